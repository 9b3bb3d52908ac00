// A thread reads 16 consecutive elements of a row, rounds them, and stores 16 codes; for the transposed layout they go
// through a tile of llmc/cuda/op/fp8/fp8.cuh.
//
// Bytes moved for an element: 2 read, 1 written for each layout; transposing codes 1 and 1; SwiGLU forward 4 read and 1 for each layout of its
// result; backward 6 read, 2 for each layout of the gradients and 1 for each of the result.
#include "llmc/cuda/op/fp8/fp8.h"

#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/op/elementwise/swiglu.cuh"
#include "llmc/cuda/op/fp8/fp8.cuh"

namespace weft::cuda {

namespace {

using namespace fp8_tile;

constexpr int kNeighbours = 16;                              // consecutive elements of a row that a thread reads
constexpr int kRowThreads = kTileColumns / kNeighbours;      // threads that share a row of a tile
constexpr int kRounds = kTileRows * kRowThreads / kThreads;  // iterations in which a block reads a tile

// Sources of quantize_kernel: load 16 consecutive elements of a row as fp32.
struct Plain {
  const bf16* x;
  std::int64_t columns;
  __device__ void load(float (&values)[kNeighbours], std::int64_t row, std::int64_t column) const {
    Elements<bf16, kNeighbours> elements;
    elements.load(x + row * columns + column);
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) values[i] = elements.get(i);
  }
};
struct SwigluOut {
  const bf16* gate_up;
  std::int64_t columns;
  __device__ void load(float (&values)[kNeighbours], std::int64_t row, std::int64_t column) const {
    Elements<bf16, kNeighbours> gate, up;
    gate.load(gate_up + row * 2 * columns + column);
    up.load(gate_up + row * 2 * columns + columns + column);
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) values[i] = swiglu<bf16>(gate.get(i), up.get(i));
  }
};

struct SwigluOutStored : SwigluOut {
  bf16* plain;
  __device__ void load(float (&values)[kNeighbours], std::int64_t row, std::int64_t column) const {
    SwigluOut::load(values, row, column);
    Elements<bf16, kNeighbours> elements;
    elements.set(values);
    elements.store_streaming(plain + row * columns + column);
  }
};

