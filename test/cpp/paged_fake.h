// A model for tests of what stands above InferenceModel: instead of keys and values its pages hold ids, and what it samples is
// a pure function of all ids that it finds through a sequence's block table. A wrong page, a page with two owners, a missing
// or a repeated append give other ids, or an error. It checks what submit() demands of its caller.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/model/inference_model.h"

namespace weft {

struct PagedFakeSizes {
  std::int64_t vocab_size = 64;
  std::int64_t page_size = 4;
  std::int64_t num_pages = 64;
  std::int64_t slots = 8;
  std::int64_t max_rows = 32;
  std::int64_t max_positions = 200;
  std::int64_t finite_positions = 1 << 30;  // from this position on no logit is a number
  std::int64_t depth = 1;
  std::int64_t wrong_of = 0;    // for a draft model: one of so many ids that it samples is another one; 0: none
  bool device_drafts = false;   // it has a place for draft tokens
  bool read_everything = true;  // each row reads all ids before it; otherwise the state of the one before alone
  std::int64_t window = 0;      // of them it reads so many, its own included; at least 2. 0: all
};

class PagedFake : public InferenceModel {
 public:
  static constexpr std::int32_t kPoison = 1;  // after this id no logit is a number

  explicit PagedFake(const PagedFakeSizes& sizes) : sizes_(sizes) {
    config_.vocab_size = config_.tokenizer_vocab = sizes.vocab_size;
    config_.max_positions = sizes.max_positions;
    if (sizes.window > 0) config_.num_layers = 1, config_.windows = {sizes.window};
    cells_.resize(static_cast<std::size_t>(sizes.num_pages * sizes.page_size));
    used_.resize(static_cast<std::size_t>(sizes.num_pages));
    slots_.resize(static_cast<std::size_t>(sizes.slots));
  }

  // What it samples after `ids`, and the log-probability of `id` there.
  static std::uint64_t state_after(std::uint64_t before, std::int32_t id) {
    std::uint64_t x = (before ^ static_cast<std::uint64_t>(id)) + 0x9e3779b97f4a7c15u;  // splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  static std::uint64_t state_of(std::span<const std::int32_t> ids) {
    std::uint64_t state = 0;
    for (const std::int32_t id : ids) state = state_after(state, id);
    return state;
  }
  // Never kPoison.
  static std::int32_t sampled_from(std::uint64_t state, std::uint64_t seed, std::int64_t position,
                                   std::int64_t vocab_size) {
    const std::uint64_t random =
        state_after(state_after(state, static_cast<std::int32_t>(position)), static_cast<std::int32_t>(seed) + 7);
    const auto id = static_cast<std::int32_t>(random % static_cast<std::uint64_t>(vocab_size));
    return id == kPoison ? kPoison + 1 : id;
  }
  // With rules it samples the greatest of these after they are changed.
  static std::vector<float> logits_after(std::uint64_t state, std::uint64_t seed, std::int64_t position,
                                         std::int64_t vocab_size) {
    const std::uint64_t here =
        state_after(state_after(state, static_cast<std::int32_t>(position)), static_cast<std::int32_t>(seed) + 7);
    std::vector<float> logits;
    for (std::int32_t id = 0; id < vocab_size; ++id) {
      logits.push_back(static_cast<float>(state_after(here, id) >> 40) * 0x1p-21f - 4);
    }
    logits[kPoison] = -std::numeric_limits<float>::infinity();
    return logits;
  }
  // `count` ids after a prompt.
  static std::vector<std::int32_t> ids_after(const std::vector<std::int32_t>& prompt, std::int64_t count,
                                             std::uint64_t seed, std::int64_t vocab_size) {
    std::vector<std::int32_t> ids;
    std::uint64_t state = state_of(prompt);
    while (std::ssize(ids) < count) {
      ids.push_back(sampled_from(state, seed, std::ssize(prompt) + std::ssize(ids), vocab_size));
      state = state_after(state, ids.back());
    }
    return ids;
  }
  static float logprob_from(std::uint64_t state, std::int32_t id) {
    return -static_cast<float>(state_after(state, id) >> 40) * 0x1p-20f;
  }

