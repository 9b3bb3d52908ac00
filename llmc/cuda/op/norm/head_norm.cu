// RMSNorm of the heads of q and k (Henry et al., 2020), arithmetic in fp32, with r = 1 / sqrt(mean(x^2) + eps) and
// g = dout (w + weight_offset) (the formulas of llmc/cpu/head_norm.cpp):
//
//   y = x r (w + weight_offset),   dx = r g - x r^3 mean(g x),   dw += dout x r
//
// A head lies in the registers of 4 to 32 neighbouring lanes, so that its sums need no shared memory, and a block has as
// many heads of a token as it can. The partner of an element's rotation comes from another lane, rounded, as rope.cu would
// read it. r is computed again in backward, from the x that is read for dx anyway. Bytes moved,
// of E bytes an element: forward reads and writes N (NH + NKV) HS E, and writes as much again if it keeps x; backward
// reads dout and x and writes dx, 3 N (NH + NKV) HS E.
#include "llmc/cuda/op/norm/head_norm.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/elementwise/rotate_pair.cuh"
#include "llmc/cuda/op/norm/column_sums.cuh"

namespace weft::cuda {

namespace {

constexpr int kMaxHeadSize = 256;
constexpr int kForwardThreads = 768;   // 48 heads of 128 elements in 16 bits, so that a decoded token needs one pass
constexpr int kBackwardThreads = 512;  // more would take all shared memory for the sums of the weights' gradients
constexpr int kMaxBackwardBlocks = 640;

// Lane i of a head has chunks i, i + kLanes, ... of 16 bytes, as far as the head has so many.
template <typename T, int kLanes_, int kChunks_>
struct HeadSpread {
  static constexpr int kLanes = kLanes_, kChunks = kChunks_;
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T));  // of a chunk
  static constexpr int kColumns = kLanes * kChunks * kElements;       // at least HS
  using Chunk = Elements<T, kElements>;

  static __device__ int lane() { return threadIdx.x % kLanes; }
  static __device__ int slot() { return threadIdx.x / kLanes; }  // which of the block's heads
  static __device__ int column(int chunk) { return (chunk * kLanes + lane()) * kElements; }

  static __device__ void load(Chunk (&chunks)[kChunks], const T* head, int HS) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (head != nullptr && column(c) < HS) {
        chunks[c].load(head + column(c));
      } else {
        chunks[c].clear();
      }
    }
  }
  static __device__ void store(const Chunk (&chunks)[kChunks], T* head, int HS) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (column(c) < HS) chunks[c].store(head + column(c));
    }
  }
};

template <typename T, int kElements>
__device__ float sum_of_products(const Elements<T, kElements>& a, const Elements<T, kElements>& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) sum += a.get(i) * b.get(i);
  return sum;
}

__device__ float inverse_rms(float squares, const HeadNormShape& shape) {
  return rsqrtf(squares * (1.0f / static_cast<float>(shape.HS)) + shape.eps);
}

__device__ float with_offset(float weight, const HeadNormShape& shape) {
  return shape.weight_offset != 0 ? weight + shape.weight_offset : weight;
}

// Head h of a token: of q, then of k.
template <typename T>
__device__ T* head_of(const HeadViewOf<T>& q, const HeadViewOf<T>& k, std::int64_t b, std::int64_t t, int h, int NH) {
  return h < NH ? q.at(b, t, h) : k.at(b, t, h - NH);
}

// Chunk `chunk` of the lane's head, as far as there is one: it may lie in another lane, whose chunks are `x`. Called by all
// lanes.
template <typename S>
__device__ typename S::Chunk chunk_of_head(const typename S::Chunk (&x)[S::kChunks], int chunk) {
  typename S::Chunk found;
  auto* const to = reinterpret_cast<unsigned*>(found.value);
#pragma unroll
  for (int c = 0; c < S::kChunks; ++c) {
    const auto* const from = reinterpret_cast<const unsigned*>(x[c].value);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const unsigned word = __shfl_sync(~0u, from[w], chunk % S::kLanes, S::kLanes);
      if (c == chunk / S::kLanes) to[w] = word;
    }
  }
  return found;
}

