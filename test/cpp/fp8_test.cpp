// --precision fp8 on the CPU: rounding to the formats, scales, and a model whose linear layers compute with rounded operands.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <random>

#include "llmc/base/error.h"
#include "llmc/cpu/fp8.h"
#include "llmc/model/compare.h"
#include "test/cpp/gradient_check.h"
#include "test/cpp/train_tools.h"
#include "test/cpp/whole_model_checks.h"

namespace weft {
namespace {

constexpr Fp8Format kFormats[] = {Fp8Format::e4m3, Fp8Format::e5m2};

// ---- formats --------------------------------------------------------------------------------------------------------

// The number of a code by the definition of OFP8, in double; NaN where it is none.
double number_of(unsigned code, Fp8Format format) {
  const int mantissa_bits = format == Fp8Format::e4m3 ? 3 : 2, bias = format == Fp8Format::e4m3 ? 7 : 15;
  const unsigned magnitude = code & 0x7Fu;
  const int exponent = static_cast<int>(magnitude >> mantissa_bits);
  const double mantissa = static_cast<double>(magnitude & ((1u << mantissa_bits) - 1)) / (1 << mantissa_bits);
  double value = exponent == 0 ? std::ldexp(mantissa, 1 - bias) : std::ldexp(1 + mantissa, exponent - bias);
  if (format == Fp8Format::e4m3 && magnitude == 0x7F) value = NAN;
  if (format == Fp8Format::e5m2 && magnitude == 0x7C) value = INFINITY;
  if (format == Fp8Format::e5m2 && magnitude > 0x7C) value = NAN;
  return code >= 0x80 ? -value : value;
}

TEST(Fp8, EveryCodeIsItsNumberAndBack) {
  for (const Fp8Format format : kFormats) {
    for (unsigned code = 0; code < 256; ++code) {
      SCOPED_TRACE(code);
      const double want = number_of(code, format);
      const float got = fp8_to_f32(static_cast<std::uint8_t>(code), format);
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got));
        continue;
      }
      EXPECT_EQ(static_cast<double>(got), want);
      EXPECT_EQ(std::signbit(got), code >= 0x80);
      if (std::isinf(want)) continue;
      EXPECT_EQ(f32_to_fp8(got, format), code);
      EXPECT_EQ(std::bit_cast<std::uint32_t>(round_to_fp8(got, format)), std::bit_cast<std::uint32_t>(got));
    }
  }
}

// At the middle between two neighbours, and next to it on both sides.
TEST(Fp8, RoundsToTheNearestAndTiesToEven) {
  for (const Fp8Format format : kFormats) {
    const unsigned largest = format == Fp8Format::e4m3 ? 0x7E : 0x7B;
    for (unsigned code = 0; code < largest; ++code) {
      const double low = number_of(code, format), high = number_of(code + 1, format);
      const float middle = static_cast<float>((low + high) / 2);
      for (const float sign : {1.0f, -1.0f}) {
        const unsigned of_sign = sign < 0 ? 0x80 : 0;
        SCOPED_TRACE(code + of_sign);
        EXPECT_EQ(f32_to_fp8(sign * middle, format), (code + code % 2) | of_sign);
        EXPECT_EQ(f32_to_fp8(sign * std::nextafter(middle, 0.0f), format), code | of_sign);
        EXPECT_EQ(f32_to_fp8(sign * std::nextafter(middle, INFINITY), format), (code + 1) | of_sign);
      }
    }
    EXPECT_EQ(f32_to_fp8(fp8_flushed(format), format), 0) << "what is rounded to zero";
    EXPECT_EQ(f32_to_fp8(std::nextafter(fp8_flushed(format), INFINITY), format), 1);
  }
}

TEST(Fp8, SaturatesAndKeepsWhatIsNotFinite) {
  for (const Fp8Format format : kFormats) {
    const float largest = fp8_largest(format);
    EXPECT_EQ(static_cast<double>(largest), number_of(format == Fp8Format::e4m3 ? 0x7E : 0x7B, format));
    for (const float beyond : {std::nextafter(largest, INFINITY), 1.1f * largest, std::numeric_limits<float>::max()}) {
      EXPECT_EQ(round_to_fp8(beyond, format), largest);
      EXPECT_EQ(round_to_fp8(-beyond, format), -largest);
    }
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      EXPECT_TRUE(std::isnan(round_to_fp8(bad, format)));
      EXPECT_TRUE(std::isnan(fp8_to_f32(f32_to_fp8(bad, format), format)));
    }
  }
}

TEST(Fp8, ExponentsLeaveAFactorOfTwo) {
  for (const Fp8Format format : kFormats) {
    const double half = fp8_largest(format) / 2;
    for (int exponent = -110; exponent <= 110; exponent += 11) {
      for (const float mantissa : {1.0f, 1.5f, 1.75f, 1.7500001f, 1.9999999f}) {
        const float amax = std::ldexp(mantissa, exponent);
        const int e = fp8_exponent(std::bit_cast<std::uint32_t>(amax), format);
        EXPECT_LE(std::ldexp(static_cast<double>(amax), e), half) << amax;
        EXPECT_GT(std::ldexp(static_cast<double>(amax), e + 1), half) << amax;
      }
    }
    EXPECT_EQ(fp8_exponent(0, format), 0);
    EXPECT_EQ(fp8_exponent(1, format), 126) << "the smallest number of fp32";
    for (const int e : {-126, 0, 126}) EXPECT_EQ(std::bit_cast<float>(fp8_scale_bits(e)), std::ldexp(1.0f, e));
  }
}

