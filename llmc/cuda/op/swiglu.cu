// SwiGLU on packed rows [gate F | up F], T = float, bf16 or fp16; its arithmetic is in swiglu.cuh.
//
// Bytes moved, for elements of E bytes: forward reads 2F and writes F a row, 3 N F E; backward reads 3F and writes 2F,
// 5 N F E, or 6 N F E where it also writes `out` again. Re-emitting it here costs one write; doing so in a forward
// kernel of its own would read gate and up once more.
//
// A thread owns 16 bytes of gate and the same columns of up, so it has read all that its writes overwrite: in place is
// safe. Neighbouring blocks take neighbouring parts of one row: what is in work at a time lies close together in memory.

#include "llmc/cuda/op/swiglu.h"

#include "llmc/cuda/op/swiglu.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256;

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    swiglu_forward_kernel(T* out, const T* gate_up, std::int64_t F, unsigned parts) {
  const std::int64_t row = blockIdx.x / parts;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x % parts) * kThreads + threadIdx.x) * kCount;
  if (column >= F) return;
  Elements<T, kCount> gate, up, product;
  gate.load(gate_up + row * 2 * F + column);
  up.load(gate_up + row * 2 * F + F + column);
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = swiglu<T>(gate.get(i), up.get(i));
  product.set(values);
  product.store(out + row * F + column);
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(T* dgate_up, const T* dout, const T* gate_up, std::int64_t F, unsigned parts, T* product) {
  const std::int64_t row = blockIdx.x / parts;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x % parts) * kThreads + threadIdx.x) * kCount;
  if (column >= F) return;
  Elements<T, kCount> gate, up, gradient, result;
  gate.load(gate_up + row * 2 * F + column);
  up.load(gate_up + row * 2 * F + F + column);
  gradient.load(dout + row * F + column);
  float out[kCount], dgate[kCount], dup[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const SwigluGradient d = swiglu_gradient<T>(gradient.get(i), gate.get(i), up.get(i));
    dgate[i] = d.gate;
    dup[i] = d.up;
    out[i] = d.out;
  }
  result.set(dgate);
  result.store_streaming(dgate_up + row * 2 * F + column);
  result.set(dup);
  result.store_streaming(dgate_up + row * 2 * F + F + column);
  if (product != nullptr) {
    result.set(out);
    result.store_streaming(product + row * F + column);
  }
}

unsigned parts_of(std::int64_t F, int count) {
  return static_cast<unsigned>(ceil_div(F, kThreads * count));
}
unsigned blocks_of(std::int64_t N, unsigned parts) {
  return static_cast<unsigned>(N * parts);
}

template <int kCount, typename T>
void launch_forward(T* out, const T* gate_up, std::int64_t N, std::int64_t F, cudaStream_t stream) {
  const unsigned parts = parts_of(F, kCount);
  swiglu_forward_kernel<T, kCount><<<blocks_of(N, parts), kThreads, 0, stream>>>(out, gate_up, F, parts);
  check_launch("swiglu_forward");
}

template <int kCount, typename T>
void launch_backward(T* dgate_up, const T* dout, const T* gate_up, std::int64_t N, std::int64_t F, T* product,
                     cudaStream_t stream) {
  const unsigned parts = parts_of(F, kCount);
  swiglu_backward_kernel<T, kCount>
      <<<blocks_of(N, parts), kThreads, 0, stream>>>(dgate_up, dout, gate_up, F, parts, product);
  check_launch("swiglu_backward");
}

}  // namespace

template <typename T>
void swiglu_forward(T* out, const T* gate_up, std::int64_t N, std::int64_t F, cudaStream_t stream) {
  constexpr int kPack = Pack<T>::size;
  if (N == 0) return;
  if (F % kPack == 0 && aligned_to_16(out, gate_up)) {
    launch_forward<kPack>(out, gate_up, N, F, stream);
  } else {
    launch_forward<1>(out, gate_up, N, F, stream);
  }
}

template <typename T>
void swiglu_backward(T* dgate_up, const T* dout, const T* gate_up, std::int64_t N, std::int64_t F, T* product,
                     cudaStream_t stream) {
  constexpr int kPack = Pack<T>::size;
  if (N == 0) return;
  if (F % kPack == 0 && aligned_to_16(dgate_up, dout, gate_up, product)) {
    launch_backward<kPack>(dgate_up, dout, gate_up, N, F, product, stream);
  } else {
    launch_backward<1>(dgate_up, dout, gate_up, N, F, product, stream);
  }
}

#define WEFT_INSTANTIATE(T)                                                                \
  template void swiglu_forward<T>(T*, const T*, std::int64_t, std::int64_t, cudaStream_t); \
  template void swiglu_backward<T>(T*, const T*, const T*, std::int64_t, std::int64_t, T*, cudaStream_t);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
