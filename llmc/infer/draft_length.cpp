#include "llmc/infer/draft_length.h"

#include <algorithm>
#include <bit>

namespace weft {

void RecentTimes::add(double seconds) {
  if (added_++ >= kFirst) times_[static_cast<std::size_t>(seen() - 1) % kWindow] = seconds;
}

double RecentTimes::median() const {
  if (seen() == 0) return 0;
  std::array<double, kWindow> sorted = times_;
  const std::int64_t count = std::min(seen(), kWindow);
  const auto end = sorted.begin() + count, middle = sorted.begin() + count / 2;
  std::nth_element(sorted.begin(), middle, end);
  return *middle;
}

std::int64_t StepCosts::bucket_of(std::int64_t rows) {
  if (rows <= 8) return rows;
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(rows)));
}

// A least-squares line through the medians of the buckets. A negative slope is taken to be 0: further rows cost
// nothing.
StepCosts::Line StepCosts::line(double guess) const {
  double n = 0, rows = 0, seconds = 0, best = 0;
  std::int64_t most = 0, rows_of_most = 1;
  for (const auto& [bucket, times] : times_) {
    if (times.seen() > most) most = times.seen(), rows_of_most = bucket, best = times.median();
    if (times.seen() < kEnough) continue;
    ++n;
    rows += static_cast<double>(bucket);
    seconds += times.median();
  }
  if (most == 0) return {0, guess};
  if (n < 2) return {best / (1 + guess * static_cast<double>(rows_of_most - 1)), guess};
  double xy = 0, xx = 0;
  for (const auto& [bucket, times] : times_) {
    if (times.seen() < kEnough) continue;
    const double x = static_cast<double>(bucket) - rows / n;
    xy += x * (times.median() - seconds / n);
    xx += x * x;
  }
  const double slope = std::max(0.0, xy / xx), one = seconds / n - slope * (rows / n - 1);
  if (one <= 0) return {seconds / n, guess};
  return {one, slope / one};
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
