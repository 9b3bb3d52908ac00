// Backward on tensor cores, sm_80 and later. P is recomputed block by block from the saved lse. With
// D = rowsum(dO * O):
//
//   P = 2^(c S - lse2);  dV = P^T dO;  dP = dO V^T;  dS = P * (dP - D);  dQ = scale dS K;  dK = scale dS^T Q
//
// with S = Q K^T, c = scale log2 e, lse2 = lse log2 e. (Dao et al., 2022, algorithm 4.)
//
// Two kernels, and why. One pass over the blocks needs 5 GEMMs, but a block of keys adds to dQ of every later query: by
// float atomics, whose sums change from run to run, or with blocks that wait for each other in a fixed order around
// fp32 sums in global memory. Here instead
//
//   query_gradient_kernel  has a block of queries and walks the keys:    S, dP, dQ            3 GEMMs
//   key_gradient_kernel    has a block of keys and walks the queries:    S^T, dP^T, dV, dK    4 GEMMs
//
// which is 7 instead of 5. The two recomputed GEMMs avoid atomics, waiting between blocks and fp32 dQ in memory: every
// sum stays in the registers of one warp from its first term to its last, in a fixed order. The key gradient kernel
// walks the queries of all heads of the group, so that dK and dV of grouped-query attention need no sum over heads in
// memory either.
//
// Tiling: a warp has 32 rows of queries or keys (16 at head dimension 256), so that each fragment read from shared
// memory feeds two MMAs. The streamed operand comes in two stages of shared memory; a warp works through a stage in
// chunks of kChunk rows, which bounds the registers of S and dP.
//
// query_gradient_kernel also computes D while it has dO in shared memory and stores (lse2, D) of each query for
// key_gradient_kernel.

#include <cstdint>
#include <type_traits>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/attention/train/hide_past.cuh"
#include "llmc/cuda/op/attention/train/launch.cuh"
#include "llmc/cuda/op/attention/train/mma.cuh"
#include "llmc/cuda/op/attention/train/paths.h"

namespace weft::cuda {

namespace {

// ---- dQ and the row statistics ----------------------------------------------------------------------------------------

template <int HeadDim, int Stages, bool HidesPast>
struct QueryTiling {
  static constexpr int HS = HeadDim, kStages = Stages;
  static constexpr bool kHidesPast = HidesPast;
  static constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
  static constexpr int M = HS <= 128 ? 2 : 1;
  static constexpr int kWarpRows = M * 16, kQueries = kWarps * kWarpRows;
  static constexpr int kKeys = HS <= 80 ? 64 : 32, kChunk = 32;
  static constexpr int kBlocksPerMultiprocessor = HS <= 64 ? 3 : 2;
  static constexpr int kSharedBytes = Tile<bf16, HS>::bytes(2 * kQueries + 2 * kStages * kKeys);
  static_assert(kStatisticsBlock % kQueries == 0);
};

// Computes (lse2, D) of the warp's rows g and g + 8 of each m16 tile, and stores them to `statistics` (the warp's row
// 0). Queries from `valid` on get lse2 = infinity, hence P = 0. `dO`: the warp's first tile row in shared memory, `O`:
// its first row in global memory.
template <typename T, int HS, int M>
__device__ void row_statistics(RowStatistics (&rows)[M][2], RowStatistics* statistics, const T* dO, const T* O,
                               std::int64_t token_stride, const float* lse, int valid) {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + g;
      float D = 0;
      if (row < valid) {
        for (int chunk = t; chunk < HS / 8; chunk += 4) {
          const Pack<T> left = load_pack(dO + row * Tile<T, HS>::kStride + chunk * 8);
          const Pack<T> right = load_pack(O + row * token_stride + chunk * 8);
#pragma unroll
          for (int i = 0; i < 8; ++i) D = fmaf(to_float(left.value[i]), to_float(right.value[i]), D);
        }
      }
      D += __shfl_xor_sync(~0u, D, 1);
      D += __shfl_xor_sync(~0u, D, 2);
      rows[m][half] = {row < valid ? lse[row] * kLog2E : INFINITY, D};
      if (t == 0) statistics[row] = rows[m][half];
    }
  }
}

