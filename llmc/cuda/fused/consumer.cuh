// The consumer warps of the fused decode kernel: GEMVs over the chunks of the ring, norms, attention and sampling. This
// file has a thread's state, and its accesses to the ring and to other blocks' results; the work is in
//
//   layer.cuh           the order of a layer and of a launch
//   rows.cuh            GEMV over the chunks of the ring
//   quantized_rows.cuh  the same with weights in 8 or 4 bits
//   norm.cuh            the norms
//   attention.cuh       attention of an item
//   head.cuh            logits and the largest of them
//   sampling.cuh        the next id, for all blocks and the host
//
// and, for the sequential residual, in sequential_layer.cuh, grouped_attention.cuh and tensor_attention.cuh.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/block.cuh"
#include "llmc/cuda/fused/packed.cuh"
#include "llmc/cuda/fused/softmax_state.cuh"
#include "llmc/cuda/fused/timeline.h"
#include "llmc/cuda/hw/ring.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

template <typename K>
struct Consumer {
  using Parameters = typename Block<K>::Parameters;
  using Layer = typename Block<K>::Layer;
  using S = typename K::S;
  static constexpr int kRowLoads = K::kRowLoads;             // 16-byte loads a thread from a row of C elements
  static constexpr int kRows = kChunkLoads / kRowLoads;      // rows of C elements that a warp multiplies from a chunk
  static constexpr int kInputs = kRowLoads * kLaneElements;  // elements of a row of C that this thread multiplies
  static constexpr int kHidden = 4 * kInputs;                // and of a row of F

  const Block<K>& c;
  char* shared;
  const SharedLayout& at;
  const Layer* layers;
  const BlockRows& own;
  const int& threads;  // of all consumers
  int thread, warp, lane, warp_k, warp_r;
  RingPosition ring;
  int partial_buffer = 0;   // which of two: a barrier lies between two uses of one
  unsigned step = 0;        // layers done in this launch
  unsigned item_phase = 0;  // phase of query_here (sequential residual: of item_done) for the next item
  float x_own = 0;          // residual stream: element own.out.begin + thread
  bool stamping = false;    // this token is recorded in the timeline

