// The launches of one token, from its id in the state on the device to the logits.
//
// Parallel residual:   h' = h + attention(norm1(h)) + mlp(norm2(h))     three launches a layer
// Sequential residual: h1 = h + attention(norm1(h));  h' = h1 + mlp(norm2(h1))     five
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/inference/neox_decoder.cuh"

namespace weft::cuda {

namespace {

__global__ void set_state_kernel(DecodeState* state, const __grid_constant__ DecodeState value) {
  *state = value;
}

// residual [C] = the embedding of the state's token.
template <typename S>
__global__ void __launch_bounds__(256)
    embed_kernel(float* residual, const DecodeState* state, const S* embedding, std::int64_t C) {
  launch_dependents();
  const S* row = embedding + state->token * C;
  for (std::int64_t c = threadIdx.x; c < C; c += blockDim.x) residual[c] = to_float(row[c]);
}

}  // namespace

template <typename S>
void NeoxDecoder<S>::set_state(const DecodeState& state) {
  set_state_kernel<<<1, 1, 0, stream_>>>(b_.state, state);
  check_launch("decode state");
}

template <typename S>
void NeoxDecoder<S>::run_token() {
  const std::int64_t C = config_.hidden_size, F = config_.ffn_size;
  const float eps = static_cast<float>(config_.norm_eps);
  embed_kernel<<<1, 256, 0, stream_>>>(b_.residual, b_.state, weights_.embedding, C);
  check_launch("embedding of a token");
  for (std::int64_t l = 0; l < config_.num_layers; ++l) {
    const MaybeRange layer(profiling(), "layer", l);
    const Layer& w = weights_.blocks[static_cast<std::size_t>(l)];
    const auto linear = [](const DeviceLinear<S>& each) { return GemvLinear<S, S>{each.weight.plain, each.bias}; };
    const typename NormGemv<S, S>::Output qkv{w.input_norm, linear(w.qkv), 3 * C, false, b_.qkv, nullptr};
    const typename NormGemv<S, S>::Output up{w.post_norm, linear(w.up), F, true, b_.up, nullptr};
    const typename ResidualGemv<S, S>::Input dense{b_.attention, linear(w.output), C}, down{b_.up, linear(w.down), F};
    const bool parallel = config_.parallel_residual;
    named(parallel ? "norms, QKV, MLP up" : "norm, QKV", [&] {
      norm_gemv<S, S>({b_.residual, C, eps, {qkv, parallel ? up : typename NormGemv<S, S>::Output{}}}, device_,
                      stream_);
    });
    named("RoPE, cache, attention", [&] {
      decode_attention<S, S>({heads(), b_.qkv, keys(l), values(l), options_.capacity, &b_.state->position, rope_,
                              b_.attention, b_.partials},
                             device_, stream_);
    });
    if (parallel && !options_.layer_only) {
      named("output projection, MLP down", [&] {
        residual_gemv<S, S>({{dense, down}, b_.residual, C}, device_, stream_);
      });
      continue;
    }
    named("output projection", [&] { residual_gemv<S, S>({{dense, {}}, b_.residual, C}, device_, stream_); });
    if (parallel) continue;
    named("norm, MLP up", [&] { norm_gemv<S, S>({b_.residual, C, eps, {up, {}}}, device_, stream_); });
    if (options_.layer_only) continue;
    named("MLP down", [&] { residual_gemv<S, S>({{down, {}}, b_.residual, C}, device_, stream_); });
  }
  if (!options_.layer_only) run_head(b_.residual);
}

template <typename S>
void NeoxDecoder<S>::run_head(const float* residual) {
  const typename NormGemv<S, S>::Output head{
      weights_.final_norm, {weights_.head.plain, nullptr}, config_.vocab_size, false, nullptr, b_.logits};
  named("final norm, head", [&] {
    norm_gemv<S, S>({residual, config_.hidden_size, static_cast<float>(config_.norm_eps), {head, {}}}, device_,
                    stream_);
  });
}

template <typename S>
void NeoxDecoder<S>::launch_step(bool sampling, std::int64_t position) {
  const auto launches = [this, sampling] {
    run_token();
    if (sampling) sample_and_publish();
  };
  if (options_.mode == DecodeMode::reference) {
    const MaybeRange range(true, "token", position);
    return launches();
  }
  CapturedGraph& graph = sampling ? sampling_graph_ : step_graph_;
  if (graph.empty()) graph.capture(stream_, launches);
  graph.launch(stream_);
}

template <typename S>
std::span<const float> NeoxDecoder<S>::fetch_logits(const float* logits) {
  check(cudaMemcpyAsync(host_logits_.at<float>(0), logits, host_logits_.bytes(), cudaMemcpyDeviceToHost, stream_),
        "logits");
  stream_.synchronize("decoding");
  return {host_logits_.at<float>(0), static_cast<std::size_t>(config_.vocab_size)};
}

template <typename S>
std::span<const float> NeoxDecoder<S>::decode(std::int32_t id) {
  check_room(1);
  if constexpr (!std::is_same_v<S, float>) {
    if (fused_ != nullptr) {
      FusedRequest request;
      request.first_id = id;
      request.position = length_;
      request.count = 1;
      fused_->launch(request);
      fused_->finish();
      ++length_;
      return fetch_logits(fused_->logits());
    }
  }
  DecodeState state;
  state.token = id;
  state.position = length_;
  set_state(state);
  launch_step(false, length_);
  ++length_;
  return fetch_logits(b_.logits);
}

template <typename S>
std::string NeoxDecoder<S>::decode_timeline(std::int32_t id) {
  if constexpr (!std::is_same_v<S, float>) {
    if (fused_ != nullptr) {
      fused_->record_timeline(true);
      decode(id);
      std::string text = timeline_text(fused_->timeline());
      fused_->record_timeline(false);
      return text;
    }
  }
  (void)id;
  return {};
}

template class NeoxDecoder<float>;
template class NeoxDecoder<bf16>;
template class NeoxDecoder<fp16>;

}  // namespace weft::cuda
