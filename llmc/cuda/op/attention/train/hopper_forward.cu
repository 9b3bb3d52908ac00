// Forward with wgmma (sm_90a); the recurrence is that of portable_forward.cu.
//
// A block is a producer and two or three consumer warpgroups; there is one persistent block a multiprocessor. A tile is
// 64 queries for each consumer. The producer (one thread) copies Q, and alternately K and V, through rings of stages;
// the copy engine signals mbarriers when they are full, and consumers signal when they are empty. What makes it fast,
// most important first:
//  - S, P and O live in registers: S is an accumulator, P the register operand of the next GEMM.
//  - While the GEMMs O += P V of one key block and S = Q K^T of the next run, the warpgroup computes the softmax of
//    that S (Shah et al., 2024, FlashAttention-3, section 3.2), so a block of keys takes the longer of the two, not
//    their sum.
//  - Consumers issue their GEMMs in a fixed order (section 3.1 there): one multiplies while another exponentiates.
//  - The running maximum moves only when a row exceeds it by 2^8, so that O is rarely rescaled.
//  - Each consumer begins and stops at its own visible keys, and masks only blocks that cross a bound of what its rows see.
//  - Tiles are assigned longest first, forth and back over the blocks, which balances them; heads are adjacent, so that
//    a group's K and V are read from L2. Q has two buffers where there is room (not at head dimension 256), so that a
//    tile's first GEMM does not wait; O is written out through the tile's own Q buffer.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "llmc/cuda/hw/barriers.cuh"
#include "llmc/cuda/hw/fragments.cuh"
#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/hw/ring.cuh"
#include "llmc/cuda/hw/tensor_map.h"
#include "llmc/cuda/hw/tile.cuh"
#include "llmc/cuda/op/attention/train/hide_past.cuh"
#include "llmc/cuda/op/attention/train/hold_back.cuh"
#include "llmc/cuda/op/attention/train/launch.cuh"
#include "llmc/cuda/op/attention/train/paths.h"

#if !WEFT_WGMMA
#pragma nv_diag_suppress 177  // "declared but never referenced": the kernel's body is compiled for sm_90a only
#endif

namespace weft::cuda {

namespace {

using namespace hopper;

constexpr int kRows = 64;  // queries of a warpgroup: the M of its GEMMs

// The columns of a head lie in shared memory as column tiles of TileColumns (64, 32 or 16), with the swizzle of that
// width. The copy engine fills what the last one has beyond the head dimension with zeros, which are never multiplied.
// A GEMM is one instruction for 16 values of k in any case.
template <typename T, bool HidesPast, int HeadDim, int Consumers, int Keys, int Stages, int TileColumns = 64,
          int QueryBuffers = 2>
struct HopperForwardTiling {
  using Element = T;
  static constexpr bool kHidesPast = HidesPast;
  static constexpr int HS = HeadDim, kConsumers = Consumers, kKeys = Keys, kStages = Stages;
  static constexpr int kQueries = kConsumers * kRows, kThreads = (kConsumers + 1) * kWarpgroupSize;
  // The producer's spare registers go to the consumers; together at most 64K.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32, kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static constexpr int kTileColumns = TileColumns, kQueryBuffers = QueryBuffers;
  using QueryTile = SwizzledTile<T, kRows, HS, 2 * kTileColumns>;  // Q of one consumer, later its O
  using KeyTile = SwizzledTile<T, kKeys, HS, 2 * kTileColumns>;    // K or V of one stage

