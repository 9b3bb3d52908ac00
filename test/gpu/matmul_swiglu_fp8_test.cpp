// The GEMMs on fp8 codes with SwiGLU in their epilogue: bit for bit what cuBLASLt's GEMMs and the passes of fp8.h make of
// the same codes, and the sums themselves against the CPU.
//
// Codes are small multiples of 1/4, so that every sum is exact in 14 bits whatever its order.
#include "llmc/cuda/op/gemm/matmul_swiglu_fp8.h"

#include <array>
#include <cmath>
#include <random>
#include <string>

#include "llmc/cpu/matmul.h"
#include "llmc/cuda/runtime/stream.h"
#include "test/gpu/fp8_tools.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;
constexpr std::int64_t kMore = 4096;  // elements behind a result, which must stay as they are

// An operand: codes whose values times 2^exponent are multiples of 1/4 between -1/2 and 1/2.
struct Operand {
  Operand(std::int64_t rows, std::int64_t columns, Fp8Format format, int exponent, unsigned seed)
      : codes(static_cast<std::size_t>(rows * columns)), on_gpu(codes.size()), scale(1) {
    const Floats source = quarters(rows * columns, seed);
    for (std::size_t i = 0; i < codes.size(); ++i) {
      codes[i] = f32_to_fp8(source[i], format);
      values.push_back(scale_of(exponent) * fp8_to_f32(codes[i], format));
    }
    on_gpu.upload(codes);
    scale.upload({scale_of(exponent)});
  }
  Fp8Matrix matrix() const { return {on_gpu.data(), scale.data()}; }

  Codes codes;
  Floats values;
  DeviceBuffer<std::uint8_t> on_gpu;
  DeviceBuffer<float> scale;
};

Written written(std::int64_t count, int exponent) {
  return Written(count, exponent, kMore, {3, 5, 0, 0});
}

using Size = std::array<std::int64_t, 3>;  // N, C, F

// Rows, depths and columns that fill a tile, a step, a ring of steps or a cluster, and that do not; one tile, and several
// a block, in the last case each of more steps than a ring has.
constexpr Size kSizes[] = {{16, 16, 16},     {48, 128, 96},     {128, 144, 112},  {144, 528, 208},
                           {256, 1024, 192}, {272, 1168, 400},  {304, 64, 784},   {1008, 208, 96},
                           {4112, 80, 1616}, {2512, 336, 1008}, {4112, 656, 1616}};

class MatmulSwigluFp8 : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!matmul_swiglu_fp8_computes()) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  }
  const Stream stream_;
  Matmul matmul_{stream_};
};

TEST_F(MatmulSwigluFp8, Forward) {
  for (const auto& [N, C, F] : kSizes) {
    SCOPED_TRACE(std::to_string(N) + " x " + std::to_string(C) + " x " + std::to_string(F));
    const Operand x(N, C, Fp8Format::e4m3, 3, 1), w(2 * F, C, Fp8Format::e4m3, -1, 2);
    const std::int64_t count = 2 * N * F;
    // The largest results saturate, the smallest are flushed.
    constexpr int kExponent = 2;
    const DeviceBuffer<bf16> separate(static_cast<std::size_t>(count + kMore)), fused(separate.size()),
        alone(separate.size());
    const Written want = written(N * F, kExponent), got = written(N * F, kExponent), again = written(N * F, kExponent);
    matmul_.forward_fp8(separate.data(), x.matrix(), w.matrix(), N, C, 2 * F);
    swiglu_forward_fp8(want.rows(), separate.data(), N, F, stream_);
    gate_up_swiglu_fp8(fused.data(), got.rows(), x.matrix(), w.matrix(), N, C, F, stream_);
    gate_up_swiglu_fp8(alone.data(), {}, x.matrix(), w.matrix(), N, C, F, stream_);
    Fp8Target without_counters = again.rows();
    without_counters.counters = nullptr;
    gate_up_swiglu_fp8(alone.data(), without_counters, x.matrix(), w.matrix(), N, C, F, stream_);
    stream_.synchronize("test");
    expect_same_bits(fused, separate, "gate_up");
    expect_same_bits(alone, separate, "gate_up alone");
    EXPECT_EQ(got.codes.download(), want.codes.download());
    EXPECT_EQ(again.codes.download(), want.codes.download());
    EXPECT_EQ(got.counters.download(), want.counters.download());
    EXPECT_EQ(again.counters.download()[0], (Fp8Counters{3, 5, 0, 0}));
    const Fp8Counters counters = got.counters.download()[0];
    if (N * F > 1000 && C > 64) {
      EXPECT_GT(counters.saturated, 3u);
      EXPECT_GT(counters.flushed, 5u);
    }

    Floats sums(static_cast<std::size_t>(count));
    cpu::matmul_forward(sums.data(), x.values.data(), w.values.data(), nullptr, N, C, 2 * F);
    Floats of_gpu = on_host(fused);
    of_gpu.resize(sums.size());
    EXPECT_EQ(of_gpu, widened(stored<bf16>(sums)));
  }
}

