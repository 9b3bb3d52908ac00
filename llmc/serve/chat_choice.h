// A choice of an answer of POST /v1/chat/completions.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "llmc/serve/answer_choice.h"
#include "llmc/text/thoughts.h"

namespace weft {

class ChatChoice : public AnswerChoice {
 public:
  // `stream`: write() gives deltas, the first one with the role. `thoughts`: those of the model's chat format, if it has any;
  // they become reasoning_content.
  ChatChoice(std::int64_t index, const Tokenizer* tokenizer, std::int32_t alternatives,
             std::shared_ptr<const CompletionPrompt> prompt, bool stream, std::optional<ThoughtDivider> thoughts);

  bool pending() const override;
  // {"index":..., "message":... or "delta":..., "logprobs":..., "finish_reason":...}
  std::string write() override;

 protected:
  void add_text(std::string_view text) override;
  void end_text() override;
  void add_entry(const Token& token) override;

 private:
  bool has_news() const { return !said_.empty() || !reasons_.empty() || !entries_.empty() || !finish_reason().empty(); }
  void take(const ThoughtDivider::Parts& parts);
  std::string text_members(bool whole);

  const bool stream_;
  std::optional<ThoughtDivider> thoughts_;
  bool begun_ = false;  // something has come
  bool role_written_ = false;
  std::string said_, reasons_;  // not yet written
  std::string entries_;         // of log-probabilities: what is between the brackets; not yet written
};

}  // namespace weft
