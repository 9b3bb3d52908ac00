// Checks the arguments and chooses an implementation; rows of activations in codes.

#include "llmc/cuda/op/gemm/rows_matmul_fp8.h"

#include <string>

#include "llmc/base/fp8.h"
#include "llmc/cuda/hw/block.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/fp8/fp8.cuh"
#include "llmc/cuda/op/gemm/rows_matmul_hopper.cuh"
#include "llmc/cuda/runtime/implementation.h"
#include "llmc/model/fp8_rows.h"

namespace weft::cuda {

namespace {

constexpr int kQuantizeThreads = 512, kOnce = 8;  // values of a thread in one access

// A block for each row, which it keeps in registers: kOnce kPieces values a thread.
template <typename T, int kPieces>
__global__ void __launch_bounds__(kQuantizeThreads) quantize_rows_kernel(Fp8Rows to, const T* x, std::int64_t K) {
  __shared__ float scratch[kWarpSize];
  const std::int64_t row = blockIdx.x;
  const auto at = [](int piece) { return (piece * kQuantizeThreads + static_cast<int>(threadIdx.x)) * kOnce; };
  launch_dependents();
  wait_for_predecessors();
  Elements<T, kOnce> values[kPieces];
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    values[piece].clear();
    if (at(piece) < K) values[piece].load(x + row * K + at(piece));
  }
  float amax = 0;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
    for (int i = 0; i < kOnce; ++i) amax = fmaxf(amax, fabsf(values[piece].get(i)));
  const float scale = fp8_row_scale(block_max(amax, scratch));
  if (threadIdx.x == 0) to.scales[row] = scale;
  const RowCodes codes_of_row(scale);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if (at(piece) >= K) continue;
    unsigned words[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = values[piece].get(4 * half + i);
      words[half] = codes_of_row(four);
    }
    *reinterpret_cast<uint2*>(to.codes + row * K + at(piece)) = make_uint2(words[0], words[1]);
  }
}

void check_sizes(std::int64_t K, std::int64_t OC) {
  const std::string reason = rows_matmul_fp8_unsupported_reason(K, OC);
  if (!reason.empty()) fail(Exit::usage, "%s", reason.c_str());
}

template <typename T>
void check_arguments(const RowsMatmul<T>& io, const Fp8Rows& x, const Fp8Rows& weight) {
  check_sizes(io.K, io.OC);
  if (x.codes == nullptr || x.scales == nullptr || weight.codes == nullptr || weight.scales == nullptr)
    fail(Exit::internal, "rows_matmul_fp8: x, weight or their scales are null");
  if (!aligned_to_16(x.codes, weight.codes))
    fail(Exit::internal, "rows_matmul_fp8: x at %p and weight at %p, expected multiples of 16",
         static_cast<const void*>(x.codes), static_cast<const void*>(weight.codes));
  const bool fp32 = io.epilogue == RowsEpilogue::add || io.epilogue == RowsEpilogue::store_fp32;
  if (fp32 ? io.out_fp32 == nullptr : io.out == nullptr) fail(Exit::internal, "rows_matmul_fp8: the result is null");
  if (io.K2 != 0) fail(Exit::internal, "rows_matmul_fp8: a second input");
  if (gated(io.epilogue) && (io.bias != nullptr || io.OC % 8 != 0))
    fail(Exit::internal, "rows_matmul_fp8: a gate with a bias, or outputs that are no multiple of 8");
}

// Pairs of codes are the elements of 16 bits that the kernels move.
template <typename T>
void hopper_fp8(const RowsMatmul<T>& io, const Fp8Rows& x, const Fp8Rows& weight, const LaunchDevice& device,
                cudaStream_t stream) {
  rows::PairsMatmul<T> pairs{io, x.scales, weight.scales};
  pairs.x = reinterpret_cast<const T*>(x.codes);
  pairs.weight = reinterpret_cast<const T*>(weight.codes);
  pairs.K = io.K / 2;
  pairs.x_is_older = false;  // the preceding kernel writes the codes
  rows::launch_best_kernel(pairs, device, stream);
}

template <typename T>
constexpr Implementation<RowsMatmul<T>, Fp8Rows, Fp8Rows, LaunchDevice> kImplementations[] = {
    {"wgmma",
     [](const RowsMatmul<T>&, const Fp8Rows&, const Fp8Rows&, const LaunchDevice&) {
       return hopper_multiprocessors() > 0;
     },
     hopper_fp8<T>},
};

}  // namespace

std::string rows_matmul_fp8_unsupported_reason(std::int64_t K, std::int64_t OC) {
  if (K <= 0 || K % 16 != 0 || K > kMostFp8RowElements) {
    return "linear layer in fp8: got " + std::to_string(K) + " inputs, expected a multiple of 16 up to " +
           std::to_string(kMostFp8RowElements);
  }
  if (OC <= 0 || OC >= INT32_MAX / 2) return "linear layer in fp8: got " + std::to_string(OC) + " outputs";
  return {};
}

std::string rows_matmul_fp8_unsupported_gpu() {
  return hopper_multiprocessors() > 0 ? "" : "fp8 activations need a GPU of compute capability 9.0 (H100, H200)";
}

template <typename T>
void quantize_rows_fp8(const Fp8Rows& to, const T* x, std::int64_t rows, std::int64_t K, const LaunchDevice& device,
                       cudaStream_t stream) {
  if (rows == 0) return;
  check_sizes(K, 1);
  if (to.codes == nullptr || to.scales == nullptr || x == nullptr || !aligned_to_16(to.codes, x))
    fail(Exit::internal, "quantize_rows_fp8: x or its codes are null or no multiples of 16");
  const auto launch = [&](auto kernel) {
    launch_chained(kernel, dim3(static_cast<unsigned>(rows)), dim3(kQuantizeThreads), 0, stream, device.overlapping,
                   "quantize_rows_fp8", to, x, K);
  };
  constexpr std::int64_t kPiece = kQuantizeThreads * kOnce;
  if (K <= kPiece) return launch(quantize_rows_kernel<T, 1>);
  if (K <= 2 * kPiece) return launch(quantize_rows_kernel<T, 2>);
  if (K <= 4 * kPiece) return launch(quantize_rows_kernel<T, 4>);
  launch(quantize_rows_kernel<T, static_cast<int>(kMostFp8RowElements / kPiece)>);
}

template <typename T>
void rows_matmul_fp8(const RowsMatmul<T>& io, const Fp8Rows& x, const Fp8Rows& weight, const LaunchDevice& device,
                     cudaStream_t stream) {
  if (io.rows == 0) return;
  if (const std::string reason = rows_matmul_fp8_unsupported_gpu(); !reason.empty())
    fail(Exit::environment, "%s", reason.c_str());
  check_arguments(io, x, weight);
  launch_first("rows_matmul_fp8", kImplementations<T>, stream, io, x, weight, device);
}

#define WEFT_INSTANTIATE(T)                                                                                     \
  template void quantize_rows_fp8<T>(const Fp8Rows&, const T*, std::int64_t, std::int64_t, const LaunchDevice&, \
                                     cudaStream_t);                                                             \
  template void rows_matmul_fp8<T>(const RowsMatmul<T>&, const Fp8Rows&, const Fp8Rows&, const LaunchDevice&,   \
                                   cudaStream_t);
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
