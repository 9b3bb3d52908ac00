#include "llmc/base/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/sampling_math.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const std::vector<float> kLogits = {1.5f, -0.5f, 3.0f, 0.0f, 2.5f, -2.0f, 1.0f, 2.9f, -8.0f, 0.7f};

std::int32_t sample_once(const SamplerOptions& options, const std::vector<float>& logits, std::int64_t position = 0) {
  return Sampler(options).sample(logits, position);
}

// The probabilities that the documentation promises, in plain double arithmetic.
std::vector<double> exact_probabilities(const SamplerOptions& options, const std::vector<float>& logits) {
  const std::size_t limit = options.vocab_limit > 0 ? static_cast<std::size_t>(options.vocab_limit) : logits.size();
  std::vector<std::size_t> order(limit);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  const auto weight = [&](std::size_t id) {
    return std::exp((static_cast<double>(logits[id]) - static_cast<double>(logits[order[0]])) / options.temperature);
  };
  if (options.top_k > 0) order.resize(std::min(order.size(), static_cast<std::size_t>(options.top_k)));
  double total = 0;
  for (const std::size_t id : order) total += weight(id);
  double mass = 0;
  std::size_t kept = 0;
  while (kept < order.size() && (kept == 0 || mass < options.top_p * total)) mass += weight(order[kept++]);
  order.resize(kept);
  const double greatest = weight(order[0]);
  std::erase_if(order, [&](std::size_t id) { return weight(id) < options.min_p * greatest; });

  std::vector<double> probabilities(logits.size(), 0.0);
  double rest = 0;
  for (const std::size_t id : order) rest += weight(id);
  for (const std::size_t id : order) probabilities[id] = weight(id) / rest;
  return probabilities;
}

// The value that a chi-square variable of `degrees` exceeds once in a million draws (Wilson and Hilferty,
// 1931).
double chi_square_limit(int degrees) {
  const double z = 4.753, k = 2.0 / (9.0 * degrees);
  return degrees * std::pow(1 - k + z * std::sqrt(k), 3);
}

// Samples every position of a long sequence from the same logits and compares the counts with the exact
// distribution.
void expect_distribution(const SamplerOptions& options, const std::vector<float>& logits = kLogits) {
  constexpr int kDraws = 40'000;
  const std::vector<double> exact = exact_probabilities(options, logits);
  std::vector<int> counts(logits.size(), 0);
  Sampler sampler(options);
  for (int i = 0; i < kDraws; ++i) ++counts[static_cast<std::size_t>(sampler.sample(logits, i))];
  double chi_square = 0;
  int degrees = -1;
  for (std::size_t id = 0; id < logits.size(); ++id) {
    const double expected = exact[id] * kDraws;
    if (exact[id] == 0) {
      EXPECT_EQ(counts[id], 0) << "id " << id << " was filtered out";
    } else if (expected < 5) {
      EXPECT_LT(counts[id], 30) << "id " << id;  // too rare for the approximation: bounded alone
    } else {
      chi_square += (counts[id] - expected) * (counts[id] - expected) / expected;
      ++degrees;
    }
  }
  if (degrees > 0) {
    EXPECT_LT(chi_square, chi_square_limit(degrees)) << degrees << " degrees of freedom";
  }
}

TEST(Sampler, GreedyTakesTheGreatestAndTheLowestOfEquals) {
  EXPECT_EQ(sample_once({}, kLogits), 2);
  EXPECT_EQ(sample_once({}, {1, 5, 3, 5, 5}), 1);
  EXPECT_EQ(sample_once({}, {-0.0f, 0.0f}), 0);
  EXPECT_EQ(sample_once({}, {-kInfinity, -3, -kInfinity}), 1);
}

TEST(Sampler, TemperatureShapesTheDistribution) {
  for (const double temperature : {0.3, 0.7, 1.0, 2.0, 50.0}) {
    expect_distribution({.temperature = temperature, .seed = 11});
  }
}

TEST(Sampler, TopKKeepsTheLikeliest) {
  for (const std::int64_t k : {1, 2, 3, 7, 10, 1000}) {
    expect_distribution({.temperature = 1.5, .top_k = k, .seed = 12});
  }
}

TEST(Sampler, TopKMayLeaveOutOneAlone) {
  SamplerOptions options;
  options.temperature = 1;
  for (const std::int64_t top_k : {1, 2, 3, 4}) {
    options.top_k = top_k;
    std::set<std::int32_t> drawn;
    for (std::int64_t position = 0; position < 200; ++position) drawn.insert(sample_once(options, {0, 0, 0}, position));
    EXPECT_EQ(std::ssize(drawn), std::min<std::int64_t>(top_k, 3));
    EXPECT_EQ(*drawn.begin(), 0) << "of equals those of the lowest ids stay";
  }
}

