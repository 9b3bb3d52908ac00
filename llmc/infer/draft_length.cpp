#include "llmc/infer/draft_length.h"

#include <algorithm>

namespace weft {

void running_mean(double& mean, double seconds) {
  constexpr double kEarlier = 0.8;  // weight of the times before
  mean = mean == 0 ? seconds : kEarlier * mean + (1 - kEarlier) * seconds;
}

double expected_ids(double acceptance, std::int64_t k) {
  double sum = 1, power = 1;
  for (std::int64_t i = 0; i < k; ++i) sum += power *= acceptance;
  return sum;
}

std::int64_t best_draft_length(double acceptance, std::int64_t most, std::int64_t sequences, const DraftCosts& costs) {
  const auto n = static_cast<double>(sequences);
  const auto step = [&](double k) { return 1 + costs.row * (n * (k + 1) - 1) + k * costs.draft; };
  std::int64_t best = 0;
  double lowest = step(0);
  for (std::int64_t k = 1; k <= most; ++k) {
    const double cost = step(static_cast<double>(k)) / expected_ids(acceptance, k);
    if (cost >= lowest) continue;
    lowest = cost;
    best = k;
  }
  return best;
}

std::int64_t DraftLength::next(std::int64_t most, std::int64_t sequences, const DraftCosts& costs) const {
  const std::int64_t k = best_draft_length(acceptance(), most, sequences, costs);
  if (k == 0 && plain_ >= pause_) return std::min<std::int64_t>(most, 1);
  return k;
}

void DraftLength::verified(std::int64_t drafted, std::int64_t accepted) {
  right_ = kMemory * right_ + static_cast<double>(accepted);
  seen_ = kMemory * seen_ + static_cast<double>(accepted + (accepted < drafted ? 1 : 0));
  if (plain_ >= pause_) pause_ = accepted > 0 ? kFirstPause : std::min(2 * pause_, kLongestPause);
  plain_ = 0;
}

void DraftLength::generated_plainly() {
  ++plain_;
}

}  // namespace weft
