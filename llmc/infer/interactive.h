// Lines in, answers out, one K/V cache for all of them.
#pragma once

#include "llmc/base/error.h"
#include "llmc/infer/generate.h"

namespace weft {

// Reads lines from stdin and lets the model continue the text after each: the first line begins the text,
// every later one is appended on a line of its own. Nothing is computed twice: the cache is kept until the
// context is full; then the text begins anew with the line at hand, and a message says so.
//
// Ctrl-C during an answer ends the answer; while waiting for a line, or a second time in one answer, it ends the program
// with 130, and so it does where the prompt takes more than a second to be read. SIGTERM and SIGHUP end it after the token
// at hand, before the first one at once. End of input: Exit::ok. The signal handlers that it installs stay.
// `statistics`: one line after each answer.
Exit run_interactive(DecodeModel& model, const Tokenizer& tokenizer, Tokenizer::Special special,
                     const GenerateOptions& options, bool statistics);

}  // namespace weft
