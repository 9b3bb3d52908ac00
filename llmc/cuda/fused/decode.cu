// One kernel decodes many tokens. Its one purpose is that the memory system never pauses.
//
// Each block (one on each multiprocessor) owns a range of rows of every weight matrix; whole rows, so that no sum crosses
// blocks. Rows of [out, in] matrices are neighbours in memory, so what a block reads for a matrix is one range of
// consecutive bytes, and the checkpoint's layout is already the order of consumption: nothing is repacked. One producer
// thread a block copies these ranges, and the keys and values of its items of attention, into a ring in shared memory by
// bulk copies. The order is known before anything is computed, up to the next token's first layer and further, so the
// producer waits for free slots only, never for another block. At most `window` bytes are in flight: more queue up in
// front of everybody's synchronisation without making the memory faster (dev/performance/fused.md, "What bounds it").
//
// Consumer warps divide a row's elements among them, and a thread keeps the activations that meet its elements in
// registers: shared memory then delivers each weight once and nothing else. A warp folds the partial sums of several rows
// in one butterfly; the warps' partial sums are added at the end of a matrix, in the order of the warps.
//
// Order of a layer, for each block, with what it waits for. Work that does not depend on a result stands between making
// it and needing it:
//
//   residual x of all rows       needed at once: a bit of each word tells its layer, so the data is its own flag
//   LayerNorms, both             every block does them for itself: cheaper than sharing the result
//   QKV rows                     such words, too
//   MLP-up rows, GELU            such words
//   attention                    an item is a head and a part of the context; its query has come during MLP-up
//   MLP-down rows                need all MLP-up rows, finished while attention was computed
//   output projection rows       need all of attention, finished during MLP-down; adds both to the residual that the
//                                row's owner keeps in a register
//
// A global access takes a microsecond or two behind the copies in flight. What attention reads and writes there is done by
// a helper warp beside the consumers: it waits for q, k and v of its item, turns q and k, appends to the cache, and merges
// the parts of a head. So one synchronisation of four is not hidden (x), one half (MLP-up), and the ring's slack covers
// them. After the last layer the head's rows and the greatest logit of each block; every block finds the greatest of these
// for itself. Where an id is drawn, block 0 draws it and tells the others through one word. Block 0 tells the host through
// page-locked memory.
//
// Reuse of global buffers needs no further synchronisation: a block writes a buffer again only after it has seen results
// that every reader of the old contents could only make after reading them.
//
// Waits end after a time limit: the block that runs out of patience raises a flag that all others look at while they wait.
#include "llmc/cuda/fused/decode.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numbers>

#include "llmc/base/error.h"
#include "llmc/base/hash.h"
#include "llmc/cuda/fused/decode.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/model/tensor_table.h"

