// rows_matmul_fp8(): codes and scales of rows against the CPU byte for byte, GEMMs of codes against sums that are exact and
// against double, and that a row's bits depend on that row alone.
#include "llmc/cuda/op/gemm/rows_matmul_fp8.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "llmc/base/ceil_div.h"
#include "llmc/base/error.h"
#include "llmc/base/fp8.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/model/fp8_rows.h"
#include "test/gpu/rows_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;

// A matrix of codes with a scale for each row, on both devices. `exact`: codes of 2 and 3, scales that are powers of two. A sum
// of 128 products then has at most 11 bits, which the tensor core keeps; a sum over a long K has more. Otherwise codes of many
// sizes and both signs, and scales with which results are of order one: products of gates are no subnormal numbers of fp16.
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t K, unsigned seed, bool exact)
      : rows_(rows), K_(K), codes_(codes_of(rows * K, seed, exact)), scales_(scales_of(rows, seed + 1, exact)) {
    std::array<float, 256> numbers{};
    for (std::size_t code = 0; code < numbers.size(); ++code)
      numbers[code] = fp8_to_f32(static_cast<std::uint8_t>(code), Fp8Format::e4m3);
    const std::vector<std::uint8_t> codes = codes_.download();
    values_.resize(codes.size());
    for (std::size_t i = 0; i < codes.size(); ++i) values_[i] = numbers[codes[i]];
    host_scales_ = scales_.download();
  }
  std::int64_t rows() const { return rows_; }
  std::int64_t K() const { return K_; }
  Fp8Rows device(std::int64_t first = 0) const { return {codes_.data() + first * K_, scales_.data() + first}; }

  // As the kernels multiply, but for the order of the sum and the bits that it keeps.
  static float scaled_sum(const Matrix& x, std::int64_t row, const Matrix& w, std::int64_t output) {
    double sum = 0;
    const float *a = x.values_.data() + row * x.K_, *b = w.values_.data() + output * w.K_;
    for (std::int64_t k = 0; k < x.K_; ++k) sum += static_cast<double>(a[k]) * static_cast<double>(b[k]);
    return static_cast<float>(sum) * x.host_scales_[static_cast<std::size_t>(row)] *
           w.host_scales_[static_cast<std::size_t>(output)];
  }

 private:
  static std::vector<std::uint8_t> codes_of(std::int64_t count, unsigned seed, bool exact) {
    constexpr std::uint8_t kTwo = 0x40, kThree = 0x44, kLeast = 4 << 3;  // kLeast: 2^-3
    std::mt19937 random(seed);
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(count));
    for (std::uint8_t& code : codes) {
      const auto bits = static_cast<unsigned>(random());
      code = static_cast<std::uint8_t>(exact ? (bits % 2 == 0 ? kTwo : kThree) : (bits & 0x80) | (kLeast + bits % 48));
    }
    return codes;
  }
  static std::vector<float> scales_of(std::int64_t count, unsigned seed, bool exact) {
    std::mt19937 random(seed);
    std::vector<float> scales;
    for (std::int64_t i = 0; i < count; ++i) {
      scales.push_back(exact ? std::ldexp(1.0f, -4 - static_cast<int>(random() % 4))
                             : 0.01f + 0.0001f * static_cast<float>(random() % 1000));
    }
    return scales;
  }

  std::int64_t rows_, K_;
  DeviceBuffer<std::uint8_t> codes_;
  DeviceBuffer<float> scales_;
  Floats values_, host_scales_;
};

std::string description(std::int64_t rows, std::int64_t K, std::int64_t OC, RowsEpilogue epilogue) {
  return std::to_string(rows) + " rows, " + std::to_string(K) + " -> " + std::to_string(OC) + ", epilogue " +
         std::to_string(static_cast<int>(epilogue));
}