// S becomes dS = P * (dP - D), 0 for keys from a row's limit on.
template <int M, int N>
__device__ void score_gradient(Accumulators<M, N>& S, const Accumulators<M, N>& dP, const RowStatistics (&rows)[M][2],
                               float c, bool masked, const AttentionShape& shape, int first_row, int first_key) {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowStatistics row = rows[m][half];
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          const float P = exp2_approximate(fmaf(S.at[m][n][i], c, -row.lse2));
          S.at[m][n][i] = P * (dP.at[m][n][i] - row.D);
        }
      }
      if (!masked) continue;
      const int limit = end_visible_key(shape, first_row + m * 16 + half * 8 + g) - first_key;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (n * 8 + t * 2 + i >= limit) S.at[m][n][half * 2 + i] = 0;
      }
    }
  }
}

// Grid: x = batch and head, y = blocks of queries, those with the most keys first.
template <typename T, typename Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocksPerMultiprocessor)
    query_gradient_kernel(const __grid_constant__ BackwardArguments<T> arguments) {
  constexpr int HS = Tiling::HS, M = Tiling::M, kThreads = Tiling::kThreads;
  constexpr int kQueries = Tiling::kQueries, kKeys = Tiling::kKeys, kChunk = Tiling::kChunk;
  constexpr bool kHidesPast = Tiling::kHidesPast;
  using Rows = Tile<T, HS>;
  extern __shared__ __align__(16) unsigned char shared[];
  const AttentionShape& shape = arguments.shape;
  const std::int64_t b = blockIdx.x / shape.NH, h = blockIdx.x % shape.NH, kv = h / (shape.NH / shape.NKV);
  const int first_query = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kQueries;
  const int warp_row = threadIdx.x / kWarpSize * Tiling::kWarpRows;
  const int first_row = first_query + warp_row;

  const unsigned q_tile = shared_address(shared), do_tile = q_tile + Rows::bytes(kQueries);
  const unsigned kv_tiles = do_tile + Rows::bytes(kQueries);
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
  Rows::template load<kQueries, kThreads>(do_tile, arguments.dout.at(b, first_query, h), arguments.dout.token_stride,
                                          static_cast<int>(shape.TQ) - first_query);
  int begin = 0, warp_begin = 0, unmasked_begin = 0;
  if constexpr (kHidesPast) {
    begin = first_visible_key(shape, b, first_query) / kKeys * kKeys;
    warp_begin = first_visible_key(shape, b, first_row);
    unmasked_begin = first_visible_key(shape, b, first_row + Tiling::kWarpRows - 1);
  }
  load_keys(begin, 0);
  wait_for_copies();
  __syncthreads();

  const LeftOperand<T, HS, M> Q(q_tile + Rows::bytes(warp_row)), dO(do_tile + Rows::bytes(warp_row));
  RowStatistics rows[M][2];
  row_statistics<T, HS>(rows, arguments.statistics + blockIdx.x * padded_queries(shape.TQ) + first_row,
                        reinterpret_cast<const T*>(shared) + (kQueries + warp_row) * Rows::kStride,
                        arguments.out.at(b, first_row, h), arguments.out.token_stride,
                        arguments.lse + static_cast<std::int64_t>(blockIdx.x) * shape.TQ + first_row,
                        static_cast<int>(shape.TQ) - first_row);

  Accumulators<M, HS / 8> dQ;
  dQ.clear();
  const float c = shape.scale * kLog2E;
  const int end = end_visible_key(shape, first_query + kQueries - 1);
  const int warp_end = end_visible_key(shape, first_row + Tiling::kWarpRows - 1);
  const int unmasked_end = end_visible_key(shape, first_row);
  int stage = 0;
  for (int first_key = begin; first_key < end; first_key += kKeys) {
    wait_for_copies();
    __syncthreads();  // this stage is complete, and no thread reads the other one any more
    const unsigned k_tile = kv_tiles + stage * Rows::bytes(2 * kKeys), v_tile = k_tile + Rows::bytes(kKeys);
    if (Tiling::kStages == 2 && first_key + kKeys < end) load_keys(first_key + kKeys, stage ^ 1);
#pragma unroll 1
    for (int chunk = 0; chunk < kKeys && first_key + chunk < warp_end; chunk += kChunk) {
      if (kHidesPast && first_key + chunk + kChunk <= warp_begin) continue;
      const unsigned k_chunk = k_tile + Rows::bytes(chunk), v_chunk = v_tile + Rows::bytes(chunk);
      Accumulators<M, kChunk / 8> S, dP;
      S.clear();
      dP.clear();
      multiply_by_rows<T, HS>(S, Q, k_chunk + Rows::lane_by_columns());
      multiply_by_rows<T, HS>(dP, dO, v_chunk + Rows::lane_by_columns());
      const bool masked = first_key + chunk + kChunk > unmasked_end;
      score_gradient(S, dP, rows, c, masked, shape, first_row, first_key + chunk);
      if constexpr (kHidesPast) {
        if (first_key + chunk < unmasked_begin) hide_past(S, shape, b, first_row, first_key + chunk, 0.0f);
      }
      multiply_by_columns<T, HS>(dQ, S, k_chunk + Rows::lane_by_rows());
    }
    if (Tiling::kStages == 2) {
      stage ^= 1;
    } else if (first_key + kKeys < end) {
      __syncthreads();  // all warps are done with the only stage
      load_keys(first_key + kKeys, 0);
    }
  }

  dQ.scale(shape.scale);
  T* staging = reinterpret_cast<T*>(shared) + warp_row * Rows::kStride;  // the warp's own rows of Q
  store_rows<T, HS>(dQ, staging, arguments.dq.at(b, first_row, h), arguments.dq.token_stride,
                    static_cast<int>(shape.TQ) - first_row);
}

