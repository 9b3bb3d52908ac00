// Drivers for tests of an InferenceModel on either device: what a sequence gives must not depend on what else runs. One deals
// out pages and chunks itself, the other is the engine with few pages.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/logit_rules.h"
#include "llmc/base/sampler.h"
#include "llmc/base/sampling.h"
#include "llmc/infer/draft_length.h"
#include "llmc/infer/engine.h"
#include "llmc/model/inference_model.h"
#include "test/cpp/naive_rules.h"
#include "test/cpp/test_files.h"

namespace weft::test {

// ---- chunks and pages dealt out at random --------------------------------------------------------------------------------

// What a sequence gives: a sampled id and the logits after every chunk, and the log-probabilities of its prompt.
struct Trace {
  std::vector<std::int32_t> ids;
  std::vector<std::vector<float>> logits;
  std::vector<float> logprobs;
  bool operator==(const Trace&) const = default;
};

struct Sequence {
  std::vector<std::int32_t> prompt;
  SamplingPlan plan;
};

constexpr std::int64_t kGenerated = 9, kSlots = 7;

// Prompts of 1 to max_prompt ids, every other one sampled.
inline std::vector<Sequence> random_sequences(const ModelConfig& config, std::int64_t count, unsigned max_prompt) {
  std::vector<Sequence> all;
  std::mt19937 random(8);
  for (std::int64_t i = 0; i < count; ++i) {
    Sequence sequence;
    sequence.prompt.resize(1 + random() % max_prompt);
    for (std::int32_t& id : sequence.prompt) id = static_cast<std::int32_t>(random() % config.tokenizer_vocab);
    SamplerOptions options;
    options.temperature = i % 2 == 0 ? 0.8 : 0;
    options.seed = static_cast<std::uint64_t>(i);
    options.vocab_limit = config.tokenizer_vocab;
    sequence.plan = sampling_plan(options);
    all.push_back(sequence);
  }
  return all;
}

// Runs the sequences side by side: their prompts in chunks of random sizes up to `chunk`, their chunks in random order, in
// pages that are dealt out at random. With `chained` a decode step takes its id from the slot.
inline std::vector<Trace> run(InferenceModel& model, const std::vector<Sequence>& all, std::int64_t chunk, bool chained,
                              std::uint32_t seed) {
  struct State {
    std::vector<std::int32_t> pages, ids;  // ids: prompt, then what was sampled
    std::int64_t done = 0;                 // positions in the pages
  };
  std::mt19937 random(seed);
  std::vector<std::int32_t> free(static_cast<std::size_t>(model.num_pages()));
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), random);
  std::vector<State> states;
  for (const Sequence& sequence : all) states.push_back({{}, sequence.prompt});
  std::vector<Trace> traces(all.size());
  const auto ended = [&](std::size_t s) { return traces[s].ids.size() == kGenerated; };

  while (true) {
    std::vector<std::size_t> order;
    for (std::size_t s = 0; s < all.size(); ++s) {
      if (!ended(s) && random() % 4 != 0) order.push_back(s);  // a sequence may wait a step
    }
    std::shuffle(order.begin(), order.end(), random);
    std::vector<Chunk> work;
    std::int64_t rows = 0;
    for (const std::size_t s : order) {
      State& state = states[s];
      const std::int64_t left = std::ssize(state.ids) - state.done;
      const std::int64_t count = std::min<std::int64_t>(left, 1 + static_cast<std::int64_t>(random()) % chunk);
      rows += count;
      if (rows > model.max_rows()) break;
      while (std::ssize(state.pages) * model.page_size() < state.done + count) {
        state.pages.push_back(free.back());
        free.pop_back();
      }
      Chunk chunk;
      chunk.pages = state.pages;
      chunk.first_position = state.done;
      chunk.slot = static_cast<std::int32_t>(s);
      chunk.alternatives = 2;
      const std::span<const std::int32_t> ids = std::span(state.ids).subspan(static_cast<std::size_t>(state.done));
      const bool in_prompt = state.done < std::ssize(all[s].prompt);
      if (!(chained && !in_prompt)) chunk.ids = ids.first(static_cast<std::size_t>(count));
      if (in_prompt) chunk.targets = ids.subspan(1, static_cast<std::size_t>(std::min(count, left - 1)));
      if (count == left) chunk.sampling = &all[s].plan, chunk.keep_logits = true;
      work.push_back(chunk);
      state.done += count;
    }
    if (work.empty()) {
      if (std::all_of(states.begin(), states.end(), [&](const State& s) { return ended(&s - states.data()); })) break;
      continue;
    }
    model.submit(work);
    const std::span<const ChunkResult> results = model.collect();
    for (std::size_t w = 0; w < work.size(); ++w) {
      const std::size_t s = static_cast<std::size_t>(work[w].slot);
      for (const ScoredId& target : results[w].targets) traces[s].logprobs.push_back(target.logprob);
      if (!results[w].sampled) continue;
      states[s].ids.push_back(results[w].sampled->id);
      traces[s].ids.push_back(results[w].sampled->id);
      traces[s].logprobs.push_back(results[w].sampled->logprob);
      for (const IdLogprob& other : results[w].sampled->alternatives) traces[s].logprobs.push_back(other.logprob);
      traces[s].logits.emplace_back(results[w].logits.begin(), results[w].logits.end());
    }
  }
  return traces;
}

