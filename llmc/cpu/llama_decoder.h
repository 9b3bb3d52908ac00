// Llama generation on the CPU from parameters that live elsewhere.
#pragma once

#include <memory>

#include "llmc/model/decode_model.h"
#include "llmc/model/llama_layout.h"

namespace weft::cpu {

// `weights` must stay valid as long as the decoder; later changes to them are seen, but the K/V cache does
// not know: reset() after an update.
std::unique_ptr<DecodeModel> make_llama_decoder(const ModelConfig& config, const LlamaParameters<float>& weights,
                                                std::int64_t capacity);

}  // namespace weft::cpu