// ---- tensors --------------------------------------------------------------------------------------------------------

TEST(CpuFp8, RoundsThroughTheScaleAndCounts) {
  for (const Fp8Format format : kFormats) {
    const int e = 3;
    test::Floats x = test::random_floats(5000, 1, 2.0f);
    x[7] = 0;
    x[8] = fp8_flushed(format) / 8;             // the largest that is lost at 2^3
    x[9] = -1.01f * fp8_largest(format) / 8;    // beyond the range
    x[10] = std::numeric_limits<float>::max();  // the product is infinite, the number is not
    test::Floats out(x.size());
    Fp8Counters counters;
    cpu::round_fp8(out.data(), x.data(), std::ssize(x), format, e, &counters);
    std::uint64_t saturated = 0, flushed = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(out[i], round_to_fp8(std::min(8 * x[i], 1e30f), format) / 8) << i;
      saturated += std::abs(8 * x[i]) > fp8_largest(format) ? 1 : 0;
      flushed += x[i] != 0 && out[i] == 0 ? 1 : 0;
    }
    EXPECT_EQ(out[8], 0.0f);
    EXPECT_EQ(saturated, 2u);
    EXPECT_EQ(counters.saturated, saturated);
    EXPECT_EQ(counters.flushed, flushed);
    EXPECT_EQ(std::bit_cast<float>(counters.amax_bits), std::numeric_limits<float>::max());
    x[11] = INFINITY;
    cpu::round_fp8(x.data(), x.data(), std::ssize(x), format, e, nullptr);
    EXPECT_TRUE(std::isnan(x[11]));
    x[11] = out[11];
    EXPECT_EQ(x, out) << "in place, the same";
  }
  test::expect_same_bits_for_any_threads("rounding", [] {
    test::Floats x = test::random_floats(1237, 3);
    Fp8Counters counters;
    cpu::round_fp8(x.data(), x.data(), std::ssize(x), Fp8Format::e4m3, 9, &counters);
    x.push_back(static_cast<float>(counters.saturated));
    x.push_back(std::bit_cast<float>(counters.amax_bits));
    return std::vector<test::Floats>{x};
  });
}

// By the scale of its own largest magnitude; a tensor that is not finite has the scale 1.
TEST(CpuFp8, ATensorIsRoundedToCodes) {
  for (const Fp8Format format : kFormats) {
    for (const float size : {1e-30f, 0.02f, 3e20f}) {
      test::Floats x = test::random_floats(3001, 2, size);
      x[3] = 0;
      x[4] = 1e-9f * size;
      const Fp8Tensor tensor = round_tensor(x, format);
      EXPECT_EQ(tensor.exponent, fp8_exponent(cpu::amax_bits(x.data(), std::ssize(x)), format));
      test::Floats want(x.size()), got;
      Fp8Counters counters;
      cpu::round_fp8(want.data(), x.data(), std::ssize(x), format, tensor.exponent, &counters);
      for (const std::uint8_t code : tensor.codes)
        got.push_back(std::ldexp(fp8_to_f32(code, format), -tensor.exponent));
      EXPECT_EQ(got, want);
      EXPECT_TRUE(tensor.counters == counters);
      EXPECT_GT(counters.flushed, 0u);
    }
    const float broken[] = {1, INFINITY, -300000};
    const Fp8Tensor tensor = round_tensor(broken, format);
    EXPECT_EQ(tensor.exponent, 0);
    EXPECT_EQ(fp8_to_f32(tensor.codes[0], format), 1.0f);
    EXPECT_TRUE(std::isnan(fp8_to_f32(tensor.codes[1], format)));
    EXPECT_EQ(fp8_to_f32(tensor.codes[2], format), -fp8_largest(format));
    EXPECT_EQ(tensor.counters.saturated, 2u);
    EXPECT_TRUE(round_tensor({}, format).codes.empty());
  }
}

// The counters of several calls are those of one call with all their values, whichever comes first.
TEST(CpuFp8, CountersAddsUpOverCalls) {
  for (const Fp8Format format : kFormats) {
    test::Floats x = test::random_floats(300, 1, 1.0f);
    for (const std::size_t i : {7u, 120u, 121u}) x[i] = 1e-9f;
    for (const std::size_t i : {10u, 130u, 299u}) x[i] = -2 * fp8_largest(format) * static_cast<float>(1 + i);
    const auto counters_of = [&](const std::vector<std::pair<std::int64_t, std::int64_t>>& parts) {
      Fp8Counters counters;
      test::Floats out(x.size());
      for (const auto& [begin, end] : parts) {
        cpu::round_fp8(out.data(), x.data() + begin, end - begin, format, 0, &counters);
      }
      return counters;
    };
    const Fp8Counters whole = counters_of({{0, 300}});
    EXPECT_EQ(whole.saturated, 3u);
    EXPECT_EQ(whole.flushed, 3u);
    for (const auto& parts : {std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 100}, {100, 300}},
                              {{100, 300}, {0, 100}},
                              {{299, 300}, {0, 0}, {0, 50}, {50, 299}}}) {
      EXPECT_TRUE(counters_of(parts) == whole);
    }
  }
}