// ---- the engine ---------------------------------------------------------------------------------------------------------

// Passes every call on, with another depth.
class WithDepth final : public InferenceModel {
 public:
  WithDepth(InferenceModel& inner, std::int64_t depth) : inner_(inner), depth_(depth) {}
  const ModelConfig& config() const override { return inner_.config(); }
  std::vector<MemoryLine> memory() const override { return inner_.memory(); }
  std::uint64_t bytes_per_step(std::int64_t sequences, std::int64_t context) const override {
    return inner_.bytes_per_step(sequences, context);
  }
  std::int64_t page_size() const override { return inner_.page_size(); }
  std::int64_t num_pages() const override { return inner_.num_pages(); }
  std::int64_t slots() const override { return inner_.slots(); }
  std::int64_t max_rows() const override { return inner_.max_rows(); }
  std::int64_t max_positions() const override { return inner_.max_positions(); }
  std::int64_t depth() const override { return depth_; }
  void submit(std::span<const Chunk> work) override { inner_.submit(work); }
  std::span<const ChunkResult> collect() override { return inner_.collect(); }
  double ended_seconds() const override { return inner_.ended_seconds(); }
  void keep_activations(bool keep) override { inner_.keep_activations(keep); }
  std::vector<float> activation(const std::string& name) override { return inner_.activation(name); }

 private:
  InferenceModel& inner_;
  std::int64_t depth_;
};

// What the engine told about a request.
struct EngineTrace {
  std::vector<std::int32_t> ids;  // sampled, and the alternatives of each
  std::vector<float> logprobs;    // of these
  std::vector<float> prompt;      // of the prompt
  std::optional<RequestEnd> end;
  bool operator==(const EngineTrace&) const = default;
};
class EngineRecorder : public RequestListener {
 public:
  void on_prompt(std::span<const ScoredId> scored) override {
    for (const ScoredId& id : scored) {
      trace.prompt.push_back(id.logprob);
      for (const IdLogprob& other : id.alternatives) trace.prompt.push_back(other.logprob);
    }
  }
  bool on_id(const ScoredId& id) override {
    trace.ids.push_back(id.id);
    trace.logprobs.push_back(id.logprob);
    for (const IdLogprob& other : id.alternatives) {
      trace.ids.push_back(other.id);
      trace.logprobs.push_back(other.logprob);
    }
    return true;
  }
  void on_end(RequestEnd end) override { trace.end = end; }
  EngineTrace trace;
};

