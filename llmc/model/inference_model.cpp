#include "llmc/model/inference_model.h"

#include <algorithm>
#include <utility>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/log.h"
#include "llmc/model/tensor_table.h"
#include "llmc/model/visibility.h"

namespace weft {

namespace {

constexpr std::uint64_t kFewestPages = 2;
constexpr std::uint64_t kMostPages = std::uint64_t{1} << 30;  // page ids are 32-bit numbers

// Bytes of one position's keys in one layer.
std::uint64_t key_bytes(const ModelConfig& config, std::uint64_t element_bytes, bool fp8) {
  const std::int64_t codes_and_scales = config.kv_size() + config.num_kv_heads;
  return fp8 ? static_cast<std::uint64_t>(codes_and_scales)
             : static_cast<std::uint64_t>(config.kv_size()) * element_bytes;
}

}  // namespace

std::uint64_t kv_bytes(const ModelConfig& config, std::int64_t positions, std::uint64_t element_bytes, bool fp8) {
  const std::uint64_t of_position =
      static_cast<std::uint64_t>(config.num_layers) * key_bytes(config, element_bytes, fp8) +
      (fp8 ? key_bytes(config, element_bytes, false) : 0);
  return 2 * of_position * static_cast<std::uint64_t>(positions);
}

InferenceOptions pool_options(const ModelConfig& config, std::uint64_t bytes, std::int64_t sequences,
                              std::uint64_t element_bytes, bool fp8) {
  InferenceOptions options;
  options.slots = sequences;
  options.kv_fp8 = fp8;
  const std::uint64_t page = kv_bytes(config, options.page_size, element_bytes, fp8);
  const std::uint64_t of_sequence =
      (static_cast<std::uint64_t>(config.max_positions) + static_cast<std::uint64_t>(options.page_size) - 1) /
      static_cast<std::uint64_t>(options.page_size);
  const std::uint64_t most = std::min(kMostPages, of_sequence * static_cast<std::uint64_t>(sequences));
  const std::uint64_t pages = std::min(bytes / page, std::max(most, kFewestPages));
  if (pages < kFewestPages) {
    fail(Exit::resources, "K/V cache: got %s, expected at least the %s of %llu pages of %lld positions",
         human_bytes(static_cast<double>(bytes)).c_str(), human_bytes(static_cast<double>(kFewestPages * page)).c_str(),
         static_cast<unsigned long long>(kFewestPages), static_cast<long long>(options.page_size));
  }
  options.num_pages = static_cast<std::int64_t>(pages);
  return options;
}

InferenceOptions completed(InferenceOptions options, const ModelConfig& config) {
  if (options.max_positions == 0) options.max_positions = config.max_positions;
  options.max_positions = std::min(options.max_positions, options.num_pages * options.page_size);
  return options;
}

MemoryPlan plan_pages(const ModelConfig& config, const InferenceOptions& options, std::uint64_t element_bytes) {
  MemoryPlan plan("K/V cache");
  plan.add(kv_bytes(config, options.num_pages * options.page_size, element_bytes, options.kv_fp8));
  return plan;
}

KvCodes kv_codes(const ModelConfig& config, const InferenceOptions& options, std::uint8_t* pages, std::int64_t layer) {
  const std::int64_t scales = options.num_pages * options.page_size * config.num_kv_heads,
                     codes = scales * config.head_dim, L = config.num_layers;
  if (scales % kKvUnit != 0)
    fail(Exit::internal, "K/V cache: got %lld rows of codes a layer, expected a multiple of %lld",
         static_cast<long long>(scales), static_cast<long long>(kKvUnit));
  std::uint8_t* const of_scales = pages + 2 * L * codes;
  return {pages + layer * codes, pages + (L + layer) * codes, of_scales + layer * scales,
          of_scales + (L + layer) * scales};
}

void check_step(std::span<const Chunk> work, const InferenceOptions& options, std::int64_t window) {
  std::int64_t rows = 0;
  for (const Chunk& chunk : work) {
    const std::int64_t end = chunk.first_position + chunk.rows();
    const std::int64_t covered = std::ssize(chunk.pages) * options.page_size;
    if (chunk.first_position < 0 || end > std::min(covered, options.max_positions)) {
      fail(Exit::internal, "inference: positions %lld to %lld: %lld are covered by pages, %lld are possible",
           static_cast<long long>(chunk.first_position), static_cast<long long>(end), static_cast<long long>(covered),
           static_cast<long long>(options.max_positions));
    }
    const Visibility visibility = {.window = static_cast<int>(window)};
    const std::int64_t hidden = visibility.first_key(static_cast<int>(chunk.first_position)) / options.page_size;
    for (std::int64_t i = 0; i < std::ssize(chunk.pages); ++i) {
      const std::int32_t page = chunk.pages[static_cast<std::size_t>(i)];
      const bool none = page == -1 && i < hidden;
      if (!none && (page < 0 || page >= options.num_pages))
        fail(Exit::internal, "inference: page %d does not exist", page);
    }
    if (chunk.slot < 0 || chunk.slot >= options.slots)
      fail(Exit::internal, "inference: slot %d does not exist", chunk.slot);
    if (std::ssize(chunk.targets) > chunk.rows()) {
      fail(Exit::internal, "inference: %zu targets for %lld rows", chunk.targets.size(),
           static_cast<long long>(chunk.rows()));
    }
    const bool verifies = chunk.drafts > 0 && chunk.drafts < std::ssize(chunk.ids) && chunk.sampling != nullptr &&
                          chunk.targets.empty() && !chunk.keep_logits;
    if (chunk.drafts != 0 && !verifies) {
      fail(Exit::internal, "inference: %lld drafts in a chunk of %lld rows%s", static_cast<long long>(chunk.drafts),
           static_cast<long long>(chunk.rows()), chunk.sampling == nullptr ? " that samples nothing" : "");
    }
    const std::int64_t changed = std::ssize(chunk.logit_rows);
    if (changed != 0 && (chunk.sampling == nullptr || chunk.drafts_on_device || changed != 1 + chunk.drafts)) {
      fail(Exit::internal, "inference: rules for %lld rows of a chunk with %lld drafts",
           static_cast<long long>(changed), static_cast<long long>(chunk.drafts));
    }
    if (chunk.drafts_on_device && (chunk.drafts < 1 || chunk.drafts > kDeviceDrafts)) {
      fail(Exit::internal, "inference: %lld drafts on the device, expected 1 to %lld",
           static_cast<long long>(chunk.drafts), static_cast<long long>(kDeviceDrafts));
    }
    rows += chunk.rows();
  }
  if (work.empty() || rows > options.max_rows) {
    fail(Exit::internal, "inference: a step of %lld rows, expected 1 to %lld", static_cast<long long>(rows),
         static_cast<long long>(options.max_rows));
  }
}

double InferenceModel::ended_seconds() const {
  return in_seconds(std::chrono::steady_clock::now().time_since_epoch());
}

void accept_drafts(std::span<const std::int32_t> drafted, std::span<VerifiedRow> rows, ChunkResult& result) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    result.error = rows[i].error;
    if (result.error != SampleError::none) return;
    if (i == drafted.size() || rows[i].id.id != drafted[i]) {
      result.sampled = std::move(rows[i].id);
      return;
    }
    result.accepted.push_back(std::move(rows[i].id));
  }
}

std::uint64_t read_bytes_of_step(const ModelConfig& config, std::int64_t sequences, std::int64_t context,
                                 std::uint64_t element_bytes, bool fp8) {
  const TensorTable table(config, element_bytes == sizeof(float) ? DType::f32 : DType::f16);
  std::uint64_t weights = 0;
  for (const TensorSpec& spec : table.specs()) weights += spec.bytes;
  if (!config.tied_embeddings) weights -= table.specs()[0].bytes;  // of the embedding only a row is read
  std::int64_t positions = 0;                                      // of keys and values, in all layers
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    positions += config.window(l) > 0 ? std::min(config.window(l), context) : context;
  }
  const std::uint64_t embedding = static_cast<std::uint64_t>(config.hidden_size) * element_bytes,
                      pages = 2 * static_cast<std::uint64_t>(positions) * key_bytes(config, element_bytes, fp8);
  return weights + static_cast<std::uint64_t>(sequences) * (embedding + pages);
}

}  // namespace weft
