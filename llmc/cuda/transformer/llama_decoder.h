// Llama generation on the GPU from parameters that live elsewhere: for samples while training.
#pragma once

#include <memory>
#include <vector>

#include "llmc/model/decode_model.h"
#include "llmc/model/llama_layout.h"
#include "llmc/model/train_model.h"

namespace weft::cuda {

// What a decoder will allocate, region by region. Needs no GPU.
std::vector<MemoryLine> plan_llama_decoder(const ModelConfig& config, Precision precision, std::int64_t capacity);

// `weights` point into device memory and must stay valid as long as the decoder; S is float or bf16. Whoever changes
// the weights synchronises first, and calls reset(), because the K/V cache does not know. It samples on the GPU. Device
// memory for `capacity` positions is allocated here and nothing later: Exit::resources where it cannot be had.
template <typename S>
std::unique_ptr<DecodeModel> make_llama_decoder(const ModelConfig& config, const LlamaParameters<S>& weights,
                                                std::int64_t capacity);

}  // namespace weft::cuda
