// CPU decoders over prompts of several chunks: the same logits and scores as token by token.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <set>

#include "golden_cases.h"
#include "gradient_check.h"
#include "llmc/app/decode_device.h"
#include "llmc/cpu/inference.h"
#include "llmc/cpu/training.h"
#include "llmc/model/presets.h"
#include "test_files.h"

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
  int polls = 0;
  model.interrupt_score([&polls] { return ++polls == 3; });
  const std::vector<double> cut = model.score(ids);
  EXPECT_EQ(cut, std::vector<double>(together.begin(), together.begin() + 512)) << "two pieces of 256";
}

TEST(CpuDecoder, NeoxPromptOfSeveralChunks) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/neox-hs32-padded.model.bin");
  expect_chunks_agree_with_single_tokens(*cpu::load_decoder(file, kTokens));
}

TEST(CpuDecoder, LlamaPromptOfSeveralChunks) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin");
  TrainOptions options;
  options.seq_len = 1;
  const auto model = cpu::make_training_model(file.config(), options);
  load_parameters(file, *model);
  expect_chunks_agree_with_single_tokens(*model->decoder(kTokens));
}

// A long series of calls of all kinds on one decoder: each gives the bits of a new decoder that gets the calls since the last
// reset alone. `change_weights` may be empty.
void expect_a_series_of_calls_is_that_of_new_decoders(const std::function<std::unique_ptr<DecodeModel>()>& make,
                                                      const std::function<void(int)>& change_weights) {
  constexpr std::int64_t kCapacity = 40;
  const std::unique_ptr<DecodeModel> used = make();
  std::mt19937 random(5);
  const auto draw = [&](std::int64_t below) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below));
  };
  const auto some_ids = [&](std::int64_t count) {
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < count; ++i) {
      ids.push_back(static_cast<std::int32_t>(draw(used->config().tokenizer_vocab)));
    }
    return ids;
  };
  std::vector<std::vector<std::int32_t>> calls;  // since the last reset; of one id: decode()
  bool keeps = false;
  const auto play = [](DecodeModel& model, const std::vector<std::int32_t>& ids) {
    const std::span<const float> logits = ids.size() == 1 ? model.decode(ids[0]) : model.prefill(ids);
    return Floats(logits.begin(), logits.end());
  };
  const auto reset = [&] {
    used->reset();
    calls.clear();
    EXPECT_EQ(used->length(), 0);
  };
  for (int round = 0; round < 120; ++round) {
    const std::int64_t before = used->length();
    switch (draw(9)) {
      case 0:
        reset();
        break;
      case 1: {  // a score, whole or not, begins anew
        const std::vector<std::int32_t> ids = some_ids(2 + draw(kCapacity - 2));
        used->interrupt_score([] { return true; });
        EXPECT_LT(used->score(ids).size(), ids.size() - 1);
        used->interrupt_score({});
        const std::vector<double> scores = used->score(ids);
        EXPECT_EQ(scores, make()->score(ids)) << "round " << round;
        EXPECT_EQ(scores.size(), ids.size() - 1);
        reset();
        break;
      }
      case 2:
        error_of(Exit::internal, [&] { used->prefill(some_ids(kCapacity - before + 1)); });
        EXPECT_EQ(used->length(), before);
        break;
      case 3:
        keeps = !keeps;
        used->keep_activations(keeps);
        break;
      case 4:
        if (change_weights) change_weights(round);
        reset();
        break;
      default: {
        if (before == kCapacity) continue;
        calls.push_back(some_ids(1 + draw(2) * draw(std::min<std::int64_t>(9, kCapacity - before))));
        const Floats got = play(*used, calls.back());
        const std::unique_ptr<DecodeModel> fresh = make();
        fresh->keep_activations(keeps);
        Floats expected;
        for (const std::vector<std::int32_t>& call : calls) expected = play(*fresh, call);
        ASSERT_EQ(got, expected) << "round " << round;
        EXPECT_EQ(used->length(), fresh->length());
        if (keeps && calls.back().size() > 1) {
          EXPECT_EQ(used->activation("logits"), fresh->activation("logits")) << "round " << round;
        }
      }
    }
  }
}

