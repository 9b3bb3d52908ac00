#include "test/fuzz/memory_files.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/file.h"

namespace weft {

namespace {

struct Content {
  std::unique_ptr<std::byte[]> bytes;  // null for an empty file, as MappedFile has it
  std::uint64_t size = 0;
};

std::map<std::string, Content>& files() {
  static std::map<std::string, Content> all;
  return all;
}

}  // namespace

namespace fuzz {

void put_file(const std::string& path, std::span<const std::uint8_t> content) {
  Content file;
  file.size = content.size();
  if (!content.empty()) {
    file.bytes.reset(new std::byte[content.size()]);
    std::memcpy(file.bytes.get(), content.data(), content.size());
  }
  files()[path] = std::move(file);
}

void remove_files() {
  files().clear();
}

std::string_view file_text(const std::string& path) {
  const auto found = files().find(path);
  if (found == files().end()) std::abort();
  return {reinterpret_cast<const char*>(found->second.bytes.get()), found->second.size};
}

}  // namespace fuzz

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const auto found = files().find(path);
  if (found == files().end()) {
    fail(Exit::bad_file, "%s: cannot open: No such file or directory", escaped(path).c_str());
  }
  data_ = found->second.bytes.get();
  size_ = found->second.size;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      identity_(other.identity_) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() = default;  // the file keeps its bytes

bool MappedFile::unchanged() const {
  return true;
}

std::string read_text_file(const std::string& path, std::uint64_t max_bytes) {
  const MappedFile file(path);
  if (file.size() > max_bytes) {
    fail(Exit::bad_file, "%s: %llu bytes, at most %llu are accepted", escaped(path).c_str(),
         static_cast<unsigned long long>(file.size()), static_cast<unsigned long long>(max_bytes));
  }
  return std::string(file.text());
}

}  // namespace weft
