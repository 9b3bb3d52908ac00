// The Llama in training on the GPU: one class, implemented by job in several files.
//
//   llama.cu        forward and backward: the model as two lists of operators
//   operators.cu    each operator of the lists: what it launches, under which name, and what it has to compute and move
//   setup.cu        construction: GEMM plans, arenas, tables
//   step.cu         what surrounds the lists in a step: upload, graphs, statistics, update, timing
//   ranks.cu        gradients and parameters on their way between ranks
//   tensor_io.cu    parameters, gradients and moments to and from the host
//   activations.cu  activations by name, for comparison with PyTorch
//   plan.{h,cu}     sizes of everything that is allocated
//
// Letters: B batch, T sequence, N = B T rows, C hidden, NH / NKV query and K/V heads, HS head size, q = NH HS,
// kv = NKV HS, F FFN width, V vocabulary, L layers. d_x is the gradient of x. S is the storage type of parameters and
// activations: bf16 or float.
//
// Numbers: all arithmetic in fp32; gradients of parameters, moments and statistics are stored in fp32 (moments in bf16 if
// asked for). With S = bf16 each parameter has 16 low bits beside it that make it an exact fp32 master
// (llmc/cuda/op/adamw.h).
//
// Nothing waits for the GPU but statistics(), evaluate(), and access to tensors and activations.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/cuda/comm/device_ranks.h"
#include "llmc/cuda/llama/plan.h"
#include "llmc/cuda/llama/token_upload.h"
#include "llmc/cuda/op/matmul.h"
#include "llmc/cuda/op/residual_norm.h"
#include "llmc/cuda/op/rope.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/operator_clock.h"
#include "llmc/cuda/runtime/step_graph.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/cuda/transformer/inference.h"
#include "llmc/model/llama_layout.h"
#include "llmc/model/single_sequence.h"

namespace weft::cuda {

template <typename S>
class Llama final : public TrainModel {
 public:
  // One rank of a run; alone where the pointers are null.
  struct Peers {
    Communicator* ranks = nullptr;
    DeviceRanks* device_ranks = nullptr;
    RankShare share;
  };
  Llama(const ModelConfig& config, const TrainOptions& options, const Peers& peers);

  const ModelConfig& config() const override { return config_; }
  const TensorTable& table() const override { return table_; }
  std::vector<MemoryLine> memory() const override { return llama_memory<S>(config_, options_, peers_.share); }

  void forward(const Batch& batch, std::uint64_t micro_step, float loss_scale) override;
  void backward() override;
  void zero_gradients() override;
  StepStatistics statistics() override;
  void update(const AdamWStep& step) override;
  OperatorTable time_operators(const std::function<void()>& step) override;
  double evaluate(const Batch& batch, std::int64_t* label_count) override;
  bool evaluates_together() const override { return division_.parameters_divided; }
  void read_tensor(TensorRole role, const TensorSpec& spec, float* values) override;
  void write_tensor(TensorRole role, const TensorSpec& spec, const float* values) override;
  std::unique_ptr<StateCopy> make_state_copy() override;
  std::vector<Range> own_elements() const override;
  std::unique_ptr<StateCopy> make_own_copy() override;
  std::vector<float> activation(const std::string& name) override;
  void inject_device_fault() override { launch_faulty_kernel(stream_); }
  std::unique_ptr<DecodeModel> decoder(std::int64_t capacity) override {
    if (division_.parameters_divided) fail(Exit::internal, "a decoder of divided parameters");
    // Inference has a stream of its own: updates, and parameters on their way from other ranks, must be there first.
    return single_sequence(make_llama_inference<S>(config_, weights_, one_sequence(capacity)), capacity,
                           [this] { synchronize("parameters"); });
  }

 private:
  std::int64_t rows() const { return options_.micro_batch * options_.seq_len; }
  std::int64_t qkv_size() const { return config_.q_size() + 2 * config_.kv_size(); }

  // Heads of one packed [N, q + 2 kv] row block: q heads, then k heads, then v heads.
  HeadViewOf<S> q_heads(S* qkv) const { return heads(qkv, qkv_size()); }
  HeadViewOf<S> k_heads(S* qkv) const { return heads(qkv + config_.q_size(), qkv_size()); }
  HeadViewOf<S> v_heads(S* qkv) const { return heads(qkv + config_.q_size() + config_.kv_size(), qkv_size()); }
  HeadViewOf<S> heads(S* data, std::int64_t row) const { return {data, options_.seq_len * row, row, config_.head_dim}; }

  // ---- llama.cu: the two lists
  void forward_layers();
  void forward_layer(std::int64_t l);
  void forward_to_swiglu(std::int64_t l, S* branch, S* swiglu_out);
  void classify(float loss_scale, Accumulate head, LossTotal* total);
  void backward_layers(Accumulate accumulate);
  void recompute_layer(std::int64_t l);
  void backward_layer(std::int64_t l, Accumulate accumulate);

