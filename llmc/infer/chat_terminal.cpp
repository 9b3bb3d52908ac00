#include "llmc/infer/chat_terminal.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/base/log.h"
#include "llmc/base/utf8.h"
#include "llmc/infer/interactive.h"
#include "llmc/infer/report.h"
#include "llmc/text/thoughts.h"

namespace weft {

namespace {

constexpr const char* kChatHelp =
    "A line that you type is a message, and the model answers it.\n"
    "  /reset          forget the conversation; the system message stays\n"
    "  /system TEXT    from now on this is the system message; without a text there is none\n"
    "  /help           print this\n"
    "  /quit           leave, as Ctrl-D does\n"
    "Ctrl-C stops an answer. To send one of these words, put a space before it.";
constexpr std::string_view kSystem = "/system";
constexpr std::int64_t kAnswerShare = 8;  // of the context is left for an answer, if turns have to be left out

class ChatAnswerer : public LineAnswerer {
 public:
  ChatAnswerer(DecodeModel& model, const Tokenizer& tokenizer, const Chat& chat, std::string system,
               const GenerateOptions& options, bool ignore_eos, bool statistics)
      : model_(model),
        tokenizer_(tokenizer),
        chat_(chat),
        options_(options),
        statistics_(statistics),
        system_(std::move(system)) {
    options_.hide_special = false;  // marks of thoughts may be special tokens, and the format drops thoughts by them
    options_.rules.end_ids.insert(options_.rules.end_ids.end(), chat.stop_ids().begin(), chat.stop_ids().end());
    if (!ignore_eos) {
      options_.stop_ids.insert(options_.stop_ids.end(), chat.stop_ids().begin(), chat.stop_ids().end());
    }
    options_.stop_texts.insert(options_.stop_texts.end(), chat.stop_texts().begin(), chat.stop_texts().end());
  }

  bool command(const std::string& line) override {
    if (line.find_first_not_of(" \t\r") == std::string::npos) return true;  // Enter alone says nothing
    if (line == "/reset") {
      turns_.clear();
      log_info("(the conversation begins anew)");
    } else if (line == "/help") {
      log_info("%s", kChatHelp);
    } else if (line == kSystem || line.starts_with(std::string(kSystem) + " ")) {
      const std::size_t begin = line.find_first_not_of(" \t", kSystem.size());
      set_system(begin == std::string::npos ? "" : utf8_replace_invalid(line.substr(begin)));
    } else {
      return false;
    }
    return true;
  }

  void answer(const std::string& line) override {
    turns_.push_back({"user", utf8_replace_invalid(line)});
    const std::optional<Prompt> prompt = next_prompt();
    if (!prompt) {
      turns_.pop_back();
      return;
    }
    const std::span<const std::int32_t> added = not_in_cache(prompt->ids);
    options_.earlier.assign(prompt->ids.begin(), prompt->ids.end() - std::ssize(added));
    GenerateHooks hooks = answer_hooks(output_);
    std::optional<EmptyThoughtsFilter> filter;
    if (chat_.thoughts()) {
      filter.emplace(*chat_.thoughts(), prompt->in_thoughts);
      hooks.on_text = [&](std::string_view piece) { output_.write(filter->push(piece)); };
    }
    const GenerateResult result = generate(model_, &tokenizer_, added, options_, hooks);
    if (filter) output_.write(filter->finish());
    in_cache_ = prompt->ids;
    in_cache_.insert(in_cache_.end(), result.ids.begin(), result.ids.end() - 1);
    turns_.push_back({"assistant", result.text});
    output_.write("\n");
    if (statistics_) log_info("(%s)", statistics_line(model_, result).c_str());
  }

 private:
  void set_system(std::string text) {
    try {
      check_system_message(chat_, text);
    } catch (const Error& error) {
      return log_warning("%s", error.what());
    }
    system_ = std::move(text);
    log_info(system_.empty() ? "(there is no system message)" : "(this is the system message now)");
  }

  struct Prompt {
    std::vector<std::int32_t> ids;
    bool in_thoughts;
  };
  // That of the conversation. Without the oldest turns, if all do not fit. Nothing, with a warning that says why, if the message
  // cannot be answered.
  std::optional<Prompt> next_prompt() {
    const std::int64_t capacity = model_.capacity();
    for (;;) {
      std::vector<ChatMessage> messages = turns_;
      if (!system_.empty()) messages.insert(messages.begin(), {"system", system_});
      Prompt prompt;
      try {
        const std::vector<TextSegment> conversation = chat_.render(messages, Chat::Tail::answer);
        prompt = {chat_.ids(conversation), chat_.in_thoughts(conversation)};
      } catch (const Error& error) {
        log_warning("%s. This message is left out", error.what());
        return std::nullopt;
      }
      const std::int64_t size = std::ssize(prompt.ids);
      const bool only = turns_.size() == 1;
      if (size > 0 && size < capacity && (only || size <= capacity - capacity / kAnswerShare)) return prompt;
      if (only) {
        log_warning(
            "this message has %lld tokens with what belongs to it, and the context takes less than %lld: it is left "
            "out",
            static_cast<long long>(size), static_cast<long long>(capacity));
        return std::nullopt;
      }
      turns_.erase(turns_.begin(), turns_.begin() + 2);
      log_info("(the context of %lld tokens is full: the oldest turn is left out)", static_cast<long long>(capacity));
    }
  }

  // What of the prompt the cache lacks.
  std::span<const std::int32_t> not_in_cache(std::span<const std::int32_t> prompt) {
    const bool continues = std::ssize(in_cache_) == model_.length() && in_cache_.size() < prompt.size() &&
                           std::ranges::equal(in_cache_, prompt.first(in_cache_.size()));
    if (continues) return prompt.subspan(in_cache_.size());
    model_.reset();
    return prompt;
  }

  DecodeModel& model_;
  const Tokenizer& tokenizer_;
  const Chat& chat_;
  GenerateOptions options_;
  const bool statistics_;
  std::string system_;
  std::vector<ChatMessage> turns_;  // user and assistant, one after the other
  std::vector<std::int32_t> in_cache_;
  TextOutput output_;
};

}  // namespace

void check_system_message(const Chat& chat, const std::string& system) {
  if (system.empty()) return;
  const std::vector<ChatMessage> messages = {{"system", utf8_replace_invalid(system)}, {"user", "a"}};
  try {
    chat.render(messages, Chat::Tail::answer);
  } catch (const Error& error) {
    fail(Exit::usage, "--system: %s", error.what());
  }
}

Exit run_chat(DecodeModel& model, const Tokenizer& tokenizer, const Chat& chat, const std::string& system,
              const GenerateOptions& options, bool ignore_eos, bool statistics) {
  ChatAnswerer answerer(model, tokenizer, chat, utf8_replace_invalid(system), options, ignore_eos, statistics);
  return answer_lines(answerer);
}

}  // namespace weft
