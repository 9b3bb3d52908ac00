// quantized_matmul(): every weight that there is, against rows_matmul() of the same weights (int4: bit for bit) and the CPU, and
// that a row's bits depend on that row alone.
#include "llmc/cuda/op/gemm/quantized_matmul.h"

#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/runtime/stream.h"
#include "test/gpu/quantized_tools.h"
#include "test/gpu/rows_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;

constexpr std::array kFormats = {DType::i8, DType::e4m3, DType::u4};

// A layer whose weight is quantised, and the same with the weights as 16-bit values.
template <typename T>
class Layer {
 public:
  Layer(DType format, std::int64_t K, std::int64_t OC, RowsEpilogue epilogue, std::int64_t K2 = 0, bool exact = false)
      : K_(K),
        K2_(K2),
        OC_(OC),
        epilogue_(epilogue),
        values_(format, has_gate() ? 2 * OC : OC, K, 21, exact),
        values2_(format, OC, K2 > 0 ? K2 : 8, 22, exact),
        packed_(values_, has_gate()),
        packed2_(values2_, false),
        dense_(stored<T>(values_.values())),
        dense2_(stored<T>(values2_.values())),
        bias_(stored<T>(exact ? quarters(OC, 23) : random_floats(OC, 23))),
        bias2_(stored<T>(exact ? quarters(OC, 24) : random_floats(OC, 24))) {}

  bool has_gate() const { return gated(epilogue_); }
  const QuantizedValues& values() const { return values_; }
  const QuantizedValues& values2() const { return values2_; }
  Floats bias() const { return has_gate() ? Floats(static_cast<std::size_t>(OC_)) : on_host(bias_); }
  Floats bias2() const { return on_host(bias2_); }

  Floats quantized(const Floats& x, const Floats& x2, std::int64_t rows, RowsPath path, const Floats& before) const {
    return quantized(x, x2, rows, path, before, device_);
  }
  Floats quantized(const Floats& x, const Floats& x2, std::int64_t rows, RowsPath path, const Floats& before,
                   const LaunchDevice& device) const {
    return run(x, x2, rows, before, [&](const RowsMatmul<T>& io) {
      quantized_matmul(io, packed_.matrix(), packed2_.matrix(), device, stream_, path);
    });
  }
  Floats dense(const Floats& x, const Floats& x2, std::int64_t rows, RowsPath path, const Floats& before) const {
    return run(x, x2, rows, before, [&](RowsMatmul<T> io) {
      io.weight = dense_.data(), io.weight2 = dense2_.data();
      rows_matmul(io, device_, stream_, path);
    });
  }

 private:
  // Results as they lie in memory, widened to fp32, and a failure where something was written behind them.
  template <typename Run>
  Floats run(const Floats& x, const Floats& x2, std::int64_t rows, const Floats& before, const Run& launch) const {
    constexpr std::size_t kMore = 4096;
    const DeviceBuffer<T> first = on_device<T>(x), second = on_device<T>(x2);
    const auto count = static_cast<std::size_t>(rows * OC_);
    RowsMatmul<T> io;
    io.x = first.data();
    io.bias = has_gate() ? nullptr : bias_.data();
    io.rows = rows, io.K = K_, io.OC = OC_, io.epilogue = epilogue_;
    io.x_is_older = rows % 2 == 0;  // it is
    if (K2_ > 0) io.x2 = second.data(), io.bias2 = bias2_.data(), io.K2 = K2_;
    const auto take = [&](auto& buffer) {
      auto all = buffer.download();
      const std::vector<unsigned char> untouched(kMore * sizeof all[0], 0xff);
      EXPECT_EQ(std::memcmp(all.data() + count, untouched.data(), untouched.size()), 0) << "written behind the end";
      all.resize(count);
      return widened(all);
    };
    if (is_fp32(epilogue_)) {
      DeviceBuffer<float> out(count + kMore);
      if (epilogue_ == RowsEpilogue::add) {
        check(cudaMemcpy(out.data(), before.data(), count * sizeof(float), cudaMemcpyHostToDevice), "test");
        check(cudaStreamSynchronize(nullptr), "test");
      }
      io.out_fp32 = out.data();
      launch(io);
      stream_.synchronize("test");
      return take(out);
    }
    DeviceBuffer<T> out(count + kMore);
    io.out = out.data();
    launch(io);
    stream_.synchronize("test");
    return take(out);
  }

