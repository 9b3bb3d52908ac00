// Transfers parameters, gradients and moments to and from the host, as fp32 and exactly: single tensors, and a copy of
// the whole state for saving.
#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "llmc/base/arena_layout.h"
#include "llmc/base/error.h"
#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/training/state_copy.h"
#include "llmc/cuda/training/training_model.h"

namespace weft::cuda {

template <typename S>
std::byte* TrainingModel<S>::address_of(TensorRole role, const Piece& piece) const {
  const auto element = static_cast<std::uint64_t>(piece.element), state = static_cast<std::uint64_t>(piece.state);
  switch (role) {
    case TensorRole::parameter:
      return own_parameters().template at<std::byte>((sharding_.parameters_sharded ? state : element) * sizeof(S));
    case TensorRole::gradient:
      return reinterpret_cast<std::byte*>(gradients_.values() + (sharding_.gradients_sharded ? state : element));
    case TensorRole::state1:
      return state1_arena_.at<std::byte>(state * moment_bytes(options_));
    case TensorRole::state2:
      return state2_arena_.at<std::byte>(static_cast<std::uint64_t>(sharding_.seconds.position_of(piece.element)) *
                                         moment_bytes(options_));
  }
  fail(Exit::internal, "unknown tensor role");
}

template <typename S>
void TrainingModel<S>::require_tensor(TensorRole role, const TensorSpec& spec) const {
  if (!has_tensor(optimizer(), role, spec)) fail(Exit::internal, "%s has no such state", spec.name.c_str());
}

// The tensor is found by its name, since `named` may come from the table of a file, whose tensors have other types.
template <typename S>
void TrainingModel<S>::read_tensor(TensorRole role, const TensorSpec& named, float* values) {
  if (role == TensorRole::gradient) gradients_.zero_stale();
  synchronize("reading a tensor");
  const TensorSpec& spec = table_.at(named.name);
  require_tensor(role, spec);
  const Range tensor = elements_of(spec);
  for (std::size_t b = 0; b < sharding_.buckets.size(); ++b) {
    const Bucket& bucket = sharding_.buckets[b];
    if (common(tensor, bucket.range).size() == 0) continue;
    const Range part = common(tensor, held(role, bucket));
    const std::int64_t state = sharding_.state_begins[b] + part.begin - held(role, bucket).begin;
    if (part.size() > 0) read_piece(role, {part.begin, state, part.size()}, values + (part.begin - spec.offset));
    if (!is_sharded(role)) continue;
    std::vector<Range> parts;
    for (const Range& each : bucket.parts) {
      const Range theirs = common(tensor, each);
      parts.push_back({theirs.begin - spec.offset, theirs.end - spec.offset});
    }
    peers_.ranks->gather(values, parts);
  }
}

template <typename S>
void TrainingModel<S>::read_piece(TensorRole role, const Piece& piece, float* values) {
  const auto count = static_cast<std::size_t>(piece.count);
  const bool split = role == TensorRole::parameter && kSplitMaster<S>;
  const bool is_bf16_moment = is_state(role) && options_.moments == Precision::bf16;
  if (!split && !is_bf16_moment) {
    check(cudaMemcpy(values, address_of(role, piece), count * sizeof(float), cudaMemcpyDeviceToHost),
          "reading a tensor");
    return;
  }
  std::vector<std::uint16_t> stored(count);  // bf16
  check(cudaMemcpy(stored.data(), address_of(role, piece), count * sizeof(std::uint16_t), cudaMemcpyDeviceToHost),
        "reading a tensor");
  if (!split) return convert_to_f32(stored.data(), DType::bf16, values, count);
  std::vector<std::int16_t> low(count);
  check(cudaMemcpy(low.data(), low_arena_.at<std::int16_t>(0) + piece.state, count * sizeof(std::int16_t),
                   cudaMemcpyDeviceToHost),
        "reading a tensor");
  join_host_masters(stored.data(), low.data(), values, count);
}

template <typename S>
void TrainingModel<S>::write_tensor(TensorRole role, const TensorSpec& named, const float* values) {
  if (role == TensorRole::gradient) gradients_.zero_stale();
  synchronize("writing a tensor");
  check(cudaEventSynchronize(state_copied_), "writing a tensor");
  if (role == TensorRole::parameter) buffers_.forget();
  if (role == TensorRole::parameter) merged_is_stale_ = true;
  if (role == TensorRole::parameter && fp8_) fp8_->weights_replaced();
  const TensorSpec& spec = table_.at(named.name);
  require_tensor(role, spec);
  const Range tensor = elements_of(spec);
  for (std::size_t b = 0; b < sharding_.buckets.size(); ++b) {
    const Bucket& bucket = sharding_.buckets[b];
    const Range own = held(role, bucket);
    const auto write = [&](const Range& range, bool has_state) {
      const Range part = common(tensor, range);
      if (part.size() == 0) return;
      const std::int64_t state = has_state ? sharding_.state_begins[b] + part.begin - own.begin : -1;
      write_piece(role, {part.begin, state, part.size()}, values + (part.begin - spec.offset));
    };
    write(own, true);
    if (role != TensorRole::parameter || sharding_.parameters_sharded) continue;
    // Every rank has all parameters, even where their state is sharded.
    write({bucket.range.begin, own.begin}, false);
    write({own.end, bucket.range.end}, false);
  }
}

template <typename S>
void TrainingModel<S>::write_frozen(const TensorSpec& named, const float* values) {
  if (!options_.lora) return TrainModel::write_frozen(named, values);
  synchronize("writing a tensor");
  merged_is_stale_ = true;
  const TensorSpec& spec = frozen_table_.at(named.name);
  if (rounds_frozen() && spec.kind == ValueKind::quants) return write_rounded(spec, values);
  // In pieces, by all threads: a model of 8 billion parameters in seconds.
  constexpr std::int64_t kUploaded = 8 << 20, kConverted = 1 << 16;
  std::vector<S> stored(static_cast<std::size_t>(std::min(spec.elements, kUploaded)));
  for (std::int64_t begin = 0; begin < spec.elements; begin += kUploaded) {
    const std::int64_t count = std::min(spec.elements - begin, kUploaded);
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < count; i += kConverted) {
      convert_from_f32(values + begin + i, kStorage<S>, stored.data() + i,
                       static_cast<std::size_t>(std::min(count - i, kConverted)));
    }
    const std::uint64_t bytes = static_cast<std::uint64_t>(begin) * sizeof(S);
    write_values(frozen_arena_.at<std::byte>(spec.byte_offset + bytes), stored.data(),
                 static_cast<std::size_t>(count) * sizeof(S));
  }
}

