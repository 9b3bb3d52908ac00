// Checked file input and output: read-only maps, and files that appear under their name only when they are
// complete.
//
// Every error names the path, what was attempted and errno's text. Reading problems are Exit::bad_file, a
// full disk or quota is Exit::resources, anything else while writing is Exit::environment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

// A whole file mapped read-only. Only regular files are accepted. Movable, not copyable.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::string& path() const { return path_; }
  const std::byte* data() const { return data_; }
  std::uint64_t size() const { return size_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

  // True while the file under path() still is the one that was mapped: same inode, size and modification
  // time.
  bool unchanged() const;

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
  std::uint64_t inode_ = 0;
  std::int64_t modified_ns_ = 0;
};

// Writes "<path>.tmp.<pid>", and publish() gives it its name: preallocate -> write -> fsync -> rename ->
// fsync directory. Destroyed before publish(): the temporary file is removed and whatever stood at `path` is
// untouched.
class AtomicFile {
 public:
  // `expected_bytes` is reserved on disk first, so that a full disk is found before anything is written; 0:
  // unknown.
  explicit AtomicFile(const std::string& path, std::uint64_t expected_bytes = 0);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::size_t bytes);  // appends
  void write(std::string_view text) { write(text.data(), text.size()); }
  void rewrite(std::uint64_t offset, const void* data, std::size_t bytes);  // replaces bytes already written
  std::uint64_t size() const { return size_; }
  void publish();

 private:
  std::string path_;
  std::string temporary_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
  std::uint64_t on_its_way_ = 0;  // of them, those that the disk was asked to take
};

// Opens a file that a run appends to or locks, under a name that somebody else may have taken before: `flags` as for
// open(2), new files have mode 0644. Never follows a symbolic link, never waits for the other end of a FIFO, and accepts
// only a regular file that has no second name (hard link). Otherwise -1, and `problem` says why and what to do.
int open_own_file(const std::string& path, int flags, std::string& problem);

// The whole text file; larger than `max_bytes` is Exit::bad_file.
std::string read_text_file(const std::string& path, std::uint64_t max_bytes);

// AtomicFile in one call.
void write_file_atomically(const std::string& path, std::string_view content);

// fsync of a directory: makes renames and removals in it survive a power cut.
void sync_directory(const std::string& directory);

// The directory part of a path: "." where there is none.
std::string parent_directory(const std::string& path);

// The regular files that match a shell pattern, in lexicographic order. None: Exit::bad_file with the pattern
// and the working directory.
std::vector<std::string> expand_glob(const std::string& pattern);

// Fault hooks of --debug-inject; null (the default) means no fault. They run on the thread that writes.
//
// Before each write of an AtomicFile of `bytes` bytes at `offset`. Returns how many of them may be written before the
// hook is asked again: fewer tear a write at an exact byte. May throw, or not return.
using WriteFault = std::size_t (*)(const std::string& path, std::uint64_t offset, std::size_t bytes);
void set_write_fault(WriteFault fault);
// A fault counts the bytes of a save: with one armed its files are written one after the other.
bool write_fault_armed();
// Before each sync, rename and removal that a save consists of. False: the call fails with EIO. May not return.
using CallFault = bool (*)(const char* call, const std::string& path);
void set_call_fault(CallFault fault);
// Asks that hook; false with errno = EIO where the call is to fail.
bool call_allowed(const char* call, const std::string& path);

}  // namespace weft
