#include "llmc/text/chat_format.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/text/code_points.h"
#include "llmc/text/json_node.h"

namespace weft {

namespace {

constexpr std::size_t kMaxRules = 4096;
constexpr std::size_t kMaxKinds = 64;
constexpr std::size_t kMaxEnds = 64;
constexpr std::size_t kMaxParts = 16;
constexpr std::size_t kMaxSteps = 8;
constexpr std::size_t kMaxTextBytes = 64 << 10;

// ---- steps -----------------------------------------------------------------------------------------------------------

// What str.strip() of Python takes.
bool is_white_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_stripped(std::string_view character, std::string_view characters) {
  if (characters.empty()) return is_white_space(code_point_of(character));
  return characters.find(character) != std::string_view::npos;  // both are valid: no match begins inside a character
}

std::size_t last_character(std::string_view text) {
  std::size_t begin = text.size() - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return begin;
}

std::string_view stripped_left(std::string_view text, std::string_view characters) {
  while (!text.empty()) {
    const std::size_t length = std::max<std::size_t>(utf8_sequence_length(text), 1);
    if (!is_stripped(text.substr(0, length), characters)) break;
    text.remove_prefix(length);
  }
  return text;
}

std::string_view stripped_right(std::string_view text, std::string_view characters) {
  while (!text.empty()) {
    const std::size_t begin = last_character(text);
    if (!is_stripped(text.substr(begin), characters)) break;
    text = text.substr(0, begin);
  }
  return text;
}

// `text` in the pieces between the occurrences of `marker`, found from left to right.
template <typename OnPiece>
void split(std::string_view text, std::string_view marker, const OnPiece& on_piece) {
  for (std::size_t found = text.find(marker); found != std::string_view::npos; found = text.find(marker)) {
    on_piece(text.substr(0, found));
    text.remove_prefix(found + marker.size());
  }
  on_piece(text);
}

std::string_view cut(std::string_view text, const ChatStep& step) {
  const bool first = step.kind == ChatStepKind::after_first || step.kind == ChatStepKind::before_first;
  const bool after = step.kind == ChatStepKind::after_first || step.kind == ChatStepKind::after_last;
  const std::size_t found = first ? text.find(step.text) : text.rfind(step.text);
  if (found == std::string_view::npos) return text;
  return after ? text.substr(found + step.text.size()) : text.substr(0, found);
}

std::string applied(std::string_view text, const ChatStep& step) {
  switch (step.kind) {
    case ChatStepKind::strip:
      return std::string(stripped_right(stripped_left(text, step.text), step.text));
    case ChatStepKind::lstrip:
      return std::string(stripped_left(text, step.text));
    case ChatStepKind::rstrip:
      return std::string(stripped_right(text, step.text));
    case ChatStepKind::after_first:
    case ChatStepKind::after_last:
    case ChatStepKind::before_first:
    case ChatStepKind::before_last:
      return std::string(cut(text, step));
    case ChatStepKind::delete_all:
    case ChatStepKind::remove_spans:
      break;
  }
  const bool spans = step.kind == ChatStepKind::remove_spans;
  std::string result;
  split(text, spans ? step.end : step.text, [&](std::string_view piece) {
    result += spans ? piece.substr(0, std::min(piece.find(step.text), piece.size())) : piece;
  });
  return result;
}

}  // namespace

std::string apply_chat_steps(std::string_view text, const ChatSteps& steps) {
  std::string result(text);
  for (const ChatStep& step : steps) result = applied(result, step);
  return result;
}

bool ChatFormat::Tests::hold(std::string_view content) const {
  return (!empty || content.empty()) && (!blank || stripped_left(content, {}).empty()) &&
         (!contains || content.find(*contains) != std::string_view::npos) &&
         (!starts || content.starts_with(*starts)) && (!ends || content.ends_with(*ends)) &&
         (!gone || apply_chat_steps(content, *gone).empty());
}

// ---- reading ---------------------------------------------------------------------------------------------------------

// Reads a format; a function for each of its parts.
class ChatFormatReader {
 public:
  static ChatFormat read(const Node& root) {
    allow(root, {"version", "order", "rules", "kinds", "refusals", "end", "thoughts", "source", "options", "date"});
    root["version"].integer(1, 1, "version");
    ChatFormat format;
    format.alternate_ = one_of(root["order"], {"any", "alternate"}) == "alternate";
    each(root["kinds"], kMaxKinds, [&](const Node& node) { format.kinds_.push_back(kind(node)); });
    const std::vector<std::string> names = kind_names(format);
    each(root["rules"], kMaxRules, [&](const Node& node) { format.rules_.push_back(rule(node, names)); });
    each(root["refusals"], kMaxRules, [&](const Node& node) { format.refusals_.push_back(refusal(node)); });
    each(root["end"], kMaxEnds, [&](const Node& node) { format.end_.push_back(text(node)); });
    if (!root["thoughts"].is_null()) {
      allow(root["thoughts"], {"begin", "end"});
      format.thoughts_ = ChatFormat::Thoughts{text(root["thoughts"]["begin"]), text(root["thoughts"]["end"])};
    }
    for (const char* name : {"source", "date"}) {
      if (!root[name].is_null()) text(root[name], 0);
    }
    if (!root["options"].is_null() && !root["options"].json().is_object()) root["options"].refuse("an object");
    return format;
  }

