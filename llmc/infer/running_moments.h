// Mean and variance in one pass over many values (Welford, Technometrics 4, 1962).
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace weft {

class RunningMoments {
 public:
  void add(double value) {
    ++count_;
    const double difference = value - mean_;
    mean_ += difference / static_cast<double>(count_);
    squares_ += difference * (value - mean_);
  }
  std::int64_t count() const { return count_; }
  double mean() const { return mean_; }
  double standard_error() const {
    if (count_ < 2) return std::numeric_limits<double>::quiet_NaN();
    return std::sqrt(squares_ / static_cast<double>(count_ - 1) / static_cast<double>(count_));
  }

 private:
  std::int64_t count_ = 0;
  double mean_ = 0, squares_ = 0;
};

}  // namespace weft
