#include "llmc/serve/chat_request.h"

#include <algorithm>
#include <optional>

#include "llmc/base/error.h"
#include "llmc/base/json.h"

namespace weft {

namespace {

constexpr const char* kMessages = "messages";

// 400 about a place within the messages.
[[noreturn]] void refuse_place(const std::string& place, const std::string& problem) {
  throw RequestError(400, place + problem, kMessages);
}
[[noreturn]] void refuse_value(const std::string& place, const Json& got, const std::string& expected) {
  refuse_place(place, format(": got %s, expected %s", escaped(json_text(got), 60).c_str(), expected.c_str()));
}

// The place of the member `name`, which may be any text.
std::string member_of(const std::string& place, const std::string& name) {
  const auto is_plain = [](char c) { return c == '_' || (c >= 'a' && c <= 'z'); };
  return place + "." + (std::ranges::all_of(name, is_plain) ? name.substr(0, 60) : escaped(name, 60));
}

// A part of a content. Only texts: images, sound and files are refused by their type.
const std::string& read_part(const Json& part, const std::string& place) {
  if (!part.is_object()) refuse_value(place, part, R"({"type": "text", "text": ...})");
  const auto type = part.find("type"), text = part.find("text");
  if (type == part.end() || !type->is_string()) refuse_place(place + ".type", ": missing, expected \"text\"");
  if (*type != "text") refuse_value(place + ".type", *type, "\"text\": nothing else is supported");
  if (text == part.end() || !text->is_string()) refuse_place(place + ".text", ": missing, expected a text");
  for (const auto& member : part.items()) {
    if (member.key() == "type" || member.key() == "text" || member.key() == "annotations" || member.value().is_null()) {
      continue;
    }
    refuse_place(member_of(place, member.key()), ": a field that this server does not know. Leave it out");
  }
  return text->get_ref<const std::string&>();
}

std::string read_content(const Json& message, const std::string& place) {
  const auto content = message.find("content");
  if (content == message.end() || content->is_null()) refuse_place(place, ": missing, expected a text");
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array() || content->empty()) {
    refuse_value(place, *content, R"(a text, or a list of {"type": "text", "text": ...})");
  }
  std::string joined;
  for (std::size_t i = 0; i < content->size(); ++i) {
    if (i > 0) joined += '\n';
    joined += read_part((*content)[i], format("%s[%zu]", place.c_str(), i));
  }
  return joined;
}

std::string read_role(const Json& message, const std::string& place) {
  const auto role = message.find("role");
  const char* expected = "system, developer, user or assistant";
  if (role == message.end() || role->is_null()) refuse_place(place, format(": missing, expected %s", expected));
  for (const char* known : {"system", "developer", "user", "assistant"}) {
    if (*role == known) return known;
  }
  const bool of_tools = *role == "tool" || *role == "function";
  refuse_value(place, *role, std::string(expected) + (of_tools ? ": tools are not supported" : ""));
}

// Members of a message that ask for nothing here: what answers of this API bring with them, and names for the client's own use.
bool is_neutral(const std::string& name, const Json& value, const std::string& role) {
  if (value.is_null() || name == "name") return true;
  if (name == "tool_calls" || name == "annotations") return value == Json::array();
  return role == "assistant" && (name == "reasoning_content" || name == "reasoning" || name == "refusal");
}

ChatMessage read_message(const Json& message, const std::string& place) {
  if (!message.is_object()) refuse_value(place, message, R"({"role": ..., "content": ...})");
  ChatMessage result{read_role(message, place + ".role"), ""};
  for (const auto& member : message.items()) {
    const std::string& name = member.key();
    if (name == "role" || name == "content" || is_neutral(name, member.value(), result.role)) continue;
    const std::string of = member_of(place, name);
    if (name == "tool_calls" || name == "function_call" || name == "tool_call_id") {
      refuse_value(of, member.value(), "null: tools are not supported");
    }
    refuse_place(of, ": a field that this server does not know: it would have no effect. Leave it out");
  }
  result.content = read_content(message, place + ".content");
  return result;
}

bool is_read_by_chat(const std::string& name) {
  constexpr std::string_view kNames[] = {
      "model", "n", "stream", "stream_options", "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens"};
  return std::ranges::find(kNames, name) != std::end(kNames) || is_of_conversation(name);
}

// Nothing: as many as there is room for.
std::optional<std::int64_t> read_max_tokens(const Json& body) {
  const std::int64_t older = read_count(body, "max_tokens", 0, INT64_MAX),
                     newer = read_count(body, "max_completion_tokens", 0, INT64_MAX);
  if (older > 0 && newer > 0 && older != newer) {
    refuse_field("max_tokens", older,
                 format("null or max_completion_tokens, which is %lld", static_cast<long long>(newer)));
  }
  if (older == 0 && newer == 0) return std::nullopt;
  return std::max(older, newer);
}

// The likeliest ids of each token; -1: no log-probabilities.
std::int32_t read_logprobs(const Json& body) {
  const bool wanted = read_flag(body, "logprobs");
  const auto top = body.find("top_logprobs");
  if (top == body.end() || top->is_null()) return wanted ? 0 : -1;
  const std::optional<std::int64_t> count = json_integer(*top);
  if (!count || *count < 0 || *count > kMaxLogprobs) {
    refuse_field("top_logprobs", *top, format("an integer from 0 to %d", kMaxLogprobs));
  }
  if (!wanted && *count > 0) refuse_field("top_logprobs", *top, "null or 0: it goes with logprobs, which is not true");
  return wanted ? static_cast<std::int32_t>(*count) : -1;
}

// The prompt of the conversation, tokenized.
void read_prompt(const Conversation& conversation, std::optional<std::int64_t> max_tokens,
                 const RequestContext& context, TextRequest& request) {
  const Chat& chat = need_chat(context);
  CompletionOptions& options = request.options;
  options.max_tokens = max_tokens.value_or(1);
  const std::vector<TextSegment> segments =
      for_field(kMessages, [&] { return chat.render(conversation.messages, conversation.tail); });
  check_text_size(joined_text(segments), kMessages, kMessages, options.max_tokens, context);
  CompletionPrompt prompt;
  prompt.ids = for_field(kMessages, [&] { return chat.ids(segments); });
  if (prompt.ids.empty()) refuse_place(kMessages, ": there is no text in them");
  check_prompt_size(std::ssize(prompt.ids), kMessages, options.max_tokens, context);
  if (!max_tokens) {
    options.max_tokens = context.room ? context.room(std::ssize(prompt.ids)) : context.config->max_positions;
  }
  request.in_thoughts = chat.in_thoughts(segments);
  request.prompts.push_back(std::move(prompt));
}

}  // namespace

