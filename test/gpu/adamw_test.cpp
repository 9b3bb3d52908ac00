// AdamW, split masters and the global norm on the GPU, against the CPU.

#include "llmc/cuda/op/optim/adamw.h"

#include <bit>

#include "llmc/cpu/adamw.h"
#include "llmc/model/compare.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;
using Low = std::vector<std::int16_t>;

// ---- split masters ----------------------------------------------------------------------------------------------------
TEST(SplitMaster, EveryFiniteFloatComesBack) {
  // Every exponent, sign and high mantissa with the low halves around a tie, where rounding decides.
  for (std::uint32_t high = 0; high <= 0xFFFF; ++high) {
    for (const std::uint32_t low : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const std::uint32_t bits = high << 16 | low;
      if (std::isnan(std::bit_cast<float>(bits))) continue;
      const SplitMaster split = split_master(bits);
      ASSERT_EQ(join_master(split), bits) << std::hex << bits;
      const float nearest = std::bit_cast<float>(static_cast<std::uint32_t>(split.high) << 16);
      const float even = __bfloat162float(__float2bfloat16(std::bit_cast<float>(bits)));
      if (low != 0x8000u) {
        ASSERT_EQ(nearest, even) << std::hex << bits;  // only a tie may round differently
      }
    }
  }
}

TEST(SplitMaster, NotANumberStaysOne) {
  for (const std::uint32_t bits : {0x7FFFFFFFu, 0xFFFFFFFFu, 0x7F800001u}) {
    const SplitMaster split = split_master(bits);
    EXPECT_TRUE(std::isnan(std::bit_cast<float>(static_cast<std::uint32_t>(split.high) << 16)));
    EXPECT_TRUE(std::isnan(std::bit_cast<float>(join_master(split))));
  }
}

struct Split {
  DeviceBuffer<bf16> parameters;
  DeviceBuffer<std::int16_t> low;

  explicit Split(const Floats& masters) : parameters(masters.size()), low(masters.size()) {
    const DeviceBuffer<float> whole(masters);
    split_masters(parameters.data(), low.data(), whole.data(), static_cast<std::int64_t>(masters.size()), nullptr);
    check(cudaStreamSynchronize(nullptr), "split_masters");
  }
  Floats joined() const {
    const DeviceBuffer<float> whole(low.size());
    join_masters(whole.data(), parameters.data(), low.data(), static_cast<std::int64_t>(low.size()), nullptr);
    return on_host(whole);
  }
};