TEST(Sampler, TopPKeepsTheCrossingToken) {
  for (const double p : {0.0, 0.05, 0.3, 0.5, 0.9, 0.999, 1.0}) {
    expect_distribution({.temperature = 1.0, .top_p = p, .seed = 13});
  }
  // Quarters: exactly half of the mass needs two ids, a little more needs three.
  const std::vector<float> quarters = {0, 0, 0, 0};
  for (int position = 0; position < 200; ++position) {
    EXPECT_LT(sample_once({.temperature = 1, .top_p = 0.5, .seed = 1}, quarters, position), 2);
  }
  expect_distribution({.temperature = 1, .top_p = 0.51, .seed = 14}, quarters);
}

TEST(Sampler, MinPIsRelativeToTheLikeliest) {
  for (const double p : {0.01, 0.2, 0.6, 1.0}) {
    expect_distribution({.temperature = 1.0, .min_p = p, .seed = 15});
  }
}

TEST(Sampler, FiltersInTheDocumentedOrder) {
  // Top-p after top-k sees the mass that top-k left; min-p sees weights after the temperature.
  expect_distribution({.temperature = 2.0, .top_k = 5, .top_p = 0.8, .min_p = 0.3, .seed = 16});
  expect_distribution({.temperature = 0.5, .top_k = 3, .top_p = 0.95, .seed = 17});
  expect_distribution({.temperature = 4.0, .top_p = 0.7, .min_p = 0.5, .seed = 18});
}

TEST(Sampler, EqualLogitsRankById) {
  const std::vector<float> equal(8, 1.0f);
  for (int position = 0; position < 100; ++position) {
    EXPECT_LT(sample_once({.temperature = 1, .top_k = 3, .seed = 2}, equal, position), 3);
    EXPECT_LT(sample_once({.temperature = 1, .top_p = 0.25, .seed = 2}, equal, position), 2);
  }
}

TEST(Sampler, PaddingIsNeverSampled) {
  std::vector<float> logits = kLogits;
  logits.insert(logits.end(), {30.0f, std::nanf(""), kInfinity, -kInfinity});  // rows without a token
  const std::int64_t limit = static_cast<std::int64_t>(kLogits.size());
  EXPECT_EQ(sample_once({.vocab_limit = limit}, logits), 2);
  expect_distribution({.temperature = 1, .seed = 19, .vocab_limit = limit}, logits);
  EXPECT_EQ(sample_once({.vocab_limit = 1000}, kLogits), 2);  // more than there are: all of them
}

TEST(Sampler, ExtremeLogits) {
  for (const double temperature : {5e-324, 1e-310, 1e-300, 0.5, 1.0, 1e300}) {
    const SamplerOptions options{.temperature = temperature, .seed = 3};
    EXPECT_EQ(sample_once(options, {-1e30f, 1e30f, 0}), temperature == 1e300 ? sample_once(options, {0, 0, 0}) : 1);
    EXPECT_EQ(sample_once(options, {-kInfinity, 1e38f, -kInfinity}), 1);
    EXPECT_EQ(sample_once(options, {-1e38f, -kInfinity}), 0);
  }
  for (int position = 0; position < 100; ++position) {
    const std::int32_t id = sample_once({.temperature = 1e300, .seed = 4}, {0, -kInfinity, 5, -kInfinity}, position);
    EXPECT_EQ(id % 2, 0) << "a masked id";
  }
}

TEST(Sampler, NonFiniteLogitsAreAnError) {
  for (const std::vector<float>& bad :
       {std::vector<float>{1, std::nanf(""), 0}, {std::nanf("")}, {1, kInfinity}, {-kInfinity, -kInfinity}, {}}) {
    for (const double temperature : {0.0, 1.0}) {
      error_of(Exit::numeric, [&, &logits = bad] { sample_once({.temperature = temperature}, logits); });
    }
  }
  // The message names the first one and what it is. A logit of -infinity is a masked id.
  for (const auto& [logits, words] :
       {std::pair(std::vector<float>{1, -kInfinity, std::nanf(""), kInfinity}, "id 2 is NaN"),
        {{1, -kInfinity, 2, kInfinity}, "id 3 is infinite"},
        {{-kInfinity, -kInfinity}, "no logit is finite"}}) {
    expect_contains(error_of(Exit::numeric, [&] { sample_once({.temperature = 1}, logits); }), words);
  }
}

