#include "llmc/cuda/fused/packed_tiles.h"

#include "llmc/base/error.h"
#include "llmc/cuda/fused/packed_tiles.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/gemm/quantized_matmul.cuh"

namespace weft::cuda::fused {

namespace {

constexpr int kPackThreads = 256, kPackSlices = 8;  // thread blocks that divide the stages of one stream among them

// The rows of a packed matrix that form a part of a stream.
struct Source {
  const std::byte* blocks;
  std::int64_t K;
  int first_group;
  RowRange rows;
  bool gated;  // rows of gate, then those of up

  // The row of the packed matrix that is row `row` of the part.
  __device__ std::int64_t packed_row(int row) const {
    if (!gated) return rows.begin + row;
    const int count = rows.end - rows.begin;
    const bool up = row >= count;
    const auto part = up ? PackedPlace::Part::up : PackedPlace::Part::gate;
    return quantized::packed_row({rows.begin, part}, up ? row - count : row);
  }
};

// The 16 bytes at `offset` of the stage that begins at row `first_row` and group `first_group` of the part.
template <typename Format>
__device__ uint4 stage_piece(const Source& from, int offset, int first_row, int rows, int first_group, int groups) {
  groups = stored_groups<Format>(groups);
  const int set_stride = kSetRows<Format> * groups * kGroupBytes<Format>, set = offset / set_stride;
  const int own_rows = min(kSetRows<Format>, rows - set * kSetRows<Format>);
  offset -= set * set_stride;
  first_row += set * kSetRows<Format>;
  first_group += from.first_group;
  unsigned words[4] = {};
  const int weights = groups * kGroupPieces<Format> * own_rows * kPieceBytes;
  if (offset < weights) {
    const int piece = offset / (own_rows * kPieceBytes), t = offset % kPieceBytes / 16;
    const std::int64_t row = from.packed_row(first_row + offset / kPieceBytes % own_rows);
    const int group = first_group + piece / 2 * kSharedGroups<Format>;
    const std::int64_t k = static_cast<std::int64_t>(group) * kQuantGroup + 32 * t + piece % 2 * 16;
    const auto value = [&](std::int64_t at) {
      return at < from.K ? quantized::packed_value<Format>(from.blocks, from.K, row, at) : 0;
    };
    for (int n = 0; n < 4; ++n) {
      for (int i = 0; i < 4; ++i) {
        unsigned byte;
        if constexpr (kSharedGroups<Format> == 2) {
          const std::int64_t low = k + n % 2 * kQuantGroup + n / 2 * 8 + i;
          byte = value(low) | value(low + 4) << 4;
        } else {
          byte = value(k + 4 * n + i);
        }
        words[n] |= byte << (8 * i);
      }
    }
  } else if constexpr (Format::kGrouped) {
    for (int n = 0; n < 4; ++n) {
      const int index = (offset - weights) / 4 + n;
      const int group = first_group + index / own_rows;
      if (index >= groups * own_rows || group >= groups_of(from.K)) break;
      words[n] =
          quantized::packed_group<Format>(from.blocks, from.K, from.packed_row(first_row + index % own_rows), group);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Writes one part of a stream to `to`; kPackSlices thread blocks each write every kPackSlices-th stage.
template <typename Format>
__device__ void pack_part(std::byte* to, const Source& from, const StreamShape& shape, const StreamPart& part) {
  int stage = 0;
  for_each_stage<Format>(shape, part, [&](int first_row, int rows, int first_group, int groups) {
    const int bytes = set_bytes<Format>(rows, groups);
    if (stage++ % kPackSlices == static_cast<int>(blockIdx.y)) {
      for (int offset = 16 * static_cast<int>(threadIdx.x); offset < bytes; offset += 16 * kPackThreads) {
        *reinterpret_cast<uint4*>(to + offset) =
            stage_piece<Format>(from, offset, first_row, rows, first_group, groups);
      }
    }
    to += bytes;
  });
}

struct LayerSources {
  const std::byte* blocks[4];  // by LayerParts::Matrix
  std::int64_t K[4];
};

template <typename Format>
__global__ void __launch_bounds__(kPackThreads)
    pack_layer_kernel(std::byte* to, LayerSources from, Sizes sizes, SequentialSizes sequential, bool is_sequential,
                      int row_loads, const BlockRows* rows) {
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const LayerParts parts =
      layer_parts(sizes, is_sequential ? &sequential : nullptr, row_loads, rows[block], block, blocks);
  const StreamShape shape(sizes);
  to += block * sizes.stream_bytes;
  for (int i = 0; i < parts.count; ++i) {
    const LayerParts::Part& part = parts.part[i];
    const bool gated = is_sequential && sequential.gated && part.matrix == LayerParts::up;
    pack_part<Format>(to, {from.blocks[part.matrix], from.K[part.matrix], part.first_group, part.rows_of, gated}, shape,
                      part);
    to += part_bytes<Format>(shape, part);
  }
}

__global__ void __launch_bounds__(kPackThreads)
    pack_head_kernel(std::byte* to, const std::byte* from, Sizes sizes, int row_loads, const BlockRows* rows) {
  const RowRange own = rows[blockIdx.x].head;
  pack_part<HeadFormat>(to + blockIdx.x * sizes.head_stream_bytes, {from, sizes.C, 0, own, false}, StreamShape(sizes),
                        {own.end - own.begin, groups_of(sizes.C), row_loads});
}

}  // namespace

void pack_layer(std::byte* to, const std::array<PackedMatrix, 4>& from, const Sizes& sizes,
                const SequentialSizes* sequential, int row_loads, const BlockRows* rows, int blocks,
                cudaStream_t stream) {
  const std::int64_t attention = sequential == nullptr ? sizes.C : sequential->q_size;
  const LayerSources sources = {{from[0].blocks, from[1].blocks, from[2].blocks, from[3].blocks},
                                {sizes.C, sizes.C, sizes.F, attention}};
  for_format(from[0].dtype, [&]<typename Format>() {
    const dim3 grid(static_cast<unsigned>(blocks), kPackSlices);
    pack_layer_kernel<Format>
        <<<grid, kPackThreads, 0, stream>>>(to, sources, sizes, sequential == nullptr ? SequentialSizes{} : *sequential,
                                            sequential != nullptr, row_loads, rows);
  });
  check_launch("fused decoding: weights");
}

void pack_head(std::byte* to, const PackedMatrix& from, const Sizes& sizes, int row_loads, const BlockRows* rows,
               int blocks, cudaStream_t stream) {
  if (from.dtype != HeadFormat::kType) fail(Exit::internal, "fused decoding: a head in %s", dtype_name(from.dtype));
  pack_head_kernel<<<dim3(static_cast<unsigned>(blocks), kPackSlices), kPackThreads, 0, stream>>>(
      to, from.blocks, sizes, row_loads, rows);
  check_launch("fused decoding: head");
}

}  // namespace weft::cuda::fused