// Rotates a head by the angles at cos and sin [half]; called by all lanes. All heads of a token read the same ones, so most
// come from L1. (Through shared memory behind a barrier, or with two tokens a block, the kernel takes 15 % longer.)
template <typename S>
__device__ void rotate_head(typename S::Chunk (&x)[S::kChunks], const float* cos, const float* sin, int half) {
  typename S::Chunk partner[S::kChunks];
#pragma unroll
  for (int c = 0; c < S::kChunks; ++c) {
    const int column = S::column(c), of = column < half ? column + half : column - half;
    partner[c] = chunk_of_head<S>(x, column < 2 * half ? of / S::kElements : 0);
  }
#pragma unroll
  for (int c = 0; c < S::kChunks; ++c) {
    const int column = S::column(c);
    if (column >= 2 * half) continue;
    const bool low = column < half;
    Elements<float, S::kElements> cosine, sine;
    cosine.load(cos + (low ? column : column - half));
    sine.load(sin + (low ? column : column - half));
    float y[S::kElements];
#pragma unroll
    for (int i = 0; i < S::kElements; ++i)
      y[i] = rotated(x[c].get(i), partner[c].get(i), cosine.get(i), low ? -sine.get(i) : sine.get(i));
    x[c].set(y);
  }
}

// Block: one token.
template <typename T, typename S>
__global__ void __launch_bounds__(kForwardThreads)
    head_norm_kernel(const __grid_constant__ HeadNormShape shape, const __grid_constant__ HeadNormForward<T> io) {
  launch_dependents();
  const int NH = static_cast<int>(shape.NH), heads = NH + static_cast<int>(shape.NKV), HS = static_cast<int>(shape.HS);
  const unsigned tokens = static_cast<unsigned>(shape.T);
  const std::int64_t b = blockIdx.x / tokens, t = blockIdx.x % tokens;
  typename S::Chunk q_weight[S::kChunks], k_weight[S::kChunks];
  S::load(q_weight, io.q_weight, HS);
  S::load(k_weight, io.k_weight, HS);
  const int half = static_cast<int>(io.rope.half);
  const std::int64_t angles =
      half == 0 ? 0 : (t - (io.rope.document_starts != nullptr ? io.rope.document_starts[blockIdx.x] : 0)) * half;
  wait_for_predecessors();
  for (int first = 0; first < heads; first += blockDim.x / S::kLanes) {
    const int h = first + S::slot();
    const bool active = h < heads;
    T* const head = active ? head_of(io.q, io.k, b, t, h, NH) : nullptr;
    typename S::Chunk x[S::kChunks];
    S::load(x, head, HS);
    float squares = 0;
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c) squares += sum_of_products(x[c], x[c]);
    const float r = inverse_rms(lanes_sum<S::kLanes>(squares), shape);
    if (active && io.kept != nullptr)
      S::store(x, io.kept + (static_cast<std::int64_t>(blockIdx.x) * heads + h) * HS, HS);
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c) {
      float y[S::kElements];
#pragma unroll
      for (int i = 0; i < S::kElements; ++i) {
        const float weight = h < NH ? q_weight[c].get(i) : k_weight[c].get(i);
        y[i] = x[c].get(i) * r * with_offset(weight, shape);
      }
      x[c].set(y);
    }
    if (half > 0) rotate_head<S>(x, io.rope.cos + angles, io.rope.sin + angles, half);
    if (active) S::store(x, head, HS);
  }
}

// partial[d] = the sum over the block's heads of the d-th element of `sums`, which each lane has for its elements;
// without `counts` its sums are 0.
template <typename S>
__device__ void write_partial(float* partial, const float (&sums)[S::kChunks][S::kElements], float* shared, int HS,
                              bool counts = true) {
  __syncthreads();  // `shared` has been read
#pragma unroll
  for (int c = 0; c < S::kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < S::kElements; ++i) shared[S::slot() * S::kColumns + S::column(c) + i] = counts ? sums[c][i] : 0;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < HS; d += blockDim.x) {
    float sum = 0;
    for (int slot = 0; slot < static_cast<int>(blockDim.x) / S::kLanes; ++slot) sum += shared[slot * S::kColumns + d];
    partial[d] = sum;
  }
}

