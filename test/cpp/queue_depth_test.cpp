// How many steps are queued on a device, and what that is for: a host whose thread loses its core for longer than a step.
#include "llmc/model/queue_depth.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "llmc/infer/batch_bench.h"
#include "llmc/infer/bench.h"
#include "llmc/infer/engine.h"
#include "llmc/model/single_sequence.h"
#include "paged_fake.h"

namespace weft {
namespace {

// After `steps` steps of this time.
std::int64_t depth_after(std::int64_t most, double step_seconds, int steps) {
  QueueDepth depth(most, 24e-3);
  for (int i = 0; i < steps; ++i) depth.collected(100 + step_seconds * i);
  return depth.steps();
}

TEST(QueueDepth, CoversATimeOfTheDevice) {
  EXPECT_EQ(depth_after(16, 1.5e-3, 0), 2) << "nothing is known";
  EXPECT_EQ(depth_after(16, 1.5e-3, 1), 2) << "an end alone is no time";
  EXPECT_EQ(depth_after(16, 1.5e-3, 2), 16);
  EXPECT_EQ(depth_after(16, 2.8e-3, 40), 9);
  EXPECT_EQ(depth_after(16, 20e-3, 40), 2);
  EXPECT_EQ(depth_after(16, 200e-3, 40), 2) << "one is queued behind the one that runs";
  EXPECT_EQ(depth_after(16, 1e-6, 40), 16);
  EXPECT_EQ(depth_after(16, 0, 40), 16);
  for (const int steps : {0, 40}) EXPECT_EQ(depth_after(1, 1.5e-3, steps), 1) << "the device queues nothing";
}

TEST(QueueDepth, FollowsTheStepsAndNotThePauses) {
  QueueDepth depth(16, 24e-3);
  double now = 0;
  const auto run = [&](int steps, double seconds) {
    for (int i = 0; i < steps; ++i) depth.collected(now += seconds);
  };
  run(20, 4e-3);
  EXPECT_EQ(depth.steps(), 6);
  run(15, 100e-3);  // the host was late, or nothing was asked for
  EXPECT_EQ(depth.steps(), 6);
  run(1, 8e-3);  // the last of 16
  EXPECT_EQ(depth.steps(), 3);
}

// A device with a clock of its own, and a host that has a core for 4 ms and then none for 8, in simulated time: a step takes
// `step_ms` and begins when it was submitted and the one before has ended; submitting one takes the host 40 us and collecting it
// 20. `host` is the host's clock.
class LateHost final : public PagedFake {
 public:
  LateHost(const PagedFakeSizes& sizes, double step_ms) : PagedFake(sizes), step_ms_(step_ms) {}
  void submit(std::span<const Chunk> work) override {
    PagedFake::submit(work);
    spend(0.04);
    device_ = std::max(device_, host_ms) + step_ms_;
    ready_.push_back(device_);
    deepest = std::max(deepest, std::ssize(ready_));
  }
  std::span<const ChunkResult> collect() override {
    while (host_ms < ready_.front()) spend(std::min(ready_.front() - host_ms, 0.1));  // as a thread that polls
    spend(0.02);
    ended_ = ready_.front();
    ready_.pop_front();
    ++collected_;
    return PagedFake::collect();
  }
  double ended_seconds() const override { return 1e-3 * ended_; }
  std::int64_t collected_steps() const { return collected_; }

  double host_ms = 0, late_ms = 8;
  std::int64_t deepest = 0;

 private:
  void spend(double ms) {
    host_ms += ms;
    used_ += ms;
    if (used_ < 4) return;
    used_ = 0;
    host_ms += late_ms;
  }

