// How a model wants its conversation: a chat format is data that scripts/chat_template.py learned from the model's chat
// template. doc/chat.md specifies it; scripts/chat_format.py renders it in Python, and test/fixtures/chat has the vectors.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/base/json_fwd.h"
#include "llmc/text/text_segment.h"

namespace weft {

struct ChatMessage {
  std::string role;     // system, developer (the same), user, assistant
  std::string content;  // valid UTF-8
};

enum class ChatStepKind {
  strip,
  lstrip,
  rstrip,
  after_first,
  after_last,
  before_first,
  before_last,
  delete_all,
  remove_spans,
};

// One change of a content. Strips: `text` holds the characters, none for white space. The others: `text` is the marker, and
// `end` that of the end of a span.
struct ChatStep {
  ChatStepKind kind = ChatStepKind::strip;
  std::string text;
  std::string end;
};

using ChatSteps = std::vector<ChatStep>;

// `text`, which is valid UTF-8, after each of `steps`.
std::string apply_chat_steps(std::string_view text, const ChatSteps& steps);

// Immutable once made: any number of threads may use one at the same time.
class ChatFormat {
 public:
  struct Thoughts {
    std::string begin;
    std::string end;
  };

  // Checks all of `value`, the chat_format of a model file. Exit::bad_file with "<source>: <member>: ...".
  static ChatFormat from_json(const Json& value, const std::string& source);

  // The conversation. `generation`: with the prompt for an answer. Without `tail`, and then without `generation`, the last
  // message stays open. A conversation that the format does not take: Exit::usage with the reason.
  std::vector<TextSegment> render(std::span<const ChatMessage> messages, bool generation, bool tail = true) const;

  const std::vector<std::string>& end_tokens() const { return end_; }  // beside the model's eos_ids
  const std::optional<Thoughts>& thoughts() const { return thoughts_; }

  static constexpr std::size_t kMaxMessages = 4096;
  static constexpr std::size_t kMaxRenderedBytes = 64 << 20;

 private:
  friend class ChatFormatReader;
  friend class ChatRenderer;

  enum class Source { literal, content, system };
  struct Part {
    Source source = Source::literal;
    std::string text;  // of a literal
    ChatSteps steps;
  };
  // What a rule may ask of a message's place. Empty: any.
  struct Condition {
    std::optional<std::string> kind, zone, system, previous_kind;
    std::optional<bool> last, generation;
  };
  struct Rule {
    std::string previous, role;
    Condition when;
    std::vector<Part> parts;
  };
  struct Tests {
    bool empty = false;
    bool blank = false;
    std::optional<std::string> contains, starts, ends;
    std::optional<ChatSteps> gone;
    bool hold(std::string_view content) const;
  };
  struct Kind {
    std::string role;
    Tests tests;
    std::string name;    // empty if the content is refused
    std::string refuse;  // why
  };
  struct Refusal {
    std::string previous, role, message;
  };

  bool alternate_ = false;
  std::vector<Kind> kinds_;
  std::vector<Rule> rules_;
  std::vector<Refusal> refusals_;
  std::vector<std::string> end_;
  std::optional<Thoughts> thoughts_;
};

}  // namespace weft
