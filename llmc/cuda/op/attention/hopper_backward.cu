// Backward on Hopper's asynchronous units, sm_90a: tensor copies, warpgroup products, one pass over the blocks. With D
// = rowsum(dO * O), c = scale log2 e and lse2 = lse log2 e:
//
//   P = 2^(c S - lse2);  dV = P^T dO;  dP = dO V^T;  dS = P * (dP - D);  dQ = scale dS K;  dK = scale dS^T Q
//
// (Dao et al., 2022, algorithm 4; the division of labour is that of FlashAttention-3, Shah et al., 2024, section 3.)
// Two kernels in a row:
//
//   row_statistics_kernel  (lse2, D) of every query; sets the counters to zero
//   key_block_kernel       a block has 128 keys in shared memory and walks the queries that see them: 5 products
//
// Shapes of the products, keys first (S^T = K Q^T and dP^T = V dO^T), so that P^T and dS^T lie in registers as the left
// operands of dV += P^T dO and dK += dS^T Q, whose sums never leave registers: a block walks the query heads of its
// group one after the other. dS^T also goes through shared memory for dQ = dS K, where keys are the inner dimension.
//
// Two warpgroups have 64 keys each; a third has the two threads that move data: one loads Q, dO and the statistics into
// rings, the other adds dQ to global memory. A warpgroup's step i, in the order of issue; products run on behind it:
//
//   P = exp(S) | dP is there | dV += | dS = P (dP - D), to shared memory | dQ of step i - 1 =, dK += | dV is there |
//   S of step i + 1 = | dQ is there, to shared memory | dK is there | dP of step i + 1 = | S is there
//
// so that the tensor cores have dP while exponentials are taken, dV while dS is made, dK and the next S while dQ leaves
// the registers. dQ needs dS of both warpgroups; because it is a step late, they need not be at the same place, and by
// turns at the exponentials they are not: one takes them while the products of the other run. What is waited for where
// is chosen so that the accumulators fit into the 240 registers that a thread has.
//
// dQ of a query tile is the sum over all blocks of keys that it sees. Those are added in fp32 by bulk copies that add
// in L2, in a fixed order: a counter per tile says whose turn it is, keys first to last. The order costs little waiting
// because everything runs in the same direction: blocks take their work from a counter, those with the first keys (and
// the most queries) first; each walks its queries from the last to the first, all heads of the group at one tile before
// the next tile. So blocks of the same head that start together meet a tile one step after each other, and a block that
// starts later is behind. No block waits for one that took its work later: one that waits always waits for a block that
// runs. The first block of keys sees every tile and stores instead of adding; the last block of a tile rounds the sum
// to T.
//
// Where q and k have been turned by RoPE, dQ and dK are turned back on their way out, in fp32: dK in the accumulators,
// whose threads hold both halves of a head, dQ by the block that rounds it.
//
// The sums have the layout of the accumulators: [B, NH, tiles of queries, 2 warpgroups, 8, 128 threads, 4].

#include <algorithm>
#include <cstdint>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/hw/tensor_map.h"
#include "llmc/cuda/op/attention/mma.cuh"
#include "llmc/cuda/op/attention/paths.h"

