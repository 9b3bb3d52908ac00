// The consumer warps of the step kernel: GEMMs of up to 8 rows of activations on tensor cores, and the order of a layer.
// Norms are in step_norm.cuh, attention in step_attention.cuh.
//
// Tiles. A warp multiplies 4 rows of a matrix, 64 elements of each at a time, by up to 8 rows of activations with
// mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"). The weights are operand B. One 16-byte load a lane takes
// a tile from shared memory: lanes 8 j to 8 j + 7 read 128 consecutive bytes of row j, so there are no bank conflicts
// whatever the row length. These registers are used as B fragments without a shuffle. Lane 4 g + t holds column g of B,
// so column g is one half (g % 2: first or second 32 elements) of row g / 2. The dot product does not depend on the
// order of the elements as long as A has the same order: A's rows 0 to 7 are the activation rows over the first halves,
// its rows 8 to 15 the same rows over the second halves. So of the accumulators c[0] is the sum of matrix row t with
// activation row g over the first halves, c[3] over the second halves; c[1] and c[2] pair different halves and are
// discarded.
//
// An activation row is a row of A, so its sums do not depend on the other rows, nor on how many there are.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/packed.cuh"
#include "llmc/cuda/fused/step_parameters.cuh"
#include "llmc/cuda/fused/timeline.h"
#include "llmc/cuda/hw/ring.cuh"
#include "llmc/cuda/op/attention/train/mma.cuh"
#include "llmc/cuda/op/elementwise/gelu.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// Whether all four values carry the tag of `step`; without branches, because it is the body of a loop that polls.
__device__ inline bool all_tagged(const uint4& v, unsigned step) {
  return (((v.x ^ step) | (v.y ^ step) | (v.z ^ step) | (v.w ^ step)) & 1) == 0;
}
__device__ inline void untag(const uint4& v, float* to) {
  to[0] = untagged(v.x);
  to[1] = untagged(v.y);
  to[2] = untagged(v.z);
  to[3] = untagged(v.w);
}

// kRows: 1, or kStepRows for any number of rows. The operations on a row are the same in both, and so are its bits.
template <typename S, int kRows>
struct StepConsumer {
  using Variant = StepVariant<S>;
  using Layer = typename Block<Variant>::Layer;
  // This lane's part of the activations as A fragments. Pieces of 8 elements of row `act` from both halves of a tile
  // make two fragments. They are kept as fragments, because mma takes four consecutive registers: made of pieces
  // at each mma, they would cost four moves each.
  struct Operand {
    Fragment at[kWarpTiles][2];
  };
  struct Pieces {
    uint4 at[kWarpTiles][2];  // [tile][half]
  };

  static constexpr int kTileSums = kStepTileRows * kRows;  // of lanes 0 to kTileSums - 1: see Tiles
  // Chunks of QKV that a step of one row loads to registers before the wait for x. Their stages are then filled again
  // meanwhile.
  static constexpr int kAhead = kRows == 1 ? 2 : 0;
  using Chunks = uint4[2][kWarpTiles];

  const Block<Variant>& c;
  const StepParameters<S>& p;
  char* shared;
  const StepLayout& at;  // in shared memory, as `own`: 20 registers less
  const Layer* layers;
  const BlockRows& own;
  int thread, warp, lane, warps, warp_k, warp_r;
  int act, slice;  // lane / 4: activation row. lane % 4: this thread finishes row 4 warp + slice of a batch of sums
  RingPosition ring;
  int partial_buffer = 0, moment_buffer = 0;
  unsigned step;       // layers done, in this launch and all earlier ones
  unsigned items = 0;  // items of attention done in this launch
  float x_own = 0;     // residual stream: element own.out.begin + 4 warp + slice of step row `act`

  __device__ __forceinline__ StepConsumer(const Block<Variant>& block, const StepParameters<S>& parameters,
                                          char* shared_memory, const StepLayout& layout, const BlockRows& own_rows)
      : c(block),
        p(parameters),
        shared(shared_memory),
        at(layout),
        layers(reinterpret_cast<const Layer*>(shared + layout.layers)),
        own(own_rows),
        thread(static_cast<int>(threadIdx.x)),
        warp(thread / kWarpSize),
        lane(thread % kWarpSize),
        warps(p.warps_k * p.warps_r),
        warp_k(warp % p.warps_k),
        warp_r(warp / p.warps_k),
        act(lane / 4),
        slice(lane % 4),
        step(p.first_step) {}

