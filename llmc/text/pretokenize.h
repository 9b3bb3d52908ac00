// Pre-tokenization: cutting text into the pieces ("words") that are encoded independently.
//
// A step splits the pieces of the one before it at the matches of a pattern: split_pattern.h translates those of the Hugging
// Face library. A text on which a pattern would try too much is refused, however it was made: matching counts its steps, and
// a text has so many of them per byte.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

struct pcre2_real_code_8;

namespace weft {

// What becomes of a match: a piece of its own, nothing, or a piece with what stands before or behind it.
enum class SplitBehavior { isolated, removed, with_previous, with_next, contiguous };

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
  std::optional<std::string> pattern = std::nullopt;  // as translate_split_pattern() makes it; nothing: no split
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;            // what is between the matches counts as the matches
  bool add_prefix_space = false;  // before splitting, puts a space in front of a text that does not begin with one
  std::optional<MetaspaceRule> metaspace = std::nullopt;  // instead of the others
};

// ByteLevel with use_regex: the pattern of GPT-2.
PreTokenizerStep gpt2_step();
// Digits: each digit, or each run of digits.
PreTokenizerStep digits_step(bool individual);
PreTokenizerStep punctuation_step();
PreTokenizerStep whitespace_step();  // white space is removed

class PreTokenizer {
 public:
  // `use_jit` false: PCRE2's interpreter, as on machines where its compiler is not available. A pattern that PCRE2 refuses:
  // Exit::internal.
  explicit PreTokenizer(const std::vector<PreTokenizerStep>& steps, bool use_jit = true);

  // A step takes some nanoseconds. Patterns in use take 2 to 10 for a byte; each attempt counts as 64 of them at least.
  static constexpr std::uint64_t kStepsOfAnyText = 1 << 24;
  static constexpr std::uint64_t kStepsPerByte = 128;

  // Working memory of one thread, and the steps that are left to the text it works on.
  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    // Allows the steps that a text of so many bytes may take.
    void begin_text(std::size_t bytes) { steps_left_ = kStepsOfAnyText + kStepsPerByte * bytes; }

   private:
    friend class PreTokenizer;
    struct Match;
    std::unique_ptr<Match> match_;
    std::uint64_t steps_left_ = kStepsOfAnyText;
  };

  // Calls `sink(piece)` for each piece of `text`, valid UTF-8, in order; the piece is valid until `sink` returns. Every byte
  // of the text, and every added prefix, is in exactly one piece, but for those that a step removes. `at_start`: the text of
  // encode() begins here. A text that takes too many steps, or too much memory: Exit::usage.
  template <typename Sink>
  void split(std::string_view text, bool at_start, Scratch& scratch, Sink&& sink) const {
    split_from(0, text, at_start, scratch, sink);
  }

 private:
  struct Step {
    PreTokenizerStep spec;
    std::shared_ptr<const pcre2_real_code_8> pattern;  // null: no split
  };
  struct Span {
    std::size_t begin;
    std::size_t end;
    bool is_match;
  };

  // The end of the match that begins at `begin`; nothing if there is none.
  static std::optional<std::size_t> match_at(const pcre2_real_code_8& pattern, std::string_view text, std::size_t begin,
                                             Scratch& scratch);
  // The next character's first byte.
  static std::size_t next_character(std::string_view text, std::size_t position);
  // Whether two neighbouring spans are one piece.
  static bool joins(SplitBehavior behavior, bool is_match, bool next_is_match);

  // `text` with the spaces replaced and the character in front, as the rule says.
  static std::string with_metaspace(const MetaspaceRule& rule, std::string_view text, bool at_start);

  template <typename Sink>
  void split_from(std::size_t step, std::string_view text, bool at_start, Scratch& scratch, Sink& sink) const {
    if (text.empty()) return;
    if (step == steps_.size()) return sink(text);
    const PreTokenizerStep& spec = steps_[step].spec;
    if (spec.metaspace) return split_at_metaspace(step, text, at_start, scratch, sink);
    std::string prefixed;
    if (spec.add_prefix_space && text.front() != ' ') {
      prefixed.reserve(text.size() + 1);
      text = prefixed.append(1, ' ').append(text);
    }
    if (!steps_[step].pattern) return split_from(step + 1, text, at_start, scratch, sink);
    std::optional<Span> waiting;  // the piece that grows, and whether its last span is a match
    const auto finish = [&] {
      if (!waiting || (spec.behavior == SplitBehavior::removed && waiting->is_match)) return;
      split_from(step + 1, text.substr(waiting->begin, waiting->end - waiting->begin), at_start && waiting->begin == 0,
                 scratch, sink);
    };
    each_span(*steps_[step].pattern, text, scratch, [&](Span span) {
      span.is_match = span.is_match != spec.invert;
      if (waiting && joins(spec.behavior, waiting->is_match, span.is_match)) {
        span.begin = waiting->begin;
      } else {
        finish();
      }
      waiting = span;
    });
    finish();
  }

  // The matches of a text and what is between them, in order. As the original finds them: a match of nothing counts, unless
  // it stands right behind another match.
  template <typename OnSpan>
  static void each_span(const pcre2_real_code_8& pattern, std::string_view text, Scratch& scratch, OnSpan&& on_span) {
    std::size_t done = 0;
    std::optional<std::size_t> last_end;
    for (std::size_t position = 0; position <= text.size();) {
      const std::optional<std::size_t> end = match_at(pattern, text, position, scratch);
      if (!end || (*end == position && last_end == position)) {
        position = next_character(text, position);
        continue;
      }
      if (done < position) on_span({done, position, false});
      on_span({position, *end, true});
      done = *end;
      position = done;
      last_end = done;
    }
    if (done < text.size()) on_span({done, text.size(), false});
  }

  template <typename Sink>
  void split_at_metaspace(std::size_t step, std::string_view text, bool at_start, Scratch& scratch, Sink& sink) const {
    const MetaspaceRule& rule = *steps_[step].spec.metaspace;
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
