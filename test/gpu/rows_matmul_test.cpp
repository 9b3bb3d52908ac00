// rows_matmul() against the CPU, and its promise that a row's bits depend on that row alone.
//
// Where results are compared with the CPU, operands are small multiples of 1/4, so that every sum is exact in fp32 whatever
// its order: sums must be the CPU's bit for bit, and only GELU, SwiGLU and GeGLU have a tolerance. Where results of one GPU are
// compared with each other, operands are random, so that any other order of a sum shows.
#include "llmc/cuda/op/gemm/rows_matmul.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/runtime/stream.h"
#include "test/gpu/operator_tools.h"
#include "test/gpu/rows_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;

std::string name_of(RowsEpilogue epilogue) {
  constexpr const char* kNames[] = {"store", "gelu", "swiglu", "geglu_tanh", "add", "store_fp32"};
  return kNames[static_cast<int>(epilogue)];
}
std::string name_of(RowsPath path) {
  return path == RowsPath::automatic ? "automatic" : "portable";
}
// As large as needed and a little more before and after, which must stay as it is.
template <typename T>
class Guarded {
 public:
  explicit Guarded(std::int64_t count) : count_(static_cast<std::size_t>(count)), buffer_(count_ + 2 * kMore) {}
  T* data() const { return buffer_.data() + kMore; }
  void upload(const Floats& values) {
    const std::vector<T> kept = stored<T>(values);
    check(cudaMemcpy(data(), kept.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "test: upload");
    check(cudaStreamSynchronize(nullptr), "test: upload");
  }
  // The values, and a failure where something was written beside them.
  std::vector<T> take(const std::string& what) const {
    const std::vector<T> all = buffer_.download();
    const std::vector<unsigned char> untouched(kMore * sizeof(T), 0xff);
    EXPECT_EQ(std::memcmp(all.data(), untouched.data(), untouched.size()), 0)
        << what << ": written before the beginning";
    EXPECT_EQ(std::memcmp(all.data() + kMore + count_, untouched.data(), untouched.size()), 0)
        << what << ": written behind the end";
    return std::vector<T>(all.begin() + kMore, all.begin() + static_cast<std::ptrdiff_t>(kMore + count_));
  }

 private:
  static constexpr std::size_t kMore = 4096;  // elements: keeps the alignment
  std::size_t count_;
  DeviceBuffer<T> buffer_;
};

// Columns `first` to `first + count` of a matrix whose rows have `width`.
Floats columns_of(const Floats& matrix, std::int64_t width, std::int64_t first, std::int64_t count) {
  Floats part;
  for (auto row = matrix.begin(); row != matrix.end(); row += static_cast<std::ptrdiff_t>(width))
    part.insert(part.end(), row + static_cast<std::ptrdiff_t>(first), row + static_cast<std::ptrdiff_t>(first + count));
  return part;
}

// A layer whose weight stays on the GPU, and what it computes. With two inputs, whose rows are one row of K + K2 values, and
// so those of the weight.
template <typename S>
class Layer {
 public:
  Layer(std::int64_t K, std::int64_t OC, RowsEpilogue epilogue, const Floats& weight, const Floats& bias,
        std::int64_t K2 = 0, const Floats& bias2 = {})
      : K_(K),
        K2_(K2),
        OC_(OC),
        epilogue_(epilogue),
        weight_(stored<S>(columns_of(weight, K + K2, 0, K))),
        weight2_(stored<S>(columns_of(weight, K + K2, K, K2))),
        bias_(stored<S>(bias)),
        bias2_(stored<S>(bias2)) {}
  static std::int64_t weight_rows(std::int64_t OC, RowsEpilogue epilogue) { return gated(epilogue) ? 2 * OC : OC; }

  RowsMatmul<S> of(const S* x, std::int64_t rows) const {
    RowsMatmul<S> io;
    io.x = x, io.weight = weight_.data();
    io.bias = bias_.size() > 0 && !gated(epilogue_) ? bias_.data() : nullptr;
    io.rows = rows, io.K = K_, io.OC = OC_, io.epilogue = epilogue_;
    return io;
  }
  Floats run(const Floats& x, std::int64_t rows, RowsPath path, const Floats& before = {}) const {
    return run(on_device<S>(columns_of(x, K_ + K2_, 0, K_)), on_device<S>(columns_of(x, K_ + K2_, K_, K2_)), rows, path,
               before);
  }
  Floats run(const DeviceBuffer<S>& x, std::int64_t rows, RowsPath path, const Floats& before = {}) const {
    return run(x, x, rows, path, before);
  }

