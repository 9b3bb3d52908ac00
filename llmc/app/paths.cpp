#include "llmc/app/paths.h"

#include <filesystem>
#include <system_error>

#include "llmc/base/error.h"
#include "llmc/base/installed.h"
#include "llmc/file/run_dir.h"

namespace weft {

namespace {

bool is_directory(const std::string& path) {
  std::error_code error;
  return !path.empty() && std::filesystem::is_directory(path, error);
}

// Of a run's directory (train_llama --out), the model file of its newest checkpoint; empty if it has none.
std::string newest_model(const std::string& path) {
  try {
    for (const RunDirectory::Entry& entry : RunDirectory::checkpoints_in(path)) {
      const std::string model = (std::filesystem::path(path) / entry.name / "model.bin").string();
      std::error_code error;
      if (entry.problem.empty() && std::filesystem::exists(model, error)) return model;
    }
  } catch (const Error&) {  // it cannot be listed
  }
  return "";
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
