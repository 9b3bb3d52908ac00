// A model in training on the GPU: one class, implemented by job in several files.
//
//   lists.cpp       forward and backward: the model as two lists of operators
//   operators.cpp   each operator of the lists: what it launches, under which name, and what it has to compute and move
//   setup.cpp       construction: GEMM plans, arenas, tables
//   step.cpp        what surrounds the lists in a step: upload, graphs, statistics, update, timing
//   gradient_exchange.{h,cpp}  the gradients of a step, and their exchange between ranks
//   ranks.cpp       the exchange of parameters and statistics between ranks
//   tensor_io.cpp   parameters, gradients and moments to and from the host
//   activations.cpp activations by name, for comparison with PyTorch
//   plan.{h,cpp}    sizes of everything that is allocated
//   fp8_linears.{h,cpp}  the linear layers of the blocks with --precision fp8
//
// Letters: B batch, T sequence, N = B T rows, C hidden, NH / NKV query and K/V heads, HS head size, q = NH HS,
// kv = NKV HS, F FFN width, V vocabulary, L layers. d_x is the gradient of x. S is the storage type of parameters and
// activations: bf16 or float.
//
// Numbers: all arithmetic is fp32; gradients of parameters, moments and statistics are stored in fp32 (moments
// optionally in bf16). With S = bf16 each parameter has 16 low bits beside it that make it an exact fp32 master
// (llmc/cuda/op/optim/adamw.h).
//
// Only statistics(), evaluate(), and access to tensors and activations wait for the GPU.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llmc/cuda/inference/inference.h"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/cuda/op/norm/head_norm.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/operator_clock.h"
#include "llmc/cuda/runtime/step_graph.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/cuda/training/fp8_linears.h"
#include "llmc/cuda/training/gradient_exchange.h"
#include "llmc/cuda/training/plan.h"
#include "llmc/cuda/training/token_upload.h"
#include "llmc/model/block_weights.h"
#include "llmc/model/qkv_heads.h"
#include "llmc/model/single_sequence.h"
#include "llmc/model/training_activations.h"

namespace weft::cuda {

template <typename S>
class TrainingModel final : public TrainModel {
 public:
  TrainingModel(const ModelConfig& config, const TrainOptions& options, const Peers& peers);

  const ModelConfig& config() const override { return config_; }
  const TensorTable& table() const override { return table_; }
  const Optimizer& optimizer() const override { return *options_.optimizer; }
  std::vector<MemoryLine> memory() const override { return llama_memory<S>(config_, options_, peers_.share); }

  void forward(const Batch& batch, std::uint64_t micro_step, float loss_scale) override;
  void backward() override;
  void zero_gradients() override;
  StepStatistics statistics() override;
  void update(const OptimizerStep& step) override;
  OperatorTable time_operators(const std::function<void()>& step) override;
  double evaluate(const Batch& batch, std::int64_t* label_count) override;
  void label_losses(const Batch& batch, std::span<float> losses) override;
  bool evaluates_together() const override { return sharding_.parameters_sharded; }
  void read_tensor(TensorRole role, const TensorSpec& spec, float* values) override;
  void write_tensor(TensorRole role, const TensorSpec& spec, const float* values) override;
  TensorTable frozen_table() const override { return rounds_frozen() ? merged_table_ : frozen_table_; }
  void write_frozen(const TensorSpec& spec, const float* values) override;
  void write_frozen_quantized(const TensorSpec& spec, const std::byte* bytes) override;
  std::vector<float> fp8_state() const override { return fp8_ ? fp8_->state() : std::vector<float>(); }
  void set_fp8_state(std::span<const float> state) override {
    if (!fp8_) return TrainModel::set_fp8_state(state);
    fp8_->set_state(state);
  }
  std::unique_ptr<StateCopy> make_state_copy() override;
  std::vector<Range> own_elements() const override;
  std::unique_ptr<StateCopy> make_own_copy() override;
  std::vector<float> activation(const std::string& name) override;
  void inject_device_fault() override { launch_faulty_kernel(stream_); }
  std::unique_ptr<DecodeModel> decoder(std::int64_t capacity) override {
    if (sharding_.parameters_sharded) fail(Exit::internal, "a decoder of sharded parameters");
    if (options_.lora) {
      if (!merged_) merged_ = std::make_unique<DeviceArena>(parameter_plan(merged_table_));
      merge_adapter();
      synchronize("parameters");
    }
    const TensorTable& table = options_.lora ? merged_table_ : table_;
    const DeviceArena& parameters = options_.lora ? *merged_ : parameter_arena_;
    // Inference has its own stream: updates, and the exchange of parameters, must have ended before.
    return single_sequence(make_inference<S>(config_, table, parameters.at<S>(0), one_sequence(capacity)), capacity,
                           [this] {
                             merge_adapter();
                             synchronize("parameters");
                           });
  }

