// The JSON of answers that all APIs for text have in common: the object around the choices, events of a stream, usage, errors.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/serve/answer_choice.h"

namespace weft {

// What all choices and all events of one answer have in common.
struct AnswerHead {
  std::string id;
  std::int64_t created = 0;  // Unix time, seconds
  std::string model;
  std::string_view object = "text_completion";        // of the whole answer
  std::string_view event_object = "text_completion";  // of an event of a stream
  bool usage_follows = false;                         // in the last event of a stream: all others say "usage":null
  bool prompt_details = false;                        // usage says how many tokens of the prompts were cached
};
// With the id of the request behind `prefix`, and the time.
AnswerHead answer_head(std::string_view prefix, const std::string& request_id, const std::string& model);

struct AnswerUsage {
  std::int64_t prompt_tokens = 0;      // each prompt once, however many choices it has
  std::int64_t completion_tokens = 0;  // of all choices
  std::int64_t cached_tokens = 0;      // of the prompts: found in the prefix cache by the first choice of each
};

// The whole answer, of choices that are finished.
std::string answer_body(const AnswerHead& head, const std::vector<std::unique_ptr<AnswerChoice>>& choices,
                        const AnswerUsage& usage);
// Events of a stream, each "data: ...\n\n". `usage`, unless null: so far.
std::string answer_event(const AnswerHead& head, const std::string& choice, const AnswerUsage* usage = nullptr);
std::string usage_event(const AnswerHead& head, const AnswerUsage& usage);
inline constexpr const char* kLastEvent = "data: [DONE]\n\n";

// {"error": {"message", "type", "param", "code"}}: the type follows from the status. Empty texts are null.
std::string error_body(int status, const std::string& message, const std::string& param = "",
                       const std::string& code = "");
std::string error_event(int status, const std::string& message);

}  // namespace weft
