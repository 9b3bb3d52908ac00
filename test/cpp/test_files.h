// Helpers of the tests that work on files.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/json.h"

namespace weft {

// A file system in memory where there is one: for tests that sync files hundreds of times, and that a disk would only slow down.
inline std::filesystem::path memory_files() {
  const std::filesystem::path shared = "/dev/shm";
  return ::access(shared.c_str(), W_OK) == 0 ? shared : std::filesystem::temp_directory_path();
}

// A directory of its own for a test, removed with everything in it.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    std::string name = (parent / "weft_test_XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot create a temporary directory");
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  std::string file(const std::string& name) const { return (path_ / name).string(); }
  std::size_t entries() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::filesystem::path path_;
};

// How many files and sockets this process has open.
inline std::ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes;
  file.close();
  EXPECT_TRUE(file.good()) << path;
}

// The values of a file with one JSON value a line, such as a run's log; none if there is no file.
inline std::vector<Json> json_lines(const std::string& path) {
  std::vector<Json> all;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) all.push_back(Json::parse(line));
  return all;
}

// The message of the weft::Error that `work` throws, which must have this exit code; "accepted" if it throws none.
template <typename Work>
std::string reason_of(Exit code, Work work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "accepted";
}

// The same for what has to be an error: "" and a failed test if it throws none.
template <typename Work>
std::string error_of(Exit code, Work work) {
  const std::string reason = reason_of(code, work);
  if (reason != "accepted") return reason;
  ADD_FAILURE() << "no error was thrown";
  return "";
}

inline std::string hex_bytes(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

// The bytes of a damaged file from a damaged.json: its good file in `fixtures`, cut or extended with zeros to
// "size", then edited. Hashes that "rehash" asks for are left to the caller.
inline std::string damaged_bytes(const std::string& fixtures, const Json& damage) {
  std::string bytes = read_bytes(fixtures + damage["base"].get<std::string>());
  if (damage.contains("size")) bytes.resize(damage["size"].get<std::size_t>());
  for (const Json& edit : damage["edits"]) {
    const std::string replacement = hex_bytes(edit[1].get<std::string>());
    bytes.replace(edit[0].get<std::size_t>(), replacement.size(), replacement);
  }
  return bytes;
}

// Expects `part` somewhere in `text`.
inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "got: " << text << "\nexpected within it: " << part;
}

}  // namespace weft
