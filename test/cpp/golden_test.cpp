// Whole models against PyTorch: every dump in test/fixtures/golden through the CPU models, at 1e-5 of each
// tensor's largest value (fp32 sums of up to a few thousand terms err by a few tens of eps = 1.2e-7, and
// layers add up).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iostream>

#include "llmc/cpu/llama.h"
#include "llmc/cpu/neox.h"
#include "llmc/model/compare.h"
#include "llmc/model/model_file.h"

namespace weft {
namespace {

constexpr double kTolerance = 1e-5;

struct GoldenCase {
  std::string name, model, dump;
};

std::vector<GoldenCase> golden_cases() {
  std::vector<GoldenCase> cases;
  const std::string suffix = ".dump.bin";
  for (const auto& entry : std::filesystem::directory_iterator("test/fixtures/golden")) {
    const std::string path = entry.path().string();
    if (path.size() < suffix.size() || path.compare(path.size() - suffix.size(), suffix.size(), suffix) != 0)
      continue;
    const std::string stem = path.substr(0, path.size() - suffix.size());
    if (std::filesystem::exists(stem + ".model.bin")) {
      cases.push_back({entry.path().filename().string(), stem + ".model.bin", path});
    }
  }
  std::sort(cases.begin(), cases.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return cases;
}

std::unique_ptr<TrainModel> load_llama(const ModelFile& file, const TrainOptions& options) {
  auto model = cpu::make_llama(file.config(), options);
  for (const TensorSpec& spec : file.table().specs()) {
    std::vector<float> values(static_cast<std::size_t>(spec.elements));
    file.read_parameter(spec, values.data());
    model->write_tensor(TensorRole::parameter, spec, values.data());
  }
  return model;
}

Comparison run_case(const GoldenCase& golden) {
  const TensorFile dump = TensorFile::open(golden.dump, FileKind::reference_dump);
  if (json_string(dump.config().at("model"), "family", golden.dump) == "llama") {
    const ModelFile file = ModelFile::open(golden.model, Family::llama);
    return compare_training(dump, kTolerance,
                            [&](const TrainOptions& options) { return load_llama(file, options); });
  }
  const ModelFile file = ModelFile::open(golden.model, Family::gpt_neox);
  return compare_decoding(dump, kTolerance, *cpu::load_neox(file, file.config().max_positions));
}

TEST(Golden, FixturesExist) {
  EXPECT_GE(golden_cases().size(), 10u);
}

TEST(Golden, EveryTensorMatchesPyTorch) {
  for (const GoldenCase& golden : golden_cases()) {
    SCOPED_TRACE(golden.name);
    const Comparison result = run_case(golden);
    EXPECT_TRUE(result.passed());
    if (result.passed()) continue;
    for (const std::string& line : result.table()) std::cout << line << "\n";
  }
}

// The decoder that samples during training is another code path over the same weights: it must agree with
// PyTorch too.
TEST(Golden, LlamaDecoderMatchesPyTorch) {
  for (const GoldenCase& golden : golden_cases()) {
    const TensorFile dump = TensorFile::open(golden.dump, FileKind::reference_dump);
    if (json_string(dump.config().at("model"), "family", golden.dump) != "llama") continue;
    SCOPED_TRACE(golden.name);
    const ModelFile file = ModelFile::open(golden.model, Family::llama);
    TrainOptions options;
    options.seq_len = 1;
    const auto model = load_llama(file, options);
    const Comparison result =
        compare_decoding(dump, kTolerance, *model->decoder(file.config().max_positions));
    EXPECT_TRUE(result.passed());
    if (result.passed()) continue;
    for (const std::string& line : result.table()) std::cout << line << "\n";
  }
}

// --recompute trades time for memory, never bits.
TEST(Golden, RecomputationGivesTheSameBits) {
  for (const GoldenCase& golden : golden_cases()) {
    const TensorFile dump = TensorFile::open(golden.dump, FileKind::reference_dump);
    if (json_string(dump.config().at("model"), "family", golden.dump) != "llama") continue;
    SCOPED_TRACE(golden.name);
    const ModelFile file = ModelFile::open(golden.model, Family::llama);
    const TensorInfo& inputs = dump.at("input_ids");
    const auto gradients = [&](Recompute recompute) {
      TrainOptions options;
      options.micro_batch = inputs.shape[0];
      options.seq_len = inputs.shape[1];
      options.recompute = recompute;
      options.dropout = 0.1f;
      const auto model = load_llama(file, options);
      std::vector<std::int32_t> ids(inputs.elements()), labels(inputs.elements());
      std::memcpy(ids.data(), dump.bytes(inputs).data(), inputs.bytes);
      std::memcpy(labels.data(), dump.bytes(dump.at("labels")).data(), inputs.bytes);
      model->zero_gradients();
      model->forward({ids, labels}, 3, 0.125f);
      model->backward();
      std::vector<float> all(static_cast<std::size_t>(file.table().arena_elements()));
      for (const TensorSpec& spec : file.table().specs()) {
        model->read_tensor(TensorRole::gradient, spec, all.data() + spec.offset);
      }
      return all;
    };
    const std::vector<float> reference = gradients(Recompute::none);
    EXPECT_EQ(std::memcmp(reference.data(), gradients(Recompute::norm).data(), reference.size() * 4), 0);
    EXPECT_EQ(std::memcmp(reference.data(), gradients(Recompute::block).data(), reference.size() * 4), 0);
  }
}

}  // namespace
}  // namespace weft
