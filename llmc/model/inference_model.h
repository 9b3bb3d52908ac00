// A model that runs many sequences at once: one interface, implemented on the CPU and on the GPU.
//
// A step takes rows of several sequences. One row is one position of one sequence; a prompt is a chunk of many rows, a decode
// step a chunk of one, a chunk of a prompt a chunk in the middle. Keys and values lie in pages of one pool; a block table, the
// list of a sequence's pages, says where its positions are (Kwon et al., "Efficient Memory Management for Large Language
// Model Serving with PagedAttention", SOSP 2023). Who owns which page is decided above (llmc/infer/page_pool.h): the model
// reads and writes the pages that a chunk names.
//
// The bits of a row depend on its sequence alone: on the ids up to its position. Not on the other rows of the step, nor on
// how the sequence was cut into chunks, nor on which pages hold it.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/base/kv_fp8.h"
#include "llmc/base/logit_row.h"
#include "llmc/base/sampling.h"
#include "llmc/model/config.h"

struct CUevent_st;  // cudaEvent_t points to one

namespace weft {

struct InferenceOptions {
  std::int64_t num_pages = 1;
  std::int64_t page_size = 32;  // positions
  std::int64_t slots = 1;
  std::int64_t max_rows = 256;
  // The longest sequence, if the pages hold it; 0: what the model was made for.
  std::int64_t max_positions = 0;
  bool kv_fp8 = false;  // keys and values in e4m3 (llmc/base/kv_fp8.h); otherwise in the type of the device
};

// Bytes of keys and values of `positions` positions, in elements of `element_bytes`. With `fp8` codes and scales and, for
// kernels that read other elements, one layer's keys and values in elements of `element_bytes`, which may be 0.
std::uint64_t kv_bytes(const ModelConfig& config, std::int64_t positions, std::uint64_t element_bytes,
                       bool fp8 = false);
// A pool for at most `sequences` sequences in at most `bytes`, and not larger than they could ever fill. Exit::resources,
// with how much is needed, if that is less than two pages.
InferenceOptions pool_options(const ModelConfig& config, std::uint64_t bytes, std::int64_t sequences,
                              std::uint64_t element_bytes, bool fp8 = false);

// `options` with max_positions filled in: that of the model if it is 0, and at most what the pages hold.
InferenceOptions completed(InferenceOptions options, const ModelConfig& config);
// Keys and values of the whole pool, as kv_bytes() counts them. With kv_fp8 kv_codes() says where codes and scales lie; what
// else there is begins behind them.
MemoryPlan plan_pages(const ModelConfig& config, const InferenceOptions& options, std::uint64_t element_bytes);
// The pages of a layer in memory of plan_pages() that begins at `pages`. Exit::internal if its rows are no whole units (kKvUnit).
KvCodes kv_codes(const ModelConfig& config, const InferenceOptions& options, std::uint8_t* pages, std::int64_t layer);

// Where a model on a device writes draft tokens for a step that is submitted before the host knows them.
inline constexpr std::int64_t kDeviceDrafts = 7;
struct DeviceDrafts {
  std::int32_t* ids = nullptr;    // [kDeviceDrafts], all in [0, vocab_size) at any time; null: the host must know them
  CUevent_st* written = nullptr;  // recorded behind what writes them; the step waits for it
};

// Rows of one sequence for one step.
struct Chunk {
  // Block table: page i holds the positions [i * page_size, (i + 1) * page_size). It covers the chunk's last position. Pages
  // that two chunks of a step share are only read by both: the positions that a chunk appends lie in pages of its own. A page
  // that is -1 is none: it lies in front of what the first row sees in any layer.
  std::span<const std::int32_t> pages;
  std::int64_t first_position = 0;  // the positions before it are in the pages already
  // In [0, vocab_size). Empty: one row, with the id that was sampled last in `slot`; after a SampleError, which the caller may
  // not have collected yet, with any id in [0, vocab_size).
  std::span<const std::int32_t> ids;

  // Where an id that is sampled here is kept for the next chunk without ids, in [0, slots()). One sequence a slot.
  std::int32_t slot = 0;
  // Not null: an id is sampled from the last row, for position first_position + rows. Valid until submit() returns.
  const SamplingPlan* sampling = nullptr;
  // What changes in the logits before: nothing, or one element for each row that an id is sampled from, in order. Scores and
  // kept logits are of the row as the model has computed it. Valid until submit() returns. kUnknownId is the id of a chunk
  // without ids.
  std::span<const LogitRow> logit_rows;
  // The log-probability of targets[i] by row i is reported; at most as many as there are rows.
  std::span<const std::int32_t> targets;
  // Of the sampled id and of each target, this many most likely ids are reported with it; -1: not even the log-probability
  // of the sampled id.
  std::int32_t alternatives = -1;
  bool keep_logits = false;  // of the last row, for ChunkResult::logits
  // This many ids at the end of `ids` are drafts: what may be sampled after the ids before them
  // (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023). An id is sampled
  // from each of the last drafts + 1 rows, for the position after it: the one that a chunk of one row would
  // sample there. ChunkResult::accepted says how many draft tokens were right; the keys and values of the others are
  // overwritten by a later chunk. Needs `sampling` and at least one id before the drafts; without targets and
  // keep_logits. The next chunk of `slot` has ids.
  std::int64_t drafts = 0;
  // A device writes the drafts to InferenceModel::device_drafts(): at most kDeviceDrafts, for one chunk of a step.
  // Then `ids` only reserves their places: before collect() the caller writes the drafts, or -1 for a missing one,
  // there and leaves them until then.
  bool drafts_on_device = false;

