// The consumers of the fused decode kernel: from the ring to sums over rows, LayerNorms, attention, the next id.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused_stream.cuh"

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

  // Two chunks at a time, so that the latencies of one hide behind the other: what is in registers is released at once.

  // `count` rows of C elements, times the inputs; at most partial_rows.
  __device__ __forceinline__ void narrow_rows(int count, const float (&input)[kInputs]) {
    const Parameters<S>& p = c.p;
    const int row_bytes = 2 * p.C, chunk_rows = kRows * p.warps_r;
    float* partial = partials() + warp_k * p.partial_rows;
    bool inside[QC];
#pragma unroll
    for (int i = 0; i < QC; ++i) inside[i] = piece(i) * kLane < p.C;
    for (int first = 0; first < count; first += 2 * chunk_rows) {
      const int row = first + warp_r * kRows;  // this warp's first
      uint4 w[2][kRows][QC];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int left = count - row - half * chunk_rows;
        const bool exists = first + half * chunk_rows < count;
        const unsigned from =
            exists ? begin_chunk() + warp_r * kRows * row_bytes + (warp_k * kWarpSize + lane) * 16 : 0;
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
#pragma unroll
          for (int i = 0; i < QC; ++i) {
            w[half][j][i] = make_uint4(0, 0, 0, 0);
            if (inside[i] && j < left) w[half][j][i] = load_shared(from + j * row_bytes + i * p.warps_k * 512);
          }
        }
        if (exists) end_chunk();
      }
      float sums[2 * kRows] = {};
