#include "llmc/infer/answer_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
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

// What is read of an answer: three members, whatever else it holds. An answer with scores may have millions of values,
// of which none is kept.
class AnswerMembers : public nlohmann::json_sax<Json> {
 public:
  std::string id;  // as JSON
  std::optional<std::string> finish_reason, request;
  std::string problem;  // of the JSON

  bool null() override { return take(nullptr); }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t number) override { return take(number); }
  bool number_unsigned(number_unsigned_t number) override { return take(number); }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t& text) override { return take(text); }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return ++depth_ > 0; }
  bool start_array(std::size_t) override { return ++depth_ > 0; }
  bool end_object() override { return --depth_ >= 0; }
  bool end_array() override { return --depth_ >= 0; }
  bool key(string_t& key) override {
    key_ = key;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception& error) override {
    problem = error.what();
    return false;
  }

 private:
  // Nothing is made of what is inside of a member.
  template <typename Value>
  bool take(const Value& value) {
    if (depth_ == 1) keep(value);
    return true;
  }
  void keep(const Json& value) {
    if (key_ == "id") id = json_text(value);
    if (key_ == "finish_reason" && value.is_string()) finish_reason = value.get<std::string>();
    if (key_ == "request" && value.is_string()) request = value.get<std::string>();
  }

  int depth_ = 0;
  std::string key_;  // of the value that comes next
};

// Whether `rest`, which follows the id, can be that of an answer, or the beginning of one. Batch::write_answers() and
// Batch::refuse() know these members.
bool may_follow_an_id(std::string_view rest) {
  for (const std::string_view member : {R"(,"prompt_ids":[)", R"(,"line":)"}) {
    if (rest.starts_with(member) || member.starts_with(rest)) return true;
  }
  return false;
}

// Whether `line`, the last one and without its end, can be the beginning of an answer, as a killed run leaves it. A whole
// object without finish_reason is something else: a request, for example.
bool is_torn_answer(std::string_view line) {
  constexpr std::string_view kBeginning = "{\"id\":";
  if (kBeginning.starts_with(line)) return true;
  if (!line.starts_with(kBeginning)) return false;
  AnswerMembers members;
  if (Json::sax_parse(line, &members)) return members.finish_reason.has_value();
  std::size_t end = kBeginning.size();
  if (line.substr(end).starts_with('"')) {
    for (++end; end < line.size() && line[end] != '"'; ++end) {
      if (line[end] == '\\') ++end;
    }
    ++end;
  } else if (line.substr(end).starts_with("null")) {
    end += 4;
  } else {
    if (std::string_view("null").starts_with(line.substr(end))) return true;
    end = std::min(line.find_first_not_of("-0123456789", end), line.size());
  }
  return end >= line.size() || may_follow_an_id(line.substr(end));
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
    } while (!is_file_at(fd_, path_));  // another run has put a new file in the place of the one that is locked now
    read();
    struct stat info {};
    if (::fstat(fd_, &info) == 0) size_ = info.st_size;
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
  const int fd = open_own_file(path, O_RDWR | O_CREAT | O_APPEND, problem, "Choose another name, or - for stdout");
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

// The new file is locked before it takes the name, and the old one until then: no other run comes in between.
void AnswerFile::write_anew(std::string_view content) {
  AtomicFile file(path_, content.size());
  file.write(content);
  const int fd = open_locked(file.temporary());
  try {
    struct stat old {};
    if (::fstat(fd_, &old) == 0) ::fchmod(fd, old.st_mode & 07777);
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
    AnswerMembers answer;
    Json::sax_parse(line, &answer);
    if (!answer.problem.empty()) refuse(where, "not valid JSON: " + escaped(answer.problem, 200));
    if (answer.id.empty() || !answer.finish_reason) refuse(where, "not an answer");
    if (answer.finish_reason == "error") {
      if (errors++ == 0) kept.assign(file.text().substr(0, file.text().size() - rest.size()));
    } else {
      if (!answer.request) refuse(where, "not an answer: request: missing");
      remember(answer.id, *answer.request, where);
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

void AnswerFile::remember(const std::string& id, const std::string& request, const std::string& where) {
  if (!requests_.emplace(id, request).second) refuse(where, "a second answer to id " + escaped(id));
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
  size_ += std::ssize(line);
  check_is_there();
}

// Otherwise a run could end well whose answers nobody finds.
void AnswerFile::check_is_there() const {
  struct stat info {};
  const std::string name = escaped(path_);
  if (!is_file_at(fd_, path_) || ::fstat(fd_, &info) != 0) {
    fail(Exit::environment,
         "--output: %s was removed, renamed or replaced while the batch ran. What was answered went with it. Put it "
         "back "
         "if it has another name now, and run again",
         name.c_str());
  }
  if (info.st_size == size_) return;
  fail(
      Exit::environment,
      "--output: %s has %lld bytes, expected %lld: another process has changed it while the batch ran. Look at what it "
      "holds, and run again",
      name.c_str(), static_cast<long long>(info.st_size), static_cast<long long>(size_));
}

void AnswerFile::sync() {
  if (fd_ < 0) return;
  if (::fsync(fd_) != 0) {
    fail(Exit::environment, "%s: cannot sync: %s", escaped(path_).c_str(), std::strerror(errno));
  }
  check_is_there();
}

}  // namespace weft