// ---- dK and dV --------------------------------------------------------------------------------------------------------

// Two ways to divide the four GEMMs among warps:
//
//  - Whole: a warp computes all of them for its 32 keys, with P and dS in registers. dK and dV take HS registers a
//    thread each.
//  - Paired, where registers do not suffice for that: two warps share the same keys; the value warp computes S^T, P^T
//    and dV, the key warp dP^T, dS^T and dK. The key warp receives P^T through shared memory, rounded to T as the value
//    warp uses it. A whole warp with only 16 keys would be bound by reading shared memory (at head dimension 128, 80
//    KiB for 32 keys and 32 queries; a pair moves 44). Up to head dimension 80 the exchange costs more than it saves.
template <int HeadDim, bool Roomy, bool HidesPast>
struct KeyTiling {
  static constexpr int HS = HeadDim, kStages = 2;
  static constexpr bool kHidesPast = HidesPast;
  static constexpr bool kPaired = HS >= 96, kLarge = HS == 128 && Roomy;
  static constexpr int M = HS <= 128 ? 2 : 1;  // m16 tiles of keys
  static constexpr int kTeams = kPaired && !kLarge ? 2 : 4, kThreads = (kPaired ? 2 : 1) * kTeams * kWarpSize;
  static constexpr int kTeamRows = M * 16, kKeys = kTeams * kTeamRows;
  static constexpr int kQueries = HS == 256 ? 16 : HS == 128 && !Roomy ? 32 : 64;
  static constexpr int kChunk = HS == 256 || HS == 80 ? 16 : kLarge ? 64 : 32;
  static constexpr int kBlocksPerMultiprocessor = kLarge ? 1 : 2;
  static constexpr int kStatisticsBytes = kStages * kQueries * static_cast<int>(sizeof(RowStatistics));
  static constexpr int kExchangeBytes = kPaired ? kKeys * kQueries * 2 : 0;  // P^T of a stage
  static constexpr int kSharedBytes =
      Tile<bf16, HS>::bytes(2 * kKeys + 2 * kStages * kQueries) + kStatisticsBytes + kExchangeBytes;
  static_assert(!kPaired || kTeams * kQueries / kChunk < 16);  // a block has 16 named barriers
};