template <Fp8Format kFormat, typename Source>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(Fp8Target to, Source source, std::int64_t N, std::int64_t C) {
  __shared__ unsigned tile[kTileWords], scratch[3];
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * kTileRows;
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * kTileColumns;
  const std::int64_t column = first_column + threadIdx.x % kRowThreads * kNeighbours;
  const float scale = to.writes() ? *to.scale : 1.0f;
  ThreadCounters counters;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int tile_row = round * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
    const std::int64_t row = first_row + tile_row;
    if (row >= N || column >= C) continue;
    float values[kNeighbours];
    source.load(values, row, column);
    unsigned words[kNeighbours / 4];
#pragma unroll
    for (int i = 0; i < kNeighbours / 4; ++i) words[i] = round_four<kFormat>(values + 4 * i, scale, counters);
    if (to.codes != nullptr) {
      *reinterpret_cast<uint4*>(to.codes + row * C + column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (to.transposed == nullptr) continue;
    unsigned* const place = tile + tile_row * kTileStride + threadIdx.x % kRowThreads * (kNeighbours / 4);
#pragma unroll
    for (int i = 0; i < kNeighbours / 4; ++i) place[i] = words[i];
  }
  if (to.transposed != nullptr) {
    __syncthreads();
    store_transposed(to.transposed, tile, first_row, first_column, N, C, 0);
  }
  add_counters(to, counters, scratch);
}

__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(Fp8Target dgate_up, Fp8Target out, const bf16* dout, const bf16* gate_up, std::int64_t N,
                           std::int64_t F) {
  __shared__ unsigned tiles[3][kTileWords], scratch[3];
  constexpr int kHalf = kNeighbours / 2;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * kTileRows;
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * kTileColumns;
  const std::int64_t column = first_column + threadIdx.x % kRowThreads * kNeighbours;
  const float gradient_scale = dgate_up.writes() ? *dgate_up.scale : 1.0f, out_scale = out.writes() ? *out.scale : 1.0f;
  ThreadCounters gradient_counters, out_counters;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int tile_row = round * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
    const std::int64_t row = first_row + tile_row;
    if (row >= N || column >= F) continue;
    unsigned words[3][kNeighbours / 4];  // codes of the gradients of gate and up, and of out
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t at = row * 2 * F + column + half * kHalf;
      const GatedGradients<Swiglu, bf16, kHalf> d(dout + row * F + column + half * kHalf, gate_up + at, F);
#pragma unroll
      for (int i = 0; i < kHalf / 4; ++i) {
        const int word = half * (kHalf / 4) + i;
        words[0][word] = round_four<Fp8Format::e5m2>(d.gate + 4 * i, gradient_scale, gradient_counters);
        words[1][word] = round_four<Fp8Format::e5m2>(d.up + 4 * i, gradient_scale, gradient_counters);
        words[2][word] = round_four<Fp8Format::e4m3>(d.out + 4 * i, out_scale, out_counters);
      }
    }
    const auto store = [](std::uint8_t* codes, const unsigned* w) {
      *reinterpret_cast<uint4*>(codes) = make_uint4(w[0], w[1], w[2], w[3]);
    };
    if (dgate_up.codes != nullptr) {
      store(dgate_up.codes + row * 2 * F + column, words[0]);
      store(dgate_up.codes + row * 2 * F + F + column, words[1]);
    }
    if (out.codes != nullptr) store(out.codes + row * F + column, words[2]);
    const int place = tile_row * kTileStride + threadIdx.x % kRowThreads * (kNeighbours / 4);
#pragma unroll
    for (int i = 0; i < kNeighbours / 4; ++i) {
      tiles[0][place + i] = words[0][i];
      tiles[1][place + i] = words[1][i];
      tiles[2][place + i] = words[2][i];
    }
  }
  __syncthreads();
  if (dgate_up.transposed != nullptr) {
    store_transposed(dgate_up.transposed, tiles[0], first_row, first_column, N, F, 0);
    store_transposed(dgate_up.transposed, tiles[1], first_row, first_column, N, F, F);
  }
  if (out.transposed != nullptr) store_transposed(out.transposed, tiles[2], first_row, first_column, N, F, 0);
  add_counters(dgate_up, gradient_counters, scratch);
  add_counters(out, out_counters, scratch);
}

// A thread has eight columns of gate and of up, and reads everything that its writes overwrite before it writes.
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_plain_kernel(Fp8Target dgate_up, bf16* plain_dgate_up, bf16* plain_out, const bf16* dout,
                                 const bf16* gate_up, std::int64_t F, unsigned parts) {
  constexpr int kCount = 8;
  __shared__ unsigned scratch[3];
  const std::int64_t row = blockIdx.x / parts;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x % parts) * kThreads + threadIdx.x) * kCount;
  const float scale = *dgate_up.scale;
  ThreadCounters counters;
  if (column < F) {
    const std::int64_t at = row * 2 * F + column;
    const GatedGradients<Swiglu, bf16, kCount> d(dout + row * F + column, gate_up + at, F);
    Elements<bf16, kCount> result;
    const auto store = [&](const float(&values)[kCount], std::int64_t to) {
      result.set(values);
      result.store_streaming(plain_dgate_up + to);
      const unsigned low = round_four<Fp8Format::e5m2>(values, scale, counters);
      const unsigned high = round_four<Fp8Format::e5m2>(values + 4, scale, counters);
      *reinterpret_cast<uint2*>(dgate_up.codes + to) = make_uint2(low, high);
    };
    store(d.gate, at);
    store(d.up, at + F);
    if (plain_out != nullptr) {
      result.set(d.out);
      result.store_streaming(plain_out + row * F + column);
    }
  }
  add_counters(dgate_up, counters, scratch);
}

__global__ void __launch_bounds__(kThreads)
    transpose_kernel(std::uint8_t* transposed, const std::uint8_t* codes, std::int64_t N, std::int64_t C) {
  __shared__ unsigned tile[kTileWords];
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * kTileRows;
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * kTileColumns;
  const int group = threadIdx.x % kRowThreads;
  const std::int64_t column = first_column + group * kNeighbours;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int tile_row = round * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
    const std::int64_t row = first_row + tile_row;
    if (row >= N || column >= C) continue;
    const uint4 words = *reinterpret_cast<const uint4*>(codes + row * C + column);
    unsigned* const place = tile + tile_row * kTileStride + group * (kNeighbours / 4);
    place[0] = words.x;
    place[1] = words.y;
    place[2] = words.z;
    place[3] = words.w;
  }
  __syncthreads();
  store_transposed(transposed, tile, first_row, first_column, N, C, 0);
}