TEST(CpuDecoder, ASeriesOfCallsIsThatOfNewDecoders) {
  const ModelFile neox = ModelFile::open("test/fixtures/golden/neox-hs32-padded.model.bin");
  expect_a_series_of_calls_is_that_of_new_decoders([&] { return cpu::load_decoder(neox, 40); }, {});
  const ModelFile file = ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin");
  TrainOptions options;
  options.seq_len = 1;
  const auto model = cpu::make_training_model(file.config(), options);
  load_parameters(file, *model);
  expect_a_series_of_calls_is_that_of_new_decoders(
      [&] { return model->decoder(40); },
      [&](int round) {
        const TensorSpec& spec =
            model->table().specs()[static_cast<std::size_t>(round) % model->table().specs().size()];
        Floats values(static_cast<std::size_t>(spec.elements));
        model->read_tensor(TensorRole::parameter, spec, values.data());
        for (float& value : values) value *= 1.0f + 0.01f * static_cast<float>(round % 3);
        model->write_tensor(TensorRole::parameter, spec, values.data());
      });
}

// A token reads every weight once, but of an embedding that is not the head as well one row, and the K/V cache.
void expect_bytes_of_a_token(const DecodeModel& model) {
  const ModelConfig& config = model.config();
  const TensorTable table(config);
  ASSERT_FALSE(config.tied_embeddings);
  const std::int64_t read = table.parameters() - config.vocab_size * config.hidden_size + config.hidden_size;
  EXPECT_EQ(model.bytes_per_token(0), 4 * static_cast<std::uint64_t>(read));
  const std::int64_t cached = 2 * config.num_layers * config.kv_size() * 10;
  EXPECT_EQ(model.bytes_per_token(10), 4 * static_cast<std::uint64_t>(read + cached));
}

TEST(CpuDecoder, BytesOfATokenAreWhatItReads) {
  for (const char* name : {"neox-hs32-padded", "neox-hs32-sequential-nobias"}) {
    const std::string path = std::string("test/fixtures/golden/") + name + ".model.bin";
    expect_bytes_of_a_token(*cpu::load_decoder(ModelFile::open(path), 16));
  }
  const ModelFile file = ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin");
  TrainOptions options;
  options.seq_len = 1;
  const auto model = cpu::make_training_model(file.config(), options);
  expect_bytes_of_a_token(*model->decoder(16));
}

// What the cache cannot hold is refused before anything is written, however much of it is taken already.
TEST(CpuDecoder, NothingIsWrittenPastTheCache) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/neox-hs32-padded.model.bin");
  constexpr std::int64_t kCapacity = 6;
  const auto model = cpu::load_decoder(file, kCapacity);
  const std::vector<std::int32_t> ids(kCapacity + 1, 1);
  const auto refused = [&](const auto& call) {
    const std::int64_t before = model->length();
    expect_contains(error_of(Exit::internal, call), "do not fit");
    EXPECT_EQ(model->length(), before);
  };
  refused([&] { model->prefill(ids); });
  refused([&] { model->prefill({}); });
  refused([&] { model->score(ids); });
  model->prefill({ids.data(), 4});
  refused([&] { model->prefill({ids.data(), 3}); });
  model->prefill({ids.data(), 2});
  refused([&] { model->decode(1); });
  model->reset();
  model->prefill({ids.data(), kCapacity});
}

// Random weights are those of the seed, and no others: models of --random-model that are timed are the same everywhere.
TEST(DecodeDevice, RandomModelsHaveTheWeightsOfTheirSeed) {
  const ModelConfig config = ModelFile::open("test/fixtures/golden/neox-hs32-padded.model.bin").config();
  const std::vector<std::int32_t> ids = {1, 2, 3};
  InferSettings settings;
  settings.device = "cpu";
  const auto logits_of = [&](std::int64_t seed) {
    settings.seed = seed;
    const DecodeDevice device(settings);
    const std::unique_ptr<DecodeModel> model = device.make_random(config, 16);
    const std::span<const float> logits = model->prefill(ids);
    return Floats(logits.begin(), logits.end());
  };
  const Floats first = logits_of(1);
  EXPECT_EQ(logits_of(1), first);
  EXPECT_NE(logits_of(2), first);
  EXPECT_GT(std::set<float>(first.begin(), first.end()).size(), first.size() / 2);
  const DecodeDevice device(settings);
  EXPECT_NO_THROW(device.make_random(preset_config("tiny"), 16));
}

}  // namespace
}  // namespace weft
