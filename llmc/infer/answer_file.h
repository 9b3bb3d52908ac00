// The answers of a batch: one JSON object a line, appended as they come. A run that was stopped or killed continues
// with the file that it left.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "llmc/base/hash.h"
#include "llmc/base/json_fwd.h"

namespace weft {

class AnswerFile {
 public:
  // Opens or creates the file and locks it; "-" is stdout. From an existing file it removes an unfinished last
  // line, which a killed run leaves, and answers with an error, so that their requests are tried again; its mode
  // stays. A file that holds anything but answers is Exit::bad_file and is not changed; one that another run has
  // locked, or that is a link, is Exit::environment.
  explicit AnswerFile(const std::string& path);
  ~AnswerFile();
  AnswerFile(const AnswerFile&) = delete;
  AnswerFile& operator=(const AnswerFile&) = delete;

  // The member "request" of the answer to `id` that the file had when it was opened; nothing if it had none.
  std::optional<std::string> answered(const Json& id) const;
  // Appends `answer`, which begins with the member "id", as one line: all of it or nothing. A full disk is Exit::resources.
  // A file that is not at its path any more, or that another process has changed, is Exit::environment.
  void write(const nlohmann::ordered_json& answer);
  // Makes what was written survive a power cut, and checks as write() does that it is there.
  void sync();

 private:
  // Opens `path`, which is path_ or the file that is to take its place, and locks it.
  int open_locked(const std::string& path) const;
  void replace_descriptor(int fd);
  void read();
  void write_anew(std::string_view content);
  void check_is_there() const;
  void remember(const std::string& id, const std::string& request, const std::string& where);

  const std::string path_;
  int fd_ = -1;  // stdout: -1
  std::int64_t found_ = 0;
  std::int64_t size_ = 0;                                              // bytes that were found or written
  std::unordered_map<std::string, std::string, SeededHash> requests_;  // by the JSON text of the id
};

}  // namespace weft
