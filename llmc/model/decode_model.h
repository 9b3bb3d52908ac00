// A model that generates text: one interface, implemented on the CPU and on the GPU.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/logit_rules.h"
#include "llmc/base/sampling.h"
#include "llmc/model/config.h"
#include "llmc/model/draft_counts.h"
#include "llmc/model/inference_model.h"

namespace weft {

// What generate_ids() needs besides the prompt.
struct GenerationRequest {
  SamplingPlan sampling;
  std::vector<std::int32_t> stop_ids = {};
  std::int64_t max_ids = 0;
  LogitRuleOptions rules = {};
  std::vector<std::int32_t> earlier =
      {};  // in the cache before the prompt, as far as repetition_penalty is to count them
};

// The id that wait() returns, for DecodeModel::drafted(): nothing where it throws Exit::numeric.
template <typename Wait>
std::optional<std::int32_t> drafted_id(const Wait& wait) {
  try {
    return wait();
  } catch (const Error& error) {
    if (error.code() != Exit::numeric) throw;
    return std::nullopt;
  }
}

class DecodeModel {
 public:
  virtual ~DecodeModel() = default;

  virtual const ModelConfig& config() const = 0;
  virtual std::vector<MemoryLine> memory() const = 0;
  // Bytes that one decode step at `context` positions must read: weights, one embedding row, K/V cache.
  virtual std::uint64_t bytes_per_token(std::int64_t context) const = 0;

  virtual std::int64_t capacity() const = 0;  // positions the KV cache holds
  virtual std::int64_t length() const = 0;    // positions it holds now
  // Sets length() to 0. Also to be called when the weights have been changed between two sequences: it waits until the
  // change is complete.
  virtual void reset() = 0;

  // Appends `ids`: at least one, length() + ids.size() <= capacity(), otherwise Exit::internal. The caller has checked
  // that every id is in [0, vocab_size). Returns the fp32 logits after the last one, [vocab_size]; valid until the next
  // call.
  virtual std::span<const float> prefill(std::span<const std::int32_t> ids) = 0;
  // The same for one id: the step that a decode kernel makes fast.
  virtual std::span<const float> decode(std::int32_t id) = 0;

  // Whether the model can pick tokens itself, without its logits ever leaving the device: generate_ids().
  virtual bool samples() const { return false; }
  // Appends `prompt` as prefill() does, then generates. Calls `on_id` with each id in order, as soon as the host has it;
  // by then the model may already compute later ones. Ends after a stop id, after request.max_ids ids (1 ..
  // capacity() - length() - prompt.size()), or when on_id returns false; then the cache holds the prompt and every id
  // that on_id got but the last. Each id is the one that Sampler picks from the same logits. Logits that are not finite:
  // Exit::numeric.
  virtual void generate_ids(std::span<const std::int32_t> /*prompt*/, const GenerationRequest& /*request*/,
                            const std::function<bool(std::int32_t)>& /*on_id*/) {
    fail(Exit::internal, "this model does not sample");
  }
  // When the id that on_id is being called with was sampled, in seconds since any moment: by the clock of the device that
  // computed it where that has one, otherwise now.
  virtual double sampled_seconds() const { return in_seconds(std::chrono::steady_clock::now().time_since_epoch()); }

  // Whether the model can draft for another one: start_draft().
  virtual bool can_draft() const { return false; }
  // Cuts the sequence to its first `kept` positions, appends `ids` (at least one) and samples `count` (at least one)
  // further ids. All but the last of these are appended too, so the sequence then has kept + ids.size() + count - 1 <=
  // capacity() positions. Returns before the ids are sampled. The caller has checked `ids`. Id i is sampled for
  // position kept + ids.size() + i and, where `to` is given, also written to to.ids[i].
  virtual void start_draft(std::int64_t /*kept*/, std::span<const std::int32_t> /*ids*/, std::int64_t /*count*/,
                           const SamplingPlan& /*sampling*/, const DeviceDrafts& /*to*/) {
    fail(Exit::internal, "this model does not draft");
  }
  // Waits for id i of the draft. Nothing, for this and all later ids, if its logits are not finite.
  virtual std::optional<std::int32_t> drafted(std::int64_t /*i*/) { return std::nullopt; }

  // Counts for the last generate_ids(); nothing if the model does not draft.
  virtual std::optional<DraftCounts> draft_counts() const { return std::nullopt; }

  // For measurements: decodes `id` as decode() does and returns a table of when its phases ended. A model that cannot
  // measure this returns an empty text and decodes nothing.
  virtual std::string decode_timeline(std::int32_t /*id*/) { return {}; }

  // reset(), then nll[i] = -log p(ids[i + 1] | ids[0..i]) for i < ids.size() - 1: perplexity.
  virtual std::vector<double> score(std::span<const std::int32_t> ids) = 0;
  // From now on score() polls `interrupted` before each piece of the ids that it computes at once. When that returns
  // true, score() ends with the losses that it has.
  virtual void interrupt_score(std::function<bool()> interrupted) { interrupted_ = std::move(interrupted); }

  // The activation `name` (names of scripts/dump_reference.py) of the last prefill, fp32; empty if not kept.
  // Kept only after keep_activations(true).
  virtual void keep_activations(bool keep) = 0;
  virtual std::vector<float> activation(const std::string& name) = 0;
  // The same for activation("logits") alone, [ids, vocab_size], which is much faster.
  virtual void keep_logits(bool keep) { keep_activations(keep); }

 protected:
  bool score_interrupted() const { return interrupted_ && interrupted_(); }

 private:
  std::function<bool()> interrupted_;
};

}  // namespace weft
