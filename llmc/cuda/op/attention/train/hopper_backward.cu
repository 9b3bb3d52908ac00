// Backward on Hopper (sm_90a): tensor copies, wgmma, one pass over the blocks. With D = rowsum(dO * O), c = scale log2
// e and lse2 = lse log2 e:
//
//   P = 2^(c S - lse2);  dV = P^T dO;  dP = dO V^T;  dS = P * (dP - D);  dQ = scale dS K;  dK = scale dS^T Q
//
// (Dao et al., 2022, algorithm 4; the roles of the warpgroups are those of FlashAttention-3, Shah et al., 2024, section
// 3.) Two kernels:
//
//   row_statistics_kernel  (lse2, D) of every query; zeroes the counters
//   key_block_kernel       a block has 128 keys in shared memory and walks the queries that see them: 5 GEMMs
//
// The GEMMs have keys as rows (S^T = K Q^T and dP^T = V dO^T), so that P^T and dS^T are in registers as the left
// operands of dV += P^T dO and dK += dS^T Q. Those two sums never leave registers: a block walks the query heads of its
// group one after the other. dS^T also goes through shared memory for dQ = dS K, where keys are the inner dimension.
//
// Two warpgroups have 64 keys each. A third has the threads that move data. One loads Q, dO and the statistics into
// rings. Two add dQ to global memory, one for each stage of its ring, so that one addition can begin while the other is
// on its way. Step i of a consumer warpgroup, in the order of issue; GEMMs are asynchronous:
//
//   P = exp(S) | wait for dP | dQ of step i - 2 handed over | dV += | dS = P (dP - D), to shared memory |
//   wait for the other's dS, for Q and dO of step i + 1 and for room for dQ | dQ of step i - 1 =, dK += | wait for dV |
//   S of step i + 1 = | wait for dQ, to shared memory | wait for dK | dP of step i + 1 = | wait for S
//
// dQ is handed over where no GEMM is in flight: its fence would wait for those that are. (That of dS waits for dV.)
//
// So the tensor cores compute dP while exponentials are computed, dV during dS, dK and the next S while dQ leaves the
// registers. dQ needs dS of both warpgroups. Because it is computed a step late, they need not run in lockstep, and do
// not: only one at a time computes exponentials, while the GEMMs of the other run. The waits are placed so that the
// accumulators fit into the 240 registers of a thread.
//
// dQ of a query tile is the sum over all blocks of keys that it sees. They are added in fp32 by bulk copies that reduce
// in L2, in a fixed order, keys first to last: a counter for each tile says how many have been added. Little time is
// lost waiting for one's turn, because all blocks proceed in the same direction: blocks take their work from a counter,
// those with the first keys (and the most queries) first, and each walks its queries from the last to the first, all
// heads of the group at one tile before the next tile. So blocks of the same head that start together reach a tile one
// step after each other, and a block that starts later is behind. There is no deadlock: a block only waits for blocks
// that took their work earlier, which are therefore running. The first block of keys sees every tile and stores instead
// of adding; the last block of a tile rounds the sum to T.
//
// Where past keys are hidden (Tiling::kHidesPast), a block ends at the last query tile that sees its keys, and the first
// block that a tile sees is the one that stores. The first kernel writes down each query's first visible key.
//
// Where RoPE has rotated q and k, dQ and dK are rotated back in fp32 before they are stored: dK in the accumulators,
// whose threads hold both halves of a head, dQ by the block that rounds it.
//
// With codes (Tiling::kCodes) dQ, dK and dV are rounded to bf16 and then to e5m2, and only that is stored: dQ from the
// registers of the block that rounds it, dK and dV from shared memory, which gives a thread 16 columns of a row.
//
// The dQ sums have the layout of the accumulators: [B, NH, tiles of queries, 2 warpgroups, 8, 128 threads, 4].

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/barriers.cuh"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/fragments.cuh"
#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/hw/memory_order.cuh"
#include "llmc/cuda/hw/ring.cuh"
#include "llmc/cuda/hw/tensor_map.h"
#include "llmc/cuda/hw/tile.cuh"
#include "llmc/cuda/op/attention/train/hide_past.cuh"
#include "llmc/cuda/op/attention/train/launch.cuh"
#include "llmc/cuda/op/attention/train/paths.h"
#include "llmc/cuda/op/elementwise/rotate_pair.cuh"
#include "llmc/cuda/op/fp8/fp8.cuh"

namespace weft::cuda {

namespace {

using namespace hopper;

constexpr int kKeys = 128, kGroupKeys = 64;  // keys of a block, of a warpgroup
constexpr int kStages = 2;                   // stages of every ring
constexpr int kSumBytes = 64 * 64 * 4;       // a warpgroup's share of dQ in one step: 64 x 64 in fp32

template <typename T, int HeadDim, bool HidesPast, bool Codes = false>
struct Tiling {
  using Element = T;
  static constexpr bool kHidesPast = HidesPast, kCodes = Codes;
  static constexpr int HS = HeadDim, kQueries = HeadDim == 64 ? 128 : 64;
  static constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * kWarpgroupSize;
  using KeyTile = SwizzledTile<T, kKeys, HS>;          // K or V of a block
  using QueryTile = SwizzledTile<T, kQueries, HS>;     // Q or dO of a step
  using ScoreTile = SwizzledTile<T, kKeys, kQueries>;  // dS^T of a step
  static constexpr int kStatisticsBytes = kQueries * static_cast<int>(sizeof(RowStatistics));

