// The requests of an engine, from the step that takes them up until they hold nothing, and all that their listeners
// hear.
//
// Owns the requests and their deadlines. Every request ends once: by its last id, by cancel(), by its deadline, or by
// end(); its listener then gets on_end() and nothing more. A request that ends with rows in flight stays at its address
// until these are collected. Used by the thread that steps; listeners are called from it.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "llmc/infer/drafter.h"
#include "llmc/infer/engine.h"
#include "llmc/infer/request_state.h"
#include "llmc/infer/scheduler.h"
#include "llmc/infer/steps_in_flight.h"
#include "llmc/model/inference_model.h"

namespace weft {

class RequestTable {
 public:
  RequestTable(Scheduler& scheduler, Drafter& drafter) : scheduler_(scheduler), drafter_(drafter) {}

  void add(std::unique_ptr<RequestState> owned);
  void cancel(RequestId id) {
    if (const auto found = requests_.find(id); found != requests_.end()) end(*found->second, RequestEnd::cancelled);
  }
  void end_late();  // those whose deadline is over

  // The log-probabilities of the chunk's targets. Tells the listener if they complete the prompt's. False if one is not
  // a number.
  bool take_scores(const FlightChunk& chunk, const ChunkResult& result);
  // The next id of a request. May end it.
  void take_id(RequestState& request, const ScoredId& id);
  // A step with rows of it was collected, and its result taken. Erases the request if it has ended.
  void collected(RequestState& request) {
    scheduler_.collected(request);
    erase_if_released(request);
  }
  // Erases the request unless a submitted step has rows of it. Nothing happens if it has ended already.
  void end(RequestState& request, RequestEnd reason);

  bool empty() const { return requests_.empty(); }
  std::int64_t generated_ids() const { return generated_ids_; }
  std::string inconsistency() const;  // what a request holds in vain, or what nobody holds; empty: nothing
  std::size_t deadlines() const { return deadlines_.size(); }

 private:
  void erase_if_released(const RequestState& request) {
    if (Scheduler::released(request)) requests_.erase(request.id);
  }

  Scheduler& scheduler_;
  Drafter& drafter_;
  std::map<RequestId, std::unique_ptr<RequestState>> requests_;  // waiting, running, or ended with rows in flight
  std::set<std::pair<std::chrono::steady_clock::time_point, RequestId>> deadlines_;  // of requests that have not ended
  std::int64_t generated_ids_ = 0;
};

}  // namespace weft
