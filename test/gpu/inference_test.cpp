// InferenceModel on the GPU: against PyTorch's dumps and the CPU, and that the bits of a sequence are its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <iostream>
#include <map>
#include <numeric>
#include <thread>

#include "llmc/base/error.h"
#include "llmc/cpu/inference.h"
#include "llmc/cuda/inference/inference.h"
#include "llmc/model/compare.h"
#include "llmc/model/single_sequence.h"
#include "test/cpp/inference_tools.h"
#include "test/gpu/decode_tools.h"
#include "test/gpu/device_buffer.h"
#include "test/gpu/gpu_goldens.h"
#include "test/gpu/neox_models.h"

namespace weft {
namespace {

using test::expect_close;
using test::kFp32Tolerance;
using test::same_bits;

using Floats = std::vector<float>;
using Ids = std::vector<std::int32_t>;

constexpr DType kDTypes[] = {DType::f16, DType::bf16, DType::f32};

cuda::GpuInferenceOptions options_of(DType dtype, bool direct = false) {
  cuda::GpuInferenceOptions options;
  options.dtype = dtype;
  options.direct = direct;
  return options;
}

InferenceOptions pool_of(std::int64_t pages, std::int64_t page_size = 16, std::int64_t slots = test::kSlots) {
  InferenceOptions pool;
  pool.page_size = page_size;
  pool.num_pages = pages;
  pool.slots = slots;
  pool.max_rows = 64;
  return pool;
}

// A random model in a file, and the models made of it.
class Fixture {
 public:
  Fixture(const ModelConfig& config, DType dtype, const test::Edit& edit = nullptr) : config_(config), dtype_(dtype) {
    test::write_random_model(path(), config, dtype, 3, edit);
  }
  std::string path() const { return directory_.file("model.bin"); }
  const ModelConfig& config() const { return config_; }
  std::unique_ptr<InferenceModel> on_gpu(const InferenceOptions& pool, bool direct = false) const {
    return on_gpu(pool, options_of(dtype_, direct));
  }
  std::unique_ptr<InferenceModel> on_gpu(const InferenceOptions& pool, const cuda::GpuInferenceOptions& options) const {
    return cuda::load_inference(ModelFile::open(path()), pool, options);
  }
  std::unique_ptr<InferenceModel> on_cpu(const InferenceOptions& pool, DType cache = DType::f32) const {
    return cpu::load_inference(ModelFile::open(path()), pool, cache);
  }