// The queries that a warp multiplies with its keys at a time: kChunk of a stage. All GEMMs have keys as rows and
// queries as columns.
struct QueryChunk {
  unsigned q, dO;                   // tiles
  const RowStatistics* statistics;  // of the first query, in shared memory
  int hidden;                       // key i of the warp is hidden from query j of the chunk if hidden + i > j
  int first;                        // index of the first query in the stage
};

// Where a warp's chunk lies, for the keys in front of what its queries see.
struct ChunkPosition {
  const AttentionShape& shape;
  std::int64_t b;
  int first_query, first_key;

  __device__ int first_visible(int query) const { return first_visible_key(shape, b, first_query + query); }
  // Whether all of the warp's keys are in front of what each of the queries sees.
  template <typename Tiling>
  __device__ bool hidden() const {
    return first_key + Tiling::kTeamRows <= first_visible(0);
  }
  // P^T of hidden keys becomes 0.
  template <int M, int N>
  __device__ void hide(Accumulators<M, N>& P) const {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    if (first_visible(N * 8 - 1) <= first_key) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int begin = first_visible(n * 8 + t * 2 + i) - first_key - g;
#pragma unroll
        for (int m = 0; m < M; ++m) {
          if (m * 16 < begin) P.at[m][n][i] = 0;
          if (m * 16 + 8 < begin) P.at[m][n][2 + i] = 0;
        }
      }
    }
  }
};

// S^T becomes P^T.
template <int M, int N>
__device__ void probabilities(Accumulators<M, N>& S, const QueryChunk& chunk, float c) {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
  const bool masked = chunk.hidden + M * 16 > 1;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float4 pair = *reinterpret_cast<const float4*>(chunk.statistics + n * 8 + t * 2);  // lse2, D, lse2, D
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& P = S.at[m][n][i];
        P = exp2_approximate(fmaf(P, c, i % 2 ? -pair.z : -pair.x));
        if (masked && chunk.hidden + m * 16 + i / 2 * 8 + g > n * 8 + t * 2 + i % 2) P = 0;
      }
    }
  }
}

// dP^T becomes dS^T = P^T * (dP^T - D); weight(m, n, i) returns the element of P^T.
template <int M, int N, typename Weight>
__device__ void score_gradient_transposed(Accumulators<M, N>& dP, const QueryChunk& chunk, const Weight& weight) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float4 pair = *reinterpret_cast<const float4*>(chunk.statistics + n * 8 + t * 2);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dP.at[m][n][i] = weight(m, n, i) * (dP.at[m][n][i] - (i % 2 ? pair.w : pair.y));
    }
  }
}

// A warp's keys: their rows in shared memory (tiles as addresses and as pointers) and in the tensors.
template <typename T>
struct TeamRows {
  unsigned k, v;
  T *k_staging, *v_staging;
  std::int64_t b, kv;
  int first;
};

template <typename T, typename Tiling>
struct WholeWarp {
  static constexpr int HS = Tiling::HS, M = Tiling::M;
  LeftOperand<T, HS, M> K, V;
  Accumulators<M, HS / 8> dK, dV;

