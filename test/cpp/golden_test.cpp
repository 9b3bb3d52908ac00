// Whole models against PyTorch: every dump in test/fixtures/golden through the CPU models, at 1e-5 of each tensor's
// largest value (fp32 sums of up to a few thousand terms err by a few tens of eps = 1.2e-7, and layers add up).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <iostream>
#include <set>

#include "golden_cases.h"
#include "llmc/cpu/inference.h"
#include "llmc/cpu/training.h"
#include "llmc/model/compare.h"
#include "llmc/model/fp8.h"
#include "train_tools.h"

namespace weft {
namespace {

constexpr double kTolerance = 1e-5;

std::unique_ptr<TrainModel> load_llama(const ModelFile& file, const TrainOptions& options) {
  auto model = cpu::make_training_model(file.config(), options);
  load_parameters(file, *model);
  return model;
}

// Every row is within its tolerance, and every tensor of the dump that is one of `names`, or begins with one that ends in a point, has a row.
void expect_passed(const Comparison& result, const TensorFile& dump, const std::vector<std::string>& names) {
  EXPECT_TRUE(result.passed());
  std::set<std::string> compared;
  for (const TensorDistance& row : result.rows) compared.insert(row.name);
  for (const TensorInfo& tensor : dump.tensors()) {
    const bool due = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return name.ends_with('.') ? tensor.name.starts_with(name) : tensor.name == name;
    });
    EXPECT_TRUE(!due || compared.contains(tensor.name)) << tensor.name << " was not compared";
  }
  if (result.passed()) return;
  for (const std::string& line : result.table()) std::cout << line << "\n";
}

TEST(Golden, FixturesCoverBothFamilies) {
  EXPECT_GE(golden_cases("llama").size(), 6u);
  EXPECT_GE(golden_cases("gpt_neox").size(), 6u);
}

TEST(Golden, LlamaTrainingMatchesPyTorch) {
  for (const GoldenCase& golden : trainable_goldens()) {
    SCOPED_TRACE(golden.name);
    const ModelFile file = ModelFile::open(golden.model);
    const TensorFile dump = TensorFile::open(golden.dump, FileKind::reference_dump);
    const auto load = [&](const TrainOptions& options) { return load_llama(file, options); };
    expect_passed(compare_training(dump, Precision::fp32, kTolerance, load), dump, {"act.", "grad.", "adamw.", "loss"});
  }
}

// With operands rounded to fp8, over steps in which scales change and values grow beyond them. No value of the dump is so near to the
// middle between two codes that another order of sums moves it, so the tolerances that it brings are hardly above those of fp32.
TEST(Golden, Fp8TrainingMatchesPyTorch) {
  const ModelFile file = ModelFile::open(kFp8Golden.model);
  const TensorFile dump = TensorFile::open(kFp8Golden.dump, FileKind::reference_dump);
  const auto load = [&](const TrainOptions& options) { return load_llama(file, options); };
  const Comparison result = compare_training(dump, Precision::fp8, kTolerance, load);
  expect_passed(result, dump, {"act.", "grad.", "adamw."});
  for (const TensorDistance& row : result.rows) EXPECT_LE(row.tolerance, 20 * kTolerance) << row.name;
}

// The scales of each step are part of what is compared: without their history, or with one that is a step late, or without any
// rounding, the model is another one, by a hundred times what is allowed.
TEST(Golden, Fp8WithOtherScalesIsNotPyTorch) {
  struct Changed : HookedModel {
    explicit Changed(std::unique_ptr<TrainModel> model) : HookedModel(*model), owned(std::move(model)) {}
    std::unique_ptr<TrainModel> owned;
  };
  const ModelFile file = ModelFile::open(kFp8Golden.model);
  const TensorFile dump = TensorFile::open(kFp8Golden.dump, FileKind::reference_dump);
  using Change = std::function<void(std::vector<float> & history)>;
  std::uint64_t saturated = 0;
  const auto worst = [&](Precision precision, const Change& change) {
    const auto load = [&](TrainOptions options) {
      options.precision = precision;
      auto model = std::make_unique<Changed>(load_llama(file, options));
      TrainModel& inner = *model->owned;
      model->after_statistics = [&saturated](StepStatistics& statistics) {
        if (statistics.fp8) saturated += statistics.fp8->kinds[static_cast<std::size_t>(Fp8Kind::input)].saturated;
      };
      model->before_forward = [&inner, change](std::uint64_t) {
        std::vector<float> history = inner.fp8_state();
        if (!change) return;
        change(history);
        inner.set_fp8_state(history);
      };
      return model;
    };
    double most = 0;
    for (const TensorDistance& row : compare_training(dump, Precision::fp8, kTolerance, load).rows) {
      most = std::max(most, row.relative / row.tolerance);
    }
    return most;
  };
  EXPECT_LE(worst(Precision::fp8, [](std::vector<float>&) {}), 1) << "as it is";
  EXPECT_GT(saturated, 0u) << "nothing shows what becomes of values beyond the range";
  const auto forgotten = [](std::vector<float>& history) { std::fill(history.begin(), history.end(), 0.0f); };
  const auto late = [](std::vector<float>& history) {
    const auto slots = static_cast<std::ptrdiff_t>(history.size()) / kFp8History;
    std::rotate(history.begin(), history.begin() + slots, history.end());
    std::fill(history.end() - slots, history.end(), 0.0f);
  };
  EXPECT_GT(worst(Precision::fp8, forgotten), 100);
  EXPECT_GT(worst(Precision::fp8, late), 100);
  EXPECT_GT(worst(Precision::fp32, nullptr), 100);
}

