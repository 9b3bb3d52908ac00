#include "llmc/cuda/runtime/step_graph.h"

#include "llmc/base/log.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

void StepGraph::run(cudaStream_t stream, const Values& values, const std::function<void()>& launches) {
  if (!ran_ || refused_) {
    launches();
    ran_ = true;
    return;
  }
  if (graph_.empty() || values != values_) {
    try {
      graph_.capture(stream, launches);
      values_ = values;
    } catch (const Error& error) {
      cudaGetLastError();
      if (error.code() == Exit::internal || cudaPeekAtLastError() != cudaSuccess) throw;  // a kernel failed earlier
      log_warning("no CUDA graph of the training step: %s. Every kernel is launched by itself", error.what());
      graph_.clear();
      refused_ = true;
      launches();
      return;
    }
  }
  graph_.launch(stream);
}

}  // namespace weft::cuda