namespace weft::cuda {

namespace {

using namespace hopper;

constexpr int kRowBytes = 128;               // of a tile: 64 columns
constexpr int kKeys = 128, kGroupKeys = 64;  // of a block, of a warpgroup
constexpr int kKeyTile = kKeys * kRowBytes;
constexpr int kStages = 2;              // of every ring of buffers
constexpr int kSumBytes = 64 * 64 * 4;  // what a warpgroup adds to dQ in one step: 64 x 64 in fp32

template <int HeadDim>
struct Tiling {
  static constexpr int HS = HeadDim, kQueries = HeadDim == 64 ? 128 : 64;
  static constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * kWarpgroupSize;
  static constexpr int kColumnTiles = HS / 64, kQueryTile = kQueries * kRowBytes;
  static constexpr int kKeyBytes = kColumnTiles * kKeyTile;      // K or V of a block
  static constexpr int kQueryBytes = kColumnTiles * kQueryTile;  // Q or dO of a step
  static constexpr int kScoreBytes = kQueries / 64 * kKeyTile;   // dS^T [128 keys, queries], two of them
  static constexpr int kStatisticsBytes = kQueries * static_cast<int>(sizeof(RowStatistics));
  // Shared memory
  static constexpr int kValuesAt = kKeyBytes, kQueriesAt = kValuesAt + kKeyBytes;
  static constexpr int kOutputsAt = kQueriesAt + kStages * kQueryBytes;
  static constexpr int kScoresAt = kOutputsAt + kStages * kQueryBytes;
  static constexpr int kSumsAt = kScoresAt + kStages * kScoreBytes;
  static constexpr int kStatisticsAt = kSumsAt + kStages * kConsumers * kSumBytes;
  static constexpr int kBarriersAt = kStatisticsAt + kStages * kStatisticsBytes;
  static constexpr int kBarriers = 3 + 8 * kStages;
  static constexpr int kSharedBytes = kBarriersAt + (kBarriers + 1) * 8;
  static_assert(kSharedBytes <= 227 * 1024);
  static_assert(kQueries * HS == kConsumers * 64 * 64, "dQ of a step is 64 x 64 a warpgroup");
};

// All that the kernels know; sizes in 32 bits as attention.cu bounds them.
template <typename T>
struct Arguments {
  CUtensorMap q, dout, k, v, dk, dv;
  HeadViewOf<T> dq;
  const float *cos, *sin;           // RoPE's, [tokens, HS / 2]; null: q and k have not been turned
  const float* statistics;          // [B * NH, tiles, 2, queries of a tile]: lse2, then D
  float* sums;                      // dQ, see above
  int* turns;                       // [B * NH, tiles]: how many blocks of keys have been added
  int* ticket;                      // next piece of work
  int tokens, tiles, stored_tiles;  // tiles of queries that exist; that the arrays above have a head
  int heads, kv_heads, batch_kv_heads;
  int key_blocks, section;
  float scale;
};

// ---- statistics -----------------------------------------------------------------------------------------------------

// Grid: x = batch and head, y = kStatisticsBlock queries; 256 threads. Queries past the last get lse2 = infinity, so P
// = 0.
template <typename T, typename Tiling>
__global__ void __launch_bounds__(256)
    row_statistics_kernel(HeadViewOf<const T> dout, HeadViewOf<const T> out, const float* lse, float* statistics,
                          int* turns, int* ticket, int heads, int tokens) {
  constexpr int kLanes = Tiling::HS / 8, kRows = 256 / kLanes, kRounds = kStatisticsBlock / kRows;
  constexpr int kQueries = Tiling::kQueries;
  const std::int64_t b = blockIdx.x / heads, h = blockIdx.x % heads;
  const int first = static_cast<int>(blockIdx.y * kStatisticsBlock), lane = threadIdx.x % kLanes;
  statistics += (static_cast<std::int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * kStatisticsBlock * 2;
  Pack<T> left[kRounds], right[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {  // all loads first; rows past the end read the last one
    const int token = min(first + i * kRows + static_cast<int>(threadIdx.x) / kLanes, tokens - 1);
    left[i] = load_pack(dout.at(b, token, h) + lane * 8);
    right[i] = load_pack_streaming(out.at(b, token, h) + lane * 8);
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int row = i * kRows + static_cast<int>(threadIdx.x) / kLanes;
    const bool valid = first + row < tokens;
    float D = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) D = fmaf(to_float(left[i].value[j]), to_float(right[i].value[j]), D);
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) D += __shfl_xor_sync(~0u, D, offset);
    if (lane == 0) {
      float* tile = statistics + row / kQueries * kQueries * 2 + row % kQueries;
      tile[0] = valid ? lse[static_cast<std::int64_t>(blockIdx.x) * tokens + first + row] * kLog2E : INFINITY;
      tile[kQueries] = valid ? D : 0;
    }
  }
  constexpr int kTiles = kStatisticsBlock / kQueries;
  if (threadIdx.x < kTiles)
    turns[(static_cast<std::int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * kTiles + threadIdx.x] = 0;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *ticket = 0;
}

// ---- the pass over the blocks ---------------------------------------------------------------------------------------

#if WEFT_WGMMA

// Named barriers: of all consumers; of one, from here on; a consumer's turn at the exponentials, from here on.
constexpr int kAllConsumers = 1, kOneConsumer = 2, kTurn = 4;

// Where step `step` finds its buffers in the rings, and the parity of the phase that they are in.
__device__ inline int stage_of(int step) {
  return step % kStages;
}
__device__ inline unsigned parity_of(int step) {
  return step / kStages % 2;
}

__device__ inline int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline void store_release(int* address, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Between ordinary accesses to global memory and those of bulk copies.
__device__ inline void fence_global_proxies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Never hangs, as mbarrier_wait(). A __trap() does no harm here: the role that calls this asks for no registers.
__device__ inline void wait_for_turn(const int* turn, int block) {
  constexpr long long kWatchdog = 5LL << 32;
  const long long start = clock64();
  while (load_acquire(turn) != block)
    if (clock64() - start > kWatchdog) __trap();
  fence_global_proxies();
}

// A block's work: 128 keys of one K/V head, and the steps over tiles of queries and heads of the group.
struct Work {
  int b, kv, block;  // of keys
  int first_tile;    // of queries that see the keys
};

// Work in the order in which it is given out. Sections of some K/V heads follow each other, so that what they read
// stays in L2; in a section first blocks of all heads first.
template <typename Tiling, typename T>
__device__ Work take_work(const Arguments<T>& a, int ticket) {
  const int first = ticket / (a.section * a.key_blocks) * a.section;
  const int width = min(a.section, a.batch_kv_heads - first), rest = ticket - first * a.key_blocks;
  const int head = first + rest % width, block = rest / width;
  return {head / a.kv_heads, head % a.kv_heads, block, block * kKeys / Tiling::kQueries};
}

struct Barriers {
  unsigned keys, values, sums, scores_full, scores_empty, q_full, q_empty, do_full, do_empty, sum_full, sum_empty;
};

template <typename Tiling, typename T>
__device__ void load_role(const Arguments<T>& a, const Work& work, unsigned shared, const Barriers& at) {
  const int group = a.heads / a.kv_heads;
  const auto load_tiles = [&](unsigned to, int tile_bytes, const CUtensorMap& map, unsigned barrier, int token, int h) {
#pragma unroll
    for (int i = 0; i < Tiling::kColumnTiles; ++i)
      tensor_load(to + i * tile_bytes, &map, barrier, i * 64, token, h, work.b);
  };
  mbarrier_arrive_expect(at.keys, Tiling::kKeyBytes);
  load_tiles(shared, kKeyTile, a.k, at.keys, work.block * kKeys, work.kv);
  int step = 0;
  for (int tile = a.tiles - 1; tile >= work.first_tile; --tile) {
    for (int h = work.kv * group; h < (work.kv + 1) * group; ++h) {
      const int stage = stage_of(step);
      mbarrier_wait(at.q_empty + stage * 8, parity_of(step) ^ 1);
      const unsigned q_full = at.q_full + stage * 8;
      mbarrier_arrive_expect(q_full, Tiling::kQueryBytes + Tiling::kStatisticsBytes);
      load_tiles(shared + Tiling::kQueriesAt + stage * Tiling::kQueryBytes, Tiling::kQueryTile, a.q, q_full,
                 tile * Tiling::kQueries, h);
      const std::int64_t row = (static_cast<std::int64_t>(work.b) * a.heads + h) * a.stored_tiles + tile;
      bulk_load(shared + Tiling::kStatisticsAt + stage * Tiling::kStatisticsBytes,
                a.statistics + row * Tiling::kQueries * 2, Tiling::kStatisticsBytes, q_full);
      if (step == 0) {
        mbarrier_arrive_expect(at.values, Tiling::kKeyBytes);
        load_tiles(shared + Tiling::kValuesAt, kKeyTile, a.v, at.values, work.block * kKeys, work.kv);
      }
      mbarrier_wait(at.do_empty + stage * 8, parity_of(step) ^ 1);
      const unsigned do_full = at.do_full + stage * 8;
      mbarrier_arrive_expect(do_full, Tiling::kQueryBytes);
      load_tiles(shared + Tiling::kOutputsAt + stage * Tiling::kQueryBytes, Tiling::kQueryTile, a.dout, do_full,
                 tile * Tiling::kQueries, h);
      ++step;
    }
  }
}

// Adds what the consumers leave in shared memory to dQ, when it is this block's turn.
template <typename Tiling, typename T>
__device__ void add_role(const Arguments<T>& a, const Work& work, unsigned shared, const Barriers& at) {
  const int group = a.heads / a.kv_heads;
  constexpr unsigned kBytes = Tiling::kConsumers * kSumBytes;
  int step = 0;
  for (int tile = a.tiles - 1; tile >= work.first_tile; --tile) {
    for (int h = work.kv * group; h < (work.kv + 1) * group; ++h, ++step) {
      const int stage = stage_of(step);
      const std::int64_t row = (static_cast<std::int64_t>(work.b) * a.heads + h) * a.stored_tiles + tile;
      mbarrier_wait(at.sum_full + stage * 8, parity_of(step));
      const unsigned from = shared + Tiling::kSumsAt + stage * kBytes;
      float* to = a.sums + row * (kBytes / 4);
      if (work.block == 0) {
        bulk_store(to, from, kBytes);  // the first block sees every tile: nothing has to be zero before
      } else {
        wait_for_turn(a.turns + row, work.block);
        bulk_add(to, from, kBytes);
      }
      bulk_commit();
      bulk_wait_read();
      mbarrier_arrive(at.sum_empty + stage * 8);
      bulk_wait();
      fence_global_proxies();
      store_release(a.turns + row, work.block + 1);
    }
  }
  mbarrier_arrive(at.sums);
}

// The values are overwritten next: the compiler need not keep registers for the old ones.
template <int N>
__device__ inline void forget(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "=f"(values[i]));
}

// Rounds accumulators to the words of register operands, four for each 16 columns.
template <typename T, int R>
__device__ void round_to_operand(unsigned (&words)[R / 2], const float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R / 2; ++i) words[i] = pack<T>(d[2 * i], d[2 * i + 1]);
}

// Writes a warpgroup's 64 rows to swizzled tiles of `tile_bytes` that follow each other. `place` is where lane l's
// address begins: row l % 16 of the warp's 16 in the first tile, chunk l / 16 of it.
__device__ inline unsigned lane_place(int first_row) {
  const int lane = threadIdx.x % kWarpSize;
  return (first_row + lane % 16) * kRowBytes + (lane / 16 ^ lane % 8) * 16;
}
template <int W>
__device__ void store_tiles(unsigned place, int tile_bytes, const unsigned (&words)[W]) {
#pragma unroll
  for (int i = 0; i < W / 4; ++i)
    store_matrices((place ^ i % 4 * 32) + i / 4 * tile_bytes, words[4 * i], words[4 * i + 1], words[4 * i + 2],
                   words[4 * i + 3]);
}

// The gradient of two dimensions that RoPE turned by an angle is turned back.
__device__ inline void turn_back(float& low, float& high, float cosine, float sine) {
  const float turned = low * cosine + high * sine;
  high = high * cosine - low * sine;
  low = turned;
}

// A warpgroup's dK: dimension i and i + HS / 2 of a key lie R / 2 apart. `first_key`: of the thread's two, 8 apart.
template <typename T, int R>
__device__ void turn_keys_back(const Arguments<T>& a, int first_key, float (&d)[R]) {
  constexpr int kHalf = R;  // dimensions: R = HS / 2 accumulators are two keys of HS dimensions among four threads
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int key = 0; key < 2; ++key) {
    const std::int64_t at = static_cast<std::int64_t>(min(first_key + key * 8, a.tokens - 1)) * kHalf + column;
#pragma unroll
    for (int i = 0; i < R / 8; ++i) {
      const float2 cosine = __ldg(reinterpret_cast<const float2*>(a.cos + at + i * 8));
      const float2 sine = __ldg(reinterpret_cast<const float2*>(a.sin + at + i * 8));
      turn_back(d[4 * i + 2 * key], d[4 * i + 2 * key + R / 2], cosine.x, sine.x);
      turn_back(d[4 * i + 2 * key + 1], d[4 * i + 2 * key + 1 + R / 2], cosine.y, sine.y);
    }
  }
}

// The tiles that no later block adds to, from their sums to T; `thread` of all consumers' threads. Each has two rows, and
// of both halves of a head 8 columns, which are turned together. Four heads are read at a time, so that one wait for L2
// serves them all.
template <typename T, typename Tiling>
__device__ void convert_sums(const Arguments<T>& a, const Work& work, int thread) {
  constexpr int HS = Tiling::HS, kBatch = 4, kPiece = kSumBytes / 16;
  static_assert(Tiling::kConsumers * kWarpgroupSize == 256);
  // At head dimension 64 a warpgroup's sums are 64 queries with both halves, at 128 they are one half of 64 queries.
  constexpr int kColumns = HS == 64 ? 4 : 8, kOtherHalf = HS == 64 ? kColumns * kWarpgroupSize : kPiece;
  const int column = thread % kColumns, piece = HS == 64 ? thread / 4 % 2 : 0, g = thread / 8 % 8, warp = thread / 64;
  const int group = a.heads / a.kv_heads, tiles = min(a.tiles - work.first_tile, kKeys / Tiling::kQueries);
#pragma unroll 1
  for (int tile = work.first_tile; tile < work.first_tile + tiles; ++tile) {
    const int first_row = tile * Tiling::kQueries + piece * 64 + warp * 16 + g;
    float4 cosine[2][2], sine[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = min(first_row + i / 2 * 8, a.tokens - 1);
      const std::int64_t at = static_cast<std::int64_t>(row) * (HS / 2) + column * 8 + i % 2 * 4;
      cosine[i / 2][i % 2] = a.cos == nullptr ? make_float4(1, 1, 1, 1) : *reinterpret_cast<const float4*>(a.cos + at);
      sine[i / 2][i % 2] = a.cos == nullptr ? make_float4(0, 0, 0, 0) : *reinterpret_cast<const float4*>(a.sin + at);
    }
#pragma unroll 1
    for (int first = 0; first < group; first += kBatch) {
      float4 sums[kBatch][2][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const std::int64_t head =
            static_cast<std::int64_t>(work.b) * a.heads + work.kv * group + min(first + i, group - 1);
        const float4* from = reinterpret_cast<const float4*>(a.sums) +
                             ((head * a.stored_tiles + tile) * Tiling::kConsumers + piece) * kPiece +
                             column * kWarpgroupSize + warp * 32 + g * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int t = 0; t < 4; ++t) sums[i][half][t] = __ldcg(from + half * kOtherHalf + t);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= group) break;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          unsigned words[2][4];
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            const float4 low = sums[i][0][t], high = sums[i][1][t], c = cosine[row][t / 2], s = sine[row][t / 2];
            float2 x = row == 0 ? make_float2(low.x, low.y) : make_float2(low.z, low.w);
            float2 y = row == 0 ? make_float2(high.x, high.y) : make_float2(high.z, high.w);
            turn_back(x.x, y.x, t % 2 == 0 ? c.x : c.z, t % 2 == 0 ? s.x : s.z);
            turn_back(x.y, y.y, t % 2 == 0 ? c.y : c.w, t % 2 == 0 ? s.y : s.w);
            words[0][t] = pack<T>(x.x * a.scale, x.y * a.scale);
            words[1][t] = pack<T>(y.x * a.scale, y.y * a.scale);
          }
          if (first_row + row * 8 >= a.tokens) continue;
          T* to = a.dq.at(work.b, first_row + row * 8, work.kv * group + first + i) + column * 8;
#pragma unroll
          for (int half = 0; half < 2; ++half)
            *reinterpret_cast<uint4*>(to + half * (HS / 2)) = {words[half][0], words[half][1], words[half][2],
                                                               words[half][3]};
        }
      }
    }
  }
}

