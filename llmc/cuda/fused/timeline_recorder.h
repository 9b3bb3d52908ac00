// Device memory into which a fused kernel records a timeline.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "llmc/cuda/fused/timeline.h"
#include "llmc/cuda/runtime/arena.h"

namespace weft::cuda {

// Allocated only while a timeline is wanted.
class TimelineRecorder {
 public:
  TimelineRecorder(std::int64_t layers, int blocks) : layers_(layers), blocks_(blocks) {}

  // true: allocates, and records from the next launch on. false: discards what was recorded.
  void record(bool wanted);
  bool wanted() const { return memory_ != nullptr; }
  // The zeroed times for the next launch in `stream`, on the device; null where no timeline is wanted.
  std::uint64_t* begin(cudaStream_t stream);
  // Waits for the stream and copies the times to the host. Empty where no timeline is wanted.
  FusedTimeline read(cudaStream_t stream) const;

 private:
  std::int64_t count() const { return (layers_ + 1) * kFusedPhases * blocks_; }

  std::int64_t layers_;
  int blocks_;
  std::unique_ptr<DeviceArena> memory_;
};

}  // namespace weft::cuda
