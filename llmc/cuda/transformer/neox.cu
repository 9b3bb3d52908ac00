// GPT-NeoX (Black et al., 2022) as a straight list of launches, twice: for the many tokens of a prompt (run_prompt) and for
// one token (run_token). Weights, activations and cache are stored in S, the residual stream and all sums in fp32.
//
// Parallel residual:   h' = h + attention(norm1(h)) + mlp(norm2(h))     three launches a layer for one token
// Sequential residual: h1 = h + attention(norm1(h));  h' = h1 + mlp(norm2(h1))     five
//
// Generating, the host stays a few tokens behind the GPU: token id, position and sampling plan live in device memory, each
// sampled id is published through page-locked memory, and the next steps are queued before the host has seen it. What the
// GPU then does in vain (the host has stopped) lies in the cache at length() and behind, where nobody reads it.
#include "llmc/cuda/transformer/neox.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "llmc/base/regions.h"
#include "llmc/cuda/fused/decode.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/attention/attention.h"
#include "llmc/cuda/op/classifier.h"
#include "llmc/cuda/op/decode_attention.h"
#include "llmc/cuda/op/embedding.h"
#include "llmc/cuda/op/gelu.h"
#include "llmc/cuda/op/gemv.h"
#include "llmc/cuda/op/matmul.h"
#include "llmc/cuda/op/residual_norm.h"
#include "llmc/cuda/op/rope.h"
#include "llmc/cuda/op/sampler.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/captured_graph.h"
#include "llmc/cuda/runtime/device.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/cuda/transformer/neox_parameters.h"

namespace weft::cuda {

namespace {

constexpr std::int64_t kChunk = 2048;      // rows of a long prompt that are computed at once
constexpr std::int64_t kScoreChunk = 256;  // rows whose logits exist at once
constexpr std::int64_t kRowUnit = 64;      // matmul rows are rounded up to it: few plans serve every length
constexpr int kMaxStopIds = 64;            // that the GPU knows; the host looks at all of them
constexpr int kAhead = 2;                  // steps queued beyond the id that the host waits for
constexpr int kRing = 64;                  // published ids that the host has not read yet
static_assert(kAhead + 2 < kRing);

// What a step reads and leaves on the device, so that one captured graph serves every step.
struct DecodeState {
  std::int64_t position = 0;         // of the token that is fed
  std::int64_t sample_position = 0;  // of the token that is sampled
  std::int32_t token = 0;            // fed next; where the sampler puts its id
  SampleError error = SampleError::none;
  std::uint32_t sequence = 0;  // of the next publication
  std::int32_t done = 0;       // a stop id or an error: nothing more is published, and from then on the position stays
  std::int32_t stop_count = 0;
  std::int32_t stop_ids[kMaxStopIds] = {};
  SamplingPlan plan;
};

__global__ void set_state_kernel(DecodeState* state, const __grid_constant__ DecodeState value) {
  *state = value;
}

// residual [C] = the embedding of the state's token.
template <typename S>
__global__ void __launch_bounds__(256)
    embed_kernel(float* residual, const DecodeState* state, const S* embedding, std::int64_t C) {
  let_successor_start();
  const S* row = embedding + state->token * C;
  for (std::int64_t c = threadIdx.x; c < C; c += blockDim.x) residual[c] = to_float(row[c]);
}

// A published id in one 8-byte word, so that it appears whole: sequence, error, id.
constexpr int kErrorShift = 28;
std::int32_t id_of(std::uint64_t word) {
  return static_cast<std::int32_t>(word & ((1u << kErrorShift) - 1));
}
SampleError error_of(std::uint64_t word) {
  return static_cast<SampleError>((word >> kErrorShift) & 15);
}
std::uint32_t sequence_of(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 32);
}

// Shows the sampled id to the host and moves on to the next position.
__global__ void publish_kernel(DecodeState* state, volatile std::uint64_t* ring) {
  if (state->done != 0) return;
  const std::uint32_t sequence = state->sequence;
  const auto error = static_cast<std::uint32_t>(state->error);
  ring[sequence % kRing] = static_cast<std::uint64_t>(sequence) << 32 |
                           static_cast<std::uint64_t>(error << kErrorShift | static_cast<std::uint32_t>(state->token));
  bool stop = error != 0;
  for (int i = 0; i < state->stop_count; ++i) stop = stop || state->stop_ids[i] == state->token;
  state->done = stop ? 1 : 0;
  state->sequence = sequence + 1;
  // After a stop, too: the steps that are queued already write where this id would, not over the one before it.
  state->position = state->sample_position;
  ++state->sample_position;
}

// A name for the profiler, in the mode that launches one operator at a time.
class MaybeRange {
 public:
  MaybeRange(bool wanted, const char* name, std::int64_t number = -1) {
    if (!wanted) return;
    if (number < 0) {
      range_.emplace(name);
    } else {
      range_.emplace(format("%s %lld", name, static_cast<long long>(number)).c_str());
    }
  }