// What the epilogue meets: values that all fit, values that are flushed, both with some that saturate or are zero, values
// that are not finite, and products that are infinite while their gradients fit. `spread`, `offset`: of gate and up.
struct Values {
  float spread;
  int gradient, out;  // exponents of the scales
  bool saturates, flushes, finite = true;
  float offset = 0;
};

TEST_F(MatmulSwigluFp8, Backward) {
  for (const Values& v : {Values{0.5f, 10, 5, false, false},
                          {3, -10, -4, false, true},
                          {40, 14, 6, true, true},
                          {0.5f, 10, 5, false, false, false},
                          {0x1p64f, -70, 0, false, false, true, 0x1p67f}}) {
    for (const auto& [N, C, F] : kSizes) {
      SCOPED_TRACE(std::to_string(N) + " x " + std::to_string(C) + " x " + std::to_string(F) + ", spread " +
                   std::to_string(v.spread) + ", 2^" + std::to_string(v.gradient) + (v.finite ? "" : ", not finite"));
      const Operand dout(N, C, Fp8Format::e5m2, -2, 3), w(F, C, Fp8Format::e4m3, 1, 4);
      Floats values = random_stored<bf16>(2 * N * F, 5, v.spread, v.offset);
      if (!v.finite) {
        values[1] = INFINITY;
        values[static_cast<std::size_t>(2 * N * F) - 3] = NAN;
      }
      const DeviceBuffer<bf16> gate_up = on_device<bf16>(values), before = on_device<bf16>(values),
                               dswiglu_out(static_cast<std::size_t>(N * F));
      const Written want = written(2 * N * F, v.gradient), got = written(2 * N * F, v.gradient),
                    want_out = written(N * F, v.out), got_out = written(N * F, v.out),
                    again = written(2 * N * F, v.gradient), again_out = written(N * F, v.out);
      matmul_.input_grad_fp8(dswiglu_out.data(), dout.matrix(), w.matrix(), N, F, C);
      swiglu_backward_fp8(want.target(), want_out.columns(), dswiglu_out.data(), gate_up.data(), N, F, stream_);
      Fp8Target counted = got_out.columns(), without_counters = again.target();
      counted.counters = got_out.counters.data();
      without_counters.counters = nullptr;
      down_input_grad_swiglu_fp8(got.target(), counted, dout.matrix(), w.matrix(), gate_up.data(), N, C, F, stream_);
      down_input_grad_swiglu_fp8(without_counters, again_out.columns(), dout.matrix(), w.matrix(), gate_up.data(), N, C,
                                 F, stream_);
      stream_.synchronize("test");
      EXPECT_EQ(got.codes.download(), want.codes.download());
      EXPECT_EQ(got.transposed.download(), want.transposed.download());
      EXPECT_EQ(got_out.transposed.download(), want_out.transposed.download());
      EXPECT_EQ(got.counters.download(), want.counters.download());
      EXPECT_EQ(got_out.counters.download()[0], (Fp8Counters{3, 5, 0, 0})) << "counted in the forward pass";
      EXPECT_EQ(again.codes.download(), want.codes.download());
      EXPECT_EQ(again.transposed.download(), want.transposed.download());
      EXPECT_EQ(again_out.transposed.download(), want_out.transposed.download());
      EXPECT_EQ(again.counters.download()[0], (Fp8Counters{3, 5, 0, 0}));
      const Fp8Counters counters = got.counters.download()[0];
      EXPECT_EQ(counters.amax_bits < 0x7F800000u, v.finite);
      if (N * F > 1000 && C > 64 && v.finite) {
        const auto few = 5 + static_cast<std::uint64_t>(N * F) / 1000;  // so that most squares have none
        EXPECT_EQ(counters.saturated > (v.saturates ? 3 : few), v.saturates);
        EXPECT_EQ(counters.flushed > (v.flushes ? 5 : few), v.flushes);
      }
      expect_same_bits(gate_up, before, "gate_up, which is read only");

      Floats sums(static_cast<std::size_t>(N * F));
      cpu::matmul_forward(sums.data(), dout.values.data(), w.values.data(), nullptr, N, C, F);
      EXPECT_EQ(on_host(dswiglu_out), widened(stored<bf16>(sums)));
    }
  }
}