TEST(SplitMaster, KernelsAreExact) {
  for (const std::int64_t count : {1, 3, 4, 1023, 100'001}) {
    const Floats masters = random_floats(count, 1);
    EXPECT_EQ(Split(masters).joined(), masters) << count;
  }
}

// ---- update -----------------------------------------------------------------------------------------------------------
// Tensors as a model has them: neighbours of odd sizes, matrices and norms, and padding that belongs to nobody.
struct Layout {
  std::vector<AdamWRange> ranges;
  std::int64_t elements = 0;
};
Layout make_layout() {
  Layout layout;
  layout.ranges.reserve(16);  // g++ 13 at -O3 otherwise warns falsely of an overflow in the growing vector
  const auto add = [&](std::int64_t size, bool decay, std::int64_t padding) {
    layout.ranges.push_back({layout.elements, layout.elements + size, decay});
    layout.elements += size + padding;
  };
  add(20'000, true, 0);
  add(8192, true, 0);
  add(1, false, 0);
  add(3, true, 0);
  add(2, false, 1);
  add(7, true, 0);
  add(64, false, 45);
  add(40'001, true, 23);
  return layout;
}

TEST(AdamWBlocks, CoverTheRangesOnce) {
  const Layout layout = make_layout();
  std::vector<int> covered(static_cast<std::size_t>(layout.elements), -1);
  for (const AdamWBlock& block : adamw_blocks(layout.ranges)) {
    for (std::int64_t i = block.begin; i < block.begin + block.count; ++i) {
      ASSERT_EQ(covered[static_cast<std::size_t>(i)], -1) << i;
      covered[static_cast<std::size_t>(i)] = block.decay;
    }
  }
  std::vector<int> want(covered.size(), -1);
  for (const AdamWRange& range : layout.ranges) {
    std::fill(want.begin() + range.begin, want.begin() + range.end, range.decay ? 1 : 0);
  }
  EXPECT_EQ(covered, want);
  EXPECT_TRUE(adamw_blocks({}).empty());
}

struct State {
  Floats parameters, gradients, moment1, moment2;

  explicit State(std::int64_t n)
      : parameters(random_floats(n, 1)),
        gradients(random_floats(n, 2, 0.1f)),
        moment1(random_floats(n, 3, 0.1f)),
        moment2(random_floats(n, 4, 0.1f)) {
    for (float& v : moment2) v *= v;
  }
};

AdamWStep make_step(std::int64_t step, float scale) {
  AdamWStep s;
  s.step = step;
  s.learning_rate = 1e-2f;
  s.weight_decay = 0.1f;
  s.eps = 3e-3f;  // beside square roots of about 0.1: one that is ignored shows
  s.gradient_scale = scale;
  return s;
}

void cpu_update(const Layout& layout, State& s, const AdamWStep& step) {
  for (const AdamWRange& r : layout.ranges) {
    cpu::adamw(s.parameters.data() + r.begin, s.gradients.data() + r.begin, s.moment1.data() + r.begin,
               s.moment2.data() + r.begin, r.end - r.begin, r.decay, step);
  }
}

// Both storages from one state; five steps, so that the moments and the bias correction move.
TEST(AdamW, FollowsTheCpu) {
  const Layout layout = make_layout();
  State want(layout.elements);
  const std::vector<AdamWBlock> list = adamw_blocks(layout.ranges);
  const DeviceBuffer<AdamWBlock> blocks(list);
  const DeviceBuffer<float> whole(want.parameters), gradients(want.gradients);
  const DeviceBuffer<float> m(want.moment1), v(want.moment2), split_m(want.moment1), split_v(want.moment2);
  const Split split(want.parameters);
  for (std::int64_t t = 1; t <= 5; ++t) {
    const AdamWStep step = make_step(t, 0.5f);
    cpu_update(layout, want, step);
    const auto count = static_cast<std::int64_t>(list.size());
    adamw(whole.data(), gradients.data(), m.data(), v.data(), blocks.data(), count, step, nullptr, nullptr);
    adamw(split.parameters.data(), split.low.data(), gradients.data(), split_m.data(), split_v.data(), blocks.data(),
          count, step, nullptr, nullptr);
  }
  // The CPU fuses other multiply-adds than the GPU: a few roundings a step.
  expect_near<float>(on_host(whole), want.parameters, "parameters", 1e-6);
  expect_near<float>(on_host(m), want.moment1, "moment1", 1e-6);
  expect_near<float>(on_host(v), want.moment2, "moment2", 1e-6);
  // With split masters nothing is lost: the very bits of the fp32 run.
  EXPECT_EQ(split.joined(), on_host(whole));
  expect_same_bits(split_m, m, "moment1");
  expect_same_bits(split_v, v, "moment2");
  const Floats rounded = on_host(split.parameters), masters = on_host(whole);
  for (std::size_t i = 0; i < masters.size(); ++i)
    ASSERT_LE(std::abs(rounded[i] - masters[i]), 0x1p-8f * std::abs(masters[i])) << i;
  // Padding keeps its bits.
  const State before(layout.elements);
  EXPECT_EQ(masters[static_cast<std::size_t>(layout.elements - 1)], before.parameters.back());
  EXPECT_EQ(on_host(m).back(), before.moment1.back());
}

// Moments and low halves in arenas of another layout, as a rank has them that updates a part: the same bits at other places.
TEST(AdamW, TheStateMayLieElsewhere) {
  const Layout layout = make_layout();
  const State state(layout.elements);
  const std::vector<AdamWBlock> list = adamw_blocks(layout.ranges);
  constexpr std::int64_t kShift = -8192;  // of the blocks behind the first one, which are all that is updated
  std::vector<AdamWBlock> shifted(list.begin() + 1, list.end());
  for (AdamWBlock& block : shifted) block.state = block.begin + kShift;
  const DeviceBuffer<AdamWBlock> plain_blocks(std::vector<AdamWBlock>(list.begin() + 1, list.end())),
      shifted_blocks(shifted);
  const auto count = static_cast<std::int64_t>(shifted.size());
  const auto behind = [&](const Floats& values) { return Floats(values.begin() - kShift, values.end()); };
  const auto same = [&](const Floats& got, const Floats& want) { EXPECT_EQ(got, behind(want)); };
  const DeviceBuffer<float> g(state.gradients), m(state.moment1), v(state.moment2), m2(behind(state.moment1)),
      v2(behind(state.moment2));
  const Split plain(state.parameters), other(state.parameters);
  const DeviceBuffer<std::int16_t> low(static_cast<std::size_t>(layout.elements + kShift));
  check(cudaMemcpy(low.data(), other.low.data() - kShift, low.bytes(), cudaMemcpyDeviceToDevice), "test");
  adamw(plain.parameters.data(), plain.low.data(), g.data(), m.data(), v.data(), plain_blocks.data(), count,
        make_step(3, 1), nullptr, nullptr);
  adamw(other.parameters.data(), low.data(), g.data(), m2.data(), v2.data(), shifted_blocks.data(), count,
        make_step(3, 1), nullptr, nullptr);
  expect_same_bits(other.parameters, plain.parameters, "parameters");
  same(on_host(m2), on_host(m));
  same(on_host(v2), on_host(v));
  // Parameters and gradients as well.
  std::vector<AdamWBlock> moved = shifted;
  for (AdamWBlock& block : moved) block.gradient = block.parameter = block.state;
  const DeviceBuffer<AdamWBlock> moved_blocks(moved);
  const DeviceBuffer<float> all(state.parameters), own(behind(state.parameters)), g3(behind(state.gradients)),
      m3(behind(state.moment1)), v3(behind(state.moment2)), m4(state.moment1), v4(state.moment2);
  adamw(all.data(), g.data(), m4.data(), v4.data(), plain_blocks.data(), count, make_step(3, 1), nullptr, nullptr);
  adamw(own.data(), g3.data(), m3.data(), v3.data(), moved_blocks.data(), count, make_step(3, 1), nullptr, nullptr);
  same(on_host(own), on_host(all));
  same(on_host(m3), on_host(m4));
  const Low got = low.download(), want = plain.low.download();
  EXPECT_TRUE(std::equal(got.begin(), got.end(), want.begin() - kShift));
  // Rounded moments: the random bits are those of the parameter, wherever its moments lie.
  const DeviceBuffer<bf16> rm(stored<bf16>(state.moment1)), rv(stored<bf16>(state.moment2)),
      rm2(stored<bf16>(behind(state.moment1))), rv2(stored<bf16>(behind(state.moment2)));
  adamw(plain.parameters.data(), plain.low.data(), g.data(), rm.data(), rv.data(), plain_blocks.data(), count,
        make_step(4, 1), nullptr, 5, nullptr);
  adamw(other.parameters.data(), low.data(), g.data(), rm2.data(), rv2.data(), shifted_blocks.data(), count,
        make_step(4, 1), nullptr, 5, nullptr);
  expect_same_bits(other.parameters, plain.parameters, "parameters");
  same(on_host(rm2), on_host(rm));
  same(on_host(rv2), on_host(rv));
}

TEST(AdamW, TakesItsScaleFromTheNorm) {
  const Layout layout = make_layout();
  const State state(layout.elements);
  const std::vector<AdamWBlock> list = adamw_blocks(layout.ranges);
  const DeviceBuffer<AdamWBlock> blocks(list);
  const auto run = [&](const GradientNorm* norm, float scale) {
    const DeviceBuffer<float> p(state.parameters), g(state.gradients), m(state.moment1), v(state.moment2);
    adamw(p.data(), g.data(), m.data(), v.data(), blocks.data(), static_cast<std::int64_t>(list.size()),
          make_step(3, scale), norm, nullptr);
    Floats all = on_host(p);
    for (const DeviceBuffer<float>* moment : {&m, &v}) {
      const Floats values = on_host(*moment);
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  };
  const DeviceBuffer<GradientNorm> finite(std::vector<GradientNorm>{{2.0, 0.125f, 0}});
  EXPECT_EQ(run(finite.data(), 1.0f), run(nullptr, 0.125f));
  const DeviceBuffer<GradientNorm> broken(std::vector<GradientNorm>{{NAN, 1.0f, 1}});
  Floats untouched = state.parameters;
  untouched.insert(untouched.end(), state.moment1.begin(), state.moment1.end());
  untouched.insert(untouched.end(), state.moment2.begin(), state.moment2.end());
  EXPECT_EQ(run(broken.data(), 1.0f), untouched);
}

// ---- global norm ------------------------------------------------------------------------------------------------------
GradientNorm gpu_norm(const Floats& gradients, float clip) {
  const DeviceBuffer<float> values(gradients);
  const AdamWRange all{0, static_cast<std::int64_t>(gradients.size()), true};
  const DeviceBuffer<AdamWBlock> blocks(adamw_blocks({&all, 1}));
  const auto count = static_cast<std::int64_t>(blocks.size());
  const DeviceBuffer<double> squares(blocks.size());
  const DeviceBuffer<GradientNorm> result(1), again(1);
  for (const DeviceBuffer<GradientNorm>* target : {&result, &again}) {
    block_squares(squares.data(), values.data(), blocks.data(), count, nullptr);
    gradient_norm(target->data(), squares.data(), nullptr, count, clip, nullptr);
  }
  expect_same_bits(result, again, "gradient norm");
  return result.download()[0];
}

TEST(GradientNorm, FollowsTheCpu) {
  for (const std::int64_t count : {1, 3, 4, 7, 1000, 2'000'003, 9'000'001}) {
    const Floats gradients = random_floats(count, 1, 0.01f);
    const double norm = std::sqrt(cpu::sum_of_squares(gradients.data(), count));
    for (const float clip : {0.0f, 1e-3f, 1.0f, 1e6f}) {
      const GradientNorm got = gpu_norm(gradients, clip);
      EXPECT_NEAR(got.norm, norm, 1e-6 * norm) << count;
      EXPECT_NEAR(got.gradient_scale, clip_factor(norm, static_cast<double>(clip)), 1e-6) << count << " clip " << clip;
      EXPECT_EQ(got.non_finite, 0);
    }
  }
}

// Blocks that begin and end inside a quad, and padding that belongs to no block.
TEST(GradientNorm, SquaresAreThoseOfTheBlocks) {
  const Layout layout = make_layout();
  Floats gradients = random_floats(layout.elements, 1, 0.01f);
  const std::vector<AdamWBlock> list = adamw_blocks(layout.ranges);
  const DeviceBuffer<AdamWBlock> blocks(list);
  const DeviceBuffer<float> values(gradients);
  const DeviceBuffer<double> squares(list.size());
  block_squares(squares.data(), values.data(), blocks.data(), static_cast<std::int64_t>(list.size()), nullptr);
  const std::vector<double> got = squares.download();
  for (std::size_t b = 0; b < list.size(); ++b) {
    double want = 0;
    for (std::int64_t i = list[b].begin; i < list[b].begin + list[b].count; ++i) {
      want += static_cast<double>(gradients[static_cast<std::size_t>(i)]) * gradients[static_cast<std::size_t>(i)];
    }
    EXPECT_NEAR(got[b], want, 1e-6 * want) << b;
  }
}

// Squares that lie in another order are added in the order that is asked for.
TEST(GradientNorm, DoesNotDependOnWhereTheSquaresLie) {
  constexpr std::int64_t kCount = 5001;
  std::vector<double> in_order, shuffled(kCount);
  std::vector<std::int32_t> order;
  for (std::int64_t i = 0; i < kCount; ++i) {
    in_order.push_back(std::exp(static_cast<double>(i % 37) - 20));
    order.push_back(static_cast<std::int32_t>(i * 1234 % kCount));
    shuffled[static_cast<std::size_t>(order.back())] = in_order.back();
  }
  const DeviceBuffer<double> squares(in_order), elsewhere(shuffled);
  const DeviceBuffer<std::int32_t> positions(order);
  const DeviceBuffer<GradientNorm> want(1), got(1);
  gradient_norm(want.data(), squares.data(), nullptr, kCount, 1, nullptr);
  gradient_norm(got.data(), elsewhere.data(), positions.data(), kCount, 1, nullptr);
  expect_same_bits(got, want, "gradient norm");
}

TEST(GradientNorm, SaysWhatIsNotFinite) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    for (const std::size_t where : {std::size_t{0}, std::size_t{5'002}, std::size_t{500'002}}) {
      Floats gradients = random_floats(500'003, 1);
      gradients[where] = bad;
      const GradientNorm got = gpu_norm(gradients, 1);
      EXPECT_EQ(got.non_finite, 1) << bad << " at " << where;
      EXPECT_FALSE(std::isfinite(got.norm));
    }
  }
}

}  // namespace
}  // namespace weft::cuda
