// Checks the arguments and chooses an implementation.

#include "llmc/cuda/op/gemm/rows_matmul.h"

#include <string>
#include <type_traits>

#include "llmc/cuda/op/gemm/rows_matmul.cuh"
#include "llmc/cuda/runtime/implementation.h"

namespace weft::cuda {

namespace {

template <typename S>
constexpr DType dtype_of() {
  return std::is_same_v<S, float> ? DType::f32 : std::is_same_v<S, bf16> ? DType::bf16 : DType::f16;
}

template <typename S>
void check_input(const S* x, const S* weight, std::int64_t K, std::int64_t OC) {
  const std::string reason = rows_matmul_unsupported_reason(K, OC, dtype_of<S>());
  if (!reason.empty()) fail(Exit::usage, "%s", reason.c_str());
  if (x == nullptr || weight == nullptr) fail(Exit::internal, "rows_matmul: x or weight is null");
  if (!aligned_to_16(x, weight))
    fail(Exit::internal, "rows_matmul: x at %p and weight at %p, expected multiples of 16", static_cast<const void*>(x),
         static_cast<const void*>(weight));
}

template <typename S>
void check_arguments(const RowsMatmul<S>& io) {
  check_input(io.x, io.weight, io.K, io.OC);
  if (io.K2 != 0) {
    check_input(io.x2, io.weight2, io.K2, io.OC);
    if (io.epilogue != RowsEpilogue::add)
      fail(Exit::internal, "rows_matmul: a second input, and the sums are not added to the residual stream");
  }
  const bool fp32 = io.epilogue == RowsEpilogue::add || io.epilogue == RowsEpilogue::store_fp32;
  if (fp32 ? io.out_fp32 == nullptr : io.out == nullptr) fail(Exit::internal, "rows_matmul: the result is null");
  if (gated(io.epilogue) && io.bias != nullptr) fail(Exit::internal, "rows_matmul: a bias with a gate");
}

// Two inputs are two launches.
template <typename S>
void portable_in_turn(const RowsMatmul<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  RowsMatmul<S> first = io;
  first.K2 = 0;
  rows::portable(first, device, stream);
  if (io.K2 == 0) return;
  RowsMatmul<S> second = first;
  second.x = io.x2, second.weight = io.weight2, second.bias = io.bias2, second.K = io.K2;
  second.x_is_older = false;
  rows::portable(second, device, stream);
}

template <typename S>
constexpr Implementation<RowsMatmul<S>, LaunchDevice> kImplementations[] = {
    {"wgmma", rows::hopper_computes<S>, rows::hopper<S>},
    {"mma.sync", [](const RowsMatmul<S>&, const LaunchDevice&) { return true; }, portable_in_turn<S>},
};

}  // namespace

std::string rows_matmul_unsupported_reason(std::int64_t K, std::int64_t OC, DType dtype) {
  const bool known = dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
  if (!known)
    return std::string("linear layer: got weights of type ") + dtype_name(dtype) + ", expected f32, f16 or bf16";
  const auto multiple = static_cast<std::int64_t>(16 / dtype_bytes(dtype));
  if (K <= 0 || K % multiple != 0 || K >= INT32_MAX) {
    return "linear layer: got " + std::to_string(K) + " inputs of type " + dtype_name(dtype) +
           ", expected a multiple of " + std::to_string(multiple);
  }
  // The second dimension of the portable kernels' grids: tiles of 64 rows of the weight, which with a gate has two rows
  // an output.
  constexpr std::int64_t kMostOutputs = 65535 * 64 / 2;
  if (OC <= 0 || OC > kMostOutputs) {
    return "linear layer: got " + std::to_string(OC) + " outputs, expected 1 to " + std::to_string(kMostOutputs);
  }
  return {};
}

template <typename S>
void rows_matmul(const RowsMatmul<S>& io, const LaunchDevice& device, cudaStream_t stream, RowsPath path) {
  if (io.rows == 0) return;
  check_arguments(io);
  if constexpr (std::is_same_v<S, float>) {
    portable_in_turn(io, device, stream);
  } else if (path == RowsPath::portable) {
    portable_in_turn(io, device, stream);
  } else {
    launch_first("rows_matmul", kImplementations<S>, stream, io, device);
  }
}

template void rows_matmul<float>(const RowsMatmul<float>&, const LaunchDevice&, cudaStream_t, RowsPath);
template void rows_matmul<bf16>(const RowsMatmul<bf16>&, const LaunchDevice&, cudaStream_t, RowsPath);
template void rows_matmul<fp16>(const RowsMatmul<fp16>&, const LaunchDevice&, cudaStream_t, RowsPath);

}  // namespace weft::cuda
