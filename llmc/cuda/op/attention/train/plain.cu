// Attention on CUDA cores in fp32, for float tensors and for 16-bit views that 16-byte copies cannot read. It shares
// only the formulas with the tensor core kernels, and is meant to be correct, not fast.
//
// A block of 8 warps keeps its rows (queries; for dK and dV: keys) in shared memory and walks the others in tiles of
// 32, one a lane. One lane computes a whole score. In the sums over a tile (O, dQ, dK, dV) a lane has columns d = lane
// + 32 i. A tile's rows are HS + 1 floats apart, so that both ways of reading it touch 32 different banks.

#include <cstdint>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/attention/train/hide_past.cuh"
#include "llmc/cuda/op/attention/train/launch.cuh"
#include "llmc/cuda/op/attention/train/paths.h"

namespace weft::cuda {

namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarpSize, kTile = kWarpSize;

// Rows of a warp and columns of a lane, for HS up to 128 and up to 256.
template <int HeadDims>
struct Room {
  static constexpr int kRows = HeadDims <= 128 ? 4 : 2, kSlots = HeadDims / kWarpSize;
  static constexpr int kBlockRows = kWarps * kRows;
};

// Loads `count` rows of a head as fp32, `stride` floats apart; rows from `valid` on are zero.
template <typename T>
__device__ void load_rows(float* rows, int stride, int count, HeadViewOf<const T> view, std::int64_t b,
                          std::int64_t first, std::int64_t h, std::int64_t valid, int HS) {
  for (int index = threadIdx.x; index < count * HS; index += kThreads) {
    const int row = index / HS, d = index % HS;
    rows[row * stride + d] = row < valid ? to_float(view.at(b, first + row, h)[d]) : 0.0f;
  }
}

// dots[r] = rows[r] . lane's row of the tile.
template <int R>
__device__ void dot_products(float (&dots)[R], const float* rows, const float* tile, int HS) {
  const float* own = tile + threadIdx.x % kWarpSize * (HS + 1);
#pragma unroll
  for (int r = 0; r < R; ++r) dots[r] = 0;
  for (int d = 0; d < HS; ++d) {
#pragma unroll
    for (int r = 0; r < R; ++r) dots[r] = fmaf(rows[r * HS + d], own[d], dots[r]);
  }
}

// sums[r][i] += sum over the tile's rows j of (lane j's weights[r]) * tile[j][lane + 32 i].
template <int R, int Slots>
__device__ void add_weighted(float (&sums)[R][Slots], const float (&weights)[R], const float* tile, int HS) {
  const int lane = threadIdx.x % kWarpSize;
  for (int j = 0; j < kTile; ++j) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float weight = __shfl_sync(~0u, weights[r], j);
#pragma unroll
      for (int i = 0; i < Slots; ++i) {
        const int d = lane + i * kWarpSize;
        if (d < HS) sums[r][i] = fmaf(weight, tile[j * (HS + 1) + d], sums[r][i]);
      }
    }
  }
}

template <typename T, int R, int Slots>
__device__ void store_sums(const float (&sums)[R][Slots], HeadViewOf<T> view, std::int64_t b, std::int64_t first,
                           std::int64_t h, std::int64_t end, int HS, const float (&factor)[R]) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      const int d = threadIdx.x % kWarpSize + i * kWarpSize;
      if (first + r < end && d < HS) view.at(b, first + r, h)[d] = from_float<T>(sums[r][i] * factor[r]);
    }
  }
}

// The rows of a block whose rows are queries: those of one head, the last block first.
struct QueryBlock {
  int HS, lane, warp_row;  // warp_row: the warp's first row in the block
  std::int64_t b, h, kv;
  int first_query, first_row;  // first query of the block, of the warp
};
template <int HeadDims>
__device__ QueryBlock query_block(const AttentionShape& shape) {
  const int warp_row = threadIdx.x / kWarpSize * Room<HeadDims>::kRows;
  const std::int64_t h = blockIdx.x % shape.NH;
  const int first_query = static_cast<int>(gridDim.y - 1 - blockIdx.y) * Room<HeadDims>::kBlockRows;
  return {static_cast<int>(shape.HS),
          static_cast<int>(threadIdx.x % kWarpSize),
          warp_row,
          blockIdx.x / shape.NH,
          h,
          h / (shape.NH / shape.NKV),
          first_query,
          first_query + warp_row};
}

