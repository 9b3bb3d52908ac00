// Forward on tensor cores, sm_80 and later. For one block of queries Q and each block of keys K, V in turn:
//
//   S = Q K^T;  m' = max(m, rowmax S);  P = 2^(c (S - m'));  l = l 2^(c (m - m')) + rowsum P;  O = O 2^(c (m - m')) + P V
//
// with c = scale log2 e, and at the end O / l, lse = scale m + ln l. (Dao et al., 2022, algorithm 1, in base 2, in
// which the hardware exponentiates.)
//
// Tiling, and why:
//  - A warp has 32 rows of queries (two m16 tiles; one where O would not fit the registers), so each K or V fragment
//    that ldmatrix loads feeds two MMAs. With 16 rows a warp, reading shared memory (128 bytes a clock) would take
//    longer than the MMAs. Four warps a block, two or three blocks a multiprocessor: one computes softmax while another
//    multiplies.
//  - S, P and O stay in registers from the first key to the last; shared memory holds Q, and K and V in two stages, so
//    that the copies of the next block overlap with this block's GEMMs, with one barrier a block. Devices with 99 KiB a
//    block run head dimension 128 with one stage.
//  - Keys go from first to last: the first block has a visible key for every row, so m is finite from then on. Unless past
//    keys are hidden: then a block of queries begins at the first key that one of them sees, rows without a visible key yet
//    have the maximum -infinity, and their weights are 0.
//  - The running maximum moves only when a row exceeds it by 2^8. Until then P is at most 256, which costs no accuracy
//    in the fp32 sums and the 16-bit floating-point P, and O need not be rescaled.
//  - Only blocks that cross a bound of what the rows see are masked; a warp skips blocks of which it sees nothing.
//  - The query blocks with the most keys start first, and heads are adjacent, so that the heads of a group read their K
//    and V from L2 at the same time and the last blocks to finish are short.

#include <cstdint>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/attention/train/hide_past.cuh"
#include "llmc/cuda/op/attention/train/launch.cuh"
#include "llmc/cuda/op/attention/train/mma.cuh"
#include "llmc/cuda/op/attention/train/paths.h"

namespace weft::cuda {

namespace {

template <int HeadDim, int Stages, bool HidesPast>
struct ForwardTiling {
  static constexpr int HS = HeadDim, kStages = Stages;
  static constexpr bool kHidesPast = HidesPast;
  static constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
  static constexpr int M = HS <= 128 ? 2 : 1;  // m16 tiles of a warp
  static constexpr int kWarpRows = M * 16, kQueries = kWarps * kWarpRows;
  static constexpr int kKeys = HS <= 128 ? 64 : 32;
  static constexpr int kBlocksPerMultiprocessor = HS <= 64 ? 3 : 2;
  static constexpr int kSharedBytes = Tile<bf16, HS>::bytes(kQueries + 2 * kStages * kKeys);
};

// Scores of keys from a row's limit on become -infinity; the limit grows by one a row on the diagonal.
template <int M, int N>
__device__ void mask_scores(Accumulators<M, N>& S, const AttentionShape& shape, int first_row, int first_key) {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int limit = end_visible_key(shape, first_row + m * 16 + half * 8 + g) - first_key;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (n * 8 + t * 2 + i >= limit) S.at[m][n][half * 2 + i] = -INFINITY;
      }
    }
  }
}

// The online softmax of a warp's rows. A thread has rows g and g + 8 of each m16 tile. The four threads of a quad share
// a row and agree on its maximum; each sums its own columns until the end.
template <int M, bool HidesPast>
struct OnlineSoftmax {
  static constexpr float kSlack = 8;  // a weight may reach 2^kSlack before the maximum in use moves
  float maximum[M][2], sum[M][2];
  float c;  // scale log2 e

  __device__ explicit OnlineSoftmax(float scale) : c(scale * kLog2E) {
#pragma unroll
    for (int m = 0; m < M; ++m) maximum[m][0] = maximum[m][1] = -INFINITY, sum[m][0] = sum[m][1] = 0;
  }

