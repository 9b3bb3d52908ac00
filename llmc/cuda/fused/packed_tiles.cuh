// The layout of quantised weights in global memory and in the stages of the ring: the order in which a block's
// consumers multiply them, so that the producer copies consecutive bytes and a lane's 16-byte load is an mma fragment.
//
// A stream is one block's share of one layer: its rows of each matrix, one part after another (layer_parts()). A part
// is a range of rows over all of K, in groups of 128. It is cut into stages: K is cut into bands, as many groups as the
// consumers hold activations for at a time, `loads` loads of each warp; within a band the rows are cut into kSetRows for
// each group of warps along the rows; within these the groups are cut into load_groups at a time, a load of each warp. In
// a stage each group of warps has its own set of rows, kSetRows of them or what is left:
//
//   8 bits  [group][half][row][64 bytes]: byte 16 t + i of half h is k = 32 t + 16 h + i of the group
//   4 bits  [two groups][half][row][64 bytes]: byte 16 t + 4 n + i of half h has, of group n % 2 of the two,
//           k = 32 t + 16 h + 8 (n / 2) + i in its low bits, k + 4 in the high ones
//
// With groups a set ends with [group][row] words: the scale's fp16 bits in the low half, the zero point in the high half.
// The stride is the number of rows that there are, not kSetRows: the only padding of rows is at the end of a set with
// such words, to 16 bytes. K is padded with zeros to whole groups, with 4 bits to two groups.
#pragma once

#include <algorithm>

#include "llmc/cuda/formats/formats.cuh"
#include "llmc/cuda/fused/parameters.cuh"

namespace weft::cuda::fused {

constexpr int kTileRows = 8;  // rows of weights in an mma
// groups that a warp covers with kWarpElements elements
constexpr int kWarpGroups = kWarpElements / static_cast<int>(kQuantGroup);

template <typename Format>
constexpr int kSetRows = Format::kTiles* kTileRows;
template <typename Format>
constexpr int kGroupBytes = static_cast<int>(kQuantGroup) * Format::kBits / 8 + (Format::kGrouped ? 4 : 0);  // of a row
constexpr int kPieceBytes = 64;  // consecutive bytes of a row
// Groups of K that share pieces of a row, and the pieces of one group.
template <typename Format>
constexpr int kSharedGroups = 8 / Format::kBits;
template <typename Format>
constexpr int kGroupPieces = static_cast<int>(kQuantGroup) * Format::kBits / 8 / kPieceBytes;
// The groups of a set that has `groups` groups of K.
template <typename Format>
__host__ __device__ constexpr int stored_groups(int groups) {
  return (groups + kSharedGroups<Format> - 1) / kSharedGroups<Format> * kSharedGroups<Format>;
}
template <typename Format>
__host__ __device__ constexpr int set_bytes(int rows, int groups) {
  return (rows * stored_groups<Format>(groups) * kGroupBytes<Format> + 15) / 16 * 16;
}
template <typename... Formats>
constexpr int most_set_rows(FormatList<Formats...>) {
  return std::max({kSetRows<Formats>...});
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
  int load_groups, warps_r;

  __host__ __device__ explicit StreamShape(const Sizes& p) : load_groups(kWarpGroups * p.warps_k), warps_r(p.warps_r) {}
};
// Loads of a band of MLP-down, whose rows of F elements have four times row_loads, with the sequential residual in two parts.
// More save sums over lanes; fewer release the first stage sooner (dev/performance/fused.md).
__host__ __device__ constexpr int down_loads(int row_loads, bool sequential) {
  return sequential ? 2 : 4 / row_loads;
}

struct StreamPart {
  int rows, groups, loads;
};
// Calls visit(first row, rows, first group, groups) for each stage of a part, in order.
#pragma nv_exec_check_disable  // visit() is for the host or for the device, as the caller is
template <typename Format, typename Visit>
__host__ __device__ inline void for_each_stage(const StreamShape& shape, const StreamPart& part, const Visit& visit) {
  const int stage_rows = kSetRows<Format> * shape.warps_r, band_groups = part.loads * shape.load_groups;
  for (int band = 0; band < part.groups; band += band_groups) {
    const int band_end = band + band_groups < part.groups ? band + band_groups : part.groups;
    for (int row = 0; row < part.rows; row += stage_rows) {
      const int rows = stage_rows < part.rows - row ? stage_rows : part.rows - row;
      for (int first = band; first < band_end; first += shape.load_groups) {
        visit(row, rows, first, shape.load_groups < band_end - first ? shape.load_groups : band_end - first);
      }
    }
  }
}
template <typename Format>
__host__ __device__ inline std::int64_t part_bytes(const StreamShape& shape, const StreamPart& part) {
  std::int64_t bytes = 0;
  for_each_stage<Format>(shape, part,
                         [&](int, int rows, int, int groups) { bytes += set_bytes<Format>(rows, groups); });
  return bytes;
}

// The parts of a block's stream, in the order in which they are read. Keys and values are copied between MLP-up and
// MLP-down with the parallel residual, after QKV with the sequential one. A part of gate and up has the rows of gate
// first.
constexpr int kMostParts = 6;
struct LayerParts {
  enum Matrix { qkv, up, down, dense };
  __host__ __device__ static int before_cache(bool sequential) { return sequential ? 1 : 2; }
  struct Part : StreamPart {
    Matrix matrix;
    int first_group;  // of the matrix
    RowRange rows_of;
  };
  Part part[kMostParts];
  int count;
};
__host__ __device__ inline LayerParts layer_parts(const Sizes& p, const SequentialSizes* s, int row_loads,
                                                  const BlockRows& own, int block, int blocks) {
  LayerParts parts{};
  const auto add = [&](LayerParts::Matrix matrix, const RowRange& rows, int first_group, int groups, int matrices = 1) {
    LayerParts::Part& part = parts.part[parts.count++];
    part.rows = matrices * (rows.end - rows.begin), part.groups = groups;
    part.loads = matrix == LayerParts::down ? down_loads(row_loads, s != nullptr) : row_loads;
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

// Of a row of LayerMatrices::up_scales: gate and up lie by turns, 8 rows each (packed_row()).
__device__ inline int gate_scale(int unit) {
  return unit / 8 * 16 + unit % 8;
}
__device__ inline int up_scale(int unit) {
  return gate_scale(unit) + 8;
}

}  // namespace weft::cuda::fused
