// Steps of up to 8 rows in one persistent kernel: against the CPU, and that the bits of a row are its own.
#include "llmc/cuda/fused/step.h"

#include <gtest/gtest.h>

#include <memory>

#include "llmc/cpu/inference.h"
#include "llmc/cuda/inference/inference.h"
#include "test/cpp/inference_tools.h"
#include "test/gpu/decode_tools.h"
#include "test/gpu/fused_tools.h"
#include "test/gpu/neox_models.h"

namespace weft {
namespace {

using test::expect_close;

using Ids = std::vector<std::int32_t>;

constexpr DType kDTypes[] = {DType::f16, DType::bf16};

// Every head dimension, and the ways in which warps share a row. `large`: those of eight and of ten warps a row, too.
std::vector<test::NamedConfig> models(bool large) {
  std::vector<test::NeoxShape> shapes = {{"hs32", 5, 32, 3, 640},    {"hs64 nobias", 3, 64, 2, 768, true, false},
                                         {"hs80", 2, 80, 2, 640},    {"hs128", 4, 128, 2, 2048},
                                         {"hs256", 2, 256, 2, 2048}, {"three warps a row", 12, 64, 1, 3072}};
  if (large) shapes.push_back({"eight warps a row", 8, 256, 1, 8192});
  std::vector<test::NamedConfig> all;
  for (const test::NeoxShape& shape : shapes) all.push_back({shape.name, test::neox_config(shape)});
  return all;
}

InferenceOptions pool_of(std::int64_t pages, std::int64_t page_size, std::int64_t max_rows = cuda::kFusedStepRows) {
  InferenceOptions pool;
  pool.page_size = page_size;
  pool.num_pages = pages;
  pool.slots = test::kSlots;
  pool.max_rows = max_rows;
  return pool;
}

// A random model in a file, and the models made of it: all steps of the GPU's are small enough for the kernel.
class Fixture {
 public:
  Fixture(const ModelConfig& config, DType dtype) : config_(config), dtype_(dtype) {
    test::write_random_model(path(), config, dtype, 3);
  }
  std::string path() const { return directory_.file("model.bin"); }
  const ModelConfig& config() const { return config_; }
  std::unique_ptr<InferenceModel> on_gpu(const InferenceOptions& pool) const {
    cuda::GpuInferenceOptions options;
    options.dtype = dtype_;
    options.fused_steps = true;
    return cuda::load_inference(ModelFile::open(path()), pool, options);
  }
  std::unique_ptr<InferenceModel> on_cpu(const InferenceOptions& pool) const {
    return cpu::load_inference(ModelFile::open(path()), pool);
  }

