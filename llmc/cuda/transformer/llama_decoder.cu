// One launch an operator; K/V cache [NKV, capacity, HS] a layer. A decode step is a prefill of one token. generate_ids()
// samples on the GPU, and the host waits for each id: samples of a training run are short and rare, so that the simplest way
// does.
#include "llmc/cuda/transformer/llama_decoder.h"

#include <algorithm>
#include <cmath>

#include "llmc/base/dtype.h"
#include "llmc/base/regions.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/attention/attention.h"
#include "llmc/cuda/op/classifier.h"
#include "llmc/cuda/op/embedding.h"
#include "llmc/cuda/op/matmul.h"
#include "llmc/cuda/op/residual_norm.h"
#include "llmc/cuda/op/rope.h"
#include "llmc/cuda/op/sampler.h"
#include "llmc/cuda/op/swiglu.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/stream.h"

namespace weft::cuda {

namespace {

constexpr std::int64_t kChunk = 512;  // rows of a long prompt that are computed at once

// Copies `rows` rows of `width` elements each from packed heads to a cache whose heads are `capacity` tokens apart.
template <typename S>
void append_to_cache(S* cache, const S* heads, std::int64_t row_stride, std::int64_t num_heads, std::int64_t HS,
                     std::int64_t capacity, std::int64_t position, std::int64_t rows, cudaStream_t stream) {
  for (std::int64_t h = 0; h < num_heads; ++h) {
    check(cudaMemcpy2DAsync(cache + (h * capacity + position) * HS, static_cast<std::size_t>(HS) * sizeof(S),
                            heads + h * HS, static_cast<std::size_t>(row_stride) * sizeof(S),
                            static_cast<std::size_t>(HS) * sizeof(S), static_cast<std::size_t>(rows),
                            cudaMemcpyDeviceToDevice, stream),
          "K/V cache");
  }
}

// The sampler takes fp32.
template <typename S>
__global__ void widen_kernel(float* out, const S* values, std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) out[i] = to_float(values[i]);
}

// The result of the sampler.
struct Picked {
  std::int32_t id;
  SampleError error;
};

// Pointers into the workspace.
template <typename S>
struct Buffers {
  S *residual, *norm, *branch, *qkv, *attention, *gate_up, *swiglu_out, *logits;
  std::int32_t* ids;
  float *losses, *cos, *sin, *scores;
  SamplingPlan* sampling;
  std::int64_t* position;
  Picked* picked;
};

template <typename S>
Regions plan_workspace(const ModelConfig& c, std::int64_t capacity, Buffers<S>& b) {
  const std::int64_t rows = std::min(kChunk, capacity), C = c.hidden_size, F = c.ffn_size, V = c.vocab_size;
  Regions regions("decoder workspace");
  regions.want(&b.residual, rows * C);
  regions.want(&b.norm, rows * C);
  regions.want(&b.branch, rows * C);
  regions.want(&b.qkv, rows * (c.q_size() + 2 * c.kv_size()));
  regions.want(&b.attention, rows * c.q_size());
  regions.want(&b.gate_up, rows * 2 * F);
  regions.want(&b.swiglu_out, rows * F);
  regions.want(&b.logits, rows * V);
  regions.want(&b.ids, rows + 1);
  regions.want(&b.losses, rows);
  regions.want(&b.cos, capacity * (c.rope.rotary_dim / 2));
  regions.want(&b.sin, capacity * (c.rope.rotary_dim / 2));
  regions.want(&b.scores, V);
  regions.want(&b.sampling, 1);
  regions.want(&b.position, 1);
  regions.want(&b.picked, 1);
  return regions;
}

template <typename S>
MemoryPlan plan_cache(const ModelConfig& config, std::int64_t capacity) {
  MemoryPlan plan("K/V cache");
  plan.add(2 * static_cast<std::uint64_t>(config.num_layers * config.kv_size() * capacity) * sizeof(S));
  return plan;
}

std::vector<MemoryLine> memory_lines(std::uint64_t cache, std::uint64_t workspace) {
  return {{"K/V cache of samples", cache}, {"workspace of samples", workspace + Matmul::kWorkspaceBytes}};
}
template <typename S>
std::vector<MemoryLine> plan_of(const ModelConfig& config, std::int64_t capacity) {
  Buffers<S> buffers;
  return memory_lines(plan_cache<S>(config, capacity).bytes(),
                      plan_workspace<S>(config, capacity, buffers).plan().bytes());
}

template <typename S>
class LlamaDecoder final : public DecodeModel {
 public:
  LlamaDecoder(const ModelConfig& config, const LlamaParameters<S>& weights, std::int64_t capacity);

