// The rules of a request: each against the formula of its documentation, whatever is known of the generated ids when a row is
// described.
#include "llmc/base/logit_rules.h"

#include <gtest/gtest.h>

#include <array>
#include <cfloat>
#include <cmath>
#include <string>

#include "test/cpp/naive_rules.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr std::int32_t kVocab = 23;  // few, so that ids come again
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> random_logits(std::mt19937& random, std::int32_t vocab = kVocab) {
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(static_cast<std::size_t>(vocab));
  for (float& logit : logits) logit = normal(random);
  return logits;
}

Ids random_ids(std::mt19937& random, std::size_t count) {
  Ids ids(count);
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % kVocab);
  return ids;
}

// All bits of what `options` make of `logits` after the prompt and the generated ids.
std::vector<float> changed(const LogitRuleOptions& options, const Ids& prompt, const Ids& generated,
                           std::vector<float> logits) {
  LogitRules rules(options, prompt);
  apply(rules.row(generated), 0, logits);
  return logits;
}

TEST(LogitRules, EveryRowIsThatOfTheFormula) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const LogitRuleOptions options = random_rules(random, kVocab);
    check_logit_rules(options, kVocab, 0);
    const Ids prompt = random_ids(random, random() % 12), generated = random_ids(random, 30);
    LogitRules rules(options, prompt);
    for (std::size_t size = 0; size < generated.size();) {
      const std::span<const std::int32_t> known = std::span(generated).first(size);
      // Drafts that follow, right ones or wrong.
      const Ids drafts = random_ids(random, random() % kMostRecentIds);
      for (std::size_t i = 0; i <= drafts.size(); ++i) {
        Ids all(known.begin(), known.end());
        all.insert(all.end(), drafts.begin(), drafts.begin() + static_cast<std::ptrdiff_t>(i));
        std::vector<float> logits = random_logits(random), expected = logits;
        change_naively(options, prompt, all, expected);
        apply(rules.row(known, std::span(drafts).first(i)), 5, logits);
        ASSERT_EQ(logits, expected) << "round " << round << ", after " << size << " ids and " << i << " drafts";
      }
      // One more id, which the host does not know.
      Ids all(known.begin(), known.end());
      all.push_back(generated[size]);
      std::vector<float> logits = random_logits(random), expected = logits;
      change_naively(options, prompt, all, expected);
      apply(rules.row(known, {&kUnknownId, 1}), all.back(), logits);
      ASSERT_EQ(logits, expected) << "round " << round << ", after " << size << " ids and one that is not known";
      size += 1 + random() % 3;
    }
  }
}

TEST(LogitRules, PenaltiesCountWhatTheySay) {
  const std::vector<float> logits = {2, 2, 2, -2, -2, 0};
  const Ids prompt = {0, 3}, generated = {1, 1, 4};
  LogitRuleOptions options;
  options.penalties = {.repetition = 1, .frequency = 0.5, .presence = 0};
  EXPECT_EQ(changed(options, prompt, generated, logits), (std::vector<float>{2, 1, 2, -2, -2.5, 0}));
  options.penalties = {.repetition = 1, .frequency = 0, .presence = -2};
  EXPECT_EQ(changed(options, prompt, generated, logits), (std::vector<float>{2, 4, 2, -2, 0, 0}));
  options.penalties = {.repetition = 2, .frequency = 0, .presence = 0};
  EXPECT_EQ(changed(options, prompt, generated, logits), (std::vector<float>{1, 1, 2, -4, -4, 0}));
  options.penalties = {.repetition = 0.5, .frequency = 0, .presence = 0};
  EXPECT_EQ(changed(options, prompt, generated, logits), (std::vector<float>{4, 4, 2, -1, -1, 0}));
  // Bias, then the factor, then what is subtracted.
  options.penalties = {.repetition = 2, .frequency = 0.5, .presence = 1};
  options.logit_bias = {{1, -4}, {2, 1}};
  EXPECT_EQ(changed(options, prompt, generated, logits), (std::vector<float>{1, -6, 3, -4, -5.5, 0}));
}