namespace weft::cuda {

namespace {

using namespace fused;

constexpr int kDefaultWindow = 48 << 10;
constexpr int kMinStages = 3;
constexpr int kMaxStages = 64;
constexpr int kMaxLayers = 256;

// How consumer warps share the rows of a model. warps_k = 0: no way.
struct WarpShape {
  int lines = 0;  // QC of the kernel
  int warps_k = 0, warps_r = 0;
  int stage_bytes = 0;
};
constexpr WarpShape warp_shape(std::int64_t C) {
  WarpShape shape;
  if (C % 16 != 0 || C < 16) return {};
  if (C <= 2560) {
    const int along = static_cast<int>(ceil_div(C, kLineElements));
    shape.lines = 1;
    shape.warps_k = along == 6 || along == 7 ? 8 : along;
    shape.warps_r = std::max(1, 10 / shape.warps_k);
    shape.stage_bytes = static_cast<int>(kLinesAtOnce * 2 * C * shape.warps_r);
  } else if (C <= 5120 && C % 512 == 0 && C >= 4096) {
    shape.lines = 2;
    shape.warps_k = static_cast<int>(C / 512);
    shape.warps_r = 1;
    shape.stage_bytes = static_cast<int>(4 * C);
  }
  return shape;
}

// Sampling takes the first threads of the consumers.
static_assert([] {
  for (std::int64_t C = 0; C <= 5120; C += 16) {
    const WarpShape shape = warp_shape(C);
    const int warps = shape.warps_k * shape.warps_r;
    if (warps != 0 && (warps > kMaxWarps || warps * kWarpSize < kSamplerThreads)) return false;
  }
  return true;
}());

Rows share_of(std::int64_t rows, int block, int blocks) {
  return {static_cast<int>(rows * block / blocks), static_cast<int>(rows * (block + 1) / blocks)};
}

// Equal bytes a layer for every block: QKV and output rows are divided evenly, and MLP-up rows even out what is left.
std::vector<Shares> make_shares(const ModelConfig& config, int blocks, bool layer_only) {
  const std::int64_t C = config.hidden_size, F = config.ffn_size;
  const std::int64_t out_row = layer_only ? C : C + F;
  const std::int64_t total = 3 * C * C + F * C + C * out_row;
  std::vector<Shares> shares(static_cast<std::size_t>(blocks));
  int up = 0;
  for (int b = 0; b < blocks; ++b) {
    Shares& own = shares[static_cast<std::size_t>(b)];
    own.qkv = share_of(3 * C, b, blocks);
    own.out = share_of(C, b, blocks);
    own.head = share_of(config.vocab_size, b, blocks);
    const std::int64_t target = total * (b + 1) / blocks - own.qkv.end * C - own.out.end * out_row;
    const std::int64_t end = std::clamp<std::int64_t>((target + C / 2) / C, up, F);
    own.up = {up, b + 1 == blocks ? static_cast<int>(F) : static_cast<int>(end)};
    up = own.up.end;
  }
  return shares;
}

// The smallest models spend their time on telling each other; fewer blocks have less to tell. Every block has a QKV row: so
// nobody writes the next layer's x before it has this one's.
int blocks_for(const ModelConfig& config, int multiprocessors, int wanted) {
  const int chosen = wanted > 0                  ? std::min(wanted, multiprocessors)
                     : config.hidden_size <= 256 ? (multiprocessors + 1) / 2
                                                 : multiprocessors;
  return static_cast<int>(std::min<std::int64_t>(chosen, 3 * config.hidden_size));
}

int max_splits_of(const ModelConfig& config, int blocks) {
  return std::max(1, blocks / static_cast<int>(config.num_heads));
}

// Regions of the workspace; `blocks` bounds what depends on it.
struct Regions {
  MemoryPlan plan{"fused decoding: workspace"};
  std::uint64_t control, x, qkv, attention, h, parts, head_best, cleared, shares, layers, logits;
};
Regions plan_workspace(const ModelConfig& config, int blocks) {
  const auto n = [](std::int64_t count, std::size_t size) { return static_cast<std::uint64_t>(count) * size; };
  const std::int64_t parts = config.num_heads * max_splits_of(config, blocks);
  Regions r;
  r.control = r.plan.add(sizeof(Control));
  r.x = r.plan.add(n(config.hidden_size, sizeof(Word)));
  r.qkv = r.plan.add(n(3 * config.hidden_size, sizeof(Word)));
  r.attention = r.plan.add(n(config.hidden_size, sizeof(Word)));
  r.h = r.plan.add(n(config.ffn_size, sizeof(Word)));
  r.parts = r.plan.add(n(parts * (config.head_dim + 2), 8));
  r.head_best = r.plan.add(n(blocks, 8));
  r.cleared = r.plan.bytes();
  r.shares = r.plan.add(n(blocks, sizeof(Shares)));
  r.layers = r.plan.add(n(config.num_layers + 1, sizeof(Layer<fp16>)));
  r.logits = r.plan.add(n(config.vocab_size, 4));
  return r;
}

// How a model runs on a device, or why it does not.
struct Plan {
  std::string refusal;
  WarpShape shape;
  int blocks = 0;
  std::vector<Shares> shares;
  Sizes sizes{};
  SharedLayout layout{};
};
Plan plan_of(const ModelConfig& config, const Device& device, const FusedTuning& tuning) {
  Plan plan;
  const auto refuse = [&](std::string why) {
    plan.refusal = std::move(why);
    return plan;
  };
  const auto number = [](std::int64_t value) { return static_cast<long long>(value); };
  if (device.arch < 90) {
    return refuse(format("fused decoding needs a GPU of compute capability 9.0 or later, this is sm_%d", device.arch));
  }
  if (config.family != Family::gpt_neox) return refuse("fused decoding runs GPT-NeoX models only");
  if (!config.parallel_residual) return refuse("fused decoding runs models with the parallel residual only");
  if (config.ffn_size != 4 * config.hidden_size) {
    return refuse(format("fused decoding needs ffn_size = 4 hidden_size, got %lld and %lld", number(config.ffn_size),
                         number(config.hidden_size)));
  }
  if (config.head_dim % kLane != 0 || config.head_dim > 256) {
    return refuse(
        format("fused decoding needs a head_dim that is a multiple of 8 up to 256, got %lld", number(config.head_dim)));
  }
  const WarpShape shape = plan.shape = warp_shape(config.hidden_size);
  if (shape.warps_k == 0) {
    return refuse(format(
        "fused decoding needs a hidden_size that is a multiple of 16 up to 2560, or 4096, 4608 or 5120; got %lld",
        number(config.hidden_size)));
  }
  if (config.num_layers > kMaxLayers || config.vocab_size >= BlockBest::kIds) {
    return refuse(format("fused decoding needs at most %d layers and fewer than 2^20 ids", kMaxLayers));
  }

  plan.blocks = blocks_for(config, device.multiprocessors, tuning.blocks);
  plan.shares = make_shares(config, plan.blocks, tuning.layer_only);
  const int chunk_rows = kLinesAtOnce / shape.lines * shape.warps_r;
  const int consumers = shape.warps_k * shape.warps_r * kWarpSize;
  int most_rows = chunk_rows;
  for (const Shares& own : plan.shares) {
    for (const Rows rows : {own.qkv, own.up, own.out}) most_rows = std::max(most_rows, rows.end - rows.begin);
  }
  if (plan.blocks < 1 || most_rows > consumers) {  // a thread finishes one row
    return refuse(format(
        "fused decoding: %d multiprocessors are too few for this model: a block would own %d rows, at most %d are "
        "possible",
        plan.blocks, most_rows, consumers));
  }

  Sizes& p = plan.sizes;
  p.rope_half = static_cast<int>(config.rope.rotary_dim / 2);
  p.L = static_cast<int>(config.num_layers);
  p.C = static_cast<int>(config.hidden_size);
  p.F = static_cast<int>(config.ffn_size);
  p.V = static_cast<int>(config.vocab_size);
  p.NH = static_cast<int>(config.num_heads);
  p.HS = static_cast<int>(config.head_dim);
  p.warps_k = shape.warps_k;
  p.warps_r = shape.warps_r;
  p.stage_bytes = shape.stage_bytes;
  p.partial_rows = static_cast<int>(ceil_div(most_rows, chunk_rows) * chunk_rows);
  p.max_splits = max_splits_of(config, plan.blocks);
  // The ring takes the shared memory that nothing else needs.
  const int most = device.shared_bytes - static_cast<int>(ceil_div(sizeof(Flags), 128) * 128);
  const int stages_wanted = tuning.ring_bytes > 0 ? tuning.ring_bytes / p.stage_bytes : kMaxStages;
  for (p.stages = std::clamp(stages_wanted, kMinStages, kMaxStages); p.stages > kMinStages; --p.stages) {
    if (shared_layout(p).bytes <= most) break;
  }
  plan.layout = shared_layout(p);
  if (plan.layout.bytes > most) {
    return refuse(
        format("fused decoding: needs %d bytes of shared memory a block, this GPU has %d", plan.layout.bytes, most));
  }
  const int window_bytes = tuning.window_bytes > 0 ? tuning.window_bytes : kDefaultWindow;
  p.window = std::clamp((window_bytes + p.stage_bytes / 2) / p.stage_bytes, 1, p.stages);
  return plan;
}

std::uint64_t read_word(std::uint64_t& word) {
  return std::atomic_ref<std::uint64_t>(word).load(std::memory_order_acquire);
}

}  // namespace

std::string fused_decode_refusal(const ModelConfig& config, const Device& device) {
  return plan_of(config, device, {}).refusal;
}

const char* fused_stamp_name(int event) {
  static const char* const names[kFusedStamps] = {"x here",           "norms done",     "QKV done",  "up done",
                                                  "query here",       "attention done", "up of all", "down done",
                                                  "attention of all", "x written"};
  return event >= 0 && event < kFusedStamps ? names[event] : "?";
}

template <typename S>
struct FusedDecode<S>::State {
  ModelConfig config;
  cudaStream_t stream = nullptr;
  FusedTuning tuning;
  int blocks = 0, threads = 0;
  int shared_bytes = 0;
  const void* kernel = nullptr;
  Parameters<S> parameters{};
  Regions regions;
  DeviceArena workspace;
  PinnedBuffer mailbox_memory;
  std::unique_ptr<DeviceArena> stamps;
  unsigned serial = 0;
  bool launched = false;
  FusedRequest request;
  Result result;

