// What an engine's thread exchanges with all others: requests and cancellations come in, statistics go out.
//
// Any thread may call any function, except that take() and publish() belong to the thread that steps. Nothing here
// waits for a step: the lock is held to move a few words.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "llmc/infer/engine.h"
#include "llmc/infer/request_state.h"

namespace weft {

class EngineInbox {
 public:
  struct Command {
    RequestId id;
    std::unique_ptr<RequestState> request;  // null: cancel
  };

  RequestId submit(std::unique_ptr<RequestState> request) {  // gives it its number
    const std::lock_guard lock(mutex_);
    const RequestId id = request->id = ++last_id_;
    push({id, std::move(request)});
    return id;
  }
  void cancel(RequestId id) {
    const std::lock_guard lock(mutex_);
    push({id, nullptr});
  }
  // Blocks until there is something to do, or until `until`.
  void wait(std::chrono::steady_clock::time_point until) {
    std::unique_lock lock(mutex_);
    arrived_.wait_until(lock, until, [&] { return busy_ || !commands_.empty(); });
  }
  EngineStatistics statistics() const {  // of the last step, with the requests that came since
    const std::lock_guard lock(mutex_);
    EngineStatistics now = statistics_;
    for (const Command& command : commands_) now.waiting += command.request != nullptr;
    return now;
  }

  std::vector<Command> take() {  // all that came since the last call, in its order
    const std::lock_guard lock(mutex_);
    return std::exchange(commands_, {});
  }
  // At the end of a step. `busy`: requests are left. Returns whether there is something to do.
  bool publish(const EngineStatistics& statistics, bool busy) {
    const std::lock_guard lock(mutex_);
    statistics_ = statistics;
    busy_ = busy;
    return busy_ || !commands_.empty();
  }

 private:
  void push(Command command) {
    commands_.push_back(std::move(command));
    arrived_.notify_all();
  }

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable arrived_;
  std::vector<Command> commands_;
  RequestId last_id_ = 0;
  EngineStatistics statistics_;
  bool busy_ = false;
};

}  // namespace weft
