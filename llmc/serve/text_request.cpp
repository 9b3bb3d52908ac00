#include "llmc/serve/text_request.h"

#include <algorithm>
#include <optional>

#include "llmc/base/error.h"
#include "llmc/base/json.h"

namespace weft {

namespace {

constexpr const char* kBody = "request body";

[[noreturn]] void refuse_length(const std::string& message, const std::string& param) {
  throw RequestError(400, message, param, "context_length_exceeded");
}

// Any 64 bits, as in OpenAI's API, whose seeds may be negative.
std::uint64_t read_seed(const Json& value) {
  if (value.is_number_unsigned()) return value.get<std::uint64_t>();
  if (!value.is_number_integer()) refuse_field("seed", value, "an integer of 64 bits; -1: a random one");
  return static_cast<std::uint64_t>(value.get<std::int64_t>());
}

void read_stream_options(const Json& body, TextRequest& request) {
  const auto found = body.find("stream_options");
  if (found == body.end() || found->is_null()) return;
  if (!found->is_object()) refuse_field("stream_options", *found, "an object");
  if (!request.stream) refuse_field("stream_options", *found, "null: it goes with stream alone");
  for_field("stream_options", [&] {
    request.include_usage = read_flag(*found, "include_usage");
    request.usage_in_events = read_flag(*found, "continuous_usage_stats");
  });
}

}  // namespace

void check_model_name(const std::string& name, const std::string& served) {
  if (name == served) return;
  throw RequestError(404,
                     format("model: got %s, expected %s: this server has one model", escaped(name, 60).c_str(),
                            escaped(served).c_str()),
                     "model", "model_not_found");
}

void check_model(const Json& body, const std::string& served) {
  const auto found = body.find("model");
  if (found == body.end() || found->is_null()) return;
  if (!found->is_string()) refuse_field("model", *found, "a text");
  check_model_name(found->get_ref<const std::string&>(), served);
}

std::int64_t answer_values(const TextRequest& request, const ModelConfig& config) {
  const CompletionOptions& options = request.options;
  const bool scored = options.logprobs >= 0;
  std::int64_t tokens = 0;
  for (const CompletionPrompt& prompt : request.prompts) {
    const std::int64_t size = std::ssize(prompt.ids);
    if (options.echo && scored) tokens += size;
    if (!request.stream) tokens += std::clamp<std::int64_t>(config.max_positions - size, 0, options.max_tokens);
  }
  // A scored token: its own log-probability, those of the likeliest, and its text.
  return request.n * tokens * (scored ? options.logprobs + 2 : 1);
}

Json parse_request(std::string_view text) {
  const JsonLimits limits = {.bytes = text.size(), .depth = kMaxRequestDepth, .values = kMaxRequestValues};
  Json body = for_field("", [&] { return parse_json(text, kBody, limits); });
  if (!body.is_object()) {
    throw RequestError(400, format("%s: got a JSON %s, expected an object", kBody, body.type_name()));
  }
  return body;
}

void read_common_fields(const Json& body, const RequestContext& context, TextRequest& request) {
  check_model(body, context.model);
  request.n = read_count(body, "n", 1, kMaxChoices);
  request.stream = read_flag(body, "stream");
  read_stream_options(body, request);
}

void read_option(const std::string& name, const Json& value, TextApi api, TextRequest& request) {
  // Other servers of this API take -1 for all ids, which is 0 here, and for a seed that they choose.
  if ((name == "top_k" || name == "seed") && json_integer(value) == -1) return;
  if (name == "seed") {
    request.options.sampler.seed = read_seed(value);
    request.seeded = true;
    return;
  }
  if (for_field(name, [&] { return read_completion_option(name, value, request.options); })) return;
  if (const std::string wrong = foreign_field_error(name, value, api); !wrong.empty()) {
    throw RequestError(400, wrong, name);
  }
}

void check_options(const TextRequest& request, const RequestContext& context) {
  for_field("max_tokens", [&] { check_completion_options(request.options); });
  if (context.tokenizer == nullptr && !request.options.stop.empty()) {
    throw RequestError(400, "stop: a stop text needs a tokenizer, and the model file has none", "stop");
  }
}

void reserve_places(const TextRequest& request, std::int64_t prompts, const RequestContext& context,
                    const Reserve& reserve) {
  if (prompts > context.max_sequences / request.n) {
    throw RequestError(400,
                       format("n: got %lld for %lld prompts, expected at most %lld completions in one request",
                              static_cast<long long>(request.n), static_cast<long long>(prompts),
                              static_cast<long long>(context.max_sequences)),
                       "n");
  }
  if (reserve) reserve(prompts * request.n);
}

void check_text_size(std::string_view text, const std::string& name, const std::string& param, std::int64_t max_tokens,
                     const RequestContext& context) {
  if (!context.refusal || context.tokenizer == nullptr) return;
  const std::int64_t least = context.tokenizer->least_ids(text);
  const std::string refusal = least > 0 ? context.refusal(least, max_tokens) : "";
  if (refusal.empty()) return;
  refuse_length(format("%s: its %zu bytes are at least %lld ids. If no more: %s", name.c_str(), text.size(),
                       static_cast<long long>(least), refusal.c_str()),
                param);
}

void check_prompt_size(std::int64_t ids, const std::string& param, std::int64_t max_tokens,
                       const RequestContext& context, const std::string& place) {
  const std::string refusal = context.refusal ? context.refusal(ids, max_tokens) : "";
  if (!refusal.empty()) refuse_length(place.empty() ? refusal : place + ": " + refusal, param);
}

void complete_rules(TextRequest& request, const RequestContext& context) {
  try {
    request.options.logit_rules = completion_rules(request.options, context.tokenizer, *context.config);
  } catch (const Error& error) {
    if (error.code() != Exit::usage) throw;
    const std::string message = error.what();
    throw RequestError(400, message, message.substr(0, message.find(':')));  // it begins with the field
  }
}

void check_answer_values(TextRequest& request, const RequestContext& context) {
  request.values = answer_values(request, *context.config);
  if (request.values > context.max_values) {
    throw RequestError(
        400,
        format("the answer may have %lld values, the tokens and log-probabilities of all choices, expected "
               "at most %lld. %s",
               static_cast<long long>(request.values), static_cast<long long>(context.max_values),
               request.stream ? "Echo fewer prompts, choices or alternatives"
                              : "Stream it, or ask for fewer choices, tokens or alternatives"),
        request.options.logprobs >= 0 ? "logprobs" : "max_tokens");
  }
}

}  // namespace weft
