#include "llmc/text/split_pattern.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/utf8.h"
#include "llmc/text/code_points.h"
#include "llmc/text/unicode_ranges.h"

namespace weft {

namespace {

constexpr std::string_view kAnyCharacter = R"([\s\S])";
constexpr std::string_view kNotWordInBrackets = R"(\x{B2}\x{B3}\x{B9}\x{BC}-\x{BE})";
constexpr std::size_t kPropertyCost = 800, kWordCost = 1600, kClassCost = 64, kRangeCost = 12, kLiteralCost = 8,
                      kGroupCost = 24;

std::string code_point_text(char32_t c) {
  return format("\\x{%X}", static_cast<unsigned>(c));
}

bool is_letter(char32_t c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

bool is_digit(char32_t c) {
  return c >= '0' && c <= '9';
}

// Characters that a pattern describes one of.
struct Set {
  std::string members;              // of a PCRE2 class, without the brackets
  std::vector<std::string> others;  // patterns that match one character each
  std::size_t cost = 0;
  bool ascii = true;  // of ASCII, or \s or \d: may ignore case

  void add(const Set& set) {
    members += set.members;
    others.insert(others.end(), set.others.begin(), set.others.end());
    cost += set.cost;
    ascii = ascii && set.ascii;
  }
  std::string matching() const {
    std::string text = members.empty() ? "" : "[" + members + "]";
    if (others.empty()) return text;
    for (const std::string& other : others) text += (text.empty() ? "" : "|") + other;
    return "(?:" + text + ")";
  }
  std::string not_matching() const {
    if (others.empty()) return "[^" + members + "]";
    return "(?:(?!" + matching() + ")" + std::string(kAnyCharacter) + ")";
  }
  Set negated() const { return {"", {not_matching()}, cost, ascii}; }
};

// A part of the pattern, translated.
struct Part {
  std::string text;
  std::size_t cost = 0;
  int width = 0;               // characters of every match; -1: they differ
  bool fixed_branches = true;  // each of its alternatives has a width
  bool may_be_empty = true;    // may match nothing
  bool is_character = false;   // a repeat does not copy it
  bool can_repeat = true;
  enum class Repeat { none, greedy, lazy } repeat = Repeat::none;  // it is one repeat and nothing else
};

struct Problem {
  std::string text;
};

class Translator {
 public:
  explicit Translator(std::string_view pattern) {
    while (!pattern.empty()) {
      const std::size_t length = utf8_sequence_length(pattern);
      characters_.push_back(code_point_of(pattern.substr(0, length)));
      pattern.remove_prefix(length);
    }
  }

  std::string translate() {
    const Part all = alternatives(false, false);
    if (!at_end()) refuse("no ) without (");
    if (all.cost > kMaxPatternCost) {
      throw Problem{format("is too large: %zu, at most %zu are accepted", all.cost, kMaxPatternCost)};
    }
    return all.text;
  }

 private:
  bool at_end() const { return position_ == characters_.size(); }
  char32_t peek(std::size_t ahead = 0) const {
    return position_ + ahead < characters_.size() ? characters_[position_ + ahead] : 0;
  }
  bool looks_at(std::string_view text) const {
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (peek(i) != static_cast<unsigned char>(text[i])) return false;
    }
    return true;
  }
  bool take(std::string_view text) {
    if (!looks_at(text)) return false;
    position_ += text.size();
    return true;
  }
  [[noreturn]] void refuse(const char* expected) const {
    std::string got = at_end() ? "its end" : "U+" + format("%04X", static_cast<unsigned>(peek()));
    if (!at_end() && peek() > ' ' && peek() < 0x7F) got = std::string(1, static_cast<char>(peek()));
    throw Problem{format("at character %zu: got %s, expected %s", position_ + 1, got.c_str(), expected)};
  }

  Part alternatives(bool ignore_case, bool behind);
  Part sequence(bool ignore_case, bool behind);
  Part repeated(Part part);
  Part atom(bool ignore_case, bool behind);
  Part group(bool ignore_case, bool behind);
  Part look(const char* begin, bool ignore_case, bool behind);
  Part literal(char32_t c, bool ignore_case);
  Part part_of(const Set& set, bool ignore_case);
  std::optional<Part> anchor();
  std::optional<char32_t> escaped_character();
  Set escaped_set(bool in_brackets);
  Set property();
  Set brackets();
  Set members();
  char32_t member_character();
  char32_t hexadecimal(std::size_t least, std::size_t most);
  std::optional<int> number();

  std::vector<char32_t> characters_;
  std::size_t position_ = 0;
  int depth_ = 0;
  char32_t before_ = 0;  // the literal just before, where case is ignored
};

Part Translator::alternatives(bool ignore_case, bool behind) {
  if (++depth_ > kMaxPatternDepth) refuse("fewer groups in groups");
  if (take("(?i)")) {  // for the rest of the group, with its other alternatives
    Part rest = alternatives(true, behind);
    rest.text = "(?i:" + rest.text + ")";
    --depth_;
    return rest;
  }
  Part all = sequence(ignore_case, behind);
  all.fixed_branches = all.width >= 0;
  while (take("|")) {
    before_ = 0;
    const Part next = sequence(ignore_case, behind);
    all.text += "|" + next.text;
    all.cost += next.cost + kLiteralCost;
    all.may_be_empty = all.may_be_empty || next.may_be_empty;
    all.fixed_branches = all.fixed_branches && next.width >= 0;
    if (all.width != next.width) all.width = -1;
    all.repeat = Part::Repeat::none;
  }
  --depth_;
  return all;
}

Part Translator::sequence(bool ignore_case, bool behind) {
  Part all;
  for (int parts = 0; !at_end() && peek() != '|' && peek() != ')'; ++parts) {
    const Part one = repeated(atom(ignore_case, behind));
    all.text += one.text;
    all.cost += one.cost;
    all.width = all.width < 0 || one.width < 0 ? -1 : all.width + one.width;
    all.may_be_empty = all.may_be_empty && one.may_be_empty;
    all.repeat = parts == 0 ? one.repeat : Part::Repeat::none;
  }
  return all;
}

std::optional<int> Translator::number() {
  const std::size_t begin = position_;
  int value = 0;
  for (; is_digit(peek()); ++position_) {
    value = value * 10 + static_cast<int>(peek() - '0');
    if (value > kMaxRepeat) refuse("a repeat of at most 1000");
  }
  return position_ == begin ? std::nullopt : std::optional(value);
}

// With the quantifier behind it, if there is one. `+` behind braces repeats once more: it is not possessive there.
Part Translator::repeated(Part part) {
  const char32_t sign = peek();
  if (at_end() || (sign != '*' && sign != '+' && sign != '?' && sign != '{')) return part;
  if (!part.can_repeat) refuse("something to repeat");
  before_ = 0;
  ++position_;
  std::optional<int> least = sign == '+' ? 1 : 0, most = sign == '?' ? std::optional(1) : std::nullopt;
  if (sign == '{') {
    least = number();
    const bool range = take(",");
    most = range ? number() : least;
    if (!least && !most) refuse("numbers within {}, or \\{");
    if (peek() != '}') refuse("}");
    if (most && *most < least.value_or(0)) refuse("the smaller number first");
    ++position_;
    if (!range && peek() == '?') refuse("no ? behind {n}");
  }
  const bool lazy = take("?"), more = !lazy && take("+");
  if (!at_end() && (peek() == '*' || peek() == '+' || peek() == '?' || peek() == '{')) refuse("one repeat at a time");
  const bool repeats = !most || *most > 1 || (sign == '{' && more);
  if (repeats && (part.may_be_empty || (sign == '{' && more && least.value_or(0) == 0))) {
    refuse("no repeat of what may be empty");
  }
  if (part.repeat == Part::Repeat::lazy || (lazy && part.repeat != Part::Repeat::none)) {
    refuse("no repeat of a repeat with ?");
  }
  const int copies = std::max({1, least.value_or(0), most.value_or(0)});
  Part all;
  all.cost = kGroupCost + part.cost * (part.is_character ? 1 : static_cast<std::size_t>(copies)) +
             (part.is_character ? 0 : kGroupCost * static_cast<std::size_t>(copies));
  all.may_be_empty = part.may_be_empty || least.value_or(0) == 0;
  all.width = part.width >= 0 && most && *most == least.value_or(0) && !(sign == '{' && more) ? part.width * *most : -1;
  all.repeat = lazy ? Part::Repeat::lazy : more && sign != '{' ? Part::Repeat::none : Part::Repeat::greedy;
  const std::string mark = sign != '{' ? std::string(1, static_cast<char>(sign))
                           : most      ? format("{%d,%d}", least.value_or(0), *most)
                                       : format("{%d,}", *least);
  all.text = part.text + mark + (lazy ? "?" : more && sign != '{' ? "+" : "");
  if (more && sign == '{') all.text = "(?:" + all.text + ")+";
  return all;
}

Part Translator::look(const char* begin, bool ignore_case, bool behind) {
  if (behind) refuse("no look around within a look behind");
  const bool back = begin[2] == '<';
  Part part = alternatives(ignore_case, back);
  if (back && !part.fixed_branches) refuse("a look behind of a fixed width");
  if (!take(")")) refuse(")");
  return {begin + part.text + ")", part.cost + kGroupCost, 0, true, true, false, false, Part::Repeat::none};
}

// Behind the ( of a group.
Part Translator::group(bool ignore_case, bool behind) {
  before_ = 0;
  for (const char* begin : {"(?=", "(?!", "(?<=", "(?<!"}) {
    if (take(begin + 1)) return look(begin, ignore_case, behind);
  }
  std::string begin = "(?:";
  if (take("?i:")) {
    begin = "(?i:";
    ignore_case = true;
  } else if (take("?-i:")) {
    begin = "(?-i:";
    ignore_case = false;
  } else if (take("?>")) {
    begin = "(?>";
  } else if (!take("?:") && peek() == '?') {
    refuse("(?:, (?i:, (?>, (?=, (?!, (?<= or (?<!");
  }
  Part part = alternatives(ignore_case, behind);
  if (!take(")")) refuse(")");
  before_ = 0;
  part.text = begin + part.text + ")";
  part.cost += kGroupCost;
  part.is_character = false;
  part.can_repeat = true;
  if (begin == "(?>") part.repeat = Part::Repeat::none;
  return part;
}

// Case is ignored for ASCII alone, and not where two letters in a row are one character elsewhere: ss and ß, fi and ﬁ.
Part Translator::literal(char32_t c, bool ignore_case) {
  if (ignore_case) {
    if (c >= 0x80) refuse("ASCII where case is ignored");
    const auto lower = [](char32_t x) { return static_cast<char>(is_letter(x) ? x | 0x20 : ' '); };
    const std::string both = {lower(before_), lower(c)};
    for (const char* pair : {"ff", "fi", "fl", "ss", "st"}) {
      if (both == pair) refuse("no ff, fi, fl, ss, st where case is ignored");
    }
    before_ = c;
  }
  return {code_point_text(c), kLiteralCost, 1, true, false, true, true, Part::Repeat::none};
}

Part Translator::part_of(const Set& set, bool ignore_case) {
  if (ignore_case && !set.ascii) refuse("ASCII where case is ignored");
  before_ = 0;
  return {set.matching(), set.cost + kClassCost, 1, true, false, true, true, Part::Repeat::none};
}

// What matches no character. Other words boundaries than PCRE2's, which has another idea of a word.
std::optional<Part> Translator::anchor() {
  const std::string word =
      format("[%s%.*s]", word_class().c_str(), static_cast<int>(kNotWordInBrackets.size()), kNotWordInBrackets.data());
  const auto part = [](std::string text, std::size_t cost) {
    return Part{std::move(text), cost, 0, true, true, false, false, Part::Repeat::none};
  };
  if (take("^")) return part("^", kLiteralCost);
  if (take("$")) return part("$", kLiteralCost);
  for (const char* one : {"\\A", "\\z", "\\Z"}) {
    if (take(one)) return part(one, kLiteralCost);
  }
  const bool boundary = looks_at("\\b");
  if (!boundary && !looks_at("\\B")) return std::nullopt;
  position_ += 2;
  const std::string is = "(?<=" + word + ")", was_not = "(?<!" + word + ")";
  const std::string comes = "(?=" + word + ")", comes_not = "(?!" + word + ")";
  return part(boundary ? "(?:" + is + comes_not + "|" + was_not + comes + ")"
                       : "(?:" + is + comes + "|" + was_not + comes_not + ")",
              4 * kWordCost);
}

Part Translator::atom(bool ignore_case, bool behind) {
  if (take("(")) return group(ignore_case, behind);
  if (std::optional<Part> part = anchor()) {
    before_ = 0;
    return *part;
  }
  if (take("[")) return part_of(brackets(), ignore_case);
  if (take(".")) return part_of({"", {"[^\\n]"}, kClassCost, true}, false);
  const char32_t c = peek();
  if (c == '*' || c == '+' || c == '?') refuse("something to repeat");
  if (c == '{') refuse("\\{");
  if (c == 0) refuse("no U+0000");
  if (c != '\\') {
    const Part part = literal(c, ignore_case);
    ++position_;
    return part;
  }
  if (const std::optional<char32_t> escaped = escaped_character()) return literal(*escaped, ignore_case);
  return part_of(escaped_set(false), ignore_case);
}

char32_t Translator::hexadecimal(std::size_t least, std::size_t most) {
  char32_t value = 0;
  std::size_t digits = 0;
  for (; digits < most; ++digits, ++position_) {
    const char32_t c = peek(), lower = is_letter(c) ? c | 0x20 : c;
    if (is_digit(c)) {
      value = value * 16 + (c - '0');
    } else if (lower >= 'a' && lower <= 'f') {
      value = value * 16 + (lower - 'a' + 10);
    } else {
      break;
    }
  }
  const bool scalar = value <= 0x10FFFF && (value < 0xD800 || value > 0xDFFF);
  if (digits < least || value == 0 || !scalar) refuse("a character in hexadecimal digits");
  return value;
}

// The character of an escape at the position, which then stands behind it; nothing if it is none of one character.
std::optional<char32_t> Translator::escaped_character() {
  const char32_t c = peek(1);
  if (take("\\x{")) {
    const char32_t value = hexadecimal(1, 6);
    if (!take("}")) refuse("}");
    return value;
  }
  if (take("\\u")) return hexadecimal(4, 4);
  if (take("\\x")) {
    const char32_t value = hexadecimal(2, 2);
    if (value >= 0x80) refuse("\\x{...} for what is not ASCII");
    return value;
  }
  constexpr std::string_view kNames = "tnrfvae", kValues = "\t\n\r\f\v\a\x1b";
  if (c < 0x80 && !is_letter(c) && !is_digit(c) && c > ' ') {
    position_ += 2;
    return c;
  }
  const std::size_t named = c < 0x80 ? kNames.find(static_cast<char>(c)) : std::string_view::npos;
  if (named == std::string_view::npos) return std::nullopt;
  position_ += 2;
  return static_cast<unsigned char>(kValues[named]);
}

Set Translator::escaped_set(bool in_brackets) {
  const char32_t c = peek(1);
  Set set;
  switch (c | 0x20) {
    case 's':
      set = {whitespace_class(), {}, 10 * kRangeCost, true};
      break;
    case 'd':
      set = {property_class("Nd")->members, {}, kPropertyCost, true};
      break;
    case 'h':
      set = {"0-9A-Fa-f", {}, 3 * kRangeCost, true};
      break;
    case 'w':
      set = {word_class() + std::string(in_brackets ? "" : kNotWordInBrackets), {}, kWordCost, false};
      break;
    case 'p':
      set = property();
      return c == 'P' ? set.negated() : set;
    default:
      refuse("an escape that is known (\\s \\d \\w \\h \\p{..} \\b \\A \\z \\Z \\t \\n \\r \\x.. or \\ and a sign)");
  }
  position_ += 2;
  return c < 'a' ? set.negated() : set;
}

Set Translator::property() {
  position_ += 2;
  if (!take("{")) refuse("{");
  const bool negated = take("^");
  std::string name;
  while (is_letter(peek())) name += static_cast<char>(characters_[position_++]);
  if (!take("}")) refuse("}");
  const std::optional<CharacterClass> known = property_class(name);
  if (!known) refuse("a general category such as L or Lu, Han, Hiragana, Katakana or Hangul in the \\p{} before this");
  Set set = {known->members, {}, kPropertyCost, false};
  if (!known->without.empty())
    set = {"", {"(?![" + known->without + "])[" + known->members + "]"}, kPropertyCost, false};
  return negated ? set.negated() : set;
}

char32_t Translator::member_character() {
  const char32_t c = peek();
  if (c == '\\') {
    if (const std::optional<char32_t> escaped = escaped_character()) return *escaped;
    refuse("a character");
  }
  if (at_end() || c == 0 || c == '[' || c == ']' || looks_at("&&")) refuse("a character");
  ++position_;
  return c;
}

// The members of a set up to && or ].
Set Translator::members() {
  Set all;
  bool any = false;
  for (; !at_end() && peek() != ']' && !looks_at("&&"); any = true) {
    if (looks_at("[:")) refuse("\\[, or no [:name:]");
    if (take("[")) {
      all.add(brackets());
      continue;
    }
    if (peek() == '-' && any && peek(1) != ']') refuse("\\- in the middle of a set");
    if (peek() == '\\') {
      const std::size_t at = position_;
      const bool single = escaped_character().has_value();
      position_ = at;
      if (!single) {
        all.add(escaped_set(true));
        continue;
      }
    }
    const char32_t first = member_character();
    char32_t last = first;
    if (peek() == '-' && peek(1) != ']' && !(peek(1) == '&' && peek(2) == '&')) {
      ++position_;
      last = member_character();
      if (last < first) refuse("a range from the smaller to the larger");
    }
    std::string range = code_point_text(first);
    if (last != first) range.append(1, '-').append(code_point_text(last));
    all.add({std::move(range), {}, kRangeCost, last < 0x80});
  }
  if (!any) refuse("a set that is not empty");
  return all;
}

// Behind the [ of a set.
Set Translator::brackets() {
  if (++depth_ > kMaxPatternDepth) refuse("fewer sets in sets");
  const bool negated = take("^");
  Set all = members();
  while (take("&&")) {
    Set next = members();
    all = {"",
           {"(?:(?=" + all.matching() + ")" + next.matching() + ")"},
           all.cost + next.cost + kGroupCost,
           all.ascii && next.ascii};
  }
  if (!take("]")) refuse("]");
  --depth_;
  return negated ? all.negated() : all;
}

}  // namespace

SplitPattern translate_split_pattern(std::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    return {"", format("has %zu bytes, at most %zu are accepted", pattern.size(), kMaxPatternBytes)};
  }
  try {
    return {Translator(pattern).translate(), ""};
  } catch (const Problem& problem) {
    return {"", problem.text};
  }
}

std::string literal_split_pattern(std::string_view text) {
  std::string pattern;
  while (!text.empty()) {
    const std::size_t length = utf8_sequence_length(text);
    pattern += code_point_text(code_point_of(text.substr(0, length)));
    text.remove_prefix(length);
  }
  return pattern;
}

}  // namespace weft
