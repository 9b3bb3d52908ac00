// Reads lines from a file, a pipe or stdin without waiting for them: other work goes on until a line has come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace weft {

class PolledLines {
 public:
  // "-" is stdin. `limit`: bytes of a line. A file that cannot be opened is Exit::bad_file.
  PolledLines(const std::string& path, std::size_t limit);
  ~PolledLines();
  PolledLines(const PolledLines&) = delete;
  PolledLines& operator=(const PolledLines&) = delete;

  enum class Result { line, too_long, not_yet, end };
  // The next line, without its newline, if it comes within `wait_ms`. too_long: the line was read to its end and discarded.
  // A signal ends the wait. Exit::bad_file if reading fails.
  Result next(std::string& line, int wait_ms);
  // Whether the lines come from the regular file `path`.
  bool reads(const std::string& path) const;
  // ", 41 % of the input read", or nothing where the size is not known.
  std::string progress() const;

 private:
  void close() const;
  Result give(std::string& line);

  const std::string path_;
  const std::size_t limit_;
  int fd_ = -1;
  std::uint64_t size_ = 0, read_ = 0;  // of a regular file: its bytes, and those read
  std::string buffer_;                 // of the last read
  std::size_t position_ = 0;           // in buffer_: everything before it has been handed out
  std::string line_;                   // the beginning of the next line
  bool began_ = false, too_long_ = false, end_ = false;
};

}  // namespace weft
