// The body of POST /v1/chat/completions: from JSON that anybody may have sent to a conversation, its prompt and options.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "llmc/base/json_fwd.h"
#include "llmc/serve/text_request.h"

namespace weft {

// A conversation that somebody sent: messages and what comes behind them.
struct Conversation {
  std::vector<ChatMessage> messages;
  Chat::Tail tail = Chat::Tail::answer;
};
// The members messages, add_generation_prompt and continue_final_message of `body`. Other members are not looked at.
Conversation read_conversation(const Json& body);
bool is_of_conversation(const std::string& name);

// The chat of the model. 400 without one.
const Chat& need_chat(const RequestContext& context);

// As parse_completions().
TextRequest parse_chat(std::string_view text, const RequestContext& context, const Reserve& reserve = nullptr);

}  // namespace weft