  struct Storage {
    typename KeyTile::Storage k, v;
    typename QueryTile::Storage q[kStages], dout[kStages];
    typename ScoreTile::Storage scores[kStages];
    float sums[kStages][kConsumers][kSumBytes / 4];  // dQ
    float statistics[kStages][2][kQueries];          // lse2, then D
    BarrierStorage k_full, v_full, sums_added;
    RingBarrierStorage<kStages> score_ring, q_ring, dout_ring, sum_ring;
    int ticket;
  };
  static constexpr int kSharedBytes = sizeof(Storage);
  static_assert(sizeof(Storage::statistics) == kStages * kStatisticsBytes && kStatisticsBytes % 16 == 0);
  static_assert(kSharedBytes <= 227 * 1024);
  static_assert(kQueries * HS == kConsumers * 64 * 64, "dQ of a step is 64 x 64 a warpgroup");
};

// The kernels' arguments; sizes fit 32 bits, as attention.cu checks.
template <typename T>
struct Arguments {
  CUtensorMap q, dout, k, v, dk, dv;
  HeadViewOf<T> dq;
  const float *cos, *sin;           // RoPE table [tokens, HS / 2]; null: q and k are not rotated
  const float* statistics;          // [B * NH, tiles, 2, queries of a tile]: lse2, then D
  float* sums;                      // dQ in fp32, in the layout described above
  int* order;                       // [B * NH, tiles]: blocks of keys that have been added
  int* ticket;                      // next piece of work
  int tokens, tiles, stored_tiles;  // tiles: of queries; stored_tiles: a head's tiles in the arrays above
  int heads, kv_heads, batch_kv_heads;
  int key_blocks, section;
  float scale;
  AttentionCodes codes;        // with Tiling::kCodes, in the place of dq, dk and dv
  int* first_keys;             // [B, stored tiles, queries of a tile], with Tiling::kHidesPast
  const int* document_starts;  // [B, tokens], with Tiling::kHidesPast; null: RoPE's positions count through a sequence

