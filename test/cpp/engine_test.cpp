#include "llmc/infer/engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "llmc/infer/scheduler.h"
#include "test/cpp/checked_engine.h"
#include "test/cpp/naive_rules.h"
#include "test/cpp/paged_fake.h"
#include "test/cpp/sanitized.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

using Engine = CheckedEngine;  // so that no test can forget to look
using Ids = std::vector<std::int32_t>;
using Clock = std::chrono::steady_clock;

constexpr std::int32_t kStop = 5;

// What a request gives when nothing else runs, from the formula alone.
struct Alone {
  Ids ids;
  std::vector<float> logprobs, prompt_logprobs;
  RequestEnd end = RequestEnd::max_ids;
};

Alone alone(const EngineRequest& request, const InferenceModel& model) {
  Alone result;
  Ids ids = request.prompt;
  for (std::size_t i = 1; i < ids.size(); ++i) {
    result.prompt_logprobs.push_back(PagedFake::logprob_from(PagedFake::state_of(std::span(ids).first(i)), ids[i]));
  }
  std::uint64_t state = PagedFake::state_of(ids);
  while (std::ssize(result.ids) < request.max_ids) {
    if (std::ssize(ids) == model.max_positions()) {
      result.end = RequestEnd::full;
      break;
    }
    const std::int64_t vocab_size = model.config().vocab_size;
    std::int32_t id = PagedFake::sampled_from(state, request.sampling.seed, std::ssize(ids), vocab_size);
    if (request.rules.any()) {
      std::vector<float> logits = PagedFake::logits_after(state, request.sampling.seed, std::ssize(ids), vocab_size);
      change_naively(request.rules, request.prompt, result.ids, logits);
      id = static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin());
    }
    result.ids.push_back(id);
    result.logprobs.push_back(PagedFake::logprob_from(state, id));
    ids.push_back(id);
    state = PagedFake::state_after(state, id);
    if (std::ranges::find(request.stop_ids, id) != request.stop_ids.end()) {
      result.end = RequestEnd::stop_id;
      break;
    }
  }
  return result;
}

// Keeps what it is told, and checks the order.
class Recorder : public RequestListener {
 public:
  void on_prompt(std::span<const ScoredId> scored) override {
    EXPECT_TRUE(!told && ids.empty() && !end.has_value());
    told = true;
    for (const ScoredId& id : scored) prompt.push_back(id.logprob);
    if (!scored.empty()) alternatives = std::ssize(scored.back().alternatives);
  }
  bool on_id(const ScoredId& id) override {
    EXPECT_FALSE(end.has_value());
    ids.push_back(id.id);
    logprobs.push_back(id.logprob);
    alternatives = std::ssize(id.alternatives);
    if (during) during();
    return std::ssize(ids) != stop_after;
  }
  void on_end(RequestEnd reason) override {
    EXPECT_FALSE(end.has_value());
    end = reason;
  }

  Ids ids;
  std::vector<float> prompt, logprobs;
  std::int64_t alternatives = -1, stop_after = -1;
  bool told = false;
  std::optional<RequestEnd> end;
  std::function<void()> during;
};

EngineRequest request_of(Ids prompt, std::int64_t max_ids, std::uint64_t seed = 0) {
  EngineRequest request;
  request.prompt = std::move(prompt);
  request.max_ids = max_ids;
  request.sampling.seed = seed;
  return request;
}

Ids random_ids(std::int64_t count, std::uint64_t seed, std::int32_t vocab_size = 64) {
  std::mt19937_64 random(seed);
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i) {
    ids.push_back(2 + static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(vocab_size - 2)));
  }
  return ids;
}

struct Asked {
  EngineRequest request;
  std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>();
  RequestId id = 0;
};

void expect_as_alone(const Asked& asked, const InferenceModel& model) {
  const EngineRequest& request = asked.request;
  const Recorder& got = *asked.recorder;
  ASSERT_TRUE(got.end.has_value());
  const bool poisoned = std::ranges::find(request.prompt, PagedFake::kPoison) != request.prompt.end();
  const Alone expected = alone(request, model);
  const bool early = *got.end == RequestEnd::cancelled || *got.end == RequestEnd::deadline;
  if (poisoned && !early) {
    // Scores without an id need not reach the damaged id: it may be the last one.
    if (request.max_ids > 0) {
      EXPECT_EQ(*got.end, RequestEnd::not_finite);
    }
    EXPECT_TRUE(got.ids.empty());
    return;
  }
  if (got.told && !poisoned) {
    EXPECT_EQ(got.prompt, expected.prompt_logprobs);
  }
  if (early || *got.end == RequestEnd::listener) {
    ASSERT_LE(got.ids.size(), expected.ids.size());
    EXPECT_TRUE(std::equal(got.ids.begin(), got.ids.end(), expected.ids.begin()));
    return;
  }
  EXPECT_EQ(got.ids, expected.ids);
  EXPECT_EQ(got.logprobs, expected.logprobs);
  EXPECT_EQ(*got.end, expected.end);
  EXPECT_EQ(got.told, request.score_prompt);
}

std::shared_ptr<Recorder> submit(Engine& engine, EngineRequest request) {
  auto recorder = std::make_shared<Recorder>();
  engine.submit(std::move(request), recorder);
  return recorder;
}

Asked ask(Engine& engine, EngineRequest request) {
  Asked asked{std::move(request)};
  asked.id = engine.submit(asked.request, asked.recorder);
  return asked;
}

// Steps until nothing is left and all is free; more than `limit` steps are a failure.
std::int64_t finish(Engine& engine, std::int64_t limit = 100000) {
  std::int64_t steps = 0;
  while (engine.step() && steps < limit) ++steps;
  EXPECT_LT(steps, limit) << "the engine does not come to an end";
  const EngineStatistics statistics = engine.statistics();
  EXPECT_EQ(statistics.running, 0);
  EXPECT_EQ(statistics.waiting, 0);
  EXPECT_EQ(statistics.pages_in_use, 0);
  EXPECT_EQ(engine.inconsistency(), "");
  return steps;
}

void step(Engine& engine, int steps) {
  for (int i = 0; i < steps; ++i) engine.step();
}

std::shared_ptr<Recorder> finished(Engine& engine, EngineRequest request) {
  auto recorder = submit(engine, std::move(request));
  finish(engine);
  return recorder;
}

// Of each chunk of the last step.
std::vector<std::int64_t> rows_of(const PagedFake& model) {
  std::vector<std::int64_t> rows;
  for (const PagedFake::ChunkRows& chunk : model.rows_of_last_step) rows.push_back(chunk.rows);
  return rows;
}

std::int64_t sum_of(const std::vector<std::int64_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
}

// Options with a draft model.
EngineOptions drafting(InferenceModel& draft, std::int64_t max_running, double row_cost, double draft_cost) {
  EngineOptions options{.max_running = max_running, .rows_per_step = 32};
  options.drafts = {.model = &draft, .row_cost = row_cost, .draft_cost = draft_cost};
  return options;
}

TEST(Engine, ARequestAloneGivesTheModelsIds) {
  for (const std::int64_t depth : {1, 2, 3, 16}) {
    PagedFake model({.depth = depth});
    Engine engine(model, {.max_running = 4, .rows_per_step = 7});
    EngineRequest request = request_of(random_ids(30, 1), 20, 3);
    request.alternatives = 2;
    request.score_prompt = true;
    const Alone expected = alone(request, model);
    const auto got = finished(engine, request);
    EXPECT_EQ(got->ids, expected.ids);
    EXPECT_EQ(got->logprobs, expected.logprobs);
    EXPECT_EQ(got->prompt, expected.prompt_logprobs);
    EXPECT_EQ(got->alternatives, 2);
    EXPECT_EQ(got->end, RequestEnd::max_ids);
    const EngineStatistics statistics = engine.statistics();
    EXPECT_EQ(statistics.prompt_ids, 30);
    EXPECT_EQ(statistics.generated_ids, 20);
    EXPECT_EQ(statistics.rows, 49);  // the last id is not appended
  }
}

// A step is queued behind another one also for a request with rules, which knows all ids but the last; no more than that.
TEST(Engine, RulesDoNotHoldAStepUp) {
  for (const std::int64_t depth : {1, 2, 3}) {
    PagedFake model({.depth = depth});
    Engine engine(model, {.max_running = 4, .rows_per_step = 7});
    EngineRequest request = request_of(random_ids(7, 1), 40, 3);
    request.rules.penalties = {.repetition = 2, .frequency = 0.5, .presence = 0.25};
    request.rules.bad_words = {{9}, {3, 4}, {3, 5}};
    const auto got = submit(engine, request);
    const auto steps = finish(engine);
    EXPECT_EQ(got->ids, alone(request, model).ids);
    if (depth <= 2) {
      EXPECT_EQ(steps, 38 + depth);  // the first of them fills the queue
    }
    error_of(Exit::usage, [&] {
      request.rules.logit_bias = {{64, 1.0f}};
      submit(engine, request);
    });
  }
}

