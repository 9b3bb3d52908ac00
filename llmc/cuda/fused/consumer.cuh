// The consumers of the fused decode kernel: from the ring to sums over rows, LayerNorms, attention, the next id.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/stream.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// QC: lines of a row of C elements that one warp owns.
template <typename S, int QC>
struct Consumer {
  static constexpr int kRows = kLinesAtOnce / QC;  // rows of C elements that a warp takes from a chunk
  static constexpr int kInputs = QC * kLane;       // of C, in this thread
  static constexpr int kHidden = 4 * QC * kLane;   // of F, in this thread

  const Common<S>& c;
  char* shared;
  SharedLayout at;
  const Layer<S>* layers;
  Shares own;
  int thread, warp, lane, threads, warp_k, warp_r;
  Cursor cursor;
  int turn = 0, reduction_turn = 0;
  unsigned step = 0;         // layers done in this launch
  unsigned item_parity = 0;  // of the next item of attention
  float x_own = 0;           // residual of row own.out.begin + thread
  bool stamping = false;

  __device__ __forceinline__ Consumer(const Common<S>& common, char* shared_memory, const SharedLayout& layout)
      : c(common),
        shared(shared_memory),
        at(layout),
        layers(reinterpret_cast<const Layer<S>*>(shared + layout.layers)) {
    const Parameters<S>& p = c.p;
    own = p.shares[c.block];
    thread = static_cast<int>(threadIdx.x);
    warp = thread / kWarpSize;
    lane = thread % kWarpSize;
    threads = p.warps_k * p.warps_r * kWarpSize;
    warp_k = warp % p.warps_k;
    warp_r = warp / p.warps_k;
  }

  __device__ __forceinline__ void sync() const { named_barrier_wait(1, threads); }
  __device__ __forceinline__ void stamp(int layer, int event) const {
    if (stamping && thread == 0) c.p.stamps[(layer * kFusedStamps + event) * c.blocks + c.block] = global_time();
  }
  // Piece i of the vectors whose inputs this thread holds: elements 8 piece ... 8 piece + 7.
  __device__ __forceinline__ int piece(int i) const { return (i * c.p.warps_k + warp_k) * kWarpSize + lane; }

  __device__ __forceinline__ unsigned begin_chunk() {
    c.wait_barrier(c.full + 8 * cursor.slot, cursor.parity);
    return c.ring + cursor.slot * c.p.stage_bytes;
  }
  __device__ __forceinline__ void end_chunk() {
    __syncwarp();
    if (lane == 0) hopper::mbarrier_arrive(c.empty + 8 * cursor.slot);
    cursor.advance(c.p.stages);
  }
  __device__ __forceinline__ float* partials() {
    return reinterpret_cast<float*>(shared + at.partials) + turn * c.p.warps_k * c.p.partial_rows;
  }

  // After the partial sums of up to partial_rows rows: finish(row, sum) in one thread a row. One barrier; the partial sums
  // of the next call go to the other buffer.
  template <typename Finish>
  __device__ __forceinline__ void finish_rows(int count, const Finish& finish) {
    sync();
    const float* partial = partials();
    if (thread < count) {
      float sum = partial[thread];
      for (int k = 1; k < c.p.warps_k; ++k) sum += partial[k * c.p.partial_rows + thread];
      finish(thread, sum);
    }
    turn ^= 1;
  }

  // Rows come two chunks at a time, because one butterfly then folds twice as many sums. A chunk is in registers, and its
  // slot free, before the arithmetic on the chunk before it begins: neither waits for the other. What lies outside of a row
  // stays 0; rows that do not exist are whatever the slot or the registers hold, and no sum of them is kept.

