// The persistent kernel of decode.cu for one step of a few rows. Blocks, ring, producer and helper are the same. The
// differences:
//
// Consumers multiply on tensor cores (step_consumer.cuh): 4 rows of a matrix by 8 rows of activations at a time. The
// tile has 8 columns whether or not the step has 8 rows, so more rows cost no time there. A chunk of the ring has, for
// each group of warps, 4 rows of at most hidden_size elements. MLP-down is multiplied hidden_size columns at a time, so
// that the activations of one such range fit in registers. Activations are 16-bit, as Inference stores them.
//
// A step of one row has a kernel of its own. It computes the same, but its ring is larger, because partial sums take
// less shared memory, and its consumers hold two chunks of QKV in registers while they wait for the residual stream:
// that is what memory can bring during the only wait that nothing hides.
//
// Blocks exchange the residual stream and q, k, v as tagged values (parameters.cuh). In that form the MLP's hidden rows
// and attention's output would be, for 8 rows, about four times as many bytes as an exchange can hide. They are
// exchanged as 16-bit values, which have no bit to spare for a tag; a counter announces them. The wait for the first is
// hidden behind attention, that for the second behind MLP-down.
//
// An item of attention is a row, a head and a split of the row's positions. The keys and values of the step's own rows
// come from the blocks that computed them, not from the pages. So several positions of one sequence see each other, and
// what a block writes to a page is read only by later launches.
#include "llmc/cuda/fused/step.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numbers>

#include "llmc/base/arena_layout.h"
#include "llmc/base/error.h"
#include "llmc/cuda/fused/layer_table.cuh"
#include "llmc/cuda/fused/plan.cuh"
#include "llmc/cuda/fused/step_kernel.h"
#include "llmc/cuda/fused/step_parameters.cuh"
#include "llmc/cuda/fused/timeline_recorder.h"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

namespace {

using namespace fused;

constexpr int kMaxStepStages = 64, kMinStepStages = 3;
constexpr int kStepWindow = 48 << 10;

// The ring of a kernel: Sizes::stages and Sizes::window, and the dynamic shared memory of a block.
struct StepRing {
  int stages = 0, window = 0, shared_bytes = 0;
};
struct StepPlan {
  Plan plan;               // as FusedDecode's, with the sizes and the reason of the step kernel
  StepRing one_row, many;  // of the two kernels; with less else in shared memory, that of one row has a larger ring
  int most_shared = 0;     // dynamic shared memory that a block may have, in bytes
};

// The largest ring up to `stages` stages. Too large for a GPU only if it has the fewest stages.
StepRing step_ring(Sizes sizes, int rows, int stages, int window_bytes, int most_shared) {
  for (sizes.stages = std::clamp(stages, kMinStepStages, kMaxStepStages); sizes.stages > kMinStepStages;
       --sizes.stages) {
    if (step_layout(sizes, rows).bytes <= most_shared) break;
  }
  const int window = (window_bytes + sizes.stage_bytes / 2) / sizes.stage_bytes;
  return {sizes.stages, std::clamp(window, 1, sizes.stages), step_layout(sizes, rows).bytes};
}

StepPlan step_plan(const ModelConfig& config, const Device& device, const FusedTuning& tuning) {
  StepPlan step{plan_of(config, device, tuning), {}, {}, 0};
  Plan& plan = step.plan;
  const auto refuse = [&](std::string why) {
    plan.reason = std::move(why);
    return step;
  };
  if (!plan.reason.empty()) return step;
  if (config.quantization.any()) return refuse("steps of several rows have no fused kernel for quantised weights");
  if (plan.sequential) {
    return refuse("steps of several rows have a fused kernel for the parallel residual of GPT-NeoX only");
  }
  if (plan.shape.row_loads != 1) {
    return refuse(format("steps of several rows have a fused kernel for a hidden_size up to 2560, got %lld",
                         static_cast<long long>(config.hidden_size)));
  }
  Sizes& p = plan.sizes;
  const int batch = kStepTileRows * p.warps_k * p.warps_r;
  for (const BlockRows& own : plan.rows) {
    if (own.out.end - own.out.begin <= batch) continue;
    return refuse(
        format("fused decoding: %d multiprocessors are too few for steps of several rows of this model", plan.blocks));
  }
  step.most_shared = device.shared_bytes - static_cast<int>(ceil_div(sizeof(Flags), 128) * 128);
  const int stages = tuning.ring_bytes > 0 ? tuning.ring_bytes / p.stage_bytes : kMaxStepStages;
  const int window = tuning.window_bytes > 0 ? tuning.window_bytes : kStepWindow;
  step.one_row = step_ring(p, 1, stages, window, step.most_shared);
  step.many = step_ring(p, kStepRows, stages, window, step.most_shared);
  if (step.many.shared_bytes > step.most_shared) {
    return refuse(format("fused decoding: needs %d bytes of shared memory a block, this GPU has %d",
                         step.many.shared_bytes, step.most_shared));
  }

  SequentialSizes& s = plan.sequential_sizes;
  s.NKV = p.NH;
  s.group = 1;
  s.q_size = static_cast<int>(config.q_size());
  s.q_stride = s.kv_stride = 3 * p.HS;
  s.key_begin = p.HS;
  s.value_begin = 2 * p.HS;
  return step;
}

// The layout before `rows` must be zero before the first launch: clear().
template <typename S>
ArenaLayout plan_workspace(const ModelConfig& config, int blocks, StepParameters<S>& p) {
  ArenaLayout layout("fused steps: workspace");
  p.qkv_stride = static_cast<int>(config.qkv_size());
  layout.reserve(&p.control, 1);
  layout.reserve(&p.x, kStepRows * ceil_div(config.hidden_size, kWarpElements) * kWarpElements);
  layout.reserve(&p.qkv, std::int64_t{kStepRows} * p.qkv_stride);
  layout.reserve(&p.splits, kStepRows * config.num_heads * max_splits_of(config, blocks) * (config.head_dim + 2));
  layout.reserve(&p.hidden, kStepRows * config.ffn_size);
  layout.reserve(&p.attended, kStepRows * config.q_size());
  layout.reserve(&p.rows, blocks);
  layout.reserve_bytes(&p.layers, static_cast<std::uint64_t>(config.num_layers + 1) * kLayerBytes<false>);
  return layout;
}

}  // namespace

