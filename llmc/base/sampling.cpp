#include "llmc/base/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "llmc/base/error.h"
#include "llmc/base/sampling_math.h"

namespace weft {

SamplingPlan sampling_plan(const SamplerOptions& options) {
  const bool valid = std::isfinite(options.temperature) && options.temperature >= 0 && options.top_k >= 0 &&
                     options.top_p >= 0 && options.top_p <= 1 && options.min_p >= 0 && options.min_p <= 1 &&
                     options.vocab_limit >= 0;
  if (!valid) {
    fail(Exit::usage,
         "sampling: expected temperature >= 0, top-k >= 0, top-p and min-p from 0 to 1; got %g, %lld, %g, %g",
         options.temperature, static_cast<long long>(options.top_k), options.top_p, options.min_p);
  }
  SamplingPlan plan;
  plan.greedy = options.temperature == 0;
  // For a tiny temperature the division overflows. With the largest finite scale the greatest logit still takes all.
  if (!plan.greedy) {
    plan.scale = std::min(std::numbers::log2e / options.temperature, std::numeric_limits<double>::max());
  }
  plan.top_p = options.top_p;
  plan.least_weight = options.min_p > 0 ? sampling_share(options.min_p, kGreatestWeight) : 0;
  plan.top_k = static_cast<std::uint64_t>(options.top_k);
  plan.seed = options.seed;
  plan.vocab_limit = options.vocab_limit;
  return plan;
}

void check_sample(SampleError error) {
  switch (error) {
    case SampleError::none:
      return;
    case SampleError::not_a_number:
      fail(Exit::numeric, "a logit is NaN: the model's weights or its arithmetic are damaged");
    case SampleError::infinite:
      fail(Exit::numeric, "a logit is infinite: the model's weights or its arithmetic are damaged");
    case SampleError::nothing_finite:
      fail(Exit::numeric, "no logit is finite: no token is possible");
  }
  fail(Exit::internal, "sampling: unknown error %d", static_cast<int>(error));
}

}  // namespace weft
