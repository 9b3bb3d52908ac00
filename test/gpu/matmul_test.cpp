// The three products of a linear layer against the CPU, and plans that do not depend on timing.
#include "llmc/cuda/matmul.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "device_buffer.h"
#include "llmc/base/dtype.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cuda/stream.h"
#include "llmc/model/compare.h"

namespace weft::cuda {
namespace {

using test::DeviceBuffer;

template <typename T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::f32;
}
template <>
constexpr DType dtype_of<__nv_bfloat16>() {
  return DType::bf16;
}
template <>
constexpr DType dtype_of<__half>() {
  return DType::f16;
}

// Values on the device in T, and the same rounded values in fp32 on the host.
template <typename T>
struct Operand {
  std::vector<float> host;
  DeviceBuffer<T> device;

  Operand(std::int64_t count, unsigned seed) : host(static_cast<std::size_t>(count)), device(host.size()) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> noise(0, 1);
    for (float& value : host) value = noise(generator);
    std::vector<T> stored(host.size());
    convert_from_f32(host.data(), dtype_of<T>(), stored.data(), stored.size());
    convert_to_f32(stored.data(), dtype_of<T>(), host.data(), host.size());
    device.upload(stored);
  }
  std::vector<float> download() const {
    const std::vector<T> stored = device.download();
    std::vector<float> values(stored.size());
    convert_to_f32(stored.data(), dtype_of<T>(), values.data(), values.size());
    return values;
  }
};

// A result is one fp32 sum, rounded once to T: half a unit of T in the 2-norm, and the order of the sum.
template <typename T>
double tolerance() {
  return dtype_of<T>() == DType::f32 ? 1e-5 : dtype_of<T>() == DType::bf16 ? 0x1p-8 : 0x1p-11;
}

template <typename T>
void expect_near(const char* what, const std::vector<float>& got, const std::vector<float>& want) {
  const TensorDistance row = distance(what, got, want, tolerance<T>(), Norm::l2);
  EXPECT_TRUE(row.pass) << what << " " << row.relative;
}

struct Size {
  std::int64_t N, C, OC;
};
constexpr Size kSizes[] = {{1, 8, 8}, {7, 24, 40}, {111, 72, 320}, {65, 200, 1003}, {1000, 64, 72}};

template <typename T>
class MatmulTest : public testing::Test {};
using Types = testing::Types<float, __nv_bfloat16, __half>;
TYPED_TEST_SUITE(MatmulTest, Types);

TYPED_TEST(MatmulTest, MatchesTheCpu) {
  using T = TypeParam;
  const Stream stream;
  Matmul matmul(stream);
  for (const auto [N, C, OC] : kSizes) {
    SCOPED_TRACE(testing::Message() << N << " x " << C << " -> " << OC);
    const Operand<T> x(N * C, 1), weight(OC * C, 2), bias(OC, 3), dout(N * OC, 4);
    for (const bool accumulate : {false, true}) {
      for (const bool with_bias : {false, true}) {
        const Operand<T> out(N * OC, 5);
        std::vector<float> want = out.host;
        cpu::matmul_forward(want.data(), x.host.data(), weight.host.data(), with_bias ? bias.host.data() : nullptr, N,
                            C, OC, accumulate ? cpu::Accumulate::yes : cpu::Accumulate::no);
        matmul.forward<T>(out.device.data(), x.device.data(), weight.device.data(),
                          with_bias ? bias.device.data() : nullptr, N, C, OC,
                          accumulate ? Accumulate::yes : Accumulate::no);
        stream.synchronize("test");
        expect_near<T>("out", out.download(), want);
      }
      const Operand<T> dx(N * C, 6);
      const Operand<float> dweight(OC * C, 7);
      std::vector<float> dx_want = dx.host, dweight_want = dweight.host;
      cpu::matmul_backward(dx_want.data(), nullptr, nullptr, dout.host.data(), x.host.data(), weight.host.data(), N, C,
                           OC, accumulate ? cpu::Accumulate::yes : cpu::Accumulate::no);
      if (!accumulate) dweight_want.assign(dweight_want.size(), 0);
      cpu::matmul_backward(nullptr, dweight_want.data(), nullptr, dout.host.data(), x.host.data(), weight.host.data(),
                           N, C, OC);
      const Accumulate mode = accumulate ? Accumulate::yes : Accumulate::no;
      matmul.input_grad<T>(dx.device.data(), dout.device.data(), weight.device.data(), N, C, OC, mode);
      matmul.weight_grad<T>(dweight.device.data(), dout.device.data(), x.device.data(), N, C, OC, mode);
      stream.synchronize("test");
      expect_near<T>("dx", dx.download(), dx_want);
      expect_near<float>("dweight", dweight.download(), dweight_want);
    }
  }
}

// Whatever the clock said when the plans were timed: prepared and unprepared, first and second time, the same bits.
TYPED_TEST(MatmulTest, TimingNeverChangesABit) {
  using T = TypeParam;
  const cudaDataType_t type = dtype_of<T>() == DType::f32    ? CUDA_R_32F
                              : dtype_of<T>() == DType::bf16 ? CUDA_R_16BF
                                                             : CUDA_R_16F;
  const Stream stream;
  for (const auto [N, C, OC] : kSizes) {
    SCOPED_TRACE(testing::Message() << N << " x " << C << " -> " << OC);
    const Operand<T> x(N * C, 1), weight(OC * C, 2), dout(N * OC, 4);
    std::vector<std::vector<float>> results;
    for (const bool prepared : {false, true, true, true}) {
      Matmul matmul(stream);
      if (prepared) {
        matmul.prepare({Product::forward, N, C, OC, type, Accumulate::no, false});
        matmul.prepare({Product::input_grad, N, C, OC, type, Accumulate::no, false});
        matmul.prepare({Product::weight_grad, N, C, OC, type, Accumulate::no, false});
        EXPECT_EQ(matmul.report().size(), 3u);
      }
      const Operand<T> out(N * OC, 5), dx(N * C, 6);
      const Operand<float> dweight(OC * C, 7);
      matmul.forward<T>(out.device.data(), x.device.data(), weight.device.data(), nullptr, N, C, OC);
      matmul.input_grad<T>(dx.device.data(), dout.device.data(), weight.device.data(), N, C, OC);
      matmul.weight_grad<T>(dweight.device.data(), dout.device.data(), x.device.data(), N, C, OC, Accumulate::no);
      stream.synchronize("test");
      std::vector<float> all = out.download();
      for (const std::vector<float>& part : {dx.download(), dweight.download()})
        all.insert(all.end(), part.begin(), part.end());
      results.push_back(all);
    }
    for (const std::vector<float>& other : results) {
      EXPECT_EQ(std::memcmp(results[0].data(), other.data(), other.size() * sizeof(float)), 0);
    }
  }
}

}  // namespace
}  // namespace weft::cuda