 private:
  // Results as they lie in memory, widened to fp32. `before`: of the residual stream.
  Floats run(const DeviceBuffer<S>& x, const DeviceBuffer<S>& x2, std::int64_t rows, RowsPath path,
             const Floats& before) const {
    RowsMatmul<S> io = of(x.data(), rows);
    if (K2_ > 0) {
      io.x2 = x2.data(), io.weight2 = weight2_.data(), io.K2 = K2_;
      io.bias2 = bias2_.size() > 0 ? bias2_.data() : nullptr;
    }
    io.x_is_older = rows % 2 == 0;  // it is
    if (is_fp32(epilogue_)) {
      Guarded<float> out(rows * OC_);
      if (epilogue_ == RowsEpilogue::add) out.upload(before);
      io.out_fp32 = out.data();
      rows_matmul(io, device_, stream_, path);
      stream_.synchronize("test");
      return out.take(name_of(epilogue_));
    }
    const Guarded<S> out(rows * OC_);
    io.out = out.data();
    rows_matmul(io, device_, stream_, path);
    stream_.synchronize("test");
    return widened(out.take(name_of(epilogue_)));
  }

  std::int64_t K_, K2_, OC_;
  RowsEpilogue epilogue_;
  DeviceBuffer<S> weight_, weight2_, bias_, bias2_;
  LaunchDevice device_ = launch_device();
  Stream stream_;
};

float gelu_of(float x) {
  return static_cast<float>(0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0))));
}

template <typename S>
class RowsMatmulTest : public ::testing::Test {
 public:
  void check_values(std::int64_t rows, std::int64_t K, std::int64_t OC, RowsEpilogue epilogue, bool with_bias,
                    std::int64_t K2 = 0, bool with_bias2 = false) const {
    const std::int64_t weight_rows = Layer<S>::weight_rows(OC, epilogue), all = K + K2;
    const bool bias_used = with_bias && !gated(epilogue);
    const Floats x = quarters(rows * all, 1), weight = quarters(weight_rows * all, 2),
                 bias = bias_used ? quarters(OC, 3) : Floats{}, bias2 = with_bias2 ? quarters(OC, 17) : Floats{},
                 before = quarters(rows * OC, 4);
    Floats sums(static_cast<std::size_t>(rows * weight_rows)), want(static_cast<std::size_t>(rows * OC));
    cpu::matmul_forward(sums.data(), x.data(), weight.data(), bias_used ? bias.data() : nullptr, rows, all,
                        weight_rows);
    for (std::size_t i = 0; i < sums.size() && with_bias2; ++i) sums[i] += bias2[i % static_cast<std::size_t>(OC)];
    const Floats kept = widened(stored<S>(sums));
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t c = 0; c < OC; ++c) {
        const auto to = static_cast<std::size_t>(row * OC + c), from = static_cast<std::size_t>(row * weight_rows + c);
        switch (epilogue) {
          case RowsEpilogue::store:
            want[to] = kept[from];
            break;
          case RowsEpilogue::gelu:
            want[to] = gelu_of(sums[from]);
            break;
          case RowsEpilogue::swiglu:
          case RowsEpilogue::geglu_tanh:
            want[to] = static_cast<float>(gated_of(epilogue, kept[from], kept[from + static_cast<std::size_t>(OC)]));
            break;
          case RowsEpilogue::add:
            want[to] = before[to] + sums[from];
            break;
          case RowsEpilogue::store_fp32:
            want[to] = sums[from];
            break;
        }
      }
    }
    const Layer<S> layer(K, OC, epilogue, weight, bias, K2, bias2);
    for (const RowsPath path : kPaths) {
      SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(K) + " + " + std::to_string(K2) + " -> " +
                   std::to_string(OC) + ", " + name_of(epilogue) + (bias_used ? " with bias, " : ", ") + name_of(path));
      const Floats got = layer.run(x, rows, path, before);
      if (epilogue == RowsEpilogue::gelu || gated(epilogue)) {
        expect_near<S>(got, want, name_of(epilogue));
        continue;
      }
      ASSERT_EQ(got.size(), want.size());
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(got[i], want[i]) << "row " << i / static_cast<std::size_t>(OC) << ", column "
                                   << i % static_cast<std::size_t>(OC);
      }
    }
  }

  // A row alone, and the same row first, in the middle and last among others, some of which are NaN and infinite.
  void check_invariance(std::int64_t first_K, std::int64_t OC, RowsEpilogue epilogue, std::int64_t most_rows = 2000,
                        std::int64_t K2 = 0) const {
    const std::int64_t weight_rows = Layer<S>::weight_rows(OC, epilogue), K = first_K + K2;
    const Layer<S> layer(first_K, OC, epilogue, random_floats(weight_rows * K, 5, 0.3f), random_floats(OC, 6), K2,
                         K2 > 0 ? random_floats(OC, 18) : Floats{});
    const Floats row = random_stored<S>(K, 7), row_before = random_floats(OC, 8);
    const Floats others = random_floats((2000 + 89) * K, 10, 2.0f);
    const auto out_width = static_cast<std::size_t>(OC);
    for (const RowsPath path : kPaths) {
      const Floats alone = layer.run(row, 1, path, row_before);
      for (const float value : alone) ASSERT_TRUE(std::isfinite(value));
      for (const std::int64_t rows : {2,  3,  4,   8,   15,  16,  17,  24,  32,  33,  48,  49,  64,   65,  96,
                                      97, 99, 128, 129, 192, 193, 256, 257, 300, 384, 385, 513, 1100, 2000}) {
        if (rows > most_rows) break;
        SCOPED_TRACE(std::to_string(first_K) + " + " + std::to_string(K2) + " -> " + std::to_string(OC) + ", " +
                     name_of(epilogue) + ", " + name_of(path) + ", one of " + std::to_string(rows) + " rows");
        const auto first = static_cast<std::ptrdiff_t>(rows % 89 * K);  // other neighbours each time
        Floats x(others.begin() + first, others.begin() + first + static_cast<std::ptrdiff_t>(rows * K));
        Floats before = epilogue == RowsEpilogue::add ? random_floats(rows * OC, 9) : Floats{};
        for (std::int64_t r = 0; r < rows; ++r) {
          const float all = r % 7 == 3   ? std::numeric_limits<float>::quiet_NaN()
                            : r % 7 == 5 ? std::numeric_limits<float>::infinity()
                                         : 0.0f;
          const auto at = x.begin() + static_cast<std::ptrdiff_t>(r * K);
          if (all != 0) std::fill(at, at + static_cast<std::ptrdiff_t>(K), all);  // NaN != 0, too
        }
        const std::array places = {std::int64_t{0}, rows / 2, rows - 1};
        for (const std::int64_t place : places) {
          std::copy(row.begin(), row.end(), x.begin() + static_cast<std::ptrdiff_t>(place * K));
          if (!before.empty())
            std::copy(row_before.begin(), row_before.end(), before.begin() + static_cast<std::ptrdiff_t>(place * OC));
        }
        const Floats got = layer.run(x, rows, path, before);
        for (const std::int64_t place : places) {
          ASSERT_EQ(std::memcmp(got.data() + static_cast<std::size_t>(place) * out_width, alone.data(),
                                out_width * sizeof(float)),
                    0)
              << "at row " << place;
        }
      }
    }
  }
};