 private:
  std::optional<Range> range_;
};

// Pointers into the workspace.
template <typename S>
struct Buffers {
  float *residual, *logits, *score_logits, *losses, *partials, *cos, *sin;
  S *norm1, *norm2, *branch, *attention, *qkv, *up;
  std::byte* side_workspace;  // of the products beside attention
  std::int32_t* ids;
  DecodeState* state;
};

std::int64_t padded_rows(std::int64_t rows) {
  return ceil_div(rows, kRowUnit) * kRowUnit;
}
std::int64_t chunk_rows(std::int64_t capacity) {
  return padded_rows(std::min(kChunk, capacity));
}

template <typename S>
Regions plan_workspace(const ModelConfig& c, std::int64_t capacity, const LaunchDevice& device, Buffers<S>& b) {
  const std::int64_t rows = chunk_rows(capacity), C = c.hidden_size, F = c.ffn_size, V = c.vocab_size;
  Regions regions("decoder workspace");
  regions.want(&b.residual, rows * C);
  regions.want(&b.norm1, rows * C);
  regions.want(&b.norm2, rows * C);
  regions.want(&b.branch, rows * C);
  regions.want(&b.attention, rows * C);
  regions.want(&b.qkv, rows * 3 * C);
  regions.want(&b.up, rows * F);
  regions.want(&b.side_workspace, Matmul::kWorkspaceBytes);
  regions.want(&b.score_logits, std::min(kScoreChunk, rows) * V);
  regions.want(&b.logits, V);
  regions.want(&b.losses, kScoreChunk);
  const std::size_t partials = decode_attention_workspace({c.num_heads, c.head_dim}, device);
  regions.want(&b.partials, ceil_div(static_cast<std::int64_t>(partials), sizeof(float)));
  regions.want(&b.cos, capacity * (c.rope.rotary_dim / 2));
  regions.want(&b.sin, capacity * (c.rope.rotary_dim / 2));
  regions.want(&b.ids, rows + 1);
  regions.want(&b.state, 1);
  return regions;
}

MemoryPlan plan_parameters(const TensorTable& table, std::size_t element) {
  MemoryPlan plan("parameters");
  plan.add(static_cast<std::uint64_t>(table.arena_elements()) * element);
  return plan;
}

MemoryPlan plan_cache(const ModelConfig& c, std::int64_t capacity, std::size_t element) {
  MemoryPlan plan("K/V cache");
  plan.add(2 * static_cast<std::uint64_t>(c.num_layers * c.hidden_size * capacity) * element);
  return plan;
}

template <typename S>
std::vector<MemoryLine> memory_lines(const ModelConfig& config, const NeoxOptions& options, std::uint64_t parameters,
                                     std::uint64_t cache, std::uint64_t workspace) {
  const std::string type = std::string(" (") + dtype_name(options.dtype) + ")";
  std::vector<MemoryLine> lines = {{"parameters" + type, parameters},
                                   {"K/V cache" + type, cache},
                                   {"workspace", workspace + Matmul::kWorkspaceBytes}};
  if constexpr (!std::is_same_v<S, float>) {
    if (options.mode == DecodeMode::fused) {
      for (const MemoryLine& line : FusedDecode<S>::memory(config)) lines.push_back(line);
    }
  }
  return lines;
}

// There is no fused kernel in fp32.
struct NoFusedDecode {};
template <typename S>
using FusedOf = std::conditional_t<std::is_same_v<S, float>, NoFusedDecode, FusedDecode<S>>;

template <typename S>
class NeoxDecoder final : public DecodeModel {
 public:
  NeoxDecoder(const ModelConfig& config, const NeoxOptions& options, const std::function<void(S*)>& fill);
  ~NeoxDecoder() override { cudaStreamSynchronize(stream_); }

  const ModelConfig& config() const override { return config_; }
  std::vector<MemoryLine> memory() const override {
    return memory_lines<S>(config_, options_, parameters_.bytes(), cache_arena_.bytes(), workspace_.bytes());
  }
  std::uint64_t bytes_per_token(std::int64_t context) const override {
    const std::int64_t C = config_.hidden_size, weights = table_.parameters() - config_.vocab_size * C + C;
    return static_cast<std::uint64_t>(weights + 2 * config_.num_layers * C * context) * sizeof(S);
  }
  std::int64_t capacity() const override { return options_.capacity; }
  std::int64_t length() const override { return length_; }
  void reset() override { length_ = 0; }
  std::span<const float> prefill(std::span<const std::int32_t> ids) override;
  std::span<const float> decode(std::int32_t id) override;
  std::string decode_timeline(std::int32_t id) override;
  bool samples() const override { return true; }
  void generate_ids(std::span<const std::int32_t> prompt, const GenerationRequest& request,
                    const std::function<bool(std::int32_t)>& on_id) override;
  std::vector<double> score(std::span<const std::int32_t> ids) override;
  void keep_activations(bool keep) override { keep_ = keep; }
  std::vector<float> activation(const std::string& name) override {
    const auto found = kept_.find(name);
    return found == kept_.end() ? std::vector<float>{} : found->second;
  }

 private:
  using Layer = NeoxLayerWeights<S, S>;

  void check_room(std::size_t ids) const {
    if (ids > 0 && static_cast<std::int64_t>(ids) <= options_.capacity - length_) return;
    fail(Exit::internal, "decoder: %zu tokens do not fit: %lld of %lld positions are used", ids,
         static_cast<long long>(length_), static_cast<long long>(options_.capacity));
  }

