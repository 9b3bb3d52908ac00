#include "llmc/comm/heartbeat.h"

#include "llmc/base/signals.h"

namespace weft {

Heartbeat::Heartbeat(Communicator& ranks, std::chrono::duration<double> longest) {
  const double interval = ranks.sign_interval_s();
  if (interval <= 0) return;
  const SignalsElsewhere signals;
  thread_ = std::thread([this, &ranks, interval, longest] {
    const auto end = std::chrono::steady_clock::now() + longest;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::duration<double>(interval), [this] { return done_; })) {
      if (std::chrono::steady_clock::now() >= end) return;
      ranks.beat();
    }
  });
}

Heartbeat::~Heartbeat() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

}  // namespace weft
