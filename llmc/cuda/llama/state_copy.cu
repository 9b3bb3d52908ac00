#include "llmc/cuda/llama/state_copy.h"

#include <cstring>

#include "llmc/base/dtype.h"
#include "llmc/base/error.h"
#include "llmc/cuda/op/adamw.h"

namespace weft::cuda {

void join_host_masters(const std::uint16_t* high, const std::int16_t* low, float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = join_master({high[i], low[i]});
    std::memcpy(&values[i], &bits, sizeof bits);
  }
}

PinnedStateCopy::PinnedStateCopy(const TensorTable& table, const Source& source, cudaStream_t training,
                                 cudaEvent_t copied)
    : count_(static_cast<std::uint64_t>(table.arena_elements())),
      source_(source),
      training_(training),
      copied_(copied),
      buffer_(state_copy_bytes(table)) {}

std::uint64_t PinnedStateCopy::begin_of(TensorRole role) const {
  const std::uint64_t arena = sizeof(float) * count_;
  switch (role) {
    case TensorRole::parameter:
      return 0;
    case TensorRole::moment1:
      return arena;
    case TensorRole::moment2:
      return 2 * arena;
    case TensorRole::gradient:
      break;
  }
  fail(Exit::internal, "a copy of the state has no gradients");
}

void PinnedStateCopy::copy(std::uint64_t offset, const std::byte* device, std::uint64_t bytes) {
  check(cudaMemcpyAsync(buffer_.at<std::byte>(offset), device, bytes, cudaMemcpyDeviceToHost, stream_),
        "copying the state");
}

void PinnedStateCopy::take() {
  check(cudaEventRecord(ready_, training_), "copying the state");
  check(cudaStreamWaitEvent(stream_, ready_), "copying the state");
  if (source_.low != nullptr) {
    copy(0, source_.parameters, sizeof(std::uint16_t) * count_);
    copy(sizeof(std::uint16_t) * count_, source_.low, sizeof(std::int16_t) * count_);
  } else {
    copy(0, source_.parameters, sizeof(float) * count_);
  }
  copy(begin_of(TensorRole::moment1), source_.moment1, source_.moment_bytes * count_);
  copy(begin_of(TensorRole::moment2), source_.moment2, source_.moment_bytes * count_);
  check(cudaEventRecord(copied_, stream_), "copying the state");
}

const float* PinnedStateCopy::read(TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t count,
                                   float* buffer) const {
  check(cudaEventSynchronize(copied_), "copying the state");
  const std::uint64_t begin = begin_of(role), element = static_cast<std::uint64_t>(spec.offset) + first;
  if (role == TensorRole::parameter && source_.low != nullptr) {
    join_host_masters(buffer_.at<std::uint16_t>(sizeof(std::uint16_t) * element),
                      buffer_.at<std::int16_t>(sizeof(std::uint16_t) * (count_ + element)), buffer, count);
    return buffer;
  }
  if (role == TensorRole::parameter || source_.moment_bytes == sizeof(float)) {
    return buffer_.at<float>(begin + sizeof(float) * element);
  }
  convert_to_f32(buffer_.at<std::byte>(begin + sizeof(std::uint16_t) * element), DType::bf16, buffer, count);
  return buffer;
}

}  // namespace weft::cuda
