// SwiGLU and GeGLU on packed rows [gate F | up F], T = float, bf16 or fp16; their arithmetic is in swiglu.cuh.
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

template <typename Gated, typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    gated_forward_kernel(T* out, const T* gate_up, std::int64_t F, unsigned parts) {
  const std::int64_t row = blockIdx.x / parts;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x % parts) * kThreads + threadIdx.x) * kCount;
  if (column >= F) return;
  Elements<T, kCount> gate, up, result;
  gate.load(gate_up + row * 2 * F + column);
  up.load(gate_up + row * 2 * F + F + column);
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = gated_product<T>(gate.get(i), Gated::argument(gate.get(i)), up.get(i));
  result.set(values);
  result.store(out + row * F + column);
}

template <typename Gated, typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    gated_backward_kernel(T* dgate_up, const T* dout, const T* gate_up, std::int64_t F, unsigned parts, T* again) {
  const std::int64_t row = blockIdx.x / parts;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x % parts) * kThreads + threadIdx.x) * kCount;
  if (column >= F) return;
  const std::int64_t at = row * 2 * F + column;
  const GatedGradients<Gated, T, kCount> d(dout + row * F + column, gate_up + at, F);
  Elements<T, kCount> result;
  result.set(d.gate);
  result.store_streaming(dgate_up + at);
  result.set(d.up);
  result.store_streaming(dgate_up + at + F);
  if (again != nullptr) {
    result.set(d.out);
    result.store_streaming(again + row * F + column);
  }
}

unsigned parts_of(std::int64_t F, int count) {
  return static_cast<unsigned>(ceil_div(F, kThreads * count));
}
unsigned blocks_of(std::int64_t N, unsigned parts) {
  return static_cast<unsigned>(N * parts);
}

template <typename Gated, typename T>
void gated_forward(T* out, const T* gate_up, std::int64_t N, std::int64_t F, cudaStream_t stream, const char* name) {
  constexpr int kPack = Pack<T>::size;
  if (N == 0) return;
  with_count<kPack>(F % kPack == 0 && aligned_to_16(out, gate_up), [&](auto count) {
    const unsigned parts = parts_of(F, count);
    gated_forward_kernel<Gated, T, count><<<blocks_of(N, parts), kThreads, 0, stream>>>(out, gate_up, F, parts);
  });
  check_launch(name);
}

template <typename Gated, typename T>
void gated_backward(T* dgate_up, const T* dout, const T* gate_up, std::int64_t N, std::int64_t F, T* again,
                    cudaStream_t stream, const char* name) {
  constexpr int kPack = Pack<T>::size;
  if (N == 0) return;
  with_count<kPack>(F % kPack == 0 && aligned_to_16(dgate_up, dout, gate_up, again), [&](auto count) {
    const unsigned parts = parts_of(F, count);
    gated_backward_kernel<Gated, T, count>
        <<<blocks_of(N, parts), kThreads, 0, stream>>>(dgate_up, dout, gate_up, F, parts, again);
  });
  check_launch(name);
}

}  // namespace

template <typename T>
void swiglu_forward(T* out, const T* gate_up, std::int64_t N, std::int64_t F, cudaStream_t stream) {
  gated_forward<Swiglu>(out, gate_up, N, F, stream, "swiglu_forward");
}
template <typename T>
void swiglu_backward(T* dgate_up, const T* dout, const T* gate_up, std::int64_t N, std::int64_t F, T* swiglu_out,
                     cudaStream_t stream) {
  gated_backward<Swiglu>(dgate_up, dout, gate_up, N, F, swiglu_out, stream, "swiglu_backward");
}

template <typename T>
void geglu_tanh_forward(T* out, const T* gate_up, std::int64_t N, std::int64_t F, cudaStream_t stream) {
  gated_forward<GegluTanh>(out, gate_up, N, F, stream, "geglu_tanh_forward");
}
template <typename T>
void geglu_tanh_backward(T* dgate_up, const T* dout, const T* gate_up, std::int64_t N, std::int64_t F, T* geglu_out,
                         cudaStream_t stream) {
  gated_backward<GegluTanh>(dgate_up, dout, gate_up, N, F, geglu_out, stream, "geglu_tanh_backward");
}

#define WEFT_INSTANTIATE(T)                                                                               \
  template void swiglu_forward<T>(T*, const T*, std::int64_t, std::int64_t, cudaStream_t);                \
  template void swiglu_backward<T>(T*, const T*, const T*, std::int64_t, std::int64_t, T*, cudaStream_t); \
  template void geglu_tanh_forward<T>(T*, const T*, std::int64_t, std::int64_t, cudaStream_t);            \
  template void geglu_tanh_backward<T>(T*, const T*, const T*, std::int64_t, std::int64_t, T*, cudaStream_t);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
