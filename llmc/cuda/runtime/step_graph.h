// The launches of a training step, replayed as a CUDA graph once they have been captured.
//
// From one micro-batch to the next the launches differ only in a few host values that are kernel parameters (a scale,
// the position in the random stream). The caller passes those values: while they stay the same the graph is replayed;
// when one changes, the list is captured again and the graph updated in place. The kernels, their order and their
// parameters are those of an eager run, and so are the bits of the results.
#pragma once

#include <array>
#include <cstdint>
#include <functional>

#include "llmc/cuda/runtime/captured_graph.h"

namespace weft::cuda {

class StepGraph {
 public:
  using Values = std::array<std::uint64_t, 2>;

  // Queues the launches. The first run is eager, because operators set themselves up in it. If the runtime cannot
  // capture the list, this and all later runs are eager, with one warning.
  void run(cudaStream_t stream, const Values& values, const std::function<void()>& launches);

  // False while every run so far was eager.
  bool replays() const { return !graph_.empty(); }

 private:
  CapturedGraph graph_{"training step"};
  Values values_{};  // values with which graph_ was captured
  bool ran_ = false, refused_ = false;
};

}  // namespace weft::cuda
