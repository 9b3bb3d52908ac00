// The GEMMs with SwiGLU in their epilogue against the CPU, and bit for bit against SwiGLU as a kernel of its own.
//
// Operands are small multiples of 1/4, so that every sum is exact in fp32 whatever its order, and all ways round the same
// numbers.
#include "llmc/cuda/op/gemm/matmul_swiglu.h"

#include <array>
#include <initializer_list>

#include "llmc/cpu/matmul.h"
#include "llmc/cpu/swiglu.h"
#include "llmc/cuda/op/elementwise/swiglu.h"
#include "llmc/cuda/runtime/stream.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;

Floats rounded(const Floats& values) {
  return widened(stored<bf16>(values));
}

// As large as needed and a little more, which must stay as it is.
class Guarded {
 public:
  explicit Guarded(std::int64_t count) : count_(static_cast<std::size_t>(count)), buffer_(count_ + kMore) {}
  explicit Guarded(const DeviceBuffer<bf16>& values) : Guarded(static_cast<std::int64_t>(values.size())) {
    check(cudaMemcpy(data(), values.data(), values.bytes(), cudaMemcpyDeviceToDevice), "test: copy");
  }
  bf16* data() const { return buffer_.data(); }
  // The values, and a failure where something was written behind them.
  DeviceBuffer<bf16> take(const char* what) const {
    std::vector<bf16> values = buffer_.download();
    for (std::size_t i = count_; i < values.size(); ++i)
      EXPECT_TRUE(__isnan(__bfloat162float(values[i]))) << what << ": " << i - count_ << " behind the end";
    values.resize(count_);
    return DeviceBuffer<bf16>(values);
  }

 private:
  static constexpr std::size_t kMore = 4096;
  std::size_t count_;
  DeviceBuffer<bf16> buffer_;
};

class MatmulSwiglu : public ::testing::Test {
 public:
  void SetUp() override {
    if (!matmul_swiglu_computes(8, 8)) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  }

  void check_forward(std::int64_t N, std::int64_t C, std::int64_t F) {
    SCOPED_TRACE("forward " + std::to_string(N) + " x " + std::to_string(C) + " x " + std::to_string(F));
    const auto n = static_cast<std::size_t>(N * F);
    const Floats x = quarters(N * C, 1), w = quarters(2 * F * C, 2);
    Floats gate_up(2 * n), swiglu_out(n);
    cpu::matmul_forward(gate_up.data(), x.data(), w.data(), nullptr, N, C, 2 * F);
    gate_up = rounded(gate_up);
    cpu::swiglu_forward(swiglu_out.data(), gate_up.data(), N, F);

    const DeviceBuffer<bf16> gpu_x = on_device<bf16>(x), gpu_w = on_device<bf16>(w);
    const Guarded gpu_gate_up(2 * N * F), gpu_swiglu_out(N * F), alone(2 * N * F);
    gate_up_swiglu(gpu_gate_up.data(), gpu_swiglu_out.data(), gpu_x.data(), gpu_w.data(), N, C, F, stream_);
    gate_up_swiglu(alone.data(), nullptr, gpu_x.data(), gpu_w.data(), N, C, F, stream_);
    stream_.synchronize("test");
    const DeviceBuffer<bf16> found = gpu_gate_up.take("gate_up"), found_swiglu_out = gpu_swiglu_out.take("swiglu_out");
    expect_near<bf16>(on_host(found_swiglu_out), swiglu_out, "swiglu_out");
    expect_same_bits(found, on_device<bf16>(gate_up), "gate_up");
    expect_same_bits(alone.take("gate_up alone"), found, "gate_up without swiglu_out");
    const DeviceBuffer<bf16> separate(n);
    swiglu_forward(separate.data(), found.data(), N, F, nullptr);
    expect_same_bits(found_swiglu_out, separate, "swiglu_out");
  }