 private:
  std::int64_t rows() const { return options_.micro_batch * options_.seq_len; }
  std::int64_t qkv_size() const { return config_.qkv_size(); }

  // Heads of packed rows [N, q + 2 kv]. T is S, or fp8's codes.
  template <typename T>
  HeadViewOf<T> q_heads(T* qkv) const {
    HeadViewOf<T> view = heads(qkv, qkv_size());
    view.head_stride = qkv_heads(config_).stride;
    return view;
  }
  template <typename T>
  HeadViewOf<T> k_heads(T* qkv) const {
    return q_heads(qkv + qkv_heads(config_).keys);
  }
  template <typename T>
  HeadViewOf<T> v_heads(T* qkv) const {
    return q_heads(qkv + qkv_heads(config_).values);
  }
  template <typename T>
  HeadViewOf<T> heads(T* data, std::int64_t row) const {
    return {data, options_.seq_len * row, row, config_.head_dim};
  }

  // ---- lists.cpp: the two lists
  void forward_layers();
  void forward_layer(std::int64_t l);
  void forward_to_swiglu(std::int64_t l, S* branch, S* swiglu_out);
  void classify(float loss_scale, Accumulate head, LossTotal* total);
  void backward_layers(Accumulate accumulate);
  void recompute_layer(std::int64_t l);
  void backward_layer(std::int64_t l, Accumulate accumulate);

  // ---- operators.cpp
  // A linear layer, out [N, OC] = x [N, C] W^T + bias, with the names of its three GEMMs.
  struct LinearLayer {
    const char *forward, *input_grad, *weight_grad;
    std::int64_t C, OC;
    std::optional<BlockLinear> block;  // empty: the head
  };
  static constexpr std::int64_t kNoLayer = -1;  // in the place of the head's layer
  // The norm that reads the residual stream after branch `branch`: 2 l is the attention of layer l, 2 l + 1 its MLP, -1
  // the embedding. So layer l has norm_after(2 l - 1) and norm_after(2 l); the final norm is norm_after(2 L - 1). With the
  // parallel residual those of a layer are one, norm_after(2 l - 1), with two outputs.
  struct NormSite {
    std::int64_t branch, layer;
    std::optional<BlockLinear> reader;  // of its output; empty: the head
    S* residual;                        // [N, C], the norm's input
    NormWeights<S> weights;
    NormWeights<float> d_weights;
    S* out;
    float *mean, *rstd;
    NormWeights<S> weights2 = {};
    NormWeights<float> d_weights2 = {};
    S* out2 = nullptr;
  };
  NormSite norm_after(std::int64_t branch) const;
  ResidualNormShape norm_shape(std::int64_t branch) const {
    return norm_shape_after(branch, config_, options_, micro_step_, training_);
  }
  // The norm of site.residual alone.
  ResidualNormForward<S, S> norm_operands(const NormSite& site) const;
  void launch_norm(const NormSite& site, const ResidualNormForward<S, S>& norm);