 private:
  TemporaryDirectory directory_;
  ModelConfig config_;
  DType dtype_;
};

// ---- against PyTorch and the CPU ---------------------------------------------------------------------------------------

std::vector<GoldenCase> inferred_goldens() {
  const auto reason = [](const ModelConfig& config) { return cuda::inference_unsupported_reason(config, DType::f32); };
  return test::computed_goldens(golden_cases(), reason,
                                {{"qwen2-mha", "head_dim: got 16"},
                                 {"neox-train", "head_dim: got 12"},
                                 {"gemma3-train", "head_dim: got 6"},
                                 {"gemma3-train-untied", "head_dim: got 4"},
                                 {"neox-train-sequential-nobias", "head_dim: got 8"},
                                 {"neox-tanh-linear", "activation"},
                                 {"neox-tanh-yarn", "activation"}});
}

TEST(CudaInference, Fp32MatchesPyTorchTensorByTensor) {
  for (const GoldenCase& golden : inferred_goldens()) {
    const ModelFile file = ModelFile::open(golden.model);
    const TensorFile dump = TensorFile::open(golden.dump, FileKind::reference_dump);
    const std::int64_t capacity = file.config().max_positions;
    for (const bool direct : {false, true}) {
      SCOPED_TRACE(golden.name + (direct ? ", direct" : ", graph"));
      const auto model =
          single_sequence(cuda::load_inference(file, one_sequence(capacity), options_of(DType::f32, direct)), capacity);
      const Comparison result = compare_decoding(dump, kFp32Tolerance, *model);
      EXPECT_TRUE(result.passed());
      if (result.passed()) continue;
      for (const std::string& line : result.table()) std::cout << line << "\n";
    }
  }
}

// keep_logits() gives what keep_activations() gives of "logits", and nothing else.
TEST(CudaInference, LogitsAloneAreThoseBesideAllActivations) {
  for (const GoldenCase& golden : inferred_goldens()) {
    SCOPED_TRACE(golden.name);
    const ModelFile file = ModelFile::open(golden.model);
    const std::int64_t capacity = file.config().max_positions;
    const auto model =
        single_sequence(cuda::load_inference(file, one_sequence(capacity), options_of(DType::f32)), capacity);
    const Ids ids = test::random_tokens(11, file.config().tokenizer_vocab, 5);
    model->keep_activations(true);
    model->prefill(ids);
    const std::vector<float> all = model->activation("logits");
    EXPECT_EQ(all.size(), ids.size() * static_cast<std::size_t>(file.config().vocab_size));
    model->reset();
    model->keep_logits(true);
    model->prefill(ids);
    EXPECT_EQ(model->activation("logits"), all);
    EXPECT_TRUE(model->activation("final_norm").empty() && model->activation("layers.0.q").empty());
  }
}

// More rows of a step than have their logits at once, twice and a rest.
TEST(CudaInference, LogitsOfManyRowsMatchTheCpu) {
  const Fixture fixture(test::neox_config(test::small_shapes()[0]), DType::f32);
  const Ids ids = test::random_tokens(600, fixture.config().tokenizer_vocab, 7);
  InferenceOptions pool = one_sequence(640);
  pool.max_rows = 640;
  const auto reference = single_sequence(fixture.on_cpu(pool), 640), model = single_sequence(fixture.on_gpu(pool), 640);
  for (DecodeModel* each : {reference.get(), model.get()}) {
    each->keep_logits(true);
    each->prefill(ids);
  }
  const Floats want = reference->activation("logits");
  EXPECT_EQ(want.size(), ids.size() * static_cast<std::size_t>(fixture.config().vocab_size));
  expect_close("logits", model->activation("logits"), want, DType::f32);
}

// A prompt with everything that can be asked for: logits against the CPU's, everything else against these logits.
void compare_prompt(const Fixture& fixture, DType dtype, std::int64_t size) {
  SCOPED_TRACE("prompt of " + std::to_string(size));
  const InferenceOptions pool = pool_of(6, 32);
  const auto gpu = fixture.on_gpu(pool), cpu = fixture.on_cpu(pool);
  const Ids ids = test::random_tokens(static_cast<std::size_t>(size), fixture.config().tokenizer_vocab, 5);
  const Ids pages = {4, 1, 5};
  SamplingPlan plan;  // greedy
  plan.vocab_limit = fixture.config().tokenizer_vocab;
  const auto result_of = [&](InferenceModel& model, std::int64_t begin, std::int64_t count, bool last) {
    Chunk chunk;
    chunk.pages = pages;
    chunk.first_position = begin;
    chunk.ids = std::span(ids).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
    if (last) {
      chunk.targets = std::span(ids).subspan(static_cast<std::size_t>(begin) + 1, static_cast<std::size_t>(count) - 1);
      chunk.sampling = &plan;
      chunk.alternatives = 20;
      chunk.keep_logits = true;
    }
    model.submit({&chunk, 1});
    return model.collect()[0];
  };
  const std::int64_t before = size / 3;  // in a step of its own
  for (InferenceModel* model : {gpu.get(), cpu.get()}) {
    if (before > 0) result_of(*model, 0, before, false);
  }
  const ChunkResult got = result_of(*gpu, before, size - before, true),
                    want = result_of(*cpu, before, size - before, true);
  expect_close("logits", got.logits, want.logits, dtype);
  ASSERT_EQ(got.targets.size(), want.targets.size());
  Floats got_scores, want_scores;
  for (std::size_t t = 0; t < want.targets.size(); ++t) {
    EXPECT_EQ(got.targets[t].id, want.targets[t].id);
    EXPECT_EQ(got.targets[t].alternatives.size(), 20u);
    got_scores.push_back(got.targets[t].logprob);
    want_scores.push_back(want.targets[t].logprob);
  }
  if (!want_scores.empty()) expect_close("scores", got_scores, want_scores, dtype);

  double sum = 0;
  const auto logit = [&](std::int32_t id) { return static_cast<double>(got.logits[static_cast<std::size_t>(id)]); };
  for (const float each : got.logits) sum += std::exp(static_cast<double>(each) - logit(0));
  const auto logprob = [&](std::int32_t id) { return logit(id) - logit(0) - std::log(sum); };
  Ids order(static_cast<std::size_t>(fixture.config().tokenizer_vocab));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return logit(a) > logit(b); });
  ASSERT_TRUE(got.sampled.has_value());
  EXPECT_EQ(got.sampled->id, order[0]);
  EXPECT_NEAR(got.sampled->logprob, logprob(order[0]), 1e-5 * std::abs(logprob(order[0])) + 1e-5);
  ASSERT_EQ(got.sampled->alternatives.size(), 20u);
  for (std::size_t i = 0; i < 20; ++i) {
    const IdLogprob& other = got.sampled->alternatives[i];
    EXPECT_EQ(other.id, order[i]) << i;
    EXPECT_NEAR(other.logprob, logprob(other.id), 1e-5 * std::abs(logprob(other.id)) + 1e-5);
  }
}

TEST(CudaInference, LogitsAndScoresMatchTheCpu) {
  std::vector<test::NamedConfig> models = test::small_models();
  for (const ModelConfig& config : {models.back().config, test::small_gemmas()[0].config}) {
    models.push_back({"biases of gate and up, " + config.family, config});
    models.back().config.mlp_bias = true;
  }
  for (const test::NamedConfig& model : models) {
    SCOPED_TRACE(model.name);
    for (const DType dtype : kDTypes) {
      const Fixture fixture(model.config, dtype);
      for (const std::int64_t size : {1, 2, 33, 64, 90}) compare_prompt(fixture, dtype, size);
    }
  }
}

// All layers have this window but the last, which has `last`.
ModelConfig windowed_llama(std::int64_t window, std::int64_t last) {
  ModelConfig config = test::llama_config(test::small_llamas()[1]);
  config.windows.assign(static_cast<std::size_t>(config.num_layers), window);
  config.windows.back() = last;
  return config;
}

TEST(CudaInference, LogitsAndScoresWithWindowsMatchTheCpu) {
  for (const DType dtype : kDTypes) {
    for (const auto& [window, last] : {std::pair{1, 7}, {7, 33}, {16, 0}, {33, 16}, {0, 20}, {100, 100}}) {
      SCOPED_TRACE(format("%s, windows of %d and %d", dtype_name(dtype), window, last));
      const Fixture fixture(windowed_llama(window, last), dtype);
      for (const std::int64_t size : {1, 33, 90}) compare_prompt(fixture, dtype, size);
    }
  }
}

InferenceOptions fp8_pool(std::int64_t pages, std::int64_t page_size = 16) {
  InferenceOptions pool = pool_of(pages, page_size);
  pool.kv_fp8 = true;
  return pool;
}

