// Memory that the next kernel of a chain reads, asked for in L2 by one whose own reads have arrived: memory works while one kernel
// ends and the next begins.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/cuda/op/gemv.h"
#include "llmc/cuda/op/rows_matmul.h"

namespace weft::cuda {

// Pieces of one or two tensors; piece i is `bytes` from i * stride on, in each. A hint: any of them, or none, may be asked for.
struct Ahead {
  const void *first = nullptr, *second = nullptr;  // aligned to 16 bytes; null: none
  std::int64_t stride = 0, bytes = 0;              // multiples of 16
  int count = 0;
  // Where these are given, the pieces are pages: `list` is {where their numbers begin in `pages`, how many there are}. Read before
  // the wait for the predecessor.
  const std::int32_t *list = nullptr, *pages = nullptr;
  int most_bytes = 0;
};

// The same results as rows_matmul().
template <typename S>
void rows_matmul_ahead(const RowsMatmul<S>& io, const Ahead& ahead, const LaunchDevice& device, cudaStream_t stream);

extern Ahead g_ahead_of_up, g_ahead_of_attention;

}  // namespace weft::cuda
