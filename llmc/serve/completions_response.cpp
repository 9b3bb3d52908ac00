#include "llmc/serve/completions_response.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <span>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"

namespace weft {

namespace {

constexpr float kLeastLogprob = -9999;  // for -infinity, which JSON does not have

std::int64_t characters(std::string_view utf8) {
  return static_cast<std::int64_t>(utf8_characters(utf8));
}

std::string json_quoted(std::string_view text) {
  const auto is_plain = [](char c) { return c >= ' ' && c < '\x7F' && c != '"' && c != '\\'; };
  if (!std::ranges::all_of(text, is_plain)) return json_text(Json(text));
  std::string quoted;
  quoted.reserve(text.size() + 2);
  return quoted.append(1, '"').append(text).append(1, '"');
}

std::u32string code_points(std::string_view utf8) {
  std::u32string points;
  for (std::size_t at = 0; at < utf8.size();) {
    const std::size_t length = utf8_sequence_length(utf8.substr(at));
    char32_t point = static_cast<unsigned char>(utf8[at]) & (0xFFu >> (length > 1 ? length + 1 : 0));
    for (std::size_t i = 1; i < length; ++i) point = point << 6 | (static_cast<unsigned char>(utf8[at + i]) & 0x3Fu);
    points += point;
    at += length;
  }
  return points;
}

// Where each character of `decoded`, and its end, stands in `given`: a text whose normalization it is. Where they differ, the
// shortest parts count as equal behind which both go on alike.
std::vector<std::int64_t> places_of(std::u32string_view decoded, std::u32string_view given) {
  constexpr std::size_t kLongest = 8, kAlike = 3;
  std::vector<std::int64_t> places;
  std::size_t d = 0, g = 0;  // both are done up to here
  const auto alike_behind = [&](std::size_t d_part, std::size_t g_part) {
    if (d + d_part > decoded.size() || g + g_part > given.size()) return false;
    return decoded.substr(d + d_part, kAlike) == given.substr(g + g_part, kAlike);
  };
  while (d < decoded.size()) {
    std::size_t d_part = 1, g_part = 1;
    if (g == given.size() || decoded[d] != given[g]) {
      for (std::size_t both = 1; both <= kLongest; ++both) {
        std::size_t part = 0;
        while (part <= both && !alike_behind(part, both - part)) ++part;
        if (part > both) continue;
        d_part = part;
        g_part = both - part;
        break;
      }
    }
    for (std::size_t i = 0; i < d_part; ++i) places.push_back(static_cast<std::int64_t>(g + std::min(i, g_part)));
    d += d_part;
    g = std::min(g + g_part, given.size());
  }
  places.push_back(static_cast<std::int64_t>(given.size()));
  for (std::int64_t& place : places) place = std::min(place, places.back());
  return places;
}

Json number(float logprob) {
  return static_cast<double>(std::max(logprob, kLeastLogprob));
}

// The members of every object, with an open brace before them and a comma behind.
std::string begin_object(const CompletionsHead& head) {
  std::string out = R"({"id":")";
  out += head.id;
  out += R"(","object":"text_completion","created":)";
  out += std::to_string(head.created);
  out += R"(,"model":)";
  out += json_quoted(head.model);
  return out += ',';
}

std::string usage_object(const CompletionsUsage& usage) {
  return format(R"({"prompt_tokens":%lld,"completion_tokens":%lld,"total_tokens":%lld})",
                static_cast<long long>(usage.prompt_tokens), static_cast<long long>(usage.completion_tokens),
                static_cast<long long>(usage.prompt_tokens + usage.completion_tokens));
}

const char* error_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    default:
      return status < 500 ? "invalid_request_error" : "server_error";
  }
}

}  // namespace

std::string random_word() {
  std::random_device random;
  return format("%08x%08x%08x%08x", random(), random(), random(), random());
}

CompletionsHead completions_head(const std::string& model) {
  CompletionsHead head;
  head.id = "cmpl-" + random_word();
  head.created =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  head.model = model;
  return head;
}