  __device__ __forceinline__ int step_rows() const { return kRows == 1 ? 1 : p.step_rows; }

  // ---- synchronisation of the block's consumers
  __device__ __forceinline__ void sync() const { named_barrier_wait(1, warps * kWarpSize); }
  __device__ __forceinline__ void stamp(int layer, FusedPhase phase) const {
    if (p.instruments.timeline == nullptr || thread != 0) return;
    p.instruments.timeline[(layer * kFusedPhases + static_cast<int>(phase)) * c.blocks + c.block] = global_time();
  }
  __device__ __forceinline__ void announce(Counter& counter) const {
    sync();
    if (thread == 0) add_release(&counter.value, 1);
  }
  __device__ __forceinline__ void await(const Counter& counter, unsigned target) const {
    if (thread == 0) c.wait_counter(counter, target);
    sync();
  }

  // Shared-memory address at which the offsets of the layout begin.
  __device__ __forceinline__ unsigned base() const { return c.ring - kStepConstantBytes; }

  // ---- the ring
  __device__ __forceinline__ unsigned begin_chunk() {
    c.wait_barrier(c.full + 8 * ring.stage, ring.phase);
    return c.ring + ring.stage * p.stage_bytes;
  }
  __device__ __forceinline__ void end_chunk() {
    __syncwarp();
    if (lane == 0) hopper::mbarrier_arrive(c.empty + 8 * ring.stage);
    ring.advance(p.stages);
  }

  // This lane's part of a vector in `half` of tile `tile` is elements 8 piece to 8 piece + 7.
  __device__ __forceinline__ int piece(int tile, int half) const {
    return warp_k * kWarpSize + tile * 8 + half * 4 + slice;
  }
  // Index of this lane's 8 elements of a matrix row in tile 0; each further tile adds 8.
  __device__ __forceinline__ int weight_piece() const { return warp_k * kWarpSize + lane % 8; }

