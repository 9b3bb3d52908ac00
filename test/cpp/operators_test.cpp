// The small CPU operators: embedding, matmul, RoPE, SwiGLU, GELU, classifier, and the exponential that they use. Each is
// compared with an independent double-precision definition and with central differences of it.

#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <numbers>

#include "llmc/cpu/classifier.h"
#include "llmc/cpu/embedding.h"
#include "llmc/cpu/exp.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/head_norm.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/rope.h"
#include "llmc/cpu/swiglu.h"
#include "llmc/model/train_model.h"
#include "test/cpp/gradient_check.h"

namespace weft::cpu {
namespace {

using namespace weft::test;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// ---- exp --------------------------------------------------------------------------------------------------

TEST(Exp, IsWithinTwoUnitsInTheLastPlace) {
  double worst = 0;
  for (double x = -87.3; x < 88.7; x += 1.7e-4) {
    const float at = static_cast<float>(x);
    const double expected = std::exp(static_cast<double>(at));
    const float rounded = static_cast<float>(expected);
    const double ulp = static_cast<double>(std::nextafter(rounded, kInf)) - static_cast<double>(rounded);
    worst = std::max(worst, std::abs(static_cast<double>(exp_f32(at)) - expected) / ulp);
  }
  EXPECT_LE(worst, 2.0);
}

TEST(Exp, CoversTheWholeRange) {
  EXPECT_EQ(exp_f32(0.0f), 1.0f);
  EXPECT_EQ(exp_f32(-kInf), 0.0f);
  EXPECT_EQ(exp_f32(kInf), kInf);
  EXPECT_EQ(exp_f32(-1e30f), 0.0f);
  EXPECT_EQ(exp_f32(1e30f), kInf);
  EXPECT_TRUE(std::isnan(exp_f32(kNaN)));
  for (float x = -103.9f; x < -87.3f; x += 0.01f) {  // subnormal results
    EXPECT_NEAR(exp_f32(x), std::exp(static_cast<double>(x)), 3e-45) << x;
  }
}

// ---- embedding --------------------------------------------------------------------------------------------

TEST(Embedding, GathersAndAddsBack) {
  const std::int64_t N = 7, C = 5, V = 4;
  const std::vector<std::int32_t> tokens = {3, 0, 3, 1, 3, 0, 1};  // token 2 does not occur
  const Floats weight = random_floats(V * C, 1), dout = random_floats(N * C, 2), before = random_floats(V * C, 3);
  Floats out(N * C), dweight = before, expected = before;
  embedding_forward(out.data(), tokens.data(), weight.data(), N, C);
  embedding_backward(dweight.data(), dout.data(), tokens.data(), N, C);
  for (std::int64_t n = 0; n < N; ++n) {
    for (std::int64_t c = 0; c < C; ++c) {
      EXPECT_EQ(out[n * C + c], weight[tokens[n] * C + c]);
      expected[tokens[n] * C + c] += dout[n * C + c];  // in the order of n: the same bits
    }
  }
  EXPECT_EQ(dweight, expected);

  embedding_forward(out.data(), tokens.data(), weight.data(), N, C, 3);
  dweight = Floats(V * C);
  embedding_backward(dweight.data(), dout.data(), tokens.data(), N, C, 3);
  for (std::int64_t c = 0; c < C; ++c) {
    EXPECT_EQ(out[c], 3 * weight[3 * C + c]);
    EXPECT_FLOAT_EQ(dweight[c], 3 * (dout[C + c] + dout[5 * C + c])) << "of token 0";
  }
}

TEST(Embedding, SameBitsForAnyThreads) {
  const std::int64_t N = 1000, C = 37, V = 11;
  const Floats dout = random_floats(N * C, 1);
  std::vector<std::int32_t> tokens(N);
  for (std::int64_t n = 0; n < N; ++n) tokens[n] = static_cast<std::int32_t>(n * n % V);
  expect_same_bits_for_any_threads("embedding", [&] {
    Floats dweight(V * C);
    embedding_backward(dweight.data(), dout.data(), tokens.data(), N, C);
    return std::vector<Floats>{dweight};
  });
}

// ---- matmul -----------------------------------------------------------------------------------------------

template <typename T>
Doubles naive_matmul(const std::vector<T>& x, const std::vector<T>& weight, const std::vector<T>& bias, std::int64_t N,
                     std::int64_t C, std::int64_t OC) {
  Doubles out(static_cast<std::size_t>(N * OC));
  for (std::int64_t n = 0; n < N; ++n) {
    for (std::int64_t o = 0; o < OC; ++o) {
      double sum = bias.empty() ? 0.0 : static_cast<double>(bias[o]);
      for (std::int64_t c = 0; c < C; ++c) {
        sum += static_cast<double>(x[n * C + c]) * static_cast<double>(weight[o * C + c]);
      }
      out[n * OC + o] = sum;
    }
  }
  return out;
}

struct MatmulSize {
  std::int64_t N, C, OC;
};

// The plain loops and the form by OpenBLAS have one contract.
struct MatmulForm {
  const char* name;
  decltype(&matmul_forward) forward;
  decltype(&matmul_backward) backward;
};
constexpr MatmulForm kMatmulForms[] = {{"plain", plain::matmul_forward, plain::matmul_backward},
                                       {"BLAS", matmul_forward, matmul_backward}};

class MatmulSizes : public testing::TestWithParam<MatmulSize> {};

TEST_P(MatmulSizes, ForwardIsTheDefinition) {
  const auto [N, C, OC] = GetParam();
  const Floats x = random_floats(N * C, 1), weight = random_floats(OC * C, 2), bias = random_floats(OC, 3);
  const Floats before = random_floats(N * OC, 4);
  for (const bool with_bias : {false, true}) {
    const Doubles expected = naive_matmul(x, weight, with_bias ? bias : Floats{}, N, C, OC);
    Doubles added = expected;
    for (std::size_t i = 0; i < added.size(); ++i) added[i] += static_cast<double>(before[i]);
    const float* const bias_or_null = with_bias ? bias.data() : nullptr;
    for (const MatmulForm& form : kMatmulForms) {
      SCOPED_TRACE(form.name);
      Floats out(N * OC, kNaN);  // = must not read what was there
      form.forward(out.data(), x.data(), weight.data(), bias_or_null, N, C, OC, Accumulate::no);
      expect_close(out, expected, "out");
      out = before;
      form.forward(out.data(), x.data(), weight.data(), bias_or_null, N, C, OC, Accumulate::yes);
      expect_close(out, added, "accumulated out");
    }
  }
}

TEST_P(MatmulSizes, BackwardIsTheDefinition) {
  const auto [N, C, OC] = GetParam();
  const Floats x = random_floats(N * C, 1), weight = random_floats(OC * C, 2), dout = random_floats(N * OC, 3);
  const Floats dx_before = random_floats(N * C, 4), dweight_before = random_floats(OC * C, 5);
  const Floats dbias_before = random_floats(OC, 6);
  Doubles dx(N * C), dweight = widen(dweight_before), dbias = widen(dbias_before);
  for (std::int64_t n = 0; n < N; ++n) {
    for (std::int64_t o = 0; o < OC; ++o) {
      const double d = static_cast<double>(dout[n * OC + o]);
      dbias[o] += d;
      for (std::int64_t c = 0; c < C; ++c) {
        dx[n * C + c] += d * static_cast<double>(weight[o * C + c]);
        dweight[o * C + c] += d * static_cast<double>(x[n * C + c]);
      }
    }
  }
  Doubles dx_added = dx;
  for (std::size_t i = 0; i < dx.size(); ++i) dx_added[i] += static_cast<double>(dx_before[i]);
  for (const MatmulForm& form : kMatmulForms) {
    SCOPED_TRACE(form.name);
    Floats got_dx(N * C, kNaN), got_dweight = dweight_before, got_dbias = dbias_before;
    form.backward(got_dx.data(), got_dweight.data(), got_dbias.data(), dout.data(), x.data(), weight.data(), N, C, OC,
                  Accumulate::no);
    expect_close(got_dx, dx, "dx");
    expect_close(got_dweight, dweight, "dweight");
    expect_close(got_dbias, dbias, "dbias");

    got_dx = dx_before;
    form.backward(got_dx.data(), nullptr, nullptr, dout.data(), x.data(), weight.data(), N, C, OC, Accumulate::yes);
    expect_close(got_dx, dx_added, "accumulated dx");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Odd, MatmulSizes,
    testing::Values(MatmulSize{1, 8, 1}, MatmulSize{1, 1030, 6}, MatmulSize{2, 33, 7}, MatmulSize{3, 192, 65},
                    MatmulSize{4, 16, 9}, MatmulSize{5, 7, 3}, MatmulSize{7, 1030, 129}, MatmulSize{65, 130, 31},
                    MatmulSize{300, 5, 700}, MatmulSize{1000, 24, 17},
                    MatmulSize{4, 70, 13},       // the last N of dot products, four outputs at a time
                    MatmulSize{1300, 33, 1030},  // 6 blocks of 256 rows by 3 of 512 columns, both ragged
                    MatmulSize{515, 1101, 3}));  // several of each in dx and in dweight

TEST(Matmul, GradientsAreCentralDifferences) {
  const std::int64_t N = 3, C = 5, OC = 4;
  const Floats x = random_floats(N * C, 1), weight = random_floats(OC * C, 2), bias = random_floats(OC, 3);
  const Floats dout = random_floats(N * OC, 4);
  Floats dx(N * C), dweight(OC * C), dbias(OC);
  matmul_backward(dx.data(), dweight.data(), dbias.data(), dout.data(), x.data(), weight.data(), N, C, OC);
  const auto loss = [&](const Doubles& at_x, const Doubles& at_weight, const Doubles& at_bias) {
    return weighted_sum(naive_matmul(at_x, at_weight, at_bias, N, C, OC), dout);
  };
  const Doubles x0 = widen(x), w0 = widen(weight), b0 = widen(bias);
  expect_gradient(
      "dx", [&](const Doubles& v) { return loss(v, w0, b0); }, x, dx);
  expect_gradient(
      "dweight", [&](const Doubles& v) { return loss(x0, v, b0); }, weight, dweight);
  expect_gradient(
      "dbias", [&](const Doubles& v) { return loss(x0, w0, v); }, bias, dbias);
}

TEST(Matmul, SameBitsForAnyThreads) {
  for (const std::int64_t N : {1, 3, 37, 700}) {
    const std::int64_t C = 190, OC = 333;
    const Floats x = random_floats(N * C, 1), weight = random_floats(OC * C, 2), bias = random_floats(OC, 3);
    const Floats dout = random_floats(N * OC, 4);
    for (const MatmulForm& form : kMatmulForms) {
      expect_same_bits_for_any_threads(form.name, [&] {
        Floats out(N * OC), dx(N * C), dweight(OC * C), dbias(OC);
        form.forward(out.data(), x.data(), weight.data(), bias.data(), N, C, OC, Accumulate::no);
        form.backward(dx.data(), dweight.data(), dbias.data(), dout.data(), x.data(), weight.data(), N, C, OC,
                      Accumulate::no);
        return std::vector<Floats>{out, dx, dweight, dbias};
      });
    }
  }
}

TEST(Matmul, NoRowsIsNoWork) {
  const Floats weight(12, 1.0f);
  Floats dweight(12, 5.0f), dbias(4, 5.0f);
  matmul_forward(nullptr, nullptr, weight.data(), nullptr, 0, 3, 4);
  float dx = 7;
  matmul_backward(&dx, dweight.data(), dbias.data(), weight.data(), weight.data(), weight.data(), 0, 3, 4);
  EXPECT_EQ(dx, 7.0f);
  EXPECT_EQ(dweight, Floats(12, 5.0f));
  EXPECT_EQ(dbias, Floats(4, 5.0f));
}

TEST(Matmul, NanReachesItsRowOnly) {
  for (const std::int64_t N : {2, 9}) {
    const std::int64_t C = 40, OC = 21;
    Floats x = random_floats(N * C, 1), out(N * OC);
    const Floats weight(OC * C, 0.0f);  // even times zero
    x[C + 3] = kNaN;
    matmul_forward(out.data(), x.data(), weight.data(), nullptr, N, C, OC);
    for (std::int64_t o = 0; o < OC; ++o) {
      EXPECT_FALSE(std::isnan(out[o]));
      EXPECT_TRUE(std::isnan(out[OC + o]));
    }
  }
}

// ---- RoPE -------------------------------------------------------------------------------------------------

RopeTable make_rope_table(std::int64_t positions, std::int64_t rotary_dim, double theta) {
  RopeTable table;
  table.positions = positions;
  table.half = rotary_dim / 2;
  for (std::int64_t p = 0; p < positions; ++p) {
    for (std::int64_t i = 0; i < table.half; ++i) {
      const double angle =
          static_cast<double>(p) * std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim));
      table.cos.push_back(static_cast<float>(std::cos(angle)));
      table.sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return table;
}

// Dimension d turns with its partner half a rotary_dim away, as a multiplication of complex numbers.
Doubles naive_rope(const Doubles& x, const RopeTable& table, std::int64_t B, std::int64_t T, std::int64_t NH,
                   std::int64_t HS, std::int64_t first_position, const std::int32_t* starts = nullptr) {
  Doubles y = x;
  for (std::int64_t row = 0; row < B * T * NH; ++row) {
    const std::int64_t position = first_position + row / NH % T - (starts != nullptr ? starts[row / NH] : 0);
    for (std::int64_t d = 0; d < 2 * table.half; ++d) {
      const std::int64_t i = d % table.half;
      const double c = static_cast<double>(table.cos[position * table.half + i]);
      const double s = static_cast<double>(table.sin[position * table.half + i]);
      const double real = x[row * HS + i], imaginary = x[row * HS + table.half + i];
      y[row * HS + d] = d < table.half ? real * c - imaginary * s : real * s + imaginary * c;
    }
  }
  return y;
}

TEST(Rope, ForwardAndBackwardAreTheDefinition) {
  struct Size {
    std::int64_t B, T, NH, HS, rotary, first;
    std::vector<std::int32_t> starts = {};
  };
  for (const Size& s : {Size{2, 5, 3, 8, 8, 0}, Size{1, 7, 2, 10, 4, 3}, Size{2, 1, 1, 80, 20, 9},
                        Size{2, 5, 3, 8, 8, 0, {0, 0, 2, 3, 3, 0, 1, 1, 1, 4}}}) {
    const std::int32_t* const starts = s.starts.empty() ? nullptr : s.starts.data();
    const RopeTable table = make_rope_table(s.first + s.T, s.rotary, 100.0);
    const Floats x = random_floats(s.B * s.T * s.NH * s.HS, 1), dout = random_floats(s.B * s.T * s.NH * s.HS, 2);
    const auto view = [&](Floats& data) { return HeadView{data.data(), s.T * s.NH * s.HS, s.NH * s.HS, s.HS}; };
    const auto forward = [&](const Doubles& v) { return naive_rope(v, table, s.B, s.T, s.NH, s.HS, s.first, starts); };
    Floats y = x, dx = dout;
    rope_forward(view(y), table, s.B, s.T, s.NH, s.first, starts);
    expect_close(y, forward(widen(x)), "y");
    rope_backward(view(dx), table, s.B, s.T, s.NH, s.first, starts);
    expect_gradient(
        "dx", [&](const Doubles& v) { return weighted_sum(forward(v), dout); }, x, dx);
    rope_backward(view(y), table, s.B, s.T, s.NH, s.first, starts);  // a rotation back
    expect_close(y, x, "there and back");
  }
}

TEST(Rope, TouchesNothingOutsideTheView) {
  const std::int64_t B = 2, T = 3, HS = 4, row = 17;  // one head in rows of 17 values
  const RopeTable table = make_rope_table(T, 2, 100.0);
  const Floats before = random_floats(B * T * row, 1);
  Floats x = before;
  rope_forward(HeadView{x.data() + 6, T * row, row, HS}, table, B, T, 1, 0);
  for (std::int64_t i = 0; i < B * T * row; ++i) {
    const bool turned = (i % row == 6 || i % row == 7) && i / row % T > 0;  // position 0 turns by nothing
    EXPECT_EQ(x[i] != before[i], turned) << i;
  }
}

TEST(Rope, OffsetsAre64Bit) {
  // The second sequence lies 3 * 2^30 elements, 12 GiB, after the first; only the pages in use get memory.
  const std::int64_t stride = std::int64_t{3} << 30;
  const std::size_t bytes = static_cast<std::size_t>(stride + 8) * sizeof(float);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no 12 GiB of address space";
  auto* x = static_cast<float*>(memory);
  x[stride] = 1.0f;
  rope_forward(HeadView{x, stride, 8, 8}, make_rope_table(2, 8, 100.0), 2, 1, 1, 1);
  EXPECT_FLOAT_EQ(x[stride], std::cos(1.0f));
  EXPECT_FLOAT_EQ(x[stride + 4], std::sin(1.0f));
  munmap(memory, bytes);
}

// ---- norms of heads -----------------------------------------------------------------------------------------

Doubles naive_head_norm(const Doubles& x, const Doubles& weight, std::int64_t heads, std::int64_t HS, double eps) {
  Doubles y(x.size());
  for (std::int64_t h = 0; h < heads; ++h) {
    double squares = 0;
    for (std::int64_t d = 0; d < HS; ++d) squares += x[h * HS + d] * x[h * HS + d];
    const double r = 1 / std::sqrt(squares / static_cast<double>(HS) + eps);
    for (std::int64_t d = 0; d < HS; ++d) y[h * HS + d] = x[h * HS + d] * r * weight[d];
  }
  return y;
}

// Sizes beside the lanes of a sum, and tokens beside the blocks of dweight.
TEST(HeadNorm, ForwardAndBackwardAreTheDefinition) {
  for (const HeadNormShape shape : {HeadNormShape{1, 1, 1, 2, 1e-6f}, HeadNormShape{2, 5, 3, 7, 1e-5f},
                                    HeadNormShape{1, 67, 2, 33, 1e-3f}, HeadNormShape{3, 11, 1, 16, 1e-6f}}) {
    const std::int64_t heads = shape.B * shape.T * shape.heads, row = shape.heads * shape.HS, HS = shape.HS;
    const Floats x = random_floats(heads * HS, 1, 2.0f), w = random_floats(HS, 2, 0.3f, 1.0f);
    const Floats dout = random_floats(heads * HS, 3), before = random_floats(HS, 4);
    const auto view = [&](auto& data) { return HeadViewOf{data.data(), shape.T * row, row, HS}; };
    const auto forward = [&](const Doubles& v, const Doubles& weight) {
      return naive_head_norm(v, weight, heads, HS, static_cast<double>(shape.eps));
    };
    Floats y(x.size()), in_place = x;
    head_norm_forward(shape, view(y), view(x), w.data());
    expect_close(y, forward(widen(x), widen(w)), "y");
    head_norm_forward(shape, view(in_place), view(in_place), w.data());
    EXPECT_EQ(in_place, y);

    Floats dx(x.size()), dweight = before, none(static_cast<std::size_t>(HS));
    head_norm_backward(shape, view(dx), dweight.data(), view(dout), view(x), w.data());
    expect_gradient(
        "dx", [&](const Doubles& v) { return weighted_sum(forward(v, widen(w)), dout); }, x, dx);
    Floats in_place_dx = dout;
    head_norm_backward(shape, view(in_place_dx), none.data(), view(in_place_dx), view(x), w.data());
    EXPECT_EQ(in_place_dx, dx);
    expect_gradient(
        "dweight", [&](const Doubles& v) { return weighted_sum(forward(widen(x), v), dout); }, w, none);
    for (std::int64_t d = 0; d < HS; ++d) EXPECT_FLOAT_EQ(dweight[d], before[d] + none[d]) << "added to";
  }
}

TEST(HeadNorm, AnOffsetIsAddedToTheWeight) {
  const std::int64_t heads = 6, HS = 7;
  const Floats x = random_floats(heads * HS, 1, 2.0f), w = random_floats(HS, 2, 0.3f);
  Doubles sum = widen(w);
  for (double& each : sum) each += 1;
  Floats y(x.size());
  const auto view = [&](auto& data) { return HeadViewOf{data.data(), heads * HS, heads * HS, HS}; };
  const HeadNormShape shape = {1, 1, heads, HS, 1e-5f, 1.0f};
  head_norm_forward(shape, view(y), view(x), w.data());
  expect_close(y, naive_head_norm(widen(x), sum, heads, HS, 1e-5), "y");
  const Floats dout = random_floats(heads * HS, 3);
  Floats dx(x.size()), dweight(w.size());
  head_norm_backward(shape, view(dx), dweight.data(), view(dout), view(x), w.data());
  expect_gradient(
      "dx", [&](const Doubles& v) { return weighted_sum(naive_head_norm(v, sum, heads, HS, 1e-5), dout); }, x, dx);
}

// q and k are parts of wider rows, and a head's bits are its own.
TEST(HeadNorm, BitsDoNotDependOnThreadsOrNeighbours) {
  const std::int64_t T = 70, HS = 24, row = 5 * HS;
  const Floats packed = random_floats(T * row, 1), w = random_floats(HS, 2), dout = random_floats(T * row, 3);
  const auto run = [&](int threads) {
    omp_set_num_threads(threads);
    Floats y = packed, dx = dout, dweight(static_cast<std::size_t>(HS));
    const auto middle = [&](auto& data) { return HeadViewOf{data.data() + HS, T * row, row, HS}; };
    head_norm_forward({1, T, 2, HS, 1e-6f}, middle(y), middle(packed), w.data());
    head_norm_backward({1, T, 2, HS, 1e-6f}, middle(dx), dweight.data(), middle(dout), middle(packed), w.data());
    Floats all = y;
    all.insert(all.end(), dx.begin(), dx.end());
    all.insert(all.end(), dweight.begin(), dweight.end());
    return all;
  };
  const int before = omp_get_max_threads();
  const Floats one = run(1);
  for (const int threads : {2, 3, 8}) EXPECT_EQ(run(threads), one) << threads;
  omp_set_num_threads(before);
  for (std::int64_t i = 0; i < T * row; ++i) {
    const bool inside = i % row >= HS && i % row < 3 * HS;
    EXPECT_EQ(one[static_cast<std::size_t>(i)] != packed[static_cast<std::size_t>(i)], inside) << i;
  }
  Floats alone(packed.begin() + 3 * row + HS, packed.begin() + 3 * row + 2 * HS);
  const HeadView head{alone.data(), HS, HS, HS};
  head_norm_forward({1, 1, 1, HS, 1e-6f}, head, head, w.data());
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), one.begin() + 3 * row + HS));
}

