// Linear layers as in rows_matmul.h, batch-invariant too, whose weights are int8, fp8 e4m3 or int4 (llmc/model/quantization.h says
// what a weight is). They are read as they are stored and become 16-bit values in registers.
//
// Order of sums. int4: that of rows_matmul() on the same path, so that the result has the bits of rows_matmul() with the
// weights rounded to S. int8 and fp8: the same splits, but with two inputs each split belongs to one of them; the sum of a
// split over x q is multiplied by the row's scale, then the splits are added in order.
//
// Weights lie in the order in which threads need them (PackedMatrix).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "llmc/base/dtype.h"
#include "llmc/cuda/op/rows_matmul.h"
#include "llmc/model/quantization.h"

namespace weft::cuda {

// [rows, K] on the device, aligned to 128 bytes: blocks of 64 rows by 128 of K, those of 64 rows after each other; rows and K are
// filled up with zeros. A block of int8 and fp8 has 8,192 bytes. One of int4 has 4,096, then for each row a word: the scale's
// fp16 bits, and above them zero. quantized_matmul.cuh says where in a block a weight lies.
struct PackedMatrix {
  std::byte* blocks = nullptr;
  float* row_scales = nullptr;  // int8, fp8: [rows, filled up to a multiple of 64]
  DType dtype = DType::f32;     // i8, e4m3 or u4; f32: no matrix

  explicit operator bool() const { return dtype != DType::f32; }
};

// Rows in the packed matrix of a layer with OC outputs: with SwiGLU by turns 8 rows of gate and the 8 rows of up of the same
// units, those filled up to a multiple of 8.
std::int64_t packed_rows(std::int64_t OC, bool swiglu);
// What `rows` of them take, without the scales; and their scales, 0 for int4.
std::uint64_t packed_block_bytes(DType dtype, std::int64_t rows, std::int64_t K);
std::uint64_t packed_scale_bytes(DType dtype, std::int64_t rows);

// Which rows of a packed matrix the rows of a tensor become: `first` and those that follow, or with SwiGLU the rows of gate or
// up from unit `first` on.
struct PackedPlace {
  enum class Part { rows, gate, up };
  std::int64_t first = 0;
  Part part = Part::rows;
};
// `count` rows of a tensor as its file has them, all of K, to their places. Device memory. The matrix was cleared before.
void pack_weights(const PackedMatrix& to, const PackedPlace& place, std::int64_t K, const std::byte* from,
                  std::int64_t count, cudaStream_t stream);
// fp32 scales of `count` rows (int8, fp8).
void pack_row_scales(const PackedMatrix& to, const PackedPlace& place, const float* from, std::int64_t count,
                     cudaStream_t stream);
// fp16 scales [count, groups of K], and zeros of the same shape (int4), in any order.
void pack_group_scales(const PackedMatrix& to, const PackedPlace& place, std::int64_t K, const std::uint16_t* from,
                       std::int64_t count, cudaStream_t stream);
void pack_zeros(const PackedMatrix& to, const PackedPlace& place, std::int64_t K, const std::uint8_t* from,
                std::int64_t count, cudaStream_t stream);

// io.weight and io.weight2 are not read: the matrices are `weight` and, with K2 > 0, `weight2`, of the same dtype. T: bf16 or
// fp16. Sizes and errors as for rows_matmul().
template <typename T>
void quantized_matmul(const RowsMatmul<T>& io, const PackedMatrix& weight, const PackedMatrix& weight2,
                      const LaunchDevice& device, cudaStream_t stream, RowsPath path = RowsPath::automatic);

}  // namespace weft::cuda