TEST(Fp8Scales, FollowTheLargestOfTheLastSteps) {
  Fp8Scales scales(2);
  const Fp8Slots slots = scales.slots();
  ASSERT_EQ(slots.count(), 24);
  const std::int64_t slot = slots.at(Fp8Kind::gradient, 1, BlockLinear::up);
  EXPECT_EQ(slots.name(slot), "layers.1 gate, up gradient");
  std::vector<Fp8Counters> counters(24);
  const auto push = [&](float amax) {
    counters[static_cast<std::size_t>(slot)].amax_bits = std::bit_cast<std::uint32_t>(amax);
    scales.push(counters);
    return scales.exponent(slot);
  };
  // Gradients have 2^5 of headroom beyond the factor of two.
  const auto of = [](float amax) { return fp8_exponent(std::bit_cast<std::uint32_t>(amax), Fp8Format::e5m2) - 5; };
  EXPECT_FALSE(scales.known());
  EXPECT_EQ(push(8), of(8));
  EXPECT_TRUE(scales.known());
  EXPECT_EQ(push(1024), of(1024));
  for (int step = 1; step < kFp8History; ++step) EXPECT_EQ(push(1), of(1024)) << step;
  const std::vector<float> state = scales.state();
  EXPECT_EQ(push(1), of(1)) << "the large one is forgotten";
  EXPECT_EQ(push(INFINITY), of(1)) << "what is not finite is not learnt from";
  EXPECT_EQ(push(NAN), of(1));
  EXPECT_EQ(scales.exponent(slot - 1), 0) << "the neighbour";

  Fp8Scales again(2);
  again.set_state(state);
  EXPECT_TRUE(again.known());
  EXPECT_EQ(again.exponent(slot), of(1024));
  EXPECT_EQ(again.state(), state);
  again.forget();
  EXPECT_FALSE(again.known());
  EXPECT_EQ(error_of(Exit::internal, [&] { again.set_state(std::vector<float>(3)); }),
            "fp8: a history of 3 values for 384");
}

// A tensor that is not finite has its newest value once more, and the others of that step have theirs.
TEST(Fp8Scales, WhatIsNotFiniteRepeatsTheNewestValue) {
  for (const std::uint32_t bad : {0x7F800000u, 0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu}) {
    Fp8Scales scales(1);
    const auto slots = static_cast<std::size_t>(scales.slots().count());
    std::vector<Fp8Counters> counters(slots);
    const auto push = [&](float factor, std::size_t not_finite) {
      for (std::size_t slot = 0; slot < slots; ++slot) {
        counters[slot].amax_bits = std::bit_cast<std::uint32_t>(factor * static_cast<float>(slot + 1));
      }
      if (not_finite < slots) counters[not_finite].amax_bits = bad;
      scales.push(counters);
      return scales.state();
    };
    push(8, slots);
    push(1, slots);
    const std::size_t middle = slots / 2;
    const std::vector<float> state = push(4, middle);
    for (std::size_t slot = 0; slot < slots; ++slot) {
      const auto value = static_cast<float>(slot + 1);
      EXPECT_EQ(state[slot], slot == middle ? value : 4 * value) << slot;
      EXPECT_EQ(state[slots + slot], value) << slot;
      EXPECT_EQ(state[2 * slots + slot], 8 * value) << slot;
    }
    for (Fp8Counters& slot : counters) slot.amax_bits = bad;
    Fp8Scales nothing_known(1);
    nothing_known.push(counters);
    EXPECT_FALSE(nothing_known.known());
    EXPECT_EQ(nothing_known.exponent(0), 0);
    counters[3].amax_bits = std::bit_cast<std::uint32_t>(1.0f);
    nothing_known.push(counters);
    counters[3].amax_bits = bad;
    nothing_known.push(counters);
    EXPECT_TRUE(nothing_known.known()) << "one tensor is";
  }
  Fp8Scales scales(1);
  EXPECT_EQ(error_of(Exit::internal, [&] { scales.push(std::vector<Fp8Counters>(11)); }),
            "fp8: 11 counters for 12 slots");
}

// Of x and W what doubles is still in range, of gradients what grows sixty-fourfold: in single steps they do, in all layers.
TEST(Fp8Scales, LeaveEachKindItsHeadroom) {
  Fp8Scales scales(1);
  std::vector<Fp8Counters> counters(12);
  for (const float amax : {3e-9f, 0.7f, 1.0f, 1.76f, 400.0f}) {
    for (Fp8Counters& slot : counters) slot.amax_bits = std::bit_cast<std::uint32_t>(amax);
    for (std::int64_t step = 0; step < kFp8History; ++step) scales.push(counters);
    for (const Fp8Kind kind : kFp8Kinds) {
      SCOPED_TRACE(scales.slots().name(scales.slots().first(kind)));
      const int e = scales.exponent(scales.slots().first(kind));
      const double largest = static_cast<double>(fp8_largest(fp8_format(kind)));
      const double scaled = std::ldexp(static_cast<double>(amax), e) * (kind == Fp8Kind::gradient ? 64 : 2);
      EXPECT_LE(scaled, largest);
      EXPECT_GT(2 * scaled, largest) << "no more than that: the range below is for small values";
    }
  }
  for (const float amax : {0.0f, std::numeric_limits<float>::max()}) {
    for (Fp8Counters& slot : counters) slot.amax_bits = std::bit_cast<std::uint32_t>(amax);
    for (std::int64_t step = 0; step < kFp8History; ++step) scales.push(counters);
    const int e = scales.exponent(scales.slots().first(Fp8Kind::gradient));
    EXPECT_EQ(e, amax == 0 ? 0 : -119);
    EXPECT_TRUE(std::isfinite(std::ldexp(1.0f, -e)));
  }
}

