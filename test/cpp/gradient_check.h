// What the operator tests share: random tensors, comparison with a derived tolerance, gradients by central
// differences, and runs with a chosen number of threads.
//
// Tolerance. Every operator computes in fp32, whose unit roundoff is 6e-8. A sum of n products errs by at
// most n units of the largest partial sum and typically by sqrt(n); with n up to a few thousand that is 3e-6
// of the result's scale. Errors are therefore taken relative to the largest element of the tensor and must
// stay below 1e-5.
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace weft::test {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

inline constexpr double kTolerance = 1e-5;

// Standard normal values times scale, plus offset; the same for the same seed.
inline Floats random_floats(std::int64_t count, unsigned seed, float scale = 1.0f, float offset = 0.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = scale * normal(generator) + offset;
  return values;
}

inline Doubles widen(const Floats& values) {
  return {values.begin(), values.end()};
}

// max |got - expected| / max |expected|; infinity where one is NaN and the other is not, or the sizes differ.
template <typename Expected>
double relative_error(const Floats& got, const Expected& expected) {
  if (got.size() != expected.size()) return INFINITY;
  double error = 0, largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double difference = std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
    if (std::isnan(difference)) return INFINITY;
    error = std::max(error, difference);
    largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
  }
  return error == 0 ? 0 : error / largest;
}

template <typename Expected>
void expect_close(const Floats& got, const Expected& expected, const std::string& what, double tolerance = kTolerance) {
  EXPECT_LT(relative_error(got, expected), tolerance) << what;
}

// Compares the analytic gradient of a scalar function with its central differences, taken in double precision
// where they err by about 1e-9: what is left is the fp32 error of the gradient itself. Looks at up to
// `samples` elements of `at`, evenly spread, and judges them relative to the largest element of the whole
// gradient.
inline void expect_gradient(const std::string& what, const std::function<double(const Doubles&)>& function,
                            const Floats& at, const Floats& gradient, std::size_t samples = 200,
                            double tolerance = kTolerance) {
  ASSERT_EQ(at.size(), gradient.size()) << what;
  double largest = 0;
  for (const float value : gradient) largest = std::max(largest, std::abs(static_cast<double>(value)));
  ASSERT_GT(largest, 0) << what << ": a gradient of zeros shows nothing";
  Doubles x = widen(at);
  const double stride = std::max(1.0, static_cast<double>(x.size()) / static_cast<double>(samples));
  for (double position = 0; position < static_cast<double>(x.size()); position += stride) {
    const auto i = static_cast<std::size_t>(position);
    const double centre = x[i], step = 1e-5 * std::max(1.0, std::abs(centre));
    x[i] = centre + step;
    const double above = function(x);
    x[i] = centre - step;
    const double below = function(x);
    x[i] = centre;
    const double difference = (above - below) / (2 * step);
    ASSERT_NEAR(static_cast<double>(gradient[i]), difference, tolerance * largest) << what << ", element " << i;
  }
}

// The scalar whose gradient is checked: the sum of outputs with fixed random weights, so that dout = weights.
inline double weighted_sum(const Doubles& values, const Floats& weights) {
  double sum = 0;
  for (std::size_t i = 0; i < values.size(); ++i) sum += values[i] * static_cast<double>(weights[i]);
  return sum;
}

// Runs `work` with 1, 2 and 3 threads: the results must have the same bits.
inline void expect_same_bits_for_any_threads(const std::string& what,
                                             const std::function<std::vector<Floats>()>& work) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  const std::vector<Floats> expected = work();
  for (int threads = 2; threads <= 3; ++threads) {
    omp_set_num_threads(threads);
    EXPECT_EQ(work(), expected) << what << " with " << threads << " threads";
  }
  omp_set_num_threads(before);
}

}  // namespace weft::test