using Types = ::testing::Types<float, bf16, fp16>;
TYPED_TEST_SUITE(RowsMatmulTest, Types);

// Sizes that fill a tile, a stage, a split and do not.
TYPED_TEST(RowsMatmulTest, EveryEpilogueIsTheCpus) {
  for (const RowsEpilogue epilogue : kEpilogues) {
    for (const auto& [rows, K, OC] : std::initializer_list<std::array<std::int64_t, 3>>{{1, 64, 1},
                                                                                        {1, 8, 8},
                                                                                        {1, 2560, 512},
                                                                                        {2, 72, 37},
                                                                                        {3, 1000, 100},
                                                                                        {16, 10240, 104},
                                                                                        {17, 2560, 200},
                                                                                        {33, 520, 64},
                                                                                        {50, 136, 65},
                                                                                        {65, 1096, 328},
                                                                                        {127, 640, 100},
                                                                                        {129, 1000, 136},
                                                                                        {256, 2120, 72},
                                                                                        {300, 1000, 777},
                                                                                        {513, 72, 1000}})
      this->check_values(rows, K, OC, epilogue, rows % 2 == 1);
  }
}

// Sizes that end in the middle of a stage, of a tile and of a split, and a second input shorter than a stage.
TYPED_TEST(RowsMatmulTest, TwoInputsAreTheCpus) {
  for (const auto& [rows, K, K2, OC] : std::initializer_list<std::array<std::int64_t, 4>>{{1, 8, 8, 1},
                                                                                          {1, 256, 1024, 256},
                                                                                          {3, 72, 1000, 37},
                                                                                          {16, 2568, 1016, 104},
                                                                                          {17, 1000, 8, 200},
                                                                                          {33, 136, 520, 1160},
                                                                                          {50, 200, 3000, 2568},
                                                                                          {64, 640, 2560, 640},
                                                                                          {65, 1096, 40, 328},
                                                                                          {100, 8, 1096, 2500},
                                                                                          {128, 136, 1000, 100},
                                                                                          {129, 72, 136, 9000},
                                                                                          {256, 520, 2120, 72},
                                                                                          {300, 1000, 72, 777},
                                                                                          {1100, 136, 264, 2500}})
    this->check_values(rows, K, OC, RowsEpilogue::add, rows % 2 == 1, K2, rows % 3 != 0);
}