// Every rank has rounded all weights, and inputs and gradients of its own micro-batches.
TEST(Fp8Counters, OfAllRanksAreSumsAndMaximaButWeightsCountOnce) {
  const Fp8Slots slots{2};
  constexpr std::int64_t kRanks = 3;
  std::vector<Fp8Counters> counters;
  for (std::uint32_t r = 0; r < kRanks; ++r) {
    for (std::uint32_t slot = 0; slot < slots.count(); ++slot) {
      const bool is_weight = slots.kind(slot) == Fp8Kind::weight;
      const std::uint32_t i =
          is_weight ? slot : 100 * ((r + slot) % kRanks) + slot;  // the largest: another rank each time
      counters.push_back({1 + i, 1000 + i, 5000 + i});
    }
  }
  const std::vector<Fp8Counters> all = of_all_ranks(slots, counters);
  ASSERT_EQ(std::ssize(all), slots.count());
  for (std::uint32_t slot = 0; slot < slots.count(); ++slot) {
    const bool is_weight = slots.kind(slot) == Fp8Kind::weight;
    const Fp8Counters expected = is_weight ? Fp8Counters{1 + slot, 1000 + slot, 5000 + slot}
                                           : Fp8Counters{3 + 300 + 3 * slot, 3000 + 300 + 3 * slot, 5200 + slot};
    EXPECT_EQ(all[slot], expected) << slots.name(slot);
  }
  const std::span<const Fp8Counters> alone = std::span(counters).first(static_cast<std::size_t>(slots.count()));
  EXPECT_TRUE(std::ranges::equal(of_all_ranks(slots, alone), alone));
}

TEST(Fp8Buffers, LayersTakeTurns) {
  Fp8Buffers few(5, true), all(5, false);
  EXPECT_FALSE(few.has(0));
  for (std::int64_t l = 0; l < 5; ++l) {
    few.put(l);
    EXPECT_FALSE(all.has_all());
    all.put(l);
    EXPECT_TRUE(few.has(l) && all.has(0) && all.has(l));
    if (l >= 1) {
      EXPECT_TRUE(few.has(l - 1)) << "the layer before has another place";
    }
    if (l >= 2) {
      EXPECT_FALSE(few.has(l - 2));
    }
    EXPECT_EQ(few.count(), 2);
    EXPECT_EQ(all.count(), 5);
    EXPECT_EQ(few.of(l), l % 2);
    EXPECT_EQ(all.of(l), l);
  }
  EXPECT_TRUE(all.has_all());
  EXPECT_FALSE(few.has_all());
  all.forget();
  EXPECT_FALSE(all.has(0) || all.has(4) || all.has_all());
}

// Sizes by hand: of a layer's inputs 24 + 40 + 24 + 56 columns, of its gradients 60 + 24 + 112 + 24, and 6,432 weights.
TEST(Fp8Statistics, SharesAreThoseOfAllMicroBatchesButWeightsCountOnce) {
  ModelConfig config = micro_config();
  config.num_layers = 2;
  config.hidden_size = 24;
  config.num_heads = 4;
  config.num_kv_heads = 1;
  config.head_dim = 10;
  config.ffn_size = 56;
  const Fp8Slots slots{config.num_layers};
  for (const std::uint64_t micro_batches : {1, 3}) {
    std::vector<Fp8Counters> counters(static_cast<std::size_t>(slots.count()));
    const auto counters_of = [&](Fp8Kind kind, std::int64_t layer, BlockLinear linear) -> Fp8Counters& {
      return counters[static_cast<std::size_t>(slots.at(kind, layer, linear))];
    };
    const std::uint64_t rows = 10 * micro_batches;
    counters_of(Fp8Kind::input, 1, BlockLinear::down).saturated = rows / 10;  // of 56 rows: 1 of 560
    counters_of(Fp8Kind::weight, 0, BlockLinear::output).saturated = 2;       // 1 of 480, the most
    counters_of(Fp8Kind::gradient, 1, BlockLinear::up).saturated = rows / 5;  // of 112 rows: 1 of 560
    counters_of(Fp8Kind::gradient, 0, BlockLinear::qkv).flushed = 5;
    counters_of(Fp8Kind::gradient, 1, BlockLinear::down).flushed = 7;
    const auto statistics = [&](const std::optional<LoraConfig>& lora) {
      return fp8_statistics(config, lora, counters, 10, static_cast<std::int64_t>(micro_batches));
    };
    const auto gradients_beside = [&](const char* targets) {
      const LoraConfig lora{2, 4, parse_lora_targets("", targets, lora_targets(config))};
      return statistics(lora).kinds[static_cast<std::size_t>(Fp8Kind::gradient)];
    };
    const Fp8Statistics got = statistics(std::nullopt);
    const auto expect = [&](Fp8Kind kind, std::uint64_t values, std::uint64_t saturated, std::uint64_t flushed) {
      const Fp8Statistics::Kind& sum = got.kinds[static_cast<std::size_t>(kind)];
      EXPECT_EQ(sum.values, values);
      EXPECT_EQ(sum.saturated, saturated);
      EXPECT_EQ(sum.flushed, flushed);
    };
    expect(Fp8Kind::input, 2 * 144 * rows, rows / 10, 0);
    expect(Fp8Kind::weight, 2 * 6432, 2, 0);
    expect(Fp8Kind::gradient, 2 * 220 * rows, rows / 5, 12);
    EXPECT_EQ(got.worst, "layers.0 output weight");
    EXPECT_DOUBLE_EQ(got.worst_share, 2.0 / 960);
    EXPECT_EQ(gradients_beside("q,down").values,
              (2 * 220 - 60) * rows);  // that of layer 0's qkv would reach the embedding alone
    EXPECT_EQ(gradients_beside("o,down").values, (2 * 220 - 60 - 24) * rows);
  }
}

