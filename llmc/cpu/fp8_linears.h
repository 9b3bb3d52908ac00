// The operands of the linear layers of a Llama in training with --precision fp8, on the CPU: rounded to fp8 and kept in fp32.
// The GEMMs themselves are those of llmc/cpu/matmul.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/base/arena_layout.h"
#include "llmc/comm/communicator.h"
#include "llmc/model/block_weights.h"
#include "llmc/model/fp8.h"
#include "llmc/model/train_model.h"

namespace weft::cpu {

class Fp8Linears {
 public:
  Fp8Linears(const ModelConfig& config, const TrainOptions& options, bool parameters_sharded);
  Fp8Linears(const Fp8Linears&) = delete;  // a region's pointer is bound to its address
  Fp8Linears& operator=(const Fp8Linears&) = delete;

  // Of the rounded weights, an input and a gradient.
  static std::uint64_t planned_bytes(const ModelConfig& config, const TrainOptions& options, bool parameters_sharded);

  // What a call is part of. Only the first computation of a training step is counted and measured for later scales; what is
  // computed again has the scales of the first time.
  enum class Pass { training, again, evaluation };

  // Before a pass reads the weights of a layer: rounds them if they have changed, or another layer is in their place. `again`:
  // a backward pass.
  void use_weights(std::int64_t layer, const BlockWeights<float>& weights, bool again);
  const float* weight(BlockLinear linear, std::int64_t layer) const { return weight_of(linear, layer); }
  // x [N, C] and dout [N, OC] rounded; valid until the next call of the same function.
  const float* input(BlockLinear linear, std::int64_t layer, const float* x, Pass pass);
  const float* gradient(BlockLinear linear, std::int64_t layer, const float* dout);

  void begin_step();  // forgets what the micro-batches of an earlier attempt have met
  void end_micro_batch() { ++micro_batches_; }
  void gather_counters(Communicator& ranks);  // all ranks have done their micro-batches: a call of all
  Fp8Statistics statistics() const;
  void end_step();          // the parameters have been updated
  void weights_replaced();  // from outside: their history says nothing about them
  std::vector<float> state() const { return scales_.state(); }
  void set_state(std::span<const float> state) {
    scales_.set_state(state);
    buffers_.forget();
  }

 private:
  void round(float* out, std::int64_t slot, const float* x, std::int64_t count, Pass pass);
  float* weight_of(BlockLinear linear, std::int64_t layer) const {
    return weights_[static_cast<std::size_t>(4 * buffers_.of(layer)) + static_cast<std::size_t>(linear)];
  }
  // Of all ranks, if there are several.
  const std::vector<Fp8Counters>& step_counters() const { return of_ranks_.empty() ? counters_ : of_ranks_; }

  ModelConfig config_;
  std::optional<LoraConfig> lora_;
  std::int64_t rows_;
  Fp8Scales scales_;
  std::vector<int> exponents_;         // of this step
  std::vector<Fp8Counters> counters_;  // of this step; of weights since they were rounded
  std::vector<Fp8Counters> of_ranks_;  // of all ranks, once they have been gathered
  Fp8Buffers buffers_;
  std::vector<float*> weights_;  // by place and linear layer
  float *input_ = nullptr, *gradient_ = nullptr;
  ArenaLayout layout_{"operands rounded to fp8"};
  HostArena arena_;
  std::int64_t micro_batches_ = 0;
};

}  // namespace weft::cpu
