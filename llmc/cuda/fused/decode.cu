// One kernel decodes many tokens, so that memory is read without a pause.
//
// Each block (one on each multiprocessor) owns a range of whole rows of every weight matrix, so no sum crosses blocks.
// Rows of [out, in] matrices are contiguous: a block's share of a matrix is one range of consecutive bytes, and the
// checkpoint's layout is already the order in which they are read. Nothing is repacked. In each block one producer
// thread copies these ranges, and the keys and values of its items of attention, into a ring in shared memory by bulk
// copies. Their order is fixed in advance (copies.cuh) and continues into the next token, so the producer waits only for free
// stages of the ring, never for another block. At most `window` bytes are in flight: more would not make memory faster, but
// would delay the exchanges between blocks, which queue behind the copies (dev/performance/fused.md, "What bounds it").
//
// Consumer warps divide the elements of a row among them, and each thread keeps the activations for its elements in
// registers, none of which may be spilled (parameters.cuh, Consumer::find_place()). So shared memory is read once for each
// weight, and for nothing else. A warp sums several rows in one warp_fold(); the warps' partial sums are added at the end
// of a matrix, in the order of the warps.
//
// The order of a layer in each block, and what each phase waits for. Work that depends on neither stands between the
// phase that makes a result and the phase that needs it:
//
//   residual x of all rows       waited for at once. Every value carries a bit of its layer's number (TaggedValue), so
//                                no flag is needed beside the data
//   LayerNorms, both             every block computes them for itself: cheaper than sharing the result
//   QKV rows                     written as tagged values
//   MLP-up rows, GELU            written as tagged values
//   attention                    an item is a head and a split of the context; its query has arrived during MLP-up
//   MLP-down rows                need all MLP-up rows, which arrived during attention
//   output projection rows       need all of attention, which arrived during MLP-down; both are added to the residual
//                                that the thread which owns the row keeps in a register
//
// A global access takes one to two microseconds, because it queues behind the copies in flight. A helper warp makes
// those of attention beside the consumers: it waits for q, k and v of its item, rotates q and k, appends to the cache,
// and merges the splits of a head. Of the four exchanges of a layer only that of x is not hidden, and that of MLP-up
// only by half; the weights that the ring has stocked cover them. After the last layer come the rows of the head and
// each block's largest logit, from which every block finds the overall largest for itself. With random sampling block 0
// draws the id and tells the others through one word. Block 0 publishes the id in the mailbox.
//
// Reusing a global buffer needs no further synchronisation: a block writes a buffer again only after it has read
// results that every reader of the old contents computed after reading them.
//
// Quantised weights are repacked once (packed_tiles.cuh) and multiplied by other code (quantized_rows.cuh).
// Everything else is the same.
//
// Every wait has a time limit: a block that has waited too long raises a flag, which all others check while they wait.
#include "llmc/cuda/fused/decode.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numbers>

#include "llmc/base/arena_layout.h"
#include "llmc/base/error.h"
#include "llmc/base/hash.h"
#include "llmc/cuda/formats/formats.cuh"
#include "llmc/cuda/fused/kernel.h"
#include "llmc/cuda/fused/layer_table.cuh"
#include "llmc/cuda/fused/packed_tiles.h"
#include "llmc/cuda/fused/parameters.cuh"
#include "llmc/cuda/fused/plan.cuh"
#include "llmc/cuda/fused/timeline_recorder.h"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/model/inference_model.h"
#include "llmc/model/tensor_table.h"

