#include "llmc/cpu/inference.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "llmc/base/dtype.h"
#include "llmc/base/error.h"
#include "llmc/cpu/classifier.h"
#include "llmc/cpu/low_rank.h"
#include "llmc/model/single_sequence.h"

namespace weft::cpu {

namespace {

constexpr std::int64_t kLogitRows = 64;  // rows of logits that exist at the same time: bounds the memory of scoring

}  // namespace

Inference::Inference(const ModelConfig& config, const InferenceOptions& options,
                     const ModelWeights<const float>& weights, std::unique_ptr<HostArena> own,
                     const std::optional<LoraConfig>& lora)
    : config_(config),
      kv_arena_(plan_pages(config, options, options.kv_fp8 ? 0 : sizeof(float))),
      options_(completed(options, config)),
      rope_(rope_table(config.rope, options_.max_positions)),
      local_rope_(config.local_rope_theta > 0 ? rope_table(config.local_rope(), options_.max_positions) : RopeTable()),
      own_(std::move(own)),
      weights_(weights),
      lora_(lora) {
  last_ids_.resize(static_cast<std::size_t>(options_.slots));
  const auto rows_of = [&](std::int64_t columns) { return static_cast<std::size_t>(options_.max_rows * columns); };
  const std::int64_t C = config.hidden_size;
  for (std::vector<float>* each : {&residual_, &final_norm_, &norm1_, &branch_}) each->resize(rows_of(C));
  if (config.parallel_residual) norm2_.resize(rows_of(C));
  attention_.resize(rows_of(config.q_size()));
  qkv_.resize(rows_of(config.qkv_size()));
  up_.resize(rows_of(linear_size(config, BlockLinear::up).OC));
  if (config.gated()) product_.resize(rows_of(config.ffn_size));
  if (!lora) return;
  std::int64_t workspace = 0;
  for (const BlockLinear which : kBlockLinears) {
    workspace = std::max(workspace, low_rank_workspace(low_rank_shape(which, options_.max_rows)));
  }
  low_rank_.resize(static_cast<std::size_t>(workspace));
}

std::vector<MemoryLine> Inference::memory() const {
  std::size_t values = 0;
  for (const std::vector<float>* each : {&residual_, &final_norm_, &norm1_, &norm2_, &branch_, &attention_, &qkv_, &up_,
                                         &product_, &low_rank_, &codes_, &code_scales_}) {
    values += each->size();
  }
  std::vector<MemoryLine> lines = {{options_.kv_fp8 ? "K/V cache (fp8)" : "K/V cache (fp32)", kv_arena_.bytes()},
                                   {"workspace (fp32)", values * sizeof(float)}};
  const Quantization& quantization = config_.quantization;
  const std::string types = quantization.any() ? quantization_text(quantization) : "fp32";
  if (own_ != nullptr) lines.insert(lines.begin(), {"parameters (" + types + ")", own_->bytes()});
  return lines;
}

std::uint64_t Inference::bytes_per_step(std::int64_t sequences, std::int64_t context) const {
  return read_bytes_of_step(config_, sequences, context, sizeof(float), options_.kv_fp8);
}

void Inference::use_fp8_activations() {
  codes_.resize(static_cast<std::size_t>(options_.max_rows * widest_input(config_)));
  code_scales_.resize(static_cast<std::size_t>(options_.max_rows));
}

// ---- a step ---------------------------------------------------------------------------------------------------------

void Inference::submit(std::span<const Chunk> work) {
  if (uncollected_) fail(Exit::internal, "inference: the step before was not collected");
  check_step(work, options_, config_.longest_window());
  take_rows(work);
  const auto run = [&] {
    run_layers();
    compute_logits(work);
  };
  if (ids_.size() == 1) {
    threads_.run(run);
  } else {
    run();
  }
  uncollected_ = true;
}

std::span<const ChunkResult> Inference::collect() {
  if (!uncollected_) fail(Exit::internal, "inference: collect() without a step");
  uncollected_ = false;
  return results_;
}

void Inference::take_rows(std::span<const Chunk> work) {
  ids_.clear();
  rows_.clear();
  for (const Chunk& chunk : work) {
    rows_.push_back({chunk.pages, chunk.first_position, chunk.rows(), static_cast<std::int64_t>(ids_.size())});
    if (chunk.ids.empty()) {
      ids_.push_back(last_ids_[static_cast<std::size_t>(chunk.slot)]);
    } else {
      ids_.insert(ids_.end(), chunk.ids.begin(), chunk.ids.end());
    }
  }
}

// ---- logits ---------------------------------------------------------------------------------------------------------

std::vector<Inference::WantedRow> Inference::wanted_rows(std::span<const Chunk> work) const {
  std::vector<WantedRow> wanted;
  for (std::size_t s = 0; s < work.size(); ++s) {
    const std::int64_t rows = rows_[s].rows, targets = static_cast<std::int64_t>(work[s].targets.size());
    const bool last_is_wanted = work[s].sampling != nullptr || work[s].keep_logits;
    const std::int64_t verified = work[s].drafts > 0 ? rows - 1 - work[s].drafts : rows;  // first row that verifies
    for (std::int64_t t = 0; t < rows; ++t) {
      const bool last = t + 1 == rows && last_is_wanted;
      if (t < targets || last || t >= verified) {
        wanted.push_back({rows_[s].first_row + t, s, t < targets ? t : -1, last, t >= verified ? t - verified : -1});
      }
    }
  }
  return wanted;
}

void Inference::compute_logits(std::span<const Chunk> work) {
  const std::int64_t C = config_.hidden_size, V = config_.vocab_size;
  results_.assign(work.size(), {});
  kept_logits_.assign(work.size(), {});
  verified_.resize(work.size());
  for (std::size_t s = 0; s < work.size(); ++s) {
    results_[s].targets.resize(work[s].targets.size());
    verified_[s].assign(work[s].drafts > 0 ? static_cast<std::size_t>(work[s].drafts + 1) : 0, {});
  }

  const std::vector<WantedRow> wanted = wanted_rows(work);
  const std::int64_t count = static_cast<std::int64_t>(wanted.size()), piece = std::min(count, kLogitRows);
  std::vector<float> hidden(static_cast<std::size_t>(piece * C)), logits(static_cast<std::size_t>(piece * V));
  for (std::int64_t first = 0; first < count; first += kLogitRows) {
    const std::int64_t rows = std::min(kLogitRows, count - first);
    for (std::int64_t i = 0; i < rows; ++i) {
      std::copy_n(final_norm_.data() + wanted[static_cast<std::size_t>(first + i)].row * C, C, hidden.data() + i * C);
    }
    matmul_rows_forward(logits.data(), hidden.data(), weights_.head, nullptr, rows, C, V);
#pragma omp parallel for schedule(dynamic)
    for (std::int64_t i = 0; i < rows; ++i) {
      const WantedRow& row = wanted[static_cast<std::size_t>(first + i)];
      finish_row(work[row.chunk], row, {logits.data() + i * V, static_cast<std::size_t>(V)});
    }
  }
  for (std::size_t s = 0; s < work.size(); ++s) {
    if (work[s].drafts == 0) continue;
    accept_drafts(work[s].ids.last(static_cast<std::size_t>(work[s].drafts)), verified_[s], results_[s]);
  }
}

void Inference::finish_row(const Chunk& chunk, const WantedRow& wanted, std::span<const float> logits) {
  ChunkResult& result = results_[wanted.chunk];
  if (wanted.target >= 0) {
    const std::size_t target = static_cast<std::size_t>(wanted.target);
    result.targets[target] = scored(chunk.targets[target], logits, chunk.alternatives);
  }
  if (wanted.draft >= 0) {
    VerifiedRow& verified = verified_[wanted.chunk][static_cast<std::size_t>(wanted.draft)];
    const std::int64_t position = chunk.first_position + wanted.row - rows_[wanted.chunk].first_row + 1;
    std::int32_t id = 0;
    verified.error = try_sample(chunk, wanted.draft, logits, position, &id);
    if (verified.error == SampleError::none) verified.id = sampled_id(id, logits, chunk.alternatives);
    return;
  }
  if (!wanted.last) return;
  if (chunk.keep_logits) {
    kept_logits_[wanted.chunk].assign(logits.begin(), logits.end());
    result.logits = kept_logits_[wanted.chunk];
  }
  if (chunk.sampling == nullptr) return;
  std::int32_t id = 0;
  result.error = try_sample(chunk, 0, logits, chunk.first_position + rows_[wanted.chunk].rows, &id);
  if (result.error != SampleError::none) return;
  last_ids_[static_cast<std::size_t>(chunk.slot)] = id;
  result.sampled = sampled_id(id, logits, chunk.alternatives);
}

SampleError Inference::try_sample(const Chunk& chunk, std::int64_t i, std::span<const float> logits,
                                  std::int64_t position, std::int32_t* id) const {
  Sampler sampler(*chunk.sampling);
  if (chunk.logit_rows.empty()) return sampler.try_sample(logits, position, id);
  std::vector<float> changed(logits.begin(), logits.end());
  apply(chunk.logit_rows[static_cast<std::size_t>(i)], last_ids_[static_cast<std::size_t>(chunk.slot)], changed);
  return sampler.try_sample(changed, position, id);
}

ScoredId Inference::sampled_id(std::int32_t id, std::span<const float> logits, std::int32_t alternatives) const {
  return alternatives < 0 ? ScoredId{id, 0, {}} : scored(id, logits, alternatives);
}

ScoredId Inference::scored(std::int32_t id, std::span<const float> logits, std::int32_t alternatives) const {
  const LogSoftmax softmax = log_softmax(logits.data(), config_.vocab_size);
  const auto logit = [&](std::int32_t of) { return logits[static_cast<std::size_t>(of)]; };
  ScoredId result = {id, -softmax.loss(logit(id)), {}};
  if (alternatives <= 0) return result;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(config_.tokenizer_vocab));
  std::iota(ids.begin(), ids.end(), 0);
  const auto end = ids.begin() + std::min<std::ptrdiff_t>(alternatives, std::ssize(ids));
  // NaN ranks last: an order needs every pair to compare.
  const auto rank = [&](std::int32_t of) { return std::isnan(logit(of)) ? -INFINITY : logit(of); };
  std::partial_sort(ids.begin(), end, ids.end(),
                    [&](std::int32_t a, std::int32_t b) { return rank(a) != rank(b) ? rank(a) > rank(b) : a < b; });
  for (auto each = ids.begin(); each != end; ++each) {
    result.alternatives.push_back({*each, -softmax.loss(logit(*each))});
  }
  return result;
}