// The first key of the first tile that a block of queries sees.
__device__ inline int first_tile(const AttentionShape& shape, std::int64_t b, int first_query) {
  return first_visible_key(shape, b, first_query) / kTile * kTile;
}

// ---- forward ----------------------------------------------------------------------------------------------------------

template <typename T, int HeadDims>
__global__ void __launch_bounds__(kThreads)
    plain_forward_kernel(const __grid_constant__ ForwardArguments<T> arguments) {
  constexpr int R = Room<HeadDims>::kRows, kSlots = Room<HeadDims>::kSlots, kBlockRows = Room<HeadDims>::kBlockRows;
  extern __shared__ float shared_floats[];
  const AttentionShape& shape = arguments.shape;
  const auto [HS, lane, warp_row, b, h, kv, first_query, first_row] = query_block<HeadDims>(shape);
  float *Q = shared_floats, *K = Q + kBlockRows * HS, *V = K + kTile * (HS + 1);
  load_rows(Q, HS, kBlockRows, arguments.q, b, first_query, h, shape.TQ - first_query, HS);

  const float c = shape.scale * kLog2E;
  float maximum[R], sum[R], O[R][kSlots] = {};
  int begin[R];
#pragma unroll
  for (int r = 0; r < R; ++r) maximum[r] = -INFINITY, sum[r] = 0, begin[r] = first_visible_key(shape, b, first_row + r);
  const int end = end_visible_key(shape, first_query + kBlockRows - 1);
  for (int first_key = first_tile(shape, b, first_query); first_key < end; first_key += kTile) {
    __syncthreads();  // no thread reads the previous tile any more
    load_rows(K, HS + 1, kTile, arguments.k, b, first_key, kv, shape.TK - first_key, HS);
    load_rows(V, HS + 1, kTile, arguments.v, b, first_key, kv, shape.TK - first_key, HS);
    __syncthreads();
    float P[R];
    dot_products(P, Q + warp_row * HS, K, HS);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int key = first_key + lane;
      const bool visible = key >= begin[r] && key < end_visible_key(shape, first_row + r);
      const float score = visible ? P[r] * c : -INFINITY, raised = fmaxf(maximum[r], warp_max(score));
      const float shrink = exp2f(maximum[r] - finite_maximum<true>(raised));
      P[r] = exp2f(score - finite_maximum<true>(raised));
      sum[r] = sum[r] * shrink + warp_sum(P[r]);
      maximum[r] = raised;
#pragma unroll
      for (int i = 0; i < kSlots; ++i) O[r][i] *= shrink;
    }
    add_weighted(O, P, V, HS);
  }

  float inverse[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    inverse[r] = 1 / sum[r];
    if (arguments.lse && lane == 0 && first_row + r < shape.TQ)
      arguments.lse[blockIdx.x * shape.TQ + first_row + r] = maximum[r] * kLn2 + logf(sum[r]);
  }
  store_sums(O, arguments.out, b, first_row, h, shape.TQ, HS, inverse);
}

// ---- backward ---------------------------------------------------------------------------------------------------------

// One warp a query: (lse2, D).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    plain_statistics_kernel(const __grid_constant__ BackwardArguments<T> arguments) {
  const AttentionShape& shape = arguments.shape;
  const std::int64_t b = blockIdx.x / shape.NH, h = blockIdx.x % shape.NH;
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.y) * kWarps + threadIdx.x / kWarpSize;
  if (t >= shape.TQ) return;
  const T *dO = arguments.dout.at(b, t, h), *O = arguments.out.at(b, t, h);
  const int lane = threadIdx.x % kWarpSize;
  float D = 0;
  for (int d = lane; d < shape.HS; d += kWarpSize) D = fmaf(to_float(dO[d]), to_float(O[d]), D);
  D = warp_sum(D);
  if (lane == 0)
    arguments.statistics[blockIdx.x * padded_queries(shape.TQ) + t] = {
        arguments.lse[blockIdx.x * shape.TQ + t] * kLog2E, D};
}

