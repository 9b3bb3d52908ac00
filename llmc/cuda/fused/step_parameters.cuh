// What host and device share about the step kernel (step.cu): its parameters, how attention is divided into items, and
// the layout of shared memory. What it shares with the decode kernel is in parameters.cuh.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/block.cuh"
#include "llmc/cuda/fused/parameters.cuh"
#include "llmc/cuda/fused/step.h"

namespace weft::cuda::fused {

constexpr int kStepRows = static_cast<int>(kFusedStepRows);
constexpr int kStepTileRows = 4;   // rows of a matrix that a warp multiplies from a chunk
constexpr int kTileElements = 64;  // columns of a tile: 4 rows x 64 16-bit elements are one 16-byte load a lane
constexpr int kWarpTiles = kWarpElements / kTileElements;  // tiles that a warp multiplies of a row
constexpr int kNormalizedRow = 2 * kWarpElements;          // bytes of a warp's elements of a row in 16 bits
constexpr int kItemSlots = 2;                              // one item is computed while the helper prepares the next
constexpr int kMinStepSplit = 128;  // positions of a split, at least; the last split may have fewer

template <typename S>
struct StepVariant : SequentialVariant<S, void, 1, false> {};

// Two counters announce the 16-bit exchanges: Control::head counts blocks that have written their rows of `hidden`,
// Control::attention counts heads whose rows of `attended` are written. Counters and tags continue from launch to
// launch, so nothing is cleared in between.
template <typename S>
struct StepParameters : SequentialParameters<S> {
  int step_rows;
  FusedStepRow row[kStepRows];  // rows from step_rows on: id 0, no logits
  const std::int32_t *pages, *last_ids;
  int qkv_stride;             // elements from one row of qkv to the next
  S *hidden, *attended;       // [kStepRows, F] after GELU; [kStepRows, q_size], attention's output rounded to S
  unsigned first_step;        // layers computed by all earlier launches
  unsigned attention_before;  // heads announced by all earlier launches
};

// Index of an element of row `row` of the residual stream in `x`. The 256 elements of a warp lie together, row after row.
// A lane needs 8 neighbouring elements, as two 16-byte loads: first the first halves of all lanes' elements, then the
// second halves, so that each load of a warp covers 512 consecutive bytes.
__host__ __device__ inline int exchange_place(int row, int element) {
  const int of_warp = element % kWarpElements;
  return (element - of_warp) * kStepRows + row * kWarpElements + (of_warp >> 2 & 1) * (kWarpElements / 2) +
         (of_warp >> 3) * 4 + (of_warp & 3);
}

// Number of splits of positions 0 to `position`. It depends on the position alone, so that a row's bits do not depend
// on other rows.
__host__ __device__ inline int step_splits(int position, int max_splits) {
  const int wanted = (position + 1) / kMinStepSplit;
  return wanted < 1 ? 1 : wanted > max_splits ? max_splits : wanted;
}

// An item of attention: one row, one head, one split of the row's positions.
struct StepWorkUnit {
  int row, head, split, splits;
};
// The item that `block` computes in `round`; false if it has none. The same in every layer. The assignment shifts by
// one block each round, so that the last splits of heads, which also merge the others, do not always fall to the same
// blocks.
template <typename S>
__device__ inline bool item_at(const StepParameters<S>& p, int block, int blocks, int round, StepWorkUnit& item) {
  int index = round * blocks + (block + round) % blocks;
  for (int row = 0; row < p.step_rows; ++row) {
    const int splits = step_splits(p.row[row].position, p.max_splits), items = p.NH * splits;
    if (index < items) {
      item = {row, index / splits, index % splits, splits};
      return true;
    }
    index -= items;
  }
  return false;
}

#if WEFT_BULK_COPY
// Positions of an item. Those below `cached` are in the sequence's pages, the others are rows of this step.
struct ItemPositions {
  int begin, end, cached;
};
template <typename S>
__device__ inline ItemPositions positions_of_work_unit(const StepParameters<S>& p, const StepWorkUnit& item) {
  const FusedStepRow& row = p.row[item.row];
  const Positions all = positions_of<kPageUnit>(row.position + 1, item.splits, item.split);
  return {all.begin, all.end, p.row[row.first].position};
}
#endif

// Byte offsets in dynamic shared memory of the kernel for 1 or for kStepRows rows. The constants come
// first, then the ring.
struct StepLayout {
  int layers, partials, normalized, moments, raw, query, added, states, barriers, bytes;
};
struct StepConstants {
  StepLayout at;
  BlockRows own;
};
constexpr int kStepConstantBytes = 128;  // of which the ring's stages are multiples
static_assert(sizeof(StepConstants) <= kStepConstantBytes);
__host__ __device__ inline StepLayout step_layout(const Sizes& p, int rows) {
  const int warps = p.warps_k * p.warps_r;
  StepLayout at{};
  int end = kStepConstantBytes + p.stages * p.stage_bytes;
  const auto take = [&](int bytes) {
    const int start = end;
    end += (bytes + 15) / 16 * 16;
    return start;
  };
  at.layers = take((p.L + 1) * kLayerBytes<false>);
  // two alternating buffers: [warps_k][tiles of a batch][sums of a tile]
  at.partials = take(2 * p.warps_k * warps * kStepTileRows * rows * 4);
  at.normalized = take(rows == 1 ? warps * 2 * kNormalizedRow : 0);  // of each warp and norm, step_norm.cuh
  at.moments = take(2 * warps * rows * 8);
  at.raw = take((1 + rows) * p.HS * 4);
  at.query = take(kItemSlots * p.HS * 4);
  // Of each slot: keys, then values, of the rows of this step that belong to the item's sequence.
  at.added = take(kItemSlots * 2 * rows * p.HS * 2);
  at.states = take(kItemSlots * warps * (p.HS + 2) * 4);
  at.barriers = take((2 * p.stages + 2 * kItemSlots) * 8);
  at.bytes = end;
  return at;
}

}  // namespace weft::cuda::fused
