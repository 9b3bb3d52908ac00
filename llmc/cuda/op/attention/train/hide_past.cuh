// What kernels share that hide keys in front of a query: those before its window or its document.
#pragma once

#include <cstdint>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/attention/train/mma.cuh"
#include "llmc/cuda/op/attention/train/paths.h"

namespace weft::cuda {

// The number of rows before the first, of [0, rows), for which `holds` does not; no later one holds either. All lanes of a
// warp call it and try 32 rows at a time.
template <typename Predicate>
__device__ int leading_rows(int rows, const Predicate& holds) {
  int begin = 0, end = rows;  // every row before `begin` holds, none from `end` on
  while (begin < end) {
    const int step = (end - begin + kWarpSize - 1) / kWarpSize;
    const int row = begin + static_cast<int>(threadIdx.x % kWarpSize) * step;
    const int held = __popc(__ballot_sync(~0u, row < end && holds(row)));
    end = min(end, begin + held * step);
    if (held > 0) begin += (held - 1) * step + 1;
  }
  return begin;
}

// The number of queries of sequence b before the first that sees no key before `end_key`.
__device__ inline int queries_before(const AttentionShape& shape, std::int64_t b, int end_key) {
  return leading_rows(static_cast<int>(shape.TQ), [&](int row) { return first_visible_key(shape, b, row) < end_key; });
}

// A warp's scores, rows from query `first_row` on by keys from `first_key` on: those of keys in front of what a query sees
// become `hidden`.
template <int M, int N>
__device__ void hide_past(Accumulators<M, N>& S, const AttentionShape& shape, std::int64_t b, int first_row,
                          int first_key, float hidden) {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = first_visible_key(shape, b, first_row + m * 16 + half * 8 + g) - first_key;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (n * 8 + t * 2 + i < begin) S.at[m][n][half * 2 + i] = hidden;
      }
    }
  }
}

// What is subtracted from a row's scores before they are exponentiated. With HidesPast a row may have seen no key yet, and
// then it has no maximum.
template <bool HidesPast>
__device__ float finite_maximum(float maximum) {
  return HidesPast && maximum == -INFINITY ? 0 : maximum;
}

}  // namespace weft::cuda
