#include "llmc/cuda/fused/timeline_recorder.h"

#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

void TimelineRecorder::record(bool wanted) {
  if (!wanted) {
    memory_.reset();
  } else if (memory_ == nullptr) {
    MemoryPlan plan("fused decoding: timeline");
    plan.add(static_cast<std::uint64_t>(count()) * sizeof(std::uint64_t));
    memory_ = std::make_unique<DeviceArena>(plan);
  }
}

std::uint64_t* TimelineRecorder::begin(cudaStream_t stream) {
  if (memory_ == nullptr) return nullptr;
  memory_->clear(stream);
  return memory_->at<std::uint64_t>(0);
}

FusedTimeline TimelineRecorder::read(cudaStream_t stream) const {
  FusedTimeline timeline;
  if (memory_ == nullptr) return timeline;
  timeline.layers = layers_;
  timeline.blocks = blocks_;
  timeline.times.resize(static_cast<std::size_t>(count()));
  check(cudaMemcpyAsync(timeline.times.data(), memory_->at<std::uint64_t>(0),
                        timeline.times.size() * sizeof(std::uint64_t), cudaMemcpyDeviceToHost, stream),
        "timeline");
  check(cudaStreamSynchronize(stream), "timeline");
  return timeline;
}

}  // namespace weft::cuda