  struct Storage {
    typename QueryTile::Storage q[kQueryBuffers][kConsumers];
    typename KeyTile::Storage k[kStages], v[kStages];
    RingBarrierStorage<kQueryBuffers * kConsumers> q_ring;  // in the order of `q`
    RingBarrierStorage<kStages> k_ring, v_ring;
  };
  static constexpr int kSharedBytes = alignof(Storage) + sizeof(Storage);  // alignof: to align the storage
  static_assert(kKeys % 16 == 0 && kKeys <= 256 && kSharedBytes <= 227 * 1024);
  static_assert(HS % 16 == 0);
};

struct HopperForwardArguments {
  AttentionShape shape;
  CUtensorMap q, k, v, out;
  float* lse;  // [B, NH, TQ] or null
  int tiles;
};

// A tile: one block of queries of one head.
template <typename Tiling>
struct WorkTile {
  int b, h, first_query;
  int begin = 0, blocks;  // its queries see the blocks of keys [begin, blocks)

  __device__ WorkTile(const AttentionShape& shape, int index) {
    const int heads = static_cast<int>(shape.B * shape.NH), TQ = static_cast<int>(shape.TQ);
    const int levels = (TQ + Tiling::kQueries - 1) / Tiling::kQueries;
    const int level = index / heads, head = index % heads;
    b = head / static_cast<int>(shape.NH), h = head % static_cast<int>(shape.NH);
    first_query = (levels - 1 - level) * Tiling::kQueries;
    const int last = min(first_query + Tiling::kQueries, TQ) - 1;
    if constexpr (Tiling::kHidesPast) begin = first_visible_key(shape, b, first_query) / Tiling::kKeys;
    blocks = (end_visible_key(shape, last) + Tiling::kKeys - 1) / Tiling::kKeys;
  }
};

// The i-th tile of this block, assigned forth and back over the blocks, so that each gets long and short ones.
__device__ inline int tile_index(int i) {
  const int blocks = gridDim.x, block = blockIdx.x;
  return i * blocks + (i % 2 == 0 ? block : blocks - 1 - block);
}

#if WEFT_WGMMA

template <typename Tiling>
struct SharedMemory {
  using Storage = typename Tiling::Storage;
  using QueryTile = typename Tiling::QueryTile;
  using KeyTile = typename Tiling::KeyTile;

  unsigned base;

  __device__ explicit SharedMemory(const void* dynamic) : base(shared_address(dynamic, alignof(Storage))) {}

  // The ring of Q has kQueryBuffers stages for each consumer.
  __device__ static RingPosition of_consumer(const RingPosition& q, int consumer) {
    return {q.stage * Tiling::kConsumers + consumer, q.phase};
  }
  __device__ QueryTile q(RingPosition of_consumer) const {
    return {base + unsigned{offsetof(Storage, q)} + of_consumer.stage * QueryTile::kBytes};
  }
  __device__ KeyTile k(RingPosition at) const {
    return {base + unsigned{offsetof(Storage, k)} + at.stage * KeyTile::kBytes};
  }
  __device__ KeyTile v(RingPosition at) const {
    return {base + unsigned{offsetof(Storage, v)} + at.stage * KeyTile::kBytes};
  }
  __device__ RingBarriers q_ring() const {
    return {base + unsigned{offsetof(Storage, q_ring)}, Tiling::kQueryBuffers * Tiling::kConsumers};
  }
  __device__ RingBarriers k_ring() const { return {base + unsigned{offsetof(Storage, k_ring)}, Tiling::kStages}; }
  __device__ RingBarriers v_ring() const { return {base + unsigned{offsetof(Storage, v_ring)}, Tiling::kStages}; }
};

// The producer; run by one thread.
template <typename Tiling>
__device__ void produce(const HopperForwardArguments& arguments, const SharedMemory<Tiling>& shared) {
  const AttentionShape& shape = arguments.shape;
  const int group = static_cast<int>(shape.NH / shape.NKV);
  const RingBarriers q_ring = shared.q_ring(), k_ring = shared.k_ring(), v_ring = shared.v_ring();
  RingPosition k, v, q;
  const auto load = [](const CUtensorMap& map, const auto& tile, unsigned full, int token, int h, int b, L2 keep) {
    mbarrier_arrive_expect(full, static_cast<unsigned>(tile.kBytes));
    tensor_load(tile, map, full, token, h, b, keep);
  };
  for (int i = 0; tile_index(i) < arguments.tiles; ++i) {
    const WorkTile<Tiling> tile(shape, tile_index(i));
    const int kv = tile.h / group;
    for (int j = tile.begin; j < tile.blocks; ++j) {
      k_ring.wait_empty(k);
      load(arguments.k, shared.k(k), k_ring.full(k.stage), j * Tiling::kKeys, kv, tile.b, L2::evict_last);
      k.advance(Tiling::kStages);
      if (j == tile.begin) {
        for (int consumer = 0; consumer < Tiling::kConsumers; ++consumer) {
          const RingPosition its = shared.of_consumer(q, consumer);
          q_ring.wait_empty(its);
          load(arguments.q, shared.q(its), q_ring.full(its.stage), tile.first_query + consumer * kRows, tile.h, tile.b,
               L2::evict_first);
        }
        q.advance(Tiling::kQueryBuffers);
      }
      v_ring.wait_empty(v);
      load(arguments.v, shared.v(v), v_ring.full(v.stage), j * Tiling::kKeys, kv, tile.b, L2::evict_last);
      v.advance(Tiling::kStages);
    }
  }
}

// Scores of keys from a row's limit on become -infinity; the limit grows by one a row on the diagonal.
template <int R>
__device__ void mask_scores(float (&S)[R], const AttentionShape& shape, int thread_row, int first_key) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int limit = end_visible_key(shape, thread_row + half * 8) - first_key - t * 2;
#pragma unroll
    for (int n = 0; n < R / 4; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (n * 8 + i >= limit) S[n * 4 + half * 2 + i] = -INFINITY;
    }
  }
}

