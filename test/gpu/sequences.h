// One sequence on the GPU, in each way of decoding, as llmc/app/decode_device.cpp makes it.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "llmc/cuda/inference/fused_tokens.h"
#include "llmc/cuda/inference/inference.h"
#include "llmc/model/model_file.h"
#include "llmc/model/single_sequence.h"

namespace weft::test {

enum class Way { reference, graph, fused };  // --decode
inline const char* name_of(Way way) {
  return way == Way::reference ? "reference" : way == Way::graph ? "graph" : "fused";
}

inline InferenceOptions pool_for(Way way, std::int64_t capacity, bool kv_fp8 = false) {
  InferenceOptions pool = one_sequence(capacity);
  pool.kv_fp8 = kv_fp8;
  pool.max_rows = std::min(cuda::kInferenceRows, capacity);
  if (way != Way::fused) return pool;
  pool.page_size = cuda::kFusedPageSize;
  pool.num_pages = (capacity + pool.page_size - 1) / pool.page_size;
  return pool;
}

// make(pool, options) loads or makes the inference model.
template <typename Make>
std::unique_ptr<DecodeModel> sequence_of(Way way, DType dtype, std::int64_t capacity, const Make& make,
                                         bool kv_fp8 = false) {
  cuda::GpuInferenceOptions options;
  options.dtype = dtype;
  options.direct = way == Way::reference;
  std::unique_ptr<InferenceModel> model = make(pool_for(way, capacity, kv_fp8), options);
  std::unique_ptr<IdDecoder> decoder = way == Way::fused ? cuda::fused_tokens(*model, dtype) : nullptr;
  return single_sequence(std::move(model), capacity, nullptr, std::move(decoder));
}
inline std::unique_ptr<DecodeModel> loaded_sequence(const ModelFile& file, Way way, DType dtype, std::int64_t capacity,
                                                    bool kv_fp8 = false) {
  const auto load = [&](const InferenceOptions& pool, const cuda::GpuInferenceOptions& options) {
    return cuda::load_inference(file, pool, options);
  };
  return sequence_of(way, dtype, capacity, load, kv_fp8);
}
inline std::unique_ptr<DecodeModel> random_sequence(const ModelConfig& config, std::uint64_t seed, Way way, DType dtype,
                                                    std::int64_t capacity) {
  return sequence_of(way, dtype, capacity, [&](const InferenceOptions& pool, const cuda::GpuInferenceOptions& options) {
    return cuda::random_inference(config, seed, pool, options);
  });
}
inline std::unique_ptr<DecodeModel> fused_sequence(const ModelFile& file, DType dtype, std::int64_t capacity) {
  return loaded_sequence(file, Way::fused, dtype, capacity);
}
// The fused kernel as far as `positions`, then the graph.
inline std::unique_ptr<DecodeModel> fused_then_graph(const ModelFile& file, DType dtype, std::int64_t capacity,
                                                     std::int64_t positions) {
  cuda::GpuInferenceOptions options;
  options.dtype = dtype;
  std::unique_ptr<InferenceModel> model = cuda::load_inference(file, pool_for(Way::fused, capacity), options);
  std::unique_ptr<IdDecoder> decoder = cuda::fused_tokens(*model, dtype);
  return single_sequence(std::move(model), capacity, nullptr, std::move(decoder), positions);
}

inline std::vector<std::int32_t> generated(DecodeModel& model, std::span<const std::int32_t> prompt,
                                           const SamplerOptions& sampler, std::int64_t count,
                                           std::vector<std::int32_t> stop_ids = {}) {
  std::vector<std::int32_t> ids;
  model.generate_ids(prompt, {sampling_plan(sampler), std::move(stop_ids), count}, [&](std::int32_t id) {
    ids.push_back(id);
    return true;
  });
  return ids;
}

}  // namespace weft::test