  State(const ModelConfig& model, const FusedTuning& chosen, const Plan& plan)
      : config(model),
        tuning(chosen),
        blocks(plan.blocks),
        threads((plan.shape.warps_k * plan.shape.warps_r + 2) * kWarpSize),
        shared_bytes(plan.layout.bytes),
        regions(plan_workspace(model, blocks)),
        workspace(regions.plan),
        mailbox_memory(sizeof(Mailbox)) {}

  Mailbox& mailbox() const { return *mailbox_memory.at<Mailbox>(0); }
  bool answered(std::uint64_t word) const { return word >> 32 == serial; }
  void throw_fault();
  void look_after(std::chrono::steady_clock::time_point& since);
};

template <typename S>
FusedDecode<S>::FusedDecode(const ModelConfig& config, const NeoxWeights<S, S>& weights, const KvCache<S>& cache,
                            const DeviceRopeTable& rope, cudaStream_t stream, const FusedTuning& tuning) {
  Device device;
  device.arch =
      10 * device_attribute(cudaDevAttrComputeCapabilityMajor) + device_attribute(cudaDevAttrComputeCapabilityMinor);
  device.multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  device.shared_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const Plan plan = plan_of(config, device, tuning);
  if (!plan.refusal.empty()) fail(Exit::environment, "%s", plan.refusal.c_str());
  state_ = std::make_unique<State>(config, tuning, plan);
  State& s = *state_;
  s.stream = stream;
  s.kernel = plan.shape.lines == 1 ? reinterpret_cast<const void*>(fused_decode_kernel<S, 1>)
                                   : reinterpret_cast<const void*>(fused_decode_kernel<S, 2>);

  Parameters<S>& p = s.parameters;
  const Regions& r = s.regions;
  const DeviceArena& memory = s.workspace;
  static_cast<Sizes&>(p) = plan.sizes;
  p.layers = memory.at<Layer<S>>(r.layers);
  p.shares = memory.at<Shares>(r.shares);
  p.embedding = weights.embedding;
  p.keys = cache.keys;
  p.values = cache.values;
  p.capacity = cache.capacity;
  p.rope_cos = rope.cos;
  p.rope_sin = rope.sin;
  p.eps = static_cast<float>(config.norm_eps);
  p.scale = static_cast<float>(std::numbers::log2e / std::sqrt(static_cast<double>(config.head_dim)));
  p.control = memory.at<Control>(r.control);
  p.x = memory.at<Word>(r.x);
  p.qkv = memory.at<Word>(r.qkv);
  p.attention = memory.at<Word>(r.attention);
  p.parts = memory.at<std::uint64_t>(r.parts);
  p.h = memory.at<Word>(r.h);
  p.head_best = memory.at<std::uint64_t>(r.head_best);
  p.logits = memory.at<float>(r.logits);
  p.mailbox = s.mailbox_memory.template at<Mailbox>(0);
  p.layer_only = tuning.layer_only;
  p.lose_an_arrival = tuning.lose_an_arrival;
  p.timeout_ns = static_cast<std::uint64_t>(tuning.timeout_seconds * 1e9);
  std::memset(p.mailbox, 0, sizeof(Mailbox));

  check(cudaFuncSetAttribute(s.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, s.shared_bytes), "fused decoding");

  std::vector<Layer<S>> layers;
  for (const NeoxLayerWeights<S, S>& w : weights.layers) {
    layers.push_back({w.qkv.weight, w.up.weight, w.down.weight, w.dense.weight, w.qkv.bias, w.up.bias, w.down.bias,
                      w.dense.bias, w.input_norm.weight, w.input_norm.bias, w.post_norm.weight, w.post_norm.bias});
  }
  Layer<S> last{};
  last.qkv = weights.head;
  last.norm1_weight = weights.final_norm.weight;
  last.norm1_bias = weights.final_norm.bias;
  layers.push_back(last);
  const auto upload = [&](std::uint64_t offset, const void* from, std::size_t bytes) {
    check(cudaMemcpyAsync(memory.at<char>(offset), from, bytes, cudaMemcpyHostToDevice, stream), "fused decoding");
  };
  upload(r.layers, layers.data(), layers.size() * sizeof(Layer<S>));
  upload(r.shares, plan.shares.data(), plan.shares.size() * sizeof(Shares));
  check(cudaStreamSynchronize(stream), "fused decoding");
}

template <typename S>
FusedDecode<S>::~FusedDecode() {
  if (state_ == nullptr || !state_->launched) return;
  cancel();
  cudaStreamSynchronize(state_->stream);  // errors have no one to go to
}

template <typename S>
std::vector<MemoryLine> FusedDecode<S>::memory(const ModelConfig& config) {
  const int blocks = blocks_for(config, device_attribute(cudaDevAttrMultiProcessorCount), 0);
  return {{"fused decoding: workspace", plan_workspace(config, blocks).plan.bytes()}};
}

template <typename S>
void FusedDecode<S>::launch(const FusedRequest& request) {
  State& s = *state_;
  Parameters<S>& p = s.parameters;
  const bool valid = !s.launched && request.count >= 1 && request.count <= kFusedTokens && request.position >= 0 &&
                     request.position + request.count <= p.capacity && request.first_id >= 0 &&
                     request.first_id < p.V && request.stop_ids.size() <= kFusedStopIds;
  if (!valid) {
    fail(Exit::internal,
         "fused decoding: launch of %lld tokens at position %lld of %lld, id %d, %zu stop ids%s: out of range",
         static_cast<long long>(request.count), static_cast<long long>(request.position),
         static_cast<long long>(p.capacity), request.first_id, request.stop_ids.size(),
         s.launched ? ", another launch runs" : "");
  }
  p.serial = ++s.serial;
  p.first_id = request.first_id;
  p.position = static_cast<int>(request.position);
  p.count = static_cast<int>(request.count);
  p.sampling = request.sampling;
  p.num_stop_ids = static_cast<int>(request.stop_ids.size());
  std::copy(request.stop_ids.begin(), request.stop_ids.end(), p.stop_ids);
  p.stamps = s.stamps != nullptr ? s.stamps->template at<std::uint64_t>(0) : nullptr;
  check(cudaMemsetAsync(s.workspace.template at<char>(s.regions.control), 0, s.regions.cleared - s.regions.control,
                        s.stream),
        "fused decoding");
  if (s.stamps != nullptr) s.stamps->clear(s.stream);
  // Cooperative: all blocks run at once, or the launch is refused.
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  const cudaLaunchConfig_t launch =
      launch_config(dim3(static_cast<unsigned>(s.blocks)), dim3(static_cast<unsigned>(s.threads)),
                    static_cast<std::size_t>(s.shared_bytes), s.stream, cooperative);
  void* arguments[] = {&p};
  check(cudaLaunchKernelExC(&launch, s.kernel, arguments), "fused decoding");
  s.request = request;
  s.launched = true;
  s.result = {};
}

template <typename S>
void FusedDecode<S>::State::throw_fault() {
  const std::uint64_t word = read_word(mailbox().error);
  if (!answered(word)) return;
  cudaStreamSynchronize(stream);  // it ends by itself
  launched = false;
  const unsigned fault = word & 0xffu;
  if (fault == static_cast<unsigned>(Fault::sampling)) check_sample(static_cast<SampleError>((word >> 8) & 0xffu));
  fail(Exit::environment,
       "fused decoding: no progress on the GPU for %g s; another program may hold it. Use --decode graph",
       tuning.timeout_seconds);
}

// Now and then while the host waits: has the kernel died?
template <typename S>
void FusedDecode<S>::State::look_after(std::chrono::steady_clock::time_point& since) {
  using Clock = std::chrono::steady_clock;
  const cudaError_t state = cudaStreamQuery(stream);
  if (state == cudaErrorNotReady) {
    if (std::chrono::duration<double>(Clock::now() - since).count() < 2 * tuning.timeout_seconds + 10) return;
    fail(Exit::environment, "fused decoding: no answer from the GPU. Use --decode graph");
  }
  launched = false;
  check(state, "fused decoding");
}

template <typename S>
std::optional<std::int32_t> FusedDecode<S>::wait(std::int64_t i) {
  State& s = *state_;
  if (i < 0 || i >= kFusedTokens) fail(Exit::internal, "fused decoding: no token %lld", static_cast<long long>(i));
  auto since = std::chrono::steady_clock::now();
  bool ended = false;
  for (unsigned n = 1;; ++n) {
    const std::uint64_t word = read_word(s.mailbox().ids[i]);
    if (s.answered(word)) return static_cast<std::int32_t>(word & 0xffffffffu);
    s.throw_fault();
    const std::uint64_t end = read_word(s.mailbox().end);
    if (s.answered(end) && (end & 0xffffffu) <= static_cast<std::uint64_t>(i)) {
      s.throw_fault();  // it was written before the end
      return std::nullopt;
    }
    if (ended) fail(Exit::internal, "fused decoding: the kernel ended without an answer");
    if (n % 4096 == 0) {
      s.look_after(since);
      ended = !s.launched;  // what it wrote last is read once more
      if (ended) s.launched = true;
    }
  }
}

template <typename S>
void FusedDecode<S>::cancel() {
  std::atomic_ref<std::uint64_t>(state_->mailbox().cancel).store(state_->serial, std::memory_order_release);
}

template <typename S>
typename FusedDecode<S>::Result FusedDecode<S>::finish() {
  State& s = *state_;
  if (!s.launched) return s.result;
  check(cudaStreamSynchronize(s.stream), "fused decoding");
  s.throw_fault();
  s.launched = false;
  const std::uint64_t end = read_word(s.mailbox().end);
  if (!s.answered(end)) fail(Exit::internal, "fused decoding: the kernel ended without an answer");
  s.result = {static_cast<FusedEnd>((end >> 24) & 0xffu), static_cast<std::int64_t>(end & 0xffffffu)};
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
  const std::int64_t cached = 2 * c.num_layers * c.kv_size() * context;
  std::int64_t elements = TensorTable(c).parameters() - c.vocab_size * c.hidden_size + c.hidden_size;
  if (state_->tuning.layer_only) elements = c.num_layers * c.hidden_size * (4 * c.hidden_size + c.ffn_size);
  return static_cast<std::uint64_t>(elements + cached) * sizeof(S);
}

template <typename S>
int FusedDecode<S>::blocks() const {
  return state_->blocks;
}

template <typename S>
void FusedDecode<S>::record_timeline(bool record) {
  State& s = *state_;
  if (!record) {
    s.stamps.reset();
  } else if (s.stamps == nullptr) {
    MemoryPlan plan("fused decoding: time line");
    plan.add(static_cast<std::uint64_t>((s.config.num_layers + 1) * kFusedStamps * s.blocks) * sizeof(std::uint64_t));
    s.stamps = std::make_unique<DeviceArena>(plan);
  }
}

template <typename S>
FusedTimeline FusedDecode<S>::timeline() {
  State& s = *state_;
  FusedTimeline line;
  if (s.stamps == nullptr) return line;
  line.layers = s.config.num_layers;
  line.blocks = s.blocks;
  line.stamps.resize(static_cast<std::size_t>((line.layers + 1) * kFusedStamps * s.blocks));
  check(cudaMemcpyAsync(line.stamps.data(), s.stamps->template at<std::uint64_t>(0),
                        line.stamps.size() * sizeof(std::uint64_t), cudaMemcpyDeviceToHost, s.stream),
        "time line");
  check(cudaStreamSynchronize(s.stream), "time line");
  return line;
}

template class FusedDecode<fp16>;
template class FusedDecode<bf16>;

}  // namespace weft::cuda
