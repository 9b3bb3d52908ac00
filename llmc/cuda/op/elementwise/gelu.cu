// Exact GELU (Hendrycks & Gimpel, 2016), T = float, bf16 or fp16, arithmetic in fp32:
//
//   gelu(x) = x Phi(x)             Phi(x) = (1 + erf(x / sqrt 2)) / 2
//   d gelu / dx = Phi(x) + x phi(x)
//
// Bytes moved, for elements of E bytes: forward 2 E an element, backward 3 E. A thread owns 16 bytes; a shorter last
// piece of an array goes element by element. 16-bit types use the approximation of gelu.cuh: erff() would take longer
// than the memory accesses.

#include "llmc/cuda/op/elementwise/gelu.h"

#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/op/elementwise/gelu.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256;

template <typename T, int kCount>
__device__ void forward_at(T* out, const T* x, std::int64_t i) {
  Elements<T, kCount> in;
  in.load(x + i);
  float values[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = gelu_for<T>(in.get(j));
  in.set(values);
  in.store_streaming(out + i);
}

template <typename T, int kCount>
__device__ void backward_at(T* dx, const T* dout, const T* x, std::int64_t i) {
  Elements<T, kCount> in, gradient;
  in.load(x + i);
  gradient.load(dout + i);
  float values[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = gradient.get(j) * gelu_slope_for<T>(in.get(j));
  gradient.set(values);
  gradient.store_streaming(dx + i);
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) gelu_forward_kernel(T* out, const T* x, std::int64_t count) {
  std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  if (i + kCount <= count) {
    forward_at<T, kCount>(out, x, i);
  } else {
    for (; i < count; ++i) forward_at<T, 1>(out, x, i);
  }
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) gelu_backward_kernel(T* dx, const T* dout, const T* x, std::int64_t count) {
  std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  if (i + kCount <= count) {
    backward_at<T, kCount>(dx, dout, x, i);
  } else {
    for (; i < count; ++i) backward_at<T, 1>(dx, dout, x, i);
  }
}

unsigned blocks_of(std::int64_t count, int elements) {
  return static_cast<unsigned>(ceil_div(count, static_cast<std::int64_t>(kThreads) * elements));
}

}  // namespace

template <typename T>
void gelu_forward(T* out, const T* x, std::int64_t count, cudaStream_t stream) {
  constexpr int kPack = Pack<T>::size;
  if (count == 0) return;
  if (aligned_to_16(out, x)) {
    gelu_forward_kernel<T, kPack><<<blocks_of(count, kPack), kThreads, 0, stream>>>(out, x, count);
  } else {
    gelu_forward_kernel<T, 1><<<blocks_of(count, 1), kThreads, 0, stream>>>(out, x, count);
  }
  check_launch("gelu_forward");
}

template <typename T>
void gelu_backward(T* dx, const T* dout, const T* x, std::int64_t count, cudaStream_t stream) {
  constexpr int kPack = Pack<T>::size;
  if (count == 0) return;
  if (aligned_to_16(dx, dout, x)) {
    gelu_backward_kernel<T, kPack><<<blocks_of(count, kPack), kThreads, 0, stream>>>(dx, dout, x, count);
  } else {
    gelu_backward_kernel<T, 1><<<blocks_of(count, 1), kThreads, 0, stream>>>(dx, dout, x, count);
  }
  check_launch("gelu_backward");
}

#define WEFT_INSTANTIATE(T)                                                \
  template void gelu_forward<T>(T*, const T*, std::int64_t, cudaStream_t); \
  template void gelu_backward<T>(T*, const T*, const T*, std::int64_t, cudaStream_t);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