  __device__ __forceinline__ void load_tiles(uint4 (&w)[kWarpTiles], unsigned own_bytes, int width) {
    const unsigned from = begin_chunk() + own_bytes;
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      if ((weight_piece() + 8 * i) * kLaneElements < width) w[i] = load_shared(from + 128 * i);
    }
    end_chunk();
  }
  // The dot product of matrix row `slice` of the tiles with activation row `act`.
  __device__ __forceinline__ static float multiply_tiles(const Operand& a, const uint4 (&w)[kWarpTiles]) {
    float sums[4][4] = {};  // independent accumulators, so that the mma overlap
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      multiply_add<S>(sums[i % 2 * 2], a.at[i][0], w[i].x, w[i].y);
      multiply_add<S>(sums[i % 2 * 2 + 1], a.at[i][1], w[i].z, w[i].w);
    }
    return ((sums[0][0] + sums[0][3]) + (sums[1][0] + sums[1][3])) +
           ((sums[2][0] + sums[2][3]) + (sums[3][0] + sums[3][3]));
  }
  __device__ __forceinline__ float* partials(int of_warp_k) const {
    return reinterpret_cast<float*>(shared + at.partials) +
           (partial_buffer * p.warps_k + of_warp_k) * warps * kTileSums;
  }
  __device__ __forceinline__ int chunks_of(int rows) const {
    const int chunk_rows = kStepTileRows * p.warps_r;
    return (rows + chunk_rows - 1) / chunk_rows;
  }
  // Where this lane's part of a chunk begins.
  __device__ __forceinline__ unsigned own_part(int width) const {
    return (warp_r * kStepTileRows + lane / 8) * 2 * width + weight_piece() * 16;
  }
  // Loads the first chunks of a matrix of `rows` rows to registers, at most kAhead, and returns how many.
  __device__ __forceinline__ int load_ahead(Chunks& w, int rows, int width) {
    const int chunks = min(kAhead, chunks_of(min(rows, kStepTileRows * warps)));
    if (kAhead > 0 && chunks > 0) load_tiles(w[0], own_part(width), width);
    if (kAhead > 1 && chunks > 1) load_tiles(w[1], own_part(width), width);
    return chunks;
  }
  // Partial sums of this warp for `rows` rows of `width` elements, at most a batch, that is 4 rows a warp. A chunk has
  // 4 rows for each group of warps. Elements past the end of a row are 0. Rows past the last one are stale shared
  // memory; their sums are not used. The first `held` chunks are in `w` already.
  __device__ __forceinline__ void multiply(int rows, int width, const Operand& a, bool accumulate, Chunks& w,
                                           int held = 0) {
    const int chunks = chunks_of(rows);
    const unsigned from = own_part(width);
    float* sums = partials(warp_k) + warp_r * kTileSums + lane;
    const int chunk_sums = p.warps_r * kTileSums;
    const auto keep = [&](int chunk, float sum) {
      if (lane >= kTileSums) return;
      float& place = sums[chunk * chunk_sums];
      place = accumulate ? place + sum : sum;
    };
    // A chunk is loaded to registers and its stage released before the arithmetic on the previous chunk, so that loads
    // and mma overlap.
    if (held < 1 && chunks > 0) load_tiles(w[0], from, width);
    for (int chunk = 0; chunk < chunks; chunk += 2) {
      if (chunk + 1 >= held && chunk + 1 < chunks) load_tiles(w[1], from, width);
      keep(chunk, multiply_tiles(a, w[0]));
      if (chunk + 1 >= chunks) break;
      if (chunk + 2 < chunks) load_tiles(w[0], from, width);
      keep(chunk + 1, multiply_tiles(a, w[1]));
    }
  }
  // Adds the partial sums in the order of the warps and calls finish(row, sum) in one thread for each row of the batch
  // and each activation row `act`, with kStepRows of them also for those that the step does not have. One barrier is
  // enough: the next partial sums go to the other buffer.
  template <typename Finish>
  __device__ __forceinline__ void finish_rows(int rows, const Finish& finish) {
    sync();
    const int row = kStepTileRows * warp + slice;
    if (row < rows && act < kRows) {
      float of_warp[kMaxWarps];  // all loads before the first addition
#pragma unroll
      for (int k = 0; k < kMaxWarps; ++k) of_warp[k] = k < p.warps_k ? partials(k)[warp * kTileSums + lane] : 0.0f;
      float sum = of_warp[0];
#pragma unroll
      for (int k = 1; k < kMaxWarps; ++k) sum += of_warp[k];
      finish(row, sum);
    }
    partial_buffer ^= 1;
  }
  // GEMM of all of this block's rows of a matrix with `width` columns, a batch at a time; calls store(row, sum + bias).
  // The first `held` chunks are in `w` already.
  template <typename Store>
  __device__ __forceinline__ void all_rows(RowRange rows, int width, const S* bias, const Operand& a, Chunks& w,
                                           int held, const Store& store) {
    const int batch = kStepTileRows * warps;
    for (int first = rows.begin; first < rows.end; first += batch) {
      const int count = min(batch, rows.end - first);
      const unsigned short bits = load_bias(bias, first, count);
      multiply(count, width, a, false, w, held);
      held = 0;
      finish_rows(count, [&](int row, float sum) { store(first + row, sum + bias_value(bits)); });
    }
  }
  // Bias of the row that this thread finishes, as bits: converting it here would wait for the load.
  __device__ __forceinline__ unsigned short load_bias(const S* bias, int first, int count) const {
    const int row = kStepTileRows * warp + slice;
    return bias != nullptr && row < count ? load_early(reinterpret_cast<const unsigned short*>(bias) + first + row) : 0;
  }
  __device__ __forceinline__ static float bias_value(unsigned short bits) {
    float low, high;
    widen<S>(bits, low, high);
    return low;
  }

  // Loads 16-bit activation rows that a counter has announced: `width` elements from `vectors` on, rows `stride`
  // elements apart. make_operand() waits for the loads.
  __device__ __forceinline__ void load_pieces(Pieces& a, const S* vectors, int stride, int width) const {
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = piece(i, half) * kLaneElements;
        a.at[i][half] = make_uint4(0, 0, 0, 0);
        if (act >= step_rows() || first >= width) continue;
        const S* from = vectors + static_cast<std::int64_t>(act) * stride + first;
        a.at[i][half] = load_relaxed_x4(reinterpret_cast<const unsigned*>(from));
      }
    }
  }
  __device__ __forceinline__ static void make_operand(Operand& out, const Pieces& a) {
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) make_fragments(out.at[i], a.at[i][0], a.at[i][1]);
  }
  // The fragments of a tile from the pieces in its two halves.
  __device__ __forceinline__ static void make_fragments(Fragment (&out)[2], const uint4& first, const uint4& second) {
    out[0] = Fragment{{first.x, second.x, first.y, second.y}};
    out[1] = Fragment{{first.z, second.z, first.w, second.w}};
#pragma unroll
    for (Fragment& f : out) {  // here, not in the loop over the chunks
      asm volatile("" : "+r"(f.word[0]), "+r"(f.word[1]), "+r"(f.word[2]), "+r"(f.word[3]));
    }
  }

  // ---- step_norm.cuh
  __device__ __forceinline__ const S* embedding_of(int row) const {
    const std::int32_t id = p.row[row].id;
    return p.embedding + static_cast<std::int64_t>(id < 0 ? p.last_ids[-1 - id] : id) * p.C;
  }
  __device__ __forceinline__ float elements_of(int of_warp_k) const {
    return static_cast<float>(max(0, min(kWarpElements, p.C - of_warp_k * kWarpElements)));
  }
  __device__ __forceinline__ float mean_of_warp(float sum) const {
    const float count = elements_of(warp_k);
    return count > 0 ? sum / count : 0.0f;
  }
  // Mean and 1 / sqrt(variance + eps) of `row` from mean and squares of the parts that its warps have, combined as in
  // moments_of() of norm.cuh. One lane of a warp, the `writer`, gives the warp's own.
  struct Moments {
    float mean, rstd;
  };
  __device__ __forceinline__ Moments combine_moments(float own_mean, float squares, int row, bool writer) {
    float2* of_warps = reinterpret_cast<float2*>(shared + at.moments) + moment_buffer * warps * kRows;
    moment_buffer ^= 1;
    if (writer) of_warps[warp * kRows + row] = make_float2(own_mean, squares);
    sync();
    float2 moments[kMaxWarps];
    float mean = 0, total = 0;
#pragma unroll
    for (int k = 0; k < kMaxWarps; ++k) {
      moments[k] = k < p.warps_k ? of_warps[(warp_r * p.warps_k + k) * kRows + row] : make_float2(0, 0);
      mean = fmaf(moments[k].x, k < p.warps_k ? elements_of(k) : 0.0f, mean);
    }
    const float C = static_cast<float>(p.C);
    mean /= C;
#pragma unroll
    for (int k = 0; k < kMaxWarps; ++k) {
      const float off = moments[k].x - mean;
      if (k < p.warps_k) total += fmaf(off * off, elements_of(k), moments[k].y);
    }
    return {mean, rsqrtf(total / C + p.eps)};
  }
  // 8 standardized elements times a norm's weight plus its bias, rounded to S.
  __device__ __forceinline__ static uint4 scale_and_shift(const float (&standard)[kLaneElements], const uint4& weight,
                                                          const uint4& bias) {
    float w[kLaneElements], b[kLaneElements], y[kLaneElements];
    widen<S>(weight, w);
    widen<S>(bias, b);
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) y[j] = fmaf(standard[j], w[j], b[j]);
    return make_uint4(pack<S>(y[0], y[1]), pack<S>(y[2], y[3]), pack<S>(y[4], y[5]), pack<S>(y[6], y[7]));
  }
  template <bool kBoth>
  __device__ __forceinline__ void load_input(int l, Operand& first, Operand& second);
  __device__ __forceinline__ void load_second_input(Operand& input, const Operand& second);

  // ---- step_attention.cuh
  __device__ __forceinline__ void attend(int layer);
  template <int kLanes>
  __device__ __forceinline__ void attend_work_unit(const StepWorkUnit& item, int slot);

  // ---- order of the operators in a layer
  __device__ __forceinline__ void run() {
    for (int l = 0; l < p.L; ++l) run_layer(l);
    if (p.logits != nullptr) run_head();
  }
  // h' = h + attention(norm1(h)) + mlp(norm2(h)): the parallel residual.
  __device__ __forceinline__ void run_layer(int l) {
    Operand input;
    {
      Operand mlp_input;
      Chunks w_rows = {};
      const int held = load_ahead(w_rows, own.qkv.end - own.qkv.begin, p.C);
      load_input<true>(l, input, mlp_input);
      input_rows(l, input, mlp_input, w_rows, held);
    }
    attend(l);
    output_rows(l, input);
    ++step;
  }
  // QKV, then MLP-up and GELU, in a loop that is not unrolled: a layer's code exceeds the instruction cache. `input` is
  // the input of QKV and is overwritten. The kernel of many rows also writes q, k, v and x of rows that the step does
  // not have: then all their values carry a layer's tag, however many rows the next launch has.
  __device__ __forceinline__ void input_rows(int l, Operand& input, const Operand& mlp_input, Chunks& w_rows,
                                             int held) {
    const Layer& w = layers[l];
#pragma unroll 1
    for (int matrix = 0; matrix < 2; ++matrix) {
      const bool up = matrix == 1;
      all_rows(up ? own.up : own.qkv, p.C, up ? w.up_bias : w.qkv_bias, input, w_rows, held, [&](int row, float sum) {
        if (!up) {
          store_relaxed(p.qkv + act * p.qkv_stride + row, tagged(sum, step + 1));
        } else if (act < step_rows()) {
          p.hidden[static_cast<std::int64_t>(act) * p.F + row] = from_float<S>(gelu_exact(sum));
        }
      });
      held = 0;
      if (up) {
        if (!(p.instruments.lose_an_arrival && c.block == 0 && l + 1 == p.L)) announce(p.control->head);
      } else {
        load_second_input(input, mlp_input);
      }
      stamp(l, up ? FusedPhase::up_done : FusedPhase::qkv_done);
    }
  }
  // MLP-down, C columns at a time, and the output projection, for the same rows; both are added to the residual.
  // `input` is passed as scratch registers.
  __device__ __forceinline__ void output_rows(int l, Operand& input) {
    const Layer& w = layers[l];
    const int rows = own.out.end - own.out.begin;
    if (rows <= 0) return;
    Chunks w_rows = {};
    const unsigned short down_bias = load_bias(w.down_bias, own.out.begin, rows),
                         dense_bias = load_bias(w.dense_bias, own.out.begin, rows);
    await(p.control->head, static_cast<unsigned>(c.blocks) * (step + 1));
    Pieces next;
    load_pieces(next, p.hidden, p.F, p.C);
    make_operand(input, next);
    stamp(l, FusedPhase::mlp_up_here);
    // Software pipeline: while one range of C columns is multiplied, the next one is loaded. The last range is
    // attention's output. One loop for all, because code of its own for the projection would be fetched each time.
#pragma unroll 1
    for (int begin = 0; begin <= p.F; begin += p.C) {
      const int after = begin + p.C;
      if (after < p.F) {
        load_pieces(next, p.hidden + after, p.F, p.C);
      } else if (after == p.F) {
        const auto heads = static_cast<unsigned>(step_rows() * p.NH);
        await(p.control->attention, p.attention_before + heads * static_cast<unsigned>(l + 1));
        load_pieces(next, p.attended, p.q_size, p.q_size);
        stamp(l, FusedPhase::attention_here);
      } else {
        stamp(l, FusedPhase::down_done);
      }
      multiply(rows, begin < p.F ? p.C : p.q_size, input, begin > 0, w_rows);
      make_operand(input, next);
    }
    finish_rows(rows, [&](int row, float sum) {
      x_own += sum + (bias_value(down_bias) + bias_value(dense_bias));
      store_relaxed(p.x + exchange_place(act, own.out.begin + row), tagged(x_own, step + 1));
    });
    stamp(l, FusedPhase::x_written);
  }
  __device__ __forceinline__ void run_head() {
    Operand input;
    load_input<false>(p.L, input, input);
    const int logits_row = p.row[act].logits;
    float* logits = p.logits + static_cast<std::int64_t>(logits_row) * p.V;
    Chunks w_rows = {};
    all_rows(own.head, p.C, nullptr, input, w_rows, 0, [&](int row, float sum) {
      if (logits_row >= 0) logits[row] = sum;
    });
    stamp(p.L, FusedPhase::qkv_done);
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
