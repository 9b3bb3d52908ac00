// The numeric guard: checks that the loss and the gradient norm of a step are finite, decides whether its update is applied,
// and finds steps in which one of them jumps.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/json_fwd.h"
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

// A step whose loss or gradient norm is far above its level.
struct Spike {
  double loss_level = 0;  // running mean of the loss before the step
  double norm_level = 0;  // running geometric mean of the gradient norm before it
  bool of_loss = false, of_norm = false;
};

// Finds spikes of the loss and of the gradient norm. For each it keeps a running mean and variance (exponentially weighted;
// of the norm's logarithm, because norms vary by factors). Only finite values of applied steps are observed: after one that
// is not finite, mean and variance would never be finite again. Part of a checkpoint.
class SpikeDetector {
 public:
  // Adds both values to their means. Returns a spike if one of them lies more than kSpikeDeviations standard deviations
  // above its mean, but not during the first 8 steps, nor during the 16 after a spike: a spike is reported once.
  std::optional<Spike> observe(double loss, double gradient_norm);

  Json to_json() const;
  // A checkpoint of a version that watched the norm alone gives a detector that begins anew.
  static SpikeDetector from_json(const Json& object, const std::string& source);
  bool operator==(const SpikeDetector&) const = default;

 private:
  struct Level {
    double mean = 0, variance = 0;
    bool operator==(const Level&) const = default;
  };
  bool observe(Level& level, double value, double least_deviation) const;

  std::int64_t observed_ = 0;
  std::int64_t quiet_ = 0;  // number of following steps whose spikes are not reported
  Level loss_, log_norm_;
};
inline constexpr double kSpikeDeviations = 6;

}  // namespace weft
