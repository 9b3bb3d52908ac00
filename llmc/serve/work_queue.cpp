#include "llmc/serve/work_queue.h"

#include <algorithm>
#include <utility>

#include "llmc/base/clock.h"

namespace weft {

WorkQueue::WorkQueue(int threads) : most_large_(std::max(1, threads - 1)) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
}

void WorkQueue::post(std::size_t bytes, std::function<void()> work, Clock::time_point now) {
  const Clock::time_point due = now + duration_of(static_cast<double>(bytes) / kBytesPerSecond);
  {
    const std::lock_guard lock(mutex_);
    items_.insert({due, ++posted_, bytes > kLargeBytes, std::move(work)});
  }
  changed_.notify_one();
}

std::size_t WorkQueue::waiting() const {
  const std::lock_guard lock(mutex_);
  return items_.size();
}

void WorkQueue::finish() {
  {
    const std::lock_guard lock(mutex_);
    finishing_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

// What may begin now; the end if there is nothing.
std::set<WorkQueue::Item>::const_iterator WorkQueue::next() const {
  if (large_ < most_large_) return items_.begin();
  return std::find_if(items_.begin(), items_.end(), [](const Item& item) { return !item.large; });
}

void WorkQueue::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return next() != items_.end() || (finishing_ && items_.empty()); });
    const auto first = next();
    if (first == items_.end()) return;
    const auto item = items_.extract(first);
    const bool large = item.value().large;
    if (large) ++large_;
    lock.unlock();
    item.value().work();
    lock.lock();
    if (!large) continue;
    --large_;
    changed_.notify_all();  // who has left large work to this thread
  }
}

}  // namespace weft
