// A model that can be trained: one interface, implemented on the CPU (llmc/cpu/training.h) and on the GPU.
// Loop, data, schedule, numeric guard, checkpoints and logs are written once, above it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/base/error.h"
#include "llmc/base/range.h"
#include "llmc/model/decode_model.h"
#include "llmc/model/fp8.h"
#include "llmc/model/lora.h"
#include "llmc/model/operator_table.h"
#include "llmc/model/optimizer.h"
#include "llmc/model/tensor_table.h"

namespace weft {

inline constexpr std::int32_t kIgnoredLabel = -100;  // transformers' ignore_index

enum class Precision {
  fp32,
  bf16,
  fp8
};  // fp8: llmc/model/fp8.h; what is not in fp8 is as in bf16, on the CPU as in fp32
enum class Recompute { none, norm, block };

struct TrainOptions {
  std::int64_t micro_batch = 1;  // B
  std::int64_t seq_len = 0;      // T
  bool document_mask = false;    // batches may have document_starts
  bool label_weights = false;    // batches may have label_weights
  Precision precision = Precision::fp32;
  Recompute recompute = Recompute::none;
  float dropout = 0;       // probability; applied to each branch before it is added to the residual
  std::uint64_t seed = 0;  // of the dropout masks, and of the rounding of moments
  // An adapter is trained beside a frozen model: table(), parameters, gradients and the optimizer's state are the adapter's
  // alone. adapter_dropout: probability, of the adapter's inputs.
  std::optional<LoraConfig> lora = std::nullopt;
  float adapter_dropout = 0;
  // The formats that the frozen model's file has, which a GPU keeps in its memory; the CPU has their values, and so has a GPU with
  // Precision::fp8, which rounds them to fp8 for its GEMMs.
  Quantization frozen_quantization = {};
  const Optimizer* optimizer = &adamw_optimizer();
  Precision moments = Precision::fp32;  // in which AdamW's moments are stored; bf16: on a GPU, not with Precision::fp32

  // A step is the work of this many ranks, which the model does one after the other (--virtual-ranks), with
  // `rank_micro_batches` micro-batches each. A rank's gradients are those of a model that computes its micro-batches alone;
  // they are complete before they are added to the sum, in the order of the ranks. 1: all micro-batches are one rank's.
  std::int64_t virtual_ranks = 1, rank_micro_batches = 1;

  // These change how a GPU does the work, not what comes out.
  bool accumulates = true;   // a step may have several micro-batches
  bool graph = true;         // replay the launches of a step as CUDA graphs
  std::string matmul_plans;  // the run's file of GEMM plans (llmc/cuda/op/gemm/matmul_plans.h); empty: none
};

// The tensors that are trained: a model's, or an adapter's.
TensorTable trained_table(const ModelConfig& config, const TrainOptions& options, DType storage = DType::f32);

// One micro-batch: tokens and labels, each [B, T] row-major. labels[b, t] is the token after tokens[b, t], or
// kIgnoredLabel. document_starts [B, T]: where in the row the document of each token begins. Attention then sees its own document
// alone, and the token at a start has position 0. Empty: a row is one document; TrainOptions::document_mask is needed for others.
// label_weights [B, T]: by what the gradient of each label's loss is multiplied; the losses themselves are not. Empty: all 1;
// TrainOptions::label_weights is needed for others.
struct Batch {
  std::span<const std::int32_t> tokens;
  std::span<const std::int32_t> labels;
  std::span<const std::int32_t> document_starts = {};
  std::span<const float> label_weights = {};
};

// For a model at the begin of a pass: Exit::internal for a batch with document_starts or label_weights that its options do not
// announce.
inline void check_batch(const Batch& batch, const TrainOptions& options) {
  const auto fits = [&](std::size_t size, bool announced) {
    return size == 0 || (announced && size == batch.tokens.size());
  };
  if (!fits(batch.document_starts.size(), options.document_mask)) {
    fail(Exit::internal, "a batch with the documents of %zu tokens", batch.document_starts.size());
  }
  if (!fits(batch.label_weights.size(), options.label_weights)) {
    fail(Exit::internal, "a batch with weights of %zu labels", batch.label_weights.size());
  }
}

// For the making of a model: Exit::usage for an adapter that a model of this configuration cannot have.
void check_adapter(const ModelConfig& config, const TrainOptions& options);

// What a step needs to know before it may update. Reading it is the only synchronisation of a step.
struct StepStatistics {
  double loss_sum = 0;  // sum over counted labels of -log p(label), of all micro-batches since zero_gradients()
  std::int64_t label_count = 0;                     // how many labels were counted
  double gradient_norm = 0;                         // 2-norm over all parameters; not finite if any gradient is not
  std::optional<Fp8Statistics> fp8 = std::nullopt;  // with Precision::fp8
};

// Parameters and state tensors as they were at one moment, in host memory: what a thread can write to disk while training
// goes on.
class StateCopy {
 public:
  virtual ~StateCopy() = default;
  // The state of the model as it is now. May return while the device still copies; the next update waits for that. Not
  // while another thread reads the last copy.
  virtual void take() = 0;
  // `count` values of a tensor of the state taken last, from its element `first` on, exactly as TrainModel::read_tensor
  // would have given them then. Returns a pointer into the copy where it holds fp32, otherwise fills `buffer` and returns
  // that. Any number of threads may call it while training goes on.
  virtual const float* read(TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t count,
                            float* buffer) const = 0;
};
// What a StateCopy keeps on the host: a parameter and its state tensors, four bytes each on every device.
std::uint64_t state_copy_bytes(const Optimizer& optimizer, const TensorTable& table);

// A StateCopy in plain host memory. take() calls read(role, range, values) for each of these ranges, in this order.
std::unique_ptr<StateCopy> make_host_copy(const std::vector<RoleRanges>& of_roles,
                                          std::function<void(TensorRole, const Range&, float* values)> read);

class TrainModel {
 public:
  virtual ~TrainModel() = default;