namespace weft::cuda {

namespace {

using namespace fused;

// The layout before `rows` are zeroed before each launch.
template <typename S>
ArenaLayout plan_workspace(const ModelConfig& config, const Plan& plan, SequentialParameters<S>& p) {
  const int blocks = plan.blocks;
  const std::int64_t C = config.hidden_size;
  ArenaLayout layout("fused decoding: workspace");
  layout.reserve(&p.control, 1);
  layout.reserve(&p.x, C);
  layout.reserve(&p.x_mid, C);
  layout.reserve(&p.qkv, config.qkv_size());
  layout.reserve(&p.attention, config.q_size());
  layout.reserve(&p.h, config.ffn_size);
  layout.reserve(&p.splits, config.num_heads * max_splits_of(config, blocks) * (config.head_dim + 2));
  layout.reserve(&p.head_best, blocks);
  layout.reserve(&p.rows, blocks);
  layout.reserve(&p.copies, static_cast<std::int64_t>(plan.copies.size()));
  layout.reserve(&p.head_norms_of, config.qk_norm ? config.num_layers * 2 * config.head_dim : 0);
  layout.reserve_bytes(&p.layers, static_cast<std::uint64_t>((config.num_layers + 1) * plan.sizes.layer_bytes));
  layout.reserve(&p.logits, config.vocab_size);
  return layout;
}

std::uint64_t read_word(std::uint64_t& word) {
  return std::atomic_ref<std::uint64_t>(word).load(std::memory_order_acquire);
}

Device current_device() {
  Device device;
  device.arch =
      10 * device_attribute(cudaDevAttrComputeCapabilityMajor) + device_attribute(cudaDevAttrComputeCapabilityMinor);
  device.multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  device.shared_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return device;
}

// Repacked quantised weights: the streams of all layers, then those of the head.
MemoryPlan plan_streams(const ModelConfig& config, const Plan& plan) {
  MemoryPlan memory("fused decoding: weights");
  memory.add(static_cast<std::uint64_t>(config.num_layers * plan.blocks * plan.sizes.stream_bytes));
  memory.add(static_cast<std::uint64_t>(plan.blocks * plan.sizes.head_stream_bytes));
  return memory;
}

// The kernel for matrices in Format with everything else in S.
template <typename S, typename Format>
const void* quantized_kernel(const Plan& plan) {
  if constexpr (std::is_same_v<S, fp16>) {
    if (!plan.sequential) return fused_kernel<S, Format>(plan.shape.row_loads, false);
  } else {
    if (plan.sequential) return fused_sequential_kernel<S, Format>(plan.shape.row_loads, false);
  }
  fail(Exit::internal, "fused decoding: weights in %s are not compiled for this model", dtype_name(Format::kType));
}

}  // namespace

template <typename S>
struct FusedDecode<S>::State {
  ModelConfig config;
  FusedTuning tuning;
  Mailbox& mailbox;
  cudaStream_t stream;
  const Plan plan;
  DType quantized;  // type of quantised weights; f32: not quantised
  int blocks, threads, shared_bytes;
  SequentialParameters<S> parameters{};  // the kernel of the parallel residual takes its base class, Parameters
  ArenaLayout layout;
  DeviceArena workspace;
  std::unique_ptr<DeviceArena> streams;  // repacked quantised weights; null without
  PinnedBuffer host_memory;
  TimelineRecorder timeline;
  bool launched = false;
  Result result;

  State(const ModelConfig& model, const FusedTuning& chosen, const Plan& found, DType type, Mailbox& box,
        cudaStream_t in_stream)
      : config(model),
        tuning(chosen),
        mailbox(box),
        stream(in_stream),
        plan(found),
        quantized(type),
        blocks(plan.blocks),
        threads(plan.sequential ? kSequentialThreads : plan.sizes.threads + 2 * kWarpSize),
        shared_bytes(plan.layout.bytes),
        layout(plan_workspace(model, plan, parameters)),
        workspace(layout.plan()),
        host_memory(sizeof(HostWords)),
        timeline(model.num_layers, blocks) {
    layout.bind(workspace);
    std::memset(&host(), 0, sizeof(HostWords));
  }

