// What host and device share about the fused decode kernel: its parameters, the rows of each block, the words that
// blocks and host exchange, and the layout of shared memory. Private to this folder, like all of its .cuh files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "llmc/base/dtype.h"
#include "llmc/base/kv_fp8.h"
#include "llmc/base/sampling.h"
#include "llmc/cuda/fused/copies.cuh"
#include "llmc/cuda/fused/decode.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/gemm/linear.h"
#include "llmc/cuda/op/sample/mailbox.h"
#include "llmc/cuda/op/sample/sampler.cuh"

namespace weft::cuda::fused {

constexpr int kLaneElements = 8;                          // 16-bit elements in a 16-byte load
constexpr int kWarpElements = kLaneElements * kWarpSize;  // elements that a warp loads at once: 512 bytes
constexpr int kChunkLoads = 4;                            // 16-byte loads a lane from a chunk of weights
constexpr int kSamplerThreads = 256;
// consumer warps; with producer and helper 12, 3 on each of a multiprocessor's 4 partitions
constexpr int kMaxWarps = 10;
// With the sequential residual two whole warpgroups, so that they can have the registers that a third one, with producer
// and helper, does not need: nothing is spilled. A spilled register is a cache line of a warp, and beside shared memory of
// 227 KB L1 has no room for those of ten warps: each is fetched from L2 (dev/performance/fused.md).
constexpr int kSequentialWarps = 8, kSequentialThreads = (kSequentialWarps + 4) * kWarpSize;
constexpr int kLaunchRegisters = 168;  // of each thread; of them all:
template <bool kQuantized>
constexpr int kConsumerRegisters = kQuantized ? 224 : 208;
template <bool kQuantized>
constexpr int kOtherRegisters = 3 * kLaunchRegisters - 2 * kConsumerRegisters<kQuantized>;
static_assert(kSequentialThreads <= (kMaxWarps + 2) * kWarpSize && kSequentialWarps * kWarpSize >= kSamplerThreads);
constexpr int kMinSplitPositions = 64;  // positions of a split, at least; the last split may have fewer
constexpr int kMaxLayers = 256;

// Where the matrices of a layer lie: rows in 16 bits, by LayerParts::Matrix,
template <typename S, bool kPacked>
struct LayerMatrices {
  const S *qkv = nullptr, *up = nullptr, *down = nullptr, *dense = nullptr;  // [out, in]; last entry: the head in qkv
  static constexpr const float *qkv_scales = nullptr, *up_scales = nullptr, *down_scales = nullptr,
                               *dense_scales = nullptr;
};
// or quantised, in the order of packed_tiles.cuh.
template <typename S>
struct LayerMatrices<S, true> {
  const std::byte* stream = nullptr;  // one a block, Sizes::stream_bytes apart; last entry: the quantised head, or null
  const S* qkv = nullptr;             // last entry: the head in 16 bits, or null
  // One scale a row, as in PackedMatrix; null where grouped.
  const float *qkv_scales = nullptr, *up_scales = nullptr, *down_scales = nullptr, *dense_scales = nullptr;
};
template <typename S, bool kPacked>
struct Layer : LayerMatrices<S, kPacked> {
  const S *qkv_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr, *dense_bias = nullptr;
  const S *norm1_weight = nullptr, *norm1_bias = nullptr, *norm2_weight = nullptr, *norm2_bias = nullptr;  // [C]
};
// sizeof(Layer<S, kPacked>) for all S: the host lays out shared memory without knowing them.
template <bool kPacked>
constexpr int kLayerBytes = (kPacked ? 14 : 12) * static_cast<int>(sizeof(void*));

// The rows of each matrix that a block owns; out: of MLP-down and of the output projection. And what it copies in the kernel of
// many tokens.
struct BlockRows {
  RowRange qkv, up, out, head;
  // Runs of Parameters::copies from first_run on: of a layer, then of the head. Keys and values have none, since their number
  // depends on the position; they are copied before run cached_at.
  int first_run, cached_at, layer_runs, runs;
};

// Words in page-locked host memory about the running launch, beside the mailbox. The upper half of each is the sequence
// number of the launch's first id, so that nothing needs to be cleared between launches.
struct HostWords {
  std::uint64_t end;      // SampleError << 28 | FusedEnd << 24 | tokens
  std::uint64_t timeout;  // a wait of this launch took too long
  std::uint64_t cancel;   // written by the host: the sequence number of the launch that is to end
};
constexpr int kEndShift = 24, kEndErrorShift = 28;

// A result of a layer for other blocks: an fp32 number whose lowest bit is replaced by that of `step`, the number of
// layers done since the launch began, this one included. Each location is written once a layer, and only after all of
// its readers have read the previous layer's value. So the bit tells whether a value belongs to this layer, and no flag
// is needed beside the data.
using TaggedValue = unsigned;

// The largest logit of a block's rows with its lowest id, in one word that also names its token. From the highest bit:
// sort key of the logit (32 bits), flags (3), token number + 1 modulo 512 (9), complement of the id (20), so that of
// equal logits the lowest id has the largest word.
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
  // The rank as sampler_detail::rank_of() computes it; its upper 32 bits are 0 if there was no candidate.
  __device__ static std::uint64_t rank(std::uint64_t word) { return word | 0xfff00000ull; }

