// A DecodeModel over an InferenceModel: one sequence that has all the pages.
#pragma once

#include <memory>

#include "llmc/model/decode_model.h"
#include "llmc/model/inference_model.h"

namespace weft {

// Options of a model for one sequence of at most `capacity` positions.
InferenceOptions one_sequence(std::int64_t capacity);

// `model` was made with one_sequence(capacity).
std::unique_ptr<DecodeModel> single_sequence(std::unique_ptr<InferenceModel> model, std::int64_t capacity);

}  // namespace weft
