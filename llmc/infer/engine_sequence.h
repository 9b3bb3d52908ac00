// A DecodeModel that generates through an Engine of its own: one sequence, with drafts.
#pragma once

#include <cstdint>
#include <memory>

#include "llmc/infer/engine.h"
#include "llmc/model/decode_model.h"
#include "llmc/model/inference_model.h"

namespace weft {

// A draft model in one of two forms, or none.
struct SequenceDraft {
  std::unique_ptr<InferenceModel> paged;  // with at least one slot
  std::unique_ptr<DecodeModel> sequence;  // of which can_draft()
};

// `model` was made with one_sequence(capacity) (llmc/model/single_sequence.h). `options.model` and `options.sequence` are set to
// `draft`'s.
std::unique_ptr<DecodeModel> engine_sequence(std::shared_ptr<InferenceModel> model, std::int64_t capacity,
                                             SequenceDraft draft, DraftOptions options);

}  // namespace weft
