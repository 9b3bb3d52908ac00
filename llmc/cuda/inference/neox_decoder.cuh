// The GPT-NeoX decoder. Private to this folder; implemented in
//
//   neox.cu              memory, and the functions that the programs call
//   neox_prompt.cu       the list of launches for the many tokens of a prompt
//   neox_token.cu        the list of launches for one token
//   neox_generate.cu     generating: the state on the device, passing ids to the host
//   neox_activations.cu  copies of activations for comparison
//
// Weights, activations and cache are stored in S, the residual stream and all sums in fp32.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "llmc/base/arena_layout.h"
#include "llmc/base/error.h"
#include "llmc/cuda/fused/decode.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/inference/neox.h"
#include "llmc/cuda/inference/parameters.h"
#include "llmc/cuda/op/attention/paged/decode_attention.h"
#include "llmc/cuda/op/attention/paged/kv_cache.h"
#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/cuda/op/gemm/gemv.h"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/cuda/op/sample/mailbox.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/captured_graph.h"
#include "llmc/cuda/runtime/stream.h"

namespace weft::cuda {

constexpr std::int64_t kChunk = 2048;      // rows of a long prompt that are computed at once
constexpr std::int64_t kScoreChunk = 256;  // rows whose logits exist at once
// rows of a GEMM are rounded up to a multiple, so that few plans serve every length
constexpr std::int64_t kRowUnit = 64;

inline std::int64_t padded_rows(std::int64_t rows) {
  return ceil_div(rows, kRowUnit) * kRowUnit;
}
inline std::int64_t size_of(RowRange rows) {
  return rows.end - rows.begin;
}

// The state that a step reads and writes on the device, so that one captured graph serves every step.
struct DecodeState {
  std::int64_t position = 0;         // position of the token that is fed
  std::int64_t sample_position = 0;  // position of the token that is sampled
  std::int32_t token = 0;            // the token fed next; the sampler writes its id here
  SampleError error = SampleError::none;
  std::uint32_t sequence = 0;  // mailbox sequence number of the next id
  std::int32_t done = 0;       // 1 after a stop id or an error: nothing more is published, and the position stays
  std::int32_t stop_count = 0;
  std::int32_t stop_ids[kMaxStopIds] = {};
  SamplingPlan plan;
};

// A profiler range, if wanted: in the mode that launches one operator at a time.
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
  std::optional<TraceRange> range_;
};

// Pointers into the workspace.
template <typename S>
struct NeoxBuffers {
  float *residual, *logits, *score_logits, *losses, *partials, *cos, *sin;
  S *norm1, *norm2, *branch, *attention, *qkv, *up;
  std::byte* side_workspace;  // workspace of the GEMMs that run beside attention
  std::int32_t* ids;
  DecodeState* state;
};

// Plans the workspace; the pointers are filled when it is bound.
template <typename S>
ArenaLayout plan_neox_workspace(const ModelConfig& c, std::int64_t capacity, const LaunchDevice& device,
                                NeoxBuffers<S>& buffers);