TEST(Engine, EndsOfEveryKind) {
  for (const std::int64_t depth : {1, 2}) {
    PagedFake model({.depth = depth});
    Engine engine(model, {.max_running = 8, .rows_per_step = 32});
    EngineRequest stops = request_of(random_ids(5, 2), 100);
    stops.stop_ids = {alone(stops, model).ids[6]};
    const Alone stopped = alone(stops, model);
    const auto by_id = submit(engine, stops);
    const auto full = submit(engine, request_of(random_ids(190, 3), 1000));
    const auto one = submit(engine, request_of(random_ids(9, 4), 1));
    const auto by_listener = submit(engine, request_of(random_ids(9, 5), 50));
    by_listener->stop_after = 4;
    EngineRequest late = request_of(random_ids(9, 6), 50);
    late.deadline = Clock::now() - std::chrono::seconds(1);
    const auto deadline = submit(engine, late);
    const auto [_, cancelled, id] = ask(engine, request_of(random_ids(9, 7), 50));
    step(engine, 5);
    engine.cancel(id);
    engine.cancel(id);
    engine.cancel(12345);
    finish(engine);
    EXPECT_EQ(by_id->end, RequestEnd::stop_id);
    EXPECT_EQ(by_id->ids, stopped.ids);
    EXPECT_EQ(full->end, RequestEnd::full);
    EXPECT_EQ(full->ids.size(), 10u);
    EXPECT_EQ(one->end, RequestEnd::max_ids);
    EXPECT_EQ(one->ids.size(), 1u);
    EXPECT_EQ(by_listener->end, RequestEnd::listener);
    EXPECT_EQ(by_listener->ids.size(), 4u);
    EXPECT_EQ(deadline->end, RequestEnd::deadline);
    EXPECT_TRUE(deadline->ids.empty());
    EXPECT_EQ(cancelled->end, RequestEnd::cancelled);
    EXPECT_FALSE(cancelled->ids.empty());
    EXPECT_LE(cancelled->ids.size(), 5u);
  }
}

TEST(Engine, APromptCanBeScoredWithoutGenerating) {
  for (const std::int64_t length : {1, 2, 41}) {
    PagedFake model({.depth = 2});
    Engine engine(model, {.max_running = 4, .rows_per_step = 8});
    EngineRequest request = request_of(random_ids(length, 1), 0);
    request.score_prompt = true;
    const auto got = finished(engine, request);
    EXPECT_TRUE(got->told);
    EXPECT_EQ(got->prompt, alone(request, model).prompt_logprobs);
    EXPECT_EQ(got->end, RequestEnd::max_ids);
    EXPECT_EQ(engine.statistics().rows, length - 1);
  }
}

TEST(Engine, RequestsThatCanNeverRunAreRefusedWithTheNumberThatCould) {
  PagedFake model({.num_pages = 10, .max_positions = 100});  // 40 positions
  Engine engine(model, {.max_running = 4, .rows_per_step = 8});
  EXPECT_EQ(engine.refusal(10, 31), "");
  EXPECT_EQ(engine.refusal(10, 32),
            "the request needs memory for the keys and values of 41 positions, and there is memory for 40. After this "
            "prompt at most 31 ids can be generated");
  EXPECT_EQ(engine.refusal(41, 1),
            "the request needs memory for the keys and values of 41 positions, and there is memory for 40. Its prompt "
            "alone has 41 ids");
  EXPECT_EQ(engine.refusal(100, 1), "the prompt has 100 ids, and this model takes at most 99 and a generated one");
  EXPECT_EQ(engine.refusal(101, 0), "the prompt has 101 ids, and this model takes at most 100");
  error_of(Exit::usage, [&] { submit(engine, request_of(random_ids(10, 1), 32)); });
  error_of(Exit::usage, [&] { submit(engine, request_of({}, 1)); });
  error_of(Exit::usage, [&] { submit(engine, request_of({3, 64}, 1)); });
  error_of(Exit::usage, [&] { submit(engine, request_of({3, -1}, 1)); });
  error_of(Exit::usage, [&] { submit(engine, request_of({3}, 0)); });
  error_of(Exit::usage, [&] { submit(engine, request_of({3}, -1)); });
  const auto fits = finished(engine, request_of(random_ids(10, 1), 31));
  EXPECT_EQ(fits->ids, alone(request_of(random_ids(10, 1), 31), model).ids);

  // A model says that it takes no more than its pages hold: the request is refused, and not cut.
  PagedFake small({.num_pages = 10, .max_positions = 40});
  small.change_config().max_positions = 100;
  EXPECT_EQ(Engine(small, {.max_running = 4, .rows_per_step = 8}).refusal(10, 32), engine.refusal(10, 32));

  PagedFake roomy({.num_pages = 100, .max_positions = 100});  // max_ids is cut to what the model can hold
  EXPECT_EQ(Engine(roomy, {.max_running = 4, .rows_per_step = 8}).refusal(50, INT64_MAX), "");
  // A prompt that is only scored may fill the model; one that is continued leaves a position.
  EXPECT_EQ(Engine(roomy, {.max_running = 4, .rows_per_step = 8}).refusal(100, 0), "");
  EXPECT_NE(Engine(roomy, {.max_running = 4, .rows_per_step = 8}).refusal(100, 1), "");
  EXPECT_NE(Engine(roomy, {.max_running = 4, .rows_per_step = 8}).refusal(101, 0), "");
}

TEST(Engine, OptionsOutOfRange) {
  PagedFake model({.slots = 4, .max_rows = 8});
  for (const EngineOptions& options :
       {EngineOptions{.max_running = 0, .rows_per_step = 4}, EngineOptions{.max_running = 5, .rows_per_step = 4},
        EngineOptions{.max_running = 4, .rows_per_step = 0}, EngineOptions{.max_running = 4, .rows_per_step = 9},
        EngineOptions{.max_running = 4, .rows_per_step = 8, .prompt_rows = 0}}) {
    error_of(Exit::usage, [&] { Engine(model, options); });
  }
}

TEST(Engine, LogitsThatAreNotFiniteEndTheirRequestAlone) {
  for (const bool scored : {false, true}) {
    PagedFake model({.depth = 2});
    Engine engine(model, {.max_running = 4, .rows_per_step = 16});
    Ids damaged = random_ids(17, 1);
    damaged[9] = PagedFake::kPoison;
    EngineRequest bad = request_of(damaged, 10);
    bad.score_prompt = scored;
    const auto good = submit(engine, request_of(random_ids(12, 2), 30));
    const auto first = finished(engine, bad);
    EXPECT_EQ(good->ids, alone(request_of(random_ids(12, 2), 30), model).ids);
    EXPECT_EQ(first->end, RequestEnd::not_finite);
    EXPECT_TRUE(first->ids.empty());
    // Its pages are not shared any more: the same request is computed again.
    const auto second = finished(engine, bad);
    EXPECT_EQ(second->end, RequestEnd::not_finite);
    EXPECT_EQ(engine.statistics().prefix_ids, 0);
  }
}

TEST(Engine, APrefixThatIsThereIsNotComputedAgain) {
  for (const bool share : {true, false}) {
    PagedFake model({.num_pages = 200, .depth = 2});
    Engine engine(model, {.max_running = 4, .rows_per_step = 32, .share_prefixes = share});
    const EngineRequest request = request_of(random_ids(40, 1), 1);
    EngineRequest scored = request;
    scored.score_prompt = true;
    finished(engine, request);
    EXPECT_EQ(engine.statistics().rows, 40);
    const auto again = finished(engine, request);
    EXPECT_EQ(again->ids, alone(request, model).ids);
    EXPECT_EQ(engine.statistics().prefix_ids, share ? 36 : 0);  // the last id gives the logits: its page is computed
    EXPECT_EQ(engine.statistics().rows, share ? 44 : 80);
    const auto with_scores = finished(engine, scored);
    EXPECT_EQ(with_scores->prompt, alone(scored, model).prompt_logprobs);
    EXPECT_EQ(engine.statistics().rows, share ? 84 : 120);
    EXPECT_EQ(engine.statistics().pages_cached > 0, share);
  }
}

// A prompt waits for an older one whose next page it can take over, and only for that: not without sharing, and not where the page
// has the prompt's last id, which is computed anyway. Pages have 4 positions.
TEST(Engine, EqualPromptsWaitForPagesThatTheyCanShare) {
  struct Case {
    bool share;
    std::int64_t ids;
    std::vector<std::int64_t> rows;  // of the first step's chunks
  };
  for (const auto& [share, ids, rows] : {Case{true, 10, {10}}, Case{false, 10, {10, 10}}, Case{true, 5, {5}},
                                         Case{true, 4, {4, 4}}, Case{false, 4, {4, 4}}, Case{true, 3, {3, 3}}}) {
    SCOPED_TRACE(std::to_string(ids) + (share ? " ids, shared" : " ids"));
    PagedFake model({});
    Engine engine(model, {.max_running = 4, .rows_per_step = 32, .share_prefixes = share});
    const EngineRequest request = request_of(random_ids(ids, 1), 3);
    const auto one = submit(engine, request), other = submit(engine, request);
    engine.step();
    EXPECT_EQ(rows_of(model), rows);
    finish(engine);
    EXPECT_EQ(one->ids, alone(request, model).ids);
    EXPECT_EQ(other->ids, one->ids);
  }
}

