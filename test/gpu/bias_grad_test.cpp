// The gradients of biases on the GPU, against sums in double.

#include "llmc/cuda/op/gemm/bias_grad.h"

#include <cmath>

#include "llmc/base/fp8.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;

constexpr std::int64_t kRows[] = {1, 2, 3, 4, 5, 33, 64, 65, 257, 1000, 8191, 8193, 20'001};
constexpr std::int64_t kColumns[] = {1, 7, 8, 96, 255, 256, 257, 1152, 4104};

Floats sums(const Floats& before, const Floats& dout, std::int64_t N, std::int64_t OC) {
  Floats result;
  for (std::int64_t o = 0; o < OC; ++o) {
    double sum = before[static_cast<std::size_t>(o)];
    for (std::int64_t n = 0; n < N; ++n) sum += static_cast<double>(dout[static_cast<std::size_t>(n * OC + o)]);
    result.push_back(static_cast<float>(sum));
  }
  return result;
}

template <typename T>
void check_sums() {
  for (const std::int64_t OC : kColumns) {
    const DeviceBuffer<char> workspace(bias_grad_workspace(OC));
    for (const std::int64_t N : kRows) {
      if (N * OC > 10'000'000) continue;
      SCOPED_TRACE(type_name<T>() + " " + std::to_string(N) + " x " + std::to_string(OC));
      const Floats dout = random_stored<T>(N * OC, 1, 1.0f, 0.1f), before = random_floats(OC, 2);
      Floats shifted(1, 0.0f);
      shifted.insert(shifted.end(), dout.begin(), dout.end());
      const DeviceBuffer<T> at_a_boundary = on_device<T>(dout), beside_it = on_device<T>(shifted);
      const auto added = [&](const T* from) {
        const DeviceBuffer<float> dbias(before);
        bias_grad(dbias.data(), from, N, OC, workspace.data(), nullptr);
        return on_host(dbias);
      };
      const Floats got = added(at_a_boundary.data());
      expect_near<float>(got, sums(before, dout, N, OC), "dbias");
      EXPECT_EQ(added(at_a_boundary.data()), got) << "again";
      EXPECT_EQ(added(beside_it.data() + 1), got) << "from another address";
    }
    if (testing::Test::HasFailure()) return;
  }
}

TEST(BiasGrad, Fp32) {
  check_sums<float>();
}
TEST(BiasGrad, Bf16) {
  check_sums<bf16>();
}
TEST(BiasGrad, Fp16) {
  check_sums<fp16>();
}

// Every finite code of e5m2.
TEST(BiasGrad, OfCodes) {
  const float scale = 0x1p-9f;
  const DeviceBuffer<float> on_gpu(Floats{scale});
  for (const std::int64_t OC : {16, 1152, 4112}) {
    const DeviceBuffer<char> workspace(bias_grad_workspace(OC));
    for (const std::int64_t N : {16, 80, 1008, 8208}) {
      SCOPED_TRACE(std::to_string(N) + " x " + std::to_string(OC));
      std::vector<std::uint8_t> codes(static_cast<std::size_t>(N * OC));
      std::mt19937 random(3);
      for (std::uint8_t& code : codes) {
        do {
          code = static_cast<std::uint8_t>(random());
        } while ((code & 0x7c) == 0x7c);  // infinity and NaN
      }
      Floats values(codes.size());
      for (std::size_t i = 0; i < codes.size(); ++i) {
        values[i] = scale * fp8_to_f32(codes[i], Fp8Format::e5m2);
      }
      const Floats before = random_floats(OC, 2);
      const DeviceBuffer<std::uint8_t> gpu_codes(codes);
      const DeviceBuffer<float> dbias(before);
      bias_grad_fp8(dbias.data(), {gpu_codes.data(), on_gpu.data()}, N, OC, workspace.data(), nullptr);
      expect_near<float>(on_host(dbias), sums(before, values, N, OC), "dbias");
    }
  }
}

}  // namespace
}  // namespace weft::cuda
