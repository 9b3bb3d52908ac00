// The rules of one request about its ids, beside how they are sampled: what a client may ask for, and the state that it
// needs. What a row becomes, and in which order, is in llmc/base/logit_row.h.
//
// The state is a function of the prompt and of the generated ids. It lives on the host, which learns an id one step late
// where steps are queued: a row says then that one more id counts, and the device looks it up (kUnknownId). So a request
// that is preempted, drafted for or queued ahead keeps its bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "llmc/base/logit_row.h"
#include "llmc/base/logit_rule.h"

namespace weft {

struct LogitRuleOptions {
  LogitPenalties penalties = {};
  std::vector<std::pair<std::int32_t, float>> logit_bias = {};  // each id once
  std::vector<std::vector<std::int32_t>> bad_words = {};        // sequences that are never completed; none is empty
  std::int64_t min_tokens = 0;                                  // no id of end_ids before so many generated ones
  std::vector<std::int32_t> end_ids = {};

  bool any() const { return penalties.any() || !logit_bias.empty() || !bad_words.empty() || min_tokens > 0; }
};

inline constexpr double kMostPenalty = 2;  // of presence and frequency, either sign
inline constexpr double kMostLogitBias = 100;

// Exit::usage if an id is not in [0, vocab_size), or if all ids below vocab_limit (0: vocab_size), from which the sampler
// chooses, could be forbidden at once.
void check_logit_rules(const LogitRuleOptions& options, std::int64_t vocab_size, std::int64_t vocab_limit);

class LogitRules {
 public:
  // check_logit_rules() has accepted the options.
  LogitRules(const LogitRuleOptions& options, std::span<const std::int32_t> prompt);

  // For the id after `generated`, all known ids of the request, and after `recent`, which follow them: at most
  // kMostRecentIds drafts, or kUnknownId alone. Later calls have all that is in `generated` at its beginning. Valid as long
  // as `recent` and until the next call with more of `generated`.
  LogitRow row(std::span<const std::int32_t> generated, std::span<const std::int32_t> recent = {});

 private:
  std::vector<std::unique_ptr<LogitRule>> rules_;
  LogitPenalties penalties_;
  LogitEdits edits_;
  std::size_t taken_ = 0;  // generated ids
};

// The rules that `options` ask for, if any, of a text that begins with `earlier` and goes on with `prompt`.
std::optional<LogitRules> begun_rules(const LogitRuleOptions& options, std::span<const std::int32_t> earlier,
                                      std::span<const std::int32_t> prompt);

}  // namespace weft