// Blocks loop over the tokens. partial [blocks][2][HS]: the gradients of both weights. kOneHead: the block has all heads of a
// token at once, so a thread has the same one of every token, and needs the sums of one weight's gradients alone.
template <typename T, typename S, bool kOneHead>
__global__ void __launch_bounds__(kBackwardThreads)
    head_norm_backward_kernel(const __grid_constant__ HeadNormShape shape,
                              const __grid_constant__ HeadNormBackward<T> io) {
  __shared__ float shared[kBackwardThreads * S::kChunks * S::kElements];
  launch_dependents();  // the successor waits for the end of this kernel; only its launch latency is hidden
  const int NH = static_cast<int>(shape.NH), heads = NH + static_cast<int>(shape.NKV), HS = static_cast<int>(shape.HS);
  const unsigned tokens = static_cast<unsigned>(shape.T), all = static_cast<unsigned>(shape.B) * tokens;
  constexpr int kSums = kOneHead ? 1 : 2;  // of q and of k
  const bool first_of_q = S::slot() < NH;
  typename S::Chunk weights[kSums][S::kChunks];
  S::load(weights[0], !kOneHead || first_of_q ? io.q_weight : io.k_weight, HS);
  if constexpr (!kOneHead) S::load(weights[1], io.k_weight, HS);
  float d_weight[kSums][S::kChunks][S::kElements] = {};
  for (unsigned token = blockIdx.x; token < all; token += gridDim.x) {
    const std::int64_t b = token / tokens, t = token % tokens;
    for (int first = 0; first < (kOneHead ? 1 : heads); first += blockDim.x / S::kLanes) {
      const int h = first + S::slot();
      const bool active = h < heads, second = !kOneHead && h >= NH;
      T* const gradient = active ? head_of(io.dq, io.dk, b, t, h, NH) : nullptr;
      typename S::Chunk dout[S::kChunks], x[S::kChunks];
      S::load(dout, gradient, HS);
      S::load(x, active ? io.kept + (static_cast<std::int64_t>(token) * heads + h) * HS : nullptr, HS);
      float squares = 0, products = 0, g[S::kChunks][S::kElements];  // of x x and of g x
#pragma unroll
      for (int c = 0; c < S::kChunks; ++c) {
        squares += sum_of_products(x[c], x[c]);
#pragma unroll
        for (int i = 0; i < S::kElements; ++i) {
          const float weight = second ? weights[kSums - 1][c].get(i) : weights[0][c].get(i);
          g[c][i] = dout[c].get(i) * with_offset(weight, shape);
          products += g[c][i] * x[c].get(i);
        }
      }
      const float r = inverse_rms(lanes_sum<S::kLanes>(squares), shape);
      const float slope = r * r * r * lanes_sum<S::kLanes>(products) * (1.0f / static_cast<float>(HS));
      if (!active) continue;
#pragma unroll
      for (int c = 0; c < S::kChunks; ++c) {
#pragma unroll
        for (int i = 0; i < S::kElements; ++i) {
          const float term = dout[c].get(i) * (x[c].get(i) * r);
          if (second) {
            d_weight[kSums - 1][c][i] += term;
          } else {
            d_weight[0][c][i] += term;
          }
          g[c][i] = r * g[c][i] - x[c].get(i) * slope;
        }
        dout[c].set(g[c]);
      }
      S::store(dout, gradient, HS);
    }
  }
  float* const partial = static_cast<float*>(io.workspace) + static_cast<std::int64_t>(blockIdx.x) * 2 * HS;
  if constexpr (kOneHead) {
    write_partial<S>(partial, d_weight[0], shared, HS, first_of_q);
    write_partial<S>(partial + HS, d_weight[0], shared, HS, !first_of_q);
  } else {
    write_partial<S>(partial, d_weight[0], shared, HS);
    write_partial<S>(partial + HS, d_weight[1], shared, HS);
  }
}

// ---- launchers --------------------------------------------------------------------------------------------------------

// How a head is spread depends on HS and the type alone, and with it the order of its sums.
template <typename T, typename Launch>
void with_spread(std::int64_t HS, const Launch& launch) {
  const std::int64_t chunks = HS * static_cast<std::int64_t>(sizeof(T)) / 16;
  if (chunks <= 4) return launch(HeadSpread<T, 4, 1>{});
  if (chunks <= 8) return launch(HeadSpread<T, 8, 1>{});
  if (chunks <= 16) return launch(HeadSpread<T, 16, 1>{});
  if (chunks <= 32) return launch(HeadSpread<T, 32, 1>{});
  if constexpr (sizeof(T) == 4) launch(HeadSpread<T, 32, 2>{});
}

