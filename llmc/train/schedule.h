// The learning rate of each step: a linear warm-up to the peak, then one of four shapes down to a fraction of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

// The default peak for a model with this many parameters. `divisor` is 10 where a run starts from the weights of --model, which
// the rate for a new model would destroy, and ten times as much for dpo. doc/hyperparameters.md gives the sources.
double default_learning_rate(std::int64_t parameters, int divisor = 1);

enum class ScheduleShape { cosine, linear, constant, wsd };

const std::vector<std::string>& schedule_names();           // in the order of ScheduleShape
ScheduleShape schedule_from_name(const std::string& name);  // Exit::usage if unknown

struct Schedule {
  ScheduleShape shape = ScheduleShape::cosine;
  double peak = 0;                  // learning rate after the warm-up
  double min_ratio = 0;             // the final rate is peak * min_ratio
  std::int64_t warmup_steps = 0;    // step n of these has peak * n / warmup_steps
  std::int64_t steps = 1;           // of the whole run
  double wsd_decay_fraction = 0.2;  // wsd only: the share of all steps that decays

  std::int64_t wsd_decay_steps() const;  // wanted; if the warm-up leaves fewer, the decay takes those

  // The rate of step `step`, counted from 1. With p the share of the decay that is done (0 at its first step, below 1
  // at its last, so that no step is taken with the final rate of the curve):
  //   cosine    min + (peak - min) (1 + cos(pi p)) / 2                     Loshchilov and Hutter, SGDR (2017)
  //   linear    peak - (peak - min) p
  //   constant  peak
  //   wsd       peak, then peak - (peak - min) sqrt(p) in the decay phase   Haegele et al. (2024), "1-sqrt"
  double at(std::int64_t step) const;
};

}  // namespace weft
