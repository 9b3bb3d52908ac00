// The device memory into which a fused kernel records a timeline.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "llmc/cuda/fused/timeline.h"
#include "llmc/cuda/runtime/arena.h"

namespace weft::cuda {

// Where a kernel of so many layers and blocks records its timeline, while it is wanted.
class TimelineRecorder {
 public:
  TimelineRecorder(std::int64_t layers, int blocks) : layers_(layers), blocks_(blocks) {}

  // Records from the next launch on, or forgets what was recorded.
  void record(bool wanted);
  bool wanted() const { return memory_ != nullptr; }
  // For the next launch in `stream`: the times, all 0; null where none are wanted.
  std::uint64_t* begin(cudaStream_t stream);
  // After a launch, for which it waits. Without times where none are wanted.
  FusedTimeline read(cudaStream_t stream) const;

 private:
  std::int64_t count() const { return (layers_ + 1) * kFusedPhases * blocks_; }

  std::int64_t layers_;
  int blocks_;
  std::unique_ptr<DeviceArena> memory_;
};

}  // namespace weft::cuda