  const ModelConfig& config() const override { return config_; }
  ModelConfig& change_config() { return config_; }
  std::vector<MemoryLine> memory() const override { return {}; }
  std::uint64_t bytes_per_step(std::int64_t, std::int64_t) const override { return 0; }
  std::int64_t page_size() const override { return sizes_.page_size; }
  std::int64_t num_pages() const override { return sizes_.num_pages; }
  std::int64_t slots() const override { return sizes_.slots; }
  std::int64_t max_rows() const override { return sizes_.max_rows; }
  std::int64_t max_positions() const override { return sizes_.max_positions; }
  std::int64_t depth() const override { return sizes_.depth; }
  DeviceDrafts device_drafts() override {
    return sizes_.device_drafts ? DeviceDrafts{device_ids_.data(), nullptr} : DeviceDrafts{};
  }
  void keep_activations(bool) override {}
  std::vector<float> activation(const std::string&) override { return {}; }

  void submit(std::span<const Chunk> work) override {
    if (std::ssize(flights_) >= sizes_.depth) fail(Exit::internal, "fake: too many steps");
    ++step_;
    rows_of_last_step.clear();
    std::int64_t rows = 0;
    std::set<std::int32_t> slots;
    for (const Chunk& chunk : work) {
      rows += rows_of(chunk);
      check_chunk(chunk);
      if (!slots.insert(chunk.slot).second) fail(Exit::internal, "fake: slot %d twice", chunk.slot);
      rows_of_last_step.push_back({chunk.slot, rows_of(chunk)});
    }
    if (work.empty() || rows > sizes_.max_rows) fail(Exit::internal, "fake: a step of %lld rows", wide(rows));
    check_pages(work);
    std::vector<ChunkResult>& results = flights_.emplace_back();
    for (const Chunk& chunk : work) results.push_back(run(chunk));
  }

  std::span<const ChunkResult> collect() override {
    if (flights_.empty()) fail(Exit::internal, "fake: nothing to collect");
    collected_ = std::move(flights_.front());
    flights_.pop_front();
    return collected_;
  }

  struct ChunkRows {
    std::int32_t slot;
    std::int64_t rows;
  };
  std::vector<ChunkRows> rows_of_last_step;

 private:
  std::array<std::int32_t, kDeviceDrafts> device_ids_{};

  struct Cell {
    std::int32_t id = -1;  // -1: never written
    std::uint64_t state = 0;
    bool poisoned = false;
  };
  // The last step that reads a page or appends to it, and the slot of the chunk; -2: of several.
  struct Use {
    std::int64_t step = 0;
    std::int32_t slot = -1;
  };
  struct Slot {
    std::int32_t id = -1;  // sampled last
    std::int64_t position = -1;
  };

  static long long wide(std::int64_t value) { return value; }
  static std::int64_t rows_of(const Chunk& chunk) { return std::max<std::int64_t>(std::ssize(chunk.ids), 1); }
  Cell& cell(const Chunk& chunk, std::int64_t position) {
    const std::int64_t page = chunk.pages[static_cast<std::size_t>(position / sizes_.page_size)];
    return cells_[static_cast<std::size_t>(page * sizes_.page_size + position % sizes_.page_size)];
  }

