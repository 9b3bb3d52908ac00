#include "llmc/infer/engine.h"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/infer/scheduler.h"

namespace weft {

namespace {

using Clock = std::chrono::steady_clock;

struct Request {
  Request(PagePool& pool, RequestId id, EngineRequest asked, std::shared_ptr<RequestListener> to)
      : sequence(pool, id), request(std::move(asked)), listener(std::move(to)) {}

  Sequence sequence;
  EngineRequest request;  // the prompt is moved into sequence.ids
  std::shared_ptr<RequestListener> listener;
  bool cut = false;              // max_ids is less than was asked for
  std::vector<ScoredId> scored;  // of the prompt, by row
  bool prompt_told = false;
};

// The longest sequence that requests are cut to. A model may say less than it was made for, because its pages hold no more; that
// is a reason to refuse a request, with the number that would fit, and not to cut it.
std::int64_t longest_sequence(const InferenceModel& model) {
  const bool pages_limit = model.max_positions() >= model.num_pages() * model.page_size();
  return pages_limit ? std::max(model.config().max_positions, model.max_positions()) : model.max_positions();
}

// What came in between two steps.
struct Command {
  RequestId id;
  std::unique_ptr<Request> request;  // null: cancel
};

// A submitted step: one entry a span.
struct FlightSpan {
  Request* request;
  std::int64_t first_target = 0, targets = 0;  // rows
  bool sampled = false;
};
using Flight = std::vector<FlightSpan>;

void check_options(const InferenceModel& model, const EngineOptions& options) {
  const auto check = [](const char* name, std::int64_t value, std::int64_t high) {
    if (value >= 1 && value <= high) return;
    fail(Exit::usage, "%s: got %lld, expected 1 to %lld", name, static_cast<long long>(value),
         static_cast<long long>(high));
  };
  check("sequences at once", options.max_running, model.slots());
  check("rows of a step", options.rows_per_step, model.max_rows());
  check("rows of prompts beside decoding", options.prompt_rows, std::numeric_limits<std::int64_t>::max());
}

}  // namespace

class Engine::State {
 public:
  State(InferenceModel& model, const EngineOptions& options)
      : model_(model),
        longest_(longest_sequence(model)),
        pool_(model.num_pages(), model.page_size()),
        scheduler_(pool_, {options.max_running, options.rows_per_step, options.prompt_rows, model.slots(),
                           options.share_prefixes}) {
    update_statistics();
  }

  std::string refusal(std::int64_t prompt_ids, std::int64_t max_ids) const;
  RequestId submit(EngineRequest asked, std::shared_ptr<RequestListener> listener);
  void cancel(RequestId id);
  bool step();
  void wait(Clock::time_point until);
  EngineStatistics statistics() const;
  std::string inconsistency() const { return pool_.inconsistency(); }

 private:
  std::int64_t max_ids_of(std::int64_t prompt_ids, std::int64_t max_ids) const {
    return std::min(max_ids, longest_ - prompt_ids);
  }
  void check(const EngineRequest& asked) const;

  void take_commands();
  void end_late_requests();
  void submit_step(std::span<const PlannedSpan> plan);
  void collect_step();
  void take_result(const FlightSpan& span, const SpanResult& result);
  bool take_scores(const FlightSpan& span, const SpanResult& result);
  void take_id(Request& request, const ScoredId& id);
  void end(Request& request, RequestEnd reason);
  bool update_statistics();

  InferenceModel& model_;
  const std::int64_t longest_;
  PagePool pool_;
  Scheduler scheduler_;
  std::map<RequestId, std::unique_ptr<Request>> requests_;       // waiting, running, or ended with rows in flight
  std::set<std::pair<Clock::time_point, RequestId>> deadlines_;  // of requests that have not ended
  std::deque<Flight> flights_;                                   // submitted and not collected, the oldest first
  std::vector<Flight> unused_flights_;                           // their memory, for later steps
  std::vector<Span> spans_;                                      // of the step that is submitted
  std::int64_t steps_ = 0, rows_ = 0, generated_ids_ = 0;

