// One sequence that the fused decode kernel continues after a prompt of the inference model, in the same pages.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "llmc/cuda/inference/fused_tokens.h"
#include "llmc/cuda/inference/inference.h"
#include "llmc/model/model_file.h"
#include "llmc/model/single_sequence.h"

namespace weft::test {

inline std::unique_ptr<DecodeModel> fused_sequence(const ModelFile& file, DType dtype, std::int64_t capacity) {
  InferenceOptions pool = one_sequence(capacity);
  pool.page_size = cuda::kFusedPageSize;
  pool.num_pages = (capacity + pool.page_size - 1) / pool.page_size;
  cuda::GpuInferenceOptions options;
  options.dtype = dtype;
  auto model = cuda::load_inference(file, pool, options);
  auto decoder = cuda::fused_tokens(*model, dtype);
  return single_sequence(std::move(model), capacity, nullptr, std::move(decoder));
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
