// Text from a Llama that is being trained: what its decoder picks on the GPU is what the host picks from the same logits.
// The logits themselves: test/gpu/llama_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "llmc/base/error.h"
#include "llmc/cuda/inference/inference.h"
#include "llmc/cuda/training/training.h"
#include "llmc/infer/generate.h"
#include "llmc/model/presets.h"
#include "test/gpu/decode_tools.h"

namespace weft {
namespace {

constexpr std::int64_t kPrompt = 40, kIds = 100, kCapacity = 200;

// Three query heads a K/V head, and a vocabulary that is no multiple of 8 and ends in padding rows.
std::unique_ptr<TrainModel> random_llama(Precision precision) {
  ModelConfig config = preset_config("tiny");
  config.num_layers = 2;
  config.vocab_size = 1003;
  config.tokenizer_vocab = 990;
  config.hidden_size = 72;
  config.ffn_size = 200;
  TrainOptions options;
  options.micro_batch = options.seq_len = 1;
  options.precision = precision;
  auto model = cuda::make_training_model(config, options);
  std::mt19937 generator(5);
  std::normal_distribution<float> noise(0, 1);
  for (const TensorSpec& spec : model->table().specs()) {
    std::vector<float> values(static_cast<std::size_t>(spec.elements));
    for (float& value : values) value = 0.1f * noise(generator) + (spec.init == Init::ones ? 1.0f : 0.0f);
    model->write_tensor(TensorRole::parameter, spec, values.data());
  }
  return model;
}

std::vector<std::int32_t> prompt_ids() {
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < kPrompt; ++i) ids.push_back((i * i + 7 * i) % 990);
  return ids;
}

GenerateOptions greedy_options() {
  GenerateOptions options;
  options.max_tokens = kIds;
  options.sampler.vocab_limit = 990;
  return options;
}

GenerateResult generated(DecodeModel& model, const GenerateOptions& options) {
  model.reset();
  return generate(model, nullptr, prompt_ids(), options);
}

TEST(CudaLlamaSamples, SampledIdsAreThoseOfTheHost) {
  for (const Precision precision : {Precision::bf16, Precision::fp32}) {
    const auto model = random_llama(precision);
    const auto decoder = model->decoder(kCapacity);
    ASSERT_TRUE(decoder->samples());
    GenerateOptions options = greedy_options();
    const auto check = [&] {
      const GenerateResult result = generated(*decoder, options);
      EXPECT_EQ(result.ids, test::host_sampled(*decoder, prompt_ids(), options));
      EXPECT_EQ(result.context, kPrompt + kIds - 1);
      for (const std::int32_t id : result.ids) EXPECT_LT(id, 990) << "a padding row";
      return result.ids;
    };
    const std::vector<std::int32_t> greedy = check();
    options.sampler.temperature = 1.2;
    options.sampler.seed = 99;
    const std::vector<std::int32_t> warm = check();
    EXPECT_NE(warm, greedy);
    options.sampler.seed = 100;
    EXPECT_NE(check(), warm);
    options.sampler.top_k = 40;
    options.sampler.top_p = 0.9;
    options.sampler.min_p = 0.01;
    EXPECT_NE(check(), warm);
  }
}

TEST(CudaLlamaSamples, GenerationEndsWhereItShould) {
  const auto model = random_llama(Precision::bf16);
  const auto decoder = model->decoder(kCapacity);
  GenerateOptions options = greedy_options();
  options.sampler.temperature = 2;
  const std::vector<std::int32_t> whole = generated(*decoder, options).ids;

  options.max_tokens = kCapacity;  // more than there is room for
  const GenerateResult filled = generated(*decoder, options);
  EXPECT_EQ(filled.ids.size(), static_cast<std::size_t>(kCapacity - kPrompt));
  EXPECT_EQ(filled.finish_reason, FinishReason::context_full);
  EXPECT_TRUE(std::equal(whole.begin(), whole.end(), filled.ids.begin()));

  options.stop_ids = {whole[20]};
  const GenerateResult stopped = generated(*decoder, options);
  const auto first = std::find(whole.begin(), whole.end(), whole[20]);
  EXPECT_EQ(stopped.ids, std::vector<std::int32_t>(whole.begin(), first + 1));
  EXPECT_EQ(stopped.finish_reason, FinishReason::end_of_text);
  EXPECT_EQ(stopped.context, kPrompt + (first - whole.begin()));
}

// -log p of every id, against the logits of the same decoder; and not one id more than there is room for.
TEST(CudaLlamaSamples, ScoresFollowTheLogits) {
  const auto model = random_llama(Precision::fp32);
  const auto decoder = model->decoder(kCapacity);
  const std::vector<std::int32_t> prompt = prompt_ids();
  std::vector<double> want;
  for (std::size_t i = 0; i + 1 < prompt.size(); ++i) {
    const std::span<const float> logits = decoder->decode(prompt[i]);
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    want.push_back(std::log(sum) - static_cast<double>(logits[static_cast<std::size_t>(prompt[i + 1])]));
  }
  const std::vector<double> got = decoder->score(prompt);
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-4 * std::abs(want[i]) + 1e-4) << i;

  EXPECT_EQ(decoder->score(std::vector<std::int32_t>(kCapacity, 1)).size(), static_cast<std::size_t>(kCapacity) - 1);
  try {
    decoder->score(std::vector<std::int32_t>(kCapacity + 1, 1));
    ADD_FAILURE() << "more ids were scored than there is room for";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::internal);
  }
}

TEST(CudaLlamaSamples, ThePlanIsWhatIsAllocated) {
  for (const Precision precision : {Precision::bf16, Precision::fp32}) {
    const auto model = random_llama(precision);
    const auto planned = cuda::plan_samples(model->config(), precision, kCapacity),
               reported = model->decoder(kCapacity)->memory();
    ASSERT_EQ(planned.size(), reported.size());
    for (std::size_t i = 0; i < planned.size(); ++i) EXPECT_EQ(planned[i].bytes, reported[i].bytes) << planned[i].name;
  }
}

TEST(CudaLlamaSamples, DamagedLogitsAreAnErrorOnce) {
  const auto model = random_llama(Precision::bf16);
  const auto decoder = model->decoder(kCapacity);
  const TensorSpec* norm = nullptr;
  for (const TensorSpec& spec : model->table().specs()) {
    if (spec.name == "model.norm.weight") norm = &spec;
  }
  ASSERT_NE(norm, nullptr);
  std::vector<float> values(static_cast<std::size_t>(norm->elements));
  model->read_tensor(TensorRole::parameter, *norm, values.data());
  const float whole = values[3];
  values[3] = std::numeric_limits<float>::quiet_NaN();
  model->write_tensor(TensorRole::parameter, *norm, values.data());
  try {
    generated(*decoder, greedy_options());
    ADD_FAILURE() << "a token was picked from logits that are no numbers";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::numeric);
  }
  values[3] = whole;
  model->write_tensor(TensorRole::parameter, *norm, values.data());
  EXPECT_EQ(generated(*decoder, greedy_options()).ids.size(), static_cast<std::size_t>(kIds));
}

}  // namespace
}  // namespace weft