  __device__ WholeWarp(const TeamRows<T>& team, Fragment*) : K(team.k), V(team.v) {
    dK.clear();
    dV.clear();
  }
  __device__ void add(const QueryChunk& chunk, float c, const ChunkPosition& position) {
    using Rows = Tile<T, HS>;
    Accumulators<M, Tiling::kChunk / 8> S, dP;
    S.clear();
    dP.clear();
    multiply_by_rows<T, HS>(S, K, chunk.q + Rows::lane_by_columns());
    multiply_by_rows<T, HS>(dP, V, chunk.dO + Rows::lane_by_columns());
    probabilities(S, chunk, c);
    if constexpr (Tiling::kHidesPast) position.hide(S);
    score_gradient_transposed(dP, chunk, [&](int m, int n, int i) { return S.at[m][n][i]; });
    multiply_by_columns<T, HS>(dV, S, chunk.dO + Rows::lane_by_rows());
    multiply_by_columns<T, HS>(dK, dP, chunk.q + Rows::lane_by_rows());
  }
  __device__ void store(const TeamRows<T>& team, const BackwardArguments<T>& arguments) {
    const int valid = static_cast<int>(arguments.shape.TK) - team.first;
    dK.scale(arguments.shape.scale);
    store_rows<T, HS>(dK, team.k_staging, arguments.dk.at(team.b, team.first, team.kv), arguments.dk.token_stride,
                      valid);
    store_rows<T, HS>(dV, team.v_staging, arguments.dv.at(team.b, team.first, team.kv), arguments.dv.token_stride,
                      valid);
  }
};

template <typename T, typename Tiling>
struct PairedWarp {
  static constexpr int HS = Tiling::HS, M = Tiling::M, N = Tiling::kChunk / 8;
  // Both warps of a pair belong to the same scheduler, which can issue the GEMMs of one while the other exponentiates.
  const bool value_warp = threadIdx.x / kWarpSize < Tiling::kTeams;
  LeftOperand<T, HS, M> left;        // K or V
  Accumulators<M, HS / 8> gradient;  // dV or dK
  Fragment* exchange;                // this lane's part of the pair's P^T: as_operand(m, k) of each chunk

  __device__ PairedWarp(const TeamRows<T>& team, Fragment* exchange)
      : left(value_warp ? team.k : team.v), exchange(exchange) {
    gradient.clear();
  }
  __device__ void add(const QueryChunk& chunk, float c, const ChunkPosition& position) {
    using Rows = Tile<T, HS>;
    Accumulators<M, N> S;  // S^T and P^T, or dP^T and dS^T
    S.clear();
    multiply_by_rows<T, HS>(S, left, (value_warp ? chunk.q : chunk.dO) + Rows::lane_by_columns());
    // Each P^T of a stage has its own named barrier, so the value warp does not wait. The stage's __syncthreads() keeps
    // it from overwriting a P^T that the key warp has not read.
    const int ready = 1 + threadIdx.x / kWarpSize % Tiling::kTeams + chunk.first / Tiling::kChunk * Tiling::kTeams;
    Fragment* const P = exchange + chunk.first * Tiling::kTeamRows * 2 / 16;
    if (value_warp) {
      probabilities(S, chunk, c);
      if constexpr (Tiling::kHidesPast) position.hide(S);
#pragma unroll
      for (int i = 0; i < M * N / 2; ++i) P[i * kWarpSize] = as_operand<T>(S, i / (N / 2), i % (N / 2));
      named_barrier_arrive(ready, 2 * kWarpSize);
    } else {
      named_barrier_wait(ready, 2 * kWarpSize);
      score_gradient_transposed(S, chunk, [&](int m, int n, int i) {
        const Fragment& words = P[(m * N / 2 + n / 2) * kWarpSize];
        const float2 weights = unpack<T>(words.word[n % 2 * 2 + i / 2]);
        return i % 2 ? weights.y : weights.x;
      });
    }
    multiply_by_columns<T, HS>(gradient, S, (value_warp ? chunk.dO : chunk.q) + Rows::lane_by_rows());
  }
  __device__ void store(const TeamRows<T>& team, const BackwardArguments<T>& arguments) {
    const HeadViewOf<T>& result = value_warp ? arguments.dv : arguments.dk;
    if (!value_warp) gradient.scale(arguments.shape.scale);
    store_rows<T, HS>(gradient, value_warp ? team.k_staging : team.v_staging, result.at(team.b, team.first, team.kv),
                      result.token_stride, static_cast<int>(arguments.shape.TK) - team.first);
  }
};