  // Of the queries of a tile.
  __device__ const int* first_keys_of(int b, int tile, int queries) const {
    return first_keys + (static_cast<std::int64_t>(b) * stored_tiles + tile) * queries;
  }
};

// ---- statistics -----------------------------------------------------------------------------------------------------

// Grid: x = batch and head, y = kStatisticsBlock queries; 256 threads. Queries past the last get lse2 = infinity, so P
// = 0. The first head of a sequence writes first_keys, for `shape`.
template <typename Tiling, typename T = typename Tiling::Element>
__global__ void __launch_bounds__(256)
    row_statistics_kernel(HeadViewOf<const T> dout, HeadViewOf<const T> out, const float* lse, float* statistics,
                          int* order, int* ticket, int heads, int tokens, const __grid_constant__ AttentionShape shape,
                          int* first_keys) {
  constexpr int kLanes = Tiling::HS / 8, kRows = 256 / kLanes, kRounds = kStatisticsBlock / kRows;
  constexpr int kQueries = Tiling::kQueries;
  const std::int64_t b = blockIdx.x / heads, h = blockIdx.x % heads;
  const int first = static_cast<int>(blockIdx.y * kStatisticsBlock), lane = threadIdx.x % kLanes;
  statistics += (static_cast<std::int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * kStatisticsBlock * 2;
  Pack<T> left[kRounds], right[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {  // all loads first; rows past the end load the last one
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
  if constexpr (Tiling::kHidesPast) {
    const int row = static_cast<int>(threadIdx.x);
    if (h == 0 && row < kStatisticsBlock)
      first_keys[(b * gridDim.y + blockIdx.y) * kStatisticsBlock + row] = first_visible_key(shape, b, first + row);
  }
  constexpr int kTiles = kStatisticsBlock / kQueries;
  if (threadIdx.x < kTiles)
    order[(static_cast<std::int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * kTiles + threadIdx.x] = 0;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *ticket = 0;
}

// ---- the pass over the blocks ---------------------------------------------------------------------------------------

#if WEFT_WGMMA

// Named barriers: one of all consumers; from kOneConsumer on one for each consumer; from kExpSlot on one for each
// consumer's turn at exponentials.
constexpr int kAllConsumers = 1, kOneConsumer = 2, kExpSlot = 4;

// Waits until `blocks` blocks of keys, all those before this one, have been added to a tile. Traps after a time limit,
// like mbarrier_wait(). (A __trap() is harmless here: the warpgroup that calls this releases registers and requests
// none.)
__device__ inline void wait_for_order(const int* added, int blocks) {
  constexpr long long kWatchdog = 5LL << 32;
  const long long start = clock64();
  while (load_acquire(added) != blocks)
    if (clock64() - start > kWatchdog) __trap();
  fence_async_proxy_global();
}

// The work of a block: 128 keys of one K/V head, in steps over tiles of queries and heads of the group.
struct Work {
  int b, kv, block;  // block: of keys
  int first_tile;    // first tile of queries that see the keys
  int end_tile;      // past the last one, with Tiling::kHidesPast; otherwise all later ones see them
};

// The work for a ticket. Work is ordered by sections of a few K/V heads, whose operands stay in L2; within a section
// the first blocks of keys of all heads come first.
template <typename Tiling, typename T>
__device__ Work work_of(const Arguments<T>& a, int ticket) {
  const int first = ticket / (a.section * a.key_blocks) * a.section;
  const int width = min(a.section, a.batch_kv_heads - first), rest = ticket - first * a.key_blocks;
  const int head = first + rest % width, block = rest / width, b = head / a.kv_heads;
  int end_tile = 0;
  if constexpr (Tiling::kHidesPast) {
    const int* first_keys = a.first_keys_of(b, 0, Tiling::kQueries);
    end_tile =
        leading_rows(a.tiles, [&](int tile) { return first_keys[tile * Tiling::kQueries] < (block + 1) * kKeys; });
  }
  return {b, head % a.kv_heads, block, block * kKeys / Tiling::kQueries, end_tile};
}

template <typename Tiling, typename T>
__device__ int end_tile(const Arguments<T>& a, const Work& work) {
  return Tiling::kHidesPast ? work.end_tile : a.tiles;
}

template <typename Tiling>
struct SharedMemory {
  using Storage = typename Tiling::Storage;
  using KeyTile = typename Tiling::KeyTile;
  using QueryTile = typename Tiling::QueryTile;
  using ScoreTile = typename Tiling::ScoreTile;

  unsigned base;

  __device__ KeyTile k() const { return {base + unsigned{offsetof(Storage, k)}}; }
  __device__ KeyTile v() const { return {base + unsigned{offsetof(Storage, v)}}; }
  __device__ QueryTile q(int stage) const {
    return {base + unsigned{offsetof(Storage, q)} + stage * QueryTile::kBytes};
  }
  __device__ QueryTile dout(int stage) const {
    return {base + unsigned{offsetof(Storage, dout)} + stage * QueryTile::kBytes};
  }
  __device__ ScoreTile scores(int stage) const {
    return {base + unsigned{offsetof(Storage, scores)} + stage * ScoreTile::kBytes};
  }
  __device__ unsigned sums(int stage) const {
    return base + unsigned{offsetof(Storage, sums)} + stage * Tiling::kConsumers * kSumBytes;
  }
  __device__ unsigned statistics(int stage) const {
    return base + unsigned{offsetof(Storage, statistics)} + stage * Tiling::kStatisticsBytes;
  }

  __device__ unsigned k_full() const { return base + unsigned{offsetof(Storage, k_full)}; }
  __device__ unsigned v_full() const { return base + unsigned{offsetof(Storage, v_full)}; }
  __device__ unsigned sums_added() const { return base + unsigned{offsetof(Storage, sums_added)}; }
  // dS^T: both warpgroups fill it, and both read it.
  __device__ RingBarriers score_ring() const { return {base + unsigned{offsetof(Storage, score_ring)}, kStages}; }
  __device__ RingBarriers q_ring() const { return {base + unsigned{offsetof(Storage, q_ring)}, kStages}; }
  __device__ RingBarriers dout_ring() const { return {base + unsigned{offsetof(Storage, dout_ring)}, kStages}; }
  // dQ: the warpgroups fill it, the threads that add it to global memory empty it, one a stage.
  __device__ RingBarriers sum_ring() const { return {base + unsigned{offsetof(Storage, sum_ring)}, kStages}; }
};

// The thread that loads K, V, and for each step Q, dO and the statistics.
template <typename Tiling, typename T>
__device__ void load(const Arguments<T>& a, const Work& work, const SharedMemory<Tiling>& shared) {
  constexpr int kQueries = Tiling::kQueries, kStatisticsBytes = Tiling::kStatisticsBytes;
  const int group = a.heads / a.kv_heads;
  const RingBarriers q_ring = shared.q_ring(), dout_ring = shared.dout_ring();
  mbarrier_arrive_expect(shared.k_full(), Tiling::KeyTile::kBytes);
  tensor_load(shared.k(), a.k, shared.k_full(), work.block * kKeys, work.kv, work.b);
  int step = 0;
  for (int tile = end_tile<Tiling>(a, work) - 1; tile >= work.first_tile; --tile) {
    for (int h = work.kv * group; h < (work.kv + 1) * group; ++h) {
      const RingPosition now = RingPosition::at(step, kStages);
      q_ring.wait_empty(now);
      const unsigned q_full = q_ring.full(now.stage);
      mbarrier_arrive_expect(q_full, Tiling::QueryTile::kBytes + kStatisticsBytes);
      tensor_load(shared.q(now.stage), a.q, q_full, tile * kQueries, h, work.b);
      const std::int64_t row = (static_cast<std::int64_t>(work.b) * a.heads + h) * a.stored_tiles + tile;
      bulk_load(shared.statistics(now.stage), a.statistics + row * kQueries * 2, kStatisticsBytes, q_full);
      if (step == 0) {
        mbarrier_arrive_expect(shared.v_full(), Tiling::KeyTile::kBytes);
        tensor_load(shared.v(), a.v, shared.v_full(), work.block * kKeys, work.kv, work.b);
      }
      dout_ring.wait_empty(now);
      const unsigned dout_full = dout_ring.full(now.stage);
      mbarrier_arrive_expect(dout_full, Tiling::QueryTile::kBytes);
      tensor_load(shared.dout(now.stage), a.dout, dout_full, tile * kQueries, h, work.b);
      ++step;
    }
  }
}

// The thread that adds the consumers' dQ from a stage of shared memory to global memory, each tile once all blocks of
// keys before this one have added theirs.
template <typename Tiling, typename T>
__device__ void add_sums(const Arguments<T>& a, const Work& work, const SharedMemory<Tiling>& shared, int stage) {
  const int group = a.heads / a.kv_heads;
  constexpr unsigned kBytes = Tiling::kConsumers * kSumBytes;
  const RingBarriers sum_ring = shared.sum_ring();
  int step = 0;
  for (int tile = end_tile<Tiling>(a, work) - 1; tile >= work.first_tile; --tile) {
    int earlier = work.block;  // blocks of keys before this one that the tile sees
    if constexpr (Tiling::kHidesPast) earlier -= a.first_keys_of(work.b, tile, Tiling::kQueries)[0] / kKeys;
    for (int h = work.kv * group; h < (work.kv + 1) * group; ++h, ++step) {
      const RingPosition now = RingPosition::at(step, kStages);
      if (now.stage != stage) continue;
      const std::int64_t row = (static_cast<std::int64_t>(work.b) * a.heads + h) * a.stored_tiles + tile;
      sum_ring.wait_full(now);
      const unsigned from = shared.sums(now.stage);
      float* to = a.sums + row * (kBytes / 4);
      if (earlier == 0) {
        bulk_store(to, from, kBytes);  // a tile's first block stores, so nothing need be zeroed
      } else {
        wait_for_order(a.order + row, earlier);
        bulk_add(to, from, kBytes);
      }
      bulk_commit();
      bulk_wait_read();
      mbarrier_arrive(sum_ring.empty(now.stage));
      bulk_wait();
      fence_async_proxy_global();
      store_release(a.order + row, earlier + 1);
    }
  }
  mbarrier_arrive(shared.sums_added());
}

// Undoes RoPE's rotation of two dimensions by an angle.
__device__ inline void unrotate(float& low, float& high, float cosine, float sine) {
  rotate_pair(low, high, cosine, -sine);
}

// The position by which RoPE has rotated a token.
template <typename Tiling, typename T>
__device__ int position_of(const Arguments<T>& a, int b, int token) {
  if constexpr (Tiling::kHidesPast) {
    if (a.document_starts != nullptr) token -= a.document_starts[static_cast<std::int64_t>(b) * a.tokens + token];
  }
  return token;
}

// Rotates a warpgroup's dK back. Dimensions i and i + HS / 2 of a key are R / 2 accumulators apart. `first_key`: the
// first of the thread's two keys, which are 8 apart.
template <typename Tiling, typename T, int R>
__device__ void unrotate_keys(const Arguments<T>& a, int b, int first_key, float (&d)[R]) {
  // half of HS: R = HS / 2 accumulators hold two keys of HS dimensions, spread over four threads
  constexpr int kHalf = R;
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int key = 0; key < 2; ++key) {
    const int position = position_of<Tiling>(a, b, min(first_key + key * 8, a.tokens - 1));
    const std::int64_t at = static_cast<std::int64_t>(position) * kHalf + column;
#pragma unroll
    for (int i = 0; i < R / 8; ++i) {
      const float2 cosine = __ldg(reinterpret_cast<const float2*>(a.cos + at + i * 8));
      const float2 sine = __ldg(reinterpret_cast<const float2*>(a.sin + at + i * 8));
      unrotate(d[4 * i + 2 * key], d[4 * i + 2 * key + R / 2], cosine.x, sine.x);
      unrotate(d[4 * i + 2 * key + 1], d[4 * i + 2 * key + 1 + R / 2], cosine.y, sine.y);
    }
  }
}

// What rounding to fp8 needs in a thread.
struct Rounding {
  float scale = 1.0f;
  ThreadCounters counters;

  // The codes of eight values of T.
  template <typename T>
  __device__ uint2 codes(const unsigned (&words)[4]) {
    float values[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<T>(words[i]);
      values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
    const unsigned low = round_four<Fp8Format::e5m2>(values, scale, counters);
    return make_uint2(low, round_four<Fp8Format::e5m2>(values + 4, scale, counters));
  }
};

// Stores the codes of a warpgroup's 64 keys, whose gradients lie in `tile` of shared memory.
template <typename Tiling>
__device__ void store_key_codes(const HeadViewOf<std::uint8_t>& to, const typename Tiling::KeyTile& tile,
                                const Work& work, int consumer, int tokens, Rounding& rounding) {
  using T = typename Tiling::Element;
  constexpr int kRowThreads = Tiling::HS / 16, kRowsAtOnce = kWarpgroupSize / kRowThreads;
  const int thread = threadIdx.x % kWarpgroupSize, chunk = thread % kRowThreads * 2;
#pragma unroll 1
  for (int row = consumer * kGroupKeys + thread / kRowThreads; row < (consumer + 1) * kGroupKeys; row += kRowsAtOnce) {
    const int key = work.block * kKeys + row;
    if (key >= tokens) break;
    uint2 codes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 from =
          *static_cast<const uint4*>(__cvta_shared_to_generic(tile.address + Tiling::KeyTile::offset(row, chunk + i)));
      const unsigned words[4] = {from.x, from.y, from.z, from.w};
      codes[i] = rounding.codes<T>(words);
    }
    *reinterpret_cast<uint4*>(to.at(work.b, key, work.kv) + chunk * 8) =
        make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y);
  }
}

// Rounds dQ to T, or to codes, for the tiles that no later block adds to. `thread`: over all consumers' threads. A
// thread has two rows and 8 columns of each half of a head, which RoPE rotates together. Four heads are loaded at a
// time, so that one wait for L2 serves all of them.
template <typename Tiling, typename T>
__device__ void convert_sums(const Arguments<T>& a, const Work& work, int thread, Rounding& rounding) {
  constexpr int HS = Tiling::HS, kBatch = 4, kPiece = kSumBytes / 16;
  static_assert(Tiling::kConsumers * kWarpgroupSize == 256);
  // At head dimension 64 a warpgroup's sums are 64 queries by both halves of a head, at 128 they are 64 queries by one
  // half.
  constexpr int kColumns = HS == 64 ? 4 : 8, kOtherHalf = HS == 64 ? kColumns * kWarpgroupSize : kPiece;
  const int column = thread % kColumns, piece = HS == 64 ? thread / 4 % 2 : 0, g = thread / 8 % 8, warp = thread / 64;
  const int group = a.heads / a.kv_heads, tiles = min(a.tiles - work.first_tile, kKeys / Tiling::kQueries);
#pragma unroll 1
  for (int tile = work.first_tile; tile < work.first_tile + tiles; ++tile) {
    const int first_row = tile * Tiling::kQueries + piece * 64 + warp * 16 + g;
    float4 cosine[2][2], sine[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = position_of<Tiling>(a, work.b, min(first_row + i / 2 * 8, a.tokens - 1));
      const std::int64_t at = static_cast<std::int64_t>(position) * (HS / 2) + column * 8 + i % 2 * 4;
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
            unrotate(x.x, y.x, t % 2 == 0 ? c.x : c.z, t % 2 == 0 ? s.x : s.z);
            unrotate(x.y, y.y, t % 2 == 0 ? c.y : c.w, t % 2 == 0 ? s.y : s.w);
            words[0][t] = pack<T>(x.x * a.scale, x.y * a.scale);
            words[1][t] = pack<T>(y.x * a.scale, y.y * a.scale);
          }
          if (first_row + row * 8 >= a.tokens) continue;
          const int token = first_row + row * 8, head = work.kv * group + first + i;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int first_column = column * 8 + half * (HS / 2);
            if constexpr (Tiling::kCodes) {
              *reinterpret_cast<uint2*>(a.codes.dq.at(work.b, token, head) + first_column) =
                  rounding.codes<T>(words[half]);
            } else {
              *reinterpret_cast<uint4*>(a.dq.at(work.b, token, head) + first_column) = {words[half][0], words[half][1],
                                                                                        words[half][2], words[half][3]};
            }
          }
        }
      }
    }
  }
}

