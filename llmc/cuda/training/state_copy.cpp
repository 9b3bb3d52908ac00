#include "llmc/cuda/training/state_copy.h"

#include <cstring>
#include <utility>

#include "llmc/base/dtype.h"
#include "llmc/base/error.h"
#include "llmc/cuda/op/optim/adamw.h"
#include "llmc/cuda/runtime/fork.h"

namespace weft::cuda {

void join_host_masters(const std::uint16_t* high, const std::int16_t* low, float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = join_master({high[i], low[i]});
    std::memcpy(&values[i], &bits, sizeof bits);
  }
}

PinnedStateCopy::PinnedStateCopy(std::vector<Range> elements, PackedRanges seconds, const Source& source,
                                 cudaStream_t training, cudaEvent_t copied)
    : elements_(std::move(elements)),
      seconds_(std::move(seconds)),
      count_(static_cast<std::uint64_t>(elements_.size())),
      source_(source),
      training_(training),
      copied_(copied),
      buffer_(sizeof(float) * (2 * count_ + static_cast<std::uint64_t>(seconds_.size()))) {}

std::uint64_t PinnedStateCopy::begin_of(TensorRole role) const {
  const std::uint64_t arena = sizeof(float) * count_;
  switch (role) {
    case TensorRole::parameter:
      return 0;
    case TensorRole::state1:
      return arena;
    case TensorRole::state2:
      return 2 * arena;
    case TensorRole::gradient:
      break;
  }
  fail(Exit::internal, "a copy of the state has no gradients");
}

void PinnedStateCopy::copy(std::uint64_t offset, const std::byte* device, std::uint64_t bytes) {
  if (bytes == 0) return;
  check(cudaMemcpyAsync(buffer_.at<std::byte>(offset), device, bytes, cudaMemcpyDeviceToHost, stream_),
        "copying the state");
}

void PinnedStateCopy::copy_parameters(std::uint64_t element_bytes) {
  if (source_.parameters_packed) return copy(0, source_.parameters, element_bytes * count_);
  for (std::size_t i = 0; i < elements_.ranges().size(); ++i) {
    const Range& range = elements_.ranges()[i];
    copy(element_bytes * static_cast<std::uint64_t>(elements_.begin_of(i)),
         source_.parameters + element_bytes * static_cast<std::uint64_t>(range.begin),
         element_bytes * static_cast<std::uint64_t>(range.size()));
  }
}

void PinnedStateCopy::take() {
  fork_stream(training_, stream_, ready_, "copying the state");
  if (source_.low != nullptr) {
    copy_parameters(sizeof(std::uint16_t));
    copy(sizeof(std::uint16_t) * count_, source_.low, sizeof(std::int16_t) * count_);
  } else {
    copy_parameters(sizeof(float));
  }
  copy(begin_of(TensorRole::state1), source_.state1, source_.state_bytes * count_);
  copy(begin_of(TensorRole::state2), source_.state2, source_.state_bytes * static_cast<std::uint64_t>(seconds_.size()));
  check(cudaEventRecord(copied_, stream_), "copying the state");
}

const float* PinnedStateCopy::read(TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t count,
                                   float* buffer) const {
  check(cudaEventSynchronize(copied_), "copying the state");
  const std::uint64_t begin = begin_of(role);
  const PackedRanges& ranges = role == TensorRole::state2 ? seconds_ : elements_;
  const auto element = static_cast<std::uint64_t>(ranges.position_of(spec.offset + static_cast<std::int64_t>(first)));
  if (role == TensorRole::parameter && source_.low != nullptr) {
    join_host_masters(buffer_.at<std::uint16_t>(sizeof(std::uint16_t) * element),
                      buffer_.at<std::int16_t>(sizeof(std::uint16_t) * (count_ + element)), buffer, count);
    return buffer;
  }
  if (role == TensorRole::parameter || source_.state_bytes == sizeof(float)) {
    return buffer_.at<float>(begin + sizeof(float) * element);
  }
  convert_to_f32(buffer_.at<std::byte>(begin + sizeof(std::uint16_t) * element), DType::bf16, buffer, count);
  return buffer;
}

}  // namespace weft::cuda
