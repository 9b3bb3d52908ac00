// Parameters, gradients and moments to and from the host, as fp32 and exactly: single tensors, and a copy of the whole
// state for saving.
#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/llama/llama_model.h"
#include "llmc/cuda/llama/state_copy.h"

namespace weft::cuda {

// By the name: the spec may come from the table of a file, whose tensors lie in other types and so at other bytes.
template <typename S>
std::byte* Llama<S>::address_of(TensorRole role, const TensorSpec& named) const {
  const TensorSpec& spec = table_.at(named.name);
  const std::uint64_t offset = static_cast<std::uint64_t>(spec.offset);
  switch (role) {
    case TensorRole::parameter:
      return parameter_arena_.at<std::byte>(spec.byte_offset);
    case TensorRole::gradient:
      return gradient_arena_.at<std::byte>(offset * sizeof(float));
    case TensorRole::moment1:
      return moment1_arena_.at<std::byte>(offset * moment_bytes(options_));
    case TensorRole::moment2:
      return moment2_arena_.at<std::byte>(offset * moment_bytes(options_));
  }
  fail(Exit::internal, "unknown tensor role");
}

template <typename S>
void Llama<S>::read_tensor(TensorRole role, const TensorSpec& spec, float* values) {
  if (role == TensorRole::gradient) zero_stale_gradients();
  stream_.synchronize("reading a tensor");
  const auto count = static_cast<std::size_t>(spec.elements);
  const bool split = role == TensorRole::parameter && kSplitMaster<S>;
  if (!split && !is_bf16_moment(role)) {
    check(cudaMemcpy(values, address_of(role, spec), count * sizeof(float), cudaMemcpyDeviceToHost),
          "reading a tensor");
    return;
  }
  std::vector<std::uint16_t> stored(count);  // bf16
  check(cudaMemcpy(stored.data(), address_of(role, spec), count * sizeof(std::uint16_t), cudaMemcpyDeviceToHost),
        "reading a tensor");
  if (!split) return convert_to_f32(stored.data(), DType::bf16, values, count);
  std::vector<std::int16_t> low(count);
  check(cudaMemcpy(low.data(), low_arena_.at<std::int16_t>(0) + spec.offset, count * sizeof(std::int16_t),
                   cudaMemcpyDeviceToHost),
        "reading a tensor");
  join_host_masters(stored.data(), low.data(), values, count);
}

template <typename S>
void Llama<S>::write_tensor(TensorRole role, const TensorSpec& spec, const float* values) {
  if (role == TensorRole::gradient) zero_stale_gradients();
  stream_.synchronize("writing a tensor");
  check(cudaEventSynchronize(state_copied_), "writing a tensor");
  const auto count = static_cast<std::size_t>(spec.elements);
  if (is_bf16_moment(role)) {  // exact for what read_tensor() gave
    std::vector<std::uint16_t> stored(count);
    convert_from_f32(values, DType::bf16, stored.data(), count);
    check(cudaMemcpy(address_of(role, spec), stored.data(), count * sizeof(std::uint16_t), cudaMemcpyHostToDevice),
          "writing a tensor");
    return;
  }
  if (role != TensorRole::parameter || !kSplitMaster<S>) {
    check(cudaMemcpy(address_of(role, spec), values, count * sizeof(float), cudaMemcpyHostToDevice),
          "writing a tensor");
    return;
  }
  // Masters are split into halves on the GPU, a piece at a time.
  constexpr std::size_t kPiece = 4 << 20;
  MemoryPlan plan("masters on their way to the GPU");
  plan.add(std::min(count, kPiece) * sizeof(float));
  const DeviceArena staging(plan);
  auto* parameter = reinterpret_cast<bf16*>(address_of(role, spec));
  std::int16_t* low = low_arena_.at<std::int16_t>(0) + spec.offset;
  for (std::size_t begin = 0; begin < count; begin += kPiece) {
    const std::size_t piece = std::min(kPiece, count - begin);
    check(cudaMemcpyAsync(staging.at<float>(0), values + begin, piece * sizeof(float), cudaMemcpyHostToDevice, stream_),
          "writing a tensor");
    split_masters(parameter + begin, low + begin, staging.at<float>(0), static_cast<std::int64_t>(piece), stream_);
    stream_.synchronize("writing a tensor");
  }
}

template <typename S>
std::unique_ptr<StateCopy> Llama<S>::make_state_copy() {
  PinnedStateCopy::Source source{};
  source.parameters = parameter_arena_.at<std::byte>(0);
  source.low = kSplitMaster<S> ? low_arena_.at<std::byte>(0) : nullptr;
  source.moment1 = moment1_arena_.at<std::byte>(0);
  source.moment2 = moment2_arena_.at<std::byte>(0);
  source.moment_bytes = moment_bytes(options_);
  return std::make_unique<PinnedStateCopy>(table_, source, stream_, state_copied_);
}

#define WEFT_INSTANTIATE(S)                                                          \
  template std::byte* Llama<S>::address_of(TensorRole, const TensorSpec&) const;     \
  template void Llama<S>::read_tensor(TensorRole, const TensorSpec&, float*);        \
  template void Llama<S>::write_tensor(TensorRole, const TensorSpec&, const float*); \
  template std::unique_ptr<StateCopy> Llama<S>::make_state_copy();
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