template <typename S>
void TrainingModel<S>::write_frozen_quantized(const TensorSpec& named, const std::byte* bytes) {
  const TensorSpec& spec = frozen_table_.at(named.name);
  if (!options_.lora || rounds_frozen() || spec.kind == ValueKind::floats)
    return TrainModel::write_frozen_quantized(named, bytes);
  synchronize("writing a tensor");
  merged_is_stale_ = true;
  write_values(frozen_arena_.at<std::byte>(spec.byte_offset), bytes, spec.bytes);
}

// A module of a frozen linear layer. Its modules have one scale, so they are rounded together, when the last one has come.
template <typename S>
void TrainingModel<S>::write_rounded(const TensorSpec& spec, const float* values) {
  for (std::int64_t l = 0; l < config_.num_layers; ++l) {
    for (const BlockLinear linear : kBlockLinears) {
      const std::vector<std::string> modules = names_of(config_).block(l).linear(linear);
      const auto module = std::find_if(modules.begin(), modules.end(),
                                       [&](const std::string& name) { return weight_of(name) == spec.name; });
      if (module == modules.end()) continue;
      const LinearSize size = linear_size(config_, linear);
      const auto number = static_cast<std::size_t>(module - modules.begin());
      UnroundedLinear& whole = unrounded_[{l, linear}];
      if (whole.written.empty()) whole.values = std::exchange(unrounded_buffer_, {});
      if (std::ssize(whole.values) < size.OC * size.C) whole.values.resize(static_cast<std::size_t>(size.OC * size.C));
      whole.written.resize(modules.size());
      whole.written[number] = true;
      const std::int64_t begin = module_rows(config_, linear, number).begin * size.C;
      std::copy_n(values, spec.elements, whole.values.begin() + begin);
      if (std::count(whole.written.begin(), whole.written.end(), false) > 0) return;
      const Fp8Tensor rounded = round_tensor(std::span(whole.values).first(static_cast<std::size_t>(size.OC * size.C)),
                                             fp8_format(Fp8Kind::weight));
      const std::vector<float> scales(static_cast<std::size_t>(size.OC), std::ldexp(1.0f, -rounded.exponent));
      const TensorSpec &codes = frozen_table_.at(weight_of(modules.front())),
                       &of_rows = frozen_table_.at(scales_of(codes.name));
      write_values(frozen_arena_.at<std::byte>(codes.byte_offset), rounded.codes.data(), rounded.codes.size());
      write_values(frozen_arena_.at<std::byte>(of_rows.byte_offset), scales.data(), scales.size() * sizeof(float));
      fp8_->frozen_rounded(linear, l, rounded.exponent, rounded.counters);
      unrounded_buffer_ = std::move(whole.values);
      unrounded_.erase({l, linear});
      return;
    }
  }
  fail(Exit::internal, "%s: not in a linear layer of a block", spec.name.c_str());
}

