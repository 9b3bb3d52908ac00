// The Llama training step on the GPU, as two straight-line lists of launches: forward_layer and backward_layer mirror
// each other line by line, and llmc/cpu/llama.cpp is the same list on the CPU.
//
// Letters: B batch, T sequence, N = B T rows, C hidden, NH / NKV query and K/V heads, HS head size, q = NH HS,
// kv = NKV HS, F FFN width, V vocabulary, L layers. d_x is the gradient of x. S is the storage type of parameters and
// activations: bf16 or float.
//
// Numbers: all arithmetic fp32; gradients of parameters, moments and statistics are stored in fp32. With S = bf16 each
// parameter has 16 low bits beside it that make it an exact fp32 master (llmc/cuda/op/adamw.h).
//
// Nothing here waits for the GPU but statistics(), evaluate(), and the access functions at the end. The launches of
// forward() and of backward() are one CUDA graph each, replayed from the third micro-batch on (llmc/cuda/runtime/step_graph.h).
#include "llmc/cuda/llama/llama.h"

#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>

#include "llmc/base/dtype.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/adamw.h"
#include "llmc/cuda/op/attention/attention.h"
#include "llmc/cuda/op/ceilings.h"
#include "llmc/cuda/op/classifier.h"
#include "llmc/cuda/op/embedding.h"
#include "llmc/cuda/op/matmul.h"
#include "llmc/cuda/op/matmul_swiglu.h"
#include "llmc/cuda/op/residual_norm.h"
#include "llmc/cuda/op/rope.h"
#include "llmc/cuda/op/swiglu.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/operator_clock.h"
#include "llmc/cuda/runtime/step_graph.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/cuda/transformer/llama_decoder.h"
#include "llmc/model/llama_layout.h"

namespace weft::cuda {

namespace {

// Rows of logits at once. With fewer the gradient of the head, which every chunk reads and writes, costs more; with more
// nothing is gained but memory is lost (1 GB here with a vocabulary of 128,256).
std::int64_t classifier_rows(std::int64_t N) {
  constexpr std::int64_t kRows = 4096;
  return std::min(N, kRows);
}

template <typename S>
constexpr bool kSplitMaster = std::is_same_v<S, bf16>;

std::size_t moment_bytes(const TrainOptions& options) {
  return options.moments == Precision::bf16 ? sizeof(bf16) : sizeof(float);
}

MemoryPlan arena_plan(const char* name, const TensorTable& table, std::size_t element_bytes) {
  MemoryPlan plan(name);
  plan.add(static_cast<std::uint64_t>(table.arena_elements()) * element_bytes);
  return plan;
}

AttentionShape attention_shape(const ModelConfig& config, const TrainOptions& options) {
  return {options.micro_batch,
          options.seq_len,
          options.seq_len,
          config.num_heads,
          config.num_kv_heads,
          config.head_dim,
          true,
          1.0f / std::sqrt(static_cast<float>(config.head_dim))};
}

// Everything beside activations that a step needs: tokens, tables, results and the operators' scratch memory. Scratch
// regions of operators that never run at once share one place.
struct Workspace {
  MemoryPlan plan{"workspace"};
  std::uint64_t tokens, sorted_tokens, labels, rope_cos, rope_sin, loss_total, evaluation_total, norm, blocks, scratch;

  Workspace(const ModelConfig& config, const TrainOptions& options, std::int64_t adamw_block_count) {
    const std::int64_t N = options.micro_batch * options.seq_len;
    const std::int64_t table = options.seq_len * (config.rope.rotary_dim / 2);
    const auto add = [this](std::int64_t count, std::size_t bytes) {
      return plan.add(static_cast<std::uint64_t>(count) * bytes);
    };
    tokens = add(N, sizeof(std::int32_t));
    sorted_tokens = plan.add(embedding_sort_bytes(N));
    labels = add(N, sizeof(std::int32_t));
    rope_cos = add(table, sizeof(float));
    rope_sin = add(table, sizeof(float));
    loss_total = add(1, sizeof(LossTotal));
    evaluation_total = add(1, sizeof(LossTotal));
    norm = add(1, sizeof(GradientNorm));
    blocks = add(adamw_block_count, sizeof(AdamWBlock));
    const int norm_sums = config.norm == NormKind::layernorm ? 2 : 1;
    scratch = plan.add(std::max({residual_norm_backward_workspace(config.hidden_size, norm_sums),
                                 attention_backward_workspace(attention_shape(config, options)),
                                 embedding_backward_workspace(N, config.hidden_size), gradient_norm_workspace()}));
  }
};

std::vector<AdamWBlock> update_blocks(const TensorTable& table) {
  std::vector<AdamWRange> ranges;
  for (const TensorSpec& spec : table.specs()) ranges.push_back({spec.offset, spec.offset + spec.elements, spec.decay});
  return adamw_blocks(ranges);
}

template <typename S>
std::vector<MemoryLine> plan_of(const ModelConfig& config, const TrainOptions& options) {
  const TensorTable table(config);
  const std::uint64_t elements = static_cast<std::uint64_t>(table.arena_elements());
  const Workspace workspace(config, options, static_cast<std::int64_t>(update_blocks(table).size()));
  const LlamaActivations<S> activations(config, options, classifier_rows(options.micro_batch * options.seq_len));
  std::vector<MemoryLine> lines;
  lines.push_back({kSplitMaster<S> ? "parameters (bf16)" : "parameters (fp32)", elements * sizeof(S)});
  if (kSplitMaster<S>) lines.push_back({"low halves of fp32 masters", elements * sizeof(std::int16_t)});
  lines.push_back({"gradients (fp32)", elements * sizeof(float)});
  lines.push_back({options.moments == Precision::bf16 ? "AdamW moments (bf16)" : "AdamW moments (fp32)",
                   2 * elements * moment_bytes(options)});
  lines.push_back({kSplitMaster<S> ? "activations (bf16)" : "activations (fp32)", activations.plan().bytes()});
  lines.push_back({"workspace", workspace.plan.bytes() + Matmul::kWorkspaceBytes});
  return lines;
}

void check_sizes(const ModelConfig& config) {
  if (config.hidden_size % 8 != 0 || config.hidden_size > kMaxNormWidth) {
    fail(Exit::usage, "hidden_size: got %lld, the GPU kernels need a multiple of 8 up to %lld. Use --device cpu",
         static_cast<long long>(config.hidden_size), static_cast<long long>(kMaxNormWidth));
  }
  if (!attention_supports(config.head_dim)) {
    fail(Exit::usage, "head_dim: got %lld, the GPU kernels have 32, 64, 80, 96, 128 and 256. Use --device cpu",
         static_cast<long long>(config.head_dim));
  }
}

// Page-locked copies of the last few micro-batches on their way to the GPU: the host fills the next one while the last
// is still being read.
class TokenUpload {
 public:
  explicit TokenUpload(std::int64_t N)
      : rows_(N), buffer_(kSlots * 2 * static_cast<std::uint64_t>(N) * sizeof(std::int32_t)) {}

