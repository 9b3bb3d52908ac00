// Llama on the GPU: training in bf16 (with an exact fp32 master) or fp32, and generation from the live parameters.
#pragma once

#include <memory>

#include "llmc/model/train_model.h"

namespace weft::cuda {

// What make_llama will allocate, region by region. Needs no GPU.
std::vector<MemoryLine> plan_llama(const ModelConfig& config, const TrainOptions& options);

// All parameters, gradients and moments start as zeros: write_tensor() brings them. Exit::usage for a head size or width
// that the kernels do not have, Exit::resources if the memory cannot be had, Exit::environment without a usable GPU.
std::unique_ptr<TrainModel> make_llama(const ModelConfig& config, const TrainOptions& options);

}  // namespace weft::cuda
