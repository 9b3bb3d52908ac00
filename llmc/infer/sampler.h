// Which token comes next.
//
// Only ids below vocab_limit take part. At temperature 0 the greatest logit wins, and the lowest id where
// several are equal. Otherwise, in this order:
//   temperature  w[i] = exp((logit[i] - greatest) / temperature)
//   top-k        the k ids of greatest logit stay
//   top-p        of those, the fewest ids in order of falling logit whose weights reach the share p of the
//   weights that
//                top-k left stay: the id that crosses p is kept, so at least one is (Holtzman et al., "The
//                Curious Case of Neural Text Degeneration", ICLR 2020)
//   min-p        of those, the ids with w[i] >= min_p * the greatest weight stay
// Equal logits rank by id, the lower first. Then one uniform number is turned into an id by the inverse of
// the cumulative sum of the kept weights, in order of id. llmc/infer/sampling_math.h has the arithmetic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft {

struct SamplerOptions {
  double temperature = 0;  // 0: greedy
  std::int64_t top_k = 0;  // 0: all
  double top_p = 1;        // 1: all
  double min_p = 0;        // 0: all
  std::uint64_t seed = 0;
  std::int64_t vocab_limit = 0;  // ids from here on (padding rows) are never sampled; 0: no limit
};

class Sampler {
 public:
  // Values out of range: Exit::usage.
  explicit Sampler(const SamplerOptions& options);

  // The id for `position` (0-based, in the whole sequence) from fp32 logits [vocab_size]. A pure function of
  // options, logits and position. -infinity masks an id; NaN, +infinity or nothing but -infinity is
  // Exit::numeric.
  std::int32_t sample(std::span<const float> logits, std::int64_t position);

 private:
  std::vector<std::int32_t> kept_ids(std::span<const float> logits) const;

  SamplerOptions options_;
  double scale_ = 0;                    // log2(e) / temperature
  std::vector<std::uint64_t> weights_;  // by id; reused from call to call
};

}  // namespace weft
