// Backward on tensor cores, sm_80 and later. P is recomputed block by block from the saved lse; with D = rowsum(dO * O):
//
//   P = 2^(c S - lse2);  dV = P^T dO;  dP = dO V^T;  dS = P * (dP - D);  dQ = scale dS K;  dK = scale dS^T Q
//
// with S = Q K^T, c = scale log2 e, lse2 = lse log2 e. (Dao et al., 2022, algorithm 4.)
//
// Two kernels, and why. One pass over the blocks needs 5 products, but a block of keys adds to dQ of every later query:
// either float atomics, whose sums change from run to run, or blocks that wait for each other in a fixed order around
// fp32 sums in global memory. Here
//
//   query_gradient_kernel  has a block of queries and walks the keys:    S, dP, dQ            3 products
//   key_gradient_kernel    has a block of keys and walks the queries:    S^T, dP^T, dV, dK    4 products
//
// that is 7 instead of 5. For the two recomputed ones there are no atomics, no waiting, no fp32 dQ in memory, no exchange
// between warps: every sum stays in the registers of one warp from its first term to its last, P and dS pass from one
// product to the next in registers, and the order of every sum is fixed. The key gradient kernel walks the queries of
// all heads of the group, so that dK and dV of grouped-query attention need no sum over heads in memory either.
//
// Tiling: a warp has 32 rows of queries or keys where the sums leave room (each fragment read from shared memory feeds two
// MMAs), else 16. The streamed operand comes in two stages of shared memory; a warp works through a stage in chunks of
// kChunk rows, which bounds the registers of S and dP.
//
// query_gradient_kernel also computes D while it has dO in shared memory and leaves (lse2, D) of each query for the other.

#include <cstdint>

#include "llmc/base/error.h"
#include "llmc/cuda/attention/mma.cuh"
#include "llmc/cuda/attention/paths.h"
#include "llmc/cuda/common.cuh"

