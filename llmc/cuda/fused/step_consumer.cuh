// The consumer warps of the step kernel: GEMMs of a few rows on tensor cores over the chunks of the ring, norms, and the order of
// a layer. Attention is in step_attention.cuh.
//
// Tiles. A warp multiplies 4 rows of a matrix, 64 elements of each at a time, by up to 8 rows of activations. One load of 16 bytes
// by each lane takes the tile from shared memory: lanes 8 j ... 8 j + 7 have 128 consecutive bytes of row j, so no two meet in a
// bank however long rows are. mma.m16n8k16 gets these registers as they are: lane = 4 g + t holds column g of B, which so is one
// half, g % 2, of the 64 elements of row g / 2. Any order of the elements gives the same sum if both operands follow it; so does
// A, whose rows 0 ... 7 are the rows of activations over the first halves and rows 8 ... 15 the same over the second halves. Of
// the accumulators (PTX ISA, "Matrix fragments for mma.m16n8k16") c[0] is the sum of row t of the matrix with row g of the
// activations over the first halves and c[3] that over the second; c[1] and c[2] mix halves and are not used.
//
// A row of activations is a row of A: its sums do not depend on the other rows, nor on how many there are.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/packed.cuh"
#include "llmc/cuda/fused/step_parameters.cuh"
#include "llmc/cuda/fused/timeline.h"
#include "llmc/cuda/hw/ring.cuh"
#include "llmc/cuda/hw/warp_fold.cuh"
#include "llmc/cuda/op/attention/mma.cuh"
#include "llmc/cuda/op/gelu.cuh"
#include "llmc/cuda/op/swiglu.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