  // ---- many tokens
  // Appends `ids`; the last row of the residual stream stays in the buffers, in the last of the chunk's rows. Returns how
  // many those are.
  std::int64_t run_prompt(std::span<const std::int32_t> ids);
  // Of a chunk, which rows' final norm somebody reads. What the last layer computes for others beyond the cache is left out.
  enum class Wanted { none, last, all };
  // Rows from `first` (a multiple of kRowUnit) to the end of a chunk.
  struct Rows {
    std::int64_t first, count;
  };
  void run_chunk(std::span<const std::int32_t> ids, Wanted wanted);
  void run_layer(std::int64_t l, std::int64_t rows, Rows wanted);
  void attend(std::int64_t l, std::int64_t rows, Rows wanted);
  // residual += branch (null: nothing); out = norm(residual), and out2 = norm2(residual) where there is one.
  void normalize(Rows rows, const S* branch, const Norm<S>& norm, S* out, const Norm<S>* norm2 = nullptr,
                 S* out2 = nullptr);
  void normalize_input(std::int64_t l, Rows rows, const S* branch);
  void linear(S* out, const S* x, const Linear<S, S>& w, Rows rows, std::int64_t in, std::int64_t out_size,
              Accumulate accumulate = Accumulate::no) {
    matmul_.forward<S>(out + rows.first * out_size, x + rows.first * in, w.weight, w.bias, padded_rows(rows.count), in,
                       out_size, accumulate);
  }
  void run_up(const Layer& w, Rows rows, cudaStream_t stream);  // MLP up and GELU; matmul_ runs in that stream

  // Plans for whole chunks: who has a cache for long prompts will have them. Shorter ones run on first suggestions, and
  // so do small models, where plans differ by less than their choice takes.
  bool prepare_matmuls() {
    if (options_.capacity < kChunk || config_.hidden_size < 1024) return false;
    const std::int64_t C = config_.hidden_size, F = config_.ffn_size;
    const cudaDataType_t type = std::is_same_v<S, float>  ? CUDA_R_32F
                                : std::is_same_v<S, bf16> ? CUDA_R_16BF
                                                          : CUDA_R_16F;
    const bool bias = config_.attention_bias;
    const Accumulate joined = config_.parallel_residual ? Accumulate::yes : Accumulate::no;
    const MatmulShape shapes[] = {{Gemm::forward, kChunk, C, 3 * C, type, Accumulate::no, bias},
                                  {Gemm::forward, kChunk, C, C, type, Accumulate::no, bias},
                                  {Gemm::forward, kChunk, C, F, type, Accumulate::no, true},
                                  {Gemm::forward, kChunk, F, C, type, joined, true}};
    matmul_.prepare(shapes);
    return true;
  }

  // ---- one token
  void run_token();                      // from the state's token to the logits
  void run_head(const float* residual);  // logits of one row of the residual stream
  void sample_and_publish();
  // `position` is for the profiler alone.
  void launch_step(bool sampling,
                   std::int64_t position);  // run_token(), then sample_and_publish() if asked for, in the mode chosen
  void start(const DecodeState& state) {
    set_state_kernel<<<1, 1, 0, stream_>>>(b_.state, state);
    check_launch("decode state");
  }
  std::span<const float> fetch_logits(const float* logits);
  // Decodes from `id`, which on_id has got already, in launches of many tokens; `left` ids may follow it.
  void generate_fused(std::int32_t id, std::int64_t left, const GenerationRequest& request,
                      const std::function<bool(std::int32_t)>& on_id);
  std::int32_t wait_for(std::uint32_t sequence);

  S* keys(std::int64_t l) const { return cache_.keys + l * config_.hidden_size * options_.capacity; }
  S* values(std::int64_t l) const { return cache_.values + l * config_.hidden_size * options_.capacity; }
  NeoxHeads heads() const { return {config_.num_heads, config_.head_dim}; }
  // Runs `work` under a name for the profiler.
  template <typename Work>
  void named(const char* name, const Work& work) {
    const MaybeRange range(profiling(), name);
    work();
  }
  bool profiling() const { return options_.mode == DecodeMode::reference; }

  // ---- activations for comparison
  template <typename T>
  std::vector<float> download(const T* data, std::int64_t count);
  template <typename T>
  void keep(const std::string& name, const T* data, std::int64_t count) {
    if (!keep_) return;
    const std::vector<float> values = download(data, count);
    std::vector<float>& kept = kept_[name];
    kept.insert(kept.end(), values.begin(), values.end());
  }
  void keep_heads(std::int64_t l, std::int64_t rows);

