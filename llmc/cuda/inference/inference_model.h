// InferenceModel on the GPU. Private to this folder; implemented in
//
//   inference.cu         memory, and the functions that the programs call
//   inference_step.cu    a step: uploading the description of its rows, captured graphs, returning results
//   inference_layers.cu  the list of launches from ids to scored logits
//
// One list of operators for all models. Capabilities of ModelConfig decide about the norms, about where the second half of a layer
// reads the residual stream, the layout of heads in a row of qkv and the function between the two matrices of the MLP.
//
// Activations, keys, values and weights that are not quantised are stored in S, the residual stream and all sums in
// fp32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "llmc/base/arena_layout.h"
#include "llmc/base/error.h"
#include "llmc/cuda/fused/step.h"
#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/inference/inference.h"
#include "llmc/cuda/op/attention/paged/kv_cache.h"
#include "llmc/cuda/op/attention/paged/paged_attention.h"
#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/cuda/op/gemm/device_weights.h"
#include "llmc/cuda/op/gemm/linear.h"
#include "llmc/cuda/op/gemm/quantized_matmul.h"
#include "llmc/cuda/op/gemm/rows_matmul.h"
#include "llmc/cuda/op/gemm/rows_matmul_fp8.h"
#include "llmc/cuda/op/lora/low_rank.h"
#include "llmc/cuda/op/sample/logit_rows.h"
#include "llmc/cuda/op/sample/score_rows.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/captured_graph.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/model/lora.h"
#include "llmc/model/norm_shape.h"
#include "llmc/model/qkv_heads.h"

namespace weft::cuda {

constexpr std::int64_t kLogitRows = 256;  // rows of logits that exist at the same time: bounds the memory of scoring
constexpr std::int64_t kGraphRows = 256;  // steps of up to so many rows are replayed as captured graphs
constexpr std::int64_t kDepth = 16;       // steps in flight: one runs, the others are queued (llmc/model/queue_depth.h)
constexpr std::int64_t kStepSlots = 2;    // descriptions on the device: of the running step and of the next one

// Rows of a step after padding, so that few captured graphs serve every number of rows; more than kGraphRows stay as they are.
std::int64_t row_bucket(std::int64_t rows);

// The description of a step, uploaded in one copy: these arrays, attention's work list, and then the block tables of
// the chunks. `rows` and `wanted` are padded by row_bucket(): the arrays' positions depend on these two alone, so that a
// captured graph finds them. The indices in `tables` count from the beginning of the copy.
struct StepArrays {
  RowScore** scores_at;                          // [1]: where the step's results go, for ScoreRows
  std::int64_t* sample_positions;                // [wanted]: position of the id that is sampled; -1: none
  SamplingPlan* plans;                           // [wanted]
  std::int32_t *ids, *positions, *tables;        // [rows]; id -1 - s: the id in slot s; position -1: padding
  std::int32_t* wanted_rows;                     // [wanted]: rows whose logits are wanted
  std::int32_t *slots, *targets, *alternatives;  // [wanted], see ScoreRows
  std::byte* work;                               // attention's work list
  const std::int32_t* begin;                     // the beginning of the copy
  bool decodes = false;     // attention rotates and appends the rows itself, so the launches differ
  bool all_wanted = false;  // wanted_rows is 0, 1, ...: nothing has to be gathered
  // No row before it is wanted, so the last layer computes only keys and values of these; `rows`: of all.
  std::int64_t first_wanted = 0;
  // [wanted], page-locked: kernels write results where the host reads them. Null in a graph: *scores_at.
  RowScore* scores = nullptr;
  const DeviceLogitRow* logit_rows = nullptr;  // [wanted]; null: no request of the step has rules
};
StepArrays step_arrays(std::byte* begin, std::int64_t rows, std::int64_t wanted);

// Pointers into the workspace.
template <typename S>
struct InferenceBuffers {
  std::byte* step[kStepSlots];                   // descriptions (StepArrays)
  float* residual;                               // [rows, C]
  S *norm1, *norm2, *qkv, *attention, *product;  // [rows, ...]; norm2: with two_norms() only
  float* branch;                                 // [rows, C]; what attention or the MLP gives, with post norms only
  S* gate_up;                                // [rows, F or 2F]; with gate_up_in_memory(), or an adapter of gate or up
  S* low_rank;                               // [rows, H] of one layer: its input times the adapter's A
  Fp8Rows codes;                             // [rows, ...]: the input of a layer in fp8; with fp8 activations
  float* sums;                               // [rows, ...]: outputs of a layer before they are rounded; with an adapter
  float* gathered;                           // [logit rows, C]: the residual stream of rows whose logits are wanted
  S* final_norm;                             // [logit rows, C]
  float* logits;                             // [logit rows, V]
  std::int32_t* sampled_ids;                 // [logit rows]
  SampleError* errors;                       // [logit rows]
  IdLogprob* most_likely;                    // [wanted rows, kMaxAlternatives]
  std::int32_t* last_ids;                    // [slots + kDeviceDrafts]: the slots, then device_drafts()
  float *cos, *sin, *local_cos, *local_sin;  // local: with ModelConfig::local_rope_theta only
  std::byte* attention_workspace;
};

// Whether gate and up are stored before SwiGLU reads them: where they have biases.
inline bool gate_up_in_memory(const ModelConfig& config) {
  return config.gated() && config.mlp_bias;
}

// Whether the input of the MLP is stored beside that of QKV: both are there at once with the parallel residual, and with
// post norms that of QKV is the next layer's.
inline bool two_norms(const ModelConfig& config) {
  return config.parallel_residual || config.post_norms;
}

// H of the matrices of an adapter beside a linear layer, as op/lora/low_rank.h packs them; 0: it has no part there.
inline std::int64_t low_rank_hidden(const std::optional<LoraConfig>& lora, BlockLinear linear) {
  if (!lora) return 0;
  LowRankShape shape;
  shape.rank = lora->rank;
  shape.modules = std::count_if(lora->targets.begin(), lora->targets.end(),
                                [&](const LoraTarget& target) { return target.linear == linear; });
  return hidden_size(shape);
}

// Plans the workspace; the pointers are filled when it is bound.
template <typename S>
ArenaLayout plan_inference_workspace(const ModelConfig& config, const InferenceOptions& pool,
                                     InferenceBuffers<S>& buffers, const std::optional<LoraConfig>& lora = std::nullopt,
                                     bool fp8_activations = false);
// The most bytes of the description of a step.
std::size_t step_bytes(const ModelConfig& config, const InferenceOptions& pool);
PagedAttentionShape attention_shape(const ModelConfig& config, const InferenceOptions& pool);

// What another decoder of the same sequence needs: the parameters if the model owns them, else null; the weights; all
// pages, where page i of a single sequence is page i; the RoPE table; the model's stream.
template <typename S>
struct InferenceParts {
  S* parameters = nullptr;
  const DeviceWeights<S>* weights = nullptr;
  KvCache<S> cache;
  DeviceRopeTable rope;
  cudaStream_t stream = nullptr;
};

template <typename S>
class Inference final : public InferenceModel {
 public:
  // `own`: the parameters, if this model owns them.
  Inference(const ModelConfig& config, const InferenceOptions& pool, const GpuInferenceOptions& options,
            DeviceWeights<S> weights, std::unique_ptr<DeviceArena> own);
  ~Inference() override { cudaStreamSynchronize(stream_); }