// Arrives for the warp, when all of its lanes are done. `thread`: in the warpgroup.
__device__ __forceinline__ void warp_arrive(unsigned barrier, int thread) {
  __syncwarp();
  if (thread % kWarpSize == 0) mbarrier_arrive(barrier);
}

// Starts d = a b, for S^T, dP^T and dQ.
template <typename A, typename B, int R>
__device__ __forceinline__ void start_gemm(float (&d)[R], const A& a, const B& b) {
  forget(d);
  gemm_async(d, a, b);
  wgmma_commit();
}
// Starts d += a b with a in registers, for dV and dK.
template <typename B, int W, int R>
__device__ __forceinline__ void start_gemm_add(float (&d)[R], const unsigned (&a)[W], const B& b) {
  gemm_add_async(d, a, b);
  wgmma_commit();
}

// P^T = 2^(S^T c - lse2), in the place of S^T: a warp's 16 keys by 2 R queries. `lse2` points to the thread's first two
// queries. `ahead`: the warp's first key minus the first query.
template <int R>
__device__ __forceinline__ void exponentials(float (&S)[R], const float* lse2, float c, int ahead, int lane) {
#pragma unroll
  for (int j = 0; j < R / 4; ++j) {
    const float2 pair = *reinterpret_cast<const float2*>(lse2 + j * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) S[4 * j + i] = exp2_approximate(fmaf(S[4 * j + i], c, i % 2 ? -pair.y : -pair.x));
  }
  if (ahead + 15 > 0) {  // causal mask: keys after a query are hidden from it
    const int hidden = ahead + lane / 4 - lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < R / 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (hidden > j * 8 + i % 2 - i / 2 * 8) S[4 * j + i] = 0;
  }
}
// P^T of keys in front of what a query sees becomes 0. `first_keys`: of the thread's first two queries.
template <int R>
__device__ __forceinline__ void hide_past(float (&P)[R], const int* first_keys, int first_key) {
  const int key = first_key + static_cast<int>(threadIdx.x) % kWarpSize / 4;
#pragma unroll
  for (int j = 0; j < R / 4; ++j) {
    const int2 first = __ldg(reinterpret_cast<const int2*>(first_keys + j * 8));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (key + i / 2 * 8 < (i % 2 ? first.y : first.x)) P[4 * j + i] = 0;
  }
}
// dS^T = P^T (dP^T - D), in the place of dP^T. `D` points to the thread's first two queries.
template <int R>
__device__ __forceinline__ void score_gradients(float (&dP)[R], const float (&P)[R], const float* D) {
#pragma unroll
  for (int j = 0; j < R / 4; ++j) {
    const float2 pair = *reinterpret_cast<const float2*>(D + j * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) dP[4 * j + i] = P[4 * j + i] * (dP[4 * j + i] - (i % 2 ? pair.y : pair.x));
  }
}

