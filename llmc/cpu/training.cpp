// The training step of a Llama (Touvron et al., 2023), a GPT-NeoX (Black et al., 2022) or a Gemma 3 on the CPU, as two straight-line
// lists of operator calls: forward_layer() and backward_layer() mirror each other, and llmc/cuda/training/lists.cpp is the
// same list on the GPU.
//
// Sequential residual: h1 = h + attention(norm1(h));  h' = h1 + mlp(norm2(h1))
// Parallel residual:   h' = h + (attention(norm1(h)) + mlp(norm2(h)))     one residual_norm with two outputs a block
// With post norms what attention and mlp give has a norm of its own before it is added.
//
// Letters: B batch, T sequence, N = B T rows, C hidden, NH / NKV query and K/V heads, HS head size, q = NH HS, kv = NKV HS,
// F FFN width, V vocabulary, L layers. d_x is the gradient of x.
#include "llmc/cpu/training.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "llmc/base/ceil_div.h"
#include "llmc/base/checked.h"
#include "llmc/base/error.h"
#include "llmc/cpu/adamw.h"
#include "llmc/cpu/attention.h"
#include "llmc/cpu/classifier.h"
#include "llmc/cpu/embedding.h"
#include "llmc/cpu/fp8_linears.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/head_norm.h"
#include "llmc/cpu/inference.h"
#include "llmc/cpu/low_rank.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/optimizer.h"
#include "llmc/cpu/rank_sum.h"
#include "llmc/cpu/residual_norm.h"
#include "llmc/cpu/rope.h"
#include "llmc/cpu/swiglu.h"
#include "llmc/model/block_weights.h"
#include "llmc/model/lora.h"
#include "llmc/model/qkv_heads.h"
#include "llmc/model/single_sequence.h"
#include "llmc/model/training_activations.h"

namespace weft::cpu {

namespace {

constexpr std::int64_t kClassifierRows = 512;  // of logits at once

// All tensors of a model, in memory.
struct HostModel {
  explicit HostModel(const ModelConfig& config) : table(config), arena(parameter_plan(table)) {}
  TensorTable table;
  HostArena arena;
};

MemoryPlan adapter_workspace_plan(const ModelConfig& config, const TrainOptions& options) {
  MemoryPlan plan("workspace of the adapter");
  std::int64_t largest = 0;
  for (const BlockLinear which : kBlockLinears) {
    if (options.lora) largest = std::max(largest, low_rank_workspace(low_rank_shape(config, options, which)));
  }
  plan.add(checked_mul(static_cast<std::uint64_t>(largest), sizeof(float), "workspace of the adapter"));
  return plan;
}

MemoryPlan part_plan(const char* name, const Range& part) {
  MemoryPlan plan(name);
  plan.add(checked_mul(static_cast<std::uint64_t>(part.size()), sizeof(float), name));
  return plan;
}

// The elements of a process's part that have a state tensor of this role.
PackedRanges states_of(const TrainOptions& options, const TensorTable& table, TensorRole role, const Range& own) {
  return PackedRanges(state_ranges(*options.optimizer, table, role, own));
}

MemoryPlan state_plan(const char* name, const PackedRanges& elements) {
  return part_plan(name, {0, elements.size()});
}

// For the largest tensor in `own`.
MemoryPlan update_workspace_plan(const TrainOptions& options, const TensorTable& table, const Range& own) {
  std::int64_t largest = 0;
  for (const TensorSpec& spec : table.specs()) {
    if (common(elements_of(spec), own).size() == 0) continue;
    largest = std::max(largest, update_of(*options.optimizer).workspace(spec));
  }
  return part_plan("workspace of the optimizer", {0, largest});
}

// For the sum of the gradients of the ranks before, if a process computes several ranks. `part`: the elements that it
// adds.
MemoryPlan rank_sum_plan(std::int64_t rounds, const Range& part) {
  MemoryPlan plan("sum of the ranks' gradients");
  if (rounds > 1) plan.add(checked_mul(static_cast<std::uint64_t>(part.size()), sizeof(float), "sum of the ranks"));
  return plan;
}

// One process's share of the arena and of the ranks of a step.
struct RankShard {
  std::int64_t rounds = 1;  // ranks that it computes, one after the other
  Range added;              // elements of the gradients that it adds
  Range own;                // elements that it updates: it has their moments
  SectionBuffers places;    // of sharded parameters; empty if it has all of them
};

RankShard shard_of(const ModelConfig& config, const TensorTable& table, const TrainOptions& options, int rank,
                   int ranks, Shard shard) {
  const Range all{0, table.arena_elements()};
  const Range part = cut_arena(table, ranks, kAdamWBlock, *options.optimizer)[static_cast<std::size_t>(rank)];
  RankShard own{options.virtual_ranks / ranks, part, shard == Shard::none ? all : part, {}};
  if (shard == Shard::parameters && ranks > 1) {
    own.places = SectionBuffers(parameter_sections(config, table), config.num_layers);
  }
  return own;
}

// The parameters that passes read: all of them or, where they are sharded, those of the sections in use.
MemoryPlan read_parameters_plan(const TensorTable& table, const RankShard& shard) {
  if (shard.places.elements() == 0) return parameter_plan(table);
  return part_plan("parameters of layers in use", {0, shard.places.elements()});
}

// This process's own part of the parameters, where they are sharded.
MemoryPlan own_parameters_plan(const RankShard& shard) {
  return part_plan("parameters", shard.places.elements() > 0 ? shard.own : Range());
}

std::vector<MemoryLine> memory_lines(const ModelConfig& config, const TrainOptions& options, const TensorTable& table,
                                     const RankShard& shard) {
  const std::uint64_t all = parameter_plan(table).bytes(), read = read_parameters_plan(table, shard).bytes();
  std::vector<MemoryLine> lines;
  if (shard.places.elements() > 0) {
    lines.push_back({"parameters (fp32)", own_parameters_plan(shard).bytes()});
    lines.push_back({"parameters of layers in use (fp32)", read});
  } else {
    lines.push_back({"parameters (fp32)", read});
  }
  if (options.lora) {
    lines.push_back({"frozen parameters (fp32)", parameter_plan(TensorTable(config)).bytes()});
    lines.push_back({"workspace of the adapter (fp32)", adapter_workspace_plan(config, options).bytes()});
  }
  lines.push_back({"gradients (fp32)", all});
  if (shard.rounds > 1) {
    lines.push_back({"sum of the ranks (fp32)", rank_sum_plan(shard.rounds, shard.added).bytes()});
  }
  std::uint64_t states = 0;
  for (const TensorRole role : {TensorRole::state1, TensorRole::state2}) {
    states += state_plan("state", states_of(options, table, role, shard.own)).bytes();
  }
  lines.push_back({format("%s (fp32)", options.optimizer->state_name()), states});
  if (const std::uint64_t bytes = update_workspace_plan(options, table, shard.own).bytes(); bytes > 0) {
    lines.push_back({"workspace of the optimizer (fp32)", bytes});
  }
  lines.push_back({"activations (fp32)", TrainingActivations<float>(config, options, kClassifierRows).plan().bytes()});
  if (options.precision == Precision::fp8) {
    const std::uint64_t bytes = Fp8Linears::planned_bytes(config, options, shard.places.elements() > 0);
    lines.push_back({"operands rounded to fp8 (fp32)", bytes});
  }
  return lines;
}

void check_precision(const ModelConfig& config, const TrainOptions& options) {
  if (options.precision == Precision::bf16)
    fail(Exit::usage, "--precision: got bf16, the CPU computes in fp32 and fp8 only");
  check_adapter(config, options);
  if (options.precision == Precision::fp8) check_fp8_sizes(config, options.micro_batch, options.seq_len);
}

class TrainingModel final : public TrainModel {
 public:
  // `ranks` null: alone.
  TrainingModel(const ModelConfig& config, const TrainOptions& options, Communicator* ranks, Shard shard)
      : config_(config),
        options_(options),
        table_(trained_table(config, options)),
        update_(update_of(*options.optimizer)),
        ranks_(ranks),
        sharded_(ranks != nullptr && shard != Shard::none),
        parts_(cut_arena(table_, ranks != nullptr ? ranks->size() : 1, kAdamWBlock, *options.optimizer)),
        shard_(shard_of(config, table_, options, ranks != nullptr ? ranks->rank() : 0,
                        ranks != nullptr ? ranks->size() : 1, shard)),
        own_(shard_.own),
        sections_(parameters_sharded() ? parameter_sections(config, table_) : std::vector<Range>()),
        parameter_arena_(read_parameters_plan(table_, shard_)),
        own_parameter_arena_(own_parameters_plan(shard_)),
        gradient_arena_(per_parameter_plan("gradients", table_, sizeof(float))),
        rank_sum_arena_(rank_sum_plan(shard_.rounds, shard_.added)),
        state1_(states_of(options, table_, TensorRole::state1, own_)),
        state2_(states_of(options, table_, TensorRole::state2, own_)),
        state1_arena_(state_plan("optimizer's first state", state1_)),
        state2_arena_(state_plan("optimizer's second state", state2_)),
        update_workspace_(update_workspace_plan(options, table_, own_)),
        frozen_(options.lora ? std::make_unique<HostModel>(config) : nullptr),
        adapter_workspace_(adapter_workspace_plan(config, options)),
        weights_(frozen_ ? bind_weights(config, frozen_->table, frozen_->arena.at<float>(0), Offsets::bytes)
                         : bind_weights(config, table_, parameter_arena_.at<float>(0), Offsets::bytes)),
        d_weights_(frozen_ ? nothing_trained(config)
                           : bind_weights(config, table_, gradient_arena_.at<float>(0), Offsets::elements)),
        acts_(config, options, kClassifierRows),
        activation_arena_(acts_.plan()),
        rope_(rope_table(config.rope, options.seq_len)),
        local_rope_(config.local_rope_theta > 0 ? rope_table(config.local_rope(), options.seq_len) : RopeTable()) {
    acts_.bind(activation_arena_);
    if (frozen_) {
      bind_adapter(config, *options.lora, table_, parameter_arena_.at<float>(0), Offsets::bytes, weights_);
      bind_adapter(config, *options.lora, table_, gradient_arena_.at<float>(0), Offsets::elements, d_weights_);
    }
    if (options.precision == Precision::fp8) fp8_.emplace(config, options, parameters_sharded());
    if (!parameters_sharded()) return;
    std::vector<std::int64_t> moves;
    for (std::size_t s = 0; s < sections_.size(); ++s) moves.push_back(shard_.places.begin_of(s) - sections_[s].begin);
    weights_.move_sections(moves);
  }