 private:
  static void allow(const Node& node, std::initializer_list<std::string_view> members) {
    if (!node.json().is_object()) node.refuse("an object");
    for (const auto& [key, value] : node.json().items()) {
      if (std::find(members.begin(), members.end(), key) == members.end()) {
        node.problem("got the member " + escaped(key) + ", which a chat format does not have");
      }
      if (value.is_null()) node[key].refuse("a value");
    }
  }

  template <typename OnEntry>
  static void each(const Node& node, std::size_t most, const OnEntry& on_entry) {
    if (node.list_size() > most) node.problem(format("got %zu entries, expected at most %zu", node.list_size(), most));
    for (std::size_t i = 0; i < node.list_size(); ++i) on_entry(node[i]);
  }

  static const std::string& text(const Node& node, std::size_t least = 1) {
    const std::string& value = node.text();
    if (value.size() < least || value.size() > kMaxTextBytes) {
      node.problem(format("got %zu bytes, expected %zu to %zu", value.size(), least, kMaxTextBytes));
    }
    return value;
  }

  template <typename Names>
  static const std::string& one_of(const Node& node, const Names& names) {
    const std::string& value = node.text();
    if (std::find(names.begin(), names.end(), value) == names.end())
      node.refuse("one of the names that doc/chat.md lists");
    return value;
  }
  static const std::string& one_of(const Node& node, std::initializer_list<std::string_view> names) {
    return one_of<std::initializer_list<std::string_view>>(node, names);
  }

  static std::vector<std::string> kind_names(const ChatFormat& format) {
    std::vector<std::string> names = {"plain"};
    for (const ChatFormat::Kind& kind : format.kinds_) {
      if (!kind.name.empty() && kind.name != "absent") names.push_back(kind.name);
    }
    return names;
  }

  static ChatStep step(const Node& node) {
    struct Form {
      std::string_view name;
      ChatStepKind kind;
      std::size_t least, most;  // members, with the name
    };
    static constexpr std::array kForms = {
        Form{"strip", ChatStepKind::strip, 1, 2},
        Form{"lstrip", ChatStepKind::lstrip, 1, 2},
        Form{"rstrip", ChatStepKind::rstrip, 1, 2},
        Form{"after_first", ChatStepKind::after_first, 2, 2},
        Form{"after_last", ChatStepKind::after_last, 2, 2},
        Form{"before_first", ChatStepKind::before_first, 2, 2},
        Form{"before_last", ChatStepKind::before_last, 2, 2},
        Form{"delete", ChatStepKind::delete_all, 2, 2},
        Form{"remove", ChatStepKind::remove_spans, 3, 3},
    };
    const std::size_t size = node.list_size();
    if (size == 0) node.refuse("the name of a step and its texts");
    const std::string name = node[0].text();
    const auto form = std::find_if(kForms.begin(), kForms.end(), [&](const Form& one) { return one.name == name; });
    if (form == kForms.end()) node[0].refuse("the name of a step");
    if (size < form->least || size > form->most) {
      node.problem(format("got %zu members, expected %zu to %zu", size, form->least, form->most));
    }
    return {form->kind, size > 1 ? text(node[1]) : "", size > 2 ? text(node[2]) : ""};
  }

  static ChatSteps steps(const Node& node) {
    ChatSteps result;
    each(node, kMaxSteps, [&](const Node& one) { result.push_back(step(one)); });
    return result;
  }

  static ChatFormat::Part part(const Node& node) {
    if (node.json().is_string()) return {ChatFormat::Source::literal, text(node), {}};
    allow(node, {"from", "steps"});
    const bool content = one_of(node["from"], {"content", "system"}) == "content";
    return {content ? ChatFormat::Source::content : ChatFormat::Source::system, {}, steps(node["steps"])};
  }