// Prompts that begin like one of three texts, and everything else that a request may ask for.
inline std::vector<EngineRequest> random_requests(const InferenceModel& model, std::int64_t count, unsigned seed) {
  std::mt19937 random(seed), of_rules(seed);
  const auto below = [&](std::int64_t limit) {
    return static_cast<std::int64_t>(random() % static_cast<unsigned>(limit));
  };
  const std::int64_t vocab = model.config().tokenizer_vocab;
  const std::int64_t longest = std::min(model.max_positions(), model.num_pages() * model.page_size());
  std::vector<EngineRequest> requests;
  for (std::int64_t i = 0; i < count; ++i) {
    EngineRequest request;
    std::mt19937 text(static_cast<unsigned>(below(3)));
    const std::int64_t shared = below(longest / 3), own = 1 + below(longest / 6);
    for (std::int64_t t = 0; t < shared + own; ++t) {
      request.prompt.push_back(
          static_cast<std::int32_t>((t < shared ? text() : random()) % static_cast<unsigned>(vocab)));
    }
    SamplerOptions options;
    options.temperature = below(2) == 0 ? 0.9 : 0;
    options.top_k = below(3) == 0 ? 20 : 0;
    options.seed = static_cast<std::uint64_t>(i);
    options.vocab_limit = vocab;
    request.sampling = sampling_plan(options);
    request.max_ids = 1 + below(longest / 2);
    if (below(3) == 0) {
      request.stop_ids = {static_cast<std::int32_t>(below(vocab)), static_cast<std::int32_t>(below(vocab))};
    }
    request.alternatives = static_cast<std::int32_t>(below(5)) - 1;
    request.score_prompt = below(4) == 0;
    if (i % 3 == 0) request.rules = random_rules(of_rules, static_cast<std::int32_t>(vocab));
    requests.push_back(std::move(request));
  }
  return requests;
}

// Each request alone, then all of them arriving at random times, in `schedules` ways: depths, chunks of prompts, with and
// without shared prefixes, with `drafts`. Returns the sums of what happened.
inline EngineStatistics expect_engine_changes_nothing(InferenceModel& model, int schedules, std::int64_t requests,
                                                      unsigned seed, const DraftOptions& drafts = {}) {
  const std::vector<EngineRequest> all = random_requests(model, requests, seed);
  const auto finish = [](Engine& engine) {
    while (engine.step()) {
    }
    EXPECT_EQ(engine.statistics().pages_in_use, 0);
    EXPECT_EQ(engine.inconsistency(), "");
  };
  std::vector<EngineTrace> alone;
  EngineOptions one_by_one;
  one_by_one.max_running = 1;
  one_by_one.rows_per_step = model.max_rows();
  one_by_one.share_prefixes = false;
  for (const EngineRequest& request : all) {
    Engine engine(model, one_by_one);
    const auto recorder = std::make_shared<EngineRecorder>();
    engine.submit(request, recorder);
    finish(engine);
    alone.push_back(recorder->trace);
  }
  EngineStatistics sum;
  std::mt19937 random(seed + 1);
  for (int schedule = 0; schedule < schedules; ++schedule) {
    WithDepth shallow(model, 1 + schedule % model.depth());
    EngineOptions options;
    options.max_running = model.slots();
    options.rows_per_step = std::min<std::int64_t>(model.max_rows(), 5 + static_cast<std::int64_t>(random() % 60));
    options.prompt_rows = 1 + static_cast<std::int64_t>(random() % 60);
    options.share_prefixes = schedule % 3 != 0;
    options.drafts = drafts;
    Engine engine(shallow, options);
    std::vector<std::shared_ptr<EngineRecorder>> recorders;
    for (const EngineRequest& request : all) {
      recorders.push_back(std::make_shared<EngineRecorder>());
      engine.submit(request, recorders.back());
      for (auto wait = random() % 4; wait > 0; --wait) engine.step();
    }
    finish(engine);
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_TRUE(recorders[i]->trace == alone[i])
          << "request " << i << ", schedule " << schedule << ", depth " << shallow.depth();
    }
    const EngineStatistics one = engine.statistics();
    sum.steps += one.steps;
    sum.preemptions += one.preemptions;
    sum.prefix_ids += one.prefix_ids;
    sum.drafts.verifications += one.drafts.verifications;
    sum.drafts.accepted += one.drafts.accepted;
  }
  return sum;
}

