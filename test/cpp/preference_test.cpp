// Direct preference optimisation: pairs of answers as data, their loss, and the gradient of it. The witness runs each answer alone,
// at its own length, and writes equation 7 out.
#include "llmc/train/preference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <numeric>

#include "llmc/base/json.h"
#include "llmc/comm/thread_ranks.h"
#include "llmc/train/loop.h"
#include "test/cpp/document_training.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

constexpr std::size_t kPrompt = 2;  // tokens of each document that are not learned
constexpr double kBeta = 0.3;
// Chosen and rejected, in turn. In rows of 16 tokens: no two lengths are alike within a pair, and several pairs share a row.
const std::vector<std::size_t> kLengths = {5, 4, 3, 6, 7, 10, 9, 4, 4, 6, 3, 5};
constexpr std::size_t kPairs = 6;

std::size_t begin_of(std::size_t document) {
  return std::accumulate(kLengths.begin(), kLengths.begin() + static_cast<std::ptrdiff_t>(document), std::size_t{0});
}

bool is_learned(std::size_t token) {
  std::size_t document = 0;
  while (begin_of(document + 1) <= token) ++document;
  return token - begin_of(document) >= kPrompt;
}

class PreferenceTest : public DocumentTraining {
 protected:
  void SetUp() override {
    DocumentTraining::SetUp();
    tokens_ = patterned_tokens(begin_of(kLengths.size()));
    write(kLengths, is_learned);
    settings_.objective = "dpo";
    settings_.dpo_beta = kBeta;
    settings_.masks_documents = true;
    settings_.micro_batch = 1;
    settings_.seq_len = 16;
    settings_.batch_tokens = 16 * 6;
  }

  void write(const std::vector<std::size_t>& lengths, const IsLearned& learned) const {
    write_document_shard(temporary_.file("pairs_0.bin"), tokens_, lengths, learned, 32, 3);
  }
  TokenDataset data(RowOptions rows = {}) const {
    return {temporary_.file("pairs_*.bin"), settings_.seq_len, WindowUse::training, rows};
  }
  // A model far from uniform, so that pairs differ.
  std::unique_ptr<TrainModel> model() const {
    std::unique_ptr<TrainModel> result = micro_model(settings_);
    for (const TensorSpec& spec : result->table().specs()) {
      std::vector<float> values(static_cast<std::size_t>(spec.elements));
      result->read_tensor(TensorRole::parameter, spec, values.data());
      for (float& value : values) value *= 8;
      result->write_tensor(TensorRole::parameter, spec, values.data());
    }
    return result;
  }
  static std::vector<PairLogProbabilities> some_reference() {
    std::vector<PairLogProbabilities> reference;
    for (std::size_t pair = 0; pair < kPairs; ++pair) {
      const auto p = static_cast<double>(pair);
      reference.push_back({-12.0 - p, -19.0 + 3 * p});
    }
    return reference;
  }

  // log p of an answer without other documents beside it.
  double alone(TrainModel& model, std::size_t document) const {
    return -DocumentTraining::alone(model, begin_of(document), kLengths[document], is_learned).loss;
  }
  PreferenceSums witness(TrainModel& model, const std::vector<PairLogProbabilities>& reference) const {
    PreferenceSums sums;
    for (std::size_t pair = 0; pair < kPairs; ++pair) {
      const double chosen = kBeta * (alone(model, 2 * pair) - reference[pair].chosen);
      const double rejected = kBeta * (alone(model, 2 * pair + 1) - reference[pair].rejected);
      sums.loss -= std::log(1 / (1 + std::exp(rejected - chosen)));
      sums.margin += chosen - rejected;
      sums.preferred += chosen > rejected ? 1 : 0;
      ++sums.pairs;
    }
    return sums;
  }

  // A run of one step over all rows.
  Json step(TrainModel& model, const std::vector<PairLogProbabilities>& reference, const std::string& name,
            const std::function<void(const AdamWStep&)>& at_update = {}) const {
    const TokenDataset pairs = data();
    const Preference preference(pairs, reference, kBeta);
    return train(model, pairs, name, at_update, &preference);
  }
};

TEST_F(PreferenceTest, BothAnswersOfAPairLieInOneRow) {
  const TokenDataset pairs = data();
  EXPECT_EQ(pairs.pairs(), std::ssize(kLengths) / 2);
  EXPECT_EQ(pairs.windows(), 4u);
  std::vector<bool> found(kPairs);
  for (std::uint64_t window = 0; window < pairs.windows(); ++window) {
    MicroBatch batch = pairs.make_batch(1);
    pairs.read_row(window, batch, 0);
    EXPECT_EQ(batch.windows[0], window);
    std::size_t begin = 0;
    for (const PairPlace& pair : pairs.pairs_of(window)) {
      EXPECT_EQ(pair.chosen, begin);
      EXPECT_EQ(pair.rejected - pair.chosen, kLengths[2 * pair.pair] - 1);
      EXPECT_EQ(pair.end - pair.rejected, kLengths[2 * pair.pair + 1] - 1);
      for (std::size_t t = pair.chosen; t < pair.end; ++t) {
        const bool chosen = t < pair.rejected;
        const std::size_t start = chosen ? pair.chosen : pair.rejected,
                          token = begin_of(2 * pair.pair + !chosen) + t - start;
        EXPECT_EQ(batch.document_starts[t], static_cast<std::int32_t>(start));
        EXPECT_EQ(batch.tokens[t], tokens_[token]);
        EXPECT_EQ(batch.labels[t], is_learned(token + 1) ? tokens_[token + 1] : kIgnoredLabel);
      }
      found[pair.pair] = true;
      begin = pair.end;
    }
  }
  EXPECT_EQ(found, std::vector<bool>(kPairs, true));
}