  const ModelConfig& config() const override { return config_; }
  std::vector<MemoryLine> memory() const override;
  std::uint64_t bytes_per_step(std::int64_t sequences, std::int64_t context) const override;
  std::int64_t page_size() const override { return pool_.page_size; }
  std::int64_t num_pages() const override { return pool_.num_pages; }
  std::int64_t slots() const override { return pool_.slots; }
  std::int64_t max_rows() const override { return pool_.max_rows; }
  std::int64_t max_positions() const override { return pool_.max_positions; }
  std::int64_t depth() const override { return kDepth; }
  void submit(std::span<const Chunk> work) override;
  double ended_seconds() const override { return ended_seconds_; }
  DeviceDrafts device_drafts() override { return {b_.last_ids + pool_.slots, drafts_written_}; }
  std::span<const ChunkResult> collect() override;
  void keep_activations(bool keep) override {
    keep_ = keep;
    logits_alone_ = false;
    kept_.clear();
  }
  void keep_logits(bool keep) override {
    keep_activations(keep);
    logits_alone_ = keep;
  }
  std::vector<float> activation(const std::string& name) override {
    const auto found = kept_.find(name);
    return found == kept_.end() ? std::vector<float>{} : found->second;
  }
  InferenceParts<S> parts() {
    KvCache<S> cache = {nullptr, nullptr, pool_.num_pages * pool_.page_size, pool_.page_size};
    if (pool_.kv_fp8) {
      cache.codes = kv_codes(config_, pool_, kv_arena_.template at<std::uint8_t>(0), 0);
    } else {
      cache.keys = kv_arena_.template at<S>(0);
      cache.values = cache.keys + config_.num_layers * cache.capacity * config_.kv_size();
    }
    return {own_ != nullptr ? own_->template at<S>(0) : nullptr, &weights_, cache, rope_, stream_};
  }

