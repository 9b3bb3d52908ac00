// infer_pythia --batch: a file of requests, one JSON object a line, answered in the order in which they end
// (doc/batch.md says what the lines hold).
#pragma once

#include <cstddef>
#include <string>

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
  CompletionOptions defaults;  // for what a request leaves out
  Tokenizer::Special special = Tokenizer::Special::text;
  EngineOptions engine;
  std::string model = {};  // stands for its weights (ModelFile::content_hash()): another model's answer is another one
};

// Answers every request of `input` that has no answer in `output` yet. A line that is no valid request gets an
// answer with an error. A stop signal ends the run: unfinished requests get no answer. Returns Exit::ok, the
// code of the signal, Exit::failed_lines if an answer is an error, or otherwise Exit::bad_file if, under the id of
// some request, the output has the answer to a different one. `tokenizer` may be null.
Exit run_batch(InferenceModel& model, const Tokenizer* tokenizer, const BatchSettings& settings, PolledLines& input,
               AnswerFile& output);

}  // namespace weft
