// A fixed list of launches as a CUDA graph: launched by one call, without a gap between its kernels.
//
// The launches of a list are the same every time but for a few host values that they carry as kernel parameters (a
// scale, the position in the random stream). The caller names those values: as long as they stay, the graph is replayed
// as it is; when one changes, the list is captured again and the graph updated in place. Either way the kernels, their
// order and their parameters are those of an eager run, and so are the bits of the results.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <functional>

namespace weft::cuda {

class StepGraph {
 public:
  using Values = std::array<std::uint64_t, 2>;

  StepGraph() = default;
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  // Queues the launches. The first run is eager: operators set themselves up in it. Where the runtime cannot capture
  // the list, this and every later run is eager, with one warning.
  void run(cudaStream_t stream, const Values& values, const std::function<void()>& launches);

  // False while every run so far was eager.
  bool replays() const { return executable_ != nullptr; }

 private:
  cudaGraph_t capture(cudaStream_t stream, const std::function<void()>& launches) const;
  void instantiate(cudaGraph_t graph);

  cudaGraphExec_t executable_ = nullptr;
  Values values_{};
  bool ran_ = false, refused_ = false;
};

}  // namespace weft::cuda