// A pair that does not fit into a row, or one of whose answers has nothing to learn, is left out whole.
TEST_F(PreferenceTest, APairIsLeftOutWhole) {
  settings_.seq_len = 15;  // the longest pair has 7 + 10 - 2 inputs
  EXPECT_EQ(data().pairs(), 6);
  settings_.seq_len = 14;
  EXPECT_EQ(data().pairs(), 5);
  EXPECT_EQ(data().too_long(), 1);
  write(kLengths, [](std::size_t token) { return is_learned(token) && (token < begin_of(7) || token >= begin_of(8)); });
  EXPECT_EQ(data().pairs(), 4);
  EXPECT_EQ(data().unlearned(), 1);
  settings_.seq_len = 2;
  EXPECT_THROW(data(), Error);
  settings_.seq_len = 16;
  EXPECT_THROW(data({.pack = false}), Error);
  write_document_shard(temporary_.file("pairs_1.bin"), tokens_, kLengths, is_learned);
  EXPECT_THROW(data(), Error) << "pairs and conversations";
}

TEST_F(PreferenceTest, TheLossOfAStepIsTheMeanOverItsPairs) {
  settings_.batch_tokens = 16 * 4;
  settings_.lr = 0;
  for (const std::int64_t micro_batch : {1, 2, 4}) {
    for (const std::int64_t virtual_ranks : {1, 2}) {
      if (virtual_ranks * micro_batch > 4) continue;
      settings_.micro_batch = micro_batch;
      settings_.virtual_ranks = virtual_ranks;
      const std::unique_ptr<TrainModel> start = model();
      const PreferenceSums expected = witness(*start, some_reference());
      ASSERT_GT(expected.preferred, 0);
      ASSERT_LT(expected.preferred, expected.pairs);
      const Json record = step(*start, some_reference(), format("run_%d_%d", int(micro_batch), int(virtual_ranks)));
      for (const char* of : {"", "val_"}) {
        const auto at = [&](const char* key) { return record[std::string(of) + key].get<double>(); };
        EXPECT_NEAR(at("loss"), expected.mean_loss(), 1e-6 * expected.mean_loss());
        EXPECT_NEAR(at("reward_margin"), expected.mean_margin(), 1e-6 * std::abs(expected.mean_margin()));
        EXPECT_EQ(at("reward_accuracy"), expected.accuracy());
        EXPECT_EQ(at("pairs"), kPairs);
      }
      EXPECT_FALSE(record.contains("learned_tokens"));
    }
  }
}

// A model that is its own reference: log 2, and neither answer is preferred.
TEST_F(PreferenceTest, BesideItselfTheLossIsTheLogarithmOfTwo) {
  settings_.batch_tokens = 16 * 4;
  settings_.lr = 1e-4;
  const std::unique_ptr<TrainModel> start = model();
  SingleRank alone;
  const auto reference = *pair_log_probabilities(*start, data(), 1, alone);
  for (std::size_t pair = 0; pair < kPairs; ++pair) {
    const double chosen = this->alone(*start, 2 * pair), rejected = this->alone(*start, 2 * pair + 1);
    // A row of several documents goes through GEMMs of more rows, which the BLAS of some CPUs adds in another order (seen:
    // 1.1e-6). A document that saw its neighbour would differ in the first digits.
    EXPECT_NEAR(reference[pair].chosen, chosen, -1e-5 * chosen);
    EXPECT_NEAR(reference[pair].rejected, rejected, -1e-5 * rejected);
  }
  const Json record = step(*start, reference, "run");
  EXPECT_DOUBLE_EQ(record["loss"].get<double>(), std::log(2.0));
  EXPECT_EQ(record["reward_margin"], 0.0);
  EXPECT_LT(record["val_loss"].get<double>(), std::log(2.0)) << "after a step";
  EXPECT_GT(record["val_reward_margin"].get<double>(), 0.0);
}