__global__ void current_scale_kernel(float* scale, float* inverse, const Fp8Counters* counters, Fp8Format format) {
  const std::uint32_t amax = counters->amax_bits;
  const int exponent = amax < 0x7F800000u ? fp8_exponent(amax, format) : 0;
  *scale = __uint_as_float(fp8_scale_bits(exponent));
  *inverse = __uint_as_float(fp8_scale_bits(-exponent));
}

dim3 tiles_of(std::int64_t N, std::int64_t C) {
  return {static_cast<unsigned>(ceil_div(C, kTileColumns)), static_cast<unsigned>(ceil_div(N, kTileRows))};
}

}  // namespace

void quantize_fp8(Fp8Format format, const Fp8Target& to, const bf16* x, std::int64_t N, std::int64_t C,
                  cudaStream_t stream) {
  if (N == 0) return;
  if (format == Fp8Format::e4m3) {
    quantize_kernel<Fp8Format::e4m3><<<tiles_of(N, C), kThreads, 0, stream>>>(to, Plain{x, C}, N, C);
  } else {
    quantize_kernel<Fp8Format::e5m2><<<tiles_of(N, C), kThreads, 0, stream>>>(to, Plain{x, C}, N, C);
  }
  check_launch("quantize_fp8");
}

void transpose_fp8(std::uint8_t* transposed, const std::uint8_t* codes, std::int64_t N, std::int64_t C,
                   cudaStream_t stream) {
  if (N == 0) return;
  transpose_kernel<<<tiles_of(N, C), kThreads, 0, stream>>>(transposed, codes, N, C);
  check_launch("transpose_fp8");
}

void swiglu_forward_fp8(const Fp8Target& out, const bf16* gate_up, std::int64_t N, std::int64_t F, cudaStream_t stream,
                        bf16* plain) {
  if (N == 0) return;
  const SwigluOut source{gate_up, F};
  if (plain != nullptr) {
    quantize_kernel<Fp8Format::e4m3>
        <<<tiles_of(N, F), kThreads, 0, stream>>>(out, SwigluOutStored{source, plain}, N, F);
  } else {
    quantize_kernel<Fp8Format::e4m3><<<tiles_of(N, F), kThreads, 0, stream>>>(out, source, N, F);
  }
  check_launch("swiglu_forward_fp8");
}

void swiglu_backward_fp8(const Fp8Target& dgate_up, const Fp8Target& out, const bf16* dout, const bf16* gate_up,
                         std::int64_t N, std::int64_t F, cudaStream_t stream) {
  if (N == 0) return;
  swiglu_backward_kernel<<<tiles_of(N, F), kThreads, 0, stream>>>(dgate_up, out, dout, gate_up, N, F);
  check_launch("swiglu_backward_fp8");
}

void swiglu_backward_fp8(const Fp8Target& dgate_up, bf16* plain_dgate_up, bf16* plain_out, const bf16* dout,
                         const bf16* gate_up, std::int64_t N, std::int64_t F, cudaStream_t stream) {
  if (dgate_up.codes == nullptr || dgate_up.transposed != nullptr) {
    fail(Exit::internal, "swiglu_backward_fp8: the gradient is written as rows beside bf16");
  }
  if (N == 0) return;
  const auto parts = static_cast<unsigned>(ceil_div(F, 8 * kThreads));
  swiglu_backward_plain_kernel<<<static_cast<unsigned>(N * parts), kThreads, 0, stream>>>(
      dgate_up, plain_dgate_up, plain_out, dout, gate_up, F, parts);
  check_launch("swiglu_backward_fp8");
}

void fp8_current_scale(float* scale, float* inverse, const Fp8Counters* counters, Fp8Format format,
                       cudaStream_t stream) {
  current_scale_kernel<<<1, 1, 0, stream>>>(scale, inverse, counters, format);
  check_launch("fp8_current_scale");
}

}  // namespace weft::cuda