  void upload(const Batch& batch, std::int32_t* tokens, std::int32_t* labels, cudaStream_t stream) {
    const std::size_t slot = next_++ % kSlots;
    const std::size_t bytes = static_cast<std::size_t>(rows_) * sizeof(std::int32_t);
    check(cudaEventSynchronize(copied_[slot]), "token upload");  // of four uploads ago: done long since
    auto* staged = buffer_.at<std::int32_t>(slot * 2 * bytes);
    std::memcpy(staged, batch.tokens.data(), bytes);
    std::memcpy(staged + rows_, batch.labels.data(), bytes);
    check(cudaMemcpyAsync(tokens, staged, bytes, cudaMemcpyHostToDevice, stream), "token upload");
    check(cudaMemcpyAsync(labels, staged + rows_, bytes, cudaMemcpyHostToDevice, stream), "token upload");
    check(cudaEventRecord(copied_[slot], stream), "token upload");
  }

 private:
  static constexpr std::size_t kSlots = 4;
  std::int64_t rows_;
  PinnedBuffer buffer_;
  Event copied_[kSlots] = {Event(cudaEventDisableTiming), Event(cudaEventDisableTiming), Event(cudaEventDisableTiming),
                           Event(cudaEventDisableTiming)};
  std::size_t next_ = 0;
};

// The state in page-locked host memory, as it lies on the device. The copy runs beside the next step's forward and
// backward passes, which change none of it; the update waits for the event `copied`.
class PinnedStateCopy final : public StateCopy {
 public:
  // Parameters, their low halves (null without), both moments in fp32 or bf16. Stream and event belong to the model.
  struct Source {
    const std::byte *parameters, *low, *moment1, *moment2;
    std::uint64_t moment_bytes;
  };
  PinnedStateCopy(const TensorTable& table, const Source& source, cudaStream_t training, cudaEvent_t copied)
      : count_(static_cast<std::uint64_t>(table.arena_elements())),
        source_(source),
        training_(training),
        copied_(copied),
        buffer_(state_copy_bytes(table)) {}
  ~PinnedStateCopy() override { cudaStreamSynchronize(stream_); }

  void take() override {
    check(cudaEventRecord(ready_, training_), "copying the state");
    check(cudaStreamWaitEvent(stream_, ready_), "copying the state");
    const std::uint64_t quarter = 2 * count_, half = 4 * count_;  // bytes of an array of 16 and of 32 bits
    copy(0, source_.parameters, source_.low != nullptr ? quarter : half);
    if (source_.low != nullptr) copy(quarter, source_.low, quarter);
    copy(half, source_.moment1, source_.moment_bytes * count_);
    copy(2 * half, source_.moment2, source_.moment_bytes * count_);
    check(cudaEventRecord(copied_, stream_), "copying the state");
  }

  const float* read(TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t count,
                    float* buffer) const override {
    check(cudaEventSynchronize(copied_), "copying the state");
    const std::uint64_t offset = static_cast<std::uint64_t>(spec.offset) + first;
    if (role != TensorRole::parameter || source_.low == nullptr) {
      const std::uint64_t part = role == TensorRole::parameter ? 0 : role == TensorRole::moment1 ? 1 : 2;
      if (part == 0 || source_.moment_bytes == sizeof(float)) return buffer_.at<float>(4 * (part * count_ + offset));
      convert_to_f32(buffer_.at<std::byte>(4 * part * count_ + 2 * offset), DType::bf16, buffer, count);
      return buffer;
    }
    const auto* high = buffer_.at<std::uint16_t>(2 * offset);
    const auto* low = buffer_.at<std::int16_t>(2 * (count_ + offset));
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t bits = join_master({high[i], low[i]});
      std::memcpy(&buffer[i], &bits, sizeof bits);
    }
    return buffer;
  }

 private:
  void copy(std::uint64_t offset, const std::byte* device, std::uint64_t bytes) {
    check(cudaMemcpyAsync(buffer_.at<std::byte>(offset), device, bytes, cudaMemcpyDeviceToHost, stream_),
          "copying the state");
  }

  std::uint64_t count_;
  Source source_;
  cudaStream_t training_;
  cudaEvent_t copied_;
  PinnedBuffer buffer_;
  Stream stream_;
  Event ready_{cudaEventDisableTiming};
};

template <typename S>
class Llama final : public TrainModel {
 public:
  Llama(const ModelConfig& config, const TrainOptions& options);

  const ModelConfig& config() const override { return config_; }
  const TensorTable& table() const override { return table_; }
  std::vector<MemoryLine> memory() const override { return plan_of<S>(config_, options_); }

  void forward(const Batch& batch, std::uint64_t micro_step, float loss_scale) override;
  void backward() override;
  void zero_gradients() override;
  StepStatistics statistics() override;
  void update(const AdamWStep& step) override;
  OperatorTable time_operators(const std::function<void()>& step) override;
  double evaluate(const Batch& batch, std::int64_t* label_count) override;
  void read_tensor(TensorRole role, const TensorSpec& spec, float* values) override;
  void write_tensor(TensorRole role, const TensorSpec& spec, const float* values) override;
  std::unique_ptr<StateCopy> make_state_copy() override {
    PinnedStateCopy::Source source{};
    source.parameters = parameter_arena_.template at<std::byte>(0);
    if (kSplitMaster<S>) source.low = low_arena_.template at<std::byte>(0);
    source.moment1 = moment1_arena_.template at<std::byte>(0);
    source.moment2 = moment2_arena_.template at<std::byte>(0);
    source.moment_bytes = moment_bytes(options_);
    return std::make_unique<PinnedStateCopy>(table_, source, stream_, state_copied_);
  }
  std::vector<float> activation(const std::string& name) override;
  void inject_device_fault() override { launch_faulty_kernel(stream_); }
  std::unique_ptr<DecodeModel> decoder(std::int64_t capacity) override {
    stream_.synchronize("decoder");
    return make_llama_decoder<S>(config_, weights_, capacity);
  }