// Scores of keys in front of what a row sees become -infinity.
template <int R>
__device__ void hide_past(float (&S)[R], const AttentionShape& shape, int b, int thread_row, int first_key) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int begin = first_visible_key(shape, b, thread_row + half * 8) - first_key - t * 2;
#pragma unroll
    for (int n = 0; n < R / 4; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (n * 8 + i < begin) S[n * 4 + half * 2 + i] = -INFINITY;
    }
  }
}

// The online softmax of a thread's rows g and g + 8. The four threads of a quad share a row and agree on its maximum;
// each sums its own columns until the end.
template <bool HidesPast>
struct RunningSoftmax {
  static constexpr float kSlack = 8;  // a weight may reach 2^kSlack before the maximum in use moves
  float maximum[2], sum[2], shrink[2];
  float c;  // scale log2 e
  bool grown;

  // S becomes P (in fp32). If `grown`, O must afterwards be multiplied by `shrink`.
  template <bool First, int R>
  __device__ void update(float (&S)[R]) {
    float largest[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = fmaxf(S[half * 2], S[half * 2 + 1]);
#pragma unroll
      for (int n = 1; n < R / 4; ++n)
        largest[half] = fmaxf(largest[half], fmaxf(S[n * 4 + half * 2], S[n * 4 + half * 2 + 1]));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
    }
    if constexpr (First) {
      maximum[0] = largest[0], maximum[1] = largest[1], sum[0] = sum[1] = 0, grown = false;
    } else {
      grown = __any_sync(~0u, fmaxf(largest[0] - maximum[0], largest[1] - maximum[1]) * c > kSlack);
      if (grown) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float raised = fmaxf(maximum[half], largest[half]);
          shrink[half] = exp2_approximate((maximum[half] - finite_maximum<HidesPast>(raised)) * c);
          maximum[half] = raised;
          sum[half] *= shrink[half];
        }
      }
    }
    const float offset[2] = {finite_maximum<HidesPast>(maximum[0]) * c, finite_maximum<HidesPast>(maximum[1]) * c};
#pragma unroll
    for (int n = 0; n < R / 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = S[n * 4 + i];
        s = exp2_approximate(fmaf(s, c, -offset[i / 2]));
        sum[i / 2] += s;
      }
    }
  }
};

