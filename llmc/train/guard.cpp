#include "llmc/train/guard.h"

#include <algorithm>
#include <cmath>

#include "llmc/base/error.h"
#include "llmc/base/json.h"

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

// Updates a level with `value` and returns whether it is a spike. The standard deviation is taken to be at least
// `least_deviation`, so that an ordinary step of a very smooth run is not a spike.
bool SpikeDetector::observe(Level& level, double value, double least_deviation) const {
  constexpr std::int64_t kFirst = 8;    // steps before the first result
  constexpr std::int64_t kMemory = 16;  // steps that mean and variance look back over
  const double limit = level.mean + kSpikeDeviations * std::max(std::sqrt(level.variance), least_deviation);
  const bool spike = observed_ >= kFirst && value > limit;
  if (spike) value = limit;  // a spike must not raise the level so far that the next one is missed
  const double weight = 1.0 / static_cast<double>(std::min(observed_ + 1, kMemory));
  const double difference = value - level.mean;
  level.mean += weight * difference;
  level.variance = (1 - weight) * (level.variance + weight * difference * difference);
  return spike;
}

std::optional<Spike> SpikeDetector::observe(double loss, double gradient_norm) {
  constexpr std::int64_t kQuiet = 16;           // steps after a spike that are not reported
  constexpr double kLeastLossDeviation = 0.1;   // a spike is at least 0.6 above the mean loss
  constexpr double kLeastNormDeviation = 0.25;  // and at least exp(1.5) = 4.5 times the mean norm
  constexpr double kLeastNorm = 1e-30;          // the logarithm of 0 is not finite
  Spike spike{loss_.mean, std::exp(log_norm_.mean)};
  spike.of_loss = observe(loss_, loss, kLeastLossDeviation);
  spike.of_norm = observe(log_norm_, std::log(std::max(gradient_norm, kLeastNorm)), kLeastNormDeviation);
  ++observed_;
  const bool silent = quiet_ > 0;
  if (silent) --quiet_;
  if (silent || !(spike.of_loss || spike.of_norm)) return std::nullopt;
  quiet_ = kQuiet;
  return spike;
}

Json SpikeDetector::to_json() const {
  return {{"observed", observed_},           {"quiet", quiet_},
          {"loss_mean", loss_.mean},         {"loss_variance", loss_.variance},
          {"log_norm_mean", log_norm_.mean}, {"log_norm_variance", log_norm_.variance}};
}

SpikeDetector SpikeDetector::from_json(const Json& object, const std::string& source) {
  SpikeDetector detector;
  constexpr std::int64_t kMaxCounter = 1'000'000'000'000'000'000;  // leaves room to count on
  detector.observed_ = json_int(object, "observed", 0, kMaxCounter, source);
  if (object.contains("mean")) return SpikeDetector();
  detector.quiet_ = json_int(object, "quiet", 0, kMaxCounter, source);
  const auto level = [&](const std::string& name) {
    const Level read{json_number(object, name + "_mean", source), json_number(object, name + "_variance", source)};
    constexpr double kLargest = 1e100;  // no loss or norm comes near; its square is still finite
    if (std::abs(read.mean) > kLargest || read.variance < 0 || read.variance > kLargest * kLargest) {
      fail(Exit::bad_file, "%s: spikes: %s_mean %g and %s_variance %g are not those of a run", source.c_str(),
           name.c_str(), read.mean, name.c_str(), read.variance);
    }
    return read;
  };
  detector.loss_ = level("loss");
  detector.log_norm_ = level("log_norm");
  return detector;
}

}  // namespace weft
