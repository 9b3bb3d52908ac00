#include "llmc/serve/completions_request.h"

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/json.h"

namespace weft {

namespace {

constexpr const char* kPrompts = "a text, a list of texts, a list of token ids, or a list of those";

// Refuses a prompt by its size, which is known at once: a text that certainly has too many ids is not tokenized.
void check_size(const Json& prompt, const std::string& name, std::int64_t max_tokens, const RequestContext& context) {
  if (prompt.is_array()) {
    check_prompt_size(std::ssize(prompt), "prompt", max_tokens, context, name);
  } else if (prompt.is_string()) {
    check_text_size(prompt.get_ref<const std::string&>(), name, "prompt", max_tokens, context);
  }
}

// Rather than one prompt: a text, or the list of its ids.
bool is_list_of_prompts(const Json& value) {
  return value.is_array() && !value.empty() && (value.front().is_string() || value.front().is_array());
}

std::vector<CompletionPrompt> read_prompts(const Json& body, std::int64_t max_tokens, const RequestContext& context) {
  const auto found = body.find("prompt");
  if (found == body.end()) throw RequestError(400, format("prompt: missing, expected %s", kPrompts), "prompt");
  const Json& value = *found;
  const auto read = [&](const Json& one, const std::string& name) {
    CompletionPrompt prompt = for_field("prompt", [&] {
      if (!one.is_string()) return prompt_from_ids(one, context.tokenizer, *context.config, name);
      return prompt_from_text(one.get_ref<const std::string&>(), context.tokenizer, context.special, *context.config,
                              name);
    });
    check_prompt_size(std::ssize(prompt.ids), "prompt", max_tokens, context);
    return prompt;
  };
  if (!value.is_string() && !value.is_array()) refuse_field("prompt", value, kPrompts);
  const bool list = is_list_of_prompts(value);
  const std::span<const Json> all =
      list ? std::span<const Json>(value.get_ref<const Json::array_t&>()) : std::span(&value, 1);
  if (all.size() > kMaxPrompts) {
    throw RequestError(400, format("prompt: got %zu prompts, expected at most %zu", all.size(), kMaxPrompts), "prompt");
  }
  const auto name_of = [&](std::size_t i) { return list ? format("prompt[%zu]", i) : "prompt"; };
  for (std::size_t i = 0; i < all.size(); ++i) check_size(all[i], name_of(i), max_tokens, context);
  std::vector<CompletionPrompt> prompts;
  for (const Json& one : all) {
    const std::string name = name_of(prompts.size());
    if (one.type() != all.front().type()) refuse_field(name, one, "prompts of one kind, texts or lists of token ids");
    prompts.push_back(read(one, name));
  }
  return prompts;
}

void check_best_of(const Json& body, std::int64_t n) {
  const auto best_of = body.find("best_of");
  if (best_of != body.end() && !best_of->is_null() && *best_of != n) {
    refuse_field("best_of", *best_of, format("null or n, which is %lld", static_cast<long long>(n)));
  }
}

bool is_read_by_completions(const std::string& name) {
  constexpr std::string_view kNames[] = {"model", "prompt", "n", "best_of", "stream", "stream_options"};
  return std::ranges::find(kNames, name) != std::end(kNames);
}

}  // namespace

TextRequest parse_completions(std::string_view text, const RequestContext& context, const Reserve& reserve) {
  const Json body = parse_request(text);
  TextRequest request;
  read_common_fields(body, context, request);
  check_best_of(body, request.n);
  request.options.max_tokens = kDefaultMaxTokens;
  request.options.sampler.temperature = 1;
  for (const auto& [name, value] : body.items()) {
    if (!value.is_null() && !is_read_by_completions(name)) read_option(name, value, TextApi::completions, request);
  }
  check_options(request, context);

  const auto prompt = body.find("prompt");
  const bool list = prompt != body.end() && is_list_of_prompts(*prompt);
  reserve_places(request, list ? static_cast<std::int64_t>(std::min(prompt->size(), kMaxPrompts)) : 1, context,
                 reserve);
  request.prompts = read_prompts(body, request.options.max_tokens, context);
  complete_rules(request, context);
  check_answer_values(request, context);
  return request;
}

}  // namespace weft