  void embed();
  void normalize(const NormSite& site);
  void linear(const LinearLayer& layer, std::int64_t l, S* out, const S* x, const Linear<S>& w, std::int64_t N,
              const S* addend = nullptr);
  // The norm behind branch `branch` of the blocks, counted as by norm_after(), with post_norms: from what its projection gave,
  // which is kept, to what is added to the stream.
  struct BranchNorm {
    S* x;  // [N, C]
    NormWeights<S> weights;
    NormWeights<float> d_weights;
    float *mean, *rstd;
  };
  BranchNorm branch_norm(std::int64_t branch) const;
  void normalize_branch(const BranchNorm& norm, S* out);
  HeadNormShape head_norm_shape() const;
  void normalize_heads(std::int64_t l);
  // That of layer l; empty where its q and k do not rotate.
  DeviceRopeTable rope_table_of(std::int64_t l) const {
    return !config_.rotates(l) ? DeviceRopeTable{} : config_.rotates_locally(l) ? local_rope_ : rope_;
  }
  void rope(std::int64_t l, S* qkv);
  // Of layer l, in the batch that was uploaded last.
  AttentionShape attention_shape(std::int64_t l) const {
    AttentionShape shape = cuda::attention_shape(config_, options_, l);
    shape.document_starts = work_.document_starts;
    return shape;
  }
  void attend(std::int64_t l, const LayerActivations<S>& a);
  void linear_and_normalize(const LinearLayer& layer, std::int64_t l, const NormSite& site, const S* x,
                            const Linear<S>& w, const S* skip, S* branch);
  void linears_and_normalize(std::int64_t l, const NormSite& site, S* branch);
  void gate_up_and_swiglu(std::int64_t l, S* swiglu_out);
  void softmax_and_loss(std::int64_t row, std::int64_t count, float loss_scale);
  void sum_losses(LossTotal* total);

  void sort_tokens();
  void embed_backward();
  void normalize_backward(const NormSite& site, const S* d_out, bool has_skip);
  void branch_norm_backward(std::int64_t branch);
  void input_grad(const LinearLayer& layer, std::int64_t l, S* dx, const S* dout, const S* weight, std::int64_t N);
  void weight_grad(const LinearLayer& layer, std::int64_t l, const Linear<float>& dw, const S* dout, const S* x,
                   std::int64_t N, Accumulate accumulate);
  void normalize_heads_backward(std::int64_t l);
  // The matrix of a linear layer of a block for a GEMM: where it is quantised in scratch memory, until the next call.
  const S* floats_of(const LinearLayer& layer, const Weight<S>& weight);
  // The adapter's part of a linear layer of a block; nothing where it has none. Dropout is that of layer l in this micro-batch.
  LowRankShape adapter_shape(BlockLinear linear, std::int64_t l) const {
    return low_rank_shape_of(linear, l, config_, options_, micro_step_, training_);
  }
  template <typename Run>
  void with_adapter(const LinearLayer& layer, std::int64_t l, const char* name, int in_gemms, int out_gemms,
                    const Run& run);
  void add_adapter(const LinearLayer& layer, std::int64_t l, S* out, const S* x);
  void adapter_hidden_grad(const LinearLayer& layer, std::int64_t l, const S* dout);
  void adapter_input_grad(const LinearLayer& layer, std::int64_t l, S* dx);
  void adapter_weight_grad(const LinearLayer& layer, std::int64_t l, const S* dout, const S* x, Accumulate accumulate);
  void merge_adapter();
  // Whether a linear layer computes in fp8. If so, both gradients read codes of dout, which fp8_ keeps from one layer to
  // the next: weight_grad() rounds that of the output projection, and of qkv if attention has not done so,
  // down_input_grad_and_swiglu() that of down, and SwiGLU's derivative writes that of gate and up; gate_up itself stays.
  // The outputs of norms and of SwiGLU exist in fp8 only: the arguments that stand for them are null. Beside an adapter they exist as
  // without fp8, and so does every gradient; input_grad() rounds it, but for that of gate and up.
  bool in_fp8(const LinearLayer& layer) const { return fp8_ && layer.block; }
  Fp8Linears::Pass fp8_pass() const {
    return !training_     ? Fp8Linears::Pass::evaluation
           : recomputing_ ? Fp8Linears::Pass::again
                          : Fp8Linears::Pass::training;
  }
  // Whether attention's backward pass writes the gradient of qkv in fp8, so that acts_.d_qkv is not used: on Hopper, from
  // the second step on. Not where the norms of heads come between, or an adapter reads it.
  bool attention_rounds() const {
    return fp8_ && !options_.lora && fp8_->scales_known() && !config_.qk_norm &&
           attention_backward_rounds(attention_shape(0), rope_);
  }
  void attend_backward(std::int64_t l, const LayerActivations<S>& a);
  void down_input_grad_and_swiglu(std::int64_t l, S* swiglu_out);