template <typename T, typename Tiling>
__device__ void product_role(const Arguments<T>& a, const Work& work, unsigned shared, const Barriers& at,
                             int consumer) {
  constexpr int HS = Tiling::HS, kQueries = Tiling::kQueries, kR = kQueries / 2;
  const int thread = threadIdx.x % kWarpgroupSize, lane = threadIdx.x % kWarpSize, warp = thread / kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const int warp_row = consumer * kGroupKeys + warp * 16;  // the first of the warp's keys
  const unsigned place = shared + lane_place(warp_row);    // in a tile of 128 keys
  const std::uint64_t keys = operand(shared + consumer * kGroupKeys * kRowBytes);
  const std::uint64_t values = advance(keys, Tiling::kValuesAt);
  // dQ: at head dimension 64 a warpgroup has 64 of the queries, at 128 it has 64 of the columns.
  const std::uint64_t dq_keys = operand(shared + (HS == 64 ? 0 : consumer * kKeyTile));
  const std::uint64_t dq_scores = operand(shared + Tiling::kScoresAt + (HS == 64 ? consumer * kKeyTile : 0));

  float S[kR], dP[kR], dK[HS / 2], dV[HS / 2];
#pragma unroll
  for (int i = 0; i < HS / 2; ++i) dK[i] = 0, dV[i] = 0;
  pin(dK);
  pin(dV);

  const auto multiply_by_queries = [&](float(&d)[kR], std::uint64_t left, unsigned right) {
    const std::uint64_t b = operand(right);
    forget(d);
#pragma unroll
    for (int k = 0; k < HS / 16; ++k)
      multiply_async<T>(d, advance(left, k / 4 * kKeyTile + k % 4 * 32),
                        advance(b, k / 4 * Tiling::kQueryTile + k % 4 * 32), k != 0);
    products_commit();
  };
  const auto add_to_gradient = [&](float(&d)[HS / 2], const unsigned(&words)[kR / 2], unsigned right) {
    const std::uint64_t b = operand(right, Tiling::kQueryTile);
#pragma unroll
    for (int k = 0; k < kQueries / 16; ++k)
      multiply_async<T, Major::mn>(d, words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3],
                                   advance(b, k * 16 * kRowBytes));
    products_commit();
  };
  const auto multiply_scores = [&](float(&d)[32], int stage) {
    const std::uint64_t scores = advance(dq_scores, stage * Tiling::kScoreBytes);
    forget(d);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      multiply_async<T, Major::mn, Major::mn>(d, advance(scores, k * 16 * kRowBytes),
                                              advance(dq_keys, k * 16 * kRowBytes), k != 0);
    products_commit();
  };
  const auto q_tile = [&](int stage) { return shared + Tiling::kQueriesAt + stage * Tiling::kQueryBytes; };
  const auto do_tile = [&](int stage) { return shared + Tiling::kOutputsAt + stage * Tiling::kQueryBytes; };
  const auto release = [&](unsigned barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };

  const auto store_sums = [&](const float(&dQ)[32], int step) {
    const int stage = stage_of(step);
    mbarrier_wait(at.sum_empty + stage * 8, parity_of(step) ^ 1);
    float4* sums = reinterpret_cast<float4*>(__cvta_shared_to_generic(shared + Tiling::kSumsAt)) +
                   (stage * Tiling::kConsumers + consumer) * (kSumBytes / 16) + thread;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      sums[i * kWarpgroupSize] = make_float4(dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]);
    fence_async_proxy();
    release(at.sum_full + stage * 8);
  };

  const int group = a.heads / a.kv_heads, steps = (a.tiles - work.first_tile) * group;
  const float c = a.scale * kLog2E;
  int head = 0;
  // The warp's first key less the tile's first query.
  int ahead = work.block * kKeys + warp_row - (a.tiles - 1) * kQueries;

  if (consumer == 1) named_barrier_arrive(kTurn, Tiling::kConsumers * kWarpgroupSize);
  mbarrier_wait(at.keys, 0);
  mbarrier_wait(at.q_full, 0);
  products_begin();
  multiply_by_queries(S, keys, q_tile(0));
  mbarrier_wait(at.values, 0);
  mbarrier_wait(at.do_full, 0);
  products_begin();
  multiply_by_queries(dP, values, do_tile(0));
  products_wait<1>();
  pin(S);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // S is there, dP on its way.
    const int stage = stage_of(step), next = stage_of(step + 1);

    const float* lse2 = reinterpret_cast<const float*>(__cvta_shared_to_generic(shared + Tiling::kStatisticsAt)) +
                        stage * kQueries * 2 + t * 2;
    named_barrier_wait(kTurn + consumer, Tiling::kConsumers * kWarpgroupSize);
    unsigned words[kR / 2];
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(lse2 + j * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) S[4 * j + i] = exp2_approximate(fmaf(S[4 * j + i], c, i % 2 ? -pair.y : -pair.x));
    }
    if (ahead + 15 > 0) {  // a key later than a query is hidden from it
      const int hidden = ahead + g - t * 2;
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (hidden > j * 8 + i % 2 - i / 2 * 8) S[4 * j + i] = 0;
    }
    round_to_operand<T>(words, S);
    pin(words);  // exponentials before the wait
    if (consumer == 0 || step + 1 < steps)
      named_barrier_arrive(kTurn + 1 - consumer, Tiling::kConsumers * kWarpgroupSize);
    products_wait<0>();
    pin(dP);
    products_begin();
    add_to_gradient(dV, words, do_tile(stage));
    const float* D = lse2 + kQueries;
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(D + j * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) dP[4 * j + i] = S[4 * j + i] * (dP[4 * j + i] - (i % 2 ? pair.y : pair.x));
    }
    unsigned score_words[kR / 2];
    round_to_operand<T>(score_words, dP);
    mbarrier_wait(at.scores_empty + stage * 8, parity_of(step) ^ 1);
    store_tiles(place + Tiling::kScoresAt + stage * Tiling::kScoreBytes, kKeyTile, score_words);
    fence_async_proxy();
    release(at.scores_full + stage * 8);

    // dQ of the step before: the other warpgroup has had time for its dS. In the first step of whatever lies there, for
    // nobody: a branch around products would make the compiler wait for those in flight.
    if (step > 0) mbarrier_wait(at.scores_full + next * 8, parity_of(step - 1));
    float dQ[32];
    products_begin();
    multiply_scores(dQ, next);
    add_to_gradient(dK, score_words, q_tile(stage));
    products_wait<2>();  // dV: the registers of its operand are free for S
    pin(dV);
    release(at.do_empty + stage * 8);
    if (step + 1 < steps) mbarrier_wait(at.q_full + next * 8, parity_of(step + 1));
    products_begin();
    multiply_by_queries(S, keys, q_tile(next));  // after the last step of whatever lies there, for nobody
    products_wait<2>();                          // dQ
    pin(dQ);
    if (step > 0) {
      release(at.scores_empty + next * 8);
      store_sums(dQ, step - 1);
    }
    products_wait<1>();  // dK
    pin(dK);
    release(at.q_empty + stage * 8);
    if (step + 1 < steps) mbarrier_wait(at.do_full + next * 8, parity_of(step + 1));
    products_begin();
    multiply_by_queries(dP, values, do_tile(next));
    products_wait<1>();
    pin(S);

    if (++head == group) head = 0, ahead += kQueries;
  }

  products_wait<0>();
  pin(S);
  pin(dP);
  float dQ[32];
  mbarrier_wait(at.scores_full + stage_of(steps - 1) * 8, parity_of(steps - 1));
  products_begin();
  multiply_scores(dQ, stage_of(steps - 1));
  products_wait<0>();
  pin(dK);
  pin(dV);
  pin(dQ);
  store_sums(dQ, steps - 1);
