// Waits on the host for GPU work that depends on other ranks: by polling, so that a lost or late rank ends the wait.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <optional>
#include <thread>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/comm/communicator.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/runtime/stream.h"

namespace weft::cuda {

class Waiter {
 public:
  Waiter(Communicator& ranks, double time_limit_s) : ranks_(ranks), time_limit_s_(time_limit_s) {}

  // Implements DeviceRanks::wait(). look() is called while polling and may throw.
  template <typename Look>
  void wait(cudaStream_t stream, cudaEvent_t own, const char* action, const Look& look) const {
    check(cudaEventRecord(done_, stream), action);
    if (own != nullptr) {
      poll([&] { return has_come(own, action); }, std::nullopt, action, look);
      ranks_.barrier();  // its errors name the ranks that are late; queued transfers proceed meanwhile
    }
    poll([&] { return has_come(done_, action); }, Clock::now(), action, look);
  }

  // Polls until done() returns true; the time limit counts from now.
  template <typename Done, typename Look>
  void until(const Done& done, const char* action, const Look& look) const {
    poll(done, Clock::now(), action, look);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kLook{1};

  bool has_come(cudaEvent_t event, const char* action) const {
    const cudaError_t error = cudaEventQuery(event);
    if (error == cudaSuccess) return true;
    if (error == cudaErrorNotReady) {
      cudaGetLastError();  // clears cudaErrorNotReady, which is no error
      return false;
    }
    // A lost rank's memory disappears with it, and a copy from there may fail before its connection does. An error that
    // names the rank is better: wait for it.
    constexpr int kTimes = 100;
    for (int i = 0; i < kTimes; ++i) {
      ranks_.check();
      std::this_thread::sleep_for(10 * kLook);
    }
    check(error, action);
    return true;
  }

  template <typename Done, typename Look>
  void poll(const Done& done, const std::optional<Clock::time_point>& begin, const char* action,
            const Look& look) const {
    Clock::time_point looked = Clock::now();
    while (!done()) {
      std::this_thread::yield();
      const Clock::time_point now = Clock::now();
      if (now - looked < kLook) continue;
      looked = now;
      ranks_.check();
      look();
      if (begin && seconds_since(*begin) > time_limit_s_) {
        fail(Exit::environment, "%s: the other ranks did not come within %g s", action, time_limit_s_);
      }
    }
  }

  Communicator& ranks_;
  const double time_limit_s_;
  const Event done_{cudaEventDisableTiming};
};

}  // namespace weft::cuda