// A chunk with drafts gives the ids and log-probabilities that chunks of one row give, as far as its drafts are right, and
// leaves pages from which the sequence goes on whatever was drafted. `model`: at least 24 pages, 48 positions a sequence.
inline void expect_drafts_verified(InferenceModel& model) {
  constexpr std::int64_t kIds = 20, kPrompt = 7;
  std::vector<std::int32_t> pages(static_cast<std::size_t>(48 / model.page_size()));
  std::iota(pages.rbegin(), pages.rend(), 2);
  const auto vocab = static_cast<std::int32_t>(model.config().tokenizer_vocab);
  for (const double temperature : {0.0, 0.7}) {
    SamplerOptions sampler;
    sampler.temperature = temperature;
    sampler.seed = 5;
    sampler.vocab_limit = vocab;
    const SamplingPlan plan = sampling_plan(sampler);
    std::vector<std::int32_t> ids = {3, 1, 4, 1, 5, 9, 2};
    Chunk chunk;
    chunk.pages = pages;
    chunk.slot = 2;
    chunk.alternatives = 3;
    chunk.sampling = &plan;
    const auto run = [&](std::int64_t first, std::span<const std::int32_t> rows, std::int64_t drafts) {
      chunk.first_position = first;
      chunk.ids = rows;
      chunk.drafts = drafts;
      model.submit({&chunk, 1});
      return ChunkResult(model.collect()[0]);
    };
    std::vector<ScoredId> plain = {*run(0, ids, 0).sampled};
    for (std::int64_t i = 0; i < kIds; ++i) {
      ids.push_back(plain.back().id);
      plain.push_back(*run(kPrompt + i, std::span(ids).last(1), 0).sampled);
    }
    const auto expect_same = [](const ScoredId& a, const ScoredId& b) {
      EXPECT_EQ(a.id, b.id);
      EXPECT_EQ(a.logprob, b.logprob);
      ASSERT_EQ(a.alternatives.size(), b.alternatives.size());
      for (std::size_t i = 0; i < a.alternatives.size(); ++i) EXPECT_EQ(a.alternatives[i].id, b.alternatives[i].id);
    };
    // From every position: k drafts of which the first `right` are right.
    for (std::int64_t begin = 0, k = 1, right = 0; begin + k < kIds;) {
      std::vector<std::int32_t> rows = {plain[static_cast<std::size_t>(begin)].id};
      for (std::int64_t i = 1; i <= k; ++i) {
        const std::int32_t id = plain[static_cast<std::size_t>(begin + i)].id;
        rows.push_back(i <= right ? id : (id + 1) % vocab);
      }
      const ChunkResult result = run(kPrompt + begin, rows, k);
      EXPECT_EQ(result.error, SampleError::none);
      ASSERT_EQ(std::ssize(result.accepted), right);
      ASSERT_TRUE(result.sampled.has_value());
      for (std::int64_t i = 0; i < right; ++i) {
        expect_same(result.accepted[static_cast<std::size_t>(i)], plain[static_cast<std::size_t>(begin + i + 1)]);
      }
      expect_same(*result.sampled, plain[static_cast<std::size_t>(begin + right + 1)]);
      begin += right + 1;
      k = k % kMostDrafted + 1;
      right = std::min(k, (right + 3) % 6);
    }
    chunk.drafts = 0;
  }
  const auto refused = [&](const auto& change) {
    const std::vector<std::int32_t> ids = {5, 9, 2};
    const SamplingPlan plan = sampling_plan({});
    Chunk chunk;
    chunk.pages = pages;
    chunk.ids = ids;
    chunk.sampling = &plan;
    chunk.drafts = 2;
    change(chunk);
    EXPECT_NE(error_of(Exit::internal,
                       [&] {
                         model.submit({&chunk, 1});
                       })
                  .find("drafts in a chunk"),
              std::string::npos);
  };
  refused([](Chunk& s) { s.drafts = 3; });
  refused([](Chunk& s) { s.drafts = -1; });
  refused([](Chunk& s) { s.sampling = nullptr; });
  refused([](Chunk& s) { s.keep_logits = true; });
  refused([](Chunk& s) { s.targets = s.ids; });
}

