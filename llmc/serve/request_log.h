// The line of one request in the log (--log-requests). It holds no text of prompts and answers, and no key.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "llmc/infer/completion.h"
#include "llmc/serve/http.h"

namespace weft {

// When the tokens of one completion came.
struct TokenTimes {
  std::optional<double> first_seconds;  // from the arrival of the request to the first token; none: there is no token
  double later_seconds = 0;             // from the first token to the last
  std::int64_t later_tokens = 0;        // after the first
};

// What was computed for a request.
struct RequestFigures {
  std::int64_t prompt_tokens = 0, cached_tokens = 0;  // as AnswerUsage has them
  std::int64_t completion_tokens = 0;                 // of all choices, sent or not
  TokenTimes times;                                   // the first token of any choice; the later ones of all choices
  std::vector<std::string> finish;                    // finish_reason_name() of all choices, each once

  void add(FinishedBy reason, std::int64_t tokens, const TokenTimes& of_choice);  // a choice that has ended
};

// What `status` says where the client has left before there was an answer.
inline constexpr int kClientClosed = 499;

// `request id=... method=POST path='/v1/completions' status=200`, and with figures prompt_tokens, cached_tokens,
// completion_tokens, first_ms, token_ms (both "-" without such a token) and finish.
std::string request_line(const HttpRequest& request, int status, const RequestFigures* figures = nullptr);

}  // namespace weft
