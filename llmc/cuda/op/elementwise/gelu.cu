// GELU element by element, T = float, bf16 or fp16; its arithmetic is in gelu.cuh.
//
// Bytes moved, for elements of E bytes: forward 2 count E; backward 3 count E, or 4 count E where it also writes `gelu_out`.
// A thread owns 16 bytes, and reads everything that its writes overwrite before it writes: in place is safe.

#include "llmc/cuda/op/elementwise/gelu.h"

#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/op/elementwise/gelu.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256;

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) gelu_forward_kernel(T* out, const T* x, std::int64_t count) {
  const std::int64_t begin = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  if (begin >= count) return;
  Elements<T, kCount> input, result;
  input.load(x + begin);
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = gelu_for<T>(input.get(i));
  result.set(values);
  result.store(out + begin);
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    gelu_backward_kernel(T* dx, const T* dout, const T* x, std::int64_t count, T* gelu_out) {
  const std::int64_t begin = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  if (begin >= count) return;
  Elements<T, kCount> input, gradient, result;
  input.load(x + begin);
  gradient.load(dout + begin);
  float values[kCount], out[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = gradient.get(i) * gelu_derivative_for<T>(input.get(i));
    out[i] = gelu_for<T>(input.get(i));
  }
  result.set(values);
  result.store_streaming(dx + begin);
  if (gelu_out != nullptr) {
    result.set(out);
    result.store_streaming(gelu_out + begin);
  }
}

unsigned blocks_of(std::int64_t count, int pack) {
  return static_cast<unsigned>(ceil_div(count, kThreads * pack));
}

}  // namespace

template <typename T>
void gelu_forward(T* out, const T* x, std::int64_t count, cudaStream_t stream) {
  constexpr int kPack = Pack<T>::size;
  if (count == 0) return;
  with_count<kPack>(count % kPack == 0 && aligned_to_16(out, x), [&](auto pack) {
    gelu_forward_kernel<T, pack><<<blocks_of(count, pack), kThreads, 0, stream>>>(out, x, count);
  });
  check_launch("gelu_forward");
}

template <typename T>
void gelu_backward(T* dx, const T* dout, const T* x, std::int64_t count, T* gelu_out, cudaStream_t stream) {
  constexpr int kPack = Pack<T>::size;
  if (count == 0) return;
  with_count<kPack>(count % kPack == 0 && aligned_to_16(dx, dout, x, gelu_out), [&](auto pack) {
    gelu_backward_kernel<T, pack><<<blocks_of(count, pack), kThreads, 0, stream>>>(dx, dout, x, count, gelu_out);
  });
  check_launch("gelu_backward");
}

#define WEFT_INSTANTIATE(T)                                                \
  template void gelu_forward<T>(T*, const T*, std::int64_t, cudaStream_t); \
  template void gelu_backward<T>(T*, const T*, const T*, std::int64_t, T*, cudaStream_t);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
#undef WEFT_INSTANTIATE
template void gelu_forward<fp16>(fp16*, const fp16*, std::int64_t, cudaStream_t);

}  // namespace weft::cuda
