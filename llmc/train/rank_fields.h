// What the ranks of a run have to have in common: options, model, data.
#pragma once

#include <vector>

#include "llmc/comm/agreement.h"
#include "llmc/train/inputs.h"
#include "llmc/train/options.h"

namespace weft {

// For require_same(). All options but those that each rank may have for itself (paths, threads, what it prints), the model, the
// tokenizer, and each shard by what is in it.
std::vector<RankField> rank_fields(const TrainSettings& settings, const TrainInputs& inputs);

}  // namespace weft
