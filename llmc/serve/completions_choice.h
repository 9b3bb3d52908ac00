// A choice of an answer of POST /v1/completions.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "llmc/serve/answer_choice.h"

namespace weft {

class CompletionsChoice : public AnswerChoice {
 public:
  using AnswerChoice::AnswerChoice;

  bool pending() const override;
  // {"index":..., "text":..., "logprobs":..., "finish_reason":...}
  std::string write() override;

 protected:
  void add_text(std::string_view text) override { text_ += text; }
  void add_entry(const Token& token) override;

 private:
  std::string text_;  // not yet written
  struct Lists {
    std::string tokens, logprobs, top, offsets;  // what is between the brackets
  } lists_;                                      // of the tokens that are due and not yet written
};

}  // namespace weft
