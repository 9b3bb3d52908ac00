#include "llmc/app/paths.h"

#include <filesystem>
#include <system_error>

#include "llmc/base/error.h"

namespace weft {

namespace {

bool is_directory(const std::string& path) {
  std::error_code error;
  return !path.empty() && std::filesystem::is_directory(path, error);
}

}  // namespace

void refuse_model_directory(const std::string& path) {
  if (!is_directory(path)) return;
  const std::string name = escaped(path);
  std::error_code error;
  const bool hugging_face = std::filesystem::exists(path + "/config.json", error);
  fail(Exit::bad_file, "--model: %s: this is a directory, not a regular file. %s%s%s", name.c_str(),
       hugging_face ? "Convert it first: python3 scripts/convert_hf.py " : "Give the model file in it",
       hugging_face ? name.c_str() : "", hugging_face ? " -o model.bin" : "");
}

void refuse_tokenizer_directory(const std::string& path) {
  if (!is_directory(path)) return;
  fail(Exit::bad_file,
       "--tokenizer: %s: this is a directory, not a regular file. Give its tokenizer.json: --tokenizer %s",
       escaped(path).c_str(), escaped(path + "/tokenizer.json").c_str());
}

}  // namespace weft