  ModelConfig config_;
  NeoxOptions options_;
  TensorTable table_;
  LaunchDevice device_;
  Stream stream_{-1}, side_stream_;
  Event normed_{cudaEventDisableTiming}, up_done_{cudaEventDisableTiming};
  Buffers<S> b_{};
  Regions regions_;
  Matmul matmul_;
  const bool prepared_ = prepare_matmuls();           // while there is memory for it
  DeviceArena parameters_, cache_arena_, workspace_;  // in this order: what is largest is refused first
  NeoxWeights<S, S> weights_;
  KvCache<S> cache_;
  DeviceRopeTable rope_;
  PinnedBuffer ring_, host_logits_;
  CapturedGraph step_graph_{"decode graph"}, sampling_graph_{"decode graph"};
  std::unique_ptr<FusedOf<S>> fused_;  // in fused mode
  std::int64_t length_ = 0;
  std::uint32_t sequence_ = 1;  // of the next generation's first id
  bool keep_ = false;
  std::map<std::string, std::vector<float>> kept_;
};

template <typename S>
NeoxDecoder<S>::NeoxDecoder(const ModelConfig& config, const NeoxOptions& options, const std::function<void(S*)>& fill)
    : config_(config),
      options_(options),
      table_(config),
      device_(launch_device()),
      regions_(plan_workspace<S>(config, options.capacity, device_, b_)),
      matmul_(stream_),
      parameters_(plan_parameters(table_, sizeof(S))),
      cache_arena_(plan_cache(config, options.capacity, sizeof(S))),
      workspace_(regions_.plan()),
      ring_(kRing * sizeof(std::uint64_t)),
      host_logits_(static_cast<std::uint64_t>(config.vocab_size) * sizeof(float)) {
  regions_.bind(workspace_);
  workspace_.clear(stream_);   // tickets, and rows that only pad a matmul
  parameters_.clear(stream_);  // padding between tensors
  stream_.synchronize("clearing GPU memory");
  fill(parameters_.at<S>(0));
  weights_ = bind_neox<S>(config, table_, parameters_.at<S>(0));
  cache_ = {cache_arena_.at<S>(0), cache_arena_.at<S>(0) + config.num_layers * config.hidden_size * options.capacity,
            options.capacity};
  const RopeTable table = rope_table(config.rope, options.capacity);
  const std::size_t bytes = table.cos.size() * sizeof(float);
  check(cudaMemcpy(b_.cos, table.cos.data(), bytes, cudaMemcpyHostToDevice), "RoPE table");
  check(cudaMemcpy(b_.sin, table.sin.data(), bytes, cudaMemcpyHostToDevice), "RoPE table");
  rope_ = {b_.cos, b_.sin, table.positions, table.half};
  std::fill_n(ring_.at<std::uint64_t>(0), kRing, 0);
  if constexpr (!std::is_same_v<S, float>) {
    if (options.mode == DecodeMode::fused) {
      FusedTuning tuning;
      tuning.layer_only = options.layer_only;
      fused_ = std::make_unique<FusedDecode<S>>(config, weights_, cache_, rope_, stream_, tuning);
    }
  }
}

// ---- many tokens ------------------------------------------------------------------------------------------------------
template <typename S>
void NeoxDecoder<S>::normalize(Rows rows, const S* branch, const Norm<S>& norm, S* out, const Norm<S>* norm2, S* out2) {
  const std::int64_t C = config_.hidden_size, first = rows.first * C;
  ResidualNormShape shape;
  shape.rows = rows.count;
  shape.C = C;
  shape.kind = NormKind::layernorm;
  shape.eps = static_cast<float>(config_.norm_eps);
  ResidualNormForward<S, float> io;
  io.x = branch != nullptr ? branch + first : nullptr;
  io.residual = b_.residual + first;
  io.residual_out = branch != nullptr ? b_.residual + first : nullptr;
  io.weight = norm.weight;
  io.bias = norm.bias;
  io.out = out + first;
  if (norm2 != nullptr) {
    io.weight2 = norm2->weight;
    io.bias2 = norm2->bias;
    io.out2 = out2 + first;
  }
  residual_norm_forward(shape, io, stream_);
}

// The norm or norms that read the input of layer l, or the final norm after the last layer.
template <typename S>
void NeoxDecoder<S>::normalize_input(std::int64_t l, Rows rows, const S* branch) {
  if (l == config_.num_layers) return normalize(rows, branch, weights_.final_norm, b_.norm1);
  const Layer& layer = weights_.layers[static_cast<std::size_t>(l)];
  if (!config_.parallel_residual) return normalize(rows, branch, layer.input_norm, b_.norm1);
  normalize(rows, branch, layer.input_norm, b_.norm1, &layer.post_norm, b_.norm2);
}

template <typename S>
void NeoxDecoder<S>::attend(std::int64_t l, std::int64_t rows, Rows wanted) {
  const std::int64_t C = config_.hidden_size, NH = config_.num_heads, HS = config_.head_dim;
  named("RoPE, cache", [&] {
    rope_and_append<S, S>(b_.qkv, keys(l), values(l), heads(), rows, options_.capacity, length_, rope_, stream_);
  });
  if (wanted.count == 0) return;
  AttentionShape shape;
  shape.B = 1;
  shape.TQ = wanted.count;
  shape.TK = length_ + rows;
  shape.NH = shape.NKV = NH;
  shape.HS = HS;
  shape.scale = 1.0f / std::sqrt(static_cast<float>(HS));
  const HeadViewOf<const S> q{b_.qkv + wanted.first * 3 * C, 0, 3 * C, 3 * HS};
  const HeadViewOf<const S> k{keys(l), 0, HS, options_.capacity * HS}, v{values(l), 0, HS, options_.capacity * HS};
  named("attention", [&] {
    attention_forward<S>(shape, HeadViewOf<S>{b_.attention + wanted.first * C, 0, C, HS}, nullptr, q, k, v, stream_);
  });
  if (keep_) keep_heads(l, rows);
}

template <typename S>
void NeoxDecoder<S>::run_up(const Layer& w, Rows rows, cudaStream_t stream) {
  const std::int64_t C = config_.hidden_size, F = config_.ffn_size;
  named("MLP up", [&] { linear(b_.up, b_.norm2, w.up, rows, C, F); });
  S* up = b_.up + rows.first * F;
  named("GELU", [&] { gelu_forward(up, up, rows.count * F, stream); });
}

// With the parallel residual MLP up and GELU wait for the norm alone. They run beside QKV and attention, in a stream of
// lower priority: where those leave multiprocessors idle, at the ends of kernels, blocks of the MLP fill them.
template <typename S>
void NeoxDecoder<S>::run_layer(std::int64_t l, std::int64_t rows, Rows wanted) {
  const Layer& w = weights_.layers[static_cast<std::size_t>(l)];
  const std::int64_t C = config_.hidden_size, F = config_.ffn_size;
  const std::string prefix = keep_ ? "layers." + std::to_string(l) + "." : "";
  const MaybeRange range(profiling(), "layer", l);
  const bool parallel = config_.parallel_residual, beside = parallel && !profiling() && wanted.count == rows;

  keep(prefix + "input_norm", b_.norm1, rows * C);
  if (beside) check(cudaEventRecord(normed_, stream_), "prompt");
  named("QKV", [&] { linear(b_.qkv, b_.norm1, w.qkv, {0, rows}, C, 3 * C); });
  if (beside) {
    check(cudaStreamWaitEvent(side_stream_, normed_), "prompt");
    const Matmul::Elsewhere elsewhere(matmul_, side_stream_, b_.side_workspace);
    run_up(w, wanted, side_stream_);
    check(cudaEventRecord(up_done_, side_stream_), "prompt");
  }
  attend(l, rows, wanted);
  if (wanted.count == 0) return;
  named("output projection", [&] { linear(b_.branch, b_.attention, w.dense, wanted, C, C); });
  if (!parallel) named("norms", [&] { normalize(wanted, b_.branch, w.post_norm, b_.norm2); });
  keep(prefix + "post_attention_norm", b_.norm2, rows * C);
  if (beside) {
    check(cudaStreamWaitEvent(stream_, up_done_), "prompt");
  } else {
    run_up(w, wanted, stream_);
  }
  keep(prefix + "mlp_product", b_.up, rows * F);
  // Parallel residual: both branches join at once, so the MLP adds to what attention left.
  named("MLP down",
        [&] { linear(b_.branch, b_.up, w.down, wanted, F, C, parallel ? Accumulate::yes : Accumulate::no); });
  named("norms", [&] { normalize_input(l + 1, wanted, b_.branch); });
  keep(prefix + "residual", b_.residual, rows * C);
}

template <typename S>
void NeoxDecoder<S>::run_chunk(std::span<const std::int32_t> ids, Wanted wanted) {
  const std::int64_t rows = static_cast<std::int64_t>(ids.size()), C = config_.hidden_size;
  if (keep_) wanted = Wanted::all;
  const Rows all{0, rows};
  const std::int64_t last_unit = (rows - 1) / kRowUnit * kRowUnit;
  const Rows at_end = wanted == Wanted::all    ? all
                      : wanted == Wanted::last ? Rows{last_unit, rows - last_unit}
                                               : Rows{rows, 0};
  const MaybeRange range(profiling(), "prompt of", rows);
  check(cudaMemcpyAsync(b_.ids, ids.data(), ids.size_bytes(), cudaMemcpyHostToDevice, stream_), "prompt");
  embedding_forward<S, float>(b_.residual, b_.ids, weights_.embedding, rows, C, stream_);
  keep("embedding", b_.residual, rows * C);
  normalize_input(0, all, nullptr);
  for (std::int64_t l = 0; l < config_.num_layers; ++l) run_layer(l, rows, l + 1 == config_.num_layers ? at_end : all);
  keep("final_norm", b_.norm1, rows * C);
  length_ += rows;
}

template <typename S>
std::int64_t NeoxDecoder<S>::run_prompt(std::span<const std::int32_t> ids) {
  check_room(ids.size());
  kept_.clear();
  std::int64_t rows = 0;
  for (std::size_t begin = 0; begin < ids.size(); begin += static_cast<std::size_t>(rows)) {
    rows = std::min<std::int64_t>(kChunk, static_cast<std::int64_t>(ids.size() - begin));
    const bool last = begin + static_cast<std::size_t>(rows) == ids.size();
    run_chunk(ids.subspan(begin, static_cast<std::size_t>(rows)), last ? Wanted::last : Wanted::none);
    for (std::int64_t first = 0; keep_ && first < rows; first += kScoreChunk) {
      const std::int64_t count = std::min(kScoreChunk, rows - first), C = config_.hidden_size;
      matmul_.wide<S>(b_.score_logits, b_.norm1 + first * C, weights_.head, count, C, config_.vocab_size);
      keep("logits", b_.score_logits, count * config_.vocab_size);
    }
  }
  return rows;
}

template <typename S>
std::span<const float> NeoxDecoder<S>::prefill(std::span<const std::int32_t> ids) {
  const std::int64_t rows = run_prompt(ids);
  run_head(b_.residual + (rows - 1) * config_.hidden_size);
  return fetch_logits(b_.logits);
}

template <typename S>
std::vector<double> NeoxDecoder<S>::score(std::span<const std::int32_t> ids) {
  reset();
  check_room(ids.size());
  const std::int64_t C = config_.hidden_size, V = config_.vocab_size;
  const bool keep = std::exchange(keep_, false);
  std::vector<double> nll;
  std::vector<float> losses(static_cast<std::size_t>(kScoreChunk));
  for (std::size_t begin = 0; begin + 1 < ids.size(); begin += kChunk) {
    const std::int64_t rows = std::min<std::int64_t>(kChunk, static_cast<std::int64_t>(ids.size() - 1 - begin));
    run_chunk(ids.subspan(begin, static_cast<std::size_t>(rows)), Wanted::all);
    for (std::int64_t first = 0; first < rows; first += kScoreChunk) {
      const std::int64_t count = std::min(kScoreChunk, rows - first);
      const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
      matmul_.wide<S>(b_.score_logits, b_.norm1 + first * C, weights_.head, count, C, V);
      check(cudaMemcpyAsync(b_.ids, ids.data() + begin + static_cast<std::size_t>(first) + 1, bytes,
                            cudaMemcpyHostToDevice, stream_),
            "scoring");
      classifier(b_.score_logits, b_.losses, b_.ids, count, V, V, 0, false, stream_);
      check(cudaMemcpyAsync(losses.data(), b_.losses, bytes, cudaMemcpyDeviceToHost, stream_), "scoring");
      stream_.synchronize("scoring");
      nll.insert(nll.end(), losses.begin(), losses.begin() + count);
    }
  }
  keep_ = keep;
  return nll;
}

// ---- one token --------------------------------------------------------------------------------------------------------
template <typename S>
void NeoxDecoder<S>::run_token() {
  const std::int64_t C = config_.hidden_size, F = config_.ffn_size;
  const float eps = static_cast<float>(config_.norm_eps);
  embed_kernel<<<1, 256, 0, stream_>>>(b_.residual, b_.state, weights_.embedding, C);
  check_launch("embedding of a token");
  for (std::int64_t l = 0; l < config_.num_layers; ++l) {
    const MaybeRange layer(profiling(), "layer", l);
    const Layer& w = weights_.layers[static_cast<std::size_t>(l)];
    const typename NormGemv<S, S>::Output qkv{w.input_norm, w.qkv, 3 * C, false, b_.qkv, nullptr};
    const typename NormGemv<S, S>::Output up{w.post_norm, w.up, F, true, b_.up, nullptr};
    const typename ResidualGemv<S, S>::Input dense{b_.attention, w.dense, C}, down{b_.up, w.down, F};
    const bool parallel = config_.parallel_residual;
    named(parallel ? "norms, QKV, MLP up" : "norm, QKV", [&] {
      norm_gemv<S, S>({b_.residual, C, eps, {qkv, parallel ? up : typename NormGemv<S, S>::Output{}}}, device_,
                      stream_);
    });
    named("RoPE, cache, attention", [&] {
      decode_attention<S, S>({heads(), b_.qkv, keys(l), values(l), options_.capacity, &b_.state->position, rope_,
                              b_.attention, b_.partials},
                             device_, stream_);
    });
    if (parallel && !options_.layer_only) {
      named("output projection, MLP down", [&] {
        residual_gemv<S, S>({{dense, down}, b_.residual, C}, device_, stream_);
      });
      continue;
    }
    named("output projection", [&] { residual_gemv<S, S>({{dense, {}}, b_.residual, C}, device_, stream_); });
    if (parallel) continue;
    named("norm, MLP up", [&] { norm_gemv<S, S>({b_.residual, C, eps, {up, {}}}, device_, stream_); });
    if (options_.layer_only) continue;
    named("MLP down", [&] { residual_gemv<S, S>({{down, {}}, b_.residual, C}, device_, stream_); });
  }
  if (!options_.layer_only) run_head(b_.residual);
}

template <typename S>
void NeoxDecoder<S>::run_head(const float* residual) {
  const typename NormGemv<S, S>::Output head{
      weights_.final_norm, {weights_.head, nullptr}, config_.vocab_size, false, nullptr, b_.logits};
  named("final norm, head", [&] {
    norm_gemv<S, S>({residual, config_.hidden_size, static_cast<float>(config_.norm_eps), {head, {}}}, device_,
                    stream_);
  });
}

template <typename S>
void NeoxDecoder<S>::sample_and_publish() {
  const MaybeRange range(profiling(), "sampling");
  sample(&b_.state->token, &b_.state->error, b_.logits, 1, config_.vocab_size, config_.vocab_size, &b_.state->plan,
         &b_.state->sample_position, stream_);
  publish_kernel<<<1, 1, 0, stream_>>>(b_.state, ring_.at<std::uint64_t>(0));
  check_launch("publishing a token");
}

template <typename S>
void NeoxDecoder<S>::launch_step(bool sampling, std::int64_t position) {
  const auto launches = [this, sampling] {
    run_token();
    if (sampling) sample_and_publish();
  };
  if (options_.mode == DecodeMode::reference) {
    const MaybeRange range(true, "token", position);
    return launches();
  }
  CapturedGraph& graph = sampling ? sampling_graph_ : step_graph_;
  if (graph.empty()) graph.capture(stream_, launches);
  graph.launch(stream_);
}

template <typename S>
std::span<const float> NeoxDecoder<S>::fetch_logits(const float* logits) {
  check(cudaMemcpyAsync(host_logits_.at<float>(0), logits, host_logits_.bytes(), cudaMemcpyDeviceToHost, stream_),
        "logits");
  stream_.synchronize("decoding");
  return {host_logits_.at<float>(0), static_cast<std::size_t>(config_.vocab_size)};
}

template <typename S>
std::span<const float> NeoxDecoder<S>::decode(std::int32_t id) {
  check_room(1);
  if constexpr (!std::is_same_v<S, float>) {
    if (fused_ != nullptr) {
      FusedRequest request;
      request.first_id = id;
      request.position = length_;
      request.count = 1;
      fused_->launch(request);
      fused_->finish();
      ++length_;
      return fetch_logits(fused_->logits());
    }
  }
  DecodeState state;
  state.token = id;
  state.position = length_;
  start(state);
  launch_step(false, length_);
  ++length_;
  return fetch_logits(b_.logits);
}

// When each phase of a layer ends, in microseconds after the first block has the layer's input: means over layers.
std::string timeline_text(const FusedTimeline& line) {
  const auto at = [&](std::int64_t layer, int event, int block) {
    return static_cast<double>(
        line.stamps[static_cast<std::size_t>((layer * kFusedStamps + event) * line.blocks + block)]);
  };
  std::string text = format("%-24s %8s %8s %8s\n", "end of a phase, us", "first", "mean", "last block");
  for (int event = 0; event < kFusedStamps; ++event) {
    double first = 0, mean = 0, last = 0;
    int layers = 0;
    for (std::int64_t l = 1; l < line.layers; ++l) {  // layer 0 waits for nobody
      double begin = std::numeric_limits<double>::max(), low = begin, high = 0, sum = 0;
      int blocks = 0;
      for (int b = 0; b < line.blocks; ++b) {
        if (at(l, 0, b) > 0) begin = std::min(begin, at(l, 0, b));
        if (at(l, event, b) == 0) continue;  // the block has no part in it
        low = std::min(low, at(l, event, b));
        high = std::max(high, at(l, event, b));
        sum += at(l, event, b);
        ++blocks;
      }
      if (blocks == 0) continue;
      first += low - begin;
      mean += sum / blocks - begin;
      last += high - begin;
      ++layers;
    }
    if (layers == 0) continue;
    const double scale = 1e-3 / layers;
    text += format("%-24s %8.2f %8.2f %8.2f\n", fused_stamp_name(event), first * scale, mean * scale, last * scale);
  }
  return text;
}

template <typename S>
std::string NeoxDecoder<S>::decode_timeline(std::int32_t id) {
  if constexpr (!std::is_same_v<S, float>) {
    if (fused_ != nullptr) {
      fused_->record_timeline(true);
      decode(id);
      fused_->record_timeline(false);
      return timeline_text(fused_->timeline());
    }
  }
  (void)id;
  return {};
}

// The id of this sequence number, as soon as the GPU has published it.
template <typename S>
std::int32_t NeoxDecoder<S>::wait_for(std::uint32_t sequence) {
  using Clock = std::chrono::steady_clock;
  const std::atomic_ref<std::uint64_t> word(ring_.at<std::uint64_t>(0)[sequence % kRing]);
  Clock::time_point next_look = Clock::now() + std::chrono::milliseconds(20);
  std::uint64_t got = 0;
  while (sequence_of(got = word.load(std::memory_order_acquire)) != sequence) {
    if (Clock::now() < next_look) {
      std::this_thread::yield();
      continue;
    }
    next_look = Clock::now() + std::chrono::milliseconds(20);
    const cudaError_t status = cudaStreamQuery(stream_);
    if (status == cudaErrorNotReady) continue;
    check(status, "decoding");
    if (sequence_of(word.load(std::memory_order_acquire)) == sequence) continue;
    fail(Exit::internal, "decoding: the GPU has finished without publishing a token");
  }
  check_sample(error_of(got));
  return id_of(got);
}

template <typename S>
void NeoxDecoder<S>::generate_ids(std::span<const std::int32_t> prompt, const GenerationRequest& request,
                                  const std::function<bool(std::int32_t)>& on_id) {
  const std::int64_t rows = run_prompt(prompt), first = length_;
  if (request.max_ids < 1 || request.max_ids > options_.capacity - first) {
    fail(Exit::internal, "decoder: %lld ids asked for, %lld positions are left",
         static_cast<long long>(request.max_ids), static_cast<long long>(options_.capacity - first));
  }
  DecodeState state;
  state.sample_position = first;
  state.sequence = sequence_;
  state.plan = request.sampling;
  state.stop_count = static_cast<std::int32_t>(std::min<std::size_t>(request.stop_ids.size(), kMaxStopIds));
  std::copy_n(request.stop_ids.begin(), state.stop_count, state.stop_ids);
  start(state);
  run_head(b_.residual + (rows - 1) * config_.hidden_size);
  sample_and_publish();

  // Whatever ends the loop, on_id's exceptions included: what is queued is done afterwards, and its numbers are used up.
  struct Drain {
    NeoxDecoder& decoder;
    std::int64_t queued = 1;
    ~Drain() {
      cudaStreamSynchronize(decoder.stream_);
      decoder.sequence_ += static_cast<std::uint32_t>(queued);
    }
  } drain{*this};
  const std::uint32_t sequence = sequence_;
  const bool fused = options_.mode == DecodeMode::fused;
  const auto is_stop = [&](std::int32_t id) {
    return std::find(request.stop_ids.begin(), request.stop_ids.end(), id) != request.stop_ids.end();
  };
  for (std::int64_t seen = 0; seen < request.max_ids;) {
    const std::int64_t wanted = fused ? 1 : std::min(request.max_ids, seen + 1 + kAhead);
    for (; drain.queued < wanted; ++drain.queued) {
      launch_step(true, first + drain.queued - 1);
    }
    const std::int32_t id = wait_for(sequence + static_cast<std::uint32_t>(seen));
    length_ = first + seen++;
    if (!on_id(id) || is_stop(id)) break;
    if (fused) return generate_fused(id, request.max_ids - 1, request, on_id);
  }
}

template <typename S>
void NeoxDecoder<S>::generate_fused(std::int32_t id, std::int64_t left, const GenerationRequest& request,
                                    const std::function<bool(std::int32_t)>& on_id) {
  if constexpr (!std::is_same_v<S, float>) {
    struct Drain {
      FusedDecode<S>& fused;
      ~Drain() {
        fused.cancel();
        try {
          fused.finish();
        } catch (const Error&) {  // who ends a launch early has no use for its errors
        }
      }
    } drain{*fused_};
    while (left > 0) {
      FusedRequest fused;
      fused.first_id = id;
      fused.position = length_;
      fused.count = std::min(left, kFusedTokens);
      fused.sampling = request.sampling;
      fused.stop_ids = request.stop_ids;
      if (fused.stop_ids.size() > kFusedStopIds) fused.stop_ids.resize(kFusedStopIds);  // the host knows the others
      fused_->launch(fused);
      for (std::int64_t i = 0; i < fused.count; ++i, --left) {
        const std::optional<std::int32_t> next = fused_->wait(i);
        if (!next.has_value()) fail(Exit::internal, "fused decoding: ended before its last token");
        id = *next;
        length_ = fused.position + i + 1;
        const bool stop = std::find(request.stop_ids.begin(), request.stop_ids.end(), id) != request.stop_ids.end();
        if (!on_id(id) || stop) return;
      }
      fused_->finish();
    }
  } else {
    (void)id, (void)left, (void)request, (void)on_id;
  }
}

// ---- activations ------------------------------------------------------------------------------------------------------
template <typename S>
template <typename T>
std::vector<float> NeoxDecoder<S>::download(const T* data, std::int64_t count) {
  std::vector<T> raw(static_cast<std::size_t>(count));
  check(cudaMemcpyAsync(raw.data(), data, raw.size() * sizeof(T), cudaMemcpyDeviceToHost, stream_), "activation");
  stream_.synchronize("activation");
  std::vector<float> values(raw.size());
  convert_to_f32(raw.data(), storage_dtype<T>(), values.data(), values.size());
  return values;
}

// q (rotated) from the packed rows, k (rotated) and v from the cache.
template <typename S>
void NeoxDecoder<S>::keep_heads(std::int64_t l, std::int64_t rows) {
  const std::int64_t NH = config_.num_heads, HS = config_.head_dim, capacity = options_.capacity;
  const std::vector<float> packed = download(b_.qkv, rows * NH * 3 * HS);
  const std::vector<float> k = download(keys(l), NH * HS * capacity), v = download(values(l), NH * HS * capacity);
  const std::string prefix = "layers." + std::to_string(l) + ".";
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t h = 0; h < NH; ++h) {
      const auto append = [&](const char* name, const std::vector<float>& from, std::int64_t offset) {
        std::vector<float>& kept = kept_[prefix + name];
        kept.insert(kept.end(), from.begin() + offset, from.begin() + offset + HS);
      };
      append("q", packed, (t * NH + h) * 3 * HS);
      append("k", k, (h * capacity + length_ + t) * HS);
      append("v", v, (h * capacity + length_ + t) * HS);
    }
  }
  keep(prefix + "attention", b_.attention, rows * NH * HS);
}