  double step_ms_, device_ = 0, ended_ = 0, used_ = 0;
  std::int64_t collected_ = 0;
  std::deque<double> ready_;
};

PagedFakeSizes sizes_of(std::int64_t sequences, std::int64_t depth) {
  PagedFakeSizes sizes;
  sizes.vocab_size = 1 << 20;  // the one id that is poison is not among the random ones
  sizes.page_size = 32;
  sizes.num_pages = 20 * sequences;
  sizes.slots = sequences;
  sizes.max_rows = 64 * sequences;
  sizes.max_positions = 600;
  sizes.depth = depth;
  sizes.read_everything = false;
  return sizes;
}

// The first steps, whose time is not known yet, are at most two deep.
TEST(QueueDepth, AHostThatIsLateLosesNothing) {
  for (const auto& [depth, least, most] : {std::tuple(2, 20.0, 80.0), std::tuple(16, -1e-9, 3.0)}) {
    SCOPED_TRACE(testing::Message() << "depth " << depth);
    const auto one = std::make_shared<LateHost>(sizes_of(1, depth), 1.5);
    const auto sequence = single_sequence(one, 600);
    const BenchResult bench = run_bench(*sequence, {.tokens = 500});
    const double loss_of_one = 100 * (1 - 1.5e-3 * bench.main.decode.tokens_per_second());
    EXPECT_GE(loss_of_one, least);
    EXPECT_LE(loss_of_one, most);
    EXPECT_NEAR(bench.main.decode.inter_token_percentile(50), 1.5, 1e-6) << "by the device's clock";

    LateHost many(sizes_of(64, depth), 2.8);
    BatchBenchOptions options;
    options.sequences = {64};
    options.prompt = 32;
    options.tokens = 400;
    EngineOptions engine;
    engine.rows_per_step = many.max_rows();
    const BatchBenchPoint point = run_batch_bench(many, engine, options).points[0];
    const double loss_of_many = 100 * (1 - 2.8e-3 * point.tokens_per_second() / 64);
    EXPECT_GE(loss_of_many, least / 4);
    EXPECT_LE(loss_of_many, most);
    EXPECT_NEAR(point.step_percentile(50), 2.8, 1e-6) << "by the device's clock";
    EXPECT_EQ(many.deepest, depth == 2 ? 2 : 9);
  }
}

// ---- the engine's reasons against a deep queue --------------------------------------------------------------------------

class Quiet : public RequestListener {
 public:
  bool on_id(const ScoredId& id) override {
    ids.push_back(id.id);
    return std::ssize(ids) < last;
  }
  void on_end(RequestEnd) override { ended = true; }
  std::vector<std::int32_t> ids;
  std::int64_t last = 1 << 30;  // ends the request
  bool ended = false;
};

struct Asked {
  std::int64_t prompt = 8, max_ids = 300;
  bool rules = false;
};
std::shared_ptr<Quiet> submit(Engine& engine, const Asked& asked) {
  EngineRequest request;
  request.prompt.assign(static_cast<std::size_t>(asked.prompt), 7);
  request.max_ids = asked.max_ids;
  if (asked.rules) request.rules.penalties.repetition = 2;
  auto listener = std::make_shared<Quiet>();
  engine.submit(std::move(request), listener);
  return listener;
}

std::int64_t in_flight(const Engine& engine, const LateHost& model) {
  return engine.statistics().steps - model.collected_steps();
}

TEST(QueueDepth, TheEngineQueuesOnlyWhatNobodyWaitsBehind) {
  const auto settle = [](Engine& engine, LateHost& model) {
    for (int i = 0; i < 60; ++i) engine.step();
    model.deepest = 0;
    for (int i = 0; i < 60; ++i) engine.step();
    return model.deepest;
  };
  PagedFakeSizes sizes = sizes_of(4, 16);
  sizes.vocab_size = 64;  // rules need a logit of each
  EngineOptions options{.max_running = 2, .rows_per_step = 64};
  {
    LateHost model(sizes, 1.5);
    Engine engine(model, options);
    submit(engine, {});
    submit(engine, {});
    EXPECT_EQ(settle(engine, model), 16);
    // A third one waits for a place.
    submit(engine, {});
    engine.step();
    while (in_flight(engine, model) > 2) engine.step();
    EXPECT_EQ(settle(engine, model), 2);
  }
  {
    LateHost model(sizes, 1.5);
    Engine engine(model, options);
    submit(engine, {});
    submit(engine, {.rules = true});
    EXPECT_EQ(settle(engine, model), 2) << "rules need to know the ids";
  }
  {
    LateHost model(sizes, 1.5);
    Engine engine(model, {.max_running = 2, .rows_per_step = 64, .queued_seconds = 4e-3});
    submit(engine, {});
    EXPECT_EQ(settle(engine, model), 3) << "4 ms of 1.5";
  }
  {
    sizes.num_pages = 11;  // 352 positions: not the 600 that two sequences want
    LateHost model(sizes, 1.5);
    Engine engine(model, options);
    const auto one = submit(engine, {}), two = submit(engine, {});
    while (engine.step()) {
    }
    EXPECT_EQ(std::ssize(one->ids), 300);
    EXPECT_EQ(std::ssize(two->ids), 300);
    EXPECT_GT(engine.statistics().preemptions, 0);
    EXPECT_LE(engine.statistics().preemptions, 2)
        << "the steps in flight are collected before a sequence loses its pages";
    EXPECT_EQ(engine.inconsistency(), "");
  }
}

// Who arrives waits for the queue and for no step more; who leaves has computed no more rows in vain than are queued, and nobody
// hears of them.
TEST(QueueDepth, ArrivalsAndEndsCostNoMoreThanTheQueue) {
  LateHost model(sizes_of(4, 16), 1.5);
  model.late_ms = 0;
  Engine engine(model, {.max_running = 4, .rows_per_step = 64, .queued_seconds = 12e-3});
  const auto first = submit(engine, {.max_ids = 500});
  for (int i = 0; i < 100; ++i) engine.step();
  const double arrived = model.host_ms;
  const auto second = submit(engine, {.max_ids = 500});
  while (second->ids.empty()) engine.step();
  EXPECT_GE(model.host_ms - arrived, 7 * 1.5);
  EXPECT_LE(model.host_ms - arrived, 10 * 1.5) << "a queue of 8, and its own step";

  for (int i = 0; i < 100; ++i) engine.step();
  const std::int64_t rows = engine.statistics().rows, before = std::ssize(first->ids) + std::ssize(second->ids);
  first->last = std::ssize(first->ids) + 1;
  second->last = std::ssize(second->ids) + 1;
  while (engine.step()) {
  }
  EXPECT_TRUE(first->ended && second->ended);
  EXPECT_EQ(std::ssize(first->ids) + std::ssize(second->ids), before + 2);
  EXPECT_LE(engine.statistics().rows - rows, 2 * 8);
  EXPECT_EQ(engine.statistics().pages_in_use, 0);
  EXPECT_EQ(engine.inconsistency(), "");
}

}  // namespace
}  // namespace weft
