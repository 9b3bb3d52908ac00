// bad_words: sequences of ids that are never completed. Their last id is forbidden wherever the ids before it were just
// generated; the prompt does not count, as in vLLM.
#include "llmc/base/logit_rules.h"

namespace weft {

namespace {

class BadWords final : public LogitRule {
 public:
  explicit BadWords(const std::vector<std::vector<std::int32_t>>& words) : words_(words) {}

  void forbid(const GeneratedIds& before, std::vector<ForbiddenId>& ids) const override {
    for (const std::vector<std::int32_t>& word : words_) {
      const std::int64_t begin = before.size() - (std::ssize(word) - 1);
      if (begin < 0) continue;
      ForbiddenId last = {word.back()};
      bool follows = true;
      for (std::int64_t i = 0; i + 1 < std::ssize(word) && follows; ++i) {
        const std::int32_t wanted = word[static_cast<std::size_t>(i)], got = before[begin + i];
        if (got == kUnknownId) {
          last.after = wanted;
        } else {
          follows = got == wanted;
        }
      }
      if (follows) ids.push_back(last);
    }
  }

 private:
  const std::vector<std::vector<std::int32_t>> words_;
};

}  // namespace

std::unique_ptr<LogitRule> bad_words_rule(const LogitRuleOptions& options) {
  return options.bad_words.empty() ? nullptr : std::make_unique<BadWords>(options.bad_words);
}

}  // namespace weft
