// What surrounds lists.cpp in a training step: the upload of tokens, CUDA graphs, statistics, the update, validation, and the
// timing of operators.
#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/op/gemm/ceilings.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/runtime/fork.h"
#include "llmc/cuda/training/training_model.h"

namespace weft::cuda {

// ---- micro-batches --------------------------------------------------------------------------------------------------

// The launches of forward() and of backward() are one graph each. `scale` and, with dropout, micro_step_ are all that
// differs from one run of a list to the next.
template <typename S>
void TrainingModel<S>::replay(StepGraph& graph, float scale, const std::function<void()>& launches) {
  // Launches that later steps do not have: a search for scales, or rounding that was due before.
  const bool special = fp8_ && (!fp8_->scales_known() || (!rounds_weights_ && !fp8_->has_all_weights()));
  if (!options_.graph || clock_.timing() || special) return launches();
  std::uint32_t scale_bits = 0;
  std::memcpy(&scale_bits, &scale, sizeof scale_bits);
  graph.run(stream_, {scale_bits, options_.dropout > 0 || options_.adapter_dropout > 0 ? micro_step_ : 0}, launches);
}

template <typename S>
void TrainingModel<S>::forward(const Batch& batch, std::uint64_t micro_step, float loss_scale) {
  const TraceRange range("forward");
  const Accumulate head = gradients_.begin_forward();
  micro_step_ = micro_step;
  training_ = true;
  round_stale_weights();
  // In the first micro-batch of each round, not when they are stale: what is captured once is replayed in every step.
  rounds_weights_ =
      fp8_ && !options_.lora && sharding_.sharded && !sharding_.parameters_sharded && head == Accumulate::no;
  upload(batch);
  const auto launches = [&] {
    forward_layers();
    classify(loss_scale, head, work_.loss_total);
  };
  if (sharding_.parameters_sharded) {  // no graph: it waits for parameters whose transfer is queued along with it
    launches();
  } else {
    replay(forward_graphs_[static_cast<int>(head)], loss_scale, launches);
  }
  if (rounds_weights_) fp8_->all_weights_rounded();
  rounds_weights_ = false;
  gradients_.end_forward();
}

template <typename S>
void TrainingModel<S>::backward() {
  if (!training_) fail(Exit::internal, "backward() without a forward()");
  const TraceRange range("backward");
  const Accumulate accumulate = gradients_.begin_backward();
  delay_point(stream_, DelayPoint::step);
  if (sharding_.gradients_sharded) {  // no graph: it waits for exchanges that are queued along with it
    backward_layers(accumulate);
  } else {
    replay(backward_graphs_[static_cast<int>(accumulate)], 0, [&] { backward_layers(accumulate); });
  }
  if (fp8_) fp8_->end_micro_batch();
  if (const std::optional<std::int64_t> rank = gradients_.end_backward()) store_loss(*rank);
}

// The loss of a rank of the step is complete: it goes to its place or, of virtual ranks, to the sum.
template <typename S>
void TrainingModel<S>::store_loss(std::int64_t rank) {
  if (!has_peers()) return move_losses(work_.rank_totals, work_.loss_total, stream_);
  LossTotal* const total = work_.rank_totals + rank * peers_.share.ranks + peers_.share.rank;
  check(cudaMemcpyAsync(total, work_.loss_total, sizeof *total, cudaMemcpyDeviceToDevice, stream_), "losses");
  check(cudaMemsetAsync(work_.loss_total, 0, sizeof *total, stream_), "losses");
}

// Before a pass: rounds the weights whose codes no update has written. If ranks divide the update, the lists do that. Frozen ones
// were rounded when the last of their modules came.
template <typename S>
void TrainingModel<S>::round_stale_weights() {
  if (!unrounded_.empty()) fail(Exit::internal, "a pass before all frozen weights of a linear layer are there");
  unrounded_buffer_ = {};
  if (sharding_.sharded) return;
  for (std::int64_t l = 0; l < config_.num_layers; ++l) use_fp8_weights(l, false);
}

// Called in the lists: what follows reads the codes of layer l's weights, whose parameters are there. `again`: in the
// backward pass.
template <typename S>
void TrainingModel<S>::use_fp8_weights(std::int64_t l, bool again) {
  if constexpr (std::is_same_v<S, bf16>) {
    if (!fp8_ || (fp8_->has_weights(l) && !rounds_weights_)) return;
    fp8_->round_weights(l, weights_.blocks[static_cast<std::size_t>(l)], again);
  }
}

template <typename S>
double TrainingModel<S>::evaluate(const Batch& batch, std::int64_t* label_count) {
  const TraceRange range("evaluate");
  training_ = false;
  LossTotal* total = work_.evaluation_total;
  check(cudaMemsetAsync(total, 0, sizeof *total, stream_), "evaluate");
  round_stale_weights();
  upload(batch);
  forward_layers();
  classify(0, Accumulate::yes, total);
  LossTotal* result = results_.at<LossTotal>(0);
  check(cudaMemcpyAsync(result, total, sizeof *total, cudaMemcpyDeviceToHost, stream_), "evaluate");
  synchronize("evaluate");
  *label_count = result->label_count;
  return result->loss_sum;
}

template <typename S>
void TrainingModel<S>::label_losses(const Batch& batch, std::span<float> losses) {
  std::int64_t label_count = 0;
  evaluate(batch, &label_count);
  check(cudaMemcpyAsync(losses.data(), acts_.losses, losses.size_bytes(), cudaMemcpyDeviceToHost, stream_),
        "label_losses");
  synchronize("label_losses");
}

template <typename S>
void TrainingModel<S>::zero_gradients() {
  gradients_.begin();
  if (fp8_) fp8_->begin_step();
  check(cudaMemsetAsync(work_.loss_total, 0, sizeof(LossTotal), stream_), "zero_gradients");
  check(cudaMemsetAsync(work_.rank_totals, 0, rank_totals() * sizeof(LossTotal), stream_), "zero_gradients");
}

// ---- statistics and update ------------------------------------------------------------------------------------------

template <typename S>
StepStatistics TrainingModel<S>::statistics() {
  const TraceRange range("statistics");
  if (const std::optional<std::int64_t> rank = gradients_.finish()) store_loss(*rank);
  const auto blocks = static_cast<std::int64_t>(sharding_.blocks.size());
  double* const squares = work_.squares + (sharding_.sharded ? sharding_.squares_of_rank[my_rank()].begin : 0);
  clock_.run("gradient norm", 0, static_cast<double>(sharding_.state_elements) * sizeof(float),
             [&] { block_squares(squares, gradients_.values(), work_.adamw_blocks, blocks, stream_); });
  if (has_peers()) gather_statistics();
  gradient_norm(work_.gradient_norm, work_.squares, work_.squares_order, sharding_.squares, 0, stream_);
  GradientNorm* norm = results_.at<GradientNorm>(0);
  LossTotal* total = results_.at<LossTotal>(sizeof(GradientNorm));
  LossTotal* totals = total + 1;
  check(cudaMemcpyAsync(norm, work_.gradient_norm, sizeof *norm, cudaMemcpyDeviceToHost, stream_), "statistics");
  check(cudaMemcpyAsync(total, work_.loss_total, sizeof *total, cudaMemcpyDeviceToHost, stream_), "statistics");
  check(cudaMemcpyAsync(totals, work_.rank_totals, rank_totals() * sizeof *total, cudaMemcpyDeviceToHost, stream_),
        "statistics");
  if (fp8_) fp8_->download_counters(work_.rank_counters != nullptr ? work_.rank_counters : fp8_->counters());
  if (has_peers()) {
    peers_.device_ranks->wait(stream_, gradients_.own_work(), "training step");
  } else {
    stream_.synchronize("training step");
  }
  StepStatistics statistics{0, 0, norm->norm};
  if (fp8_) statistics.fp8 = fp8_->statistics();
  for (std::size_t r = 0; r < rank_totals(); ++r) {  // added in the order of the ranks
    statistics.loss_sum += totals[r].loss_sum;
    statistics.label_count += totals[r].label_count;
  }
  if (has_peers()) return statistics;  // this rank's total is among them
  statistics.loss_sum += total->loss_sum;
  statistics.label_count += total->label_count;
  return statistics;
}

template <typename S>
void TrainingModel<S>::update(const OptimizerStep& step) {
  const TraceRange range("update");
  gradients_.zero_stale();
  merged_is_stale_ = true;
  delay_point(stream_, DelayPoint::step);
  check(cudaStreamWaitEvent(stream_, state_copied_), "update");  // no wait if the event was never recorded
  if (fp8_) fp8_->end_step();
  const bool adamw_alone = sharding_.matrices.empty();
  if (fp8_ && !options_.lora && fp8_->scales_known() && adamw_alone && !sharding_.sharded) {
    return update_and_round(step.adamw);
  }
  if (!sharding_.sharded) {
    return update_parts({0, sharding_.blocks_of_bucket.back().end}, {0, std::ssize(sharding_.matrices)}, step);
  }
  // Parameters that other ranks are still reading must not change.
  for (const std::unique_ptr<Event>& event : parameters_ready_) check(cudaStreamWaitEvent(stream_, *event), "update");
  buffers_.forget();
  // Divided parameters with which the next forward pass begins are fetched while the others are updated.
  const std::size_t first = section_of_layer(std::min(config_.num_layers, kLayerBuffers));
  for (std::size_t b = 0; b < sharding_.buckets.size(); ++b) {
    update_parts(sharding_.blocks_of_bucket[b], sharding_.matrices_of_bucket[b], step);
    if (!sharding_.parameters_sharded) {
      gather_parameters(b);
      continue;
    }
    const std::size_t section = sharding_.buckets[b].section;
    const bool complete = b + 1 == sharding_.buckets.size() || sharding_.buckets[b + 1].section != section;
    if (complete && section < first) fetch_parameters(section);
  }
}

// Updates ranges of sharding_.blocks and of sharding_.matrices.
template <typename S>
void TrainingModel<S>::update_parts(const Range& blocks, const Range& matrices, const OptimizerStep& step) {
  std::int64_t elements = 0;
  for (std::int64_t i = blocks.begin; i < blocks.end; ++i)
    elements += sharding_.blocks[static_cast<std::size_t>(i)].count;
  update_listed(work_.adamw_blocks + blocks.begin, blocks.size(), elements, step.adamw);
  std::map<MuonShape, std::vector<MuonMatrix>> of_shape;
  for (std::int64_t i = matrices.begin; i < matrices.end; ++i) {
    const MuonMatrix& matrix = sharding_.matrices[static_cast<std::size_t>(i)];
    of_shape[matrix.shape].push_back(matrix);
  }
  for (const auto& [shape, all] : of_shape) {
    const auto batch = static_cast<std::size_t>(muon_batch(shape));
    for (std::size_t first = 0; first < all.size(); first += batch) {
      update_matrices(std::span(all).subspan(first, std::min(batch, all.size() - first)), step.muon);
    }
  }
}

// Matrices of one shape, at most a batch.
template <typename S>
void TrainingModel<S>::update_matrices(std::span<const MuonMatrix> matrices, const MuonStep& step) {
  const MuonShape& shape = matrices[0].shape;
  const double count = static_cast<double>(matrices.size()), elements = count * static_cast<double>(shape.elements());
  // The gradient, the momentum read and written; u and x are written, and u is read.
  const double read = sizeof(float) + 2.0 * static_cast<double>(moment_bytes(options_));
  clock_.run("muon momentum", 0, elements * (read + 3 * sizeof(S)), [&] {
    with_moments([&](auto* momentum, auto*, auto... seed) {
      muon_momentum<S>(work_.muon, matrices, gradients_.values(), momentum, step, seed..., stream_);
    });
  });
  clock_.run("newton-schulz", count * muon_flops(shape), count * muon_moves(shape) * sizeof(S),
             [&] { orthogonalize<S>(matmul_, shape, work_.muon); });
  clock_.run("muon", 0, elements * (2 * sizeof(float) + sizeof(S)), [&] {
    if constexpr (kSplitMaster<S>) {
      muon_apply(work_.muon, matrices, own_parameters().template at<bf16>(0), low_arena_.at<std::int16_t>(0), step,
                 stream_);
    } else {
      muon_apply(work_.muon, matrices, own_parameters().template at<float>(0), step, stream_);
    }
  });
}

// `blocks` [count], on the device, of `elements` in all.
template <typename S>
void TrainingModel<S>::update_listed(const AdamWBlock* blocks, std::int64_t count, std::int64_t elements,
                                     const AdamWStep& step) {
  clock_.run("adamw", 0, static_cast<double>(elements) * update_bytes(), [&] {
    with_moments([&](auto* moment1, auto* moment2, auto... seed) {
      if constexpr (kSplitMaster<S>) {
        adamw(own_parameters().template at<bf16>(0), low_arena_.at<std::int16_t>(0), gradients_.values(), moment1,
              moment2, blocks, count, step, nullptr, seed..., stream_);
      } else {
        adamw(own_parameters().template at<float>(0), gradients_.values(), moment1, moment2, blocks, count, step,
              nullptr, stream_);
      }
    });
  });
}

// Updates everything, and writes the codes of the linear layers for the next step.
template <typename S>
void TrainingModel<S>::update_and_round(const AdamWStep& step) {
  if constexpr (kSplitMaster<S>) {
    const Fp8Linears::Update& work = fp8_->begin_update();
    clock_.run("adamw, quantise", 0, static_cast<double>(work.elements) * (update_bytes() + 2), [&] {
      with_moments([&](auto* moment1, auto* moment2, auto... seed) {
        adamw_fp8(own_parameters().template at<bf16>(0), low_arena_.at<std::int16_t>(0), gradients_.values(), moment1,
                  moment2, work.matrices, work.count, work.tiles, step, seed..., stream_);
      });
    });
    update_listed(work.others, work.other_count, work.other_elements, step);
  }
}

// Calls update() with the moments as they are stored and, for those that are rounded at random, the seed.
template <typename S>
template <typename Update>
void TrainingModel<S>::with_moments(const Update& update) const {
  if constexpr (kSplitMaster<S>) {
    if (options_.moments == Precision::bf16) {
      return update(state1_arena_.at<bf16>(0), state2_arena_.at<bf16>(0), options_.seed);
    }
  }
  update(state1_arena_.at<float>(0), state2_arena_.at<float>(0));
}

template <typename S>
OperatorTable TrainingModel<S>::time_operators(const std::function<void()>& step) {
  if (!ceilings_) ceilings_ = measure_ceilings(stream_);
  synchronize("timing operators");
  clock_.start();
  {
    // The first timed step has a name of its own, so that a profiler can be told to record it alone.
    const TraceRange range(timed_before_ ? "timed again" : "timed step");
    timed_before_ = true;
    step();
  }
  OperatorTable table = clock_.stop();
  std::tie(table.bytes_per_s, table.flops_per_s) = *ceilings_;
  return table;
}

#define WEFT_INSTANTIATE(S)                                                     \
  template void TrainingModel<S>::forward(const Batch&, std::uint64_t, float);  \
  template void TrainingModel<S>::backward();                                   \
  template double TrainingModel<S>::evaluate(const Batch&, std::int64_t*);      \
  template void TrainingModel<S>::label_losses(const Batch&, std::span<float>); \
  template void TrainingModel<S>::use_fp8_weights(std::int64_t, bool);          \
  template void TrainingModel<S>::zero_gradients();                             \
  template StepStatistics TrainingModel<S>::statistics();                       \
  template void TrainingModel<S>::update(const OptimizerStep&);                 \
  template OperatorTable TrainingModel<S>::time_operators(const std::function<void()>&);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
