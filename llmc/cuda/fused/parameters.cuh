// What host and device share about the fused decode kernel: its parameters, the rows of each block, the words through which
// blocks and host talk, and the layout of shared memory. Private to this folder, as all of its .cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmc/base/dtype.h"
#include "llmc/base/sampling.h"
#include "llmc/cuda/fused/decode.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/linear.h"
#include "llmc/cuda/op/mailbox.h"
#include "llmc/cuda/op/sampler.cuh"

namespace weft::cuda::fused {

constexpr int kLaneElements = 8;                          // 16-bit elements of a 16-byte load
constexpr int kWarpElements = kLaneElements * kWarpSize;  // of one load of a warp, 512 bytes
constexpr int kChunkLoads = 4;                            // loads of a warp from a chunk of weights
constexpr int kSamplerThreads = 256;
constexpr int kMaxWarps = 10;           // consumers; with producer and helper 3 on each quarter of the multiprocessor
constexpr int kMinSplitPositions = 64;  // a split of the context has at least so many, but for the last

template <typename W, typename A>
struct Layer {
  const W *qkv, *up, *down, *dense;                                // weights, [out, in]
  const A *qkv_bias, *up_bias, *down_bias, *dense_bias;            // or null
  const A *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;  // [C]
  static constexpr const float *qkv_scales = nullptr, *up_scales = nullptr, *down_scales = nullptr,
                               *dense_scales = nullptr;
};
// The host lays out shared memory without knowing the types.
constexpr int kLayerBytes = 12 * static_cast<int>(sizeof(void*));

// As type of weights: matrices of the blocks in i8 or u4, in the order of weight_stream.cuh.
template <DType Q>
struct Quantized {
  static constexpr DType kType = Q;
};
template <typename W>
constexpr bool kIsQuantized = false;
template <DType Q>
constexpr bool kIsQuantized<Quantized<Q>> = true;

template <typename A>
struct QuantizedLayer {
  const std::byte*
      stream;    // matrices: of each block its own, Sizes::stream_bytes apart; in the last layer the head, or null
  const A* qkv;  // in the last layer the head in 16 bits, or null
  const float *qkv_scales, *up_scales, *down_scales, *dense_scales;  // of rows, as PackedMatrix has them; int4: null
  const A *qkv_bias, *up_bias, *down_bias, *dense_bias;
  const A *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;
};
template <DType Q, typename A>
struct Layer<Quantized<Q>, A> : QuantizedLayer<A> {};
constexpr int kQuantizedLayerBytes = 14 * static_cast<int>(sizeof(void*));

// Rows of each matrix that are assigned to a block; out: of MLP-down and of the output projection.
struct BlockRows {
  RowRange qkv, up, out, head;
};

// Words in page-locked memory about the running launch, beside the mailbox. Each holds the sequence number of the launch's
// first id in its upper half, so that nothing needs to be cleared between launches.
struct HostWords {
  std::uint64_t end;      // SampleError << 28 | FusedEnd << 24 | tokens
  std::uint64_t timeout;  // a wait of this launch took too long
  std::uint64_t cancel;   // the number alone, written by the host: end this launch
};
constexpr int kEndShift = 24, kEndErrorShift = 28;

// A result of a layer for other blocks: an fp32 number whose last bit is that of `step`, the number of layers done since
// the launch began, this one included. Each is written once a layer, and not before all of its readers have read that of the
// previous layer; so the bit tells whether it is of this layer, and data needs no flag beside it.
using TaggedValue = unsigned;

// The greatest logit of a block's rows and its lowest id, in one word that tells its token: key of the logit, flags, number
// of the token modulo 512, id (fewer than kIds) from the other end.
struct BlockBest {
  static constexpr std::int64_t kIds = std::int64_t{1} << 20;
  static_assert(kIds <= kMaxSampledVocab);
  static constexpr unsigned kCancelled = 1, kNotANumber = 2, kInfinite = 4;
  __device__ static std::uint64_t word(std::uint64_t rank, unsigned flags, int token) {
    return (rank & ~0xfff00000ull) | flags << 29 | tag(token);
  }
  __device__ static bool is_of(std::uint64_t word, int token) {
    return (static_cast<unsigned>(word) & 0x1ff00000u) == tag(token);
  }
  __device__ static unsigned flags(std::uint64_t word) { return static_cast<unsigned>(word) >> 29; }
  // As sampler_detail::rank_of() gives it; nothing above it if there was no candidate.
  __device__ static std::uint64_t rank(std::uint64_t word) { return word | 0xfff00000ull; }