TEST(LogitRules, ABadWordIsForbiddenWhereItWouldBeComplete) {
  LogitRuleOptions options;
  options.bad_words = {{4}, {1, 2}, {1, 1, 3}};
  const std::vector<float> logits(6, 1.0f);
  const auto forbidden = [&](const Ids& generated) {
    std::string ids;
    const std::vector<float> row = changed(options, {1, 1}, generated, logits);
    for (std::size_t id = 0; id < row.size(); ++id) {
      EXPECT_TRUE(row[id] == 1 || row[id] == -kInfinity);
      if (row[id] != 1) ids += std::to_string(id);
    }
    return ids;
  };
  EXPECT_EQ(forbidden({}), "4") << "the prompt does not count";
  EXPECT_EQ(forbidden({1}), "24");
  EXPECT_EQ(forbidden({1, 1}), "234");
  EXPECT_EQ(forbidden({1, 1, 0}), "4");
  EXPECT_EQ(forbidden({1, 0, 1}), "24");
}

TEST(LogitRules, NothingEndsBeforeMinTokens) {
  LogitRuleOptions options;
  options.min_tokens = 2;
  options.end_ids = {0, 3};
  for (const std::int64_t size : {0, 1, 2, 3}) {
    const std::vector<float> row = changed(options, {1}, Ids(static_cast<std::size_t>(size), 1), {1, 1, 1, 1});
    const float end = size < 2 ? -kInfinity : 1;
    EXPECT_EQ(row, (std::vector<float>{end, 1, 1, end})) << size;
  }
}

// Damage is still seen, and no penalty makes any.
TEST(LogitRules, ALogitStaysFiniteIfItIs) {
  const LogitEdit edit = {0, 100, 1000, 1};
  for (const float repetition : {FLT_MIN, FLT_MAX}) {
    for (const float sign : {-1.0f, 1.0f}) {
      const LogitPenalties penalties = {repetition, 2 * sign, 2 * sign};
      for (const float logit : {-FLT_MAX, -1e6f, -100.0f, -0.0f, 0.0f, 1.0f, FLT_MAX}) {
        EXPECT_TRUE(std::isfinite(edited_logit(logit, edit, penalties))) << logit << " " << repetition;
      }
      EXPECT_EQ(edited_logit(kInfinity, edit, penalties), kInfinity);
      EXPECT_EQ(edited_logit(-kInfinity, edit, penalties), -kInfinity);
      EXPECT_TRUE(std::isnan(edited_logit(std::nanf(""), edit, penalties)));
    }
  }
}

TEST(LogitRules, IdsOutOfRangeAndNothingLeftAreRefused) {
  const auto refusal = [](const LogitRuleOptions& options, std::int64_t limit = 0) {
    return error_of(Exit::usage, [&] { check_logit_rules(options, 4, limit); });
  };
  LogitRuleOptions options;
  options.logit_bias = {{3, 1}, {4, 1}};
  EXPECT_EQ(refusal(options), "logit_bias: got id 4, expected 0 to 3");
  options = {};
  options.bad_words = {{3, 2}, {-1, 2}};
  EXPECT_EQ(refusal(options), "bad_words: got id -1, expected 0 to 3");
  options = {};
  options.end_ids = {9};
  EXPECT_EQ(refusal(options), "stop_token_ids: got id 9, expected 0 to 3");
  // Ids from the limit on are never sampled: they count neither as forbidden nor as left.
  options.end_ids = {1, 2, 3};
  options.bad_words = {{1, 0}, {1}};
  check_logit_rules(options, 4, 3);
  options.min_tokens = 1;
  EXPECT_NE(refusal(options, 3).find("none of the model's 3 tokens is left"), std::string::npos);
  EXPECT_NE(refusal(options).find("none of the model's 4"), std::string::npos);
  options.bad_words = {{0, 1}};
  check_logit_rules(options, 4, 3);
}

// Ids are taken once, however often rows are asked for.
TEST(LogitRules, WhatWasTakenIsNotForgotten) {
  LogitRuleOptions options;
  options.penalties.frequency = 1;
  LogitRules rules(options, Ids{1});
  const Ids generated = {2, 2, 3};
  for (int i = 0; i < 3; ++i) {
    std::vector<float> logits(4, 0.0f);
    apply(rules.row(generated), 0, logits);
    EXPECT_EQ(logits, (std::vector<float>{0, 0, -2, -1}));
  }
  EXPECT_NE(error_of(Exit::internal, [&] { rules.row(Ids{2}); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { rules.row(generated, Ids(kMostRecentIds + 1, 0)); }), "");
}

}  // namespace
}  // namespace weft
