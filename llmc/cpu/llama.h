// Llama on the CPU in fp32: training, and generation from the live parameters.
#pragma once

#include <memory>

#include "llmc/comm/communicator.h"
#include "llmc/model/shards.h"
#include "llmc/model/train_model.h"

namespace weft::cpu {

// What make_llama will allocate, region by region; allocates nothing.
std::vector<MemoryLine> plan_llama(const ModelConfig& config, const TrainOptions& options);
// The same for rank `rank` of `ranks`.
std::vector<MemoryLine> plan_llama(const ModelConfig& config, const TrainOptions& options, int rank, int ranks,
                                   Shard shard);

// All parameters, gradients and moments start as zeros: write_tensor() brings them. Exit::usage if
// options.precision is not fp32, Exit::resources if the memory cannot be had.
std::unique_ptr<TrainModel> make_llama(const ModelConfig& config, const TrainOptions& options);

// One rank of options.virtual_ranks, as many as `ranks` has: its model computes the micro-batches of this rank alone, and
// gives the bits of one model that computes those of all ranks. `ranks` outlives the model. All ranks call, in the same
// order: statistics(), which makes the gradients those of the step; update(); and, with Shard::optimizer, read_tensor() of
// moments and, after statistics(), of gradients. write_tensor() of a moment keeps the part that the rank has.
std::unique_ptr<TrainModel> make_llama(const ModelConfig& config, const TrainOptions& options, Communicator& ranks,
                                       Shard shard);

}  // namespace weft::cpu