 private:
  __device__ static unsigned tag(int token) { return (static_cast<unsigned>(token + 1) & 511u) << 20; }
};

// Counters in global memory, each in a cache line of its own.
struct alignas(128) Counter {
  unsigned value;
};
struct Control {
  Counter attention, head, abort;
  alignas(128) std::uint64_t next;  // (token + 1) << 32 | stop << 31 | id
};

// The model's sizes and how it is divided, which do not depend on storage types.
struct Sizes {
  int rope_half;
  int L, C, F, V, NH, HS;
  int warps_k, warps_r;  // consumer warps along a row, groups of them along rows
  int stages, stage_bytes, window;
  int partial_rows;  // rows whose partial sums fit in shared memory
  int max_splits;
  int item_shift;    // of the first item of attention of a block, from layer to layer
  int vector_bytes;  // of shared memory, through which a block gets what others computed; 0: each thread loads its own
  int chunk_positions;  // of keys and values, in a stage of the ring
  int page_size;        // positions; without pages all that there are
  int layer_bytes;      // of the kernel's Layer
  // Quantised weights: of shared memory for the digits of a warp's activations; of a block's matrices of a layer, of its head.
  int digit_bytes;
  std::int64_t stream_bytes, head_stream_bytes;
};

// For measurements and tests; only instrumented kernels look at them.
struct Instruments {
  bool layer_only, lose_an_arrival;
  std::uint64_t* timeline;  // FusedTimeline::times, or null
};

template <typename W, typename A, typename KV>
struct Parameters : Sizes {
  Layer<W, A>* layers;  // [L + 1]: the last one holds the head in `qkv` and the final norm in norm1
  BlockRows* rows;      // [blocks]
  const A* embedding;
  KV *keys, *values;
  std::int64_t capacity;
  const float *rope_cos, *rope_sin;
  float eps, scale;  // scale: log2(e) / sqrt(head_dim)
  // workspace
  Control* control;
  TaggedValue *x, *qkv, *attention, *h;  // [C], [3 C], [C] (its output), [F] (after GELU)
  std::uint64_t* splits;     // [NH, max_splits, 2 + HS]: step << 32 | fp32: largest score, sum, output times sum
  float* logits;             // [V]
  std::uint64_t* head_best;  // [blocks]: BlockBest
  // the launch
  MailboxWords* mailbox;
  HostWords* host;
  std::uint32_t sequence;  // of the first id in the mailbox
  std::int32_t first_id;
  std::int32_t more_ids[kFusedMoreIds];  // fed after it
  int num_more;
  int position, count;       // count: tokens that are fed; the first num_more of them have no logits
  std::int32_t* device_ids;  // or null: the sampled ids go there, too
  SamplingPlan sampling;
  int num_stop_ids;
  std::int32_t stop_ids[kMaxStopIds];
  std::uint64_t timeout_ns;
  Instruments instruments;
};

// What a model with the sequential residual has beside Sizes: a Llama, or a GPT-NeoX without the parallel residual.
struct SequentialSizes {
  int NKV, group;  // K/V heads; query heads of each
  int q_size;      // NH HS
  // Where a row of qkv has the heads: the queries of K/V head h begin at h q_stride, its key at h kv_stride + key_begin.
  int q_stride, kv_stride, key_begin, value_begin;
  int first_part;   // of the F elements between the MLP's matrices: they are exchanged in two parts
  bool gated, rms;  // SwiGLU, not GELU; RMSNorm, not LayerNorm
};
// Query heads of a K/V head that one warp takes.
constexpr int kWarpQueries = 4;

template <typename W, typename A, typename KV>
struct SequentialParameters : Parameters<W, A, KV>, SequentialSizes {
  TaggedValue* x_mid;  // [C]: the residual stream between attention and MLP
};

// The rows of a block, of rows that are divided evenly.
__host__ __device__ inline RowRange share_of(std::int64_t rows, int block, int blocks) {
  return {static_cast<int>(rows * block / blocks), static_cast<int>(rows * (block + 1) / blocks)};
}

// Rows of part 0 or 1 of the elements between the MLP's matrices.
__host__ __device__ inline RowRange hidden_part(const Sizes& p, int first_part, int part, int block, int blocks) {
  if (part == 0) return share_of(first_part, block, blocks);
  const RowRange rows = share_of(p.F - first_part, block, blocks);
  return {first_part + rows.begin, first_part + rows.end};
}

// Words of shared memory between the warps of a block.
struct Flags {
  int abort;             // something went wrong here or elsewhere: waits return at once
  int stop;              // not 0: no token follows; with the sequential residual, how many tokens there were
  unsigned cache_steps;  // layers of this launch, counted over its tokens, whose new keys and values are in the cache
  std::int32_t id;       // of the next token
  float4 moments[2][kMaxWarps];  // of each warp's elements of x: mean, sum of squared distances, count
};

// Offsets of everything in dynamic shared memory, behind the ring; host and device compute it alike. `group`: query heads of
// an item of attention.
struct SharedLayout {
  int layers, partials, digits, vector, rope, raw, query, added, states, sampler, barriers, bytes;
};
__host__ __device__ inline SharedLayout shared_layout(const Sizes& p, int group = 1) {
  const int warps = p.warps_k * p.warps_r;
  const auto up16 = [](int bytes) { return (bytes + 15) / 16 * 16; };
  SharedLayout at{};
  int end = p.stages * p.stage_bytes;
  const auto take = [&](int bytes) {
    const int start = end;
    end += up16(bytes);
    return start;
  };
  at.layers = take((p.L + 1) * p.layer_bytes);
  at.partials = take(2 * p.warps_k * p.partial_rows * 4);
  at.digits = take(warps * p.digit_bytes);
  at.vector = take(p.vector_bytes);
  at.rope = take(2 * p.rope_half * 4);
  at.raw = take((group + 2) * p.HS * 4);
  at.query = take(group * p.HS * 4);
  at.added = take(2 * p.HS * static_cast<int>(sizeof(fp16)));
  at.states = take(warps * (group < kWarpQueries ? group : kWarpQueries) * (p.HS + 2) * 4);
  at.sampler = take(static_cast<int>(sizeof(SamplerScratch<kSamplerThreads>)));
  at.barriers = take((2 * p.stages + 2) * 8);
  at.bytes = end;
  return at;
}

// Splits of the context of one head at `position`.
__host__ __device__ inline int splits_at(int position, int max_splits) {
  const int wanted = position / kMinSplitPositions;
  return wanted < 1 ? 1 : wanted > max_splits ? max_splits : wanted;
}

}  // namespace weft::cuda::fused