// A prompt beside a sequence with drafts has half of the rows that are left, by hand: of 8 rows one decodes, 3 of the other 7 are
// drafts, 4 are the prompt's.
TEST(Engine, DraftsLeaveRowsForPrompts) {
  PagedFake model({.slots = 2, .max_rows = 8}), draft({.slots = 2, .max_rows = 8});
  DraftOptions drafts{.model = &draft, .row_cost = 1e-3, .draft_cost = 0.05};
  Engine engine(model, {.max_running = 2, .rows_per_step = 8, .prompt_rows = 64, .drafts = drafts});
  const auto first = submit(engine, request_of(random_ids(3, 1), 60));
  while (std::ssize(first->ids) < 20) engine.step();
  const auto second = submit(engine, request_of(random_ids(20, 2), 5));
  engine.step();
  EXPECT_EQ(rows_of(model), (std::vector<std::int64_t>{4, 4}));
  finish(engine);
  EXPECT_EQ(second->ids, alone(request_of(random_ids(20, 2), 5), model).ids);
}

// A conversation's next prompt contains the answer: what was generated is shared, too.
TEST(Engine, GeneratedIdsArePartOfAPrefix) {
  PagedFake model({.depth = 2});
  Engine engine(model, {.max_running = 4, .rows_per_step = 32});
  Ids ids = random_ids(10, 1);
  const auto answer = finished(engine, request_of(ids, 20));
  ids.insert(ids.end(), answer->ids.begin(), answer->ids.end());
  ids.push_back(9);
  const auto next = finished(engine, request_of(ids, 5));
  EXPECT_EQ(next->ids, alone(request_of(ids, 5), model).ids);
  EXPECT_EQ(engine.statistics().prefix_ids, 28);
}

// Four long prompts that begin alike and arrive together: the first one computes, the others follow it.
TEST(Engine, PromptsThatArriveTogetherComputeTheirPrefixOnce) {
  PagedFake model({.num_pages = 400, .max_positions = 400, .depth = 2});
  Engine engine(model, {.max_running = 4, .rows_per_step = 32});
  for (std::int32_t i = 0; i < 4; ++i) {
    Ids ids = random_ids(300, 1);
    ids.push_back(10 + i);
    submit(engine, request_of(ids, 1));
  }
  finish(engine);
  EXPECT_LT(engine.statistics().rows, 301 + 3 * 64);
}

TEST(Engine, AShortPromptDoesNotWaitForALongOne) {
  for (const std::int64_t long_prompts : {1, 6}) {
    PagedFake model({.page_size = 16,
                     .num_pages = 6000,
                     .slots = 32,
                     .max_rows = 256,
                     .max_positions = 12000,
                     .depth = 2,
                     .read_everything = false});
    Engine engine(model, {.max_running = 32, .rows_per_step = 256});
    std::vector<std::shared_ptr<Recorder>> slow;
    for (std::int64_t i = 0; i < long_prompts; ++i) {
      slow.push_back(submit(engine, request_of(random_ids(10000, static_cast<std::uint64_t>(i)), 2)));
    }
    step(engine, 3);
    const auto quick = submit(engine, request_of(random_ids(100, 77), 2));
    step(engine, 3);
    EXPECT_GE(quick->ids.size(), 1u);
    EXPECT_TRUE(slow[0]->ids.empty());
    // A stream of short prompts leaves the oldest long one half of the rows: 10,000 rows in 80 steps of 128.
    std::int64_t steps = 0;
    for (; slow[0]->ids.empty() && steps < 200; ++steps) {
      submit(engine, request_of(random_ids(120, 1000 + static_cast<std::uint64_t>(steps)), 1));
      submit(engine, request_of(random_ids(120, 5000 + static_cast<std::uint64_t>(steps)), 1));
      engine.step();
    }
    EXPECT_LE(steps, 10000 / 120 + 5);
    finish(engine);
  }
}

TEST(Engine, EachStepDecodesEveryRunningSequenceWhilePromptsArrive) {
  PagedFake model({.page_size = 16,
                   .num_pages = 4000,
                   .slots = 32,
                   .max_rows = 64,
                   .max_positions = 12000,
                   .depth = 2,
                   .read_everything = false});
  Engine engine(model, {.max_running = 32, .rows_per_step = 64});
  std::vector<std::shared_ptr<Recorder>> running;
  for (std::uint64_t i = 0; i < 8; ++i) running.push_back(submit(engine, request_of(random_ids(6, i), 300)));
  step(engine, 4);
  for (std::uint64_t i = 0; i < 3; ++i) submit(engine, request_of(random_ids(3000, 100 + i), 1));
  for (int step = 0; step < 100; ++step) {
    const std::size_t before = running[0]->ids.size();
    engine.step();
    for (const auto& one : running) ASSERT_EQ(one->ids.size(), before + 1);
    ASSERT_LE(model.rows_of_last_step.size(), 11u);
    for (std::size_t i = 0; i < 8; ++i) ASSERT_EQ(model.rows_of_last_step[i].rows, 1);  // decodes come first
  }
  finish(engine);
}

// What lies in the model when a step is collected, and whose ids the steps take.
class Pipeline : public PagedFake {
 public:
  using PagedFake::PagedFake;
  void submit(std::span<const Chunk> work) override {
    PagedFake::submit(work);
    ++queued_;
    for (const Chunk& chunk : work) (chunk.ids.empty() ? on_device : from_host) += 1;
  }
  std::span<const ChunkResult> collect() override {
    deepest = std::max(deepest, queued_);
    if (--queued_ == 0) ++idle;
    return PagedFake::collect();
  }
  std::int64_t deepest = 0, idle = 0;  // idle: collected steps behind which none was queued
  std::int64_t on_device = 0, from_host = 0;

 private:
  std::int64_t queued_ = 0;
};

TEST(Engine, TheModelAlwaysHasAStepQueued) {
  for (const std::int64_t depth : {1, 2, 3, 16}) {
    Pipeline model({.depth = depth});
    Engine engine(model, {.max_running = 4, .rows_per_step = 32});
    for (std::uint64_t i = 0; i < 4; ++i) submit(engine, request_of(random_ids(8, i), 40));
    std::int64_t steps = 0;
    while (engine.step()) ++steps;
    EXPECT_EQ(model.deepest, depth);
    EXPECT_EQ(model.idle, depth == 1 ? 40 : 1);  // the last step has none behind it
    EXPECT_EQ(model.from_host, 4);
    EXPECT_EQ(model.on_device, 4 * 39);
    EXPECT_LE(steps, 40 + depth);
  }
}

// A sequence that the draft model has no positions for is not waited for.
TEST(Engine, BehindTheDraftModelsContextStepsAreQueuedAgain) {
  Pipeline model({.max_positions = 200, .depth = 4});
  PagedFake draft({.max_positions = 20, .depth = 4});
  Engine engine(model, drafting(draft, 4, 0.01, 0.05));
  finished(engine, request_of(random_ids(10, 1), 150));
  EXPECT_GT(engine.statistics().drafts.drafted, 0);
  EXPECT_LT(model.idle, 30);  // of some 142 steps
}

TEST(Engine, PromptRowsBesideDecodingAreLimited) {
  PagedFake model({.num_pages = 256, .max_rows = 64, .depth = 2});
  Engine engine(model, {.max_running = 8, .rows_per_step = 64, .prompt_rows = 6, .share_prefixes = false});
  submit(engine, request_of(random_ids(50, 1), 30));
  submit(engine, request_of(random_ids(14, 2), 30));
  engine.step();
  ASSERT_EQ(model.rows_of_last_step.size(), 2u);  // nothing decodes yet: both prompts in one step
  EXPECT_EQ(sum_of(rows_of(model)), 64);
  const auto late = submit(engine, request_of(random_ids(40, 3), 2));
  std::int64_t prompt_rows = 0;
  while (!late->end.has_value()) {
    engine.step();
    const std::int64_t rows = sum_of(rows_of(model));
    ASSERT_LE(rows, 2 + 6);
    prompt_rows += std::max<std::int64_t>(rows - 2, 0);
  }
  EXPECT_GE(prompt_rows, 40);
  finish(engine);
  // Without others a prompt has the whole step.
  submit(engine, request_of(random_ids(60, 4), 1));
  engine.step();
  ASSERT_EQ(model.rows_of_last_step.size(), 1u);
  EXPECT_EQ(model.rows_of_last_step[0].rows, 60);
}

