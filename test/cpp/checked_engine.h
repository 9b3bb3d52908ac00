// An engine for tests, after which nothing may be held, whatever the test has done with it: at its end what is left is cancelled,
// and then all pages, slots, turns and drafts are free (Engine::step() fails otherwise). On the way nothing may be held in vain.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/infer/engine.h"

namespace weft {

class CheckedEngine : public Engine {
 public:
  using Engine::Engine;
  ~CheckedEngine() {
    for (const RequestId id : ids_) cancel(id);
    try {
      int steps = 0;
      while (step() && steps < 1000) ++steps;
      EXPECT_LT(steps, 1000) << "cancelled requests do not end";
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
    const EngineStatistics now = statistics();
    EXPECT_EQ(now.running, 0);
    EXPECT_EQ(now.waiting, 0);
    EXPECT_EQ(now.pages_in_use, 0);
    EXPECT_EQ(inconsistency(), "");
  }

  RequestId submit(EngineRequest request, std::shared_ptr<RequestListener> listener) {
    const RequestId id = Engine::submit(std::move(request), std::move(listener));
    const std::lock_guard lock(mutex_);
    ids_.push_back(id);
    return id;
  }
  bool step() {
    const bool more = Engine::step();
    if (statistics().pages <= kFewPages) {
      EXPECT_EQ(inconsistency(), "");
    }
    return more;
  }

 private:
  static constexpr std::int64_t kFewPages = 100;  // it reads them all

  std::mutex mutex_;
  std::vector<RequestId> ids_;
};

}  // namespace weft
