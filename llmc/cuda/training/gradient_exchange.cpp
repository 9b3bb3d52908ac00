#include "llmc/cuda/training/gradient_exchange.h"

#include <algorithm>
#include <span>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/op/optim/rank_sum.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/runtime/fork.h"

namespace weft::cuda {

std::vector<Range> shifted(std::vector<Range> parts, std::int64_t by) {
  for (Range& part : parts) part = {part.begin + by, part.end + by};
  return parts;
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "exchange between ranks");
  return status != cudaStreamCaptureStatusNone;
}

GradientExchange::GradientExchange(const TensorTable& table, const TrainOptions& options, const Sharding& sharding,
                                   const Peers& peers, OperatorClock& clock, cudaStream_t stream)
    : table_(table),
      options_(options),
      sharding_(sharding),
      peers_(peers),
      clock_(clock),
      passes_(stream),
      computed_(gradient_plan(sharding)),
      part_sums_(part_sum_plan(sharding)),
      rank_sum_(rank_sum_plan(table, options)),
      received_(received_plan(sharding)),
      unsent_(sharding.buckets.size()) {
  for (DeviceArena* arena : {&computed_, &part_sums_, &rank_sum_, &received_}) arena->clear(stream);
  if (!has_peers()) return;
  constexpr int kBeforeOthers = -1;  // a higher priority: gradients from other ranks are added as soon as they arrive
  exchanges_.emplace(kBeforeOthers);
  const auto new_event = [] { return std::make_unique<Event>(cudaEventDisableTiming); };
  for (std::size_t s = 0; s < sharding.sections.size(); ++s) ready_.push_back(new_event());
  for (std::size_t b = 0; b < sharding.buckets.size(); ++b) exchanged_.push_back(new_event());
}

float* GradientExchange::values() const {
  const bool of_virtual_ranks = !has_peers() && options_.virtual_ranks > 1 && ranks_done_ > 0;
  return (sharding_.gradients_sharded ? part_sums_ : of_virtual_ranks ? rank_sum_ : computed_).at<float>(0);
}

// ---- the states of a step -------------------------------------------------------------------------------------------

// An abandoned step may still be sending gradients. After a complete step only parameters are in transfer, for which the next
// forward pass waits where it reads them.
void GradientExchange::begin() {
  if (has_peers() && state_ != State::summed) join();
  state_ = State::stale;
  micro_batches_ = ranks_done_ = 0;
  unsent_ = sharding_.buckets.size();
}

Accumulate GradientExchange::begin_forward() {
  if (state_ == State::summed || (state_ == State::complete && ranks_done_ == ranks_of_process())) {
    fail(Exit::internal, "more micro-batches than a step has");
  }
  if (state_ == State::complete) {  // the gradients of the next rank overwrite those of this one
    if (has_peers()) join();
    state_ = State::stale;
    unsent_ = sharding_.buckets.size();
  }
  return state_ == State::stale ? Accumulate::no : Accumulate::yes;
}

void GradientExchange::end_forward() {
  if (state_ == State::stale) state_ = State::head;
  if (is_last_micro_batch() && sharding_.head_section != 0) exchange_from(sharding_.head_section);
}

Accumulate GradientExchange::begin_backward() const {
  if (state_ != State::head && state_ != State::computed) fail(Exit::internal, "backward() without a forward()");
  return state_ == State::head ? Accumulate::no : Accumulate::yes;
}

std::optional<std::int64_t> GradientExchange::end_backward() {
  state_ = State::computed;
  const bool last = is_last_micro_batch();
  ++micro_batches_;
  if (!last || (!has_peers() && options_.virtual_ranks == 1)) return {};
  return complete_rank();
}

// Sends what has not been sent. The gradients of a virtual rank are added to those of the ranks before it.
std::int64_t GradientExchange::complete_rank() {
  exchange_from(0);
  if (!has_peers()) {
    float* const sum = rank_sum_.at<float>(0);
    const float* const pieces[] = {sum, computed_.at<float>(0)};
    const std::size_t first = ranks_done_ == 0 ? 1 : 0;
    const std::int64_t count = table_.arena_elements();
    clock_.run("sum of ranks", 0, static_cast<double>(3 - first) * static_cast<double>(count) * sizeof(float),
               [&] { add_ranks(sum, std::span(pieces).subspan(first), count, passes_); });
  }
  state_ = State::complete;
  micro_batches_ = 0;
  return ranks_done_++;
}

// Those of virtual ranks are read from their sum. Sharded gradients are zeroed where they are summed.
void GradientExchange::zero_stale() {
  if (!has_peers() && ranks_done_ > 0) return;
  if (sharding_.gradients_sharded) {
    for (; unsent_ > 0; --unsent_) {
      const std::size_t b = unsent_ - 1;
      float* const sum = part_sums_.at<float>(0) + sharding_.sum_begins[b];
      const std::int64_t count = sharding_.buckets[b].parts[my_rank()].size();
      check(cudaMemsetAsync(sum, 0, static_cast<std::size_t>(count) * sizeof(float), passes_), "zero_gradients");
    }
  } else if (state_ == State::stale || state_ == State::head) {
    zero_where([&](const TensorSpec&, std::size_t section) {
      return state_ == State::stale || section != sharding_.head_section;
    });
  }
  if (state_ == State::stale || state_ == State::head) state_ = State::computed;
}