 private:
  std::int64_t rows() const { return options_.micro_batch * options_.seq_len; }
  std::int64_t qkv_size() const { return config_.q_size() + 2 * config_.kv_size(); }
  // Bytes of one activation of `columns` a row.
  double row_bytes(std::int64_t columns) const { return static_cast<double>(rows() * columns) * sizeof(S); }
  // Of the forward pass: two products of T x T / 2 by HS for each head.
  double attention_flops() const {
    return 2.0 * static_cast<double>(rows() * options_.seq_len) * static_cast<double>(config_.q_size());
  }
  // Whether SwiGLU is the last step of the products beside it.
  bool swiglu_in_products() const {
    return std::is_same_v<S, bf16> && matmul_swiglu_computes(config_.hidden_size, config_.ffn_size);
  }
  // Without dropout a branch joins the residual in the epilogue of the product that makes it.
  bool joins_in_product() const { return options_.dropout == 0; }
  bool short_moments(TensorRole role) const {
    return options_.moments == Precision::bf16 && (role == TensorRole::moment1 || role == TensorRole::moment2);
  }
  // Gradients to which backward adds even in the first micro-batch: norms, and an embedding that is not the head.
  bool added_to(const TensorSpec& spec) const {
    return spec.shape.size() == 1 ||
           (!config_.tied_embeddings && gradient_arena_.at<float>(0) + spec.offset == d_weights_.embedding);
  }
  template <typename U>
  U* workspace(std::uint64_t offset) const {
    return workspace_arena_.at<U>(offset);
  }

  // Heads of one packed [N, q + 2 kv] row block: q heads, then k heads, then v heads.
  HeadViewOf<S> q_heads(S* qkv) const { return heads(qkv, qkv_size()); }
  HeadViewOf<S> k_heads(S* qkv) const { return heads(qkv + config_.q_size(), qkv_size()); }
  HeadViewOf<S> v_heads(S* qkv) const { return heads(qkv + config_.q_size() + config_.kv_size(), qkv_size()); }
  HeadViewOf<S> heads(S* data, std::int64_t row) const { return {data, options_.seq_len * row, row, config_.head_dim}; }

  // The shape of the norm that follows branch `branch`: 2 l is the attention of layer l, 2 l + 1 its MLP; -1 the
  // embedding, which is never dropped.
  ResidualNormShape norm_shape(std::int64_t branch) const {
    ResidualNormShape shape;
    shape.rows = rows();
    shape.C = config_.hidden_size;
    shape.kind = config_.norm;
    shape.eps = static_cast<float>(config_.norm_eps);
    shape.dropout = training_ && branch >= 0 ? options_.dropout : 0;
    shape.seed = options_.seed;
    shape.offset = dropout_offset(micro_step_, std::max<std::int64_t>(branch, 0), 2 * config_.num_layers);
    return shape;
  }
  // The norm that reads residual[l]: a layer's first one, or the final one.
  struct NormSite {
    NormParameters<S> weights;
    NormParameters<float> d_weights;
    S* out;
    float *mean, *rstd;
  };
  NormSite norm_site(std::int64_t l) {
    if (l == config_.num_layers) {
      return {weights_.final_norm, d_weights_.final_norm, acts_.final_norm, acts_.final_mean, acts_.final_rstd};
    }
    const auto i = static_cast<std::size_t>(l);
    return {weights_.layers[i].input_norm, d_weights_.layers[i].input_norm, acts_.layers[i].input_norm,
            acts_.layers[i].mean1, acts_.layers[i].rstd1};
  }

  // One of the linear layers, with the names of its three products.
  struct Linear {
    const char *forward, *input_grad, *weight_grad;
    std::int64_t C, OC;
  };
  void forward(const Linear& linear, S* out, const S* x, const S* weight, std::int64_t N, const S* addend = nullptr);
  void input_grad(const Linear& linear, S* dx, const S* dout, const S* weight, std::int64_t N);
  void weight_grad(const Linear& linear, float* dweight, const S* dout, const S* x, std::int64_t N,
                   Accumulate accumulate);
  void forward_norm(const char* name, std::int64_t branch, const ResidualNormForward<S, S>& norm);

  void prepare_matmuls();
  void settle_gradients();
  void clear_gradient(const TensorSpec& spec);
  void forward_layers();
  void forward_attention_and_gate(std::int64_t l, S* branch, S* product);
  void forward_gate_up(std::int64_t l, S* product);
  void backward_gate_up(std::int64_t l, S* product);
  void join_branch(std::int64_t l);
  void classify(float loss_scale, Accumulate head, LossTotal* total);
  void normalize_input(std::int64_t l);
  void recompute_layer(std::int64_t l);
  void backward_layer(std::int64_t l, Accumulate accumulate);
  void backward_layers(Accumulate accumulate);
  void replay(StepGraph& graph, float scale, const std::function<void()>& launches);
  // Without dropout a branch and the residual it joins have one gradient.
  S* branch_gradient() const { return options_.dropout > 0 ? acts_.branch : acts_.d_residual; }
  void join_backward(std::int64_t branch, const NormParameters<S>& weights, const NormParameters<float>& d_weights,
                     const S* dout, const S* residual, const float* mean, const float* rstd, bool has_skip);
  template <typename U>
  U* element(TensorRole role, const TensorSpec& spec) const;

  ModelConfig config_;
  TrainOptions options_;
  TensorTable table_;
  const Linear qkv_{"qkv", "qkv dgrad", "qkv wgrad", config_.hidden_size, qkv_size()};
  const Linear output_{"output", "output dgrad", "output wgrad", config_.q_size(), config_.hidden_size};
  const Linear gate_up_{"gate, up", "gate, up dgrad", "gate, up wgrad", config_.hidden_size, 2 * config_.ffn_size};
  const Linear down_{"down", "down dgrad", "down wgrad", config_.ffn_size, config_.hidden_size};
  const Linear head_{"head", "head dgrad", "head wgrad", config_.hidden_size, config_.vocab_size};
  Stream stream_, side_stream_;
  Event tokens_ready_{cudaEventDisableTiming}, tokens_sorted_{cudaEventDisableTiming};
  OperatorClock clock_;
  Matmul matmul_;
  std::vector<AdamWBlock> blocks_;
  LlamaActivations<S> acts_;
  Workspace plan_;
  DeviceArena parameter_arena_, low_arena_, gradient_arena_, moment1_arena_, moment2_arena_, activation_arena_,
      workspace_arena_;
  LlamaParameters<S> weights_;
  LlamaParameters<float> d_weights_;
  DeviceRopeTable rope_;
  TokenUpload upload_;
  PinnedBuffer results_;                        // LossTotal, GradientNorm
  Event state_copied_{cudaEventDisableTiming};  // of the last StateCopy::take(): nothing may change the state before it

  StepGraph forward_graphs_[2], backward_graphs_[2];  // by Accumulate
  std::optional<std::pair<double, double>> ceilings_;
  bool timed_before_ = false;

