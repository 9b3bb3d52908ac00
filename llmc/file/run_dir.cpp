#include "llmc/file/run_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/log.h"

namespace weft {

namespace fs = std::filesystem;

namespace {

constexpr const char* kLockName = "lock";
constexpr const char* kStepPrefix = "step_";
constexpr const char* kTemporarySuffix = ".tmp";
constexpr const char* kReplacedSuffix = ".replaced";  // then .tmp: the old checkpoint while a new one takes its name

std::string step_name(std::int64_t step) {
  return format("step_%08lld", static_cast<long long>(step));
}

bool all_digits(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
}

// The step that `name` stands for, -1 if it is not a name that weft writes.
std::int64_t step_of(const std::string& name) {
  if (!name.starts_with(kStepPrefix)) return -1;
  const std::string digits = name.substr(std::strlen(kStepPrefix));
  if (!all_digits(digits) || digits.size() > 15) return -1;
  const std::int64_t step = std::stoll(digits);
  return step_name(step) == name ? step : -1;
}

// step_00000100.tmp or step_00000100.replaced.tmp: the names that begin_checkpoint() and commit_checkpoint() make.
bool is_name_of_a_leftover(std::string name) {
  if (!name.ends_with(kTemporarySuffix)) return false;
  name.resize(name.size() - std::strlen(kTemporarySuffix));
  if (name.ends_with(kReplacedSuffix)) name.resize(name.size() - std::strlen(kReplacedSuffix));
  return step_of(name) >= 0;
}

[[noreturn]] void fail_at(Exit code, const std::string& path, const char* action, int error) {
  fail(is_full(error) ? Exit::resources : code, "%s: cannot %s: %s", escaped(path).c_str(), action,
       std::strerror(error));
}

void rename_or_fail(const std::string& from, const std::string& to) {
  if (!call_allowed("rename", from) || ::rename(from.c_str(), to.c_str()) != 0) {
    fail_at(Exit::environment, from, "rename", errno);
  }
}

// False for a symbolic link to a directory.
bool is_real_directory(const std::string& path) {
  std::error_code error;
  return fs::symlink_status(path, error).type() == fs::file_type::directory;
}

constexpr const char* kFilesOfASave[] = {"model.bin", "adapter.bin", "state.bin", "manifest.json"};

// Whether an error of open() or stat() says something of what has the name (ENXIO: a socket), and not of the system.
bool is_of_the_name(int error) {
  return error == ENOENT || error == ENOTDIR || error == ELOOP || error == ENAMETOOLONG || error == ENXIO;
}

// A file of a checkpoint, or the temporary name under which AtomicFile writes it.
bool is_name_of_a_save(const std::string& name) {
  for (const std::string file : kFilesOfASave) {
    if (name == file) return true;
    const std::string temporary = file + kTemporarySuffix + ".";
    if (name.starts_with(temporary) && all_digits(name.substr(temporary.size()))) return true;
  }
  return false;
}

// Removes the files of a save, then the directory if nothing else is left in it. Does nothing if `path` is not a directory.
std::error_code remove_save(const std::string& path) {
  std::error_code error;
  if (!is_real_directory(path)) return error;
  std::vector<fs::path> files;
  for (fs::directory_iterator entry(path, error); !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (is_name_of_a_save(entry->path().filename().string())) files.push_back(entry->path());
  }
  for (const fs::path& file : files) {
    if (!error && ::unlink(file.c_str()) != 0) error.assign(errno, std::generic_category());
  }
  if (!error && ::rmdir(path.c_str()) != 0) error.assign(errno, std::generic_category());
  return error;
}

// For a directory that is no longer a checkpoint: failing to remove it costs only disk space, so it is a warning.
void remove_or_warn(const std::string& path) {
  std::error_code error;
  if (call_allowed("remove", path)) {
    error = remove_save(path);
  } else {
    error.assign(errno, std::generic_category());
  }
  if (error == std::errc::directory_not_empty) {
    log_warning("%s: stays, because it holds something that no save has written", escaped(path).c_str());
  } else if (error) {
    log_warning("%s: cannot remove: %s", escaped(path).c_str(), error.message().c_str());
  }
}

std::vector<fs::directory_entry> entries_of(const std::string& path) {
  std::error_code error;
  std::vector<fs::directory_entry> entries;
  fs::directory_iterator entry(path, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) entries.push_back(*entry);
  if (error) fail_at(Exit::environment, path, "read the run directory", error.value());
  return entries;
}

void make_directories(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) fail_at(Exit::usage, path, "create the run directory (--out)", error.value());
  if (!fs::is_directory(path, error)) fail_at(Exit::usage, path, "use as run directory (--out)", ENOTDIR);
}

std::string this_process() {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return format("pid %d on %s", static_cast<int>(::getpid()), host);
}

std::string lock_owner(int fd) {
  char text[512];
  const ssize_t length = ::pread(fd, text, sizeof text, 0);
  std::string owner(text, length > 0 ? static_cast<std::size_t>(length) : 0);
  while (!owner.empty() && owner.back() == '\n') owner.pop_back();
  return owner;
}

// The owner of a lock that another process has. Who has just taken it may not have written its name yet.
std::string owner_of_taken_lock(int fd) {
  std::string owner = lock_owner(fd);
  for (int i = 0; owner.empty() && i < 50; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    owner = lock_owner(fd);
  }
  return owner.empty() ? "a process without a name" : owner;
}

}  // namespace

RunDirectory::RunDirectory(const std::string& path) : path_(path) {
  make_directories(path_);
  for (const fs::directory_entry& entry : entries_of(path_)) {
    was_empty_ = was_empty_ && entry.path().filename() == kLockName;
  }
  take_lock();
}