 private:
  TemporaryDirectory directory_;
  ModelConfig config_;
  DType dtype_;
};

// Feeds `ids` in chunks of up to `chunk` rows; the logits of the last row of each.
std::vector<std::vector<float>> logits_of(InferenceModel& model, const Ids& ids, const Ids& pages, std::int64_t chunk) {
  std::vector<std::vector<float>> all;
  for (std::int64_t begin = 0; begin < std::ssize(ids); begin += chunk) {
    const auto count = std::min<std::int64_t>(chunk, std::ssize(ids) - begin);
    Chunk chunk;
    chunk.pages = pages;
    chunk.first_position = begin;
    chunk.ids = std::span(ids).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
    chunk.keep_logits = true;
    model.submit({&chunk, 1});
    const std::span<const float> logits = model.collect()[0].logits;
    all.emplace_back(logits.begin(), logits.end());
  }
  return all;
}

TEST(FusedStep, MatchesTheCpuAtEveryShape) {
  for (const test::NamedConfig& each : models(true)) {
    SCOPED_TRACE(each.name);
    for (const DType dtype : kDTypes) {
      const Fixture fixture(each.config, dtype);
      const InferenceOptions pool = pool_of(6, 16);
      const auto gpu = fixture.on_gpu(pool), cpu = fixture.on_cpu(pool);
      const Ids ids = test::random_tokens(43, fixture.config().tokenizer_vocab, 5), pages = {4, 1, 5};
      for (const std::int64_t chunk : {1, 7}) {
        const auto got = logits_of(*gpu, ids, pages, chunk), want = logits_of(*cpu, ids, pages, chunk);
        for (std::size_t i = 0; i < want.size(); ++i) {
          expect_close("chunk " + std::to_string(i) + " of " + std::to_string(chunk), got[i], want[i], dtype);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(FusedStep, MatchesTheCpuAtTheLayersOf2_8BAndThreeSplits) {
  ModelConfig config = test::neox_config(test::shape_2_8b());
  for (const DType dtype : kDTypes) {
    const Fixture fixture(config, dtype);
    const InferenceOptions pool = pool_of(16, 32);
    const auto gpu = fixture.on_gpu(pool), cpu = fixture.on_cpu(pool);
    const Ids ids = test::random_tokens(dtype == DType::f16 ? 403 : 19, config.tokenizer_vocab, 5);
    Ids pages(13);
    std::iota(pages.rbegin(), pages.rend(), 2);
    const auto got = logits_of(*gpu, ids, pages, 8), want = logits_of(*cpu, ids, pages, 8);
    for (std::size_t i = 0; i < want.size(); ++i) {
      expect_close("chunk " + std::to_string(i), got[i], want[i], dtype);
      if (HasFailure()) return;
    }
  }
}

// 1 to 8 rows: sequences side by side, whose prompts come in chunks of every length, against each alone, a row at a time.
TEST(FusedStep, BitsOfARowAreItsOwn) {
  std::int64_t page_size = 16;  // another one each time
  for (const test::NamedConfig& each : models(false)) {
    SCOPED_TRACE(each.name);
    for (const DType dtype : kDTypes) {
      const Fixture fixture(each.config, dtype);
      const auto model = fixture.on_gpu(pool_of(7 * 4, page_size));
      page_size = page_size == 64 ? 16 : 2 * page_size;
      const std::vector<test::Sequence> all = test::random_sequences(each.config, test::kSlots, 40);
      std::vector<test::Trace> alone;
      for (const test::Sequence& sequence : all) alone.push_back(test::run(*model, {sequence}, 1, false, 1)[0]);
      for (const std::int64_t chunk : {1, 5, 8}) {
        EXPECT_TRUE(test::run(*model, all, chunk, chunk == 5, 9) == alone) << "chunks of " << chunk;
      }
    }
  }
}

// From 256 and 384 positions on a row has two and three splits.
TEST(FusedStep, BitsOfARowAreItsOwnAcrossSplits) {
  const Fixture fixture(test::neox_config({"hs80", 2, 80, 2, 640}), DType::f16);
  const auto model = fixture.on_gpu(pool_of(14, 64));
  const Ids ids = test::random_tokens(421, fixture.config().tokenizer_vocab, 7), pages = {3, 9, 1, 0, 12, 5, 2};
  const auto singly = logits_of(*model, ids, pages, 1);
  for (const std::int64_t chunk : {2, 3, 8}) {
    const auto chunks = logits_of(*model, ids, pages, chunk);
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      const std::size_t row = std::min(ids.size(), (i + 1) * static_cast<std::size_t>(chunk)) - 1;
      ASSERT_TRUE(test::same_bits(chunks[i], singly[row])) << "position " << row << ", chunks of " << chunk;
    }
  }
}

TEST(FusedStep, DraftsAreVerified) {
  for (const DType dtype : kDTypes) {
    SCOPED_TRACE(dtype_name(dtype));
    const Fixture fixture(test::neox_config({"hs80", 2, 80, 2, 640}), dtype);
    test::expect_drafts_verified(*fixture.on_gpu(pool_of(24, 16)));
    test::expect_rules_obeyed(*fixture.on_gpu(pool_of(24, 16)));
  }
}

// Steps of more rows run launch by launch in the same pages.
TEST(FusedStep, ContinuesWhatAStepOfManyRowsBegan) {
  for (const DType dtype : kDTypes) {
    const Fixture fixture(test::neox_config({"hs80", 2, 80, 2, 640}), dtype);
    const InferenceOptions pool = pool_of(6, 32, 64);
    const auto gpu = fixture.on_gpu(pool), cpu = fixture.on_cpu(pool);
    const Ids ids = test::random_tokens(62, fixture.config().tokenizer_vocab, 5), pages = {4, 1};
    const auto got = logits_of(*gpu, ids, pages, 57), want = logits_of(*cpu, ids, pages, 57);
    for (std::size_t i = 0; i < want.size(); ++i) expect_close("chunk " + std::to_string(i), got[i], want[i], dtype);
  }
}

// ---- the kernel itself ----------------------------------------------------------------------------------------------

struct StepModel {
  StepModel() : model(test::neox_config({"hs80", 2, 80, 2, 640}), 64, 1, 32), pages(Ids{0, 1}), last_ids(Ids{3}) {
    logits.resize(static_cast<std::size_t>(cuda::kFusedStepRows * model.config().vocab_size));
  }
  std::vector<float> run(cuda::FusedStep<test::fp16>& step, std::int64_t rows) {
    std::vector<cuda::FusedStepRow> all;
    for (std::int32_t r = 0; r < rows; ++r) all.push_back({r + 5, r, 0, 0, r});
    test::DeviceBuffer<float> out(logits);
    step.launch(all, pages.data(), last_ids.data(), out.data());
    cuda::check(cudaDeviceSynchronize(), "step");
    step.check();
    return out.download();
  }

  test::Model<test::fp16> model;
  test::DeviceBuffer<std::int32_t> pages, last_ids;
  std::vector<float> logits;
};

// A wait that never ends is an error of the machine after the time limit, and the GPU is free afterwards.
TEST(FusedStep, TheWatchdogEndsAHang) {
  StepModel model;
  cuda::FusedTuning tuning;
  tuning.timeout_seconds = 0.2;
  const auto sound = model.model.fused_step(tuning);
  tuning.lose_an_arrival = true;
  const auto broken = model.model.fused_step(tuning);
  for (const std::int64_t rows : {1, 3}) {  // both kernels
    const std::vector<float> expected = model.run(*sound, rows);
    EXPECT_NE(error_of(Exit::environment, [&] { model.run(*broken, rows); }).find("no progress"), std::string::npos);
    EXPECT_EQ(model.run(*sound, rows), expected);
  }
}

TEST(FusedStep, FewBlocksAndTheSmallestRing) {
  StepModel model;
  cuda::FusedTuning tuning;
  const auto usual = model.model.fused_step(tuning);
  tuning.blocks = 13;
  tuning.ring_bytes = tuning.window_bytes = 1;
  const auto small = model.model.fused_step(tuning);
  for (const std::int64_t rows : {1, 8}) {
    const std::vector<float> a = model.run(*usual, rows), b = model.run(*small, rows);
    expect_close("13 blocks, " + std::to_string(rows) + " rows", b, a, DType::f16);
  }
}

TEST(FusedStep, Refusals) {
  cuda::Device device = cuda::probe_device();
  const auto reason = [&](const ModelConfig& config) { return cuda::fused_step_unsupported_reason(config, device); };
  const ModelConfig good = test::neox_config({"hs80", 2, 80, 2, 640});
  EXPECT_EQ(reason(good), "");
  EXPECT_NE(reason(test::neox_config({"sequential", 2, 80, 2, 640, false})).find("parallel residual"),
            std::string::npos);
  EXPECT_NE(reason(test::llama_config(test::small_llamas()[1])).find("parallel residual"), std::string::npos);
  EXPECT_NE(reason(test::neox_config({"6.9b", 32, 128, 1, 16384})).find("2560, got 4096"), std::string::npos);
  device.arch = 80;
  EXPECT_NE(reason(good).find("9.0"), std::string::npos);
}

}  // namespace
}  // namespace weft
