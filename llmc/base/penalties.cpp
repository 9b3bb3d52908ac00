// presence_penalty, frequency_penalty, repetition_penalty: less likely, or more, what the text has already. The first two
// count generated ids alone, as in vLLM; the third one those of the prompt, too.
#include "llmc/base/logit_rules.h"

namespace weft {

namespace {

class Penalties final : public LogitRule {
 public:
  explicit Penalties(bool repetition) : counts_prompt_(repetition) {}

  void begin(std::span<const std::int32_t> prompt, LogitEdits& edits) override {
    if (!counts_prompt_) return;
    for (const std::int32_t id : prompt) edits.of(id).in_prompt = 1;
  }
  void take(std::int32_t id, LogitEdits& edits) override { ++edits.of(id).generated; }

 private:
  const bool counts_prompt_;
};

}  // namespace

std::unique_ptr<LogitRule> penalties_rule(const LogitRuleOptions& options) {
  return options.penalties.any() ? std::make_unique<Penalties>(options.penalties.repetition != 1) : nullptr;
}

}  // namespace weft
