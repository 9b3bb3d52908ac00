// min_tokens: no id that ends the text before so many ids are generated.
#include "llmc/base/logit_rules.h"

namespace weft {

namespace {

class MinTokens final : public LogitRule {
 public:
  MinTokens(std::int64_t least, const std::vector<std::int32_t>& ends) : least_(least), ends_(ends) {}

  void forbid(const GeneratedIds& before, std::vector<ForbiddenId>& ids) const override {
    if (before.size() >= least_) return;
    for (const std::int32_t id : ends_) ids.push_back({id});
  }

 private:
  const std::int64_t least_;
  const std::vector<std::int32_t> ends_;
};

}  // namespace

std::unique_ptr<LogitRule> min_tokens_rule(const LogitRuleOptions& options) {
  return options.min_tokens > 0 ? std::make_unique<MinTokens>(options.min_tokens, options.end_ids) : nullptr;
}

}  // namespace weft
