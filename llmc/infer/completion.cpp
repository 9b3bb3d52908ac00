#include "llmc/infer/completion.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/infer/option_values.h"
#include "llmc/infer/prompt.h"
#include "llmc/infer/text_stream.h"

namespace weft {

namespace {

std::vector<std::string> read_stop(const std::string& name, const Json& value) {
  const Json list = value.is_string() ? Json::array({value}) : value;
  const auto is_stop = [](const Json& text) {
    return text.is_string() && !text.get_ref<const std::string&>().empty() &&
           text.get_ref<const std::string&>().size() <= kMaxStopTextBytes;
  };
  if (!list.is_array() || list.size() > kMaxStopTexts || !std::all_of(list.begin(), list.end(), is_stop)) {
    refuse_option(
        name, value,
        format("a text of 1 to %zu bytes, or a list of at most %zu of them", kMaxStopTextBytes, kMaxStopTexts));
  }
  return list.get<std::vector<std::string>>();
}

// Decodes ids, applies the stop texts and names the reason of the end.
class CompletionListener : public RequestListener {
 public:
  CompletionListener(CompletionPrompt prompt, const CompletionOptions& options, const Tokenizer* tokenizer,
                     std::vector<std::int32_t> stop_ids, std::shared_ptr<CompletionSink> sink)
      : prompt_ids_(static_cast<std::int64_t>(prompt.ids.size())),
        echo_(options.echo ? std::optional(std::move(prompt.text)) : std::nullopt),
        text_(tokenizer, prompt.ids, options.stop, false, options.rules.min_tokens),
        stop_ids_(std::move(stop_ids)),
        sink_(std::move(sink)) {}

  void on_cached(std::int64_t ids) override { cached_ = ids; }
  void on_prompt(std::span<const ScoredId> scored) override { echo_prompt(scored); }

  bool on_id(const ScoredId& id) override {
    echo_prompt({});
    ++generated_;
    const bool stop_id = std::find(stop_ids_.begin(), stop_ids_.end(), id.id) != stop_ids_.end();
    send({.text = stop_id ? "" : text_.push(id.id), .id = id, .prompt = {}, .is_prompt = false});
    return !gone_ && !text_.stopped();
  }

  void on_end(RequestEnd reason) override {
    CompletionEnd end = end_of(reason);
    end.prompt_ids = prompt_ids_;
    end.generated_ids = generated_;
    end.cached_ids = cached_;
    const bool late = reason == RequestEnd::deadline;  // the client still listens, and gets the text of all its tokens
    if (end.reason == FinishedBy::stop || end.reason == FinishedBy::length || late) {
      if (!late) echo_prompt({});
      std::string rest = text_.finish();
      if (text_.stopped() && !late) end.reason = FinishedBy::stop;
      if (!rest.empty()) send({.text = std::move(rest), .id = {}, .prompt = {}, .is_prompt = false});
    }
    sink_->on_end(end);
  }

 private:
  void send(CompletionPiece piece) {
    if (!gone_) gone_ = !sink_->on_piece(std::move(piece));
  }

  void echo_prompt(std::span<const ScoredId> scored) {
    if (std::optional<std::string> text = std::exchange(echo_, std::nullopt)) {
      send({.text = *std::move(text), .id = {}, .prompt = {scored.begin(), scored.end()}, .is_prompt = true});
    }
  }

  CompletionEnd end_of(RequestEnd reason) const {
    switch (reason) {
      case RequestEnd::stop_id:
        return {FinishedBy::stop, ""};
      case RequestEnd::listener:
        if (text_.stopped()) return {FinishedBy::stop, ""};
        return {FinishedBy::cancelled, "the receiver has gone"};
      case RequestEnd::max_ids:
      case RequestEnd::full:
        return {FinishedBy::length, ""};
      case RequestEnd::cancelled:
        return {FinishedBy::cancelled, "cancelled"};
      case RequestEnd::deadline:
        return {FinishedBy::cancelled, "the time limit of this request is over"};
      case RequestEnd::not_finite:
        break;
    }
    return {FinishedBy::error,
            "the logits of this request are not finite: the model's weights or its arithmetic are damaged"};
  }

