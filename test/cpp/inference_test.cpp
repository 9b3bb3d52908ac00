// InferenceModel on the CPU: a row's bits depend on its own sequence alone. Both families, all golden shapes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <span>

#include "golden_cases.h"
#include "gradient_check.h"
#include "inference_tools.h"
#include "llmc/cpu/attention.h"
#include "llmc/cpu/inference.h"
#include "llmc/cpu/matmul_rows.h"
#include "llmc/cpu/paged_attention.h"
#include "llmc/infer/divergence.h"
#include "llmc/infer/perplexity.h"
#include "llmc/model/presets.h"
#include "test_files.h"

namespace weft {
namespace {

using test::expect_close;
using test::Floats;
using test::kSlots;
using test::random_floats;
using test::run;
using test::Sequence;
using test::Trace;

// ---- operators ------------------------------------------------------------------------------------------------------

// Every number of rows around the blocks, and shapes around the blocks of outputs, panels and vectors.
TEST(MatmulRows, ARowHasTheSameBitsAmongAnyNumberOfOthers) {
  struct Shape {
    std::int64_t C, OC;
  };
  for (const auto& [C, OC] : {Shape{1, 1}, Shape{37, 5}, Shape{64, 50}, Shape{129, 24}, Shape{3000, 61}}) {
    constexpr std::int64_t kMost = 19;
    const Floats x = random_floats(kMost * C, 1), weight = random_floats(OC * C, 2), bias = random_floats(OC, 3);
    const Floats before = random_floats(kMost * OC, 4);
    for (const bool accumulate : {false, true}) {
      const cpu::Accumulate how = accumulate ? cpu::Accumulate::yes : cpu::Accumulate::no;
      Floats alone = before, plain = before;
      for (std::int64_t n = 0; n < kMost; ++n) {
        cpu::matmul_rows_forward(alone.data() + n * OC, x.data() + n * C, {weight.data(), {}}, bias.data(), 1, C, OC,
                                 how);
      }
      cpu::plain::matmul_forward(plain.data(), x.data(), weight.data(), bias.data(), kMost, C, OC, how);
      expect_close(alone, plain, "C " + std::to_string(C));
      for (std::int64_t N = 1; N <= kMost; ++N) {
        Floats together(before.begin(), before.begin() + N * OC);
        cpu::matmul_rows_forward(together.data(), x.data(), {weight.data(), {}}, bias.data(), N, C, OC, how);
        EXPECT_TRUE(std::equal(together.begin(), together.end(), alone.begin())) << C << " " << OC << ", rows " << N;
      }
    }
  }
}

// k, v: [positions, NKV, HS].
void put_in_pages(const cpu::PagedKv& kv, std::span<const std::int32_t> pages, const Floats& k, const Floats& v) {
  const std::int64_t P = kv.page_size, HS = kv.HS;
  for (std::int64_t t = 0; t * kv.NKV * HS < std::ssize(k); ++t) {
    for (std::int64_t h = 0; h < kv.NKV; ++h) {
      const std::int64_t at = kv.offset(pages[t / P], h) + t % P * HS;
      std::copy_n(k.data() + (t * kv.NKV + h) * HS, HS, kv.keys + at);
      std::copy_n(v.data() + (t * kv.NKV + h) * HS, HS, kv.values + at);
    }
  }
}

// Two sequences in shuffled pages against attention over contiguous keys: every split of the rows into calls, heads that
// share keys, head sizes that are no multiple of a vector, several pages and a ragged last one, windows around a page's size.
TEST(PagedAttention, MatchesContiguousKeysWhateverThePages) {
  constexpr std::int64_t P = 8;
  struct Shape {
    std::int64_t NH, NKV, HS, window = 0;
  };
  for (const auto& [NH, NKV, HS, window] :
       {Shape{4, 2, 16}, Shape{3, 1, 20}, Shape{2, 2, 5}, Shape{10, 2, 5}, Shape{12, 2, 8}, Shape{14, 2, 3},
        Shape{16, 2, 4}, Shape{15, 3, 6}, Shape{9, 1, 4}, Shape{22, 2, 4}, Shape{4, 2, 5, 1}, Shape{4, 2, 5, P - 1},
        Shape{4, 2, 5, P}, Shape{4, 2, 5, P + 1}, Shape{2, 1, 5, 2 * P - 1}, Shape{2, 1, 5, 2 * P + 3},
        Shape{2, 1, 5, 100}}) {
    const std::int64_t T = 3 * P + 5;
    const Floats q = random_floats(T * NH * HS, 5), k = random_floats(T * NKV * HS, 6),
                 v = random_floats(T * NKV * HS, 7);
    const float scale = 0.3f;
    Floats want(q.size());
    AttentionShape shape;
    shape.B = 1, shape.TQ = T, shape.TK = T, shape.NH = NH, shape.NKV = NKV, shape.HS = HS, shape.scale = scale;
    shape.window = window;
    const auto view = [HS = HS](const Floats& data, std::int64_t heads) {
      return cpu::ConstHeadView{data.data(), 0, heads * HS, HS};
    };
    cpu::plain::attention_forward(shape, {want.data(), 0, NH * HS, HS}, nullptr, view(q, NH), view(k, NKV),
                                  view(v, NKV));

    const Floats garbage(12 * NKV * P * HS, std::nanf(""));  // of pages that nobody wrote: it must not be read
    Floats first;
    for (const std::vector<std::int32_t>& pages : {std::vector<std::int32_t>{0, 1, 2, 3}, {11, 2, 7, 5}}) {
      Floats keys = garbage, values = garbage;
      const cpu::PagedKv kv = {keys.data(), values.data(), P, NKV, HS};
      put_in_pages(kv, pages, k, v);
      for (const std::int64_t piece : {std::int64_t{1}, std::int64_t{3}, std::int64_t{4}, std::int64_t{7}, T}) {
        Floats got(q.size());
        std::vector<cpu::PagedRows> work;
        for (std::int64_t t = 0; t < T; t += piece) work.push_back({pages, t, std::min(piece, T - t), t});
        cpu::paged_attention({NH, scale, NH * HS, HS, window}, got.data(), q.data(), kv, work);
        expect_close(got, want, "paged attention");
        if (first.empty()) first = got;
        EXPECT_EQ(got, first) << "pieces of " << piece << ", window " << window;
      }
    }
  }
}

// The longest context of Llama 3.1: the last rows one by one, in chunks and at once, in two orders of the pages, have equal
// bits, and are near sums in double.
TEST(PagedAttention, RowsBehind131072PositionsAreTheirOwn) {
  constexpr std::int64_t P = 32, T = 131'072, NH = 2, HS = 8, kRows = 2 * P + 5, kFirst = T - kRows;
  constexpr float kScale = 0.7f;
  const Floats q = random_floats(kRows * NH * HS, 5, 3), k = random_floats(T * HS, 6),
               v = random_floats(T * HS, 7, 1, 1);  // no sums that cancel
  Floats first;
  std::vector<std::int32_t> pages(T / P);
  std::iota(pages.begin(), pages.end(), 0);
  for (const unsigned seed : {1u, 2u}) {
    std::shuffle(pages.begin(), pages.end(), std::mt19937(seed));
    Floats keys(k.size()), values(v.size());
    const cpu::PagedKv kv = {keys.data(), values.data(), P, 1, HS};
    put_in_pages(kv, pages, k, v);
    for (const std::int64_t piece : {std::int64_t{1}, std::int64_t{7}, kRows}) {
      Floats got(q.size());
      std::vector<cpu::PagedRows> work;
      for (std::int64_t r = 0; r < kRows; r += piece)
        work.push_back({pages, kFirst + r, std::min(piece, kRows - r), r});
      cpu::paged_attention({NH, kScale, NH * HS, HS}, got.data(), q.data(), kv, work);
      if (first.empty()) first = got;
      EXPECT_EQ(got, first) << "pieces of " << piece << ", order " << seed;
    }
  }
  Floats some, want;
  for (std::int64_t row = 0; row < kRows * NH; row += 27) {  // of both heads
    double sums[HS] = {}, total = 0;
    for (std::int64_t t = 0; t <= kFirst + row / NH; ++t) {
      const double score = std::inner_product(&q[row * HS], &q[row * HS] + HS, &k[t * HS], 0.0);
      const double weight = std::exp(kScale * score);
      total += weight;
      for (std::int64_t d = 0; d < HS; ++d) sums[d] += weight * v[t * HS + d];
    }
    some.insert(some.end(), &first[row * HS], &first[row * HS] + HS);
    for (const double sum : sums) want.push_back(static_cast<float>(sum / total));
  }
  expect_close(some, want, "paged attention");
}

// The positions in front of the window of every row hold NaN, and of pages wholly in front of it the table has no number.
TEST(PagedAttention, WhatLiesInFrontOfTheWindowIsNotRead) {
  constexpr std::int64_t P = 8, T = 4 * P + 3, HS = 5;
  const Floats q = random_floats(T * HS, 5), k = random_floats(5 * P * HS, 6), v = random_floats(5 * P * HS, 7);
  for (const std::int64_t window : {std::int64_t{1}, P - 1, P, P + 1, 2 * P + 3}) {
    for (const std::int64_t rows : {1, 2, 4, 5, 11}) {
      const std::int64_t position = T - rows, first = std::max<std::int64_t>(position - window + 1, 0);
      std::vector<std::int32_t> pages = {0, 1, 2, 3, 4};
      const auto attend = [&](Floats keys, Floats values) {
        Floats out(rows * HS);
        const std::vector<cpu::PagedRows> work = {{pages, position, rows, 0}};
        cpu::paged_attention({1, 0.4f, HS, HS, window}, out.data(), q.data(), {keys.data(), values.data(), P, 1, HS},
                             work);
        return out;
      };
      const Floats want = attend(k, v);
      Floats keys = k, values = v;
      std::fill_n(keys.begin(), first * HS, std::nanf(""));
      std::fill_n(values.begin(), first * HS, std::nanf(""));
      std::fill_n(pages.begin(), first / P, std::numeric_limits<std::int32_t>::min());
      EXPECT_EQ(attend(keys, values), want) << window << ", " << rows << " rows";
    }
  }
}

// A score that towers above those of later pages: brought to a lower maximum its weight would overflow.
TEST(PagedAttention, AGreatScoreOfAnEarlierPageStays) {
  constexpr std::int64_t P = 4, T = 2 * P + 3;
  const std::vector<std::int32_t> pages = {0, 1, 2};
  Floats keys(3 * P, -150.0f), values(3 * P, 2.0f), out(T);
  keys[0] = 150.0f;
  values[0] = 1.0f;
  const Floats q(T, 1.0f);
  const std::vector<cpu::PagedRows> work = {{pages, 0, T, 0}};
  cpu::paged_attention({1, 1.0f, 1, 1}, out.data(), q.data(), {keys.data(), values.data(), P, 1, 1}, work);
  EXPECT_EQ(out, Floats(T, 1.0f));
}

// ---- models ---------------------------------------------------------------------------------------------------------

constexpr std::int64_t kPage = 4;

std::vector<Sequence> sequences(const ModelConfig& config) {
  return test::random_sequences(config, kSlots, 30);
}

InferenceOptions pool(std::int64_t pages, std::int64_t page_size = kPage) {
  return {.num_pages = pages, .page_size = page_size, .slots = kSlots, .max_rows = 64, .max_positions = 48};
}

TEST(CpuInference, BitsOfASequenceDoNotDependOnWhatElseRuns) {
  for (const GoldenCase& golden : golden_cases()) {
    SCOPED_TRACE(golden.name);
    const auto model = cpu::load_inference(ModelFile::open(golden.model), pool(90));
    const std::vector<Sequence> all = sequences(model->config());
    std::vector<Trace> alone;
    for (const Sequence& sequence : all) alone.push_back(run(*model, {sequence}, 64, false, 1)[0]);
    for (const std::int64_t chunk : {1, 5, 64}) {
      for (const bool chained : {false, true}) {
        EXPECT_TRUE(run(*model, all, chunk, chained, 9) == alone) << "chunks of " << chunk << ", chained " << chained;
      }
    }
  }
}

// The parameters of a model file under a configuration with windows.
std::unique_ptr<InferenceModel> with_windows(const ModelFile& file, const std::vector<std::int64_t>& windows,
                                             const InferenceOptions& options) {
  ModelConfig config = file.config();
  config.windows = windows;
  const auto fill = [&file](const TensorSpec& spec, std::byte* values) { file.read_tensor(spec, values); };
  return cpu::make_inference(config, options, fill);
}

TEST(CpuInference, BitsOfASequenceWithWindowsDoNotDependOnWhatElseRuns) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin");
  const auto all_keys = cpu::load_inference(file, pool(90));
  const std::vector<Sequence> all = sequences(file.config());
  const std::int64_t layers = file.config().num_layers;
  for (const std::int64_t window : {std::int64_t{1}, kPage - 1, kPage, 2 * kPage + 3, std::int64_t{100}}) {
    std::vector<std::int64_t> windows(static_cast<std::size_t>(layers), window);
    windows.back() = 5;
    const auto model = with_windows(file, windows, pool(90));
    std::vector<Trace> alone;
    for (const Sequence& sequence : all) alone.push_back(run(*model, {sequence}, 64, false, 1)[0]);
    EXPECT_FALSE(alone == run(*all_keys, all, 64, false, 9));
    for (const std::int64_t chunk : {1, 5, 64}) {
      EXPECT_TRUE(run(*model, all, chunk, chunk == 5, 9) == alone) << "chunks of " << chunk << ", window " << window;
    }
  }
}

// The same through the engine, which preempts, shares prefixes and delays as the few pages demand.
TEST(CpuInference, BitsDoNotDependOnTheEnginesSchedule) {
  for (const char* name : {"neox-hs32-padded", "llama-hs32-gqa2"}) {
    SCOPED_TRACE(name);
    const std::string path = std::string("test/fixtures/golden/") + name + ".model.bin";
    const auto model = cpu::load_inference(ModelFile::open(path), pool(20));
    const EngineStatistics sum = test::expect_engine_changes_nothing(*model, 6, 20, 1);
    EXPECT_GT(sum.preemptions, 10);
    EXPECT_GT(sum.prefix_ids, 10);
  }
}

// Every token but the first is compared once, however the windows lie, and the losses are those of the perplexity.
TEST(CpuInference, PagesInFrontOfWindowsAreGivenBackWithoutAChange) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin");
  std::int64_t preemptions = 0;
  for (const std::int64_t longest : {5, 23}) {
    std::vector<std::int64_t> windows(static_cast<std::size_t>(file.config().num_layers), longest);
    windows.front() = kPage - 1;
    const auto model = with_windows(file, windows, pool(13));
    const EngineStatistics sum = test::expect_engine_changes_nothing(*model, 3, 20, 1);
    EXPECT_GT(sum.prefix_ids, 10);
    preemptions += sum.preemptions;
    DraftOptions drafts;
    drafts.lookup = 4;
    drafts.row_cost = 1e-3;
    drafts.draft_cost = 1;  // neither is measured
    EXPECT_GT(test::expect_engine_changes_nothing(*model, 2, 20, 2, drafts).drafts.verifications, 0);
  }
  EXPECT_GT(preemptions, 10);
}