// Logits: an odd vocabulary, whose rows are not aligned.
TYPED_TEST(RowsMatmulTest, OddVocabulary) {
  for (const std::int64_t rows : {1, 5, 50, 300})
    this->check_values(rows, 64, 50257 / (rows > 100 ? 8 : 1), RowsEpilogue::store_fp32, false);
}

// The largest grid of the portable path: one more group of 8 outputs would not launch with SwiGLU.
TYPED_TEST(RowsMatmulTest, TheMostOutputs) {
  constexpr std::int64_t kMost = 2'097'120;
  EXPECT_EQ(rows_matmul_unsupported_reason(8, kMost, DType::bf16), "");
  EXPECT_NE(rows_matmul_unsupported_reason(8, kMost + 1, DType::bf16), "");
  this->check_values(1, 8, kMost, RowsEpilogue::swiglu, false);
}

// The ring of stages more than twice around and a ragged end, with one split (OC > 128 tiles) and with several; and more tiles
// than blocks that stay.
TYPED_TEST(RowsMatmulTest, EveryPieceMoreThanTwice) {
  for (const std::int64_t rows : {4, 100}) {
    this->check_values(rows, 23 * 64 + 8, 8200, RowsEpilogue::store_fp32, true);
    this->check_values(rows, 4 * 23 * 64 + 24, 2500, RowsEpilogue::add, true);
  }
  for (const std::int64_t rows : {1, 15, 16, 17, 31, 48, 63, 65, 128}) {  // tiles of 80 and of 224 rows
    this->check_values(rows, 1032, 10200, rows % 2 == 0 ? RowsEpilogue::store : RowsEpilogue::add, true);
    this->check_values(rows, 328, 12760, rows % 2 == 0 ? RowsEpilogue::geglu_tanh : RowsEpilogue::swiglu, false);
    this->check_values(rows, 72, 25390, RowsEpilogue::gelu, rows % 2 == 0);
  }
  for (const std::int64_t rows : {33, 63, 64, 65, 100, 128}) {  // one round of tiles of 96, 128, 160 and 192 rows
    this->check_values(rows, 1032, 9004, RowsEpilogue::store_fp32, true);
    this->check_values(rows, 712, 7000, rows % 2 == 0 ? RowsEpilogue::geglu_tanh : RowsEpilogue::swiglu, false);
    this->check_values(rows, 712, 18004, RowsEpilogue::add, true);
    this->check_values(rows, 520, 25001, RowsEpilogue::gelu, rows % 2 == 0);
  }
  this->check_values(1100, 11 * 64 + 8, 8200, RowsEpilogue::store, true);
  this->check_values(1100, 1032, 2500, RowsEpilogue::add, true);
  this->check_values(2000, 1032, 712, RowsEpilogue::gelu, true);
  this->check_values(700, 264, 3208, RowsEpilogue::swiglu, false);
  this->check_values(700, 264, 3208, RowsEpilogue::geglu_tanh, false);
}

// Rows of x for which large tiles on 132 multiprocessors have 64 and 96 of them, with 5 splits,
constexpr std::int64_t kRowsOfNarrowTiles[] = {313, 549};
// 128, 160, 176, 184 and 192 with two splits, in two rounds and three,
constexpr std::int64_t kRowsOfSplitTiles[] = {510, 1155, 1042, 1063, 1111};
// and 96, 128, 160, 176, 184 and 192 with one, where the consumers take turns: those of 96 in one round, the others in up to
// four.
constexpr std::int64_t kRowsOfTilesInTurns[] = {90, 250, 388, 1155, 1042, 1064, 739};