TEST(Engine, DividesRowsBetweenPrompts) {
  const auto divide = [](std::int64_t budget, const std::vector<PromptRows>& prompts, std::int64_t page_size) {
    return divide_rows(budget, prompts, page_size);
  };
  using Rows = std::vector<std::int64_t>;
  EXPECT_EQ(divide(64, {}, 16), Rows{});
  EXPECT_EQ(divide(64, {{0, 1000}}, 16), Rows{64});
  EXPECT_EQ(divide(64, {{8, 1000}}, 16), Rows{56});  // up to the end of a page
  EXPECT_EQ(divide(5, {{8, 1000}}, 16), Rows{5});    // the page does not end in the chunk
  EXPECT_EQ(divide(64, {{0, 30}}, 16), Rows{30});
  EXPECT_EQ(divide(64, {{0, 1000}, {0, 1000}}, 16), (Rows{32, 32}));
  EXPECT_EQ(divide(64, {{0, 1000}, {0, 1000}, {0, 10}}, 16), (Rows{32, 16, 10}));
  EXPECT_EQ(divide(64, {{0, 1000}, {0, 10}}, 16), (Rows{48, 10}));  // the rest goes to the oldest
  EXPECT_EQ(divide(64, {{0, 3}, {0, 10}}, 16), (Rows{3, 10}));
  EXPECT_EQ(divide(1, {{0, 3}, {0, 1}}, 16), (Rows{1, 0}));
  EXPECT_EQ(divide(0, {{5, 3}, {0, 1}}, 16), (Rows{0, 0}));
}

// A prompt that gets fewer rows than a page has: it goes on inside the page, and where the page ends it may find the next
// ones computed by others.
TEST(Engine, APromptGoesOnInTheMiddleOfAPage) {
  for (const std::int64_t rows : {4, 5, 6, 7}) {
    PagedFake model({.slots = 8, .max_rows = 8});
    Engine engine(model, {.max_running = 8, .rows_per_step = rows});
    std::vector<Asked> all;
    for (std::uint64_t i = 0; i < 5; ++i) {
      all.push_back(ask(engine, request_of(i < 3 ? random_ids(2, i) : random_ids(27, 9), 40, i)));
      step(engine, 5);
    }
    finish(engine);
    for (const Asked& asked : all) expect_as_alone(asked, model);
  }
}

// Each of them needs almost the whole pool, so that they can only run one after the other.
TEST(Engine, RequestsThatDisplaceEachOtherAllFinish) {
  for (const std::int64_t depth : {1, 2}) {
    PagedFake model({.num_pages = 16, .slots = 8, .depth = depth});  // 64 positions
    Engine engine(model, {.max_running = 8, .rows_per_step = 16});
    std::vector<Asked> all;
    for (std::uint64_t i = 0; i < 8; ++i) all.push_back(ask(engine, request_of(random_ids(4, i), 60, i)));
    EXPECT_LT(finish(engine), 8 * 70);
    for (const Asked& asked : all) expect_as_alone(asked, model);
    EXPECT_GT(engine.statistics().preemptions, 0);
  }
}

// They need not run again to be told so.
TEST(Engine, RequestsThatWaitEndInTheNextStep) {
  for (const std::int64_t depth : {1, 2}) {
    PagedFake model({.num_pages = 16, .slots = 8, .max_rows = 64, .depth = depth});  // 64 positions
    Engine engine(model, {.max_running = 8, .rows_per_step = 64});
    const EngineRequest all_pages = request_of(random_ids(40, 1), 24);
    const auto older = submit(engine, all_pages);
    const auto displaced = std::make_shared<Recorder>(), never_ran = std::make_shared<Recorder>();
    const RequestId displaced_id = engine.submit(request_of(random_ids(4, 2), 50), displaced);
    const RequestId never_ran_id = engine.submit(request_of(random_ids(60, 3), 2), never_ran);
    for (int i = 0; i < 30 && engine.statistics().preemptions == 0; ++i) engine.step();
    ASSERT_EQ(engine.statistics().preemptions, 1);
    EngineRequest late = request_of(random_ids(60, 4), 2);
    late.deadline = Clock::now() + std::chrono::milliseconds(5);
    const auto out_of_time = submit(engine, late);
    engine.step();
    EXPECT_EQ(engine.statistics().waiting + static_cast<std::int64_t>(out_of_time->end.has_value()), 3);
    EXPECT_FALSE(displaced->ids.empty());
    engine.cancel(displaced_id);
    engine.cancel(never_ran_id);
    std::this_thread::sleep_for(std::chrono::milliseconds(6));
    engine.step();
    EXPECT_EQ(displaced->end, RequestEnd::cancelled);
    EXPECT_EQ(never_ran->end, RequestEnd::cancelled);
    EXPECT_EQ(out_of_time->end, RequestEnd::deadline);
    EXPECT_FALSE(older->end.has_value());
    EXPECT_EQ(engine.statistics().waiting, 0);
    finish(engine);
    EXPECT_EQ(older->ids, alone(all_pages, model).ids);
  }
}

TEST(Engine, ARequestEndsAtItsDeadlineWhileItGenerates) {
  PagedFake model({.depth = 2});
  Engine engine(model, {.max_running = 4, .rows_per_step = 16});
  EngineRequest request = request_of(random_ids(5, 1), 100);
  request.deadline = Clock::now() + std::chrono::hours(1);
  const auto in_time = submit(engine, request);
  request.deadline = Clock::now() + std::chrono::milliseconds(20);
  const auto late = submit(engine, request);
  step(engine, 5);
  std::this_thread::sleep_for(std::chrono::milliseconds(21));
  engine.step();
  EXPECT_EQ(late->end, RequestEnd::deadline);
  EXPECT_LE(late->ids.size(), 5u);
  finish(engine);
  EXPECT_EQ(in_time->end, RequestEnd::max_ids);
  EXPECT_EQ(in_time->ids, alone(request, model).ids);
  EXPECT_TRUE(std::equal(late->ids.begin(), late->ids.end(), in_time->ids.begin()));
}

// In every step short prompts arrive that would fill it.
TEST(Engine, ALongPromptAdvancesWhateverArrives) {
  PagedFake model({.page_size = 16,
                   .num_pages = 1000,
                   .slots = 64,
                   .max_rows = 64,
                   .max_positions = 4000,
                   .depth = 2,
                   .read_everything = false});
  Engine engine(model, {.max_running = 64, .rows_per_step = 64});
  const auto slow = submit(engine, request_of(random_ids(2000, 1), 1));
  std::int64_t steps = 0;
  for (; !slow->end.has_value() && steps < 1000; ++steps) {
    for (std::uint64_t i = 0; i < 4; ++i) {
      submit(engine, request_of(random_ids(20, 100 + static_cast<std::uint64_t>(steps) * 4 + i), 1));
    }
    engine.step();
  }
  EXPECT_LE(steps, 2000 / 32 + 4);  // half of every step
  finish(engine);
}

// A request that needs almost all pages, while small ones arrive that always find some.
TEST(Engine, ALargeRequestIsNotOvertakenForEver) {
  PagedFake model({.num_pages = 16, .slots = 8, .depth = 2});  // 64 positions
  Engine engine(model, {.max_running = 8, .rows_per_step = 32});
  const EngineRequest large = request_of(random_ids(50, 1), 8);
  std::shared_ptr<Recorder> got;
  std::int64_t steps = 0;
  for (; (got == nullptr || !got->end.has_value()) && steps < 1000; ++steps) {
    if (steps % 2 == 0) submit(engine, request_of(random_ids(4, 10 + static_cast<std::uint64_t>(steps)), 8));
    if (steps == 20) got = submit(engine, large);
    engine.step();
  }
  EXPECT_LT(steps, 100);
  EXPECT_EQ(got->ids, alone(large, model).ids);
  finish(engine);
}

// Who asks for many sequences at once does not hold up who asks for few: their groups take turns.
TEST(Engine, GroupsTakeTurns) {
  PagedFake model({});
  Engine engine(model, {.max_running = 1, .rows_per_step = 32});
  std::string order;
  std::vector<RequestId> ids;
  const auto ask = [&](char name, std::uint64_t group) {
    EngineRequest request = request_of({2 + name % 60, 3}, 2);
    request.group = group;
    auto recorder = std::make_shared<Recorder>();
    recorder->during = [&order, name] {
      if (order.empty() || order.back() != name) order += name;
    };
    ids.push_back(engine.submit(std::move(request), recorder));
  };
  const auto many = [&](std::string_view names, std::uint64_t group) {
    for (const char name : names) ask(name, group);
  };
  many("abcdef", 7);
  many("ABC", 8);
  many("12", 0);  // each for itself
  many("g", 7);
  finish(engine);
  EXPECT_EQ(order, "aA12bBcCdefg");
  // The turns go on where sequences that wait are cancelled: the first, one in the middle, and all of a group.
  order.clear();
  ids.clear();
  many("abcd", 7);
  many("AB", 8);
  many("xyz", 9);
  for (const std::size_t i : {0u, 2u, 4u, 5u}) engine.cancel(ids[i]);
  finish(engine);
  EXPECT_EQ(order, "bxdyz");
}

