// infer_pythia --interactive: the model continues each line of stdin, with one K/V cache for the whole conversation.
#pragma once

#include "llmc/base/error.h"
#include "llmc/infer/generate.h"

namespace weft {

// Reads lines from stdin and lets the model continue the text after each: the first line begins the text, every later
// one is appended on a line of its own. The cache is kept, so nothing is computed twice. When the context is full, the
// text begins anew with the current line, and a message says so.
//
// The lines /help, /reset (the text begins anew) and /quit are commands.
//
// Ctrl-C during an answer ends the answer. It ends the program with 130 while the program waits for a line, if
// it is the second one in one answer, or if the prompt's prefill takes more than a second longer. SIGTERM and
// SIGHUP end the program after the current token, or at once before the first token; a SIGHUP that was ignored
// (nohup) stays ignored. End of input: Exit::ok. The signal handlers that this function installs stay.
// `statistics`: one line after each answer.
Exit run_interactive(DecodeModel& model, const Tokenizer& tokenizer, Tokenizer::Special special,
                     const GenerateOptions& options, bool statistics);

}  // namespace weft
