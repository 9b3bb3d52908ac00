#include "llmc/infer/engine.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/infer/drafter.h"
#include "llmc/infer/engine_inbox.h"
#include "llmc/infer/request_state.h"
#include "llmc/infer/request_table.h"
#include "llmc/infer/scheduler.h"
#include "llmc/infer/steps_in_flight.h"

namespace weft {

namespace {

using Clock = std::chrono::steady_clock;

// Requests for more are cut to this many positions. max_positions() may be lower than what the model was
// made for, because its pages hold no more: then a request that does not fit is refused, with the number
// that would, instead of being cut.
std::int64_t longest_sequence(const InferenceModel& model) {
  const bool pages_limit = model.max_positions() >= model.num_pages() * model.page_size();
  return pages_limit ? std::max(model.config().max_positions, model.max_positions()) : model.max_positions();
}

void check_options(const InferenceModel& model, const EngineOptions& options) {
  const auto check = [](const char* name, std::int64_t value, std::int64_t high) {
    if (value >= 1 && value <= high) return;
    fail(Exit::usage, "%s: got %lld, expected 1 to %lld", name, static_cast<long long>(value),
         static_cast<long long>(high));
  };
  check("sequences at once", options.max_running, model.slots());
  check("rows of a step", options.rows_per_step, model.max_rows());
  check("rows of prompts beside decoding", options.prompt_rows, std::numeric_limits<std::int64_t>::max());
  const DraftOptions& drafts = options.drafts;
  if (drafts.lookup != 0) check("ids that are looked up", drafts.lookup, kMostDrafted);
  if (drafts.model != nullptr)
    check("sequences at once, of the draft model", options.max_running, drafts.model->slots());
  if ((drafts.lookup != 0) + (drafts.model != nullptr) + (drafts.sequence != nullptr) > 1)
    fail(Exit::internal, "drafts: lookup, a draft model, a draft model for one sequence: only one of them");
  if (drafts.sequence != nullptr && options.max_running != 1)
    fail(Exit::internal, "drafts: a model of one sequence for %lld", static_cast<long long>(options.max_running));
}

}  // namespace

// One step, from what came in to what goes out. Each part says in its header what it owns; here is the order of their
// work.
class Engine::State {
 public:
  State(InferenceModel& model, const EngineOptions& options)
      : model_(model),
        longest_(longest_sequence(model)),
        pool_(model.num_pages(), model.page_size()),
        scheduler_(pool_, {options.max_running, options.rows_per_step, options.prompt_rows, model.slots(),
                           options.share_prefixes, model.config().longest_window(), model.depth()}),
        drafter_(options.drafts, model, scheduler_),
        steps_(model, options.rows_per_step, options.queued_seconds),
        requests_(scheduler_, drafter_) {
    publish_statistics();
  }

  std::string refusal(std::int64_t prompt_ids, std::int64_t max_ids) const;
  std::int64_t most_ids(std::int64_t prompt_ids) const {
    return std::min(longest_, pool_.num_pages() * pool_.page_size() + 1) - prompt_ids;
  }
  std::unique_ptr<RequestState> admitted(EngineRequest asked, std::shared_ptr<RequestListener> listener);
  bool step();
  std::string inconsistency() const;

 private:
  std::int64_t max_ids_of(std::int64_t prompt_ids, std::int64_t max_ids) const {
    return std::min(max_ids, longest_ - prompt_ids);
  }
  void check(const EngineRequest& asked) const;

  void take_commands();
  void collect_step();
  void collect_all() {
    while (!steps_.empty()) collect_step();
  }
  void take_result(const FlightChunk& chunk, const ChunkResult& result);
  void verify(const FlightChunk& chunk, const ChunkResult& result);
  std::string held_when_idle() const;
  bool publish_statistics();

  InferenceModel& model_;
  const std::int64_t longest_;
  PagePool pool_;
  Scheduler scheduler_;
  Drafter drafter_;
  StepsInFlight steps_;
  RequestTable requests_;

