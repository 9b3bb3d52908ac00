// The launches of a step, from ids to scored logits. Each is an operator over rows; all but the embedding and sampling
// are launched as a chain.
//
// Parallel residual:   h' = h + attention(norm1(h)) + mlp(norm2(h))
// Sequential residual: h1 = h + attention(norm1(h));  h' = h1 + mlp(norm2(h1))
// With post norms what attention and mlp give has a norm of its own before it is added.
#include <algorithm>
#include <type_traits>

#include "llmc/cuda/inference/inference_model.h"
#include "llmc/cuda/inference/parameters.h"
#include "llmc/cuda/op/attention/paged/append_to_pages.h"
#include "llmc/cuda/op/elementwise/gelu.h"
#include "llmc/cuda/op/elementwise/step_rows.h"
#include "llmc/cuda/op/elementwise/swiglu.h"
#include "llmc/cuda/op/norm/head_norm.h"
#include "llmc/cuda/op/norm/post_norm.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/cuda/op/sample/sampler.h"
#include "llmc/cuda/runtime/fork.h"

namespace weft::cuda {

template <typename S>
ResidualNormShape Inference<S>::norm_shape(std::int64_t rows) const {
  ResidualNormShape shape;
  shape.rows = rows;
  shape.C = config_.hidden_size;
  shape.kind = config_.norm;
  shape.eps = static_cast<float>(config_.norm_eps);
  shape.weight_offset = static_cast<float>(config_.norm_weight_offset);
  return shape;
}

template <typename S>
void Inference<S>::normalize(std::int64_t rows, const float* residual, const Norm<S>& norm, S* out,
                             const Norm<S>* norm2, S* out2) {
  const ResidualNormShape shape = norm_shape(rows);
  if (shape.weight_offset != 0) {  // it reads these weights before its predecessor has ended
    PostNorm<S> io;
    io.residual = residual;
    io.weight = norm.weight;
    io.bias = norm.bias;
    io.out = out;
    return named("norm", [&] { post_norm(shape, io, stream_, device_.overlapping); });
  }
  ResidualNormForward<S, float> io;
  io.residual = residual;
  io.weight = norm.weight;
  io.bias = norm.bias;
  io.out = out;
  if (out == nullptr) io.row_codes = b_.codes;
  if (norm2 != nullptr) {
    io.weight2 = norm2->weight;
    io.bias2 = norm2->bias;
    io.out2 = out2;
  }
  named("norm", [&] { residual_norm_forward(shape, io, stream_, norm_shared_memory(), device_.overlapping); });
}

template <typename S>
void Inference<S>::add_normalized(RowRange rows, const Norm<S>& norm, const Norm<S>* next, S* out) {
  const std::int64_t first = rows.begin * config_.hidden_size;
  PostNorm<S> io;
  io.branch = b_.branch + first;
  io.branch_weight = norm.weight;
  io.branch_bias = norm.bias;
  io.residual = io.residual_out = b_.residual + first;
  if (next != nullptr) {
    io.weight = next->weight;
    io.bias = next->bias;
    io.out = out + first;
  }
  named("norm of a branch, norm",
        [&] { post_norm(norm_shape(rows.end - rows.begin), io, stream_, device_.overlapping); });
}

template <typename S>
void Inference<S>::multiply(RowsMatmul<S> io, const DeviceLinear<S>& w, const DeviceLinear<S>& w2,
                            const Launch& launch) {
  io.bias = w.bias;
  io.bias2 = w2.bias;
  if constexpr (!std::is_same_v<S, float>) {
    if (w.weight.packed.in_rows) return multiply_fp8(io, w.weight.packed, w2.weight.packed, launch);
    if (w.weight.packed) return quantized_matmul(io, w.weight.packed, w2.weight.packed, launch.device, launch.stream);
  }
  io.weight = w.weight.plain;
  io.weight2 = w2.weight.plain;
  rows_matmul(io, launch.device, launch.stream);
}

template <typename S>
void Inference<S>::multiply_fp8(const RowsMatmul<S>& io, const PackedMatrix& w, const PackedMatrix& w2,
                                const Launch& launch) {
  if constexpr (!std::is_same_v<S, float>) {
    const auto in_turn = [&](const S* x, const PackedMatrix& matrix, const S* bias, std::int64_t K) {
      RowsMatmul<S> one = io;
      one.bias = bias;
      one.K = K;
      one.K2 = 0;
      if (x != nullptr) quantize_rows_fp8(b_.codes, x, io.rows, K, launch.device, launch.stream);
      const Fp8Rows weight = {reinterpret_cast<std::uint8_t*>(matrix.blocks), matrix.row_scales};
      rows_matmul_fp8(one, b_.codes, weight, launch.device, launch.stream);
    };
    in_turn(io.x, w, io.bias, io.K);
    if (io.K2 > 0) in_turn(io.x2, w2, io.bias2, io.K2);
  }
}

template <typename S>
void Inference<S>::multiply(const S* x, const DeviceLinear<S>& w, std::int64_t rows, std::int64_t K, std::int64_t OC,
                            RowsEpilogue epilogue, S* out, float* out_fp32) {
  RowsMatmul<S> io;
  io.x = x;
  io.rows = rows;
  io.K = K;
  io.OC = OC;
  io.epilogue = epilogue;
  io.out = out;
  io.out_fp32 = out_fp32;
  multiply(io, w, {}, in_chain());
}

template <typename S>
void Inference<S>::add_low_rank(const S* x, const DeviceBlock<S>& block, BlockLinear which, std::int64_t rows,
                                float* out) {
  for (const LowRank<const S>& part : block.linear(which).low_rank) {
    const LinearSize size = linear_size(config_, which);
    const std::int64_t hidden = low_rank_hidden(options_.lora, which);
    const auto times = [&](const S* in, const S* matrix, std::int64_t K, std::int64_t OC, RowsEpilogue epilogue) {
      multiply(in, {{matrix, {}}}, rows, K, OC, epilogue, b_.low_rank, out);
    };
    named("adapter, A", [&] { times(x, part.down, size.C, hidden, RowsEpilogue::store); });
    named("adapter, B", [&] { times(b_.low_rank, part.up, hidden, size.OC, RowsEpilogue::add); });
  }
}

template <typename S>
void Inference<S>::multiply_with_adapter(const S* x, const DeviceBlock<S>& block, BlockLinear which, std::int64_t rows,
                                         S* out) {
  const LinearSize size = linear_size(config_, which);
  multiply(x, block.linear(which), rows, size.C, size.OC, RowsEpilogue::store_fp32, nullptr, b_.sums);
  add_low_rank(x, block, which, rows, b_.sums);
  round_rows(out, b_.sums, rows, size.OC, device_.overlapping, stream_);
}

template <typename S>
void Inference<S>::multiply_up(const DeviceBlock<S>& w, RowRange rows, const Launch& launch) {
  const std::int64_t C = config_.hidden_size, F = config_.ffn_size;
  const std::int64_t columns = linear_size(config_, BlockLinear::up).OC;
  if (!w.up.low_rank.empty()) {
    named("MLP up", [&] {
      multiply_with_adapter(norm2() + rows.begin * C, w, BlockLinear::up, rows.end - rows.begin,
                            b_.gate_up + rows.begin * columns);
    });
    return activate(rows, launch.stream);
  }
  RowsMatmul<S> io;
  io.x = norms_in_codes() ? nullptr : norm2() + rows.begin * C;
  io.rows = rows.end - rows.begin;
  io.K = C;
  io.OC = F;
  io.epilogue = config_.activation == Activation::swiglu       ? RowsEpilogue::swiglu
                : config_.activation == Activation::geglu_tanh ? RowsEpilogue::geglu_tanh
                                                               : RowsEpilogue::gelu;
  io.out = b_.product + rows.begin * F;
  io.x_is_older = parallel();  // it follows attention, or an event
  if (!gate_up_in_memory(config_)) return named("MLP up", [&] { multiply(io, w.up, {}, launch); });
  // With biases, which the gated epilogues have not.
  io.OC = columns;
  io.epilogue = RowsEpilogue::store;
  io.out = b_.gate_up + rows.begin * columns;
  named("MLP up", [&] { multiply(io, w.up, {}, launch); });
  activate(rows, launch.stream);
}

// Where the projection's output lies in memory.
template <typename S>
void Inference<S>::activate(RowRange rows, cudaStream_t stream) {
  const std::int64_t F = config_.ffn_size, count = rows.end - rows.begin;
  const S* const in = b_.gate_up + rows.begin * linear_size(config_, BlockLinear::up).OC;
  S* const out = b_.product + rows.begin * F;
  if (config_.activation == Activation::swiglu)
    named("SwiGLU", [&] { swiglu_forward(out, in, count, F, stream); });
  else if (config_.activation == Activation::geglu_tanh)
    named("GeGLU", [&] { geglu_tanh_forward(out, in, count, F, stream); });
  else
    named("GELU", [&] { gelu_forward(out, in, count * F, stream); });
}

// The parallel residual's two branches, as one sum: attention Woutput^T + product Wdown^T.
template <typename S>
void Inference<S>::add_branches(const DeviceBlock<S>& w, RowRange rows, const Launch& launch) {
  RowsMatmul<S> io;
  io.K = config_.q_size();
  io.K2 = config_.ffn_size;
  io.x = b_.attention + rows.begin * io.K;
  io.x2 = b_.product + rows.begin * io.K2;
  io.rows = rows.end - rows.begin;
  io.OC = config_.hidden_size;
  io.epilogue = RowsEpilogue::add;
  io.out_fp32 = b_.residual + rows.begin * io.OC;
  named("output projection, MLP down", [&] { multiply(io, w.output, w.down, launch); });
}

// ---- attention --------------------------------------------------------------------------------------------------------

template <typename S>
PagedKv<S> Inference<S>::pages_of_layer(std::int64_t l) const {
  const std::int64_t positions = pool_.num_pages * pool_.page_size, layer = positions * config_.kv_size();
  PagedKv<S> kv = {nullptr, nullptr, pool_.page_size, config_.num_kv_heads, config_.head_dim};
  if (pool_.kv_fp8) {
    kv.codes = kv_codes(config_, pool_, kv_arena_.template at<std::uint8_t>(0), l);
    kv.keys = kv_arena_.template at<S>(kv_bytes(config_, positions, 0, true));
    kv.values = kv.keys + layer;
  } else {
    kv.keys = kv_arena_.template at<S>(0) + l * layer;
    kv.values = kv.keys + config_.num_layers * layer;
  }
  return kv;
}

template <typename S>
HeadViewOf<S> Inference<S>::heads(std::int64_t first_element) const {
  return {b_.qkv + first_element, 0, qkv_size(), qkv_heads(config_).stride};
}

template <typename S>
void Inference<S>::normalize_heads(std::int64_t l, std::int64_t rows) {
  const DeviceBlock<S>& w = weights_.blocks[static_cast<std::size_t>(l)];
  const ResidualNormShape norm = norm_shape(rows);
  const HeadNormShape shape = {
      1, rows, config_.num_heads, config_.num_kv_heads, config_.head_dim, norm.eps, norm.weight_offset};
  const HeadNormForward<S> io = {queries(), keys(), w.q_norm.weight, w.k_norm.weight};
  named("q norm, k norm", [&] { head_norm_forward(shape, io, stream_, device_.overlapping); });
}

template <typename S>
void Inference<S>::attend(std::int64_t l, const StepArrays& step, std::int64_t rows, bool output) {
  if (config_.qk_norm) normalize_heads(l, rows);
  const PagedRows paged_rows{step.positions, step.tables, step.begin, rows};
  PagedAttention<S> io;
  io.shape = attention_shape(config_, pool_);
  io.scale = config_.score_scale();
  io.window = config_.window(l);
  io.q = queries();
  io.kv = pages_of_layer(l);
  io.rows = paged_rows;
  io.work = step.work;
  io.workspace = b_.attention_workspace;
  io.out = b_.attention;
  io.decodes = step.decodes;
  if (step.decodes && !pool_.kv_fp8) {
    io.k = keys();
    io.v = values();
    io.rope = rope_of(l);
  } else {
    const AppendToPages<S> append = {queries(), keys(), values(), config_.num_heads, io.kv, paged_rows, rope_of(l)};
    named("RoPE, pages", [&] { append_to_pages(append, device_, stream_); });
    if (!output) return;
  }
  named("attention", [&] { paged_attention(io, device_, stream_); });
  keep_heads(l);
}

// ---- the list ---------------------------------------------------------------------------------------------------------

template <typename S>
void Inference<S>::run_layers(const StepArrays& step, std::int64_t rows) {
  const std::int64_t C = config_.hidden_size;
  named("embedding", [&] {
    embed_rows(b_.residual, step.ids, b_.last_ids, weights_.embedding, config_.embedding_scale(storage_dtype<S>()),
               rows, C, stream_);
  });
  keep("embedding", b_.residual, C);
  for (std::int64_t l = 0; l < config_.num_layers; ++l) run_layer(l, step, rows);
}

// With the parallel residual MLP up depends on the norm alone, so it need not wait for attention: it starts where
// attention's blocks have ended, or in steps of many rows beside QKV and attention, in a stream of lower priority.
template <typename S>
void Inference<S>::run_layer(std::int64_t l, const StepArrays& step, std::int64_t rows) {
  const DeviceBlock<S>& w = weights_.blocks[static_cast<std::size_t>(l)];
  const std::int64_t C = config_.hidden_size, F = config_.ffn_size, q = config_.q_size();
  const std::string prefix = keep_ ? "layers." + std::to_string(l) + "." : "";
  // What follows attention is computed for these rows.
  const RowRange needed{static_cast<int>(l + 1 == config_.num_layers ? step.first_wanted : 0), static_cast<int>(rows)};
  const std::int64_t first = needed.begin, count = rows - first;
  // An adapter has one workspace, and so have the codes of fp8.
  const bool beside = parallel() && !options_.direct && !options_.lora && !options_.fp8_activations && first == 0 &&
                      rows >= options_.two_stream_rows;
  S* const norm1 = norms_in_codes() ? nullptr : b_.norm1;
  if (parallel()) {
    normalize(rows, b_.residual, w.input_norm, b_.norm1, &w.post_norm, b_.norm2);
  } else if (l == 0 || !config_.post_norms) {  // otherwise the layer before has computed it
    normalize(rows, b_.residual, w.input_norm, norm1);
  }
  keep(prefix + "input_norm", b_.norm1, C);
  if (beside) fork_stream(stream_, side_stream_, forked_, "inference step");
  named("QKV", [&] {
    if (!w.qkv.low_rank.empty()) return multiply_with_adapter(b_.norm1, w, BlockLinear::qkv, rows, b_.qkv);
    multiply(norm1, w.qkv, rows, C, qkv_size(), RowsEpilogue::store, b_.qkv);
  });
  if (beside) {
    multiply_up(w, needed, behind_event(side_stream_));
    cuda::check(cudaEventRecord(up_done_, side_stream_), "inference step");
  }
  attend(l, step, rows, count > 0);
  if (count == 0) return;
  float* const residual = b_.residual + first * C;
  if (beside) {
    cuda::check(cudaStreamWaitEvent(stream_, up_done_), "inference step");
    add_branches(w, needed, behind_event(stream_));
  } else if (parallel()) {
    multiply_up(w, needed, in_chain());
    add_branches(w, needed, in_chain());
    add_low_rank(b_.attention + first * q, w, BlockLinear::output, count, residual);
    add_low_rank(b_.product + first * F, w, BlockLinear::down, count, residual);
  } else if (config_.post_norms) {
    float* const branch = b_.branch + first * C;
    named("output projection", [&] {
      multiply(b_.attention + first * q, w.output, count, q, C, RowsEpilogue::store_fp32, nullptr, branch);
    });
    add_low_rank(b_.attention + first * q, w, BlockLinear::output, count, branch);
    add_normalized(needed, w.attention_norm, &w.post_norm, norm2());
    multiply_up(w, needed, in_chain());
    named("MLP down",
          [&] { multiply(b_.product + first * F, w.down, count, F, C, RowsEpilogue::store_fp32, nullptr, branch); });
    add_low_rank(b_.product + first * F, w, BlockLinear::down, count, branch);
    const bool last = l + 1 == config_.num_layers;
    add_normalized(needed, w.mlp_norm, last ? nullptr : &weights_.blocks[static_cast<std::size_t>(l) + 1].input_norm,
                   b_.norm1);
  } else {
    named("output projection",
          [&] { multiply(b_.attention + first * q, w.output, count, q, C, RowsEpilogue::add, nullptr, residual); });
    add_low_rank(b_.attention + first * q, w, BlockLinear::output, count, residual);
    normalize(count, residual, w.post_norm, norms_in_codes() ? nullptr : norm2() + first * C);
    multiply_up(w, needed, in_chain());
    named("MLP down",
          [&] { multiply(b_.product + first * F, w.down, count, F, C, RowsEpilogue::add, nullptr, residual); });
    add_low_rank(b_.product + first * F, w, BlockLinear::down, count, residual);
  }
  keep(prefix + "post_attention_norm", norm2(), C);
  keep(prefix + "mlp_product", b_.product, F);
  keep(prefix + "residual", b_.residual, C);
}

template <typename S>
void Inference<S>::run_head(const StepArrays& step, std::int64_t first, std::int64_t count) {
  const std::int64_t C = config_.hidden_size, V = config_.vocab_size;
  const float* residual = b_.residual + first * C;
  if (!step.all_wanted) {
    residual = b_.gathered;
    named("wanted rows", [&] {
      gather_rows(b_.gathered, b_.residual, step.wanted_rows + first, count, C, device_.overlapping, stream_);
    });
  }
  normalize(count, residual, weights_.final_norm, b_.final_norm);
  named("head",
        [&] { multiply(b_.final_norm, {weights_.head}, count, C, V, RowsEpilogue::store_fp32, nullptr, b_.logits); });
  sample_and_score(step, first, count);
}

template <typename S>
void Inference<S>::sample_and_score(const StepArrays& step, std::int64_t first, std::int64_t count) {
  const std::int64_t V = config_.vocab_size;
  // Scores, and logits that are kept, are those of the model.
  const auto with_rules = [&](const auto& change) {
    if (step.logit_rows == nullptr) return;
    named("rules",
          [&] { change(step.logit_rows + first, count, b_.logits, V, b_.last_ids, device_.overlapping, stream_); });
  };
  with_rules(edit_logits);
  named("sampling", [&] {
    sample_rows(b_.sampled_ids, b_.errors, b_.logits, count, V, V, step.plans + first, step.sample_positions + first,
                device_.overlapping, stream_);
  });
  with_rules(restore_logits);
  ScoreRows io;
  io.logits = b_.logits;
  io.rows = count;
  io.V = V;
  io.tokenizer_vocab = config_.tokenizer_vocab;
  io.slots = step.slots + first;
  io.targets = step.targets + first;
  io.alternatives = step.alternatives + first;
  io.ids = b_.sampled_ids;
  io.errors = b_.errors;
  io.last_ids = b_.last_ids;
  io.scores = step.scores == nullptr ? nullptr : step.scores + first;
  io.scores_at = step.scores_at;
  io.most_likely = b_.most_likely + first * kMaxAlternatives;
  named("scores", [&] { score_rows(io, device_.overlapping, stream_); });
}

// ---- activations ------------------------------------------------------------------------------------------------------

template <typename S>
template <typename T>
std::vector<float> Inference<S>::download(const T* data, std::int64_t count) {
  std::vector<T> raw(static_cast<std::size_t>(count));
  cuda::check(cudaMemcpyAsync(raw.data(), data, raw.size() * sizeof(T), cudaMemcpyDeviceToHost, stream_), "activation");
  stream_.synchronize("activation");
  std::vector<float> values(raw.size());
  convert_to_f32(raw.data(), storage_dtype<T>(), values.data(), values.size());
  return values;
}

template <typename S>
template <typename T>
void Inference<S>::keep(const std::string& name, const T* data, std::int64_t columns) {
  if (!keep_ || logits_alone_) return;
  const std::vector<float> values = download(data, kept_step_rows_ * columns);
  std::vector<float>& kept = kept_[name];
  kept.insert(kept.end(), values.begin(), values.end());
}

// Keeps q (rotated) from the packed rows, and k (rotated) and v from the pages.
template <typename S>
void Inference<S>::keep_heads(std::int64_t l) {
  if (!keep_ || logits_alone_) return;
  const std::int64_t NH = config_.num_heads, HS = config_.head_dim, P = pool_.page_size;
  const PagedKv<S> kv = pages_of_layer(l);
  const std::int64_t rows = pool_.num_pages * P * kv.NKV;
  const auto stored = [&](KvKind kind, const S* wide, const std::uint8_t* codes, const std::uint8_t* scales) {
    if (!kv.fp8()) return download(wide, rows * HS);
    std::vector<std::uint8_t> raw(static_cast<std::size_t>(rows * HS)), of_rows(static_cast<std::size_t>(rows));
    for (const auto& [to, from] : {std::pair{&raw, codes}, {&of_rows, scales}}) {
      cuda::check(cudaMemcpyAsync(to->data(), from, to->size(), cudaMemcpyDeviceToHost, stream_), "activation");
    }
    stream_.synchronize("activation");
    std::vector<float> values(raw.size());
    kv_load(kind, raw.data(), of_rows.data(), HS, 0, rows, values.data());
    return values;
  };
  const std::vector<float> packed = download(b_.qkv, kept_step_rows_ * qkv_size()),
                           k = stored(KvKind::key, kv.keys, kv.codes.keys, kv.codes.key_scales),
                           v = stored(KvKind::value, kv.values, kv.codes.values, kv.codes.value_scales);
  const std::int64_t head_stride = queries().head_stride;
  const std::string prefix = "layers." + std::to_string(l) + ".";
  const auto append = [HS](std::vector<float>& kept, const std::vector<float>& from, std::int64_t offset) {
    kept.insert(kept.end(), from.begin() + offset, from.begin() + offset + HS);
  };
  std::vector<float>&kept_q = kept_[prefix + "q"], &kept_k = kept_[prefix + "k"], &kept_v = kept_[prefix + "v"];
  for (std::int64_t r = 0; r < kept_step_rows_; ++r) {
    const auto [page, place] = kept_places_[static_cast<std::size_t>(r)];
    for (std::int64_t h = 0; h < NH; ++h) append(kept_q, packed, r * qkv_size() + h * head_stride);
    for (std::int64_t h = 0; h < kv.NKV; ++h) {
      const std::int64_t at = ((page * kv.NKV + h) * P + place) * HS;
      append(kept_k, k, at);
      append(kept_v, v, at);
    }
  }
  keep(prefix + "attention", b_.attention, NH * HS);
}

// Computes and keeps the final norm and the logits of every row of the step.
template <typename S>
void Inference<S>::keep_logits_of_all_rows() {
  if (!keep_) return;
  const std::int64_t C = config_.hidden_size, V = config_.vocab_size, all = kept_step_rows_;
  normalize(all, b_.residual, weights_.final_norm, b_.norm1);
  keep("final_norm", b_.norm1, C);
  const std::int64_t piece = std::min(kLogitRows, row_bucket(pool_.max_rows));
  for (std::int64_t first = 0; first < all; first += piece) {
    const std::int64_t count = std::min(piece, all - first);
    multiply(b_.norm1 + first * C, {weights_.head}, count, C, V, RowsEpilogue::store_fp32, nullptr, b_.logits);
    const std::vector<float> values = download(b_.logits, count * V);
    std::vector<float>& kept = kept_["logits"];
    kept.insert(kept.end(), values.begin(), values.end());
  }
}

#define WEFT_INSTANTIATE(S)                                                                    \
  template void Inference<S>::run_layers(const StepArrays&, std::int64_t);                     \
  template void Inference<S>::run_head(const StepArrays&, std::int64_t, std::int64_t);         \
  template void Inference<S>::sample_and_score(const StepArrays&, std::int64_t, std::int64_t); \
  template void Inference<S>::keep_logits_of_all_rows();
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