// ---- SwiGLU and GELU --------------------------------------------------------------------------------------

Doubles naive_swiglu(const Doubles& gate_up, std::int64_t N, std::int64_t F) {
  Doubles out(static_cast<std::size_t>(N * F));
  for (std::int64_t n = 0; n < N; ++n) {
    for (std::int64_t f = 0; f < F; ++f) {
      const double gate = gate_up[n * 2 * F + f], up = gate_up[n * 2 * F + F + f];
      out[n * F + f] = gate / (1.0 + std::exp(-gate)) * up;
    }
  }
  return out;
}

TEST(Swiglu, ForwardAndBackwardAreTheDefinition) {
  for (const std::int64_t N : {1, 7}) {
    for (const std::int64_t F : {1, 8, 13}) {
      const Floats x = random_floats(N * 2 * F, 1, 2.0f), dout = random_floats(N * F, 2);
      Floats out(N * F), dx(N * 2 * F), in_place = x;
      swiglu_forward(out.data(), x.data(), N, F);
      expect_close(out, naive_swiglu(widen(x), N, F), "out");
      swiglu_backward(dx.data(), dout.data(), x.data(), N, F);
      expect_gradient(
          "dx", [&](const Doubles& v) { return weighted_sum(naive_swiglu(v, N, F), dout); }, x, dx);
      swiglu_backward(in_place.data(), dout.data(), in_place.data(), N, F);
      EXPECT_EQ(in_place, dx);
    }
  }
}