// The result for rows [first, first + rows) of x, widened, and a failure where something was written behind it.
template <typename T>
Floats multiply(const Matrix& x, std::int64_t first, std::int64_t rows, const Matrix& weight, RowsEpilogue epilogue,
                const Floats& bias, const Floats& before) {
  constexpr std::size_t kMore = 4096;
  const std::int64_t OC = gated(epilogue) ? weight.rows() / 2 : weight.rows();
  const auto count = static_cast<std::size_t>(rows * OC);
  const DeviceBuffer<T> bias_there = on_device<T>(bias);
  const Stream stream;
  RowsMatmul<T> io;
  io.bias = gated(epilogue) ? nullptr : bias_there.data();
  io.rows = rows, io.K = x.K(), io.OC = OC, io.epilogue = epilogue;
  const auto run = [&](auto& out) {
    rows_matmul_fp8(io, x.device(first), weight.device(), launch_device(), stream);
    stream.synchronize("test");
    auto all = out.download();
    const std::vector<unsigned char> untouched(kMore * sizeof all[0], 0xff);
    EXPECT_EQ(std::memcmp(all.data() + count, untouched.data(), untouched.size()), 0) << "written behind the end";
    all.resize(count);
    return widened(all);
  };
  if (is_fp32(epilogue)) {
    DeviceBuffer<float> out(count + kMore);
    io.out_fp32 = out.data();
    if (epilogue == RowsEpilogue::add) {
      check(cudaMemcpy(out.data(), before.data(), count * sizeof(float), cudaMemcpyHostToDevice), "test");
      check(cudaStreamSynchronize(nullptr), "test");
    }
    return run(out);
  }
  DeviceBuffer<T> out(count + kMore);
  io.out = out.data();
  return run(out);
}

template <typename T>
class Fp8RowsMatmulTest : public ::testing::Test {
 public:
  void SetUp() override {
    if (!rows_matmul_fp8_unsupported_gpu().empty()) GTEST_SKIP() << rows_matmul_fp8_unsupported_gpu();
  }

  // `exact`: sums and scales are, so results have the bits of the reference unless a function is between. Otherwise what the
  // tensor core drops from sums of 128: it keeps about 14 bits of each.
  void compare(std::int64_t rows, std::int64_t K, std::int64_t OC, RowsEpilogue epilogue, bool exact) const {
    SCOPED_TRACE(description(rows, K, OC, epilogue) + (exact ? ", exact" : ""));
    const Matrix x(rows, K, 1, exact), weight(gated(epilogue) ? 2 * OC : OC, K, 3, exact);
    const Floats bias = quarters(OC, 5), before = quarters(rows * OC, 6);
    const Floats got = multiply<T>(x, 0, rows, weight, epilogue, bias, before);
    // What is not exact may be rounded the other way, so there the tolerance has the rounding, of a product's factors too.
    const auto kept = [exact](double v) {
      return exact ? static_cast<double>(widened(stored<T>({static_cast<float>(v)}))[0]) : v;
    };
    const double of_factors = gated(epilogue) ? 2 * unit_roundoff<T>() : 0;
    // Of large results some outputs of each row, others in the next row.
    constexpr std::int64_t kMostProducts = std::int64_t{1} << 22;
    const std::int64_t step = ceil_div(rows * OC * K, kMostProducts) | 1;
    Floats want, checked;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t c = row % step; c < OC; c += step) {
        const double sum = Matrix::scaled_sum(x, row, weight, c);
        const auto at = static_cast<std::size_t>(row * OC + c);
        double value = sum + static_cast<double>(bias[static_cast<std::size_t>(c)]);
        if (epilogue == RowsEpilogue::gelu) value = 0.5 * value * (1 + std::erf(value / std::sqrt(2.0)));
        if (gated(epilogue)) value = gated_of(epilogue, kept(sum), kept(Matrix::scaled_sum(x, row, weight, OC + c)));
        if (epilogue == RowsEpilogue::add) value += before[at];
        want.push_back(static_cast<float>(epilogue == RowsEpilogue::store ? kept(value) : value));
        checked.push_back(got[at]);
      }
    }
    ASSERT_FALSE(checked.empty());
    const bool function = epilogue == RowsEpilogue::gelu || gated(epilogue);
    if (!exact) return expect_near<T>(checked, want, "fp8", 0x1p-10 + of_factors);
    if (function) return expect_near<T>(checked, want, "exact", 2e-5);
    for (std::size_t i = 0; i < checked.size(); ++i)
      ASSERT_EQ(checked[i], want[i]) << "result " << i << " of those checked";
  }
};

using Types = ::testing::Types<bf16, fp16>;
TYPED_TEST_SUITE(Fp8RowsMatmulTest, Types);

// Every kernel, every epilogue, sizes that fill tiles and stages and do not.
TYPED_TEST(Fp8RowsMatmulTest, EveryEpilogue) {
  for (const RowsEpilogue epilogue : kEpilogues) {
    for (const auto& [rows, K, OC] : std::initializer_list<std::array<std::int64_t, 3>>{{1, 2560, 512},
                                                                                        {3, 16, 8},
                                                                                        {7, 80, 40},
                                                                                        {33, 1008, 104},
                                                                                        {64, 1104, 136},
                                                                                        {65, 528, 200},
                                                                                        {200, 272, 776},
                                                                                        {257, 656, 328}}) {
      for (const bool exact : {true, false}) this->compare(rows, K, OC, epilogue, exact);
    }
  }
}