bool is_of_conversation(const std::string& name) {
  return name == kMessages || name == "add_generation_prompt" || name == "continue_final_message";
}

Conversation read_conversation(const Json& body) {
  const auto messages = body.find(kMessages);
  if (messages == body.end() || messages->is_null()) refuse_place(kMessages, ": missing, expected a list of messages");
  if (!messages->is_array()) refuse_value(kMessages, *messages, "a list of messages");
  if (messages->empty() || messages->size() > ChatFormat::kMaxMessages) {
    refuse_place(kMessages,
                 format(": got %zu messages, expected 1 to %zu", messages->size(), ChatFormat::kMaxMessages));
  }
  Conversation result;
  result.messages.reserve(messages->size());
  for (std::size_t i = 0; i < messages->size(); ++i) {
    result.messages.push_back(read_message((*messages)[i], format("%s[%zu]", kMessages, i)));
  }
  const bool open = read_flag(body, "continue_final_message");
  const bool answer = read_flag(body, "add_generation_prompt", !open);
  if (open && answer) {
    throw RequestError(400, "add_generation_prompt: got true, expected false beside continue_final_message",
                       "add_generation_prompt");
  }
  if (open && result.messages.back().role != "assistant") {
    throw RequestError(
        400,
        format("continue_final_message: got true, but the last message is of the role %s, expected assistant",
               result.messages.back().role.c_str()),
        "continue_final_message");
  }
  result.tail = open ? Chat::Tail::open : answer ? Chat::Tail::answer : Chat::Tail::end;
  return result;
}

const Chat& need_chat(const RequestContext& context) {
  if (context.chat != nullptr) return *context.chat;
  throw RequestError(
      400,
      "messages: the model file has no chat format. Convert a model that has a chat template, or give one to the "
      "converter with --chat-format; POST /v1/completions takes a prompt",
      kMessages);
}

TextRequest parse_chat(std::string_view text, const RequestContext& context, const Reserve& reserve) {
  const Json body = parse_request(text);
  TextRequest request;
  read_common_fields(body, context, request);
  request.options.sampler.temperature = 1;
  request.options.logprobs = read_logprobs(body);
  const std::optional<std::int64_t> max_tokens = read_max_tokens(body);
  for (const auto& [name, value] : body.items()) {
    if (value.is_null() || is_read_by_chat(name)) continue;
    if (name == "echo") {
      if (value != false) refuse_field(name, value, "false: it is not supported");
      continue;
    }
    read_option(name, value, TextApi::chat, request);
  }
  check_options(request, context);
  const Chat& chat = need_chat(context);
  const Conversation conversation = read_conversation(body);
  reserve_places(request, 1, context, reserve);
  read_prompt(conversation, max_tokens, context, request);
  CompletionOptions& options = request.options;
  options.stop_ids = chat.stop_ids();
  if (!options.ignore_eos) options.stop.insert(options.stop.end(), chat.stop_texts().begin(), chat.stop_texts().end());
  complete_rules(request, context);
  check_answer_values(request, context);
  return request;
}

}  // namespace weft
