// The work of requests with a body, for a few threads: small work does not wait behind large work, and large work is not put
// off for ever.
//
// Work is due `bytes` / kBytesPerSecond after it came, and what is due first begins first: a small request overtakes larger
// ones, but each of these only for as long as its own size says. What cannot be overtaken is work that has begun. So one
// thread does no large work.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace weft {

class WorkQueue {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kLargeBytes = 64 << 10;
  static constexpr double kBytesPerSecond = 1
                                            << 20;  // less than a thread does, so that order is by size where all wait

  explicit WorkQueue(int threads);  // a single one does large work, too
  ~WorkQueue() { finish(); }
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // `work` must not throw. `bytes` says how large it is; `now`: only tests give another time.
  void post(std::size_t bytes, std::function<void()> work, Clock::time_point now = Clock::now());
  std::size_t waiting() const;  // that has not begun
  // Does all that waits, and ends the threads.
  void finish();

 private:
  struct Item {
    Clock::time_point due;
    std::uint64_t number;  // of equals the first
    bool large;
    std::function<void()> work;
    bool operator<(const Item& other) const { return due != other.due ? due < other.due : number < other.number; }
  };

  void run();
  std::set<Item>::const_iterator next() const;

  const int most_large_;  // at once
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::set<Item> items_;  // and all below: guarded by mutex_
  std::uint64_t posted_ = 0;
  int large_ = 0;  // that threads do now
  bool finishing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace weft
