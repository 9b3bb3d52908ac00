#include "llmc/infer/requested_rules.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/infer/completion.h"
#include "llmc/infer/option_values.h"

namespace weft {

namespace {

constexpr const char* kWhiteSpace = " \t\r\n\v\f";

std::vector<std::pair<std::int32_t, float>> read_logit_bias(const std::string& name, const Json& value) {
  if (value == Json::array()) return {};  // llama.cpp's form of none
  const std::string expected =
      format("at most %zu members, each a token id with a number from %g to %g, as {\"50256\": -100}", kMaxLogitBias,
             -kMostLogitBias, kMostLogitBias);
  if (!value.is_object() || value.size() > kMaxLogitBias) refuse_option(name, value, expected);
  std::vector<std::pair<std::int32_t, float>> bias;
  for (const auto& [key, number] : value.items()) {
    std::int32_t id = -1;
    const std::from_chars_result parsed = std::from_chars(key.data(), key.data() + key.size(), id);
    // One way to write an id, so that none comes twice.
    if (parsed.ec != std::errc{} || id < 0 || key != std::to_string(id)) refuse_option(name, key, expected);
    bias.emplace_back(id, static_cast<float>(number_option(format("%s: %d", name.c_str(), id), number, -kMostLogitBias,
                                                           kMostLogitBias)));
  }
  return bias;
}

std::vector<std::string> read_bad_words(const std::string& name, const Json& value) {
  const auto is_word = [](const Json& word) {
    if (!word.is_string()) return false;
    const std::string& text = word.get_ref<const std::string&>();
    return text.size() <= kMaxStopTextBytes && text.find_first_not_of(kWhiteSpace) != std::string::npos;
  };
  if (value.is_array() && value.size() <= kMaxBadWords && std::ranges::all_of(value, is_word)) {
    return value.get<std::vector<std::string>>();
  }
  refuse_option(name, value,
                format("a list of at most %zu texts, each of at most %zu bytes and not of white space alone",
                       kMaxBadWords, kMaxStopTextBytes));
}

std::vector<std::int32_t> read_ids(const std::string& name, const Json& value) {
  if (!value.is_array() || value.size() > kMaxStopTokenIds) {
    refuse_option(name, value, format("a list of at most %zu token ids", kMaxStopTokenIds));
  }
  std::vector<std::int32_t> ids;
  for (const Json& id : value) {
    ids.push_back(static_cast<std::int32_t>(integer_option(name, id, 0, std::numeric_limits<std::int32_t>::max())));
  }
  return ids;
}

}  // namespace

bool read_rule(const std::string& name, const Json& value, RequestedRules& rules) {
  if (name == "presence_penalty") {
    rules.penalties.presence = static_cast<float>(number_option(name, value, -kMostPenalty, kMostPenalty));
  } else if (name == "frequency_penalty") {
    rules.penalties.frequency = static_cast<float>(number_option(name, value, -kMostPenalty, kMostPenalty));
  } else if (name == "repetition_penalty") {
    const double penalty = number_option(name, value, 0, std::numeric_limits<double>::max());
    if (penalty == 0) refuse_option(name, value, "a number greater than 0");
    rules.penalties.repetition = repetition_of(penalty);
  } else if (name == "logit_bias") {
    rules.logit_bias = read_logit_bias(name, value);
  } else if (name == "bad_words") {
    rules.bad_words = read_bad_words(name, value);
  } else if (name == "min_tokens") {
    rules.min_tokens = integer_option(name, value, 0, INT64_MAX);
  } else if (name == "stop_token_ids") {
    rules.stop_token_ids = read_ids(name, value);
  } else {
    return false;
  }
  return true;
}

float repetition_of(double value) {
  using Limits = std::numeric_limits<float>;
  return static_cast<float>(std::clamp(value, static_cast<double>(Limits::min()), static_cast<double>(Limits::max())));
}

Json rules_json(const RequestedRules& rules) {
  return {rules.penalties.presence, rules.penalties.frequency, rules.penalties.repetition, rules.logit_bias,
          rules.bad_words,          rules.min_tokens,          rules.stop_token_ids};
}

LogitRuleOptions logit_rules(const RequestedRules& rules, std::vector<std::int32_t> end_ids, std::int64_t max_tokens,
                             const Tokenizer* tokenizer, const ModelConfig& config) {
  if (tokenizer == nullptr && !rules.bad_words.empty()) {
    fail(Exit::usage, "bad_words: they need a tokenizer, and the model file has none");
  }
  if (rules.min_tokens > max_tokens) {
    fail(Exit::usage, "min_tokens: got %lld, expected at most the %lld tokens that may be generated",
         static_cast<long long>(rules.min_tokens), static_cast<long long>(max_tokens));
  }
  LogitRuleOptions result;
  result.penalties = rules.penalties;
  result.logit_bias = rules.logit_bias;
  for (const std::string& word : rules.bad_words) {
    const std::string begin = word.substr(word.find_first_not_of(kWhiteSpace));
    for (const std::string& text : {begin, " " + begin}) {
      std::vector<std::int32_t> ids = tokenizer->encode(text, false, Tokenizer::Special::allow);
      if (ids.empty()) fail(Exit::usage, "bad_words: got %s, a text without tokens", escaped(word).c_str());
      const bool known = std::ranges::find(result.bad_words, ids) != result.bad_words.end();
      if (!known) result.bad_words.push_back(std::move(ids));
    }
  }
  result.min_tokens = rules.min_tokens;
  result.end_ids = std::move(end_ids);
  result.end_ids.insert(result.end_ids.end(), rules.stop_token_ids.begin(), rules.stop_token_ids.end());
  check_logit_rules(result, config.vocab_size, tokenizer != nullptr ? tokenizer->vocab_size() : config.tokenizer_vocab);
  return result;
}

}  // namespace weft
