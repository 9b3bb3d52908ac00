#include "llmc/infer/interactive.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <iostream>
#include <optional>
#include <string>

#include "llmc/base/log.h"
#include "llmc/base/signals.h"
#include "llmc/infer/prompt.h"
#include "llmc/infer/report.h"
#include "llmc/infer/text_output.h"

namespace weft {

namespace {

volatile std::sig_atomic_t answering = 0;
volatile std::sig_atomic_t received = 0;

extern "C" void on_signal(int signal_number) {
  // Nothing is lost by leaving at once, and nothing but async-signal-safe calls is allowed here.
  if (answering == 0 || received != 0) ::_exit(static_cast<int>(exit_after_signal(signal_number)));
  received = signal_number;
}

void install_handlers() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal_number : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal_number, &action, nullptr);
}

class Conversation {
 public:
  Conversation(DecodeModel& model, const Tokenizer& tokenizer, Tokenizer::Special special,
               const GenerateOptions& options)
      : model_(model), tokenizer_(tokenizer), special_(special), options_(options) {}

  void answer(const std::string& line) {
    const std::optional<std::vector<std::int32_t>> ids = next_ids(line);
    if (!ids.has_value()) return;
    GenerateHooks hooks;
    hooks.on_text = [this](std::string_view piece) { output_.write(piece); };
    hooks.interrupted = [] { return received != 0; };
    const GenerateResult result = generate(model_, &tokenizer_, *ids, options_, hooks);
    last_id_ = result.ids.back();
    output_.write("\n");
    log_info("(%s)", statistics_line(model_, result).c_str());
  }

 private:
  // What the line adds to the text; nothing if even an empty context could not hold it.
  std::optional<std::vector<std::int32_t>> next_ids(const std::string& line) {
    if (model_.length() > 0) {
      std::vector<std::int32_t> ids = {last_id_};  // sampled last time, and not in the cache yet
      const std::vector<std::int32_t> added = tokenizer_.encode("\n" + line, false, special_);
      ids.insert(ids.end(), added.begin(), added.end());
      if (model_.length() + static_cast<std::int64_t>(ids.size()) < model_.capacity()) return ids;
      log_info("(the context of %lld tokens is full: the text begins anew)", static_cast<long long>(model_.capacity()));
      model_.reset();
    }
    std::vector<std::int32_t> ids = start_ids(tokenizer_.encode(line, true, special_), model_.config());
    if (static_cast<std::int64_t>(ids.size()) < model_.capacity()) return ids;
    log_warning("this line has %zu tokens, and the context takes less than %lld: it is left out", ids.size(),
                static_cast<long long>(model_.capacity()));
    return std::nullopt;
  }

  DecodeModel& model_;
  const Tokenizer& tokenizer_;
  Tokenizer::Special special_;
  const GenerateOptions& options_;
  TextOutput output_;
  std::int32_t last_id_ = 0;
};

}  // namespace

Exit run_interactive(DecodeModel& model, const Tokenizer& tokenizer, Tokenizer::Special special,
                     const GenerateOptions& options) {
  install_handlers();
  // What came while the model was loaded was caught by the handlers before these.
  if (stop_signal() != 0) return exit_after_signal(stop_signal());
  const bool prompting = ::isatty(STDIN_FILENO) == 1 && ::isatty(STDERR_FILENO) == 1;
  Conversation conversation(model, tokenizer, special, options);
  std::string line;
  while (true) {
    if (prompting) std::fputs("> ", stderr);
    if (!std::getline(std::cin, line)) break;
    received = 0;
    answering = 1;
    conversation.answer(line);
    answering = 0;
    if (received == SIGTERM || received == SIGHUP) return Exit::terminated;
  }
  if (prompting) std::fputs("\n", stderr);
  return Exit::ok;
}

}  // namespace weft