  const ModelConfig& config() const override { return config_; }
  const TensorTable& table() const override { return table_; }
  const Optimizer& optimizer() const override { return *options_.optimizer; }
  std::vector<MemoryLine> memory() const override { return memory_lines(config_, options_, table_, shard_); }

  void forward(const Batch& batch, std::uint64_t micro_step, float loss_scale) override {
    micro_step_ = micro_step;
    training_ = true;
    take(batch);
    forward_layers();
    loss_sum_ += classify(batch, loss_scale, &label_count_);
  }

  double evaluate(const Batch& batch, std::int64_t* label_count) override {
    training_ = false;
    take(batch);
    forward_layers();
    *label_count = 0;
    return classify(batch, 0, label_count);
  }

  void label_losses(const Batch& batch, std::span<float> losses) override {
    std::int64_t label_count = 0;
    evaluate(batch, &label_count);
    std::copy_n(acts_.losses, losses.size(), losses.begin());
  }

  bool evaluates_together() const override { return parameters_sharded(); }

  void backward() override;
  void zero_gradients() override {
    gradient_arena_.clear();
    rank_micro_batches_ = ranks_added_ = 0;
    loss_sum_ = ranks_loss_sum_ = 0;
    label_count_ = 0;
    exchanged_ = false;
    if (fp8_) fp8_->begin_step();
  }
  StepStatistics statistics() override;
  void update(const OptimizerStep& step) override;
  void read_tensor(TensorRole role, const TensorSpec& spec, float* values) override;
  void write_tensor(TensorRole role, const TensorSpec& spec, const float* values) override {
    require_tensor(role, spec);
    const Range part = common(elements_of(spec), held(role));
    if (part.size() > 0) std::copy_n(values + (part.begin - spec.offset), part.size(), at(role, part));
    if (role == TensorRole::parameter) parameters_changed();
    if (role == TensorRole::parameter && fp8_) fp8_->weights_replaced();
  }
  void write_frozen(const TensorSpec& spec, const float* values) override {
    if (!frozen_) return TrainModel::write_frozen(spec, values);
    std::copy_n(values, spec.elements, frozen_->arena.at<float>(frozen_->table.at(spec.name).byte_offset));
    parameters_changed();
    if (fp8_) fp8_->weights_replaced();
  }
  std::vector<float> fp8_state() const override { return fp8_ ? fp8_->state() : std::vector<float>(); }
  void set_fp8_state(std::span<const float> state) override {
    if (!fp8_) return TrainModel::set_fp8_state(state);
    fp8_->set_state(state);
  }
  std::vector<Range> own_elements() const override { return {sharded_ ? own_ : Range{0, table_.arena_elements()}}; }
  std::unique_ptr<StateCopy> make_own_copy() override {
    return make_host_copy(state_ranges(optimizer(), table_, own_elements()[0]),
                          [this](TensorRole role, const Range& range, float* values) {
                            std::copy_n(at(role, range), range.size(), values);
                          });
  }
  std::vector<float> activation(const std::string& name) override;
  std::unique_ptr<DecodeModel> decoder(std::int64_t capacity) override {
    if (parameters_sharded()) fail(Exit::internal, "a decoder of sharded parameters");
    if (frozen_) {
      if (!merged_) merged_ = std::make_unique<HostModel>(config_);
      merge_adapter();
      const float* const merged = merged_->arena.at<float>(0);
      return single_sequence(make_inference(config_, merged_->table, merged, one_sequence(capacity)), capacity,
                             [this] { merge_adapter(); });
    }
    return single_sequence(make_inference(config_, table_, parameter_arena_.at<float>(0), one_sequence(capacity)),
                           capacity);
  }

