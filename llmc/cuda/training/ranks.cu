// The exchange between the ranks of a run, in its own stream beside the passes: the gradients of a bucket are sent as
// soon as backward has completed them, and parameters that a rank has updated arrive before the next forward pass needs
// them. The lists of lists.cu mark both by section of the arena. The marks are events that are external to the captured
// graphs of the lists, so that work outside can wait for a part of a graph and a part of a graph for work outside.
#include <algorithm>
#include <utility>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/optim/rank_sum.h"
#include "llmc/cuda/runtime/fork.h"
#include "llmc/cuda/training/training_model.h"

namespace weft::cuda {

namespace {

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "exchange between ranks");
  return status != cudaStreamCaptureStatusNone;
}

// The parts as bytes of elements of `size` bytes.
std::vector<Range> in_bytes(std::vector<Range> parts, std::size_t size) {
  const auto bytes = static_cast<std::int64_t>(size);
  for (Range& part : parts) part = {part.begin * bytes, part.end * bytes};
  return parts;
}

}  // namespace

// Called in the lists: the gradients of a section are complete, if this is the last micro-batch.
template <typename S>
void TrainingModel<S>::gradients_ready(std::size_t section) {
  if (!has_peers()) return;
  const unsigned flags = is_captured(stream_) ? cudaEventRecordExternal : cudaEventRecordDefault;
  check(cudaEventRecordWithFlags(*gradients_ready_[section], stream_, flags), "exchange between ranks");
  if (sharding_.gradients_sharded && section != head_section()) exchange_from(section);
}

// Called in the lists: what follows reads the parameters of a section.
template <typename S>
void TrainingModel<S>::parameters_needed(std::size_t section) {
  if (!sharding_.sharded) return;
  fetch_parameters(section);
  const unsigned flags = is_captured(stream_) ? cudaEventWaitExternal : cudaEventWaitDefault;
  for (std::size_t b = 0; b < sharding_.buckets.size(); ++b) {
    if (sharding_.buckets[b].section != section) continue;
    check(cudaStreamWaitEvent(stream_, *parameters_ready_[b], flags), "exchange between ranks");
  }
}

// The same in backward, needed for sharded parameters only: the forward pass may have overwritten them by other
// sections.
template <typename S>
void TrainingModel<S>::parameters_needed_again(std::size_t section) {
  if (sharding_.parameters_sharded) parameters_needed(section);
}

// Called in the lists: queues fetching a section's sharded parameters into their place, unless they are there, after
// all work queued so far. So call it when no later operator reads the parameters that were in that place, and as early
// before parameters_needed() as that allows.
template <typename S>
void TrainingModel<S>::fetch_parameters(std::size_t section) {
  if (!sharding_.parameters_sharded || !buffers_.take(section)) return;
  const cudaStream_t stream = *exchange_stream_;
  fork_stream(stream_, stream, forked_, "parameters");
  for (std::size_t b = 0; b < sharding_.buckets.size(); ++b) {
    if (sharding_.buckets[b].section != section) continue;
    std::vector<Range> parts = sharding_.buckets[b].parts;
    for (Range& part : parts) {
      part.begin += parameter_shift(section);
      part.end += parameter_shift(section);
    }
    const Range mine = parts[my_rank()];
    if (mine.size() > 0) {
      const auto begin = static_cast<std::uint64_t>(mine.begin) * sizeof(S),
                 own = static_cast<std::uint64_t>(sharding_.state_begins[b]) * sizeof(S);
      check(cudaMemcpyAsync(parameter_arena_.at<std::byte>(begin), own_parameter_arena_.at<std::byte>(own),
                            static_cast<std::size_t>(mine.size()) * sizeof(S), cudaMemcpyDeviceToDevice, stream),
            "parameters");
    }
    peers_.device_ranks->gather(parameter_arena_.at<std::byte>(0), in_bytes(std::move(parts), sizeof(S)), stream);
    check(cudaEventRecord(*parameters_ready_[b], stream), "parameters");
  }
}

// Queues the exchange of all buckets that are complete once `section` is, and have not been sent.
template <typename S>
void TrainingModel<S>::exchange_from(std::size_t section) {
  if (!has_peers()) return;
  for (std::size_t b = sharding_.buckets.size(); b-- > 0;) {
    if (sharding_.buckets[b].section >= section && !sent_[b]) exchange(b);
  }
}

// Each rank receives the others' gradients for its part of the bucket and adds all in the order of the ranks. If the
// update is not sharded, all ranks then receive all sums.
template <typename S>
void TrainingModel<S>::exchange(std::size_t number) {
  const Bucket& bucket = sharding_.buckets[number];
  const cudaStream_t stream = *exchange_stream_;
  check(cudaStreamWaitEvent(stream, *gradients_ready_[bucket.section]), "exchange between ranks");
  delay_point(stream, DelayPoint::forked);
  std::vector<Range> parts = bucket.parts;  // shifted to where they lie while they are computed
  for (Range& part : parts) {
    part.begin += gradient_shift(bucket.section);
    part.end += gradient_shift(bucket.section);
  }
  float* const gradients = gradient_arena_.at<float>(0);
  const float* received = received_arena_.at<float>(0);
  const Range mine = parts[my_rank()];
  peers_.device_ranks->exchange(gradients, parts, received_arena_.at<float>(0), stream);
  float* const part_sum = part_sum_arena_.at<float>(0) + sharding_.sum_begins[number];
  std::vector<const float*> pieces;
  if (rounds_done_ > 0) pieces.push_back(part_sum);
  for (std::size_t r = 0; r < parts.size(); ++r) {
    if (r == my_rank()) {
      pieces.push_back(gradients + mine.begin);
    } else {
      pieces.push_back(received);
      received += mine.size();
    }
  }
  const bool last = rounds_done_ + 1 == peers_.share.rounds;
  add_ranks(last && !sharding_.gradients_sharded ? gradients + mine.begin : part_sum, pieces, mine.size(), stream);
  check(cudaEventRecord(*gradients_exchanged_[number], stream), "exchange between ranks");
  if (last && !sharding_.sharded) {
    peers_.device_ranks->gather(reinterpret_cast<std::byte*>(gradients), in_bytes(bucket.parts, sizeof(float)), stream);
  }
  sent_[number] = true;
}

