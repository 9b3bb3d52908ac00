#include "llmc/base/logit_rules.h"

#include <algorithm>
#include <set>

#include "llmc/base/error.h"

namespace weft {

void check_logit_rules(const LogitRuleOptions& options, std::int64_t vocab_size, std::int64_t vocab_limit) {
  const auto check = [&](const char* name, std::int32_t id) {
    if (id >= 0 && id < vocab_size) return;
    fail(Exit::usage, "%s: got id %d, expected 0 to %lld", name, id, static_cast<long long>(vocab_size - 1));
  };
  std::set<std::int32_t> forbidden;
  for (const auto& entry : options.logit_bias) check("logit_bias", entry.first);
  for (const std::vector<std::int32_t>& word : options.bad_words) {
    for (const std::int32_t id : word) check("bad_words", id);
    forbidden.insert(word.back());
  }
  for (const std::int32_t id : options.end_ids) {
    check("stop_token_ids", id);
    if (options.min_tokens > 0) forbidden.insert(id);
  }
  const std::int64_t sampled = vocab_limit > 0 ? std::min(vocab_limit, vocab_size) : vocab_size;
  forbidden.erase(forbidden.lower_bound(static_cast<std::int32_t>(sampled)), forbidden.end());
  if (std::ssize(forbidden) < sampled) return;
  fail(Exit::usage, "%s: none of the model's %lld tokens is left. Forbid fewer",
       options.bad_words.empty() ? "min_tokens" : "bad_words", static_cast<long long>(sampled));
}

LogitRules::LogitRules(const LogitRuleOptions& options, std::span<const std::int32_t> prompt)
    : penalties_(options.penalties) {
  for (const auto make : {bad_words_rule, min_tokens_rule, logit_bias_rule, penalties_rule}) {
    if (std::unique_ptr<LogitRule> rule = make(options)) rules_.push_back(std::move(rule));
  }
  for (const auto& rule : rules_) rule->begin(prompt, edits_);
}

LogitRow LogitRules::row(std::span<const std::int32_t> generated, std::span<const std::int32_t> recent) {
  if (generated.size() < taken_ || std::ssize(recent) > kMostRecentIds) {
    fail(Exit::internal, "logit rules: %zu ids, then %zu, after %zu", generated.size(), recent.size(), taken_);
  }
  for (; taken_ < generated.size(); ++taken_) {
    for (const auto& rule : rules_) rule->take(generated[taken_], edits_);
  }
  LogitRow row;
  row.edits = edits_.list();
  row.penalties = penalties_;
  if (penalties_.any()) row.recent = recent;
  for (const auto& rule : rules_) rule->forbid({generated, recent}, row.forbidden);
  // An id that is forbidden anyway sorts before its conditions.
  std::ranges::sort(row.forbidden);
  const auto repeats = [](const ForbiddenId& a, const ForbiddenId& b) {
    return a.id == b.id && (a.after == ForbiddenId::kAlways || a.after == b.after);
  };
  row.forbidden.erase(std::unique(row.forbidden.begin(), row.forbidden.end(), repeats), row.forbidden.end());
  return row;
}

std::optional<LogitRules> begun_rules(const LogitRuleOptions& options, std::span<const std::int32_t> earlier,
                                      std::span<const std::int32_t> prompt) {
  if (!options.any()) return std::nullopt;
  std::vector<std::int32_t> ids(earlier.begin(), earlier.end());
  ids.insert(ids.end(), prompt.begin(), prompt.end());
  return LogitRules(options, ids);
}

}  // namespace weft