  // kPieces pieces of each of kEach rows, from `own` bytes into the next chunk; an offset below 0 is outside.
  template <int kEach, int kPieces>
  __device__ __forceinline__ void load_chunk(uint4 (&w)[kEach][kPieces], unsigned own, int row_bytes,
                                             const int (&offset)[kPieces]) {
    const unsigned from = begin_chunk() + own;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (offset[i] >= 0) w[j][i] = load_shared(from + j * row_bytes + offset[i]);
      }
    }
    end_chunk();
  }

  // `count` rows of C elements, times the inputs; at most partial_rows.
  __device__ __forceinline__ void narrow_rows(int count, const float (&input)[kInputs]) {
    const Parameters<S>& p = c.p;
    const int row_bytes = 2 * p.C, chunk_rows = kRows * p.warps_r;
    const unsigned own = warp_r * kRows * row_bytes;
    float* partial = partials() + warp_k * p.partial_rows;
    int offset[QC];
#pragma unroll
    for (int i = 0; i < QC; ++i) offset[i] = piece(i) * kLane < p.C ? piece(i) * 16 : -1;
    uint4 w[2][kRows][QC] = {};
    if (count > 0) load_chunk(w[0], own, row_bytes, offset);
    for (int first = 0; first < count; first += 2 * chunk_rows) {
      float sums[2 * kRows] = {};
      if (first + chunk_rows < count) load_chunk(w[1], own, row_bytes, offset);
#pragma unroll
      for (int i = 0; i < QC; ++i) {
#pragma unroll
        for (int j = 0; j < kRows; ++j) dot<S>(sums[j], w[0][j][i], input + i * kLane);
      }
      if (first + 2 * chunk_rows < count) load_chunk(w[0], own, row_bytes, offset);
#pragma unroll
      for (int i = 0; i < QC; ++i) {
#pragma unroll
        for (int j = 0; j < kRows; ++j) dot<S>(sums[kRows + j], w[1][j][i], input + i * kLane);
      }
      const float sum = fold(sums, lane);
      constexpr int kSpan = kWarpSize / (2 * kRows);
      const int j = lane / kSpan, target = first + warp_r * kRows + (j < kRows ? j : chunk_rows + j - kRows);
      if (lane % kSpan == 0 && target < count) partial[target] = sum;
    }
  }

  // `count` rows of F = 4 C elements, times the inputs. A chunk holds a row for each group of warps, or half a row.
  __device__ __forceinline__ void wide_rows(int count, const float (&input)[kHidden]) {
    const Parameters<S>& p = c.p;
    const int together = 2 / QC * p.warps_r;  // rows in two chunks
    const unsigned own = warp_r * 2 * p.F;
    float* partial = partials() + warp_k * p.partial_rows;
    int offset[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) offset[i] = QC > 1 || piece(i) * kLane < p.F ? piece(i) * 16 : -1;
    uint4 w[2][1][4] = {};
    if (count > 0) load_chunk(w[0], own, 0, offset);
    for (int first = 0; first < count; first += together) {
      float sums[2][4] = {}, rows[2];
      if (QC > 1 || first + p.warps_r < count) load_chunk(w[1], own, 0, offset);
#pragma unroll
      for (int i = 0; i < 4; ++i) dot<S>(sums[0][i], w[0][0][i], input + i * kLane);
      if (first + together < count) load_chunk(w[0], own, 0, offset);
#pragma unroll
      for (int i = 0; i < 4; ++i) dot<S>(sums[1][i], w[1][0][i], input + ((QC == 1 ? 0 : 4) + i) * kLane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[half] = (sums[half][0] + sums[half][1]) + (sums[half][2] + sums[half][3]);
      }
      if constexpr (QC == 1) {
        const float sum = fold(rows, lane);
        const int target = first + (lane / 16) * p.warps_r + warp_r;
        if (lane % 16 == 0 && target < count) partial[target] = sum;
      } else {
        const float sum = warp_sum(rows[0] + rows[1]);
        if (lane == 0 && first + warp_r < count) partial[first + warp_r] = sum;
      }
    }
  }

  struct NormWeights {
    uint4 weight1[QC], bias1[QC], weight2[QC], bias2[QC];
  };
  // Early, so that the loads are back when x is.
  __device__ __forceinline__ NormWeights load_norms(const Layer<S>& layer, bool both) const {
    NormWeights n;
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < QC; ++i) {
      const bool inside = piece(i) * kLane < c.p.C;
      const auto get = [&](const S* from) { return load_early(reinterpret_cast<const uint4*>(from) + piece(i)); };
      n.weight1[i] = inside ? get(layer.norm1_weight) : zero;
      n.bias1[i] = inside ? get(layer.norm1_bias) : zero;
      n.weight2[i] = inside && both ? get(layer.norm2_weight) : zero;
      n.bias2[i] = inside && both ? get(layer.norm2_bias) : zero;
    }
    return n;
  }
  // This thread's pieces of a vector of words, once they are those of `step`; asks again only for what is missing.
  template <int kPieces>
  __device__ __forceinline__ void load_vector(const Word* vector, int size, unsigned step_of,
                                              float (&x)[kPieces * kLane]) const {
    uint4 words[2 * kPieces] = {};
    unsigned missing = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) missing |= piece(i) * kLane < size ? 3u << 2 * i : 0;
    c.wait_for([&] {
#pragma unroll
      for (int k = 0; k < 2 * kPieces; ++k) {
        if ((missing >> k & 1) != 0) words[k] = load_words(vector + piece(k / 2) * kLane + k % 2 * 4);
      }
#pragma unroll
      for (int k = 0; k < 2 * kPieces; ++k) {
        const uint4 w = words[k];
        const bool complete = is_of(w.x, step_of) && is_of(w.y, step_of) && is_of(w.z, step_of) && is_of(w.w, step_of);
        if (complete) missing &= ~(1u << k);
      }
      return missing == 0;
    });
