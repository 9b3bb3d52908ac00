#include "llmc/cuda/runtime/captured_graph.h"

#include <memory>

#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

namespace {

struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
};
using Graph = std::unique_ptr<CUgraph_st, DestroyGraph>;

// A stream capture that is ended on every path.
class Capture {
 public:
  Capture(cudaStream_t stream, const char* action) : stream_(stream), action_(action) {
    // Thread-local mode: CUDA calls of other threads (saving a checkpoint, say) are neither captured nor forbidden.
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), action);
  }
  ~Capture() {
    if (ended_) return;
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream_, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();  // the exception in flight says what went wrong
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  Graph end() {
    ended_ = true;
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream_, &graph), action_);
    return Graph(graph);
  }

 private:
  cudaStream_t stream_;
  const char* action_;
  bool ended_ = false;
};

}  // namespace

void CapturedGraph::capture(cudaStream_t stream, const std::function<void()>& launches) {
  const std::string action = "capturing the " + name_;
  Capture capture(stream, action.c_str());
  launches();
  const Graph graph = capture.end();
  if (executable_ != nullptr) {
    cudaGraphExecUpdateResultInfo difference{};
    if (cudaGraphExecUpdate(executable_, graph.get(), &difference) == cudaSuccess) return;
    cudaGetLastError();  // a graph of another shape: not an error
    clear();
  }
  check(cudaGraphInstantiate(&executable_, graph.get(), 0), action.c_str());
}

void CapturedGraph::launch(cudaStream_t stream) const {
  check(cudaGraphLaunch(executable_, stream), name_.c_str());
}

void CapturedGraph::clear() {
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
  executable_ = nullptr;
}

}  // namespace weft::cuda