TEST(Swiglu, LargeGatesAndNan) {
  const Floats x = {-200, 200, -90, kNaN, 1, 1, 1, 1, 1, kNaN};  // N = 1, F = 5
  Floats out(5);
  swiglu_forward(out.data(), x.data(), 1, 5);
  EXPECT_EQ(out[0], 0.0f);
  EXPECT_EQ(out[1], 200.0f);
  EXPECT_NEAR(out[2], 0.0f, 1e-30);
  EXPECT_TRUE(std::isnan(out[3]));
  EXPECT_TRUE(std::isnan(out[4]));
}

TEST(Gelu, ForwardAndBackwardAreTheDefinition) {
  const Floats x = random_floats(1001, 1, 2.0f), dout = random_floats(1001, 2);
  const auto forward = [](const Doubles& v) {
    Doubles y = v;
    for (double& value : y) value *= 0.5 * std::erfc(-value / std::numbers::sqrt2);
    return y;
  };
  Floats out(x.size()), dx(x.size()), in_place = x, gradient_in_place = dout;
  gelu_forward(out.data(), x.data(), 1001);
  gelu_backward(dx.data(), dout.data(), x.data(), 1001);
  expect_close(out, forward(widen(x)), "out");
  expect_gradient(
      "dx", [&](const Doubles& v) { return weighted_sum(forward(v), dout); }, x, dx);
  gelu_forward(in_place.data(), in_place.data(), 1001);
  gelu_backward(gradient_in_place.data(), gradient_in_place.data(), x.data(), 1001);
  EXPECT_EQ(in_place, out);
  EXPECT_EQ(gradient_in_place, dx);
  Floats over_x = x;
  gelu_backward(over_x.data(), dout.data(), over_x.data(), 1001);
  EXPECT_EQ(over_x, dx);
}

