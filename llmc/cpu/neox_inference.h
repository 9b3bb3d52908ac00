// GPT-NeoX / Pythia inference on the CPU in fp32.
#pragma once

#include <functional>
#include <memory>

#include "llmc/model/inference_model.h"
#include "llmc/model/model_file.h"
#include "llmc/model/tensor_table.h"

namespace weft::cpu {

class Inference;

std::unique_ptr<Inference> load_neox_inference(const ModelFile& file, const InferenceOptions& options);
// The same without a file, for a model that is not quantised: `fill` writes the elements of each tensor.
std::unique_ptr<InferenceModel> make_neox_inference(const ModelConfig& config, const InferenceOptions& options,
                                                    const std::function<void(const TensorSpec&, float*)>& fill);

}  // namespace weft::cpu