  HostWords& host() const { return *host_memory.at<HostWords>(0); }
  // Whether a word in host memory was written by the running launch.
  bool is_of_launch(std::uint64_t word) const { return word >> 32 == parameters.sequence; }
  bool instrumented() const { return tuning.layer_only || tuning.lose_an_arrival || timeline.wanted(); }
  const void* kernel_of_type() const {
    if (quantized == DType::f32) {
      return plan.sequential ? fused_sequential_kernel<S>(plan.shape.row_loads, instrumented())
                             : fused_kernel<S>(plan.shape.row_loads, instrumented());
    }
    return for_format(quantized, [&]<typename Format>() { return quantized_kernel<S, Format>(plan); });
  }
  // The kernel for the next launch; raises its limit of dynamic shared memory.
  const void* kernel() const {
    const void* chosen = kernel_of_type();
    check(cudaFuncSetAttribute(chosen, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "fused decoding");
    return chosen;
  }
  void upload(void* to, const void* from, std::size_t bytes) const {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "fused decoding");
  }
  // Fill `parameters.layers`.
  void upload_layers(const DeviceWeights<S>& weights);
  void upload_quantized_layers(const DeviceWeights<S>& weights);
  // Gathers the weights of the norms of heads, so that a layer's entry need not point to them.
  void copy_head_norms(const DeviceWeights<S>& weights);
  // Throws if a wait in the running kernel exceeded the time limit; the kernel then ends by itself.
  void throw_timeout() {
    if (!is_of_launch(read_word(host().timeout))) return;
    cudaStreamSynchronize(stream);
    launched = false;
    fail(Exit::environment,
         "fused decoding: no progress on the GPU for %g s; another program may hold it. Use --decode graph",
         tuning.timeout_seconds);
  }
};

template <typename S>
FusedDecode<S>::FusedDecode(const ModelConfig& config, const DeviceWeights<S>& weights, const KvCache<S>& cache,
                            const DeviceRopeTable& rope, Mailbox& mailbox, cudaStream_t stream,
                            const FusedTuning& tuning) {
  const Plan plan = plan_of(config, current_device(), tuning, cache.fp8());
  if (!plan.reason.empty()) fail(Exit::environment, "%s", plan.reason.c_str());
  if (cache.fp8() && (cache.page_size % kKvUnit != 0 || cache.capacity % cache.page_size != 0)) {
    fail(Exit::internal,
         "fused decoding: %lld positions of codes in pages of %lld, expected whole pages of whole units",
         static_cast<long long>(cache.capacity), static_cast<long long>(cache.page_size));
  }
  const PackedMatrix& first = weights.blocks.front().qkv.weight.packed;
  const bool quantized = static_cast<bool>(first);
  if (quantized != config.quantization.any()) {
    fail(Exit::internal, "fused decoding: a model with weights in %s, and its matrices are %squantised",
         quantization_text(config.quantization).c_str(), quantized ? "" : "not ");
  }
  const DType type = quantized ? first.dtype : DType::f32;
  state_ = std::make_unique<State>(config, tuning, plan, type, mailbox, stream);
  State& s = *state_;

  SequentialParameters<S>& p = s.parameters;
  static_cast<Sizes&>(p) = plan.sizes;
  static_cast<SequentialSizes&>(p) = plan.sequential_sizes;
  p.embedding = weights.embedding;
  p.keys = cache.keys;
  p.values = cache.values;
  const auto bytes_of = [](S* elements) { return reinterpret_cast<std::uint8_t*>(elements); };
  p.cached = cache.fp8() ? cache.codes : KvCodes{bytes_of(cache.keys), bytes_of(cache.values)};
  p.capacity = cache.capacity;
  p.page_size = static_cast<int>(cache.page_size);
  p.rope_cos = rope.cos;
  p.rope_sin = rope.sin;
  p.at = plan.layout;
  p.eps = static_cast<float>(config.norm_eps);
  p.scale = static_cast<float>(std::numbers::log2e / std::sqrt(static_cast<double>(config.head_dim)));
  p.mailbox = mailbox.words();
  p.host = &s.host();
  p.timeout_ns = static_cast<std::uint64_t>(tuning.timeout_seconds * 1e9);
  p.instruments = {tuning.layer_only, tuning.lose_an_arrival, nullptr};
  s.kernel();

  s.upload(p.rows, plan.rows.data(), plan.rows.size() * sizeof(BlockRows));
  s.upload(p.copies, plan.copies.data(), plan.copies.size() * sizeof(CopyRun));
  if (config.qk_norm) s.copy_head_norms(weights);
  if (quantized) {
    s.upload_quantized_layers(weights);
  } else {
    s.upload_layers(weights);
  }
}

template <typename S>
void FusedDecode<S>::State::upload_layers(const DeviceWeights<S>& weights) {
  const auto layers = layer_table(weights);
  upload(parameters.layers, layers.data(), layers.size() * sizeof(layers[0]));
  check(cudaStreamSynchronize(stream), "fused decoding");
}

template <typename S>
void FusedDecode<S>::State::upload_quantized_layers(const DeviceWeights<S>& weights) {
  const Sizes& sizes = plan.sizes;
  const SequentialSizes* const sequential = plan.sequential ? &plan.sequential_sizes : nullptr;
  const int row_loads = plan.shape.row_loads;
  streams = std::make_unique<DeviceArena>(plan_streams(config, plan));
  std::byte* const begin = streams->at<std::byte>(0);
  const auto layers = layer_table<true>(weights, [&](std::size_t l) -> LayerMatrices<S, true> {
    std::byte* const to = begin + static_cast<std::int64_t>(l) * blocks * sizes.stream_bytes;
    if (l == weights.blocks.size()) {
      const PackedMatrix& head = weights.head.packed;
      if (!head) return {nullptr, weights.head.plain};
      pack_head(to, head, sizes, row_loads, parameters.rows, blocks, stream);
      return {to, nullptr, head.row_scales};
    }
    const DeviceBlock<S>& w = weights.blocks[l];
    const PackedMatrix &qkv = w.qkv.weight.packed, &up = w.up.weight.packed, &down = w.down.weight.packed,
                       &output = w.output.weight.packed;
    pack_layer(to, {qkv, up, down, output}, sizes, sequential, row_loads, parameters.rows, blocks, stream);
    return {to, nullptr, qkv.row_scales, up.row_scales, down.row_scales, output.row_scales};
  });
  upload(parameters.layers, layers.data(), layers.size() * sizeof(layers[0]));
  check(cudaStreamSynchronize(stream), "fused decoding");
}

template <typename S>
void FusedDecode<S>::State::copy_head_norms(const DeviceWeights<S>& weights) {
  const std::int64_t HS = config.head_dim;
  S* to = parameters.head_norms_of;
  for (const DeviceBlock<S>& w : weights.blocks) {
    const S* const norms[] = {w.q_norm.weight, w.k_norm.weight};
    for (const S* from : norms) {
      check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(HS) * sizeof(S), cudaMemcpyDeviceToDevice, stream),
            "fused decoding");
      to += HS;
    }
  }
}