// Pages that no row of a chunk sees may be missing, others may not.
TEST(CpuInference, OnlyPagesInFrontOfAllWindowsMayBeMissing) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin");
  const auto layers = static_cast<std::size_t>(file.config().num_layers);
  std::vector<std::int64_t> windows(layers, 3);
  windows.back() = 5;
  const std::vector<std::int32_t> ids = {1, 2, 3, 4, 5, 6, 7, 8, 9}, next = {3, 4};
  const std::vector<std::int32_t> all = {4, 2, 6, 0}, without_first = {-1, 2, 6, 0}, without_two = {-1, -1, 6, 0};
  const auto logits_of = [&](InferenceModel& model, const std::vector<std::int32_t>& pages, std::int64_t position) {
    Chunk chunk;
    chunk.pages = all, chunk.ids = ids;
    model.submit({&chunk, 1});
    model.collect();
    chunk.pages = pages, chunk.first_position = position, chunk.ids = next, chunk.keep_logits = true;
    model.submit({&chunk, 1});
    const std::span<const float> logits = model.collect()[0].logits;
    return Floats(logits.begin(), logits.end());
  };
  const auto model = with_windows(file, windows, pool(8));
  EXPECT_EQ(logits_of(*model, without_first, 8), logits_of(*model, all, 8));  // sees the positions 4 and 5 on
  EXPECT_EQ(logits_of(*model, without_first, 9), logits_of(*model, all, 9));
  for (const auto& [pages, position] : {std::pair{&without_first, 7}, {&without_two, 8}}) {
    expect_contains(error_of(Exit::internal, [&] { logits_of(*model, *pages, position); }), "page -1 does not exist");
  }
  windows.front() = 0;  // a layer that sees everything
  const auto mixed = with_windows(file, windows, pool(8));
  expect_contains(error_of(Exit::internal, [&] { logits_of(*mixed, without_first, 8); }), "page -1 does not exist");
}