 private:
  void require_tensor(TensorRole role, const TensorSpec& spec) const {
    if (!has_tensor(optimizer(), role, spec)) fail(Exit::internal, "%s has no such state", spec.name.c_str());
  }
  // The elements of the arena that this model has.
  Range held(TensorRole role) const { return is_sharded(role) ? own_ : Range{0, table_.arena_elements()}; }
  // Whether each rank has only its own part of these tensors.
  bool is_sharded(TensorRole role) const {
    if (role == TensorRole::parameter) return parameters_sharded();
    return sharded_ && (role != TensorRole::gradient || exchanged_);
  }
  bool parameters_sharded() const { return shard_.places.elements() > 0; }
  // The values of elements that this model has; null if there are none.
  float* at(TensorRole role, const Range& part) const {
    if (part.size() == 0) return nullptr;
    switch (role) {
      case TensorRole::parameter:
        return parameters_sharded() ? own_parameter_arena_.at<float>(0) + (part.begin - own_.begin)
                                    : parameter_arena_.at<float>(0) + part.begin;
      case TensorRole::gradient:
        return (ranks_ == nullptr && ranks_added_ > 0 ? rank_sum_arena_ : gradient_arena_).at<float>(0) + part.begin;
      case TensorRole::state1:
        return state1_arena_.at<float>(0) + state1_.position_of(part.begin);
      case TensorRole::state2:
        return state2_arena_.at<float>(0) + state2_.position_of(part.begin);
    }
    fail(Exit::internal, "unknown tensor role");
  }

  // Called whenever values of parameters are no longer what they were.
  void parameters_changed() {
    shard_.places.forget();
    merged_is_stale_ = true;
  }
  void merge_adapter();
  // The gradients of a model whose parameters are all frozen: none exists.
  static ModelWeights<float> nothing_trained(const ModelConfig& config) {
    ModelWeights<float> none;
    none.blocks.resize(static_cast<std::size_t>(config.num_layers));
    return none;
  }

  std::int64_t rows() const { return options_.micro_batch * options_.seq_len; }
  std::int64_t qkv_size() const { return config_.qkv_size(); }

  // Heads of packed rows [N, q + 2 kv].
  HeadView q_heads(float* qkv) const { return heads(qkv, qkv_size(), qkv_heads(config_).stride); }
  HeadView k_heads(float* qkv) const { return q_heads(qkv + qkv_heads(config_).keys); }
  HeadView v_heads(float* qkv) const { return q_heads(qkv + qkv_heads(config_).values); }
  HeadView heads(float* data, std::int64_t row) const { return heads(data, row, config_.head_dim); }
  HeadView heads(float* data, std::int64_t row, std::int64_t stride) const {
    return {data, options_.seq_len * row, row, stride};
  }
  AttentionShape attention_shape(std::int64_t l) const {
    return {options_.micro_batch,
            options_.seq_len,
            options_.seq_len,
            config_.num_heads,
            config_.num_kv_heads,
            config_.head_dim,
            true,
            config_.score_scale(),
            config_.window(l),
            document_starts()};
  }
  // [B, T]; null: a row is one document.
  const std::int32_t* document_starts() const { return document_starts_.empty() ? nullptr : document_starts_.data(); }
  void take(const Batch& batch) {
    check_batch(batch, options_);
    tokens_.assign(batch.tokens.begin(), batch.tokens.end());
    document_starts_.assign(batch.document_starts.begin(), batch.document_starts.end());
  }

  ResidualNormShape norm_shape(std::int64_t branch) const {
    return norm_shape_after(branch, config_, options_, micro_step_, training_);
  }
  // The norm that reads the residual stream after branch `branch`: a layer's two norms and the final one. With the parallel
  // residual those of a layer are one, with two outputs.
  struct NormSite {
    std::int64_t branch;
    float* residual;  // [N, C]
    NormWeights<float> weights, d_weights;
    float *out, *mean, *rstd;
    NormWeights<float> weights2 = {}, d_weights2 = {};
    float* out2 = nullptr;
  };
  NormSite norm_after(std::int64_t branch);

  static ResidualNormForward norm_operands(const NormSite& site);
  // out = norm(residual).
  void normalize(const NormSite& site);
  // residual = skip + dropout(x), out = norm(residual).
  void add_and_normalize(const NormSite& site, const float* x, const float* skip);
  // From d_norm, with a second output acts_.d_post_norm, and, with a skip, acts_.d_residual, the gradients of out, out2 and
  // residual: acts_.branch and acts_.d_residual become those of x and skip.
  void norm_backward(const NormSite& site, const float* d_norm, bool has_skip);

  // The norm behind a branch, with post_norms: from what the branch gave, which is kept, to what is added to the stream.
  struct BranchNorm {
    float* x;  // [N, C]
    NormWeights<float> weights, d_weights;
    float *mean, *rstd;
  };
  BranchNorm attention_norm(std::int64_t l);
  BranchNorm mlp_norm(std::int64_t l);
  void normalize_branch(const BranchNorm& norm, float* out);
  // From acts_.branch, the gradient of its output, to that of x, in place.
  void branch_norm_backward(const BranchNorm& norm);

