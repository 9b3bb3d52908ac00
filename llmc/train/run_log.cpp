#include "llmc/train/run_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/train/fault_injection.h"

namespace weft {

RunLog::RunLog(const std::string& path) : path_(path) {
  std::string problem;
  fd_ = open_own_file(path, O_RDWR | O_CREAT | O_APPEND, problem);
  if (fd_ < 0) {
    give_up(problem);
    return;
  }
  const off_t size = ::lseek(fd_, 0, SEEK_END);
  char last = '\n';
  const bool unfinished = size > 0 && ::pread(fd_, &last, 1, size - 1) == 1 && last != '\n';
  if (unfinished) end_after(append_line(fd_, path_, "\n"));
}

RunLog::~RunLog() {
  if (fd_ >= 0) ::close(fd_);
}

void RunLog::give_up(const std::string& problem) {
  log_warning("%s: %s. Training goes on without a log", escaped(path_).c_str(), problem.c_str());
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void RunLog::write(Json record) {
  if (fd_ < 0) return;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  record["time"] = std::chrono::duration_cast<std::chrono::milliseconds>(now).count() / 1000.0;
  end_after(log_record_allowed() ? append_line(fd_, path_, json_text(record) + "\n") : ENOSPC);
}

void RunLog::end_after(int error) {
  if (error != 0) give_up(std::string("cannot write: ") + std::strerror(error));
}

}  // namespace weft