// What the optimizer is given is the derivative of that mean, by central differences along several directions.
TEST_F(PreferenceTest, TheGradientIsTheDerivativeOfThatMean) {
  settings_.batch_tokens = 16 * 4;
  for (const std::int64_t virtual_ranks : {1, 2}) {
    settings_.virtual_ranks = virtual_ranks;
    const std::unique_ptr<TrainModel> trained = model(), before = model();
    std::vector<float> gradient;
    const Json record =
        step(*trained, some_reference(), format("run_%d", int(virtual_ranks)), [&](const AdamWStep& update) {
          gradient = tensors(*trained, TensorRole::gradient);
          for (float& value : gradient) value *= update.gradient_scale;
        });
    EXPECT_NEAR(record["grad_norm"].get<double>(), norm_of(gradient), 1e-5 * norm_of(gradient));
    expect_derivative(
        *before, gradient, [&] { return witness(*before, some_reference()).mean_loss(); }, 3, 5e-3);
  }
}

// Another token of one pair changes no bit of the weights of the others, in its row and in other rows.
TEST_F(PreferenceTest, PairsDoNotTouchEachOther) {
  const TokenDataset pairs = data();
  const Preference preference(pairs, some_reference(), kBeta);
  settings_.micro_batch = 4;
  const std::unique_ptr<TrainModel> start = model();
  MicroBatch batch = pairs.make_batch(4);
  for (std::int64_t row = 0; row < 4; ++row) pairs.read_row(static_cast<std::uint64_t>(row), batch, row);
  std::vector<float> before, after;
  preference.compare(*start, batch, before);
  std::size_t touched = 0, kept = 0;
  for (std::size_t row = 0; row < 4; ++row) {
    for (const PairPlace& pair : pairs.pairs_of(row)) {
      const std::size_t first = row * 16 + pair.rejected;
      std::int32_t& token = batch.tokens[first];
      const std::int32_t was = token;
      token = (token + 7) % 32;
      preference.compare(*start, batch, after);
      token = was;
      for (std::size_t t = 0; t < before.size(); ++t) {
        const bool own = t >= row * 16 + pair.chosen && t < row * 16 + pair.end;
        EXPECT_EQ(before[t] != after[t], own) << t;
        ++(own ? touched : kept);
      }
    }
  }
  EXPECT_GT(touched, 0u);
  EXPECT_GT(kept, touched);
  // Chosen answers have positive weights, rejected ones the same, negative.
  for (const PairPlace& pair : pairs.pairs_of(0)) {
    EXPECT_GT(before[pair.chosen], 0);
    EXPECT_EQ(before[pair.rejected], -before[pair.chosen]);
  }
}

TEST_F(PreferenceTest, RanksMeasureWhatOneDoes) {
  const TokenDataset pairs = data();
  const Preference preference(pairs, some_reference(), kBeta);
  for (const std::int64_t micro_batch : {1, 3}) {
    settings_.micro_batch = micro_batch;
    const std::unique_ptr<TrainModel> start = model();
    SingleRank alone;
    const auto reference = *pair_log_probabilities(*start, pairs, micro_batch, alone);
    const PreferenceSums sums = *preference.measure(*start, micro_batch, 0, alone);
    EXPECT_EQ(sums.pairs, std::ssize(reference));
    EXPECT_NEAR(sums.loss, witness(*start, some_reference()).loss, 1e-5);
    EXPECT_LT(preference.measure(*start, micro_batch, 1, alone)->pairs, sums.pairs);
    for (const int ranks : {2, 3, 5}) {
      run_thread_ranks(ranks, 20, [&](Communicator& all) {
        const std::unique_ptr<TrainModel> own = model();
        EXPECT_EQ(pair_log_probabilities(*own, pairs, micro_batch, all), reference);
        const std::optional<PreferenceSums> measured = preference.measure(*own, micro_batch, 0, all);
        EXPECT_EQ(measured->loss, sums.loss);
        EXPECT_EQ(measured->margin, sums.margin);
        EXPECT_EQ(measured->preferred, sums.preferred);
      });
    }
  }
}

TEST_F(PreferenceTest, TheFileOfTheReferenceHasEveryBit) {
  const std::string path = temporary_.file("reference.bin");
  const Json identity = {{"train", "a"}};
  const Reference written{some_reference(), {{-1.0 / 3, -1e-300}}};
  EXPECT_FALSE(read_reference(path, identity, 6, 1));
  write_reference(path, identity, written);
  const std::optional<Reference> read = read_reference(path, identity, 6, 1);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->train, written.train);
  EXPECT_EQ(read->val, written.val);
  EXPECT_FALSE(read_reference(path, {{"train", "b"}}, 6, 1)) << "of other data";
  testing::internal::CaptureStderr();
  EXPECT_FALSE(read_reference(path, identity, 5, 1));
  expect_contains(testing::internal::GetCapturedStderr(),
                  "got i64 [6, 2], expected i64 [5, 2]. The reference is computed again");
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(8192 + 17);
  file.put('x');
  file.close();
  testing::internal::CaptureStderr();
  EXPECT_FALSE(read_reference(path, identity, 6, 1));
  expect_contains(testing::internal::GetCapturedStderr(), "The reference is computed again");
  write_reference(path, identity, {some_reference(), {}});  // without --val
  EXPECT_TRUE(read_reference(path, identity, 6, 0));
}

}  // namespace
}  // namespace weft
