// What ranks exchange beside gradients: parameters that a rank has updated arrive before the next pass needs them, which the lists
// of lists.cpp mark by section of the arena; and the statistics of a step.
#include <vector>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/training/training_model.h"

namespace weft::cuda {

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
  const cudaStream_t stream = gradients_.stream();
  gradients_.fork("parameters");
  for (std::size_t b = 0; b < sharding_.buckets.size(); ++b) {
    if (sharding_.buckets[b].section != section) continue;
    const std::vector<Range> parts = shifted(sharding_.buckets[b].parts, parameter_shift(section));
    const Range mine = parts[my_rank()];
    if (mine.size() > 0) {
      const auto begin = static_cast<std::uint64_t>(mine.begin) * sizeof(S),
                 own = static_cast<std::uint64_t>(sharding_.state_begins[b]) * sizeof(S);
      check(cudaMemcpyAsync(parameter_arena_.at<std::byte>(begin), own_parameter_arena_.at<std::byte>(own),
                            static_cast<std::size_t>(mine.size()) * sizeof(S), cudaMemcpyDeviceToDevice, stream),
            "parameters");
    }
    gradients_.gather(parameter_arena_.at<S>(0), parts);
    check(cudaEventRecord(*parameters_ready_[b], stream), "parameters");
  }
}

// Gathers the losses of all ranks, the squares if each rank has those of its own blocks only, and what fp8 has met.
template <typename S>
void TrainingModel<S>::gather_statistics() {
  gradients_.fork("statistics");
  for (std::int64_t round = 0; round < peers_.share.rounds; ++round) {
    std::vector<Range> totals;
    for (std::int64_t r = round * peers_.share.ranks; std::ssize(totals) < peers_.share.ranks; ++r) {
      totals.push_back({r, r + 1});
    }
    gradients_.gather(work_.rank_totals, totals);
  }
  if (sharding_.sharded) gradients_.gather(work_.squares, sharding_.squares_of_rank);
  if (work_.rank_counters != nullptr) {
    const std::int64_t slots = fp8_->slots();
    check(cudaMemcpyAsync(work_.rank_counters + peers_.share.rank * slots, fp8_->counters(),
                          static_cast<std::size_t>(slots) * sizeof(Fp8Counters), cudaMemcpyDeviceToDevice,
                          gradients_.stream()),
          "statistics");
    gradients_.gather(work_.rank_counters, shares(peers_.share.ranks * slots, peers_.share.ranks));
  }
  gradients_.join();
}

// Called after the update of this rank's part of a bucket.
template <typename S>
void TrainingModel<S>::gather_parameters(std::size_t bucket) {
  gradients_.fork("update");
  gradients_.gather(parameter_arena_.at<S>(0), sharding_.buckets[bucket].parts);
  check(cudaEventRecord(*parameters_ready_[bucket], gradients_.stream()), "update");
}

// Waits for the GPU, including transfers from other ranks.
template <typename S>
void TrainingModel<S>::synchronize(const char* action) {
  if (!has_peers()) return stream_.synchronize(action);
  gradients_.join();
  peers_.device_ranks->wait(stream_, nullptr, action);
}

#define WEFT_INSTANTIATE(S)                                             \
  template void TrainingModel<S>::parameters_needed(std::size_t);       \
  template void TrainingModel<S>::parameters_needed_again(std::size_t); \
  template void TrainingModel<S>::fetch_parameters(std::size_t);        \
  template void TrainingModel<S>::gather_statistics();                  \
  template void TrainingModel<S>::gather_parameters(std::size_t);       \
  template void TrainingModel<S>::synchronize(const char*);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
