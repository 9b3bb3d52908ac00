// One choice of an answer: collects the pieces of a completion, as JSON, and writes what has come since the last write().
// The shape of the JSON is that of an API: completions_choice.h, chat_choice.h.
//
// Every token has its entry in the lists of log-probabilities, which comes with the token's text. The text between a token's
// offset and that of the next one is the token's; of a stop id, or of a token that a stop text removes, it is empty, and the
// entry comes with the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "llmc/base/json_fwd.h"
#include "llmc/infer/completion.h"
#include "llmc/text/tokenizer.h"

namespace weft {

class AnswerChoice {
 public:
  // `prompt`: what the text continues; may be null without log-probabilities. `alternatives`: CompletionOptions::logprobs.
  AnswerChoice(std::int64_t index, const Tokenizer* tokenizer, std::int32_t alternatives,
               std::shared_ptr<const CompletionPrompt> prompt);
  virtual ~AnswerChoice() = default;

  void add(const CompletionPiece& piece);
  void finish(FinishedBy reason);
  // Whether there is something to write.
  virtual bool pending() const = 0;
  virtual std::string write() = 0;

 protected:
  struct Token {
    ScoredId id;
    bool scored = true;               // the first id of a prompt has no log-probability
    bool unconditional = false;       // does not wait for its text: of a prompt, or without a tokenizer
    std::int64_t offset = kNotKnown;  // characters of the choice's text before it
  };

  virtual void add_text(std::string_view text) = 0;
  virtual void end_text() {}
  virtual void add_entry(const Token& token) = 0;  // the token is due

  std::int64_t index() const { return index_; }
  bool scored() const { return alternatives_ >= 0; }
  // Of one token by itself: possibly not UTF-8. Nothing for an id that is no token.
  std::optional<std::string> token_bytes(std::int32_t id) const;
  // Its text in OpenAI's form: "bytes:\x..." if its bytes alone are not valid UTF-8.
  std::string token_text(std::int32_t id) const;
  // "stop", "length", "abort", or "" before finish(), and once it was taken.
  const std::string& finish_reason() const { return finish_reason_; }
  // The reason as JSON, for the choice that is written now.
  std::string take_finish_reason();

 private:
  static constexpr std::int64_t kNotKnown = INT64_MAX;  // what it stands behind may still change

  void add_prompt_tokens(const CompletionPiece& piece);
  std::string add_token(Token token, StreamingDecoder* decoder);
  std::string decode(StreamingDecoder& decoder, std::optional<std::int32_t> id);
  bool token_is_due() const;
  void add_due_entries();

  std::int64_t index_;
  const Tokenizer* tokenizer_;
  std::int32_t alternatives_;
  std::shared_ptr<const CompletionPrompt> prompt_;
  std::optional<StreamingDecoder> decoder_;  // of the generated ids, before stop texts are taken out
  std::int64_t offset_ = 0;                  // characters that the tokens so far have made for certain
  std::int64_t shown_ = 0;                   // characters of the text so far
  std::deque<Token> tokens_;                 // not yet due
  std::size_t written_ = 0;                  // tokens that were in tokens_
  struct Waiting {
    std::size_t number;  // of the token
    bool has_text;
  };
  std::deque<Waiting> waiting_;  // tokens whose offset is not known, as yet
  std::string finish_reason_;    // not yet written; empty: not finished
};

// In the words of the API: "stop", "length", "abort" (cancelled), "error".
const char* finish_reason_name(FinishedBy reason);
// `text` as a JSON string.
std::string json_quoted(std::string_view text);
// A log-probability. -9999 for -infinity, which JSON does not have.
Json json_logprob(float logprob);

}  // namespace weft
