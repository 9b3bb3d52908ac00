// Llama inference on the CPU in fp32.
#pragma once

#include <memory>

#include "llmc/model/inference_model.h"
#include "llmc/model/llama_layout.h"
#include "llmc/model/model_file.h"

namespace weft::cpu {

class Inference;

std::unique_ptr<Inference> load_llama_inference(const ModelFile& file, const InferenceOptions& options);

// From parameters that live elsewhere. `weights` must stay valid as long as the model. Later changes to them take
// effect, but keys and values that are in the pages already stay as they are.
std::unique_ptr<InferenceModel> make_llama_inference(const ModelConfig& config, const LlamaParameters<float>& weights,
                                                     const InferenceOptions& options);

}  // namespace weft::cpu
