// The initial parameters of a new model.
#pragma once

#include <cstdint>
#include <span>

#include "llmc/model/train_model.h"

namespace weft {

// The values of tensor number `tensor` of the table: a pure function of (seed, tensor, element), so they do
// not depend on the device or on the order of filling. Init::normal is N(0, 0.02^2); Init::normal_residual,
// for the projections that end a residual branch, 0.02 / sqrt(2 L): GPT-2's rule, which keeps the variance of
// the residual stream independent of the depth (Radford et al., 2019, section 2.3). Init::uniform, for A of an adapter, is PyTorch's
// Kaiming-uniform with a = sqrt(5) (He et al., 2015), as PEFT has it.
void initial_values(const TensorSpec& spec, std::uint64_t tensor, std::int64_t num_layers, std::uint64_t seed,
                    std::span<float> values);

// Writes the initial values of every parameter. Moments are left as they are: zero in a new model.
void initialize_parameters(TrainModel& model, std::uint64_t seed);

}  // namespace weft