#pragma unroll
  for (int i = 0; i < HS / 2; ++i) dK[i] *= a.scale;
  if (a.cos != nullptr) turn_keys_back(a, work.block * kKeys + warp_row + g, dK);
  unsigned words[HS / 4];
  named_barrier_wait(kAllConsumers, Tiling::kConsumers * kWarpgroupSize);  // nobody reads K and V any more
  round_to_operand<T>(words, dV);
  store_tiles(place + Tiling::kValuesAt, kKeyTile, words);
  round_to_operand<T>(words, dK);
  store_tiles(place, kKeyTile, words);
  fence_async_proxy();
  named_barrier_wait(kOneConsumer + consumer, kWarpgroupSize);
  if (thread == 0) {
    const unsigned rows = shared + consumer * kGroupKeys * kRowBytes;
    const int first_key = work.block * kKeys + consumer * kGroupKeys;
#pragma unroll
    for (int i = 0; i < Tiling::kColumnTiles; ++i) {
      tensor_store(&a.dv, rows + Tiling::kValuesAt + i * kKeyTile, i * 64, first_key, work.kv, work.b);
      tensor_store(&a.dk, rows + i * kKeyTile, i * 64, first_key, work.kv, work.b);
    }
    bulk_commit();
  }
  mbarrier_wait(at.sums, 0);
  convert_sums<T, Tiling>(a, work, consumer * kWarpgroupSize + thread);
  if (thread == 0) bulk_wait_read();
}

