// What the lists of copies of the fused decode kernel (llmc/cuda/fused/copies.cuh) say, checked on the host, without a GPU.
#pragma once

#include <string>

#include "llmc/model/config.h"

namespace weft::cuda {

// Empty if the blocks' lists for a model on a GPU of `multiprocessors` copy every byte of every matrix once, in stages that hold
// it; otherwise what is wrong. "not planned: ..." if the kernel does not compute the model.
std::string copy_lists_problem(const ModelConfig& config, int multiprocessors);

}  // namespace weft::cuda