#pragma unroll
      for (int i = 0; i < QC; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * kRows; ++j) dot<S>(sums[j], w[j / kRows][j % kRows][i], input + i * kLane);
      }
      const float sum = fold(sums, lane);
      constexpr int kSpan = kWarpSize / (2 * kRows);
      const int j = lane / kSpan, target = row + (j < kRows ? j : chunk_rows + j - kRows);
      if (lane % kSpan == 0 && target < count) partial[target] = sum;
    }
  }

  // `count` rows of F = 4 C elements, times the inputs. A chunk holds a row for each group of warps, or half a row.
  __device__ __forceinline__ void wide_rows(int count, const float (&input)[kHidden]) {
    constexpr int kTogether = 2 / QC;  // rows of this warp in two chunks
    const Parameters<S>& p = c.p;
    float* partial = partials() + warp_k * p.partial_rows;
    bool inside[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) inside[i] = QC > 1 || piece(i) * kLane < p.F;
    for (int first = 0; first < count; first += kTogether * p.warps_r) {
      uint4 w[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int begin = first + (QC == 1 ? half * p.warps_r : 0);  // rows of the chunk
        const bool exists = begin < count, mine = begin + warp_r < count;
        const unsigned from = exists ? begin_chunk() + warp_r * 2 * p.F + (warp_k * kWarpSize + lane) * 16 : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[half][i] = make_uint4(0, 0, 0, 0);
          if (inside[i] && mine) w[half][i] = load_shared(from + i * p.warps_k * 512);
        }
        if (exists) end_chunk();
      }
      float sums[2][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          dot<S>(sums[half][i], w[half][i], input + ((QC == 1 ? 0 : half * 4) + i) * kLane);
        }
      }
      float rows[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rows[half] = (sums[half][0] + sums[half][1]) + (sums[half][2] + sums[half][3]);
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

  // The sum over all inputs of a row: over the warps of this thread's group.
  __device__ __forceinline__ float group_sum(float value) {
    float* sums = c.flags.reduction[reduction_turn];
    reduction_turn ^= 1;
    value = warp_sum(value);
    if (lane == 0) sums[warp] = value;
    sync();
    float total = 0;
    for (int k = 0; k < c.p.warps_k; ++k) total += sums[warp_r * c.p.warps_k + k];
    return total;
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
  // This thread's part of a vector [C] whose words carry the number of layers done when they were written.
  __device__ __forceinline__ void load_vector(const std::uint64_t* vector, unsigned epoch, float (&x)[kInputs]) const {
#pragma unroll
    for (int i = 0; i < QC; ++i) {
      const bool inside = piece(i) * kLane < c.p.C;
      std::uint64_t words[kLane];
      const std::uint64_t* from = vector + piece(i) * kLane;
      const auto complete = [&] {
        bool good = true;
#pragma unroll
        for (int j = 0; j < kLane; j += 2) load_words(words[j], words[j + 1], from + j);
#pragma unroll
        for (int j = 0; j < kLane; ++j) good = good && static_cast<unsigned>(words[j] >> 32) == epoch;
        return good;
      };
      if (inside) c.wait_for(complete);
#pragma unroll
      for (int j = 0; j < kLane; ++j) {
        x[i * kLane + j] = inside ? __uint_as_float(static_cast<unsigned>(words[j])) : 0.0f;
      }
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
  // LayerNorm in two passes: x becomes norm1(x), other becomes norm2(x).
  __device__ __forceinline__ void normalize(const NormWeights& n, float (&x)[kInputs], float (&other)[kInputs]) {
    const float C = static_cast<float>(c.p.C);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kInputs; ++j) sum += x[j];
    const float mean = group_sum(sum) / C;
    sum = 0;
#pragma unroll
    for (int i = 0; i < QC; ++i) {
      const bool inside = piece(i) * kLane < c.p.C;
#pragma unroll
      for (int j = 0; j < kLane; ++j) {
        const float d = inside ? x[i * kLane + j] - mean : 0.0f;
        x[i * kLane + j] = d;
        sum = fmaf(d, d, sum);
      }
    }
    const float rstd = rsqrtf(group_sum(sum) / C + c.p.eps);
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
    const unsigned target = static_cast<unsigned>(c.blocks) * (step + 1);
    const int position = p.position + token, splits = splits_at(position, p.max_splits);
    float input[kInputs], other[kInputs];
    {
      const NormWeights norms = load_norms(w, true);
      if (l == 0 && !(p.layer_only && token > 0)) {
        load_embedding(id, input);
        const int row = own.out.begin + thread;
        if (row < own.out.end) x_own = to_float(p.embedding[static_cast<std::int64_t>(id) * p.C + row]);
      } else {
        load_vector(p.x, step, input);
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
        store_word(p.qkv + own.qkv.begin + row,
                   static_cast<std::uint64_t>(step + 1) << 32 | __float_as_uint(sum + bias_value(bias)));
      });
      stamp(l, 2);
    }
    {
      const unsigned short bias = load_bias(w.up_bias, own.up);
      const int rows = own.up.end - own.up.begin;
      narrow_rows(rows, other);
      finish_rows(rows, [&](int row, float sum) { p.h[own.up.begin + row] = gelu(sum + bias_value(bias)); });
      if (!(p.lose_an_arrival && c.block == 0 && token == p.count - 1)) announce(p.control->up);
      stamp(l, 3);
    }
    attend(l, position, splits);
    stamp(l, 5);
    const int rows = own.out.end - own.out.begin;
    float below = 0;  // what MLP-down adds to this thread's row
    const unsigned short down_bias = load_bias(w.down_bias, own.out), dense_bias = load_bias(w.dense_bias, own.out);
    if (rows > 0 && !p.layer_only) {
      await(p.control->up, target);
      stamp(l, 6);
      float hidden[kHidden];
#pragma unroll
      for (int i = 0; i < 4 * QC; ++i) {
        float4 a = make_float4(0, 0, 0, 0), b = a;
        if (piece(i) * kLane < p.F) {
          const float4* from = reinterpret_cast<const float4*>(p.h + piece(i) * kLane);
          a = __ldcg(from);
          b = __ldcg(from + 1);
        }
        float* to = hidden + i * kLane;
        to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
        to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
      }
      stamp(l, 7);
      wide_rows(rows, hidden);
      finish_rows(rows, [&](int, float sum) { below = sum + bias_value(down_bias); });
      stamp(l, 8);
    }
    if (rows > 0) {
      load_vector(p.attention, step + 1, input);
      stamp(l, 9);
      narrow_rows(rows, input);
      finish_rows(rows, [&](int row, float sum) {
        x_own += (sum + bias_value(dense_bias)) + below;
        store_word(p.x + own.out.begin + row, static_cast<std::uint64_t>(step + 1) << 32 | __float_as_uint(x_own));
      });
      stamp(l, 10);
    }
    ++step;
  }

  // ---- the head ----

  // Logits of this block's rows, and the greatest of them.
  __device__ __forceinline__ void run_head(int token) {
    const Parameters<S>& p = c.p;
    float input[kInputs], unused[kInputs];
    const NormWeights norms = load_norms(layers[p.L], false);
    load_vector(p.x, step, input);
    stamp(p.L, 0);
    normalize(norms, input, unused);
    stamp(p.L, 1);
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
        bad |= isnan(logit) ? 1u : logit == INFINITY ? 2u : 0u;
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
    if (thread == 0) {
      for (int w = 1; w < threads / kWarpSize; ++w) {
        best = words[w].x > best ? words[w].x : best;
        bad |= static_cast<unsigned>(words[w].y);
      }
      p.head_best[c.block] = make_ulonglong2(best, bad);
    }
    announce(p.control->head);
    if (c.block == 0) choose(token);
    stamp(p.L, 3);
  }

  // Block 0 picks the next id and tells the host and the other blocks.
  __device__ __forceinline__ void choose(int token) {
    const Parameters<S>& p = c.p;
    await(p.control->head, static_cast<unsigned>(c.blocks) * static_cast<unsigned>(token + 1));
    SampledToken chosen{0, SampleError::none};
    if (p.sampling.greedy) {
      if (warp == 0) {
        std::uint64_t best = 0;
        unsigned bad = 0;
        for (int b = lane; b < c.blocks; b += kWarpSize) {
          const ulonglong2 word = __ldcg(p.head_best + b);
          best = word.x > best ? word.x : best;
          bad |= static_cast<unsigned>(word.y);
        }
#pragma unroll
        for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
          const std::uint64_t other = __shfl_xor_sync(~0u, best, offset);
          best = other > best ? other : best;
          bad |= __shfl_xor_sync(~0u, bad, offset);
        }
        chosen.id = sampler_detail::id_of(best);
        if (best == 0 || sampler_detail::logit_of(static_cast<std::uint32_t>(best >> 32)) == -INFINITY) {
          chosen = {0, SampleError::nothing_finite};
        }
        if ((bad & 2u) != 0) chosen = {0, SampleError::infinite};
        if ((bad & 1u) != 0) chosen = {0, SampleError::not_a_number};
      }
    } else if (thread < kSamplerThreads) {
      auto& scratch = *reinterpret_cast<SamplerScratch<kSamplerThreads>*>(shared + at.sampler);
      chosen = sample_block<kSamplerThreads, 2>(p.logits, p.V, p.sampling, p.position + token + 1, thread, scratch);
    }
    if (thread != 0) return;
    const std::uint64_t serial = static_cast<std::uint64_t>(p.serial) << 32;
    FusedEnd end = token + 1 == p.count ? FusedEnd::length : FusedEnd::running;
    if (load_system(&p.mailbox->cancel) == p.serial) end = FusedEnd::cancelled;
    for (int i = 0; i < p.num_stop_ids; ++i) {
      if (p.stop_ids[i] == chosen.id) end = FusedEnd::stop_id;
    }
    int tokens = token + 1;
    if (chosen.error != SampleError::none) {
      store_system(&p.mailbox->error,
                   serial | static_cast<unsigned>(Fault::sampling) | static_cast<unsigned>(chosen.error) << 8);
      end = FusedEnd::cancelled;
      --tokens;
    } else {
      store_system(&p.mailbox->ids[token], serial | static_cast<unsigned>(chosen.id));
    }
    if (end != FusedEnd::running) {
      store_system(&p.mailbox->end, serial | static_cast<unsigned>(end) << 24 | static_cast<unsigned>(tokens));
    }
    const unsigned stop = end != FusedEnd::running ? 1u << 31 : 0u;
    store_word(&p.control->next, static_cast<std::uint64_t>(token + 1) << 32 | stop | static_cast<unsigned>(chosen.id));
  }

  // The id that follows, or -1 if there is none.
  __device__ __forceinline__ std::int32_t next_id(int token) {
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
    const std::int32_t id = *const_cast<volatile std::int32_t*>(&c.flags.id);
    return id;
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
      id = next_id(token);
    }
    if (thread == 0) *const_cast<volatile int*>(&c.flags.stop) = 1;
  }
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