// Large tiles leave by tensor copies.
TYPED_TEST(RowsMatmulTest, TilesOfEveryWidthAreCopiedOut) {
  const auto epilogue = [](std::int64_t rows) { return rows % 2 == 0 ? RowsEpilogue::gelu : RowsEpilogue::store; };
  for (const std::int64_t rows : kRowsOfNarrowTiles) this->check_values(rows, 1288, 2504, epilogue(rows), true);
  for (const std::int64_t rows : kRowsOfSplitTiles) this->check_values(rows, 520, 7656, epilogue(rows), true);
  for (const std::int64_t rows : kRowsOfTilesInTurns) this->check_values(rows, 712, 8200, epilogue(rows), true);
  for (const std::int64_t rows : {90, 1155})
    this->check_values(rows, 72, 8200, epilogue(rows), true);  // fewer stages than the ring
}

// The same in the other epilogues, of which gated ones are copied out with one split, twice around the ring and more.
TYPED_TEST(RowsMatmulTest, TilesOfEveryWidthInEveryEpilogue) {
  for (const RowsEpilogue epilogue : {RowsEpilogue::swiglu, RowsEpilogue::add, RowsEpilogue::store_fp32}) {
    for (const std::int64_t rows : kRowsOfNarrowTiles)
      this->check_values(rows, 1288, gated(epilogue) ? 1248 : 2500, epilogue, true);
    for (const std::int64_t rows : kRowsOfSplitTiles)
      this->check_values(rows, 520, gated(epilogue) ? 3824 : 7650, epilogue, true);
    for (const std::int64_t rows : kRowsOfTilesInTurns) this->check_values(rows, 712, 8200, epilogue, true);
  }
}

// With 33 to 128 rows of x and several splits: tiles of 96 rows of the weight, of which the last is not whole, with 5 splits, in
// which the ring goes twice around and more, with 2 and with 8; tiles of 112 with 2, gated, and with 3 of one and of two inputs.
TYPED_TEST(RowsMatmulTest, TilesOf96And112RowsInSplits) {
  for (const std::int64_t rows : {33, 48, 49, 64, 65, 96, 97, 127, 128}) {
    const bool odd = rows % 2 == 1;
    this->check_values(rows, 5 * 26 * 64 + 8, 1700, odd ? RowsEpilogue::store_fp32 : RowsEpilogue::add, true);
    this->check_values(rows, 520, 6140, odd ? RowsEpilogue::gelu : RowsEpilogue::store, odd);
    this->check_values(rows, 2120, 200, odd ? RowsEpilogue::swiglu : RowsEpilogue::geglu_tanh, false);
    this->check_values(rows, 520, 3400, odd ? RowsEpilogue::geglu_tanh : RowsEpilogue::swiglu, false);
    this->check_values(rows, 776, 4401, odd ? RowsEpilogue::store : RowsEpilogue::gelu, !odd);
    this->check_values(rows, 456, 4401, RowsEpilogue::add, odd, 520, !odd);
  }
}

// Results and biases at addresses that are no multiple of 16 bytes have the bits of those that are.
TYPED_TEST(RowsMatmulTest, ResultsAndBiasesMayBeginAnywhere) {
  using S = TypeParam;
  constexpr std::int64_t K = 136, OC = 328;
  const DeviceBuffer<S> weight = on_device<S>(random_stored<S>(2 * OC * K, 19, 0.1f));
  const Floats bias = random_stored<S>(OC, 20), shifted_bias = [&] {
    Floats all = {0.0f};
    all.insert(all.end(), bias.begin(), bias.end());
    return all;
  }();
  const DeviceBuffer<S> aligned_bias = on_device<S>(bias), odd_bias = on_device<S>(shifted_bias);
  const Stream stream;
  for (const RowsEpilogue epilogue : kEpilogues) {
    for (const std::int64_t rows : {3, 40, 100}) {
      const DeviceBuffer<S> x = on_device<S>(random_stored<S>(rows * K, 21));
      for (const RowsPath path : kPaths) {
        SCOPED_TRACE(std::to_string(rows) + " rows, " + name_of(epilogue) + ", " + name_of(path));
        const auto run = [&](std::int64_t result_at, bool shifted) {
          const auto count = static_cast<std::size_t>(rows * OC), behind = static_cast<std::size_t>(result_at);
          DeviceBuffer<S> out(count + 8);
          DeviceBuffer<float> wide(count + 8);
          wide.fill_bytes(0);
          RowsMatmul<S> io;
          io.x = x.data(), io.weight = weight.data();
          io.rows = rows, io.K = K, io.OC = OC, io.epilogue = epilogue;
          if (!gated(epilogue)) io.bias = shifted ? odd_bias.data() + 1 : aligned_bias.data();
          if (is_fp32(epilogue)) {
            io.out_fp32 = wide.data() + behind;
          } else {
            io.out = out.data() + behind;
          }
          rows_matmul(io, launch_device(), stream, path);
          stream.synchronize("test");
          const Floats all = is_fp32(epilogue) ? wide.download() : on_host(out);
          const auto first = all.begin() + static_cast<std::ptrdiff_t>(behind);
          return Floats(first, first + static_cast<std::ptrdiff_t>(count));
        };
        const Floats want = run(0, false);
        EXPECT_EQ(run(1, false), want) << "the result";
        EXPECT_EQ(run(0, true), want) << "the bias";
      }
    }
  }
}