  std::uint64_t micro_step_ = 0;
  bool training_ = false;
  // zero_gradients() writes nothing: the first micro-batch after it stores its gradients instead of adding them. Until
  // then the head's, and everything else's, are stale.
  bool head_stale_ = false, others_stale_ = false;
};

// The plans are timed before the arenas exist, because they are timed on scratch memory of the size of the operands.
template <typename S>
Llama<S>::Llama(const ModelConfig& config, const TrainOptions& options)
    : config_(config),
      options_(options),
      table_(config),
      clock_(stream_),
      matmul_(stream_, options.matmul_plans),
      blocks_(update_blocks(table_)),
      acts_(config, options, classifier_rows(rows())),
      plan_(config, options, static_cast<std::int64_t>(blocks_.size())),
      parameter_arena_((prepare_matmuls(), arena_plan("parameters", table_, sizeof(S)))),
      low_arena_(arena_plan("low halves of fp32 masters", table_, kSplitMaster<S> ? sizeof(std::int16_t) : 0)),
      gradient_arena_(arena_plan("gradients", table_, sizeof(float))),
      moment1_arena_(arena_plan("first moments", table_, moment_bytes(options))),
      moment2_arena_(arena_plan("second moments", table_, moment_bytes(options))),
      activation_arena_(acts_.plan()),
      workspace_arena_(plan_.plan),
      weights_(config, table_, parameter_arena_.at<S>(0)),
      d_weights_(config, table_, gradient_arena_.at<float>(0)),
      upload_(rows()),
      results_(sizeof(LossTotal) + sizeof(GradientNorm)) {
  acts_.bind(activation_arena_.at<std::byte>(0));
  for (DeviceArena* arena : {&parameter_arena_, &low_arena_, &gradient_arena_, &moment1_arena_, &moment2_arena_,
                             &activation_arena_, &workspace_arena_}) {
    arena->clear(stream_);
  }
  const RopeTable table = rope_table(config.rope, options.seq_len);
  rope_ = {workspace<float>(plan_.rope_cos), workspace<float>(plan_.rope_sin), table.positions, table.half};
  const std::size_t table_bytes = table.cos.size() * sizeof(float);
  check(
      cudaMemcpyAsync(workspace<float>(plan_.rope_cos), table.cos.data(), table_bytes, cudaMemcpyHostToDevice, stream_),
      "RoPE table");
  check(
      cudaMemcpyAsync(workspace<float>(plan_.rope_sin), table.sin.data(), table_bytes, cudaMemcpyHostToDevice, stream_),
      "RoPE table");
  check(cudaMemcpyAsync(workspace<AdamWBlock>(plan_.blocks), blocks_.data(), blocks_.size() * sizeof(AdamWBlock),
                        cudaMemcpyHostToDevice, stream_),
        "optimizer blocks");
  stream_.synchronize("start");
}

// Every shape of the step: four linear layers and the head, each in three directions. Weight gradients are stored by the
// first micro-batch of a step and added by the others.
template <typename S>
void Llama<S>::prepare_matmuls() {
  const std::int64_t N = rows(), chunk = classifier_rows(N);
  const cudaDataType_t type = std::is_same_v<S, float> ? CUDA_R_32F : CUDA_R_16BF;
  std::vector<MatmulShape> shapes;
  const bool swiglu = swiglu_in_products();
  const auto prepare = [&](const Linear& linear, std::int64_t n, bool joins, bool stores, bool adds) {
    const std::int64_t C = linear.C, OC = linear.OC;
    if (!swiglu || &linear != &gate_up_)
      shapes.push_back({Gemm::forward, n, C, OC, type, Accumulate::no, false, joins});
    if (!swiglu || &linear != &down_) shapes.push_back({Gemm::input_grad, n, C, OC, type, Accumulate::no, false});
    if (stores) shapes.push_back({Gemm::weight_grad, n, C, OC, type, Accumulate::no, false});
    if (adds) shapes.push_back({Gemm::weight_grad, n, C, OC, type, Accumulate::yes, false});
  };
  const bool joins = joins_in_product(), accumulates = options_.accumulates;
  prepare(qkv_, N, false, true, accumulates);
  prepare(output_, N, joins, true, accumulates);
  prepare(gate_up_, N, false, true, accumulates);
  prepare(down_, N, joins, true, accumulates);
  prepare(head_, chunk, false, true, accumulates || N > chunk);
  if (N % chunk != 0) prepare(head_, N % chunk, false, false, true);
  matmul_.prepare(shapes);
}

// ---- operators: each launch under its name, with what it has to compute and to move -----------------------------------

template <typename S>
void Llama<S>::forward(const Linear& linear, S* out, const S* x, const S* weight, std::int64_t N, const S* addend) {
  const double n = static_cast<double>(N), C = static_cast<double>(linear.C), OC = static_cast<double>(linear.OC);
  clock_.run(linear.forward, 2 * n * C * OC, (n * C + C * OC + (addend != nullptr ? 2 : 1) * n * OC) * sizeof(S),
             [&] { matmul_.forward<S>(out, x, weight, nullptr, N, linear.C, linear.OC, Accumulate::no, addend); });
}

template <typename S>
void Llama<S>::input_grad(const Linear& linear, S* dx, const S* dout, const S* weight, std::int64_t N) {
  const double n = static_cast<double>(N), C = static_cast<double>(linear.C), OC = static_cast<double>(linear.OC);
  clock_.run(linear.input_grad, 2 * n * C * OC, (n * C + C * OC + n * OC) * sizeof(S),
             [&] { matmul_.input_grad<S>(dx, dout, weight, N, linear.C, linear.OC); });
}

template <typename S>
void Llama<S>::weight_grad(const Linear& linear, float* dweight, const S* dout, const S* x, std::int64_t N,
                           Accumulate accumulate) {
  const double n = static_cast<double>(N), C = static_cast<double>(linear.C), OC = static_cast<double>(linear.OC);
  const double passes = accumulate == Accumulate::yes ? 2 : 1;
  clock_.run(linear.weight_grad, 2 * n * C * OC, n * (C + OC) * sizeof(S) + passes * C * OC * sizeof(float),
             [&] { matmul_.weight_grad<S>(dweight, dout, x, N, linear.C, linear.OC, accumulate); });
}

template <typename S>
void Llama<S>::forward_norm(const char* name, std::int64_t branch, const ResidualNormForward<S, S>& norm) {
  const int passes = 1 + (norm.x != nullptr) + (norm.residual != nullptr) + (norm.residual_out != nullptr);
  clock_.run(name, 0, passes * row_bytes(config_.hidden_size),
             [&] { residual_norm_forward(norm_shape(branch), norm, stream_); });
}

// ---- forward --------------------------------------------------------------------------------------------------------

// `scale` and, with dropout, micro_step_ are all that differs from one run of a list to the next.
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
  upload_.upload(batch, workspace<std::int32_t>(plan_.tokens), workspace<std::int32_t>(plan_.labels), stream_);
  replay(forward_graphs_[static_cast<int>(head)], loss_scale, [&] {
    forward_layers();
    classify(loss_scale, head, workspace<LossTotal>(plan_.loss_total));
  });
  head_stale_ = false;
}

