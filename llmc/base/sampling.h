// How the next token is chosen: the options, and the plan from which the host's sampler and the GPU kernel make the
// same choice.
//
// Only ids below vocab_limit take part. At temperature 0 the greatest logit wins, and the lowest id if several are
// equal. Otherwise, in this order:
//   temperature  w[i] = exp((logit[i] - greatest) / temperature)
//   top-k        the k ids of greatest logit stay
//   top-p        of those, ids stay in order of falling logit until their weights add up to the share p of the weights
//                that top-k left. The id that reaches p stays, too, so there is always one (Holtzman et al., "The
//                Curious Case of Neural Text Degeneration", ICLR 2020)
//   min-p        of those, the ids with w[i] >= min_p * the greatest weight stay
// Equal logits rank by id, the lower first. Then one uniform number is turned into an id by the inverse of the
// cumulative sum of the kept weights, in order of id. llmc/base/sampling_math.h has the arithmetic.
#pragma once

#include <cstdint>

namespace weft {

struct SamplerOptions {
  double temperature = 0;  // 0: greedy
  std::int64_t top_k = 0;  // 0: all
  double top_p = 1;        // 1: all
  double min_p = 0;        // 0: all
  std::uint64_t seed = 0;
  std::int64_t vocab_limit = 0;  // ids from here on (padding rows) are never sampled; 0: no limit
};

// The options in the units of sampling_math.h. Plain data: a kernel reads it from device memory.
struct SamplingPlan {
  bool greedy = true;
  double scale = 0;  // log2(e) / temperature
  double top_p = 1;
  std::uint64_t least_weight = 0;  // min-p: ids of a smaller weight are dropped
  std::uint64_t top_k = 0;
  std::uint64_t seed = 0;
  std::int64_t vocab_limit = 0;
};

// Options out of range: Exit::usage.
SamplingPlan sampling_plan(const SamplerOptions& options);

// Why no id can be picked: the model's weights or its arithmetic are damaged.
enum class SampleError : std::int32_t {
  none = 0,
  not_a_number = 1,
  infinite = 2,        // +infinity
  nothing_finite = 3,  // only -infinity, or no logits at all
};
// Throws Exit::numeric unless `error` is none.
void check_sample(SampleError error);

}  // namespace weft