// Many rows, one split and several, a row of the weight that is not aligned, and sums of more bits than the tensor core keeps.
TYPED_TEST(Fp8RowsMatmulTest, LargeAndOddSizes) {
  for (const std::int64_t rows : {2, 65, 300}) {
    this->compare(rows, 28672, 72, RowsEpilogue::store_fp32, true);
    this->compare(rows, 144, 8200, RowsEpilogue::store_fp32, true);
    this->compare(rows, 144, 5025, RowsEpilogue::store, false);
    this->compare(rows, 96, 8208, RowsEpilogue::swiglu, false);
  }
  this->compare(65, 4096, 8200, RowsEpilogue::store_fp32, true);
  this->compare(2000, 272, 136, RowsEpilogue::store, true);
  for (const std::int64_t rows : {413, 869, 1077, 1111})  // tiles of 128, 160, 184 and 192 rows of x
    this->compare(rows, 144, 8200, RowsEpilogue::store, false);
  this->compare(805, 2128, 5025, RowsEpilogue::add, false);  // tiles of 64 with 3 splits,
  this->compare(605, 2128, 5025, RowsEpilogue::add, false);  // of 128
}

// The rows of a step one by one, in pieces, and all at once, at every place in a tile.
TYPED_TEST(Fp8RowsMatmulTest, ARowsBitsAreItsOwn) {
  using T = TypeParam;
  constexpr std::int64_t kRows = 320;
  for (const auto& [K, OC, epilogue] : std::initializer_list<std::tuple<std::int64_t, std::int64_t, RowsEpilogue>>{
           {2128, 512, RowsEpilogue::store_fp32},
           {4096, 320, RowsEpilogue::add},
           {336, 8200, RowsEpilogue::store},
           {1008, 200, RowsEpilogue::swiglu},
           {272, 10240, RowsEpilogue::gelu},       // tiles of 80 rows
           {272, 14336, RowsEpilogue::swiglu}}) {  // tiles of 224
    const Matrix x(kRows, K, 11, false), weight(gated(epilogue) ? 2 * OC : OC, K, 13, false);
    const Floats bias = random_stored<T>(OC, 15), before = random_floats(kRows * OC, 16);
    const Floats all = multiply<T>(x, 0, kRows, weight, epilogue, bias, before);
    for (const float value : all) ASSERT_TRUE(std::isfinite(value));
    for (const std::int64_t rows : {1, 3, 16, 17, 33, 64, 65, 97, 129, 200, 257}) {
      for (const std::int64_t first : {std::int64_t{0}, kRows - rows}) {
        SCOPED_TRACE(description(rows, K, OC, epilogue) + ", from row " + std::to_string(first));
        const Floats begin(before.begin() + first * OC, before.begin() + (first + rows) * OC);
        const Floats got = multiply<T>(x, first, rows, weight, epilogue, bias, begin);
        ASSERT_EQ(std::memcmp(got.data(), all.data() + first * OC, got.size() * sizeof(float)), 0);
      }
    }
  }
}

