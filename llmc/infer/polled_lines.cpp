#include "llmc/infer/polled_lines.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/file.h"

namespace weft {

namespace {

constexpr std::size_t kPieceBytes = 1 << 16;

}  // namespace

PolledLines::PolledLines(const std::string& path, std::size_t limit) : path_(path), limit_(limit) {
  fd_ = path == "-" ? STDIN_FILENO : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const std::string name = path == "-" ? "standard input" : escaped(path);
  struct stat info {};
  if (fd_ < 0 || ::fstat(fd_, &info) != 0) {
    const int error = errno;
    close();
    fail(Exit::bad_file, "%s: cannot open: %s", name.c_str(), std::strerror(error));
  }
  if (S_ISDIR(info.st_mode)) {
    close();
    fail(Exit::bad_file, "%s: this is a directory, expected a file", name.c_str());
  }
  if (S_ISREG(info.st_mode)) size_ = static_cast<std::uint64_t>(info.st_size);
}

PolledLines::~PolledLines() {
  close();
}

bool PolledLines::reads(const std::string& path) const {
  struct stat info {};
  return is_file_at(fd_, path) && ::fstat(fd_, &info) == 0 && S_ISREG(info.st_mode);
}

void PolledLines::close() const {
  if (fd_ >= 0 && fd_ != STDIN_FILENO) ::close(fd_);
}

PolledLines::Result PolledLines::next(std::string& line, int wait_ms) {
  while (true) {
    const std::string_view rest = std::string_view(buffer_).substr(position_);
    const std::size_t newline = rest.find('\n');
    const std::string_view piece = rest.substr(0, newline);
    began_ = began_ || !rest.empty();
    too_long_ = too_long_ || line_.size() + piece.size() > limit_;
    if (!too_long_) line_ += piece;
    position_ += piece.size();
    if (newline != std::string_view::npos) {
      ++position_;
      return give(line);
    }
    if (end_) return began_ ? give(line) : Result::end;

    pollfd ready{fd_, POLLIN, 0};
    if (::poll(&ready, 1, wait_ms) <= 0) return Result::not_yet;  // nothing has come, or a signal
    buffer_.resize(kPieceBytes);
    position_ = 0;
    const ssize_t got = ::read(fd_, buffer_.data(), buffer_.size());
    buffer_.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return Result::not_yet;
    if (got < 0) {
      fail(Exit::bad_file, "%s: cannot read: %s", path_ == "-" ? "standard input" : escaped(path_).c_str(),
           std::strerror(errno));
    }
    read_ += buffer_.size();
    end_ = got == 0;
  }
}

PolledLines::Result PolledLines::give(std::string& line) {
  line = std::exchange(line_, {});
  began_ = false;
  if (!std::exchange(too_long_, false)) return Result::line;
  line.clear();
  return Result::too_long;
}

std::string PolledLines::progress() const {
  if (size_ == 0) return "";
  return format(", %.0f %% of the input read", 100.0 * static_cast<double>(read_) / static_cast<double>(size_));
}

}  // namespace weft
