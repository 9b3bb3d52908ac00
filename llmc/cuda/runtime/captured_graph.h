// A list of launches as a CUDA graph: captured from a stream, then launched by one call, without gaps between its
// kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <utility>

namespace weft::cuda {

class CapturedGraph {
 public:
  // `name` appears in error messages.
  explicit CapturedGraph(std::string name) : name_(std::move(name)) {}
  ~CapturedGraph() { clear(); }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  // Captures what `launches` queues in `stream`, without running it. An existing graph is updated in place if the new
  // list has the same shape (the same kernels with other parameters), otherwise it is replaced. If `launches` throws,
  // or the runtime cannot capture the list, the capture is ended, the exception propagates, and the graph is unchanged
  // or empty.
  void capture(cudaStream_t stream, const std::function<void()>& launches);
  void launch(cudaStream_t stream) const;
  void clear();
  bool empty() const { return executable_ == nullptr; }

 private:
  std::string name_;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace weft::cuda