#pragma unroll
    for (int k = 0; k < 2 * kPieces; ++k) {
      x[4 * k] = value_of(words[k].x);
      x[4 * k + 1] = value_of(words[k].y);
      x[4 * k + 2] = value_of(words[k].z);
      x[4 * k + 3] = value_of(words[k].w);
    }
  }
  __device__ __forceinline__ void load_embedding(std::int32_t id, float (&x)[kInputs]) const {
#pragma unroll
    for (int i = 0; i < QC; ++i) {
      uint4 packed = make_uint4(0, 0, 0, 0);
      if (piece(i) * kLane < c.p.C) {
        packed =
            __ldg(reinterpret_cast<const uint4*>(c.p.embedding + static_cast<std::int64_t>(id) * c.p.C) + piece(i));
      }
      widen<S>(packed, x + i * kLane);
    }
  }
  // LayerNorm: x becomes norm1(x), other becomes norm2(x). Each warp takes mean and squared distances from it of its own
  // elements, and those of all warps are put together: as exact as two passes over all elements, with one barrier.
  __device__ __forceinline__ void normalize(const NormWeights& n, float (&x)[kInputs], float (&other)[kInputs]) {
    const float C = static_cast<float>(c.p.C);
    float sum = 0, count = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < QC; ++i) {
      const int first = (i * c.p.warps_k + warp_k) * kLineElements;
      count += static_cast<float>(max(0, min(kLineElements, c.p.C - first)));
    }
#pragma unroll
    for (int j = 0; j < kInputs; ++j) sum += x[j];  // 0 outside
    const float own_mean = count > 0 ? warp_sum(sum) / count : 0.0f;