TEST(Engine, AListenerMaySubmitAndCancel) {
  PagedFake model({.depth = 2});
  Engine engine(model, {.max_running = 4, .rows_per_step = 16});
  auto first = std::make_shared<Recorder>(), next = std::make_shared<Recorder>();
  RequestId id = 0;
  first->during = [&] {
    if (first->ids.size() != 3) return;
    engine.submit(request_of({2, 3}, 4), next);
    engine.cancel(id);
  };
  id = engine.submit(request_of({4, 5, 6}, 100), first);
  finish(engine);
  EXPECT_EQ(first->end, RequestEnd::cancelled);
  EXPECT_LE(first->ids.size(), 4u);
  EXPECT_EQ(next->ids, alone(request_of({2, 3}, 4), model).ids);
  // Also with its last id: there is more to do, although no request is left.
  auto last = std::make_shared<Recorder>(), after = std::make_shared<Recorder>();
  last->during = [&] { engine.submit(request_of({2, 3}, 4), after); };
  engine.submit(request_of({7}, 1), last);
  finish(engine);
  EXPECT_EQ(last->ids.size(), 1u);
  EXPECT_EQ(after->ids, next->ids);
}

// Pages that a prefix would find and nobody uses are among those that are free: a sequence that is admitted takes them away.
TEST(Engine, APrefixThatIsOnlyCachedTakesItsPagesFromWhatIsFree) {
  PagedFake model({.page_size = 4, .num_pages = 10, .slots = 4, .max_positions = 40});
  Engine engine(model, {.max_running = 4, .rows_per_step = 32});
  const auto longer = [](Ids ids, std::int64_t by, std::uint64_t seed) {
    const Ids more = random_ids(by, seed);
    ids.insert(ids.end(), more.begin(), more.end());
    return ids;
  };
  const Ids prefix = random_ids(16, 1);
  finished(engine, request_of(longer(prefix, 1, 2), 1));
  ASSERT_EQ(engine.statistics().pages_cached, 4);
  submit(engine, request_of(random_ids(13, 3), 8));  // has 4 pages, and will have 6
  engine.step();
  const EngineRequest request = request_of(longer(prefix, 9, 4), 2);
  const auto after =
      submit(engine, request);  // needs 7 pages: the 4 that are cached, and one more than the 2 beside them
  engine.step();
  EXPECT_EQ(engine.statistics().running, 1);
  EXPECT_EQ(engine.statistics().waiting, 1);
  finish(engine);
  EXPECT_EQ(engine.statistics().preemptions, 0);  // nobody was admitted too early
  EXPECT_EQ(engine.statistics().prefix_ids, 16);
  EXPECT_EQ(after->ids, alone(request, model).ids);

  // Pages of a prefix that another sequence uses cost nothing.
  submit(engine, request_of(longer(prefix, 1, 5), 3));  // 5 pages of 10
  engine.step();
  submit(engine, request_of(longer(prefix, 5, 6), 3));  // 6 pages, of which 4 are in use
  engine.step();
  EXPECT_EQ(engine.statistics().running, 2);
  finish(engine);
}

// What a sequence finds of its own pages when it comes back was not saved by another.
TEST(Engine, PagesFoundAgainAfterAPreemptionAreNotCountedAsShared) {
  PagedFake model({.page_size = 4, .num_pages = 8, .slots = 4, .max_positions = 40});
  Engine engine(model, {.max_running = 4, .rows_per_step = 32});
  const EngineRequest older = request_of(random_ids(9, 1), 12), younger = request_of(random_ids(9, 2), 20);
  const auto first = submit(engine, older), second = submit(engine, younger);
  finish(engine);
  EXPECT_EQ(first->ids, alone(older, model).ids);
  EXPECT_EQ(second->ids, alone(younger, model).ids);
  const EngineStatistics statistics = engine.statistics();
  EXPECT_GE(statistics.preemptions, 1);
  EXPECT_LT(statistics.rows, 20 + 28 + 28);  // some of its pages were still there
  EXPECT_EQ(statistics.prompt_ids, 18);
  EXPECT_EQ(statistics.prefix_ids, 0);
}

// A step has a row for each sequence that decodes: so many run at most.
TEST(Engine, NoMoreSequencesRunThanAStepHasRows) {
  PagedFake model({.slots = 8});
  Engine engine(model, {.max_running = 8, .rows_per_step = 2});
  std::vector<Asked> all;
  for (std::uint64_t i = 0; i < 6; ++i) all.push_back(ask(engine, request_of(random_ids(5, i), 7, i)));
  engine.cancel(12345);                       // of a request that has ended long ago
  EXPECT_EQ(engine.statistics().waiting, 6);  // none was taken up yet
  EXPECT_EQ(engine.statistics().running, 0);
  bool more = true;
  for (int i = 0; more && i < 1000; ++i) {
    more = engine.step();
    EXPECT_LE(engine.statistics().running, 2);
    EXPECT_LE(sum_of(rows_of(model)), 2);
  }
  EXPECT_FALSE(more);
  for (const Asked& asked : all) expect_as_alone(asked, model);
}

// A sequence that runs will need another page: who takes the last one would be preempted for it.
TEST(Engine, APageIsLeftForEachSequenceThatRuns) {
  PagedFake model({.num_pages = 2, .slots = 2});  // pages of 4 positions
  Engine engine(model, {.max_running = 2, .rows_per_step = 16});
  const EngineRequest first = request_of(random_ids(4, 1), 4), second = request_of(random_ids(3, 2), 2);
  const auto older = submit(engine, first), younger = submit(engine, second);
  engine.step();
  EXPECT_EQ(engine.statistics().running, 1);
  finish(engine);
  EXPECT_EQ(engine.statistics().preemptions, 0);
  EXPECT_EQ(older->ids, alone(first, model).ids);
  EXPECT_EQ(younger->ids, alone(second, model).ids);
}

// Whoever waits hears of what comes in, at once.
TEST(Engine, WaitingEndsWithWhatComesIn) {
  PagedFake model({});
  Engine engine(model, {.max_running = 4, .rows_per_step = 32});
  const auto waited = [&](const std::function<void()>& during) {
    const Clock::time_point before = Clock::now();
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      during();
    });
    engine.wait(before + std::chrono::seconds(10));
    other.join();
    return std::chrono::duration<double>(Clock::now() - before).count();
  };
  EXPECT_LT(waited([&] { submit(engine, request_of({3, 4}, 5)); }), 8);
  EXPECT_LT(waited([] {}), 8);  // it is still there
  finish(engine);
  EXPECT_LT(waited([&] { engine.cancel(12345); }), 8);
}

TEST(Engine, RequestsComeFromOtherThreads) {
  PagedFake model({.depth = 2});
  Engine engine(model, {.max_running = 8, .rows_per_step = 16});
  constexpr int kThreads = 4, kEach = 50;
  std::atomic<int> ended = 0;
  class Counter : public RequestListener {
   public:
    explicit Counter(std::atomic<int>& ended) : ended_(ended) {}
    bool on_id(const ScoredId&) override { return true; }
    void on_end(RequestEnd) override { ++ended_; }

   private:
    std::atomic<int>& ended_;
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        const auto seed = static_cast<std::uint64_t>(t * kEach + i);
        const RequestId id = engine.submit(request_of(random_ids(5, seed), 5), std::make_shared<Counter>(ended));
        if (i % 3 == 0) engine.cancel(id);
        EXPECT_GE(engine.statistics().pages, 0);
      }
    });
  }
  while (ended < kThreads * kEach) {
    engine.wait(Clock::now() + std::chrono::seconds(1));
    engine.step();
  }
  for (std::thread& thread : threads) thread.join();
  finish(engine);
  const Clock::time_point before = Clock::now();
  engine.wait(before + std::chrono::milliseconds(20));  // nothing to do: until the time is up
  EXPECT_GE(Clock::now() - before, std::chrono::milliseconds(20));
}

// ---- randomised schedules --------------------------------------------------------------------------------------------

// A request like others before it: its prompt begins with some of the ids of one of four texts.
EngineRequest random_request(std::mt19937_64& random, std::int64_t max_prompt, std::int64_t max_ids,
                             std::int32_t vocab_size = 64) {
  const auto below = [&](std::int64_t limit) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
  };
  Ids prompt = random_ids(below(max_prompt), 1000 + static_cast<std::uint64_t>(below(4)), vocab_size);
  const Ids tail =
      random_ids(1 + below(std::max<std::int64_t>(max_prompt - std::ssize(prompt), 1)), random(), vocab_size);
  prompt.insert(prompt.end(), tail.begin(), tail.end());
  if (below(40) == 0) prompt[static_cast<std::size_t>(below(std::ssize(prompt)))] = PagedFake::kPoison;
  EngineRequest request = request_of(std::move(prompt), 1 + below(max_ids), random() % 5);
  if (below(2) == 0) request.stop_ids = {kStop, 7};
  if (below(4) == 0) request.score_prompt = true;
  if (request.score_prompt && below(4) == 0) request.max_ids = 0;
  request.alternatives = static_cast<std::int32_t>(below(3)) - 1;
  if (below(3) == 0) {
    std::mt19937 of_rules(static_cast<unsigned>(random()));
    request.rules = random_rules(of_rules, vocab_size);
  }
  return request;
}

