#include "llmc/infer/chat.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace weft {

Chat::Chat(ChatFormat format, const Tokenizer& tokenizer) : format_(std::move(format)), tokenizer_(tokenizer) {
  for (const std::string& end : format_.end_tokens()) {
    if (const std::optional<std::int32_t> id = tokenizer.id_of(end)) {
      stop_ids_.push_back(*id);
    } else {
      stop_texts_.push_back(end);
    }
  }
}

bool Chat::in_thoughts(std::span<const TextSegment> conversation) const {
  if (!thoughts()) return false;
  const auto last =
      std::find_if(conversation.rbegin(), conversation.rend(), [](const TextSegment& one) { return one.literal; });
  const auto behind = static_cast<std::size_t>(last - conversation.rbegin());
  const std::string text = joined_text(conversation.last(std::min(behind + 1, conversation.size())));
  const std::size_t begin = text.rfind(thoughts()->begin);
  return begin != std::string::npos && text.find(thoughts()->end, begin) == std::string::npos;
}

std::string joined_text(std::span<const TextSegment> segments) {
  std::string text;
  for (const TextSegment& segment : segments) text += segment.text;
  return text;
}

}  // namespace weft
