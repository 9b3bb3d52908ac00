// InferenceModel on the CPU in fp32: pages of keys and values, logits, sampling and scoring of any rows, and keeping
// activations for comparison. inference_layers.cpp has the list of operators from ids to the final norm.
//
// Every operator here treats a row as if it were alone, so that its bits do not depend on the others: GEMMs are
// matmul_rows_forward(), attention goes page by page.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/sampler.h"
#include "llmc/base/threads.h"
#include "llmc/cpu/head_view.h"
#include "llmc/cpu/matmul_rows.h"
#include "llmc/cpu/paged_attention.h"
#include "llmc/model/block_weights.h"
#include "llmc/model/decode_model.h"
#include "llmc/model/inference_model.h"
#include "llmc/model/lora.h"
#include "llmc/model/low_rank_shape.h"
#include "llmc/model/model_file.h"
#include "llmc/model/norm_shape.h"

namespace weft::cpu {

// A model from its file: reads and verifies every parameter, fp16, bf16 or fp32 into fp32 memory and quantised matrices as
// they are, with an adapter beside them (ModelFile::adapter_beside()). Exit::bad_file for damaged tensors, Exit::resources if the memory cannot be had.
// `cache`: the type (f32, f16 or bf16) that keys and values are rounded to on their way into the pages, which are fp32, or
// e4m3 with kv_fp8: the reference for a device that computes in 16 bits. `fp8_activations`: what the linear layers of the
// blocks read is rounded to e4m3, with a scale for each row; Exit::usage unless their weights are fp8 and nothing stands
// beside them.
std::unique_ptr<InferenceModel> load_inference(const ModelFile& file, const InferenceOptions& options,
                                               DType cache = DType::f32, bool fp8_activations = false);
// The same for one sequence of at most `capacity` positions, 1 .. max_positions.
std::unique_ptr<DecodeModel> load_decoder(const ModelFile& file, std::int64_t capacity, DType cache = DType::f32,
                                          bool fp8_activations = false);

// The same without a file: `fill` writes the bytes of each tensor of TensorTable(config).
using FillTensor = std::function<void(const TensorSpec&, std::byte*)>;
std::unique_ptr<InferenceModel> make_inference(const ModelConfig& config, const InferenceOptions& options,
                                               const FillTensor& fill);
// From parameters that live elsewhere, in an arena of the layout of `table` by bytes, and must stay valid as long as the model.
// Later changes to them take effect, but keys and values that are in the pages already stay as they are.
std::unique_ptr<InferenceModel> make_inference(const ModelConfig& config, const TensorTable& table,
                                               const float* parameters, const InferenceOptions& options);

class Inference final : public InferenceModel {
 public:
  // `own`: the memory of the parameters where this model owns it, otherwise null. `lora`: of the low-rank additions of `weights`.
  Inference(const ModelConfig& config, const InferenceOptions& options, const ModelWeights<const float>& weights,
            std::unique_ptr<HostArena> own, const std::optional<LoraConfig>& lora = std::nullopt);

  const ModelConfig& config() const final { return config_; }
  std::vector<MemoryLine> memory() const final;
  std::uint64_t bytes_per_step(std::int64_t sequences, std::int64_t context) const final;
  std::int64_t page_size() const final { return options_.page_size; }
  std::int64_t num_pages() const final { return options_.num_pages; }
  std::int64_t slots() const final { return options_.slots; }
  std::int64_t max_rows() const final { return options_.max_rows; }
  std::int64_t max_positions() const final { return options_.max_positions; }
  std::int64_t depth() const final { return 1; }
  void submit(std::span<const Chunk> work) final;
  std::span<const ChunkResult> collect() final;
  void keep_activations(bool keep) final;
  std::vector<float> activation(const std::string& name) final;

  // From the next step on; load_inference() says what it does.
  void round_cache_to(DType type) { cache_type_ = type; }
  void use_fp8_activations();

 private:
  struct WantedRow {
    std::int64_t row;  // of the step
    std::size_t chunk;
    std::int64_t target;  // index in the chunk's targets; -1: none
    bool last;            // of its chunk: sampled and kept where that is asked for
    std::int64_t draft;   // index among the rows that verify the chunk's drafts; -1: none of them
  };