  static ChatFormat::Condition condition(const Node& node, const std::vector<std::string>& kinds) {
    ChatFormat::Condition when;
    if (node.is_null()) return when;
    allow(node, {"kind", "zone", "last", "system", "generation", "previous_kind"});
    std::vector<std::string> kinds_or_none = kinds;
    kinds_or_none.emplace_back("none");
    if (!node["kind"].is_null()) when.kind = one_of(node["kind"], kinds);
    if (!node["previous_kind"].is_null()) when.previous_kind = one_of(node["previous_kind"], kinds);
    if (!node["system"].is_null()) when.system = one_of(node["system"], kinds_or_none);
    if (!node["zone"].is_null()) when.zone = one_of(node["zone"], {"before", "last_user", "after"});
    if (!node["last"].is_null()) when.last = node["last"].flag(false);
    if (!node["generation"].is_null()) when.generation = node["generation"].flag(false);
    return when;
  }

  static const std::string& previous(const Node& node) {
    return one_of(node["previous"], {"start", "system", "user", "assistant"});
  }
  static const std::string& role(const Node& node) {
    return one_of(node["role"], {"system", "user", "assistant", "end", "generation"});
  }

  static ChatFormat::Rule rule(const Node& node, const std::vector<std::string>& kinds) {
    allow(node, {"previous", "role", "when", "parts"});
    ChatFormat::Rule rule{previous(node), role(node), condition(node["when"], kinds), {}};
    each(node["parts"], kMaxParts, [&](const Node& one) { rule.parts.push_back(part(one)); });
    const bool tail = rule.role == "end" || rule.role == "generation";
    for (const ChatFormat::Part& part : rule.parts) {
      if (part.source == ChatFormat::Source::content && tail)
        node["parts"].problem("got a content, but " + rule.role + " is no message");
      if (part.source == ChatFormat::Source::system && rule.when.system.value_or("none") == "none") {
        node["parts"].problem("got the system message, expected a kind of it in when.system");
      }
    }
    return rule;
  }

  static ChatFormat::Refusal refusal(const Node& node) {
    allow(node, {"previous", "role", "message"});
    return {previous(node), role(node), text(node["message"])};
  }

  static ChatFormat::Tests tests(const Node& node) {
    allow(node, {"empty", "blank", "contains", "starts", "ends", "gone"});
    if (node.json().empty()) node.problem("got no test, expected at least one");
    ChatFormat::Tests result;
    for (const auto& [name, flag] : {std::pair{"empty", &result.empty}, std::pair{"blank", &result.blank}}) {
      *flag = node[name].flag(false);
      if (!node[name].is_null() && !*flag) node[name].refuse("true");
    }
    for (const auto& [name, marker] : {std::pair{"contains", &result.contains}, std::pair{"starts", &result.starts},
                                       std::pair{"ends", &result.ends}}) {
      if (!node[name].is_null()) *marker = text(node[name]);
    }
    if (!node["gone"].is_null()) result.gone = steps(node["gone"]);
    return result;
  }

  static ChatFormat::Kind kind(const Node& node) {
    allow(node, {"role", "tests", "kind", "refuse"});
    if (node["kind"].is_null() == node["refuse"].is_null()) node.problem("expected either kind or refuse");
    ChatFormat::Kind kind{one_of(node["role"], {"system", "user", "assistant"}), tests(node["tests"]), {}, {}};
    if (node["kind"].is_null()) {
      kind.refuse = text(node["refuse"]);
      return kind;
    }
    kind.name = text(node["kind"]);
    if (kind.name == "none") node["kind"].refuse("another name");
    if (kind.name == "absent" && kind.role != "system") node["kind"].refuse("absent for the role system alone");
    return kind;
  }
};

ChatFormat ChatFormat::from_json(const Json& value, const std::string& source) {
  return ChatFormatReader::read(Node(value, "", source));
}

// ---- rendering -------------------------------------------------------------------------------------------------------

// One call of render().
class ChatRenderer {
 public:
  ChatRenderer(const ChatFormat& format, std::span<const ChatMessage> messages, bool generation)
      : format_(format), generation_(generation) {
    for (const ChatMessage& message : messages) take(message);
    if (turns_.empty()) fail(Exit::usage, "got no message, expected at least one that is not empty");
    if (format.alternate_) check_order();
    for (std::size_t i = 0; i < turns_.size(); ++i) {
      if (turns_[i].role == "user") last_user_ = i;
    }
  }

