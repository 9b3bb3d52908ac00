#include "llmc/infer/engine.h"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/philox.h"
#include "llmc/infer/draft_length.h"
#include "llmc/infer/draft_model.h"
#include "llmc/infer/draft_sequence.h"
#include "llmc/infer/lookup.h"
#include "llmc/infer/scheduler.h"

namespace weft {

namespace {

using Clock = std::chrono::steady_clock;

static_assert(kMostDrafted <= kDeviceDrafts);

struct Request {
  Request(PagePool& pool, RequestId id, EngineRequest asked, std::shared_ptr<RequestListener> to)
      : sequence(pool, id), request(std::move(asked)), listener(std::move(to)) {}

  Sequence sequence;
  EngineRequest request;  // the prompt is moved into sequence.ids
  std::shared_ptr<RequestListener> listener;
  bool cut = false;              // max_ids is less than was asked for
  std::vector<ScoredId> scored;  // of the prompt, by row
  bool prompt_told = false;

  DraftLength draft_length;
  Lookup lookup;
  std::vector<std::int32_t> found;  // by lookup
  std::int64_t found_after = -1;    // the number of ids after which `found` was looked up
  std::optional<DraftModel::State> draft_state;
};

// Requests for more are cut to this many positions. max_positions() may be lower than what the model was
// made for, because its pages hold no more: then a request that does not fit is refused, with the number
// that would, instead of being cut.
std::int64_t longest_sequence(const InferenceModel& model) {
  const bool pages_limit = model.max_positions() >= model.num_pages() * model.page_size();
  return pages_limit ? std::max(model.config().max_positions, model.max_positions()) : model.max_positions();
}

// A call of submit() or cancel(), for the next step() to take up.
struct Command {
  RequestId id;
  std::unique_ptr<Request> request;  // null: cancel
};

// A submitted step: one entry a span.
struct FlightSpan {
  Request* request;
  std::int64_t first_target = 0, targets = 0;  // rows
  bool sampled = false;
  std::int64_t drafts = 0;
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

class Engine::State {
 public:
  State(InferenceModel& model, const EngineOptions& options)
      : model_(model),
        longest_(longest_sequence(model)),
        pool_(model.num_pages(), model.page_size()),
        scheduler_(pool_, {options.max_running, options.rows_per_step, options.prompt_rows, model.slots(),
                           options.share_prefixes}),
        drafts_(options.drafts) {
    if (drafts_.model != nullptr) draft_model_.emplace(*drafts_.model, model.config().vocab_size);
    if (drafts_.sequence != nullptr) draft_sequence_.emplace(*drafts_.sequence, model.config().vocab_size);
    verified_ids_.reserve(static_cast<std::size_t>(options.rows_per_step));
    update_statistics();
  }

  std::string refusal(std::int64_t prompt_ids, std::int64_t max_ids) const;
  RequestId submit(EngineRequest asked, std::shared_ptr<RequestListener> listener);
  void cancel(RequestId id);
  bool step();
  void wait(Clock::time_point until);
  EngineStatistics statistics() const;
  std::string inconsistency() const;

 private:
  std::int64_t max_ids_of(std::int64_t prompt_ids, std::int64_t max_ids) const {
    return std::min(max_ids, longest_ - prompt_ids);
  }
  void check(const EngineRequest& asked) const;

