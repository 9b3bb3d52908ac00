// Llama on the CPU in fp32: training, and generation from the live parameters.
#pragma once

#include <memory>

#include "llmc/model/train_model.h"

namespace weft::cpu {

// What make_llama will allocate, region by region; allocates nothing.
std::vector<MemoryLine> plan_llama(const ModelConfig& config, const TrainOptions& options);

// All parameters, gradients and moments start as zeros: write_tensor() brings them. Exit::usage if
// options.precision is not fp32, Exit::resources if the memory cannot be had.
std::unique_ptr<TrainModel> make_llama(const ModelConfig& config, const TrainOptions& options);

}  // namespace weft::cpu
