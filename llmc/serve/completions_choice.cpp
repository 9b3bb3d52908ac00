#include "llmc/serve/completions_choice.h"

#include "llmc/base/json.h"

namespace weft {

bool CompletionsChoice::pending() const {
  return !text_.empty() || !finish_reason().empty() || !lists_.tokens.empty();
}

std::string CompletionsChoice::write() {
  std::string out = R"({"index":)" + std::to_string(index()) + R"(,"text":)" + json_quoted(text_);
  out += R"(,"logprobs":)";
  if (!scored()) {
    out += "null";
  } else {
    out.append(R"({"text_offset":[)").append(lists_.offsets);
    out.append(R"(],"token_logprobs":[)").append(lists_.logprobs);
    out.append(R"(],"tokens":[)").append(lists_.tokens);
    out.append(R"(],"top_logprobs":[)").append(lists_.top).append("]}");
  }
  out += R"(,"finish_reason":)";
  const bool last = !finish_reason().empty();
  out += take_finish_reason() + "}";
  text_.clear();
  for (std::string* list : {&lists_.tokens, &lists_.logprobs, &lists_.top, &lists_.offsets}) {
    list->clear();
    if (last) list->shrink_to_fit();
  }
  return out;
}

void CompletionsChoice::add_entry(const Token& token) {
  const auto append = [](std::string& list, std::string_view value) {
    if (!list.empty()) list += ',';
    list += value;
  };
  const std::string text = token_text(token.id.id);
  append(lists_.tokens, json_quoted(text));
  append(lists_.offsets, std::to_string(token.offset));
  append(lists_.logprobs, token.scored ? json_text(json_logprob(token.id.logprob)) : "null");
  if (!token.scored) return append(lists_.top, "null");
  Json alternatives = Json::object();
  for (const IdLogprob& one : token.id.alternatives)
    alternatives.emplace(token_text(one.id), json_logprob(one.logprob));
  alternatives.emplace(text, json_logprob(token.id.logprob));
  append(lists_.top, json_text(alternatives));
}

}  // namespace weft
