// GEMV over the chunks of the ring.
#pragma once

#include "llmc/cuda/fused/consumer.cuh"
#include "llmc/cuda/hw/warp_fold.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// Two chunks are multiplied at a time, because one warp_fold() then sums twice as many rows. A chunk is loaded to
// registers, and its stage released, before the arithmetic on the previous chunk begins, so that loads and arithmetic
// overlap. Elements past the end of a row are 0. Rows past the last one are stale shared memory or registers, and their
// sums are discarded: that costs less than a branch.

// Makes kLoads loads of each of kEach rows, which begin `own_bytes` into the next chunk. A negative offset is past the
// end of a row: not loaded.
template <typename K>
template <int kEach, int kLoads>
__device__ __forceinline__ void Consumer<K>::load_chunk(uint4 (&w)[kEach][kLoads], unsigned own_bytes, int row_bytes,
                                                        const int (&offset)[kLoads]) {
  const unsigned from = begin_chunk() + own_bytes;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (offset[i] >= 0) w[j][i] = load_shared(from + j * row_bytes + offset[i]);
    }
  }
  end_chunk();
}

// Partial sums of `count` rows (at most partial_rows) of C elements times `input`.
template <typename K>
__device__ __forceinline__ void Consumer<K>::narrow_rows(int count, const float (&input)[kInputs]) {
  const Parameters& p = c.p;
  const int row_bytes = 2 * p.C, chunk_rows = kRows * p.warps_r;
  const unsigned own_bytes = warp_r * kRows * row_bytes;
  float* partial =
      reinterpret_cast<float*>(shared + at.partials) + (partial_buffer * p.warps_k + warp_k) * p.partial_rows;
  int offset[kRowLoads];
#pragma unroll
  for (int i = 0; i < kRowLoads; ++i) offset[i] = piece(i) * kLaneElements < p.C ? piece(i) * 16 : -1;
  uint4 w[2][kRows][kRowLoads] = {};
  if (count > 0) load_chunk(w[0], own_bytes, row_bytes, offset);
  for (int first = 0; first < count; first += 2 * chunk_rows) {
    float sums[2 * kRows] = {};
    if (first + chunk_rows < count) load_chunk(w[1], own_bytes, row_bytes, offset);
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) dot<S>(sums[j], w[0][j][i], input + i * kLaneElements);
    }
    if (first + 2 * chunk_rows < count) load_chunk(w[0], own_bytes, row_bytes, offset);
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) dot<S>(sums[kRows + j], w[1][j][i], input + i * kLaneElements);
    }
    const float sum = warp_fold(sums, lane);
    constexpr int kSpan = kWarpSize / (2 * kRows);
    const int j = lane / kSpan, target = first + warp_r * kRows + (j < kRows ? j : chunk_rows + j - kRows);
    if (lane % kSpan == 0 && target < count) partial[target] = sum;
  }
}

// The same for rows of F = 4 C elements. A chunk holds one row for each group of warps, or half a row.
template <typename K>
__device__ __forceinline__ void Consumer<K>::wide_rows(int count, const float (&input)[kHidden]) {
  const Parameters& p = c.p;
  const int rows_at_once = 2 / kRowLoads * p.warps_r;  // rows in two chunks
  const unsigned own_bytes = warp_r * 2 * p.F;
  float* partial =
      reinterpret_cast<float*>(shared + at.partials) + (partial_buffer * p.warps_k + warp_k) * p.partial_rows;
  int offset[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) offset[i] = kRowLoads > 1 || piece(i) * kLaneElements < p.F ? piece(i) * 16 : -1;
  uint4 w[2][1][4] = {};
  if (count > 0) load_chunk(w[0], own_bytes, 0, offset);
  for (int first = 0; first < count; first += rows_at_once) {
    float sums[2][4] = {}, rows[2];
    if (kRowLoads > 1 || first + p.warps_r < count) load_chunk(w[1], own_bytes, 0, offset);
#pragma unroll
    for (int i = 0; i < 4; ++i) dot<S>(sums[0][i], w[0][0][i], input + i * kLaneElements);
    if (first + rows_at_once < count) load_chunk(w[0], own_bytes, 0, offset);
#pragma unroll
    for (int i = 0; i < 4; ++i) dot<S>(sums[1][i], w[1][0][i], input + ((kRowLoads == 1 ? 0 : 4) + i) * kLaneElements);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half] = (sums[half][0] + sums[half][1]) + (sums[half][2] + sums[half][3]);
    }
    if constexpr (kRowLoads == 1) {
      const float sum = warp_fold(rows, lane);
      const int target = first + (lane / 16) * p.warps_r + warp_r;
      if (lane % 16 == 0 && target < count) partial[target] = sum;
    } else {
      const float sum = warp_sum(rows[0] + rows[1]);
      if (lane == 0 && first + warp_r < count) partial[first + warp_r] = sum;
    }
  }
}

// Adds the warps' partial sums of up to partial_rows rows and calls finish(row, sum), one thread a row. One barrier is
// enough: the next partial sums go to the other buffer, or a norm's barrier comes before them.
template <typename K>
template <typename Finish>
__device__ __forceinline__ void Consumer<K>::finish_rows(int count, const Finish& finish) {
  sync();
  const float* partial =
      reinterpret_cast<const float*>(shared + at.partials) + partial_buffer * c.p.warps_k * c.p.partial_rows;
  if (thread < count) {
    float of_warp[kMaxWarps];  // all loads before the first addition
#pragma unroll
    for (int k = 0; k < kMaxWarps; ++k) of_warp[k] = k < c.p.warps_k ? partial[k * c.p.partial_rows + thread] : 0.0f;
    float sum = of_warp[0];
#pragma unroll
    for (int k = 1; k < kMaxWarps; ++k) sum += of_warp[k];
    finish(thread, sum);
  }
  partial_buffer ^= 1;
}

// Scale and bias of the row that this thread finishes. The bias stays in bits: converting it early would wait for the
// load.
template <typename K>
struct Consumer<K>::RowTerms {
  unsigned short bias;
  float scale;

  __device__ __forceinline__ float of(float sum) const {
    float low, high;
    widen<S>(bias, low, high);
    if constexpr (K::kQuantized) return fmaf(sum, scale, low);
    return sum + low;
  }
};
template <typename K>
__device__ __forceinline__ typename Consumer<K>::RowTerms Consumer<K>::load_terms(const S* bias, const float* scales,
                                                                                  RowRange rows) const {
  const bool mine = thread < rows.end - rows.begin;
  RowTerms terms{0, 1};
  if (mine && bias != nullptr)
    terms.bias = load_early(reinterpret_cast<const unsigned short*>(bias) + rows.begin + thread);
  if constexpr (K::kQuantized)
    terms.scale = mine ? load_scale(scales == nullptr ? nullptr : scales + rows.begin + thread) : 1;
  return terms;
}
// 1 where `scale` is null.
template <typename K>
__device__ __forceinline__ float Consumer<K>::load_scale(const float* scale) {
  return scale != nullptr ? load_early(scale) : 1.0f;
}

// Partial sums of `count` rows of `size` elements: C if kLoads is kRowLoads, else F.
template <typename K>
template <int kLoads>
__device__ __forceinline__ void Consumer<K>::multiply_rows(int count, int size,
                                                           float (&input)[kLoads * kLaneElements]) {
  if constexpr (K::kQuantized) {
    multiply_stream<typename K::Format, kLoads>(count, size, input, false);
  } else if constexpr (kLoads == kRowLoads) {
    narrow_rows(count, input);
  } else {
    wide_rows(count, input);
  }
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
