// AdamW with moments in bf16: the update of the CPU, and a rounding that is random, right on average, and addressed.
#include <bit>

#include "llmc/cpu/adamw.h"
#include "llmc/cuda/op/optim/adamw.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;

constexpr std::uint64_t kSeed = 11;

float upper(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Parameters, low halves and moments on the device, and one update of them.
struct State {
  DeviceBuffer<bf16> parameters, moment1, moment2;
  DeviceBuffer<std::int16_t> low;

  State(const Floats& masters, const Floats& m, const Floats& v)
      : parameters(masters.size()), moment1(stored<bf16>(m)), moment2(stored<bf16>(v)), low(masters.size()) {
    const DeviceBuffer<float> joined(masters);
    split_masters(parameters.data(), low.data(), joined.data(), static_cast<std::int64_t>(masters.size()), nullptr);
    check(cudaDeviceSynchronize(), "split_masters");
  }
  void update(const Floats& gradients, const std::vector<AdamWRange>& ranges, const AdamWStep& step,
              std::uint64_t seed = kSeed) const {
    const DeviceBuffer<float> g(gradients);
    const DeviceBuffer<AdamWBlock> blocks(adamw_blocks(ranges));
    adamw(parameters.data(), low.data(), g.data(), moment1.data(), moment2.data(), blocks.data(),
          static_cast<std::int64_t>(blocks.size()), step, nullptr, seed, nullptr);
    check(cudaDeviceSynchronize(), "adamw");
  }
  Floats masters() const {
    const DeviceBuffer<float> joined(low.size());
    join_masters(joined.data(), parameters.data(), low.data(), static_cast<std::int64_t>(low.size()), nullptr);
    return on_host(joined);
  }
};

AdamWStep some_step(std::int64_t number) {
  AdamWStep step;
  step.step = number;
  step.learning_rate = 3e-3f;
  step.weight_decay = 0.1f;
  step.gradient_scale = 0.7f;
  return step;
}

// Ranges that begin and end inside of a group of four elements, with padding that no range covers.
TEST(AdamWRounded, UpdatesLikeTheCpuAndRoundsWithItsOwnRandomBits) {
  const std::vector<AdamWRange> ranges = {{0, 20'001, true}, {20'001, 20'010, false}, {20'014, 41'111, true}};
  const std::int64_t count = 41'120;
  const Floats masters = random_floats(count, 1), gradients = random_floats(count, 2);
  const Floats m = random_stored<bf16>(count, 3, 0.1f);
  Floats v = random_stored<bf16>(count, 4, 0.01f);
  for (float& value : v) value = std::abs(value);
  const State state(masters, m, v);
  const AdamWStep step = some_step(5);
  state.update(gradients, ranges, step);

  Floats p_want = masters, m_want = m, v_want = v;
  for (const AdamWRange& range : ranges) {
    cpu::adamw(p_want.data() + range.begin, gradients.data() + range.begin, m_want.data() + range.begin,
               v_want.data() + range.begin, range.end - range.begin, range.decay, step);
  }
  expect_near<float>(state.masters(), p_want, "parameters");
  const Floats m_got = on_host(state.moment1), v_got = on_host(state.moment2);
  std::int64_t off = 0;
  for (const AdamWRange& range : ranges) {
    for (std::int64_t i = range.begin; i < range.end; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const std::uint32_t word = rounding_words(kSeed, step.step, i / 4).word[i % 4];
      const auto expected = [](float value, std::uint32_t random) {
        return upper(round_at_random(std::bit_cast<std::uint32_t>(value), random));
      };
      // The CPU's fp32 may differ from the GPU's in its last bit, which seldom changes where it is rounded to.
      off += m_got[at] != expected(m_want[at], word & 0xffffu) || v_got[at] != expected(v_want[at], word >> 16);
    }
  }
  EXPECT_LT(off, count / 1000);
  for (const std::int64_t i : {20'010, 20'013, 41'111, 41'119}) {
    const auto at = static_cast<std::size_t>(i);
    EXPECT_EQ(m_got[at], m[at]) << i;
    EXPECT_EQ(v_got[at], v[at]) << i;
  }
}

// v starts at 1 and grows by about 3 x 2^-12 a step. Half a unit of bf16 is 2^-8 there: rounding to nearest would lose every
// increment.
TEST(AdamWRounded, SmallIncrementsArriveOnAverage) {
  const std::int64_t count = 1 << 16;
  AdamWStep step = some_step(1);
  step.gradient_scale = 1;
  step.beta2 = 1 - 0x1p-12f;
  const State state(Floats(count, 1.0f), Floats(count, 0.0f), Floats(count, 1.0f));
  double want = 1;
  for (step.step = 1; step.step <= 32; ++step.step) {
    state.update(Floats(count, 2.0f), {{0, count, false}}, step);
    want = want * step.beta2 + (1 - step.beta2) * 4.0;
  }
  double mean = 0;
  for (const float value : on_host(state.moment2)) mean += value / static_cast<double>(count);
  EXPECT_NEAR(mean, want, 2e-4);  // 1.0232; one element's error is about 0.01, and 65,536 of them are averaged
}

TEST(AdamWRounded, TheSameBitsForTheSameSeedAndStep) {
  const std::int64_t count = 10'000;
  const auto moments = [&](std::uint64_t seed, std::int64_t number) {
    const State state(random_floats(count, 1), random_stored<bf16>(count, 2), Floats(count, 0.5f));
    state.update(random_floats(count, 3), {{0, count, true}}, some_step(number), seed);
    return on_host(state.moment1);
  };
  EXPECT_EQ(moments(1, 7), moments(1, 7));
  EXPECT_NE(moments(1, 7), moments(2, 7));
  EXPECT_NE(moments(1, 7), moments(1, 8));
}

TEST(AdamWRounded, NumbersThatAreNotFiniteStayWhatTheyAre) {
  for (const std::uint32_t bits : {0x7F800000u, 0xFF800000u, 0x7FC00000u, 0x7FFFFFFFu}) {
    for (const std::uint32_t random : {0u, 0xFFFFu}) {
      const float before = std::bit_cast<float>(bits), after = upper(round_at_random(bits, random));
      EXPECT_EQ(std::isnan(before), std::isnan(after));
      if (!std::isnan(before)) {
        EXPECT_EQ(before, after);
      }
    }
  }
}

}  // namespace
}  // namespace weft::cuda
