#include "llmc/train/guard.h"

#include <algorithm>
#include <cmath>

#include "llmc/base/error.h"

namespace weft {

const std::vector<std::string>& on_non_finite_names() {
  static const std::vector<std::string> names = {"abort", "skip", "rerun"};
  return names;
}

OnNonFinite on_non_finite_from_name(const std::string& name) {
  const auto& names = on_non_finite_names();
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) fail(Exit::usage, "--on-nan: unknown policy %s", escaped(name).c_str());
  return static_cast<OnNonFinite>(found - names.begin());
}

bool is_finite(const StepStatistics& statistics) {
  return std::isfinite(statistics.loss_sum) && std::isfinite(statistics.gradient_norm);
}

std::string first_bad_gradient(TrainModel& model) {
  std::vector<float> values;
  for (const TensorSpec& spec : model.table().specs()) {
    values.resize(static_cast<std::size_t>(spec.elements));
    model.read_tensor(TensorRole::gradient, spec, values.data());
    const auto bad = std::find_if(values.begin(), values.end(), [](float value) { return !std::isfinite(value); });
    if (bad != values.end()) {
      return format("%s[%lld]", spec.name.c_str(), static_cast<long long>(bad - values.begin()));
    }
  }
  return {};
}

std::optional<double> SpikeDetector::observe(double norm) {
  constexpr std::int64_t kWarmup = 32;  // observations before the first result
  constexpr double kMemory = 100;       // steps that the averages look back over
  const double weight =
      1.0 / static_cast<double>(std::min<std::int64_t>(observed_ + 1, static_cast<std::int64_t>(kMemory)));
  const double difference = norm - mean_;
  std::optional<double> deviations;
  if (observed_ >= kWarmup && variance_ > 0) deviations = difference / std::sqrt(variance_);
  mean_ += weight * difference;
  variance_ = (1 - weight) * (variance_ + weight * difference * difference);
  ++observed_;
  return deviations;
}

Json SpikeDetector::to_json() const {
  return {{"observed", observed_}, {"mean", mean_}, {"variance", variance_}};
}

SpikeDetector SpikeDetector::from_json(const Json& object, const std::string& source) {
  SpikeDetector detector;
  constexpr std::int64_t kMaxCounter = 1'000'000'000'000'000'000;  // leaves room to count on
  detector.observed_ = json_int(object, "observed", 0, kMaxCounter, source);
  detector.mean_ = json_number(object, "mean", source);
  detector.variance_ = json_number(object, "variance", source);
  constexpr double kLargest = 1e100;  // no gradient norm comes near; its square is still finite
  if (std::abs(detector.mean_) > kLargest || detector.variance_ < 0 || detector.variance_ > kLargest * kLargest) {
    fail(Exit::bad_file, "%s: spikes: mean %g and variance %g are not those of gradient norms", source.c_str(),
         detector.mean_, detector.variance_);
  }
  return detector;
}

}  // namespace weft