// The worst tensor is the first of those with the largest share; without anything saturated there is none.
TEST(Fp8Statistics, TheWorstTensorIsOneThatSaturates) {
  const ModelConfig config = micro_config();
  const Fp8Slots slots{config.num_layers};
  std::vector<Fp8Counters> counters(static_cast<std::size_t>(slots.count()));
  for (Fp8Counters& slot : counters) slot.flushed = 3;
  const Fp8Statistics none = fp8_statistics(config, {}, counters, 16, 1);
  EXPECT_EQ(none.worst, "");
  EXPECT_EQ(none.worst_share, 0);
  for (const BlockLinear linear : {BlockLinear::output, BlockLinear::down}) {
    const std::int64_t slot = slots.at(Fp8Kind::gradient, 0, linear);  // of equal sizes
    counters[static_cast<std::size_t>(slot)].saturated = 8;
  }
  EXPECT_EQ(fp8_statistics(config, {}, counters, 16, 1).worst, "layers.0 output gradient");
}

// ---- the model ------------------------------------------------------------------------------------------------------

ModelConfig small_config() {
  ModelConfig config = micro_config();
  config.num_layers = 2;
  config.hidden_size = 32;
  config.ffn_size = 48;
  return config;
}

TrainOptions small_options(Precision precision = Precision::fp8) {
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = 16;
  options.precision = precision;
  return options;
}

// The same with norms of heads and every bias.
ModelConfig small_qwen() {
  ModelConfig config = small_config();
  set_family(config, "qwen3");
  config.qkv_bias = config.output_bias = config.mlp_bias = true;
  return config;
}

std::unique_ptr<TrainModel> small_model(const TrainOptions& options, const ModelConfig& config = small_config()) {
  std::unique_ptr<TrainModel> model = cpu::make_training_model(config, options);
  test::randomize_parameters(*model);
  return model;
}

// Steps first .. last of two micro-batches each, with tokens of their own; returns what the steps showed.
std::vector<double> take_steps(TrainModel& model, std::int64_t first, std::int64_t last) {
  std::vector<double> shown;
  for (std::int64_t step = first; step <= last; ++step) {
    model.zero_gradients();
    for (int i = 0; i < 2; ++i) {
      const auto number = static_cast<std::uint64_t>(2 * step + i);
      model.forward(test::random_tokens(model.config(), 32, static_cast<unsigned>(number)).batch(), number, 0.02f);
      model.backward();
    }
    const StepStatistics statistics = model.statistics();
    shown.insert(shown.end(), {statistics.loss_sum, statistics.gradient_norm});
    if (statistics.fp8) {
      for (const Fp8Statistics::Kind& kind : statistics.fp8->kinds) {
        shown.insert(shown.end(), {static_cast<double>(kind.values), static_cast<double>(kind.flushed)});
      }
    }
    AdamWStep update;
    update.step = step;
    update.learning_rate = 1e-2f;
    model.update(update);
  }
  return shown;
}

std::vector<float> everything(TrainModel& model) {
  std::vector<float> all = whole_state(model);
  const std::vector<float> history = model.fp8_state();
  all.insert(all.end(), history.begin(), history.end());
  return all;
}

// With weights of the size that training has, so that no softmax makes much of a small error.
void scale_matrices(TrainModel& model, float by) {
  for (const TensorSpec& spec : model.table().specs()) {
    if (spec.shape.size() != 2) continue;
    test::Floats values = test::read_values(model, TensorRole::parameter, spec);
    for (float& value : values) value *= by;
    model.write_tensor(TensorRole::parameter, spec, values.data());
  }
}

// Every weight to one of its two neighbours, at random.
void move_by_an_ulp(TrainModel& model, unsigned seed) {
  std::mt19937 random(seed);
  for (const TensorSpec& spec : model.table().specs()) {
    test::Floats values = test::read_values(model, TensorRole::parameter, spec);
    for (float& value : values) value = std::nextafter(value, random() % 2 == 0 ? INFINITY : -INFINITY);
    model.write_tensor(TensorRole::parameter, spec, values.data());
  }
}

// Rounding errs by at most 2^-4 of each x and W and 2^-3 of each dY, by 0.03 and 0.06 in the mean, in all directions: the
// few in a row between a gradient and the loss make it 0.1 in the 2-norm, and leave the direction.
void expect_gradients_of_fp32(const ModelConfig& config) {
  const auto exact = small_model(small_options(Precision::fp32), config), model = small_model(small_options(), config);
  const test::TokenBatch text = test::random_tokens(config, 32, 5);
  for (TrainModel* each : {exact.get(), model.get()}) {
    scale_matrices(*each, 0.3f);
    each->zero_gradients();
    each->forward(text.batch(), 0, 0.02f);
    each->backward();
  }
  const StepStatistics want = exact->statistics(), got = model->statistics();
  EXPECT_FALSE(want.fp8.has_value());
  EXPECT_NEAR(got.loss_sum, want.loss_sum, 0.02 * want.loss_sum);
  EXPECT_NE(got.loss_sum, want.loss_sum);
  for (const TensorSpec& spec : model->table().specs()) {
    const TensorDistance row = distance(spec.name, test::read_values(*model, TensorRole::gradient, spec),
                                        test::read_values(*exact, TensorRole::gradient, spec), 0.25, Norm::l2);
    EXPECT_TRUE(row.pass) << spec.name << " " << row.relative;
    EXPECT_GT(row.cosine, 0.97) << spec.name;
    EXPECT_GT(row.relative, 1e-3) << spec.name << " is that of fp32";
  }
}
TEST(Fp8Model, GradientsPointWhereThoseOfFp32Point) {
  expect_gradients_of_fp32(small_config());
  expect_gradients_of_fp32(small_qwen());
}

