// The operands of the linear layers of a Llama in training with --precision fp8, on the CPU: rounded to fp8 and kept in fp32.
// The GEMMs themselves are those of llmc/cpu/matmul.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/base/regions.h"
#include "llmc/model/fp8.h"
#include "llmc/model/llama_layout.h"

namespace weft::cpu {

class Fp8Linears {
 public:
  Fp8Linears(const ModelConfig& config, const TrainOptions& options);
  Fp8Linears(const Fp8Linears&) = delete;  // a region's pointer is bound to its address
  Fp8Linears& operator=(const Fp8Linears&) = delete;

  // Of the rounded weights, an input and a gradient.
  static std::uint64_t planned_bytes(const ModelConfig& config, const TrainOptions& options);

  // What a call is part of. Only the first computation of a training step is counted and measured for later scales; what is
  // computed again has the scales of the first time.
  enum class Pass { training, again, evaluation };

  // Before a pass: rounds the weights if they have changed.
  void use_weights(const LlamaParameters<float>& weights);
  const float* weight(BlockLinear linear, std::int64_t layer) const;
  // x [N, C] and dout [N, OC] rounded; valid until the next call of the same function.
  const float* input(BlockLinear linear, std::int64_t layer, const float* x, Pass pass);
  const float* gradient(BlockLinear linear, std::int64_t layer, const float* dout);

  void begin_step();  // forgets what the micro-batches of an earlier attempt have met
  void end_micro_batch() { ++micro_batches_; }
  Fp8Statistics statistics() const;
  void end_step();          // the parameters have been updated
  void weights_replaced();  // from outside: their history says nothing about them
  std::vector<float> state() const { return scales_.state(); }
  void set_state(std::span<const float> state) { scales_.set_state(state); }

 private:
  void round(float* out, std::int64_t slot, const float* x, std::int64_t count, Pass pass);

  ModelConfig config_;
  std::int64_t rows_;
  Fp8Scales scales_;
  std::vector<int> exponents_;     // of this step
  std::vector<Fp8Tally> tallies_;  // of this step; of weights since they were rounded
  std::vector<float*> weights_;    // by layer and linear layer
  float *input_ = nullptr, *gradient_ = nullptr;
  Regions regions_{"operands rounded to fp8"};
  HostArena arena_;
  std::int64_t micro_batches_ = 0;
  bool weights_stale_ = true;
};

}  // namespace weft::cpu