// ---- activations ----------------------------------------------------------------------------------------------------

void Inference::keep_activations(bool keep) {
  keep_ = keep;
  kept_.clear();
}

void Inference::keep_values(const std::string& name, const float* data, std::int64_t count) {
  if (!keep_) return;
  std::vector<float>& kept = kept_[name];
  kept.insert(kept.end(), data, data + count);
}

void Inference::keep_heads(const std::string& name, ConstHeadView heads, std::int64_t count) {
  for (std::int64_t t = 0; t < rows(); ++t) {
    for (std::int64_t h = 0; h < count; ++h) keep_values(name, heads.at(0, t, h), config_.head_dim);
  }
}

std::vector<float> Inference::activation(const std::string& name) {
  if (name == "logits") {  // of every position, from the final norm that was kept
    const auto found = kept_.find("final_norm");
    if (found == kept_.end()) return {};
    const std::int64_t rows = static_cast<std::int64_t>(found->second.size()) / config_.hidden_size;
    std::vector<float> logits(static_cast<std::size_t>(rows * config_.vocab_size));
    matmul_rows_forward(logits.data(), found->second.data(), weights_.head, nullptr, rows, config_.hidden_size,
                        config_.vocab_size);
    return logits;
  }
  const auto found = kept_.find(name);
  return found == kept_.end() ? std::vector<float>{} : found->second;
}

