#include "llmc/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "llmc/base/error.h"

namespace weft {

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
  const std::int64_t decay_begin = shape == ScheduleShape::wsd ? steps - wsd_decay_steps() : warmup_steps;
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
