// A model's chats: its chat format (doc/chat.md) with its tokenizer.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/json_fwd.h"
#include "llmc/text/chat_format.h"
#include "llmc/text/tokenizer.h"

namespace weft {

// Immutable once made: any number of threads may use one at the same time.
class Chat {
 public:
  // `tokenizer` must outlive it.
  Chat(ChatFormat format, const Tokenizer& tokenizer);

  // What comes behind the last message: the prompt for an answer; the end of the conversation; or nothing, because the answer
  // continues that message.
  enum class Tail { answer, end, open };
  // A conversation that the format does not take: Exit::usage with the reason.
  std::vector<TextSegment> render(std::span<const ChatMessage> messages, Tail tail) const {
    return format_.render(messages, tail == Tail::answer, tail != Tail::open);
  }
  std::vector<std::int32_t> ids(std::span<const TextSegment> conversation) const {
    return tokenizer_.encode(conversation);
  }
  // Whether what continues the conversation begins inside thoughts.
  bool in_thoughts(std::span<const TextSegment> conversation) const;

  // What ends an answer beside the model's eos_ids: tokens, and texts where the tokenizer has no such token.
  const std::vector<std::int32_t>& stop_ids() const { return stop_ids_; }
  const std::vector<std::string>& stop_texts() const { return stop_texts_; }
  const std::optional<ChatFormat::Thoughts>& thoughts() const { return format_.thoughts(); }

 private:
  ChatFormat format_;
  const Tokenizer& tokenizer_;
  std::vector<std::int32_t> stop_ids_;
  std::vector<std::string> stop_texts_;
};

// The segments as one text.
std::string joined_text(std::span<const TextSegment> segments);

}  // namespace weft