TEST(Divergence, ComparesEachTokenOnce) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin");
  ASSERT_EQ(file.config().tokenizer_vocab, file.config().vocab_size) << "the perplexity is over padding rows, too";
  const std::vector<std::int32_t> ids = {5, 9, 2, 40, 7, 1, 3, 3, 8, 12, 6};
  for (const std::int64_t window : {4, 7, 11, 20}) {
    for (const std::int64_t stride : {std::int64_t{1}, std::int64_t{2}, window - 1}) {
      SCOPED_TRACE(
          format("windows of %lld, %lld apart", static_cast<long long>(window), static_cast<long long>(stride)));
      const auto model = cpu::load_decoder(file, window), same = cpu::load_decoder(file, window);
      const DivergenceResult result = divergence(*model, *same, ids, window, stride);
      EXPECT_EQ(result.tokens, 10);
      EXPECT_NEAR(result.mean, 0, 1e-9);
      EXPECT_EQ(result.same_top, 1);
      EXPECT_NEAR(result.nll, perplexity(*model, ids, 11, stride).mean_nll, 1e-5);
      EXPECT_EQ(result.nll, result.nll_against);
    }
  }
}

TEST(CpuInference, PositionsEndWhereThePagesEnd) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/neox-hs32-padded.model.bin");
  InferenceOptions options = pool(3);
  options.max_positions = 0;
  EXPECT_EQ(cpu::load_inference(file, options)->max_positions(), 3 * options.page_size);
  options.num_pages = 1000;
  EXPECT_EQ(cpu::load_inference(file, options)->max_positions(), file.config().max_positions);
  options.max_positions = 7;
  EXPECT_EQ(cpu::load_inference(file, options)->max_positions(), 7);
}