CompletionsChoice::CompletionsChoice(std::int64_t index, const Tokenizer* tokenizer, std::int32_t alternatives,
                                     std::shared_ptr<const CompletionPrompt> prompt)
    : index_(index), tokenizer_(tokenizer), alternatives_(alternatives), prompt_(std::move(prompt)) {
  if (tokenizer == nullptr || alternatives < 0) return;
  decoder_.emplace(*tokenizer, prompt_ ? std::span<const std::int32_t>(prompt_->ids) : std::span<const std::int32_t>());
}

void CompletionsChoice::add(const CompletionPiece& piece) {
  text_ += piece.text;
  shown_ += characters(piece.text);
  if (alternatives_ < 0) return;
  if (piece.is_prompt) add_prompt_tokens(piece);
  if (piece.id) add_token({*piece.id, true, tokenizer_ == nullptr}, decoder_ ? &*decoder_ : nullptr);
  write_due_tokens();
}

void CompletionsChoice::add_prompt_tokens(const CompletionPiece& piece) {
  if (!prompt_) return;
  std::optional<StreamingDecoder> decoder;
  if (tokenizer_ != nullptr) decoder.emplace(*tokenizer_);
  std::string decoded;
  for (std::size_t i = 0; i < prompt_->ids.size(); ++i) {
    const bool scored = i > 0 && i <= piece.prompt.size();
    decoded += add_token({scored ? piece.prompt[i - 1] : ScoredId{prompt_->ids[i], 0, {}}, scored, true},
                         decoder && i >= prompt_->in_front ? &*decoder : nullptr);
  }
  if (decoder) decoded += decode(*decoder, std::nullopt);
  if (decoded != piece.text) {
    const std::vector<std::int64_t> places = places_of(code_points(decoded), code_points(piece.text));
    for (Token& token : tokens_) token.offset = places[static_cast<std::size_t>(token.offset)];
  }
  offset_ = characters(piece.text);
}

// `decoder`: that of the text that the token is of; null if it is of none. Returns the text that is certain now.
std::string CompletionsChoice::add_token(Token token, StreamingDecoder* decoder) {
  const std::int32_t id = token.id.id;
  const bool has_text = decoder != nullptr && id < tokenizer_->vocab_size();
  tokens_.push_back(std::move(token));
  if (!has_text && waiting_.empty()) {
    tokens_.back().offset = offset_;
    return "";
  }
  waiting_.push_back({written_ + tokens_.size() - 1, has_text});
  return has_text ? decode(*decoder, id) : "";
}

// Without an id: the end of the text. Tokens learn where they begin; one without text stands where the next one begins.
std::string CompletionsChoice::decode(StreamingDecoder& decoder, std::optional<std::int32_t> id) {
  std::vector<std::size_t> begins;
  std::string text = id ? decoder.push(*id, &begins) : decoder.finish(&begins);
  const auto place_next = [&](std::int64_t offset) {
    const Waiting next = waiting_.front();
    tokens_[next.number - written_].offset = offset;
    waiting_.pop_front();
    return next.has_text;
  };
  for (const std::size_t begin : begins) {
    while (!place_next(offset_ + static_cast<std::int64_t>(begin))) {
    }
  }
  offset_ += characters(text);
  while (!id && !waiting_.empty()) place_next(offset_);
  return text;
}

void CompletionsChoice::finish(FinishedBy reason) {
  if (decoder_) decode(*decoder_, std::nullopt);
  for (Token& token : tokens_) {
    token.offset = std::min(token.offset, shown_);
    token.unconditional = true;
  }
  write_due_tokens();
  finish_reason_ = reason == FinishedBy::stop || reason == FinishedBy::length ? finished_by_name(reason) : "abort";
}

bool CompletionsChoice::token_is_due() const {
  return !tokens_.empty() && (tokens_.front().unconditional || tokens_.front().offset < shown_);
}

