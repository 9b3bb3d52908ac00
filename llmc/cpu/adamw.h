// AdamW (Loshchilov & Hutter, 2019), in the order of torch.optim.AdamW: decay, moments, bias correction, update.
#pragma once

#include <cstdint>

#include "llmc/cpu/optimizer.h"

namespace weft::cpu {

// g = gradient * step.gradient_scale;  p *= 1 - lr * weight_decay (if decay);  m, v = moving averages;
// p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).
void adamw(float* parameters, const float* gradients, float* moment1, float* moment2, std::int64_t count, bool decay,
           const AdamWStep& step);
// The same for one tensor of a model.
void adamw_update(const TensorUpdate& tensor, const OptimizerStep& step);
inline std::int64_t adamw_workspace(const TensorSpec& /*spec*/) {
  return 0;
}

// adamw() and both functions below work in blocks of this many elements: a tensor that is cut between blocks gives the
// same bits.
inline constexpr std::int64_t kAdamWBlock = 4096;

// Sum of squares in double precision, added in blocks of a fixed size: the same bits for any thread count. Not finite
// if any value is not.
double sum_of_squares(const float* values, std::int64_t count);
// The sums of the blocks: sum_of_squares() adds them in their order. sums [ceil(count / kAdamWBlock)].
void block_squares(double* sums, const float* values, std::int64_t count);

}  // namespace weft::cpu