namespace weft::cuda {

namespace {

// ---- dQ and the row statistics ----------------------------------------------------------------------------------------

template <int HeadDim, int Stages>
struct QueryTiling {
  static constexpr int HS = HeadDim, kStages = Stages;
  static constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
  static constexpr int M = HS <= 128 ? 2 : 1;
  static constexpr int kWarpRows = M * 16, kQueries = kWarps * kWarpRows;
  static constexpr int kKeys = HS <= 80 ? 64 : 32, kChunk = 32;
  static constexpr bool kInRegisters = HS <= 64;  // Q and dO
  static constexpr int kBlocksPerMultiprocessor = 2;
  static constexpr int kSharedBytes = Tile<bf16, HS>::bytes(2 * kQueries + 2 * kStages * kKeys);
  static_assert(kStatisticsBlock % kQueries == 0);
};

// (lse2, D) of the warp's rows g and g + 8 of each m16 tile, also to `statistics` (its row 0). Queries past `valid` get
// lse2 = infinity, hence P = 0. dO is the warp's first tile row in shared memory, O its first row in global memory.
template <typename T, int HS, int M>
__device__ void row_statistics(RowStatistics (&rows)[M][2], RowStatistics* statistics, const T* dO, const T* O,
                               std::int64_t token_stride, const float* lse, std::int64_t valid) {
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

// S becomes dS = P * (dP - D); keys from a row's limit on get 0.
template <int M, int N>
__device__ void score_gradient(Accumulators<M, N>& S, const Accumulators<M, N>& dP, const RowStatistics (&rows)[M][2],
                               float c, bool masked, const AttentionShape& shape, std::int64_t first_row,
                               std::int64_t first_key) {
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
      const int limit = static_cast<int>(visible_keys(shape, first_row + m * 16 + half * 8 + g) - first_key);
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
  using Rows = Tile<T, HS>;
  extern __shared__ __align__(16) unsigned char shared[];
  const AttentionShape& shape = arguments.shape;
  const std::int64_t b = blockIdx.x / shape.NH, h = blockIdx.x % shape.NH, kv = h / (shape.NH / shape.NKV);
  const std::int64_t first_query = static_cast<std::int64_t>(gridDim.y - 1 - blockIdx.y) * kQueries;
  const int warp_row = threadIdx.x / kWarpSize * Tiling::kWarpRows;
  const std::int64_t first_row = first_query + warp_row;

  const unsigned q_tile = shared_address(shared), do_tile = q_tile + Rows::bytes(kQueries);
  const unsigned kv_tiles = do_tile + Rows::bytes(kQueries);
  const auto load_keys = [&](std::int64_t first_key, int stage) {
    const unsigned tile = kv_tiles + stage * Rows::bytes(2 * kKeys);
    const std::int64_t valid = shape.TK - first_key;
    Rows::template load<kKeys, kThreads>(tile, arguments.k.at(b, first_key, kv), arguments.k.token_stride, valid);
    Rows::template load<kKeys, kThreads>(tile + Rows::bytes(kKeys), arguments.v.at(b, first_key, kv),
                                         arguments.v.token_stride, valid);
    commit_copies();
  };
  Rows::template load<kQueries, kThreads>(q_tile, arguments.q.at(b, first_query, h), arguments.q.token_stride,
                                          shape.TQ - first_query);
  Rows::template load<kQueries, kThreads>(do_tile, arguments.dout.at(b, first_query, h), arguments.dout.token_stride,
                                          shape.TQ - first_query);
  load_keys(0, 0);
  wait_for_copies();
  __syncthreads();

  LeftOperand<T, HS, M, Tiling::kInRegisters> Q(q_tile + Rows::bytes(warp_row)), dO(do_tile + Rows::bytes(warp_row));
  Q.fetch();
  dO.fetch();
  RowStatistics rows[M][2];
  row_statistics<T, HS>(
      rows, arguments.statistics + blockIdx.x * padded_queries(shape.TQ) + first_row,
      reinterpret_cast<const T*>(shared) + (kQueries + warp_row) * Rows::kStride, arguments.out.at(b, first_row, h),
      arguments.out.token_stride, arguments.lse + static_cast<std::int64_t>(blockIdx.x) * shape.TQ + first_row,
      shape.TQ - first_row);

  Accumulators<M, HS / 8> dQ;
  dQ.clear();
  const float c = shape.scale * kLog2E;
  const std::int64_t end = visible_keys(shape, first_query + kQueries - 1);
  const std::int64_t warp_end = visible_keys(shape, first_row + Tiling::kWarpRows - 1);
  const std::int64_t unmasked_end = visible_keys(shape, first_row);
  int stage = 0;
  for (std::int64_t first_key = 0; first_key < end; first_key += kKeys) {
    wait_for_copies();
    __syncthreads();  // this stage is complete, and nobody reads the other one any more
    const unsigned k_tile = kv_tiles + stage * Rows::bytes(2 * kKeys), v_tile = k_tile + Rows::bytes(kKeys);
    if (Tiling::kStages == 2 && first_key + kKeys < end) load_keys(first_key + kKeys, stage ^ 1);
#pragma unroll 1
    for (int chunk = 0; chunk < kKeys && first_key + chunk < warp_end; chunk += kChunk) {
      const unsigned k_chunk = k_tile + Rows::bytes(chunk), v_chunk = v_tile + Rows::bytes(chunk);
      Accumulators<M, kChunk / 8> S, dP;
      S.clear();
      dP.clear();
      multiply_by_rows<T, HS>(S, Q, k_chunk + Rows::lane_by_columns());
      multiply_by_rows<T, HS>(dP, dO, v_chunk + Rows::lane_by_columns());
      const bool masked = first_key + chunk + kChunk > unmasked_end;
      score_gradient(S, dP, rows, c, masked, shape, first_row, first_key + chunk);
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
  store_rows<T, HS>(dQ, staging, arguments.dq.at(b, first_row, h), arguments.dq.token_stride, shape.TQ - first_row);
}

// ---- dK and dV --------------------------------------------------------------------------------------------------------

template <int HeadDim, bool Roomy>
struct KeyTiling {
  static constexpr int HS = HeadDim;
  static constexpr int M = HS <= 80 ? 2 : 1;
  static constexpr int kWarps = HS == 96 || (HS == 128 && Roomy) ? 8 : 4, kThreads = kWarps * kWarpSize;
  static constexpr int kWarpRows = M * 16, kKeys = kWarps * kWarpRows;
  static constexpr int kStages = HS <= 128 ? 2 : 1;
  static constexpr int kQueries = HS == 256 ? 16 : HS == 96 || (HS == 128 && !Roomy) ? 32 : 64;
  static constexpr int kChunk = HS == 80 || HS == 256 ? 16 : 32;
  static constexpr int kColumns = HS == 256 ? 128 : HS;  // of dK and dV that a block has; two blocks share 256
  static constexpr int kBlocksPerMultiprocessor = kWarps == 8 ? 1 : 2;
  static constexpr int kStatisticsBytes = kStages * kQueries * static_cast<int>(sizeof(RowStatistics));
  static constexpr int kSharedBytes = Tile<bf16, HS>::bytes(2 * kKeys + 2 * kStages * kQueries) + kStatisticsBytes;
};

// S^T becomes P^T, and dP^T becomes dS^T = P^T * (dP^T - D). Rows are keys, columns are queries; `statistics` are those of
// the first column, in shared memory. `hidden` + row - column > 0: the query does not see the key.
template <int M, int N>
__device__ void score_gradient_transposed(Accumulators<M, N>& S, Accumulators<M, N>& dP,
                                          const RowStatistics* statistics, float c, bool masked, int hidden) {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float4 pair = *reinterpret_cast<const float4*>(statistics + n * 8 + t * 2);  // lse2, D, lse2, D
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float lse2 = i % 2 ? pair.z : pair.x, D = i % 2 ? pair.w : pair.y;
        float P = exp2_approximate(fmaf(S.at[m][n][i], c, -lse2));
        if (masked && hidden + m * 16 + i / 2 * 8 + g > n * 8 + t * 2 + i % 2) P = 0;
        S.at[m][n][i] = P;
        dP.at[m][n][i] = P * (dP.at[m][n][i] - D);
      }
    }
  }
}

// Grid: x = batch, K/V head and part of the columns; y = blocks of keys, those with the most queries first.
template <typename T, typename Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocksPerMultiprocessor)
    key_gradient_kernel(const __grid_constant__ BackwardArguments<T> arguments) {
  constexpr int HS = Tiling::HS, M = Tiling::M, kThreads = Tiling::kThreads, kStages = Tiling::kStages;
  constexpr int kQueries = Tiling::kQueries, kKeys = Tiling::kKeys, kChunk = Tiling::kChunk;
  constexpr int kColumns = Tiling::kColumns, kParts = HS / kColumns;
  using Rows = Tile<T, HS>;
  extern __shared__ __align__(16) unsigned char shared[];
  const AttentionShape& shape = arguments.shape;
  const std::int64_t group = shape.NH / shape.NKV, head = blockIdx.x / kParts;
  const std::int64_t b = head / shape.NKV, kv = head % shape.NKV;
  const int first_column = blockIdx.x % kParts * kColumns;
  const std::int64_t first_key = static_cast<std::int64_t>(blockIdx.y) * kKeys;
  const int warp_row = threadIdx.x / kWarpSize * Tiling::kWarpRows;
  const std::int64_t first_row = first_key + warp_row;  // key of this warp

  // Queries before the first that sees a key are skipped; visible: query t sees keys up to past + t.
  const std::int64_t past = shape.causal ? shape.TK - shape.TQ : shape.TK;
  const std::int64_t skipped = first_key > past ? (first_key - past) / kQueries : 0;
  const std::int64_t blocks = ceil_div(shape.TQ, kQueries) - skipped;  // of queries, of each head

  const unsigned k_tile = shared_address(shared), v_tile = k_tile + Rows::bytes(kKeys);
  const unsigned q_tiles = v_tile + Rows::bytes(kKeys), statistics = q_tiles + Rows::bytes(2 * kStages * kQueries);
  const auto load_queries = [&](std::int64_t head_in_group, std::int64_t block, int stage) {
    const std::int64_t h = kv * group + head_in_group, first_query = (skipped + block) * kQueries;
    const std::int64_t valid = shape.TQ - first_query;
    const unsigned tile = q_tiles + stage * Rows::bytes(2 * kQueries);
    Rows::template load<kQueries, kThreads>(tile, arguments.q.at(b, first_query, h), arguments.q.token_stride, valid);
    Rows::template load<kQueries, kThreads>(tile + Rows::bytes(kQueries), arguments.dout.at(b, first_query, h),
                                            arguments.dout.token_stride, valid);
    const RowStatistics* rows =
        arguments.statistics + (b * shape.NH + h) * padded_queries(shape.TQ) + first_query + threadIdx.x * 2;
    if (threadIdx.x < kQueries / 2)
      copy_async(statistics + stage * kQueries * 8 + threadIdx.x * 16, rows, true);
    commit_copies();
  };
  Rows::template load<kKeys, kThreads>(k_tile, arguments.k.at(b, first_key, kv), arguments.k.token_stride,
                                       shape.TK - first_key);
  Rows::template load<kKeys, kThreads>(v_tile, arguments.v.at(b, first_key, kv), arguments.v.token_stride,
                                       shape.TK - first_key);
  load_queries(0, 0, 0);

  const SharedOperand<T, HS, M> K(k_tile + Rows::bytes(warp_row)), V(v_tile + Rows::bytes(warp_row));
  Accumulators<M, kColumns / 8> dK, dV;
  dK.clear();
  dV.clear();
  const float c = shape.scale * kLog2E;
  std::int64_t head_in_group = 0, block = 0;
  int stage = 0;
  while (head_in_group < group) {
    wait_for_copies();
    __syncthreads();  // this stage is complete, and nobody reads the other one any more
    const bool last_of_head = block + 1 == blocks;
    const std::int64_t next_head = head_in_group + last_of_head, next_block = last_of_head ? 0 : block + 1;
    if (kStages == 2 && next_head < group) load_queries(next_head, next_block, stage ^ 1);
    const unsigned q_tile = q_tiles + stage * Rows::bytes(2 * kQueries), do_tile = q_tile + Rows::bytes(kQueries);
    const auto* rows = reinterpret_cast<const RowStatistics*>(shared + (statistics - k_tile)) + stage * kQueries;
#pragma unroll 1
    for (int chunk = 0; chunk < kQueries; chunk += kChunk) {
      // Key first_row + i is hidden from query first_query + j if hidden + i > j.
      const std::int64_t first_query = (skipped + block) * kQueries + chunk;
      const std::int64_t hidden = first_row - past - first_query;
      if (hidden >= kChunk) continue;
      const unsigned q_chunk = q_tile + Rows::bytes(chunk), do_chunk = do_tile + Rows::bytes(chunk);
      Accumulators<M, kChunk / 8> S, dP;
      S.clear();
      dP.clear();
      multiply_by_rows<T, HS>(S, K, q_chunk + Rows::lane_by_columns());
      multiply_by_rows<T, HS>(dP, V, do_chunk + Rows::lane_by_columns());
      const bool masked = hidden + Tiling::kWarpRows > 1;
      score_gradient_transposed(S, dP, rows + chunk, c, masked, static_cast<int>(masked ? hidden : 0));
      multiply_by_columns<T, HS>(dV, S, do_chunk + Rows::lane_by_rows() + first_column * 2);
      multiply_by_columns<T, HS>(dK, dP, q_chunk + Rows::lane_by_rows() + first_column * 2);
    }
    if (kStages == 2) {
      stage ^= 1;
    } else if (next_head < group) {
      __syncthreads();  // all warps are done with the only stage
      load_queries(next_head, next_block, 0);
    }
    head_in_group = next_head;
    block = next_block;
  }

  dK.scale(shape.scale);
  T* staging = reinterpret_cast<T*>(shared) + warp_row * Rows::kStride;  // the warp's own rows of K
  const std::int64_t valid = shape.TK - first_row;
  store_rows<T, HS>(dK, staging, arguments.dk.at(b, first_row, kv) + first_column, arguments.dk.token_stride, valid);
  store_rows<T, HS>(dV, staging, arguments.dv.at(b, first_row, kv) + first_column, arguments.dv.token_stride, valid);
}

// ---- launch -----------------------------------------------------------------------------------------------------------

template <typename T, typename Tiling>
void launch_query_gradient(const BackwardArguments<T>& arguments, cudaStream_t stream) {
  const AttentionShape& shape = arguments.shape;
  const auto kernel = query_gradient_kernel<T, Tiling>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiling::kSharedBytes),
        "attention backward, queries: shared memory");
  // Whole statistics blocks, so that the other kernel finds every padded row.
  const dim3 grid(static_cast<unsigned>(shape.B * shape.NH),
                  static_cast<unsigned>(padded_queries(shape.TQ) / Tiling::kQueries));
  kernel<<<grid, Tiling::kThreads, Tiling::kSharedBytes, stream>>>(arguments);
  check_launch("attention backward, queries");
}

