// The fused decode kernel as the IdDecoder of an InferenceModel on the GPU: the model computes the prompt, and the
// kernel continues in the same pages.
#pragma once

#include <memory>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/model/inference_model.h"
#include "llmc/model/single_sequence.h"

namespace weft::cuda {

// Positions of a page in a model for fused decoding: a stage of the kernel's ring must not span pages.
inline constexpr std::int64_t kFusedPageSize = 64;

// Memory that fused_tokens() will allocate on the current GPU.
std::vector<MemoryLine> plan_fused_tokens(const ModelConfig& config);

// `model`: from load_inference() or random_inference() in `dtype`, fp16 or bf16; it must outlive the decoder.
// Exit::environment where fused_unsupported_reason() is not empty.
std::unique_ptr<IdDecoder> fused_tokens(InferenceModel& model, DType dtype);

}  // namespace weft::cuda
