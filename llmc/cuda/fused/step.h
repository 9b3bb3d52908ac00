// One step of up to 8 rows in one persistent kernel: rows of different sequences at their own positions, or several positions of
// one, whose keys and values lie in pages. It computes what Inference (llmc/cuda/transformer/inference.h) computes launch by
// launch, up to the logits. step.cu says how it works.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/cuda/fused/decode.h"
#include "llmc/cuda/fused/neox_weights.h"
#include "llmc/cuda/fused/timeline.h"
#include "llmc/cuda/op/kv_cache.h"
#include "llmc/cuda/op/rope.h"
#include "llmc/cuda/runtime/device.h"
#include "llmc/model/config.h"

namespace weft::cuda {

inline constexpr std::int64_t kFusedStepRows = 8;

// Why the kernel cannot run this model on this GPU, in one line for the user; empty if it can: a GPT-NeoX with the parallel
// residual and a hidden_size up to 2560 that FusedDecode can run.
std::string fused_step_refusal(const ModelConfig& config, const Device& device);

// A row of a step. Rows of one sequence follow each other, in the order of their positions.
struct FusedStepRow {
  std::int32_t id = 0;        // that is fed; -1 - s: last_ids[s]
  std::int32_t position = 0;  // the pages hold those before that of row `first`
  std::int32_t table = 0;     // where the block table of the row's sequence begins in `pages`
  std::int32_t first = 0;     // first row of this step that is of the same sequence
  std::int32_t logits = -1;   // row of `logits`; -1: not wanted
};

// S: fp16 or bf16, of parameters, activations, keys and values; sums and the residual stream are fp32. A row's bits depend on its
// sequence alone, and on the number of multiprocessors: not on the other rows of the step, nor on where its keys lie.
template <typename S>
class FusedStep {
 public:
  // What `weights`, `cache`, which is in pages, and `rope` point to stays valid as long as this object. Allocates memory() and
  // nothing later. Exit::environment where fused_step_refusal() is not empty. Everything runs in `stream`. Of `tuning` blocks,
  // window_bytes, ring_bytes, timeout_seconds and lose_an_arrival count.
  FusedStep(const ModelConfig& config, const NeoxWeights<S, S>& weights, const KvCache<S>& cache,
            const DeviceRopeTable& rope, cudaStream_t stream, const FusedTuning& tuning = {});
  ~FusedStep();
  FusedStep(const FusedStep&) = delete;
  FusedStep& operator=(const FusedStep&) = delete;

  // Device memory that the constructor allocates.
  static std::vector<MemoryLine> memory(const ModelConfig& config);

  // Starts a step and returns: appends keys and values of the rows to their pages, and writes the logits that are wanted,
  // [.., vocab_size] fp32. On the device: the block tables `pages`, `last_ids` and `logits`, which must have been written in the
  // order of the stream. Positions and pages are in range.
  void launch(std::span<const FusedStepRow> rows, const std::int32_t* pages, const std::int32_t* last_ids,
              float* logits);
  // Once the GPU has done what was launched. Exit::environment if a wait of the kernel took longer than the time limit: what it
  // wrote is no result.
  void check();

  int blocks() const;
  // Records a timeline from the next launch on, or forgets what was recorded.
  void record_timeline(bool record);
  // Of the last launch, which has ended; empty unless one is recorded.
  FusedTimeline timeline();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft::cuda