  const ModelConfig& config() const override { return config_; }
  std::vector<MemoryLine> memory() const override { return memory_lines(cache_arena_.bytes(), workspace_.bytes()); }
  std::uint64_t bytes_per_token(std::int64_t context) const override {
    const TensorTable table(config_);
    const std::int64_t embedding = config_.tied_embeddings ? 0 : config_.vocab_size * config_.hidden_size;
    const std::int64_t cached = 2 * config_.num_layers * config_.kv_size() * context;
    return static_cast<std::uint64_t>(table.parameters() - embedding + config_.hidden_size + cached) * sizeof(S);
  }
  std::int64_t capacity() const override { return capacity_; }
  std::int64_t length() const override { return length_; }
  void reset() override { length_ = 0; }
  std::span<const float> prefill(std::span<const std::int32_t> ids) override;
  std::span<const float> decode(std::int32_t id) override { return prefill({&id, 1}); }
  bool samples() const override { return true; }
  void generate_ids(std::span<const std::int32_t> prompt, const GenerationRequest& request,
                    const std::function<bool(std::int32_t)>& on_id) override;
  std::vector<double> score(std::span<const std::int32_t> ids) override;
  void keep_activations(bool) override {}
  std::vector<float> activation(const std::string&) override { return {}; }

 private:
  S* cache(std::int64_t values, std::int64_t l) const {  // values 0: keys, 1: values
    return cache_arena_.template at<S>(0) + (values * config_.num_layers + l) * config_.kv_size() * capacity_;
  }

  void check_room(std::size_t ids) const {
    if (ids > 0 && static_cast<std::int64_t>(ids) <= capacity_ - length_) return;
    fail(Exit::internal, "decoder: %zu tokens do not fit: %lld of %lld positions are used", ids,
         static_cast<long long>(length_), static_cast<long long>(capacity_));
  }
  // Appends `ids`, chunk by chunk. Returns the rows of the last chunk, whose final norm stays in the buffers.
  std::int64_t run_prompt(std::span<const std::int32_t> ids);
  void run_head(std::int64_t row);      // logits of one row of the norm
  std::int32_t pick(std::int64_t row);  // the id that follows it, sampled by the plan in device memory
  void run_layers(std::span<const std::int32_t> ids);
  void run_layer(std::int64_t l, std::int64_t rows);
  void attend(std::int64_t l, std::int64_t rows);
  void normalize(const NormParameters<S>& norm, std::int64_t rows, const S* branch, S* out);