#pragma unroll
    for (int i = 0; i < QC; ++i) {
      const bool inside = piece(i) * kLane < c.p.C;
#pragma unroll
      for (int j = 0; j < kLane; ++j) {
        const float d = inside ? x[i * kLane + j] - own_mean : 0.0f;
        squares = fmaf(d, d, squares);
      }
    }
    squares = warp_sum(squares);
    float4* states = c.flags.moments[reduction_turn];
    reduction_turn ^= 1;
    if (lane == 0) states[warp] = make_float4(own_mean, squares, count, 0);
    sync();
    const float4 part = lane < c.p.warps_k ? states[warp_r * c.p.warps_k + lane] : make_float4(0, 0, 0, 0);
    const float mean = warp_sum(part.x * part.z) / C, off = part.x - mean;
    const float rstd = rsqrtf(warp_sum(fmaf(off * off, part.z, part.y)) / C + c.p.eps);
#pragma unroll
    for (int j = 0; j < kInputs; ++j) x[j] -= mean;
#pragma unroll
    for (int i = 0; i < QC; ++i) {
      float w[kLane], b[kLane];
      widen<S>(n.weight2[i], w);
      widen<S>(n.bias2[i], b);
#pragma unroll
      for (int j = 0; j < kLane; ++j) other[i * kLane + j] = fmaf(x[i * kLane + j] * rstd, w[j], b[j]);
      widen<S>(n.weight1[i], w);
      widen<S>(n.bias1[i], b);
#pragma unroll
      for (int j = 0; j < kLane; ++j) x[i * kLane + j] = fmaf(x[i * kLane + j] * rstd, w[j], b[j]);
    }
  }

  // What all threads of the block wrote is announced by one addition.
  __device__ __forceinline__ void announce(Counter& counter) const {
    sync();
    if (thread == 0) add_release(&counter.value, 1);
  }
  __device__ __forceinline__ void await(const Counter& counter, unsigned target) const {
    if (thread == 0) c.wait_counter(counter, target);
    sync();
  }

  // The bias of the row whose sum this thread will finish: its bits, so that nothing waits for them before that.
  __device__ __forceinline__ unsigned short load_bias(const S* bias, Rows rows) const {
    const bool mine = bias != nullptr && thread < rows.end - rows.begin;
    return mine ? load_early(reinterpret_cast<const unsigned short*>(bias) + rows.begin + thread) : 0;
  }
  __device__ __forceinline__ static float bias_value(unsigned short bits) {
    float low, high;
    widen<S>(bits, low, high);
    return low;
  }

  // ---- attention ----

  // One token more in a group's running softmax.
  struct Running {
    float largest = -INFINITY, sum = 0, out[kLane] = {};
  };

  // Chunks of keys and values of one item, by all warps; LT lanes share a token.
  template <int LT>
  __device__ __forceinline__ void attend_cached(Running& r, const float (&q)[kLane], int tokens) {
    const Parameters<S>& p = c.p;
    constexpr int kGroups = kWarpSize / LT;
    const int warps = threads / kWarpSize, group = lane / LT, part = lane % LT;
    const int chunk_tokens = p.stage_bytes / (4 * p.HS), token_bytes = 2 * p.HS;
    const bool active = part * kLane < p.HS;
    for (int done = 0; done < tokens; done += chunk_tokens) {
      const int count = min(chunk_tokens, tokens - done);
      const unsigned keys = begin_chunk() + part * 16, values = keys + chunk_tokens * token_bytes;
      for (int first = warp * kGroups; first < count; first += 2 * warps * kGroups) {
        const int token[2] = {first + group, first + warps * kGroups + group};
        uint4 v[2];
        float score[2] = {0, 0};
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          uint4 k = make_uint4(0, 0, 0, 0);
          v[u] = k;
          if (active && token[u] < count) {
            k = load_shared(keys + token[u] * token_bytes);
            v[u] = load_shared(values + token[u] * token_bytes);
          }
          dot<S>(score[u], k, q);
        }
#pragma unroll
        for (int offset = LT / 2; offset > 0; offset /= 2) {
          score[0] += __shfl_xor_sync(~0u, score[0], offset);
          score[1] += __shfl_xor_sync(~0u, score[1], offset);
        }
#pragma unroll
        for (int u = 0; u < 2; ++u) score[u] = token[u] < count ? score[u] : -INFINITY;
        add_tokens(r, score[0], score[1], v[0], v[1]);
      }
      end_chunk();
    }
  }
  __device__ __forceinline__ static void add_tokens(Running& r, float score0, float score1, const uint4& v0,
                                                    const uint4& v1) {
    const float largest = fmaxf(r.largest, fmaxf(score0, score1));
    const float base = largest == -INFINITY ? 0.0f : largest;
    const float keep = exp2f(r.largest - base), p0 = exp2f(score0 - base), p1 = exp2f(score1 - base);
    float a[kLane], b[kLane];
    widen<S>(v0, a);
    widen<S>(v1, b);
    r.largest = largest;
    r.sum = fmaf(r.sum, keep, p0 + p1);
#pragma unroll
    for (int j = 0; j < kLane; ++j) r.out[j] = fmaf(r.out[j], keep, fmaf(p0, a[j], p1 * b[j]));
  }

  // An item: from the query that the helper left in shared memory to a softmax state a warp, which the helper merges.
  template <int LT>
  __device__ __forceinline__ void attend_item(int layer, int position, int item, int splits) {
    const Parameters<S>& p = c.p;
    const int HS = p.HS, split = item % splits, part = lane % LT;
    const bool active = part * kLane < HS;
    const Tokens tokens = split_tokens(position, splits, split);
    const S* added = reinterpret_cast<const S*>(shared + at.added);
    const float* query = reinterpret_cast<const float*>(shared + at.query);
    c.wait_barrier(c.query_here, item_parity);
    item_parity ^= 1;
    stamp(layer, 4);
    float q[kLane];
#pragma unroll
    for (int j = 0; j < kLane; ++j) q[j] = active ? query[part * kLane + j] : 0.0f;

    Running r;
    attend_cached<LT>(r, q, tokens.end - tokens.begin);
    if (split == splits - 1 && warp == 0) {  // the token itself
      uint4 k = make_uint4(0, 0, 0, 0), v = k;
      if (active && lane < LT) {
        k = *reinterpret_cast<const uint4*>(added + part * kLane);
        v = *reinterpret_cast<const uint4*>(added + HS + part * kLane);
      }
      float score = 0;
      dot<S>(score, k, q);
#pragma unroll
      for (int offset = LT / 2; offset > 0; offset /= 2) score += __shfl_xor_sync(~0u, score, offset);
      add_tokens(r, lane < LT ? score : -INFINITY, -INFINITY, v, make_uint4(0, 0, 0, 0));
    }
    // The groups of the warp.
#pragma unroll
    for (int offset = LT; offset < kWarpSize; offset *= 2) {
      const float other = __shfl_xor_sync(~0u, r.largest, offset), largest = fmaxf(r.largest, other);
      const float base = largest == -INFINITY ? 0.0f : largest, keep = exp2f(r.largest - base);
      r.sum *= keep;
      r.sum += __shfl_xor_sync(~0u, r.sum, offset);
#pragma unroll
      for (int j = 0; j < kLane; ++j) {
        r.out[j] *= keep;
        r.out[j] += __shfl_xor_sync(~0u, r.out[j], offset);
      }
      r.largest = largest;
    }
    float* state = reinterpret_cast<float*>(shared + at.states) + warp * (HS + 2);
    if (lane < LT && active) {
#pragma unroll
      for (int j = 0; j < kLane; ++j) state[2 + part * kLane + j] = r.out[j];
    }
    if (lane == 0) state[0] = r.largest, state[1] = r.sum;
    __syncwarp();
    if (lane == 0) hopper::mbarrier_arrive(c.item_done);
  }

  __device__ __forceinline__ void attend(int layer, int position, int splits) {
    const Parameters<S>& p = c.p;
    for (int item = c.first_item(layer); item < p.NH * splits; item += c.blocks) {
      if (p.HS <= 32) {
        attend_item<4>(layer, position, item, splits);
      } else if (p.HS <= 64) {
        attend_item<8>(layer, position, item, splits);
      } else if (p.HS <= 128) {
        attend_item<16>(layer, position, item, splits);
      } else {
        attend_item<32>(layer, position, item, splits);
      }
    }
  }

  // ---- a layer ----

  __device__ __forceinline__ void run_layer(int l, int token, std::int32_t id) {
    const Parameters<S>& p = c.p;
    const Layer<S>& w = layers[l];
    const int position = p.position + token, splits = splits_at(position, p.max_splits);
    float input[kInputs], other[kInputs];
    {
      const NormWeights norms = load_norms(w, true);
      if (l == 0 && !(p.layer_only && token > 0)) {
        load_embedding(id, input);
        const int row = own.out.begin + thread;
        if (row < own.out.end) x_own = to_float(p.embedding[static_cast<std::int64_t>(id) * p.C + row]);
      } else {
        load_vector<QC>(p.x, p.C, step, input);
      }
      stamp(l, 0);
      normalize(norms, input, other);
      stamp(l, 1);
    }
    {
      const unsigned short bias = load_bias(w.qkv_bias, own.qkv);
      const int rows = own.qkv.end - own.qkv.begin;
      narrow_rows(rows, input);
      finish_rows(rows, [&](int row, float sum) {
        store_word(p.qkv + own.qkv.begin + row, word_of(sum + bias_value(bias), step + 1));
      });
      stamp(l, 2);
    }
    {
      const unsigned short bias = load_bias(w.up_bias, own.up);
      const int rows = own.up.end - own.up.begin;
      narrow_rows(rows, other);
      const bool lost = p.lose_an_arrival && c.block == 0 && token == p.count - 1;
      finish_rows(rows, [&](int row, float sum) {
        if (!lost) store_word(p.h + own.up.begin + row, word_of(gelu(sum + bias_value(bias)), step + 1));
      });
      stamp(l, 3);
    }
    attend(l, position, splits);
    stamp(l, 5);
    const int rows = own.out.end - own.out.begin;
    float below = 0;  // what MLP-down adds to this thread's row
    const unsigned short down_bias = load_bias(w.down_bias, own.out), dense_bias = load_bias(w.dense_bias, own.out);
    if (rows > 0 && !p.layer_only) {
      float hidden[kHidden];
      load_vector<4 * QC>(p.h, p.F, step + 1, hidden);
      stamp(l, 6);
      wide_rows(rows, hidden);
      finish_rows(rows, [&](int, float sum) { below = sum + bias_value(down_bias); });
      stamp(l, 7);
    }
    if (rows > 0) {
      load_vector<QC>(p.attention, p.C, step + 1, input);
      stamp(l, 8);
      narrow_rows(rows, input);
      finish_rows(rows, [&](int row, float sum) {
        x_own += (sum + bias_value(dense_bias)) + below;
        store_word(p.x + own.out.begin + row, word_of(x_own, step + 1));
      });
      stamp(l, 9);
    }
    ++step;
  }

  // ---- the head ----

  // Logits of this block's rows, and the greatest of them.
  __device__ __forceinline__ void run_head(int token) {
    const Parameters<S>& p = c.p;
    float input[kInputs], unused[kInputs];
    const NormWeights norms = load_norms(layers[p.L], false);
    load_vector<QC>(p.x, p.C, step, input);
    stamp(p.L, 0);
    normalize(norms, input, unused);
    stamp(p.L, 1);
    // Asked early: the answer comes from the host's memory. It may be a token late.
    const bool cancelled = c.block == 0 && thread == 0 && load_system(&p.mailbox->cancel) == p.serial;
    std::uint64_t best = 0;
    unsigned bad = 0;
    const int chunk_rows = kRows * p.warps_r, batch = p.partial_rows / chunk_rows * chunk_rows;
    const std::int64_t limit = p.sampling.vocab_limit > 0 ? p.sampling.vocab_limit : p.V;
    for (int first = own.head.begin; first < own.head.end; first += batch) {
      const int rows = min(batch, own.head.end - first);
      narrow_rows(rows, input);
      finish_rows(rows, [&](int row, float logit) {
        const int id = first + row;
        p.logits[id] = logit;
        if (id >= limit) return;
        const std::uint64_t rank = sampler_detail::rank_of(logit, id);
        best = rank > best ? rank : best;
        bad |= isnan(logit) ? BlockBest::kNotANumber : logit == INFINITY ? BlockBest::kInfinite : 0u;
      });
    }
    stamp(p.L, 2);
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      const std::uint64_t other = __shfl_xor_sync(~0u, best, offset);
      best = other > best ? other : best;
      bad |= __shfl_xor_sync(~0u, bad, offset);
    }
    ulonglong2* words = reinterpret_cast<ulonglong2*>(shared + at.sampler);
    if (lane == 0) words[warp] = make_ulonglong2(best, bad);
    sync();
    if (thread == 0 && p.sampling.greedy) {
      for (int w = 1; w < threads / kWarpSize; ++w) {
        best = words[w].x > best ? words[w].x : best;
        bad |= static_cast<unsigned>(words[w].y);
      }
      if (cancelled) bad |= BlockBest::kCancelled;
      store_word(p.head_best + c.block, BlockBest::word(best, bad, token));
    }
    if (!p.sampling.greedy) {
      announce(p.control->head);
      if (c.block == 0) choose(token, cancelled);
    }
    stamp(p.L, 3);
  }

  // How the launch goes on after a token, for which no other thread needs to be asked.
  __device__ __forceinline__ FusedEnd end_after(const SampledToken& chosen, int token, bool cancelled) const {
    const Parameters<S>& p = c.p;
    FusedEnd end = token + 1 == p.count ? FusedEnd::length : FusedEnd::running;
    if (cancelled || chosen.error != SampleError::none) end = FusedEnd::cancelled;
    for (int i = 0; i < p.num_stop_ids; ++i) {
      if (p.stop_ids[i] == chosen.id && chosen.error == SampleError::none) end = FusedEnd::stop_id;
    }
    return end;
  }
  __device__ __forceinline__ void tell_host(const SampledToken& chosen, int token, FusedEnd end) const {
    const Parameters<S>& p = c.p;
    const std::uint64_t serial = static_cast<std::uint64_t>(p.serial) << 32;
    int tokens = token + 1;
    if (chosen.error != SampleError::none) {
      store_system(&p.mailbox->error,
                   serial | static_cast<unsigned>(Fault::sampling) | static_cast<unsigned>(chosen.error) << 8);
      --tokens;
    } else {
      store_system_relaxed(&p.mailbox->ids[token], serial | static_cast<unsigned>(chosen.id));
    }
    if (end != FusedEnd::running) {
      store_system(&p.mailbox->end, serial | static_cast<unsigned>(end) << 24 | static_cast<unsigned>(tokens));
    }
  }

  // The id that follows, or -1 if there is none. Greedy: every block looks at the best of all blocks for itself.
  __device__ __forceinline__ std::int32_t greedy_id(int token) {
    constexpr int kAhead = 8;
    const Parameters<S>& p = c.p;
    SampledToken chosen{0, SampleError::none};
    FusedEnd end = FusedEnd::running;
    bool came = true;
    if (warp == 0) {
      std::uint64_t best = 0;
      unsigned flags = 0;
      for (int first = lane; first - lane < c.blocks; first += kAhead * kWarpSize) {
        std::uint64_t words[kAhead];
        came = came && c.wait_for([&] {
          bool good = true;
#pragma unroll
          for (int u = 0; u < kAhead; ++u) words[u] = load_word(p.head_best + min(first + u * kWarpSize, c.blocks - 1));
#pragma unroll
          for (int u = 0; u < kAhead; ++u) good = good && BlockBest::is_of(words[u], token);
          return good;
        });
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          const std::uint64_t rank = BlockBest::rank(words[u]);
          best = rank > best ? rank : best;
          flags |= BlockBest::flags(words[u]);
        }
      }
#pragma unroll
      for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
        const std::uint64_t other = __shfl_xor_sync(~0u, best, offset);
        best = other > best ? other : best;
        flags |= __shfl_xor_sync(~0u, flags, offset);
      }
      came = __all_sync(~0u, came) != 0;
      chosen.id = sampler_detail::id_of(best);
      if (best <= ~0u || sampler_detail::logit_of(static_cast<std::uint32_t>(best >> 32)) == -INFINITY) {
        chosen = {0, SampleError::nothing_finite};
      }
      if ((flags & BlockBest::kInfinite) != 0) chosen = {0, SampleError::infinite};
      if ((flags & BlockBest::kNotANumber) != 0) chosen = {0, SampleError::not_a_number};
      end = end_after(chosen, token, (flags & BlockBest::kCancelled) != 0);
      if (lane == 0) c.flags.id = came && end == FusedEnd::running ? chosen.id : -1;
    }
    sync();
    if (c.block == 0 && thread == 0 && came) tell_host(chosen, token, end);
    return *const_cast<volatile std::int32_t*>(&c.flags.id);
  }

  // Else block 0 picks it and tells the others.
  __device__ __forceinline__ void choose(int token, bool cancelled) {
    const Parameters<S>& p = c.p;
    await(p.control->head, static_cast<unsigned>(c.blocks) * static_cast<unsigned>(token + 1));
    if (thread >= kSamplerThreads) return;
    auto& scratch = *reinterpret_cast<SamplerScratch<kSamplerThreads>*>(shared + at.sampler);
    const SampledToken chosen =
        sample_block<kSamplerThreads, 2>(p.logits, p.V, p.sampling, p.position + token + 1, thread, scratch);
    if (thread != 0) return;
    const FusedEnd end = end_after(chosen, token, cancelled);
    const unsigned stop = end != FusedEnd::running ? 1u << 31 : 0u;
    store_word(&p.control->next, static_cast<std::uint64_t>(token + 1) << 32 | stop | static_cast<unsigned>(chosen.id));
    tell_host(chosen, token, end);
  }
  __device__ __forceinline__ std::int32_t sampled_id(int token) {
    if (thread == 0) {
      std::uint64_t word = 0;
      const bool came = c.wait_for([&] {
        word = load_word(&c.p.control->next);
        return static_cast<int>(word >> 32) == token + 1;
      });
      const std::int32_t id = static_cast<std::int32_t>(word & 0x7fffffffu);
      c.flags.id = !came || (word & 0x80000000u) != 0 ? -1 : id;
    }
    sync();
    return *const_cast<volatile std::int32_t*>(&c.flags.id);
  }

  __device__ __forceinline__ void run() {
    const Parameters<S>& p = c.p;
    std::int32_t id = p.first_id;
    for (int token = 0; token < p.count && id >= 0; ++token) {
      stamping = p.stamps != nullptr && token == p.count - 1;
      for (int l = 0; l < p.L; ++l) run_layer(l, token, id);
      if (p.layer_only) {
        if (c.block == 0 && thread == 0) {
          const std::uint64_t serial = static_cast<std::uint64_t>(p.serial) << 32;
          store_system(&p.mailbox->ids[token], serial);
          if (token + 1 == p.count) {
            store_system(&p.mailbox->end,
                         serial | static_cast<unsigned>(FusedEnd::length) << 24 | static_cast<unsigned>(p.count));
          }
        }
        id = 0;
        continue;
      }
      run_head(token);
      id = p.sampling.greedy ? greedy_id(token) : sampled_id(token);
    }
    if (thread == 0) *const_cast<volatile int*>(&c.flags.stop) = 1;
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
