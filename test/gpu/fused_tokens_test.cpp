// The fused decode kernel after a prompt of the inference model, in the same pages: logits against the CPU, ids against the
// host's sampler, generation in pieces.
#include "llmc/cuda/inference/fused_tokens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "llmc/base/error.h"
#include "llmc/cpu/inference.h"
#include "llmc/cuda/inference/inference.h"
#include "test/cpp/inference_tools.h"
#include "test/cpp/quantized_models.h"
#include "test/gpu/decode_tools.h"
#include "test/gpu/gpu_goldens.h"
#include "test/gpu/neox_models.h"
#include "test/gpu/sequences.h"

namespace weft {
namespace {

using Ids = std::vector<std::int32_t>;

using test::fused_sequence;
using test::generated;

void check_model(const ModelFile& file, DType dtype, std::int64_t prompt_size) {
  constexpr std::int64_t kIds = 60;
  const std::int64_t capacity = prompt_size + kIds + 3;
  const auto model = fused_sequence(file, dtype, capacity), cpu = cpu::load_decoder(file, capacity);
  const ModelConfig& config = model->config();
  const Ids prompt = test::random_tokens(static_cast<std::size_t>(prompt_size), config.tokenizer_vocab, 5);
  test::expect_close("prompt", model->prefill(prompt), cpu->prefill(prompt), dtype);
  for (const std::int32_t id : {7, 3, 11, 2}) test::expect_close("decode", model->decode(id), cpu->decode(id), dtype);

  for (const double temperature : {0.0, 0.9}) {
    GenerateOptions options;
    options.sampler.temperature = temperature;
    options.sampler.vocab_limit = config.tokenizer_vocab;
    options.max_tokens = kIds;
    const Ids want = test::host_sampled(*model, prompt, options);
    for (int run = 0; run < 2; ++run) {
      model->reset();
      EXPECT_EQ(generated(*model, prompt, options.sampler, kIds), want);
      EXPECT_EQ(model->length(), prompt_size + kIds - 1);
    }
    // The inference model goes on with keys and values that the kernel has appended.
    Ids all = prompt;
    all.insert(all.end(), want.begin(), want.end());
    cpu->reset();
    test::expect_close("after a text", model->prefill(std::span(all).last(1)), cpu->prefill(all), dtype);
    model->reset();
    const auto stop = std::find(want.begin(), want.end(), want[30]) + 1;
    EXPECT_EQ(generated(*model, prompt, options.sampler, kIds, {want[30]}), Ids(want.begin(), stop));
  }
  model->reset();
  EXPECT_NE(error_of(Exit::internal, [&] { generated(*model, prompt, {}, kIds + 4); }), "");
}

TEST(FusedTokens, AWidthThatLeavesLoadsEmptyIsLeftToTheGraph) {
  ModelConfig config = test::llama_config(test::small_llamas().front());
  for (const std::int64_t width : {576, 1024, 2048, 2560, 3072, 4096}) {
    config.hidden_size = width;
    EXPECT_EQ(cuda::graph_is_faster(config), width == 2560) << width;
  }
  config.hidden_size = 2048;
  config.ffn_size = 8192;
  EXPECT_FALSE(cuda::graph_is_faster(config));
  config.ffn_size = 11008;
  EXPECT_TRUE(cuda::graph_is_faster(config));
  config.parallel_residual = true;
  EXPECT_FALSE(cuda::graph_is_faster(config));

  config = test::quantized(test::llama_config(test::small_llamas().front()), &kInt4, false);
  config.hidden_size = 1024;
  EXPECT_TRUE(cuda::graph_is_faster(config));
  for (const std::int64_t width : {2048, 3072, 4096}) {
    config.hidden_size = width;
    EXPECT_FALSE(cuda::graph_is_faster(config)) << width;
  }
}

TEST(FusedTokens, WideHeadsOfGroupsAreLeftToTheGraphBehindAPosition) {
  constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();
  ModelConfig config = test::llama_config(test::small_llamas().front());
  config.num_heads = 8, config.num_kv_heads = 2, config.head_dim = 128;
  EXPECT_EQ(cuda::fused_positions(config), kAll);
  config.head_dim = 136;
  EXPECT_EQ(cuda::fused_positions(config), 12'288);
  config.num_kv_heads = 8;
  EXPECT_EQ(cuda::fused_positions(config), kAll);
}

TEST(FusedTokens, FollowThePromptOfEverySmallModel) {
  std::vector<test::NamedConfig> models;
  for (const test::LlamaShape& shape : test::small_llamas()) models.push_back({shape.name, test::llama_config(shape)});
  for (const test::NamedConfig& qwen : test::small_qwens()) models.push_back(qwen);
  for (const auto& [name, config] : models) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      if (!cuda::fused_unsupported_reason(config, dtype).empty())
        GTEST_SKIP() << cuda::fused_unsupported_reason(config, dtype);
      SCOPED_TRACE(name + " in " + dtype_name(dtype));
      const TemporaryDirectory directory;
      const std::string path = directory.file("model.bin");
      test::write_random_model(path, config, dtype, 3, nullptr);
      check_model(ModelFile::open(path), dtype, dtype == DType::f16 ? 70 : 201);
      if (HasFailure()) return;
    }
  }
}

// Keys and values in fp8 of a prompt, of the fused kernel, and again of the inference model: as near to the CPU's as codes are to
// 16 bits, since a number in the middle between two codes may get either after another rounding.
TEST(FusedTokens, ContinueAPromptInFp8) {
  constexpr std::int64_t kCapacity = 300;
  for (const test::LlamaShape& shape : test::small_llamas()) {
    if (shape.head_dim != 64 && shape.head_dim != 128) continue;
    const ModelConfig config = test::llama_config(shape);
    for (const DType dtype : {DType::f16, DType::bf16}) {
      if (const std::string why = cuda::fused_unsupported_reason(config, dtype, true); !why.empty())
        GTEST_SKIP() << why;
      SCOPED_TRACE(shape.name + " in " + dtype_name(dtype));
      const TemporaryDirectory directory;
      const std::string path = directory.file("model.bin");
      test::write_random_model(path, config, dtype, 3, nullptr);
      const ModelFile file = ModelFile::open(path);
      InferenceOptions options = one_sequence(kCapacity);
      options.kv_fp8 = true;
      const auto fused = test::loaded_sequence(file, test::Way::fused, dtype, kCapacity, true),
                 fused_wide = test::loaded_sequence(file, test::Way::fused, dtype, kCapacity),
                 cpu = single_sequence(cpu::load_inference(file, options, dtype), kCapacity),
                 cpu_wide = cpu::load_decoder(file, kCapacity, dtype);
      const Ids prompt = test::random_tokens(101, config.tokenizer_vocab, 5),
                more = test::random_tokens(90, config.tokenizer_vocab, 6),
                rest = test::random_tokens(7, config.tokenizer_vocab, 7);
      const auto logits = [&](DecodeModel& model) {
        std::vector<double> all;
        const auto keep = [&](std::span<const float> row) { all.insert(all.end(), row.begin(), row.end()); };
        keep(model.prefill(prompt));
        for (const std::int32_t id : more) keep(model.decode(id));
        keep(model.prefill(rest));
        return all;
      };
      const auto apart = [](const std::vector<double>& a, const std::vector<double>& b) {
        double sum = 0;
        for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
        return std::sqrt(sum);
      };
      const auto got = logits(*fused), got_wide = logits(*fused_wide), want = logits(*cpu), wide = logits(*cpu_wide);
      const double codes = apart(want, wide);
      EXPECT_LT(apart(got, want), 1.5 * codes + 2 * apart(got_wide, wide));
      EXPECT_GT(apart(got, wide), 0.3 * codes) << "not in fp8";

      // A launch of many ids gives those of the model's own logits.
      GenerateOptions sampled;
      sampled.sampler.temperature = 0;
      sampled.sampler.vocab_limit = config.tokenizer_vocab;
      sampled.max_tokens = 60;
      const Ids ids = test::host_sampled(*fused, prompt, sampled);
      fused->reset();
      EXPECT_EQ(test::generated(*fused, prompt, sampled.sampler, sampled.max_tokens), ids);
    }
  }
}

TEST(FusedTokens, PartsWithoutKernelsAreRefusedByName) {
  const auto reason = [](const ModelConfig& config) { return cuda::fused_unsupported_reason(config, DType::bf16); };
  ModelConfig config = test::llama_config(test::small_llamas()[0]);
  if (!reason(config).empty()) GTEST_SKIP() << reason(config);
  config.post_norms = true;
  EXPECT_EQ(reason(config), "fused decoding has no kernels for norms behind attention and MLP");
  config = test::small_qwens().back().config;
  ASSERT_TRUE(config.qk_norm);
  EXPECT_EQ(reason(config), "");
  config.parallel_residual = true;
  EXPECT_EQ(reason(config),
            "fused decoding has norms of heads, and layers without RoPE, with the sequential residual alone");
  EXPECT_EQ(reason(test::small_gemmas()[0].config), "fused decoding has no attention with a sliding window");
}

// The greedy ids of the reference dumps' models, on the GPU in fp16 and on the CPU in fp32; also where the graph goes on behind
// the fused kernel. An id may differ where the two greatest logits are closer than the storage type's rounding.
TEST(FusedTokens, GreedyIdsOfTheGoldenLlamas) {
  const std::string without_kernel =
      cuda::fused_unsupported_reason(test::llama_config(test::small_llamas()[0]), DType::f16);
  if (!without_kernel.empty()) GTEST_SKIP() << without_kernel;
  const std::map<std::string, std::string> refused = {{"llama-hs80-gqa4", "ffn_size"},
                                                      {"llama-yarn-biases", "biases beside SwiGLU"},
                                                      {"llama-mlp-bias", "biases beside SwiGLU"},
                                                      {"qwen2-mha", "head_dim: got 16"},
                                                      {"mistral-window", "sliding window"},
                                                      {"smollm3-window-tied", "sliding window"},
                                                      {"gemma3-local", "sliding window"},
                                                      {"gemma3-gqa2-biases", "sliding window"},
                                                      {"gemma3-train", "got 6"},
                                                      {"gemma3-train-hs32", "sliding window"},
                                                      {"gemma3-train-untied", "got 4"}};
  const auto reason = [](const ModelConfig& config) {
    const std::string of_kernel = cuda::fused_unsupported_reason(config, DType::f16);
    return of_kernel.empty() ? cuda::inference_unsupported_reason(config, DType::f16) : of_kernel;
  };
  int compared = 0;
  std::vector<GoldenCase> cases = trainable_goldens();
  std::erase_if(cases, [](const GoldenCase& golden) { return golden.family == "gpt_neox"; });  // neox_test.cpp has them
  for (const GoldenCase& golden : test::computed_goldens(cases, reason, refused)) {
    SCOPED_TRACE(golden.name);
    const ModelFile file = ModelFile::open(golden.model);
    const std::int64_t capacity = 40;
    const Ids prompt = test::random_tokens(9, file.config().tokenizer_vocab, 5);
    SamplerOptions sampler;
    sampler.temperature = 0;
    sampler.vocab_limit = file.config().tokenizer_vocab;
    for (const std::int64_t positions : {capacity, std::int64_t{20}}) {
      const auto model = test::fused_then_graph(file, DType::f16, capacity, positions),
                 cpu = cpu::load_decoder(file, capacity);
      const Ids ids = generated(*model, prompt, sampler, 30);
      ASSERT_EQ(ids.size(), 30u);
      compared += test::equal_greedy_ids(*cpu, prompt, sampler, ids);
    }
  }
  EXPECT_GT(compared, 400);
}

}  // namespace
}  // namespace weft
