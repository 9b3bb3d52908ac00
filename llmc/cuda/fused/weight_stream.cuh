// How quantised weights lie in global memory and in the stages of the ring: in the order in which the consumers of a block
// multiply them, so that the producer copies consecutive bytes and a lane loads 16 bytes that it can use as they are.
//
// The stream of a block and layer has its rows of each matrix, part after part (layer_parts()). A part is some rows and all
// of K, in groups of 128. Stages of a part: for each band of K, as much as the consumers hold of the activations at a time, all
// rows, stage_rows() at a time, and of these load_groups() groups a stage. In a stage each group of warps along the rows has a
// set of rows, set_rows() of them or what is left:
//
//   8 bits  [group][half][row][64 bytes]: byte 16 t + i of half h is k = 32 t + 16 h + i of the group
//   4 bits  [group][row][64 bytes]: byte 16 t + 4 n + i has k = 32 t + 8 n + i in its low bits, k + 4 in the high ones;
//           then [group][row] words: the scale's fp16 bits, and above them zero
//
// `rows`, not set_rows(), is the stride, so that nothing is filled up but the end of a set of int4, to 16 bytes. K is filled up to
// whole groups, with zeros.
#pragma once

#include "llmc/cuda/fused/parameters.cuh"
#include "llmc/model/quantization.h"

namespace weft::cuda::fused {

constexpr int kTileRows = 8;                                                // of weights in an mma
constexpr int kWarpGroups = kWarpElements / static_cast<int>(kQuantGroup);  // of a warp, in a load of kWarpElements

// Tiles of a warp in a stage: stages are of about the same size.
__host__ __device__ constexpr int warp_tiles(DType q) {
  return q == DType::u4 ? 2 : 1;
}
__host__ __device__ constexpr int set_rows(DType q) {
  return warp_tiles(q) * kTileRows;
}
__host__ __device__ constexpr int group_bytes(DType q) {
  return q == DType::u4 ? 68 : 128;
}
__host__ __device__ constexpr int set_bytes(DType q, int rows, int groups) {
  return (rows * groups * group_bytes(q) + 15) / 16 * 16;
}
__host__ __device__ inline int groups_of(std::int64_t K) {
  return static_cast<int>((K + kQuantGroup - 1) / kQuantGroup);
}

// Of the digits of a warp's activations on their way to its lanes (quantized_rows.cuh): 256 integers, in four planes.
constexpr int kDigitPlane = 256 + 16;  // bytes; lanes that read different planes find them in different banks
constexpr int kDigitBytes = 4 * kDigitPlane;

// How warps share the weights of a stage.
struct StreamShape {
  int load_groups, band_groups, warps_r;

  __host__ __device__ StreamShape(const Sizes& p, int row_loads)
      : load_groups(kWarpGroups * p.warps_k), band_groups(row_loads * load_groups), warps_r(p.warps_r) {}
  __host__ __device__ int stage_rows(DType q) const { return set_rows(q) * warps_r; }
};

struct StreamPart {
  int rows, groups;
};
// visit(first row, rows, first group, groups) for each stage, until it returns false. True: to the end.
template <typename Visit>
__host__ __device__ inline bool for_each_stage(DType q, const StreamShape& shape, const StreamPart& part,
                                               const Visit& visit) {
  const int stage_rows = shape.stage_rows(q);
  for (int band = 0; band < part.groups; band += shape.band_groups) {
    const int band_end = band + shape.band_groups < part.groups ? band + shape.band_groups : part.groups;
    for (int row = 0; row < part.rows; row += stage_rows) {
      const int rows = stage_rows < part.rows - row ? stage_rows : part.rows - row;
      for (int first = band; first < band_end; first += shape.load_groups) {
        const int groups = shape.load_groups < band_end - first ? shape.load_groups : band_end - first;
        if (!visit(row, rows, first, groups)) return false;
      }
    }
  }
  return true;
}
__host__ __device__ inline std::int64_t part_bytes(DType q, const StreamShape& shape, const StreamPart& part) {
  std::int64_t bytes = 0;
  for_each_stage(q, shape, part, [&](int, int rows, int, int groups) {
    bytes += set_bytes(q, rows, groups);
    return true;
  });
  return bytes;
}

// The parts of a layer in a block, in the order in which they are read; keys and values come between MLP-up and MLP-down.
constexpr int kParts = 4;
struct LayerParts {
  enum Matrix { qkv, up, down, dense };
  struct Part : StreamPart {
    Matrix matrix;
    RowRange rows_of;
  };
  Part part[kParts];
};
__host__ __device__ inline LayerParts layer_parts(const Sizes& p, const BlockRows& own) {
  const auto part = [](LayerParts::Matrix matrix, const RowRange& rows, int K) {
    return LayerParts::Part{{rows.end - rows.begin, groups_of(K)}, matrix, rows};
  };
  return {{part(LayerParts::qkv, own.qkv, p.C), part(LayerParts::up, own.up, p.C), part(LayerParts::down, own.out, p.F),
           part(LayerParts::dense, own.out, p.C)}};
}

}  // namespace weft::cuda::fused
