// The layout of quantised weights in global memory and in the stages of the ring: the order in which a block's
// consumers multiply them, so that the producer copies consecutive bytes and a lane's 16-byte load is an mma fragment.
//
// A stream is one block's share of one layer: its rows of each matrix, one part after another (layer_parts()). A part
// is a range of rows over all of K, in groups of 128. It is cut into stages: K is cut into bands, as many groups as the
// consumers hold activations for at a time; within a band the rows are cut into stage_rows() at a time; within these
// the groups are cut into load_groups at a time. In a stage each group of warps along the rows has its own set of rows,
// set_rows() of them or what is left:
//
//   8 bits  [group][half][row][64 bytes]: byte 16 t + i of half h is k = 32 t + 16 h + i of the group
//   4 bits  [two groups][half][row][64 bytes]: byte 16 t + 4 n + i of half h has, of group n % 2 of the two,
//           k = 32 t + 16 h + 8 (n / 2) + i in its low bits, k + 4 in the high ones;
//           then [group][row] words: the scale's fp16 bits in the low half, the zero point in the high half
//
// The stride is the number of rows that there are, not set_rows(): the only padding of rows is at the end of an int4
// set, to 16 bytes. K is padded with zeros to whole groups, of int4 to two groups.
#pragma once

#include "llmc/cuda/fused/parameters.cuh"
#include "llmc/model/quantization.h"

namespace weft::cuda::fused {

constexpr int kTileRows = 8;  // rows of weights in an mma
// groups that a warp covers with kWarpElements elements
constexpr int kWarpGroups = kWarpElements / static_cast<int>(kQuantGroup);

// Tiles of a warp in a stage: three of int4 hold the 20 rows of MLP-down and of the output projection that a block of
// Pythia-2.8B has. With 8 bits two were slower than one (dev/performance/fused.md, "Quantised weights").
__host__ __device__ constexpr int warp_tiles(DType q) {
  return q == DType::u4 ? 3 : 1;
}
__host__ __device__ constexpr int set_rows(DType q) {
  return warp_tiles(q) * kTileRows;
}
static_assert(set_rows(DType::u4) >= set_rows(DType::i8));  // partial_rows holds a stage of a head in int8, too
__host__ __device__ constexpr int group_bytes(DType q) {
  return q == DType::u4 ? 68 : 128;
}
constexpr int kPieceBytes = 64;  // consecutive bytes of a row
// Pieces of a row in a group of K; of int4 two groups share two.
__host__ __device__ constexpr int group_pieces(DType q) {
  return q == DType::u4 ? 1 : 2;
}
// The groups of a set that has `groups` groups of K.
__host__ __device__ constexpr int stored_groups(DType q, int groups) {
  return q == DType::u4 ? (groups + 1) / 2 * 2 : groups;
}
__host__ __device__ constexpr int set_bytes(DType q, int rows, int groups) {
  return (rows * stored_groups(q, groups) * group_bytes(q) + 15) / 16 * 16;
}
__host__ __device__ inline int groups_of(std::int64_t K) {
  return static_cast<int>((K + kQuantGroup - 1) / kQuantGroup);
}

// A warp's staging buffer for the digits of its activations (quantized_rows.cuh): four planes, one for each digit, of
// 256 integers or 128 fp16 numbers.
constexpr int kDigitPlane = 256 + 16;  // bytes; 16 bytes of padding put the planes into different banks
constexpr int kDigitBytes = 4 * kDigitPlane;

// How the warps of a block divide the weights of a stage.
struct StreamShape {
  int load_groups, band_groups, warps_r;

  __host__ __device__ StreamShape(const Sizes& p, int row_loads)
      : load_groups(kWarpGroups * p.warps_k), band_groups(row_loads * load_groups), warps_r(p.warps_r) {}
  __host__ __device__ int stage_rows(DType q) const { return set_rows(q) * warps_r; }
};

struct StreamPart {
  int rows, groups;
};
// Calls visit(first row, rows, first group, groups) for each stage of a part, in order, until it returns false; returns
// whether all were visited.
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

// The parts of a block's stream, in the order in which they are read. Keys and values are copied between MLP-up and
// MLP-down with the parallel residual, after QKV with the sequential one. A part of gate and up has the rows of gate
// first.
constexpr int kMostParts = 6;
struct LayerParts {
  enum Matrix { qkv, up, down, dense };
  struct Part : StreamPart {
    Matrix matrix;
    int first_group;  // of the matrix
    RowRange rows_of;
  };
  Part part[kMostParts];
  int count;
};
__host__ __device__ inline LayerParts layer_parts(const Sizes& p, const SequentialSizes* s, const BlockRows& own,
                                                  int block, int blocks) {
  LayerParts parts{};
  const auto add = [&](LayerParts::Matrix matrix, const RowRange& rows, int first_group, int groups, int matrices = 1) {
    LayerParts::Part& part = parts.part[parts.count++];
    part.rows = matrices * (rows.end - rows.begin), part.groups = groups;
    part.matrix = matrix, part.first_group = first_group, part.rows_of = rows;
  };
  add(LayerParts::qkv, own.qkv, 0, groups_of(p.C));
  if (s == nullptr) {
    add(LayerParts::up, own.up, 0, groups_of(p.C));
    add(LayerParts::down, own.out, 0, groups_of(p.F));
    add(LayerParts::dense, own.out, 0, groups_of(p.C));
    return parts;
  }
  add(LayerParts::dense, own.out, 0, groups_of(s->q_size));
  for (int i = 0; i < 2; ++i) {
    add(LayerParts::up, hidden_part(p, s->first_part, i, block, blocks), 0, groups_of(p.C), s->gated ? 2 : 1);
  }
  const int first = groups_of(s->first_part);  // whole loads of a warp, or all of F
  add(LayerParts::down, own.out, 0, first);
  add(LayerParts::down, own.out, first, groups_of(p.F) - first);
  return parts;
}

// Of a row of QuantizedLayer::up_scales: gate and up lie by turns, 8 rows each (packed_row()).
__device__ inline int gate_scale(int unit) {
  return unit / 8 * 16 + unit % 8;
}
__device__ inline int up_scale(int unit) {
  return gate_scale(unit) + 8;
}

}  // namespace weft::cuda::fused
