// Attention over keys and values in pages, for rows of many sequences: out = softmax(q k^T * scale) v. A row sees
// positions 0 to its own of its sequence, of those at most the last `window`; query head h reads K/V head h / (NH / NKV). The
// specification is llmc/cpu/paged_attention.h.
//
// The bits of a row depend on its query and on the (finite) keys and values that it sees only: not on the other
// rows of the step, nor on how the sequence was cut into chunks, nor on which pages hold it, nor on the GPU's size.
//
// A work list, which the host writes for each step (write_paged_work()) and which lies in device memory, says what is
// computed where. The launch itself is the same for every step with as many rows, so one captured graph serves them
// all. All layers of a step use the same list: what a layer with a shorter window does not see of it costs a lookup.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "llmc/cuda/op/attention/paged/paged_kv.h"
#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/cuda/runtime/device.h"
#include "llmc/model/head_view.h"

namespace weft::cuda {

// Sizes of a model and limits of its steps. NH is a multiple of NKV; max_rows is at most 65535.
struct PagedAttentionShape {
  std::int64_t NH = 0, NKV = 0, HS = 0;
  std::int64_t max_rows = 0;       // rows in a step
  std::int64_t max_chunks = 0;     // chunks in a step
  std::int64_t max_positions = 0;  // positions in a sequence
  std::int64_t window = 0;         // the longest of the model's layers; 0: some layer has none
};

// Consecutive positions of one sequence: rows first_row to first_row + rows - 1 of the step are positions from
// first_position on.
struct PagedChunk {
  std::int64_t first_row = 0, rows = 0, first_position = 0;
};

// Bytes of the longest list of work. The list begins on a 16-byte boundary.
std::size_t paged_work_bytes(const PagedAttentionShape& shape);
// Writes the work list of a step to `work` in host memory, [paged_work_bytes()]; returns the bytes written, which the
// caller copies to the device. Chunks without rows are skipped. Makes no CUDA call. Chunks beyond the limits of the
// shape: Exit::internal.
std::size_t write_paged_work(void* work, const PagedAttentionShape& shape, std::span<const PagedChunk> chunks);

// Whether every chunk of the list is one row and none is computed as a tile. Only then can paged_attention() append keys
// and values itself.
bool paged_work_decodes(const void* work);

// Bytes of workspace for paged_attention(): 16-byte aligned, zeroed before the first call. Two launches must not use it
// at the same time.
std::size_t paged_attention_workspace(const PagedAttentionShape& shape);

// S: float, bf16 or fp16. q: rows of NH heads (batch_stride is not used), each head 16-byte aligned.
template <typename S>
struct PagedAttention {
  PagedAttentionShape shape;
  float scale = 0;
  HeadViewOf<const S> q;    // rotated by append_to_pages(), unless k is given
  std::int64_t window = 0;  // of this layer, at most shape.window unless that is 0; 0: none
  // Positions after a row's own may hold anything, even NaN. Pages wholly in front of what the rows of a chunk see are not
  // read, whatever their numbers are.
  PagedKv<S> kv;
  PagedRows rows;  // the rows of a chunk are consecutive, as in its PagedChunk
  // list of write_paged_work() in device memory; must be complete as early as `rows` (paged_kv.h)
  const void* work = nullptr;
  void* workspace = nullptr;
  S* out = nullptr;      // [rows, NH, HS], 16-byte aligned; padding rows are not written
  bool decodes = false;  // only with kv.fp8(): paged_work_decodes() of the list
  // Only with paged_work_decodes() and without kv.fp8(), in the place of append_to_pages(): k and v of the rows, which like q are then as
  // the preceding GEMM wrote them. Attention rotates q and k and writes k and v to their pages; the arrays q and k do
  // not change. All results have the bits of the two separate launches. Keys and values of earlier positions are read
  // without waiting for the predecessors.
  HeadViewOf<const S> k, v;  // null: append_to_pages() has been launched before
  DeviceRopeTable rope;      // 16-byte aligned
};
enum class PagedPath {
  automatic,  // wgmma for prompts on Hopper, with the bits of mma.sync
  portable,   // mma.sync on every GPU, for tests
};
// Launched as part of a chain (hw/launch.cuh). bf16 and fp16 run on tensor cores, float on a plain, slow path.
//
// The successor is started when all kernels before attention have ended, so it may read what they wrote without
// waiting. Before it ends, and before it reads or overwrites anything that attention reads or writes, it must wait,
// like every kernel of a chain.
template <typename S>
void paged_attention(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream,
                     PagedPath path = PagedPath::automatic);

}  // namespace weft::cuda