std::string fused_step_unsupported_reason(const ModelConfig& config, const Device& device) {
  return step_plan(config, device, {}).plan.reason;
}

template <typename S>
struct FusedStep<S>::State {
  ModelConfig config;
  FusedTuning tuning;
  cudaStream_t stream;
  int blocks, threads;
  StepRing one_row, many;
  bool one_row_was_last = false;  // the other rows of x, q, k and v may have tags of earlier launches
  StepParameters<S> parameters{};
  ArenaLayout layout;
  DeviceArena workspace;
  PinnedBuffer host_memory;
  TimelineRecorder timeline;

  State(const ModelConfig& model, const FusedTuning& chosen, const StepPlan& step, cudaStream_t in_stream)
      : config(model),
        tuning(chosen),
        stream(in_stream),
        blocks(step.plan.blocks),
        threads((step.plan.shape.warps_k * step.plan.shape.warps_r + 2) * kWarpSize),
        one_row(step.one_row),
        many(step.many),
        layout(plan_workspace(model, blocks, parameters)),
        workspace(layout.plan()),
        host_memory(sizeof(HostWords)),
        timeline(model.num_layers, blocks) {
    layout.bind(workspace);
    std::memset(&host(), 0, sizeof(HostWords));
    clear();
  }

  HostWords& host() const { return *host_memory.at<HostWords>(0); }
  std::atomic_ref<std::uint64_t> timeout() const { return std::atomic_ref<std::uint64_t>(host().timeout); }
  // Zeroes the exchanged values and counters, and numbers layers from 0 again.
  void clear() {
    StepParameters<S>& p = parameters;
    const auto bytes = static_cast<std::size_t>(reinterpret_cast<char*>(p.rows) - reinterpret_cast<char*>(p.control));
    cuda::check(cudaMemsetAsync(p.control, 0, bytes, stream), "fused steps");
    p.first_step = p.attention_before = 0;
  }
  // The kernel of one row leaves the tags of the other rows as they are. Those then have the tag of the last layer that
  // wrote them, which an odd number of layers can make equal to that of the next layer: gives all values the other tag.
  void renew_tags() {
    StepParameters<S>& p = parameters;
    const auto bytes = static_cast<std::size_t>(reinterpret_cast<char*>(p.splits) - reinterpret_cast<char*>(p.x));
    cuda::check(cudaMemsetAsync(p.x, static_cast<int>(p.first_step & 1), bytes, stream), "fused steps");
  }
  void upload(void* to, const void* from, std::size_t bytes) const {
    cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "fused steps");
  }
};

