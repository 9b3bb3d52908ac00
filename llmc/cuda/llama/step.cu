// What surrounds the lists of llama.cu in a training step: tokens on their way to the GPU, CUDA graphs, gradients that are
// stored or accumulated, statistics, the update, validation, and the timing of operators.
#include <cstring>
#include <tuple>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/llama/llama_model.h"
#include "llmc/cuda/op/ceilings.h"

namespace weft::cuda {

// ---- micro-batches --------------------------------------------------------------------------------------------------

// The launches of forward() and of backward() are a graph each. `scale` and, with dropout, micro_step_ are all that differs
// from one run of a list to the next.
template <typename S>
void Llama<S>::replay(StepGraph& graph, float scale, const std::function<void()>& launches) {
  if (!options_.graph || clock_.timing()) return launches();
  std::uint32_t scale_bits = 0;
  std::memcpy(&scale_bits, &scale, sizeof scale_bits);
  graph.run(stream_, {scale_bits, options_.dropout > 0 ? micro_step_ : 0}, launches);
}

template <typename S>
void Llama<S>::forward(const Batch& batch, std::uint64_t micro_step, float loss_scale) {
  const Range range("forward");
  micro_step_ = micro_step;
  training_ = true;
  const Accumulate head = head_stale_ ? Accumulate::no : Accumulate::yes;
  upload(batch);
  replay(forward_graphs_[static_cast<int>(head)], loss_scale, [&] {
    forward_layers();
    classify(loss_scale, head, work_.loss_total);
  });
  head_stale_ = false;
}

template <typename S>
void Llama<S>::backward() {
  if (!training_) fail(Exit::internal, "backward() without a forward()");
  const Range range("backward");
  const Accumulate accumulate = others_stale_ ? Accumulate::no : Accumulate::yes;
  replay(backward_graphs_[static_cast<int>(accumulate)], 0, [&] { backward_layers(accumulate); });
  others_stale_ = false;
}

template <typename S>
double Llama<S>::evaluate(const Batch& batch, std::int64_t* label_count) {
  const Range range("evaluate");
  training_ = false;
  LossTotal* total = work_.evaluation_total;
  check(cudaMemsetAsync(total, 0, sizeof *total, stream_), "evaluate");
  upload(batch);
  forward_layers();
  classify(0, Accumulate::yes, total);
  LossTotal* result = results_.at<LossTotal>(0);
  check(cudaMemcpyAsync(result, total, sizeof *total, cudaMemcpyDeviceToHost, stream_), "evaluate");
  stream_.synchronize("evaluate");
  *label_count = result->label_count;
  return result->loss_sum;
}

// ---- gradients since the last zero_gradients() ----------------------------------------------------------------------

template <typename S>
void Llama<S>::zero_gradients() {
  head_stale_ = others_stale_ = true;
  check(cudaMemsetAsync(work_.loss_total, 0, sizeof(LossTotal), stream_), "zero_gradients");
}

template <typename S>
void Llama<S>::zero_gradient(const TensorSpec& spec) {
  check(cudaMemsetAsync(address_of(TensorRole::gradient, spec), 0,
                        static_cast<std::size_t>(spec.elements) * sizeof(float), stream_),
        "zero_gradients");
}

// The gradients that backward accumulates even in the first micro-batch: norms, and an embedding that is not the head.
template <typename S>
void Llama<S>::zero_accumulated_gradients() {
  for (const TensorSpec& spec : table_.specs()) {
    const bool is_norm = spec.shape.size() == 1;
    const bool is_embedding = gradient_arena_.at<float>(0) + spec.offset == d_weights_.embedding;
    if (is_norm || (is_embedding && !config_.tied_embeddings)) zero_gradient(spec);
  }
}

// The gradients that no micro-batch has stored since zero_gradients(): before they are read.
template <typename S>
void Llama<S>::zero_stale_gradients() {
  for (const TensorSpec& spec : table_.specs()) {
    const bool is_head = gradient_arena_.at<float>(0) + spec.offset == d_weights_.head;
    if (is_head ? head_stale_ : others_stale_) zero_gradient(spec);
  }
  head_stale_ = others_stale_ = false;
}

// ---- statistics and update ------------------------------------------------------------------------------------------

template <typename S>
StepStatistics Llama<S>::statistics() {
  const Range range("statistics");
  zero_stale_gradients();
  const std::int64_t elements = table_.arena_elements();
  clock_.run("gradient norm", 0, static_cast<double>(elements) * sizeof(float), [&] {
    gradient_norm(work_.gradient_norm, gradient_arena_.at<float>(0), elements, 0, work_.scratch, stream_);
  });
  LossTotal* total = results_.at<LossTotal>(0);
  GradientNorm* norm = results_.at<GradientNorm>(sizeof(LossTotal));
  check(cudaMemcpyAsync(total, work_.loss_total, sizeof *total, cudaMemcpyDeviceToHost, stream_), "statistics");
  check(cudaMemcpyAsync(norm, work_.gradient_norm, sizeof *norm, cudaMemcpyDeviceToHost, stream_), "statistics");
  stream_.synchronize("training step");
  return {total->loss_sum, total->label_count, norm->norm};
}

template <typename S>
void Llama<S>::update(const AdamWStep& step) {
  const Range range("update");
  zero_stale_gradients();
  check(cudaStreamWaitEvent(stream_, state_copied_), "update");  // no wait if the event was never recorded
  const std::int64_t count = static_cast<std::int64_t>(adamw_blocks_.size());
  float *moment1 = moment1_arena_.at<float>(0), *moment2 = moment2_arena_.at<float>(0);
  const float* gradients = gradient_arena_.at<float>(0);
  const double bytes = static_cast<double>(table_.parameters()) * (3 * sizeof(float) + 4.0 * moment_bytes(options_));
  clock_.run("adamw", 0, bytes, [&] {
    if constexpr (kSplitMaster<S>) {
      bf16* parameters = parameter_arena_.at<bf16>(0);
      std::int16_t* low = low_arena_.at<std::int16_t>(0);
      if (options_.moments == Precision::bf16) {
        adamw(parameters, low, gradients, moment1_arena_.at<bf16>(0), moment2_arena_.at<bf16>(0), work_.adamw_blocks,
              count, step, nullptr, options_.seed, stream_);
        return;
      }
      adamw(parameters, low, gradients, moment1, moment2, work_.adamw_blocks, count, step, nullptr, stream_);
    } else {
      adamw(parameter_arena_.at<float>(0), gradients, moment1, moment2, work_.adamw_blocks, count, step, nullptr,
            stream_);
    }
  });
}

template <typename S>
OperatorTable Llama<S>::time_operators(const std::function<void()>& step) {
  if (!ceilings_) ceilings_ = measure_ceilings(stream_);
  stream_.synchronize("timing operators");
  clock_.start();
  {
    // The first timed step has a name of its own, so that a profiler can be told to record it alone.
    const Range range(timed_before_ ? "timed again" : "timed step");
    timed_before_ = true;
    step();
  }
  OperatorTable table = clock_.stop();
  std::tie(table.bytes_per_s, table.flops_per_s) = *ceilings_;
  return table;
}

#define WEFT_INSTANTIATE(S)                                            \
  template void Llama<S>::forward(const Batch&, std::uint64_t, float); \
  template void Llama<S>::backward();                                  \
  template double Llama<S>::evaluate(const Batch&, std::int64_t*);     \
  template void Llama<S>::zero_gradients();                            \
  template void Llama<S>::zero_accumulated_gradients();                \
  template void Llama<S>::zero_stale_gradients();                      \
  template StepStatistics Llama<S>::statistics();                      \
  template void Llama<S>::update(const AdamWStep&);                    \
  template OperatorTable Llama<S>::time_operators(const std::function<void()>&);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