  virtual const ModelConfig& config() const = 0;
  virtual const TensorTable& table() const = 0;
  // What update() does, and which state tensors there are.
  virtual const Optimizer& optimizer() const { return adamw_optimizer(); }
  virtual std::vector<MemoryLine> memory() const = 0;

  // Forward over one micro-batch in training mode (dropout on); micro_step numbers the micro-batches of a run
  // and addresses the dropout masks. Keeps what backward() needs, adds to the statistics. loss_scale
  // multiplies the gradient of the loss sum: 1 / (tokens of the whole step) makes it that of the mean over all. It is a
  // parameter of forward(), not of backward(), because the classifier turns each chunk of logits into its gradient
  // in the same pass and never holds all of them.
  virtual void forward(const Batch& batch, std::uint64_t micro_step, float loss_scale) = 0;
  // Adds the gradient of the last forward to the gradients.
  virtual void backward() = 0;
  virtual void zero_gradients() = 0;
  virtual StepStatistics statistics() = 0;
  virtual void update(const OptimizerStep& step) = 0;

  // Mean loss of a batch without dropout and without touching gradients or the statistics: validation.
  // Returns the sum over counted labels; *label_count gets their number.
  virtual double evaluate(const Batch& batch, std::int64_t* label_count) = 0;
  // As evaluate(), but each label's own -log p: `losses` [B, T] gets them, and 0 for those that are ignored.
  virtual void label_losses(const Batch& /*batch*/, std::span<float> /*losses*/) {
    fail(Exit::internal, "a model without losses of labels");
  }
  // Whether all ranks of a run have to call these two at the same time, because each needs parameters of the others.
  virtual bool evaluates_together() const { return false; }

  // Runs `step` (the calls of one training step) with a clock around each operator, one launch after the other. The
  // table has no rows on a device that has no such clock.
  virtual OperatorTable time_operators(const std::function<void()>& step) {
    step();
    return {};
  }

  // A parameter, gradient or state tensor as fp32, to and from the host; `values` holds spec.elements. Exact for
  // every dtype in which weft keeps state. `spec` may be that of another table of the same configuration (a file's, say).
  virtual void read_tensor(TensorRole role, const TensorSpec& spec, float* values) = 0;
  virtual void write_tensor(TensorRole role, const TensorSpec& spec, const float* values) = 0;

  // With TrainOptions::lora: the frozen model as this model takes it, and setting one of its tensors. write_frozen() takes
  // ValueKind::floats, write_frozen_quantized() the bytes of the others as a file has them. All tensors are set before the first
  // pass.
  virtual TensorTable frozen_table() const { return TensorTable(config()); }
  virtual void write_frozen_quantized(const TensorSpec& spec, const std::byte* /*bytes*/) {
    fail(Exit::internal, "%s: not kept quantised", spec.name.c_str());
  }
  virtual void write_frozen(const TensorSpec& spec, const float* /*values*/) {
    fail(Exit::internal, "%s: nothing is frozen", spec.name.c_str());
  }

  // With Precision::fp8 what the scales of the next step depend on (Fp8Scales::state()), otherwise empty. A resumed run
  // sets it after it has written all parameters, because parameters that are written make the model forget it.
  virtual std::vector<float> fp8_state() const { return {}; }
  virtual void set_fp8_state(std::span<const float> /*state*/) { fail(Exit::internal, "a model without fp8"); }

  // Host memory for copies of the state, state_copy_bytes() of it; valid while this model lives. Exit::resources where
  // it cannot be had. This implementation calls read_tensor(); a GPU has one that copies while training goes on.
  virtual std::unique_ptr<StateCopy> make_state_copy();

  // The part of the state that this model has without asking other ranks: ranges of the arena, in its order. The ranges
  // of all ranks that have sharded the state cover the arena, and no two of them overlap.
  virtual std::vector<Range> own_elements() const { return {{0, table().arena_elements()}}; }
  // As make_state_copy(), but of own_elements() alone: each read lies within one of these ranges. No other rank takes
  // part.
  virtual std::unique_ptr<StateCopy> make_own_copy() { return make_state_copy(); }

  // Test tool: a kernel that faults, as a broken one would. Exit::usage on a device that has no kernels.
  virtual void inject_device_fault() { fail(Exit::usage, "--debug-inject gpu@step: there is no GPU in this run"); }

  // The activation `name` (names of scripts/dump_reference.py, e.g. "layers.0.q") of the last forward or
  // evaluate, as fp32; empty if this model does not keep it.
  virtual std::vector<float> activation(const std::string& name) = 0;

  // Generation from the live parameters, with a KV cache of `capacity` positions. Valid while this model
  // lives. Exit::internal for a rank that does not have all parameters.
  virtual std::unique_ptr<DecodeModel> decoder(std::int64_t capacity) = 0;
};

}  // namespace weft
