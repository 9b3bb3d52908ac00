// What host and device share about the kernel of one step of up to kFusedStepRows rows (step.cu): its parameters, how the rows of
// the step divide attention, and the layout of shared memory. What it has in common with the kernel of many tokens stands in
// parameters.cuh.
#pragma once

#include <cstdint>

#include "llmc/cuda/fused/block.cuh"
#include "llmc/cuda/fused/parameters.cuh"
#include "llmc/cuda/fused/step.h"

namespace weft::cuda::fused {

constexpr int kStepRows = static_cast<int>(kFusedStepRows);
constexpr int kStepTileRows = 4;                           // rows of a matrix that a warp takes from a chunk
constexpr int kTileElements = 64;                          // of each of them, in a tile: one load of a warp
constexpr int kWarpTiles = kWarpElements / kTileElements;  // a warp's share of a row
constexpr int kItemSlots = 2;                              // items of attention that are prepared or computed at a time
constexpr int kMinStepSplit = 128;  // a split of a row's positions has at least so many, but for the last

template <typename S>
struct StepVariant : SequentialVariant<S, S, S, 1, false> {};

// hidden and attended are announced by counters: Control::head counts blocks whose rows of hidden are written, Control::attention
// heads whose rows of attended are. Counters and tags go on from launch to launch, so that nothing is cleared between them.
template <typename S>
struct StepParameters : SequentialParameters<S, S, S> {
  int step_rows;
  FusedStepRow row[kStepRows];  // those from step_rows on have ids 0, no logits
  const std::int32_t *pages, *last_ids;
  int x_stride, qkv_stride;   // of a row of x and of qkv
  S *hidden, *attended;       // [kStepRows, F] after GELU, [kStepRows, q_size] attention's output, rounded
  unsigned first_step;        // layers of all launches before this one
  unsigned attention_before;  // heads that those announced
};

// Where an element of the residual stream lies in a row of `x`: the 8 neighbours that a lane takes are two loads of 16 bytes, and
// the four lanes that load side by side find theirs in 64 consecutive bytes.
__host__ __device__ inline int exchange_place(int element) {
  return (element & ~31) | (element >> 2 & 1) << 4 | (element >> 3 & 3) << 2 | (element & 3);
}

// Splits of the positions 0 ... position of a head: by the position alone, so that a row's bits do not depend on other rows.
__host__ __device__ inline int step_splits(int position, int max_splits) {
  const int wanted = (position + 1) / kMinStepSplit;
  return wanted < 1 ? 1 : wanted > max_splits ? max_splits : wanted;
}

// Of attention: a row, a head and a split of its positions.
struct StepItem {
  int row, head, split, splits;
};
// Item `round` of a block in a layer, the same in every layer; false if it has fewer. Each round the blocks move on by one: the
// last splits of heads, which merge the others, are not always with the same blocks.
template <typename S>
__device__ inline bool item_at(const StepParameters<S>& p, int block, int blocks, int round, StepItem& item) {
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
// Positions of an item. Those below `cached` lie in the sequence's pages, the others are rows of this step.
struct ItemPositions {
  int begin, end, cached;
};
template <typename S>
__device__ inline ItemPositions positions_of_item(const StepParameters<S>& p, const StepItem& item) {
  const FusedStepRow& row = p.row[item.row];
  const Positions all = positions_of<kPageUnit>(row.position + 1, item.splits, item.split);
  return {all.begin, all.end, p.row[row.first].position};
}
#endif

// Offsets in dynamic shared memory, behind the ring.
struct StepLayout {
  int layers, partials, moments, raw, query, added, states, barriers, bytes;
};
__host__ __device__ inline StepLayout step_layout(const Sizes& p) {
  const int warps = p.warps_k * p.warps_r;
  StepLayout at{};
  int end = p.stages * p.stage_bytes;
  const auto take = [&](int bytes) {
    const int start = end;
    end += (bytes + 15) / 16 * 16;
    return start;
  };
  at.layers = take((p.L + 1) * kLayerBytes);
  at.partials = take(2 * p.warps_k * warps * kWarpSize * 4);  // two that take turns: [warps_k][tiles of a batch][lane]
  at.moments = take(2 * warps * kStepRows * 8);
  at.raw = take((1 + kStepRows) * p.HS * 4);
  at.query = take(kItemSlots * p.HS * 4);
  at.added =
      take(kItemSlots * 2 * kStepRows * p.HS * 2);  // of a slot: keys, then values, of the sequence's rows in this step
  at.states = take(kItemSlots * warps * (p.HS + 2) * 4);
  at.barriers = take((2 * p.stages + 2 * kItemSlots) * 8);
  at.bytes = end;
  return at;
}

}  // namespace weft::cuda::fused
