// infer_pythia --batch: a file of requests, one JSON object a line, answered in the order in which they end
// (doc/batch.md says what the lines hold).
#pragma once

#include <cstddef>

#include "llmc/base/error.h"
#include "llmc/infer/answer_file.h"
#include "llmc/infer/completion.h"
#include "llmc/infer/engine.h"
#include "llmc/infer/polled_lines.h"
#include "llmc/model/inference_model.h"
#include "llmc/text/tokenizer.h"

namespace weft {

inline constexpr std::size_t kMaxRequestBytes = 64 << 20;  // of a line

struct BatchSettings {
  CompletionOptions defaults;  // for what a request does not say
  Tokenizer::Special special = Tokenizer::Special::text;
  EngineOptions engine;
};

// Answers every request of `input` that has no answer in `output` yet. A line that is no valid request gets an answer with an
// error. A stop signal ends the run: requests under way get no answer. The result is Exit::ok, that of the signal, or
// Exit::bad_file if the output has an answer to another request under the id of one of these. `tokenizer` may be null.
Exit run_batch(InferenceModel& model, const Tokenizer* tokenizer, const BatchSettings& settings, PolledLines& input,
               AnswerFile& output);

}  // namespace weft