// ---- any storage type -------------------------------------------------------------------------------------------------
template <typename Function>
auto with_storage(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::f32:
      return function(float{});
    case DType::bf16:
      return function(bf16{});
    case DType::f16:
      return function(fp16{});
    default:
      fail(Exit::internal, "neox: no storage type %s", dtype_name(dtype));
  }
}

void check_model(const ModelConfig& config, DType dtype) {
  const std::string refusal = neox_refusal(config, dtype);
  if (!refusal.empty()) fail(Exit::usage, "%s", refusal.c_str());
}

}  // namespace

const char* decode_mode_name(DecodeMode mode) {
  return mode == DecodeMode::reference ? "reference" : mode == DecodeMode::graph ? "graph" : "fused";
}

std::string neox_refusal(const ModelConfig& c, DType dtype) {
  if (!attention_supports(c.head_dim)) {
    return format("head_dim: got %lld, the GPU has kernels for 32, 64, 80, 96, 128 and 256",
                  static_cast<long long>(c.head_dim));
  }
  const std::int64_t element = static_cast<std::int64_t>(dtype_bytes(dtype));
  const std::int64_t unit = 16 / element, widest = kMaxResidualGemvBytes / element;  // of a row of both output matrices
  if (c.ffn_size % unit != 0 || c.hidden_size > kMaxNormWidth || c.hidden_size + c.ffn_size > widest) {
    return format(
        "hidden_size %lld, ffn_size %lld: in %s the GPU has kernels for multiples of %lld, together at most %lld",
        static_cast<long long>(c.hidden_size), static_cast<long long>(c.ffn_size), dtype_name(dtype),
        static_cast<long long>(unit), static_cast<long long>(widest));
  }
  return "";
}

