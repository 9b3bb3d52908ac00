// How the fused decode kernel divides a model among the multiprocessors of a device, or why it cannot run there.
// Private to this folder.
#pragma once

#include <string>
#include <vector>

#include "llmc/cuda/fused/decode.h"
#include "llmc/cuda/fused/parameters.cuh"

namespace weft::cuda::fused {

// How consumer warps divide the rows of a model. warps_k = 0: the model cannot be divided.
struct KernelShape {
  int row_loads = 0;  // 16-byte loads of a lane from a row of C elements: Variant::kRowLoads
  int warps_k = 0, warps_r = 0;
  int stage_bytes = 0;
};

struct Plan {
  std::string reason;       // empty: the model runs
  bool sequential = false;  // a kernel of the sequential residual runs it
  KernelShape shape;
  int blocks = 0;
  std::vector<BlockRows> rows;  // indexed by block
  std::vector<CopyRun> copies;  // of all blocks, one after another
  Sizes sizes{};
  SequentialSizes sequential_sizes{};
  SharedLayout layout{};
};
// `kv_fp8`: keys and values are codes.
Plan plan_of(const ModelConfig& config, const Device& device, const FusedTuning& tuning, bool kv_fp8 = false);

// Writes the lists of all blocks of a plan whose sizes are set; with the parallel residual stage_bytes must not change any more.
void list_copies(Plan& plan, const ModelConfig& config, bool layer_only);

// Thread blocks of a launch; `wanted` = 0: chosen by the model's size.
int blocks_for(const ModelConfig& config, int multiprocessors, int wanted);
// Splits of the context of a K/V head, at most: enough for every block to get an item.
int max_splits_of(const ModelConfig& config, int blocks);

}  // namespace weft::cuda::fused