// The three GEMMs of one linear layer, with all three operands rounded through scales of their own: the down projection is the
// last one, so that the gradient of its output is that of the final norm, which both precisions compute alike.
TEST(Fp8Model, TheLastLinearLayerHasRoundedOperands) {
  const ModelConfig config = small_config();
  const auto model = small_model(small_options());
  const test::TokenBatch text = test::random_tokens(config, 32, 6);
  EXPECT_EQ(fp8_format(Fp8Kind::gradient), Fp8Format::e5m2);
  model->zero_gradients();
  model->forward(text.batch(), 0, 0.02f);
  const auto rounded = [](test::Floats values) {
    const Fp8Format format = Fp8Format::e4m3;
    const int e = fp8_exponent(cpu::amax_bits(values.data(), std::ssize(values)), format);
    for (float& value : values) value = std::ldexp(round_to_fp8(std::ldexp(value, e), format), -e);
    return values;
  };
  const std::int64_t C = config.hidden_size, F = config.ffn_size;
  const test::Floats x = rounded(model->activation("layers.1.mlp_product"));
  const TensorSpec& spec = model->table().at("model.layers.1.mlp.down_proj.weight");
  const test::Floats w = rounded(test::read_values(*model, TensorRole::parameter, spec));
  const test::Floats after = model->activation("layers.1.residual");
  // The branch is what the stream gained; the stream before it is not kept by name, so two rows with equal streams would not
  // do: the stream is that of the same model whose down projection is silent.
  const auto silent = small_model(small_options());
  silent->write_tensor(TensorRole::parameter, spec, test::Floats(w.size(), 0.0f).data());
  silent->zero_gradients();
  silent->forward(text.batch(), 0, 0.02f);
  const test::Floats before = silent->activation("layers.1.residual");
  for (std::int64_t n = 0; n < 32; ++n) {
    for (std::int64_t c = 0; c < C; ++c) {
      double sum = 0;
      for (std::int64_t f = 0; f < F; ++f) {
        sum += static_cast<double>(x[static_cast<std::size_t>(n * F + f)]) * w[static_cast<std::size_t>(c * F + f)];
      }
      const auto i = static_cast<std::size_t>(n * C + c);
      ASSERT_NEAR(after[i] - before[i], sum, 1e-5) << n << " " << c;
    }
  }
}

TEST(Fp8Model, RecomputationAndRerunGiveTheSameBits) {
  TrainOptions options = small_options();
  options.dropout = 0.1f;
  for (const ModelConfig& config : {small_config(), small_qwen()}) {
    const auto run = [&](Recompute recompute) {
      options.recompute = recompute;
      const auto model = small_model(options, config);
      std::vector<double> shown = take_steps(*model, 1, 4);
      const std::vector<float> all = everything(*model);
      shown.insert(shown.end(), all.begin(), all.end());
      return shown;
    };
    const std::vector<double> expected = run(Recompute::none);
    for (const Recompute recompute : {Recompute::none, Recompute::norm, Recompute::block}) {
      EXPECT_EQ(run(recompute), expected) << config.family << " " << static_cast<int>(recompute);
    }
  }
}

// What a step adds to the history is the largest of all its micro-batches, and of no step before it.
TEST(Fp8Model, TheHistoryHasTheLargestOfAllMicroBatchesOfAStep) {
  const auto model = small_model(small_options());
  const std::vector<float> nothing(model->fp8_state().size(), 0.0f);
  // Without a history each micro-batch has scales of its own, and a learning rate of 0 leaves the weights.
  const auto newest_of = [&](const std::vector<std::pair<unsigned, float>>& micro_batches) {
    model->set_fp8_state(nothing);
    model->zero_gradients();
    for (const auto& [seed, loss_scale] : micro_batches) {
      model->forward(test::random_tokens(model->config(), 32, seed).batch(), 0, loss_scale);
      model->backward();
    }
    model->statistics();
    model->update(AdamWStep{});
    std::vector<float> newest = model->fp8_state();
    newest.resize(newest.size() / kFp8History);
    return newest;
  };
  const std::vector<float> first = newest_of({{1, 0.02f}}), second = newest_of({{2, 0.04f}});
  std::vector<float> largest(first.size());
  std::ranges::transform(first, second, largest.begin(), [](float a, float b) { return std::max(a, b); });
  ASSERT_NE(largest, first);
  ASSERT_NE(largest, second);
  EXPECT_EQ(newest_of({{1, 0.02f}, {2, 0.04f}}), largest);
  EXPECT_EQ(newest_of({{2, 0.04f}, {1, 0.02f}}), largest);
  EXPECT_EQ(newest_of({{1, 0.02f}}), first) << "not those of the step before";
}

