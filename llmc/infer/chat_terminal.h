// infer_pythia --chat: each line of stdin is a message, which the model answers in its chat format (doc/chat.md).
#pragma once

#include <string>

#include "llmc/base/error.h"
#include "llmc/infer/chat.h"
#include "llmc/infer/generate.h"

namespace weft {

// Exit::usage if the format does not take the system message. An empty one is none.
void check_system_message(const Chat& chat, const std::string& system);

// A conversation: the lines, and the answers as far as they have come. Where the prompt continues what the cache holds,
// only the rest is computed. When the context is full, the oldest turns are left out, and a message says so. The lines /help, /reset and
// /system are commands, and a line of spaces says nothing. `ignore_eos`: the format's stop ids do not end an answer, either.
// Signals: answer_lines().
Exit run_chat(DecodeModel& model, const Tokenizer& tokenizer, const Chat& chat, const std::string& system,
              const GenerateOptions& options, bool ignore_eos, bool statistics);

}  // namespace weft
