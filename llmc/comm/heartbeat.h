// Work of one rank for which the others have to wait, and that may take longer than their time limit: reading a checkpoint,
// trying GEMM plans.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "llmc/comm/communicator.h"

namespace weft {

// While one exists, a thread tells the others that this process is at work, so that they go on waiting. A process that
// is stopped or dies gives no sign; one that hangs gives signs for `longest` at most.
class Heartbeat {
 public:
  static constexpr std::chrono::minutes kLongest{30};

  explicit Heartbeat(Communicator& ranks, std::chrono::duration<double> longest = kLongest);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace weft