 public:
  EngineInbox inbox;  // last: what waits in it has block tables of the pool
};

std::string Engine::State::refusal(std::int64_t prompt_ids, std::int64_t max_ids) const {
  const auto wide = [](std::int64_t value) { return static_cast<long long>(value); };
  if (prompt_ids >= longest_ && max_ids > 0) {
    return format("the prompt has %lld ids, and this model takes at most %lld and a generated one", wide(prompt_ids),
                  wide(longest_ - 1));
  }
  if (prompt_ids > longest_) {
    return format("the prompt has %lld ids, and this model takes at most %lld", wide(prompt_ids), wide(longest_));
  }
  const std::int64_t room = pool_.num_pages() * pool_.page_size();
  const std::int64_t rows = prompt_ids + max_ids_of(prompt_ids, max_ids) - 1;
  if (rows <= room) return "";
  const std::string needs = format(
      "the request needs memory for the keys and values of %lld positions, and there is "
      "memory for %lld",
      wide(rows), wide(room));
  if (prompt_ids > room) return needs + format(". Its prompt alone has %lld ids", wide(prompt_ids));
  return needs + format(". After this prompt at most %lld ids can be generated", wide(room - prompt_ids + 1));
}

void Engine::State::check(const EngineRequest& asked) const {
  if (asked.prompt.empty()) fail(Exit::usage, "the prompt is empty");
  const std::int64_t vocab_size = model_.config().vocab_size;
  for (const std::int32_t id : asked.prompt) {
    if (id < 0 || id >= vocab_size) {
      fail(Exit::usage, "the prompt: got id %d, expected 0 to %lld", id, static_cast<long long>(vocab_size - 1));
    }
  }
  if (asked.max_ids < (asked.score_prompt ? 0 : 1)) {
    fail(Exit::usage, "got %lld ids to generate, expected at least 1", static_cast<long long>(asked.max_ids));
  }
  check_logit_rules(asked.rules, vocab_size, asked.sampling.vocab_limit);
  const std::string reason = refusal(std::ssize(asked.prompt), asked.max_ids);
  if (!reason.empty()) fail(Exit::usage, "%s", reason.c_str());
}

// Any thread may call it.
std::unique_ptr<RequestState> Engine::State::admitted(EngineRequest asked, std::shared_ptr<RequestListener> listener) {
  check(asked);
  const std::int64_t max_ids = max_ids_of(std::ssize(asked.prompt), asked.max_ids);
  return std::make_unique<RequestState>(pool_, std::move(asked), max_ids, std::move(listener));
}

bool Engine::State::step() {
  take_commands();
  requests_.end_late();
  if (drafter_.any()) {
    if (drafter_.waits_for_ids()) collect_all();
    drafter_.draft();
  }
  // What came in is not planned before the steps that were queued ahead of it are computed: then more may have come.
  const bool ahead = !drafter_.any() && scheduler_.can_queue_ahead();
  const std::span<const PlannedChunk> plan = steps_.full(ahead) ? std::span<const PlannedChunk>() : scheduler_.plan();
  drafter_.release_preempted();
  Clock::time_point start = Clock::now();
  if (!plan.empty()) steps_.submit(plan, drafter_.on_device());
  if (drafter_.on_device()) {
    steps_.set_drafts(drafter_.finish());
    start = Clock::now();
  }
  const bool verifies = std::ranges::any_of(plan, [](const PlannedChunk& chunk) { return chunk.drafts > 0; });
  if (verifies) {
    const bool alone = steps_.size() == 1 && !std::ranges::any_of(plan, [](const PlannedChunk& chunk) {
                         return chunk.rows > 1 + chunk.drafts;
                       });
    std::int64_t rows = 0;
    for (const PlannedChunk& chunk : plan) rows += chunk.rows;
    collect_all();
    if (alone) drafter_.took(rows, seconds_since(start));
  } else if (steps_.full(ahead) || (plan.empty() && !steps_.empty())) {
    collect_step();
  }
  if (requests_.empty()) {
    if (const std::string held = held_when_idle(); !held.empty()) {
      fail(Exit::internal, "engine: no request is left, but %s", held.c_str());
    }
  }
  return publish_statistics();
}

void Engine::State::take_commands() {
  for (EngineInbox::Command& command : inbox.take()) {
    if (command.request == nullptr) {
      requests_.cancel(command.id);
    } else {
      requests_.add(std::move(command.request));
    }
  }
}

void Engine::State::collect_step() {
  steps_.collect([this](const FlightChunk& chunk, const ChunkResult& result) {
    if (!chunk.request->ended) take_result(chunk, result);
    requests_.collected(*chunk.request);
  });
}

void Engine::State::take_result(const FlightChunk& chunk, const ChunkResult& result) {
  RequestState& request = *chunk.request;
  if (chunk.drafts > 0) return verify(chunk, result);
  if (result.error != SampleError::none || !requests_.take_scores(chunk, result)) {
    return requests_.end(request, RequestEnd::not_finite);
  }
  if (request.max_ids == 0 && request.prompt_told) return requests_.end(request, RequestEnd::max_ids);
  if (!chunk.sampled) return;
  if (!result.sampled.has_value()) fail(Exit::internal, "engine: a step has no id where one was asked for");
  drafter_.generated_plainly(request);
  requests_.take_id(request, *result.sampled);
}

// Rows of wrong drafts are taken back before a listener hears of any id, because a page is named by the ids that it
// holds.
void Engine::State::verify(const FlightChunk& chunk, const ChunkResult& result) {
  RequestState& request = *chunk.request;
  std::vector<ScoredId> ids = drafter_.accepted(request, chunk.drafts, result);
  const std::int64_t right = std::ssize(ids);
  Scheduler::verified(request, right);
  if (result.sampled.has_value()) ids.push_back(*result.sampled);
  drafter_.verified(request, chunk.drafts, right, std::ssize(ids));
  for (const ScoredId& id : ids) {
    requests_.take_id(request, id);
    if (request.ended) return;
  }
  if (result.error != SampleError::none) return requests_.end(request, RequestEnd::not_finite);
  if (!result.sampled.has_value()) fail(Exit::internal, "engine: a verification has no id");
}

std::string Engine::State::inconsistency() const {
  const std::string of_requests = requests_.inconsistency();
  return of_requests.empty() ? pool_.inconsistency() : of_requests;
}

std::string Engine::State::held_when_idle() const {
  if (const std::string held = scheduler_.held_when_idle(); !held.empty()) return held;
  if (pool_.in_use() > 0) return format("%lld pages are in use", static_cast<long long>(pool_.in_use()));
  if (!steps_.empty()) return format("%zu steps are in flight", steps_.size());
  if (requests_.deadlines() > 0) return format("%zu deadlines are set", requests_.deadlines());
  return drafter_.held_when_idle();
}

// Returns whether there is more to do.
bool Engine::State::publish_statistics() {
  return inbox.publish({.running = scheduler_.running(),
                        .waiting = scheduler_.waiting(),
                        .pages = pool_.num_pages(),
                        .pages_in_use = pool_.in_use(),
                        .pages_cached = pool_.cached(),
                        .steps = steps_.steps(),
                        .rows = steps_.rows(),
                        .prompt_ids = scheduler_.prompt_ids(),
                        .generated_ids = requests_.generated_ids(),
                        .prefix_ids = scheduler_.prefix_ids(),
                        .preemptions = scheduler_.preemptions(),
                        .drafts = drafter_.counts()},
                       !requests_.empty());
}

Engine::Engine(InferenceModel& model, const EngineOptions& options) {
  check_options(model, options);
  state_ = std::make_unique<State>(model, options);
}
Engine::~Engine() = default;

std::string Engine::refusal(std::int64_t prompt_ids, std::int64_t max_ids) const {
  return state_->refusal(prompt_ids, max_ids);
}
std::int64_t Engine::most_ids(std::int64_t prompt_ids) const {
  return state_->most_ids(prompt_ids);
}
RequestId Engine::submit(EngineRequest request, std::shared_ptr<RequestListener> listener) {
  return state_->inbox.submit(state_->admitted(std::move(request), std::move(listener)));
}
void Engine::cancel(RequestId id) {
  state_->inbox.cancel(id);
}
bool Engine::step() {
  return state_->step();
}
void Engine::wait(std::chrono::steady_clock::time_point until) {
  state_->inbox.wait(until);
}
EngineStatistics Engine::statistics() const {
  return state_->inbox.statistics();
}
std::string Engine::inconsistency() const {
  return state_->inconsistency();
}

}  // namespace weft