  // Shared with other threads.
  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<Command> commands_;
  RequestId last_id_ = 0;
  EngineStatistics statistics_;
  bool busy_ = false;  // requests_ is not empty
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
  const std::string reason = refusal(std::ssize(asked.prompt), asked.max_ids);
  if (!reason.empty()) fail(Exit::usage, "%s", reason.c_str());
}

RequestId Engine::State::submit(EngineRequest asked, std::shared_ptr<RequestListener> listener) {
  check(asked);
  const std::lock_guard lock(mutex_);
  const RequestId id = ++last_id_;
  auto request = std::make_unique<Request>(pool_, id, std::move(asked), std::move(listener));
  Sequence& s = request->sequence;
  s.ids = std::move(request->request.prompt);
  s.prompt_size = std::ssize(s.ids);
  s.max_ids = max_ids_of(s.prompt_size, request->request.max_ids);
  request->cut = s.max_ids < request->request.max_ids;
  if (request->request.score_prompt) s.rows_to_score = s.prompt_size - 1;
  commands_.push_back({id, std::move(request)});
  arrived_.notify_all();
  return id;
}

void Engine::State::cancel(RequestId id) {
  const std::lock_guard lock(mutex_);
  commands_.push_back({id, nullptr});
  arrived_.notify_all();
}

bool Engine::State::step() {
  take_commands();
  end_late_requests();
  const std::span<const PlannedSpan> plan = scheduler_.plan();
  if (!plan.empty()) submit_step(plan);
  const bool full = std::ssize(flights_) >= model_.depth();
  if (full || (plan.empty() && !flights_.empty())) collect_step();
  return update_statistics();
}

void Engine::State::take_commands() {
  std::vector<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (Command& command : commands) {
    if (command.request == nullptr) {
      const auto found = requests_.find(command.id);
      if (found != requests_.end()) end(*found->second, RequestEnd::cancelled);
      continue;
    }
    Request& request = *command.request;
    requests_.emplace(command.id, std::move(command.request));
    if (request.request.deadline.has_value()) deadlines_.emplace(*request.request.deadline, command.id);
    scheduler_.add(request.sequence);
    if (request.sequence.known_rows() > 0) continue;
    request.listener->on_prompt({});  // a prompt of one id is scored: there is nothing to compute
    end(request, RequestEnd::max_ids);
  }
}

void Engine::State::end_late_requests() {
  if (deadlines_.empty()) return;
  const Clock::time_point now = Clock::now();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    end(*requests_.at(deadlines_.begin()->second), RequestEnd::deadline);
  }
}

void Engine::State::submit_step(std::span<const PlannedSpan> plan) {
  Flight flight;
  if (!unused_flights_.empty()) {
    flight = std::move(unused_flights_.back());
    unused_flights_.pop_back();
  }
  flight.clear();
  spans_.clear();
  for (const PlannedSpan& planned : plan) {
    Sequence& s = *planned.sequence;
    Request& request = *requests_.at(s.order);
    const auto first = static_cast<std::size_t>(planned.first_position);
    const auto rows = static_cast<std::size_t>(planned.rows);
    Span span;
    span.pages = s.table.pages();
    span.first_position = planned.first_position;
    if (!planned.id_on_device) span.ids = std::span(s.ids).subspan(first, rows);
    span.slot = s.slot;
    if (planned.sample) span.sampling = &request.request.sampling;
    span.alternatives = request.request.alternatives;
    // Row i gives the log-probability of the id after it. Rows that are computed again after a preemption are not scored
    // again once all scores are there.
    const std::int64_t rows_to_score = s.scored_rows < s.rows_to_score ? s.rows_to_score : 0;
    const std::int64_t targets =
        std::min(planned.first_position + planned.rows, rows_to_score) - planned.first_position;
    if (targets > 0) span.targets = std::span(s.ids).subspan(first + 1, static_cast<std::size_t>(targets));
    spans_.push_back(span);
    flight.push_back({&request, planned.first_position, std::max<std::int64_t>(targets, 0), planned.sample});
    rows_ += planned.rows;
  }
  model_.submit(spans_);
  ++steps_;
  flights_.push_back(std::move(flight));
}

void Engine::State::collect_step() {
  const std::span<const SpanResult> results = model_.collect();
  Flight flight = std::move(flights_.front());
  flights_.pop_front();
  if (results.size() != flight.size()) fail(Exit::internal, "engine: a step has another number of results than spans");
  for (std::size_t i = 0; i < flight.size(); ++i) {
    Request& request = *flight[i].request;
    if (!request.sequence.ended) take_result(flight[i], results[i]);
    scheduler_.collected(request.sequence);
    if (Scheduler::released(request.sequence)) requests_.erase(request.sequence.order);
  }
  unused_flights_.push_back(std::move(flight));
}

