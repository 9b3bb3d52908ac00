#include "llmc/serve/chat_choice.h"

#include <utility>

#include "llmc/base/json.h"

namespace weft {

ChatChoice::ChatChoice(std::int64_t index, const Tokenizer* tokenizer, std::int32_t alternatives,
                       std::shared_ptr<const CompletionPrompt> prompt, bool stream,
                       std::optional<ThoughtDivider> thoughts)
    : AnswerChoice(index, tokenizer, alternatives, std::move(prompt)),
      stream_(stream),
      thoughts_(std::move(thoughts)) {}

void ChatChoice::take(const ThoughtDivider::Parts& parts) {
  said_ += parts.said;
  reasons_ += parts.thoughts;
}

void ChatChoice::add_text(std::string_view text) {
  begun_ = true;
  if (!thoughts_) {
    said_ += text;
  } else {
    take(thoughts_->push(text));
  }
}

void ChatChoice::end_text() {
  begun_ = true;
  if (thoughts_) take(thoughts_->finish());
}

void ChatChoice::add_entry(const Token& token) {
  const auto entry = [this](std::int32_t id, float logprob) {
    Json bytes;
    if (const std::optional<std::string> text = token_bytes(id)) {
      bytes = Json::array();
      for (const char byte : *text) bytes.push_back(static_cast<unsigned char>(byte));
    }
    return Json{{"token", token_text(id)}, {"logprob", json_logprob(logprob)}, {"bytes", bytes}};
  };
  Json own = entry(token.id.id, token.id.logprob);
  own["top_logprobs"] = Json::array();
  for (const IdLogprob& one : token.id.alternatives) own["top_logprobs"].push_back(entry(one.id, one.logprob));
  if (!entries_.empty()) entries_ += ',';
  entries_ += json_text(own);
}

// The first event of a stream comes with the first token, shown or not: it is its time that clients measure.
bool ChatChoice::pending() const {
  return has_news() || (stream_ && begun_ && !role_written_);
}

// A delta has what is new alone; a whole message has all of its members.
std::string ChatChoice::text_members(bool whole) {
  std::string members;
  const auto add = [&](const char* name, std::string& text) {
    members.append(members.empty() ? "\"" : ",\"").append(name).append("\":").append(json_quoted(text));
    text.clear();
  };
  if (thoughts_ && (whole || !reasons_.empty())) add("reasoning_content", reasons_);
  if (whole || !said_.empty()) add("content", said_);
  return members;
}

std::string ChatChoice::write() {
  std::string out = R"({"index":)" + std::to_string(index());
  if (stream_ && !std::exchange(role_written_, true)) {
    return out + R"(,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null})";
  }
  if (stream_) {
    out += ",\"delta\":{" + text_members(false);
  } else {
    out += R"(,"message":{"role":"assistant",)" + text_members(true) + R"(,"refusal":null)";
  }
  out += R"(},"logprobs":)";
  const bool listed = scored() && (!stream_ || !entries_.empty());
  out += listed ? R"({"content":[)" + std::exchange(entries_, {}) + R"(],"refusal":null})" : "null";
  out += R"(,"finish_reason":)" + take_finish_reason() + "}";
  return out;
}

}  // namespace weft
