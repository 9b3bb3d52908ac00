#include "llmc/serve/work_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "test/cpp/http_client.h"

namespace weft {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::size_t kLarge = WorkQueue::kLargeBytes + 1;

// Work that waits until it is let go.
struct Gate {
  std::atomic<int> inside{0};
  std::atomic<bool> open{false};
  std::function<void()> work() {
    return [this] {
      ++inside;
      while (!open) std::this_thread::sleep_for(milliseconds(1));
      --inside;
    };
  }
};

// Small work begins though every thread but one is busy with large work, and more of it waits.
TEST(WorkQueue, SmallWorkIsNotBehindLargeWork) {
  Gate gate;
  std::atomic<int> done{0};
  WorkQueue queue(2);
  for (int i = 0; i < 5; ++i) queue.post(kLarge, gate.work());
  ASSERT_TRUE(eventually([&] { return gate.inside == 1; }));
  for (int i = 0; i < 5; ++i) queue.post(WorkQueue::kLargeBytes, [&] { ++done; });
  EXPECT_TRUE(eventually([&] { return done == 5; }));
  EXPECT_EQ(gate.inside, 1) << "the other thread leaves large work alone";
  EXPECT_EQ(queue.waiting(), 4u);
  gate.open = true;
  EXPECT_TRUE(eventually([&] { return queue.waiting() == 0 && gate.inside == 0; }));
}

// With a single thread, whose order shows: by the time that work is due, which for large work is later, but not for ever.
TEST(WorkQueue, WhatIsDueFirstBeginsFirst) {
  Gate gate;
  std::mutex mutex;
  std::string order;
  const auto note = [&](char name) {
    return [&, name] {
      const std::lock_guard lock(mutex);
      order += name;
    };
  };
  WorkQueue queue(1);
  queue.post(1, gate.work());
  ASSERT_TRUE(eventually([&] { return gate.inside == 1; }));
  const WorkQueue::Clock::time_point now = WorkQueue::Clock::now();
  queue.post(4 << 20, note('L'), now);                 // due in four seconds
  queue.post(1 << 20, note('M'), now);                 // in one
  queue.post(100, note('a'), now + milliseconds(10));  // overtakes both
  queue.post(100, note('b'), now + milliseconds(10));  // not the one before
  queue.post(100, note('y'), now + seconds(3));
  queue.post(100, note('z'), now + seconds(5));  // has come too late to overtake any
  gate.open = true;
  queue.finish();
  EXPECT_EQ(order, "abMyLz");
}

TEST(WorkQueue, WhatWaitsIsDoneAtTheEnd) {
  for (const int threads : {1, 2, 3}) {
    std::atomic<int> done{0};
    WorkQueue queue(threads);
    for (int i = 0; i < 50; ++i) queue.post(i % 2 == 0 ? 1 : kLarge, [&] { ++done; });
    queue.finish();
    EXPECT_EQ(done, 50) << threads;
    EXPECT_EQ(queue.waiting(), 0u);
  }
}

}  // namespace
}  // namespace weft
