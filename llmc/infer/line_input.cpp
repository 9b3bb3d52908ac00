#include "llmc/infer/line_input.h"

#include <termios.h>
#include <unistd.h>

#include <atomic>
#include <clocale>
#include <cstdio>
#include <iostream>
#include <streambuf>

#include "llmc/base/log.h"
#ifdef WEFT_EDITLINE
#include <histedit.h>
#endif

namespace weft {

LineInput::Result read_line(std::istream& input, std::string& line, std::size_t limit) {
  using Traits = std::char_traits<char>;
  line.clear();
  std::streambuf& buffer = *input.rdbuf();
  bool anything = false, too_long = false;
  for (int next = buffer.sbumpc(); next != Traits::eof(); next = buffer.sbumpc()) {
    anything = true;
    if (next == '\n') break;
    too_long = too_long || line.size() == limit;
    if (!too_long) line += Traits::to_char_type(next);
  }
  if (!anything) return LineInput::Result::end;
  if (!too_long) return LineInput::Result::line;
  line.clear();
  return LineInput::Result::too_long;
}

#ifdef WEFT_EDITLINE

struct LineInput::Editor {
  Editor() : line(::el_init("infer_pythia", stdin, stderr, stderr)), history(::history_init()) {
    HistEvent event;
    ::history(history, &event, H_SETSIZE, 1000);
    ::el_set(
        line, EL_PROMPT, +[](EditLine*) { return const_cast<char*>("> "); });
    ::el_set(line, EL_EDITOR, "emacs");
    ::el_set(line, EL_SIGNAL, 0);  // libedit must not replace weft's signal handlers
    ::el_set(line, EL_HIST, ::history, history);
  }
  ~Editor() {
    ::history_end(history);
    ::el_end(line);
  }

  Result read(std::string& text) {
    int length = 0;
    const char* typed = ::el_gets(line, &length);
    if (typed == nullptr || length <= 0) return Result::end;
    if (static_cast<std::size_t>(length) > kMaxLineBytes) return Result::too_long;
    text.assign(typed, static_cast<std::size_t>(length));
    HistEvent event;
    if (text != "\n") ::history(history, &event, H_ENTER, typed);
    if (text.back() == '\n') text.pop_back();
    return Result::line;
  }

  EditLine* line;
  History* history;
};

#else

struct LineInput::Editor {
  Result read(std::string&) { return Result::end; }
};

#endif

namespace {

// The terminal's settings from before line editing; a signal handler reads them.
termios terminal_before;
std::atomic<bool> terminal_known{false};

}  // namespace

void LineInput::restore_terminal() {
  if (terminal_known) ::tcsetattr(STDIN_FILENO, TCSANOW, &terminal_before);
}

LineInput::LineInput() : prompting_(::isatty(STDIN_FILENO) == 1 && ::isatty(STDERR_FILENO) == 1) {
  if (!prompting_) return;
  log_info("type a line; /help lists commands. Ctrl-C stops an answer, Ctrl-D (or Ctrl-C here) leaves");
#ifdef WEFT_EDITLINE
  if (!stderr_is_terminal()) return;
  terminal_known = ::tcgetattr(STDIN_FILENO, &terminal_before) == 0;
  // libedit drops what is no character of its locale. Numbers keep their "." (error.h): they are of another category.
  std::setlocale(LC_CTYPE, "C.UTF-8");
  editor_ = std::make_unique<Editor>();
#endif
}

LineInput::~LineInput() = default;

LineInput::Result LineInput::read(std::string& line) {
  if (editor_) return editor_->read(line);
  if (prompting_) std::fputs("> ", stderr);
  const Result result = read_line(std::cin, line, kMaxLineBytes);
  if (result == Result::end && prompting_) std::fputs("\n", stderr);
  return result;
}

}  // namespace weft
