// What the tests of the GPU operators share: values in a storage type, and comparison with the CPU's fp32.
//
// Tolerance. Both sides start from the same values: fp32 numbers that the storage type holds exactly. The GPU computes
// in fp32 and rounds its result once, so an element may err by the unit roundoff of its type (2^-8 in bf16, 2^-11 in
// fp16) relative to itself, plus what two orders of fp32 arithmetic differ by: 1e-5 of the tensor's largest element, the
// bound that the CPU tests derive. In fp32 only the second part remains, a tenth of the 1e-4 that the GPU is allowed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "llmc/cuda/runtime/error.h"
#include "test/cpp/gradient_check.h"
#include "test/gpu/device_buffer.h"

namespace weft::test {

using bf16 = __nv_bfloat16;
using fp16 = __half;

// Whether the GPU's tensor cores take fp8.
inline bool has_fp8() {
  return 10 * cuda::device_attribute(cudaDevAttrComputeCapabilityMajor) +
             cuda::device_attribute(cudaDevAttrComputeCapabilityMinor) >=
         89;
}

inline constexpr double kArithmeticTolerance = 1e-5;

template <typename T>
constexpr double unit_roundoff() {
  if constexpr (std::is_same_v<T, bf16>) return 0x1p-8;
  if constexpr (std::is_same_v<T, fp16>) return 0x1p-11;
  return 0x1p-24;
}

template <typename T>
std::vector<T> stored(const Floats& values) {
  std::vector<T> result(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if constexpr (std::is_same_v<T, bf16>) {
      result[i] = __float2bfloat16(values[i]);
    } else if constexpr (std::is_same_v<T, fp16>) {
      result[i] = __float2half(values[i]);
    } else {
      result[i] = values[i];
    }
  }
  return result;
}

template <typename T>
Floats widened(const std::vector<T>& values) {
  Floats result(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if constexpr (std::is_same_v<T, bf16>) {
      result[i] = __bfloat162float(values[i]);
    } else if constexpr (std::is_same_v<T, fp16>) {
      result[i] = __half2float(values[i]);
    } else {
      result[i] = values[i];
    }
  }
  return result;
}

// Multiples of 1/4 from -1/2 to 1/2: sums of their products are exact in fp32, whatever their order.
inline Floats quarters(std::int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = 0.25f * static_cast<float>(static_cast<int>(generator() % 5) - 2);
  return values;
}

// Random values that T holds exactly.
template <typename T>
Floats random_stored(std::int64_t count, unsigned seed, float scale = 1.0f, float offset = 0.0f) {
  return widened(stored<T>(random_floats(count, seed, scale, offset)));
}

template <typename T>
DeviceBuffer<T> on_device(const Floats& values) {
  return DeviceBuffer<T>(stored<T>(values));
}
template <typename T>
Floats on_host(const DeviceBuffer<T>& buffer) {
  return widened(buffer.download());
}

// Keeps the largest error of a tensor over all comparisons of a test, as a share of what is allowed, for the test report.
inline void record_worst(const std::string& what, double share) {
  static std::map<std::string, double> worst;  // by test and tensor
  const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
  double& kept = worst[std::string(test.test_suite_name()) + "." + test.name() + "." + what];
  kept = std::max(kept, share);
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", kept);
  testing::Test::RecordProperty("metric_" + what + "_of_allowed", text);
}

// Every element within the tolerance above; `arithmetic` scales with the tensor's largest element.
template <typename T>
void expect_near(const Floats& got, const Floats& want, const std::string& what,
                 double arithmetic = kArithmeticTolerance) {
  ASSERT_EQ(got.size(), want.size()) << what;
  double largest = 0, worst = 0;
  std::size_t where = 0;
  for (const float value : want) largest = std::max(largest, std::abs(static_cast<double>(value)));
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double allowed = unit_roundoff<T>() * std::abs(static_cast<double>(want[i])) + arithmetic * largest + 1e-30;
    const double ratio = std::abs(static_cast<double>(got[i]) - want[i]) / allowed;
    if (!(ratio <= worst)) worst = ratio, where = i;  // a NaN is the worst
    if (std::isnan(ratio)) break;
  }
  record_worst(what, worst);
  EXPECT_LE(worst, 1.0) << what << ": element " << where << " is " << got[where] << ", expected " << want[where];
}

// Columns of a row of `size` elements at which a test puts something that must be noticed: all of a short row; of a long one
// the first and the last, and between them steps of a prime, which meet every residue of a power of two.
inline std::vector<std::int64_t> telling_columns(std::int64_t size) {
  constexpr std::int64_t kShort = 1100, kLong = 10'000;
  const std::int64_t end = size > kLong ? 32 : 64, step = size > kLong ? 1021 : 67;
  std::vector<std::int64_t> columns;
  for (std::int64_t c = 0; c < size; ++c) {
    if (size <= kShort || c < end || c >= size - end || c % step == 0) columns.push_back(c);
  }
  return columns;
}

template <typename T>
void expect_same_bits(const DeviceBuffer<T>& a, const DeviceBuffer<T>& b, const std::string& what) {
  const std::vector<T> x = a.download(), y = b.download();
  ASSERT_EQ(x.size(), y.size()) << what;
  EXPECT_EQ(std::memcmp(x.data(), y.data(), x.size() * sizeof(T)), 0) << what << " differs in its bits";
}

template <typename T>
std::string type_name() {
  if constexpr (std::is_same_v<T, bf16>) return "bf16";
  if constexpr (std::is_same_v<T, fp16>) return "fp16";
  return "fp32";
}

}  // namespace weft::test