  __device__ __forceinline__ Consumer(const Block<K>& block, char* shared_memory)
      : c(block),
        shared(shared_memory),
        at(c.p.at),
        layers(reinterpret_cast<const Layer*>(shared + at.layers)),
        own(c.flags.own),
        threads(c.p.threads) {
    find_place();
  }
  // Computes thread, warp, lane, warp_k and warp_r anew. The compiler derives from them once what it needs again and again, and
  // keeps it in registers, or spills it; a call between two phases ends that.
  __device__ __forceinline__ void find_place() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    warp = thread / kWarpSize;
    lane = thread % kWarpSize;
    const int2 of_warp = c.flags.places[warp];
    warp_k = of_warp.x;
    warp_r = of_warp.y;
  }

  // ---- layer.cuh
  __device__ __forceinline__ void run();
  __device__ __forceinline__ void run_layer(int l, int token, std::int32_t id);
  __device__ __forceinline__ void load_residual(int l, int token, std::int32_t id, float (&x)[kInputs]);
  __device__ __forceinline__ void load_embedding(std::int32_t id, float (&x)[kInputs]);
  __device__ __forceinline__ void input_rows(int l, int token, float (&input)[kInputs],
                                             const float (&mlp_input)[kInputs]);
  __device__ __forceinline__ void output_rows(int l, float (&input)[kInputs]);

  // ---- rows.cuh
  template <int kEach, int kLoads>
  __device__ __forceinline__ void load_chunk(uint4 (&w)[kEach][kLoads], unsigned own_bytes, int row_bytes,
                                             const int (&offset)[kLoads]);
  __device__ __forceinline__ void narrow_rows(int count, const float (&input)[kInputs]);
  __device__ __forceinline__ void wide_rows(int count, const float (&input)[kHidden]);
  template <typename Finish>
  __device__ __forceinline__ void finish_rows(int count, const Finish& finish);
  template <int kLoads>
  __device__ __forceinline__ void multiply_rows(int count, int size, float (&input)[kLoads * kLaneElements]);
  struct RowTerms;
  __device__ __forceinline__ RowTerms load_terms(const S* bias, const float* scales, RowRange rows) const;
  __device__ __forceinline__ static float load_scale(const float* scale);

  // ---- quantized_rows.cuh
  template <typename Format, int kLoads>
  struct Digits;
  template <typename Format, int kLoads>
  __device__ __forceinline__ void make_digits(Digits<Format, kLoads>& d, const float* x) const;
  template <typename Format, int kLoads>
  __device__ __forceinline__ void multiply_band(int rows, int groups, const Digits<Format, kLoads>& x, bool accumulate);
  template <typename Format, int kLoads>
  __device__ __forceinline__ void multiply_stream(int rows, int size, float (&input)[kLoads * kLaneElements],
                                                  bool accumulate);

  // ---- norm.cuh
  struct NormWeight {
    uint4 weight[kRowLoads], bias[kRowLoads];
  };
  __device__ __forceinline__ NormWeight load_norm(const S* weight, const S* bias) const;
  __device__ __forceinline__ void normalize_one(const NormWeight& n, float (&x)[kInputs]);
  __device__ __forceinline__ void normalize_late(const NormWeight& n, int which, float (&x)[kInputs]);
  __device__ __forceinline__ float norm_factor(int which) const;
  struct NormWeights {
    uint4 weight1[kRowLoads], bias1[kRowLoads], weight2[kRowLoads], bias2[kRowLoads];
  };
  __device__ __forceinline__ NormWeights load_norms(const Layer& layer, bool both) const;
  struct Moments {
    float mean, rstd;
  };
  __device__ __forceinline__ Moments moments_of(const float (&x)[kInputs], const bool& rms);
  __device__ __forceinline__ void normalize(const NormWeights& n, float (&x)[kInputs], float (&other)[kInputs]);

  // ---- attention.cuh
  __device__ __forceinline__ void attend(int layer, int position, int splits);
  template <int kLanes>
  __device__ __forceinline__ void attend_work_unit(int layer, int position, int item, int splits);
  template <int kLanes>
  __device__ __forceinline__ void attend_cached(SoftmaxState<S>& r, const float (&q)[kLaneElements], Positions cached);

  // ---- sequential_layer.cuh
  static constexpr int kPartLoads = 2 * kRowLoads;  // 16-byte loads a thread from one part of a row of F elements
  static constexpr int kPartRows = kChunkLoads / kPartLoads;  // rows that a warp multiplies from a chunk of them
  __device__ __forceinline__ void run_sequential();
  __device__ __forceinline__ void run_sequential_layer(int l, int token, std::int32_t id);
  __device__ __forceinline__ void load_position(int position) const;
  template <int kLoads, int kEach>
  __device__ __forceinline__ void multiply_chunks(int rows, int chunk_rows, int width,
                                                  const float (&input)[kLoads * kLaneElements], bool accumulate);
  struct Operand;
  __device__ __forceinline__ void multiply_part(int rows, int matrices, int width, const Operand& input);
  __device__ __forceinline__ void use_partial_sums(int use);
  __device__ __forceinline__ float partial_sum(int target) const;
  template <typename Finish>
  __device__ __forceinline__ void finish_sums(int count, const Finish& finish);
  enum class Narrow { qkv, output, hidden };  // matrices whose rows have C elements, or those of the heads
  __device__ __forceinline__ void narrow_matrix(int l, int token, std::int32_t id, Narrow matrix);
  __device__ __forceinline__ void down_rows(int l);

  // ---- grouped_attention.cuh
  template <int kQueries>
  struct GroupState;
  __device__ __forceinline__ void attend_groups(int layer);
  __device__ __forceinline__ void normalize_heads(float* first_head, int heads, int queries, const S* weights) const;
  __device__ __forceinline__ void fetch_heads(int layer, const AttentionItem& item);
  template <typename Element>
  __device__ __forceinline__ void round_added(int row, const Element& element);
  __device__ __forceinline__ void attend_single(const AttentionItem& item, int turn);
  __device__ __forceinline__ void attend_several(const AttentionItem& item, int turn);
  template <typename State>
  __device__ __forceinline__ void attend_turns(const AttentionItem& item, int turn);
  template <int kLanes, int kQueries>
  __device__ __forceinline__ void attend_group(const AttentionItem& item, int turn);
  __device__ __forceinline__ void merge_group(const AttentionItem& item, int warp_queries);

  // ---- head.cuh
  __device__ __forceinline__ void run_head(int token);

  // ---- sampling.cuh
  __device__ __forceinline__ FusedEnd end_after(const SampledToken& chosen, int token, bool cancelled) const;
  __device__ __forceinline__ void tell_host(const SampledToken& chosen, int token, FusedEnd end) const;
  __device__ __forceinline__ std::int32_t given_id(int token) const;
  __device__ __forceinline__ std::int32_t greedy_id(int token);
  __device__ __forceinline__ void choose(int token, bool cancelled);
  __device__ __forceinline__ std::int32_t sampled_id(int token);

  // ---- synchronisation of the block's consumers
  __device__ __forceinline__ void sync() const { named_barrier_wait(1, threads); }
  __device__ __forceinline__ void stamp(int layer, FusedPhase phase) const {
    if constexpr (K::kInstrumented) {
      if (!stamping || thread != 0) return;
      c.p.instruments.timeline[(layer * kFusedPhases + static_cast<int>(phase)) * c.blocks + c.block] = global_time();
    }
  }

  // ---- the ring
  __device__ __forceinline__ unsigned begin_chunk() {
    c.wait_barrier(c.full + 8 * ring.stage, ring.phase);
    return c.ring + ring.stage * c.p.stage_bytes;
  }
  __device__ __forceinline__ void end_chunk() {
    __syncwarp();
    if (lane == 0) hopper::mbarrier_arrive(c.empty + 8 * ring.stage);
    ring.advance(c.p.stages);
  }

  // ---- vectors: a thread holds the elements that it multiplies with its elements of every row
  // Load i of this thread from a vector is elements 8 piece(i) to 8 piece(i) + 7.
  __device__ __forceinline__ int piece(int i) const { return (i * c.p.warps_k + warp_k) * kWarpSize + lane; }
  // This thread's elements of a vector of tagged values: polls until all have the tag of step `wanted`, and repeats
  // only the loads of those that do not.
  template <int kLoads>
  __device__ __forceinline__ void load_vector(const TaggedValue* vector, int size, unsigned wanted,
                                              float (&x)[kLoads * kLaneElements]) const {
    if constexpr (!K::kSequential) {
      if (c.p.vector_bytes > 0) return load_shared_vector<kLoads>(vector, size, wanted, x);
    }
    uint4 values[2 * kLoads] = {};
    unsigned missing = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) missing |= piece(i) * kLaneElements < size ? 3u << 2 * i : 0;
    c.wait_for([&] {
#pragma unroll
      for (int k = 0; k < 2 * kLoads; ++k) {
        if ((missing >> k & 1) != 0) values[k] = load_relaxed_x4(vector + piece(k / 2) * kLaneElements + k % 2 * 4);
      }
#pragma unroll
      for (int k = 0; k < 2 * kLoads; ++k) {
        const uint4 v = values[k];
        const bool complete =
            has_tag(v.x, wanted) && has_tag(v.y, wanted) && has_tag(v.z, wanted) && has_tag(v.w, wanted);
        if (complete) missing &= ~(1u << k);
      }
      return missing == 0;
    });