RunDirectory::~RunDirectory() {
  if (lock_ < 0) return;
  // Emptied, not removed: another run may have opened this file already. It would lock a file without a name, while a
  // third run creates a new one and locks that.
  [[maybe_unused]] const int ignored = ::ftruncate(lock_, 0);
  ::close(lock_);
}

// The lock is the kernel's (flock): it is released when the process ends, however it ends. The text in the file only names
// the owner in messages.
void RunDirectory::take_lock() {
  const std::string name = file(kLockName);
  std::string problem;
  lock_ = open_own_file(name, O_RDWR | O_CREAT, problem);
  if (lock_ < 0) fail(Exit::usage, "--out: %s: %s", escaped(name, 4096).c_str(), problem.c_str());
  const bool taken = ::flock(lock_, LOCK_EX | LOCK_NB) == 0;
  const int error = errno;
  if (!taken && error == EWOULDBLOCK) {
    const std::string owner = owner_of_taken_lock(lock_);
    ::close(lock_);
    fail(Exit::environment, "%s: another run works here: %s. Stop it or choose another --out", escaped(path_).c_str(),
         escaped(owner).c_str());
  }
  if (!taken)
    log_warning("%s: cannot lock: %s. A second run here would go unnoticed", escaped(path_).c_str(),
                std::strerror(error));
  const std::string owner = lock_owner(lock_);
  if (taken && !owner.empty()) {
    log_info("%s: the run of %s ended without cleaning up, its lock is taken over", escaped(path_).c_str(),
             escaped(owner).c_str());
  }
  const std::string text = this_process() + "\n";
  const bool written =
      ::ftruncate(lock_, 0) == 0 && ::pwrite(lock_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size());
  if (!written) log_warning("%s: cannot write: %s", escaped(name).c_str(), std::strerror(errno));
}

void RunDirectory::remove_leftovers() const {
  for (const fs::directory_entry& entry : entries_of(path_)) {
    const std::string name = entry.path().filename().string();
    if (!is_name_of_a_leftover(name) || !is_real_directory(entry.path().string())) continue;
    log_info("%s: removing %s, left by an interrupted save", escaped(path_).c_str(), escaped(name).c_str());
    remove_or_warn(entry.path().string());
  }
}

std::vector<RunDirectory::Entry> RunDirectory::checkpoints_in(const std::string& path) {
  std::vector<Entry> entries;
  for (const fs::directory_entry& found : entries_of(path)) {
    Entry entry;
    entry.name = found.path().filename().string();
    if (!entry.name.starts_with(kStepPrefix) || entry.name.ends_with(kTemporarySuffix)) continue;
    entry.step = step_of(entry.name);
    std::error_code error;
    if (entry.step < 0) {
      entry.problem = "not the name of a checkpoint";
    } else if (!fs::is_directory(found.path(), error)) {  // follows links: a loop is an error
      if (error && !is_of_the_name(error.value())) fail_at(Exit::environment, found.path(), "read", error.value());
      entry.problem = error ? error.message() : "not a directory";
    }
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.step != b.step ? a.step > b.step : a.name < b.name; });
  return entries;
}

void RunDirectory::require_access(const Entry& entry) const {
  for (const char* name : kFilesOfASave) {
    const std::string path = file(entry.name) + "/" + name;
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const int error = errno;
    if (fd >= 0) {
      ::close(fd);
    } else if (!is_of_the_name(error)) {
      fail_at(Exit::environment, path, "open", error);
    }
  }
}

std::string RunDirectory::checkpoint_path(std::int64_t step) const {
  return file(step_name(step));
}

std::string RunDirectory::begin_checkpoint(std::int64_t step) const {
  const std::string temporary = checkpoint_path(step) + kTemporarySuffix;
  remove_save(temporary);
  if (::mkdir(temporary.c_str(), 0755) != 0) fail_at(Exit::environment, temporary, "create", errno);
  return temporary;
}

void RunDirectory::commit_checkpoint(std::int64_t step) const {
  const std::string target = checkpoint_path(step), temporary = target + kTemporarySuffix;
  sync_directory(temporary);
  const std::string replaced = target + kReplacedSuffix + kTemporarySuffix;
  std::error_code error;
  const fs::file_type type = fs::symlink_status(target, error).type();
  if (type == fs::file_type::none) fail_at(Exit::environment, target, "replace", error.value());
  const bool exists = type != fs::file_type::not_found;
  if (exists && !is_real_directory(target)) fail_at(Exit::environment, target, "replace", ENOTDIR);
  if (exists) remove_save(replaced);
  if (exists) rename_or_fail(target, replaced);  // rename() does not replace a directory that holds files
  try {
    rename_or_fail(temporary, target);
  } catch (const Error&) {
    if (exists) ::rename(replaced.c_str(), target.c_str());
    throw;
  }
  sync_directory(path_);
  if (exists) remove_or_warn(replaced);
}

void RunDirectory::discard_checkpoint(std::int64_t step) const noexcept {
  try {
    remove_save(checkpoint_path(step) + kTemporarySuffix);
  } catch (const std::exception&) {  // out of memory for the path; the next start removes the directory
  }
}

void RunDirectory::remove_checkpoint(std::int64_t step) const {
  const std::string target = checkpoint_path(step), temporary = target + kTemporarySuffix;
  if (!is_real_directory(target)) return;
  remove_save(temporary);
  rename_or_fail(target, temporary);
  sync_directory(path_);
  remove_or_warn(temporary);
}

}  // namespace weft
