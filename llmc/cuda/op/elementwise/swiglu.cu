// SwiGLU on packed rows [gate F | up F], T = float, bf16 or fp16; its arithmetic is in swiglu.cuh.
//
// Bytes moved, for elements of E bytes: forward reads 2F and writes F a row, 3 N F E; backward reads 3F and writes 2F,
// 5 N F E, or 6 N F E where it also writes `out` again. Writing it here costs one write; a forward kernel of its
// own would also read gate and up once more.
//
// A thread owns 16 bytes of gate and the same columns of up, and reads everything that its writes overwrite before it
// writes: in place is safe. Consecutive blocks take consecutive parts of one row, so that blocks that run at the same
// time access neighbouring memory.

#include "llmc/cuda/op/elementwise/swiglu.h"

#include "llmc/cuda/op/elementwise/swiglu.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256;

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    swiglu_forward_kernel(T* out, const T* gate_up, std::int64_t F, unsigned parts) {
  const std::int64_t row = blockIdx.x / parts;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x % parts) * kThreads + threadIdx.x) * kCount;
  if (column >= F) return;
  Elements<T, kCount> gate, up, result;
  gate.load(gate_up + row * 2 * F + column);
  up.load(gate_up + row * 2 * F + F + column);
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = swiglu<T>(gate.get(i), up.get(i));
  result.set(values);
  result.store(out + row * F + column);
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) swiglu_backward_kernel(T* dgate_up, const T* dout, const T* gate_up,
                                                                   std::int64_t F, unsigned parts, T* swiglu_out) {
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
  if (swiglu_out != nullptr) {
    result.set(out);
    result.store_streaming(swiglu_out + row * F + column);
  }
}

unsigned parts_of(std::int64_t F, int count) {
  return static_cast<unsigned>(ceil_div(F, kThreads * count));
}
unsigned blocks_of(std::int64_t N, unsigned parts) {
  return static_cast<unsigned>(N * parts);
}

}  // namespace

template <typename T>
void swiglu_forward(T* out, const T* gate_up, std::int64_t N, std::int64_t F, cudaStream_t stream) {
  constexpr int kPack = Pack<T>::size;
  if (N == 0) return;
  with_count<kPack>(F % kPack == 0 && aligned_to_16(out, gate_up), [&](auto count) {
    const unsigned parts = parts_of(F, count);
    swiglu_forward_kernel<T, count><<<blocks_of(N, parts), kThreads, 0, stream>>>(out, gate_up, F, parts);
  });
  check_launch("swiglu_forward");
}

template <typename T>
void swiglu_backward(T* dgate_up, const T* dout, const T* gate_up, std::int64_t N, std::int64_t F, T* swiglu_out,
                     cudaStream_t stream) {
  constexpr int kPack = Pack<T>::size;
  if (N == 0) return;
  with_count<kPack>(F % kPack == 0 && aligned_to_16(dgate_up, dout, gate_up, swiglu_out), [&](auto count) {
    const unsigned parts = parts_of(F, count);
    swiglu_backward_kernel<T, count>
        <<<blocks_of(N, parts), kThreads, 0, stream>>>(dgate_up, dout, gate_up, F, parts, swiglu_out);
  });
  check_launch("swiglu_backward");
}

#define WEFT_INSTANTIATE(T)                                                                \
  template void swiglu_forward<T>(T*, const T*, std::int64_t, std::int64_t, cudaStream_t); \
  template void swiglu_backward<T>(T*, const T*, const T*, std::int64_t, std::int64_t, T*, cudaStream_t);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