template <typename T, int HeadDims>
__global__ void __launch_bounds__(kThreads)
    plain_query_gradient_kernel(const __grid_constant__ BackwardArguments<T> arguments) {
  constexpr int R = Room<HeadDims>::kRows, kSlots = Room<HeadDims>::kSlots, kBlockRows = Room<HeadDims>::kBlockRows;
  extern __shared__ float shared_floats[];
  const AttentionShape& shape = arguments.shape;
  const auto [HS, lane, warp_row, b, h, kv, first_query, first_row] = query_block<HeadDims>(shape);
  float *Q = shared_floats, *dO = Q + kBlockRows * HS, *K = dO + kBlockRows * HS, *V = K + kTile * (HS + 1);
  load_rows(Q, HS, kBlockRows, arguments.q, b, first_query, h, shape.TQ - first_query, HS);
  load_rows(dO, HS, kBlockRows, arguments.dout, b, first_query, h, shape.TQ - first_query, HS);
  RowStatistics rows[R];
  int begin[R];
  float scale[R], dQ[R][kSlots] = {};
#pragma unroll
  for (int r = 0; r < R; ++r) {
    begin[r] = first_visible_key(shape, b, first_row + r);
    const std::int64_t row = blockIdx.x * padded_queries(shape.TQ) + first_row + r;
    rows[r] = first_row + r < shape.TQ ? arguments.statistics[row] : RowStatistics{INFINITY, 0};
    scale[r] = shape.scale;
  }

  const int end = end_visible_key(shape, first_query + kBlockRows - 1);
  for (int first_key = first_tile(shape, b, first_query); first_key < end; first_key += kTile) {
    __syncthreads();  // no thread reads the previous tile any more
    load_rows(K, HS + 1, kTile, arguments.k, b, first_key, kv, shape.TK - first_key, HS);
    load_rows(V, HS + 1, kTile, arguments.v, b, first_key, kv, shape.TK - first_key, HS);
    __syncthreads();
    float S[R], dP[R], dS[R];
    dot_products(S, Q + warp_row * HS, K, HS);
    dot_products(dP, dO + warp_row * HS, V, HS);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int key = first_key + lane;
      const bool visible = key >= begin[r] && key < end_visible_key(shape, first_row + r);
      dS[r] = visible ? exp2f(S[r] * shape.scale * kLog2E - rows[r].lse2) * (dP[r] - rows[r].D) : 0.0f;
    }
    add_weighted(dQ, dS, K, HS);
  }
  store_sums(dQ, arguments.dq, b, first_row, h, shape.TQ, HS, scale);
}

template <typename T, int HeadDims>
__global__ void __launch_bounds__(kThreads)
    plain_key_gradient_kernel(const __grid_constant__ BackwardArguments<T> arguments) {
  constexpr int R = Room<HeadDims>::kRows, kSlots = Room<HeadDims>::kSlots, kBlockRows = Room<HeadDims>::kBlockRows;
  extern __shared__ float shared_floats[];
  const AttentionShape& shape = arguments.shape;
  const int HS = static_cast<int>(shape.HS), lane = threadIdx.x % kWarpSize, warp_row = threadIdx.x / kWarpSize * R;
  const std::int64_t b = blockIdx.x / shape.NKV, kv = blockIdx.x % shape.NKV, group = shape.NH / shape.NKV;
  const int first_key = static_cast<int>(blockIdx.y) * kBlockRows, first_row = first_key + warp_row;
  float *K = shared_floats, *V = K + kBlockRows * HS, *Q = V + kBlockRows * HS, *dO = Q + kTile * (HS + 1);
  load_rows(K, HS, kBlockRows, arguments.k, b, first_key, kv, shape.TK - first_key, HS);
  load_rows(V, HS, kBlockRows, arguments.v, b, first_key, kv, shape.TK - first_key, HS);
  float scale[R], one[R], dK[R][kSlots] = {}, dV[R][kSlots] = {};
#pragma unroll
  for (int r = 0; r < R; ++r) scale[r] = shape.scale, one[r] = 1;

  // The first query that sees a key of this block, rounded down to the first of a tile.
  const int past = static_cast<int>(shape.causal ? shape.TK - shape.TQ : shape.TK);
  const int begin = first_key > past ? (first_key - past) / kTile * kTile : 0;
  const int end = queries_before(shape, b, first_key + kBlockRows);
  for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
    for (int first_query = begin; first_query < end; first_query += kTile) {
      __syncthreads();  // no thread reads the previous tile any more
      load_rows(Q, HS + 1, kTile, arguments.q, b, first_query, h, shape.TQ - first_query, HS);
      load_rows(dO, HS + 1, kTile, arguments.dout, b, first_query, h, shape.TQ - first_query, HS);
      __syncthreads();
      const int t = first_query + lane;
      const std::int64_t row = (b * shape.NH + h) * padded_queries(shape.TQ) + t;
      const RowStatistics own = t < shape.TQ ? arguments.statistics[row] : RowStatistics{INFINITY, 0};
      const int seen = first_visible_key(shape, b, t);
      float S[R], dP[R], P[R], dS[R];
      dot_products(S, K + warp_row * HS, Q, HS);
      dot_products(dP, V + warp_row * HS, dO, HS);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const bool visible = first_row + r >= seen && first_row + r < end_visible_key(shape, t);
        P[r] = visible ? exp2f(S[r] * shape.scale * kLog2E - own.lse2) : 0.0f;
        dS[r] = P[r] * (dP[r] - own.D);
      }
      add_weighted(dV, P, dO, HS);
      add_weighted(dK, dS, Q, HS);
    }
  }
  store_sums(dK, arguments.dk, b, first_row, kv, shape.TK, HS, scale);
  store_sums(dV, arguments.dv, b, first_row, kv, shape.TK, HS, one);
}

