// The drafts of an engine: for which sequences, how many, from where, and what is learned from each verification.
//
// Owns the draft model's side of DraftOptions, the measured costs and the counts. draft() sets Sequence::drafts before
// a step is planned. A request holds pages and a slot of the draft model only while it runs.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/infer/draft_length.h"
#include "llmc/infer/draft_model.h"
#include "llmc/infer/draft_sequence.h"
#include "llmc/infer/engine.h"
#include "llmc/infer/request_state.h"
#include "llmc/infer/scheduler.h"
#include "llmc/model/draft_counts.h"
#include "llmc/model/inference_model.h"

namespace weft {

class Drafter {
 public:
  // All must outlive this.
  Drafter(const DraftOptions& options, InferenceModel& model, const Scheduler& scheduler);

  bool any() const { return options_.any(); }
  // Begins a step: forgets the drafts of the last one. Whether a sequence with rows in flight is to get drafts: these
  // need all its sampled ids, so the steps in flight have to be collected first.
  bool waits_for_ids();
  // Drafts for the sequences that generate and have no rows in flight.
  void draft();
  // The device is still drawing the drafts, for the only sequence: finish() waits for them. Valid until the next call.
  bool on_device() const { return on_device_; }
  std::span<const std::int32_t> finish();

  // After a step is planned: sequences that it has preempted hold nothing of the draft model.
  void release_preempted();
  void release(RequestState& request);

  // The drafts of a chunk that count as right.
  std::vector<ScoredId> accepted(const RequestState& request, std::int64_t drafts, const ChunkResult& result) const;
  // The chunk has yielded `ids` ids; the first `right` of its `drafts` drafts are among them.
  void verified(RequestState& request, std::int64_t drafts, std::int64_t right, std::int64_t ids);
  // A chunk without drafts has yielded an id.
  void generated_plainly(RequestState& request);
  // A step of `rows` rows, which verified and did little else, took `seconds`.
  void took(std::int64_t rows, double seconds) { step_costs_.add(rows, seconds); }

  const DraftCounts& counts() const { return counts_; }
  std::string held_when_idle() const;
  // `slots`: those of the draft model that the requests have.
  std::string inconsistency(std::int64_t slots) const;

 private:
  bool has_model() const { return model_ || sequence_; }
  DraftCosts costs_now() const;
  std::int64_t length(const RequestState& request) const;
  std::int64_t count(const RequestState& request) const;
  bool wants(const RequestState& s) const;
  const std::vector<std::int32_t>& looked_up(RequestState& request);
  void draft_with_model();
  void draft_with_sequence(RequestState& request);

  const DraftOptions options_;
  InferenceModel& verifier_;
  const Scheduler& scheduler_;
  std::int64_t longest_ = INT64_MAX;  // the most ids of a sequence after which the draft model can draft
  std::optional<DraftModel> model_;
  std::optional<DraftSequence> sequence_;
  bool on_device_ = false;
  std::vector<RequestState*> holders_;  // the requests that have a state of the draft model
  std::vector<DraftModel::Job> jobs_;
  StepCosts step_costs_;  // of steps that verify and do little else
  DraftCosts costs_;      // at the beginning of the step
  DraftCounts counts_;
};

}  // namespace weft