template <typename S>
double Llama<S>::evaluate(const Batch& batch, std::int64_t* label_count) {
  const Range range("evaluate");
  training_ = false;
  LossTotal* total = workspace<LossTotal>(plan_.evaluation_total);
  check(cudaMemsetAsync(total, 0, sizeof *total, stream_), "evaluate");
  upload_.upload(batch, workspace<std::int32_t>(plan_.tokens), workspace<std::int32_t>(plan_.labels), stream_);
  forward_layers();
  classify(0, Accumulate::yes, total);
  LossTotal* result = results_.at<LossTotal>(0);
  check(cudaMemcpyAsync(result, total, sizeof *total, cudaMemcpyDeviceToHost, stream_), "evaluate");
  stream_.synchronize("evaluate");
  *label_count = result->label_count;
  return result->loss_sum;
}

template <typename S>
void Llama<S>::forward_layers() {
  clock_.run("embedding", 0, 2 * row_bytes(config_.hidden_size), [&] {
    embedding_forward(acts_.residual[0], workspace<std::int32_t>(plan_.tokens), weights_.embedding, rows(),
                      config_.hidden_size, stream_);
  });
  normalize_input(0);
  for (std::int64_t l = 0; l < config_.num_layers; ++l) {
    const Range range("layer");
    forward_attention_and_gate(l, acts_.branch, acts_.layers[static_cast<std::size_t>(l)].mlp_product);
    join_branch(l);
  }
}

// input_norm -> qkv -> RoPE -> attention -> output projection -> residual_mid, post_norm -> gate/up -> SwiGLU.
// `branch` [N, C]: with dropout, the attention branch on its way into the residual. `product`: see forward_gate_up().
template <typename S>
void Llama<S>::forward_attention_and_gate(std::int64_t l, S* branch, S* product) {
  const std::int64_t N = rows(), T = options_.seq_len;
  const LayerParameters<S>& w = weights_.layers[static_cast<std::size_t>(l)];
  const LayerActivations<S>& a = acts_.layers[static_cast<std::size_t>(l)];
  const S* residual = acts_.residual[static_cast<std::size_t>(l)];

  forward(qkv_, a.qkv, a.input_norm, w.qkv, N);
  clock_.run("rope", 0, 2 * row_bytes(config_.q_size() + config_.kv_size()), [&] {
    rope_forward(q_heads(a.qkv), k_heads(a.qkv), rope_, options_.micro_batch, T, config_.num_heads,
                 config_.num_kv_heads, 0, stream_);
  });
  clock_.run("attention", attention_flops(), row_bytes(config_.q_size() + qkv_size()), [&] {
    attention_forward<S>(attention_shape(config_, options_), heads(a.attention, config_.q_size()), a.lse,
                         q_heads(a.qkv), k_heads(a.qkv), v_heads(a.qkv), stream_);
  });

  ResidualNormForward<S, S> norm;
  if (joins_in_product()) {
    forward(output_, a.residual_mid, a.attention, w.output, N, residual);
    norm.residual = a.residual_mid;
  } else {
    forward(output_, branch, a.attention, w.output, N);
    norm.x = branch;
    norm.residual = residual;
    norm.residual_out = a.residual_mid;
  }
  norm.weight = w.post_norm.weight;
  norm.bias = w.post_norm.bias;
  norm.out = a.post_norm;
  norm.mean = a.mean2;
  norm.rstd = a.rstd2;
  forward_norm("norm", 2 * l, norm);

  forward_gate_up(l, product);
}

// gate and up, and `product` [N, F] of SwiGLU unless it is null.
template <typename S>
void Llama<S>::forward_gate_up(std::int64_t l, S* product) {
  const std::int64_t N = rows(), C = config_.hidden_size, F = config_.ffn_size;
  const S* weight = weights_.layers[static_cast<std::size_t>(l)].gate_up;
  const LayerActivations<S>& a = acts_.layers[static_cast<std::size_t>(l)];
  if constexpr (std::is_same_v<S, bf16>) {
    if (swiglu_in_products()) {
      const double n = static_cast<double>(N), c = static_cast<double>(C), f = static_cast<double>(F);
      clock_.run("gate, up, swiglu", 4 * n * c * f,
                 (n * c + 2 * f * c + (product != nullptr ? 3 : 2) * n * f) * sizeof(S),
                 [&] { gate_up_swiglu(a.gate_up, product, a.post_norm, weight, N, C, F, stream_); });
      return;
    }
  }
  forward(gate_up_, a.gate_up, a.post_norm, weight, N);
  if (product == nullptr) return;
  clock_.run("swiglu", 0, 3 * row_bytes(F), [&] { swiglu_forward(product, a.gate_up, N, F, stream_); });
}

// Down projection -> residual[l + 1] and the norm that reads it: the next layer's, or the final one.
template <typename S>
void Llama<S>::join_branch(std::int64_t l) {
  const auto i = static_cast<std::size_t>(l);
  const LayerActivations<S>& a = acts_.layers[i];
  const S* down = weights_.layers[i].down;
  const NormSite next = norm_site(l + 1);
  ResidualNormForward<S, S> norm;
  if (joins_in_product()) {
    forward(down_, acts_.residual[i + 1], a.mlp_product, down, rows(), a.residual_mid);
    norm.residual = acts_.residual[i + 1];
  } else {
    forward(down_, acts_.branch, a.mlp_product, down, rows());
    norm.x = acts_.branch;
    norm.residual = a.residual_mid;
    norm.residual_out = acts_.residual[i + 1];
  }
  norm.weight = next.weights.weight;
  norm.bias = next.weights.bias;
  norm.out = next.out;
  norm.mean = next.mean;
  norm.rstd = next.rstd;
  forward_norm("norm", 2 * l + 1, norm);
}

// Logits, losses and, in training, the gradient of the final norm and of the head, a chunk of rows at a time.
template <typename S>
void Llama<S>::classify(float loss_scale, Accumulate head, LossTotal* total) {
  const Range range("classifier");
  const std::int64_t N = rows(), C = config_.hidden_size, V = config_.vocab_size;
  const std::int64_t chunk = classifier_rows(N);
  const std::int32_t* labels = workspace<std::int32_t>(plan_.labels);
  for (std::int64_t row = 0; row < N; row += chunk) {
    const std::int64_t count = std::min(chunk, N - row);
    const S* hidden = acts_.final_norm + row * C;
    forward(head_, acts_.logits, hidden, weights_.head, count);
    const double bytes = static_cast<double>(count * V) * sizeof(S);
    clock_.run("softmax, loss", 0, training_ ? 2 * bytes : bytes, [&] {
      classifier(acts_.logits, acts_.losses + row, labels + row, count, V, V, loss_scale, training_, stream_);
    });
    if (training_) {
      input_grad(head_, acts_.d_final_norm + row * C, acts_.logits, weights_.head, count);
      weight_grad(head_, d_weights_.head, acts_.logits, hidden, count, row == 0 ? head : Accumulate::yes);
    }
  }
  clock_.run("loss sum", 0, static_cast<double>(N) * (sizeof(float) + sizeof(std::int32_t)),
             [&] { add_losses(total, acts_.losses, labels, N, stream_); });
}