template <int R>
__device__ void multiply_rows(float (&O)[R], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < R; ++i) O[i] *= factor[i / 2 % 2];
}

// One consumer warpgroup.
template <typename Tiling>
__device__ void consume(const HopperForwardArguments& arguments, const SharedMemory<Tiling>& shared, int consumer) {
  using T = typename Tiling::Element;
  constexpr int HS = Tiling::HS, kKeys = Tiling::kKeys, kConsumers = Tiling::kConsumers, kStages = Tiling::kStages;
  constexpr bool kHidesPast = Tiling::kHidesPast;
  const AttentionShape& shape = arguments.shape;
  const int TQ = static_cast<int>(shape.TQ);
  const int thread = threadIdx.x % kWarpgroupSize, lane = threadIdx.x % kWarpSize, warp = thread / kWarpSize;
  const int gemm_slot = 1 + consumer, next_gemm_slot = 1 + (consumer + 1) % kConsumers;  // named barriers
  const int own_barrier = 1 + kConsumers + consumer;
  const RingBarriers q_ring = shared.q_ring(), k_ring = shared.k_ring(), v_ring = shared.v_ring();
  RingPosition k, v, q;
  float S[kKeys / 2], O[HS / 2];
  unsigned P[kKeys / 4];
  RunningSoftmax<kHidesPast> softmax;
  softmax.c = shape.scale * kLog2E;
  int q_to_release = -1;  // the Q buffer from which the previous tile's O is being copied out

  const auto wait_for_gemm_slot = [&] { named_barrier_wait(gemm_slot, 2 * kWarpgroupSize); };
  const auto pass_gemm_slot = [&] { named_barrier_arrive(next_gemm_slot, 2 * kWarpgroupSize); };
  const auto start_scores = [&](const auto& q_tile, const auto& k_tile) {  // S = Q K^T
    const auto q_rows = q_tile.k_major();
    const auto k_rows = k_tile.k_major();
    wgmma_fence();
    gemm_async(S, q_rows, k_rows);
    wgmma_commit();
  };
  const auto start_output = [&](const auto& v_tile, bool accumulate) {  // O += P V
    const auto v_columns = v_tile.mn_major();
    wgmma_fence();
    gemm_add_async(O, P, v_columns, accumulate);
    wgmma_commit();
  };
  const auto release = [&](const RingBarriers& ring, RingPosition& position) {
    if (lane == 0) mbarrier_arrive(ring.empty(position.stage));
    position.advance(kStages);
  };
  // Releases O's buffer once the copy engine has read it.
  const auto release_q = [&] {
    if (q_to_release < 0) return;
    if (thread == 0) {
      bulk_wait_read();
      mbarrier_arrive(q_ring.empty(shared.of_consumer({q_to_release, 0}, consumer).stage));
    }
    q_to_release = -1;
  };

  if (consumer == kConsumers - 1) pass_gemm_slot();
  for (int i = 0; tile_index(i) < arguments.tiles; ++i) {
    const WorkTile<Tiling> tile(shape, tile_index(i));
    const int first_row = tile.first_query + consumer * kRows, thread_row = first_row + warp * 16 + lane / 4;
    const int end = first_row < TQ ? end_visible_key(shape, min(first_row + kRows, TQ) - 1) : 0;
    const int blocks = (end + kKeys - 1) / kKeys, unmasked_blocks = end_visible_key(shape, first_row) / kKeys;
    // The first block that its queries see, and the first key that all of them see.
    const int begin = kHidesPast ? first_visible_key(shape, tile.b, first_row) / kKeys : 0;
    const int full_begin = kHidesPast ? first_visible_key(shape, tile.b, first_row + kRows - 1) : 0;
    const RingPosition own_q = shared.of_consumer(q, consumer);
    const auto q_tile = shared.q(own_q);
    q_ring.wait_full(own_q);

    // Key blocks that only other consumers' queries see.
    const auto skip_blocks = [&](int from, int to) {
      for (int j = from; j < to; ++j) {
        wait_for_gemm_slot();
        pass_gemm_slot();
        k_ring.wait_full(k);
        release(k_ring, k);
        v_ring.wait_full(v);
        release(v_ring, v);
      }
    };

    if (blocks > 0) {
      if constexpr (kHidesPast) skip_blocks(tile.begin, begin);
      k_ring.wait_full(k);
      wait_for_gemm_slot();
      start_scores(q_tile, shared.k(k));
      pass_gemm_slot();
      wgmma_wait();
      pin(S);
      release(k_ring, k);
      if (kHidesPast ? unmasked_blocks <= begin : unmasked_blocks == 0)
        mask_scores(S, shape, thread_row, begin * kKeys);
      if constexpr (kHidesPast) {
        if (begin * kKeys < full_begin) hide_past(S, shape, tile.b, thread_row, begin * kKeys);
      }
      softmax.template update<true>(S);
      round_to_operand<T>(P, S);
      release_q();

      const auto step = [&]<bool Masked>(int j) {
        k_ring.wait_full(k);
        wait_for_gemm_slot();
        start_scores(q_tile, shared.k(k));  // S of block j
        v_ring.wait_full(v);
        start_output(shared.v(v), j > begin + 1);  // O of block j - 1
        pass_gemm_slot();
        wgmma_wait<1>();
        pin(S);
        release(k_ring, k);
        if constexpr (Masked) mask_scores(S, shape, thread_row, j * kKeys);
        if constexpr (kHidesPast) {
          if (j * kKeys < full_begin) hide_past(S, shape, tile.b, thread_row, j * kKeys);
        }
        softmax.template update<false>(S);
        hold_back(softmax.sum[0] + softmax.sum[1], q_tile.address);
        wgmma_wait<0>();
        pin(O), pin(P);
        release(v_ring, v);
        if (softmax.grown) multiply_rows(O, softmax.shrink);
        round_to_operand<T>(P, S);
      };
      int j = begin + 1;
      for (; j < min(unmasked_blocks, blocks); ++j) step.template operator()<false>(j);
      for (; j < blocks; ++j) step.template operator()<true>(j);

      v_ring.wait_full(v);
      start_output(shared.v(v), blocks > begin + 1);
      wgmma_wait<0>();
      pin(O);
      release(v_ring, v);
    } else {
      release_q();
    }
    skip_blocks(kHidesPast && blocks == 0 ? tile.begin : blocks, tile.blocks);

    if (blocks > 0) {
      float inverse[2];
      float* lse = arguments.lse ? arguments.lse + (tile.b * shape.NH + tile.h) * shape.TQ : nullptr;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = softmax.sum[half] + __shfl_xor_sync(~0u, softmax.sum[half], 1);
        total += __shfl_xor_sync(~0u, total, 2);
        inverse[half] = 1 / total;
        const int row = thread_row + half * 8;
        if (lse && lane % 4 == 0 && row < TQ) lse[row] = softmax.maximum[half] * softmax.c * kLn2 + logf(total);
      }
      multiply_rows(O, inverse);
      named_barrier_wait(own_barrier, kWarpgroupSize);  // no warp's GEMM reads Q any more, so O may overwrite it
      q_tile.store(q_tile.lane_offset(warp * 16), O);
      fence_async_proxy_shared();
      named_barrier_wait(own_barrier, kWarpgroupSize);
      if (thread == 0) {
        tensor_store(arguments.out, q_tile, first_row, tile.h, tile.b);
        bulk_commit();
      }
    }
    q_to_release = q.stage;
    if constexpr (Tiling::kQueryBuffers == 1) release_q();  // the next Q needs the buffer
    q.advance(Tiling::kQueryBuffers);
  }
  if (thread == 0) bulk_wait_read();
}

