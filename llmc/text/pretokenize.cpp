#include "llmc/text/pretokenize.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstddef>
#include <cstdint>

#include "llmc/base/error.h"
#include "llmc/text/normalizer.h"
#include "llmc/text/split_pattern.h"
#include "llmc/text/unicode_ranges.h"

namespace weft {

namespace {

constexpr std::uint32_t kHeapLimitKib = 256 * 1024;  // of the interpreter
constexpr std::size_t kJitStackBytes = 1024 * 1024;  // what needs more is interpreted
constexpr std::size_t kWindowBytes = 256;            // that a match is first tried in: longer than nearly all words
constexpr std::uint64_t kBytesPerStep = 8;           // of a larger window

std::string pcre2_message(int code) {
  char text[200];
  pcre2_get_error_message_8(code, reinterpret_cast<PCRE2_UCHAR8*>(text), sizeof text);
  return text;
}

// Each attempt begins where the search stands: PCRE2 counts the steps of one attempt, not those of a search over the text.
std::shared_ptr<const pcre2_real_code_8> compile(const std::string& pattern, bool use_jit) {
  const std::unique_ptr<pcre2_compile_context_8, decltype(&pcre2_compile_context_free_8)> context(
      pcre2_compile_context_create_8(nullptr), pcre2_compile_context_free_8);
  if (!context) fail(Exit::resources, "tokenizer: out of memory for a pattern");
  pcre2_set_newline_8(context.get(), PCRE2_NEWLINE_LF);
  constexpr std::uint32_t kOptions = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_ANCHORED;
  int error = 0;
  PCRE2_SIZE offset = 0;
  std::shared_ptr<pcre2_real_code_8> code(pcre2_compile_8(reinterpret_cast<PCRE2_SPTR8>(pattern.data()), pattern.size(),
                                                          kOptions, &error, &offset, context.get()),
                                          pcre2_code_free_8);
  if (!code) {
    fail(Exit::internal, "tokenizer: PCRE2 refuses its pattern at byte %zu: %s", offset, pcre2_message(error).c_str());
  }
  // If PCRE2 cannot compile to machine code (not built in, or executable memory is forbidden) it interprets the pattern,
  // with the same result, more slowly.
  if (use_jit) pcre2_jit_compile_8(code.get(), PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);
  return code;
}

}  // namespace

PreTokenizerStep gpt2_step() {
  constexpr std::string_view kPattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
  return {.pattern = translate_split_pattern(kPattern).pcre2};
}

PreTokenizerStep digits_step(bool individual) {
  return {.pattern = format("[%s]%s", digits_class().c_str(), individual ? "" : "+")};
}

PreTokenizerStep punctuation_step() {
  const CharacterClass characters = punctuation_class();
  return {.pattern = format("(?![%s])[%s]", characters.without.c_str(), characters.members.c_str())};
}

PreTokenizerStep whitespace_step() {
  return {.pattern = format("[%s]+", whitespace_class().c_str()), .behavior = SplitBehavior::removed};
}

struct PreTokenizer::Scratch::Match {
  pcre2_match_data_8* data = pcre2_match_data_create_8(1, nullptr);
  pcre2_match_context_8* context = pcre2_match_context_create_8(nullptr);
  pcre2_jit_stack_8* stack = pcre2_jit_stack_create_8(32 * 1024, kJitStackBytes, nullptr);

