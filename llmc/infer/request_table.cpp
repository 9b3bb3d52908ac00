#include "llmc/infer/request_table.h"

#include <algorithm>
#include <cmath>

#include "llmc/base/error.h"

namespace weft {

void RequestTable::add(std::unique_ptr<RequestState> owned) {
  RequestState& request = *owned;
  requests_.emplace(request.id, std::move(owned));
  if (request.asked.deadline.has_value()) deadlines_.emplace(*request.asked.deadline, request.id);
  scheduler_.add(request);
  if (request.known_rows() > 0) return;
  request.listener->on_prompt({});  // a prompt of one id is scored: there is nothing to compute
  end(request, RequestEnd::max_ids);
}

void RequestTable::end_late() {
  if (deadlines_.empty()) return;
  const auto now = std::chrono::steady_clock::now();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    end(*requests_.at(deadlines_.begin()->second), RequestEnd::deadline);
  }
}

bool RequestTable::take_scores(const FlightChunk& chunk, const ChunkResult& result) {
  RequestState& request = *chunk.request;
  if (std::ssize(result.targets) != chunk.targets) {
    fail(Exit::internal, "engine: a step has another number of log-probabilities than targets");
  }
  for (const ScoredId& target : result.targets) {
    if (std::isnan(target.logprob)) return false;
  }
  if (chunk.targets > 0) {
    request.scored.resize(static_cast<std::size_t>(request.rows_to_score));
    std::ranges::copy(result.targets, request.scored.begin() + chunk.first_target);
    request.scored_rows = std::max(request.scored_rows, chunk.first_target + chunk.targets);
  }
  if (request.asked.score_prompt && !request.prompt_told && request.scored_rows == request.rows_to_score) {
    request.prompt_told = true;
    request.listener->on_prompt(request.scored);
    request.scored = {};
  }
  return true;
}

void RequestTable::take_id(RequestState& request, const ScoredId& id) {
  request.ids.push_back(id.id);
  ++generated_ids_;
  const bool more = request.listener->on_id(id);
  const std::vector<std::int32_t>& stop_ids = request.asked.stop_ids;
  if (std::ranges::find(stop_ids, id.id) != stop_ids.end()) {
    end(request, RequestEnd::stop_id);
  } else if (!more) {
    end(request, RequestEnd::listener);
  } else if (std::ssize(request.ids) - request.prompt_size == request.max_ids) {
    end(request, request.cut ? RequestEnd::full : RequestEnd::max_ids);
  }
}

void RequestTable::end(RequestState& request, RequestEnd reason) {
  if (request.ended) return;
  scheduler_.end(request, reason == RequestEnd::not_finite);
  drafter_.release(request);
  if (request.asked.deadline.has_value()) deadlines_.erase({*request.asked.deadline, request.id});
  const std::shared_ptr<RequestListener> listener = std::move(request.listener);
  const std::int64_t cached = request.cached_ids;
  erase_if_released(request);
  listener->on_cached(cached);
  listener->on_end(reason);
}

// A sequence that neither runs nor has rows in flight holds nothing.
std::string RequestTable::inconsistency() const {
  std::int64_t slots = 0, of_drafts = 0;
  for (const auto& [id, request] : requests_) {
    slots += request->slot >= 0;
    const std::optional<DraftModel::State>& drafts = request->drafting.state;
    of_drafts += drafts.has_value() && drafts->slot >= 0;
    if (!request->running && drafts.has_value()) return "drafts are held for a request that does not run";
    if (!request->running && !request->in_flight() && (request->slot >= 0 || !request->table.pages().empty())) {
      return "a slot or pages are held by a request that does not run";
    }
  }
  if (slots != scheduler_.slots_in_use()) return "a slot is held by no request";
  return drafter_.inconsistency(of_drafts);
}

}  // namespace weft