std::optional<std::int64_t> GradientExchange::finish() {
  zero_stale();
  if (!sharding_.gradients_sharded) check(cudaEventRecord(own_work_, passes_), "statistics");
  if (!has_peers() || state_ == State::summed) return {};
  if (ranks_done_ != ranks_of_process() && ranks_of_process() > 1) {
    fail(Exit::internal, "statistics of a step before its last round");
  }
  for (const std::unique_ptr<Event>& event : ready_) check(cudaEventRecord(*event, passes_), "statistics");
  std::optional<std::int64_t> rank;
  if (ranks_done_ == 0) rank = complete_rank();
  join();
  state_ = State::summed;
  return rank;
}

// ---- in the lists ---------------------------------------------------------------------------------------------------

// Zeroes the gradients for which which(spec, section).
template <typename Which>
void GradientExchange::zero_where(const Which& which) {
  for (const TensorSpec& spec : table_.specs()) {
    const std::size_t section = sharding_.section_of(spec);
    if (!which(spec, section)) continue;
    float* const gradient = computed_.at<float>(0) + spec.offset + sharding_.gradient_shift(section);
    check(cudaMemsetAsync(gradient, 0, static_cast<std::size_t>(spec.elements) * sizeof(float), passes_),
          "zero_gradients");
  }
}

void GradientExchange::zero_accumulated() {
  zero_where([&](const TensorSpec& spec, std::size_t section) {
    const bool takes_turns = sharding_.gradients_sharded && section != 0 && section != sharding_.head_section;
    return !takes_turns && accumulates(spec, section);
  });
}

void GradientExchange::take_slot(std::int64_t l) {
  if (!sharding_.gradients_sharded) return;
  const std::size_t section = static_cast<std::size_t>(l) + 1, before = section + kGradientSlots;
  for (std::size_t b = 0; b < sharding_.buckets.size() && before < sharding_.end_of_layers(); ++b) {
    if (sharding_.buckets[b].section == before) check(cudaStreamWaitEvent(passes_, *exchanged_[b]), "backward");
  }
  zero_where([&](const TensorSpec& spec, std::size_t s) { return s == section && accumulates(spec, s); });
}

void GradientExchange::ready(std::size_t section) {
  if (!has_peers()) return;
  const unsigned flags = is_captured(passes_) ? cudaEventRecordExternal : cudaEventRecordDefault;
  check(cudaEventRecordWithFlags(*ready_[section], passes_, flags), "exchange between ranks");
  if (sharding_.gradients_sharded && section != sharding_.head_section) exchange_from(section);
}

// ---- the exchange ---------------------------------------------------------------------------------------------------

void GradientExchange::fork(const char* action) {
  fork_stream(passes_, *exchanges_, forked_, action);
}

void GradientExchange::join() {
  check(cudaEventRecord(forked_, *exchanges_), "exchange between ranks");
  check(cudaStreamWaitEvent(passes_, forked_), "exchange between ranks");
}

// Queues the exchange of all buckets that are complete once `section` is, and have not been sent.
void GradientExchange::exchange_from(std::size_t section) {
  if (!has_peers()) return;
  while (unsent_ > 0 && sharding_.buckets[unsent_ - 1].section >= section) exchange(--unsent_);
}

// Each rank receives the others' gradients for its part of the bucket and adds all in the order of the ranks. If the
// update is not sharded, all ranks then receive all sums.
void GradientExchange::exchange(std::size_t number) {
  const Bucket& bucket = sharding_.buckets[number];
  check(cudaStreamWaitEvent(*exchanges_, *ready_[bucket.section]), "exchange between ranks");
  delay_point(*exchanges_, DelayPoint::forked);
  const std::vector<Range> parts = shifted(bucket.parts, sharding_.gradient_shift(bucket.section));
  float* const gradients = computed_.at<float>(0);
  const float* received = received_.at<float>(0);
  const Range mine = parts[my_rank()];
  peers_.device_ranks->exchange(gradients, parts, received_.at<float>(0), *exchanges_);
  float* const part_sum = part_sums_.at<float>(0) + sharding_.sum_begins[number];
  std::vector<const float*> pieces;
  if (ranks_done_ > 0) pieces.push_back(part_sum);
  for (std::size_t r = 0; r < parts.size(); ++r) {
    if (r == my_rank()) {
      pieces.push_back(gradients + mine.begin);
    } else {
      pieces.push_back(received);
      received += mine.size();
    }
  }
  const bool last = ranks_done_ + 1 == ranks_of_process();
  add_ranks(last && !sharding_.gradients_sharded ? gradients + mine.begin : part_sum, pieces, mine.size(), *exchanges_);
  check(cudaEventRecord(*exchanged_[number], *exchanges_), "exchange between ranks");
  if (last && !sharding_.sharded) gather(gradients, bucket.parts);
}

}  // namespace weft::cuda
