// A DecodeModel over an InferenceModel: one sequence that has all the pages.
#pragma once

#include <functional>
#include <memory>

#include "llmc/model/decode_model.h"
#include "llmc/model/inference_model.h"

namespace weft {

// Options of a model for one sequence of at most `capacity` positions.
InferenceOptions one_sequence(std::int64_t capacity);

// `model` was made with one_sequence(capacity). `wait_for_weights`, if there is one, is called by each reset(): it returns when
// whatever changes the weights is done.
std::unique_ptr<DecodeModel> single_sequence(std::shared_ptr<InferenceModel> model, std::int64_t capacity,
                                             std::function<void()> wait_for_weights = nullptr);

}  // namespace weft
