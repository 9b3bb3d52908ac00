#include "llmc/text/pretokenize.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstddef>
#include <cstdint>

#include "llmc/base/error.h"
#include "llmc/text/normalizer.h"
#include "llmc/text/unicode_ranges.h"

namespace weft {

namespace {

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

constexpr std::uint32_t kHeapLimitKib = 256 * 1024;   // of the interpreter
constexpr std::size_t kJitStackBytes = 1024 * 1024;   // the patterns need a constant few hundred bytes
constexpr std::uint32_t kMatchLimit = 4'000'000'000;  // backtracking is at most twice the text's length

// The patterns above for PCRE2. Capitals stand for the contents of character classes: L letters, N numbers,
// S whitespace, D digits as the pre-tokenizer Digits defines them.
const char* pattern_template(SplitRule rule) {
  switch (rule) {
    case SplitRule::none:
      return "";
    case SplitRule::gpt2:
      return R"('s|'t|'re|'ve|'m|'ll|'d| ?[L]+| ?[N]+| ?[^SLN]+|[S]+(?![^S])|[S]+)";
    case SplitRule::llama3:
      return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nLN]?[L]+|[N]{1,3}| ?[^SLN]+[\r\n]*|[S]*[\r\n]+|[S]+(?![^S])|[S]+)";
    case SplitRule::qwen2:
      return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nLN]?[L]+|[N]| ?[^SLN]+[\r\n]*|[S]*[\r\n]+|[S]+(?![^S])|[S]+)";
    case SplitRule::digit:
      return "[D]";
    case SplitRule::digit_run:
      return "[D]+";
  }
  fail(Exit::internal, "tokenizer: split rule %d", static_cast<int>(rule));
}

std::string pcre2_pattern(SplitRule rule) {
  std::string pattern;
  for (const char* c = pattern_template(rule); *c != '\0'; ++c) {
    switch (*c) {
      case 'L':
        pattern += letter_class();
        break;
      case 'N':
        pattern += number_class();
        break;
      case 'S':
        pattern += whitespace_class();
        break;
      case 'D':
        pattern += digits_class();
        break;
      default:
        pattern += *c;
    }
  }
  return pattern;
}

std::string pcre2_message(int code) {
  char text[200];
  pcre2_get_error_message_8(code, reinterpret_cast<PCRE2_UCHAR8*>(text), sizeof text);
  return text;
}

std::shared_ptr<const pcre2_real_code_8> compile(SplitRule rule, bool use_jit) {
  if (rule == SplitRule::none) return nullptr;
  const std::string pattern = pcre2_pattern(rule);
  int error = 0;
  PCRE2_SIZE offset = 0;
  std::shared_ptr<pcre2_real_code_8> code(pcre2_compile_8(reinterpret_cast<PCRE2_SPTR8>(pattern.data()), pattern.size(),
                                                          PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr),
                                          pcre2_code_free_8);
  if (!code) {
    fail(Exit::internal, "tokenizer: PCRE2 refuses its pattern at byte %zu: %s", offset, pcre2_message(error).c_str());
  }
  // If PCRE2 cannot compile to machine code (not built in, or executable memory is forbidden) it interprets the pattern,
  // with the same result, more slowly.
  if (use_jit) pcre2_jit_compile_8(code.get(), PCRE2_JIT_COMPLETE);
  return code;
}

}  // namespace

std::optional<SplitRule> split_rule_of_pattern(std::string_view pattern) {
  if (pattern == kGpt2Pattern) return SplitRule::gpt2;
  if (pattern == kLlama3Pattern) return SplitRule::llama3;
  if (pattern == kQwen2Pattern) return SplitRule::qwen2;
  return std::nullopt;
}

struct PreTokenizer::Scratch::Match {
  pcre2_match_data_8* data = pcre2_match_data_create_8(1, nullptr);
  pcre2_match_context_8* context = pcre2_match_context_create_8(nullptr);
  pcre2_jit_stack_8* stack = pcre2_jit_stack_create_8(32 * 1024, kJitStackBytes, nullptr);

  Match() {
    if (data == nullptr || context == nullptr) {
      fail(Exit::resources, "tokenizer: out of memory for matching");
    }
    pcre2_set_match_limit_8(context, kMatchLimit);
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
    steps_.push_back({step.add_prefix_space, compile(step.rule, use_jit), step.metaspace});
  }
}

std::string PreTokenizer::with_metaspace(const MetaspaceRule& rule, std::string_view text, bool at_start) {
  std::string marked = replace_all(text, " ", rule.character);
  const bool wanted =
      rule.prepend == MetaspaceRule::Prepend::always || (rule.prepend == MetaspaceRule::Prepend::first && at_start);
  if (wanted && !marked.starts_with(rule.character)) marked.insert(0, rule.character);
  return marked;
}

std::optional<PreTokenizer::Span> PreTokenizer::next_match(const pcre2_real_code_8& pattern, std::string_view text,
                                                           std::size_t from, Scratch& scratch) {
  const auto* subject = reinterpret_cast<PCRE2_SPTR8>(text.data());
  const int found = pcre2_match_8(&pattern, subject, text.size(), from, PCRE2_NO_UTF_CHECK, scratch.match_->data,
                                  scratch.match_->context);
  if (found == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (found < 0) {
    fail(Exit::resources, "tokenizer: matching stopped at byte %zu of %zu: %s", from, text.size(),
         pcre2_message(found).c_str());
  }
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer_8(scratch.match_->data);
  return Span{bounds[0], bounds[1]};
}

}  // namespace weft
