#include "llmc/infer/draft_sequence.h"

#include <algorithm>
#include <optional>

#include "llmc/base/clock.h"

namespace weft {

DraftSequence::DraftSequence(DecodeModel& model, std::int64_t vocab_size)
    : model_(model), vocab_size_(std::min(vocab_size, model.config().vocab_size)) {}

std::int64_t DraftSequence::start(std::span<const std::int32_t> ids, const SamplingPlan& sampling, std::int64_t count,
                                  const DeviceDrafts& to) {
  const std::int64_t size = std::ssize(ids);
  count = std::min(count, model_.capacity() - size + 1);
  started_ = 0;
  if (count < 1) return 0;
  // The row of the last id is computed again even if the model has it, because its logits are needed.
  const auto same = std::ranges::mismatch(held_, ids.first(static_cast<std::size_t>(size - 1))).in1 - held_.begin();
  const std::span<const std::int32_t> missing = ids.subspan(static_cast<std::size_t>(same));
  if (std::ranges::any_of(missing, [&](std::int32_t id) { return id >= vocab_size_; })) return 0;

  SamplingPlan plan = sampling;
  plan.vocab_limit = plan.vocab_limit > 0 ? std::min(plan.vocab_limit, vocab_size_) : vocab_size_;
  start_ = std::chrono::steady_clock::now();
  model_.start_draft(same, missing, count, plan, to);
  held_.resize(static_cast<std::size_t>(same));
  held_.insert(held_.end(), missing.begin(), missing.end());
  timed_ = missing.size() <= 2;
  steps_ = std::ssize(missing) + count - 1;
  return started_ = count;
}

std::span<const std::int32_t> DraftSequence::finish() {
  draft_tokens_.clear();
  for (std::int64_t i = 0; i < started_; ++i) {
    const std::optional<std::int32_t> id = model_.drafted(i);
    if (!id.has_value()) break;
    draft_tokens_.push_back(*id);
  }
  if (started_ > 0 && timed_) step_times_.add(seconds_since(start_) / static_cast<double>(steps_));
  if (!draft_tokens_.empty()) held_.insert(held_.end(), draft_tokens_.begin(), draft_tokens_.end() - 1);
  started_ = 0;
  return draft_tokens_;
}

}  // namespace weft
