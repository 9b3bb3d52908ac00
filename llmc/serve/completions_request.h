// The body of POST /v1/completions: from JSON that anybody may have sent to prompts and options.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/infer/completion.h"
#include "llmc/model/config.h"
#include "llmc/text/tokenizer.h"

namespace weft {

inline constexpr int kMaxRequestDepth = 8;                   // of the JSON: a list of lists of ids has 3
inline constexpr std::size_t kMaxRequestValues = 1'000'000;  // of the JSON: what bounds the ids of all prompts
inline constexpr std::size_t kMaxPrompts = 1024;             // of one request
inline constexpr std::int64_t kMaxChoices = 128;             // n
inline constexpr std::int64_t kDefaultMaxTokens = 16;        // the API's default

inline constexpr std::int64_t kMostAnswerValues = 1 << 22;  // answer_values(), each some 30 bytes of JSON

// A request that is refused: the status and the fields of the API's error object.
class RequestError : public Error {
 public:
  RequestError(int status, const std::string& message, std::string param = "", std::string code = "")
      : Error(Exit::usage, message), status_(status), param_(std::move(param)), code_(std::move(code)) {}
  int status() const { return status_; }
  const std::string& param() const { return param_; }  // the field; empty: none
  const std::string& api_code() const { return code_; }

 private:
  int status_;
  std::string param_, code_;
};

struct CompletionsRequest {
  std::vector<CompletionPrompt> prompts;  // at least one
  CompletionOptions options;              // of all prompts
  std::int64_t n = 1;                     // completions a prompt
  bool stream = false, include_usage = false;
  bool seeded = false;      // the request names a seed
  std::int64_t values = 0;  // answer_values()

  std::int64_t sequences() const { return n * static_cast<std::int64_t>(prompts.size()); }
};

// What parse_completions() has to know about the server.
struct CompletionsContext {
  std::string model;                                      // the name that requests may give
  const Tokenizer* tokenizer = nullptr;                   // may be null
  Tokenizer::Special special = Tokenizer::Special::text;  // names of special tokens in a prompt
  const ModelConfig* config = nullptr;
  std::int64_t max_sequences = 1024;  // prompts times n
  std::int64_t max_values = kMostAnswerValues;
  // Why a prompt of so many ids, with so many generated ones, cannot be served; empty if it can. Null: all can.
  std::function<std::string(std::int64_t prompt_ids, std::int64_t max_tokens)> refusal = nullptr;
};

// A name other than that of the model that is served: 404.
void check_model_name(const std::string& name, const std::string& served);

// How many tokens and log-probabilities an answer may have to hold at once: all of a whole answer, and of a stream those of
// the prompts, which come in one event.
std::int64_t answer_values(const CompletionsRequest& request, const ModelConfig& config);

// A field that is not supported is refused unless it asks for nothing (request_fields.h). Throws RequestError, which names the
// field. `reserve`, unless null, is called with the number of completions before the prompts are tokenized, which takes long:
// it throws if there are no places for them.
CompletionsRequest parse_completions(std::string_view text, const CompletionsContext& context,
                                     const std::function<void(std::int64_t completions)>& reserve = nullptr);

}  // namespace weft