// ---- backward -------------------------------------------------------------------------------------------------------

template <typename S>
void Llama<S>::normalize_input(std::int64_t l) {
  const NormSite site = norm_site(l);
  ResidualNormForward<S, S> norm;
  norm.residual = acts_.residual[static_cast<std::size_t>(l)];
  norm.weight = site.weights.weight;
  norm.bias = site.weights.bias;
  norm.out = site.out;
  norm.mean = site.mean;
  norm.rstd = site.rstd;
  forward_norm("norm", -1, norm);
}

// Brings back what --recompute let other layers overwrite, by the same operators on the same inputs: the same bits. Only
// the product of SwiGLU is left to its backward pass, which has all of it at hand.
template <typename S>
void Llama<S>::recompute_layer(std::int64_t l) {
  if (options_.recompute == Recompute::none) return;
  const Range range("recompute");
  const auto i = static_cast<std::size_t>(l);
  normalize_input(l);
  if (options_.recompute == Recompute::block) {
    forward_attention_and_gate(l, acts_.d_norm, nullptr);  // acts_.branch holds a gradient now
    return;
  }
  const LayerActivations<S>& a = acts_.layers[i];
  ResidualNormForward<S, S> norm;
  norm.residual = a.residual_mid;
  norm.weight = weights_.layers[i].post_norm.weight;
  norm.bias = weights_.layers[i].post_norm.bias;
  norm.out = a.post_norm;
  forward_norm("norm", -1, norm);
}