TEST(Gelu, IsTheExactOneAndPassesNan) {
  // The tanh approximation gives 0.8411920 and -0.1588080 at +-1.
  const Floats x = {1.0f, -1.0f, kNaN};
  Floats y(3);
  gelu_forward(y.data(), x.data(), 3);
  EXPECT_NEAR(y[0], 0.8413447461, 1e-7);
  EXPECT_NEAR(y[1], -0.1586552539, 1e-7);
  EXPECT_TRUE(std::isnan(y[2]));
}

// Gates from where it is 0 to where it is the gate itself.
TEST(Gelu, TheGateOfGegluIsTheApproximation) {
  for (const std::int64_t N : {1, 7}) {
    for (const std::int64_t F : {1, 8, 13}) {
      const Floats x = random_floats(N * 2 * F, 1, 3.0f);
      const auto geglu = [&](const Doubles& v) {
        Doubles y(static_cast<std::size_t>(N * F));
        for (std::int64_t i = 0; i < N * F; ++i) {
          const double gate = v[i / F * 2 * F + i % F], up = v[i / F * 2 * F + F + i % F];
          const double inner = std::sqrt(2 / std::numbers::pi) * (gate + 0.044715 * gate * gate * gate);
          y[i] = 0.5 * gate * (1 + std::tanh(inner)) * up;
        }
        return y;
      };
      Floats out(static_cast<std::size_t>(N * F));
      geglu_tanh_forward(out.data(), x.data(), N, F);
      expect_close(out, geglu(widen(x)), "out");

      const Floats dout = random_floats(N * F, 2);
      Floats dx(x.size()), over_x = x;
      geglu_tanh_backward(dx.data(), dout.data(), x.data(), N, F);
      expect_gradient(
          "dgate_up", [&](const Doubles& v) { return weighted_sum(geglu(v), dout); }, x, dx);
      geglu_tanh_backward(over_x.data(), dout.data(), over_x.data(), N, F);
      EXPECT_EQ(over_x, dx);
    }
  }
}

