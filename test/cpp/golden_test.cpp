// Whole models against PyTorch: every dump in test/fixtures/golden through the CPU models, at 1e-5 of each tensor's
// largest value (fp32 sums of up to a few thousand terms err by a few tens of eps = 1.2e-7, and layers add up).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <set>

#include "golden_cases.h"
#include "llmc/cpu/inference.h"
#include "llmc/cpu/llama.h"
#include "llmc/model/compare.h"

namespace weft {
namespace {

constexpr double kTolerance = 1e-5;

std::unique_ptr<TrainModel> load_llama(const ModelFile& file, const TrainOptions& options) {
  auto model = cpu::make_llama(file.config(), options);
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
  EXPECT_GE(golden_cases(Family::llama).size(), 6u);
  EXPECT_GE(golden_cases(Family::gpt_neox).size(), 6u);
}

TEST(Golden, LlamaTrainingMatchesPyTorch) {
  for (const GoldenCase& golden : golden_cases(Family::llama)) {
    SCOPED_TRACE(golden.name);
    const ModelFile file = ModelFile::open(golden.model, Family::llama);
    const TensorFile dump = TensorFile::open(golden.dump, FileKind::reference_dump);
    const auto load = [&](const TrainOptions& options) { return load_llama(file, options); };
    expect_passed(compare_training(dump, Precision::fp32, kTolerance, load), dump, {"act.", "grad.", "adamw.", "loss"});
  }
}

TEST(Golden, NeoxDecodingMatchesPyTorch) {
  for (const GoldenCase& golden : golden_cases(Family::gpt_neox)) {
    SCOPED_TRACE(golden.name);
    const ModelFile file = ModelFile::open(golden.model, Family::gpt_neox);
    const TensorFile dump = TensorFile::open(golden.dump, FileKind::reference_dump);
    expect_passed(compare_decoding(dump, kTolerance, *cpu::load_decoder(file, file.config().max_positions)), dump,
                  {"act.", "greedy.ids", "loss"});
  }
}

// The decoder that samples during training is another code path over the same weights: it must agree with PyTorch too.
TEST(Golden, LlamaDecodingMatchesPyTorch) {
  for (const GoldenCase& golden : golden_cases(Family::llama)) {
    SCOPED_TRACE(golden.name);
    const ModelFile file = ModelFile::open(golden.model, Family::llama);
    TrainOptions options;
    options.seq_len = 1;
    const auto model = load_llama(file, options);
    const TensorFile dump = TensorFile::open(golden.dump, FileKind::reference_dump);
    expect_passed(compare_decoding(dump, kTolerance, *model->decoder(file.config().max_positions)), dump,
                  {"greedy.ids", "loss"});
  }
}

// --recompute trades time for memory, never bits.
TEST(Golden, RecomputationGivesTheSameBits) {
  for (const GoldenCase& golden : golden_cases(Family::llama)) {
    SCOPED_TRACE(golden.name);
    const TensorFile dump = TensorFile::open(golden.dump, FileKind::reference_dump);
    const ModelFile file = ModelFile::open(golden.model, Family::llama);
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