#pragma unroll
    for (int k = 0; k < 2 * kLoads; ++k) {
      x[4 * k] = untagged(values[k].x);
      x[4 * k + 1] = untagged(values[k].y);
      x[4 * k + 2] = untagged(values[k].z);
      x[4 * k + 3] = untagged(values[k].w);
    }
  }

  // The same where several groups of warps need the same elements: each is loaded by one thread of the block and passed
  // on through shared memory. Fewer loads matter because another block's store to a cache line queues behind the loads
  // of that line by all blocks. Two calls must be separated by a barrier of all consumers: that of the norms, or of a
  // matrix's sums.
  template <int kLoads>
  __device__ __forceinline__ void load_shared_vector(const TaggedValue* vector, int size, unsigned wanted,
                                                     float (&x)[kLoads * kLaneElements]) const {
    // Each thread fetches kLoads pieces of 16 bytes. It needs 2 kLoads, each of which at least two groups of warps
    // share.
    uint4 values[kLoads] = {};
    unsigned missing = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) missing |= (i * threads + thread) * 4 < size ? 1u << i : 0;
    c.wait_for([&] {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if ((missing >> i & 1) != 0) values[i] = load_relaxed_x4(vector + (i * threads + thread) * 4);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint4 v = values[i];
        const bool complete =
            has_tag(v.x, wanted) && has_tag(v.y, wanted) && has_tag(v.z, wanted) && has_tag(v.w, wanted);
        if (complete) missing &= ~(1u << i);
      }
      return missing == 0;
    });
    float4* words = reinterpret_cast<float4*>(shared + at.vector);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 v = values[i];
      if ((i * threads + thread) * 4 < size) {
        words[i * threads + thread] = make_float4(untagged(v.x), untagged(v.y), untagged(v.z), untagged(v.w));
      }
    }
    sync();
#pragma unroll
    for (int k = 0; k < 2 * kLoads; ++k) {
      const bool inside = piece(k / 2) * kLaneElements < size;
      const float4 v = inside ? words[piece(k / 2) * 2 + k % 2] : make_float4(0, 0, 0, 0);
      x[4 * k] = v.x;
      x[4 * k + 1] = v.y;
      x[4 * k + 2] = v.z;
      x[4 * k + 3] = v.w;
    }
  }

  // ---- counters: one atomic announces what all consumers of the block have written
  __device__ __forceinline__ void announce(Counter& counter) const {
    sync();
    if (thread == 0) add_release(&counter.value, 1);
  }
  __device__ __forceinline__ void await(const Counter& counter, unsigned target) const {
    if (thread == 0) c.wait_counter(counter, target);
    sync();
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
