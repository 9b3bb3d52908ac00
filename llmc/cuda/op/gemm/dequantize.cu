// A thread has 8 elements of one row, which share their group, or a single one where rows are no multiples of 8.
#include "llmc/cuda/op/gemm/dequantize.h"

#include "llmc/cuda/formats/stored.cuh"
#include "llmc/cuda/hw/elements.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256;

template <typename Format, typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(T* out, QuantizedMatrix matrix, std::int64_t count, std::int64_t K) {
  static_assert(kQuantGroup % kCount == 0);
  constexpr int kOfByte = 8 / Format::kBits, kBytes = ceil_div(kCount, kOfByte);
  const std::int64_t first = kCount * (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  if (first >= count) return;
  const std::int64_t row = first / K;
  float scale = 0, zero = 0;
  if constexpr (Format::kGrouped) {
    const std::int64_t group = row * ceil_div(K, kQuantGroup) + first % K / kQuantGroup;
    scale = __half2float(__ushort_as_half(matrix.group_scales[group]));
    zero = static_cast<float>(matrix.zeros[group]);
  } else {
    scale = matrix.row_scales[row];
  }
  const std::uint8_t* const q = static_cast<const std::uint8_t*>(matrix.data) + first / kOfByte;
  alignas(8) std::uint8_t bytes[kBytes];
  if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(bytes) = *reinterpret_cast<const uint2*>(q);
  } else if constexpr (kBytes == 4) {
    *reinterpret_cast<unsigned*>(bytes) = *reinterpret_cast<const unsigned*>(q);
  } else {
    bytes[0] = q[0];
  }
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int of_byte = kCount > 1 ? i % kOfByte : static_cast<int>(first % kOfByte);
    values[i] = scale * (stored_value(Format(), bytes[i / kOfByte], of_byte) - zero);
  }
  Elements<T, kCount> result;
  result.set(values);
  result.store(out + first);
}

}  // namespace

template <typename T>
void dequantize(T* out, const QuantizedMatrix& matrix, std::int64_t rows, std::int64_t K, cudaStream_t stream) {
  const std::int64_t count = rows * K;
  if (count == 0) return;
  for_format(matrix.dtype, [&]<typename Format>() {
    with_count<8>(K % 8 == 0 && aligned_to_16(out, static_cast<const std::byte*>(matrix.data)), [&](auto wide) {
      const std::int64_t blocks = ceil_div(count, kThreads * std::int64_t{wide});
      dequantize_kernel<Format, T, wide><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(out, matrix, count, K);
    });
  });
  check_launch("dequantize");
}

template void dequantize<float>(float*, const QuantizedMatrix&, std::int64_t, std::int64_t, cudaStream_t);
template void dequantize<bf16>(bf16*, const QuantizedMatrix&, std::int64_t, std::int64_t, cudaStream_t);

}  // namespace weft::cuda