 private:
  __device__ static unsigned tag(int token) { return (static_cast<unsigned>(token + 1) & 511u) << 20; }
};

// A counter in global memory, alone in its cache line.
struct alignas(128) Counter {
  unsigned value;
};
struct Control {
  Counter attention, head, abort;
  alignas(128) std::uint64_t next;  // (token + 1) << 32 | stop << 31 | id
};

// The model's sizes and how it is divided among blocks and warps, independent of storage types.
struct Sizes {
  int rope_half;
  int L, C, F, V, NH, HS;
  int warps_k, warps_r;  // consumer warps that share a row; groups of such warps, each with its own rows
  int threads;           // of all consumers
  int blocks;            // of the grid
  int stages, stage_bytes, window;
  bool cautious;     // of a stage of several tiles a quarter is asked for beside the stage before it, not all of it
  int partial_rows;  // rows whose partial sums fit in shared memory
  int max_splits;
  int item_shift;       // how far a block's first item of attention moves from layer to layer
  int vector_bytes;     // shared memory in which a block collects other blocks' results; 0: each thread loads its own
  int chunk_positions;  // positions whose keys and values fit in a stage of the ring
  int page_size;        // positions in a page
  int layer_bytes;      // sizeof(Layer) of the kernel
  int most_runs;        // of copies of a block
  // Quantised weights: bytes of shared memory for the digits of a warp's activations; bytes of one block's stream of a
  // layer, and of the head.
  int digit_bytes;
  std::int64_t stream_bytes, head_stream_bytes;
};

constexpr int kPageUnit = 32;  // positions: where splits begin if the cache may be in pages
// Query heads of a K/V head that one warp computes.
constexpr int kWarpQueries = 4;
// Bytes of these queries as operands of tensor cores (tensor_attention.cuh), at most.
constexpr int kOperandBytes = 4096;
// Positions of a slice (tensor_attention.cuh): as many as one mma multiplies by values, and as a unit of codes has.
constexpr int kSlice = 16;
static_assert(kSlice == kKvUnit);

// The largest head size that tensor cores take; and an item of up to so many scores goes without them.
constexpr int kTensorHeadSize = 128, kSingleScores = 256;

