// Training on conversations, of which only some tokens are learned: the loss of a step is the mean over all of its learned
// tokens. The witness runs each conversation alone, at its own length, and divides once.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "llmc/base/json.h"
#include "llmc/comm/thread_ranks.h"
#include "llmc/train/evaluate.h"
#include "llmc/train/loop.h"
#include "test/cpp/document_training.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

// Conversations of very different shares: of the first ones nearly everything is learned, of the last ones one token.
const std::vector<std::size_t> kLengths = {9, 3, 7, 2, 9, 5, 8, 4};

bool is_learned(std::size_t token) {
  return token < 14 ? token % 9 != 0 : token % 4 == 3 || token == 20 || token == 45;
}

class LearnedTokens : public DocumentTraining {
 protected:
  void SetUp() override {
    DocumentTraining::SetUp();
    tokens_ = patterned_tokens(std::accumulate(kLengths.begin(), kLengths.end(), std::size_t{0}));
    write_document_shard(temporary_.file("chat_0.bin"), tokens_, kLengths, is_learned);
    settings_.batch_tokens = 8 * 8;  // all conversations, in four micro-batches
  }

  std::string shards() const { return temporary_.file("chat_*.bin"); }

  Sum witness_of(TrainModel& model, std::size_t conversation) const {
    const auto first = kLengths.begin() + static_cast<std::ptrdiff_t>(conversation);
    return alone(model, std::accumulate(kLengths.begin(), first, std::size_t{0}), *first, is_learned);
  }
  Sum witness(TrainModel& model) const {
    Sum all;
    for (std::size_t i = 0; i < kLengths.size(); ++i) {
      const Sum one = witness_of(model, i);
      all.loss += one.loss;
      all.labels += one.labels;
    }
    return all;
  }

  Json train(TrainModel& model, const std::string& name, const std::function<void(const AdamWStep&)>& at_update) {
    const TokenDataset data(shards(), settings_.seq_len, WindowUse::training, {.pack = settings_.masks_documents});
    return DocumentTraining::train(model, data, name, at_update);
  }
};

// The same with several conversations in a row: the witness has each alone.
TEST_F(LearnedTokens, PackedConversationsHaveTheLossOfEachAlone) {
  settings_.masks_documents = true;
  settings_.batch_tokens = 8 * 5;
  for (const std::int64_t micro_batch : {1, 5}) {
    settings_.micro_batch = micro_batch;
    const std::unique_ptr<TrainModel> model = micro_model(settings_);
    const Sum expected = witness(*model);
    const Json step = train(*model, format("run_%lld", static_cast<long long>(micro_batch)), {});
    EXPECT_NEAR(step["loss"].get<double>(), expected.mean(), 1e-6 * expected.mean());
    EXPECT_EQ(step["learned_tokens"], expected.labels);
  }
}

TEST_F(LearnedTokens, TheLossOfAStepIsTheMeanOverTheLearnedTokensOfTheWholeStep) {
  for (const std::int64_t micro_batch : {1, 2, 4, 8}) {
    settings_.micro_batch = micro_batch;
    const std::unique_ptr<TrainModel> model = micro_model(settings_);
    const Sum expected = witness(*model);
    ASSERT_EQ(expected.labels, 10 + 8);
    const Json step = train(*model, format("run_%lld", static_cast<long long>(micro_batch)), {});
    EXPECT_NEAR(step["loss"].get<double>(), expected.mean(), 1e-6 * expected.mean());
    EXPECT_EQ(step["learned_tokens"], expected.labels);
  }
}

// A mean of the means of conversations would be something else.
TEST_F(LearnedTokens, ItIsNoMeanOfMeans) {
  const std::unique_ptr<TrainModel> model = micro_model(settings_);
  for (const TensorSpec& spec : model->table().specs()) {  // far from uniform, so that conversations differ
    std::vector<float> values(static_cast<std::size_t>(spec.elements));
    model->read_tensor(TensorRole::parameter, spec, values.data());
    for (float& value : values) value *= 20;
    model->write_tensor(TensorRole::parameter, spec, values.data());
  }
  double means = 0;
  for (std::size_t i = 0; i < kLengths.size(); ++i) means += witness_of(*model, i).mean() / kLengths.size();
  const double expected = witness(*model).mean();
  ASSERT_GT(std::abs(means - expected), 0.01 * expected);
  EXPECT_NEAR(train(*model, "run", {})["loss"].get<double>(), expected, 1e-5 * expected);
}

