// Drafts for one sequence, by a model that holds one: on a GPU the fused kernel, which computes the ids that the model does not
// have yet and all guesses in one launch. llmc/infer/draft_model.h is the counterpart for many sequences, and says how guesses are
// drawn.
//
// Nothing has to be taken back after a verification: the model keeps what its ids and the sequence's have in common. So a turn of
// a conversation, or another text that begins in the same way, finds its rows, too.
#pragma once

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

  // At most `count` guesses of what follows `ids`, at least one id, all that are known of the sequence. Fewer, or none, where an id
  // is not in the model's vocabulary, at its longest sequence, or if logits are not finite. Waits for them; valid until the next
  // call.
  std::span<const std::int32_t> draft(std::span<const std::int32_t> ids, const SamplingPlan& sampling,
                                      std::int64_t count);

  // A step of the model in seconds; 0: not known yet.
  double step_seconds() const { return step_times_.median(); }

 private:
  DecodeModel& model_;
  const std::int64_t vocab_size_;
  std::vector<std::int32_t> held_;  // ids whose rows the model has
  std::vector<std::int32_t> guesses_;
  RecentTimes step_times_;
};

}  // namespace weft