// ---- classifier -------------------------------------------------------------------------------------------

double naive_loss(const double* row, std::int64_t V, std::int32_t label) {
  if (label == kIgnoredLabel) return 0;
  double maximum = row[0], sum = 0;
  for (std::int64_t v = 1; v < V; ++v) maximum = std::max(maximum, row[v]);
  for (std::int64_t v = 0; v < V; ++v) sum += std::exp(row[v] - maximum);
  return std::log(sum) + maximum - row[label];
}

class ClassifierVocabulary : public testing::TestWithParam<std::int64_t> {};

TEST_P(ClassifierVocabulary, LossAndGradientAreTheDefinition) {
  const std::int64_t V = GetParam(), N = 5;
  const std::vector<std::int32_t> labels = {0, static_cast<std::int32_t>(V - 1), kIgnoredLabel,
                                            static_cast<std::int32_t>(V / 2), kIgnoredLabel};
  const Floats logits = random_floats(N * V, 1, 3.0f);
  const float scale = 0.25f;
  Floats losses(N, kNaN), gradient = logits, only_losses(N, kNaN), untouched = logits;
  classifier(gradient.data(), losses.data(), labels.data(), N, V, scale, true);
  classifier(untouched.data(), only_losses.data(), labels.data(), N, V, scale, false);
  EXPECT_EQ(untouched, logits);
  EXPECT_EQ(only_losses, losses);
  const auto total = [&](const Doubles& v) {
    double sum = 0;
    for (std::int64_t n = 0; n < N; ++n) sum += naive_loss(v.data() + n * V, V, labels[n]);
    return sum;
  };
  const Doubles wide = widen(logits);
  Doubles expected(N);
  for (std::int64_t n = 0; n < N; ++n) expected[n] = naive_loss(wide.data() + n * V, V, labels[n]);
  expect_close(losses, expected, "losses");
  for (std::int64_t v = 0; v < V; ++v) EXPECT_EQ(gradient[2 * V + v], 0.0f);  // an ignored row
  expect_gradient(
      "logits", [&](const Doubles& v) { return scale * total(v); }, logits, gradient, V > 1000 ? 12 : 100);
}