  // The norms of q's and k's heads: from a.qkv as projected, which a.qk keeps; of d_qkv in place.
  HeadNormShape head_norm_shape(std::int64_t heads) const {
    return {options_.micro_batch,
            options_.seq_len,
            heads,
            config_.head_dim,
            static_cast<float>(config_.norm_eps),
            static_cast<float>(config_.norm_weight_offset)};
  }
  void normalize_heads(std::int64_t l);
  void head_norms_backward(std::int64_t l);

  static std::size_t section_of_layer(std::int64_t l) { return static_cast<std::size_t>(l) + 1; }
  void gather_parameters(std::size_t section);
  std::size_t head_section() const { return config_.tied_embeddings ? 0 : sections_.size() - 1; }

  // The linear layers of layer l of the blocks: out [N, OC] = x [N, C] W^T + b, and from dout [N, OC] the gradients of x, W
  // and b.
  void linear(BlockLinear which, std::int64_t l, float* out, const float* x, Accumulate accumulate = Accumulate::no);
  void linear_backward(BlockLinear which, std::int64_t l, float* dx, const float* dout, const float* x);
  LowRankShape adapter_shape(BlockLinear which, std::int64_t l) const {
    return low_rank_shape_of(which, l, config_, options_, micro_step_, training_);
  }

  void forward_layers();
  void forward_layer(std::int64_t l);
  void rotate(std::int64_t l, float* qkv, decltype(rope_forward)* rotation);
  void forward_to_swiglu(std::int64_t l, float* branch);
  void activate(const LayerActivations<float>& a);
  void activation_backward(const LayerActivations<float>& a);
  double classify(const Batch& batch, float loss_scale, std::int64_t* label_count);
  void recompute_layer(std::int64_t l);
  void backward_layer(std::int64_t l);
  void finish_rank();
  void add_round(float* sum);
  void complete_gradients();
  double sum_of_block_squares() const;

  ModelConfig config_;
  TrainOptions options_;
  TensorTable table_;
  const OptimizerUpdate& update_;
  Communicator* ranks_;       // null: alone
  bool sharded_;              // the optimizer's state and the update, between the ranks
  std::vector<Range> parts_;  // of the arena: one for each rank
  RankShard shard_;
  Range own_;  // whose state this model has: of all parameters, or of the part of its rank
  std::vector<Range> sections_;
  HostArena parameter_arena_;      // what passes read
  HostArena own_parameter_arena_;  // of this rank, where they are sharded
  HostArena gradient_arena_;
  HostArena rank_sum_arena_;      // the gradients of the ranks that are complete; empty where a process has one
  PackedRanges state1_, state2_;  // of the arena: whose state tensors this model has
  HostArena state1_arena_, state2_arena_, update_workspace_;
  std::unique_ptr<HostModel> frozen_;  // with an adapter
  HostArena adapter_workspace_;
  ModelWeights<float> weights_, d_weights_;
  std::unique_ptr<HostModel> merged_;  // what decoder() reads: the frozen model with the adapter in it
  bool merged_is_stale_ = true;
  TrainingActivations<float> acts_;
  HostArena activation_arena_;
  std::optional<Fp8Linears> fp8_;  // with --precision fp8
  RopeTable rope_, local_rope_;