TEST(Sampler, ATokenDependsOnSeedPositionAndLogitsAlone) {
  const SamplerOptions options{.temperature = 1, .top_p = 0.9, .seed = 5};
  Sampler walked(options);
  std::vector<std::int32_t> forward, fresh;
  for (int position = 0; position < 200; ++position) forward.push_back(walked.sample(kLogits, position));
  for (int position = 199; position >= 0; --position) fresh.push_back(sample_once(options, kLogits, position));
  std::reverse(fresh.begin(), fresh.end());
  EXPECT_EQ(forward, fresh);

  const auto sequence = [](std::uint64_t seed) {
    Sampler sampler({.temperature = 1, .seed = seed});
    std::vector<std::int32_t> ids;
    for (int position = 0; position < 200; ++position) ids.push_back(sampler.sample(kLogits, position));
    return ids;
  };
  EXPECT_NE(sequence(5), sequence(6));
  EXPECT_NE(sequence(5), sequence(5 + (1ull << 32)));
}

// Pins the choices themselves: a device kernel, another compiler or another machine must make the same.
TEST(Sampler, ChoicesAreReproducible) {
  Sampler sampler({.temperature = 0.9, .top_k = 8, .top_p = 0.95, .min_p = 0.01, .seed = 1234});
  std::vector<std::int32_t> ids;
  for (int position = 0; position < 24; ++position) ids.push_back(sampler.sample(kLogits, position));
  EXPECT_EQ(ids, (std::vector<std::int32_t>{4, 7, 4, 7, 2, 7, 2, 6, 0, 2, 7, 4, 2, 2, 2, 6, 6, 7, 2, 7, 7, 2, 4, 2}));
}

TEST(Sampler, OptionsOutOfRangeAreRefused) {
  for (const SamplerOptions& bad :
       {SamplerOptions{.temperature = -1}, SamplerOptions{.temperature = std::nan("")}, SamplerOptions{.top_k = -1},
        SamplerOptions{.top_p = 1.5}, SamplerOptions{.top_p = std::nan("")}, SamplerOptions{.min_p = -0.1},
        SamplerOptions{.vocab_limit = -1}}) {
    EXPECT_THROW(Sampler{bad}, Error);
  }
}

TEST(SamplingMath, WeightsAreTheExponential) {
  // Rounding to an integer of 2^-40 is the only error beside the series: one unit covers both.
  for (const double temperature : {0.5, 1.0, 3.0}) {
    for (float logit = -30; logit <= 0; logit += 0.0173f) {
      const double expected = std::exp(static_cast<double>(logit) / temperature) * 0x1p40;
      const double got = static_cast<double>(sampling_weight(logit + 2, 2, 1 / std::log(2.0) / temperature));
      const double input_error = std::abs(static_cast<double>(logit + 2) - 2 - static_cast<double>(logit));
      EXPECT_NEAR(got, expected, 1.0 + expected * (input_error / temperature + 1e-15)) << logit;
    }
  }
  EXPECT_EQ(sampling_weight(5, 5, 1), std::uint64_t{1} << kWeightBits);
  EXPECT_EQ(sampling_weight(-kInfinity, 5, 1), 0u);
}

TEST(SamplingMath, TargetsCoverTheTotalEvenly) {
  constexpr std::uint64_t kAll = ~std::uint64_t{0};
  for (const std::uint64_t total :
       {std::uint64_t{1}, std::uint64_t{3}, std::uint64_t{1} << 40, (std::uint64_t{1} << 60) + 12345}) {
    EXPECT_EQ(sampling_target(0, total), 0u);
    EXPECT_EQ(sampling_target(kAll, total), total - 1);
    for (std::uint64_t bits = 7; bits < kAll / 3; bits = bits * 3 + 1) {
      __extension__ using Wide = unsigned __int128;
      EXPECT_EQ(sampling_target(bits, total), static_cast<std::uint64_t>((static_cast<Wide>(bits) * total) >> 64));
    }
  }
}

TEST(SamplingMath, SharesAreReachableAndNeverEmpty) {
  EXPECT_EQ(sampling_share(0, 100), 1u);
  EXPECT_EQ(sampling_share(0.5, 100), 50u);
  EXPECT_EQ(sampling_share(0.501, 100), 51u);
  EXPECT_EQ(sampling_share(1, (std::uint64_t{1} << 60) + 1), (std::uint64_t{1} << 60) + 1);
  EXPECT_LE(sampling_share(1 - 1e-16, (std::uint64_t{1} << 60) + 1), (std::uint64_t{1} << 60) + 1);
}

}  // namespace
}  // namespace weft
