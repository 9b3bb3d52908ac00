#include "llmc/base/file.h"

#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/log.h"

namespace weft {

namespace {

// AtomicFile::write asks the kernel to start writing to disk each time this many bytes have accumulated.
constexpr std::uint64_t kWritebackBytes = 16 << 20;

std::atomic<WriteFault> write_fault{nullptr};
std::atomic<CallFault> call_fault{nullptr};

[[noreturn]] void fail_writing(const std::string& path, const char* action) {
  const int error = errno;
  fail(is_full(error) ? Exit::resources : Exit::environment, "%s: cannot %s: %s", escaped(path).c_str(), action,
       std::strerror(error));
}

void write_at(int fd, const std::string& path, std::uint64_t offset, const void* data, std::size_t bytes) {
  const auto* cursor = static_cast<const char*>(data);
  while (bytes > 0) {
    std::size_t piece = bytes;
    if (const WriteFault fault = write_fault.load()) piece = fault(path, offset, bytes);
    const ssize_t written = ::pwrite(fd, cursor, piece, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail_writing(path, "write");
    cursor += written;
    offset += static_cast<std::uint64_t>(written);
    bytes -= static_cast<std::size_t>(written);
  }
}

// Starts writing to disk, so that the disk works while the rest is produced and fsync has less to wait for. Only a
// hint: its result does not matter.
void begin_writeback(int fd, std::uint64_t offset, std::uint64_t bytes) {
  ::sync_file_range(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes), SYNC_FILE_RANGE_WRITE);
}

}  // namespace

FileIdentity FileIdentity::of(const struct stat& info) {
  return {static_cast<std::uint64_t>(info.st_dev), static_cast<std::uint64_t>(info.st_ino),
          static_cast<std::uint64_t>(info.st_size),
          static_cast<std::int64_t>(info.st_mtim.tv_sec) * 1'000'000'000 + info.st_mtim.tv_nsec};
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // O_NONBLOCK: a FIFO must not hang us
  if (fd < 0) fail(Exit::bad_file, "%s: cannot open: %s", escaped(path).c_str(), std::strerror(errno));
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    fail(Exit::bad_file, "%s: %s", escaped(path).c_str(),
         S_ISDIR(info.st_mode) ? "this is a directory, not a regular file" : "not a regular file");
  }
  size_ = static_cast<std::uint64_t>(info.st_size);
  identity_ = FileIdentity::of(info);
  if (size_ > 0) {  // mmap refuses length 0
    void* address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    const int error = errno;
    ::close(fd);
    if (address == MAP_FAILED) {
      fail(error == ENOMEM ? Exit::resources : Exit::bad_file, "%s: cannot map %llu bytes: %s", escaped(path).c_str(),
           static_cast<unsigned long long>(size_), std::strerror(error));
    }
    data_ = static_cast<const std::byte*>(address);
  } else {
    ::close(fd);
  }
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
  std::swap(identity_, other.identity_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

bool MappedFile::unchanged() const {
  struct stat info {};
  return ::stat(path_.c_str(), &info) == 0 && FileIdentity::of(info) == identity_;
}

AtomicFile::AtomicFile(const std::string& path, std::uint64_t expected_bytes)
    : path_(path), temporary_(format("%s.tmp.%d", path.c_str(), static_cast<int>(::getpid()))) {
  // A file of this name was left by a process that died and had the same id, or it is a link that another user has put
  // into a shared directory. It is removed first, and O_EXCL makes sure that nothing is written through a link.
  ::unlink(temporary_.c_str());
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd_ < 0) fail_writing(path_, "create");
  if (expected_bytes > 0) {
    // Reserving the blocks reports a full disk now and not after minutes of writing. Some file systems do not support
    // it.
    int error = 0;
    do {
      error = ::posix_fallocate(fd_, 0, static_cast<off_t>(expected_bytes));
    } while (error == EINTR);
    if (error != 0 && error != EOPNOTSUPP && error != EINVAL) {
      ::close(fd_);
      ::unlink(temporary_.c_str());
      errno = error;
      fail_writing(path_, "reserve space");
    }
  }
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) {
    ::close(fd_);
    ::unlink(temporary_.c_str());
  }
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  rewrite(size_, data, bytes);
  size_ += bytes;
  if (size_ - writeback_end_ < kWritebackBytes) return;
  begin_writeback(fd_, writeback_end_, size_ - writeback_end_);
  writeback_end_ = size_;
}

void AtomicFile::rewrite(std::uint64_t offset, const void* data, std::size_t bytes) {
  write_at(fd_, path_, offset, data, bytes);
}

void AtomicFile::extend(std::uint64_t bytes) {
  if (::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) fail_writing(path_, "extend");
  size_ = bytes;
}

void AtomicFile::publish() {
  // Preallocation may have reserved more than was written.
  if (::ftruncate(fd_, static_cast<off_t>(size_)) != 0) fail_writing(path_, "truncate");
  if (!call_allowed("sync", path_) || ::fsync(fd_) != 0) fail_writing(path_, "sync");
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0) {
    ::unlink(temporary_.c_str());
    fail_writing(path_, "close");
  }
  if (!call_allowed("rename", temporary_) || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    errno = error;
    fail_writing(path_, "rename the finished file");
  }
  sync_directory(parent_directory(path_));
}

