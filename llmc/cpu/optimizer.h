// The optimizers of llmc/model/optimizer.h on the CPU: a table with a row for each.
#pragma once

#include <array>
#include <cstdint>

#include "llmc/model/optimizer.h"

namespace weft::cpu {

// The arrays of one tensor in an update, or of the part that a rank has; a tensor that Optimizer::needs_whole() is complete.
struct TensorUpdate {
  const TensorSpec& spec;
  std::int64_t count;  // elements of each array
  float* parameters;
  const float* gradients;
  std::array<float*, 2> states;  // state1 and state2; null where the optimizer has none
  float* workspace;              // OptimizerUpdate::workspace() elements
};

struct OptimizerUpdate {
  const Optimizer& optimizer;
  // Updates parameters and states. The same bits for any number of threads and, where a tensor may be cut, for any cut
  // between blocks of kAdamWBlock elements.
  void (*update)(const TensorUpdate& tensor, const OptimizerStep& step);
  // Elements of fp32 that update() writes to for this tensor.
  std::int64_t (*workspace)(const TensorSpec& spec);
};

// Exit::internal for an optimizer without a row.
const OptimizerUpdate& update_of(const Optimizer& optimizer);

}  // namespace weft::cpu
