// Decoding GPT-NeoX and Llama at batch 1 in one persistent kernel: all layers, the head and sampling of many tokens in one launch,
// one block on each multiprocessor, weights and K/V cache streamed without a pause through shared memory.
// decode.cu says how it works.
//
// It computes what llmc/cpu/neox_inference.cpp and llmc/cpu/llama_inference.cpp specify, in fp32, with matrices stored in W, embedding, biases and norms in A, the
// cache in KV (all fp16, or all bf16). Sums are added in an
// order that depends on the model and on the number of multiprocessors only: same bits every run.
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
#include "llmc/cuda/fused/neox_weights.h"
#include "llmc/cuda/fused/timeline.h"
#include "llmc/cuda/op/kv_cache.h"
#include "llmc/cuda/op/mailbox.h"
#include "llmc/cuda/op/rope.h"
#include "llmc/cuda/runtime/device.h"
#include "llmc/model/config.h"

namespace weft::cuda {

// Quantised weights (llmc/model/quantization.h) are multiplied with fp32 activations without rounding either: int4 is
// scale * (q - zero) itself, not that rounded to 16 bits. The constructor copies them into the order in which blocks read them, so
// that a model whose prompts another decoder reads has them twice. They are int8 or int4 of a GPT-NeoX with the parallel residual,
// beside fp16.

// Why the kernel cannot run this model on this GPU, in one line for the user; empty if it can. It needs compute
// capability 9.0, a head_dim that is a multiple of 8 up to 256, and multiprocessors enough for the model's rows: 16 for
// Pythia-410M, 32 for 1B to 2.8B, 64 for 6.9B and 12B. With the parallel residual ffn_size = 4 hidden_size (all Pythia models);
// with the sequential one ffn_size is at most 4 times the hidden_size, rounded up to whole loads.
std::string fused_decode_refusal(const ModelConfig& config, const Device& device);

// Tokens of a launch, at most: the host may read their ids as late as it likes.
inline constexpr std::int64_t kFusedTokens = kMailboxIds;

// Tokens of a launch, at most, that are fed after the first one before an id is sampled.
inline constexpr std::size_t kFusedMoreIds = 7;

// What one launch decodes.
struct FusedRequest {
  std::int32_t first_id = 0;  // the token that is fed first, at `position`: the cache holds the positions before it
  std::vector<std::int32_t> more_ids =
      {};  // fed after it, at most kFusedMoreIds; nothing is sampled but after the last
  std::int64_t position = 0;
  // Tokens to sample, 1 .. kFusedTokens; position + more_ids.size() + count <= the cache's capacity.
  std::int64_t count = 0;
  SamplingPlan sampling;  // token i (from 0) is sampled for sequence position `position` + more_ids.size() + 1 + i
  std::vector<std::int32_t> stop_ids;  // the launch ends after the first of them; at most kMaxStopIds
  std::int32_t* device_ids = nullptr;  // [count] on the device: the ids are written there, too; or null
};

enum class FusedEnd : std::int32_t {
  running = 0,
  length = 1,     // `count` tokens
  stop_id = 2,    // the last token is a stop id
  cancelled = 3,  // by cancel()
};

// For measurements and tests.
struct FusedTuning {
  int blocks = 0;        // 0: chosen by the model's size; at most one on each multiprocessor
  int window_bytes = 0;  // bulk copies in flight a block; 0: the default
  int ring_bytes = 0;    // shared memory of the ring; 0: all there is
  bool own_vectors =
      false;  // each thread loads what it needs of other blocks' results, also where several need the same
  // LayerNorms, QKV, attention, output projection, MLP-up and GELU of each layer, and nothing else: no MLP-down, no head.
  // Ids are 0, logits are not written.
  bool layer_only = false;
  double timeout_seconds = 10;   // a wait of the kernel that takes longer is an error
  bool lose_an_arrival = false;  // for tests of that: the last token of a launch never completes
};

template <typename W, typename A, typename KV>
class FusedDecode {
 public:
  // What `weights`, `cache` and `rope` point to, a table of `cache.capacity` positions or more, and `mailbox`, where ids are
  // published, stay valid as long as this object. Allocates memory() and nothing later. Exit::environment where
  // fused_decode_refusal() is not empty. Everything runs in `stream`.
  FusedDecode(const ModelConfig& config, const NeoxWeights<W, A>& weights, const KvCache<KV>& cache,
              const DeviceRopeTable& rope, Mailbox& mailbox, cudaStream_t stream, const FusedTuning& tuning = {});
  ~FusedDecode();
  FusedDecode(const FusedDecode&) = delete;
  FusedDecode& operator=(const FusedDecode&) = delete;

  // Device memory that the constructor allocates: workspace with the logits, and quantised weights in the kernel's order.
  static std::vector<MemoryLine> memory(const ModelConfig& config);

  // Starts decoding and returns. The launch before must have ended (finish()). Keys and values of the fed tokens are
  // appended to the cache.
  void launch(const FusedRequest& request);
  // The id of token i of the running launch as soon as the GPU has written it, or nothing if the launch ended before it.
  // Exit::numeric if its logits held NaN or infinity; Exit::environment if the GPU does not answer.
  std::optional<std::int32_t> wait(std::int64_t i);
  // The launch ends after the token in work. Harmless when nothing runs.
  void cancel();
  // Waits for the end of the launch; reports what wait() would. Nothing runs: returns the last answer.
  struct Result {
    FusedEnd end = FusedEnd::running;
    std::int64_t tokens = 0;  // sampled; so many positions and those of more_ids were added to the cache
  };
  Result finish();

  // fp32 [V] on the device: those of the last token of a launch that has ended.
  const float* logits() const;
  // XXH3-64 over the bits of the logits, copied to the host.
  std::uint64_t logits_hash();
  // Bytes that one token with `context` positions before it reads: weights, an embedding row, K/V cache.
  std::uint64_t bytes_per_token(std::int64_t context) const;

  int blocks() const;
  // Records a timeline from the next launch on, with a kernel that has instruments; or forgets what was recorded and goes
  // back to the kernel without.
  void record_timeline(bool record);
  // Of the last launch, which has ended; empty unless one is recorded.
  FusedTimeline timeline();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft::cuda