// The same bits every time, also with sums that are rounded.
TEST_F(MatmulSwigluFp8, RerunsGiveTheSameBits) {
  constexpr std::int64_t N = 528, C = 1040, F = 1008;
  std::mt19937 generator(9);
  const auto random_codes = [&](std::int64_t count) {
    Codes codes(static_cast<std::size_t>(count));
    for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(generator() & 0xB7);  // none is NaN
    return codes;
  };
  const DeviceBuffer<std::uint8_t> x(random_codes(N * C)), w(random_codes(2 * F * C));
  const DeviceBuffer<float> scale(std::vector<float>{0.125f});
  const auto run = [&] {
    const DeviceBuffer<bf16> gate_up(static_cast<std::size_t>(2 * N * F));
    const Written out = written(N * F, 0), gradient = written(2 * N * F, 3), out_again = written(N * F, 0);
    gate_up_swiglu_fp8(gate_up.data(), out.rows(), {x.data(), scale.data()}, {w.data(), scale.data()}, N, C, F,
                       stream_);
    down_input_grad_swiglu_fp8(gradient.target(), out_again.columns(), {x.data(), scale.data()},
                               {w.data(), scale.data()}, gate_up.data(), N, C, F, stream_);
    stream_.synchronize("test");
    return std::array<Codes, 4>{out.codes.download(), gradient.codes.download(), gradient.transposed.download(),
                                out_again.transposed.download()};
  };
  const auto first = run();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(run(), first);
}

TEST_F(MatmulSwigluFp8, NoRows) {
  gate_up_swiglu_fp8(nullptr, {}, {}, {}, 0, 16, 16, stream_);
  down_input_grad_swiglu_fp8({}, {}, {}, {}, nullptr, 0, 16, 16, stream_);
  stream_.synchronize("test");
}

TEST_F(MatmulSwigluFp8, RefusesOddSizes) {
  for (const auto& [N, C, F] : {Size{24, 16, 16}, {16, 24, 16}, {16, 16, 24}}) {
    EXPECT_THROW(gate_up_swiglu_fp8(nullptr, {}, {}, {}, N, C, F, stream_), Error);
    EXPECT_THROW(down_input_grad_swiglu_fp8({}, {}, {}, {}, nullptr, N, C, F, stream_), Error);
  }
}

TEST_F(MatmulSwigluFp8, RefusesALayoutThatItDoesNotWrite) {
  const Written out = written(256, 0);
  EXPECT_THROW(gate_up_swiglu_fp8(nullptr, out.target(), {}, {}, 16, 16, 16, stream_), Error);
}

}  // namespace
}  // namespace weft::cuda
