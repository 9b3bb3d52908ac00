// The engine: many requests on one InferenceModel, with in-flight batching (Yu et al., "Orca", OSDI 2022). Knows no device,
// no text and no protocol.
//
// Each step has a budget of rows. First every sequence that generates gets its row, then prompts get chunks of what is left,
// or of prompt_rows if that is less: half of it the oldest, the rest those that are completed soonest. A sequence that finds
// no free page takes those of the youngest running one, which waits again and is computed anew from its ids (preemption by
// recomputation). Full pages are shared between sequences that begin with the same ids. llmc/infer/scheduler.h and page_pool.h
// say how.
//
// With EngineOptions::drafts a sequence that generates may get a row for each of several draft tokens, and all
// that are right are generated in one step (doc/speculation.md). The draft tokens are looked up in the sequence's own ids or
// come from a draft model. Each row is sampled as it would be without draft tokens, by the random number of its position, and a
// draft token counts if it is the id that was sampled in its place: so the ids are those of plain decoding at any temperature,
// not only their distribution.
//
// None of this changes a request's ids or bits: InferenceModel promises that.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/logit_rules.h"
#include "llmc/base/sampling.h"
#include "llmc/model/decode_model.h"
#include "llmc/model/draft_counts.h"
#include "llmc/model/inference_model.h"
#include "llmc/model/queue_depth.h"

namespace weft {

enum class RequestEnd {
  stop_id,     // one of stop_ids was sampled; on_id got it
  listener,    // on_id returned false
  max_ids,     // as many ids as asked for
  full,        // the longest sequence that the model can hold
  cancelled,   // by cancel()
  deadline,    // the time was up
  not_finite,  // logits that are not finite: nothing can be sampled
};

// Receives what the engine produces for one request. Called from step(), in this order: on_prompt once if asked for,
// on_id for each id, on_cached, on_end once. A request that ends early may not get all of the former. May call submit() and
// cancel(). Must not throw.
class RequestListener {
 public:
  virtual ~RequestListener() = default;
  // The log-probabilities of prompt[1], prompt[2], ...
  virtual void on_prompt(std::span<const ScoredId> /*scored*/) {}
  // Returns false to end the request: then this id was its last.
  virtual bool on_id(const ScoredId& id) = 0;
  virtual void on_cached(std::int64_t /*ids*/) {}  // of the prompt: found in the prefix cache
  virtual void on_end(RequestEnd end) = 0;
};

struct EngineRequest {
  std::vector<std::int32_t> prompt;  // at least one id, all in [0, vocab_size)
  SamplingPlan sampling;
  LogitRuleOptions rules;  // none by default
  std::vector<std::int32_t> stop_ids;
  std::int64_t max_ids = 0;        // at least 1; 0 only with score_prompt: nothing is sampled
  std::int32_t alternatives = -1;  // InferenceModel's Chunk::alternatives
  bool score_prompt = false;       // on_prompt() is wanted
  std::optional<std::chrono::steady_clock::time_point> deadline;
  // Requests of one group share places among those that run, and take turns, as one (llmc/infer/scheduler.h). 0: a group
  // of its own.
  std::uint64_t group = 0;
};

// Where draft tokens come from; nowhere by default. At most one of lookup, model and sequence.
struct DraftOptions {
  std::int64_t lookup = 0;          // 0 to kMostDrafted: at most this many ids that followed the same ids before
  InferenceModel* model = nullptr;  // drafts up to kMostDrafted ids; needs max_running slots; must outlive the engine
  DecodeModel* sequence = nullptr;  // the same for max_running = 1; its can_draft() is true
  // Cost of a further row in a step, in steps of one row: it makes draft tokens too expensive where many sequences run. Used
  // until the cost is measured.
  double row_cost = 0.01;
  // Cost of one step of `model` or `sequence`, in steps of the engine's model. 0: this and row_cost are measured;
  // otherwise both are used as given.
  double draft_cost = 0;
  // For tests and measurements: a draft token counts as right with this probability, whatever was sampled.
  std::optional<double> acceptance = {};

  bool any() const { return lookup > 0 || model != nullptr || sequence != nullptr; }
};

struct EngineOptions {
  std::int64_t max_running = 256;    // sequences at once; at most the model's slots()
  std::int64_t rows_per_step = 512;  // at most the model's max_rows()
  // The most rows of prompts in a step that also decodes, because the sequences that decode wait for the whole step.
  std::int64_t prompt_rows = 128;
  bool share_prefixes = true;
  DraftOptions drafts = {};
  // Of the device's time, in steps that are queued while every sequence that there is only decodes (QueueDepth).
  double queued_seconds = kQueuedSeconds;
};

// Counters since the engine was made, and the state of the moment.
struct EngineStatistics {
  std::int64_t running = 0, waiting = 0;
  std::int64_t pages = 0, pages_in_use = 0,
               pages_cached = 0;  // cached: not in use, kept for a prefix that may come again
  std::int64_t steps = 0, rows = 0, prompt_ids = 0, generated_ids = 0;
  std::int64_t prefix_ids = 0;  // ids of prompts that were found in shared pages
  std::int64_t preemptions = 0;
  DraftCounts drafts = {};
};

using RequestId = std::uint64_t;

class Engine {
 public:
  // `model` must outlive the engine. Options out of range: Exit::usage.
  Engine(InferenceModel& model, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Why a request of this size can never run, with the number that could; empty if it can. It needs pages for its prompt and
  // max_ids - 1 further positions, all in the pool at once; max_ids is cut to what the model was made for, so that only a
  // prompt that leaves no room for one id is refused for its length.
  std::string refusal(std::int64_t prompt_ids, std::int64_t max_ids) const;
  // The largest max_ids that refusal() does not refuse and that is not cut; less than 1 if there is none.
  std::int64_t most_ids(std::int64_t prompt_ids) const;

  // From any thread. The request waits until step() takes it up. A request that refusal() refuses is Exit::usage.
  RequestId submit(EngineRequest request, std::shared_ptr<RequestListener> listener);
  // From any thread. The request ends in the next step, unless it has ended already.
  void cancel(RequestId id);

  // From one thread: takes up what came in, submits a step, and hands out the results of the oldest one once enough steps are
  // queued. Returns whether there is more to do. When nothing is, all slots and pages are free; otherwise a bug has lost them:
  // Exit::internal says what. What the model throws passes through; the engine cannot go on then, and no listener hears of it.
  bool step();
  // Blocks until there is something to do, or until `until`.
  void wait(std::chrono::steady_clock::time_point until);
  // From any thread.
  EngineStatistics statistics() const;
  // PagePool::inconsistency(), and what a request holds in vain, for tests. From the thread that calls step().
  std::string inconsistency() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace weft
