#include "llmc/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>

#include "llmc/base/error.h"

namespace weft {

double default_learning_rate(std::int64_t parameters, int divisor) {
  // Up to 30 million parameters from runs of weft, above from GPT-3 (Brown et al., 2020, table 2.1) and Pythia (Biderman et
  // al., 2023, table 1), which agree within a factor of 1.5.
  // One division of integers, so that a rate is the same number as when it is typed: 600 / 1e7 is 6e-5, but 6e-4 / 10 is not.
  constexpr struct {
    std::int64_t parameters;  // the row's rate holds up to here
    int millionths;
  } kRates[] = {{30'000'000, 3000}, {100'000'000, 1000},  {250'000'000, 600},
                {500'000'000, 300}, {2'000'000'000, 200}, {4'000'000'000, 160}};
  constexpr int kLargest = 120;
  const auto* row = std::find_if(std::begin(kRates), std::end(kRates),
                                 [&](const auto& candidate) { return parameters <= candidate.parameters; });
  const int millionths = row == std::end(kRates) ? kLargest : row->millionths;
  return millionths / (1e6 * divisor);
}

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = {"cosine", "linear", "constant", "wsd"};
  return names;
}

ScheduleShape schedule_from_name(const std::string& name) {
  const auto& names = schedule_names();
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) fail(Exit::usage, "--schedule: unknown shape %s", escaped(name).c_str());
  return static_cast<ScheduleShape>(found - names.begin());
}

std::int64_t Schedule::wsd_decay_steps() const {
  return std::llround(wsd_decay_fraction * static_cast<double>(steps));
}

double Schedule::at(std::int64_t step) const {
  if (step <= warmup_steps) return peak * static_cast<double>(step) / static_cast<double>(warmup_steps);
  const std::int64_t decay_begin =
      shape == ScheduleShape::wsd ? std::max(warmup_steps, steps - wsd_decay_steps()) : warmup_steps;
  if (step <= decay_begin || shape == ScheduleShape::constant) return peak;
  const double p =
      std::min(1.0, static_cast<double>(step - 1 - decay_begin) / static_cast<double>(steps - decay_begin));
  const double low = peak * min_ratio;
  switch (shape) {
    case ScheduleShape::cosine:
      return low + (peak - low) * 0.5 * (1 + std::cos(std::numbers::pi * p));
    case ScheduleShape::wsd:
      return peak - (peak - low) * std::sqrt(p);
    default:
      return peak - (peak - low) * p;
  }
}

}  // namespace weft