// Rows of zeros, of subnormal numbers, of the largest, with an outlier, with a NaN, with -0 and quotients between two codes
// (10.9375 / 0.875 = 12.5, where the product with the reciprocal is 12.500001), with a tiny scale, and of every length that
// has a kernel.
TYPED_TEST(Fp8RowsMatmulTest, CodesAreThoseOfTheCpu) {
  using T = TypeParam;
  constexpr std::int64_t kRows = 9;
  const float largest = std::is_same_v<T, bf16> ? 3.3e38f : 65504.0f, least = std::is_same_v<T, bf16> ? 1e-40f : 6e-8f;
  for (const std::int64_t K : {16, 48, 528, 4096, 4112, 8192, 14336, 16400, 28672, 32768}) {
    Floats x = random_stored<T>(kRows * K, static_cast<unsigned>(K));
    const auto row = [&](std::int64_t r) {
      return std::span(x).subspan(static_cast<std::size_t>(r * K), static_cast<std::size_t>(K));
    };
    std::ranges::fill(row(0), 0.0f);
    for (float& value : row(1)) value *= least;
    row(2)[static_cast<std::size_t>(K - 1)] = largest;
    row(3)[0] = -1000;
    for (float& value : row(4)) value = -value * largest / 8;
    for (float& value : row(5)) value *= 0x1p-12f;
    row(6)[3] = std::numeric_limits<float>::quiet_NaN();
    std::ranges::copy(std::array{392.0f, 10.9375f, -12.6875f, -0.0f}, row(7).begin());
    for (float& value : row(8)) value *= 1e-33f;
    x = widened(stored<T>(x));
    const DeviceBuffer<T> there = on_device<T>(x);
    const DeviceBuffer<std::uint8_t> codes(static_cast<std::size_t>(kRows * K) + 64);
    const DeviceBuffer<float> scales(kRows + 1);
    const Stream stream;
    quantize_rows_fp8(Fp8Rows{codes.data(), scales.data()}, there.data(), kRows, K, launch_device(), stream);
    stream.synchronize("test");
    const std::vector<std::uint8_t> got = codes.download();
    const Floats got_scales = scales.download();
    for (std::size_t i = static_cast<std::size_t>(kRows * K); i < got.size(); ++i) ASSERT_EQ(got[i], 0xff);
    for (std::int64_t r = 0; r < kRows; ++r) {
      float amax = 0;
      for (const float value : row(r)) amax = std::fmax(amax, std::abs(value));
      const float scale = fp8_row_scale(amax);
      ASSERT_EQ(got_scales[static_cast<std::size_t>(r)], scale) << "row " << r << " of " << K;
      for (std::int64_t k = 0; k < K; ++k) {
        const float value = row(r)[static_cast<std::size_t>(k)];
        const std::uint8_t code = got[static_cast<std::size_t>(r * K + k)];
        const std::uint8_t magnitude = code & 0x7f;
        if (std::isnan(value)) {
          ASSERT_EQ(magnitude, 0x7f);
        } else {
          ASSERT_EQ(code, f32_to_fp8(value / scale, Fp8Format::e4m3)) << "row " << r << " of " << K << ": " << value;
        }
      }
    }
  }
}

// A norm that writes codes: those of its output in 16 bits, for every way to spread a row and for few and many rows.
TYPED_TEST(Fp8RowsMatmulTest, NormsWriteTheCodesOfTheirOutput) {
  using T = TypeParam;
  for (const std::int64_t C : {16, 528, 768, 1024, 2048, 4096, 5120, 8192, 16384}) {
    for (const auto& [rows, kind] : std::initializer_list<std::pair<std::int64_t, NormKind>>{
             {3, NormKind::rmsnorm}, {3, NormKind::layernorm}, {301, NormKind::rmsnorm}}) {
      SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(C));
      Floats stream = random_floats(rows * C, static_cast<unsigned>(C));
      stream[static_cast<std::size_t>(C - 1)] = 1000;
      std::fill_n(stream.end() - C, C, 0.0f);
      const DeviceBuffer<float> residual = on_device<float>(stream);
      const DeviceBuffer<T> weight = on_device<T>(random_stored<T>(C, 21)),
                            bias = on_device<T>(random_stored<T>(C, 22));
      const auto bytes = static_cast<std::size_t>(rows * C), count = static_cast<std::size_t>(rows);
      DeviceBuffer<T> out(bytes);
      const DeviceBuffer<std::uint8_t> codes(bytes + 64), want(bytes + 64);
      const DeviceBuffer<float> scales(count + 1), want_scales(count + 1);
      ResidualNormShape shape;
      shape.rows = rows, shape.C = C, shape.kind = kind, shape.eps = 1e-5f;
      ResidualNormForward<T, float> io;
      io.residual = residual.data(), io.weight = weight.data();
      io.bias = kind == NormKind::layernorm ? bias.data() : nullptr;
      io.out = out.data();
      const Stream stream_of_work;
      residual_norm_forward(shape, io, stream_of_work);
      quantize_rows_fp8(Fp8Rows{want.data(), want_scales.data()}, out.data(), rows, C, launch_device(), stream_of_work);
      io.out = nullptr;
      io.row_codes = {codes.data(), scales.data()};
      residual_norm_forward(shape, io, stream_of_work);
      stream_of_work.synchronize("test");
      expect_same_bits(codes, want, "codes");
      expect_same_bits(scales, want_scales, "scales");
    }
  }
  ResidualNormShape shape;
  shape.rows = 1, shape.C = 24;
  ResidualNormForward<T, float> io;
  const DeviceBuffer<float> residual(24);
  io.residual = residual.data();
  io.row_codes = {reinterpret_cast<std::uint8_t*>(residual.data()), residual.data()};
  EXPECT_THROW(residual_norm_forward(shape, io, nullptr), Error) << "rows that are no multiple of 16";
}

