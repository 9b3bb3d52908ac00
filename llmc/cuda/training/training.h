// Llamas and GPT-NeoX on the GPU: training in bf16 (with an exact fp32 master) or fp32, and generation from the live parameters.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/cuda/comm/device_ranks.h"
#include "llmc/model/shards.h"
#include "llmc/model/train_model.h"

namespace weft::cuda {

// What make_training_model() will allocate, region by region. Needs no GPU.
std::vector<MemoryLine> plan_training(const ModelConfig& config, const TrainOptions& options);
// The same for one of `ranks` ranks.
std::vector<MemoryLine> plan_training(const ModelConfig& config, const TrainOptions& options, int rank, int ranks,
                                      Shard shard);
// With TrainOptions::lora: the copy of the model that TrainModel::decoder() adds, with the adapter in its weights.
MemoryLine plan_merged(const ModelConfig& config, const TrainOptions& options);

// All parameters, gradients and moments start as zeros; write_tensor() sets them. Exit::usage for a head size or width
// without kernels and for an adapter that the model cannot have, Exit::resources if memory does not suffice,
// Exit::environment without a usable GPU.
std::unique_ptr<TrainModel> make_training_model(const ModelConfig& config, const TrainOptions& options);

// The model of one of `ranks` ranks, which together compute the options.virtual_ranks ranks of a step, a multiple of
// their number, in rounds: in round i rank r computes rank i ranks.size() + r of the step. Each has its own GPU or,
// with staged ranks, a shared one. Its model computes the micro-batches of this rank only, and gives the bits of a
// single model that computes all of them on such a GPU. GEMM plans are those of rank 0; options.matmul_plans of other
// ranks is ignored. `ranks` and `device_ranks` must outlive the model.
//
// Collective calls, which all ranks make in the same order: make_training_model(); forward() and backward(), which send what is
// complete; statistics(), after which the gradients are those of the step; update(); and, unless shard is none,
// read_tensor() of moments, of parameters that are sharded or in bf16 (whose low halves are sharded) and, after
// statistics(), of gradients; with Shard::parameters also evaluate() and write_tensor() of parameters. write_tensor()
// keeps the part that the rank owns. `bucket_elements`: see RankShare (llmc/cuda/training/plan.h); changes no bit.
// Exit::internal for Shard::gradients and Shard::parameters with several micro-batches a rank.
std::unique_ptr<TrainModel> make_training_model(const ModelConfig& config, const TrainOptions& options,
                                                Communicator& ranks, DeviceRanks& device_ranks, Shard shard,
                                                std::int64_t bucket_elements = 16 << 20);

}  // namespace weft::cuda
