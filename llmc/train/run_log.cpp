#include "llmc/train/run_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"

namespace weft {

RunLog::RunLog(const std::string& path) : path_(path) {
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd_ < 0) {
    give_up("open");
    return;
  }
  const off_t size = ::lseek(fd_, 0, SEEK_END);
  char last = '\n';
  const bool unfinished = size > 0 && ::pread(fd_, &last, 1, size - 1) == 1 && last != '\n';
  if (unfinished && ::write(fd_, "\n", 1) != 1) give_up("write");
}

RunLog::~RunLog() {
  if (fd_ >= 0) ::close(fd_);
}

void RunLog::give_up(const char* action) {
  log_warning("%s: cannot %s: %s. Training goes on without a log", escaped(path_).c_str(), action,
              std::strerror(errno));
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void RunLog::write(Json record) {
  if (fd_ < 0) return;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  record["time"] = std::chrono::duration_cast<std::chrono::milliseconds>(now).count() / 1000.0;
  const std::string line = json_text(record) + "\n";
  // One write for the whole line: a reader never sees half of it, and a killed run loses at most the last.
  const ssize_t written = ::write(fd_, line.data(), line.size());
  if (written == static_cast<ssize_t>(line.size())) return;
  if (written >= 0) errno = ENOSPC;  // a short write to a file means that nothing more fits
  give_up("write");
}

}  // namespace weft
