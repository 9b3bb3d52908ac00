#include "llmc/base/installed.h"

#include <algorithm>
#include <filesystem>

namespace weft {

std::string script_command(const std::string& script) {
  std::string name = "weft-" + std::filesystem::path(script).stem().string();
  std::replace(name.begin(), name.end(), '_', '-');
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  return !error && std::filesystem::exists(program.parent_path() / name, error) ? name : script;
}

}  // namespace weft