  std::int64_t K_, K2_, OC_;
  RowsEpilogue epilogue_;
  QuantizedValues values_, values2_;
  PackedOnDevice packed_, packed2_;
  DeviceBuffer<T> dense_, dense2_, bias_, bias2_;
  LaunchDevice device_ = launch_device();
  Stream stream_;
};

std::string description(DType format, std::int64_t rows, std::int64_t K, std::int64_t K2, std::int64_t OC,
                        RowsEpilogue epilogue, RowsPath path) {
  return std::string(dtype_name(format)) + ", " + std::to_string(rows) + " rows, " + std::to_string(K) + " + " +
         std::to_string(K2) + " -> " + std::to_string(OC) + ", epilogue " + std::to_string(static_cast<int>(epilogue)) +
         (path == RowsPath::portable ? ", portable" : "");
}

template <typename T>
class QuantizedMatmulTest : public ::testing::Test {
 public:
  // int4: rows_matmul() with the weights rounded to T, bit for bit. Otherwise sums are exact, and only GELU, SwiGLU and GeGLU
  // have a tolerance.
  void compare(DType format, std::int64_t rows, std::int64_t K, std::int64_t OC, RowsEpilogue epilogue,
               std::int64_t K2 = 0) const {
    const bool exact = format != DType::u4;
    const Layer<T> layer(format, K, OC, epilogue, K2, exact);
    const Floats x = exact ? quarters(rows * K, 1) : random_stored<T>(rows * K, 1),
                 x2 = exact ? quarters(rows * K2, 2) : random_stored<T>(rows * K2, 2), before = quarters(rows * OC, 3);
    for (const RowsPath path : kPaths) {
      SCOPED_TRACE(description(format, rows, K, K2, OC, epilogue, path));
      const Floats got = layer.quantized(x, x2, rows, path, before);
      if (rows <= 16) {  // on so few multiprocessors that three blocks share one
        const LaunchDevice few{1, launch_device().overlapping};
        EXPECT_EQ(layer.quantized(x, x2, rows, path, before, few), got) << "on one multiprocessor";
      }
      const Floats want =
          exact ? reference(layer, x, x2, rows, K, K2, OC, epilogue, before) : layer.dense(x, x2, rows, path, before);
      if (exact && (epilogue == RowsEpilogue::gelu || gated(epilogue))) {
        expect_near<T>(got, want, "quantised");
        continue;
      }
      ASSERT_EQ(got.size(), want.size());
      for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], want[i]) << "element " << i;
    }
  }

  // A row alone, and the same row first, in the middle and last among others, some of which are NaN.
  void check_invariance(DType format, std::int64_t K, std::int64_t OC, RowsEpilogue epilogue,
                        std::int64_t K2 = 0) const {
    const Layer<T> layer(format, K, OC, epilogue, K2);
    const Floats row = random_stored<T>(K, 7), row2 = random_stored<T>(K2, 8), row_before = random_floats(OC, 9);
    const auto place_at = [](Floats& all, const Floats& one, std::int64_t place) {
      std::copy(one.begin(), one.end(), all.begin() + static_cast<std::ptrdiff_t>(place) * std::ssize(one));
    };
    for (const RowsPath path : kPaths) {
      const Floats alone = layer.quantized(row, row2, 1, path, row_before);
      for (const float value : alone) ASSERT_TRUE(std::isfinite(value));
      for (const std::int64_t rows : {2, 7, 8, 9, 16, 17, 63, 64, 65, 128, 129, 200, 300}) {
        SCOPED_TRACE(description(format, rows, K, K2, OC, epilogue, path));
        Floats x = random_stored<T>(rows * K, 10 + static_cast<unsigned>(rows)), x2 = random_stored<T>(rows * K2, 11),
               before = random_floats(rows * OC, 12);
        for (std::int64_t r = 3; r < rows; r += 7)
          std::fill_n(x.begin() + static_cast<std::ptrdiff_t>(r * K), K, std::numeric_limits<float>::quiet_NaN());
        const std::array places = {std::int64_t{0}, rows / 2, rows - 1};
        for (const std::int64_t place : places)
          place_at(x, row, place), place_at(x2, row2, place), place_at(before, row_before, place);
        const Floats got = layer.quantized(x, x2, rows, path, before);
        for (const std::int64_t place : places) {
          ASSERT_EQ(std::memcmp(got.data() + static_cast<std::size_t>(place * OC), alone.data(),
                                alone.size() * sizeof(float)),
                    0)
              << "at row " << place;
        }
      }
    }
  }

 private:
  static Floats reference(const Layer<T>& layer, const Floats& x, const Floats& x2, std::int64_t rows, std::int64_t K,
                          std::int64_t K2, std::int64_t OC, RowsEpilogue epilogue, const Floats& before) {
    const std::int64_t outputs = layer.values().rows;
    Floats sums(static_cast<std::size_t>(rows * outputs)), sums2(static_cast<std::size_t>(rows * OC)),
        want(static_cast<std::size_t>(rows * OC));
    cpu::matmul_forward(sums.data(), x.data(), layer.values().values().data(), nullptr, rows, K, outputs);
    if (K2 > 0) cpu::matmul_forward(sums2.data(), x2.data(), layer.values2().values().data(), nullptr, rows, K2, OC);
    const Floats bias = layer.bias(), bias2 = layer.bias2();
    const auto kept = [](double v) { return static_cast<double>(widened(stored<T>({static_cast<float>(v)}))[0]); };
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t c = 0; c < OC; ++c) {
        const auto to = static_cast<std::size_t>(row * OC + c), column = static_cast<std::size_t>(c);
        const double sum = sums[static_cast<std::size_t>(row * outputs + c)];
        double value = sum + bias[column];
        if (epilogue == RowsEpilogue::gelu) value = 0.5 * value * (1 + std::erf(value / std::sqrt(2.0)));
        if (gated(epilogue))
          value = gated_of(epilogue, kept(sum), kept(sums[static_cast<std::size_t>(row * outputs + OC + c)]));
        if (epilogue == RowsEpilogue::add) value += before[to];
        if (K2 > 0) value += sums2[to] + bias2[column];
        want[to] = epilogue == RowsEpilogue::store ? static_cast<float>(kept(value)) : static_cast<float>(value);
      }
    }
    return want;
  }
};

