#include "llmc/infer/steps_in_flight.h"

#include <algorithm>
#include <utility>

#include "llmc/base/error.h"

namespace weft {

void StepsInFlight::submit(std::span<const PlannedChunk> plan, bool drafts_on_device) {
  Flight flight;
  if (!unused_flights_.empty()) {
    flight = std::move(unused_flights_.back());
    unused_flights_.pop_back();
  }
  flight.clear();
  chunks_.clear();
  verified_ids_.clear();  // chunks point into it: it has room for all rows of a step, and never moves
  logit_rows_.clear();    // and so has this, once a request has rules
  for (const PlannedChunk& planned : plan) {
    RequestState& s = request_of(*planned.sequence);
    const auto first = static_cast<std::size_t>(planned.first_position);
    const auto rows = static_cast<std::size_t>(planned.rows);
    Chunk chunk;
    chunk.pages = s.table.pages();
    chunk.first_position = planned.first_position;
    chunk.slot = s.slot;
    if (planned.drafts > 0) {
      const std::size_t begin = verified_ids_.size();
      verified_ids_.push_back(s.ids[first]);
      verified_ids_.insert(verified_ids_.end(), s.drafts.begin(), s.drafts.end());
      chunk.ids = std::span(verified_ids_).subspan(begin);
      chunk.drafts = planned.drafts;
      chunk.drafts_on_device = drafts_on_device;
    } else if (!planned.id_on_device) {
      chunk.ids = std::span(s.ids).subspan(first, rows);
    }
    if (planned.sample) chunk.sampling = &s.asked.sampling;
    if (planned.sample && s.rules) chunk.logit_rows = add_logit_rows(s, chunk);
    chunk.alternatives = s.asked.alternatives;
    // Row i gives the log-probability of the id after it. Rows that are computed again after a preemption are not
    // scored again once all scores are there.
    const std::int64_t rows_to_score = s.scored_rows < s.rows_to_score ? s.rows_to_score : 0;
    const std::int64_t targets =
        std::min(planned.first_position + planned.rows, rows_to_score) - planned.first_position;
    if (targets > 0) chunk.targets = std::span(s.ids).subspan(first + 1, static_cast<std::size_t>(targets));
    chunks_.push_back(chunk);
    flight.push_back({&s, planned.first_position, std::max<std::int64_t>(targets, 0), planned.sample, planned.drafts});
    rows_ += planned.rows;
  }
  model_.submit(chunks_);
  ++steps_;
  flights_.push_back(std::move(flight));
}

// plan() has counted what the chunk samples as sampled already.
std::span<const LogitRow> StepsInFlight::add_logit_rows(RequestState& request, const Chunk& chunk) {
  logit_rows_.reserve(verified_ids_.capacity());
  const std::size_t begin = logit_rows_.size();
  const std::int64_t unknown = request.sampled - 1 - chunk.drafts - std::ssize(request.generated());
  if (unknown < 0 || unknown > (chunk.ids.empty() ? 1 : 0)) {
    fail(Exit::internal, "engine: rules for a row behind %lld unknown ids", static_cast<long long>(unknown));
  }
  if (unknown > 0) {
    logit_rows_.push_back(request.rules->row(request.generated(), {&kUnknownId, 1}));
  } else {
    const std::span<const std::int32_t> drafts = chunk.ids.last(static_cast<std::size_t>(chunk.drafts));
    for (std::size_t i = 0; i <= drafts.size(); ++i) {
      logit_rows_.push_back(request.rules->row(request.generated(), drafts.first(i)));
    }
  }
  return std::span(logit_rows_).subspan(begin);
}

void StepsInFlight::set_drafts(std::span<const std::int32_t> drafts) {
  if (flights_.empty() || flights_.back().front().drafts == 0) return;  // there was no room for a draft
  std::vector<std::int32_t>& planned = flights_.back().front().request->drafts;
  for (std::size_t i = 0; i < planned.size(); ++i) {
    verified_ids_[1 + i] = i < drafts.size() ? drafts[i] : -1;
    planned[i] = std::max(verified_ids_[1 + i], 0);
  }
}

void StepsInFlight::collect(const std::function<void(const FlightChunk&, const ChunkResult&)>& take) {
  const std::span<const ChunkResult> results = model_.collect();
  depth_.collected(model_.ended_seconds());
  Flight flight = std::move(flights_.front());
  flights_.pop_front();
  if (results.size() != flight.size()) fail(Exit::internal, "engine: a step has another number of results than chunks");
  for (std::size_t i = 0; i < flight.size(); ++i) take(flight[i], results[i]);
  unused_flights_.push_back(std::move(flight));
}

}  // namespace weft