// Threads of a block, at most `most`: those of all heads of a token, or of an equal share of them.
template <typename S>
int threads_for(const HeadNormShape& shape, int most) {
  const std::int64_t heads = shape.NH + shape.NKV, passes = ceil_div(heads * S::kLanes, most);
  return static_cast<int>(ceil_div(ceil_div(heads, passes) * S::kLanes, kWarpSize) * kWarpSize);
}

template <typename T>
void check_shape(const HeadNormShape& shape, const HeadViewOf<T>& q, const HeadViewOf<T>& k, const T* kept,
                 const T* q_weight, const T* k_weight) {
  const bool possible = shape.HS > 0 && shape.HS % 8 == 0 && shape.HS <= kMaxHeadSize && shape.NH > 0 && shape.NKV > 0;
  const std::int64_t strides =
      q.batch_stride | q.token_stride | q.head_stride | k.batch_stride | k.token_stride | k.head_stride;
  constexpr std::int64_t kPack = 16 / static_cast<std::int64_t>(sizeof(T));
  if (possible && aligned_to_16(q.data, k.data, kept, q_weight, k_weight) && strides % kPack == 0) return;
  fail(Exit::internal,
       "head_norm: %lld and %lld heads of %lld: expected a multiple of 8 up to %d, on 16-byte boundaries",
       static_cast<long long>(shape.NH), static_cast<long long>(shape.NKV), static_cast<long long>(shape.HS),
       kMaxHeadSize);
}

}  // namespace

template <typename T>
void head_norm_forward(const HeadNormShape& shape, const HeadNormForward<T>& io, cudaStream_t stream,
                       bool overlapping) {
  check_shape(shape, io.q, io.k, static_cast<const T*>(io.kept), io.q_weight, io.k_weight);
  if (!head_norm_rotates<T>(io.rope.half) || 2 * io.rope.half > shape.HS)
    fail(Exit::internal, "head_norm: rotates the first 2 x %lld of %lld elements, expected a multiple of 2 x %zu",
         static_cast<long long>(io.rope.half), static_cast<long long>(shape.HS), 16 / sizeof(T));
  if (shape.B * shape.T == 0) return;
  with_spread<T>(shape.HS, [&](auto spread) {
    using S = decltype(spread);
    const dim3 grid(static_cast<unsigned>(shape.B * shape.T)), block(threads_for<S>(shape, kForwardThreads));
    launch_chained(head_norm_kernel<T, S>, grid, block, 0, stream, overlapping, "head_norm_forward", shape, io);
  });
}

template <typename T>
void head_norm_backward(const HeadNormShape& shape, const HeadNormBackward<T>& io, cudaStream_t stream) {
  check_shape(shape, io.dq, io.dk, io.kept, io.q_weight, io.k_weight);
  if (shape.B * shape.T == 0) return;
  with_spread<T>(shape.HS, [&](auto spread) {
    using S = decltype(spread);
    const int threads = threads_for<S>(shape, kBackwardThreads);
    const bool one_head = shape.NH + shape.NKV <= threads / S::kLanes;
    const auto kernel = one_head ? head_norm_backward_kernel<T, S, true> : head_norm_backward_kernel<T, S, false>;
    const std::int64_t resident =
        resident_blocks(kernel, threads, 0, device_attribute(cudaDevAttrMultiProcessorCount), "head_norm_backward");
    const auto blocks =
        static_cast<unsigned>(std::min<std::int64_t>({resident, kMaxBackwardBlocks, shape.B * shape.T}));
    kernel<<<blocks, threads, 0, stream>>>(shape, io);
    check_launch("head_norm_backward");
    if (io.dq_weight == nullptr) return;
    norm_detail::finish_columns({{io.dq_weight, io.dk_weight}, {0, 1, -1, -1, -1}, 2, static_cast<int>(shape.HS)},
                                io.workspace, blocks, shape.HS, stream);
  });
}

std::size_t head_norm_backward_workspace(std::int64_t HS) {
  return static_cast<std::size_t>(kMaxBackwardBlocks * 2 * HS) * sizeof(float);
}

#define WEFT_INSTANTIATE(T)                                                                                \
  template void head_norm_forward<T>(const HeadNormShape&, const HeadNormForward<T>&, cudaStream_t, bool); \
  template void head_norm_backward<T>(const HeadNormShape&, const HeadNormBackward<T>&, cudaStream_t);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