using Types = ::testing::Types<bf16, fp16>;
TYPED_TEST_SUITE(QuantizedMatmulTest, Types);

// Each row of x is 1 in one place: the result is the matrix, exactly. 256 of K have every code, 200 end inside a group.
TYPED_TEST(QuantizedMatmulTest, EveryWeightIsInItsPlace) {
  using T = TypeParam;
  for (const DType format : kFormats) {
    for (const auto& [K, OC] : std::initializer_list<std::array<std::int64_t, 2>>{{256, 136}, {200, 64}, {8, 5}}) {
      Floats x(static_cast<std::size_t>(K * K));
      for (std::int64_t k = 0; k < K; ++k) x[static_cast<std::size_t>(k * K + k)] = 1;
      const Layer<T> layer(format, K, OC, RowsEpilogue::add);
      const Floats bias = layer.bias(), before(static_cast<std::size_t>(K * OC));
      for (const RowsPath path : kPaths) {
        SCOPED_TRACE(description(format, K, K, 0, OC, RowsEpilogue::add, path));
        const Floats got = layer.quantized(x, {}, K, path, before);
        for (std::int64_t k = 0; k < K; ++k) {
          for (std::int64_t n = 0; n < OC; ++n) {
            const float value = layer.values().value(n, k),
                        weight = format == DType::u4 ? widened(stored<T>({value}))[0] : value;
            ASSERT_EQ(got[static_cast<std::size_t>(k * OC + n)], weight + bias[static_cast<std::size_t>(n)])
                << "row " << n << ", column " << k;
          }
        }
      }
    }
  }
}

