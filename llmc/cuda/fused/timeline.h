// Timeline of the fused kernels: when each block ends each phase of a layer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft::cuda {

// Ends of the phases of a layer, in the order in which a block reaches them with the parallel residual. "here" means
// that what other blocks computed has arrived. The last two, and the order with the sequential residual:
// sequential_layer.cuh.
enum class FusedPhase : int {
  x_here,
  norms_done,
  qkv_done,
  up_done,
  query_here,
  attention_done,
  mlp_up_here,
  down_done,
  attention_here,
  x_written,
  middle_written,  // the residual stream between attention and MLP
  middle_here,
};
inline constexpr int kFusedPhases = 12;

// times[(layer * kFusedPhases + phase) * blocks + block] in ns of the GPU's global timer, for the last token of a
// launch; 0 where a block takes no part in a phase. Entry `layers` is the head, with x_here, norms_done, qkv_done (its
// rows) and up_done (its largest logit).
struct FusedTimeline {
  std::int64_t layers = 0;
  int blocks = 0;
  std::vector<std::uint64_t> times;
};

// A text table with one row for each phase: its end in us after the first block has the layer's input, for the first
// block, the mean and the last block; means over layers. Layer 0 waits for no other block and is left out unless it is
// the only one. Empty where nothing was recorded.
std::string timeline_text(const FusedTimeline& timeline);

}  // namespace weft::cuda
