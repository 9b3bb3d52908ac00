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

// \w of Unicode Technical Standard 18: Alphabetic, M, Nd, Pc, Join_Control. utf8proc does not know the property Alphabetic;
// apart from marks, which are in \w anyway, it consists of letters, letter numbers, and circled and squared letters.
// Characters newer than utf8proc's tables count as no part of a word.
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

std::size_t spaces_begin(std::string_view text) {
  return skip_spaces_backward(text, text.size(), 0);
}

std::size_t spaces_end(std::string_view text) {
  return skip_spaces_forward(text, 0);
}

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens, std::size_t block)
    : tokens_(std::move(tokens)), block_(block) {
  const auto reversed_order = [](const AddedToken& a, const AddedToken& b) {
    return std::lexicographical_compare(a.content.rbegin(), a.content.rend(), b.content.rbegin(), b.content.rend(),
                                        [](unsigned char x, unsigned char y) { return x < y; });
  };
  std::stable_sort(tokens_.begin(), tokens_.end(), reversed_order);
  const auto same = [](const AddedToken& a, const AddedToken& b) { return a.content == b.content; };
  tokens_.erase(std::unique(tokens_.begin(), tokens_.end(), same), tokens_.end());
  for (const AddedToken& token : tokens_) longest_ = std::max(longest_, token.content.size());
  add_nodes();
  add_failure_links();
}

// A node at depth d stands for a range of the sorted tokens: those with the same last d bytes.
void AddedTokenMatcher::add_nodes() {
  struct Range {
    std::uint32_t begin, end;
  };
  std::vector<Range> level = {{0, static_cast<std::uint32_t>(tokens_.size())}};
  byte_ = {0};
  for (std::size_t depth = 0; !level.empty(); ++depth) {
    std::vector<Range> next;
    for (Range range : level) {
      first_child_.push_back(static_cast<std::uint32_t>(byte_.size()));
      token_.push_back(kNone);
      // A token of exactly `depth` bytes is the shortest of its range, so it comes first.
      if (depth > 0 && tokens_[range.begin].content.size() == depth) token_.back() = range.begin++;
      while (range.begin < range.end) {
        const auto byte_at = [depth](const AddedToken& token) {
          return static_cast<unsigned char>(token.content[token.content.size() - 1 - depth]);
        };
        const unsigned char byte = byte_at(tokens_[range.begin]);
        std::uint32_t end = range.begin + 1;
        while (end < range.end && byte_at(tokens_[end]) == byte) ++end;
        byte_.push_back(byte);
        next.push_back({range.begin, end});
        range.begin = end;
      }
    }
    level = std::move(next);
  }
  first_child_.push_back(static_cast<std::uint32_t>(byte_.size()));
  root_child_.assign(256, 0);
  for (std::uint32_t node = first_child_[0]; node < first_child_[1]; ++node) root_child_[byte_[node]] = node;
}

// In breadth-first order: step() follows only links of nodes that are less deep, which are set already.
void AddedTokenMatcher::add_failure_links() {
  failure_.assign(byte_.size(), 0);
  for (std::uint32_t node = 0; node < byte_.size(); ++node) {
    for (std::uint32_t i = first_child_[node]; i < first_child_[node + 1]; ++i) {
      if (node != 0) failure_[i] = step(failure_[node], byte_[i]);
      if (token_[i] == kNone) token_[i] = token_[failure_[i]];
    }
  }
}

// The child of `node` by `byte`; 0 if there is none.
std::uint32_t AddedTokenMatcher::child(std::uint32_t node, unsigned char byte) const {
  if (node == 0) return root_child_[byte];
  const auto begin = byte_.begin() + first_child_[node], end = byte_.begin() + first_child_[node + 1];
  const auto found = std::lower_bound(begin, end, byte);
  return found != end && *found == byte ? static_cast<std::uint32_t>(found - byte_.begin()) : 0;
}

// The state of the automaton after it reads `byte` in state `node`.
std::uint32_t AddedTokenMatcher::step(std::uint32_t node, unsigned char byte) const {
  while (true) {
    const std::uint32_t next = child(node, byte);
    if (next != 0 || node == 0) return next;
    node = failure_[node];
  }
}

// For each position of [begin, end) where tokens begin the longest of them, the last position first. The automaton starts
// longest_ - 1 bytes behind the last position: no token that begins in the range ends later.
void AddedTokenMatcher::find_matches(std::string_view text, std::size_t begin, std::size_t end,
                                     std::vector<Match>& matches) const {
  matches.clear();
  std::uint32_t node = 0;
  for (std::size_t position = std::min(text.size(), end + longest_ - 1); position-- > begin;) {
    node = step(node, static_cast<unsigned char>(text[position]));
    if (token_[node] != kNone && position < end) matches.push_back({position, token_[node]});
  }
}

void AddedTokenMatcher::split(std::string_view text, bool allow_special,
                              const std::function<void(std::string_view)>& on_text,
                              const std::function<void(std::int32_t)>& on_token) const {
  std::size_t done = 0;  // end of the text that the callbacks have received
  std::size_t searched = tokens_.empty() ? text.size() : 0;
  std::vector<Match> matches;
  for (std::size_t position = 0;;) {  // end of the last match, taken or rejected
    while (!matches.empty() && matches.back().begin < position) matches.pop_back();
    if (matches.empty()) {
      if (searched == text.size()) break;
      const std::size_t from = searched;
      searched += std::min(block_, text.size() - searched);
      find_matches(text, from, searched, matches);
      continue;
    }
    const AddedToken* token = &tokens_[matches.back().token];
    std::size_t begin = matches.back().begin;
    std::size_t end = begin + token->content.size();
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
