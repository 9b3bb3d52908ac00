// Picks the next token on the host, as llmc/base/sampling.h describes. llmc/cuda/op/sample/sampler.cuh makes the same choice
// on the GPU.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "llmc/base/sampling.h"

namespace weft {

class Sampler {
 public:
  // Options out of range: Exit::usage.
  explicit Sampler(const SamplerOptions& options) : plan_(sampling_plan(options)) {}
  explicit Sampler(const SamplingPlan& plan) : plan_(plan) {}

  // The id for `position` (0-based, in the whole sequence) from fp32 logits [vocab_size]. A pure function of
  // options, logits and position. -infinity masks an id; NaN, +infinity or nothing but -infinity is
  // Exit::numeric.
  std::int32_t sample(std::span<const float> logits, std::int64_t position);
  // The same, but returns the reason instead of throwing; *id is written only if there is none.
  SampleError try_sample(std::span<const float> logits, std::int64_t position, std::int32_t* id);

 private:
  std::span<const float> sampled_part(std::span<const float> logits) const;
  std::vector<std::int32_t> kept_ids(std::span<const float> logits) const;

  SamplingPlan plan_;
  std::vector<std::uint64_t> weights_;  // indexed by id; a member so that calls reuse its memory
};

}  // namespace weft
