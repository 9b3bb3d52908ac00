// Checked file input and output: files mapped read-only, and files that appear under their name only when they are
// complete and on disk.
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

struct stat;  // <sys/stat.h>

namespace weft {

// Identifies a file and its content: two with the same identity are the same file with the same content, as far as the
// file system says. Inode numbers are unique within one file system only, so its device number belongs to them.
struct FileIdentity {
  std::uint64_t device = 0, inode = 0, size = 0;
  std::int64_t modified_ns = 0;

  static FileIdentity of(const struct stat& info);
  bool operator==(const FileIdentity&) const = default;
};

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

  // True if the file at path() is still the one that was mapped: the same FileIdentity.
  bool unchanged() const;

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
  FileIdentity identity_;
};

// Writes to "<path>.tmp.<pid>", which publish() renames to `path`: preallocate -> write -> fsync -> rename -> fsync of
// the directory. If it is destroyed before publish(), the temporary file is removed and what is at `path` stays as it
// was.
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
  // Sets the size of the file to `bytes`, with zeros where nothing was written.
  void extend(std::uint64_t bytes);
  // The name that the file has until publish().
  const std::string& temporary() const { return temporary_; }
  void publish();

 private:
  std::string path_;
  std::string temporary_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
  std::uint64_t writeback_end_ = 0;  // the kernel was asked to start writing the bytes before this offset to disk
};

// A file that somebody else has made, with AtomicFile, and that several processes write, each its own bytes.
class SharedFile {
 public:
  // Exit::environment if there is no such file, or if it is no regular file of one name (open_own_file()).
  explicit SharedFile(const std::string& path);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  void write(std::uint64_t offset, const void* data, std::size_t bytes);  // by any number of threads
  void sync();                                                            // what this process has written is on disk

 private:
  std::string path_;
  int fd_ = -1;
};

// Opens a file that a run appends to or locks, where another user may have put something of the same name. `flags` as
// for open(2); a new file gets mode 0644. Does not follow a symbolic link, does not wait for the other end of a FIFO,
// and accepts only a regular file without a second name (hard link). Otherwise returns -1; `problem` says why and what
// to do: `advice` about something that is no regular file.
int open_own_file(const std::string& path, int flags, std::string& problem, const std::string& advice = "Remove it");

// Whether an error of a write (errno) means that nothing more fits: a full disk, a quota, a limit of the file's size.
bool is_full(int error);

// Appends `line`, with its end, to a file that is open with O_APPEND, in one write: a reader sees all of it or nothing.
// Returns 0, or errno; what was written of the line is removed again then. `path` is for the warning where that fails.
int append_line(int fd, const std::string& path, std::string_view line);

// The whole text file; larger than `max_bytes` is Exit::bad_file.
std::string read_text_file(const std::string& path, std::uint64_t max_bytes);

// AtomicFile in one call.
void write_file_atomically(const std::string& path, std::string_view content);

// Whether `path` is, now, a name of the open file.
bool is_file_at(int fd, const std::string& path);

// fsync of a directory: makes renames and removals in it survive a power cut.
void sync_directory(const std::string& directory);

// The directory part of a path: "." where there is none.
std::string parent_directory(const std::string& path);

// The regular files that match a shell pattern, in lexicographic order. None: Exit::bad_file with the pattern
// and the working directory.
std::vector<std::string> expand_glob(const std::string& pattern);

// Fault hooks of --debug-inject; null (the default) means no fault. They run on the thread that writes.
//
// Called before an AtomicFile or a SharedFile writes `bytes` bytes at `offset`. Returns how many of them to write before the hook is
// called again: a smaller number splits a write, so that a fault can happen at an exact byte. May throw, or not return.
using WriteFault = std::size_t (*)(const std::string& path, std::uint64_t offset, std::size_t bytes);
void set_write_fault(WriteFault fault);
// True if a write fault is set. It counts the bytes of a save, so the save writes its files one after the other then.
bool write_fault_armed();
// Called before each sync, rename and removal of a save, and before an answer file is locked. Returns false to make the
// call fail with EIO. May not return.
using CallFault = bool (*)(const char* call, const std::string& path);
void set_call_fault(CallFault fault);
// Asks the call hook, if one is set: false, with errno = EIO, if the call has to fail.
bool call_allowed(const char* call, const std::string& path);

}  // namespace weft
