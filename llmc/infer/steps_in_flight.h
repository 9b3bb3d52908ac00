// The steps that the model has been given and whose results have not been collected, the oldest first.
//
// Turns what the scheduler has planned into the model's chunks, keeps what they point to, and hands back each chunk's
// result with the request that it belongs to. Knows neither why rows are computed nor what becomes of their results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <vector>

#include "llmc/infer/request_state.h"
#include "llmc/infer/scheduler.h"
#include "llmc/model/inference_model.h"
#include "llmc/model/queue_depth.h"

namespace weft {

// Rows of one request in a submitted step.
struct FlightChunk {
  RequestState* request;
  std::int64_t first_target = 0, targets = 0;  // rows
  bool sampled = false;
  std::int64_t drafts = 0;
};

class StepsInFlight {
 public:
  // `queued_seconds`: see QueueDepth.
  StepsInFlight(InferenceModel& model, std::int64_t rows_per_step, double queued_seconds)
      : model_(model), depth_(model.depth(), queued_seconds) {
    verified_ids_.reserve(static_cast<std::size_t>(rows_per_step));
  }

  // `drafts_on_device`: the device is still drawing the drafts of this step, and set_drafts() follows.
  void submit(std::span<const PlannedChunk> plan, bool drafts_on_device);
  // The drafts that the device has drawn for the only sequence of the step that was submitted last. Fewer than the step
  // has rows for them: the others are wrong.
  void set_drafts(std::span<const std::int32_t> drafts);
  // Waits for the oldest step and gives `take` each chunk with its result.
  void collect(const std::function<void(const FlightChunk&, const ChunkResult&)>& take);

  std::size_t size() const { return flights_.size(); }
  bool empty() const { return flights_.empty(); }
  // `ahead`: nothing but their number speaks against a further step.
  bool full(bool ahead) const { return std::ssize(flights_) >= (ahead ? depth_.steps() : depth_.least()); }
  // Submitted ever.
  std::int64_t steps() const { return steps_; }
  std::int64_t rows() const { return rows_; }

 private:
  using Flight = std::vector<FlightChunk>;

  std::span<const LogitRow> add_logit_rows(RequestState& request, const Chunk& chunk);

  InferenceModel& model_;
  QueueDepth depth_;
  std::deque<Flight> flights_;
  std::vector<Flight> unused_flights_;      // their memory, for later steps
  std::vector<Chunk> chunks_;               // of the step that is submitted
  std::vector<std::int32_t> verified_ids_;  // of its chunks with drafts
  std::vector<LogitRow> logit_rows_;        // of its chunks whose request has rules
  std::int64_t steps_ = 0, rows_ = 0;
};

}  // namespace weft