// The log-probabilities are those of the logits; the alternatives are the most likely ids, and none is a padding row.
TEST(CpuInference, LogprobsFollowTheLogits) {
  const auto model = cpu::load_inference(ModelFile::open("test/fixtures/golden/neox-hs32-padded.model.bin"), pool(8));
  const std::vector<std::int32_t> pages = {3, 1}, ids = {5, 9, 2, 40, 7};
  Chunk chunk;
  chunk.pages = pages;
  chunk.ids = ids;
  chunk.targets = std::span(ids).subspan(1);
  chunk.alternatives = 4;
  chunk.keep_logits = true;
  SamplingPlan plan;
  plan.vocab_limit = model->config().tokenizer_vocab;
  chunk.sampling = &plan;
  model->submit({&chunk, 1});
  const ChunkResult result = model->collect()[0];
  ASSERT_TRUE(result.sampled.has_value());
  double sum = 0;
  for (const float logit : result.logits) sum += std::exp(static_cast<double>(logit));
  const auto logprob = [&](std::int32_t id) { return result.logits[static_cast<std::size_t>(id)] - std::log(sum); };
  EXPECT_NEAR(result.sampled->logprob, logprob(result.sampled->id), 1e-5);
  ASSERT_EQ(result.sampled->alternatives.size(), 4u);
  EXPECT_EQ(result.sampled->alternatives[0].id, result.sampled->id);  // greedy
  for (std::size_t i = 0; i < 4; ++i) {
    const IdLogprob& other = result.sampled->alternatives[i];
    EXPECT_NEAR(other.logprob, logprob(other.id), 1e-5);
    EXPECT_LT(other.id, model->config().tokenizer_vocab);
    EXPECT_LE(other.logprob, result.sampled->alternatives[i == 0 ? 0 : i - 1].logprob);
  }
  chunk.alternatives = 0;  // the log-probability is wanted, and none beside it
  model->submit({&chunk, 1});
  const ChunkResult& alone = model->collect()[0];
  EXPECT_EQ(alone.sampled->logprob, result.sampled->logprob);
  EXPECT_TRUE(alone.sampled->alternatives.empty());
  EXPECT_EQ(alone.targets.at(3).logprob, result.targets.at(3).logprob);
  ASSERT_EQ(result.targets.size(), 4u);
  const auto decoder = cpu::load_decoder(ModelFile::open("test/fixtures/golden/neox-hs32-padded.model.bin"), 8);
  const std::vector<double> nll = decoder->score(ids);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(result.targets[i].id, ids[i + 1]);
    EXPECT_EQ(static_cast<double>(-result.targets[i].logprob), nll[i]);
  }
}

