// Activations of the last forward pass, under the names of scripts/dump_reference.py, for comparison with PyTorch.
#include <algorithm>
#include <cstdio>

#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/training/training_model.h"

namespace weft::cuda {

namespace {

// Downloads `columns` of each of N rows, `stride` apart, as fp32.
template <typename S>
std::vector<float> download(const S* data, std::int64_t N, std::int64_t columns, std::int64_t stride) {
  std::vector<S> raw(static_cast<std::size_t>(N * columns));
  check(cudaMemcpy2D(raw.data(), static_cast<std::size_t>(columns) * sizeof(S), data,
                     static_cast<std::size_t>(stride) * sizeof(S), static_cast<std::size_t>(columns) * sizeof(S),
                     static_cast<std::size_t>(N), cudaMemcpyDeviceToHost),
        "reading an activation");
  std::vector<float> values(raw.size());
  convert_to_f32(raw.data(), kStorage<S>, values.data(), values.size());
  return values;
}

}  // namespace

template <typename S>
std::vector<float> TrainingModel<S>::activation(const std::string& name) {
  const std::int64_t N = rows(), C = config_.hidden_size, V = config_.vocab_size;
  stream_.synchronize("reading an activation");
  if (name == "embedding") return download(acts_.residual[0], N, C, C);
  if (name == "final_norm") return download(acts_.final_norm, N, C, C);
  if (name == "logits" && sharding_.parameters_sharded) return {};
  if (name == "logits") {  // recomputed, because the classifier has replaced them by their gradient
    std::vector<float> logits;
    const std::int64_t chunk = classifier_rows(N);
    for (std::int64_t row = 0; row < N; row += chunk) {
      const std::int64_t count = std::min(chunk, N - row);
      matmul_.forward<S>(acts_.logits, acts_.final_norm + row * C, weights_.head.plain, nullptr, count, C, V);
      stream_.synchronize("reading an activation");
      const std::vector<float> part = download(acts_.logits, count, V, V);
      logits.insert(logits.end(), part.begin(), part.end());
    }
    return logits;
  }
  // "layers.<l>.<part>": stored for every layer only without recomputation.
  long long l = -1;
  char part[64] = "";
  const bool parsed = std::sscanf(name.c_str(), "layers.%lld.%63s", &l, part) == 2 && l >= 0 && l < config_.num_layers;
  if (!parsed || options_.recompute != Recompute::none) return {};
  const LayerActivations<S>& a = acts_.layers[static_cast<std::size_t>(l)];
  const std::int64_t q = config_.q_size(), F = config_.ffn_size, HS = config_.head_dim;
  const auto download_heads = [&](const HeadViewOf<S>& view, std::int64_t heads) {
    std::vector<float> all(static_cast<std::size_t>(N * heads * HS));
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::vector<float> head = download(view.at(0, 0, h), N, HS, qkv_size());
      for (std::int64_t n = 0; n < N; ++n) std::copy_n(head.begin() + n * HS, HS, all.begin() + (n * heads + h) * HS);
    }
    return all;
  };
  const std::string which = part;
  const bool only_in_fp8 = which == "input_norm" || which == "post_attention_norm" || which == "mlp_product";
  if (fp8_ && !options_.lora && only_in_fp8) return {};
  if (which == "input_norm") return download(a.input_norm, N, C, C);
  if (which == "q") return download_heads(q_heads(a.qkv), config_.num_heads);
  if (which == "k") return download_heads(k_heads(a.qkv), config_.num_kv_heads);
  if (which == "v") return download_heads(v_heads(a.qkv), config_.num_kv_heads);
  if (which == "attention") return download(a.attention, N, q, q);
  if (which == "post_attention_norm") return download(a.post_norm, N, C, C);
  if (which == "mlp_product") return download(a.swiglu_out, N, F, F);
  if (which == "residual") return download(acts_.residual[static_cast<std::size_t>(l) + 1], N, C, C);
  return {};
}

template std::vector<float> TrainingModel<float>::activation(const std::string&);
template std::vector<float> TrainingModel<bf16>::activation(const std::string&);

}  // namespace weft::cuda