__device__ inline void store_shared(unsigned address, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// kParallel: the parallel residual; otherwise one branch follows the other, and there may be SwiGLU, RMSNorm and grouped queries.
template <typename S, bool kParallel>
struct StepConsumer {
  using Variant = StepVariant<S>;
  using Layer = typename Block<Variant>::Layer;
  // Rows of activations, this lane's elements: [tile][half], 8 neighbours each of row `act`.
  struct Operand {
    uint4 at[kWarpTiles][2];
  };

  const Block<Variant>& c;
  const StepParameters<S>& p;
  char* shared;
  StepLayout at;
  const Layer* layers;
  BlockRows own;
  int thread, warp, lane, warps, warp_k, warp_r;
  int act, slice;  // lane / 4 and lane % 4: the row of activations, and of a batch of sums row 4 warp + slice
  RingPosition ring;
  int partial_buffer = 0, moment_buffer = 0;
  unsigned step;       // layers done, in this launch and those before
  unsigned items = 0;  // of attention, done in this launch
  float x_own = 0;     // residual of row own.out.begin + 4 warp + slice of step row `act`

  __device__ __forceinline__ StepConsumer(const Block<Variant>& block, const StepParameters<S>& parameters,
                                          char* shared_memory, const StepLayout& layout)
      : c(block),
        p(parameters),
        shared(shared_memory),
        at(layout),
        layers(reinterpret_cast<const Layer*>(shared + layout.layers)),
        own(p.rows[c.block]),
        thread(static_cast<int>(threadIdx.x)),
        warp(thread / kWarpSize),
        lane(thread % kWarpSize),
        warps(p.warps_k * p.warps_r),
        warp_k(warp % p.warps_k),
        warp_r(warp / p.warps_k),
        act(lane / 4),
        slice(lane % 4),
        step(p.first_step) {}

  // ---- the block's consumers
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

  // ---- tiles
  // Elements 8 piece ... 8 piece + 7 of a vector are this lane's in `half` of tile `tile`.
  __device__ __forceinline__ int piece(int tile, int half) const {
    return warp_k * kWarpSize + tile * 8 + half * 4 + slice;
  }
  // This lane's piece of a row of the matrix in tile 0: those of the next tiles are 8 further on.
  __device__ __forceinline__ int weight_piece() const { return warp_k * kWarpSize + lane % 8; }

  __device__ __forceinline__ void load_tiles(uint4 (&w)[kWarpTiles], unsigned own_bytes, int width) {
    const unsigned from = begin_chunk() + own_bytes;
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      if ((weight_piece() + 8 * i) * kLaneElements < width) w[i] = load_shared(from + 128 * i);
    }
    end_chunk();
  }
  // The sum of row `slice` of the tiles with row `act` of the activations.
  __device__ __forceinline__ static float multiply_tiles(const Operand& a, const uint4 (&w)[kWarpTiles]) {
    float sums[4][4] = {};  // chains that do not wait for each other
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      const uint4 &first = a.at[i][0], &second = a.at[i][1];
      multiply_add<S>(sums[i % 2 * 2], Fragment{{first.x, second.x, first.y, second.y}}, w[i].x, w[i].y);
      multiply_add<S>(sums[i % 2 * 2 + 1], Fragment{{first.z, second.z, first.w, second.w}}, w[i].z, w[i].w);
    }
    return ((sums[0][0] + sums[0][3]) + (sums[1][0] + sums[1][3])) +
           ((sums[2][0] + sums[2][3]) + (sums[3][0] + sums[3][3]));
  }
  __device__ __forceinline__ float* partials(int of_warp_k) const {
    return reinterpret_cast<float*>(shared + at.partials) +
           (partial_buffer * p.warps_k + of_warp_k) * warps * kWarpSize;
  }
  // The partial sums of `rows` rows of `width` elements, at most a batch: 4 rows for each warp. A chunk has 4 rows for each group
  // of warps. Elements past the end of a row are 0; rows past the last one are stale, and their sums are not used.
  __device__ __forceinline__ void multiply(int rows, int width, const Operand& a, bool accumulate) {
    const int chunk_rows = kTileRows * p.warps_r, chunks = (rows + chunk_rows - 1) / chunk_rows;
    const unsigned own_bytes = (warp_r * kTileRows + lane / 8) * 2 * width + weight_piece() * 16;
    float* sums = partials(warp_k) + warp_r * kWarpSize + lane;
    const int chunk_sums = p.warps_r * kWarpSize;
    const auto keep = [&](int chunk, float sum) {
      float& place = sums[chunk * chunk_sums];
      place = accumulate ? place + sum : sum;
    };
    // A chunk is loaded to registers, and its stage released, before the arithmetic on the chunk before it.
    uint4 w[2][kWarpTiles] = {};
    if (chunks > 0) load_tiles(w[0], own_bytes, width);
    for (int chunk = 0; chunk < chunks; chunk += 2) {
      if (chunk + 1 < chunks) load_tiles(w[1], own_bytes, width);
      keep(chunk, multiply_tiles(a, w[0]));
      if (chunk + 1 >= chunks) break;
      if (chunk + 2 < chunks) load_tiles(w[0], own_bytes, width);
      keep(chunk + 1, multiply_tiles(a, w[1]));
    }
  }
  // The sum of row `row` of a batch with row `act`, of the warps' partial sums in their order.
  __device__ __forceinline__ float sum_of(int row) const {
    const int place = row / kTileRows * kWarpSize + act * 4 + row % kTileRows;
    float of_warp[kMaxWarps];  // loaded side by side
#pragma unroll
    for (int k = 0; k < kMaxWarps; ++k) of_warp[k] = k < p.warps_k ? partials(k)[place] : 0.0f;
    float sum = of_warp[0];
#pragma unroll
    for (int k = 1; k < kMaxWarps; ++k) sum += of_warp[k];
    return sum;
  }
  // Calls finish(row, sum) in one thread for each row of the batch and each row `act`, those that the step has not included. One
  // barrier: the next partial sums go to the other buffer.
  template <typename Finish>
  __device__ __forceinline__ void finish_rows(int rows, const Finish& finish) {
    sync();
    const int row = kTileRows * warp + slice;
    if (row < rows) finish(row, sum_of(row));
    partial_buffer ^= 1;
  }
  // All rows of a matrix of `width` columns, a batch at a time: store(row, sum with bias).
  template <typename Store>
  __device__ __forceinline__ void all_rows(RowRange rows, int width, const S* bias, const Operand& a,
                                           const Store& store) {
    const int batch = kTileRows * warps;
    for (int first = rows.begin; first < rows.end; first += batch) {
      const int count = min(batch, rows.end - first);
      const unsigned short bits = load_bias(bias, first, count);
      multiply(count, width, a, false);
      finish_rows(count, [&](int row, float sum) { store(first + row, sum + bias_value(bits)); });
    }
  }
  // Of the row whose sum this thread will finish, as bits: converting them here would wait for the load.
  __device__ __forceinline__ unsigned short load_bias(const S* bias, int first, int count) const {
    const int row = kTileRows * warp + slice;
    return bias != nullptr && row < count ? load_early(reinterpret_cast<const unsigned short*>(bias) + first + row) : 0;
  }
  __device__ __forceinline__ static float bias_value(unsigned short bits) {
    float low, high;
    widen<S>(bits, low, high);
    return low;
  }

  // Rows of the MLP's first matrix and its function, rounded, to p.hidden.
  __device__ __forceinline__ void hidden_rows(int l, const Operand& a) {
    const Layer& w = layers[l];
    const auto store = [&](int row, float value) {
      if (act < p.step_rows) p.hidden[static_cast<std::int64_t>(act) * p.F + row] = from_float<S>(value);
    };
    if (kParallel || !p.gated) {
      all_rows(own.up, p.C, w.up_bias, a, [&](int row, float sum) { store(row, gelu_exact(sum)); });
    } else {  // a chunk has `half` rows of gate and the same rows of up
      const int half = kTileRows / 2 * p.warps_r, batch = kTileRows / 2 * warps;
      for (int first = own.up.begin; first < own.up.end; first += batch) {
        const int count = min(batch, own.up.end - first);
        multiply((count + half - 1) / half * 2 * half, p.C, a, false);
        sync();
        const int row = kTileRows * warp + slice, tile_row = row / half * 2 * half + row % half;
        if (row < count) store(first + row, swiglu<float>(sum_of(tile_row), sum_of(tile_row + half)));
        partial_buffer ^= 1;
      }
    }
    if (!(p.instruments.lose_an_arrival && c.block == 0 && l + 1 == p.L)) announce(p.control->head);
    stamp(l, FusedPhase::up_done);
  }

  // ---- activations
  // Rows of 16-bit activations that a counter has announced, `stride` elements apart; `width` elements from `vectors` on.
  __device__ __forceinline__ void load_operand(Operand& a, const S* vectors, int stride, int width) const {
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = piece(i, half) * kLaneElements;
        a.at[i][half] = make_uint4(0, 0, 0, 0);
        if (act >= p.step_rows || first >= width) continue;
        const S* from = vectors + static_cast<std::int64_t>(act) * stride + first;
        a.at[i][half] = load_relaxed_x4(reinterpret_cast<const unsigned*>(from));
      }
    }
  }
  // ---- the residual stream
  // Of every row of the step 8 neighbouring elements a lane, those of piece `column()`: the lanes of a warp then share its weights
  // of a norm, and one row costs an eighth of eight.
  using Columns = float[kStepRows][kLaneElements];
  __device__ __forceinline__ int column() const {
    return warp_k * kWarpSize + lane;
  }
  __device__ __forceinline__ bool has_column() const {
    return column() * kLaneElements < p.C;
  }
  __device__ __forceinline__ const S* embedding_of(int row) const {
    const std::int32_t id = p.row[row].id;
    return p.embedding + static_cast<std::int64_t>(id < 0 ? p.last_ids[-1 - id] : id) * p.C;
  }
  // Of the embedding in the first layer.
  __device__ __forceinline__ void load_residual(int l, Columns& x) {
    if (l > 0) {
      load_tagged(p.x, step, x);
    } else {
#pragma unroll
      for (int r = 0; r < kStepRows; ++r) {
        uint4 packed = make_uint4(0, 0, 0, 0);
        if (r < p.step_rows && has_column()) {
          packed = __ldg(reinterpret_cast<const uint4*>(embedding_of(r) + column() * kLaneElements));
        }
        widen<S>(packed, x[r]);
      }
      const int row = own.out.begin + kTileRows * warp + slice;
      if (row < own.out.end) x_own = to_float(embedding_of(act)[row]);
    }
    stamp(l, FusedPhase::x_here);
  }
  // From p.x or p.x_mid, as soon as it is of step `wanted`. Loads again only what is not, and while nothing comes only one of
  // many loads: 8 rows are 80 KB a block, and all blocks wait at the same time.
  __device__ __forceinline__ void load_tagged(const TaggedValue* vectors, unsigned wanted, Columns& x) const {
    constexpr int kLoads = 2 * kStepRows, kFew = 4;
    uint4 values[kLoads] = {};
    unsigned missing = has_column() ? (1u << 2 * p.step_rows) - 1 : 0, asked = missing;
    const TaggedValue* from = vectors + warp_k * kWarpElements + lane * 4;
    c.wait_for([&] {
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        if ((asked >> k & 1) != 0) values[k] = load_relaxed_x4(from + k / 2 * p.x_stride + k % 2 * (kWarpElements / 2));
      }
      const unsigned before = missing;
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const uint4 v = values[k];
        const bool complete =
            has_tag(v.x, wanted) && has_tag(v.y, wanted) && has_tag(v.z, wanted) && has_tag(v.w, wanted);
        if (complete) missing &= ~(1u << k);
      }
      asked = missing != before || __popc(missing) <= kFew ? missing : missing & (0 - missing);
      return missing == 0;
    });
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      float* to = x[k / 2] + k % 2 * 4;
      to[0] = untagged(values[k].x);
      to[1] = untagged(values[k].y);
      to[2] = untagged(values[k].z);
      to[3] = untagged(values[k].w);
    }
  }

  // ---- norms
  struct NormWeight {
    uint4 weight, bias;
  };
  // Early: while x is waited for. RMSNorm has no bias.
  __device__ __forceinline__ NormWeight load_norm(const S* weight, const S* bias) const {
    const auto get = [&](const S* from) {
      return has_column() && from != nullptr ? load_early(reinterpret_cast<const uint4*>(from) + column())
                                             : make_uint4(0, 0, 0, 0);
    };
    return {get(weight), get(bias)};
  }
  // x becomes (x - mean) / sqrt(variance + eps), row by row. Each warp takes the moments of its own elements, and those of all
  // warps are combined, as moments_of() in norm.cuh does; lanes 4 r ... 4 r + 3 do it for row r.
  __device__ __forceinline__ void standardize(Columns& x) {
    const auto elements_of = [&](int k) {
      return static_cast<float>(max(0, min(kWarpElements, p.C - k * kWarpElements)));
    };
    const bool rms = !kParallel && p.rms;  // 0 for every mean
    const float count = elements_of(warp_k), C = static_cast<float>(p.C);
    float sums[kStepRows], own_mean = 0;
    if (count > 0 && !rms) {
#pragma unroll
      for (int r = 0; r < kStepRows; ++r) {
        sums[r] = 0;
#pragma unroll
        for (int j = 0; j < kLaneElements; ++j) sums[r] += x[r][j];  // 0 outside
      }
      own_mean = warp_fold(sums, lane) / count;
    }
#pragma unroll
    for (int r = 0; r < kStepRows; ++r) {
      sums[r] = 0;
      if (r >= p.step_rows) continue;
      const float mean = __shfl_sync(~0u, own_mean, 4 * r);
      if (!has_column()) continue;
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        const float d = x[r][j] - mean;
        sums[r] = fmaf(d, d, sums[r]);
      }
    }
    const float squares = warp_fold(sums, lane);
    float2* of_warps = reinterpret_cast<float2*>(shared + at.moments) + moment_buffer * warps * kStepRows;
    moment_buffer ^= 1;
    if (slice == 0) of_warps[warp * kStepRows + act] = make_float2(own_mean, squares);
    sync();
    float2 moments[kMaxWarps];
    float mean = 0, total = 0;
