#include "llmc/serve/completions_request.h"

#include <algorithm>
#include <utility>

#include "llmc/base/json.h"

namespace weft {

namespace {

constexpr const char* kBody = "request body";

// Members that are not supported and would change the text, each with the value that, like null, changes nothing.
struct Unsupported {
  const char* name;
  Json neutral;
};
const std::vector<Unsupported>& unsupported() {
  static const std::vector<Unsupported> all = {
      {"suffix", ""},
      {"presence_penalty", 0},
      {"frequency_penalty", 0},
      {"repetition_penalty", 1},
      {"length_penalty", 1},
      {"logit_bias", Json::object()},
      {"min_tokens", 0},
      {"use_beam_search", false},
      {"stop_token_ids", Json::array()},
      {"bad_words", Json::array()},
      {"allowed_token_ids", Json::array()},
      {"response_format", {{"type", "text"}}},
      {"guided_json", nullptr},
      {"guided_regex", nullptr},
      {"guided_choice", nullptr},
      {"guided_grammar", nullptr},
      {"structured_outputs", nullptr},
      {"truncate_prompt_tokens", nullptr},
  };
  return all;
}

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

std::vector<CompletionPrompt> read_prompts(const Json& body, const CompletionsContext& context) {
  const auto found = body.find("prompt");
  if (found == body.end()) {
    throw RequestError(
        400, "prompt: missing, expected a text, a list of texts, a list of token ids, or a list of those", "prompt");
  }
  const Json& value = *found;
  const auto read = [&](const Json& one, const std::string& name) {
    return for_field("prompt", [&] {
      if (!one.is_string()) return prompt_from_ids(one, context.tokenizer, *context.config, name);
      return prompt_from_text(one.get_ref<const std::string&>(), context.tokenizer, context.special, *context.config,
                              name);
    });
  };
  const bool list = value.is_array() && !value.empty() && (value.front().is_string() || value.front().is_array());
  if (!list && !value.is_string() && !value.is_array()) {
    refuse("prompt", value, "a text, a list of texts, a list of token ids, or a list of those");
  }
  std::vector<CompletionPrompt> prompts;
  if (!list) {
    prompts.push_back(read(value, "prompt"));
    return prompts;
  }
  if (value.size() > kMaxPrompts) {
    throw RequestError(400, format("prompt: got %zu prompts, expected at most %zu", value.size(), kMaxPrompts),
                       "prompt");
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
  if (found->get_ref<const std::string&>() == served) return;
  throw RequestError(
      404,
      format("model: got %s, expected %s: this server has one model", shown(*found).c_str(), escaped(served).c_str()),
      "model", "model_not_found");
}

void check_unsupported(const Json& body, std::int64_t n) {
  for (const Unsupported& field : unsupported()) {
    const auto found = body.find(field.name);
    if (found == body.end() || found->is_null() || *found == field.neutral) continue;
    refuse(field.name, *found,
           field.neutral.is_null() ? std::string("null: it is not supported")
                                   : "null or " + json_text(field.neutral) + ": it is not supported");
  }
  const auto best_of = body.find("best_of");
  if (best_of != body.end() && !best_of->is_null() && *best_of != n) {
    refuse("best_of", *best_of, format("null or n, which is %lld", static_cast<long long>(n)));
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

CompletionsRequest parse_completions(std::string_view text, const CompletionsContext& context) {
  const JsonLimits limits = {.bytes = text.size(), .depth = kMaxRequestDepth, .values = kMaxRequestValues};
  const Json body = for_field("", [&] { return parse_json(text, kBody, limits); });
  if (!body.is_object()) {
    throw RequestError(400, format("%s: got a JSON %s, expected an object", kBody, body.type_name()));
  }
  check_model(body, context.model);
  CompletionsRequest request;
  request.n = read_count(body, "n", 1, kMaxChoices);
  check_unsupported(body, request.n);
  request.stream = read_flag(body, "stream");
  request.include_usage = read_include_usage(body, request.stream);

  CompletionOptions& options = request.options;
  options.max_tokens = kDefaultMaxTokens;
  options.sampler.temperature = 1;
  for (const auto& member : body.items()) {
    const std::string& name = member.key();
    const Json& value = member.value();
    if (value.is_null()) continue;
    // Other servers of this API take -1 for all ids, which is 0 here.
    if (name == "top_k" && value == -1) continue;
    for_field(name, [&] { return read_completion_option(name, value, options); });
    if (name == "seed") request.seeded = true;
  }
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
  request.prompts = read_prompts(body, context);
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
