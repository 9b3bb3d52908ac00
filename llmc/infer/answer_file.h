// The answers of a batch: one JSON object a line, appended as they come. A run that was ended or killed goes on with the file
// that it left.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>

#include "llmc/base/hash.h"
#include "llmc/base/json_fwd.h"

namespace weft {

class AnswerFile {
 public:
  // Opens or makes the file and locks it; "-" is stdout. Of a file that is there, a last line without its end, which a killed
  // run leaves, and answers with an error, which are to be tried again, are removed. A file with anything else in it than
  // answers is Exit::bad_file and stays as it is; one that another run writes, or that is a link, is Exit::environment.
  explicit AnswerFile(const std::string& path);
  ~AnswerFile();
  AnswerFile(const AnswerFile&) = delete;
  AnswerFile& operator=(const AnswerFile&) = delete;

  // What the member "request" of the answer to `id` says; empty if there is no answer. Answers that write() appends count,
  // but for those with an error.
  std::optional<std::string> answered(const Json& id) const;
  // Appends `answer`, which begins with the member "id", as one line: all of it or nothing. A full disk is Exit::resources.
  void write(const nlohmann::ordered_json& answer);
  // Makes what was written survive a power cut.
  void sync();

 private:
  void open();
  void read();
  void remember(const Json& answer, const std::string& where);

  const std::string path_;
  int fd_ = -1;  // stdout: -1
  std::int64_t found_ = 0;
  std::unordered_map<std::string, std::string, SeededHash> requests_;  // by the JSON text of the id
};

}  // namespace weft
