// What the rules of a request (llmc/base/logit_rules.h) change in one row of logits before an id is sampled from it. In
// this order, which is vLLM's:
//   bad_words, min_tokens    the logit of a forbidden id becomes -infinity
//   logit_bias               logit += bias
//   repetition_penalty r     of an id in the prompt or among those generated: logit / r if it is positive, else logit * r
//                            (Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable
//                            Generation", 2019)
//   frequency_penalty f      logit -= f * how often the id was generated
//   presence_penalty p       logit -= p if it was generated
// Then the sampler: temperature, top-k and so on (llmc/base/sampling.h).
//
// The arithmetic is written so that a host loop and a device kernel get the same bits.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "llmc/base/philox.h"

namespace weft {

struct LogitPenalties {
  float repetition = 1, frequency = 0, presence = 0;

  bool any() const { return repetition != 1 || frequency != 0 || presence != 0; }
};

// One id whose logit changes. Plain data: a kernel reads it.
struct LogitEdit {
  std::int32_t id = 0;
  float bias = 0;
  std::int32_t generated = 0;  // how often
  std::int32_t in_prompt = 0;  // 1: repetition_penalty counts it
};

// An id that cannot be sampled: at all, or if the id before it is `after`, which only the device knows.
struct ForbiddenId {
  static constexpr std::int32_t kAlways = -1;
  std::int32_t id = 0, after = kAlways;

  auto operator<=>(const ForbiddenId&) const = default;
};

// In the place of a generated id: the one that was sampled last in the row's slot, which the host does not know yet.
inline constexpr std::int32_t kUnknownId = -1;
inline constexpr std::int64_t kMostRecentIds = 8;

struct LogitRow {
  std::span<const LogitEdit> edits;  // each id once
  LogitPenalties penalties;
  // Generated ids that `edits` does not count yet, at most kMostRecentIds: drafts, or kUnknownId. Empty without penalties.
  std::span<const std::int32_t> recent;
  std::vector<ForbiddenId> forbidden;  // no two of them hold at once for one id
};

// A logit that is not finite stays: the sampler reports damage, and -infinity masks. A finite one stays finite.
WEFT_HOST_DEVICE inline float edited_logit(float logit, const LogitEdit& edit, const LogitPenalties& penalties) {
  if (!(std::fabs(logit) <= FLT_MAX)) return logit;
  float x = logit + edit.bias;
  if (edit.generated > 0 || edit.in_prompt != 0) x = x > 0 ? x / penalties.repetition : x * penalties.repetition;
  // An explicit fma: two compilers cannot contract it differently.
  x = std::fma(-penalties.frequency, static_cast<float>(edit.generated), x);
  if (edit.generated > 0) x -= penalties.presence;
  return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x;
}

// Changes `logits` [vocab_size], which all ids of `row` are below. `last_id`: what kUnknownId stands for.
void apply(const LogitRow& row, std::int32_t last_id, std::span<float> logits);

}  // namespace weft