// Through a checkpoint: parameters, moments and the history of the scales.
TEST(Fp8Model, HalfAndHalfIsTheWholeBitForBit) {
  const TemporaryDirectory temporary;
  write_shard(temporary.file("train.bin"), patterned_tokens(200));
  const TokenDataset data(temporary.file("train.bin"), 8);
  TrainSettings settings = micro_settings();
  settings.precision = "fp8";
  RunIdentity identity = micro_identity(settings, data);
  identity.model = small_config();
  const RunDirectory run(temporary.file("run"));
  CheckpointKeeper keeper(run, identity, 2);

  const auto whole = small_model(small_options()), half = small_model(small_options());
  take_steps(*whole, 1, 3);
  take_steps(*half, 1, 3);
  TrainState state;
  state.step = state.updates = 3;
  keeper.save(state, *half);
  const auto resumed = small_model(small_options());
  take_steps(*resumed, 7, 9);  // another history, which must go
  ASSERT_TRUE(keeper.resume(ResumeMode::must, *resumed).has_value());
  EXPECT_EQ(resumed->fp8_state(), whole->fp8_state());
  EXPECT_EQ(take_steps(*resumed, 4, 6), take_steps(*whole, 4, 6));
  EXPECT_EQ(everything(*resumed), everything(*whole));

  // A step with a larger gradient raises amax: the scales of the step after it differ from those of a fresh start.
  const auto forgetful = small_model(small_options());
  for (const TensorRole role : kStateRoles) {
    for (const TensorSpec& spec : half->table().specs()) {
      forgetful->write_tensor(role, spec, test::read_values(*half, role, spec).data());
    }
  }
  take_steps(*forgetful, 4, 4);
  EXPECT_NE(forgetful->fp8_state(), whole->fp8_state());

  // One without a history of scales, or with one of another size, is damaged.
  TensorSource source = tensors_of(*half);
  source.fp8_state.clear();
  state.step = state.updates = 4;
  expect_contains(error_of(Exit::bad_file, [&] { keeper.save(state, half->table(), source); }), "fp8.amax");
}

TEST(Fp8Model, ValidationChangesNothing) {
  const auto plain = small_model(small_options()), watched = small_model(small_options());
  std::int64_t labels = 0;
  std::vector<double> losses;
  const test::TokenBatch text = test::random_tokens(small_config(), 32, 9);
  for (int step = 1; step <= 4; ++step) {
    losses.push_back(watched->evaluate(text.batch(), &labels));
    EXPECT_EQ(watched->evaluate(text.batch(), &labels), losses.back());
    expect_contains(error_of(Exit::internal, [&] { watched->backward(); }), "without a forward()");
    EXPECT_EQ(take_steps(*watched, step, step), take_steps(*plain, step, step)) << step;
  }
  EXPECT_EQ(everything(*watched), everything(*plain));
}

// Right after an update as after the forward pass of the next step, which rounds the new weights in any case.
TEST(Fp8Model, ValidationHasTheWeightsOfTheLastUpdate) {
  const auto model = small_model(small_options());
  const test::TokenBatch text = test::random_tokens(small_config(), 32, 9);
  std::int64_t labels = 0;
  for (int step = 1; step <= 3; ++step) {
    take_steps(*model, step, step);
    const double at_once = model->evaluate(text.batch(), &labels);
    model->zero_gradients();
    model->forward(text.batch(), 0, 0.02f);
    EXPECT_EQ(model->evaluate(text.batch(), &labels), at_once) << step;
  }
}

// The scales of a step are those of the steps before: what has grown a thousand times saturates, is counted and named, and
// nothing wraps; later steps know.
TEST(Fp8Model, WhatGrowsSaturatesAndIsCounted) {
  const auto model = small_model(small_options());
  take_steps(*model, 1, 2);
  const std::vector<float> history = model->fp8_state();
  const TensorSpec& spec = model->table().at("model.layers.1.post_attention_layernorm.weight");
  test::Floats larger = test::read_values(*model, TensorRole::parameter, spec);
  for (float& value : larger) value *= 1000;
  model->write_tensor(TensorRole::parameter, spec, larger.data());
  model->set_fp8_state(history);
  const test::TokenBatch text = test::random_tokens(small_config(), 32, 11);
  const auto step = [&] {
    model->zero_gradients();
    model->forward(text.batch(), 9, 0.02f);
    model->backward();
    return model->statistics();
  };
  const StepStatistics grown = step();
  ASSERT_TRUE(grown.fp8.has_value());
  EXPECT_TRUE(std::isfinite(grown.loss_sum) && std::isfinite(grown.gradient_norm));
  const auto& inputs = grown.fp8->kinds[static_cast<std::size_t>(Fp8Kind::input)];
  EXPECT_GT(inputs.saturated, inputs.values / 20);
  EXPECT_EQ(inputs.values, 2u * 32 * (32 + 16 + 32 + 48));
  EXPECT_EQ(grown.fp8->kinds[static_cast<std::size_t>(Fp8Kind::weight)].saturated, 0u);
  expect_contains(grown.fp8->worst, "layers.1 ");
  EXPECT_GT(grown.fp8->worst_share, 0.1);
  AdamWStep none;
  none.learning_rate = 0;
  model->update(none);
  step();  // the input of gate and up has its range now, and so what follows from it is larger than it was
  model->update(none);
  EXPECT_EQ(step().fp8->kinds[static_cast<std::size_t>(Fp8Kind::input)].saturated, 0u);
}

