#include "llmc/serve/answer_choice.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/text/code_points.h"

namespace weft {

namespace {

constexpr float kLeastLogprob = -9999;

std::int64_t characters(std::string_view utf8) {
  return static_cast<std::int64_t>(utf8_characters(utf8));
}

std::u32string code_points(std::string_view utf8) {
  std::u32string points;
  for (std::size_t at = 0; at < utf8.size();) {
    const std::size_t length = utf8_sequence_length(utf8.substr(at));
    points += code_point_of(utf8.substr(at, length));
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

}  // namespace

const char* finish_reason_name(FinishedBy reason) {
  return reason == FinishedBy::cancelled ? "abort" : finished_by_name(reason);
}

std::string json_quoted(std::string_view text) {
  const auto is_plain = [](char c) { return c >= ' ' && c < '\x7F' && c != '"' && c != '\\'; };
  if (!std::ranges::all_of(text, is_plain)) return json_text(Json(text));
  std::string quoted;
  quoted.reserve(text.size() + 2);
  return quoted.append(1, '"').append(text).append(1, '"');
}

Json json_logprob(float logprob) {
  return static_cast<double>(std::max(logprob, kLeastLogprob));
}

AnswerChoice::AnswerChoice(std::int64_t index, const Tokenizer* tokenizer, std::int32_t alternatives,
                           std::shared_ptr<const CompletionPrompt> prompt)
    : index_(index), tokenizer_(tokenizer), alternatives_(alternatives), prompt_(std::move(prompt)) {
  if (tokenizer == nullptr || alternatives < 0) return;
  decoder_.emplace(*tokenizer, prompt_ ? std::span<const std::int32_t>(prompt_->ids) : std::span<const std::int32_t>());
}

void AnswerChoice::add(const CompletionPiece& piece) {
  add_text(piece.text);
  shown_ += characters(piece.text);
  if (alternatives_ < 0) return;
  if (piece.is_prompt) add_prompt_tokens(piece);
  if (piece.id) add_token({*piece.id, true, tokenizer_ == nullptr}, decoder_ ? &*decoder_ : nullptr);
  add_due_entries();
}

void AnswerChoice::add_prompt_tokens(const CompletionPiece& piece) {
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
std::string AnswerChoice::add_token(Token token, StreamingDecoder* decoder) {
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
std::string AnswerChoice::decode(StreamingDecoder& decoder, std::optional<std::int32_t> id) {
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

void AnswerChoice::finish(FinishedBy reason) {
  if (decoder_) decode(*decoder_, std::nullopt);
  for (Token& token : tokens_) {
    token.offset = std::min(token.offset, shown_);
    token.unconditional = true;
  }
  add_due_entries();
  end_text();
  finish_reason_ = finish_reason_name(reason);
}

bool AnswerChoice::token_is_due() const {
  return !tokens_.empty() && (tokens_.front().unconditional || tokens_.front().offset < shown_);
}

std::optional<std::string> AnswerChoice::token_bytes(std::int32_t id) const {
  if (tokenizer_ == nullptr || id >= tokenizer_->vocab_size()) return std::nullopt;
  return tokenizer_->token_bytes(id);
}

std::string AnswerChoice::token_text(std::int32_t id) const {
  const std::optional<std::string> bytes = token_bytes(id);
  if (!bytes) return format("token_id:%d", id);
  if (utf8_replace_invalid(*bytes) == *bytes) return *bytes;
  std::string text = "bytes:";
  for (const char byte : *bytes) text += format("\\x%02x", static_cast<unsigned char>(byte));
  return text;
}

std::string AnswerChoice::take_finish_reason() {
  return finish_reason_.empty() ? "null" : json_quoted(std::exchange(finish_reason_, {}));
}

// As soon as they are due, so that the end of a long answer is not the time to write all of it.
void AnswerChoice::add_due_entries() {
  for (; token_is_due(); tokens_.pop_front(), ++written_) add_entry(tokens_.front());
}

}  // namespace weft
