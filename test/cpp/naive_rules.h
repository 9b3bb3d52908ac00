// The rules of requests as the documentation says them, id by id, without any state: what llmc/base/logit_rules.h has to give.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "llmc/base/logit_rules.h"

namespace weft {

// Penalties of few bits have products without rounding, so the plain formula has the bits of the library's.
inline void change_naively(const LogitRuleOptions& rules, std::span<const std::int32_t> prompt,
                           std::span<const std::int32_t> generated, std::span<float> logits) {
  constexpr float kForbidden = -std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const auto id = static_cast<std::int32_t>(i);
    float& x = logits[i];
    for (const std::vector<std::int32_t>& word : rules.bad_words) {
      std::vector<std::int32_t> text(generated.begin(), generated.end());
      text.push_back(id);
      if (text.size() >= word.size() && std::equal(word.rbegin(), word.rend(), text.rbegin())) x = kForbidden;
    }
    const bool ends = std::ranges::find(rules.end_ids, id) != rules.end_ids.end();
    if (ends && std::ssize(generated) < rules.min_tokens) x = kForbidden;
    for (const auto& [biased, bias] : rules.logit_bias) {
      if (biased == id) x += bias;
    }
    const auto count = std::ranges::count(generated, id), before = std::ranges::count(prompt, id);
    if (count + before > 0) x = x > 0 ? x / rules.penalties.repetition : x * rules.penalties.repetition;
    x -= rules.penalties.frequency * static_cast<float>(count);
    if (count > 0) x -= rules.penalties.presence;
  }
}

// Any of the rules, for ids below `vocab`, of which one is never forbidden.
inline LogitRuleOptions random_rules(std::mt19937& random, std::int32_t vocab) {
  const auto below = [&](std::int32_t limit) {
    return static_cast<std::int32_t>(random() % static_cast<unsigned>(limit));
  };
  const auto id = [&] { return 1 + below(vocab - 1); };
  LogitRuleOptions rules;
  if (below(2) == 0) rules.penalties.presence = static_cast<float>(below(9) - 4) / 2;
  if (below(2) == 0) rules.penalties.frequency = static_cast<float>(below(9) - 4) / 8;
  if (below(2) == 0) rules.penalties.repetition = static_cast<float>(1 + below(8)) / 4;
  for (std::int32_t left = below(2) == 0 ? 4 : 0; left > 0; --left) {
    const std::int32_t biased = below(vocab);
    const auto same = [&](const auto& entry) { return entry.first == biased; };
    if (std::ranges::any_of(rules.logit_bias, same)) continue;
    rules.logit_bias.emplace_back(biased, static_cast<float>(below(17) - 8));
  }
  for (std::int32_t left = below(2) == 0 ? 12 : 0; left > 0; --left) {
    std::vector<std::int32_t> word = {id()};
    while (below(3) != 0) word.insert(word.begin(), id());
    rules.bad_words.push_back(word);
  }
  if (below(2) == 0) rules.min_tokens = below(12);
  rules.end_ids = {id(), id()};
  return rules;
}

}  // namespace weft
