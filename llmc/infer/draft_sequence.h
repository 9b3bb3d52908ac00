// Drafts for one sequence by a DecodeModel. On a GPU that is the fused kernel: one launch computes the ids that
// the model does not have yet and all draft tokens. llmc/infer/draft_model.h is the counterpart for many sequences,
// and says how draft tokens are drawn.
//
// After a verification nothing has to be undone: start() keeps the rows of all leading ids that the model
// and the sequence have in common. So the next turn of a conversation, or another text with the same
// beginning, finds its rows, too.
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
  // Drafted ids are below the vocab_size of both models. `model`: can_draft() is true; it must outlive this.
  DraftSequence(DecodeModel& model, std::int64_t vocab_size);

  // Starts drafting at most `count` draft tokens to follow `ids`, which are all known ids of the sequence, at least
  // one. Returns how many were started: fewer or none if an id is not in the model's vocabulary, or at its longest
  // sequence. Where `to` is given, the draft tokens are written there too.
  std::int64_t start(std::span<const std::int32_t> ids, const SamplingPlan& sampling, std::int64_t count,
                     const DeviceDrafts& to = {});
  // Waits for the draft tokens that start() has begun: fewer or none if logits were not finite. Valid until the next call.
  std::span<const std::int32_t> finish();

  // Median time of a step of the model in seconds; 0: not known yet.
  double step_seconds() const { return step_times_.median(); }

 private:
  DecodeModel& model_;
  const std::int64_t vocab_size_;
  std::vector<std::int32_t> held_;  // ids whose rows the model has
  std::vector<std::int32_t> draft_tokens_;
  // About the draft that was started last.
  std::int64_t started_ = 0, steps_ = 0;
  bool timed_ = false;
  std::chrono::steady_clock::time_point start_;
  RecentTimes step_times_;
};

}  // namespace weft
