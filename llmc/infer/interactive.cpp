#include "llmc/infer/interactive.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <optional>
#include <string>

#include "llmc/base/log.h"
#include "llmc/base/signals.h"
#include "llmc/infer/line_input.h"
#include "llmc/infer/prompt.h"
#include "llmc/infer/report.h"
#include "llmc/infer/text_output.h"

namespace weft {

namespace {

enum Phase { waiting, reading_prompt, writing };
// Atomic, not sig_atomic_t: a handler may run on any thread.
std::atomic<Phase> phase{waiting};
std::atomic<int> received_signal{0};
static_assert(std::atomic<Phase>::is_always_lock_free && std::atomic<int>::is_always_lock_free);
constexpr unsigned kPromptSeconds = 1;  // after Ctrl-C, a prefill that takes longer than this is ended with the program

extern "C" void on_signal(int signal_number) {
  // Leaving at once loses nothing. Only async-signal-safe calls are allowed here.
  const Phase now = phase;
  int first = 0;  // exchanged in one step: two threads may take a signal at the same time
  const bool second = !received_signal.compare_exchange_strong(first, signal_number);
  if (now == waiting || second || (now == reading_prompt && signal_number != SIGINT)) {
    LineInput::restore_terminal();
    ::_exit(static_cast<int>(exit_after_signal(signal_number)));
  }
  if (now == reading_prompt) ::alarm(kPromptSeconds);
}

extern "C" void on_prompt_alarm(int) {
  const int signal_number = received_signal;
  if (phase == reading_prompt && signal_number != 0) ::_exit(static_cast<int>(exit_after_signal(signal_number)));
}

void install_handlers() {
  struct sigaction action {};
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  action.sa_handler = on_prompt_alarm;
  sigaction(SIGALRM, &action, nullptr);
  action.sa_handler = on_signal;
  for (const int signal_number : {SIGINT, SIGTERM}) sigaction(signal_number, &action, nullptr);
  if (!is_ignored(SIGHUP)) sigaction(SIGHUP, &action, nullptr);
}

}  // namespace

GenerateHooks answer_hooks(TextOutput& output) {
  GenerateHooks hooks;
  hooks.on_text = [&output](std::string_view piece) { output.write(piece); };
  hooks.on_id = [] { phase = writing; };
  hooks.interrupted = [] { return received_signal != 0; };
  return hooks;
}

Exit answer_lines(LineAnswerer& answerer) {
  install_handlers();
  // A signal that came while the model was loaded was caught by the handlers that these replace.
  if (stop_signal() != 0) return exit_after_signal(stop_signal());
  LineInput input;
  std::string line;
  while (true) {
    const LineInput::Result result = input.read(line);
    if (result == LineInput::Result::end) break;
    if (result == LineInput::Result::too_long) {
      log_warning("this line has more than %s: it is left out", human_bytes(kMaxLineBytes).c_str());
      continue;
    }
    if (line.ends_with('\r')) line.pop_back();
    if (line == "/quit") break;
    if (answerer.command(line)) continue;
    received_signal = 0;
    phase = reading_prompt;
    answerer.answer(line);
    phase = waiting;
    if (received_signal == SIGTERM || received_signal == SIGHUP) return Exit::terminated;
  }
  return Exit::ok;
}

namespace {

constexpr const char* kInteractiveHelp =
    "A line that you type is added to the text, and the model continues it.\n"
    "  /reset   forget the text and begin anew\n"
    "  /help    print this\n"
    "  /quit    leave, as Ctrl-D does\n"
    "Ctrl-C stops an answer. To add one of these words to the text, put a space before it.";

class GrowingText : public LineAnswerer {
 public:
  GrowingText(DecodeModel& model, const Tokenizer& tokenizer, Tokenizer::Special special,
              const GenerateOptions& options, bool statistics)
      : model_(model), tokenizer_(tokenizer), special_(special), options_(options), statistics_(statistics) {}

  bool command(const std::string& line) override {
    if (line == "/reset") {
      begin_anew();
      log_info("(the text begins anew)");
    } else if (line == "/help") {
      log_info("%s", kInteractiveHelp);
    } else {
      return false;
    }
    return true;
  }

  void answer(const std::string& line) override {
    const std::optional<std::vector<std::int32_t>> ids = next_ids(line);
    if (!ids.has_value()) return;
    const GenerateResult result = generate(model_, &tokenizer_, *ids, options_, answer_hooks(output_));
    last_id_ = result.ids.back();
    std::vector<std::int32_t>& all = options_.earlier;
    all.insert(all.end(), ids->begin(), ids->end());
    all.insert(all.end(), result.ids.begin(), result.ids.end() - 1);
    output_.write("\n");
    if (statistics_) log_info("(%s)", statistics_line(model_, result).c_str());
  }

 private:
  void begin_anew() {
    model_.reset();
    options_.earlier.clear();
  }
  // The ids that the line adds to the text; empty if even a new context could not hold them.
  std::optional<std::vector<std::int32_t>> next_ids(const std::string& line) {
    if (model_.length() > 0) {
      std::vector<std::int32_t> ids = {last_id_};  // the last id of the previous answer is not in the cache yet
      const std::vector<std::int32_t> added = tokenizer_.encode("\n" + line, false, special_);
      ids.insert(ids.end(), added.begin(), added.end());
      if (model_.length() + static_cast<std::int64_t>(ids.size()) < model_.capacity()) return ids;
      log_info("(the context of %lld tokens is full: the text begins anew)", static_cast<long long>(model_.capacity()));
      begin_anew();
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
  GenerateOptions options_;
  const bool statistics_;
  TextOutput output_;
  std::int32_t last_id_ = 0;
};

}  // namespace

Exit run_interactive(DecodeModel& model, const Tokenizer& tokenizer, Tokenizer::Special special,
                     const GenerateOptions& options, bool statistics) {
  GrowingText text(model, tokenizer, special, options, statistics);
  return answer_lines(text);
}

}  // namespace weft