// The logits after each of `ids`, which come in chunks of `chunk` ids.
Floats logits_of(InferenceModel& model, const Ids& ids, std::int64_t chunk) {
  Ids pages(static_cast<std::size_t>(model.num_pages()));
  std::iota(pages.rbegin(), pages.rend(), 0);
  model.keep_logits(true);
  for (std::int64_t first = 0; first < std::ssize(ids); first += chunk) {
    Chunk work;
    work.pages = pages;
    work.first_position = first;
    work.ids = std::span(ids).subspan(static_cast<std::size_t>(first),
                                      static_cast<std::size_t>(std::min(chunk, std::ssize(ids) - first)));
    model.submit({&work, 1});
    model.collect();
  }
  return model.activation("logits");
}

double distance(const Floats& a, const Floats& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    sum += (static_cast<double>(a[i]) - static_cast<double>(b[i])) *
           (static_cast<double>(a[i]) - static_cast<double>(b[i]));
  }
  return std::sqrt(sum);
}

// Values at the middle between two codes may get either, after the errors of 16 bits: so the GPU is as near to the CPU as
// codes are to 16 bits, no nearer.
TEST(CudaInference, KeysAndValuesInFp8MatchTheCpu) {
  const std::vector<test::NamedConfig> models = {
      test::small_models().front(), test::small_models().back(), {"windows", windowed_llama(16, 33)}};
  for (const test::NamedConfig& each : models) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      SCOPED_TRACE(each.name + " in " + dtype_name(dtype));
      const Fixture fixture(each.config, dtype);
      Ids ids(60);
      for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = static_cast<std::int32_t>(i * 7 % static_cast<std::size_t>(each.config.tokenizer_vocab));
      }
      const Floats wide = logits_of(*fixture.on_cpu(pool_of(4), dtype), ids, 60),
                   codes = logits_of(*fixture.on_cpu(fp8_pool(4), dtype), ids, 60);
      for (const std::int64_t chunk : {1, 7, 60}) {
        const Floats got = logits_of(*fixture.on_gpu(fp8_pool(4), true), ids, chunk),
                     got_wide = logits_of(*fixture.on_gpu(pool_of(4), true), ids, chunk);
        EXPECT_LT(distance(got, codes), 1.5 * distance(wide, codes) + 2 * distance(got_wide, wide)) << chunk;
        EXPECT_GT(distance(got, wide), 0.3 * distance(codes, wide)) << chunk << ": not in fp8";
      }
    }
  }
}

// Equal logits: the lower id comes first, and no padding row ever does.
TEST(CudaInference, AlternativesOfEqualLogitsAreInOrderOfId) {
  const ModelConfig config = test::llama_config(test::small_llamas()[0]);
  const Fixture fixture(config, DType::f32, [&](const TensorSpec& spec, Floats& values) {
    if (spec.name == weight_of("lm_head")) std::ranges::fill(values, 0.0f);
  });
  const auto model = fixture.on_gpu(pool_of(4));
  const Ids pages = {2}, ids = {7};
  Chunk chunk;
  chunk.pages = pages;
  chunk.ids = ids;
  chunk.targets = ids;
  chunk.alternatives = 20;
  model->submit({&chunk, 1});
  const ChunkResult result = model->collect()[0];
  ASSERT_EQ(result.targets.size(), 1u);
  const float expected = -std::log(static_cast<float>(config.vocab_size));
  EXPECT_NEAR(result.targets[0].logprob, expected, 1e-5);
  for (std::size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(result.targets[0].alternatives[i].id, static_cast<std::int32_t>(i));
    EXPECT_NEAR(result.targets[0].alternatives[i].logprob, expected, 1e-5);
  }
}

// ---- the bits of a sequence are its own ----------------------------------------------------------------------------------

TEST(CudaInference, BitsOfASequenceDoNotDependOnWhatElseRuns) {
  std::vector<test::NamedConfig> models = test::small_models();
  for (const ModelConfig& config : {models.back().config, test::small_gemmas()[0].config}) {
    models.push_back({"biases of gate and up, " + config.family, config});
    models.back().config.mlp_bias = true;
  }
  for (const test::NamedConfig& each : models) {
    SCOPED_TRACE(each.name);
    for (const DType dtype : kDTypes) {
      SCOPED_TRACE(dtype_name(dtype));
      const Fixture fixture(each.config, dtype);
      const auto model = fixture.on_gpu(pool_of(60)), direct = fixture.on_gpu(pool_of(60), true);
      const std::vector<test::Sequence> all = test::random_sequences(each.config, test::kSlots, 60);
      std::vector<test::Trace> alone;
      for (const test::Sequence& sequence : all) alone.push_back(test::run(*model, {sequence}, 64, false, 1)[0]);
      for (const std::int64_t chunk : {1, 5, 64}) {
        for (const bool chained : {false, true}) {
          EXPECT_TRUE(test::run(*model, all, chunk, chained, 9) == alone)
              << "chunks of " << chunk << ", chained " << chained;
        }
      }
      EXPECT_TRUE(test::run(*direct, all, 5, true, 9) == alone) << "launches one by one differ from their graph";
    }
  }
}

TEST(CudaInference, BitsOfASequenceWithWindowsDoNotDependOnWhatElseRuns) {
  for (const DType dtype : kDTypes) {
    for (const auto& [window, last] : {std::pair{1, 5}, {15, 5}, {16, 17}, {35, 0}, {64, 64}}) {
      SCOPED_TRACE(format("%s, windows of %d and %d", dtype_name(dtype), window, last));
      const Fixture fixture(windowed_llama(window, last), dtype);
      const auto model = fixture.on_gpu(pool_of(60)), direct = fixture.on_gpu(pool_of(60), true);
      const std::vector<test::Sequence> all = test::random_sequences(fixture.config(), test::kSlots, 60);
      std::vector<test::Trace> alone;
      for (const test::Sequence& sequence : all) alone.push_back(test::run(*model, {sequence}, 64, false, 1)[0]);
      for (const std::int64_t chunk : {1, 5, 64}) EXPECT_TRUE(test::run(*model, all, chunk, chunk == 5, 9) == alone);
      EXPECT_TRUE(test::run(*direct, all, 5, true, 9) == alone) << "launches one by one differ from their graph";
    }
  }
}