  Match() {
    if (data == nullptr || context == nullptr) {
      fail(Exit::resources, "tokenizer: out of memory for matching");
    }
    pcre2_set_heap_limit_8(context, kHeapLimitKib);
    pcre2_jit_stack_assign_8(context, nullptr, stack);
  }
  ~Match() {
    pcre2_jit_stack_free_8(stack);
    pcre2_match_context_free_8(context);
    pcre2_match_data_free_8(data);
  }
  Match(const Match&) = delete;
  Match& operator=(const Match&) = delete;
};

PreTokenizer::Scratch::Scratch() : match_(std::make_unique<Match>()) {}

PreTokenizer::Scratch::~Scratch() = default;

PreTokenizer::PreTokenizer(const std::vector<PreTokenizerStep>& steps, bool use_jit) {
  for (const PreTokenizerStep& step : steps) {
    steps_.push_back({step, step.pattern ? compile(*step.pattern, use_jit) : nullptr});
  }
}

std::string PreTokenizer::with_metaspace(const MetaspaceRule& rule, std::string_view text, bool at_start) {
  std::string marked = replace_all(text, " ", rule.character);
  const bool wanted =
      rule.prepend == MetaspaceRule::Prepend::always || (rule.prepend == MetaspaceRule::Prepend::first && at_start);
  if (wanted && !marked.starts_with(rule.character)) marked.insert(0, rule.character);
  return marked;
}

bool PreTokenizer::joins(SplitBehavior behavior, bool is_match, bool next_is_match) {
  switch (behavior) {
    case SplitBehavior::with_previous:
      return !is_match && next_is_match;
    case SplitBehavior::with_next:
      return is_match && !next_is_match;
    case SplitBehavior::contiguous:
      return is_match == next_is_match;
    case SplitBehavior::isolated:
    case SplitBehavior::removed:
      break;
  }
  return false;
}

std::size_t PreTokenizer::next_character(std::string_view text, std::size_t position) {
  ++position;
  while (position < text.size() && (static_cast<unsigned char>(text[position]) & 0xC0) == 0x80) ++position;
  return position;
}

std::optional<std::size_t> PreTokenizer::match_at(const pcre2_real_code_8& pattern, std::string_view text,
                                                  std::size_t begin, Scratch& scratch) {
  const auto* subject = reinterpret_cast<PCRE2_SPTR8>(text.data());
  // What PCRE2 reads in a repeat of one character is no step for it. So it is shown a window of the text, and one in which it
  // has met the end (a partial match) is charged by its size and enlarged.
  std::size_t window = kWindowBytes, end = 0;
  const auto attempt = [&](std::uint32_t options) {
    return pcre2_match_8(&pattern, subject, end, begin,
                         PCRE2_NO_UTF_CHECK | options | (end < text.size() ? PCRE2_PARTIAL_HARD : 0),
                         scratch.match_->data, scratch.match_->context);
  };
  const auto take_steps = [&](std::uint64_t steps) {
    const bool enough = scratch.steps_left_ >= steps;
    if (enough) scratch.steps_left_ -= steps;
    return enough;
  };
  int found = PCRE2_ERROR_PARTIAL;
  for (; found == PCRE2_ERROR_PARTIAL; window *= 4) {
    end = text.size() - begin <= window ? text.size() : next_character(text, begin + window - 1);
    found = PCRE2_ERROR_MATCHLIMIT;
    if (window > kWindowBytes && !take_steps((end - begin) / kBytesPerStep)) break;
    // PCRE2 does not say how many steps it took, so it is allowed more and more of them.
    for (std::uint64_t limit = 64; found == PCRE2_ERROR_MATCHLIMIT && take_steps(limit);
         limit = std::min<std::uint64_t>(limit * 8, UINT32_MAX)) {
      pcre2_set_match_limit_8(scratch.match_->context, static_cast<std::uint32_t>(limit));
      found = attempt(0);
      if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = attempt(PCRE2_NO_JIT);
    }
  }
  if (found == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (found == PCRE2_ERROR_NOMEMORY) fail(Exit::resources, "tokenizer: out of memory for matching");
  if (found < 0) {
    fail(Exit::usage,
         "text: the tokenizer's pattern takes too long at byte %zu of %zu (%s); expected a text without what it "
         "cannot split",
         begin, text.size(), pcre2_message(found).c_str());
  }
  return pcre2_get_ovector_pointer_8(scratch.match_->data)[1];
}

}  // namespace weft