// A chain without waiting between the launches, each of which reads what the one before wrote.
TYPED_TEST(Fp8RowsMatmulTest, AChainWaitsForWhatItReads) {
  using T = TypeParam;
  constexpr std::int64_t kWidth = 1024;
  const Matrix up(2 * kWidth, kWidth, 31, false), down(kWidth, 2 * kWidth, 33, false);
  const LaunchDevice device = launch_device();
  const Stream stream;
  for (const std::int64_t rows : {1, 20, 100, 300}) {
    const Floats begin = random_stored<T>(rows * kWidth, 33, 0.01f);
    const auto run = [&](bool pause) {
      DeviceBuffer<T> x = on_device<T>(begin), inner(static_cast<std::size_t>(rows * 2 * kWidth));
      const DeviceBuffer<std::uint8_t> codes(static_cast<std::size_t>(rows * 2 * kWidth));
      const DeviceBuffer<float> scales(static_cast<std::size_t>(rows));
      const Fp8Rows of_x = {codes.data(), scales.data()};
      const auto layer = [&](const T* in, T* out, const Matrix& weight) {
        RowsMatmul<T> io;
        io.out = out, io.K = weight.K(), io.OC = weight.rows(), io.rows = rows;
        quantize_rows_fp8(of_x, in, rows, io.K, device, stream);
        if (pause) stream.synchronize("test");
        rows_matmul_fp8(io, of_x, weight.device(), device, stream);
        if (pause) stream.synchronize("test");
      };
      for (int round = 0; round < 4; ++round) {
        layer(x.data(), inner.data(), up);
        layer(inner.data(), x.data(), down);
      }
      stream.synchronize("test");
      return x;
    };
    const DeviceBuffer<T> want = run(true);
    for (int i = 0; i < 5; ++i) expect_same_bits(run(false), want, "a chain's result");
  }
}

TYPED_TEST(Fp8RowsMatmulTest, FailsOnArgumentsThatItCannotUse) {
  using T = TypeParam;
  const Matrix x(2, 32, 1, true), weight(8, 32, 2, true);
  const DeviceBuffer<T> out(64);
  const auto code_of = [&](const RowsMatmul<T>& io, const Fp8Rows& a, const Fp8Rows& b) {
    try {
      rows_matmul_fp8(io, a, b, launch_device(), nullptr);
    } catch (const Error& error) {
      return error.code();
    }
    return Exit::ok;
  };
  RowsMatmul<T> good;
  good.out = out.data(), good.rows = 2, good.K = 32, good.OC = 8;
  EXPECT_EQ(code_of(good, x.device(), weight.device()), Exit::ok);
  EXPECT_EQ(code_of({}, {}, {}), Exit::ok) << "no rows";
  check(cudaStreamSynchronize(nullptr), "test");
  EXPECT_EQ(code_of(good, {}, weight.device()), Exit::internal);
  EXPECT_EQ(code_of(good, x.device(), {weight.device().codes, nullptr}), Exit::internal);
  EXPECT_EQ(code_of(good, {x.device().codes + 8, x.device().scales}, weight.device()), Exit::internal);
  RowsMatmul<T> bad = good;
  bad.K = 24;
  EXPECT_EQ(code_of(bad, x.device(), weight.device()), Exit::usage);
  bad = good, bad.out = nullptr;
  EXPECT_EQ(code_of(bad, x.device(), weight.device()), Exit::internal);
  bad = good, bad.K2 = 16;
  EXPECT_EQ(code_of(bad, x.device(), weight.device()), Exit::internal);
  bad = good, bad.epilogue = RowsEpilogue::swiglu, bad.OC = 4;
  EXPECT_EQ(code_of(bad, x.device(), weight.device()), Exit::internal);
}

TEST(Fp8RowsMatmul, SaysWhichSizesItHas) {
  EXPECT_EQ(rows_matmul_fp8_unsupported_reason(4096, 4096), "");
  EXPECT_EQ(rows_matmul_fp8_unsupported_reason(40, 64),
            "linear layer in fp8: got 40 inputs, expected a multiple of 16 up to 32768");
  EXPECT_NE(rows_matmul_fp8_unsupported_reason(32784, 64), "");
}

}  // namespace
}  // namespace weft::cuda