  void take_commands();
  void end_late_requests();
  void draft();
  bool wants_drafts(const Request& request) const;
  const std::vector<std::int32_t>& looked_up(Request& request);
  void draft_with_model();
  void release_drafts_of_preempted();
  void finish_draft();
  DraftCosts draft_costs() const;
  bool has_model() const { return draft_model_ || draft_sequence_; }
  std::int64_t draft_length(const Request& request) const {
    return request.draft_length.next(has_model() ? kMostDrafted : drafts_.lookup, scheduler_.running(), costs_);
  }
  void submit_step(std::span<const PlannedSpan> plan);
  void collect_step();
  void verify(const FlightSpan& span, const SpanResult& result);
  std::int64_t forced_acceptance(const FlightSpan& span) const;
  void take_result(const FlightSpan& span, const SpanResult& result);
  bool take_scores(const FlightSpan& span, const SpanResult& result);
  void take_id(Request& request, const ScoredId& id);
  void end(Request& request, RequestEnd reason);
  std::string held_when_idle() const;
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
  std::vector<std::int32_t> verified_ids_;                       // of its spans with drafts
  const DraftOptions drafts_;
  std::optional<DraftModel> draft_model_;
  std::optional<DraftSequence> draft_sequence_;
  bool drafts_on_device_ = false;      // the device is still drawing them
  std::vector<Request*> drafted_for_;  // the requests that have a draft_state
  std::vector<DraftModel::Job> draft_jobs_;
  StepCosts step_costs_;  // of steps that verify and do little else
  DraftCosts costs_;      // draft_costs() at the beginning of the step
  DraftCounts draft_counts_;
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
  s.group = request->request.group;
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
  if (drafts_.any()) draft();
  const std::span<const PlannedSpan> plan = scheduler_.plan();
  release_drafts_of_preempted();
  Clock::time_point start = Clock::now();
  if (!plan.empty()) submit_step(plan);
  if (drafts_on_device_) {
    finish_draft();
    start = Clock::now();
  }
  const bool full = std::ssize(flights_) >= model_.depth();
  const bool verifies = std::ranges::any_of(plan, [](const PlannedSpan& span) { return span.drafts > 0; });
  if (verifies) {
    const bool alone = flights_.size() == 1 &&
                       !std::ranges::any_of(plan, [](const PlannedSpan& span) { return span.rows > 1 + span.drafts; });
    std::int64_t rows = 0;
    for (const PlannedSpan& span : plan) rows += span.rows;
    while (!flights_.empty()) collect_step();
    if (alone) step_costs_.add(rows, seconds_since(start));
  } else if (full || (plan.empty() && !flights_.empty())) {
    collect_step();
  }
  if (requests_.empty()) {
    if (const std::string held = held_when_idle(); !held.empty()) {
      fail(Exit::internal, "engine: no request is left, but %s", held.c_str());
    }
  }
  return update_statistics();
}

// Finds guesses for the sequences that generate. A guess needs all sampled ids, so steps in flight are collected first
// if some sequence is to get one. With lookup, they are only collected if the ids known so far have a match.
void Engine::State::draft() {
  const auto request_of = [&](const Sequence* s) -> Request& { return *requests_.at(s->id); };
  const std::span<Sequence* const> running = scheduler_.running_sequences();
  costs_ = draft_costs();
  for (Sequence* s : running) s->drafts.clear();
  const auto waits = [&](Sequence* s) {
    Request& request = request_of(s);
    return s->in_flight > 0 && wants_drafts(request) && (has_model() || !looked_up(request).empty());
  };
  if (std::ranges::any_of(running, waits)) {
    while (!flights_.empty()) collect_step();
  }
  if (draft_model_) return draft_with_model();
  for (Sequence* s : scheduler_.running_sequences()) {
    Request& request = request_of(s);
    if (s->in_flight > 0 || !wants_drafts(request)) continue;
    if (draft_sequence_) {
      const std::int64_t count = std::min(draft_length(request), s->max_ids - s->sampled - 1);
      const DeviceDrafts place = model_.device_drafts();
      const std::int64_t started = draft_sequence_->start(s->ids, request.request.sampling, count, place);
      // The step is submitted while the device draws the guesses. The zeros keep their places; the step does not read
      // them.
      s->drafts.assign(static_cast<std::size_t>(started), 0);
      drafts_on_device_ = place.ids != nullptr && started > 0;
      if (!drafts_on_device_) {
        const std::span<const std::int32_t> guesses = draft_sequence_->finish();
        s->drafts.assign(guesses.begin(), guesses.end());
      }
    } else {
      s->drafts = looked_up(request);
    }
  }
}

// Waits for the guesses that the device draws, and puts them into the places that the submitted step has for them.
void Engine::State::finish_draft() {
  drafts_on_device_ = false;
  const std::span<const std::int32_t> guesses = draft_sequence_->finish();
  if (flights_.empty() || flights_.back().front().drafts == 0) return;  // there was no room for a guess
  std::vector<std::int32_t>& drafts = flights_.back().front().request->sequence.drafts;
  for (std::size_t i = 0; i < drafts.size(); ++i) {
    verified_ids_[1 + i] = i < guesses.size() ? guesses[i] : -1;
    drafts[i] = std::max(verified_ids_[1 + i], 0);
  }
}

// The guesses that Lookup finds in the sequence's own ids. The result is kept until there is another id.
const std::vector<std::int32_t>& Engine::State::looked_up(Request& request) {
  const std::vector<std::int32_t>& ids = request.sequence.ids;
  if (request.found_after != std::ssize(ids)) {
    const std::span<const std::int32_t> found = request.lookup.find(ids, draft_length(request));
    request.found.assign(found.begin(), found.end());
    request.found_after = std::ssize(ids);
  }
  return request.found;
}

// Whether a sequence that generates is to get guesses as soon as its last id is known.
bool Engine::State::wants_drafts(const Request& request) const {
  const Sequence& s = request.sequence;
  const bool generates = s.id_on_device || s.id_on_host;
  if (!generates || std::ssize(s.ids) == s.prompt_size || s.max_ids - s.sampled < 2) return false;
  return draft_length(request) > 0;
}

void Engine::State::release_drafts_of_preempted() {
  std::erase_if(drafted_for_, [&](Request* request) {
    if (request->sequence.running) return false;
    draft_model_->release(*request->draft_state);
    request->draft_state.reset();
    return true;
  });
}

void Engine::State::draft_with_model() {
  draft_jobs_.clear();
  for (Sequence* s : scheduler_.running_sequences()) {
    if (s->max_ids < 2) continue;
    Request& request = *requests_.at(s->id);
    const bool generates = std::ssize(s->ids) > s->prompt_size, wants = s->in_flight == 0 && wants_drafts(request);
    if (generates && !wants) continue;
    if (!request.draft_state.has_value()) {
      request.draft_state.emplace(draft_model_->pool());
      drafted_for_.push_back(&request);
    }
    DraftModel::Job job{&*request.draft_state, s->ids, &request.request.sampling, 0, &s->drafts};
    if (wants) {
      job.count = std::min(draft_length(request), s->max_ids - s->sampled - 1);
    }
    draft_jobs_.push_back(job);
  }
  draft_model_->draft(draft_jobs_);
}

// Until the steps of both models are measured, a draft costs as much as the share of bytes that the draft model reads.
DraftCosts Engine::State::draft_costs() const {
  if (drafts_.draft_cost > 0) return {drafts_.row_cost, has_model() ? drafts_.draft_cost : 0};
  const StepCosts::Line line = step_costs_.line(drafts_.row_cost);
  if (!has_model()) return {line.further_row, 0};
  const double step = draft_model_ ? draft_model_->step_seconds() : draft_sequence_->step_seconds();
  if (step > 0 && line.one_row > 0) return {line.further_row, step / line.one_row};
  const std::uint64_t own = draft_model_ ? drafts_.model->bytes_per_step(1, 0) : drafts_.sequence->bytes_per_token(0),
                      all = model_.bytes_per_step(1, 0);
  return {line.further_row, all > 0 ? static_cast<double>(own) / static_cast<double>(all) : 0};
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
  verified_ids_.clear();  // spans point into it: it has room for all rows of a step, and never moves
  for (const PlannedSpan& planned : plan) {
    Sequence& s = *planned.sequence;
    Request& request = *requests_.at(s.id);
    const auto first = static_cast<std::size_t>(planned.first_position);
    const auto rows = static_cast<std::size_t>(planned.rows);
    Span span;
    span.pages = s.table.pages();
    span.first_position = planned.first_position;
    span.slot = s.slot;
    if (planned.drafts > 0) {
      const std::size_t begin = verified_ids_.size();
      verified_ids_.push_back(s.ids[first]);
      verified_ids_.insert(verified_ids_.end(), s.drafts.begin(), s.drafts.end());
      span.ids = std::span(verified_ids_).subspan(begin);
      span.drafts = planned.drafts;
      span.drafts_on_device = drafts_on_device_;
    } else if (!planned.id_on_device) {
      span.ids = std::span(s.ids).subspan(first, rows);
    }
    if (planned.sample) span.sampling = &request.request.sampling;
    span.alternatives = request.request.alternatives;
    // Row i gives the log-probability of the id after it. Rows that are computed again after a preemption are not scored
    // again once all scores are there.
    const std::int64_t rows_to_score = s.scored_rows < s.rows_to_score ? s.rows_to_score : 0;
    const std::int64_t targets =
        std::min(planned.first_position + planned.rows, rows_to_score) - planned.first_position;
    if (targets > 0) span.targets = std::span(s.ids).subspan(first + 1, static_cast<std::size_t>(targets));
    spans_.push_back(span);
    flight.push_back(
        {&request, planned.first_position, std::max<std::int64_t>(targets, 0), planned.sample, planned.drafts});
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
    if (Scheduler::released(request.sequence)) requests_.erase(request.sequence.id);
  }
  unused_flights_.push_back(std::move(flight));
}

void Engine::State::take_result(const FlightSpan& span, const SpanResult& result) {
  Request& request = *span.request;
  const Sequence& s = request.sequence;
  if (span.drafts > 0) return verify(span, result);
  if (result.error != SampleError::none || !take_scores(span, result)) return end(request, RequestEnd::not_finite);
  if (s.max_ids == 0 && request.prompt_told) return end(request, RequestEnd::max_ids);
  if (!span.sampled) return;
  if (!result.sampled.has_value()) fail(Exit::internal, "engine: a step has no id where one was asked for");
  ++draft_counts_.spans;
  ++draft_counts_.ids;
  if (drafts_.any() && draft_length(request) == 0) request.draft_length.generated_plainly();
  take_id(request, *result.sampled);
}

// Rows of wrong drafts are taken back before a listener hears of any id, because a page is named by the ids that it
// holds.
void Engine::State::verify(const FlightSpan& span, const SpanResult& result) {
  Request& request = *span.request;
  Sequence& s = request.sequence;
  std::vector<ScoredId> ids = result.accepted;
  if (drafts_.acceptance.has_value()) {
    ids.clear();
    for (std::int64_t i = forced_acceptance(span); i > 0; --i) ids.push_back({s.drafts[ids.size()], 0, {}});
  }
  const std::int64_t right = std::ssize(ids);
  Scheduler::verified(s, right);
  request.draft_length.verified(span.drafts, right);
  if (result.sampled.has_value()) ids.push_back(*result.sampled);
  ++draft_counts_.spans;
  ++draft_counts_.verifications;
  draft_counts_.ids += std::ssize(ids);
  draft_counts_.drafted += span.drafts;
  draft_counts_.accepted += right;
  for (const ScoredId& id : ids) {
    take_id(request, id);
    if (s.ended) return;
  }
  if (result.error != SampleError::none) return end(request, RequestEnd::not_finite);
  if (!result.sampled.has_value()) fail(Exit::internal, "engine: a verification has no id");
}

// How many drafts count as right under DraftOptions::acceptance: a function of the request and the position.
std::int64_t Engine::State::forced_acceptance(const FlightSpan& span) const {
  const Sequence& s = span.request->sequence;
  for (std::int64_t i = 0; i < span.drafts; ++i) {
    const PhiloxWords words = philox(s.id, static_cast<std::uint64_t>(std::ssize(s.ids) + i),
                                     static_cast<std::uint64_t>(RandomStream::sampling));
    if (static_cast<double>(uniform01(words.word[0])) >= *drafts_.acceptance) return i;
  }
  return span.drafts;
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

// Ends the request and tells its listener. Erases it unless a submitted step has rows of it.
void Engine::State::end(Request& request, RequestEnd reason) {
  if (request.sequence.ended) return;
  scheduler_.end(request.sequence, reason == RequestEnd::not_finite);
  if (request.draft_state.has_value()) {
    draft_model_->release(*request.draft_state);
    request.draft_state.reset();
    std::erase(drafted_for_, &request);
  }
  if (request.request.deadline.has_value()) deadlines_.erase({*request.request.deadline, request.sequence.id});
  const std::shared_ptr<RequestListener> listener = std::move(request.listener);
  if (Scheduler::released(request.sequence)) requests_.erase(request.sequence.id);
  listener->on_end(reason);
}

// A sequence that neither runs nor has rows in flight holds nothing.
std::string Engine::State::inconsistency() const {
  std::int64_t slots = 0, of_drafts = 0;
  for (const auto& [id, request] : requests_) {
    const Sequence& s = request->sequence;
    slots += s.slot >= 0;
    of_drafts += request->draft_state.has_value() && request->draft_state->slot >= 0;
    if (!s.running && request->draft_state.has_value()) return "drafts are held for a request that does not run";
    if (!s.running && s.in_flight == 0 && (s.slot >= 0 || !s.table.pages().empty())) {
      return "a slot or pages are held by a request that does not run";
    }
  }
  if (slots != scheduler_.slots_in_use()) return "a slot is held by no request";
  if (draft_model_ && of_drafts != draft_model_->slots_in_use()) return "draft model: a slot is held by no request";
  const std::string of_draft_pages = draft_model_ ? draft_model_->inconsistency() : "";
  return of_draft_pages.empty() ? pool_.inconsistency() : "draft model: " + of_draft_pages;
}

std::string Engine::State::held_when_idle() const {
  const auto wide = [](std::int64_t value) { return static_cast<long long>(value); };
  if (const std::string held = scheduler_.held_when_idle(); !held.empty()) return held;
  if (pool_.in_use() > 0) return format("%lld pages are in use", wide(pool_.in_use()));
  if (!flights_.empty()) return format("%zu steps are in flight", flights_.size());
  if (!deadlines_.empty()) return format("%zu deadlines are set", deadlines_.size());
  if (!drafted_for_.empty()) return format("%zu requests have drafts", drafted_for_.size());
  if (!draft_model_) return "";
  if (draft_model_->pages_in_use() > 0)
    return format("%lld pages of drafts are in use", wide(draft_model_->pages_in_use()));
  if (draft_model_->slots_in_use() > 0)
    return format("%lld slots of drafts are taken", wide(draft_model_->slots_in_use()));
  return "";
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
  statistics_.drafts = draft_counts_;
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