TEST(CudaInference, BitsOfASequenceInFp8DoNotDependOnWhatElseRuns) {
  const std::vector<test::NamedConfig> models = {test::small_models().front(), {"windows", windowed_llama(16, 33)}};
  for (const test::NamedConfig& each : models) {
    SCOPED_TRACE(each.name);
    const Fixture fixture(each.config, each.name == "windows" ? DType::bf16 : DType::f16);
    const auto model = fixture.on_gpu(fp8_pool(60));
    const std::vector<test::Sequence> all = test::random_sequences(each.config, 4, 60);
    std::vector<test::Trace> alone;
    for (const test::Sequence& sequence : all) alone.push_back(test::run(*model, {sequence}, 64, false, 1)[0]);
    for (const std::int64_t chunk : {1, 5}) {
      EXPECT_TRUE(test::run(*model, all, chunk, chunk == 5, 9) == alone) << "chunks of " << chunk;
    }
    const auto direct = fixture.on_gpu(fp8_pool(60), true);
    EXPECT_TRUE(test::run(*direct, all, 5, true, 9) == alone) << "launches one by one differ from their graph";
  }
  const Fixture fixture(windowed_llama(100, 0), DType::bf16);
  test::expect_engine_changes_nothing(*fixture.on_gpu(fp8_pool(14)), 2, 8, 1);
}

TEST(CudaInference, Fp8IsRefusedWhereThereIsNoKernel) {
  const ModelConfig config = test::llama_config(test::small_llamas()[0]);
  cuda::GpuInferenceOptions fused = options_of(DType::f16);
  fused.fused_steps = true;
  expect_contains(
      error_of(Exit::usage, [&] { cuda::random_inference(config, 1, fp8_pool(4), options_of(DType::f32)); }),
      "need fp16 or bf16");
  expect_contains(error_of(Exit::usage, [&] { cuda::random_inference(config, 1, fp8_pool(4), fused); }), "fused");
}

// Through the engine, which gives back pages in front of all windows while their sequence lives, preempts, shares prefixes and
// verifies drafts.
TEST(CudaInference, PagesInFrontOfWindowsAreGivenBackWithoutAChange) {
  std::int64_t preemptions = 0;
  for (const DType dtype : kDTypes) {
    for (const std::int64_t longest : {23, 100}) {  // with 100 the pages of all do not fit
      SCOPED_TRACE(format("%s, windows up to %d", dtype_name(dtype), static_cast<int>(longest)));
      const Fixture fixture(windowed_llama(longest, 4), dtype);
      const auto model = fixture.on_gpu(pool_of(14)), draft = fixture.on_gpu(pool_of(14));
      preemptions += test::expect_engine_changes_nothing(*model, 6, 40, 1).preemptions;
      for (const bool lookup : {true, false}) {
        const DraftOptions drafts{
            .lookup = lookup ? 5 : 0, .model = lookup ? nullptr : draft.get(), .row_cost = 1e-3, .draft_cost = 0.05};
        EXPECT_GT(test::expect_engine_changes_nothing(*model, 3, 20, 1, drafts).drafts.verifications, 0);
      }
    }
  }
  EXPECT_GT(preemptions, 0);
}

// The same of models whose layers normalise what they add.
TEST(CudaInference, PostNormsThroughTheEngine) {
  for (const test::NamedConfig& each : test::small_gemmas()) {
    for (const DType dtype : kDTypes) {
      SCOPED_TRACE(each.name + " in " + dtype_name(dtype));
      const Fixture fixture(each.config, dtype);
      const auto model = fixture.on_gpu(pool_of(14)), draft = fixture.on_gpu(pool_of(14));
      test::expect_drafts_verified(*model);
      EXPECT_GT(test::expect_engine_changes_nothing(*model, 6, 40, 1).prefix_ids, 0);
      const DraftOptions drafts{.lookup = 0, .model = draft.get(), .row_cost = 1e-3, .draft_cost = 0.05};
      EXPECT_GT(test::expect_engine_changes_nothing(*model, 3, 20, 1, drafts).drafts.verifications, 0);
    }
  }
}

// A real vocabulary and rows enough for every bucket: a sequence among 63 others.
TEST(CudaInference, BitsAmong63OthersInEverySizeOfPage) {
  for (const bool llama : {false, true}) {
    const ModelConfig config = llama ? test::llama_config({"llama", 8, 2, 64, 2, 512, 1376, true, true, 32000})
                                     : test::neox_config({"neox", 6, 80, 2, 1920, true, true, 50304});
    for (const std::int64_t page_size : {16, 32, 64}) {
      SCOPED_TRACE(std::string(llama ? "llama" : "neox") + ", pages of " + std::to_string(page_size));
      const Fixture fixture(config, DType::bf16);
      InferenceOptions pool = pool_of(64 * 8, page_size, 64);
      pool.max_rows = 512;
      const auto model = fixture.on_gpu(pool);
      const std::vector<test::Sequence> all = test::random_sequences(config, 64, 100);
      std::vector<test::Trace> alone;
      for (const test::Sequence& sequence : all) alone.push_back(test::run(*model, {sequence}, 512, true, 1)[0]);
      EXPECT_TRUE(test::run(*model, all, 40, true, 4) == alone);
    }
  }
}