// In the model's own stream: cudaMemcpy from pageable memory returns when the values have left `values`, and the next
// step would not wait for their arrival (CUDA Runtime API, "API synchronization behavior").
template <typename S>
void TrainingModel<S>::write_values(std::byte* to, const void* values, std::size_t bytes) {
  check(cudaMemcpyAsync(to, values, bytes, cudaMemcpyHostToDevice, stream_), "writing a tensor");
  stream_.synchronize("writing a tensor");
}

// piece.state is negative for a parameter whose low half another rank has.
template <typename S>
void TrainingModel<S>::write_piece(TensorRole role, const Piece& piece, const float* values) {
  const auto count = static_cast<std::size_t>(piece.count);
  if (is_state(role) && options_.moments == Precision::bf16) {  // exact for values from read_tensor()
    std::vector<std::uint16_t> stored(count);
    convert_from_f32(values, DType::bf16, stored.data(), count);
    return write_values(address_of(role, piece), stored.data(), count * sizeof(std::uint16_t));
  }
  if (role != TensorRole::parameter || !kSplitMaster<S>) {
    return write_values(address_of(role, piece), values, count * sizeof(float));
  }
  // Masters are split into halves on the GPU, kMasters at a time.
  constexpr std::int64_t kMasters = 4 << 20;
  ArenaLayout layout("masters on their way to the GPU");
  float* staging = nullptr;
  std::int16_t* unwanted = nullptr;
  layout.reserve(&staging, std::min(piece.count, kMasters));
  layout.reserve(&unwanted, piece.state < 0 ? std::min(piece.count, kMasters) : 0);
  const DeviceArena arena(layout.plan());
  layout.bind(arena);
  auto* parameter = reinterpret_cast<bf16*>(address_of(role, piece));
  for (std::int64_t begin = 0; begin < piece.count; begin += kMasters) {
    const std::int64_t some = std::min(piece.count - begin, kMasters);
    std::int16_t* low = piece.state < 0 ? unwanted : low_arena_.at<std::int16_t>(0) + piece.state + begin;
    check(cudaMemcpyAsync(staging, values + begin, static_cast<std::size_t>(some) * sizeof(float),
                          cudaMemcpyHostToDevice, stream_),
          "writing a tensor");
    split_masters(parameter + begin, low, staging, some, stream_);
    stream_.synchronize("writing a tensor");
  }
}

template <typename S>
std::unique_ptr<StateCopy> TrainingModel<S>::make_state_copy() {
  if (sharding_.sharded) return TrainModel::make_state_copy();  // from all ranks, by read_tensor()
  return make_own_copy();
}

// In the arenas of the state the parts of buckets are in the order of the buckets, as in PackedRanges.
template <typename S>
std::vector<Range> TrainingModel<S>::own_elements() const {
  if (!sharding_.sharded) return TrainModel::own_elements();
  std::vector<Range> own;
  for (const Bucket& bucket : sharding_.buckets) own.push_back(bucket.parts[my_rank()]);
  return own;
}

template <typename S>
std::unique_ptr<StateCopy> TrainingModel<S>::make_own_copy() {
  PinnedStateCopy::Source source{};
  source.parameters = own_parameters().template at<std::byte>(0);
  source.parameters_packed = sharding_.parameters_sharded;
  source.low = kSplitMaster<S> ? low_arena_.at<std::byte>(0) : nullptr;
  source.state1 = state1_arena_.at<std::byte>(0);
  source.state2 = state2_arena_.at<std::byte>(0);
  source.state_bytes = moment_bytes(options_);
  return std::make_unique<PinnedStateCopy>(own_elements(), sharding_.seconds, source, stream_, state_copied_);
}

#define WEFT_INSTANTIATE(S)                                                                    \
  template void TrainingModel<S>::read_tensor(TensorRole, const TensorSpec&, float*);          \
  template void TrainingModel<S>::write_tensor(TensorRole, const TensorSpec&, const float*);   \
  template void TrainingModel<S>::write_frozen(const TensorSpec&, const float*);               \
  template void TrainingModel<S>::write_rounded(const TensorSpec&, const float*);              \
  template void TrainingModel<S>::write_frozen_quantized(const TensorSpec&, const std::byte*); \
  template std::unique_ptr<StateCopy> TrainingModel<S>::make_state_copy();                     \
  template std::vector<Range> TrainingModel<S>::own_elements() const;                          \
  template std::unique_ptr<StateCopy> TrainingModel<S>::make_own_copy();
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
