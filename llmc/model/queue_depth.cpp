#include "llmc/model/queue_depth.h"

#include <algorithm>
#include <cmath>
#include <span>

namespace weft {

std::int64_t QueueDepth::steps() const {
  const auto known = static_cast<std::size_t>(std::clamp<std::int64_t>(collected_ - 1, 0, kRemembered));
  if (known == 0) return least();
  const double shortest = std::ranges::min(std::span(step_seconds_).first(known));
  const auto most = static_cast<double>(most_);
  const double steps = shortest * most > seconds_ ? std::ceil(seconds_ / shortest) : most;
  return std::max(least(), static_cast<std::int64_t>(steps));
}

void QueueDepth::collected(double ended_seconds) {
  if (collected_ > 0) {
    step_seconds_[static_cast<std::size_t>(collected_ - 1) % kRemembered] = ended_seconds - last_ended_;
  }
  last_ended_ = ended_seconds;
  ++collected_;
}

}  // namespace weft
