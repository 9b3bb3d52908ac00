// POST /v1/chat/completions.
#include <memory>
#include <optional>
#include <utility>

#include "llmc/serve/chat_choice.h"
#include "llmc/serve/chat_request.h"
#include "llmc/serve/text_endpoint.h"

namespace weft {

namespace {

std::unique_ptr<AnswerChoice> make_chat_choice(std::int64_t index, const TextRequest& request,
                                               const RequestContext& context,
                                               std::shared_ptr<const CompletionPrompt> prompt) {
  std::optional<ThoughtDivider> thoughts;
  if (const auto& marks = context.chat->thoughts()) thoughts.emplace(*marks, request.in_thoughts);
  return std::make_unique<ChatChoice>(index, context.tokenizer, request.options.logprobs, std::move(prompt),
                                      request.stream, std::move(thoughts));
}

constexpr TextAdapter kChat = {"chatcmpl-", "chat.completion", "chat.completion.chunk",
                               true,        parse_chat,        make_chat_choice};

}  // namespace

std::optional<HttpResponse> create_chat_completion(const Call& call) {
  return create_text(kChat, call);
}

}  // namespace weft