// Byte offsets in dynamic shared memory; the ring comes first. `group`: query heads of an item of attention, at most.
struct SharedLayout {
  int layers, copies, partials, digits, vector, rope, raw, query, added, states, sampler, barriers, bytes;
};
inline SharedLayout shared_layout(const Sizes& p, int group = 1) {
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
  at.copies = take(p.most_runs * static_cast<int>(sizeof(CopyRun)));
  // Operands lie where partial sums do: between two matrices these are idle.
  const int operands = (group + kWarpQueries - 1) / kWarpQueries * kOperandBytes;
  const int partials = 2 * p.warps_k * p.partial_rows * 4;
  at.partials = take(partials > operands ? partials : operands);
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

// For measurements and tests; only instrumented kernels read them.
struct Instruments {
  bool layer_only, lose_an_arrival;
  std::uint64_t* timeline;  // FusedTimeline::times, or null
};

template <typename S>
struct Parameters : Sizes {
  SharedLayout at;  // here, in constant memory, it takes no registers
  // [L + 1] of Layer<S, kPacked>: the last one holds the head and, in norm1, the final norm.
  std::byte* layers;
  BlockRows* rows;  // [blocks]
  CopyRun* copies;  // of all blocks
  const S* embedding;
  S *keys, *values;  // null with kv_fp8
  std::int64_t capacity;
  const float *rope_cos, *rope_sin;
  float eps, scale;  // scale: log2(e) / sqrt(head_dim)
  // workspace
  Control* control;
  TaggedValue *x, *qkv, *attention, *h;  // [C], [q + 2 kv], [q_size]: attention's output, [F]: after GELU or SwiGLU
  std::uint64_t* splits;     // [NH, max_splits, 2 + HS] of step << 32 | fp32: largest score, sum, output times sum
  float* logits;             // [V]
  std::uint64_t* head_best;  // [blocks]: BlockBest
  // the launch
  MailboxWords* mailbox;
  HostWords* host;
  std::uint32_t sequence;  // mailbox sequence number of the launch's first id
  std::int32_t first_id;
  std::int32_t more_ids[kFusedMoreIds];  // fed after it
  int num_more;
  int position, count;       // count: tokens fed; the first num_more of them need no logits
  std::int32_t* device_ids;  // or null; gets the sampled ids as well
  SamplingPlan sampling;
  int num_stop_ids;
  std::int32_t stop_ids[kMaxStopIds];
  std::uint64_t timeout_ns;
  Instruments instruments;
};

// Further sizes of a model with the sequential residual: a Llama, or a GPT-NeoX without the parallel residual.
struct SequentialSizes {
  int NKV, group;  // K/V heads; query heads for each of them
  int q_size;      // NH HS
  // Offsets in a row of qkv: the queries of K/V head h begin at h q_stride, its key at h kv_stride + key_begin, its
  // value at h kv_stride + value_begin.
  int q_stride, kv_stride, key_begin, value_begin;
  int first_part;      // the MLP's F hidden elements are exchanged in two parts; this is the size of the first
  bool gated, rms;     // true: SwiGLU, RMSNorm; false: GELU, LayerNorm
  bool head_norms;     // RMSNorm of each head of q and k, before they rotate
  bool kv_fp8;         // keys and values are codes (llmc/base/kv_fp8.h) of heads of 64 or 128
  int position_bytes;  // of a key, and of a value
  int kv_window;  // stages of keys and values in flight: at most `window`, and fewer where more warps take turns then
  std::uint32_t unrotated[kMaxLayers / 32];  // a bit a layer: its heads do not rotate

  __host__ __device__ bool rotates(int layer) const { return (unrotated[layer / 32] >> layer % 32 & 1) == 0; }
};
template <typename S>
struct SequentialParameters : Parameters<S>, SequentialSizes {
  TaggedValue* x_mid;  // [C]: the residual stream between attention and MLP
  S* head_norms_of;    // [L, 2, HS]: the weights of the norms of q and of k, where there are head_norms
  KvCodes cached;      // keys and values of all layers, codes or in S; a layer has capacity NKV rows of each
};

// The rows of a block where `rows` rows are divided evenly.
__host__ __device__ inline RowRange share_of(std::int64_t rows, int block, int blocks) {
  return {static_cast<int>(rows * block / blocks), static_cast<int>(rows * (block + 1) / blocks)};
}

// A block's rows of part 0 or 1 of the MLP's hidden elements.
__host__ __device__ inline RowRange hidden_part(const Sizes& p, int first_part, int part, int block, int blocks) {
  if (part == 0) return share_of(first_part, block, blocks);
  const RowRange rows = share_of(p.F - first_part, block, blocks);
  return {first_part + rows.begin, first_part + rows.end};
}

// Number of splits of one head's context at `position`.
__host__ __device__ inline int splits_at(int position, int max_splits) {
  const int wanted = position / kMinSplitPositions;
  return wanted < 1 ? 1 : wanted > max_splits ? max_splits : wanted;
}

// An item of attention of the sequential residual: some query heads of a K/V head, in a split of the context.
struct AttentionItem {
  int head, first_query, queries, split, splits;
  int begin, end;  // its positions in the cache

  __host__ __device__ bool newest() const { return split == splits - 1; }  // has the token itself
  __host__ __device__ bool appends() const { return newest() && first_query == 0; }
};
// How attention of a token is divided among blocks. An item has all query heads of a K/V head, so that keys and values
// are read once; or one of them, where every item then still has a block of its own, since all blocks wait for the slowest.
struct AttentionItems {
  int position;
  int splits, each;           // of the context; positions of a split, but for the last
  int parts, queries, count;  // parts of the query heads of a K/V head, `queries` in each; items
  bool single;                // few scores of few queries, which take a warp each, in little code
  int turn;                   // positions in a stage of the ring

  AttentionItems() = default;
  __host__ __device__ AttentionItems(const Sizes& p, const SequentialSizes& s, int token_position, int blocks)
      : position(token_position), splits(splits_at(position, p.max_splits)) {
    parts = s.NKV * splits * s.group <= blocks ? s.group : 1;
    queries = s.group / parts;
    count = s.NKV * splits * parts;
    const int share_of_split = (position + splits - 1) / splits;
    each = (share_of_split + kPageUnit - 1) / kPageUnit * kPageUnit;
    single = !s.kv_fp8 && queries <= kSequentialWarps && queries * share_of_split <= kSingleScores;
    turn = p.chunk_positions;
    if (single || p.HS > kTensorHeadSize) return;  // all warps read every stage
    // A stage is the turn of one warp of each set. Few positions are divided among more warps.
    const int sets = (queries + kWarpQueries - 1) / kWarpQueries;
    const int share = (share_of_split * sets + kSequentialWarps - 1) / kSequentialWarps;
    const int whole = share <= kSlice ? kSlice : (share + kSlice - 1) / kSlice * kSlice;
    turn = whole < turn ? whole : turn;
  }
  __host__ __device__ AttentionItem at(int i) const {
    const int of_head = i / splits, split = i - of_head * splits, head = of_head / parts;
    const int first = split * each, begin = first < position ? first : position,
              end = begin + each < position ? begin + each : position;
    return {head, (of_head - head * parts) * queries, queries, split, splits, begin, end};
  }
};

// Words of shared memory between the warps of a block.
struct Flags {
  int abort;             // a wait timed out, in this block or another: all waits return at once
  int stop;              // not 0: no token follows; with the sequential residual, the number of tokens decoded
  unsigned cache_steps;  // layers, counted over all tokens of this launch, whose new keys and values are in the cache
  std::int32_t id;       // id of the next token
  unsigned added_scales[2];  // of the new token's key and value, with kv_fp8
  BlockRows own;
  AttentionItems items;  // of the consumers' token, with the sequential residual; the block's first one, if it has any:
  AttentionItem first_item;
  int2 places[kMaxWarps];       // of each warp: which part of a row, and which group of rows
  float4 moments[kMaxWarps];    // of each warp's elements of x: mean, sum of squared deviations, count
  float squares[2][kMaxWarps];  // of each warp's elements of x, for both norms of a layer: their sum
};
static_assert(std::is_trivially_default_constructible_v<Flags>);  // it lies in __shared__

}  // namespace weft::cuda::fused