// Stores a warpgroup's share of a step's dQ in its stage, which is empty.
template <typename Tiling>
__device__ __forceinline__ void store_sums(const SharedMemory<Tiling>& shared, int consumer, const float (&dQ)[32],
                                           RingPosition at, int thread) {
  float4* sums = reinterpret_cast<float4*>(__cvta_shared_to_generic(shared.sums(0))) +
                 (at.stage * Tiling::kConsumers + consumer) * (kSumBytes / 16) + thread;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    sums[i * kWarpgroupSize] = make_float4(dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]);
}
// Makes that share visible to bulk copies and tells add_sums().
template <typename Tiling>
__device__ __forceinline__ void hand_over_sums(const SharedMemory<Tiling>& shared, int stage, int thread) {
  fence_async_proxy_shared();
  warp_arrive(shared.sum_ring().full(stage), thread);
}

template <typename Tiling, typename T, int R>
__device__ __forceinline__ void store_gradients(const Arguments<T>& a, const Work& work,
                                                const SharedMemory<Tiling>& shared, int consumer, float (&dK)[R],
                                                float (&dV)[R]);

// A consumer warpgroup, which has 64 of the block's keys.
template <typename Tiling, typename T>
__device__ void consume(const Arguments<T>& a, const Work& work, const SharedMemory<Tiling>& shared, int consumer) {
  constexpr int HS = Tiling::HS, kQueries = Tiling::kQueries, kR = kQueries / 2;
  using Storage = typename Tiling::Storage;
  // For the compiler they come from nowhere, so that it keeps them in registers: a special register that is read again
  // in a step comes behind all GEMMs that have been issued. (Where past keys are hidden it does so all the same.)
  int thread = threadIdx.x % kWarpgroupSize;
  asm volatile("" : "+r"(thread));
  // the first of the warp's keys
  const int warp_row = consumer * kGroupKeys + threadIdx.x % kWarpgroupSize / kWarpSize * 16;
  unsigned lane_offset = Tiling::KeyTile::lane_offset(warp_row);
  asm volatile("" : "+r"(lane_offset));
  const RingBarriers score_ring = shared.score_ring(), q_ring = shared.q_ring(), dout_ring = shared.dout_ring(),
                     sum_ring = shared.sum_ring();
  const auto k_rows = shared.k().template rows<kGroupKeys>(consumer * kGroupKeys).k_major();
  const auto v_rows = k_rows.moved(offsetof(Storage, v) - offsetof(Storage, k));
  // dQ: at head dimension 64 a warpgroup computes 64 of the queries, at 128 it computes 64 of the columns.
  const auto dq_keys = shared.k().column_tile(HS == 64 ? 0 : consumer).mn_major();
  const auto dq_scores = shared.scores(0).column_tile(HS == 64 ? consumer : 0).mn_major();

  float S[kR], dP[kR], dK[HS / 2], dV[HS / 2];
#pragma unroll
  for (int i = 0; i < HS / 2; ++i) dK[i] = 0, dV[i] = 0;
  pin(dK);
  pin(dV);

  const int group = a.heads / a.kv_heads, steps = (end_tile<Tiling>(a, work) - work.first_tile) * group;
  const float c = a.scale * kLog2E;
  int head = 0;
  // The warp's first key minus the tile's first query.
  int ahead = work.block * kKeys + warp_row - (end_tile<Tiling>(a, work) - 1) * kQueries;
  // The first key that a tile's last query sees; read a step before it is used.
  const auto last_first_key = [&](int tile) { return a.first_keys_of(work.b, tile, kQueries)[kQueries - 1]; };
  int tile = end_tile<Tiling>(a, work) - 1, all_seen_from = 0;
  if constexpr (Tiling::kHidesPast) all_seen_from = last_first_key(tile);

  if (consumer == 1) named_barrier_arrive(kExpSlot, Tiling::kConsumers * kWarpgroupSize);
  mbarrier_wait(shared.k_full(), 0);
  q_ring.wait_full({0, 0});
  wgmma_fence();
  start_gemm(S, k_rows, shared.q(0).k_major());
  mbarrier_wait(shared.v_full(), 0);
  dout_ring.wait_full({0, 0});
  wgmma_fence();
  start_gemm(dP, v_rows, shared.dout(0).k_major());
  wgmma_wait<1>();
  pin(S);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // S is complete; dP is still running.
    const RingPosition now = RingPosition::at(step, kStages), next = RingPosition::at(step + 1, kStages);
    const float* lse2 = reinterpret_cast<const float*>(__cvta_shared_to_generic(shared.statistics(0))) +
                        now.stage * kQueries * 2 + thread % 4 * 2;
    named_barrier_wait(kExpSlot + consumer, Tiling::kConsumers * kWarpgroupSize);
    unsigned P[kR / 2];
    exponentials(S, lse2, c, ahead, thread % kWarpSize);
    if constexpr (Tiling::kHidesPast) {
      const int first_key = work.block * kKeys + warp_row;
      if (first_key < all_seen_from)
        hide_past(S, a.first_keys_of(work.b, tile, kQueries) + threadIdx.x % 4 * 2, first_key);
    }
    round_to_operand<T>(P, S);
    pin(P);  // keeps the exponentials before the wait
    if (consumer == 0 || step + 1 < steps)
      named_barrier_arrive(kExpSlot + 1 - consumer, Tiling::kConsumers * kWarpgroupSize);
    wgmma_wait<0>();
    pin(dP);
    score_ring.wait_empty(now);
    if (step > 1) hand_over_sums(shared, now.stage, thread);  // of step - 2
    wgmma_fence();
    start_gemm_add(dV, P, shared.dout(now.stage).mn_major());
    score_gradients(dP, S, lse2 + kQueries);
    unsigned dS[kR / 2];
    round_to_operand<T>(dS, dP);
    shared.scores(now.stage).store(lane_offset, dS);
    fence_async_proxy_shared();
    warp_arrive(score_ring.full(now.stage), thread);

    // dQ of the previous step, whose stage is also the next step's, since there are two. By now the other warpgroup has
    // had time to store its dS. Step 0 multiplies stale shared memory and discards the result: a branch around wgmma
    // would make the compiler wait for those in flight. All that the rest of the step waits for is asked for here, at
    // once: an mbarrier answers late behind issued GEMMs. The last step has no next one, and step 0 none before: there
    // this names a phase that is over.
    static_assert(kStages == 2);
    const RingPosition loaded = step + 1 < steps ? next : now;
    const RingPosition before = step > 0 ? RingPosition::at(step - 1, kStages) : RingPosition{next.stage, 1};
    mbarrier_wait_all({score_ring.full_phase(before), sum_ring.empty_phase(step > 0 ? before : now)});
    float dQ[32];
    wgmma_fence();
    start_gemm(dQ, dq_scores.moved(next.stage * Tiling::ScoreTile::kBytes), dq_keys);
    start_gemm_add(dK, dS, shared.q(now.stage).mn_major());
    wgmma_wait<2>();  // dV is done: the registers of its operand are free for S
    pin(dV);
    warp_arrive(dout_ring.empty(now.stage), thread);
    mbarrier_wait_all({q_ring.full_phase(loaded), dout_ring.full_phase(loaded)});
    wgmma_fence();
    // in the last step this multiplies stale shared memory and is discarded
    start_gemm(S, k_rows, shared.q(next.stage).k_major());
    wgmma_wait<2>();  // dQ
    pin(dQ);
    if (step > 0) {
      warp_arrive(score_ring.empty(next.stage), thread);
      store_sums(shared, consumer, dQ, before, thread);
    }
    wgmma_wait<1>();  // dK
    pin(dK);
    warp_arrive(q_ring.empty(now.stage), thread);
    wgmma_fence();
    start_gemm(dP, v_rows, shared.dout(next.stage).k_major());
    wgmma_wait<1>();
    pin(S);

    if (++head == group) {
      head = 0, ahead += kQueries;
      if constexpr (Tiling::kHidesPast) all_seen_from = last_first_key(max(--tile, 0));
    }
  }

  wgmma_wait<0>();
  pin(S);
  pin(dP);
  float dQ[32];
  const RingPosition last = RingPosition::at(steps - 1, kStages);
  score_ring.wait_full(last);
  wgmma_fence();
  start_gemm(dQ, dq_scores.moved(last.stage * Tiling::ScoreTile::kBytes), dq_keys);
  wgmma_wait<0>();
  pin(dK);
  pin(dV);
  pin(dQ);
  if (steps > 1) hand_over_sums(shared, RingPosition::at(steps - 2, kStages).stage, thread);
  sum_ring.wait_empty(last);
  store_sums(shared, consumer, dQ, last, thread);
  hand_over_sums(shared, last.stage, thread);
  store_gradients(a, work, shared, consumer, dK, dV);
}

