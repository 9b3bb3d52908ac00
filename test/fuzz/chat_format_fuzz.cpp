// A chat format as a model file has it, and a conversation in it: u8 flags, the format's JSON, then for each message a byte 0, a
// byte that chooses its role, and its content. Flag 1: with the prompt for an answer; 2: the last message stays open; 4: the
// roles are system, user, assistant, user, ... instead.
#include <array>

#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/text/chat_format.h"
#include "llmc/text/thoughts.h"
#include "test/fuzz/served_chat.h"
#include "test/fuzz/target.h"

namespace weft::fuzz {
namespace {

std::vector<ChatMessage> messages_of(std::string_view text, bool in_turns) {
  constexpr std::array kRoles = {"system", "user", "assistant", "developer", "tool"};
  std::vector<ChatMessage> messages;
  while (!text.empty()) {
    text.remove_prefix(1);
    const std::string_view one = text.substr(0, text.find('\0'));
    text.remove_prefix(one.size());
    const std::size_t turn = messages.empty() ? 0 : 2 - messages.size() % 2;  // user after system
    const std::size_t role = in_turns ? turn : one.empty() ? 1 : static_cast<unsigned char>(one[0]) % kRoles.size();
    messages.push_back({kRoles[role], utf8_replace_invalid(one.substr(one.empty() || in_turns ? 0 : 1))});
  }
  return messages;
}

std::size_t specials(const std::vector<std::int32_t>& ids) {
  check_ids(ids, neox_tokenizer().vocab_size());
  return static_cast<std::size_t>(
      std::ranges::count_if(ids, [](std::int32_t id) { return neox_tokenizer().is_special(id); }));
}

// Nobody injects a role: special tokens are of literals, and of nothing else.
void check_segments(const Chat& chat, std::vector<TextSegment> segments) {
  std::size_t of_literals = 0;
  for (const TextSegment& segment : segments) {
    FUZZ_CHECK(!segment.text.empty() && utf8_replace_invalid(segment.text) == segment.text);
    if (segment.literal) of_literals += specials(chat.ids(std::array{segment}));
  }
  FUZZ_CHECK(specials(chat.ids(segments)) == of_literals);
  chat.in_thoughts(segments);
  for (TextSegment& segment : segments) segment.literal = false;
  FUZZ_CHECK(specials(chat.ids(segments)) == 0);
}

// An answer is divided in the same way in whatever pieces it comes.
void check_thoughts(const ChatFormat::Thoughts& marks, std::string_view text, bool inside) {
  const auto add = [](ThoughtDivider::Parts& all, const ThoughtDivider::Parts& more) {
    all.thoughts += more.thoughts;
    all.said += more.said;
  };
  ThoughtDivider divider(marks, inside), of_whole(marks, inside);
  ThoughtDivider::Parts parts, whole;
  add(whole, of_whole.push(text));
  add(whole, of_whole.finish());
  FUZZ_CHECK(whole.thoughts.size() + whole.said.size() <= text.size());
  while (!text.empty()) {
    const std::size_t length = utf8_sequence_length(text);
    add(parts, divider.push(text.substr(0, length)));
    text.remove_prefix(length);
  }
  add(parts, divider.finish());
  FUZZ_CHECK(parts.thoughts == whole.thoughts && parts.said == whole.said);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const auto flags = input.take<std::uint8_t>();
  const std::string_view rest = input.take_rest();
  const std::string_view json = rest.substr(0, rest.find('\0'));
  const std::vector<ChatMessage> messages = messages_of(rest.substr(json.size()), (flags & 4) != 0);
  accepts([&] {
    const Chat chat(ChatFormat::from_json(parse_json(json, "chat_format"), "chat_format"), neox_tokenizer());
    const Chat::Tail tail = (flags & 2) != 0   ? Chat::Tail::open
                            : (flags & 1) != 0 ? Chat::Tail::answer
                                               : Chat::Tail::end;
    const std::vector<TextSegment> segments = chat.render(messages, tail);
    check_segments(chat, segments);
    if (chat.thoughts()) check_thoughts(*chat.thoughts(), joined_text(segments), chat.in_thoughts(segments));
  });
  return 0;
}

}  // namespace weft::fuzz