  void check_chunk(const Chunk& chunk) const {
    const std::int64_t end = chunk.first_position + rows_of(chunk);
    if (chunk.first_position < 0 || end > sizes_.max_positions) fail(Exit::internal, "fake: position %lld", wide(end));
    if (std::ssize(chunk.pages) * sizes_.page_size < end) fail(Exit::internal, "fake: too few pages");
    std::span<const std::int32_t> held = chunk.pages;
    const std::int64_t hidden = first_read(chunk.first_position) / sizes_.page_size;
    while (chunk.pages.size() - held.size() < static_cast<std::size_t>(hidden) && held.front() == -1) {
      held = held.subspan(1);
    }
    const std::set<std::int32_t> pages(held.begin(), held.end());
    if (pages.size() != held.size()) fail(Exit::internal, "fake: a page twice in one table");
    if (*pages.begin() < 0 || *pages.rbegin() >= sizes_.num_pages) fail(Exit::internal, "fake: page out of range");
    for (const std::int32_t id : chunk.ids) {
      if (id < 0 || id >= sizes_.vocab_size) fail(Exit::internal, "fake: id %d", id);
    }
    if (chunk.slot < 0 || chunk.slot >= sizes_.slots) fail(Exit::internal, "fake: slot %d", chunk.slot);
    const Slot& slot = slots_[static_cast<std::size_t>(chunk.slot)];
    const bool verifies = chunk.drafts > 0 && chunk.drafts < std::ssize(chunk.ids) && chunk.sampling != nullptr &&
                          chunk.targets.empty() && !chunk.keep_logits;
    const auto sampled = static_cast<std::size_t>(chunk.sampling != nullptr ? 1 + chunk.drafts : 0);
    if (!chunk.logit_rows.empty() && (chunk.logit_rows.size() != sampled || chunk.drafts_on_device)) {
      fail(Exit::internal, "fake: rules for %zu rows of %zu", chunk.logit_rows.size(), sampled);
    }
    for (const LogitRow& row : chunk.logit_rows) {
      if (row.recent.size() == 1 && row.recent[0] == kUnknownId && !chunk.ids.empty()) {
        fail(Exit::internal, "fake: an unknown id before one that is given");
      }
    }
    if (chunk.drafts != 0 && !verifies) fail(Exit::internal, "fake: %lld drafts", wide(chunk.drafts));
    if (chunk.drafts_on_device && (chunk.drafts < 1 || !sizes_.device_drafts)) fail(Exit::internal, "fake: no device");
    if (chunk.ids.empty() && (slot.id < 0 || slot.position != chunk.first_position)) {
      fail(Exit::internal, "fake: slot %d has no id for position %lld", chunk.slot, wide(chunk.first_position));
    }
    if (std::ssize(chunk.targets) > rows_of(chunk)) fail(Exit::internal, "fake: more targets than rows");
    for (const std::int32_t id : chunk.targets) {
      if (id < 0 || id >= sizes_.vocab_size) fail(Exit::internal, "fake: target %d", id);
    }
  }

  // Appended pages belong to one chunk, in this step and in those that are not collected.
  void check_pages(std::span<const Chunk> work) {
    const std::int64_t oldest_in_flight = step_ - std::ssize(flights_);
    for (const Chunk& chunk : work) {
      for (std::size_t i = first_appended(chunk); i < chunk.pages.size(); ++i) {
        const Use& use = used_[static_cast<std::size_t>(chunk.pages[i])];
        if (use.step >= oldest_in_flight && use.slot != chunk.slot) {
          fail(Exit::internal, "fake: page %d is appended to while slot %d uses it", chunk.pages[i], use.slot);
        }
      }
    }
    for (const Chunk& chunk : work) {
      const std::int64_t first = first_read(chunk.first_position) / sizes_.page_size;
      for (const std::int32_t page : chunk.pages.subspan(static_cast<std::size_t>(first))) {
        Use& use = used_[static_cast<std::size_t>(page)];
        const bool others = use.step >= oldest_in_flight && use.slot != chunk.slot;
        use = {step_, others ? -2 : chunk.slot};
      }
    }
    for (const Chunk& chunk : work) {
      for (std::size_t i = first_appended(chunk); i < chunk.pages.size(); ++i) {
        if (used_[static_cast<std::size_t>(chunk.pages[i])].slot == chunk.slot) continue;
        fail(Exit::internal, "fake: page %d is appended to and in another chunk", chunk.pages[i]);
      }
    }
  }
  std::size_t first_appended(const Chunk& chunk) const {
    return static_cast<std::size_t>(chunk.first_position / sizes_.page_size);
  }

