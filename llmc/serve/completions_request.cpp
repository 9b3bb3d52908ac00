#include "llmc/serve/completions_request.h"

#include <algorithm>
#include <utility>

#include "llmc/base/json.h"
#include "llmc/serve/request_fields.h"

namespace weft {

namespace {

constexpr const char* kBody = "request body";

std::string shown(const Json& value) {
  return escaped(json_text(value), 60);
}

[[noreturn]] void refuse(const std::string& name, const Json& got, const std::string& expected) {
  throw RequestError(400, format("%s: got %s, expected %s", name.c_str(), shown(got).c_str(), expected.c_str()), name);
}

bool read_flag(const Json& body, const std::string& name) {
  const auto found = body.find(name);
  if (found == body.end() || found->is_null()) return false;
  if (!found->is_boolean()) refuse(name, *found, "true or false");
  return found->get<bool>();
}

std::int64_t read_count(const Json& body, const std::string& name, std::int64_t otherwise, std::int64_t high) {
  const auto found = body.find(name);
  if (found == body.end() || found->is_null()) return otherwise;
  const std::optional<std::int64_t> count = json_integer(*found);
  if (count && *count >= 1 && *count <= high) return *count;
  refuse(name, *found, format("an integer from 1 to %lld", static_cast<long long>(high)));
}

// Runs a reader that batch files use, too, and turns its error into a RequestError about the field `name`. The messages
// of these readers begin with the field: "temperature: got ...".
template <typename Read>
auto for_field(const std::string& name, Read&& read) {
  try {
    return std::forward<Read>(read)();
  } catch (const RequestError&) {
    throw;
  } catch (const Error& error) {
    if (error.code() != Exit::usage && error.code() != Exit::bad_file) throw;
    throw RequestError(400, error.what(), name);
  }
}

[[noreturn]] void refuse_length(const std::string& message) {
  throw RequestError(400, message, "prompt", "context_length_exceeded");
}

// Refuses a prompt by its size, which is known at once: a text that certainly has too many ids is not tokenized.
void check_size(const Json& prompt, const std::string& name, std::int64_t max_tokens,
                const CompletionsContext& context) {
  if (!context.refusal) return;
  if (prompt.is_array()) {
    const std::string refusal = context.refusal(std::ssize(prompt), max_tokens);
    if (!refusal.empty()) refuse_length(name + ": " + refusal);
  } else if (prompt.is_string() && context.tokenizer != nullptr) {
    const std::string& text = prompt.get_ref<const std::string&>();
    const std::int64_t least = context.tokenizer->least_ids(text);
    const std::string refusal = least > 0 ? context.refusal(least, max_tokens) : "";
    if (refusal.empty()) return;
    refuse_length(format("%s: its %zu bytes are at least %lld ids. If no more: %s", name.c_str(), text.size(),
                         static_cast<long long>(least), refusal.c_str()));
  }
}

std::vector<CompletionPrompt> read_prompts(const Json& body, std::int64_t max_tokens,
                                           const CompletionsContext& context) {
  const auto found = body.find("prompt");
  if (found == body.end()) {
    throw RequestError(
        400, "prompt: missing, expected a text, a list of texts, a list of token ids, or a list of those", "prompt");
  }
  const Json& value = *found;
  const auto read = [&](const Json& one, const std::string& name) {
    CompletionPrompt prompt = for_field("prompt", [&] {
      if (!one.is_string()) return prompt_from_ids(one, context.tokenizer, *context.config, name);
      return prompt_from_text(one.get_ref<const std::string&>(), context.tokenizer, context.special, *context.config,
                              name);
    });
    const std::string refusal = context.refusal ? context.refusal(std::ssize(prompt.ids), max_tokens) : "";
    if (!refusal.empty()) refuse_length(refusal);
    return prompt;
  };
  const bool list = value.is_array() && !value.empty() && (value.front().is_string() || value.front().is_array());
  if (!list && !value.is_string() && !value.is_array()) {
    refuse("prompt", value, "a text, a list of texts, a list of token ids, or a list of those");
  }
  std::vector<CompletionPrompt> prompts;
  if (!list) {
    check_size(value, "prompt", max_tokens, context);
    prompts.push_back(read(value, "prompt"));
    return prompts;
  }
  if (value.size() > kMaxPrompts) {
    throw RequestError(400, format("prompt: got %zu prompts, expected at most %zu", value.size(), kMaxPrompts),
                       "prompt");
  }
  for (std::size_t i = 0; i < value.size(); ++i) {
    check_size(value[i], format("prompt[%zu]", i), max_tokens, context);
  }
  for (const Json& one : value) {
    const std::string name = format("prompt[%zu]", prompts.size());
    if (one.type() != value.front().type()) refuse(name, one, "prompts of one kind, texts or lists of token ids");
    prompts.push_back(read(one, name));
  }
  return prompts;
}

void check_model(const Json& body, const std::string& served) {
  const auto found = body.find("model");
  if (found == body.end() || found->is_null()) return;
  if (!found->is_string()) refuse("model", *found, "a text");
  check_model_name(found->get_ref<const std::string&>(), served);
}

void check_best_of(const Json& body, std::int64_t n) {
  const auto best_of = body.find("best_of");
  if (best_of != body.end() && !best_of->is_null() && *best_of != n) {
    refuse("best_of", *best_of, format("null or n, which is %lld", static_cast<long long>(n)));
  }
}

// Any 64 bits, as in OpenAI's API, whose seeds may be negative.
std::uint64_t read_seed(const Json& value) {
  if (value.is_number_unsigned()) return value.get<std::uint64_t>();
  if (!value.is_number_integer()) refuse("seed", value, "an integer of 64 bits; -1: a random one");
  return static_cast<std::uint64_t>(value.get<std::int64_t>());
}

bool is_read_elsewhere(const std::string& name) {
  constexpr std::string_view kNames[] = {"model", "prompt", "n", "best_of", "stream", "stream_options"};
  return std::ranges::find(kNames, name) != std::end(kNames);
}

// What of the members is read by itself, one after the other.
void read_options(const Json& body, CompletionsRequest& request) {
  for (const auto& member : body.items()) {
    const std::string& name = member.key();
    const Json& value = member.value();
    if (value.is_null() || is_read_elsewhere(name)) continue;
    // Other servers of this API take -1 for all ids, which is 0 here, and for a seed that they choose.
    if ((name == "top_k" || name == "seed") && json_integer(value) == -1) continue;
    if (name == "seed") {
      request.options.sampler.seed = read_seed(value);
      request.seeded = true;
      continue;
    }
    if (for_field(name, [&] { return read_completion_option(name, value, request.options); })) continue;
    if (const std::string wrong = foreign_field_error(name, value); !wrong.empty()) {
      throw RequestError(400, wrong, name);
    }
  }
}

bool read_include_usage(const Json& body, bool stream) {
  const auto found = body.find("stream_options");
  if (found == body.end() || found->is_null()) return false;
  if (!found->is_object()) refuse("stream_options", *found, "an object");
  if (!stream) refuse("stream_options", *found, "null: it goes with stream alone");
  return for_field("stream_options", [&] { return read_flag(*found, "include_usage"); });
}

}  // namespace

void check_model_name(const std::string& name, const std::string& served) {
  if (name == served) return;
  throw RequestError(404,
                     format("model: got %s, expected %s: this server has one model", escaped(name, 60).c_str(),
                            escaped(served).c_str()),
                     "model", "model_not_found");
}

std::int64_t answer_values(const CompletionsRequest& request, const ModelConfig& config) {
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

CompletionsRequest parse_completions(std::string_view text, const CompletionsContext& context,
                                     const std::function<void(std::int64_t completions)>& reserve) {
  const JsonLimits limits = {.bytes = text.size(), .depth = kMaxRequestDepth, .values = kMaxRequestValues};
  const Json body = for_field("", [&] { return parse_json(text, kBody, limits); });
  if (!body.is_object()) {
    throw RequestError(400, format("%s: got a JSON %s, expected an object", kBody, body.type_name()));
  }
  check_model(body, context.model);
  CompletionsRequest request;
  request.n = read_count(body, "n", 1, kMaxChoices);
  check_best_of(body, request.n);
  request.stream = read_flag(body, "stream");
  request.include_usage = read_include_usage(body, request.stream);

  CompletionOptions& options = request.options;
  options.max_tokens = kDefaultMaxTokens;
  options.sampler.temperature = 1;
  read_options(body, request);
  for_field("max_tokens", [&] { check_completion_options(options); });
  if (context.tokenizer == nullptr && !options.stop.empty()) {
    throw RequestError(400, "stop: a stop text needs a tokenizer, and the model file has none", "stop");
  }

  // Checked before the prompts are tokenized, which takes long.
  const auto prompt = body.find("prompt");
  const bool list = prompt != body.end() && prompt->is_array() && !prompt->empty() && !prompt->front().is_number();
  const std::int64_t prompts = list ? static_cast<std::int64_t>(std::min(prompt->size(), kMaxPrompts)) : 1;
  if (prompts > context.max_sequences / request.n) {
    throw RequestError(400,
                       format("n: got %lld for %lld prompts, expected at most %lld completions in one request",
                              static_cast<long long>(request.n), static_cast<long long>(prompts),
                              static_cast<long long>(context.max_sequences)),
                       "n");
  }
  if (reserve) reserve(prompts * request.n);
  request.prompts = read_prompts(body, options.max_tokens, context);
  request.values = answer_values(request, *context.config);
  if (request.values > context.max_values) {
    throw RequestError(
        400,
        format("the answer may have %lld values, the tokens and log-probabilities of all choices, expected "
               "at most %lld. %s",
               static_cast<long long>(request.values), static_cast<long long>(context.max_values),
               request.stream ? "Echo fewer prompts, choices or alternatives"
                              : "Stream it, or ask for fewer choices, tokens or alternatives"),
        options.logprobs >= 0 ? "logprobs" : "max_tokens");
  }
  return request;
}

}  // namespace weft