// Sizes that fill a block, a stage, a split and do not.
TYPED_TEST(QuantizedMatmulTest, EveryEpilogue) {
  for (const DType format : kFormats) {
    for (const RowsEpilogue epilogue : kEpilogues) {
      for (const auto& [rows, K, OC] : std::initializer_list<std::array<std::int64_t, 3>>{{1, 2560, 512},
                                                                                          {7, 72, 40},
                                                                                          {8, 1000, 104},
                                                                                          {9, 328, 64},
                                                                                          {64, 1096, 136},
                                                                                          {65, 520, 200},
                                                                                          {200, 264, 776}})
        this->compare(format, rows, K, OC, epilogue);
    }
  }
}
// 8 splits, the ring many times around, one split of many tiles, a vocabulary whose rows are not aligned.
TYPED_TEST(QuantizedMatmulTest, LargeAndOddSizes) {
  for (const DType format : kFormats) {
    for (const std::int64_t rows : {2, 33, 100}) {
      this->compare(format, rows, 4 * 23 * 64 + 24, 520, RowsEpilogue::add);
      this->compare(format, rows, 1480, 8200, RowsEpilogue::store);
      this->compare(format, rows, 136, 5025, RowsEpilogue::store_fp32);
    }
    // Units that are no multiple of 8: rows_matmul() takes another path, with another order.
    if (format == DType::u4) continue;
    for (const RowsEpilogue epilogue : {RowsEpilogue::swiglu, RowsEpilogue::geglu_tanh})
      this->compare(format, 3, 136, 84, epilogue);
  }
}

// int4 with units that are no multiple of 8 and groups that end inside a block: the last rows of gate and up lie beside padding.
TYPED_TEST(QuantizedMatmulTest, Int4SwigluOfOddUnits) {
  using T = TypeParam;
  for (const auto& [rows, K, OC] : std::initializer_list<std::array<std::int64_t, 3>>{{3, 136, 84}, {70, 264, 37}}) {
    const Layer<T> layer(DType::u4, K, OC, RowsEpilogue::swiglu);
    const Floats weights = widened(stored<T>(layer.values().values())), x = random_stored<T>(rows * K, 1);
    const auto kept = [](double v) { return static_cast<double>(widened(stored<T>({static_cast<float>(v)}))[0]); };
    const auto sum = [&](std::int64_t row, std::int64_t output) {
      double total = 0;
      for (std::int64_t k = 0; k < K; ++k) {
        total += static_cast<double>(x[static_cast<std::size_t>(row * K + k)]) *
                 static_cast<double>(weights[static_cast<std::size_t>(output * K + k)]);
      }
      return kept(total);
    };
    Floats want;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t c = 0; c < OC; ++c) {
        const double gate = sum(row, c), up = sum(row, OC + c);
        want.push_back(static_cast<float>(gate / (1 + std::exp(-gate)) * up));
      }
    }
    for (const RowsPath path : kPaths) {
      SCOPED_TRACE(description(DType::u4, rows, K, 0, OC, RowsEpilogue::swiglu, path));
      // Gate and up are rounded before SwiGLU, perhaps to the other neighbour.
      expect_near<T>(layer.quantized(x, {}, rows, path, {}), want, "int4", 4 * unit_roundoff<T>());
    }
  }
}
// Splits with the end of the first input and the beginning of the second, an input shorter than a stage, more splits than
// the first input has stages of its own.
TYPED_TEST(QuantizedMatmulTest, TwoInputs) {
  for (const DType format : kFormats) {
    for (const auto& [rows, K, K2, OC] : std::initializer_list<std::array<std::int64_t, 4>>{{1, 256, 1024, 256},
                                                                                            {3, 72, 1000, 40},
                                                                                            {16, 648, 2536, 2560},
                                                                                            {17, 1000, 8, 200},
                                                                                            {65, 8, 1096, 328},
                                                                                            {200, 136, 264, 9000}})
      this->compare(format, rows, K, OC, RowsEpilogue::add, K2);
  }
}

TYPED_TEST(QuantizedMatmulTest, ARowsBitsAreItsOwn) {
  for (const DType format : kFormats) {
    this->check_invariance(format, 2120, 512, RowsEpilogue::store_fp32);
    this->check_invariance(format, 328, 8200, RowsEpilogue::store);
    this->check_invariance(format, 1000, 200, RowsEpilogue::swiglu);
    this->check_invariance(format, 1000, 200, RowsEpilogue::geglu_tanh);
    this->check_invariance(format, 648, 1280, RowsEpilogue::add, 1336);
  }
}

