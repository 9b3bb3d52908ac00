// AdamW, element by element; the bias corrections are formed in double once a step, because 1 - beta2^t loses
// most of its digits in fp32 for small t.
//
// Work is cut into blocks of a fixed size, so an element is computed by the same code, vector body or remainder, for any
// number of threads.

#include "llmc/cpu/adamw.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "llmc/base/ceil_div.h"
#include "llmc/cpu/lanes.h"

namespace weft::cpu {

void adamw(float* parameters, const float* gradients, float* moment1, float* moment2, std::int64_t count, bool decay,
           const AdamWStep& step) {
  const double t = static_cast<double>(step.step);
  const double correction1 = 1.0 - std::pow(static_cast<double>(step.beta1), t);
  const double correction2 = 1.0 - std::pow(static_cast<double>(step.beta2), t);
  const float step_size = static_cast<float>(step.learning_rate / correction1);
  const float inv_sqrt_correction2 = static_cast<float>(1.0 / std::sqrt(correction2));
  const float keep = decay ? 1.0f - step.learning_rate * step.weight_decay : 1.0f;
  const float beta1 = step.beta1, beta2 = step.beta2, eps = step.eps, scale = step.gradient_scale;

#pragma omp parallel for schedule(static)
  for (std::int64_t first = 0; first < count; first += kAdamWBlock) {
    const std::int64_t last = std::min(first + kAdamWBlock, count);
#pragma omp simd
    for (std::int64_t i = first; i < last; ++i) {
      const float g = gradients[i] * scale;
      const float m = moment1[i] + (1.0f - beta1) * (g - moment1[i]);
      const float v = beta2 * moment2[i] + (1.0f - beta2) * g * g;
      moment1[i] = m;
      moment2[i] = v;
      parameters[i] = parameters[i] * keep - step_size * m / (std::sqrt(v) * inv_sqrt_correction2 + eps);
    }
  }
}

void adamw_update(const TensorUpdate& tensor, const OptimizerStep& step) {
  adamw(tensor.parameters, tensor.gradients, tensor.states[0], tensor.states[1], tensor.count, tensor.spec.decay,
        step.adamw);
}

void block_squares(double* sums, const float* values, std::int64_t count) {
  const std::int64_t blocks = ceil_div(count, kAdamWBlock);
#pragma omp parallel for schedule(static)
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int64_t first = block * kAdamWBlock, last = std::min(first + kAdamWBlock, count);
    sums[block] = sum_in_double(last - first, [block_values = values + first](const auto& load) {
      const auto value = load(block_values);
      return value * value;
    });
  }
}

double sum_of_squares(const float* values, std::int64_t count) {
  std::vector<double> block_sums(static_cast<std::size_t>(ceil_div(count, kAdamWBlock)));
  block_squares(block_sums.data(), values, count);
  double total = 0;
  for (const double sum : block_sums) total += sum;
  return total;
}

}  // namespace weft::cpu
