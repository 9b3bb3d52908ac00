// AdamW and the gradient norm's sum of squares. The ten steps against torch.optim.AdamW are in
// operator_vectors_test.cpp.

#include "llmc/cpu/adamw.h"

#include <limits>

#include "test/cpp/gradient_check.h"

namespace weft::cpu {
namespace {

using namespace weft::test;

TEST(AdamW, TenStepsAreTheDefinition) {
  const std::int64_t count = 9001;  // two blocks of 4096 and a ragged one
  AdamWStep step{.learning_rate = 0.01f, .weight_decay = 0.1f, .gradient_scale = 0.37f};
  for (const bool decay : {false, true}) {
    Floats p = random_floats(count, 1), m(count), v(count);
    Doubles p_expected = widen(p), m_expected(count), v_expected(count);
    const double lr = step.learning_rate, beta1 = step.beta1, beta2 = step.beta2, eps = step.eps;
    for (step.step = 1; step.step <= 10; ++step.step) {
      const Floats g = random_floats(count, 100 + static_cast<unsigned>(step.step));
      adamw(p.data(), g.data(), m.data(), v.data(), count, decay, step);
      for (std::int64_t i = 0; i < count; ++i) {
        const double gradient = static_cast<double>(g[i]) * step.gradient_scale;
        if (decay) p_expected[i] *= 1 - lr * step.weight_decay;
        m_expected[i] = beta1 * m_expected[i] + (1 - beta1) * gradient;
        v_expected[i] = beta2 * v_expected[i] + (1 - beta2) * gradient * gradient;
        const double m_hat = m_expected[i] / (1 - std::pow(beta1, step.step));
        const double v_hat = v_expected[i] / (1 - std::pow(beta2, step.step));
        p_expected[i] -= lr * m_hat / (std::sqrt(v_hat) + eps);
      }
    }
    expect_close(p, p_expected, "parameters");
    expect_close(m, m_expected, "first moment");
    expect_close(v, v_expected, "second moment");
  }
}

TEST(AdamW, FirstStepMovesByTheLearningRate) {
  Floats p = {1.0f, 1.0f, 1.0f}, m(3), v(3);
  const Floats g = {1e-3f, -50.0f, 0.0f};
  AdamWStep step;
  step.learning_rate = 0.125f;
  adamw(p.data(), g.data(), m.data(), v.data(), 3, true, step);
  EXPECT_NEAR(p[0], 0.875, 1e-5);
  EXPECT_NEAR(p[1], 1.125, 1e-6);
  EXPECT_EQ(p[2], 1.0f);
}

// In the first step both corrected moments are those of the gradient: the step is lr g / (|g| + eps).
TEST(AdamW, EpsIsThatOfTheStep) {
  for (const float eps : {0.5f, 1e-3f}) {
    Floats p = {1.0f, 1.0f}, m(2), v(2);
    const Floats g = {0.25f, -2.0f};
    AdamWStep step;
    step.learning_rate = 0.125f;
    step.eps = eps;
    adamw(p.data(), g.data(), m.data(), v.data(), 2, false, step);
    EXPECT_NEAR(p[0], 1.0f - 0.125f * 0.25f / (0.25f + eps), 1e-6);
    EXPECT_NEAR(p[1], 1.0f + 0.125f * 2.0f / (2.0f + eps), 1e-6);
  }
}

TEST(AdamW, SameBitsForAnyThreads) {
  const std::int64_t count = 20011;
  const Floats g = random_floats(count, 2);
  expect_same_bits_for_any_threads("adamw", [&] {
    Floats p = random_floats(count, 1), m(count), v(count);
    AdamWStep step;
    step.learning_rate = 0.01f;
    step.weight_decay = 0.1f;
    for (step.step = 1; step.step <= 3; ++step.step) {
      adamw(p.data(), g.data(), m.data(), v.data(), count, true, step);
    }
    return std::vector<Floats>{p, m, v};
  });
}

TEST(SumOfSquares, IsExactEnoughAndTheSameForAnyThreads) {
  for (const std::int64_t count : {0, 1, 7, 4096, 4097, 100003}) {
    const Floats values = random_floats(count, 1);
    long double expected = 0;
    for (const float value : values) expected += static_cast<long double>(value) * value;
    const double got = sum_of_squares(values.data(), count);
    EXPECT_NEAR(got, static_cast<double>(expected), 1e-13 * static_cast<double>(expected));
    const int before = omp_get_max_threads();
    for (int threads = 1; threads <= 3; ++threads) {
      omp_set_num_threads(threads);
      EXPECT_EQ(sum_of_squares(values.data(), count), got);
    }
    omp_set_num_threads(before);
  }
}

TEST(SumOfSquares, SquaresDoNotOverflowFp32) {
  const Floats values = {1e30f, 1e30f};
  EXPECT_NEAR(sum_of_squares(values.data(), 2), 2e60, 1e54);
}

TEST(SumOfSquares, NotFiniteIfAnyValueIsNot) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const std::size_t where : {0u, 4999u, 9999u}) {
      Floats values = random_floats(10000, 1);
      values[where] = bad;
      EXPECT_FALSE(std::isfinite(sum_of_squares(values.data(), 10000)));
    }
  }
}

}  // namespace
}  // namespace weft::cpu