SharedFile::SharedFile(const std::string& path) : path_(path) {
  std::string problem;
  fd_ = open_own_file(path, O_WRONLY, problem);
  if (fd_ < 0) fail(Exit::environment, "%s: %s", escaped(path).c_str(), problem.c_str());
}

SharedFile::~SharedFile() {
  if (fd_ >= 0) ::close(fd_);
}

void SharedFile::write(std::uint64_t offset, const void* data, std::size_t bytes) {
  write_at(fd_, path_, offset, data, bytes);
  begin_writeback(fd_, offset, bytes);
}

void SharedFile::sync() {
  if (call_allowed("sync", path_) && ::fsync(fd_) == 0) return;
  fail_writing(path_, "sync");
}

int open_own_file(const std::string& path, int flags, std::string& problem, const std::string& advice) {
  const int fd = ::open(path.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0644);
  if (fd < 0) {
    problem = errno == ELOOP ? "is a symbolic link, and nothing is written through one. " + advice
                             : std::string("cannot open: ") + std::strerror(errno);
    return -1;
  }
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    problem = "is not a regular file. " + advice;
  } else if (info.st_nlink > 1) {
    problem =
        "has other names (hard links), and writing would change the file under each of them. Remove it, or put a "
        "copy in its place";
  } else {
    return fd;
  }
  ::close(fd);
  return -1;
}

bool is_file_at(int fd, const std::string& path) {
  struct stat open {};
  struct stat there {};
  return ::fstat(fd, &open) == 0 && ::stat(path.c_str(), &there) == 0 && open.st_dev == there.st_dev &&
         open.st_ino == there.st_ino;
}

bool is_full(int error) {
  return error == ENOSPC || error == EDQUOT || error == EFBIG;
}

int append_line(int fd, const std::string& path, std::string_view line) {
  const off_t before = ::lseek(fd, 0, SEEK_END);
  ssize_t written = ::write(fd, line.data(), line.size());
  while (written < 0 && errno == EINTR) written = ::write(fd, line.data(), line.size());
  if (written == static_cast<ssize_t>(line.size())) return 0;
  const int error = written < 0 ? errno : ENOSPC;  // a short write to a file means that nothing more fits
  if (written > 0 && ::ftruncate(fd, before) != 0) log_warning("%s ends in half a line", escaped(path).c_str());
  return error;
}

std::string read_text_file(const std::string& path, std::uint64_t max_bytes) {
  const MappedFile file(path);
  if (file.size() > max_bytes) {
    fail(Exit::bad_file, "%s: %llu bytes, at most %llu are accepted", escaped(path).c_str(),
         static_cast<unsigned long long>(file.size()), static_cast<unsigned long long>(max_bytes));
  }
  return std::string(file.text());
}

void write_file_atomically(const std::string& path, std::string_view content) {
  AtomicFile file(path, content.size());
  file.write(content);
  file.publish();
}

void sync_directory(const std::string& directory) {
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_writing(directory, "open the directory");
  const int result = call_allowed("sync", directory) ? ::fsync(fd) : -1;
  const int error = errno;
  ::close(fd);
  if (result != 0 && error != EINVAL) {  // EINVAL: this file system cannot sync directories
    errno = error;
    fail_writing(directory, "sync the directory");
  }
}

std::string parent_directory(const std::string& path) {
  const std::size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::vector<std::string> expand_glob(const std::string& pattern) {
  glob_t matches{};
  const int result = ::glob(pattern.c_str(), 0, nullptr, &matches);
  std::vector<std::string> paths;
  for (std::size_t i = 0; result == 0 && i < matches.gl_pathc; ++i) {
    struct stat info {};
    if (::stat(matches.gl_pathv[i], &info) == 0 && S_ISREG(info.st_mode)) paths.emplace_back(matches.gl_pathv[i]);
  }
  ::globfree(&matches);
  if (paths.empty()) {
    char directory[4096];
    const char* here = ::getcwd(directory, sizeof directory) != nullptr ? directory : "?";
    struct stat info {};
    const bool directory_given = ::stat(pattern.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
    fail(Exit::bad_file, "%s: no file matches this pattern in %s%s", escaped(pattern).c_str(), escaped(here).c_str(),
         directory_given ? ": it is a directory. Name the files in it, as in 'data/train_*.bin'" : "");
  }
  return paths;
}

void set_write_fault(WriteFault fault) {
  write_fault.store(fault);
}

bool write_fault_armed() {
  return write_fault.load() != nullptr;
}

void set_call_fault(CallFault fault) {
  call_fault.store(fault);
}

bool call_allowed(const char* call, const std::string& path) {
  const CallFault fault = call_fault.load();
  if (fault == nullptr || fault(call, path)) return true;
  errno = EIO;
  return false;
}

}  // namespace weft