// ---- launch -----------------------------------------------------------------------------------------------------------

template <typename T, int HeadDims>
void launch_forward(const ForwardArguments<T>& arguments, cudaStream_t stream) {
  const AttentionShape& shape = arguments.shape;
  constexpr int kRows = Room<HeadDims>::kBlockRows;
  const std::int64_t floats = kRows * shape.HS + 2 * kTile * (shape.HS + 1);
  launch_attention(plain_forward_kernel<T, HeadDims>, "attention forward, plain", shape.B * shape.NH,
                   ceil_div(shape.TQ, kRows), kThreads, floats * 4, stream, arguments);
}

template <typename T, int HeadDims>
void launch_backward(const BackwardArguments<T>& arguments, cudaStream_t stream) {
  const AttentionShape& shape = arguments.shape;
  constexpr int kRows = Room<HeadDims>::kBlockRows;
  const std::int64_t floats = 2 * kRows * shape.HS + 2 * kTile * (shape.HS + 1);
  launch_attention(plain_statistics_kernel<T>, "attention backward, plain statistics", shape.B * shape.NH,
                   ceil_div(shape.TQ, kWarps), kThreads, 0, stream, arguments);
  launch_attention(plain_query_gradient_kernel<T, HeadDims>, "attention backward, plain queries", shape.B * shape.NH,
                   ceil_div(shape.TQ, kRows), kThreads, floats * 4, stream, arguments);
  launch_attention(plain_key_gradient_kernel<T, HeadDims>, "attention backward, plain keys", shape.B * shape.NKV,
                   ceil_div(shape.TK, kRows), kThreads, floats * 4, stream, arguments);
}

}  // namespace

template <typename T>
void plain_forward(const ForwardArguments<T>& arguments, cudaStream_t stream) {
  if (arguments.shape.HS <= 128) return launch_forward<T, 128>(arguments, stream);
  launch_forward<T, 256>(arguments, stream);
}

template <typename T>
void plain_backward(const BackwardArguments<T>& arguments, cudaStream_t stream) {
  if (arguments.shape.HS <= 128) return launch_backward<T, 128>(arguments, stream);
  launch_backward<T, 256>(arguments, stream);
}

template void plain_forward<bf16>(const ForwardArguments<bf16>&, cudaStream_t);
template void plain_forward<fp16>(const ForwardArguments<fp16>&, cudaStream_t);
template void plain_forward<float>(const ForwardArguments<float>&, cudaStream_t);
template void plain_backward<bf16>(const BackwardArguments<bf16>&, cudaStream_t);
template void plain_backward<fp16>(const BackwardArguments<fp16>&, cudaStream_t);
template void plain_backward<float>(const BackwardArguments<float>&, cudaStream_t);

}  // namespace weft::cuda