 private:
  // Indices of a chunk's results among the wanted rows; -1: not requested.
  struct FlightChunk {
    std::int64_t targets_begin = 0;
    std::vector<std::int32_t> targets;
    std::int64_t last = -1;  // wanted row
    bool sampled = false;
    std::int64_t logits = -1;  // row of Flight::logits
    std::int32_t alternatives = -1;
    std::vector<std::int32_t> drafts;  // verified by the wanted rows that end with `last`
    // Where the caller will have written the drafts that only the device knows yet; null: they are in `drafts`.
    const std::int32_t* later_drafts = nullptr;
  };
  // A step between submit() and collect().
  struct Flight {
    Flight(std::uint64_t upload_bytes, std::int64_t rows)
        : upload(upload_bytes),
          scores(static_cast<std::uint64_t>(rows) * sizeof(RowScore)),
          most_likely(static_cast<std::uint64_t>(rows * kMaxAlternatives) * sizeof(IdLogprob)) {}

    PinnedBuffer upload, scores, most_likely;
    std::byte* step = nullptr;                   // destination of the upload
    const DeviceLogitRow* logit_rows = nullptr;  // StepArrays::logit_rows
    Event uploaded{cudaEventDisableTiming};
    std::unique_ptr<PinnedBuffer> logits;  // logits of the chunks that keep them; grows on demand
    std::unique_ptr<Event> done = std::make_unique<Event>();
    std::int64_t wanted = 0;        // wanted rows, without padding
    bool decodes = false;           // paged_work_decodes()
    bool all_wanted = false;        // the logits of every row are wanted
    std::int64_t first_wanted = 0;  // StepArrays::first_wanted
    std::vector<FlightChunk> chunks;
    std::vector<std::int64_t> kept_rows;  // wanted rows whose logits are kept, ascending
  };

  // The rules of a step. A graph reads them where they are, so there are few.
  struct Rules {
    explicit Rules(std::int64_t rows) : rows(rows) {}
    LogitRowUpload rows;
    std::int64_t step = -1;  // that was submitted with them last
  };

  struct BucketGraph {
    bool ran = false;
    CapturedGraph graph{"inference step"};
  };

  // ---- a step (inference_step.cu)
  void check(std::span<const Chunk> work) const;
  Flight& flight_of(std::int64_t step) { return *flights_[static_cast<std::size_t>(step % kDepth)]; }
  // For the step that is submitted; waits until no step reads them.
  LogitRowUpload& free_rules(std::int64_t wanted);
  // Fills the flight and its upload; returns the bytes to copy. `rows` and `wanted` become buckets.
  std::size_t describe(std::span<const Chunk> work, Flight& flight, std::int64_t& rows, std::int64_t& wanted);
  void launch(const Flight& flight, std::int64_t rows, std::int64_t wanted);
  // The same with one kernel up to the logits.
  void launch_fused(const Flight& flight, const StepArrays& step, std::int64_t rows, std::int64_t wanted);
  void keep_logits(const Flight& flight, std::int64_t first, std::int64_t count);
  ScoredId scored(const Flight& flight, std::int64_t row, std::int32_t id, float logprob, std::int32_t count) const;

