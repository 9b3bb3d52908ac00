#include "llmc/text/token_decoder.h"

#include <optional>
#include <utility>

#include "llmc/base/utf8.h"
#include "llmc/text/normalizer.h"

namespace weft {

namespace {

constexpr std::string_view kReplacementCharacter = "\uFFFD";

std::string with_replacements(std::string_view text, const std::vector<CharacterReplacement>& replacements,
                              bool first) {
  std::string result(text);
  for (const CharacterReplacement& one : replacements) {
    result = replace_all(result, one.character, first ? one.to_in_first : one.to);
  }
  return result;
}

// The value of a hexadecimal number of two characters. A plus sign in front counts, as it does for Rust's
// u8::from_str_radix(), which the original calls.
std::optional<int> hexadecimal(std::string_view text) {
  int value = 0;
  if (text[0] == '+') text.remove_prefix(1);
  for (const char c : text) {
    const int lower = c | 0x20;
    const bool letter = lower >= 'a' && lower <= 'f';
    if (!letter && (c < '0' || c > '9')) return std::nullopt;
    value = value * 16 + (letter ? lower - 'a' + 10 : c - '0');
  }
  return value;
}

// The byte that a token like <0x0A> stands for; -1 for other tokens.
std::int16_t byte_of_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return -1;
  return static_cast<std::int16_t>(hexadecimal(token.substr(3, 2)).value_or(-1));
}

}  // namespace

TokenDecoder::TokenDecoder(const std::vector<std::string>& tokens, DecoderSpec spec) : spec_(std::move(spec)) {
  bool first_differs = false;
  for (const CharacterReplacement& one : spec_.after_bytes) first_differs |= one.to_in_first != one.to;
  texts_.reserve(tokens.size());
  for (const std::string& token : tokens) {
    const std::string text = with_replacements(token, spec_.before_bytes, false);
    if (spec_.byte_fallback) bytes_.push_back(byte_of_token(text));
    texts_.push_back(with_replacements(text, spec_.after_bytes, false));
    if (first_differs) first_texts_.push_back(with_replacements(text, spec_.after_bytes, true));
  }
}

void TokenDecoder::push(State& state, std::int32_t id, std::string& out) const {
  const auto index = static_cast<std::size_t>(id);
  const bool first = !std::exchange(state.begun, true);
  if (is_byte(id)) {
    if (first) state.row_is_first = true;
    return push_byte(state, static_cast<char>(bytes_[index]), out);
  }
  end_row(state, out);
  emit(state, first && !first_texts_.empty() ? first_texts_[index] : texts_[index], out);
}

void TokenDecoder::finish(State& state, std::string& out) const {
  end_row(state, out);
}

std::string TokenDecoder::bytes_of(std::int32_t id) const {
  const auto index = static_cast<std::size_t>(id);
  return is_byte(id) ? std::string(1, static_cast<char>(bytes_[index])) : texts_[index];
}

void TokenDecoder::push_byte(State& state, char byte, std::string& out) const {
  state.row += byte;
  if (!state.row_is_broken) {
    const std::string_view rest = std::string_view(state.row).substr(state.complete);
    if (utf8_sequence_length(rest) == rest.size()) {
      state.complete = state.row.size();
      return;
    }
    if (utf8_incomplete_suffix(rest) == rest.size()) return;
    state.row_is_broken = true;
  }
  emit_broken(state, out);
}

// One U+FFFD for each byte that is held back.
void TokenDecoder::emit_broken(State& state, std::string& out) const {
  for (std::size_t i = 0; i < state.row.size(); ++i) {
    const bool first = std::exchange(state.row_is_first, false);
    emit(state, with_replacements(kReplacementCharacter, spec_.after_bytes, first), out);
  }
  state.row.clear();
}

void TokenDecoder::end_row(State& state, std::string& out) const {
  if (state.complete < state.row.size()) {
    emit_broken(state, out);
  } else if (!state.row.empty()) {
    emit(state, with_replacements(state.row, spec_.after_bytes, state.row_is_first), out);
    state.row.clear();
  }
  state.complete = 0;
  state.row_is_first = state.row_is_broken = false;
}

// Appends text, apart from what is stripped at the beginning.
void TokenDecoder::emit(State& state, std::string_view text, std::string& out) const {
  while (state.stripped < spec_.strip_count && text.starts_with(spec_.strip)) {
    text.remove_prefix(spec_.strip.size());
    ++state.stripped;
  }
  if (!text.empty()) state.stripped = spec_.strip_count;
  out += text;
}

}  // namespace weft