// A chain without waiting between the launches, each of which reads what the one before wrote.
TYPED_TEST(QuantizedMatmulTest, AChainWaitsForWhatItReads) {
  using T = TypeParam;
  constexpr std::int64_t kWidth = 1024;
  const LaunchDevice device = launch_device();
  const Stream stream;
  for (const DType format : kFormats) {
    const PackedOnDevice up(QuantizedValues(format, 2 * kWidth, kWidth, 31), false),
        down(QuantizedValues(format, kWidth, 2 * kWidth, 32), false);
    for (const std::int64_t rows : {1, 20, 100}) {
      const Floats begin = random_stored<T>(rows * kWidth, 33, 0.01f);
      const auto run = [&](bool pause) {
        DeviceBuffer<T> x = on_device<T>(begin), inner(static_cast<std::size_t>(rows * 2 * kWidth));
        for (int round = 0; round < 4; ++round) {
          RowsMatmul<T> first, second;
          first.x = x.data(), first.out = inner.data(), first.K = kWidth, first.OC = 2 * kWidth;
          second.x = inner.data(), second.out = x.data(), second.K = 2 * kWidth, second.OC = kWidth;
          first.rows = second.rows = rows;
          quantized_matmul(first, up.matrix(), {}, device, stream);
          if (pause) stream.synchronize("test");
          quantized_matmul(second, down.matrix(), {}, device, stream);
          if (pause) stream.synchronize("test");
        }
        stream.synchronize("test");
        return x;
      };
      const DeviceBuffer<T> want = run(true);
      for (int i = 0; i < 5; ++i) expect_same_bits(run(false), want, "a chain's result");
    }
  }
}

TEST(QuantizedMatmul, FailsOnArgumentsThatItCannotUse) {
  const DeviceBuffer<bf16> x(64), out(64);
  const PackedOnDevice int8(QuantizedValues(DType::i8, 8, 16, 1), false),
      int4(QuantizedValues(DType::u4, 8, 16, 2), false);
  const DeviceBuffer<float> residual(64);
  const auto code_of = [](const RowsMatmul<bf16>& io, const PackedMatrix& weight, const PackedMatrix& weight2 = {}) {
    try {
      quantized_matmul(io, weight, weight2, launch_device(), nullptr);
    } catch (const Error& error) {
      return error.code();
    }
    return Exit::ok;
  };
  RowsMatmul<bf16> good;
  good.x = x.data(), good.out = out.data(), good.rows = 2, good.K = 16, good.OC = 8;
  EXPECT_EQ(code_of(good, int8.matrix()), Exit::ok);
  EXPECT_EQ(code_of({}, {}), Exit::ok) << "no rows";
  check(cudaStreamSynchronize(nullptr), "test");
  EXPECT_EQ(code_of(good, {}), Exit::internal);
  EXPECT_EQ(code_of(good, {int8.matrix().blocks, nullptr, DType::i8}), Exit::internal);
  RowsMatmul<bf16> bad = good;
  bad.K = 12;
  EXPECT_EQ(code_of(bad, int8.matrix()), Exit::usage);
  bad = good, bad.x = x.data() + 4;
  EXPECT_EQ(code_of(bad, int8.matrix()), Exit::internal);
  bad = good, bad.out = nullptr;
  EXPECT_EQ(code_of(bad, int8.matrix()), Exit::internal);
  RowsMatmul<bf16> two = good;
  two.epilogue = RowsEpilogue::add, two.out_fp32 = residual.data(), two.x2 = x.data(), two.K2 = 16;
  EXPECT_EQ(code_of(two, int8.matrix(), int8.matrix()), Exit::ok);
  check(cudaStreamSynchronize(nullptr), "test");
  EXPECT_EQ(code_of(two, int8.matrix(), int4.matrix()), Exit::internal);
  bad = two, bad.epilogue = RowsEpilogue::store;
  EXPECT_EQ(code_of(bad, int8.matrix(), int8.matrix()), Exit::internal);
}

}  // namespace
}  // namespace weft::cuda
