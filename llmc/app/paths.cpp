#include "llmc/app/paths.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "llmc/base/error.h"
#include "llmc/base/installed.h"

namespace weft {

namespace {

bool is_directory(const std::string& path) {
  std::error_code error;
  return !path.empty() && std::filesystem::is_directory(path, error);
}

// Of a run's directory (train_llama --out), the model file of its newest checkpoint; empty if it has none.
std::string newest_model(const std::string& path) {
  std::string newest;
  std::error_code error;
  for (std::filesystem::directory_iterator at(path, error), end; !error && at != end; at.increment(error)) {
    const std::string model = (at->path() / "model.bin").string();
    std::error_code ignored;
    if (at->path().filename().string().starts_with("step_") && std::filesystem::exists(model, ignored))
      newest = std::max(newest, model);
  }
  return newest;
}

}  // namespace

void refuse_model_directory(const std::string& path) {
  if (!is_directory(path)) return;
  const auto has = [&path](const char* name) {
    std::error_code error;
    return std::filesystem::exists(path + name, error);
  };
  const std::string newest = newest_model(path);
  const std::string advice =
      !newest.empty() ? "Give the model file of its newest checkpoint: --model " + escaped(newest)
      : has("/config.json")
          ? "Convert it first: " + script_command("scripts/convert_hf.py") + " " + escaped(path) + " -o model.bin"
      : has("/model.bin") ? "Give its model file: --model " + escaped(path + "/model.bin")
                          : "Give a model file";
  fail(Exit::bad_file, "--model: %s: this is a directory, not a regular file. %s", escaped(path).c_str(),
       advice.c_str());
}

void refuse_tokenizer_directory(const std::string& path) {
  if (!is_directory(path)) return;
  fail(Exit::bad_file,
       "--tokenizer: %s: this is a directory, not a regular file. Give its tokenizer.json: --tokenizer %s",
       escaped(path).c_str(), escaped(path + "/tokenizer.json").c_str());
}

}  // namespace weft