// Rounds and stores a warpgroup's dK and dV, when all consumers are done, and then dQ of the tiles that no later block
// adds to.
template <typename Tiling, typename T, int R>
__device__ __forceinline__ void store_gradients(const Arguments<T>& a, const Work& work,
                                                const SharedMemory<Tiling>& shared, int consumer, float (&dK)[R],
                                                float (&dV)[R]) {
  constexpr int HS = Tiling::HS;
  const int thread = threadIdx.x % kWarpgroupSize, warp_row = consumer * kGroupKeys + thread / kWarpSize * 16;
  const int g = threadIdx.x % kWarpSize / 4;
  const unsigned lane_offset = Tiling::KeyTile::lane_offset(warp_row);
#pragma unroll
  for (int i = 0; i < HS / 2; ++i) dK[i] *= a.scale;
  if (a.cos != nullptr) unrotate_keys<Tiling>(a, work.b, work.block * kKeys + warp_row + g, dK);
  unsigned words[HS / 4];
  named_barrier_wait(kAllConsumers, Tiling::kConsumers * kWarpgroupSize);  // no consumer reads K and V any more
  round_to_operand<T>(words, dV);
  shared.v().store(lane_offset, words);
  round_to_operand<T>(words, dK);
  shared.k().store(lane_offset, words);
  Rounding rounding;
  if constexpr (Tiling::kCodes) {
    rounding.scale = *a.codes.scale;
    named_barrier_wait(kOneConsumer + consumer, kWarpgroupSize);
    store_key_codes<Tiling>(a.codes.dv, shared.v(), work, consumer, a.tokens, rounding);
    store_key_codes<Tiling>(a.codes.dk, shared.k(), work, consumer, a.tokens, rounding);
    mbarrier_wait(shared.sums_added(), 0);
    convert_sums<Tiling>(a, work, consumer * kWarpgroupSize + thread, rounding);
    __syncwarp();
    add_warp_counters(a.codes.counters, rounding.counters);
    return;
  }
  fence_async_proxy_shared();
  named_barrier_wait(kOneConsumer + consumer, kWarpgroupSize);
  if (thread == 0) {
    const int first_key = work.block * kKeys + consumer * kGroupKeys;
    tensor_store(a.dv, shared.v().template rows<kGroupKeys>(consumer * kGroupKeys), first_key, work.kv, work.b);
    tensor_store(a.dk, shared.k().template rows<kGroupKeys>(consumer * kGroupKeys), first_key, work.kv, work.b);
    bulk_commit();
  }
  mbarrier_wait(shared.sums_added(), 0);
  convert_sums<Tiling>(a, work, consumer * kWarpgroupSize + thread, rounding);
  if (thread == 0) bulk_wait_read();
}

