#include "llmc/infer/answer_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/options.h"

namespace weft {

namespace {

constexpr std::string_view kBeginning = "{\"id\":";

bool is_error(const Json& answer) {
  return answer["finish_reason"] == "error";
}

// Whether `line`, the last one and without its end, can be the beginning of an answer, as a killed run leaves it.
bool is_torn_answer(std::string_view line) {
  return line.starts_with(kBeginning) || kBeginning.starts_with(line);
}

[[noreturn]] void refuse(const std::string& where, const std::string& problem) {
  fail(Exit::bad_file, "%s: %s. Is this the --output of a batch? Choose another name, or remove the file",
       where.c_str(), problem.c_str());
}

}  // namespace

AnswerFile::AnswerFile(const std::string& path) : path_(path) {
  if (path == "-") return;
  try {
    do {
      replace_descriptor(open_locked(path_));
    } while (!is_at_path());  // another run has put a new file in the place of the one that is locked now
    read();
  } catch (...) {
    if (fd_ >= 0) ::close(fd_);
    throw;
  }
}

AnswerFile::~AnswerFile() {
  if (fd_ >= 0) ::close(fd_);
}

int AnswerFile::open_locked(const std::string& path) const {
  std::string problem;
  const int fd = open_own_file(path, O_RDWR | O_CREAT | O_APPEND, problem);
  const std::string name = escaped(path_);
  if (fd < 0) fail(Exit::environment, "--output: %s %s", name.c_str(), problem.c_str());
  if (call_allowed("lock", path) && ::flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
  const int error = errno;
  if (error == EWOULDBLOCK) {
    ::close(fd);
    fail(Exit::environment, "--output: another run writes %s. Stop it or choose another name", name.c_str());
  }
  log_warning("%s: cannot lock: %s. A second run that writes it would go unnoticed", name.c_str(),
              std::strerror(error));
  return fd;
}

void AnswerFile::replace_descriptor(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

bool AnswerFile::is_at_path() const {
  struct stat ours {};
  struct stat there {};
  return ::fstat(fd_, &ours) == 0 && ::stat(path_.c_str(), &there) == 0 && ours.st_dev == there.st_dev &&
         ours.st_ino == there.st_ino;
}

// The new file is locked before it takes the name, and the old one until then: no other run comes in between.
void AnswerFile::write_anew(std::string_view content) {
  AtomicFile file(path_, content.size());
  file.write(content);
  const int fd = open_locked(file.temporary());
  try {
    file.publish();
  } catch (...) {
    ::close(fd);
    throw;
  }
  replace_descriptor(fd);
}

void AnswerFile::read() {
  const MappedFile file(path_);
  std::string_view rest = file.text();
  std::string kept;  // only if something is removed
  std::int64_t errors = 0;
  bool torn = false;
  std::size_t line_number = 0;
  while (!rest.empty()) {
    const std::string where = escaped(path_) + format(": line %zu", ++line_number);
    const std::size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    if (end == std::string_view::npos) {
      if (!is_torn_answer(line)) refuse(where, "not an answer");
      torn = true;
      break;
    }
    const Json answer = parse_json(line, where);
    if (!answer.is_object() || !answer.contains("id") || !answer.contains("finish_reason")) {
      refuse(where, "not an answer");
    }
    if (is_error(answer)) {
      if (errors++ == 0) kept.assign(file.text().substr(0, file.text().size() - rest.size()));
    } else {
      remember(answer, where);
      if (errors > 0) kept.append(line).append("\n");
      ++found_;
    }
    rest.remove_prefix(end + 1);
  }
  if (errors > 0) {
    log_info("%s: %lld answers with an error are removed and tried again", escaped(path_).c_str(),
             static_cast<long long>(errors));
    write_anew(kept);
  } else if (torn && ::ftruncate(fd_, static_cast<off_t>(file.size() - rest.size())) != 0) {
    fail(Exit::environment, "%s: cannot truncate: %s", escaped(path_).c_str(), std::strerror(errno));
  }
  if (found_ > 0) log_info("%s has %lld answers", escaped(path_).c_str(), static_cast<long long>(found_));
  if (torn) log_info("%s: line %zu was not written to its end and is removed", escaped(path_).c_str(), line_number);
}

void AnswerFile::remember(const Json& answer, const std::string& where) {
  const bool added = requests_.emplace(json_text(answer["id"]), json_string(answer, "request", where)).second;
  if (!added) refuse(where, "a second answer to id " + escaped(json_text(answer["id"])));
}

std::optional<std::string> AnswerFile::answered(const Json& id) const {
  const auto found = requests_.find(json_text(id));
  if (found == requests_.end()) return std::nullopt;
  return found->second;
}

void AnswerFile::write(const nlohmann::ordered_json& answer) {
  const std::string line = answer.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  if (path_ == "-") return write_stdout(line);
  if (const int error = append_line(fd_, path_, line); error != 0) {
    fail(is_full(error) ? Exit::resources : Exit::environment, "%s: cannot write: %s. Run again to go on from here",
         escaped(path_).c_str(), std::strerror(error));
  }
}

void AnswerFile::sync() {
  if (fd_ >= 0 && ::fsync(fd_) != 0) {
    fail(Exit::environment, "%s: cannot sync: %s", escaped(path_).c_str(), std::strerror(errno));
  }
}

}  // namespace weft