  // S becomes P; O and the sums are rescaled where the maximum has moved.
  template <int N, int NO>
  __device__ void update(Accumulators<M, N>& S, Accumulators<M, NO>& O) {
    float largest[M][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[m][half] = row_maximum(S, m, half);
        grown |= (largest[m][half] - maximum[m][half]) * c > kSlack;
      }
    }
    if (__any_sync(~0u, grown)) raise(largest, O);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float offset = finite_maximum<HidesPast>(maximum[m][half]) * c;
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& s = S.at[m][n][half * 2 + i];
            s = exp2_approximate(fmaf(s, c, -offset));
            sum[m][half] += s;
          }
        }
      }
    }
  }

  template <int N>
  __device__ static float row_maximum(const Accumulators<M, N>& S, int m, int half) {
    float largest = S.at[m][0][half * 2];
#pragma unroll
    for (int n = 0; n < N; ++n) largest = fmaxf(largest, fmaxf(S.at[m][n][half * 2], S.at[m][n][half * 2 + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  }

  template <int NO>
  __device__ void raise(const float (&largest)[M][2], Accumulators<M, NO>& O) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float raised = fmaxf(maximum[m][half], largest[m][half]);
        const float shrink = exp2_approximate((maximum[m][half] - finite_maximum<HidesPast>(raised)) * c);
        maximum[m][half] = raised;
        sum[m][half] *= shrink;
#pragma unroll
        for (int n = 0; n < NO; ++n) O.at[m][n][half * 2] *= shrink, O.at[m][n][half * 2 + 1] *= shrink;
      }
    }
  }

  // Divides O by the row sums. `lse` points to the warp's first row, of which `valid` exist.
  template <int NO>
  __device__ void finish(Accumulators<M, NO>& O, float* lse, int valid) {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[m][half] + __shfl_xor_sync(~0u, sum[m][half], 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const float inverse = 1 / total;
#pragma unroll
        for (int n = 0; n < NO; ++n) O.at[m][n][half * 2] *= inverse, O.at[m][n][half * 2 + 1] *= inverse;
        const int row = m * 16 + half * 8 + g;
        if (lse && t == 0 && row < valid) lse[row] = maximum[m][half] * c * kLn2 + logf(total);
      }
    }
  }
};

