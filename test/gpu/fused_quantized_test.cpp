// The fused decode kernel with quantised weights, through the pages of an inference model: against the CPU, which computes with
// the same weights in fp32 and rounds keys and values as the kernel does (what may be left is derived in quantized_models.h),
// against the host's sampler, and against itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "llmc/base/error.h"
#include "llmc/cpu/inference.h"
#include "test/cpp/inference_tools.h"
#include "test/cpp/quantized_models.h"
#include "test/gpu/decode_tools.h"
#include "test/gpu/fused_tools.h"
#include "test/gpu/neox_models.h"
#include "test/gpu/sequences.h"

namespace weft {
namespace {

using test::fused_sequence;
using test::generated;
using test::quantized;
using Ids = std::vector<std::int32_t>;

// What the kernel wants beside quantised weights.
DType storage_of(const ModelConfig& config) {
  return config.parallel_residual ? DType::f16 : DType::bf16;
}

class QuantizedModel {
 public:
  explicit QuantizedModel(const ModelConfig& config, float factor = 1) : config_(config) {
    test::write_random_quantized_model(path(), config, factor);
  }
  std::unique_ptr<DecodeModel> fused(std::int64_t capacity) const {
    return fused_sequence(ModelFile::open(path()), storage_of(config_), capacity);
  }
  std::unique_ptr<DecodeModel> graph(std::int64_t capacity) const {
    cuda::GpuInferenceOptions options;
    options.dtype = storage_of(config_);
    return single_sequence(cuda::load_inference(ModelFile::open(path()), one_sequence(capacity), options), capacity);
  }
  std::unique_ptr<DecodeModel> on_cpu(std::int64_t capacity) const {
    return cpu::load_decoder(ModelFile::open(path()), capacity, storage_of(config_));
  }

