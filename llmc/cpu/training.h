// Llamas and GPT-NeoX on the CPU in fp32: training, and generation from the live parameters. With Precision::fp8 the operands of the blocks'
// linear layers are rounded to fp8 (llmc/model/fp8.h): the reference for a GPU that computes with them.
#pragma once

#include <memory>

#include "llmc/comm/communicator.h"
#include "llmc/model/shards.h"
#include "llmc/model/train_model.h"

namespace weft::cpu {

// What make_training_model will allocate, region by region; allocates nothing.
std::vector<MemoryLine> plan_training(const ModelConfig& config, const TrainOptions& options);
// The same for process `rank` of `ranks`.
std::vector<MemoryLine> plan_training(const ModelConfig& config, const TrainOptions& options, int rank, int ranks,
                                      Shard shard);

// All parameters, gradients and state tensors start as zeros; write_tensor() sets them. Exit::usage if options.precision is
// bf16, or fp8 with sizes that check_fp8_sizes() refuses; Exit::resources if the memory cannot be had.
std::unique_ptr<TrainModel> make_training_model(const ModelConfig& config, const TrainOptions& options);

// The model of one process of several. options.virtual_ranks is a multiple of the number of processes that `ranks` has:
// process p of P computes the ranks p, p + P, p + 2 P, ... of a step, each with options.rank_micro_batches
// micro-batches. Together they give the bits of one model that computes all ranks. `ranks` must outlive the model.
//
// All processes must make these calls in the same order: backward(), if a process has several ranks; statistics(),
// which makes the gradients those of the step; update(); with Shard::optimizer read_tensor() of the optimizer's state and, after
// statistics(), of gradients. write_tensor() of a state tensor keeps the part that the process has. Shard::parameters divides
// parameters in the same way, so that read_tensor() of parameters, forward(), backward() and evaluate() are calls of
// all processes, too: each layer's parameters come from all of them. Gradients are those of Shard::optimizer.
std::unique_ptr<TrainModel> make_training_model(const ModelConfig& config, const TrainOptions& options,
                                                Communicator& ranks, Shard shard);

}  // namespace weft::cpu