  std::vector<std::int32_t> tokens_;           // [N] of the last forward
  std::vector<std::int32_t> document_starts_;  // [N], or none
  std::uint64_t micro_step_ = 0;
  bool training_ = false, recomputing_ = false;
  std::int64_t rank_micro_batches_ = 0,
               ranks_added_ = 0;              // of the rank that is computed; ranks of this process that are complete
  double loss_sum_ = 0, ranks_loss_sum_ = 0;  // of that rank; of those before
  std::int64_t label_count_ = 0;
  bool exchanged_ = false;  // gradients, loss and labels are those of all ranks, as far as this model has them
};

// To be called before the parameters of a section are read: where they are sharded, gathers them from all ranks, unless
// they are in their place already.
void TrainingModel::gather_parameters(std::size_t section) {
  if (!parameters_sharded() || !shard_.places.take(section)) return;
  const Range range = sections_[section];
  float* const values = parameter_arena_.at<float>(0) + shard_.places.begin_of(section);
  const Range mine = common(range, own_);
  if (mine.size() > 0) {
    std::copy_n(at(TensorRole::parameter, mine), mine.size(), values + (mine.begin - range.begin));
  }
  std::vector<Range> parts;
  for (const Range& each : parts_) {
    const Range theirs = common(range, each);
    parts.push_back({theirs.begin - range.begin, theirs.end - range.begin});
  }
  ranks_->gather(values, parts);
}

// ---- forward --------------------------------------------------------------------------------------------------------

void TrainingModel::forward_layers() {
  gather_parameters(0);
  embedding_forward(acts_.residual[0], tokens_.data(), weights_.embedding, rows(), config_.hidden_size,
                    config_.embedding_scale());
  gather_parameters(section_of_layer(0));
  normalize(norm_after(-1));
  for (std::int64_t l = 0; l < config_.num_layers; ++l) forward_layer(l);
}

void TrainingModel::forward_layer(std::int64_t l) {
  const LayerActivations<float>& a = acts_.layers[l];
  const bool parallel = config_.parallel_residual;
  if (fp8_) fp8_->use_weights(l, weights_.blocks[static_cast<std::size_t>(l)], false);
  forward_to_swiglu(l, acts_.branch);
  if (parallel) linear(BlockLinear::output, l, acts_.branch, a.attention);
  float* const mlp_out = config_.post_norms ? a.mlp_out : acts_.branch;
  linear(BlockLinear::down, l, mlp_out, a.swiglu_out, parallel ? Accumulate::yes : Accumulate::no);
  if (config_.post_norms) normalize_branch(mlp_norm(l), acts_.branch);
  if (l + 1 < config_.num_layers) gather_parameters(section_of_layer(l + 1));  // its norm is used next
  add_and_normalize(norm_after(2 * l + 1), acts_.branch, parallel ? acts_.residual[l] : a.residual_mid);
}

// The part of a layer that --recompute block runs again. `branch` [N, C]: scratch for the output of attention.
void TrainingModel::forward_to_swiglu(std::int64_t l, float* branch) {
  const LayerActivations<float>& a = acts_.layers[l];

  linear(BlockLinear::qkv, l, a.qkv, a.input_norm);
  if (config_.qk_norm) normalize_heads(l);
  rotate(l, a.qkv, rope_forward);
  attention_forward(attention_shape(l), heads(a.attention, config_.q_size()), a.lse, q_heads(a.qkv), k_heads(a.qkv),
                    v_heads(a.qkv));
  if (!config_.parallel_residual) {
    linear(BlockLinear::output, l, config_.post_norms ? a.attention_out : branch, a.attention);
    if (config_.post_norms) normalize_branch(attention_norm(l), branch);
    add_and_normalize(norm_after(2 * l), branch, acts_.residual[l]);
  }
  linear(BlockLinear::up, l, a.gate_up, a.post_norm);
  activate(a);
}

// q and k of packed rows [N, q + 2 kv], forward, or their gradients, backward.
void TrainingModel::rotate(std::int64_t l, float* qkv, decltype(rope_forward)* rotation) {
  if (!config_.rotates(l)) return;
  const RopeTable& table = config_.rotates_locally(l) ? local_rope_ : rope_;
  const std::int64_t B = options_.micro_batch, T = options_.seq_len;
  rotation(q_heads(qkv), table, B, T, config_.num_heads, 0, document_starts());
  rotation(k_heads(qkv), table, B, T, config_.num_kv_heads, 0, document_starts());
}

// Between the two matrices of the MLP.
void TrainingModel::activate(const LayerActivations<float>& a) {
  const std::int64_t F = config_.ffn_size;
  switch (config_.activation) {
    case Activation::swiglu:
      return swiglu_forward(a.swiglu_out, a.gate_up, rows(), F);
    case Activation::geglu_tanh:
      return geglu_tanh_forward(a.swiglu_out, a.gate_up, rows(), F);
    case Activation::gelu:
      return gelu_forward(a.swiglu_out, a.gate_up, rows() * F);
    case Activation::gelu_tanh:
      break;
  }
  fail(Exit::internal, "an activation that training has not");
}

// Logits, losses and, in training, the gradient of the final norm and of the head, kClassifierRows at a time.
double TrainingModel::classify(const Batch& batch, float loss_scale, std::int64_t* label_count) {
  const std::int64_t N = rows(), C = config_.hidden_size, V = config_.vocab_size;
  gather_parameters(head_section());
  for (std::int64_t row = 0; row < N; row += kClassifierRows) {
    const std::int64_t count = std::min(kClassifierRows, N - row);
    const float* hidden = acts_.final_norm + row * C;
    matmul_forward(acts_.logits, hidden, weights_.head.plain, nullptr, count, C, V);
    classifier(acts_.logits, acts_.losses + row, batch.labels.data() + row, count, V, loss_scale, training_,
               batch.label_weights.empty() ? nullptr : batch.label_weights.data() + row);
    if (training_) {
      matmul_backward(acts_.d_final_norm + row * C, d_weights_.head.plain, nullptr, acts_.logits, hidden,
                      weights_.head.plain, count, C, V);
    }
  }
  double sum = 0;
  for (std::int64_t n = 0; n < N; ++n) {
    sum += static_cast<double>(acts_.losses[n]);
    *label_count += batch.labels[static_cast<std::size_t>(n)] != kIgnoredLabel ? 1 : 0;
  }
  return sum;
}

// ---- backward -------------------------------------------------------------------------------------------------------

void TrainingModel::backward() {
  if (!training_) fail(Exit::internal, "backward() without a forward()");
  const std::int64_t L = config_.num_layers;
  gather_parameters(section_of_layer(L - 1));
  norm_backward(norm_after(2 * L - 1), acts_.d_final_norm, false);
  for (std::int64_t l = L - 1; l >= 0; --l) {
    gather_parameters(section_of_layer(l));
    if (fp8_) fp8_->use_weights(l, weights_.blocks[static_cast<std::size_t>(l)], true);
    recompute_layer(l);
    backward_layer(l);
  }
  if (d_weights_.embedding != nullptr)
    embedding_backward(d_weights_.embedding, acts_.branch, tokens_.data(), rows(), config_.hidden_size,
                       config_.embedding_scale());
  if (fp8_) fp8_->end_micro_batch();
  if (shard_.rounds > 1 && ++rank_micro_batches_ == options_.rank_micro_batches) finish_rank();
}

// The gradients of one of this process's ranks are complete: adds them, and its loss, to those of the ranks before it.
void TrainingModel::finish_rank() {
  if (ranks_added_ == shard_.rounds) fail(Exit::internal, "more micro-batches than the ranks of a step have");
  float* const sum = rank_sum_arena_.at<float>(0);
  float* const gradients = gradient_arena_.at<float>(0);
  if (ranks_ != nullptr) {
    add_round(sum);
  } else {
    const float* const pieces[] = {sum, gradients};
    add_ranks(sum, std::span(pieces).subspan(ranks_added_ == 0 ? 1 : 0), table_.arena_elements());
    ranks_loss_sum_ += loss_sum_;
  }
  gradient_arena_.clear();
  loss_sum_ = 0;
  rank_micro_batches_ = 0;
  ++ranks_added_;
  if (ranks_ == nullptr || ranks_added_ < shard_.rounds) return;
  std::copy_n(sum, shard_.added.size(), gradients + shard_.added.begin);
}

// Computes again what --recompute let other layers overwrite, by the same operators on the same inputs: the same bits.
void TrainingModel::recompute_layer(std::int64_t l) {
  if (options_.recompute == Recompute::none) return;
  normalize(norm_after(2 * l - 1));
  const LayerActivations<float>& a = acts_.layers[l];
  if (options_.recompute == Recompute::block) {
    recomputing_ = true;
    forward_to_swiglu(l, acts_.d_norm);  // acts_.branch holds a gradient now
    if (config_.post_norms) linear(BlockLinear::down, l, a.mlp_out, a.swiglu_out);
    recomputing_ = false;
    return;
  }
  if (!config_.parallel_residual) normalize(norm_after(2 * l));
  activate(a);
}

// In: branch holds the gradient of what the MLP adds, d_residual that of residual_mid by the skip connection; with the parallel
// residual those of both branches and of the layer's input.
// Out: branch holds the gradient of the output of the layer below (its MLP, or the embedding).
void TrainingModel::backward_layer(std::int64_t l) {
  const LayerActivations<float>& a = acts_.layers[l];
  const bool parallel = config_.parallel_residual;

  if (config_.post_norms) branch_norm_backward(mlp_norm(l));
  linear_backward(BlockLinear::down, l, acts_.d_swiglu_out, acts_.branch, a.swiglu_out);
  activation_backward(a);  // a.gate_up is its gradient from here on
  linear_backward(BlockLinear::up, l, parallel ? acts_.d_post_norm : acts_.d_norm, a.gate_up, a.post_norm);
  if (!parallel) norm_backward(norm_after(2 * l), acts_.d_norm, true);

  if (config_.post_norms) branch_norm_backward(attention_norm(l));
  linear_backward(BlockLinear::output, l, acts_.d_attention, acts_.branch, a.attention);
  if (!input_gradient_is_read(options_.lora, l, BlockLinear::output)) return;
  attention_backward(attention_shape(l), q_heads(acts_.d_qkv), k_heads(acts_.d_qkv), v_heads(acts_.d_qkv),
                     heads(acts_.d_attention, config_.q_size()), heads(a.attention, config_.q_size()), a.lse,
                     q_heads(a.qkv), k_heads(a.qkv), v_heads(a.qkv));
  rotate(l, acts_.d_qkv, rope_backward);
  if (config_.qk_norm) head_norms_backward(l);
  linear_backward(BlockLinear::qkv, l, acts_.d_norm, acts_.d_qkv, a.input_norm);
  if (!input_gradient_is_read(options_.lora, l, BlockLinear::qkv)) return;
  norm_backward(norm_after(2 * l - 1), acts_.d_norm, true);
}

void TrainingModel::activation_backward(const LayerActivations<float>& a) {
  const std::int64_t F = config_.ffn_size;
  switch (config_.activation) {
    case Activation::swiglu:
      return swiglu_backward(a.gate_up, acts_.d_swiglu_out, a.gate_up, rows(), F);
    case Activation::geglu_tanh:
      return geglu_tanh_backward(a.gate_up, acts_.d_swiglu_out, a.gate_up, rows(), F);
    case Activation::gelu:
      return gelu_backward(a.gate_up, acts_.d_swiglu_out, a.gate_up, rows() * F);
    case Activation::gelu_tanh:
      break;
  }
  fail(Exit::internal, "an activation that training has not");
}

// ---- linear layers --------------------------------------------------------------------------------------------------

void TrainingModel::linear(BlockLinear which, std::int64_t l, float* out, const float* x, Accumulate accumulate) {
  const LinearSize size = linear_size(config_, which);
  const Linear<float>& layer = weights_.blocks[static_cast<std::size_t>(l)].linear(which);
  const float *weight = layer.weight.plain, *operand = x;  // an adapter reads x as it is
  if (fp8_) {
    using Pass = Fp8Linears::Pass;
    operand = fp8_->input(which, l, x, !training_ ? Pass::evaluation : recomputing_ ? Pass::again : Pass::training);
    weight = fp8_->weight(which, l);
  }
  matmul_forward(out, operand, weight, layer.bias, rows(), size.C, size.OC, accumulate);
  for (const LowRank<float>& adapter : layer.low_rank) {
    low_rank_forward(adapter_shape(which, l), out, x, adapter, adapter_workspace_.at<float>(0));
  }
}

void TrainingModel::linear_backward(BlockLinear which, std::int64_t l, float* dx, const float* dout, const float* x) {
  const LinearSize size = linear_size(config_, which);
  const Linear<float>& layer = weights_.blocks[static_cast<std::size_t>(l)].linear(which);
  const float *weight = layer.weight.plain, *x_operand = x, *dout_operand = dout;
  if (!input_gradient_is_read(options_.lora, l, which)) dx = nullptr;
  if (fp8_ && dx != nullptr) {
    x_operand = fp8_->input(which, l, x, Fp8Linears::Pass::again);
    dout_operand = fp8_->gradient(which, l, dout);
    weight = fp8_->weight(which, l);
  }
  const Linear<float>& d_layer = d_weights_.blocks[static_cast<std::size_t>(l)].linear(which);
  matmul_backward(dx, d_layer.weight.plain, d_layer.bias, dout_operand, x_operand, weight, rows(), size.C, size.OC);
  for (std::size_t i = 0; i < d_layer.low_rank.size(); ++i) {
    low_rank_backward(adapter_shape(which, l), dx, d_layer.low_rank[i], dout, x, layer.low_rank[i],
                      adapter_workspace_.at<float>(0));
  }
}

// ---- norms ----------------------------------------------------------------------------------------------------------

TrainingModel::NormSite TrainingModel::norm_after(std::int64_t branch) {
  const std::int64_t l = (branch + 1) / 2;
  if (branch == 2 * config_.num_layers - 1) {
    return {branch,           acts_.residual[l], weights_.final_norm, d_weights_.final_norm,
            acts_.final_norm, acts_.final_mean,  acts_.final_rstd};
  }
  const BlockWeights<float>&w = weights_.blocks[l], &dw = d_weights_.blocks[l];
  const LayerActivations<float>& a = acts_.layers[l];
  if (branch % 2 == 0) return {branch, a.residual_mid, w.post_norm, dw.post_norm, a.post_norm, a.mean2, a.rstd2};
  NormSite site{branch, acts_.residual[l], w.input_norm, dw.input_norm, a.input_norm, a.mean1, a.rstd1};
  if (config_.parallel_residual) {
    site.weights2 = w.post_norm;
    site.d_weights2 = dw.post_norm;
    site.out2 = a.post_norm;
  }
  return site;
}

// Weights and results of the norm, without what it reads.
ResidualNormForward TrainingModel::norm_operands(const NormSite& site) {
  ResidualNormForward norm;
  norm.weight = site.weights.weight;
  norm.bias = site.weights.bias;
  norm.weight2 = site.weights2.weight;
  norm.bias2 = site.weights2.bias;
  norm.out = site.out;
  norm.out2 = site.out2;
  norm.mean = site.mean;
  norm.rstd = site.rstd;
  return norm;
}

void TrainingModel::normalize(const NormSite& site) {
  ResidualNormForward norm = norm_operands(site);
  norm.x = site.residual;
  residual_norm_forward(norm_shape(-1), norm);
}

void TrainingModel::add_and_normalize(const NormSite& site, const float* x, const float* skip) {
  ResidualNormForward norm = norm_operands(site);
  norm.x = x;
  norm.residual = skip;
  norm.residual_out = site.residual;
  residual_norm_forward(norm_shape(site.branch), norm);
}

void TrainingModel::norm_backward(const NormSite& site, const float* d_norm, bool has_skip) {
  ResidualNormBackward norm;
  norm.dout = d_norm;
  norm.dresidual_out = has_skip ? acts_.d_residual : nullptr;
  norm.residual_out = site.residual;
  norm.weight = site.weights.weight;
  norm.mean = site.mean;
  norm.rstd = site.rstd;
  norm.dx = acts_.branch;
  norm.dresidual = acts_.d_residual;
  norm.dweight = site.d_weights.weight;
  norm.dbias = site.d_weights.bias;
  if (site.out2 != nullptr) {
    norm.dout2 = acts_.d_post_norm;
    norm.weight2 = site.weights2.weight;
    norm.dweight2 = site.d_weights2.weight;
    norm.dbias2 = site.d_weights2.bias;
  }
  residual_norm_backward(norm_shape(site.branch), norm);
}

TrainingModel::BranchNorm TrainingModel::attention_norm(std::int64_t l) {
  const LayerActivations<float>& a = acts_.layers[l];
  return {a.attention_out, weights_.blocks[l].attention_norm, d_weights_.blocks[l].attention_norm, a.attention_mean,
          a.attention_rstd};
}

TrainingModel::BranchNorm TrainingModel::mlp_norm(std::int64_t l) {
  const LayerActivations<float>& a = acts_.layers[l];
  return {a.mlp_out, weights_.blocks[l].mlp_norm, d_weights_.blocks[l].mlp_norm, a.mlp_mean, a.mlp_rstd};
}

void TrainingModel::normalize_branch(const BranchNorm& norm, float* out) {
  ResidualNormForward io;
  io.residual = norm.x;
  io.weight = norm.weights.weight;
  io.bias = norm.weights.bias;
  io.out = out;
  io.mean = norm.mean;
  io.rstd = norm.rstd;
  residual_norm_forward(norm_shape(-1), io);
}

void TrainingModel::branch_norm_backward(const BranchNorm& norm) {
  ResidualNormBackward io;
  io.dout = acts_.branch;
  io.residual_out = norm.x;
  io.weight = norm.weights.weight;
  io.mean = norm.mean;
  io.rstd = norm.rstd;
  io.dx = acts_.branch;
  io.dweight = norm.d_weights.weight;
  io.dbias = norm.d_weights.bias;
  residual_norm_backward(norm_shape(-1), io);
}

void TrainingModel::normalize_heads(std::int64_t l) {
  const LayerActivations<float>& a = acts_.layers[l];
  const BlockWeights<float>& w = weights_.blocks[l];
  const std::int64_t q = config_.q_size(), qk = q + config_.kv_size();
  for (std::int64_t n = 0; n < rows(); ++n) std::copy_n(a.qkv + n * qkv_size(), qk, a.qk + n * qk);
  head_norm_forward(head_norm_shape(config_.num_heads), q_heads(a.qkv), heads(a.qk, qk), w.q_norm.weight);
  head_norm_forward(head_norm_shape(config_.num_kv_heads), k_heads(a.qkv), heads(a.qk + q, qk), w.k_norm.weight);
}

void TrainingModel::head_norms_backward(std::int64_t l) {
  const LayerActivations<float>& a = acts_.layers[l];
  const BlockWeights<float>&w = weights_.blocks[l], &dw = d_weights_.blocks[l];
  const std::int64_t q = config_.q_size(), qk = q + config_.kv_size();
  const HeadView dq = q_heads(acts_.d_qkv), dk = k_heads(acts_.d_qkv);
  head_norm_backward(head_norm_shape(config_.num_heads), dq, dw.q_norm.weight, dq, heads(a.qk, qk), w.q_norm.weight);
  head_norm_backward(head_norm_shape(config_.num_kv_heads), dk, dw.k_norm.weight, dk, heads(a.qk + q, qk),
                     w.k_norm.weight);
}

// ---- step -----------------------------------------------------------------------------------------------------------

// Called when every process has the complete gradients of one rank: adds those of the part that this process adds to
// `sum`, behind those of earlier rounds.
void TrainingModel::add_round(float* sum) {
  exchange_and_add(*ranks_, sum, gradient_arena_.at<float>(0), parts_, ranks_added_ > 0);
  for (const double loss : ranks_->gather(loss_sum_)) ranks_loss_sum_ += loss;  // in the order of the ranks
}

// The gradients of all ranks are complete: from here on the arena holds those of the step, in the part of this process or, if
// the update is not sharded, everywhere.
void TrainingModel::complete_gradients() {
  float* const gradients = gradient_arena_.at<float>(0);
  if (shard_.rounds == 1) {
    add_round(gradients + shard_.added.begin);
    loss_sum_ = 0;
  }
  if (!sharded_) ranks_->gather(gradients, parts_);
  const std::vector<std::int64_t> labels = ranks_->gather(label_count_);
  label_count_ = std::accumulate(labels.begin(), labels.end(), std::int64_t{0});
  if (fp8_) fp8_->gather_counters(*ranks_);
  exchanged_ = true;
}

StepStatistics TrainingModel::statistics() {
  if (ranks_ != nullptr && !exchanged_) complete_gradients();
  double sum = 0;
  if (sharded_) {
    sum = sum_of_block_squares();
  } else {
    for (const TensorSpec& spec : table_.specs()) {
      sum += sum_of_squares(at(TensorRole::gradient, elements_of(spec)), spec.elements);
    }
  }
  StepStatistics statistics{ranks_loss_sum_ + loss_sum_, label_count_, std::sqrt(sum)};
  if (fp8_) statistics.fp8 = fp8_->statistics();
  return statistics;
}

// The same as sum_of_squares() over all tensors, from the blocks of all ranks.
double TrainingModel::sum_of_block_squares() const {
  const auto blocks_of = [](std::int64_t elements) { return ceil_div(elements, kAdamWBlock); };
  std::vector<Range> blocks_of_rank(parts_.size());
  std::int64_t blocks = 0;
  for (const TensorSpec& spec : table_.specs()) blocks += blocks_of(spec.elements);
  std::vector<double> squares(static_cast<std::size_t>(blocks));
  std::int64_t first = 0;  // block of the tensor
  for (const TensorSpec& spec : table_.specs()) {
    const Range part = common(elements_of(spec), own_);
    if (part.size() > 0) {
      block_squares(squares.data() + first + (part.begin - spec.offset) / kAdamWBlock, at(TensorRole::gradient, part),
                    part.size());
    }
    first += blocks_of(spec.elements);
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      blocks_of_rank[r].end += blocks_of(common(elements_of(spec), parts_[r]).size());
    }
  }
  for (std::size_t r = 1; r < parts_.size(); ++r) {
    blocks_of_rank[r].begin = blocks_of_rank[r - 1].end;
    blocks_of_rank[r].end += blocks_of_rank[r].begin;
  }
  ranks_->gather(squares.data(), blocks_of_rank);
  double total = 0;
  auto block = squares.begin();
  for (const TensorSpec& spec : table_.specs()) {
    const auto end = block + blocks_of(spec.elements);
    total += std::accumulate(block, end, 0.0);
    block = end;
  }
  return total;
}

void TrainingModel::update(const OptimizerStep& step) {
  for (const TensorSpec& spec : table_.specs()) {
    const Range part = common(elements_of(spec), own_);
    if (part.size() == 0) continue;
    const std::size_t states = optimizer().state_tensors(spec).size();
    update_.update(
        {spec,
         part.size(),
         at(TensorRole::parameter, part),
         at(TensorRole::gradient, part),
         {states > 0 ? at(TensorRole::state1, part) : nullptr, states > 1 ? at(TensorRole::state2, part) : nullptr},
         update_workspace_.at<float>(0)},
        step);
  }
  if (fp8_) fp8_->end_step();
  parameters_changed();
  if (sharded_ && !parameters_sharded()) ranks_->gather(parameter_arena_.at<float>(0), parts_);
}

// Into merged_, unless it has the newest parameters already.
void TrainingModel::merge_adapter() {
  if (!merged_is_stale_) return;
  std::memcpy(merged_->arena.at<std::byte>(0), frozen_->arena.at<std::byte>(0), parameter_plan(merged_->table).bytes());
  const ModelWeights<float> merged = bind_weights(config_, merged_->table, merged_->arena.at<float>(0), Offsets::bytes);
  for (std::size_t l = 0; l < merged.blocks.size(); ++l) {
    for (const BlockLinear which : kBlockLinears) {
      const std::int64_t in = linear_size(config_, which).C;
      for (const LowRank<float>& adapter : weights_.blocks[l].linear(which).low_rank) {
        add_low_rank(merged.blocks[l].linear(which).weight.plain + adapter.rows.begin * in, adapter.down, adapter.up,
                     adapter.rows.size(), in, options_.lora->rank, options_.lora->scale());
      }
    }
  }
  merged_is_stale_ = false;
}

// ---- access ---------------------------------------------------------------------------------------------------------

void TrainingModel::read_tensor(TensorRole role, const TensorSpec& spec, float* values) {
  require_tensor(role, spec);
  const Range part = common(elements_of(spec), held(role));
  if (part.size() > 0) std::copy_n(at(role, part), part.size(), values + (part.begin - spec.offset));
  if (!is_sharded(role)) return;
  std::vector<Range> parts;
  for (const Range& each : parts_) {
    const Range theirs = common(elements_of(spec), each);
    parts.push_back({theirs.begin - spec.offset, theirs.end - spec.offset});
  }
  ranks_->gather(values, parts);
}

std::vector<float> TrainingModel::activation(const std::string& name) {
  const std::int64_t N = rows(), C = config_.hidden_size;
  const auto copy = [N](const float* data, std::int64_t columns, std::int64_t stride) {
    std::vector<float> out(static_cast<std::size_t>(N * columns));
    for (std::int64_t n = 0; n < N; ++n) std::copy_n(data + n * stride, columns, out.begin() + n * columns);
    return out;
  };
  if (name == "embedding") return copy(acts_.residual[0], C, C);
  if (name == "final_norm") return copy(acts_.final_norm, C, C);
  if (name == "logits" && parameters_sharded()) return {};
  if (name == "logits") {
    std::vector<float> logits(static_cast<std::size_t>(N * config_.vocab_size));
    matmul_forward(logits.data(), acts_.final_norm, weights_.head.plain, nullptr, N, C, config_.vocab_size);
    return logits;
  }
  // "layers.<l>.<part>": kept for every layer only without recomputation.
  long long l = -1;
  char part[64] = "";
  const bool parsed = std::sscanf(name.c_str(), "layers.%lld.%63s", &l, part) == 2 && l >= 0 && l < config_.num_layers;
  if (!parsed || options_.recompute != Recompute::none) return {};
  const LayerActivations<float>& a = acts_.layers[static_cast<std::size_t>(l)];
  const std::int64_t q = config_.q_size();
  const auto copy_heads = [&](const HeadView& view, std::int64_t heads) {
    std::vector<float> out;
    for (std::int64_t n = 0; n < N * heads; ++n) {
      const float* head = view.data + n / heads * view.token_stride + n % heads * view.head_stride;
      out.insert(out.end(), head, head + config_.head_dim);
    }
    return out;
  };
  const std::string which = part;
  if (which == "input_norm") return copy(a.input_norm, C, C);
  if (which == "q") return copy_heads(q_heads(a.qkv), config_.num_heads);
  if (which == "k") return copy_heads(k_heads(a.qkv), config_.num_kv_heads);
  if (which == "v") return copy_heads(v_heads(a.qkv), config_.num_kv_heads);
  if (which == "attention") return copy(a.attention, q, q);
  if (which == "post_attention_norm") return copy(a.post_norm, C, C);
  if (which == "mlp_product") return copy(a.swiglu_out, config_.ffn_size, config_.ffn_size);
  if (which == "residual") return copy(acts_.residual[static_cast<std::size_t>(l) + 1], C, C);
  return {};
}

}  // namespace