  ChunkResult run(const Chunk& chunk) {
    ChunkResult result;
    Slot& slot = slots_[static_cast<std::size_t>(chunk.slot)];
    std::uint64_t state = 0;
    bool poisoned = false;
    std::vector<VerifiedRow> verified;
    for (std::int64_t row = 0; row < rows_of(chunk); ++row) {
      const std::int64_t position = chunk.first_position + row;
      read_before(chunk, position, state, poisoned);
      const std::int64_t draft = row - (rows_of(chunk) - chunk.drafts);
      const bool on_device = chunk.drafts_on_device && draft >= 0;
      const std::int32_t id = chunk.ids.empty() ? slot.id
                              : on_device       ? device_ids_[static_cast<std::size_t>(draft)]
                                                : chunk.ids[static_cast<std::size_t>(row)];
      state = state_after(state, id);
      poisoned = poisoned || id == kPoison || position >= sizes_.finite_positions;
      cell(chunk, position) = {id, state, poisoned};
      if (row < std::ssize(chunk.targets)) {
        result.targets.push_back(scored(chunk, state, chunk.targets[static_cast<std::size_t>(row)]));
        if (poisoned) result.targets.back().logprob = std::numeric_limits<float>::quiet_NaN();
      }
      if (chunk.drafts == 0 || row + 1 + chunk.drafts < rows_of(chunk)) continue;
      VerifiedRow& sampled = verified.emplace_back();
      if (poisoned) {
        sampled.error = SampleError::not_a_number;
      } else {
        sampled.id = scored(chunk, state, sampled_here(state, chunk, verified.size() - 1, position + 1, slot.id));
      }
    }
    if (chunk.sampling == nullptr) return result;
    if (chunk.drafts > 0) {
      const auto drafts = static_cast<std::size_t>(chunk.drafts);
      const std::span<const std::int32_t> on_device(device_ids_);
      accept_drafts(chunk.drafts_on_device ? on_device.first(drafts) : chunk.ids.last(drafts), verified, result);
      slot = {};
      return result;
    }
    slot.position = chunk.first_position + rows_of(chunk);
    if (poisoned) {
      result.error = SampleError::not_a_number;
      slot.id = 0;
      return result;
    }
    slot.id = sampled_here(state, chunk, 0, slot.position, slot.id);
    result.sampled = scored(chunk, state, slot.id);
    return result;
  }

  // From sampled row i of the chunk. `last`: what was sampled last in its slot.
  std::int32_t sampled_here(std::uint64_t state, const Chunk& chunk, std::size_t i, std::int64_t position,
                            std::int32_t last) const {
    const std::uint64_t seed = chunk.sampling->seed;
    if (!chunk.logit_rows.empty()) {
      std::vector<float> logits = logits_after(state, seed, position, sizes_.vocab_size);
      apply(chunk.logit_rows[i], last, logits);
      return static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin());
    }
    const std::int32_t id = sampled_from(state, seed, position, sizes_.vocab_size);
    if (sizes_.wrong_of == 0 || state % static_cast<std::uint64_t>(sizes_.wrong_of) != 0) return id;
    const std::int32_t other = (id + 1) % static_cast<std::int32_t>(sizes_.vocab_size);
    return other == kPoison ? kPoison + 1 : other;
  }

  // The first position that the row at `position` reads.
  std::int64_t first_read(std::int64_t position) const {
    const std::int64_t before = !sizes_.read_everything ? 1 : sizes_.window > 0 ? sizes_.window - 1 : position;
    return std::max<std::int64_t>(position - before, 0);
  }

  void read_before(const Chunk& chunk, std::int64_t position, std::uint64_t& state, bool& poisoned) {
    state = 0;
    poisoned = false;
    const std::int64_t first = first_read(position);
    for (std::int64_t i = first; i < position; ++i) {
      const Cell& before = cell(chunk, i);
      if (before.id < 0) fail(Exit::internal, "fake: position %lld was not written", wide(i));
      state = i > 0 && i == first ? before.state : state_after(state, before.id);
      if (before.state != state) fail(Exit::internal, "fake: position %lld is another sequence's", wide(i));
      poisoned = before.poisoned;
    }
  }

  static ScoredId scored(const Chunk& chunk, std::uint64_t state, std::int32_t id) {
    ScoredId result{id, logprob_from(state, id), {}};
    for (std::int32_t i = 0; i < chunk.alternatives; ++i) result.alternatives.push_back({i, logprob_from(state, i)});
    return result;
  }

  const PagedFakeSizes sizes_;
  ModelConfig config_;
  std::vector<Cell> cells_;
  std::vector<Use> used_;
  std::vector<Slot> slots_;
  std::deque<std::vector<ChunkResult>> flights_;
  std::vector<ChunkResult> collected_;
  std::int64_t step_ = 0;
};

}  // namespace weft