INSTANTIATE_TEST_SUITE_P(EveryResidue, ClassifierVocabulary,
                         testing::Values(8, 9, 10, 11, 12, 13, 14, 15, 2, 1030, 50257));

TEST(Classifier, LargeLogitsDoNotOverflow) {
  Floats logits = {10000.0f, 9990.0f, -10000.0f}, loss(1);
  const std::int32_t label = 1;
  classifier(logits.data(), loss.data(), &label, 1, 3, 1.0f, true);
  EXPECT_NEAR(loss[0], 10.0 + std::log1p(std::exp(-10.0)), 1e-5);
  EXPECT_EQ(logits[2], 0.0f);
}

// All exponentials but those relative to the largest would be 0.
TEST(Classifier, SmallLogitsDoNotUnderflow) {
  for (const std::int64_t V : {3, 17, 2049}) {
    Floats logits(static_cast<std::size_t>(V), -1000.0f), loss(1);
    const std::int32_t label = 1;
    EXPECT_NEAR(log_softmax(logits.data(), V).loss(-1000.0f), std::log(V), 1e-5);
    classifier(logits.data(), loss.data(), &label, 1, V, 1.0f, true);
    EXPECT_NEAR(loss[0], std::log(V), 1e-5);
    EXPECT_NEAR(logits[0], 1.0 / static_cast<double>(V), 1e-6);
  }
}

