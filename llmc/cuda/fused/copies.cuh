// What the producer thread copies into the ring for a layer and for the head, in the order in which the consumers read it. It
// is the same in every layer of every token, so the host writes it down once, a list for each block, which lies in shared
// memory: found anew for each stage it took a third of the producer's time (dev/performance/fused.md).
#pragma once

#include <cstdint>

namespace weft::cuda::fused {

constexpr int kCopyUnit = 16;  // bytes: addresses and sizes of bulk copies are multiples of it

// Stages that are filled alike, one after another: each with some ranges of a matrix. Amounts and distances in units of kCopyUnit.
struct alignas(16) CopyRun {
  std::uint32_t matrix;  // LayerParts::Matrix, in 16 bits the pointers at the beginning of a Layer; 0 for the head
  std::uint32_t from;    // the first range, from the matrix's first byte on; quantised: from that of the block's stream
  std::uint32_t stages;
  std::uint32_t step;    // from one stage's first range to that of the next
  std::uint32_t amount;  // of a range
  std::uint32_t ranges;  // of a stage
  std::uint32_t apart;   // from one range to the next; in the stage:
  std::uint32_t stage_apart;
};

}  // namespace weft::cuda::fused
