// Small shapes through every kernel of training and of inference, for compute-sanitizer (test/python/test_train_gpu.py):
// one step each, in fp8 two, with tiles that are full, cut and several, and a few sequences in steps of several sizes.
// The numbers are not checked here.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "llmc/cuda/inference/inference.h"
#include "llmc/cuda/training/training.h"
#include "llmc/model/presets.h"
#include "test/cpp/inference_tools.h"
#include "test/gpu/neox_models.h"
#include "test/gpu/operator_tools.h"

namespace weft {
namespace {

void train(const ModelConfig& config, const TrainOptions& options, int steps) {
  const auto model = cuda::make_training_model(config, options);
  std::mt19937 generator(1);
  std::normal_distribution<float> noise(0, 0.05f);
  for (const TensorSpec& spec : model->table().specs()) {
    std::vector<float> values(static_cast<std::size_t>(spec.elements));
    for (float& value : values) value = noise(generator);
    model->write_tensor(TensorRole::parameter, spec, values.data());
  }
  const auto count = static_cast<std::size_t>(options.micro_batch * options.seq_len);
  std::vector<std::int32_t> tokens(count), labels(count);
  for (std::size_t i = 0; i < count; ++i) {
    tokens[i] = static_cast<std::int32_t>(generator() % static_cast<unsigned>(config.vocab_size));
    labels[i] = i % 7 == 0 ? kIgnoredLabel : tokens[i];
  }
  for (int step = 1; step <= steps; ++step) {
    model->zero_gradients();
    for (std::uint64_t micro_step = 0; micro_step < 2; ++micro_step) {
      model->forward({tokens, labels}, micro_step, 0.01f);
      model->backward();
    }
    const StepStatistics statistics = model->statistics();
    EXPECT_TRUE(std::isfinite(statistics.gradient_norm));
    AdamWStep update;
    update.step = step;
    update.learning_rate = 1e-3f;
    model->update(update);
  }
  std::int64_t counted = 0;
  EXPECT_TRUE(std::isfinite(model->evaluate({tokens, labels}, &counted)));
}

void train_with(Precision precision, std::int64_t head_dim, std::int64_t T, float dropout, NormKind norm,
                Recompute recompute = Recompute::none, const char* family = "llama") {
  const bool fp8 = precision == Precision::fp8;
  ModelConfig config = preset_config("tiny");
  config.num_layers = 1;
  config.head_dim = config.rope.rotary_dim = head_dim;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.hidden_size = fp8 ? 144 : 136;
  config.ffn_size = fp8 ? 208 : 200;
  config.vocab_size = config.tokenizer_vocab = 1003;
  config.norm = norm;
  set_family(config, family);
  if (config.post_norms) {
    config.windows = {20};
    config.local_rope_theta = 100;
  } else if (config.qk_norm) {
    config.qkv_bias = config.output_bias = config.mlp_bias = true;
  }
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = T;
  options.precision = precision;
  options.dropout = dropout;
  options.recompute = recompute;
  options.graph = false;  // the sanitizer names single launches
  // In fp8 the first step has no scales, so other kernels compute it.
  train(config, options, fp8 ? 2 : 1);
}

TEST(Sanitized, Bf16HeadsOf64) {
  train_with(Precision::bf16, 64, 150, 0, NormKind::rmsnorm);
}
TEST(Sanitized, Bf16HeadsOf128) {
  train_with(Precision::bf16, 128, 150, 0, NormKind::rmsnorm);
}
// Two warps share a block of keys and exchange probabilities: the portable kernels' backward of wide heads.
TEST(Sanitized, Bf16HeadsOf96) {
  train_with(Precision::bf16, 96, 150, 0, NormKind::rmsnorm);
}
TEST(Sanitized, Bf16HeadsOf80WithDropoutAndLayerNorm) {
  train_with(Precision::bf16, 80, 70, 0.1f, NormKind::layernorm);
}
TEST(Sanitized, Fp8HeadsOf64) {
  if (!test::has_fp8()) GTEST_SKIP() << "needs a GPU of compute capability 8.9";
  train_with(Precision::fp8, 64, 152, 0, NormKind::rmsnorm);
}
TEST(Sanitized, Bf16NormsOfHeadsAndBiases) {
  train_with(Precision::bf16, 80, 70, 0, NormKind::rmsnorm, Recompute::block, "qwen3");
}
TEST(Sanitized, Bf16NormsBehindBranches) {
  train_with(Precision::bf16, 256, 70, 0, NormKind::rmsnorm, Recompute::block, "gemma3_text");
}
TEST(Sanitized, Fp32NormsBehindBranchesWithDropout) {
  train_with(Precision::fp32, 32, 40, 0.1f, NormKind::rmsnorm, Recompute::norm, "gemma3_text");
}
TEST(Sanitized, Fp8BiasesOfQkv) {
  if (!test::has_fp8()) GTEST_SKIP() << "needs a GPU of compute capability 8.9";
  train_with(Precision::fp8, 64, 152, 0, NormKind::rmsnorm, Recompute::none, "qwen2");
}
TEST(Sanitized, Fp32HeadsOf32) {
  train_with(Precision::fp32, 32, 40, 0.1f, NormKind::rmsnorm);
}
// With dropout a recomputed norm runs the kernel that drops and adds, without a branch.
TEST(Sanitized, Fp32RecomputedNormsWithDropout) {
  train_with(Precision::fp32, 32, 40, 0.1f, NormKind::layernorm, Recompute::block);
}

// Prompts in chunks, decoding from slots, scores and alternatives.
void infer_with(const ModelConfig& config, DType dtype) {
  InferenceOptions pool;
  pool.num_pages = 24;
  pool.page_size = 16;
  pool.slots = 3;
  pool.max_rows = 96;
  cuda::GpuInferenceOptions options;
  options.dtype = dtype;
  options.direct = true;  // the sanitizer names single launches
  const auto model = cuda::random_inference(config, 1, pool, options);
  const std::vector<test::Trace> traces = test::run(*model, test::random_sequences(config, 3, 70), 40, true, 2);
  for (const test::Trace& trace : traces) EXPECT_EQ(trace.ids.size(), static_cast<std::size_t>(test::kGenerated));
}

TEST(Sanitized, InferenceInBf16) {
  infer_with(test::llama_config(test::small_llamas()[1]), DType::bf16);  // heads of 64
  infer_with(test::llama_config(test::small_llamas()[2]), DType::bf16);  // of 128
  infer_with(test::small_qwens()[1].config, DType::bf16);                // with norms of heads
  infer_with(test::small_gemmas()[0].config, DType::bf16);               // of 256, norms behind attention and MLP
}
TEST(Sanitized, InferenceInFp16) {
  infer_with(test::neox_config(test::small_shapes()[3]), DType::f16);  // of 80, parallel residual
  infer_with(test::neox_config(test::small_shapes()[1]), DType::f16);  // of 32, sequential
}
TEST(Sanitized, InferenceInFp32) {
  infer_with(test::llama_config(test::small_llamas()[3]), DType::f32);
}

}  // namespace
}  // namespace weft