  // ---- operators.cu
  // A linear layer without bias, out [N, OC] = x [N, C] W^T, with the names of its three GEMMs.
  struct LinearLayer {
    const char *forward, *input_grad, *weight_grad;
    std::int64_t C, OC;
  };
  // The norm that reads the residual stream after branch `branch`: 2 l is the attention of layer l, 2 l + 1 its MLP, -1 the
  // embedding. So a layer's first norm is norm_after(2 l - 1), its second norm_after(2 l), the final norm_after(2 L - 1).
  struct NormSite {
    std::int64_t branch;
    S* residual;  // [N, C], what is normalised
    NormParameters<S> weights;
    NormParameters<float> d_weights;
    S* out;
    float *mean, *rstd;
  };
  NormSite norm_after(std::int64_t branch) const;
  ResidualNormShape norm_shape(std::int64_t branch) const;
  // The norm of site.residual alone.
  ResidualNormForward<S, S> norm_operands(const NormSite& site) const;
  void launch_norm(std::int64_t branch, const ResidualNormForward<S, S>& norm);

  void embed();
  void normalize(const NormSite& site);
  void linear(const LinearLayer& layer, S* out, const S* x, const S* weight, std::int64_t N, const S* addend = nullptr);
  void rope(S* qkv);
  void attend(const LayerActivations<S>& a);
  void linear_and_normalize(const LinearLayer& layer, const NormSite& site, const S* x, const S* weight, const S* skip,
                            S* branch);
  void gate_up_and_swiglu(std::int64_t l, S* swiglu_out);
  void softmax_and_loss(float* losses, const std::int32_t* labels, std::int64_t count, float loss_scale);
  void sum_losses(LossTotal* total);

  void sort_tokens();
  void embed_backward();
  void normalize_backward(const NormSite& site, const S* d_out, bool has_skip);
  void input_grad(const LinearLayer& layer, S* dx, const S* dout, const S* weight, std::int64_t N);
  void weight_grad(const LinearLayer& layer, float* dweight, const S* dout, const S* x, std::int64_t N,
                   Accumulate accumulate);
  void attend_backward(const LayerActivations<S>& a);
  void down_input_grad_and_swiglu(std::int64_t l, S* swiglu_out);

  // Without dropout the GEMM of a branch adds the residual in its epilogue, and the branch and the residual have one
  // gradient.
  bool residual_in_epilogue() const { return options_.dropout == 0; }
  S* branch_gradient() const { return residual_in_epilogue() ? acts_.d_residual : acts_.branch; }

  // What an operator has to move and to compute, for the table of time_operators().
  double row_bytes(std::int64_t columns) const { return static_cast<double>(rows() * columns) * sizeof(S); }
  double attention_flops() const {  // of the forward pass: two GEMMs of T x T / 2 by HS for each head
    return 2.0 * static_cast<double>(rows() * options_.seq_len) * static_cast<double>(config_.q_size());
  }

  // ---- step.cu
  void upload(const Batch& batch) { upload_.upload(batch, work_.tokens, work_.labels, stream_); }
  void replay(StepGraph& graph, float scale, const std::function<void()>& launches);
  void zero_gradient(const TensorSpec& spec);
  void zero_accumulated_gradients();
  void zero_accumulated_gradients(std::size_t section);
  void take_gradient_slot(std::int64_t l);
  void zero_stale_gradients();

  // Of the ranks of a run, and of the rounds of each.
  std::size_t rank_totals() const { return static_cast<std::size_t>(peers_.share.ranks * peers_.share.rounds); }
  bool is_last_micro_batch() const { return rank_micro_batches_ + 1 == options_.rank_micro_batches; }
  void finish_rank();
  void update_blocks(const Range& range, const AdamWStep& step);
  // The gradients of the step, or of the virtual ranks that have computed.
  float* gradients() const {
    const DeviceArena& arena = division_.gradients_divided ? part_sum_arena_
                               : ranks_added_ > 0          ? rank_sum_arena_
                                                           : gradient_arena_;
    return arena.at<float>(0);
  }
  // How far from its place in the table's layout the gradient of a section lies while it is computed.
  std::int64_t gradient_shift(std::size_t section) const {
    return division_.gradient_begins[section] - division_.sections[section].begin;
  }
  std::size_t section_of(const TensorSpec& spec) const;
  // The same for divided parameters while a pass has them.
  std::int64_t parameter_shift(std::size_t section) const {
    return division_.places.begin_of(section) - division_.sections[section].begin;
  }
  const DeviceArena& own_parameters() const {
    return division_.parameters_divided ? own_parameter_arena_ : parameter_arena_;
  }

  // ---- ranks.cu
  static constexpr auto kLayerPlaces = static_cast<std::int64_t>(SectionPlaces::kLayerPlaces);
  // Sections of the arena (llama_sections()).
  static constexpr std::size_t kEmbeddingSection = 0;
  static std::size_t section_of_layer(std::int64_t l) { return static_cast<std::size_t>(l) + 1; }
  std::size_t head_section() const {
    return config_.tied_embeddings ? kEmbeddingSection : section_of_layer(config_.num_layers);
  }
  bool has_peers() const { return peers_.ranks != nullptr; }
  std::size_t my_rank() const { return static_cast<std::size_t>(peers_.share.rank); }
  void gradients_ready(std::size_t section);
  void parameters_needed(std::size_t section);
  void parameters_needed_again(std::size_t section);
  void fetch_parameters(std::size_t section);
  void exchange_from(std::size_t section);
  void exchange(std::size_t bucket);
  void begin_round();
  void finish_round();
  void zero_unsent_gradients();
  void finish_exchange();
  void gather_statistics();
  void gather_parameters(std::size_t bucket);
  void synchronize(const char* action);

