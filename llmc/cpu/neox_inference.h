// GPT-NeoX / Pythia inference on the CPU in fp32.
#pragma once

#include <memory>

#include "llmc/model/inference_model.h"
#include "llmc/model/model_file.h"

namespace weft::cpu {

std::unique_ptr<InferenceModel> load_neox_inference(const ModelFile& file, const InferenceOptions& options);

}  // namespace weft::cpu