#pragma unroll
    for (int k = 0; k < kMaxWarps; ++k) {
      moments[k] = k < p.warps_k ? of_warps[(warp_r * p.warps_k + k) * kStepRows + act] : make_float2(0, 0);
      mean = fmaf(moments[k].x, k < p.warps_k ? elements_of(k) : 0.0f, mean);
    }
    mean /= C;
#pragma unroll
    for (int k = 0; k < kMaxWarps; ++k) {
      const float off = moments[k].x - mean;
      if (k < p.warps_k) total += fmaf(off * off, elements_of(k), moments[k].y);
    }
    const float rstd = rsqrtf(total / C + p.eps);
#pragma unroll
    for (int r = 0; r < kStepRows; ++r) {
      if (r >= p.step_rows) continue;
      const float of_row = __shfl_sync(~0u, mean, 4 * r), factor = __shfl_sync(~0u, rstd, 4 * r);
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) x[r][j] = (x[r][j] - of_row) * factor;
    }
  }
  // Standardized rows times weight plus bias, rounded, as an operand. Lanes exchange their pieces through shared memory, 4 rows at
  // a time: where the partial sums lie, so a barrier must follow.
  __device__ __forceinline__ void apply_norm(const NormWeight& n, const Columns& x, Operand& out) const {
    constexpr int kRowBytes = kTransposeBytes / 4;
    const unsigned scratch = c.ring + at.partials + warp * kTransposeBytes;
    float w[kLaneElements], b[kLaneElements];
    widen<S>(n.weight, w);
    widen<S>(n.bias, b);
#pragma unroll
    for (int i = 0; i < 2 * kWarpTiles; ++i) out.at[i / 2][i % 2] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int first = 0; first < kStepRows; first += 4) {
      if (first >= p.step_rows) break;
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (first + r >= p.step_rows) break;
        float y[kLaneElements];
#pragma unroll
        for (int j = 0; j < kLaneElements; ++j) y[j] = fmaf(x[first + r][j], w[j], b[j]);
        store_shared(scratch + r * kRowBytes + lane * 16,
                     make_uint4(pack<S>(y[0], y[1]), pack<S>(y[2], y[3]), pack<S>(y[4], y[5]), pack<S>(y[6], y[7])));
      }
      __syncwarp();
      if (act / 4 * 4 != first || act >= p.step_rows) continue;