template <typename S>
FusedDecode<S>::~FusedDecode() {
  if (state_ == nullptr || !state_->launched) return;
  cancel();
  cudaStreamSynchronize(state_->stream);  // a destructor has no way to report its errors
}

template <typename S>
std::vector<MemoryLine> FusedDecode<S>::memory(const ModelConfig& config) {
  const Plan plan = plan_of(config, current_device(), {});
  if (!plan.reason.empty()) fail(Exit::environment, "%s", plan.reason.c_str());
  SequentialParameters<S> parameters{};
  std::vector<MemoryLine> lines = {
      {"fused decoding: workspace", plan_workspace(config, plan, parameters).plan().bytes()}};
  if (config.quantization.any()) lines.push_back({"fused decoding: weights", plan_streams(config, plan).bytes()});
  return lines;
}

template <typename S>
void FusedDecode<S>::launch(const FusedRequest& request) {
  State& s = *state_;
  Parameters<S>& p = s.parameters;
  const std::size_t more = request.more_ids.size();
  const auto is_id = [&](std::int32_t id) { return id >= 0 && id < p.V; };
  const bool valid = !s.launched && request.count >= 1 && request.count <= kFusedTokens && request.position >= 0 &&
                     more <= kFusedMoreIds && (more == 0 || !s.tuning.layer_only) &&
                     request.position + static_cast<std::int64_t>(more) + request.count <= p.capacity &&
                     is_id(request.first_id) && std::ranges::all_of(request.more_ids, is_id) &&
                     request.stop_ids.size() <= kMaxStopIds;
  if (!valid) {
    fail(Exit::internal,
         "fused decoding: launch of %lld tokens at position %lld of %lld, id %d and %zu more, %zu stop ids%s: out of "
         "range",
         static_cast<long long>(request.count), static_cast<long long>(request.position),
         static_cast<long long>(p.capacity), request.first_id, more, request.stop_ids.size(),
         s.launched ? ", another launch runs" : "");
  }
  p.sequence = s.mailbox.reserve(request.count);
  p.first_id = request.first_id;
  p.position = static_cast<int>(request.position);
  p.num_more = static_cast<int>(more);
  p.count = static_cast<int>(request.count) + p.num_more;
  std::ranges::copy(request.more_ids, p.more_ids);
  p.device_ids = request.device_ids;
  p.sampling = request.sampling;
  p.num_stop_ids = static_cast<int>(request.stop_ids.size());
  std::copy(request.stop_ids.begin(), request.stop_ids.end(), p.stop_ids);
  p.instruments.timeline = s.timeline.begin(s.stream);
  const std::size_t cleared =
      static_cast<std::size_t>(reinterpret_cast<char*>(p.rows) - reinterpret_cast<char*>(p.control));
  check(cudaMemsetAsync(p.control, 0, cleared, s.stream), "fused decoding");
  launch_cooperative(s.kernel(), s.blocks, s.threads, s.shared_bytes, s.stream, "fused decoding", p);
  s.launched = true;
  s.result = {};
}

