// How many steps to keep queued on a device, so that it computes on while the host's thread does not run.
//
// On a host whose cores are all busy a thread that has lost its core waits for a time slice of others, 3 to 10 ms, before it
// runs again. With the steps of this time in the queue the device loses nothing. What is in the queue also delays whatever is
// submitted next, and a sequence that ends unexpectedly computes as many rows in vain, so the queue is measured in
// time and not in steps.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace weft {

// Where nobody waits for what is not queued yet.
inline constexpr double kQueuedSeconds = 24e-3;
// Where requests arrive at any time: the first row of each waits behind the queue.
inline constexpr double kServedQueuedSeconds = 4e-3;

// Where each step must follow the results of the ones before soon: one runs, and one is queued behind it. `most`: as below.
constexpr std::int64_t least_queued(std::int64_t most) {
  return most < 2 ? most : 2;
}

class QueueDepth {
 public:
  // `most`: InferenceModel::depth(). `seconds`: of the device's time, to be queued.
  QueueDepth(std::int64_t most, double seconds) : most_(most), seconds_(seconds) {}

  std::int64_t least() const { return least_queued(most_); }
  std::int64_t steps() const;
  // A step was collected, and ended at this time of the device's clock.
  void collected(double ended_seconds);

 private:
  static constexpr std::size_t kRemembered = 16;

  std::int64_t most_;
  double seconds_;
  double last_ended_ = 0;
  std::int64_t collected_ = 0;
  // From the end of a step to that of the next one. Pauses of the device lengthen some of them, so the shortest counts.
  std::array<double, kRemembered> step_seconds_{};
};

}  // namespace weft
