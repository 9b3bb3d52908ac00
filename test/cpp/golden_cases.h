// The reference dumps of test/fixtures/golden, and loading their models: shared by the CPU and the GPU tests.
#pragma once

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/model/model_file.h"
#include "llmc/model/train_model.h"

namespace weft {

struct GoldenCase {
  std::string name, model, dump;
  std::string family;
};

// The one in fp8, which only models in fp8 are compared with; its model has the same name.
inline const GoldenCase kFp8Golden{"llama-fp8.dump.bin", "test/fixtures/golden/llama-fp8.model.bin",
                                   "test/fixtures/golden/llama-fp8.dump.bin", "llama"};

// Every other dump with its model beside it, by name.
inline std::vector<GoldenCase> golden_cases() {
  std::vector<GoldenCase> cases;
  const std::string suffix = ".dump.bin";
  for (const auto& entry : std::filesystem::directory_iterator("test/fixtures/golden")) {
    const std::string path = entry.path().string();
    if (path.size() < suffix.size() || path.compare(path.size() - suffix.size(), suffix.size(), suffix) != 0) continue;
    const std::string stem = path.substr(0, path.size() - suffix.size());
    if (!std::filesystem::exists(stem + ".model.bin") || path == kFp8Golden.dump) continue;
    const TensorFile dump = TensorFile::open(path, FileKind::reference_dump);
    cases.push_back({entry.path().filename().string(), stem + ".model.bin", path,
                     json_string(dump.config().at("model"), "family", path)});
  }
  std::sort(cases.begin(), cases.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return cases;
}

inline std::vector<GoldenCase> golden_cases(const std::string& family) {
  std::vector<GoldenCase> cases = golden_cases();
  std::erase_if(cases, [&](const GoldenCase& golden) { return golden.family != family; });
  return cases;
}

// Of models that can be trained.
inline std::vector<GoldenCase> trainable_goldens() {
  std::vector<GoldenCase> cases = golden_cases();
  std::erase_if(cases, [](const GoldenCase& golden) {
    return !training_unsupported_reason(ModelFile::open(golden.model).config()).empty();
  });
  return cases;
}

// Copies every parameter of the file into the model.
inline void load_parameters(const ModelFile& file, TrainModel& model) {
  for (const TensorSpec& spec : file.table().specs()) {  // not the model's own table: both name the same parameters
    std::vector<float> values(static_cast<std::size_t>(spec.elements));
    file.read_parameter(spec, values.data());
    model.write_tensor(TensorRole::parameter, spec, values.data());
  }
}

// Every tensor of one role, in one vector of the table's layout.
inline std::vector<float> read_all(TrainModel& model, TensorRole role) {
  std::vector<float> all(static_cast<std::size_t>(model.table().arena_elements()));
  for (const TensorSpec& spec : model.table().specs()) model.read_tensor(role, spec, all.data() + spec.offset);
  return all;
}

}  // namespace weft
