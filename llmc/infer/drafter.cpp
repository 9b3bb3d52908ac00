#include "llmc/infer/drafter.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/base/philox.h"

namespace weft {

static_assert(kMostDrafted <= kDeviceDrafts);

Drafter::Drafter(const DraftOptions& options, InferenceModel& model, const Scheduler& scheduler)
    : options_(options), verifier_(model), scheduler_(scheduler) {
  if (options.model != nullptr) {
    model_.emplace(*options.model, model.config().vocab_size);
    longest_ = options.model->max_positions();
  }
  if (options.sequence != nullptr) {
    sequence_.emplace(*options.sequence, model.config().vocab_size);
    longest_ = options.sequence->capacity();
  }
}

// ---- how many -------------------------------------------------------------------------------------------------------

// Until the steps of both models are measured, a draft costs as much as the share of bytes that the draft model reads.
DraftCosts Drafter::costs_now() const {
  if (options_.draft_cost > 0) return {options_.row_cost, has_model() ? options_.draft_cost : 0};
  const StepCosts::Line line = step_costs_.line(options_.row_cost);
  if (!has_model()) return {line.further_row, 0};
  const double step = model_ ? model_->step_seconds() : sequence_->step_seconds();
  if (step > 0 && line.one_row > 0) return {line.further_row, step / line.one_row};
  const std::uint64_t own = model_ ? options_.model->bytes_per_step(1, 0) : options_.sequence->bytes_per_token(0),
                      all = verifier_.bytes_per_step(1, 0);
  return {line.further_row, all > 0 ? static_cast<double>(own) / static_cast<double>(all) : 0};
}

std::int64_t Drafter::length(const RequestState& request) const {
  return request.drafting.length.next(has_model() ? kMostDrafted : options_.lookup, scheduler_.running(), costs_);
}

// At most as many as can still be generated besides the id that a verification samples itself.
std::int64_t Drafter::count(const RequestState& request) const {
  return std::min(length(request), request.max_ids - request.sampled - 1);
}

// Whether a sequence that generates is to get drafts as soon as its last id is known.
bool Drafter::wants(const RequestState& s) const {
  const bool generates = s.id_on_device || s.id_on_host;
  if (!generates || std::ssize(s.ids) == s.prompt_size || s.max_ids - s.sampled < 2) return false;
  if (std::ssize(s.ids) > longest_) return false;  // the draft model has no position for it, so nothing is waited for
  return length(s) > 0;
}

// ---- drafts ---------------------------------------------------------------------------------------------------------

// With lookup, steps are only collected if the ids known so far have a match.
bool Drafter::waits_for_ids() {
  const std::span<Sequence* const> running = scheduler_.running_sequences();
  costs_ = costs_now();
  for (Sequence* s : running) s->drafts.clear();
  return std::ranges::any_of(running, [&](Sequence* s) {
    RequestState& request = request_of(*s);
    return s->in_flight() && wants(request) && (has_model() || !looked_up(request).empty());
  });
}

void Drafter::draft() {
  if (model_) return draft_with_model();
  for (Sequence* s : scheduler_.running_sequences()) {
    RequestState& request = request_of(*s);
    if (s->in_flight() || !wants(request)) continue;
    if (sequence_) {
      draft_with_sequence(request);
    } else {
      s->drafts = looked_up(request);
    }
  }
}

void Drafter::draft_with_sequence(RequestState& request) {
  // Rules need the drafts on the host.
  const DeviceDrafts place = request.rules ? DeviceDrafts{} : verifier_.device_drafts();
  const std::int64_t started = sequence_->start(request.ids, request.asked.sampling, count(request), place);
  // The step is submitted while the device draws the drafts. The zeros keep their places; the step does not read them.
  request.drafts.assign(static_cast<std::size_t>(started), 0);
  on_device_ = place.ids != nullptr && started > 0;
  if (on_device_) return;
  const std::span<const std::int32_t> drafts = sequence_->finish();
  request.drafts.assign(drafts.begin(), drafts.end());
}

std::span<const std::int32_t> Drafter::finish() {
  on_device_ = false;
  return sequence_->finish();
}

// What Lookup finds in the sequence's own ids. The result is kept until there is another id.
const std::vector<std::int32_t>& Drafter::looked_up(RequestState& request) {
  RequestDrafts& own = request.drafting;
  if (own.found_after != std::ssize(request.ids)) {
    const std::span<const std::int32_t> found = own.lookup.find(request.ids, length(request));
    own.found.assign(found.begin(), found.end());
    own.found_after = std::ssize(request.ids);
  }
  return own.found;
}

void Drafter::draft_with_model() {
  jobs_.clear();
  for (Sequence* s : scheduler_.running_sequences()) {
    if (s->max_ids < 2) continue;
    RequestState& request = request_of(*s);
    const bool generates = std::ssize(s->ids) > s->prompt_size, drafts = !s->in_flight() && wants(request);
    if (generates && !drafts) continue;
    std::optional<DraftModel::State>& state = request.drafting.state;
    if (!state.has_value()) {
      state.emplace(model_->pool());
      holders_.push_back(&request);
    }
    jobs_.push_back({&*state, s->ids, &request.asked.sampling, drafts ? count(request) : 0, &s->drafts});
  }
  model_->draft(jobs_);
}

void Drafter::release(RequestState& request) {
  if (!request.drafting.state.has_value()) return;
  model_->release(*request.drafting.state);
  request.drafting.state.reset();
  std::erase(holders_, &request);
}

void Drafter::release_preempted() {
  for (std::size_t i = holders_.size(); i-- > 0;) {
    if (!holders_[i]->running) release(*holders_[i]);
  }
}

// ---- verifications --------------------------------------------------------------------------------------------------

// Under DraftOptions::acceptance, how many count as right is a function of the request and the position.
std::vector<ScoredId> Drafter::accepted(const RequestState& request, std::int64_t drafts,
                                        const ChunkResult& result) const {
  if (!options_.acceptance.has_value()) return result.accepted;
  std::vector<ScoredId> ids;
  for (std::int64_t i = 0; i < drafts; ++i) {
    const PhiloxWords words = philox(request.id, static_cast<std::uint64_t>(std::ssize(request.ids) + i),
                                     static_cast<std::uint64_t>(RandomStream::sampling));
    if (static_cast<double>(uniform01(words.word[0])) >= *options_.acceptance) break;
    ids.push_back({request.drafts[ids.size()], 0, {}});
  }
  return ids;
}

void Drafter::verified(RequestState& request, std::int64_t drafts, std::int64_t right, std::int64_t ids) {
  request.drafting.length.verified(drafts, right);
  ++counts_.chunks;
  ++counts_.verifications;
  counts_.ids += ids;
  counts_.drafted += drafts;
  counts_.accepted += right;
}

void Drafter::generated_plainly(RequestState& request) {
  ++counts_.chunks;
  ++counts_.ids;
  if (any() && length(request) == 0) request.drafting.length.generated_plainly();
}

// ---- what is held ---------------------------------------------------------------------------------------------------

std::string Drafter::held_when_idle() const {
  if (!holders_.empty()) return format("%zu requests have drafts", holders_.size());
  if (!model_) return "";
  const auto pages = static_cast<long long>(model_->pages_in_use()),
             slots = static_cast<long long>(model_->slots_in_use());
  if (pages > 0) return format("%lld pages of drafts are in use", pages);
  if (slots > 0) return format("%lld slots of drafts are taken", slots);
  return "";
}

std::string Drafter::inconsistency(std::int64_t slots) const {
  if (!model_) return "";
  if (slots != model_->slots_in_use()) return "draft model: a slot is held by no request";
  const std::string of_pages = model_->inconsistency();
  return of_pages.empty() ? "" : "draft model: " + of_pages;
}

}  // namespace weft
