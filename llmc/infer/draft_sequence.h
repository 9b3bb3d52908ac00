// Drafts for one sequence, by a model that holds one: on a GPU the fused kernel, which computes the ids that the model does not
// have yet and all guesses in one launch. llmc/infer/draft_model.h is the counterpart for many sequences, and says how guesses are
// drawn.
//
// Nothing has to be taken back after a verification: the model keeps what its ids and the sequence's have in common. So a turn of
// a conversation, or another text that begins in the same way, finds its rows, too.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "llmc/base/sampling.h"
#include "llmc/infer/draft_length.h"
#include "llmc/model/decode_model.h"

namespace weft {

class DraftSequence {
 public:
  // Ids that are drafted are below vocab_size of both models. `model`, of which can_draft(), must outlive this.
  DraftSequence(DecodeModel& model, std::int64_t vocab_size);

  // Starts drafting at most `count` guesses of what follows `ids`, at least one id, all that are known of the sequence, and says how
  // many: fewer, or none, where an id is not in the model's vocabulary or at its longest sequence. They are written to `to`, too, if
  // that is a place.
  std::int64_t start(std::span<const std::int32_t> ids, const SamplingPlan& sampling, std::int64_t count,
                     const DeviceDrafts& to = {});
  // Waits for those that were started: fewer, or none, if logits were not finite. Valid until the next call.
  std::span<const std::int32_t> finish();

  // A step of the model in seconds; 0: not known yet.
  double step_seconds() const { return step_times_.median(); }

 private:
  DecodeModel& model_;
  const std::int64_t vocab_size_;
  std::vector<std::int32_t> held_;  // ids whose rows the model has
  std::vector<std::int32_t> guesses_;
  // Of the draft that was started.
  std::int64_t started_ = 0, steps_ = 0;
  bool timed_ = false;
  std::chrono::steady_clock::time_point start_;
  RecentTimes step_times_;
};

}  // namespace weft
