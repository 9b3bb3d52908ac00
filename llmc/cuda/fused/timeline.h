// When the phases of a layer of the fused decode kernel end, block by block.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft::cuda {

// Ends of the phases of a layer, in the order in which a block reaches them where the residual is parallel. "here": what
// other blocks computed has arrived. Of the last two, and the order elsewhere, see sequential_layer.cuh.
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

// times[(layer * kFusedPhases + phase) * blocks + block] in ns of the GPU's global timer, for the last token of a launch;
// 0 where a block has no part in a phase. Layer `layers` is the head, which has x_here, norms_done, qkv_done (its rows) and
// up_done (its greatest logit).
struct FusedTimeline {
  std::int64_t layers = 0;
  int blocks = 0;
  std::vector<std::uint64_t> times;
};

// A table with a row for each phase: its end in us after the first block has the layer's input; first, mean and last block,
// means over layers. Layer 0, which waits for no other block, is left out unless it is the only one. Empty where nothing was
// recorded.
std::string timeline_text(const FusedTimeline& timeline);

}  // namespace weft::cuda