bool CompletionsChoice::pending() const {
  return !text_.empty() || !finish_reason_.empty() || !lists_.tokens.empty();
}

std::string CompletionsChoice::write() {
  std::string out = R"({"index":)" + std::to_string(index_) + R"(,"text":)" + json_quoted(text_);
  out += R"(,"logprobs":)";
  if (alternatives_ < 0) {
    out += "null";
  } else {
    out.append(R"({"text_offset":[)").append(lists_.offsets);
    out.append(R"(],"token_logprobs":[)").append(lists_.logprobs);
    out.append(R"(],"tokens":[)").append(lists_.tokens);
    out.append(R"(],"top_logprobs":[)").append(lists_.top).append("]}");
  }
  out += R"(,"finish_reason":)";
  out += finish_reason_.empty() ? "null}" : json_quoted(finish_reason_) + "}";
  text_.clear();
  for (std::string* list : {&lists_.tokens, &lists_.logprobs, &lists_.top, &lists_.offsets}) {
    list->clear();
    if (!finish_reason_.empty()) list->shrink_to_fit();
  }
  return out;
}

// The text of a token in OpenAI's form: "bytes:\x..." if its bytes alone are not valid UTF-8.
std::string CompletionsChoice::token_text(std::int32_t id) const {
  if (tokenizer_ == nullptr || id >= tokenizer_->vocab_size()) return format("token_id:%d", id);
  const std::string bytes = tokenizer_->token_bytes(id);
  std::string text = bytes;
  if (utf8_replace_invalid(text) == text) return text;
  text = "bytes:";
  for (const char byte : bytes) text += format("\\x%02x", static_cast<unsigned char>(byte));
  return text;
}

// As soon as they are due, so that the end of a long answer is not the time to write all of it.
void CompletionsChoice::write_due_tokens() {
  const auto append = [](std::string& list, std::string_view value) {
    if (!list.empty()) list += ',';
    list += value;
  };
  for (; token_is_due(); tokens_.pop_front(), ++written_) {
    const Token& token = tokens_.front();
    const std::string text = token_text(token.id.id);
    append(lists_.tokens, json_quoted(text));
    append(lists_.offsets, std::to_string(token.offset));
    append(lists_.logprobs, token.scored ? json_text(number(token.id.logprob)) : "null");
    if (!token.scored) {
      append(lists_.top, "null");
      continue;
    }
    Json alternatives = Json::object();
    for (const IdLogprob& one : token.id.alternatives) alternatives.emplace(token_text(one.id), number(one.logprob));
    alternatives.emplace(text, number(token.id.logprob));
    append(lists_.top, json_text(alternatives));
  }
}

std::string completions_body(const CompletionsHead& head, std::vector<CompletionsChoice>& choices,
                             const CompletionsUsage& usage) {
  std::string out = begin_object(head) + "\"choices\":[";
  for (std::size_t i = 0; i < choices.size(); ++i) out.append(i > 0 ? "," : "").append(choices[i].write());
  return out.append("],\"usage\":").append(usage_object(usage)).append("}");
}

std::string completions_event(const CompletionsHead& head, const std::string& choice) {
  return "data: " + begin_object(head) + "\"choices\":[" + choice + "]" +
         (head.usage_follows ? ",\"usage\":null" : "") + "}\n\n";
}

std::string completions_usage_event(const CompletionsHead& head, const CompletionsUsage& usage) {
  return "data: " + begin_object(head) + "\"choices\":[],\"usage\":" + usage_object(usage) + "}\n\n";
}

std::string error_body(int status, const std::string& message, const std::string& param, const std::string& code) {
  const auto text_or_null = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
  return json_text({{"error",
                     {{"message", message},
                      {"type", error_type(status)},
                      {"param", text_or_null(param)},
                      {"code", text_or_null(code)}}}});
}

std::string error_event(int status, const std::string& message) {
  return "data: " + error_body(status, message) + "\n\n";
}

}  // namespace weft