// Called before the first micro-batch of a rank of the step. Its gradients overwrite those of the previous round.
template <typename S>
void TrainingModel<S>::begin_round() {
  if (rounds_done_ == peers_.share.rounds) fail(Exit::internal, "more micro-batches than a rank has in a step");
  if (rounds_done_ == 0) return;
  finish_exchange();
  std::fill(sent_.begin(), sent_.end(), false);
  head_stale_ = others_stale_ = true;
}

// Called when the gradients of a rank of the step are complete: sends what has not been sent, and stores its loss.
template <typename S>
void TrainingModel<S>::finish_round() {
  exchange_from(kEmbeddingSection);
  LossTotal* const total = work_.rank_totals + rounds_done_ * peers_.share.ranks + peers_.share.rank;
  check(cudaMemcpyAsync(total, work_.loss_total, sizeof *total, cudaMemcpyDeviceToDevice, stream_), "losses");
  check(cudaMemsetAsync(work_.loss_total, 0, sizeof *total, stream_), "losses");
  rank_micro_batches_ = 0;
  ++rounds_done_;
}

// For sharded gradients: zeroes the sums of sections that no backward has computed since the last zero_gradients().
template <typename S>
void TrainingModel<S>::zero_unsent_gradients() {
  for (std::size_t b = 0; b < sharding_.buckets.size(); ++b) {
    if (sent_[b]) continue;
    float* const sum = part_sum_arena_.at<float>(0) + sharding_.sum_begins[b];
    const std::int64_t count = sharding_.buckets[b].parts[my_rank()].size();
    check(cudaMemsetAsync(sum, 0, static_cast<std::size_t>(count) * sizeof(float), stream_), "zero_gradients");
    sent_[b] = true;
  }
}

// Makes the step's stream wait for all exchanges that are queued.
template <typename S>
void TrainingModel<S>::finish_exchange() {
  check(cudaEventRecord(forked_, *exchange_stream_), "exchange between ranks");
  check(cudaStreamWaitEvent(stream_, forked_), "exchange between ranks");
}

// Gathers the losses of all ranks, the squares if each rank has those of its own blocks only, and what fp8 has met.
template <typename S>
void TrainingModel<S>::gather_statistics() {
  fork_stream(stream_, *exchange_stream_, forked_, "statistics");
  const auto gather = [&](auto* values, const std::vector<Range>& parts) {
    peers_.device_ranks->gather(reinterpret_cast<std::byte*>(values), in_bytes(parts, sizeof *values),
                                *exchange_stream_);
  };
  for (std::int64_t round = 0; round < peers_.share.rounds; ++round) {
    std::vector<Range> totals;
    for (std::int64_t r = round * peers_.share.ranks; std::ssize(totals) < peers_.share.ranks; ++r) {
      totals.push_back({r, r + 1});
    }
    gather(work_.rank_totals, totals);
  }
  if (sharding_.sharded) gather(work_.squares, sharding_.squares_of_rank);
  if (work_.rank_tallies != nullptr) {
    const std::int64_t slots = fp8_->slots();
    check(cudaMemcpyAsync(work_.rank_tallies + peers_.share.rank * slots, fp8_->tallies(),
                          static_cast<std::size_t>(slots) * sizeof(Fp8Tally), cudaMemcpyDeviceToDevice,
                          *exchange_stream_),
          "statistics");
    gather(work_.rank_tallies, shares(peers_.share.ranks * slots, peers_.share.ranks));
  }
  finish_exchange();
}

// Called after the update of this rank's part of a bucket.
template <typename S>
void TrainingModel<S>::gather_parameters(std::size_t bucket) {
  fork_stream(stream_, *exchange_stream_, forked_, "update");
  peers_.device_ranks->gather(parameter_arena_.at<std::byte>(0), in_bytes(sharding_.buckets[bucket].parts, sizeof(S)),
                              *exchange_stream_);
  check(cudaEventRecord(*parameters_ready_[bucket], *exchange_stream_), "update");
}

// Waits for the GPU, including transfers from other ranks.
template <typename S>
void TrainingModel<S>::synchronize(const char* action) {
  if (!has_peers()) return stream_.synchronize(action);
  finish_exchange();
  peers_.device_ranks->wait(stream_, nullptr, action);
}

#define WEFT_INSTANTIATE(S)                                             \
  template void TrainingModel<S>::gradients_ready(std::size_t);         \
  template void TrainingModel<S>::parameters_needed(std::size_t);       \
  template void TrainingModel<S>::parameters_needed_again(std::size_t); \
  template void TrainingModel<S>::fetch_parameters(std::size_t);        \
  template void TrainingModel<S>::exchange_from(std::size_t);           \
  template void TrainingModel<S>::begin_round();                        \
  template void TrainingModel<S>::finish_round();                       \
  template void TrainingModel<S>::zero_unsent_gradients();              \
  template void TrainingModel<S>::finish_exchange();                    \
  template void TrainingModel<S>::gather_statistics();                  \
  template void TrainingModel<S>::gather_parameters(std::size_t);       \
  template void TrainingModel<S>::synchronize(const char*);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