// The report of the memory, line by line: every buffer of [max_rows, ...] is in the workspace.
TEST(CpuInference, ItsMemoryHasALineForEachUse) {
  for (const char* name : {"llama-hs32-gqa2", "llama-hs128-mha-tied", "neox-hs128", "neox-hs32-sequential-nobias"}) {
    const ModelFile file = ModelFile::open("test/fixtures/golden/" + std::string(name) + ".model.bin");
    const ModelConfig& c = file.config();
    const auto model = cpu::load_inference(file, pool(8));
    const std::int64_t norms = c.parallel_residual ? 2 : 1, mlp = c.gated() ? 3 : 1;
    const std::int64_t of_a_row = (3 + norms) * c.hidden_size + c.qkv_size() + c.q_size() + mlp * c.ffn_size;
    const std::pair<const char*, std::uint64_t> expected[] = {
        {"parameters (fp32)", parameter_plan(file.table()).bytes()},
        {"K/V cache (fp32)", plan_pages(c, pool(8), sizeof(float)).bytes()},
        {"workspace (fp32)", static_cast<std::uint64_t>(model->max_rows() * of_a_row) * sizeof(float)}};
    const std::vector<MemoryLine> lines = model->memory();
    ASSERT_EQ(lines.size(), 3u) << name;
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(lines[i].name, expected[i].first) << name;
      EXPECT_EQ(lines[i].bytes, expected[i].second) << name << ": " << lines[i].name;
    }
  }
}