std::vector<MemoryLine> plan_training(const ModelConfig& config, const TrainOptions& options) {
  return plan_training(config, options, 0, 1, Shard::none);
}

std::vector<MemoryLine> plan_training(const ModelConfig& config, const TrainOptions& options, int rank, int ranks,
                                      Shard shard) {
  const TensorTable table = trained_table(config, options);
  return memory_lines(config, options, table, shard_of(config, table, options, rank, ranks, shard));
}

std::unique_ptr<TrainModel> make_training_model(const ModelConfig& config, const TrainOptions& options) {
  check_precision(config, options);
  return std::make_unique<TrainingModel>(config, options, nullptr, Shard::none);
}

std::unique_ptr<TrainModel> make_training_model(const ModelConfig& config, const TrainOptions& options,
                                                Communicator& ranks, Shard shard) {
  check_precision(config, options);
  if (options.virtual_ranks % ranks.size() != 0) {
    fail(Exit::internal, "%d ranks for a step of %lld", ranks.size(), static_cast<long long>(options.virtual_ranks));
  }
  if (options.lora && shard == Shard::parameters)
    fail(Exit::usage, "--shard: got parameters, and those of an adapter are few. Use optimizer");
  if (shard == Shard::gradients)
    fail(Exit::usage, "--shard: got gradients, which needs a GPU. Use optimizer or parameters");
  return std::make_unique<TrainingModel>(config, options, &ranks, shard);
}

}  // namespace weft::cpu
