// Pre-tokenization: cutting text into the pieces ("words") that are encoded independently.
//
// The Hugging Face library accepts any Oniguruma pattern. Dialects of regular expressions differ in details that would show
// only as a few wrong ids. So weft accepts only the rules below: each is a hand-made translation to PCRE2 with the Unicode
// classes of unicode_ranges.h, compared with the original over all code points. Any other pattern is refused.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

struct pcre2_real_code_8;

namespace weft {

enum class SplitRule {
  none,       // the whole text is one piece
  gpt2,       // GPT-2 and GPT-NeoX: ByteLevel with use_regex, or a Split with the same pattern
  llama3,     // Llama-3: case-insensitive contractions, numbers in groups of 1 to 3, line breaks split off
  qwen2,      // Qwen-2: as Llama-3, but each digit is a piece of its own
  digit,      // each digit is a piece: Digits with individual_digits (SmolLM2, before ByteLevel)
  digit_run,  // each run of digits is a piece: Digits without individual_digits
};

// The rule for a Split of tokenizer.json with this pattern; nothing if it is not supported.
std::optional<SplitRule> split_rule_of_pattern(std::string_view pattern);

// Metaspace: every space becomes `character`, which is what marks words in vocabularies of SentencePiece.
struct MetaspaceRule {
  enum class Prepend {
    always,  // puts `character` in front of a text that does not begin with it
    first,   // only where the text of encode() begins
    never,
  };
  std::string character = "\u2581";  // one character of UTF-8
  Prepend prepend = Prepend::always;
  bool split = true;  // each `character` begins a piece
};

struct PreTokenizerStep {
  SplitRule rule = SplitRule::none;
  bool add_prefix_space = false;  // before splitting, puts a space in front of a text that does not begin with one
  std::optional<MetaspaceRule> metaspace = std::nullopt;  // instead of the others
};

class PreTokenizer {
 public:
  // `use_jit` false: PCRE2's interpreter, as on machines where its compiler is not available.
  explicit PreTokenizer(const std::vector<PreTokenizerStep>& steps, bool use_jit = true);

  // Working memory of one thread.
  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

   private:
    friend class PreTokenizer;
    struct Match;
    std::unique_ptr<Match> match_;
  };

  // Calls `sink(piece)` for each piece of `text`, valid UTF-8, in order; the piece is valid until `sink` returns. Every byte
  // of the text, and every added prefix, is in exactly one piece. `at_start`: the text of encode() begins here. If a PCRE2
  // limit is reached: Exit::resources.
  template <typename Sink>
  void split(std::string_view text, bool at_start, Scratch& scratch, Sink&& sink) const {
    split_from(0, text, at_start, scratch, sink);
  }

 private:
  struct Step {
    bool add_prefix_space;
    std::shared_ptr<const pcre2_real_code_8> pattern;  // null: no split
    std::optional<MetaspaceRule> metaspace;
  };
  struct Span {
    std::size_t begin;
    std::size_t end;
  };

  // The first match at or after `from`; nothing if there is none.
  static std::optional<Span> next_match(const pcre2_real_code_8& pattern, std::string_view text, std::size_t from,
                                        Scratch& scratch);

  // `text` with the spaces replaced and the character in front, as the rule says.
  static std::string with_metaspace(const MetaspaceRule& rule, std::string_view text, bool at_start);

  template <typename Sink>
  void split_from(std::size_t step, std::string_view text, bool at_start, Scratch& scratch, Sink& sink) const {
    if (text.empty()) return;
    if (step == steps_.size()) return sink(text);
    if (steps_[step].metaspace) return split_at_metaspace(step, text, at_start, scratch, sink);
    std::string prefixed;
    if (steps_[step].add_prefix_space && text.front() != ' ') {
      prefixed.reserve(text.size() + 1);
      text = prefixed.append(1, ' ').append(text);
    }
    if (!steps_[step].pattern) return split_from(step + 1, text, at_start, scratch, sink);
    for (std::size_t position = 0; position < text.size();) {
      const auto match = next_match(*steps_[step].pattern, text, position, scratch);
      const Span span = match ? *match : Span{text.size(), text.size()};
      split_from(step + 1, text.substr(position, span.begin - position), at_start && position == 0, scratch, sink);
      split_from(step + 1, text.substr(span.begin, span.end - span.begin), at_start && span.begin == 0, scratch, sink);
      position = span.end;
    }
  }

  template <typename Sink>
  void split_at_metaspace(std::size_t step, std::string_view text, bool at_start, Scratch& scratch, Sink& sink) const {
    const MetaspaceRule& rule = *steps_[step].metaspace;
    const std::string marked = with_metaspace(rule, text, at_start);
    const std::string_view rest = marked;
    for (std::size_t begin = 0; begin < rest.size();) {
      const std::size_t end = rule.split ? std::min(rest.find(rule.character, begin + 1), rest.size()) : rest.size();
      split_from(step + 1, rest.substr(begin, end - begin), at_start && begin == 0, scratch, sink);
      begin = end;
    }
  }

  std::vector<Step> steps_;
};

}  // namespace weft