#endif  // WEFT_WGMMA

// Grid: one block for each piece of work.
template <typename Tiling, typename T = typename Tiling::Element>
__global__ void __launch_bounds__(Tiling::kThreads, 1) key_block_kernel(const __grid_constant__ Arguments<T> a) {
#if WEFT_WGMMA
  extern __shared__ __align__(1024) unsigned char memory[];
  const SharedMemory<Tiling> shared{shared_address(memory)};
  int* const ticket = &reinterpret_cast<typename Tiling::Storage*>(memory)->ticket;
  if (threadIdx.x == 0) {
    if (shared.base % 1024 != 0) __trap();  // swizzled tiles must begin at multiples of 1024
    constexpr int kConsumerWarps = Tiling::kConsumers * kWarpgroupSize / kWarpSize;
    mbarrier_init(shared.k_full(), 1);
    mbarrier_init(shared.v_full(), 1);
    mbarrier_init(shared.sums_added(), kStages);
    for (int i = 0; i < kStages; ++i) shared.score_ring().init(i, kConsumerWarps, kConsumerWarps);
    for (int i = 0; i < kStages; ++i) shared.q_ring().init(i, 1, kConsumerWarps);
    for (int i = 0; i < kStages; ++i) shared.dout_ring().init(i, 1, kConsumerWarps);
    for (int i = 0; i < kStages; ++i) shared.sum_ring().init(i, kConsumerWarps, 1);
    fence_barrier_init();
    *ticket = atomicAdd(a.ticket, 1);
  }
  __syncthreads();
  const Work work = work_of<Tiling>(a, *ticket);
  // tells the compiler that it is uniform in a warp
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupSize, 0);
  if (warpgroup == 0) {
    decrease_registers<24>();
    if (threadIdx.x == 0) load(a, work, shared);
    const int stage = static_cast<int>(threadIdx.x) / kWarpSize - 1;
    if (stage >= 0 && stage < kStages && threadIdx.x % kWarpSize == 0) add_sums(a, work, shared, stage);
  } else {
    increase_registers<240>();
    consume(a, work, shared, warpgroup - 1);
  }
#else
  (void)a;
  __trap();
#endif
}

// ---- launch ---------------------------------------------------------------------------------------------------------