// One schedule: requests arrive at random, some are cancelled, late, or ended by their listener.
EngineStatistics run_schedule(const PagedFakeSizes& sizes, const EngineOptions& options, std::uint64_t seed,
                              std::int64_t steps) {
  std::mt19937_64 random(seed);
  PagedFake model(sizes);
  Engine engine(model, options);
  std::vector<Asked> all;
  const std::int64_t longest = sizes.num_pages * sizes.page_size;
  for (std::int64_t step = 0; step < steps; ++step) {
    const EngineStatistics now = engine.statistics();
    if (now.waiting < 6 && random() % 3 == 0) {
      Asked asked{random_request(random, longest / 2, longest / 2, static_cast<std::int32_t>(sizes.vocab_size))};
      asked.request.group = random() % 4;
      if (random() % 16 == 0) asked.request.deadline = Clock::now() + std::chrono::microseconds(random() % 500);
      if (random() % 16 == 0) asked.recorder->stop_after = 3;
      asked.id = engine.submit(asked.request, asked.recorder);
      all.push_back(std::move(asked));
    }
    if (!all.empty() && random() % 20 == 0)
      engine.cancel(all[all.size() - 1 - random() % std::min<std::size_t>(all.size(), 8)].id);
    engine.step();
    if (step % 64 == 0) {
      EXPECT_EQ(engine.inconsistency(), "");
    }
  }
  finish(engine);
  for (const Asked& asked : all) expect_as_alone(asked, model);
  EXPECT_GT(all.size(), static_cast<std::size_t>(steps / 20));
  return engine.statistics();
}

TEST(Engine, RandomSchedulesGiveTheIdsOfEachRequestAlone) {
  EngineStatistics sum;
  std::uint64_t seed = 0;
  for (const std::int64_t depth : {1, 2, 3, 16}) {
    for (const bool share : {true, false}) {
      for (const std::int64_t num_pages : {20, 36}) {
        for (const std::int64_t page_size : {1, 4}) {
          const PagedFakeSizes sizes{.page_size = page_size,
                                     .num_pages = num_pages,
                                     .slots = 7,
                                     .max_rows = 24,
                                     .max_positions = 80,
                                     .depth = depth};
          const EngineOptions options{
              .max_running = 6, .rows_per_step = 10 + static_cast<std::int64_t>(seed % 15), .share_prefixes = share};
          const EngineStatistics one = run_schedule(sizes, options, ++seed, 1500);
          sum.steps += one.steps;
          sum.preemptions += one.preemptions;
          sum.prefix_ids += one.prefix_ids;
          if (HasFailure()) FAIL() << "seed " << seed;
        }
      }
    }
  }
  EXPECT_GE(sum.steps, 30000);
  EXPECT_GT(sum.preemptions, 1000);
  EXPECT_GT(sum.prefix_ids, 1000);
}

// With a window pages return while their sequence lives. The model finds every page that it reads and no other one's, the ids
// are those of each request alone: with preemptions, shared prefixes, drafts, and steps in flight.
TEST(Engine, PagesInFrontOfAWindowChangeNoId) {
  EngineStatistics sum;
  std::uint64_t seed = 500;
  for (const std::int64_t depth : {1, 2, 3, 16}) {
    for (const bool share : {true, false}) {
      for (const std::int64_t lookup : {0, 4}) {
        for (const std::int64_t page_size : {1, 4}) {
          for (const std::int64_t window : {2, 4, 9}) {
            const PagedFakeSizes sizes{.vocab_size = 8,
                                       .page_size = page_size,
                                       .num_pages = 28,
                                       .slots = 7,
                                       .max_rows = 40,
                                       .max_positions = 80,
                                       .depth = depth,
                                       .window = window};
            EngineOptions options{
                .max_running = 6, .rows_per_step = 10 + static_cast<std::int64_t>(seed % 15), .share_prefixes = share};
            options.drafts.lookup = lookup;
            options.drafts.row_cost = 1e-3;
            options.drafts.draft_cost = 1;
            const EngineStatistics one = run_schedule(sizes, options, ++seed, 500);
            sum.preemptions += one.preemptions;
            sum.prefix_ids += one.prefix_ids;
            sum.drafts.accepted += one.drafts.accepted;
            if (HasFailure()) FAIL() << "seed " << seed;
          }
        }
      }
    }
  }
  EXPECT_GT(sum.preemptions, 100);
  EXPECT_GT(sum.prefix_ids, 1000);
  EXPECT_GT(sum.drafts.accepted, 100);
}

// A sequence holds the pages of its window, one at each end that it fills in part, and those of the steps in flight.
TEST(Engine, ALongSequenceHoldsThePagesOfItsWindow) {
  for (const std::int64_t depth : {1, 2}) {
    for (const std::int64_t window : {0, 2, 4, 5, 16}) {
      PagedFake model({.num_pages = 50, .depth = depth, .window = window});
      Engine engine(model, {.max_running = 2, .rows_per_step = 8});
      const auto recorder = submit(engine, request_of(random_ids(30, 1), 150));
      std::int64_t most = 0;
      while (engine.step()) {
        if (std::ssize(recorder->ids) > 2) most = std::max(most, engine.statistics().pages_in_use);
      }
      EXPECT_EQ(std::ssize(recorder->ids), 150);
      EXPECT_EQ(recorder->ids, PagedFake::ids_after(random_ids(30, 1), 150, 0, 64));
      EXPECT_LE(most, window == 0 ? 45 : (window + depth + 2) / 4 + 1) << "window " << window;
      EXPECT_GE(most, window == 0 ? 45 : (window + 3) / 4) << "window " << window;
    }
  }
}

// Prompts that are longer than the pages for all of them run beside each other, since each holds those of its window and step.
TEST(Engine, LongPromptsBesideEachOtherNeedThePagesOfTheirWindows) {
  for (const std::int64_t depth : {1, 2}) {
    for (const bool share : {false, true}) {
      PagedFake model({.num_pages = 28, .slots = 4, .max_rows = 8, .max_positions = 112, .depth = depth, .window = 4});
      Engine engine(model, {.max_running = 4, .rows_per_step = 8, .share_prefixes = share});
      const auto run = [&](std::uint64_t seed) {
        std::vector<std::shared_ptr<Recorder>> recorders;
        for (std::uint64_t i = 0; i < 3; ++i)
          recorders.push_back(submit(engine, request_of(random_ids(90, seed + i), 5)));
        std::int64_t together = 0;
        while (engine.step()) together = std::max(together, engine.statistics().running);
        for (std::uint64_t i = 0; i < 3; ++i)
          EXPECT_EQ(recorders[i]->ids, PagedFake::ids_after(random_ids(90, seed + i), 5, 0, 64));
        return together;
      };
      EXPECT_EQ(run(1), 3) << "depth " << depth << " share " << share;
      EXPECT_EQ(engine.statistics().preemptions, 0);
      run(1);
    }
  }
}

// ---- shares of places ------------------------------------------------------------------------------------------------

// `count` sequences of one group with prompts of their own.
std::vector<Asked> ask(Engine& engine, std::uint64_t group, std::int64_t count, std::int64_t max_ids,
                       std::int64_t prompt_ids = 3) {
  static std::uint64_t seed = 7000;
  std::vector<Asked> all;
  for (std::int64_t i = 0; i < count; ++i) {
    ++seed;
    Asked asked{request_of(random_ids(prompt_ids, seed), max_ids, seed % 5)};
    asked.request.group = group;
    asked.id = engine.submit(asked.request, asked.recorder);
    all.push_back(std::move(asked));
  }
  return all;
}

std::int64_t ids_of(const std::vector<Asked>& all) {
  std::int64_t sum = 0;
  for (const Asked& asked : all) sum += std::ssize(asked.recorder->ids);
  return sum;
}

bool ended(const std::vector<Asked>& all) {
  return std::ranges::all_of(all, [](const Asked& asked) { return asked.recorder->end.has_value(); });
}

// Steps until all have ended; how many.
std::int64_t steps_to_end(Engine& engine, const std::vector<Asked>& all, std::int64_t limit = 10000) {
  std::int64_t steps = 0;
  for (; !ended(all) && steps < limit; ++steps) engine.step();
  return steps;
}

// A request of many long sequences holds all places; a small one waits for a step or two, not for the end of one of them.
TEST(Engine, ASmallRequestDoesNotWaitForTheEndOfALargeOne) {
  for (const std::int64_t depth : {1, 2, 3}) {
    PagedFake model({.num_pages = 1000, .depth = depth});
    Engine engine(model, {.max_running = 8, .rows_per_step = 32});
    const std::vector<Asked> large = ask(engine, 7, 30, 150);
    step(engine, 10);
    ASSERT_EQ(engine.statistics().running, 8);
    for (int i = 0; i < 20; ++i) {
      const std::vector<Asked> small = ask(engine, 0, 1, 2);
      EXPECT_LE(steps_to_end(engine, small), 3 + 2 * depth);
      expect_as_alone(small[0], model);
    }
    // What it displaced runs again, and nothing else was.
    step(engine, 5);
    EXPECT_EQ(engine.statistics().running, 8);
    EXPECT_LE(engine.statistics().preemptions, 20);
    finish(engine);
    for (const Asked& asked : large) expect_as_alone(asked, model);
  }
}