// Grid: x = batch and K/V head; y = blocks of keys, those with the most queries first.
template <typename T, typename Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocksPerMultiprocessor)
    key_gradient_kernel(const __grid_constant__ BackwardArguments<T> arguments) {
  constexpr int HS = Tiling::HS, kThreads = Tiling::kThreads, kStages = Tiling::kStages;
  constexpr int kQueries = Tiling::kQueries, kKeys = Tiling::kKeys, kChunk = Tiling::kChunk;
  using Rows = Tile<T, HS>;
  using Warp = std::conditional_t<Tiling::kPaired, PairedWarp<T, Tiling>, WholeWarp<T, Tiling>>;
  extern __shared__ __align__(16) unsigned char shared[];
  const AttentionShape& shape = arguments.shape;
  const std::int64_t b = blockIdx.x / shape.NKV, kv = blockIdx.x % shape.NKV;
  const int TQ = static_cast<int>(shape.TQ), TK = static_cast<int>(shape.TK);
  const int group = static_cast<int>(shape.NH / shape.NKV), first_key = static_cast<int>(blockIdx.y) * kKeys;

  // Queries before the first that sees a key are skipped; query t sees the keys up to past + t.
  const int past = shape.causal ? TK - TQ : TK;
  const int skipped = first_key > past ? (first_key - past) / kQueries : 0;
  int blocks = (TQ + kQueries - 1) / kQueries - skipped;  // blocks of queries of each head
  if constexpr (Tiling::kHidesPast) {
    // At least one, which adds nothing where no query sees the keys.
    blocks = max((queries_before(shape, b, first_key + kKeys) + kQueries - 1) / kQueries - skipped, 1);
  }

  constexpr int kStatisticsAt = Rows::bytes(2 * kKeys + 2 * kStages * kQueries);
  const unsigned k_tile = shared_address(shared), v_tile = k_tile + Rows::bytes(kKeys);
  const unsigned q_tiles = v_tile + Rows::bytes(kKeys), statistics = k_tile + kStatisticsAt;
  const auto load_queries = [&](int head_in_group, int block, int stage) {
    const std::int64_t h = kv * group + head_in_group;
    const int first_query = (skipped + block) * kQueries, valid = TQ - first_query;
    const unsigned tile = q_tiles + stage * Rows::bytes(2 * kQueries);
    Rows::template load<kQueries, kThreads>(tile, arguments.q.at(b, first_query, h), arguments.q.token_stride, valid);
    Rows::template load<kQueries, kThreads>(tile + Rows::bytes(kQueries), arguments.dout.at(b, first_query, h),
                                            arguments.dout.token_stride, valid);
    const RowStatistics* rows =
        arguments.statistics + (b * shape.NH + h) * padded_queries(shape.TQ) + first_query + threadIdx.x * 2;
    if (threadIdx.x < kQueries / 2) copy_async(statistics + (stage * kQueries + threadIdx.x * 2) * 8, rows, true);
    commit_copies();
  };
  Rows::template load<kKeys, kThreads>(k_tile, arguments.k.at(b, first_key, kv), arguments.k.token_stride,
                                       TK - first_key);
  Rows::template load<kKeys, kThreads>(v_tile, arguments.v.at(b, first_key, kv), arguments.v.token_stride,
                                       TK - first_key);
  load_queries(0, 0, 0);

  const int team_row = threadIdx.x / kWarpSize % Tiling::kTeams * Tiling::kTeamRows;
  T* const staging = reinterpret_cast<T*>(shared) + team_row * Rows::kStride;
  const TeamRows<T> team = {k_tile + Rows::bytes(team_row),
                            v_tile + Rows::bytes(team_row),
                            staging,
                            staging + kKeys * Rows::kStride,
                            b,
                            kv,
                            first_key + team_row};
  Warp warp(team, reinterpret_cast<Fragment*>(shared + kStatisticsAt + Tiling::kStatisticsBytes) +
                      team_row * kQueries * 2 / 16 + threadIdx.x % kWarpSize);
  const float c = shape.scale * kLog2E;
  int head_in_group = 0, block = 0;
  for (int stage = 0; head_in_group < group; stage ^= 1) {
    wait_for_copies();
    __syncthreads();  // this stage is complete; no thread reads the other one, or the previous stage's P^T, any more
    const bool last_of_head = block + 1 == blocks;
    const int next_head = head_in_group + last_of_head, next_block = last_of_head ? 0 : block + 1;
    if (next_head < group) load_queries(next_head, next_block, stage ^ 1);
    const unsigned q_tile = q_tiles + stage * Rows::bytes(2 * kQueries), do_tile = q_tile + Rows::bytes(kQueries);
    const auto* rows = reinterpret_cast<const RowStatistics*>(shared + kStatisticsAt) + stage * kQueries;
#pragma unroll 1
    for (int first = 0; first < kQueries; first += kChunk) {
      const int hidden = team.first - past - (skipped + block) * kQueries - first;
      if (hidden >= kChunk) continue;  // hidden from every query of the chunk
      const ChunkPosition position = {shape, b, (skipped + block) * kQueries + first, team.first};
      if (Tiling::kHidesPast && position.hidden<Tiling>()) continue;
      warp.add({q_tile + Rows::bytes(first), do_tile + Rows::bytes(first), rows + first, hidden, first}, c, position);
    }
    head_in_group = next_head;
    block = next_block;
  }
  warp.store(team, arguments);
}