// With rules a chunk samples what the host's sampler picks from the changed logits, whether it knows the id before or finds it
// in the slot, and as the verification of a draft; scores and kept logits are those of the model. `model`: as above.
inline void expect_rules_obeyed(InferenceModel& model) {
  constexpr std::size_t kIds = 20;
  const std::vector<std::int32_t> prompt = {3, 1, 4, 1, 5, 9, 2};
  std::vector<std::int32_t> pages(static_cast<std::size_t>(48 / model.page_size()));
  std::iota(pages.rbegin(), pages.rend(), 2);
  const auto vocab = static_cast<std::int32_t>(model.config().tokenizer_vocab);
  std::mt19937 random(1);
  int changed = 0;
  for (int round = 0; round < 8; ++round) {
    SCOPED_TRACE(round);
    LogitRuleOptions options = random_rules(random, vocab);
    if (round == 0) options = {.penalties = {1.5, 0.25, 0.5}, .logit_bias = {{3, 4.0f}, {7, -2.0f}}};
    const SamplingPlan plan = sampling_plan({.temperature = round % 2 * 1.5, .seed = 5, .vocab_limit = vocab});
    Chunk chunk;
    chunk.pages = pages;
    chunk.slot = 2;
    chunk.alternatives = 3;
    chunk.sampling = &plan;
    const auto run = [&](std::int64_t first, std::span<const std::int32_t> ids, std::span<const LogitRow> rows) {
      chunk.first_position = first;
      chunk.ids = ids;
      chunk.logit_rows = rows;
      chunk.drafts = std::max<std::int64_t>(std::ssize(rows), 1) - 1;
      model.submit({&chunk, 1});
      return ChunkResult(model.collect()[0]);
    };
    // Each id by itself, checked.
    LogitRules rules(options, prompt);
    std::vector<std::int32_t> all = prompt;
    std::vector<ScoredId> scores;
    std::vector<std::int32_t> ids;
    chunk.keep_logits = true;
    for (std::size_t i = 0; i < kIds; ++i) {
      const std::int64_t first = i == 0 ? 0 : std::ssize(all) - 1;
      const std::vector<std::int32_t> added(all.begin() + first, all.end());
      const std::vector<float> raw = [&] {
        const ChunkResult result = run(first, added, {});
        return std::vector<float>(result.logits.begin(), result.logits.end());
      }();
      const LogitRow row = rules.row(ids);
      const ChunkResult result = run(first, added, {&row, 1});
      EXPECT_TRUE(std::ranges::equal(result.logits, raw));
      ASSERT_TRUE(result.sampled.has_value());
      std::vector<float> expected = raw;
      change_naively(options, prompt, ids, expected);
      const std::int32_t id = Sampler(plan).sample(expected, std::ssize(all));
      ASSERT_EQ(result.sampled->id, id) << "id " << i;
      double sum = 0;
      for (const float logit : raw) sum += std::exp(static_cast<double>(logit));
      EXPECT_NEAR(result.sampled->logprob, raw[static_cast<std::size_t>(id)] - std::log(sum), 1e-3);
      changed += id != Sampler(plan).sample(raw, std::ssize(all));
      all.push_back(id);
      ids.push_back(id);
      scores.push_back(*result.sampled);
    }
    chunk.keep_logits = false;
    const auto expect_same = [&](const ScoredId& got, std::size_t i) {
      EXPECT_EQ(got.id, ids[i]) << "id " << i;
      EXPECT_EQ(got.logprob, scores[i].logprob) << "id " << i;
    };
    // From the slot: the host does not know the id before.
    LogitRules late(options, prompt);
    const LogitRow first_row = late.row({});
    expect_same(*run(0, prompt, {&first_row, 1}).sampled, 0);
    for (std::size_t i = 1; i < kIds; ++i) {
      const LogitRow row = late.row(std::span(ids).first(i - 1), {&kUnknownId, 1});
      expect_same(*run(std::ssize(prompt) + static_cast<std::int64_t>(i) - 1, {}, {&row, 1}).sampled, i);
    }
    // As drafts, of which the last one may be wrong.
    LogitRules verified(options, prompt);
    for (std::size_t i = 1; i < kIds;) {
      const std::size_t drafts = std::min<std::size_t>(1 + random() % 4, kIds - i - (i + 1 < kIds ? 1 : 0));
      std::vector<std::int32_t> span_ids(ids.begin() + static_cast<std::ptrdiff_t>(i) - 1,
                                         ids.begin() + static_cast<std::ptrdiff_t>(i + drafts));
      if (random() % 2 == 0) span_ids.back() = span_ids.back() == 1 ? 2 : 1;
      std::vector<LogitRow> rows;
      for (std::size_t d = 0; d < span_ids.size(); ++d) {
        rows.push_back(verified.row(std::span(ids).first(i), std::span(span_ids).subspan(1, d)));
      }
      const ChunkResult result = run(std::ssize(prompt) + static_cast<std::int64_t>(i) - 1, span_ids, rows);
      for (const ScoredId& id : result.accepted) expect_same(id, i++);
      ASSERT_TRUE(result.sampled.has_value());
      if (i < kIds) expect_same(*result.sampled, i++);
    }
  }
  EXPECT_GT(changed, 20);
}

