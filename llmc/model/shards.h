// How the ranks of a run divide its state: by ranges of the arenas, not by tensors, so that any number of ranks fits any
// model.
#pragma once

#include <cstdint>
#include <vector>

#include "llmc/base/range.h"
#include "llmc/model/tensor_table.h"

namespace weft {

// What is divided. The bits of a step are the same for all of them.
enum class Shard {
  none,       // every rank has everything, and makes the whole update
  optimizer,  // a rank has the moments of its own range alone, updates that, and gets the other parameters from the others
};

// The ranges of `ranks` ranks, in elements of the arenas that have one type for all tensors: neighbours from 0 to
// arena_elements(), of about the same size. A border lies where a block begins, when each tensor is cut into blocks of
// `block` elements from its first one on; so what is computed in such blocks does not depend on the number of ranks. A model
// of fewer blocks than ranks leaves ranks with nothing.
std::vector<Range> cut_arena(const TensorTable& table, int ranks, std::int64_t block);

}  // namespace weft