TEST(CpuInference, RefusesWhatWouldTouchMemoryOfOthers) {
  const auto model = cpu::load_inference(ModelFile::open("test/fixtures/golden/neox-hs128.model.bin"), pool(8));
  const Chunk good = test::expect_refuses_memory_of_others(*model);
  // Drafts stand behind an id that is known, and a chunk that verifies does nothing else.
  const SamplingPlan greedy;
  const std::vector<std::int32_t> target = {1};
  const std::pair<const char*, std::function<void(Chunk&)>> damages[] = {
      {"3 drafts in a chunk of 3 rows", [](Chunk& s) { s.drafts = 3; }},
      {"-1 drafts in a chunk", [](Chunk& s) { s.drafts = -1; }},
      {"rows that samples nothing", [](Chunk& s) { s.sampling = nullptr; }},
      {"2 drafts in a chunk", [&](Chunk& s) { s.targets = target; }},
      {"2 drafts in a chunk", [](Chunk& s) { s.keep_logits = true; }},
      {"0 drafts on the device, expected 1 to", [](Chunk& s) { s.drafts = 0, s.drafts_on_device = true; }}};
  for (const auto& [message, damage] : damages) {
    Chunk chunk = good;
    chunk.sampling = &greedy;
    chunk.drafts = 2;
    damage(chunk);
    expect_contains(error_of(Exit::internal, [&] { model->submit({&chunk, 1}); }), message);
  }
  model->submit({&good, 1});
  EXPECT_NE(error_of(Exit::internal, [&] { model->submit({&good, 1}); }).find("not collected"), std::string::npos);
}

TEST(InferencePool, HoldsWhatTheMemoryHoldsAndNoMoreThanTheSequencesFill) {
  ModelConfig config = preset_config("tiny");
  config.max_positions = 100;  // four pages of 32
  const std::uint64_t page = kv_bytes(config, 32, 2);
  EXPECT_EQ(page, static_cast<std::uint64_t>(2 * config.num_layers * config.kv_size() * 2 * 32));
  EXPECT_EQ(pool_options(config, 10 * page + 1, 5, 2).num_pages, 10);
  EXPECT_EQ(pool_options(config, 10 * page - 1, 5, 2).num_pages, 9);
  EXPECT_EQ(pool_options(config, 1000 * page, 5, 2).num_pages, 20);
  EXPECT_EQ(pool_options(config, 1000 * page, 5, 2).slots, 5);
  EXPECT_EQ(pool_options(config, 2 * page, 5, 2).num_pages, 2);
  EXPECT_NE(error_of(Exit::resources, [&] { pool_options(config, 2 * page - 1, 5, 2); }).find("2 pages of 32"),
            std::string::npos);
}