// Grid: x = batch and head (heads adjacent), y = blocks of queries, the last first.
template <typename T, typename Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocksPerMultiprocessor)
    forward_kernel(const __grid_constant__ ForwardArguments<T> arguments) {
  constexpr int HS = Tiling::HS, M = Tiling::M, kThreads = Tiling::kThreads;
  constexpr int kQueries = Tiling::kQueries, kKeys = Tiling::kKeys, kStages = Tiling::kStages;
  constexpr bool kHidesPast = Tiling::kHidesPast;
  using Rows = Tile<T, HS>;
  extern __shared__ __align__(16) unsigned char shared[];
  const AttentionShape& shape = arguments.shape;
  const std::int64_t b = blockIdx.x / shape.NH, h = blockIdx.x % shape.NH, kv = h / (shape.NH / shape.NKV);
  const int first_query = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kQueries;
  const int warp_row = threadIdx.x / kWarpSize * Tiling::kWarpRows;
  const int first_row = first_query + warp_row;  // first row of this warp

  const unsigned q_tile = shared_address(shared), kv_tiles = q_tile + Rows::bytes(kQueries);
  const auto load_keys = [&](int first_key, int stage) {
    const unsigned tile = kv_tiles + stage * Rows::bytes(2 * kKeys);
    const int valid = static_cast<int>(shape.TK) - first_key;
    Rows::template load<kKeys, kThreads>(tile, arguments.k.at(b, first_key, kv), arguments.k.token_stride, valid);
    Rows::template load<kKeys, kThreads>(tile + Rows::bytes(kKeys), arguments.v.at(b, first_key, kv),
                                         arguments.v.token_stride, valid);
    commit_copies();
  };
  Rows::template load<kQueries, kThreads>(q_tile, arguments.q.at(b, first_query, h), arguments.q.token_stride,
                                          static_cast<int>(shape.TQ) - first_query);
  int begin = 0, warp_begin = 0, unmasked_begin = 0;
  if constexpr (kHidesPast) {
    begin = first_visible_key(shape, b, first_query) / kKeys * kKeys;
    warp_begin = first_visible_key(shape, b, first_row);
    unmasked_begin = first_visible_key(shape, b, first_row + Tiling::kWarpRows - 1);
  }
  load_keys(begin, 0);

  const LeftOperand<T, HS, M> Q(q_tile + Rows::bytes(warp_row));
  Accumulators<M, HS / 8> O;
  O.clear();
  OnlineSoftmax<M, kHidesPast> softmax(shape.scale);
  const int end = end_visible_key(shape, first_query + kQueries - 1);
  const int warp_end = end_visible_key(shape, first_row + Tiling::kWarpRows - 1);
  const int unmasked_end = end_visible_key(shape, first_row);
  int stage = 0;
  for (int first_key = begin; first_key < end; first_key += kKeys) {
    wait_for_copies();
    __syncthreads();  // this stage is complete, and no thread reads the other one any more
    const unsigned k_tile = kv_tiles + stage * Rows::bytes(2 * kKeys), v_tile = k_tile + Rows::bytes(kKeys);
    if (kStages == 2 && first_key + kKeys < end) load_keys(first_key + kKeys, stage ^ 1);
    if (first_key < warp_end && (!kHidesPast || first_key + kKeys > warp_begin)) {
      Accumulators<M, kKeys / 8> S;
      S.clear();
      multiply_by_rows<T, HS>(S, Q, k_tile + Rows::lane_by_columns());
      if (first_key + kKeys > unmasked_end) mask_scores(S, shape, first_row, first_key);
      if constexpr (kHidesPast) {
        if (first_key < unmasked_begin) hide_past(S, shape, b, first_row, first_key, -INFINITY);
      }
      softmax.update(S, O);
      multiply_by_columns<T, HS>(O, S, v_tile + Rows::lane_by_rows());
    }
    if (kStages == 2) {
      stage ^= 1;
    } else if (first_key + kKeys < end) {
      __syncthreads();  // all warps are done with the only stage
      load_keys(first_key + kKeys, 0);
    }
  }

  const int valid = static_cast<int>(shape.TQ) - first_row;
  float* lse = arguments.lse ? arguments.lse + static_cast<std::int64_t>(blockIdx.x) * shape.TQ + first_row : nullptr;
  softmax.finish(O, lse, valid);
  T* staging =
      reinterpret_cast<T*>(shared) + warp_row * Rows::kStride;  // the warp's own rows of Q, which no other warp reads
  store_rows<T, HS>(O, staging, arguments.out.at(b, first_row, h), arguments.out.token_stride, valid);
}

template <typename T, typename Tiling>
void launch(const ForwardArguments<T>& arguments, cudaStream_t stream) {
  const AttentionShape& shape = arguments.shape;
  launch_attention(forward_kernel<T, Tiling>, "attention forward", shape.B * shape.NH,
                   ceil_div(shape.TQ, Tiling::kQueries), Tiling::kThreads, Tiling::kSharedBytes, stream, arguments);
}

}  // namespace

template <typename T>
void portable_forward(const ForwardArguments<T>& arguments, cudaStream_t stream, int shared_limit) {
  for_head_dimension(arguments.shape.HS, "attention forward", [&]<int HS>() {
    for_visibility(arguments.shape, [&]<bool HidesPast>() {
      using TwoStages = ForwardTiling<HS, 2, HidesPast>;
      if constexpr (TwoStages::kSharedBytes > kSharedBytesEverywhere) {
        if (shared_limit < TwoStages::kSharedBytes)
          return launch<T, ForwardTiling<HS, 1, HidesPast>>(arguments, stream);
      }
      launch<T, TwoStages>(arguments, stream);
    });
  });
}

template void portable_forward<bf16>(const ForwardArguments<bf16>&, cudaStream_t, int);
template void portable_forward<fp16>(const ForwardArguments<fp16>&, cudaStream_t, int);

}  // namespace weft::cuda
