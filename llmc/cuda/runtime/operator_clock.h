// Names the operators of a step: an NVTX range for nsys and ncu and, while a step is timed, a pair of events.
#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "llmc/cuda/runtime/implementation.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/model/operator_table.h"

namespace weft::cuda {

class OperatorClock {
 public:
  explicit OperatorClock(cudaStream_t stream) : stream_(stream) {}

  // Runs `launch` as the operator `name` (a string literal, kept by address). flops and bytes: see OperatorTime.
  template <typename Launch>
  void run(const char* name, double flops, double bytes, Launch&& launch) {
    const TraceRange range(name);
    if (!timing_) return std::forward<Launch>(launch)();
    begin(name, flops, bytes);
    std::forward<Launch>(launch)();
    calls_.back().implementation = last_implementation();
    check(cudaEventRecord(calls_.back().stop, stream_), "operator clock");
  }

  void start() {
    calls_.clear();
    timing_ = true;
  }
  bool timing() const { return timing_; }
  // Waits for the GPU and returns the times since start(), one row a name; does not fill in ceilings.
  OperatorTable stop();

 private:
  struct Call {
    Call(const char* name_, double flops_, double bytes_) : name(name_), flops(flops_), bytes(bytes_) {}
    const char* name;
    double flops, bytes;
    const char* implementation = "";
    Event start, stop;
  };
  void begin(const char* name, double flops, double bytes);

  cudaStream_t stream_;
  bool timing_ = false;
  std::deque<Call> calls_;  // a deque, since events cannot be moved
};

}  // namespace weft::cuda