#endif  // WEFT_WGMMA

// Grid: as many blocks as there are pieces of work.
template <typename T, typename Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, 1) key_block_kernel(const __grid_constant__ Arguments<T> a) {
#if WEFT_WGMMA
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  const unsigned barriers = shared + Tiling::kBarriersAt;
  Barriers at;
  at.keys = barriers, at.values = barriers + 8, at.sums = barriers + 16;
  at.scores_full = barriers + 24, at.scores_empty = at.scores_full + kStages * 8;
  at.q_full = at.scores_empty + kStages * 8;
  at.q_empty = at.q_full + kStages * 8, at.do_full = at.q_empty + kStages * 8;
  at.do_empty = at.do_full + kStages * 8, at.sum_full = at.do_empty + kStages * 8;
  at.sum_empty = at.sum_full + kStages * 8;
  int* const ticket = reinterpret_cast<int*>(memory + Tiling::kBarriersAt + Tiling::kBarriers * 8);
  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) __trap();  // swizzled tiles start there
    constexpr int kConsumerWarps = Tiling::kConsumers * kWarpgroupSize / kWarpSize;
    mbarrier_init(at.keys, 1);
    mbarrier_init(at.values, 1);
    mbarrier_init(at.sums, 1);
    for (int i = 0; i < kStages; ++i)
      mbarrier_init(at.scores_full + i * 8, kConsumerWarps), mbarrier_init(at.scores_empty + i * 8, kConsumerWarps);
    for (int i = 0; i < kStages; ++i)
      mbarrier_init(at.q_full + i * 8, 1), mbarrier_init(at.q_empty + i * 8, kConsumerWarps);
    for (int i = 0; i < kStages; ++i)
      mbarrier_init(at.do_full + i * 8, 1), mbarrier_init(at.do_empty + i * 8, kConsumerWarps);
    for (int i = 0; i < kStages; ++i)
      mbarrier_init(at.sum_full + i * 8, kConsumerWarps), mbarrier_init(at.sum_empty + i * 8, 1);
    fence_barrier_init();
    *ticket = atomicAdd(a.ticket, 1);
  }
  __syncthreads();
  const Work work = take_work<Tiling>(a, *ticket);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupSize, 0);  // known to be the same in a warp
  if (warpgroup == 0) {
    decrease_registers<24>();
    if (threadIdx.x == 0) load_role<Tiling>(a, work, shared, at);
    if (threadIdx.x == kWarpSize) add_role<Tiling>(a, work, shared, at);
  } else {
    increase_registers<240>();
    product_role<T, Tiling>(a, work, shared, at, warpgroup - 1);
  }