// Places are divided equally between requests that want them, and are never empty.
TEST(Engine, RequestsShareThePlaces) {
  PagedFake model({.num_pages = 1000, .depth = 2});
  Engine engine(model, {.max_running = 8, .rows_per_step = 32});
  const auto ids_in_100_steps = [&](const std::vector<const std::vector<Asked>*>& requests) {
    std::vector<std::int64_t> before, gained;
    for (const auto* request : requests) before.push_back(ids_of(*request));
    int full = 0;
    for (int step = 0; step < 100; ++step) {
      engine.step();
      full += engine.statistics().running == 8;
    }
    EXPECT_GE(full, 80);  // the place of a sequence that has ended is taken in the next step
    for (std::size_t i = 0; i < requests.size(); ++i) gained.push_back(ids_of(*requests[i]) - before[i]);
    return gained;
  };
  const std::vector<Asked> first = ask(engine, 7, 60, 160);
  step(engine, 10);
  EXPECT_GE(ids_in_100_steps({&first})[0], 790);  // it has all of them while nobody else asks
  const std::vector<Asked> second = ask(engine, 8, 60, 160);
  step(engine, 30);
  for (const std::int64_t gained : ids_in_100_steps({&first, &second})) EXPECT_NEAR(gained, 400, 20);
  const std::vector<Asked> third = ask(engine, 9, 1, 180), fourth = ask(engine, 0, 1, 180);
  step(engine, 10);
  const std::vector<std::int64_t> gained = ids_in_100_steps({&first, &second, &third, &fourth});
  EXPECT_NEAR(gained[0], 300, 20);
  EXPECT_NEAR(gained[1], 300, 20);
  EXPECT_GE(gained[2], 98);  // one place is all that it can use
  EXPECT_GE(gained[3], 98);
  for (const Asked& asked : second) engine.cancel(asked.id);
  step(engine, 90);
  EXPECT_GE(ids_in_100_steps({&first})[0], 760);
  finish(engine);
  for (const auto* all : {&first, &third, &fourth}) {
    for (const Asked& asked : *all) expect_as_alone(asked, model);
  }
}

// Where pages are scarce the large request gives up those, too; and it does not take them back from the small one, which is younger
// than all of its sequences.
TEST(Engine, ASmallRequestGetsAndKeepsItsPages) {
  for (const std::int64_t depth : {1, 2}) {
    PagedFake model({.num_pages = 40, .slots = 16, .max_positions = 150, .depth = depth});  // 160 positions
    Engine engine(model, {.max_running = 16, .rows_per_step = 32});
    const std::vector<Asked> large = ask(engine, 7, 30, 80);
    step(engine, 25);
    ASSERT_GT(engine.statistics().waiting, 0);
    for (int i = 0; i < 10; ++i) {
      const std::vector<Asked> small = ask(engine, 0, 1, 12, 9);
      EXPECT_LE(steps_to_end(engine, small), 40);
      expect_as_alone(small[0], model);
    }
    EXPECT_FALSE(ended(large));
    finish(engine);
    for (const Asked& asked : large) expect_as_alone(asked, model);
  }
}

// Who has no more than its share gives nothing up.
TEST(Engine, RequestsOfOneSequenceWaitForTheirTurn) {
  PagedFake model({.num_pages = 1000, .depth = 2});
  Engine engine(model, {.max_running = 8, .rows_per_step = 32});
  std::vector<Asked> all = ask(engine, 0, 8, 40);
  step(engine, 10);
  const std::vector<Asked> late = ask(engine, 0, 1, 2), pair = ask(engine, 7, 2, 2);
  step(engine, 20);
  EXPECT_EQ(engine.statistics().waiting, 3);
  finish(engine);
  EXPECT_EQ(engine.statistics().preemptions, 0);
  for (const Asked& asked : all) expect_as_alone(asked, model);
}

// What would not be enough is not taken: the one that waits needs more pages than all that have more than their share hold.
TEST(Engine, NobodyIsDisplacedInVain) {
  PagedFake model({.num_pages = 20, .max_rows = 64, .max_positions = 80});  // pages of 4 positions
  Engine engine(model, {.max_running = 8, .rows_per_step = 64});
  ask(engine, 0, 1, 8, 40);  // 12 pages
  const std::vector<Asked> two = ask(engine, 7, 2, 12, 3);
  step(engine, 3);
  ASSERT_EQ(engine.statistics().running, 3);
  const std::vector<Asked> big = ask(engine, 0, 1, 2, 70);  // 18 pages
  step(engine, 4);
  EXPECT_EQ(engine.statistics().running, 3);
  EXPECT_EQ(engine.statistics().preemptions, 0);
  finish(engine);
  expect_as_alone(big[0], model);
  expect_as_alone(two[0], model);
}

// Small requests come without an end: the large one has what is left, and all of it finishes.
TEST(Engine, ALargeRequestIsNotStarvedBySmallOnes) {
  for (const std::int64_t num_pages : {1000, 60}) {
    PagedFake model({.num_pages = num_pages, .depth = 2});
    Engine engine(model, {.max_running = 8, .rows_per_step = 32});
    const std::vector<Asked> large = ask(engine, 7, 24, 60);
    std::int64_t steps = 0, longest = 0;
    std::deque<std::pair<std::int64_t, std::vector<Asked>>> small;
    for (; !ended(large) && steps < 5000; ++steps) {
      small.emplace_back(steps, ask(engine, 0, 1, 4));
      engine.step();
      for (; !small.empty() && ended(small.front().second); small.pop_front()) {
        longest = std::max(longest, steps - small.front().first);
        expect_as_alone(small.front().second[0], model);
      }
    }
    // A small one takes about 6 steps, so 6 run at a time and 2 places are left: 24 * 60 / 2 steps, and what is computed again.
    EXPECT_LE(steps, 2500) << num_pages;
    EXPECT_LE(longest, 60) << num_pages;
    finish(engine);
    for (const Asked& asked : large) expect_as_alone(asked, model);
  }
}

// A draft model's pages and slot are free as soon as a sequence does not run: after each step, as CheckedEngine looks.
TEST(Engine, DraftsOfASequenceThatIsDisplacedAreGivenBack) {
  for (const std::int64_t depth : {1, 2}) {
    PagedFake model({.num_pages = 40, .depth = depth}), draft({.num_pages = 40, .depth = depth});
    Engine engine(model, drafting(draft, 6, 1e-3, 0.05));
    const std::vector<Asked> large = ask(engine, 7, 12, 60);
    for (int i = 0; i < 12; ++i) {
      engine.step();
      const std::vector<Asked> small = ask(engine, 0, 1, 3);
      steps_to_end(engine, small);
      if (i == 6) engine.cancel(large[0].id);
      if (i == 8) engine.cancel(large[11].id);
    }
    EXPECT_GT(engine.statistics().preemptions, 5);
    finish(engine);
    for (const Asked& asked : large) expect_as_alone(asked, model);
  }
}

// Draft tokens of every kind, right and wrong, in the schedules above: by the draft model's share of wrong ids, or from a
// vocabulary so small that every pair of ids comes again.
TEST(Engine, DraftsChangeNoIdOfAnySchedule) {
  DraftCounts lookups, drafts;
  std::int64_t preemptions = 0;
  std::uint64_t seed = 100;
  const auto add = [&](DraftCounts& sum, const EngineStatistics& one) {
    sum.verifications += one.drafts.verifications;
    sum.drafted += one.drafts.drafted;
    sum.accepted += one.drafts.accepted;
    preemptions += one.preemptions;
  };
  for (const std::int64_t depth : {1, 2, 3}) {
    for (const std::int64_t page_size : {1, 4}) {
      for (const bool share : {true, false}) {
        PagedFakeSizes sizes{.vocab_size = 8,
                             .page_size = page_size,
                             .num_pages = 30,
                             .slots = 7,
                             .max_rows = 40,
                             .max_positions = 80,
                             .depth = depth};
        EngineOptions options{
            .max_running = 6, .rows_per_step = 10 + static_cast<std::int64_t>(seed % 30), .share_prefixes = share};
        options.drafts.lookup = 1 + static_cast<std::int64_t>(seed % 7);
        options.drafts.row_cost = 1e-3;
        options.drafts.draft_cost = 1;  // neither is measured
        add(lookups, run_schedule(sizes, options, ++seed, 1200));

        PagedFakeSizes of_drafts = sizes;
        of_drafts.num_pages = seed % 2 == 0 ? 60 : 20;  // few: sequences go on without draft tokens
        of_drafts.max_rows = 9;
        of_drafts.wrong_of = 2 + static_cast<std::int64_t>(seed % 4);
        of_drafts.max_positions = seed % 3 == 0 ? 30 : 80;
        PagedFake draft(of_drafts);
        options.drafts = {.model = &draft, .row_cost = 1e-3, .draft_cost = 0.05};
        add(drafts, run_schedule(sizes, options, ++seed, 1200));
        if (HasFailure()) FAIL() << "seed " << seed;
      }
    }
  }
  EXPECT_GT(preemptions, 300);
  for (const DraftCounts& sum : {lookups, drafts}) {
    EXPECT_GT(sum.verifications, 1000);
    EXPECT_GT(sum.accepted, 500);
    EXPECT_GT(sum.drafted - sum.accepted, 500);
  }
}