template <typename S>
FusedStep<S>::FusedStep(const ModelConfig& config, const DeviceWeights<S>& weights, const KvCache<S>& cache,
                        const DeviceRopeTable& rope, cudaStream_t stream, const FusedTuning& tuning) {
  Device device;
  device.arch =
      10 * device_attribute(cudaDevAttrComputeCapabilityMajor) + device_attribute(cudaDevAttrComputeCapabilityMinor);
  device.multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  device.shared_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const StepPlan step = step_plan(config, device, tuning);
  if (!step.plan.reason.empty()) fail(Exit::environment, "%s", step.plan.reason.c_str());
  if (cache.fp8()) fail(Exit::internal, "fused steps: got keys and values in fp8, expected 16 bits");
  state_ = std::make_unique<State>(config, tuning, step, stream);
  StepParameters<S>& p = state_->parameters;
  static_cast<Sizes&>(p) = step.plan.sizes;
  static_cast<SequentialSizes&>(p) = step.plan.sequential_sizes;
  p.embedding = weights.embedding;
  p.keys = cache.keys;
  p.values = cache.values;
  p.capacity = cache.capacity;
  p.page_size = static_cast<int>(cache.page_size);
  p.rope_cos = rope.cos;
  p.rope_sin = rope.sin;
  p.eps = static_cast<float>(config.norm_eps);
  p.scale = static_cast<float>(std::numbers::log2e / std::sqrt(static_cast<double>(config.head_dim)));
  p.host = &state_->host();
  p.timeout_ns = static_cast<std::uint64_t>(tuning.timeout_seconds * 1e9);
  p.instruments = {false, tuning.lose_an_arrival, nullptr};
  // The maximum: the attribute belongs to the kernel, which models of other sizes share.
  for (const int rows : {1, kStepRows}) {
    cuda::check(cudaFuncSetAttribute(fused_step_kernel_of<S>(rows), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     step.most_shared),
                "fused steps");
  }

  const auto layers = layer_table(weights);
  state_->upload(p.layers, layers.data(), layers.size() * sizeof(layers[0]));
  state_->upload(p.rows, step.plan.rows.data(), step.plan.rows.size() * sizeof(BlockRows));
  cuda::check(cudaStreamSynchronize(stream), "fused steps");
}

template <typename S>
FusedStep<S>::~FusedStep() {
  if (state_ != nullptr) cudaStreamSynchronize(state_->stream);  // a destructor has no way to report its errors
}

template <typename S>
std::vector<MemoryLine> FusedStep<S>::memory(const ModelConfig& config) {
  const int blocks = blocks_for(config, device_attribute(cudaDevAttrMultiProcessorCount), 0);
  StepParameters<S> parameters{};
  return {{"fused steps: workspace", plan_workspace(config, blocks, parameters).plan().bytes()}};
}

template <typename S>
void FusedStep<S>::launch(std::span<const FusedStepRow> rows, const std::int32_t* pages, const std::int32_t* last_ids,
                          float* logits) {
  State& s = *state_;
  StepParameters<S>& p = s.parameters;
  if (rows.empty() || std::ssize(rows) > kFusedStepRows) {
    fail(Exit::internal, "fused steps: %zu rows, 1 to %d are possible", rows.size(), kStepRows);
  }
  p.step_rows = static_cast<int>(rows.size());
  std::fill(std::begin(p.row), std::end(p.row), FusedStepRow{});
  std::copy(rows.begin(), rows.end(), p.row);
  p.pages = pages;
  p.last_ids = last_ids;
  const bool any = std::ranges::any_of(rows, [](const FusedStepRow& row) { return row.logits >= 0; });
  p.logits = any ? logits : nullptr;
  ++p.sequence;
  p.instruments.timeline = s.timeline.begin(s.stream);
  const bool one_row = p.step_rows == 1;
  if (s.one_row_was_last && !one_row && p.L % 2 != 0) s.renew_tags();
  s.one_row_was_last = one_row;
  const StepRing& ring = one_row ? s.one_row : s.many;
  p.stages = ring.stages;
  p.window = ring.window;
  launch_cooperative(fused_step_kernel_of<S>(one_row ? 1 : kStepRows), s.blocks, s.threads, ring.shared_bytes, s.stream,
                     "fused steps", p);
  p.first_step += static_cast<unsigned>(p.L);
  p.attention_before += static_cast<unsigned>(p.step_rows * p.NH * p.L);
}

template <typename S>
void FusedStep<S>::check() {
  State& s = *state_;
  if (s.timeout().load(std::memory_order_acquire) == 0) return;
  cuda::check(cudaStreamSynchronize(s.stream), "fused steps");
  s.timeout().store(0, std::memory_order_relaxed);
  s.clear();
  fail(Exit::environment,
       "fused decoding: no progress on the GPU for %g s; another program may hold it. Use --decode graph",
       s.tuning.timeout_seconds);
}

template <typename S>
int FusedStep<S>::blocks() const {
  return state_->blocks;
}

template <typename S>
void FusedStep<S>::record_timeline(bool record) {
  state_->timeline.record(record);
}

template <typename S>
FusedTimeline FusedStep<S>::timeline() {
  return state_->timeline.read(state_->stream);
}

template class FusedStep<fp16>;
template class FusedStep<bf16>;

}  // namespace weft::cuda
