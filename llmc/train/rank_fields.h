// What the ranks of a run must have in common: options, model, data.
#pragma once

#include <vector>

#include "llmc/comm/agreement.h"
#include "llmc/train/inputs.h"
#include "llmc/train/options.h"

namespace weft {

// The fields for require_same(): all options except those that each rank may choose for itself (paths, threads, what it
// prints), the model, the tokenizer, and the content of each shard.
std::vector<RankField> rank_fields(const TrainSettings& settings, const TrainInputs& inputs);

}  // namespace weft
