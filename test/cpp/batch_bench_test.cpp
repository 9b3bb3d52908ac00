#include "llmc/infer/batch_bench.h"

#include <gtest/gtest.h>

#include <thread>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/infer/bench.h"
#include "llmc/infer/prompt.h"
#include "test/cpp/paged_fake.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

// Each step takes at least a millisecond, and the bytes of a step are known.
class Measured : public PagedFake {
 public:
  explicit Measured(const PagedFakeSizes& sizes) : PagedFake(sizes) {}
  std::uint64_t bytes_per_step(std::int64_t sequences, std::int64_t context) const override {
    return static_cast<std::uint64_t>(1'000'000 * sequences + context);
  }
  std::span<const ChunkResult> collect() override {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return PagedFake::collect();
  }
};

PagedFakeSizes sizes(std::int64_t depth) {
  PagedFakeSizes made;
  made.depth = depth;
  made.vocab_size = 1 << 20;  // the one id that is poison is not among the random ones
  made.num_pages = 256;
  made.max_rows = 64;
  return made;
}

EngineOptions engine_options() {
  EngineOptions options;
  options.rows_per_step = 64;
  return options;
}

TEST(BatchBench, CountsTheStepsInWhichAllSequencesDecode) {
  for (const std::int64_t depth : {1, 2, 3}) {
    Measured model(sizes(depth));
    BatchBenchOptions options;
    options.sequences = {1, 4, 8};
    options.prompt = 12;
    options.tokens = 20;
    options.read_ceiling = 100;
    const BatchBenchResult result = run_batch_bench(model, engine_options(), options);
    ASSERT_EQ(result.points.size(), 3u);
    for (const BatchBenchPoint& point : result.points) {
      // 64 rows are the prompts of 5 sequences: the prompts of 8 take two steps, and the first five decode in the second.
      EXPECT_EQ(std::ssize(point.step_ms), point.sequences <= 4 ? 19 : 18) << point.sequences << ", depth " << depth;
      EXPECT_GE(point.step_percentile(0), 1) << depth;
      EXPECT_GE(point.prompt_seconds, point.sequences <= 4 ? 1e-3 : 2e-3);
      EXPECT_EQ(point.bytes_per_step, static_cast<std::uint64_t>(1'000'000 * point.sequences + 22));
      EXPECT_LE(point.tokens_per_second(), 1000.0 * static_cast<double>(point.sequences));
      EXPECT_LE(point.step_percentile(50), point.step_percentile(99));
    }
    const Json json = batch_bench_json(result, {"cpu", "reference"});
    EXPECT_EQ(json["points"][2]["sequences"], 8);
    EXPECT_NEAR(json["points"][2]["share_of_read_ceiling"].get<double>(), result.points[2].gb_per_second() / 100,
                1e-12);
    const std::string text = batch_bench_text(result);
    EXPECT_NE(text.find("a plain read reaches 100 GB/s here\n"), std::string::npos);
    EXPECT_EQ(std::count(text.begin(), text.end(), '%'), 3);
    BatchBenchResult unknown = result;
    unknown.read_ceiling = 0;  // on a device where it was not measured
    const auto keys_of = [](const Json& object) {
      std::string keys;
      for (const auto& [key, value] : object.items()) keys += key + " ";
      return keys;
    };
    const std::string always = "bytes_per_step decode_tokens_per_s gb_per_s prefill_tokens_per_s sequences ";
    EXPECT_EQ(keys_of(json), "decode device points prompt_tokens read_ceiling_gb_per_s tokens ");
    EXPECT_EQ(keys_of(json["points"][0]), always + "share_of_read_ceiling step_ms_p50 step_ms_p99 steps ");
    const Json not_measured = batch_bench_json(unknown, {"cpu", "reference"});
    EXPECT_EQ(keys_of(not_measured), "decode device points prompt_tokens tokens ");
    EXPECT_EQ(keys_of(not_measured["points"][0]), always + "step_ms_p50 step_ms_p99 steps ");
    const std::string without = batch_bench_text(unknown);
    EXPECT_EQ(without.find("plain read"), std::string::npos);
    EXPECT_EQ(std::count(without.begin(), without.end(), '%'), 0);
  }
}