  std::int64_t rows() const { return ids.empty() ? 1 : std::ssize(ids); }
};

// Exit::internal if a chunk would read or write memory that is not its own, or if the step is larger than `options`,
// which are completed(), allow. `window`: the model's longest_window().
void check_step(std::span<const Chunk> work, const InferenceOptions& options, std::int64_t window);

// InferenceModel::bytes_per_step() of a model whose weights, keys and values are elements of `element_bytes`; with `fp8` keys
// and values are codes and scales.
std::uint64_t read_bytes_of_step(const ModelConfig& config, std::int64_t sequences, std::int64_t context,
                                 std::uint64_t element_bytes, bool fp8 = false);

struct IdLogprob {
  std::int32_t id = 0;
  float logprob = 0;  // natural logarithm of softmax(logits), at temperature 1, over the whole vocabulary
};

struct ScoredId {
  std::int32_t id = 0;
  float logprob = 0;
  std::vector<IdLogprob> alternatives;  // the most likely first, equal ones by id; no padding rows
};

struct ChunkResult {
  std::optional<ScoredId> sampled;
  SampleError error =
      SampleError::none;  // why nothing was sampled although it was asked for: only this chunk is affected
  // Of the drafts, those that equal the ids sampled in their place, up to the first that does not. `sampled` is what follows
  // them, or `error` says why there is none.
  std::vector<ScoredId> accepted;
  std::vector<ScoredId> targets;
  std::span<const float> logits;  // [vocab_size], valid until the next submit(); empty unless asked for
};

// What was sampled from one of the last rows of a chunk with drafts.
struct VerifiedRow {
  ScoredId id;
  SampleError error = SampleError::none;
};
// Fills accepted, sampled and error of `result` from drafted.size() + 1 rows, in order. Moves the ids out of `rows`.
void accept_drafts(std::span<const std::int32_t> drafted, std::span<VerifiedRow> rows, ChunkResult& result);

class InferenceModel {
 public:
  virtual ~InferenceModel() = default;

  virtual const ModelConfig& config() const = 0;
  virtual std::vector<MemoryLine> memory() const = 0;
  // Bytes that a step with one row of each of `sequences` sequences, of `context` positions each, must read: the
  // weights once, then an embedding row and the K/V of every sequence.
  virtual std::uint64_t bytes_per_step(std::int64_t sequences, std::int64_t context) const = 0;

  virtual std::int64_t page_size() const = 0;      // positions a page
  virtual std::int64_t num_pages() const = 0;      // of the pool: ids 0 .. num_pages() - 1
  virtual std::int64_t slots() const = 0;          // sequences that may have an id on the device
  virtual std::int64_t max_rows() const = 0;       // of a step, all chunks together
  virtual std::int64_t max_positions() const = 0;  // longest sequence
  virtual std::int64_t depth() const = 0;  // steps that may be submitted before the first is collected; at least 1

  // Queues a step: appends the keys and values of all rows, and computes what the chunks ask for. At least one chunk, at most
  // max_rows() rows, at most one chunk a sequence. The caller has checked ids and pages. More than depth() uncollected steps,
  // or rows that do not fit: Exit::internal.
  virtual void submit(std::span<const Chunk> work) = 0;
  // Where a device writes draft tokens for Chunk::drafts_on_device. It may do so when all steps that read earlier draft tokens
  // are collected.
  virtual DeviceDrafts device_drafts() { return {}; }
  // Waits for the oldest step that was not collected: one result a chunk, in the order of submit(). Valid until the next
  // collect() or submit().
  virtual std::span<const ChunkResult> collect() = 0;
  // When the step that was collected last ended, in seconds since any moment, by the clock of the device that computed it.
  // Unlike the time at which the host saw it, it does not depend on when the host's thread ran. Here: now.
  virtual double ended_seconds() const;

  // The activation `name` (names of scripts/dump_reference.py) of all steps since keep_activations(true), fp32, rows in the
  // order of the steps and their chunks; empty if not kept.
  virtual void keep_activations(bool keep) = 0;
  virtual std::vector<float> activation(const std::string& name) = 0;
  // The same for activation("logits") alone.
  virtual void keep_logits(bool keep) { keep_activations(keep); }
};

}  // namespace weft
