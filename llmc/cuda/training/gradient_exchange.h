// The gradients of a training step: the arenas that hold them, whose they are, and their exchange between the ranks of a run, in
// a stream of its own beside the passes. A bucket leaves as soon as backward has completed its gradients.
//
// A process computes one or more ranks of a step, one after the other: a rank of several processes share.rounds of them, a model
// alone all virtual ranks. The states of a step, and the calls that lead from one to the next:
//
//   stale      begin(): the arenas hold what belongs to an earlier step or rank, and nothing is zeroed
//   head       end_forward(): the head's gradient is the rank's, the others are stale
//   computed   end_backward(): all are; micro-batches that follow accumulate. Also after zero_stale(), which writes zeros
//   complete   end_backward() of a rank's last micro-batch: its gradients are on their way to the other ranks, or in the sum of
//              the virtual ones. begin_forward() makes them stale for the next rank; after the last rank it is refused
//   summed     finish(): those that this process has are sums over all ranks. Only begin() follows
//
// A model alone without virtual ranks has any number of micro-batches and stays `computed`. A call out of order is Exit::internal.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/cuda/comm/device_ranks.h"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/operator_clock.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/cuda/training/plan.h"

namespace weft::cuda {

// The rank of a run; the pointers are null without other ranks.
struct Peers {
  Communicator* ranks = nullptr;
  DeviceRanks* device_ranks = nullptr;
  RankShare share;
};

// Parts of arrays in bytes, of elements of `size` bytes.
std::vector<Range> in_bytes(std::vector<Range> parts, std::size_t size);
// Whether what is queued in `stream` now becomes a part of a graph. Then events are external to it, so that work outside can wait
// for a part of a graph and a part of a graph for work outside.
bool is_captured(cudaStream_t stream);

class GradientExchange {
 public:
  // Everything belongs to the model; `stream` is that of its passes.
  GradientExchange(const TensorTable& table, const TrainOptions& options, const Sharding& sharding, const Peers& peers,
                   OperatorClock& clock, cudaStream_t stream);

  // Where gradients are while a pass computes them; Sharding::gradient_shift() says how they lie.
  const DeviceArena& computed() const { return computed_; }
  // The gradients of the step, or of the ranks so far.
  float* values() const;
  bool summed() const { return state_ == State::summed; }

  void begin();
  // Both return how a pass adds its gradients: the head's in forward, the others in backward.
  Accumulate begin_forward();
  void end_forward();
  Accumulate begin_backward() const;
  // The index among the ranks of this process of the one that this completes, if any. Its loss is complete, too.
  std::optional<std::int64_t> end_backward();
  // Zeroes what no micro-batch has stored since begin(); call it before gradients are read.
  void zero_stale();
  // Queues what is left to exchange. own_work() marks the end of this process's work before; if passes wait for other ranks
  // there is none, and it counts as complete.
  std::optional<std::int64_t> finish();
  cudaEvent_t own_work() const { return own_work_; }

  // ---- in the lists of the passes
  // Zeroes the gradients that backward accumulates even in the first micro-batch: those of norms and biases, and of an embedding that is not
  // also the head. With sharded gradients layers do it in take_slot().
  void zero_accumulated();
  // With sharded gradients: waits until the ranks have exchanged the gradients that were in layer l's place before.
  void take_slot(std::int64_t l);
  // The gradients of a section are complete, if this is the last micro-batch.
  void ready(std::size_t section);

  // ---- the stream of exchanges; with other ranks only
  cudaStream_t stream() const { return *exchanges_; }
  // Makes it wait for what is queued in the stream of the passes, and that wait for all exchanges.
  void fork(const char* action);
  void join();

 private:
  enum class State { stale, head, computed, complete, summed };
  std::size_t my_rank() const { return static_cast<std::size_t>(peers_.share.rank); }
  bool has_peers() const { return peers_.device_ranks != nullptr; }
  std::int64_t ranks_of_process() const { return has_peers() ? peers_.share.rounds : options_.virtual_ranks; }
  bool is_last_micro_batch() const { return micro_batches_ + 1 == options_.rank_micro_batches; }
  std::int64_t complete_rank();
  void add_rank();
  void exchange_from(std::size_t section);
  void exchange(std::size_t bucket);
  void zero_accumulated(std::size_t section);
  void zero(const TensorSpec& spec);

  const TensorTable& table_;
  const TrainOptions& options_;
  const Sharding& sharding_;
  const Peers& peers_;
  OperatorClock& clock_;
  const cudaStream_t passes_;
  DeviceArena computed_;
  DeviceArena part_sums_;  // see Sharding::sum_begins
  DeviceArena rank_sum_;   // sum of the gradients of completed virtual ranks; empty without them
  DeviceArena received_;   // gradients of other ranks, before they are added; empty without them
  std::optional<Stream> exchanges_;
  std::vector<std::unique_ptr<Event>> ready_, exchanged_;  // of sections; of buckets
  Event forked_{cudaEventDisableTiming}, own_work_{cudaEventDisableTiming};

  State state_ = State::stale;
  std::int64_t micro_batches_ = 0;  // of the current rank
  std::int64_t ranks_done_ = 0;     // of this process
  std::size_t unsent_ = 0;          // buckets in front of those that have been sent for the current rank
};

}  // namespace weft::cuda
