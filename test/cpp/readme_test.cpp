// README's table "What it runs" says what the code does.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <set>

#include "llmc/base/error.h"
#include "llmc/model/families/family.h"
#include "llmc/model/fp8.h"
#include "llmc/model/model_file.h"
#include "llmc/model/presets.h"

namespace weft {
namespace {

// The families of each row, by the beginning of its name.
const std::map<std::string, std::set<std::string>> kRows = {
    {"Llama", {"llama"}},
    {"Mistral", {"mistral"}},
    {"Qwen2, Qwen2.5, Qwen3", {"qwen2", "qwen3"}},
    {"SmolLM3", {"smollm3"}},
    {"GPT-NeoX (Pythia)", {"gpt_neox"}},
    {"Gemma 3 (text)", {"gemma3_text"}},
};

// What the row of a family says of training, "as Llama" replaced by Llama's.
std::map<std::string, std::string> training_of_families() {
  std::ifstream readme("README.md");
  std::string line;
  while (std::getline(readme, line) && !line.starts_with("| | train |")) {
  }
  std::getline(readme, line);  // the rule below the head
  std::map<std::string, std::string> training;
  while (std::getline(readme, line) && line.starts_with("| ")) {
    const std::size_t end = line.find(" | ", 2), next = line.find(" | ", end + 3);
    const auto row = kRows.find(line.substr(2, end - 2));
    EXPECT_NE(row, kRows.end()) << line;
    if (row == kRows.end()) continue;
    const std::string cell = line.substr(end + 3, next - end - 3);
    for (const std::string& family : row->second) {
      EXPECT_FALSE(training.contains(family)) << "twice: " << family;
      training[family] = cell == "as Llama" ? training.at("llama") : cell;
    }
  }
  return training;
}

TEST(Readme, TheTableHasEveryFamilyAndHowItTrains) {
  const std::map<std::string, std::string> training = training_of_families();
  EXPECT_EQ(training.size(), families().size());
  for (const Family* family : families()) EXPECT_TRUE(training.contains(family->name)) << family->name;
  std::set<std::string> seen;
  for (const std::string& name : preset_names()) {
    const ModelConfig config = preset_config(name);
    const std::string& says = training.at(config.family);
    SCOPED_TRACE(format("%s: %s", name.c_str(), says.c_str()));
    EXPECT_EQ(training_unsupported_reason(config).empty(), says.find("fp32") != std::string::npos);
    EXPECT_EQ(fp8_unsupported_reason(config, 1, 16).empty(), says.find("fp8") != std::string::npos);
    seen.insert(config.family);
  }
  EXPECT_EQ(seen.size(), families().size()) << "a family without a preset";
}

}  // namespace
}  // namespace weft
