// Decoding GPT-NeoX and Llama at batch 1 in one persistent kernel: all layers, the head and sampling of many tokens in
// one launch, one block on each multiprocessor, weights and K/V cache streamed without a pause through shared memory.
// How it works: decode.cu.
//
// It computes what llmc/cpu/inference_layers.cpp specifies, in fp32. S is the storage type of weights and cache, fp16 or bf16;
// a cache of codes is that of rows in S.
// The order of sums depends on the model and on the GPU (multiprocessors, shared memory) only, so every run gives the same
// bits.
//
// Quantised weights (llmc/cuda/formats): with the parallel residual beside fp16, else beside bf16. Activations stay in fp32
// there, too, and weights of grouped formats are scale * (q - zero) without rounding to 16 bits. The
// constructor copies the weights into the order in which blocks read them, so a model that another decoder reads for
// its prompts holds them twice.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/base/sampling.h"
#include "llmc/cuda/fused/timeline.h"
#include "llmc/cuda/op/attention/paged/kv_cache.h"
#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/cuda/op/gemm/device_weights.h"
#include "llmc/cuda/op/sample/mailbox.h"
#include "llmc/cuda/runtime/device.h"
#include "llmc/model/config.h"

namespace weft::cuda {

// Empty if this GPU can run this model, otherwise one line for the user that says why not. Needed: compute capability
// 9.0; a head_dim that is a multiple of 8 up to 256; enough multiprocessors for the model's rows: 16 for Pythia-410M,
// 32 for 1B to 2.8B, 64 for 6.9B and 12B. The parallel residual needs ffn_size = 4 hidden_size (all Pythia models), the
// sequential one a hidden_size and heads x head_dim of at most 4,096 and an ffn_size of at most 16,384. `kv_fp8`: keys and
// values are codes (llmc/base/kv_fp8.h); needed are the sequential residual and a head_dim of 64 or 128.
std::string fused_decode_unsupported_reason(const ModelConfig& config, const Device& device, bool kv_fp8 = false);
// Loads of 16 bytes that a lane makes of a row of the widest matrices, 1 or 2, with the sequential residual; 0 if there is no
// kernel for its sizes.
int fused_row_loads(const ModelConfig& config);

// Tokens sampled in a launch, at most: as many as the mailbox holds, so the host may read them as late as it likes.
inline constexpr std::int64_t kFusedTokens = kMailboxIds;

// Given tokens that a launch may feed after the first one, before it samples.
inline constexpr std::size_t kFusedMoreIds = 7;

// What one launch decodes.
struct FusedRequest {
  std::int32_t first_id = 0;                // the token fed at `position`; the cache holds the positions before it
  std::vector<std::int32_t> more_ids = {};  // fed next, at most kFusedMoreIds; sampling starts after the last of them
  std::int64_t position = 0;
  // Tokens to sample, 1 to kFusedTokens; position + more_ids.size() + count <= the cache's capacity.
  std::int64_t count = 0;
  SamplingPlan sampling;  // token i (from 0) is sampled for sequence position `position` + more_ids.size() + 1 + i
  std::vector<std::int32_t> stop_ids;  // the launch ends after it has sampled one of them; at most kMaxStopIds
  std::int32_t* device_ids = nullptr;  // or null; [count] on the device, gets the sampled ids as well
};

enum class FusedEnd : std::int32_t {
  running = 0,
  length = 1,     // `count` tokens
  stop_id = 2,    // the last token is a stop id
  cancelled = 3,  // by cancel()
};

// For measurements and tests.
struct FusedTuning {
  int blocks = 0;        // thread blocks; 0: chosen by the model's size, at most one on each multiprocessor
  int window_bytes = 0;  // bytes of bulk copies in flight in each block; 0: the default
  int ring_bytes = 0;    // shared memory of the ring in bytes; 0: all that is left
  bool own_vectors =
      // each thread loads other blocks' results from global memory itself, even where several threads need the same
      false;
  // Computes only LayerNorms, QKV, attention, output projection, MLP-up and GELU of each layer: no MLP-down, no head.
  // Ids are 0, logits are not written.
  bool layer_only = false;
  double timeout_seconds = 10;   // a wait of the kernel that takes longer is an error
  bool lose_an_arrival = false;  // for tests of the time limit, in 16 bits: the last token of a launch never completes
};

template <typename S>
class FusedDecode {
 public:
  // The memory that `weights`, `cache` and `rope` (at least `cache.capacity` positions) point to, and `mailbox`, in
  // which ids are published, must outlive this object. Allocates memory() here and nothing later. All work is queued in
  // `stream`. Throws Exit::environment where fused_decode_unsupported_reason() is not empty.
  FusedDecode(const ModelConfig& config, const DeviceWeights<S>& weights, const KvCache<S>& cache,
              const DeviceRopeTable& rope, Mailbox& mailbox, cudaStream_t stream, const FusedTuning& tuning = {});
  ~FusedDecode();
  FusedDecode(const FusedDecode&) = delete;
  FusedDecode& operator=(const FusedDecode&) = delete;

  // Device memory that the constructor allocates: workspace with the logits, and the repacked quantised weights.
  static std::vector<MemoryLine> memory(const ModelConfig& config);

  // Starts decoding and returns. The previous launch must have ended (finish()). Keys and values of the fed tokens are
  // appended to the cache. Exit::internal if the request is out of range.
  void launch(const FusedRequest& request);
  // Waits for the id of token i (from 0) of the running launch; nothing if the launch ends before it. Exit::numeric if
  // its logits held NaN or infinity; Exit::environment if the GPU does not answer.
  std::optional<std::int32_t> wait(std::int64_t i);
  // Ends the launch after the current token. Harmless when nothing runs.
  void cancel();
  // Waits for the end of the launch; throws what wait() would. If none is running, returns the last result.
  struct Result {
    FusedEnd end = FusedEnd::running;
    std::int64_t tokens = 0;  // sampled; the cache has grown by these and more_ids.size() positions
  };
  Result finish();

  // Logits of the last token of a launch that has ended, fp32 [V] on the device.
  const float* logits() const;
  // XXH3-64 of the bits of the logits.
  std::uint64_t logits_hash();
  // Bytes of device memory that decoding one token with `context` positions before it reads: weights, a row of the
  // embedding, K/V cache.
  std::uint64_t bytes_per_token(std::int64_t context) const;

  int blocks() const;
  // true: records a timeline from the next launch on, with the instrumented kernel; Exit::usage if matrices are quantised.
  // false: discards what was recorded and returns to the kernel without instruments.
  void record_timeline(bool record);
  // The timeline of the last launch, which must have ended; empty unless one is recorded.
  FusedTimeline timeline();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft::cuda
