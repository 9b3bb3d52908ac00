// The rules of llmc/base/logit_rules.h as requests and the command line ask for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/json_fwd.h"
#include "llmc/base/logit_rules.h"
#include "llmc/model/config.h"
#include "llmc/text/tokenizer.h"

namespace weft {

inline constexpr std::size_t kMaxLogitBias = 1024;  // ids
inline constexpr std::size_t kMaxBadWords = 256;    // each of at most kMaxStopTextBytes
inline constexpr std::size_t kMaxStopTokenIds = 128;

struct RequestedRules {
  LogitPenalties penalties = {};
  std::vector<std::pair<std::int32_t, float>> logit_bias = {};
  std::vector<std::string> bad_words = {};
  std::int64_t min_tokens = 0;
  std::vector<std::int32_t> stop_token_ids = {};  // end a text, also with ignore_eos

  bool any() const {
    return penalties.any() || !logit_bias.empty() || !bad_words.empty() || min_tokens > 0 || !stop_token_ids.empty();
  }
};

// Sets what the JSON member `name` stands for: presence_penalty, frequency_penalty, repetition_penalty, logit_bias (an object:
// {"id": -100 to 100}), bad_words (a list of texts), min_tokens, stop_token_ids (a list of ids). Returns false if `name`
// is none of them. Exit::usage as read_completion_option().
bool read_rule(const std::string& name, const Json& value, RequestedRules& rules);
// repetition_penalty as the rules take it: `value` is greater than 0.
float repetition_of(double value);
// All of them as a JSON list, to tell requests apart.
Json rules_json(const RequestedRules& rules);

// `end_ids`: those that end a text, beside stop_token_ids. Each bad word becomes its ids without and with a space in front,
// both ways of standing in a text; names of special tokens are those tokens. `tokenizer` may be null. Exit::usage, with the field
// in front: bad words without a tokenizer, min_tokens of more than `max_tokens`, or what check_logit_rules() refuses.
LogitRuleOptions logit_rules(const RequestedRules& rules, std::vector<std::int32_t> end_ids, std::int64_t max_tokens,
                             const Tokenizer* tokenizer, const ModelConfig& config);

}  // namespace weft