  void check_backward(std::int64_t N, std::int64_t C, std::int64_t F) {
    SCOPED_TRACE("backward " + std::to_string(N) + " x " + std::to_string(C) + " x " + std::to_string(F));
    const auto n = static_cast<std::size_t>(N * F);
    const Floats gate_up = random_stored<bf16>(2 * N * F, 3, 3), dout = quarters(N * C, 4), w = quarters(C * F, 5);
    Floats dswiglu_out(n), dgate_up(2 * n);
    cpu::matmul_backward(dswiglu_out.data(), nullptr, nullptr, dout.data(), nullptr, w.data(), N, F, C);
    dswiglu_out = rounded(dswiglu_out);
    cpu::swiglu_backward(dgate_up.data(), dswiglu_out.data(), gate_up.data(), N, F);

    const DeviceBuffer<bf16> gpu_dout = on_device<bf16>(dout), gpu_w = on_device<bf16>(w),
                             gpu_gate_up = on_device<bf16>(gate_up), gpu_dswiglu_out = on_device<bf16>(dswiglu_out);
    const Guarded gpu_dgate_up(gpu_gate_up), alone(gpu_gate_up), gpu_swiglu_out(N * F);
    down_input_grad_swiglu(gpu_dgate_up.data(), gpu_swiglu_out.data(), gpu_dout.data(), gpu_w.data(), N, C, F, stream_);
    down_input_grad_swiglu(alone.data(), nullptr, gpu_dout.data(), gpu_w.data(), N, C, F, stream_);
    stream_.synchronize("test");
    const DeviceBuffer<bf16> found = gpu_dgate_up.take("dgate_up");
    expect_near<bf16>(on_host(found), dgate_up, "dgate_up");
    expect_same_bits(alone.take("dgate_up alone"), found, "dgate_up without swiglu_out");
    const DeviceBuffer<bf16> separate(2 * n), separate_swiglu_out(n);
    swiglu_backward(separate.data(), gpu_dswiglu_out.data(), gpu_gate_up.data(), N, F, separate_swiglu_out.data(),
                    nullptr);
    expect_same_bits(found, separate, "dgate_up");
    expect_same_bits(gpu_swiglu_out.take("swiglu_out"), separate_swiglu_out, "swiglu_out");
  }

  // Rows, depths and columns that fill a tile, a step or a cluster, and that do not; one tile, and several a block.
  void check_shapes(void (MatmulSwiglu::*check_shape)(std::int64_t, std::int64_t, std::int64_t)) {
    for (const auto& [N, C, F] : std::initializer_list<std::array<std::int64_t, 3>>{{1, 8, 8},
                                                                                    {127, 64, 96},
                                                                                    {128, 72, 104},
                                                                                    {129, 520, 200},
                                                                                    {256, 128, 192},
                                                                                    {300, 64, 776},
                                                                                    {1003, 200, 96},
                                                                                    {4097, 72, 1608},
                                                                                    {2500, 328, 1000}})
      (this->*check_shape)(N, C, F);
  }

  Stream stream_;
};

TEST_F(MatmulSwiglu, Forward) {
  check_shapes(&MatmulSwiglu::check_forward);
}

TEST_F(MatmulSwiglu, Backward) {
  check_shapes(&MatmulSwiglu::check_backward);
}

TEST_F(MatmulSwiglu, NoRows) {
  gate_up_swiglu(nullptr, nullptr, nullptr, nullptr, 0, 8, 8, stream_);
  down_input_grad_swiglu(nullptr, nullptr, nullptr, nullptr, 0, 8, 8, stream_);
  stream_.synchronize("test");
}

// Rows that do not begin at multiples of 16 bytes are left to the other kernels.
TEST_F(MatmulSwiglu, RefusesOddSizes) {
  EXPECT_FALSE(matmul_swiglu_computes(12, 8));
  EXPECT_FALSE(matmul_swiglu_computes(8, 12));
}

}  // namespace
}  // namespace weft::cuda
