// The answers of POST /v1/completions: JSON objects, and the events of a stream.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/infer/completion.h"
#include "llmc/text/tokenizer.h"

namespace weft {

// What all choices and all events of one answer have in common.
struct CompletionsHead {
  std::string id;            // "cmpl-" and 32 hexadecimal digits
  std::int64_t created = 0;  // Unix time, seconds
  std::string model;
  bool usage_follows = false;  // in the last event of a stream: all others say "usage":null
};
// 128 random bits in hexadecimal, for ids and nonces.
std::string random_word();

CompletionsHead completions_head(const std::string& model);  // with a random id

struct CompletionsUsage {
  std::int64_t prompt_tokens = 0;      // each prompt once, however many choices it has
  std::int64_t completion_tokens = 0;  // of all choices
};

// One choice: collects the pieces of a completion, as JSON, and writes what has come since the last write().
// Every token has its entry in the lists of log-probabilities, which comes with the token's text. The text between a token's
// offset and that of the next one is the token's; of a stop id, or of a token that a stop text removes, it is empty, and the
// entry comes with the end.
class CompletionsChoice {
 public:
  // `prompt`: what the text continues; may be null without log-probabilities. `alternatives`: CompletionOptions::logprobs.
  CompletionsChoice(std::int64_t index, const Tokenizer* tokenizer, std::int32_t alternatives,
                    std::shared_ptr<const CompletionPrompt> prompt);

  void add(const CompletionPiece& piece);
  void finish(FinishedBy reason);
  // Whether there is something to write.
  bool pending() const;
  // {"index":..., "text":..., "logprobs":..., "finish_reason":...}
  std::string write();

 private:
  struct Token {
    ScoredId id;
    bool scored = true;               // the first id of a prompt has no log-probability
    bool unconditional = false;       // does not wait for its text: of a prompt, or without a tokenizer
    std::int64_t offset = kNotKnown;  // characters of the choice's text before it
  };
  static constexpr std::int64_t kNotKnown = INT64_MAX;  // what it stands behind may still change

  void add_prompt_tokens(const CompletionPiece& piece);
  std::string add_token(Token token, StreamingDecoder* decoder);
  std::string decode(StreamingDecoder& decoder, std::optional<std::int32_t> id);
  bool token_is_due() const;
  void write_due_tokens();
  std::string token_text(std::int32_t id) const;

  std::int64_t index_;
  const Tokenizer* tokenizer_;
  std::int32_t alternatives_;
  std::shared_ptr<const CompletionPrompt> prompt_;
  std::optional<StreamingDecoder> decoder_;  // of the generated ids, before stop texts are taken out
  std::int64_t offset_ = 0;                  // characters that the tokens so far have made for certain
  std::int64_t shown_ = 0;                   // characters of the text so far
  std::string text_;                         // not yet written
  std::deque<Token> tokens_;                 // not yet due
  std::size_t written_ = 0;                  // tokens that were in tokens_
  struct Waiting {
    std::size_t number;  // of the token
    bool has_text;
  };
  std::deque<Waiting> waiting_;  // tokens whose offset is not known, as yet
  struct Lists {
    std::string tokens, logprobs, top, offsets;  // what is between the brackets
  } lists_;                                      // of the tokens that are due and not yet written
  std::string finish_reason_;                    // empty: not finished
};

// The whole answer, of choices that are finished.
std::string completions_body(const CompletionsHead& head, std::vector<CompletionsChoice>& choices,
                             const CompletionsUsage& usage);
// Events of a stream, each "data: ...\n\n".
std::string completions_event(const CompletionsHead& head, const std::string& choice);
std::string completions_usage_event(const CompletionsHead& head, const CompletionsUsage& usage);
inline constexpr const char* kLastEvent = "data: [DONE]\n\n";

// {"error": {"message", "type", "param", "code"}}: the type follows from the status. Empty texts are null.
std::string error_body(int status, const std::string& message, const std::string& param = "",
                       const std::string& code = "");
std::string error_event(int status, const std::string& message);

}  // namespace weft
