#include "llmc/serve/tokenize_request.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/infer/completion.h"
#include "llmc/serve/chat_request.h"

namespace weft {

namespace {

// The object that is the body, checked but for its own fields.
Json read_body(std::string_view text, const RequestContext& context) {
  Json body = parse_request(text);
  check_model(body, context.model);
  return body;
}

void refuse_others(const Json& body, std::initializer_list<std::string_view> known) {
  for (const auto& [name, value] : body.items()) {
    if (value.is_null() || name == "model" || std::ranges::find(known, name) != known.end()) continue;
    throw RequestError(400, "got " + escaped(name, 60) + ", a field that this endpoint does not have. Leave it out",
                       name);
  }
}

// Text as it stands in a document: names of special tokens are those tokens.
std::vector<std::int32_t> ids_of_text(const Json& body, const Tokenizer& tokenizer) {
  refuse_others(body, {"prompt", "add_special_tokens", "return_token_strs"});
  const Json& prompt = body["prompt"];
  if (!prompt.is_string()) refuse_field("prompt", prompt, "a text");
  const bool in_front = read_flag(body, "add_special_tokens", true);
  return for_field("prompt", [&] {
    return tokenizer.encode(prompt.get_ref<const std::string&>(), in_front, Tokenizer::Special::allow);
  });
}

std::vector<std::int32_t> ids_of_messages(const Json& body, const RequestContext& context) {
  refuse_others(
      body, {"messages", "add_generation_prompt", "continue_final_message", "add_special_tokens", "return_token_strs"});
  if (read_flag(body, "add_special_tokens")) {
    refuse_field("add_special_tokens", true, "false beside messages: the chat format has those that it wants");
  }
  const Chat& chat = need_chat(context);
  const Conversation conversation = read_conversation(body);
  return for_field("messages", [&] { return chat.ids(chat.render(conversation.messages, conversation.tail)); });
}

}  // namespace

const Tokenizer& need_tokenizer(const RequestContext& context) {
  if (context.tokenizer != nullptr) return *context.tokenizer;
  throw RequestError(400, "the model file has no tokenizer: its tokens have no text");
}

Json tokenized(std::string_view text, const RequestContext& context) {
  const Json body = read_body(text, context);
  const Tokenizer& tokenizer = need_tokenizer(context);
  const bool has_prompt = body.contains("prompt"), has_messages = body.contains("messages");
  if (has_prompt == has_messages) throw RequestError(400, "expected either prompt or messages", "prompt");
  const std::vector<std::int32_t> ids = has_prompt ? ids_of_text(body, tokenizer) : ids_of_messages(body, context);
  Json strings;
  if (read_flag(body, "return_token_strs")) {
    strings = Json::array();
    for (const std::int32_t id : ids) strings.push_back(utf8_replace_invalid(tokenizer.token_bytes(id)));
  }
  return {{"count", ids.size()},
          {"max_model_len", context.config->max_positions},
          {"tokens", ids},
          {"token_strs", strings}};
}

Json detokenized(std::string_view text, const RequestContext& context) {
  const Json body = read_body(text, context);
  refuse_others(body, {"tokens"});
  need_tokenizer(context);
  const auto tokens = body.find("tokens");
  if (tokens == body.end()) throw RequestError(400, "tokens: missing, expected a list of token ids", "tokens");
  if (*tokens == Json::array()) return {{"prompt", ""}};
  return {{"prompt", for_field("tokens", [&] {
             return prompt_from_ids(*tokens, context.tokenizer, *context.config, "tokens").text;
           })}};
}

}  // namespace weft
