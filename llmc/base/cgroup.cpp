#include "llmc/base/cgroup.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

namespace weft {

namespace {

// Whether `name` is one of the comma-separated `controllers`.
bool lists(std::string_view controllers, std::string_view name) {
  for (std::size_t begin = 0; begin <= controllers.size();) {
    const std::size_t end = std::min(controllers.find(',', begin), controllers.size());
    if (controllers.substr(begin, end - begin) == name) return true;
    begin = end + 1;
  }
  return false;
}

std::optional<std::uint64_t> number_in(const std::string& path) {
  std::uint64_t number = 0;
  std::ifstream file(path);
  return file >> number ? std::optional(number) : std::nullopt;
}

// The number beside `key` in a file of lines "KEY NUMBER"; 0 if there is none.
std::uint64_t entry_of(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  std::string word;
  std::uint64_t number = 0;
  while (file >> word >> number) {
    if (word == key) return number;
  }
  return 0;
}

}  // namespace

std::string cgroup_membership() {
  std::ifstream file("/proc/self/cgroup");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> cgroup_directories(std::string_view membership, std::string_view controller,
                                            const std::string& root) {
  std::vector<std::string> directories;
  std::istringstream lines{std::string(membership)};
  for (std::string line; std::getline(lines, line);) {  // "ID:CONTROLLERS:PATH"; version 2 is "0::PATH"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !lists(controllers, controller)) continue;
    const std::string mount = controllers.empty() ? root : root + "/" + std::string(controller);
    for (std::string path = line.substr(second + 1);;) {
      directories.push_back(mount + path);
      const std::size_t slash = path.rfind('/');
      if (slash == std::string::npos) break;
      path.resize(slash);
    }
  }
  return directories;
}

CgroupMemory cgroup_memory(std::string_view membership, const std::string& root) {
  CgroupMemory memory;
  for (const std::string& directory : cgroup_directories(membership, "memory", root)) {
    // Version 2: memory.max, "max" without a limit, and in memory.stat "anon" of the whole subtree. Version 1:
    // memory.limit_in_bytes, nearly 2^63 without a limit, and "total_rss".
    std::optional<std::uint64_t> limit = number_in(directory + "/memory.max");
    const char* used_key = "anon";
    if (!limit) {
      limit = number_in(directory + "/memory.limit_in_bytes");
      used_key = "total_rss";
    }
    if (!limit) continue;
    const std::uint64_t used = entry_of(directory + "/memory.stat", used_key);
    memory.limit = std::min(memory.limit, *limit);
    memory.free = std::min(memory.free, *limit > used ? *limit - used : 0);
  }
  return memory;
}

}  // namespace weft