// A draft model that is always right: every verification yields all its draft tokens and one more.
TEST(Engine, RightDraftsTakeFewSteps) {
  for (const std::int64_t depth : {1, 2}) {
    PagedFake model({.depth = depth}), draft({.depth = depth});
    Engine engine(model, drafting(draft, 8, 1e-3, 1e-3));
    const Ids prompt = random_ids(11, 1);
    const auto recorder = submit(engine, request_of(prompt, 41, 3));
    const std::int64_t steps = finish(engine);
    EXPECT_EQ(recorder->ids, PagedFake::ids_after(prompt, 41, 3, 64));
    EXPECT_EQ(*recorder->end, RequestEnd::max_ids);
    const DraftCounts drafts = engine.statistics().drafts;
    EXPECT_EQ(drafts.accepted, drafts.drafted);
    EXPECT_EQ(drafts.ids, 41);
    // The first id is the prompt's; the next 40 are five times 7 draft tokens and one more.
    EXPECT_EQ(drafts.verifications, 5);
    EXPECT_LE(steps, 8);
  }
}

// Logits that are not numbers in the middle of a verification: the ids before them count, and the others go on.
TEST(Engine, AVerificationThatIsNotFiniteEndsItsRequestAlone) {
  for (const std::int64_t finite : {14, 15, 16, 20, 21, 22}) {
    PagedFake model({.finite_positions = finite}), draft({});
    Engine engine(model, drafting(draft, 4, 1e-3, 1e-3));
    const Ids prompt = random_ids(11, 1), other = random_ids(3, 2);
    const auto bad = submit(engine, request_of(prompt, 30, 3)), good = submit(engine, request_of(other, 10, 4));
    finish(engine);
    EXPECT_EQ(bad->end, RequestEnd::not_finite) << finite;
    EXPECT_EQ(bad->ids, PagedFake::ids_after(prompt, finite - 10, 3, 64)) << finite;
    EXPECT_EQ(good->end, RequestEnd::max_ids) << finite;
    EXPECT_EQ(good->ids, PagedFake::ids_after(other, 10, 4, 64)) << finite;
    EXPECT_GT(engine.statistics().drafts.verifications, 1);
  }
}

// One that is always wrong is soon not asked any more, and then steps are queued as without drafts.
TEST(Engine, WrongDraftsAreGivenUp) {
  PagedFake model({.depth = 2}), draft({.depth = 2, .wrong_of = 1});
  Engine engine(model, drafting(draft, 8, 0.01, 0.1));
  const Ids prompt = random_ids(5, 1);
  const auto recorder = finished(engine, request_of(prompt, 150, 3));
  EXPECT_EQ(recorder->ids, PagedFake::ids_after(prompt, 150, 3, 64));
  const DraftCounts drafts = engine.statistics().drafts;
  EXPECT_EQ(drafts.accepted, 0);
  EXPECT_GT(drafts.verifications, 4);  // it is tried again now and then
  EXPECT_LT(drafts.verifications, 30);
}

// Prompts that nobody may draft for: an id that the draft model does not know. Others are not concerned.
TEST(Engine, ASmallerVocabularyOfTheDraftModel) {
  PagedFake model({}), draft({.vocab_size = 60});
  const EngineOptions options = drafting(draft, 8, 1e-3, 1e-3);
  for (const std::int32_t id : {59, 60}) {
    Engine engine(model, options);
    const auto recorder = finished(engine, request_of({3, id, 4}, 12, 3));
    EXPECT_EQ(recorder->ids, PagedFake::ids_after({3, id, 4}, 12, 3, 64));
    EXPECT_EQ(engine.statistics().drafts.drafted > 0, id < 60) << id;
  }
}

// The listener, a stop id and the last id that was asked for end a sequence among ids that are right.
TEST(Engine, ASequenceEndsInTheMiddleOfAVerification) {
  PagedFake model({}), draft({});
  const EngineOptions options = drafting(draft, 8, 1e-3, 1e-3);
  const Ids prompt = random_ids(6, 1), all = PagedFake::ids_after(prompt, 20, 3, 64);
  for (std::int64_t count = 1; count <= 20; ++count) {
    const auto last = all[static_cast<std::size_t>(count - 1)];
    const std::int64_t first = std::ranges::find(all, last) - all.begin() + 1;
    Engine engine(model, options);
    const auto few = submit(engine, request_of(prompt, count, 3));
    EngineRequest stopped = request_of(prompt, 30, 3);
    stopped.stop_ids = {last};
    const auto stop = submit(engine, stopped);
    const auto told = std::make_shared<Recorder>();
    told->stop_after = count;
    engine.submit(request_of(prompt, 30, 3), told);
    finish(engine);
    EXPECT_EQ(few->ids, Ids(all.begin(), all.begin() + count));
    EXPECT_EQ(stop->ids, Ids(all.begin(), all.begin() + first));
    EXPECT_EQ(told->ids, Ids(all.begin(), all.begin() + count));
    EXPECT_EQ(*few->end, RequestEnd::max_ids);
    EXPECT_EQ(*stop->end, RequestEnd::stop_id);
    EXPECT_EQ(*told->end, count < 30 ? RequestEnd::listener : RequestEnd::max_ids);
    // What it leaves behind for others is what was generated: the rows of draft tokens that nobody took have no name.
    const auto again = submit(engine, request_of(prompt, 30, 4));
    Ids longer = prompt;
    longer.insert(longer.end(), all.begin(), all.end());
    const auto after = finished(engine, request_of(longer, 5, 3));
    EXPECT_EQ(again->ids, PagedFake::ids_after(prompt, 30, 4, 64));
    EXPECT_EQ(after->ids, PagedFake::ids_after(longer, 5, 3, 64));
  }
}

TEST(Engine, DraftOptionsOutOfRange) {
  PagedFake model({}), few({.slots = 2});
  const auto refused = [&](const DraftOptions& drafts, Exit code = Exit::usage) {
    return error_of(code, [&] { Engine engine(model, {.max_running = 3, .rows_per_step = 32, .drafts = drafts}); });
  };
  expect_contains(refused({.lookup = 8}), "got 8, expected 1 to 7");
  expect_contains(refused({.lookup = -1}), "got -1");
  expect_contains(refused({.model = &few}), "got 3, expected 1 to 2");
  expect_contains(refused({.lookup = 2, .model = &model}, Exit::internal), "only one of them");
}

// Of --debug-inject accept=P: about that share of the draft tokens counts, whatever is sampled, and the text goes on with them.
TEST(Engine, AnAcceptanceOnDemand) {
  PagedFake model({.num_pages = 600, .max_positions = 2000}),
      draft({.num_pages = 600, .max_positions = 2000, .wrong_of = 1});
  EngineOptions options{.max_running = 1, .rows_per_step = 32};
  options.drafts = {.model = &draft, .row_cost = 0.01, .draft_cost = 0.05, .acceptance = 0.7};
  Engine engine(model, options);
  const auto recorder = finished(engine, request_of(random_ids(6, 1), 1500, 3));
  EXPECT_EQ(recorder->ids.size(), 1500u);
  const DraftCounts drafts = engine.statistics().drafts;
  EXPECT_GT(drafts.ids_per_chunk(), 2.4);  // 1 / (1 - 0.7) at most
  EXPECT_LT(drafts.ids_per_chunk(), 3.34);
}

std::int64_t resident_pages() {
  std::ifstream file("/proc/self/statm");
  std::int64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident;
}

TEST(Engine, ASoakOf20000RequestsLeavesNothingBehind) {
  PagedFake model({.page_size = 8,
                   .num_pages = 80,
                   .slots = 32,
                   .max_rows = 256,
                   .max_positions = 300,
                   .depth = 2,
                   .read_everything = false});
  Engine engine(model, {.max_running = 32, .rows_per_step = 128});
  std::mt19937_64 random(5);
  std::int64_t ended = 0, before = 0;
  std::deque<Asked> recent;
  for (int i = 0; i < 20000; ++i) {
    if (i == 4000) before = resident_pages();
    recent.push_back(ask(engine, random_request(random, 100, 40)));
    if (random() % 10 == 0) engine.cancel(recent[random() % recent.size()].id);
    while (engine.statistics().waiting > 40) engine.step();
    for (; recent.size() > 100 && recent.front().recorder->end.has_value(); recent.pop_front()) {
      expect_as_alone(recent.front(), model);
      ++ended;
    }
  }
  const std::int64_t growth = (resident_pages() - before) * ::sysconf(_SC_PAGESIZE);
  if (!test::sanitized()) {  // a sanitizer keeps freed memory for a while
    EXPECT_LT(growth, 4 << 20);
  }
  finish(engine);
  for (const Asked& asked : recent) expect_as_alone(asked, model);
  EXPECT_EQ(ended + std::ssize(recent), 20000);
  EXPECT_GT(engine.statistics().preemptions, 100);
}

}  // namespace
}  // namespace weft