template <typename S>
std::optional<std::int32_t> FusedDecode<S>::wait(std::int64_t i) {
  using Clock = std::chrono::steady_clock;
  State& s = *state_;
  const std::uint32_t first = s.parameters.sequence;
  if (i < 0 || i >= kFusedTokens || first == 0) {
    fail(Exit::internal, "fused decoding: no token %lld", static_cast<long long>(i));
  }
  const auto deadline = Clock::now() + std::chrono::duration<double>(2 * s.tuning.timeout_seconds + 10);
  const auto ended = [&] {
    s.throw_timeout();
    const std::uint64_t end = read_word(s.host().end);
    if (s.is_of_launch(end)) return (end & ((1u << kEndShift) - 1)) <= static_cast<std::uint64_t>(i);
    if (Clock::now() > deadline) fail(Exit::environment, "fused decoding: no answer from the GPU. Use --decode graph");
    return false;
  };
  const auto sampled = s.mailbox.wait(first + static_cast<std::uint32_t>(i), s.stream, ended);
  if (!sampled.has_value()) return std::nullopt;
  if (sampled->error != SampleError::none) {
    cudaStreamSynchronize(s.stream);  // the kernel ends by itself
    s.launched = false;
    check_sample(sampled->error);
  }
  return sampled->id;
}

template <typename S>
void FusedDecode<S>::cancel() {
  std::atomic_ref<std::uint64_t>(state_->host().cancel).store(state_->parameters.sequence, std::memory_order_release);
}

template <typename S>
typename FusedDecode<S>::Result FusedDecode<S>::finish() {
  State& s = *state_;
  if (!s.launched) return s.result;
  check(cudaStreamSynchronize(s.stream), "fused decoding");
  s.throw_timeout();
  s.launched = false;
  const std::uint64_t end = read_word(s.host().end);
  if (!s.is_of_launch(end)) fail(Exit::internal, "fused decoding: the kernel ended without an answer");
  const auto word = static_cast<std::uint32_t>(end);
  check_sample(static_cast<SampleError>(word >> kEndErrorShift));
  s.result = {static_cast<FusedEnd>(word >> kEndShift & 0xf),
              static_cast<std::int64_t>(word & ((1u << kEndShift) - 1))};
  return s.result;
}

template <typename S>
const float* FusedDecode<S>::logits() const {
  return state_->parameters.logits;
}

template <typename S>
std::uint64_t FusedDecode<S>::logits_hash() {
  std::vector<float> values(static_cast<std::size_t>(state_->parameters.V));
  check(cudaMemcpyAsync(values.data(), logits(), values.size() * sizeof(float), cudaMemcpyDeviceToHost, state_->stream),
        "logits");
  check(cudaStreamSynchronize(state_->stream), "logits");
  return xxh3_64(values.data(), values.size() * sizeof(float));
}

template <typename S>
std::uint64_t FusedDecode<S>::bytes_per_token(std::int64_t context) const {
  const ModelConfig& c = state_->config;
  if (state_->plan.sequential || state_->streams != nullptr) {
    return read_bytes_of_step(c, 1, context, sizeof(S), state_->plan.sequential_sizes.kv_fp8);
  }
  const std::int64_t C = c.hidden_size, F = c.ffn_size, L = c.num_layers, V = c.vocab_size;
  const std::int64_t matrices = state_->tuning.layer_only ? L * C * (4 * C + F) : L * C * (4 * C + 2 * F) + V * C;
  const std::int64_t vectors =  // biases, norms, a row of the embedding
      state_->tuning.layer_only ? 0 : TensorTable(c).parameters() - V * C + C - matrices;
  return static_cast<std::uint64_t>(matrices + vectors + 2 * L * c.kv_size() * context) * sizeof(S);
}

template <typename S>
int FusedDecode<S>::blocks() const {
  return state_->blocks;
}

template <typename S>
void FusedDecode<S>::record_timeline(bool record) {
  if (record && state_->quantized != DType::f32) {
    fail(Exit::usage, "timeline: only of weights in 16 bits, these are in %s", dtype_name(state_->quantized));
  }
  state_->timeline.record(record);
}

template <typename S>
FusedTimeline FusedDecode<S>::timeline() {
  return state_->timeline.read(state_->stream);
}

template class FusedDecode<fp16>;
template class FusedDecode<bf16>;

}  // namespace weft::cuda