// What the optimizer is given is the derivative of that mean, by central differences along several directions.
TEST_F(LearnedTokens, TheGradientIsTheDerivativeOfThatMean) {
  for (const std::int64_t virtual_ranks : {1, 2, 5}) {
    settings_.virtual_ranks = virtual_ranks;
    if (virtual_ranks == 5) {  // a packed row each
      settings_.masks_documents = true;
      settings_.micro_batch = 1;
      settings_.batch_tokens = 8 * 5;
    }
    const std::unique_ptr<TrainModel> model = micro_model(settings_);
    std::vector<float> gradient;
    const std::unique_ptr<TrainModel> before = micro_model(settings_);
    const Json step =
        train(*model, format("run_%lld", static_cast<long long>(virtual_ranks)), [&](const AdamWStep& update) {
          gradient = tensors(*model, TensorRole::gradient);
          for (float& value : gradient) value *= update.gradient_scale;
        });
    EXPECT_NEAR(step["grad_norm"].get<double>(), norm_of(gradient), 1e-5 * norm_of(gradient));
    expect_derivative(
        *before, gradient, [&] { return witness(*before).mean(); }, 4, 2e-3);
  }
}

// Where everything is learned, a row for each conversation is what plain text of the same rows is: the same bits.
TEST_F(LearnedTokens, WithEveryTokenLearnedTheBitsAreThoseOfText) {
  const std::vector<std::uint16_t> text = patterned_tokens(8 * 8 + 1);
  write_shard(temporary_.file("text_0.bin"), text);
  std::vector<std::uint16_t> documents;
  for (std::size_t window = 0; window < 8; ++window) {
    for (std::size_t t = 0; t < 9; ++t) documents.push_back(text[window * 8 + t]);
  }
  write_document_shard(temporary_.file("rows_0.bin"), documents, std::vector<std::size_t>(8, 9),
                       [](std::size_t token) { return token % 9 != 0; });
  settings_.steps = 3;
  settings_.grad_clip = 0.5;
  settings_.dropout = 0.25;
  settings_.batch_tokens = 32;
  std::vector<float> states[2];
  int i = 0;
  for (const char* name : {"text_0.bin", "rows_0.bin"}) {
    std::filesystem::copy_file(temporary_.file(name), temporary_.file("chat_0.bin"),
                               std::filesystem::copy_options::overwrite_existing);
    const std::unique_ptr<TrainModel> model = micro_model(settings_);
    EXPECT_EQ(train(*model, std::string("run_") + name, {}).contains("learned_tokens"), false);
    states[i++] = whole_state(*model);
  }
  EXPECT_EQ(states[0], states[1]);
}

TEST_F(LearnedTokens, AMicroBatchInWhichNothingIsLearnedAddsNothing) {
  const std::unique_ptr<TrainModel> model = micro_model(settings_);
  const std::vector<std::int32_t> tokens(16, 3), none(16, kIgnoredLabel), some(16, 4);
  const auto step = [&](bool with_empty) {
    model->zero_gradients();
    model->forward({tokens, some}, 0, 0.1f);
    model->backward();
    if (with_empty) {
      model->forward({tokens, none}, 1, 0.1f);
      model->backward();
    }
    const StepStatistics statistics = model->statistics();
    return std::tuple(tensors(*model, TensorRole::gradient), statistics.loss_sum, statistics.label_count);
  };
  EXPECT_EQ(step(true), step(false));
}

// Perplexity on the answers: over all learned tokens, whatever the micro-batches and the ranks.
TEST_F(LearnedTokens, EvaluationIsTheMeanOverAllLearnedTokens) {
  TrainInputs inputs;
  inputs.config = micro_config();
  inputs.val.emplace(shards(), 8, WindowUse::measurement, RowOptions{.pack = false});
  settings_.json = true;
  settings_.val_batches = 0;
  const auto evaluated = [&](int ranks, std::int64_t micro_batch) {
    settings_.micro_batch = micro_batch;
    testing::internal::CaptureStdout();
    run_thread_ranks(ranks, 20, [&](Communicator& all) {
      const std::unique_ptr<TrainModel> model = micro_model(settings_);
      EXPECT_EQ(evaluate(*model, settings_, inputs, all), Exit::ok);
    });
    return testing::internal::GetCapturedStdout();
  };
  const std::unique_ptr<TrainModel> model = micro_model(settings_);
  const Sum expected = witness(*model);
  for (const bool packed : {false, true}) {
    if (packed) inputs.val.emplace(shards(), 8, WindowUse::measurement);
    settings_.masks_documents = inputs.masks_documents();
    EXPECT_EQ(inputs.val->windows(), packed ? 5u : 8u);
    for (const std::int64_t micro_batch : {1, 3, 8}) {
      const std::string text = evaluated(1, micro_batch);
      const Json record = Json::parse(text);
      EXPECT_NEAR(record["val_loss"].get<double>(), expected.mean(), 1e-6 * expected.mean());
      EXPECT_NEAR(record["perplexity"].get<double>(), std::exp(expected.mean()), 1e-5 * std::exp(expected.mean()));
      EXPECT_EQ(record["tokens"], expected.labels);
      EXPECT_EQ(record["of_learned_tokens"], expected.labels);
      EXPECT_EQ(record["conversations"], kLengths.size());
      for (const int ranks : {2, 3}) EXPECT_EQ(evaluated(ranks, micro_batch), text);
    }
  }
  settings_.json = false;
  expect_contains(evaluated(1, 2), "  18 of 18 learned tokens (all) of 8 conversations in rows of 8\n");
}

}  // namespace
}  // namespace weft
