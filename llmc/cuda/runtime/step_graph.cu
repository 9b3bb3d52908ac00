#include "llmc/cuda/runtime/step_graph.h"

#include "llmc/base/log.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

namespace {

// Owns a captured list until it has become, or has updated, an executable graph.
struct Captured {
  cudaGraph_t graph = nullptr;
  ~Captured() {
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
};

}  // namespace

StepGraph::~StepGraph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
}

// Launches that are captured do not run: where this throws, nothing has happened on the GPU.
cudaGraph_t StepGraph::capture(cudaStream_t stream, const std::function<void()>& launches) const {
  // Thread-local: what other threads do meanwhile (saving a checkpoint, say) is no part of it and is not forbidden.
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing the step");
  cudaGraph_t graph = nullptr;
  try {
    launches();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  check(cudaStreamEndCapture(stream, &graph), "capturing the step");
  return graph;
}

// Updates the executable graph where the new list has its shape, else makes a new one.
void StepGraph::instantiate(cudaGraph_t graph) {
  if (executable_ != nullptr) {
    cudaGraphExecUpdateResultInfo difference{};
    if (cudaGraphExecUpdate(executable_, graph, &difference) == cudaSuccess) return;
    cudaGetLastError();  // another shape: not an error
    cudaGraphExecDestroy(executable_);
    executable_ = nullptr;
  }
  check(cudaGraphInstantiate(&executable_, graph, 0), "capturing the step");
}

void StepGraph::run(cudaStream_t stream, const Values& values, const std::function<void()>& launches) {
  if (!ran_ || refused_) {
    launches();
    ran_ = true;
    return;
  }
  if (executable_ == nullptr || values != values_) {
    try {
      Captured captured;
      captured.graph = capture(stream, launches);
      instantiate(captured.graph);
      values_ = values;
    } catch (const Error& error) {
      cudaGetLastError();
      if (error.code() == Exit::internal || cudaPeekAtLastError() != cudaSuccess) throw;  // a kernel failed before this
      log_warning("no CUDA graph of the training step: %s. Every kernel is launched by itself", error.what());
      if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
      executable_ = nullptr;
      refused_ = true;
      launches();
      return;
    }
  }
  check(cudaGraphLaunch(executable_, stream), "training step");
}

}  // namespace weft::cuda
