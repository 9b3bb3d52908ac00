// One inference step of up to 8 rows in one persistent kernel. Rows may belong to different sequences, each at its own
// position, or be consecutive positions of one sequence; keys and values lie in pages. It computes what Inference
// (llmc/cuda/inference/inference.h) computes with one launch an operator, up to the logits. How it works: step.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/cuda/fused/decode.h"
#include "llmc/cuda/fused/timeline.h"
#include "llmc/cuda/op/attention/paged/kv_cache.h"
#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/cuda/op/gemm/device_weights.h"
#include "llmc/cuda/runtime/device.h"
#include "llmc/model/config.h"

namespace weft::cuda {

inline constexpr std::int64_t kFusedStepRows = 8;

// Empty if this GPU can run this model, otherwise one line for the user that says why not. Supported: a GPT-NeoX with
// the parallel residual and a hidden_size up to 2560 that FusedDecode supports, with 16-bit weights.
std::string fused_step_unsupported_reason(const ModelConfig& config, const Device& device);

// A row of a step: one token at one position of a sequence. Rows of the same sequence are consecutive and in the order
// of their positions.
struct FusedStepRow {
  std::int32_t id = 0;        // token id; -1 - s: read it from last_ids[s] on the device
  std::int32_t position = 0;  // the pages hold the sequence's positions before that of row `first`
  std::int32_t table = 0;     // index in `pages` at which the block table of the sequence begins
  std::int32_t first = 0;     // the first row of this step that belongs to the same sequence
  std::int32_t logits = -1;   // row of `logits` to write; -1: no logits
};

// S: fp16 or bf16, the type of parameters, activations, keys and values; sums and the residual stream are fp32. The
// bits of a row depend on its sequence and on the number of multiprocessors only: not on the other rows of the step,
// nor on the pages that hold its keys.
template <typename S>
class FusedStep {
 public:
  // The memory that `weights`, `cache` (paged) and `rope` point to must outlive this object. Allocates memory() here
  // and nothing later. All work is queued in `stream`. Only blocks, window_bytes, ring_bytes, timeout_seconds and
  // lose_an_arrival of `tuning` have an effect. Throws Exit::environment where fused_step_unsupported_reason() is not empty.
  FusedStep(const ModelConfig& config, const DeviceWeights<S>& weights, const KvCache<S>& cache,
            const DeviceRopeTable& rope, cudaStream_t stream, const FusedTuning& tuning = {});
  ~FusedStep();
  FusedStep(const FusedStep&) = delete;
  FusedStep& operator=(const FusedStep&) = delete;

  // Device memory that the constructor allocates.
  static std::vector<MemoryLine> memory(const ModelConfig& config);

  // Queues a step and returns: appends the keys and values of the rows to their pages and writes the logits that rows
  // ask for, fp32 [rows of logits, vocab_size]. `pages`, `last_ids` and `logits` are device memory, written by work
  // queued earlier in the stream. The caller guarantees that positions and pages are in range.
  void launch(std::span<const FusedStepRow> rows, const std::int32_t* pages, const std::int32_t* last_ids,
              float* logits);
  // Call after synchronising with the launches. Exit::environment if a wait in a kernel exceeded the time limit; its
  // outputs are then invalid.
  void check();

  int blocks() const;
  // true: records a timeline from the next launch on. false: stops, and discards what was recorded.
  void record_timeline(bool record);
  // The timeline of the last launch, which must have ended; empty unless one is recorded.
  FusedTimeline timeline();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft::cuda