template <typename Tiling, typename T>
void launch(const BackwardArguments<T>& arguments, int section, cudaStream_t stream) {
  constexpr int kQueries = Tiling::kQueries;
  const AttentionShape& shape = arguments.shape;
  const HopperWorkspace workspace = hopper_workspace(shape, arguments.statistics);
  Arguments<T> a;
  a.dq = arguments.dq, a.cos = arguments.rope.cos, a.sin = arguments.rope.sin;
  a.document_starts = arguments.rope.document_starts;
  a.q = encode_head_map(arguments.q, shape.B, shape.TQ, shape.NH, shape.HS, kQueries);
  a.dout = encode_head_map(arguments.dout, shape.B, shape.TQ, shape.NH, shape.HS, kQueries);
  a.k = encode_head_map(arguments.k, shape.B, shape.TK, shape.NKV, shape.HS, kKeys);
  a.v = encode_head_map(arguments.v, shape.B, shape.TK, shape.NKV, shape.HS, kKeys);
  if constexpr (Tiling::kCodes) {
    a.codes = arguments.codes;
  } else {
    a.dk = encode_head_map(arguments.dk, shape.B, shape.TK, shape.NKV, shape.HS, kGroupKeys);
    a.dv = encode_head_map(arguments.dv, shape.B, shape.TK, shape.NKV, shape.HS, kGroupKeys);
  }
  a.statistics = workspace.statistics, a.sums = workspace.sums, a.order = workspace.order, a.ticket = workspace.ticket;
  a.tokens = static_cast<int>(shape.TQ), a.tiles = static_cast<int>(ceil_div(shape.TQ, kQueries));
  a.stored_tiles = static_cast<int>(padded_queries(shape.TQ) / kQueries);
  a.heads = static_cast<int>(shape.NH), a.kv_heads = static_cast<int>(shape.NKV);
  a.batch_kv_heads = static_cast<int>(shape.B * shape.NKV);
  a.key_blocks = static_cast<int>(ceil_div(shape.TK, kKeys)), a.section = section;
  a.scale = shape.scale, a.first_keys = workspace.first_keys;

  const unsigned batch_heads = static_cast<unsigned>(shape.B * shape.NH);
  const dim3 blocks(batch_heads, static_cast<unsigned>(padded_queries(shape.TQ) / kStatisticsBlock));
  row_statistics_kernel<Tiling><<<blocks, 256, 0, stream>>>(arguments.dout, arguments.out, arguments.lse,
                                                            workspace.statistics, a.order, a.ticket, a.heads, a.tokens,
                                                            shape, workspace.first_keys);
  check_launch("attention backward, statistics");

  launch_attention(key_block_kernel<Tiling>, "attention backward, blocks of keys",
                   static_cast<std::int64_t>(a.key_blocks) * a.batch_kv_heads, 1, Tiling::kThreads,
                   Tiling::kSharedBytes, stream, a);
}

}  // namespace

bool hopper_backward_computes(const AttentionShape& shape) {
  return (shape.HS == 64 || shape.HS == 128) && shape.causal && shape.TQ == shape.TK;
}

bool hopper_backward_unrotates(const AttentionShape& shape, const DeviceRopeTable& rope) {
  const auto addresses = reinterpret_cast<std::uintptr_t>(rope.cos) | reinterpret_cast<std::uintptr_t>(rope.sin);
  return 2 * rope.half == shape.HS && addresses % 16 == 0;
}

HopperWorkspace hopper_workspace(const AttentionShape& shape, RowStatistics* memory) {
  const std::int64_t queries = shape.B * shape.NH * padded_queries(shape.TQ);
  HopperWorkspace workspace;
  workspace.statistics = reinterpret_cast<float*>(memory);
  workspace.sums = workspace.statistics + queries * 2;
  workspace.first_keys = reinterpret_cast<int*>(workspace.sums + queries * shape.HS);
  workspace.order = workspace.first_keys + shape.B * padded_queries(shape.TQ);
  workspace.ticket = workspace.order + queries / 64;
  workspace.bytes = static_cast<std::size_t>(queries) * (static_cast<std::size_t>(shape.HS) + 2) * sizeof(float) +
                    static_cast<std::size_t>(shape.B * padded_queries(shape.TQ) + queries / 64 + 4) * sizeof(int);
  return workspace;
}

template <typename T>
void hopper_backward(const BackwardArguments<T>& arguments, cudaStream_t stream) {
  const AttentionShape& shape = arguments.shape;
  // K/V heads in a section, measured at T 1024 to 16384. At head dimension 128: as many as give about 256 blocks, two
  // for every multiprocessor. At 64: 8 to 16 heads.
  const int key_blocks = static_cast<int>(ceil_div(shape.TK, kKeys));
  const int of_64 = key_blocks > 32 ? 8 : 16, of_128 = std::clamp(256 / key_blocks, 2, 16);
  for_visibility(shape, [&]<bool HidesPast>() {
    if constexpr (std::is_same_v<T, bf16>) {
      const bool codes = arguments.codes.dq.data != nullptr;
      if (codes && shape.HS == 64) return launch<Tiling<T, 64, HidesPast, true>>(arguments, of_64, stream);
      if (codes && shape.HS == 128) return launch<Tiling<T, 128, HidesPast, true>>(arguments, of_128, stream);
    }
    if (shape.HS == 64) return launch<Tiling<T, 64, HidesPast>>(arguments, of_64, stream);
    if (shape.HS == 128) return launch<Tiling<T, 128, HidesPast>>(arguments, of_128, stream);
    fail(Exit::internal, "attention backward: no Hopper kernel for head dimension %d", static_cast<int>(shape.HS));
  });
}

template void hopper_backward<bf16>(const BackwardArguments<bf16>&, cudaStream_t);
template void hopper_backward<fp16>(const BackwardArguments<fp16>&, cudaStream_t);

}  // namespace weft::cuda
