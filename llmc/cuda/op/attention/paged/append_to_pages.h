// RoPE of queries and keys at each row's own position, and the append of keys and values to their pages.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/cuda/op/attention/paged/paged_kv.h"
#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/cuda/runtime/device.h"
#include "llmc/model/head_view.h"

namespace weft::cuda {

// Views of the step's rows: NH heads a row of q, kv.NKV heads a row of k and v; batch_stride is not used, and heads
// begin on 16-byte boundaries. S: float, bf16 or fp16.
template <typename S>
struct AppendToPages {
  HeadViewOf<S> q;  // rotated in place
  HeadViewOf<const S> k, v;
  std::int64_t NH = 0;
  PagedKv<S> kv;
  PagedRows rows;
  DeviceRopeTable rope;  // 2 half <= HS; dimensions from 2 half on are copied as they are
};

// For each row at position p >= 0: q = rotate(q); key and value of p = rotate(k) and v, in page p / page_size of the
// row's block table. As rope_forward(), but with the same order of operations for every shape (rotate_pair.cuh);
// rounded to S, and with kv.fp8() from there to codes and scales by kv_fp8.h. Launched as part of a chain (hw/launch.cuh). Exit::internal for a page size, head dimension or view
// other than described.
template <typename S>
void append_to_pages(const AppendToPages<S>& io, const LaunchDevice& device, cudaStream_t stream);

}  // namespace weft::cuda
