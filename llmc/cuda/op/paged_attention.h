// Attention over keys and values in pages, for rows of many sequences: out = softmax(q k^T * scale) v, where a row sees the
// positions 0 .. its own of its sequence, and query head h reads K/V head h / (NH / NKV). llmc/cpu/paged_attention.h is the
// specification.
//
// The bits of a row depend on its query and on the keys and values of its positions (finite ones): not on the other rows of
// the step, nor on how the sequence was cut into spans, nor on which pages hold it, nor on the GPU's size.
//
// What is computed where is a list of work that the host writes for each step (write_paged_work()) and that lies in device
// memory: the launch itself is the same for every step of as many rows, so that one captured graph serves them all. All
// layers of a step use the same list.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "llmc/cuda/op/gemv.h"
#include "llmc/cuda/op/paged_kv.h"
#include "llmc/cuda/op/rope.h"
#include "llmc/model/head_view.h"

namespace weft::cuda {

// What a model and its steps can be. NH is a multiple of NKV; max_rows is at most 65535.
struct PagedAttentionShape {
  std::int64_t NH = 0, NKV = 0, HS = 0;
  std::int64_t max_rows = 0;       // of a step
  std::int64_t max_spans = 0;      // of a step
  std::int64_t max_positions = 0;  // of a sequence
};

// Consecutive positions of one sequence: rows first_row .. first_row + rows - 1 of the step, at first_position ...
struct PagedSpan {
  std::int64_t first_row = 0, rows = 0, first_position = 0;
};

// Bytes of the longest list of work. The list begins on a 16-byte boundary.
std::size_t paged_work_bytes(const PagedAttentionShape& shape);
// Writes the list of a step to host memory; returns its bytes, which is what needs to be copied. A span without rows takes no
// part. Host only, no CUDA call. Spans beyond what the shape allows: Exit::internal.
std::size_t write_paged_work(void* work, const PagedAttentionShape& shape, std::span<const PagedSpan> spans);

// Whether every span of the list is one row and none needs a tile: then paged_attention() can append keys and values itself.
bool paged_work_decodes(const void* work);

// Bytes that paged_attention() needs beside its tensors; zero before the first call, 16-byte aligned. Not for two launches at
// the same time.
std::size_t paged_attention_workspace(const PagedAttentionShape& shape);

// S: float, bf16 or fp16. q: rows of NH heads (batch_stride is not read), heads 16-byte aligned.
template <typename S>
struct PagedAttention {
  PagedAttentionShape shape;
  float scale = 0;
  HeadViewOf<const S> q;       // as append_to_pages() left it, but see k
  PagedKv<S> kv;               // positions up to the rows' own; what lies behind them is not read into any result
  PagedRows rows;              // rows of a span are neighbours, as in its PagedSpan
  const void* work = nullptr;  // write_paged_work() for these rows, in device memory; read when `rows` are (paged_kv.h)
  void* workspace = nullptr;
  S* out = nullptr;  // [rows, NH, HS], 16-byte aligned; padding rows are not written
  // Of a list that decodes, instead of append_to_pages(): k and v of the rows, and q above, as the GEMM before wrote them. Attention
  // rotates q and k and writes k and v to their pages, once; q and k themselves stay as they were. All results have the bits that
  // the two launches give. Keys and values of earlier positions are read without waiting for the predecessors.
  HeadViewOf<const S> k, v;  // null: append_to_pages() came before
  DeviceRopeTable rope;      // 16-byte aligned
};
enum class PagedPath {
  automatic,  // prompts on wgmma on Hopper; the bits are those of mma.sync
  portable,   // mma.sync on Hopper too, for tests
};
// Launched as part of a chain. bf16 and fp16 run on tensor cores, float on a plain and slow path.
//
// Its successor starts when all kernels before attention have finished, so it may read what they wrote without waiting. It still
// waits at some time before it ends, as every kernel of a chain does, and before it reads or overwrites what attention reads
// or writes.
template <typename S>
void paged_attention(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream,
                     PagedPath path = PagedPath::automatic);

}  // namespace weft::cuda
