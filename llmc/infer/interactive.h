// infer_pythia --interactive: the model continues each line of stdin, with one K/V cache for the whole conversation. --chat
// (chat_terminal.h) reads its lines in the same way.
#pragma once

#include <string>

#include "llmc/base/error.h"
#include "llmc/infer/generate.h"
#include "llmc/infer/text_output.h"

namespace weft {

class LineAnswerer {
 public:
  virtual ~LineAnswerer() = default;
  // Whether the line is a command, which is then carried out. Any other line, with a slash or without, is answered.
  virtual bool command(const std::string& line) = 0;
  virtual void answer(const std::string& line) = 0;
};

// Reads lines from stdin and has each answered, until its end or the line /quit.
//
// Ctrl-C during an answer ends the answer. It ends the program with 130 while the program waits for a line, if
// it is the second one in one answer, or if the prompt's prefill takes more than a second longer. SIGTERM and
// SIGHUP end the program after the current token, or at once before the first token; a SIGHUP that was ignored
// (nohup) stays ignored. End of input: Exit::ok. The signal handlers that this function installs stay.
Exit answer_lines(LineAnswerer& answerer);
// For generate() within answer(): text goes to `output`, and signals are heard.
GenerateHooks answer_hooks(TextOutput& output);

// Lets the model continue the text after each line: the first line begins the text, every later
// one is appended on a line of its own. The cache is kept, so nothing is computed twice. When the context is full, the
// text begins anew with the current line, and a message says so. The lines /help and /reset (the text begins anew) are
// commands. `statistics`: one line after each answer.
Exit run_interactive(DecodeModel& model, const Tokenizer& tokenizer, Tokenizer::Special special,
                     const GenerateOptions& options, bool statistics);

}  // namespace weft
