// Samples that training writes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <memory>
#include <string>

#include "llmc/base/json.h"
#include "llmc/base/signals.h"
#include "llmc/train/sample.h"
#include "test/cpp/byte_tokenizer.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

// A token for each of the letters a to t.
std::string letter_tokenizer() {
  Json vocab = Json::object();
  for (int id = 0; id < 20; ++id) vocab[std::string(1, static_cast<char>('a' + id))] = id;
  return Json{{"version", "1.0"},
              {"added_tokens", Json::array()},
              {"decoder", {{"type", "Fuse"}}},
              {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}}}
      .dump();
}

// Of samples that are `tokens` tokens behind "abc".
TrainSettings sample_settings(std::int64_t tokens) {
  TrainSettings settings = micro_settings();
  settings.sample_prompt = "abc";
  settings.sample_tokens = tokens;
  return settings;
}

// A sample depends on parameters, seed and step alone, and begins with the prompt each time.
TEST(SampleWriterTest, ASampleDoesNotGoOnWhereTheLastOneEnded) {
  TrainSettings settings = sample_settings(9);
  settings.temperature = 1;
  const std::unique_ptr<TrainModel> model = micro_model(settings);
  SampleWriter writer(settings, letter_tokenizer(), micro_config());
  writer.attach(*model);
  const std::string fifth = writer.write(5), sixth = writer.write(6);
  EXPECT_EQ(fifth.size(), 12u) << fifth;
  EXPECT_TRUE(fifth.starts_with("abc")) << fifth;
  EXPECT_NE(fifth, sixth) << "other random numbers";
  EXPECT_EQ(writer.write(5), fifth);
}

TEST(SampleWriterTest, AnotherSeedIsAnotherSample) {
  TrainSettings settings = sample_settings(20);
  settings.temperature = 1;
  const std::unique_ptr<TrainModel> model = micro_model(settings);
  const auto sample = [&](std::int64_t seed) {
    settings.seed = seed;
    SampleWriter writer(settings, letter_tokenizer(), micro_config());
    writer.attach(*model);
    return writer.write(1);
  };
  EXPECT_EQ(sample(1), sample(1));
  EXPECT_NE(sample(1), sample(2));
  EXPECT_NE(sample(1), sample(std::int64_t{1} << 40 | 1));
}

// Runs in a process of its own: a stop cannot be taken back.
TEST(SampleWriterDeathTest, ASampleEndsAtASignal) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto leave = [] {
    TrainSettings settings = sample_settings(20);
    const std::unique_ptr<TrainModel> model = micro_model(settings);
    SampleWriter writer(settings, letter_tokenizer(), micro_config());
    writer.attach(*model);
    const std::size_t whole = writer.write(1).size();
    install_signal_handlers();
    on_stop(OnStop::finish);
    ::raise(SIGTERM);
    const std::string cut = writer.write(1);
    ::_exit(whole == 23 && cut.starts_with("abc") && cut.size() <= 4 ? 0 : 1);
  };
  EXPECT_EXIT(leave(), testing::ExitedWithCode(0), "");
}

// Of the ids that the model has and the tokenizer has not none is drawn; an end token ends the sample.
TEST(SampleWriterTest, ASampleIsMadeOfTokensAndEndsAtAnEndToken) {
  TrainSettings settings = sample_settings(29);
  settings.temperature = 100;
  ModelConfig config = micro_config();
  const auto sample = [&] {
    const std::unique_ptr<TrainModel> model = cpu::make_training_model(config, settings.model_options());
    initialize_parameters(*model, 1);
    SampleWriter writer(settings, letter_tokenizer(), config);
    writer.attach(*model);
    return writer.write(1);
  };
  const std::string whole = sample();
  EXPECT_EQ(whole.size(), 32u) << whole;
  config.eos_ids = {whole[9] - 'a'};
  EXPECT_EQ(sample(), whole.substr(0, whole.find(whole[9], 3)));
}

// The token that begins a text counts among those of the prompt.
TEST(SampleWriterTest, APromptBeginsAsItsTokenizerSays) {
  Json tokenizer = Json::parse(letter_tokenizer());
  tokenizer["added_tokens"] = {{{"id", 20}, {"content", "<s>"}, {"special", true}}};
  tokenizer["post_processor"] = token_in_front("<s>", 20);
  TrainSettings settings = sample_settings(9);
  EXPECT_EQ(SampleWriter(settings, tokenizer.dump(), micro_config()).positions(), 13);
}

// Of micro_config()'s 32 positions the prompt may take all but one.
TEST(SampleWriterTest, APromptLeavesRoomForOneTokenAtLeast) {
  TrainSettings settings = micro_settings();
  const std::unique_ptr<TrainModel> model = micro_model(settings);
  // Tokens of the prompt and of the sample, and the positions for both.
  for (const auto& [prompt, tokens, positions] :
       {std::tuple(1, 1, 2), {3, 9, 12}, {3, 29, 32}, {3, 30, 32}, {31, 1, 32}, {31, 64, 32}}) {
    settings.sample_prompt = std::string(static_cast<std::size_t>(prompt), 'c');
    settings.sample_tokens = tokens;
    SampleWriter writer(settings, letter_tokenizer(), micro_config());
    EXPECT_EQ(writer.positions(), positions) << prompt;
    writer.attach(*model);
    EXPECT_EQ(std::ssize(writer.write(1)), positions) << prompt;
  }
  for (const std::size_t prompt : {32u, 33u}) {
    settings.sample_prompt = std::string(prompt, 'c');
    const std::string message =
        error_of(Exit::usage, [&] { SampleWriter(settings, letter_tokenizer(), micro_config()); });
    expect_contains(message, format("--sample-prompt: %zu tokens leave no place in the model's 32 positions", prompt));
  }
}

}  // namespace
}  // namespace weft