#endif  // WEFT_WGMMA

template <typename Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, 1)
    hopper_forward_kernel([[maybe_unused]] const __grid_constant__ HopperForwardArguments arguments) {
#if WEFT_WGMMA
  extern __shared__ unsigned char dynamic[];
  const SharedMemory<Tiling> shared(dynamic);
  if (threadIdx.x == 0) {
    for (int consumer = 0; consumer < Tiling::kConsumers; ++consumer) {
      for (int buffer = 0; buffer < Tiling::kQueryBuffers; ++buffer)
        shared.q_ring().init(buffer * Tiling::kConsumers + consumer, 1, 1);
    }
    constexpr unsigned kConsumerWarps = Tiling::kConsumers * kWarpgroupSize / kWarpSize;
    for (int stage = 0; stage < Tiling::kStages; ++stage) {
      shared.k_ring().init(stage, 1, kConsumerWarps);
      shared.v_ring().init(stage, 1, kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  // tells the compiler that it is uniform in a warp
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupSize, 0);
  if (warpgroup == 0) {
    decrease_registers<Tiling::kProducerRegisters>();
    if (threadIdx.x == 0) produce(arguments, shared);
  } else {
    increase_registers<Tiling::kConsumerRegisters>();
    consume(arguments, shared, warpgroup - 1);
  }
#else
  __trap();
#endif
}

template <typename Tiling, typename T>
void launch(const ForwardArguments<T>& given, int multiprocessors, cudaStream_t stream) {
  const AttentionShape& shape = given.shape;
  HopperForwardArguments arguments;
  arguments.shape = shape;
  arguments.q = encode_head_map(given.q, shape.B, shape.TQ, shape.NH, shape.HS, kRows, Tiling::kTileColumns);
  arguments.k = encode_head_map(given.k, shape.B, shape.TK, shape.NKV, shape.HS, Tiling::kKeys, Tiling::kTileColumns);
  arguments.v = encode_head_map(given.v, shape.B, shape.TK, shape.NKV, shape.HS, Tiling::kKeys, Tiling::kTileColumns);
  arguments.out = encode_head_map(given.out, shape.B, shape.TQ, shape.NH, shape.HS, kRows, Tiling::kTileColumns);
  arguments.lse = given.lse;
  arguments.tiles = static_cast<int>(ceil_div(shape.TQ, Tiling::kQueries) * shape.B * shape.NH);
  launch_attention(hopper_forward_kernel<Tiling>, "attention forward (Hopper)",
                   std::min(arguments.tiles, multiprocessors), 1, Tiling::kThreads, Tiling::kSharedBytes, stream,
                   arguments);
}

}  // namespace

bool hopper_forward_computes(const AttentionShape& shape) {
  constexpr std::int64_t kMostTiles = 0x7fffffff / 2;
  return (shape.HS == 64 || shape.HS == 80 || shape.HS == 128 || shape.HS == 256) &&
         shape.B * shape.NH <= kMostTiles / ceil_div(shape.TQ, kRows);
}

template <typename T>
void hopper_forward(const ForwardArguments<T>& arguments, cudaStream_t stream) {
  const int multiprocessors = hopper_multiprocessors();
  for_visibility(arguments.shape, [&]<bool HidesPast>() {
    if (arguments.shape.HS == 64)
      return launch<HopperForwardTiling<T, HidesPast, 64, 3, 128, 4>>(arguments, multiprocessors, stream);
    if (arguments.shape.HS == 80)
      return launch<HopperForwardTiling<T, HidesPast, 80, 3, 96, 4, 32>>(arguments, multiprocessors, stream);
    if (arguments.shape.HS == 256)
      return launch<HopperForwardTiling<T, HidesPast, 256, 2, 80, 2, 64, 1>>(arguments, multiprocessors, stream);
    launch<HopperForwardTiling<T, HidesPast, 128, 2, 128, 2>>(arguments, multiprocessors, stream);
  });
}

template void hopper_forward<bf16>(const ForwardArguments<bf16>&, cudaStream_t);
template void hopper_forward<fp16>(const ForwardArguments<fp16>&, cudaStream_t);

}  // namespace weft::cuda