void Engine::State::take_result(const FlightSpan& span, const SpanResult& result) {
  Request& request = *span.request;
  const Sequence& s = request.sequence;
  if (result.error != SampleError::none || !take_scores(span, result)) return end(request, RequestEnd::not_finite);
  if (s.max_ids == 0 && request.prompt_told) return end(request, RequestEnd::max_ids);
  if (!span.sampled) return;
  if (!result.sampled.has_value()) fail(Exit::internal, "engine: a step has no id where one was asked for");
  take_id(request, *result.sampled);
}

// False if a log-probability is not a number.
bool Engine::State::take_scores(const FlightSpan& span, const SpanResult& result) {
  Request& request = *span.request;
  Sequence& s = request.sequence;
  if (std::ssize(result.targets) != span.targets) {
    fail(Exit::internal, "engine: a step has another number of log-probabilities than targets");
  }
  for (const ScoredId& target : result.targets) {
    if (std::isnan(target.logprob)) return false;
  }
  if (span.targets > 0) {
    request.scored.resize(static_cast<std::size_t>(s.rows_to_score));
    std::ranges::copy(result.targets, request.scored.begin() + span.first_target);
    s.scored_rows = std::max(s.scored_rows, span.first_target + span.targets);
  }
  if (request.request.score_prompt && !request.prompt_told && s.scored_rows == s.rows_to_score) {
    request.prompt_told = true;
    request.listener->on_prompt(request.scored);
    request.scored = {};
  }
  return true;
}

void Engine::State::take_id(Request& request, const ScoredId& id) {
  Sequence& s = request.sequence;
  s.ids.push_back(id.id);
  ++generated_ids_;
  const bool more = request.listener->on_id(id);
  const std::vector<std::int32_t>& stop_ids = request.request.stop_ids;
  if (std::ranges::find(stop_ids, id.id) != stop_ids.end()) {
    end(request, RequestEnd::stop_id);
  } else if (!more) {
    end(request, RequestEnd::listener);
  } else if (std::ssize(s.ids) - s.prompt_size == s.max_ids) {
    end(request, request.cut ? RequestEnd::full : RequestEnd::max_ids);
  }
}

// Erases the request unless a submitted step has rows of it.
void Engine::State::end(Request& request, RequestEnd reason) {
  if (request.sequence.ended) return;
  scheduler_.end(request.sequence, reason == RequestEnd::not_finite);
  if (request.request.deadline.has_value()) deadlines_.erase({*request.request.deadline, request.sequence.order});
  const std::shared_ptr<RequestListener> listener = std::move(request.listener);
  if (Scheduler::released(request.sequence)) requests_.erase(request.sequence.order);
  listener->on_end(reason);
}

bool Engine::State::update_statistics() {
  const std::lock_guard lock(mutex_);
  statistics_.running = scheduler_.running();
  statistics_.waiting = scheduler_.waiting();
  statistics_.pages = pool_.num_pages();
  statistics_.pages_in_use = pool_.in_use();
  statistics_.pages_cached = pool_.cached();
  statistics_.steps = steps_;
  statistics_.rows = rows_;
  statistics_.prompt_ids = scheduler_.prompt_ids();
  statistics_.generated_ids = generated_ids_;
  statistics_.prefix_ids = scheduler_.prefix_ids();
  statistics_.preemptions = scheduler_.preemptions();
  busy_ = !requests_.empty();
  return busy_ || !commands_.empty();
}

void Engine::State::wait(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  arrived_.wait_until(lock, until, [&] { return busy_ || !commands_.empty(); });
}

EngineStatistics Engine::State::statistics() const {
  const std::lock_guard lock(mutex_);
  EngineStatistics now = statistics_;
  for (const Command& command : commands_) now.waiting += command.request != nullptr;
  return now;
}

Engine::Engine(InferenceModel& model, const EngineOptions& options) {
  check_options(model, options);
  state_ = std::make_unique<State>(model, options);
}
Engine::~Engine() = default;

std::string Engine::refusal(std::int64_t prompt_ids, std::int64_t max_ids) const {
  return state_->refusal(prompt_ids, max_ids);
}
RequestId Engine::submit(EngineRequest request, std::shared_ptr<RequestListener> listener) {
  return state_->submit(std::move(request), std::move(listener));
}
void Engine::cancel(RequestId id) {
  state_->cancel(id);
}
bool Engine::step() {
  return state_->step();
}
void Engine::wait(std::chrono::steady_clock::time_point until) {
  state_->wait(until);
}
EngineStatistics Engine::statistics() const {
  return state_->statistics();
}
std::string Engine::inconsistency() const {
  return state_->inconsistency();
}

}  // namespace weft
