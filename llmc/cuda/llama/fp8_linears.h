// The linear layers of the blocks in training with --precision fp8: their weights in fp8, the operands of the GEMMs that run,
// and the scales (llmc/model/fp8.h). llmc/cpu/fp8_linears.h is the same on the CPU.
//
// Codes of inputs are made twice: as rows for the forward GEMM, transposed for the gradient of the weight, from the bf16
// activation that the layer keeps or computes again. Scales lie on the device and change between steps alone, so that
// graphs hold.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "llmc/base/regions.h"
#include "llmc/cuda/op/fp8.h"
#include "llmc/cuda/op/matmul.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/operator_clock.h"
#include "llmc/model/fp8.h"
#include "llmc/model/llama_layout.h"

namespace weft::cuda {

// What they keep on the GPU.
struct Fp8Memory {
  Fp8Memory(const ModelConfig& config, const TrainOptions& options);
  Fp8Memory(const Fp8Memory&) = delete;  // regions has the addresses of the pointers
  Fp8Memory& operator=(const Fp8Memory&) = delete;

  // Scales that cuBLASLt reads are so many floats apart: it takes none that is not aligned as matrices are.
  static constexpr std::int64_t kScaleStride = kRegionAlignment / sizeof(float);
  float* inverse(std::int64_t slot) const { return inverses + kScaleStride * slot; }

  struct Weight {
    std::uint8_t *codes = nullptr, *transposed = nullptr;  // [OC, C], [C, OC]
  };
  std::vector<Weight> weights;                                         // by layer and linear layer
  float *scales = nullptr, *inverses = nullptr;                        // [slots]: 2^e; [slots, kScaleStride]: 2^-e
  Fp8Tally* tallies = nullptr;                                         // [slots], and one for current scaling
  std::uint8_t* input = nullptr;                                       // of the widest input [N, C]
  std::uint8_t *gradient = nullptr, *gradient_transposed = nullptr;    // of the widest but that of gate and up
  std::uint8_t *d_gate_up = nullptr, *d_gate_up_transposed = nullptr;  // [N, 2F]
  Regions regions{"weights and operands in fp8"};
};

class Fp8Linears {
 public:
  // `matmul`, `clock` and the stream belong to the model.
  Fp8Linears(const ModelConfig& config, const TrainOptions& options, Matmul& matmul, OperatorClock& clock,
             cudaStream_t stream);

  // What a call is part of. Only the first computation of a training step is counted and measured for later scales; what is
  // computed again has the scales of the first time.
  enum class Pass { training, again, evaluation };

  // False until the first step has been finished: each tensor is looked through before it is rounded, and the host
  // decides so, which a graph could not.
  bool scales_known() const { return scales_.known(); }
  // Before a pass: rounds the weights if they have been replaced.
  void use_weights(const LlamaParameters<__nv_bfloat16>& weights);

  // out [N, OC] = x [N, C] W^T, plus addend unless it is null. x is null for the down projection: it is what swiglu() has made.
  void forward(BlockLinear linear, std::int64_t layer, __nv_bfloat16* out, const __nv_bfloat16* x,
               const __nv_bfloat16* addend, const char* name, Pass pass);
  // Makes the input of the down projection from gate_up [N, 2F].
  void swiglu(std::int64_t layer, const __nv_bfloat16* gate_up, Pass pass);

  // Rounds dout [N, OC], for the two calls below. That of gate and up is made by swiglu_backward().
  void take_gradient(BlockLinear linear, std::int64_t layer, const __nv_bfloat16* dout);
  // dx [N, C] = dout W.
  void input_grad(BlockLinear linear, std::int64_t layer, __nv_bfloat16* dx, const char* name);
  // dweight [OC, C] (+)= dout^T x. x is null for the down projection: it is what swiglu_backward() has made.
  void weight_grad(BlockLinear linear, std::int64_t layer, float* dweight, const __nv_bfloat16* x,
                   Accumulate accumulate, const char* name);
  // From the gradient of SwiGLU's result [N, F]: the gradient of gate_up, and the result again, rounded.
  void swiglu_backward(std::int64_t layer, const __nv_bfloat16* d_swiglu_out, const __nv_bfloat16* gate_up);

  void begin_step();  // forgets what the micro-batches of an earlier attempt have met
  void end_micro_batch() { ++micro_batches_; }
  void download_tallies();  // in the order of the stream; statistics() and end_step() read them after it
  Fp8Statistics statistics() const;
  void end_step(const LlamaParameters<__nv_bfloat16>& weights);  // they have been updated
  void weights_replaced();                                       // from outside: their history says nothing about them
  std::vector<float> state() const { return scales_.state(); }
  void set_state(std::span<const float> state);

 private:
  Fp8Target target(std::int64_t slot, std::uint8_t* codes, std::uint8_t* transposed, Pass pass) const;
  void find_scale(std::int64_t slot, Pass pass, const std::function<void(const Fp8Target&)>& look);
  void round_weights(const LlamaParameters<__nv_bfloat16>& weights);
  void upload_scales();
  std::span<const Fp8Tally> tallies() const {
    return {results_.at<Fp8Tally>(0), static_cast<std::size_t>(scales_.slots().count())};
  }
  // An operand of cuBLASLt.
  Fp8Matrix matrix(std::int64_t slot, const std::uint8_t* codes) const { return {codes, memory_.inverse(slot)}; }
  const Fp8Memory::Weight& weight(BlockLinear linear, std::int64_t layer) const {
    return memory_.weights[static_cast<std::size_t>(4 * layer) + static_cast<std::size_t>(linear)];
  }

  const ModelConfig config_;
  const std::int64_t rows_;
  Matmul& matmul_;
  OperatorClock& clock_;
  cudaStream_t stream_;
  Fp8Scales scales_;
  Fp8Memory memory_;
  DeviceArena arena_;
  PinnedBuffer results_, upload_;  // tallies; scales and their inverses
  std::int64_t micro_batches_ = 0;
  bool weights_stale_ = true;
};

}  // namespace weft::cuda