// The sizes of the weight have 5, 8 uneven, 1, 3, 2 uneven, 1, 1, 2 and 2 splits; those with one at the end have more tiles of
// 64 rows than multiprocessors, and take others of 224 and of 80. At 33 to 128 rows those with several take tiles of 112 (5, 3
// and the last), 96 (8, the last but one) and 128 rows. The sizes at the end have one split, and one round of tiles of 96, 128,
// 160 and 192 rows.
TYPED_TEST(RowsMatmulTest, ARowsBitsAreItsOwn) {
  this->check_invariance(2560, 2560, RowsEpilogue::store_fp32);
  this->check_invariance(2120, 512, RowsEpilogue::store_fp32);
  this->check_invariance(328, 8200, RowsEpilogue::store_fp32);
  this->check_invariance(1000, 4100, RowsEpilogue::store_fp32);
  this->check_invariance(584, 7650, RowsEpilogue::store_fp32, 513);
  this->check_invariance(200, 25400, RowsEpilogue::store_fp32, 193);
  this->check_invariance(1000, 10200, RowsEpilogue::store_fp32, 513);
  this->check_invariance(584, 6140, RowsEpilogue::store_fp32, 129);
  this->check_invariance(584, 7000, RowsEpilogue::store_fp32, 129);
  for (const std::int64_t OC : {9000, 14000, 18000, 25000})
    this->check_invariance(200, OC, RowsEpilogue::store_fp32, 193);
}
TYPED_TEST(RowsMatmulTest, ARowsBitsAreItsOwnInEveryEpilogue) {
  for (const RowsEpilogue epilogue : kEpilogues) this->check_invariance(1096, 328, epilogue);
  this->check_invariance(136, 5096, RowsEpilogue::swiglu, 193);
  this->check_invariance(136, 10184, RowsEpilogue::gelu, 193);
}
// 5 splits, one of which has the end of the first input and the beginning of the second; 4, and 1.
TYPED_TEST(RowsMatmulTest, ARowsBitsAreItsOwnWithTwoInputs) {
  this->check_invariance(648, 2560, RowsEpilogue::add, 2000, 2536);
  this->check_invariance(1000, 328, RowsEpilogue::add, 2000, 136);
  this->check_invariance(72, 8200, RowsEpilogue::add, 513, 200);
}

// Splits are added in order: 8 of them for this size, each with one value that is not zero. The large ones cancel each other
// and absorb the small ones that come between, so that most orders of the same numbers give another sum.
template <typename S>
void check_order_of_splits() {
  constexpr std::int64_t K = 2048, OC = 64, kSplits = 8;
  std::array<float, kSplits> weights = {0x1p15f, -0x1p15f, 0x1p14f, -0x1p14f, 0x1p-12f, 0x3p-12f, -0x5p-12f, 0x7p-12f};
  std::mt19937 generator(11);
  Floats x(K), weight(OC * K);
  for (std::int64_t s = 0; s < kSplits; ++s) x[static_cast<std::size_t>(s * K / kSplits + 7 * s)] = 0x1p12f;
  Floats want(OC);
  int telling = 0;
  for (std::int64_t c = 0; c < OC; ++c) {
    float sum = 0, reversed = 0;
    std::array<float, kSplits> parts;
    std::shuffle(weights.begin(), weights.end(), generator);
    for (std::int64_t s = 0; s < kSplits; ++s) {
      const float w = weights[static_cast<std::size_t>(s)];
      weight[static_cast<std::size_t>(c * K + s * K / kSplits + 7 * s)] = w;
      parts[static_cast<std::size_t>(s)] = w * 0x1p12f;
    }
    for (std::size_t s = 0; s < kSplits; ++s) sum = s == 0 ? parts[0] : sum + parts[s];
    for (std::size_t s = kSplits; s-- > 0;) reversed += parts[s];
    telling += sum != reversed;
    want[static_cast<std::size_t>(c)] = sum;
  }
  ASSERT_GT(telling, 32);
  const Layer<S> layer(K, OC, RowsEpilogue::store_fp32, weight, {});
  for (const std::int64_t rows : {1, 40, 100, 200, 300}) {
    SCOPED_TRACE(std::to_string(rows) + " rows");
    Floats all;
    for (std::int64_t r = 0; r < rows; ++r) all.insert(all.end(), x.begin(), x.end());
    const Floats got = layer.run(on_device<S>(all), rows, RowsPath::automatic);
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], want[i % OC]) << "element " << i;
  }
}
TEST(RowsMatmul, SplitsAreAddedInOrder) {
  if (hopper_multiprocessors() == 0) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  check_order_of_splits<bf16>();
  check_order_of_splits<fp16>();
}

