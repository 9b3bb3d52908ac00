// CPU decoders over prompts of several chunks: the same logits and scores as token by token.
#include <gtest/gtest.h>

#include <cmath>

#include "golden_cases.h"
#include "gradient_check.h"
#include "llmc/cpu/llama.h"
#include "llmc/cpu/inference.h"

namespace weft {
namespace {

using test::expect_close;
using test::Floats;

constexpr std::int64_t kTokens = 2 * 256 + 37;  // two chunks of cpu::Decoder and a ragged one

double surprise(std::span<const float> logits, std::int32_t id) {
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
  return std::log(sum) - static_cast<double>(logits[static_cast<std::size_t>(id)]);
}

void expect_chunks_agree_with_single_tokens(DecodeModel& model) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < kTokens; ++i)
    ids.push_back(static_cast<std::int32_t>(i * 7919 % model.config().vocab_size));
  Floats last, scores;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::span<const float> logits = model.decode(ids[i]);
    if (i + 1 < ids.size()) scores.push_back(static_cast<float>(surprise(logits, ids[i + 1])));
    last.assign(logits.begin(), logits.end());
  }
  const auto copied = [](std::span<const float> logits) { return Floats(logits.begin(), logits.end()); };
  model.reset();
  expect_close(copied(model.prefill(ids)), last, "one prompt");
  model.reset();
  model.prefill({ids.data(), 300});
  expect_close(copied(model.prefill({ids.data() + 300, ids.size() - 300})), last, "two prompts");
  const std::vector<double> together = model.score(ids);
  expect_close(Floats(together.begin(), together.end()), scores, "scores");
}

TEST(CpuDecoder, NeoxPromptOfSeveralChunks) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/neox-hs32-padded.model.bin", Family::gpt_neox);
  expect_chunks_agree_with_single_tokens(*cpu::load_decoder(file, kTokens));
}

TEST(CpuDecoder, LlamaPromptOfSeveralChunks) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin", Family::llama);
  TrainOptions options;
  options.seq_len = 1;
  const auto model = cpu::make_llama(file.config(), options);
  load_parameters(file, *model);
  expect_chunks_agree_with_single_tokens(*model->decoder(kTokens));
}

}  // namespace
}  // namespace weft