 private:
  std::string path() const { return directory_.file("model.bin"); }
  ModelConfig config_;
  TemporaryDirectory directory_;
};

void expect_logits(const ModelConfig& config, std::span<const float> got, std::span<const float> want,
                   const std::string& what, double times = 1) {
  const DType cache = storage_of(config);
  const double share = test::logits_error(got, want) / (times * test::cached_logits_tolerance(cache));
  test::record_worst(std::string("logits_") + dtype_name(cache), share);
  EXPECT_LE(share, 1.0) << what << ": error as a share of what is allowed";
}

// Feeds `steps` ids to both, each from an empty sequence, and compares the logits from step `first` on, to `times` the tolerance.
void check_steps(const ModelConfig& config, int steps, int first = 0, double times = 1) {
  const QuantizedModel model(config);
  const auto fused = model.fused(steps), cpu = model.on_cpu(steps);
  for (int i = 0; i < steps; ++i) {
    const std::int32_t id = test::id_at(i, config);
    const std::span<const float> got = fused->decode(id), want = cpu->decode(id);
    if (i >= first) expect_logits(config, got, want, "step " + std::to_string(i), times);
    if (testing::Test::HasFailure()) return;
  }
}

std::string refusal_of(const ModelConfig& config) {
  return cuda::fused_unsupported_reason(config, storage_of(config));
}

ModelConfig parallel_config(std::int64_t heads, std::int64_t head_dim, std::int64_t layers, std::int64_t vocab) {
  return test::neox_config({"", heads, head_dim, layers, 4 * heads * head_dim, true, true, vocab});
}

// Widths that are not whole groups of 128 or whole loads of a warp, that leave warps without weights, one to eight tiles a block.
TEST(FusedQuantized, MatchesTheCpuAtEveryShapeOfTheParallelResidual) {
  const std::pair<int, int> shapes[] = {{4, 32}, {3, 32}, {5, 32}, {2, 80}, {11, 64}, {16, 64}, {4, 256}};
  for (const WeightFormat* scheme : kWeightFormats) {
    for (const auto& [heads, head_dim] : shapes) {
      SCOPED_TRACE(std::string(scheme->name) + ", " + std::to_string(heads) + " heads of " + std::to_string(head_dim));
      const ModelConfig config =
          quantized(parallel_config(heads, head_dim, heads * head_dim > 700 ? 1 : 3, 1003), scheme, heads % 2 == 0);
      if (!refusal_of(config).empty()) GTEST_SKIP() << refusal_of(config);
      check_steps(config, 5);
      if (HasFailure()) return;
    }
  }
}

// Two loads of a lane in a row: two halves of a band.
TEST(FusedQuantized, MatchesTheCpuAtTheLayersOf6_9B) {
  const ModelConfig config = quantized(parallel_config(32, 128, 1, 301), &kInt4, true);
  if (!refusal_of(config).empty()) GTEST_SKIP() << refusal_of(config);
  check_steps(config, 2);
}

TEST(FusedQuantized, MatchesTheCpuOverPagesAndSplits) {
  for (const WeightFormat* scheme : kWeightFormats) {
    SCOPED_TRACE(scheme->name);
    const ModelConfig config = quantized(parallel_config(2, 80, 2, 307), scheme, false);
    if (!refusal_of(config).empty()) GTEST_SKIP() << refusal_of(config);
    check_steps(config, 210, 60, test::kManyPositions);
  }
}

void expect_ids(const ModelConfig& config) {
  constexpr std::int64_t kIds = 60, kPrompt = 70;
  const QuantizedModel model(config);
  const auto fused = model.fused(kPrompt + kIds + 3);
  const Ids prompt = test::random_tokens(kPrompt, config.tokenizer_vocab, 5);
  for (const double temperature : {0.0, 0.9}) {
    GenerateOptions options;
    options.sampler.temperature = temperature;
    options.sampler.vocab_limit = config.tokenizer_vocab;
    options.max_tokens = kIds;
    const Ids want = test::host_sampled(*fused, prompt, options);
    if (temperature > 0) {
      EXPECT_GT(std::set<std::int32_t>(want.begin(), want.end()).size(), 3u) << "the test says nothing";
    }
    for (int run = 0; run < 3; ++run) {
      fused->reset();
      EXPECT_EQ(generated(*fused, prompt, options.sampler, kIds), want) << "run " << run;
    }
    fused->reset();
    if (temperature > 0) continue;
    // The graph rounds activations to 16 bits: its greatest logit is another one only where two are as near as that.
    const auto graph = model.graph(kPrompt + kIds + 3);
    std::span<const float> logits = graph->prefill(prompt);
    std::int64_t equal = 0;
    for (const std::int32_t id : want) {
      const std::span<const float> known = logits.first(static_cast<std::size_t>(config.tokenizer_vocab));
      const auto best = std::max_element(known.begin(), known.end());
      const float largest = std::max(1.0f, std::abs(*best)), behind = *best - known[static_cast<std::size_t>(id)];
      EXPECT_LT(behind, 2 * static_cast<float>(test::tolerance_of(storage_of(config))) * largest);
      equal += behind == 0 ? 1 : 0;
      logits = graph->decode(id);
    }
    EXPECT_GT(equal, kIds * 9 / 10);
  }
}

// Every kind of attention, biases of q, k and v, a hidden size that is not that of the heads, parts of gate and up that end within a group, an MLP
// of a single part, and rows that take two loads of a lane.
TEST(FusedQuantized, MatchesTheCpuWithTheSequentialResidual) {
  std::vector<test::NamedConfig> models;
  for (const test::LlamaShape& shape : test::small_llamas()) models.push_back({shape.name, test::llama_config(shape)});
  for (const test::NeoxShape& shape : test::small_shapes()) {
    if (!shape.parallel) models.push_back({shape.name, test::neox_config(shape)});
  }
  for (const test::NamedConfig& qwen : test::small_qwens()) models.push_back(qwen);
  models.push_back({"one part", test::llama_config({"", 4, 2, 32, 2, 136, 200, false, false, 1003})});
  models.push_back({"wide", test::llama_config({"", 4, 2, 64, 1, 2696, 1000})});
  for (const WeightFormat* scheme : kWeightFormats) {
    for (std::size_t i = 0; i < models.size(); ++i) {
      SCOPED_TRACE(std::string(scheme->name) + ", " + models[i].name);
      const ModelConfig config = quantized(models[i].config, scheme, i % 2 == 0);
      if (!refusal_of(config).empty()) GTEST_SKIP() << refusal_of(config);
      check_steps(config, 5);
      if (HasFailure()) return;
    }
    check_steps(quantized(test::llama_config(test::small_llamas()[2]), scheme, true), 140, 60);
  }
}

// More items than blocks, so that one has eight query heads, and more scores than are left to a warp each.
TEST(FusedQuantized, MatchesTheCpuWhereAStageIsTheTurnOfAWarp) {
  for (const WeightFormat* scheme : kWeightFormats) {
    SCOPED_TRACE(scheme->name);
    const ModelConfig narrow = quantized(test::llama_config({"", 64, 8, 32, 1, 264, 200}), scheme, false),
                      wide = quantized(test::llama_config({"", 32, 4, 128, 1, 264, 200}), scheme, true);
    if (!refusal_of(narrow).empty()) GTEST_SKIP() << refusal_of(narrow);
    check_steps(narrow, 240, 192, test::kManyPositions);
    check_steps(wide, 350, 320, test::kManyPositions);
  }
}

TEST(FusedQuantized, ManyTokensInOneLaunchAreThoseOfOneAtATimeAndOfTheGraph) {
  for (const WeightFormat* scheme : kWeightFormats) {
    SCOPED_TRACE(scheme->name);
    const ModelConfig parallel = quantized(parallel_config(11, 64, 3, 1003), scheme, scheme != &kFp8),
                      sequential = quantized(test::llama_config(test::small_llamas()[1]), scheme, false);
    if (!refusal_of(parallel).empty()) GTEST_SKIP() << refusal_of(parallel);
    expect_ids(parallel);
    expect_ids(sequential);
  }
}

TEST(FusedQuantized, OtherTypesBesideTheWeightsAreRefused) {
  const ModelConfig parallel = quantized(parallel_config(4, 32, 2, 307), &kInt8, false),
                    llama = quantized(test::llama_config(test::small_llamas()[0]), &kInt4, false);
  EXPECT_EQ(cuda::fused_unsupported_reason(parallel, DType::bf16),
            "the fused kernel reads quantised weights of models with the parallel residual beside fp16, not bf16");
  EXPECT_EQ(cuda::fused_unsupported_reason(llama, DType::f16),
            "the fused kernel reads quantised weights of Llamas and models without the parallel residual beside bf16, "
            "not fp16");
  ModelConfig head = parallel;
  head.quantization = {nullptr, &kInt8};
  EXPECT_EQ(cuda::fused_unsupported_reason(head, DType::f16),
            "the fused kernel reads quantised heads beside quantised layers, not beside layers in 16 bits");
}

TEST(FusedQuantized, WithoutBeingAskedForUpToAWidth) {
  const ModelConfig parallel = parallel_config(32, 80, 1, 307), llama = test::llama_config(test::small_llamas()[0]);
  EXPECT_TRUE(cuda::fused_by_default(parallel));
  EXPECT_TRUE(cuda::fused_by_default(llama));
  EXPECT_TRUE(cuda::fused_by_default(quantized(parallel, &kInt8, true)));
  EXPECT_TRUE(cuda::fused_by_default(quantized(parallel, &kInt4, false)));
  EXPECT_TRUE(cuda::fused_by_default(quantized(parallel, &kFp8, true)));
  EXPECT_TRUE(cuda::fused_by_default(quantized(parallel_config(32, 128, 1, 307), &kInt8, true)));
  EXPECT_FALSE(cuda::fused_by_default(quantized(parallel_config(40, 128, 1, 307), &kInt8, true)));
  EXPECT_TRUE(cuda::fused_by_default(quantized(llama, &kInt4, true)));
}

// Digits are integers or numbers near 1: that an activation was infinite must not get lost.
TEST(FusedQuantized, InfiniteActivationsAreAnError) {
  for (const WeightFormat* scheme : kWeightFormats) {
    SCOPED_TRACE(scheme->name);
    const ModelConfig config = quantized(parallel_config(4, 32, 2, 307), scheme, true);
    if (!refusal_of(config).empty()) GTEST_SKIP() << refusal_of(config);
    const QuantizedModel model(config, 1e38f);
    const auto fused = model.fused(8);
    EXPECT_NE(error_of(Exit::numeric, [&] { fused->decode(1); }), "");
  }
}

}  // namespace
}  // namespace weft