// ---- launch -----------------------------------------------------------------------------------------------------------

template <typename T, typename Queries, typename Keys>
void launch(const BackwardArguments<T>& arguments, cudaStream_t stream) {
  const AttentionShape& shape = arguments.shape;
  // The queries are padded to full statistics blocks, so that the second kernel finds every padded row.
  launch_attention(query_gradient_kernel<T, Queries>, "attention backward, queries", shape.B * shape.NH,
                   padded_queries(shape.TQ) / Queries::kQueries, Queries::kThreads, Queries::kSharedBytes, stream,
                   arguments);
  launch_attention(key_gradient_kernel<T, Keys>, "attention backward, keys", shape.B * shape.NKV,
                   ceil_div(shape.TK, Keys::kKeys), Keys::kThreads, Keys::kSharedBytes, stream, arguments);
}

}  // namespace

template <typename T>
void portable_backward(const BackwardArguments<T>& arguments, cudaStream_t stream, int shared_limit) {
  for_head_dimension(arguments.shape.HS, "attention backward", [&]<int HS>() {
    for_visibility(arguments.shape, [&]<bool HidesPast>() {
      using Queries = QueryTiling<HS, HS <= 128 ? 2 : 1, HidesPast>;
      using Keys = KeyTiling<HS, true, HidesPast>;
      if constexpr (Queries::kSharedBytes > kSharedBytesEverywhere || Keys::kSharedBytes > kSharedBytesEverywhere) {
        if (shared_limit < Queries::kSharedBytes || shared_limit < Keys::kSharedBytes)
          return launch<T, QueryTiling<HS, 1, HidesPast>, KeyTiling<HS, false, HidesPast>>(arguments, stream);
      }
      launch<T, Queries, Keys>(arguments, stream);
    });
  });
}

template void portable_backward<bf16>(const BackwardArguments<bf16>&, cudaStream_t, int);
template void portable_backward<fp16>(const BackwardArguments<fp16>&, cudaStream_t, int);

}  // namespace weft::cuda