// What a step may not do on any device. `model`: 8 pages of `page_size` positions, 64 rows, kSlots slots. Returns a chunk that
// is in order, of three rows.
inline Chunk expect_refuses_memory_of_others(InferenceModel& model) {
  static const std::vector<std::int32_t> pages = {3, 1}, ids = {5, 9, 2}, absent = {3, 8}, negative = {-1},
                                         four = {1, 2, 3, 4};
  Chunk good;
  good.pages = pages;
  good.ids = ids;
  const auto refused = [&](const std::string& what, const auto& change) {
    Chunk chunk = good;
    change(chunk);
    const std::string message = error_of(Exit::internal, [&] { model.submit({&chunk, 1}); });
    EXPECT_NE(message.find(what), std::string::npos) << message;
  };
  const std::int64_t covered = 2 * model.page_size();
  refused(std::to_string(covered) + " are covered", [&](Chunk& s) { s.first_position = covered - 2; });
  refused("positions -1", [](Chunk& s) { s.first_position = -1; });
  refused("page 8", [&](Chunk& s) { s.pages = absent; });
  refused("page -1", [&](Chunk& s) { s.pages = negative; });
  refused("slot 7", [](Chunk& s) { s.slot = kSlots; });
  refused("4 targets", [&](Chunk& s) { s.targets = four; });
  static const std::vector<LogitRow> rows(2);
  static const SamplingPlan plan;
  refused("rules for 1 rows", [&](Chunk& s) { s.logit_rows = std::span(rows).first(1); });
  refused("rules for 2 rows", [&](Chunk& s) { s.logit_rows = rows, s.sampling = &plan; });
  EXPECT_NE(error_of(Exit::internal, [&] { model.submit({}); }).find("0 rows"), std::string::npos);
  const std::vector<Chunk> many(22, good);
  EXPECT_NE(error_of(Exit::internal, [&] { model.submit(many); }).find("66 rows"), std::string::npos);
  EXPECT_NE(error_of(Exit::internal, [&] { model.collect(); }).find("without a step"), std::string::npos);
  return good;
}

}  // namespace weft::test