  // Without dropout what is added to the residual has the residual's gradient, and without a norm behind the branch its GEMM
  // adds the residual in its epilogue.
  bool one_gradient() const { return options_.dropout == 0; }
  bool residual_in_epilogue() const { return one_gradient() && !config_.post_norms; }
  S* added_gradient() const { return one_gradient() ? acts_.d_residual : acts_.branch; }
  // Of the output of a branch's projection.
  S* branch_gradient() const { return config_.post_norms ? acts_.branch : added_gradient(); }

  // Bytes and operations of operators, for the table of time_operators().
  double row_bytes(std::int64_t columns) const { return static_cast<double>(rows() * columns) * sizeof(S); }
  // Forward pass: for each head two GEMMs by HS of the T x T / 2 pairs that see each other; with a window w T - w^2 / 2.
  double attention_flops(std::int64_t l) const {
    const double T = static_cast<double>(options_.seq_len), window = static_cast<double>(config_.window(l));
    const double w = window > 0 ? std::min(window, T) : T;
    return 4.0 * static_cast<double>(rows()) * w * (1 - w / (2 * T)) * static_cast<double>(config_.q_size());
  }

  // ---- step.cpp
  void upload(const Batch& batch) {
    check_batch(batch, options_);
    upload_.upload(batch, work_.tokens, work_.labels, work_.document_starts, work_.label_weights, stream_);
  }
  void round_stale_weights();
  void use_fp8_weights(std::int64_t l, bool again);
  void replay(StepGraph& graph, float scale, const std::function<void()>& launches);
  // Number of loss totals: one for each rank and round.
  std::size_t rank_totals() const { return static_cast<std::size_t>(peers_.share.ranks * peers_.share.rounds); }
  void store_loss(std::int64_t rank);
  void update_parts(const Range& blocks, const Range& matrices, const OptimizerStep& step);
  void update_listed(const AdamWBlock* blocks, std::int64_t count, std::int64_t elements, const AdamWStep& step);
  void update_matrices(std::span<const MuonMatrix> matrices, const MuonStep& step);
  void update_and_round(const AdamWStep& step);
  template <typename Update>
  void with_moments(const Update& update) const;
  // Bytes that AdamW moves for an element: the gradient, the master read and written, and the moments likewise.
  double update_bytes() const { return 3 * sizeof(float) + 4.0 * static_cast<double>(moment_bytes(options_)); }
  // Offset of a section's sharded parameters, while a pass uses them, from their position in the table's layout.
  std::int64_t parameter_shift(std::size_t section) const {
    return sharding_.places.begin_of(section) - sharding_.sections[section].begin;
  }
  const DeviceArena& own_parameters() const {
    return sharding_.parameters_sharded ? own_parameter_arena_ : parameter_arena_;
  }

  // ---- ranks.cpp
  static constexpr auto kLayerBuffers = static_cast<std::int64_t>(SectionBuffers::kLayerBuffers);
  // Sharding::sections.
  static constexpr std::size_t kEmbeddingSection = 0;
  static std::size_t section_of_layer(std::int64_t l) { return static_cast<std::size_t>(l) + 1; }
  std::size_t head_section() const { return sharding_.head_section; }
  bool has_peers() const { return peers_.ranks != nullptr; }
  std::size_t my_rank() const { return static_cast<std::size_t>(peers_.share.rank); }
  void parameters_needed(std::size_t section);
  void parameters_needed_again(std::size_t section);
  void fetch_parameters(std::size_t section);
  void gather_statistics();
  void gather_parameters(std::size_t bucket);
  void synchronize(const char* action);

  // ---- setup.cpp
  void prepare_matmuls();
  void place_sections();

  // A range of a tensor that this model holds: its position in arenas of the table's layout, and in those of low halves and
  // first states.
  struct Piece {
    std::int64_t element, state, count;
  };
  bool is_state(TensorRole role) const { return role == TensorRole::state1 || role == TensorRole::state2; }
  void require_tensor(TensorRole role, const TensorSpec& spec) const;
  // Whether each rank holds only its own part.
  bool is_sharded(TensorRole role) const {
    if (role == TensorRole::gradient) return sharding_.gradients_sharded || (sharding_.sharded && gradients_.summed());
    return sharding_.sharded && (is_state(role) || kSplitMaster<S> || sharding_.parameters_sharded);
  }
  Range held(TensorRole role, const Bucket& bucket) const {
    return is_sharded(role) ? bucket.parts[my_rank()] : bucket.range;
  }
  void read_piece(TensorRole role, const Piece& piece, float* values);
  void write_piece(TensorRole role, const Piece& piece, const float* values);
  void write_values(std::byte* to, const void* values, std::size_t bytes);
  bool rounds_frozen() const { return options_.lora && options_.precision == Precision::fp8; }
  void write_rounded(const TensorSpec& spec, const float* values);
  std::byte* address_of(TensorRole role, const Piece& piece) const;