TEST(CudaInference, BitsDoNotDependOnTheEnginesSchedule) {
  for (const bool llama : {false, true}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      SCOPED_TRACE(std::string(llama ? "llama in " : "neox in ") + dtype_name(dtype));
      const Fixture fixture(
          llama ? test::llama_config(test::small_llamas()[1]) : test::neox_config(test::small_shapes()[3]), dtype);
      const auto model = fixture.on_gpu(pool_of(14));
      ASSERT_EQ(model->depth(), 16);
      const EngineStatistics sum = test::expect_engine_changes_nothing(*model, 16, 40, 1);
      EXPECT_GT(sum.preemptions, 50);
      EXPECT_GT(sum.prefix_ids, 50);
    }
  }
}

// A prompt and `steps` rows, each with the id of the one before, as many in flight as `depth`: results, and ends by the device's
// clock. With `rules` three of four steps forbid ids that depend on the step.
struct QueuedRun {
  std::vector<float> scores;  // ids and log-probabilities
  std::vector<double> ended;
};
QueuedRun queued_run(InferenceModel& model, std::int64_t depth, int steps, bool rules) {
  Ids pages(static_cast<std::size_t>(model.num_pages()));
  std::iota(pages.begin(), pages.end(), 0);
  const Ids prompt = test::random_tokens(7, model.config().tokenizer_vocab, 6);
  const SamplingPlan plan =
      sampling_plan({.temperature = 0.9, .seed = 4, .vocab_limit = model.config().tokenizer_vocab});
  QueuedRun run;
  std::int64_t queued = 0;
  const auto collect = [&] {
    const ChunkResult& result = model.collect()[0];
    --queued;
    run.ended.push_back(model.ended_seconds());
    if (!result.sampled) return;
    run.scores.push_back(static_cast<float>(result.sampled->id));
    run.scores.push_back(result.sampled->logprob);
    for (const IdLogprob& other : result.sampled->alternatives) run.scores.push_back(other.logprob);
  };
  for (int i = 0; i <= steps; ++i) {
    if (queued == depth) collect();
    LogitRow row;
    for (std::int32_t id = 0; id < 30; ++id) row.forbidden.push_back({id * 8 + i % 8});
    Chunk chunk;
    chunk.pages = pages;
    if (i == 0) chunk.ids = prompt;
    chunk.first_position = i == 0 ? 0 : std::ssize(prompt) + i - 1;
    chunk.sampling = &plan;
    chunk.alternatives = i % 5 == 0 ? 3 : 0;
    if (rules && i % 4 != 3) chunk.logit_rows = {&row, 1};
    model.submit({&chunk, 1});
    ++queued;
  }
  while (queued > 0) collect();
  return run;
}

// Descriptions on the device, memory for results and rules are not those of another step in flight, and a size is captured for
// two slots whatever the depth is.
TEST(CudaInference, StepsQueuedFarAheadKeepTheirBitsAndTheirTimes) {
  for (const bool llama : {false, true}) {
    for (const bool rules : {false, true}) {
      SCOPED_TRACE(std::string(llama ? "llama" : "neox") + (rules ? ", rules" : ""));
      const Fixture fixture(
          llama ? test::llama_config(test::small_llamas()[1]) : test::neox_config(test::small_shapes()[3]),
          DType::bf16);
      const auto model = fixture.on_gpu(pool_of(14));
      const QueuedRun alone = queued_run(*model, 1, 80, rules);
      ASSERT_EQ(alone.ended.size(), 81u);
      for (const std::int64_t depth : {2, 3, 16}) {
        const auto begin = std::chrono::steady_clock::now();
        const double before = model->ended_seconds();
        const QueuedRun ahead = queued_run(*model, depth, 80, rules);
        const double host = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        EXPECT_TRUE(same_bits(ahead.scores, alone.scores)) << "depth " << depth;
        EXPECT_TRUE(std::ranges::is_sorted(ahead.ended));
        EXPECT_GT(ahead.ended.front(), before);
        EXPECT_GT(ahead.ended.back() - ahead.ended.front(), 80 * 5e-6) << "a step takes the device longer";
        EXPECT_LT(ahead.ended.back() - ahead.ended.front(), host);
      }
    }
  }
}

// What the host does between two collections is not in the times of steps that were queued before.
TEST(CudaInference, AStepEndsByTheDevicesClock) {
  const Fixture fixture(test::llama_config(test::small_llamas()[1]), DType::bf16);
  const auto model = fixture.on_gpu(pool_of(14));
  queued_run(*model, 16, 40, false);
  Ids pages(static_cast<std::size_t>(model->num_pages()));
  std::iota(pages.begin(), pages.end(), 0);
  const SamplingPlan greedy;
  const Ids ids{1};
  for (int i = 0; i < 4; ++i) {
    Chunk chunk;
    chunk.pages = pages;
    if (i == 0) chunk.ids = ids;
    chunk.first_position = i;
    chunk.sampling = &greedy;
    model->submit({&chunk, 1});
  }
  model->collect();
  const double first = model->ended_seconds();
  for (int i = 0; i < 3; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    model->collect();
  }
  EXPECT_LT(model->ended_seconds() - first, 0.05);
  EXPECT_GT(model->ended_seconds() - first, 0);
}

TEST(CudaInference, RulesAreObeyedWhateverIsKnown) {
  for (const bool llama : {false, true}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      SCOPED_TRACE(std::string(llama ? "llama in " : "neox in ") + dtype_name(dtype));
      const Fixture fixture(
          llama ? test::llama_config(test::small_llamas()[1]) : test::neox_config(test::small_shapes()[3]), dtype);
      test::expect_rules_obeyed(*fixture.on_gpu(pool_of(14)));
    }
  }
}