TEST(BatchBench, RefusesWhatCannotBeMeasured) {
  const auto refusal = [](Exit code, std::vector<std::int64_t> sequences, std::int64_t prompt, std::int64_t tokens) {
    Measured model(sizes(1));
    BatchBenchOptions options;
    options.sequences = std::move(sequences);
    options.prompt = prompt;
    options.tokens = tokens;
    return reason_of(code, [&] { run_batch_bench(model, engine_options(), options); });
  };
  EXPECT_EQ(refusal(Exit::usage, {1}, 100, 100), "accepted");
  EXPECT_NE(refusal(Exit::usage, {1}, 100, 101).find("do not fit in the context of 200"), std::string::npos);
  EXPECT_NE(refusal(Exit::usage, {1}, INT64_MAX, INT64_MAX).find("do not fit"), std::string::npos);
  EXPECT_NE(refusal(Exit::usage, {1}, 4, 1).find("at least 2"), std::string::npos);
  EXPECT_NE(refusal(Exit::resources, {1, 8}, 100, 100)
                .find("8 sequences need 400 pages of keys and values, and there are 256: "
                      "enough for 5"),
            std::string::npos);
  Measured few_pages(sizes(1));  // of a model with a longer context than they hold: the message is about the model
  few_pages.change_config().max_positions = 1000;
  BatchBenchOptions options;
  options.sequences = {1};
  options.prompt = 900;
  options.tokens = 101;
  expect_contains(error_of(Exit::usage, [&] { run_batch_bench(few_pages, engine_options(), options); }),
                  "do not fit in the context of 1000");
  EXPECT_EQ(refusal(Exit::resources, {8}, 100, 29), "accepted") << "32 pages each: all";
  EXPECT_NE(refusal(Exit::resources, {8}, 100, 30).find("need 264 pages"), std::string::npos);
}

// One sequence of three, in any step of any run: the warm-up, the prompts and what is timed.
TEST(BatchBench, LogitsOfAnySequenceThatAreNotFiniteAreAnError) {
  class PoisonedOnce : public Measured {
   public:
    PoisonedOnce(std::int64_t step, std::size_t sequence) : Measured(sizes(1)), step_(step), sequence_(sequence) {}
    std::span<const ChunkResult> collect() override {
      const std::span<const ChunkResult> good = PagedFake::collect();
      results_.assign(good.begin(), good.end());
      if (++steps == step_) {
        results_.at(sequence_).sampled.reset();
        results_.at(sequence_).error = SampleError::not_a_number;
      }
      return results_;
    }
    std::int64_t steps = 0;

   private:
    const std::int64_t step_;
    const std::size_t sequence_;
    std::vector<ChunkResult> results_;
  };
  BatchBenchOptions options;
  options.sequences = {3};
  options.prompt = options.tokens = 4;
  PoisonedOnce good(0, 0);
  run_batch_bench(good, engine_options(), options);
  ASSERT_EQ(good.steps, 4 + 3 + 4);
  for (std::int64_t step = 1; step <= good.steps; ++step) {
    for (const std::size_t sequence : {0, 1, 2}) {
      SCOPED_TRACE(format("sequence %zu in step %lld", sequence, static_cast<long long>(step)));
      PoisonedOnce model(step, sequence);
      expect_contains(error_of(Exit::numeric, [&] { run_batch_bench(model, engine_options(), options); }),
                      "--bench-batch: the logits are not finite");
    }
  }
}

TEST(BatchBench, ListsOfIntegersAreReadWhole) {
  EXPECT_EQ(parse_integers("--x", "1,4,4096", 4096), (std::vector<std::int64_t>{1, 4, 4096}));
  for (const char* wrong : {"", "0", "4097", "1,,2", "1,", ",1", "x", "1 ", "-1", "1.5", "99999999999999999999"}) {
    EXPECT_THROW(parse_integers("--x", wrong, 4096), Error) << wrong;
  }
}

}  // namespace
}  // namespace weft