  const ModelConfig config_;
  const TrainOptions options_;
  const Peers peers_;
  const TensorTable table_;
  const TensorTable frozen_table_, merged_table_;  // of the whole model; used with an adapter
  const Sharding sharding_;
  // Whether SwiGLU, and its derivative, are computed in the epilogues of the adjacent GEMMs: bf16 and fp8 on Hopper,
  // without biases, and without an adapter of these GEMMs, whose product has to be added before; in fp8 without any adapter.
  const bool swiglu_in_epilogue_;
  const LinearLayer qkv_{"qkv", "qkv dgrad", "qkv wgrad", config_.hidden_size, qkv_size(), BlockLinear::qkv};
  const LinearLayer output_{"output",         "output dgrad",      "output wgrad",
                            config_.q_size(), config_.hidden_size, BlockLinear::output};
  const LinearLayer gate_up_{config_.gated() ? "gate, up" : "up",
                             config_.gated() ? "gate, up dgrad" : "up dgrad",
                             config_.gated() ? "gate, up wgrad" : "up wgrad",
                             config_.hidden_size,
                             linear_size(config_, BlockLinear::up).OC,
                             BlockLinear::up};
  const LinearLayer down_{"down", "down dgrad", "down wgrad", config_.ffn_size, config_.hidden_size, BlockLinear::down};
  const LinearLayer head_{"head", "head dgrad", "head wgrad", config_.hidden_size, config_.vocab_size, std::nullopt};

  Stream stream_, side_stream_;
  Event tokens_ready_{cudaEventDisableTiming}, tokens_sorted_{cudaEventDisableTiming};
  OperatorClock clock_;
  Matmul matmul_;
  TrainingActivations<S> acts_;
  TrainingWorkspace work_;
  AdapterMemory<S> adapter_;
  DeviceArena parameter_arena_;      // parameters that the passes read
  DeviceArena own_parameter_arena_;  // this rank's parameters, if they are sharded
  DeviceArena low_arena_;
  GradientExchange gradients_;
  DeviceArena state1_arena_, state2_arena_, activation_arena_, workspace_arena_;
  DeviceArena frozen_arena_, adapter_arena_;  // empty without an adapter
  std::optional<Fp8Linears> fp8_;             // with --precision fp8
  // Frozen linear layers of which some modules have been written since they were last rounded: layer, linear layer and values
  // [OC, C], in a vector that may be longer.
  struct UnroundedLinear {
    std::vector<float> values;
    std::vector<bool> written;  // by module
  };
  std::map<std::pair<std::int64_t, BlockLinear>, UnroundedLinear> unrounded_;
  std::vector<float> unrounded_buffer_;  // for the next one, until the first pass: new pages cost more than the copy
  ModelWeights<S> weights_;
  ModelWeights<float> d_weights_;
  DeviceRopeTable rope_, local_rope_;  // local: with ModelConfig::local_rope_theta only
  // What decoder() reads with an adapter: the frozen model with the product in it.
  std::unique_ptr<DeviceArena> merged_;
  bool merged_is_stale_ = true;
  TokenUpload upload_;
  PinnedBuffer results_;  // GradientNorm, LossTotal, then the LossTotal of each rank
  // end of the last StateCopy::take(), before which the state must not change
  Event state_copied_{cudaEventDisableTiming};

  StepGraph forward_graphs_[2], backward_graphs_[2];  // by Accumulate
  std::optional<std::pair<double, double>> ceilings_;
  bool timed_before_ = false;

  std::uint64_t micro_step_ = 0;
  bool training_ = false, recomputing_ = false;
  bool rounds_weights_ = false;  // this forward pass rounds the weights of all layers to fp8
  // With other ranks: a bucket's parameters have arrived from all of them.
  std::vector<std::unique_ptr<Event>> parameters_ready_;
  SectionBuffers buffers_;  // places in parameter_arena_, if parameters are sharded
};

}  // namespace weft::cuda