  std::vector<TextSegment> render(bool tail) {
    for (std::size_t i = 0; i < turns_.size(); ++i) append(i, turns_[i].role);
    if (tail) append(turns_.size(), generation_ ? "generation" : "end");
    return std::move(segments_);
  }

 private:
  struct Turn {
    std::string role;
    std::string_view kind;
    std::string_view content;
  };

  // With the words of the template.
  [[noreturn]] static void refuse(const std::string& why) {
    fail(Exit::usage, "the chat format refuses this conversation: %s", escaped(why, 400).c_str());
  }

  void take(const ChatMessage& message) {
    const std::string role = message.role == "developer" ? "system" : message.role;
    if (role != "system" && role != "user" && role != "assistant") {
      fail(Exit::usage, "got the role %s, expected system, user or assistant", escaped(role).c_str());
    }
    std::string_view kind = "plain";
    for (const ChatFormat::Kind& one : format_.kinds_) {
      if (one.role != role || !one.tests.hold(message.content)) continue;
      if (one.name.empty()) refuse(one.refuse);
      kind = one.name;
      break;
    }
    if (kind != "absent") turns_.push_back({role, kind, message.content});
  }

  void check_order() const {
    const std::size_t first = turns_[0].role == "system" ? 1 : 0;
    bool good = turns_.size() > first;
    for (std::size_t i = first; i < turns_.size(); ++i)
      good = good && turns_[i].role == ((i - first) % 2 ? "assistant" : "user");
    if (!good) {
      fail(Exit::usage, "after an optional system message, roles must alternate user/assistant, beginning with user");
    }
  }

  std::string_view zone(std::size_t i) const {
    if (!last_user_ || i > *last_user_) return "after";
    return i == *last_user_ ? "last_user" : "before";
  }

  bool fits(const ChatFormat::Condition& when, std::size_t i) const {
    const auto is = [](const auto& wanted, const auto& value) { return !wanted || *wanted == value; };
    return is(when.kind, i < turns_.size() ? turns_[i].kind : "plain") && is(when.zone, zone(i)) &&
           is(when.last, i + 1 >= turns_.size()) &&
           is(when.system, turns_[0].role == "system" ? turns_[0].kind : "none") && is(when.generation, generation_) &&
           is(when.previous_kind, i > 0 ? turns_[i - 1].kind : "plain");
  }

  const ChatFormat::Rule& rule(std::size_t i, const std::string& role) const {
    const std::string previous = i > 0 ? turns_[i - 1].role : "start";
    for (const ChatFormat::Rule& one : format_.rules_) {
      if (one.previous == previous && one.role == role && fits(one.when, i)) return one;
    }
    for (const ChatFormat::Refusal& one : format_.refusals_) {
      if (one.previous == previous && one.role == role) refuse(one.message);
    }
    if (i == turns_.size())
      fail(Exit::usage, "the conversation cannot end with a message of the role %s here", previous.c_str());
    fail(Exit::usage, "the chat format takes no message of the role %s %s here", role.c_str(),
         i > 0 ? ("after one of " + previous).c_str() : "first");
  }

  void append(std::size_t i, const std::string& role) {
    for (const ChatFormat::Part& part : rule(i, role).parts) {
      const bool literal = part.source == ChatFormat::Source::literal;
      const std::size_t from = part.source == ChatFormat::Source::content ? i : 0;
      std::string text = literal ? part.text : apply_chat_steps(turns_[from].content, part.steps);
      // A rule may repeat the system message in every turn.
      rendered_bytes_ += text.size();
      if (rendered_bytes_ > ChatFormat::kMaxRenderedBytes) {
        fail(Exit::usage,
             "the conversation has more than the %zu bytes that are accepted, in the form that the model wants",
             ChatFormat::kMaxRenderedBytes);
      }
      if (!text.empty()) segments_.push_back({std::move(text), literal});
    }
  }

  const ChatFormat& format_;
  bool generation_;
  std::vector<Turn> turns_;
  std::optional<std::size_t> last_user_;
  std::vector<TextSegment> segments_;
  std::size_t rendered_bytes_ = 0;
};

std::vector<TextSegment> ChatFormat::render(std::span<const ChatMessage> messages, bool generation, bool tail) const {
  if (messages.size() > kMaxMessages) {
    fail(Exit::usage, "got %zu messages, expected at most %zu", messages.size(), kMaxMessages);
  }
  return ChatRenderer(*this, messages, generation && tail).render(tail);
}

}  // namespace weft