  // ---- setup.cu
  void prepare_matmuls();
  void place_sections();

  // ---- tensor_io.cu
  // A range of a tensor that this model has: where it begins in arenas of the table's layout, and in those of the state.
  struct Piece {
    std::int64_t element, state, count;
  };
  bool is_moment(TensorRole role) const { return role == TensorRole::moment1 || role == TensorRole::moment2; }
  // Whether each rank has its part alone.
  bool is_divided(TensorRole role) const {
    if (role == TensorRole::gradient) return division_.gradients_divided || (division_.divided && exchanged_);
    return division_.divided && (is_moment(role) || kSplitMaster<S> || division_.parameters_divided);
  }
  Range held(TensorRole role, const Bucket& bucket) const {
    return is_divided(role) ? bucket.parts[my_rank()] : bucket.range;
  }
  void read_piece(TensorRole role, const Piece& piece, float* values);
  void write_piece(TensorRole role, const Piece& piece, const float* values);
  std::byte* address_of(TensorRole role, const Piece& piece) const;

  const ModelConfig config_;
  const TrainOptions options_;
  const Peers peers_;
  const TensorTable table_;
  const Division division_;
  // Whether SwiGLU, and its derivative, are computed in the epilogues of the GEMMs beside it: bf16 on Hopper.
  const bool swiglu_in_epilogue_;
  const LinearLayer qkv_{"qkv", "qkv dgrad", "qkv wgrad", config_.hidden_size, qkv_size()};
  const LinearLayer output_{"output", "output dgrad", "output wgrad", config_.q_size(), config_.hidden_size};
  const LinearLayer gate_up_{"gate, up", "gate, up dgrad", "gate, up wgrad", config_.hidden_size, 2 * config_.ffn_size};
  const LinearLayer down_{"down", "down dgrad", "down wgrad", config_.ffn_size, config_.hidden_size};
  const LinearLayer head_{"head", "head dgrad", "head wgrad", config_.hidden_size, config_.vocab_size};

  Stream stream_, side_stream_;
  Event tokens_ready_{cudaEventDisableTiming}, tokens_sorted_{cudaEventDisableTiming};
  OperatorClock clock_;
  Matmul matmul_;
  LlamaActivations<S> acts_;
  LlamaWorkspace work_;
  DeviceArena parameter_arena_;      // what passes read
  DeviceArena own_parameter_arena_;  // of this rank, where they are divided
  DeviceArena low_arena_, gradient_arena_;
  DeviceArena part_sum_arena_;  // see Division::sum_begins
  DeviceArena rank_sum_arena_;  // the gradients of the virtual ranks that are complete; empty without them
  DeviceArena received_arena_;  // gradients of other ranks on their way into the sum; empty without them
  DeviceArena moment1_arena_, moment2_arena_, activation_arena_, workspace_arena_;
  LlamaParameters<S> weights_;
  LlamaParameters<float> d_weights_;
  DeviceRopeTable rope_;
  TokenUpload upload_;
  PinnedBuffer results_;                        // GradientNorm, LossTotal, that of each rank
  Event state_copied_{cudaEventDisableTiming};  // of the last StateCopy::take(): nothing may change the state before it

  StepGraph forward_graphs_[2], backward_graphs_[2];  // by Accumulate
  std::optional<std::pair<double, double>> ceilings_;
  bool timed_before_ = false;

  std::uint64_t micro_step_ = 0;
  bool training_ = false;
  // zero_gradients() writes nothing: the first micro-batch after it stores its gradients instead of adding them. Until
  // then the head's gradient, and that of everything else, is stale.
  bool head_stale_ = false, others_stale_ = false;

  std::int64_t rank_micro_batches_ = 0,
               ranks_added_ = 0;  // of the rank that computes; virtual ranks that have computed
  // With peers: what moves between ranks does so in a stream of its own, beside the passes. Events: the gradients of a
  // section are complete; those of a bucket have been exchanged; its parameters are those of all ranks.
  std::optional<Stream> exchange_stream_;
  std::vector<std::unique_ptr<Event>> gradients_ready_, gradients_exchanged_, parameters_ready_;
  Event forked_{cudaEventDisableTiming}, own_work_{cudaEventDisableTiming};
  SectionPlaces places_;    // of parameter_arena_, where parameters are divided
  std::vector<bool> sent_;  // buckets whose exchange is queued since the last zero_gradients()
  std::int64_t rounds_done_ = 0;
  bool exchanged_ = false;  // the gradients are those of all ranks, as far as this model has them
};

}  // namespace weft::cuda