// Of the goldens without gradients.
TEST(Golden, DecodingOfModelsThatDoNotTrainMatchesPyTorch) {
  std::set<std::string> families;
  for (const GoldenCase& golden : golden_cases()) {
    SCOPED_TRACE(golden.name);
    const ModelFile file = ModelFile::open(golden.model);
    if (TensorFile::open(golden.dump, FileKind::reference_dump).find("adamw.losses") != nullptr) continue;
    families.insert(golden.family);
    const TensorFile dump = TensorFile::open(golden.dump, FileKind::reference_dump);
    expect_passed(compare_decoding(dump, kTolerance, *cpu::load_decoder(file, file.config().max_positions)), dump,
                  {"act.", "greedy.ids", "loss"});
  }
  EXPECT_EQ(families, (std::set<std::string>{"gemma3_text", "gpt_neox"}));
}

// The decoder that samples during training is another code path over the same weights: it must agree with PyTorch too.
TEST(Golden, LlamaDecodingMatchesPyTorch) {
  for (const GoldenCase& golden : trainable_goldens()) {
    SCOPED_TRACE(golden.name);
    const ModelFile file = ModelFile::open(golden.model);
    TrainOptions options;
    options.seq_len = 1;
    const auto model = load_llama(file, options);
    const TensorFile dump = TensorFile::open(golden.dump, FileKind::reference_dump);
    expect_passed(compare_decoding(dump, kTolerance, *model->decoder(file.config().max_positions)), dump,
                  {"greedy.ids", "loss"});
  }
}

// The batch of a dump may be exactly as long as the context, of the model or of what was loaded, and not longer.
TEST(Golden, ADumpMayFillTheContext) {
  for (const char* family : {"llama", "gpt_neox"}) {
    const GoldenCase golden = golden_cases(family)[0];
    const ModelFile file = ModelFile::open(golden.model);
    const TensorFile dump = TensorFile::open(golden.dump, FileKind::reference_dump);
    const std::int64_t T = dump.at("input_ids").shape[1];
    ModelConfig config = file.config();
    config.max_positions = T;
    EXPECT_EQ(training_options(dump, Precision::fp32, config).seq_len, T);
    EXPECT_GE(decoding_positions(dump, config), T);
    const auto refused = [&](const std::function<void()>& call) {
      const std::string wanted = format("%lld positions do not fit in a context of %lld", static_cast<long long>(T),
                                        static_cast<long long>(T - 1));
      EXPECT_NE(error_of(Exit::bad_file, call).find(wanted), std::string::npos);
    };
    config.max_positions = T - 1;
    refused([&] { training_options(dump, Precision::fp32, config); });
    refused([&] { decoding_positions(dump, config); });
    refused([&] { compare_decoding(dump, kTolerance, *cpu::load_decoder(file, T - 1)); });
    const auto decoder = cpu::load_decoder(file, T);
    try {
      EXPECT_TRUE(compare_decoding(dump, kTolerance, *decoder).passed());
    } catch (const Error& error) {  // the prompt and what follows it may be longer than the batch
      EXPECT_EQ(std::string(error.what()).find("input_ids"), std::string::npos) << error.what();
    }
  }
}

// --recompute trades time for memory, never bits.
TEST(Golden, RecomputationGivesTheSameBits) {
  for (const GoldenCase& golden : trainable_goldens()) {
    SCOPED_TRACE(golden.name);
    const TensorFile dump = TensorFile::open(golden.dump, FileKind::reference_dump);
    const ModelFile file = ModelFile::open(golden.model);
    const TensorInfo& inputs = dump.at("input_ids");
    std::vector<std::int32_t> ids(inputs.elements()), labels(inputs.elements());
    std::memcpy(ids.data(), dump.bytes(inputs).data(), inputs.bytes);
    std::memcpy(labels.data(), dump.bytes(dump.at("labels")).data(), inputs.bytes);
    const auto gradients = [&](Recompute recompute) {
      TrainOptions options;
      options.micro_batch = inputs.shape[0];
      options.seq_len = inputs.shape[1];
      options.recompute = recompute;
      options.dropout = 0.1f;
      const auto model = load_llama(file, options);
      model->zero_gradients();
      model->forward({ids, labels}, 3, 0.125f);
      model->backward();
      return read_all(*model, TensorRole::gradient);
    };
    const std::vector<float> reference = gradients(Recompute::none);
    EXPECT_EQ(std::memcmp(reference.data(), gradients(Recompute::norm).data(), reference.size() * 4), 0);
    EXPECT_EQ(std::memcmp(reference.data(), gradients(Recompute::block).data(), reference.size() * 4), 0);
  }
}

}  // namespace
}  // namespace weft