  // ---- the list of operators (inference_layers.cpp)
  // Runs the step's rows, which have these ids, and leaves the output of the final norm in final_norm_ [rows, C].
  void run_layers();
  void run_block(std::int64_t l);
  // out (+)= x W^T + bias, with what an adapter adds
  void multiply(float* out, const float* x, const BlockWeights<const float>& block, BlockLinear which,
                Accumulate accumulate = Accumulate::no);
  LowRankShape low_rank_shape(BlockLinear which, std::int64_t rows) const;
  // The norm or norms that read the input of block l, after `branch` was added to it; behind the last block the final norm.
  void normalize_input(std::int64_t l, const float* branch);
  // residual += branch (unless null); out = norm(residual) and, where there is one, out2 = norm2(residual) from the same
  // statistics.
  using Norm = NormWeights<const float>;
  void normalize(const float* branch, const Norm& norm, float* out, const Norm& norm2 = {}, float* out2 = nullptr);
  void normalize_branch(const Norm& norm);  // branch_ = norm(branch_)
  ResidualNormShape norm_shape() const;
  PagedKv pages_of_layer(std::int64_t l) const;
  void append(const PagedKv& kv, std::int64_t row, const float* key, const float* value) const;
  // Normalises (qk_norm) and rotates q and k, appends k and v of all rows to layer l's pages, and attends: from qkv_ to attention_.
  void attend(std::int64_t l);
  HeadView heads(std::int64_t first_element);  // q, k or v, which begin there in a row of qkv_
  // Adds `count` values, or all rows, to the activation `name`.
  void keep_values(const std::string& name, const float* data, std::int64_t count);
  void keep(const std::string& name, const float* data, std::int64_t columns) {
    keep_values(name, data, rows() * columns);
  }
  void keep_heads(const std::string& name, ConstHeadView heads, std::int64_t count);
  std::int64_t rows() const { return std::ssize(ids_); }

  // ---- a step (inference.cpp)
  void take_rows(std::span<const Chunk> work);
  std::vector<WantedRow> wanted_rows(std::span<const Chunk> work) const;
  void compute_logits(std::span<const Chunk> work);
  void finish_row(const Chunk& chunk, const WantedRow& wanted, std::span<const float> logits);
  // From sampled row i of the chunk.
  SampleError try_sample(const Chunk& chunk, std::int64_t i, std::span<const float> logits, std::int64_t position,
                         std::int32_t* id) const;
  ScoredId sampled_id(std::int32_t id, std::span<const float> logits, std::int32_t alternatives) const;
  ScoredId scored(std::int32_t id, std::span<const float> logits, std::int32_t alternatives) const;

  ModelConfig config_;
  // Keys, then values, each [L, page, NKV, page_size, HS], or as kv_codes() has them; first: it refuses what cannot fit
  HostArena kv_arena_;
  InferenceOptions options_;
  RopeTable rope_, local_rope_;         // local: of layers that rotate locally
  std::vector<std::int32_t> last_ids_;  // [slots]: sampled last in each
  std::unique_ptr<HostArena> own_;      // the parameters, where the model owns them
  const ModelWeights<const float> weights_;
  std::optional<LoraConfig> lora_;
  // [max_rows, ...]; norm2_: of the parallel residual; product_: of gated MLPs, others compute it in up_
  // low_rank_: workspace of one module; codes_, code_scales_: with fp8 activations, of the input of one layer
  std::vector<float> residual_, final_norm_, norm1_, norm2_, branch_, attention_, qkv_, up_, product_, low_rank_,
      codes_, code_scales_;

  // Of the step.
  std::vector<std::int32_t> ids_;
  std::vector<PagedRows> rows_;
  std::vector<ChunkResult> results_;
  std::vector<std::vector<float>> kept_logits_;     // by chunk
  std::vector<std::vector<VerifiedRow>> verified_;  // by chunk, then by row
  bool uncollected_ = false;
  DType cache_type_ = DType::f32;
  StepThreads threads_;  // for steps of one row

  bool keep_ = false;
  std::map<std::string, std::vector<float>> kept_;
};

}  // namespace weft::cpu
