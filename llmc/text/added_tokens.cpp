#include "llmc/text/added_tokens.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace weft {

namespace {

utf8proc_int32_t first_code_point(std::string_view text) {
  utf8proc_int32_t code_point = -1;
  utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &code_point);
  return code_point;
}

std::size_t last_character_begin(std::string_view text) {
  std::size_t begin = text.size() - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return begin;
}

// The property White_Space.
bool is_space(utf8proc_int32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// \w of Unicode Technical Standard 18: Alphabetic, M, Nd, Pc, Join_Control. utf8proc has no Alphabetic:
// letters, letter numbers and the circled and squared letters are it, marks count anyway. Characters newer
// than utf8proc's tables differ.
bool is_word(utf8proc_int32_t c) {
  switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      break;
  }
  return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
         (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
}

bool stands_alone(std::string_view text, std::size_t begin, std::size_t end) {
  const std::string_view before = text.substr(0, begin);
  const std::string_view after = text.substr(end);
  return (before.empty() || !is_word(first_code_point(before.substr(last_character_begin(before))))) &&
         (after.empty() || !is_word(first_code_point(after)));
}

std::size_t skip_spaces_backward(std::string_view text, std::size_t position, std::size_t limit) {
  while (position > limit) {
    const std::size_t begin = last_character_begin(text.substr(0, position));
    if (!is_space(first_code_point(text.substr(begin)))) break;
    position = begin;
  }
  return position;
}

std::size_t skip_spaces_forward(std::string_view text, std::size_t position) {
  while (position < text.size() && is_space(first_code_point(text.substr(position)))) {
    const auto byte = static_cast<unsigned char>(text[position]);
    position += byte < 0x80 ? 1 : byte < 0xE0 ? 2 : 3;  // no whitespace is longer
  }
  return position;
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::stable_sort(tokens_.begin(), tokens_.end(),
                   [](const AddedToken& a, const AddedToken& b) { return a.content < b.content; });
  const auto same = [](const AddedToken& a, const AddedToken& b) { return a.content == b.content; };
  tokens_.erase(std::unique(tokens_.begin(), tokens_.end(), same), tokens_.end());
  first_by_byte_.assign(257, 0);
  for (const AddedToken& token : tokens_) ++first_by_byte_[static_cast<unsigned char>(token.content[0]) + 1u];
  for (std::size_t byte = 1; byte < 257; ++byte) first_by_byte_[byte] += first_by_byte_[byte - 1];
}

// Narrows the sorted contents to those that agree with one more byte of the text, remembering each that ends
// there.
const AddedToken* AddedTokenMatcher::longest_at(std::string_view text) const {
  const auto first = static_cast<unsigned char>(text[0]);
  const AddedToken* low = tokens_.data() + first_by_byte_[first];
  const AddedToken* high = tokens_.data() + first_by_byte_[first + 1u];
  const AddedToken* longest = nullptr;
  for (std::size_t depth = 1; low < high; ++depth) {
    if (low->content.size() == depth) longest = low++;  // the shortest sorts first
    if (depth == text.size()) break;
    const auto byte = static_cast<unsigned char>(text[depth]);
    const auto at_depth = [depth](const AddedToken& token) { return static_cast<unsigned char>(token.content[depth]); };
    low = std::partition_point(low, high, [&](const AddedToken& token) { return at_depth(token) < byte; });
    high = std::partition_point(low, high, [&](const AddedToken& token) { return at_depth(token) == byte; });
  }
  return longest;
}

void AddedTokenMatcher::split(std::string_view text, bool allow_special,
                              const std::function<void(std::string_view)>& on_text,
                              const std::function<void(std::int32_t)>& on_token) const {
  std::size_t done = 0;  // end of what has been handed on
  for (std::size_t position = 0; !tokens_.empty() && position < text.size();) {
    const AddedToken* token = longest_at(text.substr(position));
    if (token == nullptr) {
      ++position;
      continue;
    }
    std::size_t begin = position;
    std::size_t end = position + token->content.size();
    position = end;
    if (token->special && !allow_special) continue;
    if (token->single_word && !stands_alone(text, begin, end)) continue;
    if (token->lstrip) begin = skip_spaces_backward(text, begin, done);
    if (token->rstrip) end = skip_spaces_forward(text, end);
    if (done < begin) on_text(text.substr(done, begin - done));
    on_token(token->id);
    done = end;
  }
  if (done < text.size()) on_text(text.substr(done));
}

}  // namespace weft