// Of an embedding only the rows of the ids are read, unless it is the head as well.
TEST(InferencePool, AStepReadsTheHeadAndNotTheEmbedding) {
  ModelConfig config = preset_config("tiny");
  for (const bool tied : {true, false}) {
    config.tied_embeddings = tied;
    for (const std::uint64_t bytes : {2, 4}) {
      const auto parameters = static_cast<std::uint64_t>(TensorTable(config).parameters()),
                 embedding = static_cast<std::uint64_t>(config.vocab_size * config.hidden_size);
      const auto of_sequence =
          static_cast<std::uint64_t>(config.hidden_size + 2 * config.num_layers * config.kv_size() * 7);
      EXPECT_EQ(read_bytes_of_step(config, 3, 7, bytes),
                (parameters - (tied ? 0 : embedding) + 3 * of_sequence) * bytes);
    }
  }
}

TEST(InferencePool, AStepReadsTheKeysOfEachLayersWindow) {
  ModelConfig config = preset_config("tiny");
  const std::uint64_t all = read_bytes_of_step(config, 2, 100, 4);
  config.windows = {0, 30, 100, 200};
  EXPECT_EQ(all - read_bytes_of_step(config, 2, 100, 4), static_cast<std::uint64_t>(2 * 2 * config.kv_size() * 70 * 4));
}

// A Llama whose parameters a test may change.
class ChangedLlama : public testing::Test {
 protected:
  const ModelFile file_ = ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin");
  const ModelConfig& config_ = file_.config();
  const TensorTable table_{config_};
  Floats arena_ = Floats(static_cast<std::size_t>(table_.arena_elements()));

  float* values_of(const char* tensor) { return arena_.data() + table_.at(tensor).offset; }
  void SetUp() override {
    ASSERT_FALSE(config_.tied_embeddings);
    for (const TensorSpec& spec : table_.specs()) file_.read_parameter(spec, arena_.data() + spec.offset);
  }
};

// Of equal logits the lowest id is sampled, and the alternatives are in that order, too.
TEST_F(ChangedLlama, EqualLogitsAreInTheOrderOfTheIds) {
  std::fill_n(values_of("lm_head.weight"), config_.vocab_size * config_.hidden_size, 0.0f);
  const auto model = cpu::make_inference(config_, table_, arena_.data(), pool(4));
  const SamplingPlan greedy;
  const std::vector<std::int32_t> pages = {0}, ids = {1, 2};
  Chunk chunk;
  chunk.pages = pages;
  chunk.ids = ids;
  chunk.targets = std::span(ids).subspan(1);
  chunk.alternatives = 5;
  chunk.sampling = &greedy;
  model->submit({&chunk, 1});
  const ChunkResult result = model->collect()[0];
  ASSERT_TRUE(result.sampled);
  EXPECT_EQ(result.sampled->id, 0);
  for (const ScoredId& scored : {*result.sampled, result.targets.at(0)}) {
    ASSERT_EQ(scored.alternatives.size(), 5u);
    for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(scored.alternatives[i].id, static_cast<std::int32_t>(i));
  }
  chunk.alternatives = static_cast<std::int32_t>(config_.vocab_size) + 1;  // more than there are: all
  model->submit({&chunk, 1});
  EXPECT_EQ(std::ssize(model->collect()[0].targets.at(0).alternatives), config_.tokenizer_vocab);
}

// A chunk whose logits are not finite says so, and the others get what they would get without it.
TEST_F(ChangedLlama, AChunkThatCannotBeSampledFailsAlone) {
  constexpr std::int32_t kDamaged = 5;
  values_of("model.embed_tokens.weight")[kDamaged * config_.hidden_size] = std::nanf("");

  const auto model = cpu::make_inference(config_, table_, arena_.data(), pool(4));
  const SamplingPlan greedy;
  const std::vector<std::vector<std::int32_t>> pages = {{0}, {1}, {2}}, ids = {{1, 2}, {1, kDamaged}, {3}};
  std::vector<Chunk> work(3);
  for (std::size_t s = 0; s < 3; ++s) {
    work[s].pages = pages[s];
    work[s].ids = ids[s];
    work[s].slot = static_cast<std::int32_t>(s);
    work[s].sampling = &greedy;
  }
  model->submit(work);
  std::vector<ChunkResult> together(3);
  std::ranges::copy(model->collect(), together.begin());
  EXPECT_EQ(together[1].error, SampleError::not_a_number);
  EXPECT_FALSE(together[1].sampled.has_value());
  for (const std::size_t s : {0, 2}) {
    model->submit({&work[s], 1});
    const ChunkResult alone = model->collect()[0];
    ASSERT_TRUE(alone.sampled && together[s].sampled);
    EXPECT_EQ(alone.sampled->id, together[s].sampled->id);
  }
}

}  // namespace
}  // namespace weft