std::string fused_refusal(const ModelConfig& config, DType dtype) {
  if (dtype == DType::f32) return "the fused kernel computes with fp16 or bf16 weights, not fp32";
  return fused_decode_refusal(config, probe_device());
}

std::vector<MemoryLine> plan_neox(const ModelConfig& config, const NeoxOptions& options) {
  check_model(config, options.dtype);
  return with_storage(options.dtype, [&](auto storage) {
    using S = decltype(storage);
    Buffers<S> buffers;
    const TensorTable table(config);
    return memory_lines<S>(config, options, plan_parameters(table, sizeof(S)).bytes(),
                           plan_cache(config, options.capacity, sizeof(S)).bytes(),
                           plan_workspace<S>(config, options.capacity, launch_device(), buffers).plan().bytes());
  });
}

std::unique_ptr<DecodeModel> load_neox(const ModelFile& file, const NeoxOptions& options) {
  check_model(file.config(), options.dtype);
  return with_storage(options.dtype, [&](auto storage) -> std::unique_ptr<DecodeModel> {
    using S = decltype(storage);
    return std::make_unique<NeoxDecoder<S>>(
        file.config(), options, [&](S* parameters) { load_parameters<S>(file, parameters, options.progress); });
  });
}

std::unique_ptr<DecodeModel> random_neox(const ModelConfig& config, std::uint64_t seed, const NeoxOptions& options) {
  check_model(config, options.dtype);
  return with_storage(options.dtype, [&](auto storage) -> std::unique_ptr<DecodeModel> {
    using S = decltype(storage);
    return std::make_unique<NeoxDecoder<S>>(
        config, options, [&](S* parameters) { randomize_parameters<S>(TensorTable(config), seed, parameters); });
  });
}

}  // namespace weft::cuda