#else
  (void)a;
  __trap();
#endif
}

// ---- launch ---------------------------------------------------------------------------------------------------------

template <typename T, typename Tiling>
void launch(const BackwardArguments<T>& arguments, int section, cudaStream_t stream) {
  constexpr int kQueries = Tiling::kQueries;
  const AttentionShape& shape = arguments.shape;
  const HopperWorkspace workspace = hopper_workspace(shape, arguments.statistics);
  Arguments<T> a;
  a.dq = arguments.dq, a.cos = arguments.rope.cos, a.sin = arguments.rope.sin;
  a.q = encode_head_map(arguments.q, shape.B, shape.TQ, shape.NH, shape.HS, kQueries);
  a.dout = encode_head_map(arguments.dout, shape.B, shape.TQ, shape.NH, shape.HS, kQueries);
  a.k = encode_head_map(arguments.k, shape.B, shape.TK, shape.NKV, shape.HS, kKeys);
  a.v = encode_head_map(arguments.v, shape.B, shape.TK, shape.NKV, shape.HS, kKeys);
  a.dk = encode_head_map(arguments.dk, shape.B, shape.TK, shape.NKV, shape.HS, kGroupKeys);
  a.dv = encode_head_map(arguments.dv, shape.B, shape.TK, shape.NKV, shape.HS, kGroupKeys);
  a.statistics = workspace.statistics, a.sums = workspace.sums, a.turns = workspace.turns, a.ticket = workspace.ticket;
  a.tokens = static_cast<int>(shape.TQ), a.tiles = static_cast<int>(ceil_div(shape.TQ, kQueries));
  a.stored_tiles = static_cast<int>(padded_queries(shape.TQ) / kQueries);
  a.heads = static_cast<int>(shape.NH), a.kv_heads = static_cast<int>(shape.NKV);
  a.batch_kv_heads = static_cast<int>(shape.B * shape.NKV);
  a.key_blocks = static_cast<int>(ceil_div(shape.TK, kKeys)), a.section = section;
  a.scale = shape.scale;

  const unsigned batch_heads = static_cast<unsigned>(shape.B * shape.NH);
  const dim3 blocks(batch_heads, static_cast<unsigned>(padded_queries(shape.TQ) / kStatisticsBlock));
  row_statistics_kernel<T, Tiling><<<blocks, 256, 0, stream>>>(
      arguments.dout, arguments.out, arguments.lse, workspace.statistics, a.turns, a.ticket, a.heads, a.tokens);
  check_launch("attention backward, statistics");

  const auto kernel = key_block_kernel<T, Tiling>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiling::kSharedBytes),
        "attention backward, blocks of keys: shared memory");
  kernel<<<static_cast<unsigned>(a.key_blocks * a.batch_kv_heads), Tiling::kThreads, Tiling::kSharedBytes, stream>>>(a);
  check_launch("attention backward, blocks of keys");
}

}  // namespace