// ---- loading --------------------------------------------------------------------------------------------------------

namespace {

// `adapter`: what stands beside the weights; null: nothing.
std::unique_ptr<Inference> filled(const ModelConfig& config, const TensorTable& table, const InferenceOptions& options,
                                  const FillTensor& fill, const ModelFile* adapter = nullptr) {
  MemoryPlan plan = parameter_plan(table);
  const std::uint64_t adapter_at = adapter != nullptr ? plan.add(adapter->table().arena_bytes()) : 0;
  auto arena = std::make_unique<HostArena>(plan);
  for (const TensorSpec& spec : table.specs()) fill(spec, arena->at<std::byte>(spec.byte_offset));
  auto weights = bind_weights(config, table, arena->at<const float>(0), Offsets::bytes);
  if (adapter == nullptr) return std::make_unique<Inference>(config, options, weights, std::move(arena));
  for (const TensorSpec& spec : adapter->table().specs()) {
    adapter->read_parameter(spec, arena->at<float>(adapter_at + spec.byte_offset));
  }
  bind_adapter(config, *adapter->lora(), adapter->table(), arena->at<const float>(adapter_at), Offsets::bytes, weights);
  return std::make_unique<Inference>(config, options, weights, std::move(arena), adapter->lora());
}

}  // namespace

std::unique_ptr<InferenceModel> load_inference(const ModelFile& file, const InferenceOptions& options, DType cache,
                                               bool fp8_activations) {
  if (fp8_activations) {
    const std::string reason =
        fp8_activations_unsupported_reason(file.config().quantization, file.adapter_beside() != nullptr);
    if (!reason.empty()) fail(Exit::usage, "fp8 activations: %s", reason.c_str());
  }
  auto model = filled(
      file.config(), file.table(), options,
      [&](const TensorSpec& spec, std::byte* out) { file.read_tensor(spec, out); }, file.adapter_beside());
  model->round_cache_to(cache);
  if (fp8_activations) model->use_fp8_activations();
  return model;
}

std::unique_ptr<InferenceModel> make_inference(const ModelConfig& config, const InferenceOptions& options,
                                               const FillTensor& fill) {
  return filled(config, TensorTable(config), options, fill);
}

std::unique_ptr<InferenceModel> make_inference(const ModelConfig& config, const TensorTable& table,
                                               const float* parameters, const InferenceOptions& options) {
  return std::make_unique<Inference>(config, options, bind_weights(config, table, parameters, Offsets::bytes), nullptr);
}

std::unique_ptr<DecodeModel> load_decoder(const ModelFile& file, std::int64_t capacity, DType cache,
                                          bool fp8_activations) {
  return single_sequence(load_inference(file, one_sequence(capacity), cache, fp8_activations), capacity);
}

}  // namespace weft::cpu