// Chunks with drafts give what chunks of one row give, and the engine's requests what they give alone: with lookups, and with
// the model as its own draft model.
TEST(CudaInference, DraftsChangeNoBit) {
  for (const bool llama : {false, true}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      SCOPED_TRACE(std::string(llama ? "llama in " : "neox in ") + dtype_name(dtype));
      const Fixture fixture(
          llama ? test::llama_config(test::small_llamas()[1]) : test::neox_config(test::small_shapes()[3]), dtype);
      const auto model = fixture.on_gpu(pool_of(14)), draft = fixture.on_gpu(pool_of(14));
      test::expect_drafts_verified(*model);
      for (const bool lookup : {true, false}) {
        const DraftOptions drafts{
            .lookup = lookup ? 5 : 0, .model = lookup ? nullptr : draft.get(), .row_cost = 1e-3, .draft_cost = 0.05};
        const EngineStatistics sum = test::expect_engine_changes_nothing(*model, 4, 20, 1, drafts);
        EXPECT_GT(sum.drafts.verifications, 20);
        EXPECT_GT(sum.drafts.accepted, lookup ? 0 : 100);
      }
    }
  }
}

// 601 rows are scored in one step, so that their logits take three pieces, and in steps of one piece and of few rows.
TEST(CudaInference, ScoresOfManyRowsAreThoseOfFew) {
  for (const bool llama : {false, true}) {
    const Fixture fixture(
        llama ? test::llama_config(test::small_llamas()[1]) : test::neox_config(test::small_shapes()[2]), DType::bf16);
    InferenceOptions pool = pool_of(40, 32);
    pool.max_rows = 640;
    const auto model = fixture.on_gpu(pool);
    const Ids ids = test::random_tokens(602, fixture.config().tokenizer_vocab, 6);
    Ids pages(20);
    std::iota(pages.begin(), pages.end(), 11);
    const SamplingPlan greedy;
    const auto scores_in_chunks = [&](std::int64_t chunk, std::int32_t* sampled) {
      Floats scores;
      for (std::int64_t begin = 0; begin < 601; begin += chunk) {
        const auto first = static_cast<std::size_t>(begin),
                   rows = static_cast<std::size_t>(std::min(chunk, 601 - begin));
        Chunk chunk;
        chunk.pages = pages;
        chunk.first_position = begin;
        chunk.ids = std::span(ids).subspan(first, rows);
        chunk.targets = std::span(ids).subspan(first + 1, rows);
        chunk.alternatives = 3;
        if (first + rows == 601) chunk.sampling = &greedy, chunk.keep_logits = true;
        model->submit({&chunk, 1});
        const ChunkResult& result = model->collect()[0];
        for (const ScoredId& target : result.targets) {
          scores.push_back(target.logprob);
          for (const IdLogprob& other : target.alternatives) scores.push_back(other.logprob);
        }
        scores.insert(scores.end(), result.logits.begin(), result.logits.end());
        if (result.sampled) *sampled = result.sampled->id;
      }
      return scores;
    };
    std::int32_t first_id = -1;
    const Floats whole = scores_in_chunks(601, &first_id);
    EXPECT_EQ(whole.size(), 601u * 4 + static_cast<std::size_t>(fixture.config().vocab_size));
    for (const std::int64_t chunk : {1, 7, 256, 300}) {
      std::int32_t id = -1;
      EXPECT_TRUE(same_bits(scores_in_chunks(chunk, &id), whole)) << "chunks of " << chunk;
      EXPECT_EQ(id, first_id);
    }
  }
}