  ModelConfig config_;
  LlamaParameters<S> weights_;
  std::int64_t capacity_, length_ = 0;
  Stream stream_;
  Matmul matmul_;
  Buffers<S> b_{};
  Regions regions_;
  DeviceArena workspace_, cache_arena_;
  DeviceRopeTable rope_;
  std::vector<float> host_logits_;
};

template <typename S>
LlamaDecoder<S>::LlamaDecoder(const ModelConfig& config, const LlamaParameters<S>& weights, std::int64_t capacity)
    : config_(config),
      weights_(weights),
      capacity_(capacity),
      matmul_(stream_),
      regions_(plan_workspace<S>(config, capacity, b_)),
      workspace_(regions_.plan()),
      cache_arena_(plan_cache<S>(config, capacity)) {
  regions_.bind(workspace_);
  const RopeTable table = rope_table(config.rope, capacity);
  rope_ = {b_.cos, b_.sin, table.positions, table.half};
  const std::size_t bytes = table.cos.size() * sizeof(float);
  check(cudaMemcpy(b_.cos, table.cos.data(), bytes, cudaMemcpyHostToDevice), "RoPE table");
  check(cudaMemcpy(b_.sin, table.sin.data(), bytes, cudaMemcpyHostToDevice), "RoPE table");
  host_logits_.resize(static_cast<std::size_t>(config.vocab_size));
}

template <typename S>
std::int64_t LlamaDecoder<S>::run_prompt(std::span<const std::int32_t> ids) {
  check_room(ids.size());
  std::int64_t rows = 0;
  for (std::size_t begin = 0; begin < ids.size(); begin += static_cast<std::size_t>(rows)) {
    rows = std::min<std::int64_t>(kChunk, static_cast<std::int64_t>(ids.size() - begin));
    run_layers(ids.subspan(begin, static_cast<std::size_t>(rows)));
  }
  return rows;
}

template <typename S>
void LlamaDecoder<S>::run_head(std::int64_t row) {
  const std::int64_t C = config_.hidden_size;
  matmul_.forward<S>(b_.logits, b_.norm + row * C, weights_.head, nullptr, 1, C, config_.vocab_size);
}

template <typename S>
std::span<const float> LlamaDecoder<S>::prefill(std::span<const std::int32_t> ids) {
  run_head(run_prompt(ids) - 1);
  const std::size_t V = host_logits_.size();
  std::vector<S> raw(V);
  check(cudaMemcpyAsync(raw.data(), b_.logits, V * sizeof(S), cudaMemcpyDeviceToHost, stream_), "logits");
  stream_.synchronize("decoding");
  convert_to_f32(raw.data(), std::is_same_v<S, float> ? DType::f32 : DType::bf16, host_logits_.data(), V);
  return host_logits_;
}

template <typename S>
std::int32_t LlamaDecoder<S>::pick(std::int64_t row) {
  constexpr int kThreads = 256;
  const std::int64_t V = config_.vocab_size;
  run_head(row);
  widen_kernel<<<static_cast<unsigned>(ceil_div(V, kThreads)), kThreads, 0, stream_>>>(b_.scores, b_.logits, V);
  check_launch("sampling");
  check(cudaMemcpyAsync(b_.position, &length_, sizeof(length_), cudaMemcpyHostToDevice, stream_), "sampling");
  sample(&b_.picked->id, &b_.picked->error, b_.scores, 1, V, V, b_.sampling, b_.position, stream_);
  Picked host{};
  check(cudaMemcpyAsync(&host, b_.picked, sizeof(host), cudaMemcpyDeviceToHost, stream_), "sampling");
  stream_.synchronize("sampling");
  check_sample(host.error);
  return host.id;
}

template <typename S>
void LlamaDecoder<S>::generate_ids(std::span<const std::int32_t> prompt, const GenerationRequest& request,
                                   const std::function<bool(std::int32_t)>& on_id) {
  std::int64_t rows = run_prompt(prompt);
  if (request.max_ids < 1 || request.max_ids > capacity_ - length_) {
    fail(Exit::internal, "decoder: %lld ids asked for, %lld positions are left",
         static_cast<long long>(request.max_ids), static_cast<long long>(capacity_ - length_));
  }
  check(cudaMemcpyAsync(b_.sampling, &request.sampling, sizeof(SamplingPlan), cudaMemcpyHostToDevice, stream_),
        "sampling");
  check(cudaMemsetAsync(b_.picked, 0, sizeof(Picked), stream_), "sampling");
  for (std::int64_t left = request.max_ids; left > 0; --left) {
    const std::int32_t id = pick(rows - 1);
    const bool stop = std::find(request.stop_ids.begin(), request.stop_ids.end(), id) != request.stop_ids.end();
    if (!on_id(id) || stop || left == 1) return;
    rows = run_prompt({&id, 1});
  }
}

template <typename S>
std::vector<double> LlamaDecoder<S>::score(std::span<const std::int32_t> ids) {
  reset();
  check_room(ids.size());
  std::vector<double> nll;
  for (std::size_t begin = 0; begin + 1 < ids.size() && !this->score_interrupted(); begin += kChunk) {
    const std::int64_t rows = std::min<std::int64_t>(kChunk, static_cast<std::int64_t>(ids.size() - 1 - begin));
    const auto count = static_cast<std::size_t>(rows);
    run_layers(ids.subspan(begin, count));
    matmul_.forward<S>(b_.logits, b_.norm, weights_.head, nullptr, rows, config_.hidden_size, config_.vocab_size);
    check(
        cudaMemcpyAsync(b_.ids, ids.data() + begin + 1, count * sizeof(std::int32_t), cudaMemcpyHostToDevice, stream_),
        "scoring");
    classifier(b_.logits, b_.losses, b_.ids, rows, config_.vocab_size, config_.vocab_size, 0, false, stream_);
    std::vector<float> host(count);
    check(cudaMemcpyAsync(host.data(), b_.losses, count * sizeof(float), cudaMemcpyDeviceToHost, stream_), "scoring");
    stream_.synchronize("scoring");
    nll.insert(nll.end(), host.begin(), host.end());
  }
  return nll;
}

template <typename S>
void LlamaDecoder<S>::normalize(const NormParameters<S>& norm, std::int64_t rows, const S* branch, S* out) {
  ResidualNormShape shape;
  shape.rows = rows;
  shape.C = config_.hidden_size;
  shape.kind = config_.norm;
  shape.eps = static_cast<float>(config_.norm_eps);
  ResidualNormForward<S, S> io;
  io.x = branch;
  io.residual = b_.residual;
  io.residual_out = branch != nullptr ? b_.residual : nullptr;
  io.weight = norm.weight;
  io.bias = norm.bias;
  io.out = out;
  residual_norm_forward(shape, io, stream_);
}

template <typename S>
void LlamaDecoder<S>::run_layers(std::span<const std::int32_t> ids) {
  const std::int64_t rows = static_cast<std::int64_t>(ids.size());
  check(cudaMemcpyAsync(b_.ids, ids.data(), ids.size_bytes(), cudaMemcpyHostToDevice, stream_), "prompt");
  embedding_forward(b_.residual, b_.ids, weights_.embedding, rows, config_.hidden_size, stream_);
  normalize(weights_.layers[0].input_norm, rows, nullptr, b_.norm);
  for (std::int64_t l = 0; l < config_.num_layers; ++l) run_layer(l, rows);
  length_ += rows;
}

template <typename S>
void LlamaDecoder<S>::attend(std::int64_t l, std::int64_t rows) {
  const std::int64_t NH = config_.num_heads, NKV = config_.num_kv_heads, HS = config_.head_dim;
  const std::int64_t q = config_.q_size(), kv = config_.kv_size(), row = q + 2 * kv;
  const HeadViewOf<S> queries{b_.qkv, 0, row, HS}, keys{b_.qkv + q, 0, row, HS};
  rope_forward(queries, keys, rope_, 1, rows, NH, NKV, length_, stream_);
  append_to_cache(cache(0, l), b_.qkv + q, row, NKV, HS, capacity_, length_, rows, stream_);
  append_to_cache(cache(1, l), b_.qkv + q + kv, row, NKV, HS, capacity_, length_, rows, stream_);
  AttentionShape shape;
  shape.B = 1;
  shape.TQ = rows;
  shape.TK = length_ + rows;
  shape.NH = NH;
  shape.NKV = NKV;
  shape.HS = HS;
  shape.scale = 1.0f / std::sqrt(static_cast<float>(HS));
  const HeadViewOf<S> cached_keys{cache(0, l), 0, HS, capacity_ * HS},
      cached_values{cache(1, l), 0, HS, capacity_ * HS};
  attention_forward<S>(shape, HeadViewOf<S>{b_.attention, 0, q, HS}, nullptr, queries, cached_keys, cached_values,
                       stream_);
}

template <typename S>
void LlamaDecoder<S>::run_layer(std::int64_t l, std::int64_t rows) {
  const LayerParameters<S>& w = weights_.layers[static_cast<std::size_t>(l)];
  const std::int64_t C = config_.hidden_size, F = config_.ffn_size, q = config_.q_size();
  const bool last = l + 1 == config_.num_layers;
  matmul_.forward<S>(b_.qkv, b_.norm, w.qkv, nullptr, rows, C, q + 2 * config_.kv_size());
  attend(l, rows);
  matmul_.forward<S>(b_.branch, b_.attention, w.output, nullptr, rows, q, C);
  normalize(w.post_norm, rows, b_.branch, b_.norm);
  matmul_.forward<S>(b_.gate_up, b_.norm, w.gate_up, nullptr, rows, C, 2 * F);
  swiglu_forward(b_.swiglu_out, b_.gate_up, rows, F, stream_);
  matmul_.forward<S>(b_.branch, b_.swiglu_out, w.down, nullptr, rows, F, C);
  normalize(last ? weights_.final_norm : weights_.layers[static_cast<std::size_t>(l) + 1].input_norm, rows, b_.branch,
            b_.norm);
}

}  // namespace

std::vector<MemoryLine> plan_llama_decoder(const ModelConfig& config, Precision precision, std::int64_t capacity) {
  return precision == Precision::bf16 ? plan_of<bf16>(config, capacity) : plan_of<float>(config, capacity);
}

template <typename S>
std::unique_ptr<DecodeModel> make_llama_decoder(const ModelConfig& config, const LlamaParameters<S>& weights,
                                                std::int64_t capacity) {
  return std::make_unique<LlamaDecoder<S>>(config, weights, capacity);
}

template std::unique_ptr<DecodeModel> make_llama_decoder<float>(const ModelConfig&, const LlamaParameters<float>&,
                                                                std::int64_t);
template std::unique_ptr<DecodeModel> make_llama_decoder<bf16>(const ModelConfig&, const LlamaParameters<bf16>&,
                                                               std::int64_t);

}  // namespace weft::cuda