TEST(Fp8Model, LearnsAsInFp32) {
  const auto last_loss = [](Precision precision) {
    const auto model = small_model(small_options(precision));
    const std::vector<std::uint16_t> text = patterned_tokens(33);
    const std::vector<std::int32_t> tokens(text.begin(), text.end() - 1), labels(text.begin() + 1, text.end());
    double loss = 0;
    for (std::int64_t step = 1; step <= 40; ++step) {
      model->zero_gradients();
      model->forward({tokens, labels}, 0, 1.0f / 32);
      model->backward();
      loss = model->statistics().loss_sum / 32;
      AdamWStep update;
      update.step = step;
      update.learning_rate = 3e-3f;
      model->update(update);
    }
    return loss;
  };
  const double exact = last_loss(Precision::fp32), rounded = last_loss(Precision::fp8);
  EXPECT_LT(exact, 1.0);
  EXPECT_NEAR(rounded, exact, 0.1);
}

// Learning rates at which a run in fp32 jumps, and then learns or stays where it is: a run in fp8 rises no higher, and comes
// back below the loss of a guess; what saturates on the way wraps nothing. Behind a jump a run is chaotic: weights that begin one
// unit in the last place apart end as far from each other as two models, in fp32 too (0.3: 1.0 to 2.1). So where one run
// ends is a matter of how a CPU rounds. How high it rises is not, and neither is the median of several runs.
TEST(Fp8Model, HighLearningRatesDivergeNoSoonerThanInFp32) {
  struct Curve {
    double highest = 0, last = 0;
    std::uint64_t saturated = 0;
  };
  const auto train = [](Precision precision, float learning_rate, unsigned start) {
    const auto model = small_model(small_options(precision));
    scale_matrices(*model, 0.3f);
    if (start > 0) move_by_an_ulp(*model, start);
    const std::vector<std::uint16_t> text = patterned_tokens(33);
    const std::vector<std::int32_t> tokens(text.begin(), text.end() - 1), labels(text.begin() + 1, text.end());
    Curve curve;
    for (std::int64_t step = 1; step <= 50; ++step) {
      model->zero_gradients();
      model->forward({tokens, labels}, 0, 1.0f / 32);
      model->backward();
      const StepStatistics statistics = model->statistics();
      const double loss = statistics.loss_sum / 32;
      EXPECT_TRUE(std::isfinite(loss) && std::isfinite(statistics.gradient_norm)) << step;
      curve.highest = std::max(curve.highest, loss);
      if (step > 40) curve.last += loss / 10;
      if (statistics.fp8) {
        for (const Fp8Statistics::Kind& kind : statistics.fp8->kinds) curve.saturated += kind.saturated;
      }
      AdamWStep update;
      update.step = step;
      update.learning_rate = learning_rate;
      model->update(update);
    }
    return curve;
  };
  constexpr unsigned kStarts = 5;
  const double guess = std::log(31.0);  // of the 31 ids that the text has
  for (const float learning_rate :
       {1e-2f, 1e-1f, 3e-1f}) {  // learns; learns with jumps; jumps to twice the loss it began with
    SCOPED_TRACE(learning_rate);
    std::vector<double> exact_ends, ends;
    for (unsigned start = 0; start < kStarts; ++start) {
      const Curve exact = train(Precision::fp32, learning_rate, start);
      const Curve rounded = train(Precision::fp8, learning_rate, start);
      EXPECT_LT(rounded.highest, 2 * exact.highest) << start;
      exact_ends.push_back(exact.last);
      ends.push_back(rounded.last);
      if (learning_rate > 0.2f) {
        EXPECT_GT(rounded.saturated, 0u);
      }
    }
    for (std::vector<double>* of_runs : {&exact_ends, &ends}) {
      std::sort(of_runs->begin(), of_runs->end());
      EXPECT_LT((*of_runs)[kStarts / 2], learning_rate < 0.05f ? 0.1 : guess);
    }
  }
}

TEST(Fp8Model, OtherSizesAreRefusedByName) {
  const auto refused = [](const std::function<void(ModelConfig&, TrainOptions&)>& change) {
    ModelConfig config = small_config();
    TrainOptions options = small_options();
    change(config, options);
    return error_of(Exit::usage, [&] { cpu::make_training_model(config, options); });
  };
  expect_contains(refused([](ModelConfig& c, TrainOptions&) { c.hidden_size = 40; }),
                  "hidden_size: got 40, --precision fp8 needs a multiple of 16");
  expect_contains(refused([](ModelConfig& c, TrainOptions&) { c.ffn_size = 56; }), "ffn_size: got 56");
  expect_contains(refused([](ModelConfig& c, TrainOptions&) { c.num_heads = 1; }), "num_heads x head_dim: got 8");
  const auto narrow_heads = [](ModelConfig& c, TrainOptions&) {
    c.num_heads = 4;
    c.head_dim = c.rope.rotary_dim = 4;
  };
  expect_contains(refused(narrow_heads), "(num_heads + 2 num_kv_heads) x head_dim: got 24");
  expect_contains(refused([](ModelConfig&, TrainOptions& o) { o.seq_len = 9; }), "--micro-batch x --seq-len: got 18");
  expect_contains(refused([](ModelConfig& c, TrainOptions&) { set_family(c, "gpt_neox"); }),
                  "got fp8 for a model of the family gpt_neox");
  expect_contains(refused([](ModelConfig& c, TrainOptions&) { c.parallel_residual = true; }), "a sequential residual");
}

}  // namespace
}  // namespace weft
