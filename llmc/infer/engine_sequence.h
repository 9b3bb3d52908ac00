// A DecodeModel that generates through an Engine of its own: one sequence, with drafts.
#pragma once

#include <cstdint>
#include <memory>

#include "llmc/infer/engine.h"
#include "llmc/model/decode_model.h"
#include "llmc/model/inference_model.h"

namespace weft {

// `model` was made with one_sequence(capacity) (llmc/model/single_sequence.h). `draft` is the draft model, with at least one slot,
// or null; `options.model` is set to it.
std::unique_ptr<DecodeModel> engine_sequence(std::shared_ptr<InferenceModel> model, std::int64_t capacity,
                                             std::unique_ptr<InferenceModel> draft, DraftOptions options);

}  // namespace weft