template <typename T, typename Tiling>
void launch_key_gradient(const BackwardArguments<T>& arguments, cudaStream_t stream) {
  const AttentionShape& shape = arguments.shape;
  const auto kernel = key_gradient_kernel<T, Tiling>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiling::kSharedBytes),
        "attention backward, keys: shared memory");
  const dim3 grid(static_cast<unsigned>(shape.B * shape.NKV * (Tiling::HS / Tiling::kColumns)),
                  static_cast<unsigned>(ceil_div(shape.TK, Tiling::kKeys)));
  kernel<<<grid, Tiling::kThreads, Tiling::kSharedBytes, stream>>>(arguments);
  check_launch("attention backward, keys");
}

template <typename T, int HS>
void launch_for_device(const BackwardArguments<T>& arguments, cudaStream_t stream) {
  using Queries = QueryTiling<HS, HS <= 128 ? 2 : 1>;
  using Keys = KeyTiling<HS, true>;
  if constexpr (Queries::kSharedBytes > kSharedBytesEverywhere || Keys::kSharedBytes > kSharedBytesEverywhere) {
    if (shared_bytes_per_block() < Queries::kSharedBytes || shared_bytes_per_block() < Keys::kSharedBytes) {
      launch_query_gradient<T, QueryTiling<HS, 1>>(arguments, stream);
      return launch_key_gradient<T, KeyTiling<HS, false>>(arguments, stream);
    }
  }
  launch_query_gradient<T, Queries>(arguments, stream);
  launch_key_gradient<T, Keys>(arguments, stream);
}

}  // namespace

template <typename T>
void portable_backward(const BackwardArguments<T>& arguments, cudaStream_t stream) {
  switch (arguments.shape.HS) {
    case 32: return launch_for_device<T, 32>(arguments, stream);
    case 64: return launch_for_device<T, 64>(arguments, stream);
    case 80: return launch_for_device<T, 80>(arguments, stream);
    case 96: return launch_for_device<T, 96>(arguments, stream);
    case 128: return launch_for_device<T, 128>(arguments, stream);
    case 256: return launch_for_device<T, 256>(arguments, stream);
    default: fail(Exit::internal, "attention backward: no kernel for head dimension %d", int(arguments.shape.HS));
  }
}

template void portable_backward<bf16>(const BackwardArguments<bf16>&, cudaStream_t);
template void portable_backward<fp16>(const BackwardArguments<fp16>&, cudaStream_t);

}  // namespace weft::cuda