  // ---- the launches (inference_layers.cu)
  void run_layers(const StepArrays& step, std::int64_t rows);
  void run_layer(std::int64_t l, const StepArrays& step, std::int64_t rows);
  void normalize_heads(std::int64_t l, std::int64_t rows);
  DeviceRopeTable rope_of(std::int64_t l) const {
    if (!config_.rotates(l)) return {};
    return config_.rotates_locally(l) ? local_rope_ : rope_;
  }
  // Without `output` only keys and values reach their pages.
  void attend(std::int64_t l, const StepArrays& step, std::int64_t rows, bool output);
  // From the residual stream of `count` wanted rows, at most kLogitRows, from wanted row `first` on, to their results.
  void run_head(const StepArrays& step, std::int64_t first, std::int64_t count);
  // The second half of run_head(), from the logits on.
  void sample_and_score(const StepArrays& step, std::int64_t first, std::int64_t count);
  ResidualNormShape norm_shape(std::int64_t rows) const;
  // out null: b_.codes in its place.
  void normalize(std::int64_t rows, const float* residual, const Norm<S>& norm, S* out, const Norm<S>* norm2 = nullptr,
                 S* out2 = nullptr);
  // residual += norm(branch); out = next(residual), unless `next` is null.
  void add_normalized(RowRange rows, const Norm<S>& norm, const Norm<S>* next, S* out);
  void multiply(const S* x, const DeviceLinear<S>& w, std::int64_t rows, std::int64_t K, std::int64_t OC,
                RowsEpilogue epilogue, S* out, float* out_fp32 = nullptr);
  // How a GEMM is launched.
  struct Launch {
    cudaStream_t stream;
    LaunchDevice device;
  };
  Launch in_chain() const { return {stream_, device_}; }
  // As an ordinary launch: an event is a predecessor, too, and the chain does not know it (hw/launch.cuh).
  Launch behind_event(cudaStream_t stream) const { return {stream, {device_.multiprocessors, false}}; }
  // With the matrices of these layers, w2 for io's second input.
  void multiply(RowsMatmul<S> io, const DeviceLinear<S>& w, const DeviceLinear<S>& w2, const Launch& launch);
  // The same in fp8: the codes of x (null: b_.codes are they), then their product, and with a second input both again.
  void multiply_fp8(const RowsMatmul<S>& io, const PackedMatrix& w, const PackedMatrix& w2, const Launch& launch);
  // product = activation(norm2 Wup^T)
  void multiply_up(const DeviceBlock<S>& w, RowRange rows, const Launch& launch);
  void activate(RowRange rows, cudaStream_t stream);
  void add_branches(const DeviceBlock<S>& w, RowRange rows, const Launch& launch);
  // out [rows, OC] += scale (x A^T) B^T of an adapter beside this layer, if there is one.
  void add_low_rank(const S* x, const DeviceBlock<S>& block, BlockLinear which, std::int64_t rows, float* out);
  // out [rows, OC] = x W^T + bias + that, rounded once.
  void multiply_with_adapter(const S* x, const DeviceBlock<S>& block, BlockLinear which, std::int64_t rows, S* out);
  PagedKv<S> pages_of_layer(std::int64_t l) const;
  // view of queries, keys or values, which begin at this element of a row of qkv
  HeadViewOf<S> heads(std::int64_t first_element) const;
  HeadViewOf<S> queries() const { return heads(0); }
  HeadViewOf<S> keys() const { return heads(qkv_heads(config_).keys); }
  HeadViewOf<S> values() const { return heads(qkv_heads(config_).values); }
  bool parallel() const { return config_.parallel_residual; }
  S* norm2() const { return two_norms(config_) ? b_.norm2 : b_.norm1; }  // input of the MLP
  // Whether norms write the codes of their output, b_.codes, in the place of the output, which nothing else reads.
  bool norms_in_codes() const {
    return options_.fp8_activations && !parallel() && !config_.post_norms && config_.norm_weight_offset == 0 &&
           !options_.lora && !keep_;
  }
  std::int64_t qkv_size() const { return config_.qkv_size(); }
  // Runs `work` under a name for the profiler, if operators are launched singly.
  template <typename Work>
  void named(const char* name, const Work& work) {
    if (!options_.direct) return work();
    const TraceRange range(name);
    work();
  }

  // ---- activations for comparison, of steps that are launched directly
  template <typename T>
  std::vector<float> download(const T* data, std::int64_t count);
  template <typename T>
  void keep(const std::string& name, const T* data, std::int64_t columns);  // the step's rows, without padding
  void keep_heads(std::int64_t l);
  void keep_logits_of_all_rows();

  ModelConfig config_;
  InferenceOptions pool_;
  GpuInferenceOptions options_;
  std::unique_ptr<DeviceArena> own_;
  DeviceWeights<S> weights_;
  LaunchDevice device_;
  Stream stream_{-1}, upload_stream_, side_stream_;
  Event drafts_written_{cudaEventDisableTiming}, forked_{cudaEventDisableTiming}, up_done_{cudaEventDisableTiming};
  InferenceBuffers<S> b_{};
  DeviceArena kv_arena_;
  ArenaLayout layout_;
  DeviceArena workspace_;
  DeviceRopeTable rope_, local_rope_;
  // For 16-bit models with GpuInferenceOptions::fused_steps.
  std::unique_ptr<FusedStep<std::conditional_t<std::is_same_v<S, float>, fp16, S>>> fused_;
  // Keyed by padded rows and wanted rows, StepArrays::decodes, all_wanted and logit_rows, and by the description's slot.
  std::map<std::tuple<std::int64_t, std::int64_t, bool, bool, const DeviceLogitRow*, const std::byte*>, BucketGraph>
      graphs_;
  std::vector<std::unique_ptr<Flight>> flights_;                  // [kDepth], used in turn
  std::vector<std::unique_ptr<Rules>> rules_;                     // [kStepSlots], used in turn
  std::int64_t submitted_ = 0, collected_ = 0, with_rules_ = 0;   // steps
  std::unique_ptr<Event> last_done_ = std::make_unique<Event>();  // of the step that was collected last
  double ended_seconds_ = 0;                                      // since this model was made
  std::vector<ChunkResult> results_;
  std::vector<VerifiedRow> verified_;
  std::vector<PagedChunk> paged_chunks_;  // chunks of the step being submitted

  bool keep_ = false, logits_alone_ = false;
  // For the step being launched, without padding: its number of rows, and where the keys and values of each row lie.
  struct Place {
    std::int64_t page, place;
  };
  std::int64_t kept_step_rows_ = 0;
  std::vector<Place> kept_places_;
  std::map<std::string, std::vector<float>> kept_;
};

}  // namespace weft::cuda