MemoryPlan plan_neox_parameters(const TensorTable& table, std::size_t element_bytes);
MemoryPlan plan_neox_cache(const ModelConfig& c, std::int64_t capacity, std::size_t element_bytes);
template <typename S>
std::vector<MemoryLine> neox_memory(const ModelConfig& config, const NeoxOptions& options, std::uint64_t parameters,
                                    std::uint64_t cache, std::uint64_t workspace);

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
    return neox_memory<S>(config_, options_, parameters_.bytes(), cache_arena_.bytes(), workspace_.bytes());
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
  bool can_draft() const override { return fused_ != nullptr; }
  void start_draft(std::int64_t kept, std::span<const std::int32_t> ids, std::int64_t count,
                   const SamplingPlan& sampling, const DeviceDrafts& to) override;
  std::optional<std::int32_t> drafted(std::int64_t i) override {
    return drafted_id([&] { return wait_fused(i); });
  }
  std::vector<double> score(std::span<const std::int32_t> ids) override;
  void keep_activations(bool keep) override {
    keep_ = keep;
    logits_alone_ = false;
  }
  void keep_logits(bool keep) override { keep_ = logits_alone_ = keep; }
  std::vector<float> activation(const std::string& name) override {
    const auto found = kept_.find(name);
    return found == kept_.end() ? std::vector<float>{} : found->second;
  }

 private:
  using Layer = DeviceBlock<S>;

  void check_room(std::size_t ids) const {
    if (ids > 0 && static_cast<std::int64_t>(ids) <= options_.capacity - length_) return;
    fail(Exit::internal, "decoder: %zu tokens do not fit: %lld of %lld positions are used", ids,
         static_cast<long long>(length_), static_cast<long long>(options_.capacity));
  }

  // ---- many tokens (neox_prompt.cu). A range of rows begins at a multiple of kRowUnit and ends at the end of the
  // chunk, unless it is empty.
  // Appends `ids`, chunk by chunk. Returns the rows of the last chunk, whose residual stream stays in the buffers.
  std::int64_t run_prompt(std::span<const std::int32_t> ids);
  // Rows of a chunk whose final norm is needed. In the last layer the others only write K and V.
  enum class Wanted { none, last, all };
  void run_chunk(std::span<const std::int32_t> ids, Wanted wanted);
  void run_layer(std::int64_t l, std::int64_t rows, RowRange wanted);
  void attend(std::int64_t l, std::int64_t rows, RowRange wanted);
  // residual += branch (null: nothing); out = norm(residual), and out2 = norm2(residual) where there is one.
  void normalize(RowRange rows, const S* branch, const Norm<S>& norm, S* out, const Norm<S>* norm2 = nullptr,
                 S* out2 = nullptr);
  void normalize_input(std::int64_t l, RowRange rows, const S* branch);
  void linear(S* out, const S* x, const DeviceLinear<S>& w, RowRange rows, std::int64_t in, std::int64_t out_size,
              Accumulate accumulate = Accumulate::no) {
    matmul_.forward<S>(out + rows.begin * out_size, x + rows.begin * in, w.weight.plain, w.bias,
                       padded_rows(size_of(rows)), in, out_size, accumulate);
  }
  void run_up(const Layer& w, RowRange rows, cudaStream_t stream);  // MLP up and GELU; matmul_ must run in that stream

  bool prepare_matmuls();

  // ---- one token (neox_token.cu)
  void set_state(const DecodeState& state);
  void run_token();                      // from the state's token to the logits
  void run_head(const float* residual);  // logits of one row of the residual stream
  // run_token() and, if `sampling`, sample_and_publish(), as a graph or launch by launch; `position` names the range
  // for the profiler.
  void launch_step(bool sampling, std::int64_t position);
  std::span<const float> fetch_logits(const float* logits);

  // ---- generating (neox_generate.cu)
  void sample_and_publish();
  // Starts a fused launch of at most `left` ids after `id`; returns their number.
  std::int64_t launch_fused(std::int32_t id, std::int64_t left, const GenerationRequest& request);
  std::int32_t wait_for(std::uint32_t sequence);  // an id published by sample_and_publish()
  std::int32_t wait_fused(std::int64_t i);        // id i of the running fused launch
  void drain() noexcept;                          // cancels a fused launch and waits until nothing is queued

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

  // ---- activations for comparison (neox_activations.cu)
  template <typename T>
  std::vector<float> download(const T* data, std::int64_t count) {
    std::vector<T> raw(static_cast<std::size_t>(count));
    check(cudaMemcpyAsync(raw.data(), data, raw.size() * sizeof(T), cudaMemcpyDeviceToHost, stream_), "activation");
    stream_.synchronize("activation");
    std::vector<float> values(raw.size());
    convert_to_f32(raw.data(), storage_dtype<T>(), values.data(), values.size());
    return values;
  }
  template <typename T>
  void keep(const std::string& name, const T* data, std::int64_t count) {
    if (!keep_ || (logits_alone_ && name != "logits")) return;
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
  NeoxBuffers<S> b_{};
  ArenaLayout layout_;
  Matmul matmul_;
  const bool prepared_ = prepare_matmuls();  // before the arenas take the memory that timing needs
  // in this order: if memory does not suffice, the largest fails first
  DeviceArena parameters_, cache_arena_, workspace_;
  DeviceWeights<S> weights_;
  KvCache<S> cache_;
  DeviceRopeTable rope_;
  PinnedBuffer host_logits_;
  Mailbox mailbox_;
  CapturedGraph step_graph_{"decode graph"}, sampling_graph_{"decode graph"};
  std::unique_ptr<FusedOf<S>> fused_;  // in fused mode
  std::int64_t length_ = 0;
  bool keep_ = false, logits_alone_ = false;
  std::map<std::string, std::vector<float>> kept_;
};

}  // namespace weft::cuda