// Backward of one residual_norm: from the gradient of its output and, with a skip, of its new residual, to the gradient
// of the branch that joined there (branch_gradient()) and of the residual before it (acts_.d_residual).
template <typename S>
void Llama<S>::join_backward(std::int64_t branch, const NormParameters<S>& weights,
                             const NormParameters<float>& d_weights, const S* dout, const S* residual,
                             const float* mean, const float* rstd, bool has_skip) {
  ResidualNormBackward<S, S> join;
  join.dout = dout;
  join.dresidual_out = has_skip ? acts_.d_residual : nullptr;
  join.residual_out = residual;
  join.weight = weights.weight;
  join.mean = mean;
  join.rstd = rstd;
  const bool one = branch_gradient() == acts_.d_residual;
  join.dx = one ? nullptr : branch_gradient();
  join.dresidual = acts_.d_residual;
  join.dweight = d_weights.weight;
  join.dbias = d_weights.bias;
  join.workspace = workspace<void>(plan_.scratch);
  clock_.run("norm backward", 0, ((has_skip ? 4 : 3) + (one ? 0 : 1)) * row_bytes(config_.hidden_size),
             [&] { residual_norm_backward(norm_shape(branch), join, stream_); });
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
void Llama<S>::backward_layers(Accumulate accumulate) {
  const std::int64_t N = rows(), C = config_.hidden_size, L = config_.num_layers;
  if (accumulate == Accumulate::no) {
    for (const TensorSpec& spec : table_.specs()) {
      if (added_to(spec)) clear_gradient(spec);
    }
  }
  // The order of the embedding's rows, found beside everything else.
  check(cudaEventRecord(tokens_ready_, stream_), "backward");
  check(cudaStreamWaitEvent(side_stream_, tokens_ready_), "backward");
  embedding_sort(workspace<void>(plan_.sorted_tokens), workspace<std::int32_t>(plan_.tokens), N, config_.vocab_size,
                 side_stream_);
  check(cudaEventRecord(tokens_sorted_, side_stream_), "backward");
  const NormSite last = norm_site(L);
  join_backward(2 * L - 1, last.weights, last.d_weights, acts_.d_final_norm,
                acts_.residual[static_cast<std::size_t>(L)], last.mean, last.rstd, false);
  for (std::int64_t l = L - 1; l >= 0; --l) {
    recompute_layer(l);
    backward_layer(l, accumulate);
  }
  check(cudaStreamWaitEvent(stream_, tokens_sorted_), "backward");
  const std::int64_t touched = std::min(N, config_.vocab_size);
  clock_.run("embedding backward", 0, row_bytes(C) + 2.0 * static_cast<double>(touched * C) * sizeof(float), [&] {
    embedding_backward(d_weights_.embedding, branch_gradient(), workspace<void>(plan_.sorted_tokens), N, C,
                       workspace<void>(plan_.scratch), stream_);
  });
}

// a.gate_up becomes its gradient, and `product`, unless it is null, is SwiGLU's product again.
template <typename S>
void Llama<S>::backward_gate_up(std::int64_t l, S* product) {
  const std::int64_t N = rows(), C = config_.hidden_size, F = config_.ffn_size;
  const S* weight = weights_.layers[static_cast<std::size_t>(l)].down;
  S* gate_up = acts_.layers[static_cast<std::size_t>(l)].gate_up;
  if constexpr (std::is_same_v<S, bf16>) {
    if (swiglu_in_products()) {
      const double n = static_cast<double>(N), c = static_cast<double>(C), f = static_cast<double>(F);
      clock_.run("down dgrad, swiglu", 2 * n * c * f,
                 (n * c + f * c + (product != nullptr ? 5 : 4) * n * f) * sizeof(S),
                 [&] { down_input_grad_swiglu(gate_up, product, branch_gradient(), weight, N, C, F, stream_); });
      return;
    }
  }
  input_grad(down_, acts_.d_mlp_product, branch_gradient(), weight, N);
  clock_.run("swiglu backward", 0, (product == nullptr ? 5 : 6) * row_bytes(F),
             [&] { swiglu_backward(gate_up, acts_.d_mlp_product, gate_up, N, F, product, stream_); });
}

// In: branch_gradient() is the gradient of the MLP's output, d_residual that of residual_mid from the skip path.
// Out: branch_gradient() is the gradient of the branch below (the MLP of layer l - 1, or the embedding).
template <typename S>
void Llama<S>::backward_layer(std::int64_t l, Accumulate accumulate) {
  const Range range("layer");
  const std::int64_t N = rows(), q = config_.q_size();
  const LayerParameters<S>& w = weights_.layers[static_cast<std::size_t>(l)];
  const LayerParameters<float>& dw = d_weights_.layers[static_cast<std::size_t>(l)];
  const LayerActivations<S>& a = acts_.layers[static_cast<std::size_t>(l)];

  backward_gate_up(l, options_.recompute == Recompute::none ? nullptr : a.mlp_product);  // null: it is still there
  weight_grad(down_, dw.down, branch_gradient(), a.mlp_product, N, accumulate);
  weight_grad(gate_up_, dw.gate_up, a.gate_up, a.post_norm, N, accumulate);  // a.gate_up is its gradient now
  input_grad(gate_up_, acts_.d_norm, a.gate_up, w.gate_up, N);
  join_backward(2 * l, w.post_norm, dw.post_norm, acts_.d_norm, a.residual_mid, a.mean2, a.rstd2, true);

  weight_grad(output_, dw.output, branch_gradient(), a.attention, N, accumulate);
  input_grad(output_, acts_.d_attention, branch_gradient(), w.output, N);
  clock_.run("attention backward", 2.5 * attention_flops(), row_bytes(2 * (q + qkv_size())), [&] {
    attention_backward<S>(attention_shape(config_, options_), q_heads(acts_.d_qkv), k_heads(acts_.d_qkv),
                          v_heads(acts_.d_qkv), heads(acts_.d_attention, q), heads(a.attention, q), a.lse,
                          q_heads(a.qkv), k_heads(a.qkv), v_heads(a.qkv), workspace<void>(plan_.scratch), stream_,
                          rope_);  // of q and k before RoPE
  });
  weight_grad(qkv_, dw.qkv, acts_.d_qkv, a.input_norm, N, accumulate);
  input_grad(qkv_, acts_.d_norm, acts_.d_qkv, w.qkv, N);
  const NormSite input = norm_site(l);
  join_backward(2 * l - 1, input.weights, input.d_weights, acts_.d_norm, acts_.residual[static_cast<std::size_t>(l)],
                input.mean, input.rstd, true);
}

// ---- step -----------------------------------------------------------------------------------------------------------

template <typename S>
void Llama<S>::zero_gradients() {
  head_stale_ = others_stale_ = true;
  check(cudaMemsetAsync(workspace<LossTotal>(plan_.loss_total), 0, sizeof(LossTotal), stream_), "zero_gradients");
}

template <typename S>
void Llama<S>::clear_gradient(const TensorSpec& spec) {
  check(cudaMemsetAsync(gradient_arena_.at<float>(0) + spec.offset, 0,
                        static_cast<std::size_t>(spec.elements) * sizeof(float), stream_),
        "zero_gradients");
}

// Gradients that are to be read but that no micro-batch has stored since zero_gradients().
template <typename S>
void Llama<S>::settle_gradients() {
  const float* head = d_weights_.head;
  for (const TensorSpec& spec : table_.specs()) {
    const bool is_head = gradient_arena_.at<float>(0) + spec.offset == head;
    if (is_head ? head_stale_ : others_stale_) clear_gradient(spec);
  }
  head_stale_ = others_stale_ = false;
}

template <typename S>
StepStatistics Llama<S>::statistics() {
  const Range range("statistics");
  settle_gradients();
  GradientNorm* norm = workspace<GradientNorm>(plan_.norm);
  const std::int64_t elements = table_.arena_elements();
  clock_.run("gradient norm", 0, static_cast<double>(elements) * sizeof(float), [&] {
    gradient_norm(norm, gradient_arena_.at<float>(0), elements, 0, workspace<void>(plan_.scratch), stream_);
  });
  LossTotal* total = results_.at<LossTotal>(0);
  GradientNorm* norm_result = results_.at<GradientNorm>(sizeof(LossTotal));
  check(cudaMemcpyAsync(total, workspace<LossTotal>(plan_.loss_total), sizeof *total, cudaMemcpyDeviceToHost, stream_),
        "statistics");
  check(cudaMemcpyAsync(norm_result, norm, sizeof *norm, cudaMemcpyDeviceToHost, stream_), "statistics");
  stream_.synchronize("training step");
  return {total->loss_sum, total->label_count, norm_result->norm};
}

template <typename S>
void Llama<S>::update(const AdamWStep& step) {
  const Range range("update");
  settle_gradients();
  check(cudaStreamWaitEvent(stream_, state_copied_), "update");  // of an event that was never recorded: no wait
  const std::int64_t count = static_cast<std::int64_t>(blocks_.size());
  const AdamWBlock* blocks = workspace<AdamWBlock>(plan_.blocks);
  float *moment1 = moment1_arena_.at<float>(0), *moment2 = moment2_arena_.at<float>(0);
  const float* gradients = gradient_arena_.at<float>(0);
  const double bytes = static_cast<double>(table_.parameters()) * (3 * sizeof(float) + 4.0 * moment_bytes(options_));
  clock_.run("adamw", 0, bytes, [&] {
    if constexpr (kSplitMaster<S>) {
      bf16* parameters = parameter_arena_.at<bf16>(0);
      std::int16_t* low = low_arena_.at<std::int16_t>(0);
      if (options_.moments == Precision::bf16) {
        adamw(parameters, low, gradients, moment1_arena_.at<bf16>(0), moment2_arena_.at<bf16>(0), blocks, count, step,
              nullptr, options_.seed, stream_);
        return;
      }
      adamw(parameters, low, gradients, moment1, moment2, blocks, count, step, nullptr, stream_);
    } else {
      adamw(parameter_arena_.at<float>(0), gradients, moment1, moment2, blocks, count, step, nullptr, stream_);
    }
  });
}

template <typename S>
OperatorTable Llama<S>::time_operators(const std::function<void()>& step) {
  if (!ceilings_) ceilings_ = measure_ceilings(stream_);
  stream_.synchronize("timing operators");
  clock_.start();
  {
    const Range range(timed_before_ ? "timed again" : "timed step");  // one step alone is for profilers
    timed_before_ = true;
    step();
  }
  OperatorTable table = clock_.stop();
  std::tie(table.bytes_per_s, table.flops_per_s) = *ceilings_;
  return table;
}

// ---- access ---------------------------------------------------------------------------------------------------------

template <typename S>
template <typename U>
U* Llama<S>::element(TensorRole role, const TensorSpec& spec) const {
  switch (role) {
    case TensorRole::parameter:
      return parameter_arena_.at<U>(0) + spec.offset;
    case TensorRole::gradient:
      return gradient_arena_.at<U>(0) + spec.offset;
    case TensorRole::moment1:
      return moment1_arena_.at<U>(0) + spec.offset;
    case TensorRole::moment2:
      return moment2_arena_.at<U>(0) + spec.offset;
  }
  fail(Exit::internal, "unknown tensor role");
}

template <typename S>
void Llama<S>::read_tensor(TensorRole role, const TensorSpec& spec, float* values) {
  if (role == TensorRole::gradient) settle_gradients();
  stream_.synchronize("reading a tensor");
  const auto count = static_cast<std::size_t>(spec.elements);
  if (short_moments(role)) {
    std::vector<std::uint16_t> stored(count);
    check(cudaMemcpy(stored.data(), element<std::uint16_t>(role, spec), count * 2, cudaMemcpyDeviceToHost),
          "reading a tensor");
    convert_to_f32(stored.data(), DType::bf16, values, count);
    return;
  }
  if (role != TensorRole::parameter || !kSplitMaster<S>) {
    check(cudaMemcpy(values, element<float>(role, spec), count * sizeof(float), cudaMemcpyDeviceToHost),
          "reading a tensor");
    return;
  }
  std::vector<std::uint16_t> high(count);
  std::vector<std::int16_t> low(count);
  check(cudaMemcpy(high.data(), element<std::uint16_t>(role, spec), count * 2, cudaMemcpyDeviceToHost),
        "reading a tensor");
  check(cudaMemcpy(low.data(), low_arena_.at<std::int16_t>(0) + spec.offset, count * 2, cudaMemcpyDeviceToHost),
        "reading a tensor");
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = join_master({high[i], low[i]});
    std::memcpy(&values[i], &bits, sizeof bits);
  }
}

