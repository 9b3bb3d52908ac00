// The numeric guard: checks the loss and the gradient norm of a step before its update, and decides whether the update is
// applied.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/model/train_model.h"

namespace weft {

// What to do when the loss or the gradient norm of a step is not finite. In no case is the update applied.
enum class OnNonFinite {
  abort,  // stop with Exit::numeric
  skip,   // leave the parameters and moments alone and go on with the next step
  rerun,  // compute the step again: if it is finite then, the hardware erred once; if not, abort
};
const std::vector<std::string>& on_non_finite_names();         // in the order of the enum
OnNonFinite on_non_finite_from_name(const std::string& name);  // Exit::usage if unknown

bool is_finite(const StepStatistics& statistics);

// The first gradient of the table that holds a value that is not finite, as "NAME[index]"; empty if there is
// none.
std::string first_bad_gradient(TrainModel& model);

// The running mean and variance of the gradient norm (exponentially weighted), by which a spike is told from noise. Only
// finite norms of applied steps are observed: after one that is not finite, mean and variance would never be finite again.
// Part of a checkpoint.
class SpikeDetector {
 public:
  // Returns how many standard deviations `norm` lies above the mean (nothing during the first observations), then adds
  // `norm` to mean and variance.
  std::optional<double> observe(double norm);

  Json to_json() const;
  static SpikeDetector from_json(const Json& object, const std::string& source);
  bool operator==(const SpikeDetector&) const = default;

 private:
  std::int64_t observed_ = 0;
  double mean_ = 0, variance_ = 0;
};
inline constexpr double kSpikeDeviations = 6;  // a step above it is reported

}  // namespace weft