// The last layer leaves out rows that nobody wants, if a step is launched directly, and steps of many rows have a second stream
// (or those of one row already, also in graphs): a long prompt in one step gives what it gives in pieces of any size, beside
// other sequences, and where every row is wanted; and so do the keys and values that it leaves.
TEST(CudaInference, LongPromptsGiveTheBitsOfShortPieces) {
  constexpr std::int64_t kRows = 601;
  const ModelConfig configs[] = {test::neox_config(test::small_shapes()[3]), test::neox_config(test::small_shapes()[1]),
                                 test::llama_config(test::small_llamas()[1]), test::small_gemmas()[0].config};
  for (const ModelConfig& config : configs) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      SCOPED_TRACE(std::to_string(config.head_dim) + " in " + dtype_name(dtype));
      const Fixture fixture(config, dtype);
      InferenceOptions pool = pool_of(60, 32);
      pool.max_rows = 1024;
      std::unique_ptr<InferenceModel> model;
      const Ids ids = test::random_tokens(kRows + 1, config.tokenizer_vocab, 6);
      Ids pages(20), other_pages(20);
      std::iota(pages.begin(), pages.end(), 7);
      std::iota(other_pages.begin(), other_pages.end(), 30);
      const SamplingPlan greedy;
      const auto chunk_of = [&](std::int64_t begin, std::int64_t end) {
        Chunk chunk;
        chunk.pages = pages;
        chunk.first_position = begin;
        chunk.ids = std::span(ids).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
        if (end == kRows) chunk.sampling = &greedy, chunk.keep_logits = true;
        return chunk;
      };
      // The logits behind the prompt, whose pieces end at `ends`, and behind one more id.
      const auto logits_of = [&](std::vector<std::int64_t> ends, int others_before, bool score) {
        Floats all;
        std::int64_t begin = 0;
        for (const std::int64_t end : ends) {
          Chunk chunk = chunk_of(begin, end), other = chunk;
          if (score) chunk.targets = std::span(ids).subspan(static_cast<std::size_t>(begin) + 1, chunk.ids.size());
          other.pages = other_pages;
          other.slot = 1;
          other.sampling = nullptr, other.keep_logits = false;  // nobody wants one of its rows
          std::vector<Chunk> work = {chunk};
          if (others_before > 0) work.insert(others_before == 1 ? work.begin() : work.end(), other);
          model->submit(work);
          const std::span<const ChunkResult> results = model->collect();
          const Floats logits = [&] {
            const ChunkResult& own = results[others_before == 1 ? 1 : 0];
            return Floats(own.logits.begin(), own.logits.end());
          }();
          all.insert(all.end(), logits.begin(), logits.end());
          begin = end;
        }
        Chunk next = chunk_of(kRows, kRows);
        next.ids = std::span(ids).last(1);
        model->submit({&next, 1});
        const std::span<const float> logits = model->collect()[0].logits;
        all.insert(all.end(), logits.begin(), logits.end());
        return all;
      };
      std::vector<std::int64_t> short_pieces;
      for (std::int64_t end = 47; end < kRows; end += 47) short_pieces.push_back(end);
      short_pieces.push_back(kRows);
      Floats want;
      const auto check_pieces = [&] {
        for (int run = 0; run < 3; ++run) {  // in the third, all steps of few rows are graphs
          const Floats got = logits_of(short_pieces, 0, false);
          if (want.empty()) want = got;
          EXPECT_TRUE(same_bits(got, want)) << "short pieces, run " << run;
        }
        ASSERT_EQ(std::ssize(want), 2 * config.vocab_size);
        for (const std::vector<std::int64_t>& ends : std::vector<std::vector<std::int64_t>>{
                 {kRows}, {300, kRows}, {256, kRows}, {257, kRows}, {600, kRows}, {1, 500, kRows}}) {
          for (const int others : {0, 1, 2}) {
            if (others > 0 && ends.front() > 500) continue;  // more rows than a step has
            EXPECT_TRUE(same_bits(logits_of(ends, others, false), want))
                << ends.size() << " pieces, the first of " << ends[0] << ", others " << others;
          }
        }
        EXPECT_TRUE(same_bits(logits_of({kRows}, 0, true), want)) << "every row wanted";
      };
      for (const std::int64_t two_stream_rows : {std::int64_t{1} << 40, std::int64_t{1}, cuda::kTwoStreamRows}) {
        SCOPED_TRACE("two streams from " + std::to_string(two_stream_rows) + " rows on");
        cuda::GpuInferenceOptions options = options_of(dtype);
        options.two_stream_rows = two_stream_rows;
        model = fixture.on_gpu(pool, options);
        check_pieces();
      }
      model = fixture.on_gpu(pool, true);
      check_pieces();
    }
  }
}

// Steps of kPromptRows rows, which one sequence has where memory has room, give the bits of steps of kInferenceRows: a prompt
// of both whole steps and a rest, and the token behind it.
TEST(CudaInference, StepsOfPromptRowsGiveTheBitsOfSmallerOnes) {
  constexpr std::int64_t kCapacity = cuda::kPromptRows + 200;
  test::LlamaShape shape{"long", 8, 2, 128, 2, 1024, 2752};
  shape.positions = kCapacity;
  const ModelConfig config = test::llama_config(shape);
  const Ids ids = test::random_tokens(kCapacity, config.tokenizer_vocab, 6);
  for (const bool fp8 : {false, true}) {
    Floats want;
    for (const std::int64_t rows : {cuda::kInferenceRows, cuda::kPromptRows}) {
      InferenceOptions pool = one_sequence(kCapacity);
      pool.kv_fp8 = fp8;
      pool.max_rows = rows;
      const auto model = single_sequence(cuda::random_inference(config, 4, pool, options_of(DType::bf16)), kCapacity);
      const std::span<const float> prompt = model->prefill(std::span(ids).first(kCapacity - 1));
      Floats got(prompt.begin(), prompt.end());
      const std::span<const float> token = model->decode(ids.back());
      got.insert(got.end(), token.begin(), token.end());
      if (want.empty()) want = got;
      EXPECT_TRUE(same_bits(got, want)) << (fp8 ? "fp8, steps of " : "steps of ") << rows;
    }
  }
}

// ---- errors ---------------------------------------------------------------------------------------------------------------

// Parameters in device memory, one of whose embeddings is damaged.
struct DamagedLlama {
  static constexpr std::int32_t kDamaged = 5;

