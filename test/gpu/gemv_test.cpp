// The GEMVs of one token against sums in double, for every row length of the Pythia suite and some that are odd.
#include "llmc/cuda/op/gemm/gemv.h"

#include <gtest/gtest.h>

#include <cmath>

#include "llmc/base/error.h"
#include "test/gpu/operator_tools.h"

namespace weft::test {
namespace {

using cuda::NormGemv;
using cuda::ResidualGemv;

// Rounding of fp32 sums of K terms, relative to their size.
constexpr double kSumTolerance = 1e-5;

template <typename T>
class CudaGemv : public testing::Test {};
using Types = testing::Types<float, bf16, fp16>;
TYPED_TEST_SUITE(CudaGemv, Types);

// This GPU, with and without launches that overlap their predecessor: older GPUs know only the latter. And one multiprocessor,
// whose blocks get so many rows that they take them in several batches.
std::vector<cuda::LaunchDevice> launch_devices() {
  const cuda::LaunchDevice device = cuda::launch_device();
  std::vector<cuda::LaunchDevice> devices = {{device.multiprocessors, false}, {1, device.overlapping}};
  if (device.overlapping) devices.push_back(device);
  return devices;
}

std::vector<double> gemv(const Floats& weight, const std::vector<double>& x, std::int64_t rows) {
  std::vector<double> out(static_cast<std::size_t>(rows));
  for (std::size_t r = 0; r < out.size(); ++r) {
    for (std::size_t k = 0; k < x.size(); ++k) out[r] += weight[r * x.size() + k] * x[k];
  }
  return out;
}

std::vector<double> layer_norm(const Floats& residual, const Floats& weight, const Floats& bias, double eps) {
  double mean = 0, variance = 0;
  for (const float value : residual) mean += value / static_cast<double>(residual.size());
  for (const float value : residual) variance += (value - mean) * (value - mean) / static_cast<double>(residual.size());
  std::vector<double> out(residual.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = (residual[i] - mean) / std::sqrt(variance + eps) * weight[i] + bias[i];
  }
  return out;
}

double gelu(double x) {
  return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
}

Floats narrowed(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

TYPED_TEST(CudaGemv, NormGemvMatchesDouble) {
  using T = TypeParam;
  struct Case {
    std::int64_t K, first, second;
  };
  for (const Case& c :
       {Case{8, 1, 0}, Case{128, 384, 512}, Case{768, 5, 3}, Case{2560, 333, 1111}, Case{4096, 40, 7},
        Case{5120, 9, 2000}, Case{8040, 30, 5}, Case{8192, 50, 0}, Case{15000, 9, 4}, Case{16384, 21, 10}}) {
    SCOPED_TRACE(testing::Message() << "K " << c.K << " rows " << c.first << " + " << c.second);
    const float deviation = 1.0f / std::sqrt(static_cast<float>(c.K));
    const Floats residual = random_floats(c.K, 1, 3.0f, 2.0f);
    const Floats norm1 = random_stored<T>(c.K, 2, 0.3f, 1.0f), shift1 = random_stored<T>(c.K, 3, 0.3f);
    const Floats norm2 = random_stored<T>(c.K, 4, 0.3f, 1.0f), shift2 = random_stored<T>(c.K, 5, 0.3f);
    const Floats weight1 = random_stored<T>(c.first * c.K, 6, deviation), bias1 = random_stored<T>(c.first, 7);
    const Floats weight2 = random_stored<T>(c.second * c.K, 8, deviation);
    const auto d_norm1 = on_device<T>(norm1), d_shift1 = on_device<T>(shift1), d_norm2 = on_device<T>(norm2),
               d_shift2 = on_device<T>(shift2), d_weight1 = on_device<T>(weight1), d_bias1 = on_device<T>(bias1),
               d_weight2 = on_device<T>(weight2);
    const DeviceBuffer<float> d_residual(residual);
    std::vector<double> want = gemv(weight1, layer_norm(residual, norm1, shift1, 1e-5), c.first);
    for (std::size_t r = 0; r < want.size(); ++r) want[r] += bias1[r];
    const Floats want_wide = narrowed(want);
    for (double& value : want) value = gelu(value);
    const Floats want1 = narrowed(want),
                 want2 = narrowed(gemv(weight2, layer_norm(residual, norm2, shift2, 1e-5), c.second));
    for (const cuda::LaunchDevice& device : launch_devices()) {
      SCOPED_TRACE(testing::Message() << device.multiprocessors << " multiprocessors, overlapping "
                                      << device.overlapping);
      DeviceBuffer<T> out1(static_cast<std::size_t>(c.first)), out2(static_cast<std::size_t>(c.second));
      DeviceBuffer<float> wide(static_cast<std::size_t>(c.first));
      NormGemv<T, T> io;
      io.residual = d_residual.data();
      io.K = c.K;
      io.eps = 1e-5f;
      io.outputs[0] = {
          {d_norm1.data(), d_shift1.data()}, {d_weight1.data(), d_bias1.data()}, c.first, true, out1.data(), nullptr};
      io.outputs[1] = {
          {d_norm2.data(), d_shift2.data()}, {d_weight2.data(), nullptr}, c.second, false, out2.data(), nullptr};
      cuda::norm_gemv(io, device, nullptr);
      io.outputs[0].fp32_out = wide.data();
      io.outputs[0].gelu = false;
      io.outputs[1] = {};
      cuda::norm_gemv(io, device, nullptr);

      expect_near<float>(wide.download(), want_wide, "wide", kSumTolerance);
      expect_near<T>(on_host(out1), want1, "out1", kSumTolerance);
      expect_near<T>(on_host(out2), want2, "out2", kSumTolerance);
    }
  }
}

TYPED_TEST(CudaGemv, ResidualGemvMatchesDouble) {
  using T = TypeParam;
  struct Case {
    std::int64_t first, second, rows;
  };
  for (const Case& c : {Case{8, 0, 1}, Case{128, 512, 128}, Case{96, 264, 7}, Case{0, 3072, 300}, Case{768, 3072, 768},
                        Case{1000, 7208, 61}, Case{2560, 10240, 277}, Case{3000, 13008, 33}, Case{4096, 16384, 133},
                        Case{4000, 20008, 21}, Case{5120, 20480, 50}, Case{10'000, 41'200, 10}}) {
    if ((c.first + c.second) * static_cast<std::int64_t>(sizeof(T)) > cuda::kMaxResidualGemvBytes) continue;
    SCOPED_TRACE(testing::Message() << "K " << c.first << " + " << c.second << " rows " << c.rows);
    const float deviation = 1.0f / std::sqrt(static_cast<float>(c.first + c.second));
    const Floats x1 = random_stored<T>(c.first, 1), x2 = random_stored<T>(c.second, 2);
    const Floats weight1 = random_stored<T>(c.first * c.rows, 3, deviation), bias1 = random_stored<T>(c.rows, 4);
    const Floats weight2 = random_stored<T>(c.second * c.rows, 5, deviation), bias2 = random_stored<T>(c.rows, 6);
    const Floats residual = random_floats(c.rows, 7, 2.0f);
    const auto d_x1 = on_device<T>(x1), d_x2 = on_device<T>(x2), d_weight1 = on_device<T>(weight1),
               d_weight2 = on_device<T>(weight2), d_bias1 = on_device<T>(bias1), d_bias2 = on_device<T>(bias2);
    const std::vector<double> gemv1 = gemv(weight1, {x1.begin(), x1.end()}, c.rows),
                              gemv2 = gemv(weight2, {x2.begin(), x2.end()}, c.rows);
    std::vector<double> want(static_cast<std::size_t>(c.rows));
    for (std::size_t r = 0; r < want.size(); ++r) {
      want[r] = residual[r] + gemv1[r] + gemv2[r];
      if (c.first > 0) want[r] += bias1[r];
      if (c.second > 0 && c.rows % 2 != 0) want[r] += bias2[r];
    }
    for (const cuda::LaunchDevice& device : launch_devices()) {
      SCOPED_TRACE(testing::Message() << device.multiprocessors << " multiprocessors, overlapping "
                                      << device.overlapping);
      const DeviceBuffer<float> d_residual(residual);
      ResidualGemv<T, T> io;
      io.inputs[0] = {d_x1.data(), {d_weight1.data(), d_bias1.data()}, c.first};
      io.inputs[1] = {d_x2.data(), {d_weight2.data(), c.rows % 2 == 0 ? nullptr : d_bias2.data()}, c.second};
      io.residual = d_residual.data();
      io.rows = c.rows;
      cuda::residual_gemv(io, device, nullptr);
      expect_near<float>(d_residual.download(), narrowed(want), "residual", kSumTolerance);
    }
  }
}

TYPED_TEST(CudaGemv, RefusesSizesItCannotHold) {
  using T = TypeParam;
  constexpr std::int64_t kPack = 16 / static_cast<std::int64_t>(sizeof(T)),
                         kMost = cuda::kMaxResidualGemvBytes / static_cast<std::int64_t>(sizeof(T));
  const cuda::LaunchDevice device = cuda::launch_device();
  const auto code_of = [](const auto& launch) {
    try {
      launch();
    } catch (const Error& error) {
      return error.code();
    }
    return Exit::ok;
  };
  for (const std::int64_t K : {kPack - 2, cuda::kMaxNormGemvWidth + kPack}) {
    NormGemv<T, T> io;
    io.K = K;
    io.outputs[0].rows = 1;
    EXPECT_EQ(code_of([&] { cuda::norm_gemv(io, device, nullptr); }), Exit::usage) << K;
  }
  struct Case {
    std::int64_t first, second;
  };
  for (const Case& c : {Case{kPack - 2, 0}, Case{kPack - 2, 2}, Case{kMost + kPack, 0}, Case{kMost, kPack}}) {
    ResidualGemv<T, T> io;
    io.inputs[0].K = c.first;
    io.inputs[1].K = c.second;
    io.rows = 1;
    EXPECT_EQ(code_of([&] { cuda::residual_gemv(io, device, nullptr); }), Exit::usage) << c.first << " + " << c.second;
  }
}

}  // namespace
}  // namespace weft::test