#pragma unroll
      for (int i = 0; i < 2 * kWarpTiles; ++i) {
        if (piece(i / 2, i % 2) * kLaneElements >= p.C) continue;
        out.at[i / 2][i % 2] = load_shared(scratch + act % 4 * kRowBytes + (4 * i + slice) * 16);
      }
    }
  }

  // ---- step_attention.cuh
  struct SoftmaxState;
  __device__ __forceinline__ void attend(int layer);
  template <int kLanes>
  __device__ __forceinline__ void attend_item(const StepItem& item, int slot);

  // ---- the order of a layer
  __device__ __forceinline__ void run() {
    for (int l = 0; l < p.L; ++l) {
      if constexpr (kParallel) {
        run_parallel_layer(l);
      } else {
        run_sequential_layer(l);
      }
      ++step;
    }
    if (p.logits != nullptr) run_head();
  }
  __device__ __forceinline__ void qkv_rows(int l, const Operand& input) {
    // Also of rows that the step has not: every tag tells its layer, however many rows the next launch has.
    all_rows(own.qkv, p.C, layers[l].qkv_bias, input,
             [&](int row, float sum) { store_relaxed(p.qkv + act * p.qkv_stride + row, tagged(sum, step + 1)); });
    stamp(l, FusedPhase::qkv_done);
  }
  __device__ __forceinline__ void await_hidden(Operand& first) const {
    await(p.control->head, static_cast<unsigned>(c.blocks) * (step + 1));
    load_operand(first, p.hidden, p.F, p.part);
  }
  __device__ __forceinline__ void await_attention(int l, Operand& attended) const {
    const auto heads = static_cast<unsigned>(p.step_rows * p.NH);
    await(p.control->attention, p.attention_before + heads * static_cast<unsigned>(l + 1));
    load_operand(attended, p.attended, p.q_size, p.q_size);
    stamp(l, FusedPhase::attention_here);
  }
  // MLP-down, a part of the columns at a time: the partial sums of rows of own.out. What is multiplied next is on its way
  // meanwhile: the next part of the hidden rows, and in the end what load_next() brings. `input` holds the first part.
  template <typename LoadNext>
  __device__ __forceinline__ void down_rows(int rows, Operand& input, const LoadNext& load_next) {
#pragma unroll 1
    for (int begin = 0; begin < p.F; begin += p.part) {
      Operand next;
      if (begin + p.part < p.F) {
        load_operand(next, p.hidden + begin + p.part, p.F, min(p.part, p.F - begin - p.part));
      } else {
        load_next(next);
      }
      multiply(rows, min(p.part, p.F - begin), input, begin > 0);
      input = next;
    }
  }
  // Adds the sums and the biases to the residual that this thread holds, and writes it to `stream`, p.x or p.x_mid.
  __device__ __forceinline__ void residual_rows(int rows, TaggedValue* stream, float biases) {
    finish_rows(rows, [&](int row, float sum) {
      x_own += sum + biases;
      store_relaxed(stream + act * p.x_stride + exchange_place(own.out.begin + row), tagged(x_own, step + 1));
    });
  }

  // h' = h + attention(norm1(h)) + mlp(norm2(h)). Attention is computed between MLP-up and MLP-down.
  __device__ __forceinline__ void run_parallel_layer(int l) {
    const Layer& w = layers[l];
    Operand input;
    {
      Operand mlp_input;
      {
        const NormWeight norm1 = load_norm(w.norm1_weight, w.norm1_bias),
                         norm2 = load_norm(w.norm2_weight, w.norm2_bias);
        Columns x;
        load_residual(l, x);
        standardize(x);
        apply_norm(norm1, x, input);
        apply_norm(norm2, x, mlp_input);
        sync();
      }
      stamp(l, FusedPhase::norms_done);
      qkv_rows(l, input);
      hidden_rows(l, mlp_input);
    }
    attend(l);
    const int rows = own.out.end - own.out.begin;
    if (rows <= 0) return;
    const unsigned short down_bias = load_bias(w.down_bias, own.out.begin, rows),
                         dense_bias = load_bias(w.dense_bias, own.out.begin, rows);
    await_hidden(input);
    stamp(l, FusedPhase::mlp_up_here);
    down_rows(rows, input, [&](Operand& next) { await_attention(l, next); });
    stamp(l, FusedPhase::down_done);
    multiply(rows, p.q_size, input, true);
    residual_rows(rows, p.x, bias_value(down_bias) + bias_value(dense_bias));
    stamp(l, FusedPhase::x_written);
  }
  // h1 = h + attention(norm1(h)); h' = h1 + mlp(norm2(h1)).
  __device__ __forceinline__ void run_sequential_layer(int l) {
    const Layer& w = layers[l];
    const int rows = own.out.end - own.out.begin;
    Operand input;
    {
      const NormWeight norm = load_norm(w.norm1_weight, w.norm1_bias);
      Columns x;
      load_residual(l, x);
      standardize(x);
      apply_norm(norm, x, input);
      sync();
    }
    stamp(l, FusedPhase::norms_done);
    qkv_rows(l, input);
    attend(l);
    if (rows > 0) {
      const unsigned short bias = load_bias(w.dense_bias, own.out.begin, rows);
      await_attention(l, input);
      multiply(rows, p.q_size, input, false);
      residual_rows(rows, p.x_mid, bias_value(bias));
      stamp(l, FusedPhase::middle_written);
    }
    {
      const NormWeight norm = load_norm(w.norm2_weight, w.norm2_bias);
      Columns x;
      load_tagged(p.x_mid, step + 1, x);
      stamp(l, FusedPhase::middle_here);
      standardize(x);
      apply_norm(norm, x, input);
      sync();
    }
    hidden_rows(l, input);
    if (rows <= 0) return;
    const unsigned short bias = load_bias(w.down_bias, own.out.begin, rows);
    await_hidden(input);
    stamp(l, FusedPhase::mlp_up_here);
    down_rows(rows, input, [](Operand&) {});
    residual_rows(rows, p.x, bias_value(bias));
    stamp(l, FusedPhase::x_written);
  }
  __device__ __forceinline__ void run_head() {
    const NormWeight norm = load_norm(layers[p.L].norm1_weight, layers[p.L].norm1_bias);
    Columns x;
    load_residual(p.L, x);
    standardize(x);
    Operand input;
    apply_norm(norm, x, input);
    sync();
    stamp(p.L, FusedPhase::norms_done);
    const int logits_row = p.row[act].logits;
    float* logits = p.logits + static_cast<std::int64_t>(logits_row) * p.V;
    all_rows(own.head, p.C, nullptr, input, [&](int row, float sum) {
      if (logits_row >= 0) logits[row] = sum;
    });
    stamp(p.L, FusedPhase::qkv_done);
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
