// One rule about which ids a request may be given next, and how likely they are. Each has a file of its own; LogitRules has
// those of a request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "llmc/base/logit_row.h"

namespace weft {

struct LogitRuleOptions;

// The edits of a request, one for each id.
class LogitEdits {
 public:
  LogitEdit& of(std::int32_t id) {
    const auto [found, added] = index_.try_emplace(id, list_.size());
    if (added) list_.push_back({id, 0, 0, 0});
    return list_[found->second];
  }
  std::span<const LogitEdit> list() const { return list_; }

 private:
  std::vector<LogitEdit> list_;
  std::unordered_map<std::int32_t, std::size_t> index_;  // into list_
};

// What was generated before a row: the ids that rules have taken, then those that are not certain yet, drafts or
// kUnknownId.
struct GeneratedIds {
  std::span<const std::int32_t> known, recent;

  std::int64_t size() const { return std::ssize(known) + std::ssize(recent); }
  std::int32_t operator[](std::int64_t i) const {
    const std::int64_t beyond = i - std::ssize(known);
    return beyond < 0 ? known[static_cast<std::size_t>(i)] : recent[static_cast<std::size_t>(beyond)];
  }
};

class LogitRule {
 public:
  virtual ~LogitRule() = default;

  // Once, before anything is generated.
  virtual void begin(std::span<const std::int32_t> /*prompt*/, LogitEdits& /*edits*/) {}
  // Each generated id, in order.
  virtual void take(std::int32_t /*id*/, LogitEdits& /*edits*/) {}
  // Appends the ids that cannot follow `before`.
  virtual void forbid(const GeneratedIds& /*before*/, std::vector<ForbiddenId>& /*ids*/) const {}
};

// Null if the options ask for nothing of it.
std::unique_ptr<LogitRule> bad_words_rule(const LogitRuleOptions& options);   // bad_words.cpp
std::unique_ptr<LogitRule> min_tokens_rule(const LogitRuleOptions& options);  // min_tokens.cpp
std::unique_ptr<LogitRule> logit_bias_rule(const LogitRuleOptions& options);  // logit_bias.cpp
std::unique_ptr<LogitRule> penalties_rule(const LogitRuleOptions& options);   // penalties.cpp

}  // namespace weft
