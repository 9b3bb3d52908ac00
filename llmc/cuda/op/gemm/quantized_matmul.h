// Linear layers as in rows_matmul.h, also batch-invariant, with quantised weights
// (llmc/model/formats/weight_format.h; on the GPU llmc/cuda/formats). Weights are read in their stored type and converted to 16-bit values in registers.
//
// Order of sums. Grouped formats: that of rows_matmul() on the same path, so the result has the bits of rows_matmul() with
// the weights rounded to S. Others: the same splits, except that with two inputs each split belongs to one of them; a
// split's sum over x q is multiplied by the row's scale, then the splits are added in order.
//
// Weights are stored in the order in which threads need them (PackedMatrix).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "llmc/base/dtype.h"
#include "llmc/cuda/op/gemm/rows_matmul.h"
#include "llmc/model/formats/weight_format.h"

namespace weft::cuda {

// A packed matrix [rows, K] on the device, aligned to 128 bytes: blocks of 64 rows by 128 of K, all blocks of 64 rows
// one after another along K; rows and K are padded with zeros. A block has 8,192 bytes with 8 bits a weight, 4,096 with 4; with
// groups then one word for each row: the scale's fp16 bits in its low half, the zero point in its high half.
// Where in a block a weight lies: quantized_matmul.cuh.
struct PackedMatrix {
  std::byte* blocks = nullptr;
  float* row_scales = nullptr;  // [rows padded to a multiple of 64]; null where grouped
  DType dtype = DType::f32;     // of q, which tells the format; f32: no matrix
  // No blocks: q is [rows, K], as the file has it. For rows_matmul_fp8() alone; with a gate all its rows come before those of up.
  bool in_rows = false;

  explicit operator bool() const { return dtype != DType::f32; }
};

// Rows of the packed matrix of a layer with OC outputs. With a gate, it and up alternate: 8 rows of gate, then the 8
// rows of up for the same units, each padded to a multiple of 8.
std::int64_t packed_rows(std::int64_t OC, bool gated);
// Bytes of `rows` packed rows without scales of rows, and bytes of these scales (0 where grouped).
std::uint64_t packed_block_bytes(DType dtype, std::int64_t rows, std::int64_t K);
std::uint64_t packed_scale_bytes(DType dtype, std::int64_t rows);

// Which rows of a packed matrix the rows of a tensor become: `first` and the following ones, or with a gate the rows of
// gate or up from unit `first` on.
struct PackedPlace {
  enum class Part { rows, gate, up };
  std::int64_t first = 0;
  Part part = Part::rows;
};
// Packs `count` rows [count, K] of a tensor in the file's format. All pointers of these functions are device memory.
// `to` must be zeroed before its first rows are packed.
void pack_weights(const PackedMatrix& to, const PackedPlace& place, std::int64_t K, const std::byte* from,
                  std::int64_t count, cudaStream_t stream);
// Packs the fp32 scales [count] of rows.
void pack_row_scales(const PackedMatrix& to, const PackedPlace& place, const float* from, std::int64_t count,
                     cudaStream_t stream);
// Packs the fp16 scales, and the zero points, [count, groups of K] each. The calls may come in any order.
// Exit::internal with a format without groups.
void pack_group_scales(const PackedMatrix& to, const PackedPlace& place, std::int64_t K, const std::uint16_t* from,
                       std::int64_t count, cudaStream_t stream);
void pack_zeros(const PackedMatrix& to, const PackedPlace& place, std::int64_t K, const std::uint8_t* from,
                std::int64_t count, cudaStream_t stream);

// As rows_matmul(), but the matrices are `weight` and, with K2 > 0, `weight2`, of the same dtype; io.weight and
// io.weight2 are not read. T: bf16 or fp16. Sizes and errors as for rows_matmul().
template <typename T>
void quantized_matmul(const RowsMatmul<T>& io, const PackedMatrix& weight, const PackedMatrix& weight2,
                      const LaunchDevice& device, cudaStream_t stream, RowsPath path = RowsPath::automatic);

}  // namespace weft::cuda