// Gates from where the product is 0 to where it is gate times up, and on both sides of 0. x has one value that is not 0, so
// that the sums are the weights.
TYPED_TEST(RowsMatmulTest, GatesOfEverySize) {
  using S = TypeParam;
  constexpr std::int64_t K = 64, kHalf = 256, OC = 2 * kHalf;
  Floats gates, weight(2 * OC * K);
  for (std::int64_t c = 0; c < OC; ++c) gates.push_back(static_cast<float>(c - kHalf) / 16);  // -16 to 16
  gates.front() = -1000, gates.back() = 1000;
  for (std::int64_t c = 0; c < OC; ++c) {
    weight[static_cast<std::size_t>(c * K + 5)] = gates[static_cast<std::size_t>(c)];
    weight[static_cast<std::size_t>((OC + c) * K + 5)] = 2;
  }
  Floats x(K);
  x[5] = 1;
  for (const RowsEpilogue epilogue : {RowsEpilogue::swiglu, RowsEpilogue::geglu_tanh}) {
    for (const RowsPath path : kPaths) {
      const Floats got = Layer<S>(K, OC, epilogue, weight, {}).run(x, 1, path);
      for (std::size_t c = 0; c < got.size(); ++c) {
        const double want = gated_of(epilogue, gates[c], 2);
        ASSERT_NEAR(got[c], want, 2 * unit_roundoff<S>() * std::abs(want) + 2e-6)
            << name_of(epilogue) << " of " << gates[c] << ", " << name_of(path);
      }
    }
  }
}

// Random values: nothing is exact, and the sums are the CPU's up to their rounding.
TYPED_TEST(RowsMatmulTest, RandomValues) {
  using S = TypeParam;
  for (const auto& [rows, K, OC] :
       std::initializer_list<std::array<std::int64_t, 3>>{{5, 2560, 300}, {80, 1000, 96}, {400, 2120, 200}}) {
    const Floats x = random_stored<S>(rows * K, 12), weight = random_stored<S>(OC * K, 13);
    Floats want(static_cast<std::size_t>(rows * OC));
    cpu::matmul_forward(want.data(), x.data(), weight.data(), nullptr, rows, K, OC);
    for (const RowsPath path : kPaths) {
      expect_near<float>(Layer<S>(K, OC, RowsEpilogue::store_fp32, weight, {}).run(on_device<S>(x), rows, path), want,
                         "store_fp32");
      expect_near<S>(Layer<S>(K, OC, RowsEpilogue::store, weight, {}).run(on_device<S>(x), rows, path), want, "store");
    }
  }
}

// A chain without waiting between the launches: each layer reads what the one before wrote, and the first again what the
// last wrote, as in a step. The same as with a pause after each.
TYPED_TEST(RowsMatmulTest, AChainWaitsForWhatItReads) {
  using S = TypeParam;
  constexpr std::int64_t kWidth = 1024, kMost = 300;
  constexpr int kRounds = 6;
  const Layer<S> up(kWidth, 2 * kWidth, RowsEpilogue::gelu, random_floats(2 * kWidth * kWidth, 14, 0.03f), {});
  const Layer<S> down(2 * kWidth, kWidth, RowsEpilogue::store, random_floats(2 * kWidth * kWidth, 15, 0.03f), {});
  const LaunchDevice device = launch_device();
  const Stream stream;
  for (const RowsPath path : kPaths) {
    for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{20}, kMost}) {
      SCOPED_TRACE(name_of(path) + ", " + std::to_string(rows) + " rows");
      const Floats begin = random_stored<S>(rows * kWidth, 16);
      const auto run = [&](bool pause) {
        DeviceBuffer<S> x = on_device<S>(begin), inner(static_cast<std::size_t>(rows * 2 * kWidth));
        for (int round = 0; round < kRounds; ++round) {
          RowsMatmul<S> first = up.of(x.data(), rows), second = down.of(inner.data(), rows);
          first.out = inner.data(), second.out = x.data();
          rows_matmul(first, device, stream, path);
          if (pause) stream.synchronize("test");
          rows_matmul(second, device, stream, path);
          if (pause) stream.synchronize("test");
        }
        stream.synchronize("test");
        return x;
      };
      const DeviceBuffer<S> want = run(true);
      for (int i = 0; i < 5; ++i) expect_same_bits(run(false), want, "a chain's result");
    }
  }
}