template <typename S>
void Llama<S>::write_tensor(TensorRole role, const TensorSpec& spec, const float* values) {
  if (role == TensorRole::gradient) settle_gradients();
  stream_.synchronize("writing a tensor");
  check(cudaEventSynchronize(state_copied_), "writing a tensor");
  const auto count = static_cast<std::size_t>(spec.elements);
  if (short_moments(role)) {  // exact for what read_tensor() gave
    std::vector<std::uint16_t> stored(count);
    convert_from_f32(values, DType::bf16, stored.data(), count);
    check(cudaMemcpy(element<std::uint16_t>(role, spec), stored.data(), count * 2, cudaMemcpyHostToDevice),
          "writing a tensor");
    return;
  }
  if (role != TensorRole::parameter || !kSplitMaster<S>) {
    check(cudaMemcpy(element<float>(role, spec), values, count * sizeof(float), cudaMemcpyHostToDevice),
          "writing a tensor");
    return;
  }
  // Split on the GPU, a piece at a time.
  constexpr std::size_t kPiece = 4 << 20;
  MemoryPlan plan("masters on their way to the GPU");
  plan.add(std::min(count, kPiece) * sizeof(float));
  const DeviceArena staging(plan);
  for (std::size_t begin = 0; begin < count; begin += kPiece) {
    const std::size_t piece = std::min(kPiece, count - begin);
    const std::int64_t offset = spec.offset + static_cast<std::int64_t>(begin);
    check(cudaMemcpyAsync(staging.at<float>(0), values + begin, piece * sizeof(float), cudaMemcpyHostToDevice, stream_),
          "writing a tensor");
    split_masters(parameter_arena_.at<bf16>(0) + offset, low_arena_.at<std::int16_t>(0) + offset, staging.at<float>(0),
                  static_cast<std::int64_t>(piece), stream_);
    stream_.synchronize("writing a tensor");
  }
}

// `columns` of each of N rows that are `stride` apart, as fp32 on the host.
template <typename S>
std::vector<float> download(const S* data, std::int64_t N, std::int64_t columns, std::int64_t stride) {
  std::vector<S> raw(static_cast<std::size_t>(N * columns));
  check(cudaMemcpy2D(raw.data(), static_cast<std::size_t>(columns) * sizeof(S), data,
                     static_cast<std::size_t>(stride) * sizeof(S), static_cast<std::size_t>(columns) * sizeof(S),
                     static_cast<std::size_t>(N), cudaMemcpyDeviceToHost),
        "reading an activation");
  std::vector<float> values(raw.size());
  convert_to_f32(raw.data(), std::is_same_v<S, float> ? DType::f32 : DType::bf16, values.data(), values.size());
  return values;
}

template <typename S>
std::vector<float> Llama<S>::activation(const std::string& name) {
  const std::int64_t N = rows(), C = config_.hidden_size, V = config_.vocab_size;
  stream_.synchronize("reading an activation");
  if (name == "embedding") return download(acts_.residual[0], N, C, C);
  if (name == "final_norm") return download(acts_.final_norm, N, C, C);
  if (name == "logits") {
    std::vector<float> logits;
    const std::int64_t chunk = classifier_rows(N);
    for (std::int64_t row = 0; row < N; row += chunk) {
      const std::int64_t count = std::min(chunk, N - row);
      matmul_.forward<S>(acts_.logits, acts_.final_norm + row * C, weights_.head, nullptr, count, C, V);
      stream_.synchronize("reading an activation");
      const std::vector<float> part = download(acts_.logits, count, V, V);
      logits.insert(logits.end(), part.begin(), part.end());
    }
    return logits;
  }
  // "layers.<l>.<part>": kept for every layer only without recomputation.
  long long l = -1;
  char part[64] = "";
  const bool parsed = std::sscanf(name.c_str(), "layers.%lld.%63s", &l, part) == 2 && l >= 0 && l < config_.num_layers;
  if (!parsed || options_.recompute != Recompute::none) return {};
  const LayerActivations<S>& a = acts_.layers[static_cast<std::size_t>(l)];
  const std::int64_t q = config_.q_size(), kv = config_.kv_size(), F = config_.ffn_size;
  const std::string which = part;
  if (which == "input_norm") return download(a.input_norm, N, C, C);
  if (which == "q") return download(a.qkv, N, q, qkv_size());
  if (which == "k") return download(a.qkv + q, N, kv, qkv_size());
  if (which == "v") return download(a.qkv + q + kv, N, kv, qkv_size());
  if (which == "attention") return download(a.attention, N, q, q);
  if (which == "post_attention_norm") return download(a.post_norm, N, C, C);
  if (which == "mlp_product") return download(a.mlp_product, N, F, F);
  if (which == "residual") return download(acts_.residual[static_cast<std::size_t>(l) + 1], N, C, C);
  return {};
}

}  // namespace

std::vector<MemoryLine> plan_llama(const ModelConfig& config, const TrainOptions& options) {
  check_sizes(config);
  return options.precision == Precision::bf16 ? plan_of<bf16>(config, options) : plan_of<float>(config, options);
}

std::unique_ptr<TrainModel> make_llama(const ModelConfig& config, const TrainOptions& options) {
  check_sizes(config);
  if (options.moments == Precision::bf16 && options.precision != Precision::bf16) {
    fail(Exit::internal, "moments in bf16 beside parameters in fp32");
  }
  if (options.precision == Precision::bf16) return std::make_unique<Llama<bf16>>(config, options);
  return std::make_unique<Llama<float>>(config, options);
}

}  // namespace weft::cuda