  DamagedLlama() : file(ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin")), arena(parameters()) {}
  Floats parameters() const {
    Floats values(static_cast<std::size_t>(file.table().arena_elements()));
    for (const TensorSpec& spec : file.table().specs()) file.read_parameter(spec, values.data() + spec.offset);
    const TensorSpec& embedding = file.table().at(weight_of("model.embed_tokens"));
    values[static_cast<std::size_t>(embedding.offset + kDamaged * file.config().hidden_size)] = std::nanf("");
    return values;
  }

  ModelFile file;
  test::DeviceBuffer<float> arena;
};

// A chunk whose logits are not finite says so, and the others get what they would get without it: in the same step, in one that
// was queued behind it, and in the pages and the slot that it leaves.
TEST(CudaInference, AChunkThatCannotBeSampledFailsAlone) {
  const DamagedLlama llama;
  const auto model =
      cuda::make_inference<float>(llama.file.config(), llama.file.table(), llama.arena.data(), pool_of(4));
  const SamplingPlan greedy;
  const std::vector<Ids> pages = {{0}, {1}, {2}}, ids = {{1, 2}, {1, DamagedLlama::kDamaged}, {3}};
  std::vector<Chunk> work(3), next(3);
  for (std::size_t s = 0; s < 3; ++s) {
    work[s].pages = next[s].pages = pages[s];
    work[s].ids = ids[s];
    work[s].slot = next[s].slot = static_cast<std::int32_t>(s);
    work[s].sampling = next[s].sampling = &greedy;
    work[s].alternatives = next[s].alternatives = 2;
    next[s].first_position = std::ssize(ids[s]);  // the id is in the slot
  }
  const auto copied = [&] {
    const std::span<const ChunkResult> results = model->collect();
    return std::vector<ChunkResult>(results.begin(), results.end());
  };
  model->submit(work);
  model->submit(next);
  const std::vector<ChunkResult> together = copied(), behind = copied();
  EXPECT_EQ(together[1].error, SampleError::not_a_number);
  EXPECT_FALSE(together[1].sampled.has_value());
  EXPECT_EQ(behind[1].error, SampleError::not_a_number) << "the damaged keys are still there";
  const auto expect_same = [](const ChunkResult& got, const ChunkResult& want) {
    ASSERT_TRUE(got.sampled && want.sampled);
    EXPECT_EQ(got.error, SampleError::none);
    EXPECT_EQ(got.sampled->id, want.sampled->id);
    EXPECT_EQ(got.sampled->logprob, want.sampled->logprob);
  };
  const std::vector<Chunk> healthy = {work[0], work[2]};  // row 1 of the logits was the damaged one's
  model->submit(healthy);
  const std::vector<ChunkResult> without = copied();
  expect_same(without[0], together[0]);
  expect_same(without[1], together[2]);
  for (const std::size_t s : {0, 2}) {
    for (const bool damaged_memory : {false, true}) {
      SCOPED_TRACE("sequence " + std::to_string(s) + (damaged_memory ? " in damaged memory" : ""));
      if (damaged_memory) {
        work[s].pages = next[s].pages = pages[1];
        work[s].slot = next[s].slot = 1;
      }
      model->submit({&work[s], 1});
      model->submit({&next[s], 1});
      expect_same(model->collect()[0], together[s]);
      expect_same(model->collect()[0], behind[s]);
    }
  }
}

TEST(CudaInference, RefusesWhatWouldTouchMemoryOfOthers) {
  const auto model = cuda::load_inference(ModelFile::open("test/fixtures/golden/neox-hs128.model.bin"), pool_of(8),
                                          options_of(DType::f32));
  const Chunk good = test::expect_refuses_memory_of_others(*model);
  Chunk more = good;
  more.alternatives = 21;
  EXPECT_NE(error_of(Exit::internal, [&] { model->submit({&more, 1}); }).find("21 alternatives"), std::string::npos);
  const std::vector<Chunk> sequences(8, good);
  EXPECT_NE(error_of(Exit::internal, [&] { model->submit(sequences); }).find("8 sequences"), std::string::npos);
  for (std::int64_t step = 0; step < model->depth(); ++step) model->submit({&good, 1});
  EXPECT_NE(error_of(Exit::internal, [&] { model->submit({&good, 1}); }).find("16 steps"), std::string::npos);
}

TEST(CudaInference, ShapesWithoutKernelsAreRefusedByName) {
  const auto reason = [](const auto& change) {
    ModelConfig config = test::llama_config(test::small_llamas()[0]);
    change(config);
    return cuda::inference_unsupported_reason(config, DType::bf16);
  };
  EXPECT_EQ(reason([](ModelConfig&) {}), "");
  EXPECT_NE(reason([](ModelConfig& c) { c.head_dim = 48; }).find("head_dim: got 48"), std::string::npos);
  EXPECT_NE(reason([](ModelConfig& c) { c.hidden_size = 36; }).find("hidden_size: got 36"), std::string::npos);
  EXPECT_NE(reason([](ModelConfig& c) { c.ffn_size = 100; }), "");
  const auto beside = [&](const auto& change) {
    return reason([&](ModelConfig& c) { change(c), c.parallel_residual = true; });
  };
  EXPECT_NE(beside([](ModelConfig& c) { c.post_norms = true; }).find("parallel_residual"), std::string::npos);
  EXPECT_NE(beside([](ModelConfig& c) { c.norm_weight_offset = 1; }).find("parallel_residual"), std::string::npos);
  const auto geglu = [](ModelConfig& c) { c.activation = Activation::geglu_tanh; };
  EXPECT_EQ(reason(geglu), "");
  EXPECT_EQ(reason([&](ModelConfig& c) { geglu(c), c.mlp_bias = true; }), "");
  EXPECT_EQ(reason([](ModelConfig& c) { c.windows.assign(static_cast<std::size_t>(c.num_layers), 8); }), "");
}

TEST(CudaInference, ThePlanIsWhatIsAllocated) {
  for (const test::NamedConfig& each : test::small_models()) {
    for (const DType dtype : kDTypes) {
      const auto planned = cuda::plan_inference(each.config, pool_of(9), dtype),
                 reported = cuda::random_inference(each.config, 1, pool_of(9), options_of(dtype))->memory();
      ASSERT_EQ(planned.size(), reported.size());
      for (std::size_t i = 0; i < planned.size(); ++i) {
        EXPECT_EQ(planned[i].name, reported[i].name);
        EXPECT_EQ(planned[i].bytes, reported[i].bytes) << planned[i].name;
      }
      if (dtype == DType::f32) continue;
      const auto fp8 = cuda::plan_inference(each.config, fp8_pool(9), dtype),
                 of_fp8 = cuda::random_inference(each.config, 1, fp8_pool(9), options_of(dtype))->memory();
      EXPECT_EQ(fp8[1].bytes, of_fp8[1].bytes);
      EXPECT_EQ(of_fp8[1].name.find("K/V cache (fp8, a layer in "), 0u) << of_fp8[1].name;
      EXPECT_EQ(fp8[2].bytes, planned[2].bytes) << "the workspace";
    }
  }
}

}  // namespace
}  // namespace weft
