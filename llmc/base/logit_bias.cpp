// logit_bias: a number that is added to the logit of an id.
#include "llmc/base/logit_rules.h"

namespace weft {

namespace {

class LogitBias final : public LogitRule {
 public:
  explicit LogitBias(const std::vector<std::pair<std::int32_t, float>>& bias) : bias_(bias) {}

  void begin(std::span<const std::int32_t> /*prompt*/, LogitEdits& edits) override {
    for (const auto& [id, bias] : bias_) edits.of(id).bias = bias;
  }

 private:
  const std::vector<std::pair<std::int32_t, float>> bias_;
};

}  // namespace

std::unique_ptr<LogitRule> logit_bias_rule(const LogitRuleOptions& options) {
  return options.logit_bias.empty() ? nullptr : std::make_unique<LogitBias>(options.logit_bias);
}

}  // namespace weft
