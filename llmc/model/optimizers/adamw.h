// AdamW (Loshchilov & Hutter, 2019; https://arxiv.org/abs/1711.05101): two moments of every parameter.
#pragma once

#include <cstdint>

namespace weft {

class Optimizer;

struct AdamWStep {
  std::int64_t step = 1;  // 1 for the first update: the exponent of the bias correction
  float learning_rate = 0, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0;
  float gradient_scale = 1;  // the clip factor; multiplies every gradient
};

const Optimizer& adamw_optimizer();

}  // namespace weft