  const std::int64_t prompt_ids_;
  std::optional<std::string> echo_;  // the prompt's text, if it is still to be sent
  TextStream text_;
  const std::vector<std::int32_t> stop_ids_;
  const std::shared_ptr<CompletionSink> sink_;
  std::int64_t generated_ = 0;
  std::int64_t cached_ = 0;
  bool gone_ = false;  // the sink takes no more pieces
};

}  // namespace

bool read_completion_option(const std::string& name, const Json& value, CompletionOptions& options) {
  if (name == "max_tokens") {
    options.max_tokens = integer_option(name, value, 0, INT64_MAX);
  } else if (name == "temperature") {
    options.sampler.temperature = number_option(name, value, 0, std::numeric_limits<double>::max());
  } else if (name == "top_k") {
    options.sampler.top_k = integer_option(name, value, 0, INT64_MAX);
  } else if (name == "top_p") {
    options.sampler.top_p = number_option(name, value, 0, 1);
  } else if (name == "min_p") {
    options.sampler.min_p = number_option(name, value, 0, 1);
  } else if (name == "seed") {
    options.sampler.seed = static_cast<std::uint64_t>(integer_option(name, value, 0, INT64_MAX));
  } else if (name == "stop") {
    options.stop = read_stop(name, value);
  } else if (name == "ignore_eos") {
    options.ignore_eos = bool_option(name, value);
  } else if (name == "logprobs") {
    options.logprobs = static_cast<std::int32_t>(integer_option(name, value, 0, kMaxLogprobs));
  } else if (name == "echo") {
    options.echo = bool_option(name, value);
  } else {
    return read_rule(name, value, options.rules);
  }
  return true;
}

void check_completion_options(const CompletionOptions& options) {
  if (options.max_tokens == 0 && !options.echo) {
    fail(Exit::usage, "max_tokens: got 0, expected at least 1. 0 is for echo, which then scores the prompt alone");
  }
}

LogitRuleOptions completion_rules(const CompletionOptions& options, const Tokenizer* tokenizer,
                                  const ModelConfig& config) {
  std::vector<std::int32_t> end_ids = config.eos_ids;
  end_ids.insert(end_ids.end(), options.stop_ids.begin(), options.stop_ids.end());
  return logit_rules(options.rules, std::move(end_ids), options.max_tokens, tokenizer, config);
}

CompletionPrompt prompt_from_text(std::string_view text, const Tokenizer* tokenizer, Tokenizer::Special special,
                                  const ModelConfig& config, const std::string& name) {
  if (tokenizer == nullptr) {
    fail(Exit::usage, "%s: the model file has no tokenizer, so text cannot be read. Give token ids", name.c_str());
  }
  std::vector<std::int32_t> ids = tokenizer->encode(text, true, special);
  const std::size_t in_front = ids.empty() || tokenizer->bos_id().has_value() ? 1 : 0;
  return {start_ids(std::move(ids), config), utf8_replace_invalid(text), in_front};
}

CompletionPrompt prompt_from_ids(const Json& list, const Tokenizer* tokenizer, const ModelConfig& config,
                                 const std::string& name) {
  const std::string expected =
      format("integers from 0 to %lld in a list of at least one", static_cast<long long>(config.vocab_size - 1));
  if (!list.is_array() || list.empty()) refuse_option(name, list, expected);
  CompletionPrompt prompt;
  prompt.ids.reserve(list.size());
  for (const Json& item : list) {
    const std::optional<std::int64_t> id = json_integer(item);
    if (!id.has_value() || *id < 0 || *id >= config.vocab_size) {
      refuse_option(format("%s: id %zu", name.c_str(), prompt.ids.size() + 1), item, expected);
    }
    prompt.ids.push_back(static_cast<std::int32_t>(*id));
  }
  if (tokenizer == nullptr) return prompt;
  // Ids past the tokenizer's are padding rows of the embedding: they have no text.
  std::vector<std::int32_t> known;
  std::ranges::copy_if(prompt.ids, std::back_inserter(known),
                       [&](std::int32_t id) { return id < tokenizer->vocab_size(); });
  prompt.text = utf8_replace_invalid(tokenizer->decode(known));
  return prompt;
}

const char* finished_by_name(FinishedBy reason) {
  switch (reason) {
    case FinishedBy::stop:
      return "stop";
    case FinishedBy::length:
      return "length";
    case FinishedBy::cancelled:
      return "cancelled";
    case FinishedBy::error:
      return "error";
  }
  return "?";
}

Completion make_completion(CompletionPrompt prompt, const CompletionOptions& options, const Tokenizer* tokenizer,
                           const ModelConfig& config, std::shared_ptr<CompletionSink> sink) {
  check_completion_options(options);
  if (tokenizer == nullptr && !options.stop.empty()) {
    fail(Exit::usage, "stop: a stop text needs a tokenizer, and the model file has none");
  }
  SamplerOptions sampler = options.sampler;
  sampler.vocab_limit = tokenizer != nullptr ? tokenizer->vocab_size() : config.tokenizer_vocab;
  EngineRequest request;
  request.prompt = prompt.ids;
  request.sampling = sampling_plan(sampler);
  request.rules = options.logit_rules ? *options.logit_rules : completion_rules(options, tokenizer, config);
  request.stop_ids = options.ignore_eos ? options.rules.stop_token_ids : request.rules.end_ids;
  request.max_ids = options.max_tokens;
  request.alternatives = options.logprobs;
  request.score_prompt = options.echo && (options.logprobs >= 0 || options.max_tokens == 0);
  request.deadline = options.deadline;
  auto listener =
      std::make_shared<CompletionListener>(std::move(prompt), options, tokenizer, request.stop_ids, std::move(sink));
  return {std::move(request), std::move(listener)};
}

}  // namespace weft