TYPED_TEST(RowsMatmulTest, NoRows) {
  rows_matmul(RowsMatmul<TypeParam>{}, launch_device(), nullptr);
}

TEST(RowsMatmul, RefusesSizesThatItCannotCompute) {
  EXPECT_EQ(rows_matmul_unsupported_reason(2560, 50257, DType::bf16), "");
  EXPECT_EQ(rows_matmul_unsupported_reason(4, 1, DType::f32), "");
  EXPECT_EQ(rows_matmul_unsupported_reason(12, 8, DType::f16),
            "linear layer: got 12 inputs of type f16, expected a multiple of 8");
  EXPECT_EQ(rows_matmul_unsupported_reason(6, 8, DType::f32),
            "linear layer: got 6 inputs of type f32, expected a multiple of 4");
  EXPECT_EQ(rows_matmul_unsupported_reason(0, 8, DType::bf16),
            "linear layer: got 0 inputs of type bf16, expected a multiple of 8");
  EXPECT_EQ(rows_matmul_unsupported_reason(8, 0, DType::bf16), "linear layer: got 0 outputs, expected 1 to 2097120");
  EXPECT_EQ(rows_matmul_unsupported_reason(8, 8, DType::u16),
            "linear layer: got weights of type u16, expected f32, f16 or bf16");
}

TEST(RowsMatmul, FailsOnArgumentsThatItCannotUse) {
  const DeviceBuffer<bf16> x(64), weight(256), out(64);
  const auto code_of = [](const RowsMatmul<bf16>& io) {
    try {
      rows_matmul(io, launch_device(), nullptr);
    } catch (const Error& error) {
      return error.code();
    }
    return Exit::ok;
  };
  RowsMatmul<bf16> good;
  good.x = x.data(), good.weight = weight.data(), good.out = out.data();
  good.rows = 2, good.K = 8, good.OC = 8;
  EXPECT_EQ(code_of(good), Exit::ok);
  check(cudaStreamSynchronize(nullptr), "test");
  RowsMatmul<bf16> bad = good;
  bad.K = 12;
  EXPECT_EQ(code_of(bad), Exit::usage);
  bad = good, bad.out = nullptr;
  EXPECT_EQ(code_of(bad), Exit::internal);
  bad = good, bad.epilogue = RowsEpilogue::add;  // without a residual stream
  EXPECT_EQ(code_of(bad), Exit::internal);
  bad = good, bad.x = x.data() + 4;
  EXPECT_EQ(code_of(bad), Exit::internal);
  for (const RowsEpilogue epilogue : {RowsEpilogue::swiglu, RowsEpilogue::geglu_tanh}) {
    bad = good, bad.epilogue = epilogue, bad.bias = out.data();
    EXPECT_EQ(code_of(bad), Exit::internal);
  }
  const DeviceBuffer<float> residual(64);
  RowsMatmul<bf16> two = good;
  two.epilogue = RowsEpilogue::add, two.out_fp32 = residual.data();
  two.x2 = x.data(), two.weight2 = weight.data(), two.K2 = 16;
  EXPECT_EQ(code_of(two), Exit::ok);
  check(cudaStreamSynchronize(nullptr), "test");
  bad = two, bad.epilogue = RowsEpilogue::store;  // and nothing is added
  EXPECT_EQ(code_of(bad), Exit::internal);
  bad = two, bad.K2 = 12;
  EXPECT_EQ(code_of(bad), Exit::usage);
  bad = two, bad.weight2 = nullptr;
  EXPECT_EQ(code_of(bad), Exit::internal);
  bad = two, bad.x2 = x.data() + 4;
  EXPECT_EQ(code_of(bad), Exit::internal);
}

}  // namespace
}  // namespace weft::cuda