bool hopper_backward_computes(const AttentionShape& shape) {
  return (shape.HS == 64 || shape.HS == 128) && shape.causal && shape.TQ == shape.TK;
}

bool hopper_backward_turns(const AttentionShape& shape, const DeviceRopeTable& rope) {
  const auto addresses = reinterpret_cast<std::uintptr_t>(rope.cos) | reinterpret_cast<std::uintptr_t>(rope.sin);
  return 2 * rope.half == shape.HS && addresses % 16 == 0;
}

HopperWorkspace hopper_workspace(const AttentionShape& shape, RowStatistics* memory) {
  const std::int64_t queries = shape.B * shape.NH * padded_queries(shape.TQ);
  HopperWorkspace workspace;
  workspace.statistics = reinterpret_cast<float*>(memory);
  workspace.sums = workspace.statistics + queries * 2;
  workspace.turns = reinterpret_cast<int*>(workspace.sums + queries * shape.HS);
  workspace.ticket = workspace.turns + queries / 64;
  workspace.bytes = static_cast<std::size_t>(queries) * (static_cast<std::size_t>(shape.HS) + 2) * sizeof(float) +
                    static_cast<std::size_t>(queries / 64 + 4) * sizeof(int);
  return workspace;
}

template <typename T>
void hopper_backward(const BackwardArguments<T>& arguments, cudaStream_t stream) {
  const AttentionShape& shape = arguments.shape;
  // Measured at T 1024 to 16384: so many K/V heads a section that it has some 256 blocks at head dimension 128, two for
  // every multiprocessor; 8 to 16 heads at 64.
  const int key_blocks = static_cast<int>(ceil_div(shape.TK, kKeys));
  if (shape.HS == 64) return launch<T, Tiling<64>>(arguments, key_blocks > 32 ? 8 : 16, stream);
  if (shape.HS == 128) return launch<T, Tiling<128>>(arguments, std::clamp(256 / key_blocks, 2, 16), stream);
  fail(Exit::internal, "attention backward: no Hopper kernel for head dimension %d", static_cast<int>(shape.HS));
}

template void hopper_backward<bf16>(const BackwardArguments<bf16>&, cudaStream_t);
template void hopper_backward<fp16>(const BackwardArguments<fp16>&, cudaStream_t);

}  // namespace weft::cuda
