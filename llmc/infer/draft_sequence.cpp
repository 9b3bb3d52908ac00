#include "llmc/infer/draft_sequence.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "llmc/base/clock.h"

namespace weft {

DraftSequence::DraftSequence(DecodeModel& model, std::int64_t vocab_size)
    : model_(model), vocab_size_(std::min(vocab_size, model.config().vocab_size)) {}

std::span<const std::int32_t> DraftSequence::draft(std::span<const std::int32_t> ids, const SamplingPlan& sampling,
                                                   std::int64_t count) {
  guesses_.clear();
  const std::int64_t size = std::ssize(ids);
  count = std::min(count, model_.capacity() - size + 1);
  if (count < 1) return guesses_;
  // The last id is fed again where it is held: its logits are needed.
  const auto same = std::ranges::mismatch(held_, ids.first(static_cast<std::size_t>(size - 1))).in1 - held_.begin();
  const std::span<const std::int32_t> missing = ids.subspan(static_cast<std::size_t>(same));
  if (std::ranges::any_of(missing, [&](std::int32_t id) { return id >= vocab_size_; })) return guesses_;
  held_.resize(static_cast<std::size_t>(same));

  SamplingPlan plan = sampling;
  plan.vocab_limit = plan.vocab_limit > 0 ? std::min(plan.vocab_limit, vocab_size_) : vocab_size_;
  const auto start = std::chrono::steady_clock::now();
  model_.start_draft(same, missing, count, plan);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::optional<std::int32_t> id = model_.drafted(i);
    if (!id.has_value()) break;
    guesses_.push_back(*id);
  }
  held_.insert(held_.end(), missing.begin(), missing.end());
  if (!guesses_.empty()) held_.insert(held_.end(), guesses_.begin(), guesses_.end() - 1);
  if (missing.size() <= 2) {
    step_times_.add(seconds_since(start) / static_cast<double>(std::ssize(missing) + count - 1));
  }
  return guesses_;
}

}  // namespace weft