TEST(Classifier, NanGivesNan) {
  for (const std::int64_t where : {0, 7, 20}) {
    Floats logits = random_floats(21, 1), loss(1);
    logits[where] = kNaN;
    const std::int32_t label = 3;
    classifier(logits.data(), loss.data(), &label, 1, 21, 1.0f, true);
    EXPECT_TRUE(std::isnan(loss[0]));
    for (const float value : logits) EXPECT_TRUE(std::isnan(value));
  }
}

// The greatest logit of a row in each column in turn, so far above the others that a sum taken without it overflows; then a
// NaN. 1100 columns are more than a block of the sum.
TEST(Classifier, EveryColumnCounts) {
  for (const std::int64_t V : {1, 3, 16, 37, 1100}) {
    Floats logits = random_floats(V * V, 1), losses(V);  // row c has it in column c
    std::vector<std::int32_t> labels;
    for (std::int64_t c = 0; c < V; ++c) {
      logits[c * V + c] = 300.0f;
      labels.push_back(static_cast<std::int32_t>((c + 1) % V));
    }
    Floats gradient = logits, bad = logits;
    classifier(gradient.data(), losses.data(), labels.data(), V, V, 1.0f, true);
    for (std::int64_t c = 0; c < V; ++c) {
      ASSERT_NEAR(losses[c], V == 1 ? 0.0f : 300.0f - logits[c * V + labels[c]], 1e-4) << c << " of " << V;
      ASSERT_EQ(gradient[c * V + c], V == 1 ? 0.0f : 1.0f) << c << " of " << V;
      bad[c * V + c] = kNaN;
    }
    classifier(bad.data(), losses.data(), labels.data(), V, V, 1.0f, true);
    for (std::int64_t c = 0; c < V; ++c) ASSERT_TRUE(std::isnan(losses[c])) << c << " of " << V;
  }
}

TEST(Classifier, SameBitsForAnyThreads) {
  const std::int64_t N = 37, V = 3001;
  const Floats logits = random_floats(N * V, 1);
  const std::vector<std::int32_t> labels(N, 17);
  expect_same_bits_for_any_threads("classifier", [&] {
    Floats gradient = logits, losses(N);
    classifier(gradient.data(), losses.data(), labels.data(), N, V, 1.0f, true);
    return std::vector<Floats>{gradient, losses};
  });
}

}  // namespace
}  // namespace weft::cpu
