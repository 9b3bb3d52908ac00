// The launches of a prompt: many tokens at once, in chunks of at most kChunk rows.
//
// Parallel residual:   h' = h + attention(norm1(h)) + mlp(norm2(h))
// Sequential residual: h1 = h + attention(norm1(h));  h' = h1 + mlp(norm2(h1))
#include <algorithm>
#include <cmath>
#include <utility>

#include "llmc/cuda/inference/neox_decoder.cuh"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/classifier/classifier.h"
#include "llmc/cuda/op/elementwise/embedding.h"
#include "llmc/cuda/op/elementwise/gelu.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/cuda/runtime/fork.h"

namespace weft::cuda {

// Tunes the GEMMs of full chunks, if the cache has room for one: tuning others, or those of small models, costs more
// than it saves.
template <typename S>
bool NeoxDecoder<S>::prepare_matmuls() {
  if (options_.capacity < kChunk || config_.hidden_size < 1024) return false;
  const std::int64_t C = config_.hidden_size, F = config_.ffn_size;
  const cudaDataType_t type = std::is_same_v<S, float>  ? CUDA_R_32F
                              : std::is_same_v<S, bf16> ? CUDA_R_16BF
                                                        : CUDA_R_16F;
  const bool bias = config_.qkv_bias;
  const Accumulate accumulate = config_.parallel_residual ? Accumulate::yes : Accumulate::no;
  const MatmulShape shapes[] = {{Gemm::forward, kChunk, C, 3 * C, type, Accumulate::no, bias},
                                {Gemm::forward, kChunk, C, C, type, Accumulate::no, bias},
                                {Gemm::forward, kChunk, C, F, type, Accumulate::no, true},
                                {Gemm::forward, kChunk, F, C, type, accumulate, true}};
  matmul_.prepare(shapes);
  return true;
}

template <typename S>
void NeoxDecoder<S>::normalize(RowRange rows, const S* branch, const Norm<S>& norm, S* out, const Norm<S>* norm2,
                               S* out2) {
  const std::int64_t C = config_.hidden_size, first = rows.begin * C;
  ResidualNormShape shape;
  shape.rows = size_of(rows);
  shape.C = C;
  shape.kind = NormKind::layernorm;
  shape.eps = static_cast<float>(config_.norm_eps);
  ResidualNormForward<S, float> io;
  io.x = branch != nullptr ? branch + first : nullptr;
  io.residual = b_.residual + first;
  io.residual_out = branch != nullptr ? b_.residual + first : nullptr;
  io.weight = norm.weight;
  io.bias = norm.bias;
  io.out = out + first;
  if (norm2 != nullptr) {
    io.weight2 = norm2->weight;
    io.bias2 = norm2->bias;
    io.out2 = out2 + first;
  }
  residual_norm_forward(shape, io, stream_);
}

// The norm or norms that read the input of layer l, or the final norm after the last layer.
template <typename S>
void NeoxDecoder<S>::normalize_input(std::int64_t l, RowRange rows, const S* branch) {
  if (l == config_.num_layers) return normalize(rows, branch, weights_.final_norm, b_.norm1);
  const Layer& layer = weights_.blocks[static_cast<std::size_t>(l)];
  if (!config_.parallel_residual) return normalize(rows, branch, layer.input_norm, b_.norm1);
  normalize(rows, branch, layer.input_norm, b_.norm1, &layer.post_norm, b_.norm2);
}

template <typename S>
void NeoxDecoder<S>::attend(std::int64_t l, std::int64_t rows, RowRange wanted) {
  const std::int64_t C = config_.hidden_size, NH = config_.num_heads, HS = config_.head_dim;
  named("RoPE, cache", [&] {
    rope_and_append<S, S>(b_.qkv, keys(l), values(l), heads(), rows, options_.capacity, length_, rope_, stream_);
  });
  if (size_of(wanted) == 0) return;
  AttentionShape shape;
  shape.B = 1;
  shape.TQ = size_of(wanted);
  shape.TK = length_ + rows;
  shape.NH = shape.NKV = NH;
  shape.HS = HS;
  shape.scale = 1.0f / std::sqrt(static_cast<float>(HS));
  const HeadViewOf<const S> q{b_.qkv + wanted.begin * 3 * C, 0, 3 * C, 3 * HS};
  const HeadViewOf<const S> k{keys(l), 0, HS, options_.capacity * HS}, v{values(l), 0, HS, options_.capacity * HS};
  named("attention", [&] {
    attention_forward<S>(shape, HeadViewOf<S>{b_.attention + wanted.begin * C, 0, C, HS}, nullptr, q, k, v, stream_);
  });
  if (keep_ && !logits_alone_) keep_heads(l, rows);
}

template <typename S>
void NeoxDecoder<S>::run_up(const Layer& w, RowRange rows, cudaStream_t stream) {
  const std::int64_t C = config_.hidden_size, F = config_.ffn_size;
  named("MLP up", [&] { linear(b_.up, b_.norm2, w.up, rows, C, F); });
  S* up = b_.up + rows.begin * F;
  named("GELU", [&] { gelu_forward(up, up, size_of(rows) * F, stream); });
}

// With the parallel residual MLP up and GELU depend on the norm alone. They run beside QKV and attention, in a stream
// of lower priority: their blocks fill the multiprocessors that the other kernels leave idle near their end.
template <typename S>
void NeoxDecoder<S>::run_layer(std::int64_t l, std::int64_t rows, RowRange wanted) {
  const Layer& w = weights_.blocks[static_cast<std::size_t>(l)];
  const std::int64_t C = config_.hidden_size, F = config_.ffn_size;
  const std::string prefix = keep_ ? "layers." + std::to_string(l) + "." : "";
  const MaybeRange range(profiling(), "layer", l);
  const bool parallel = config_.parallel_residual, beside = parallel && !profiling() && size_of(wanted) == rows;

  keep(prefix + "input_norm", b_.norm1, rows * C);
  if (beside) fork_stream(stream_, side_stream_, normed_, "prompt");
  named("QKV", [&] { linear(b_.qkv, b_.norm1, w.qkv, {0, static_cast<int>(rows)}, C, 3 * C); });
  if (beside) {
    const Matmul::OnStream on_side_stream(matmul_, side_stream_, b_.side_workspace);
    run_up(w, wanted, side_stream_);
    check(cudaEventRecord(up_done_, side_stream_), "prompt");
  }
  attend(l, rows, wanted);
  if (size_of(wanted) == 0) return;
  named("output projection", [&] { linear(b_.branch, b_.attention, w.output, wanted, C, C); });
  if (!parallel) named("norms", [&] { normalize(wanted, b_.branch, w.post_norm, b_.norm2); });
  keep(prefix + "post_attention_norm", b_.norm2, rows * C);
  if (beside) {
    check(cudaStreamWaitEvent(stream_, up_done_), "prompt");
  } else {
    run_up(w, wanted, stream_);
  }
  keep(prefix + "mlp_product", b_.up, rows * F);
  // Parallel residual: both branches are added to the stream at once, so MLP down accumulates into attention's branch.
  named("MLP down",
        [&] { linear(b_.branch, b_.up, w.down, wanted, F, C, parallel ? Accumulate::yes : Accumulate::no); });
  named("norms", [&] { normalize_input(l + 1, wanted, b_.branch); });
  keep(prefix + "residual", b_.residual, rows * C);
}

template <typename S>
void NeoxDecoder<S>::run_chunk(std::span<const std::int32_t> ids, Wanted wanted) {
  const std::int64_t rows = static_cast<std::int64_t>(ids.size()), C = config_.hidden_size;
  if (keep_) wanted = Wanted::all;
  const RowRange all{0, static_cast<int>(rows)};
  const int last_unit = static_cast<int>((rows - 1) / kRowUnit * kRowUnit);
  const RowRange at_end = wanted == Wanted::all    ? all
                          : wanted == Wanted::last ? RowRange{last_unit, all.end}
                                                   : RowRange{all.end, all.end};
  const MaybeRange range(profiling(), "prompt of", rows);
  delay_point(stream_, DelayPoint::step);
  check(cudaMemcpyAsync(b_.ids, ids.data(), ids.size_bytes(), cudaMemcpyHostToDevice, stream_), "prompt");
  embedding_forward<S, float>(b_.residual, b_.ids, weights_.embedding, rows, C, stream_);
  keep("embedding", b_.residual, rows * C);
  normalize_input(0, all, nullptr);
  for (std::int64_t l = 0; l < config_.num_layers; ++l) run_layer(l, rows, l + 1 == config_.num_layers ? at_end : all);
  keep("final_norm", b_.norm1, rows * C);
  length_ += rows;
}

template <typename S>
std::int64_t NeoxDecoder<S>::run_prompt(std::span<const std::int32_t> ids) {
  check_room(ids.size());
  kept_.clear();
  std::int64_t rows = 0;
  for (std::size_t begin = 0; begin < ids.size(); begin += static_cast<std::size_t>(rows)) {
    rows = std::min<std::int64_t>(kChunk, static_cast<std::int64_t>(ids.size() - begin));
    const bool last = begin + static_cast<std::size_t>(rows) == ids.size();
    run_chunk(ids.subspan(begin, static_cast<std::size_t>(rows)), last ? Wanted::last : Wanted::none);
    for (std::int64_t first = 0; keep_ && first < rows; first += kScoreChunk) {
      const std::int64_t count = std::min(kScoreChunk, rows - first), C = config_.hidden_size;
      matmul_.wide<S>(b_.score_logits, b_.norm1 + first * C, weights_.head.plain, count, C, config_.vocab_size);
      keep("logits", b_.score_logits, count * config_.vocab_size);
    }
  }
  return rows;
}

template <typename S>
std::span<const float> NeoxDecoder<S>::prefill(std::span<const std::int32_t> ids) {
  const std::int64_t rows = run_prompt(ids);
  run_head(b_.residual + (rows - 1) * config_.hidden_size);
  return fetch_logits(b_.logits);
}

template <typename S>
std::vector<double> NeoxDecoder<S>::score(std::span<const std::int32_t> ids) {
  reset();
  check_room(ids.size());
  const std::int64_t C = config_.hidden_size, V = config_.vocab_size;
  const bool keep = std::exchange(keep_, false);
  std::vector<double> nll;
  std::vector<float> losses(static_cast<std::size_t>(kScoreChunk));
  for (std::size_t begin = 0; begin + 1 < ids.size() && !this->score_interrupted(); begin += kChunk) {
    const std::int64_t rows = std::min<std::int64_t>(kChunk, static_cast<std::int64_t>(ids.size() - 1 - begin));
    run_chunk(ids.subspan(begin, static_cast<std::size_t>(rows)), Wanted::all);
    for (std::int64_t first = 0; first < rows; first += kScoreChunk) {
      const std::int64_t count = std::min(kScoreChunk, rows - first);
      const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
      matmul_.wide<S>(b_.score_logits, b_.norm1 + first * C, weights_.head.plain, count, C, V);
      check(cudaMemcpyAsync(b_.ids, ids.data() + begin + static_cast<std::size_t>(first) + 1, bytes,
                            cudaMemcpyHostToDevice, stream_),
            "scoring");
      classifier(b_.score_logits, b_.losses, b_.ids, count, V, V, 0, false, stream_);
      check(cudaMemcpyAsync(losses.data(), b_.losses, bytes, cudaMemcpyDeviceToHost, stream_), "scoring");
      stream_.synchronize("scoring");
      nll.insert(nll.end(), losses.begin(), losses.begin() + count);
    }
  }
  keep_ = keep;
  return nll;
}

template class NeoxDecoder<float>;
template class NeoxDecoder<bf16>;
template class NeoxDecoder<fp16>;

}  // namespace weft::cuda
