// The linear layers of the transformer blocks in training with --precision fp8: their fp8 weights, the fp8 operands of
// the GEMMs, and the scales (llmc/model/fp8.h). llmc/cpu/fp8_linears.h is the same on the CPU.
//
// The inputs of qkv and of gate and up are written as codes by the norms before them, and the layer keeps, or recomputes,
// these in the place of bf16; the gradient of the weight transposes them. The codes of the output projection's input are
// made twice, each time from the bf16 activation: as rows for the forward GEMM, transposed for the gradient of the
// weight. Scales lie on the device and change only between steps, so captured graphs stay valid.
//
// The codes of the weights are written by the update. Where ranks divide the update, each rank rounds the weights of a
// layer when they have arrived from the others.
//
// Beside an adapter the weights are frozen. Their codes are rounded once, when the model is read, and lie in its memory in the place
// of the parameters, as rows alone: the gradient of an input transposes one matrix at a time, which costs 2 bytes a weight
// and micro-batch and saves half of the memory. The adapter reads inputs and gradients in bf16, so these exist as without fp8, and a
// pass, or SwiGLU's kernels, rounds them for a GEMM. No gradient of a weight exists, and nothing that only that reads.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "llmc/base/arena_layout.h"
#include "llmc/cuda/op/fp8/fp8.h"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/cuda/op/optim/adamw.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/operator_clock.h"
#include "llmc/cuda/training/plan.h"
#include "llmc/model/block_weights.h"
#include "llmc/model/fp8.h"
#include "llmc/model/train_model.h"

namespace weft::cuda {

// Device memory of Fp8Linears.
struct Fp8Memory {
  Fp8Memory(const ModelConfig& config, const TrainOptions& options, const TensorTable& table, const Sharding& sharding);
  Fp8Memory(const Fp8Memory&) = delete;  // `layout` holds the addresses of the pointers below
  Fp8Memory& operator=(const Fp8Memory&) = delete;

  // Floats from one scale that cuBLASLt reads to the next: it requires their addresses to be aligned as those of
  // matrices are.
  static constexpr std::int64_t kScaleStride = kRegionAlignment / sizeof(float);
  float* inverse(std::int64_t slot) const { return inverses + kScaleStride * slot; }

  struct Weight {
    std::uint8_t *codes = nullptr, *transposed = nullptr;  // [OC, C], [C, OC]
  };
  std::vector<Weight> weights;  // [4 place + linear], by Fp8Buffers
  // The work of an update that is not sharded: the matrices [4 layer + linear], and the blocks of everything else.
  std::vector<AdamWMatrix> matrix_list;
  std::vector<AdamWBlock> other_list;
  AdamWMatrix* matrices = nullptr;  // the two lists on the device
  AdamWBlock* others = nullptr;
  float *scales = nullptr, *inverses = nullptr;  // [slots]: 2^e; [slots, kScaleStride]: 2^-e
  Fp8Counters* counters = nullptr;               // [slots], and one for current scaling
  // The outputs of the two norms of each layer [2 layer + norm], [N, C]; with recomputation all layers share one pair.
  std::vector<std::uint8_t*> norms;
  std::uint8_t* input = nullptr;  // [N, C] of the widest input: of any, transposed
  // [N, OC] of the widest output gradient except that of gate and up
  std::uint8_t *gradient = nullptr, *gradient_transposed = nullptr;
  std::uint8_t *d_gate_up = nullptr, *d_gate_up_transposed = nullptr;  // [N, 2F]
  std::uint8_t* frozen_transposed = nullptr;                           // [C, OC] of the largest frozen matrix: of any
  ArenaLayout layout{"weights and operands in fp8"};
};

class Fp8Linears {
 public:
  // `matmul`, `clock`, the stream and `frozen` belong to the model. `swiglu_in_epilogue`: of the GEMMs beside it, which then are
  // kernels of the project (matmul_swiglu_fp8.h). `frozen`: beside an adapter the layers, whose linear layers are packed in
  // e4m3; otherwise empty.
  Fp8Linears(const ModelConfig& config, const TrainOptions& options, const TensorTable& table, const Sharding& sharding,
             bool swiglu_in_epilogue, std::span<const BlockWeights<__nv_bfloat16>> frozen, Matmul& matmul,
             OperatorClock& clock, cudaStream_t stream);

  // Which pass a call belongs to. Only `training`, the first computation of a training step, adds to the counters from
  // which later scales follow; `again` recomputes with the scales of the first time.
  enum class Pass { training, again, evaluation };

  // False until the first step has ended. Until then each tensor is read twice, to find its scale before rounding it;
  // the passes are not captured in graphs.
  bool scales_known() const { return scales_.known(); }
  // Whether the codes of a layer's weights, or of all, are those of the weights as they are.
  bool has_weights(std::int64_t layer) const { return buffers_.has(layer); }
  bool has_all_weights() const { return buffers_.has_all(); }
  // Writes these codes; `again`: in a backward pass, after another layer has used their place.
  void round_weights(std::int64_t layer, const BlockWeights<__nv_bfloat16>& weights, bool again);
  // All codes have been written: by launches that were replayed, or by the update.
  void all_weights_rounded();

  // A frozen matrix has new codes, with the scale 2^exponent and these counters. Waits for the GPU.
  void frozen_rounded(BlockLinear linear, std::int64_t layer, int exponent, const Fp8Counters& counters);

  // The input of qkv, or of gate and up, for forward() and weight_grad(): calls norm() with where its codes go, in the
  // first step once before that to find its scale. `bytes`: what norm() moves.
  void write_input(BlockLinear linear, std::int64_t layer, double bytes, Pass pass,
                   const std::function<void(const Fp8Target&)>& norm);
  // out [N, OC] = x [N, C] W^T, plus bias [OC] and addend [N, OC] unless they are null. x is null but for the output
  // projection: the input is what write_input() or, for the down projection, gate_up_and_swiglu() has made. Frozen weights: x is null
  // for the down projection alone, whose input swiglu() has made.
  void forward(BlockLinear linear, std::int64_t layer, __nv_bfloat16* out, const __nv_bfloat16* x,
               const __nv_bfloat16* bias, const __nv_bfloat16* addend, const char* name, Pass pass);
  // gate_up [N, 2F] from what write_input() has made, and, unless it is computed again, the down projection's input.
  // `bias` [2F] or null; null where SwiGLU is in the epilogue.
  void gate_up_and_swiglu(std::int64_t layer, __nv_bfloat16* gate_up, const __nv_bfloat16* bias, const char* name,
                          Pass pass);

  // Frozen weights: swiglu_out [N, F] of gate_up [N, 2F], and the down projection's input.
  void swiglu(std::int64_t layer, __nv_bfloat16* swiglu_out, const __nv_bfloat16* gate_up, Pass pass);

  // The gradient of qkv, for input_grad() and weight_grad(), where attention's backward pass writes its codes: calls
  // attention() with where they go. Scales are known.
  void write_gradient(BlockLinear linear, std::int64_t layer, const std::function<void(const Fp8Target&)>& attention);
  // Rounds dout [N, OC] for input_grad() and weight_grad(). Not for gate and up, whose gradient is made with SwiGLU's:
  // Exit::internal.
  void take_gradient(BlockLinear linear, std::int64_t layer, const __nv_bfloat16* dout);
  // dx [N, C] = dout W.
  void input_grad(BlockLinear linear, std::int64_t layer, __nv_bfloat16* dx, const char* name);
  // dweight [OC, C] (+)= dout^T x [N, C]. x is null but for the output projection: the input is what write_input() or,
  // for the down projection, down_input_grad_and_swiglu() has made.
  void weight_grad(BlockLinear linear, std::int64_t layer, float* dweight, const __nv_bfloat16* x,
                   Accumulate accumulate, const char* name);
  // dbias [OC] += the sum of the rows of dout, as it was rounded. `workspace` as for bias_grad().
  void bias_grad(BlockLinear linear, std::int64_t layer, float* dbias, void* workspace);
  // From the gradient that take_gradient() has made for the down projection, and gate_up [N, 2F]: the fp8 gradient of
  // gate_up, and SwiGLU's result again. d_swiglu_out [N, F] is scratch.
  void down_input_grad_and_swiglu(std::int64_t layer, __nv_bfloat16* d_swiglu_out, const __nv_bfloat16* gate_up,
                                  const char* name);

  // Frozen weights: replaces gate_up [N, 2F] by its gradient for d_swiglu_out [N, F], and rounds that for input_grad(); swiglu_out
  // [N, F], unless null, gets SwiGLU's result again.
  void swiglu_backward(std::int64_t layer, __nv_bfloat16* gate_up, const __nv_bfloat16* d_swiglu_out,
                       __nv_bfloat16* swiglu_out);

  void begin_step();  // clears the counters of inputs and gradients
  void end_micro_batch() { ++micro_batches_; }
  std::int64_t slots() const { return scales_.slots().count(); }
  // The counters of this rank, on the device [slots].
  const Fp8Counters* counters() const { return memory_.counters; }
  // `counters`: on the device, those of each rank of the run [ranks, slots]. Queued in the stream; synchronise before
  // statistics() and end_step(), which read them.
  void download_counters(const Fp8Counters* counters);
  Fp8Statistics statistics() const;
  void end_step();  // before the update: the scales of the next step
  // The work of the update behind end_step(), if scales are known: for adamw_fp8() the matrices with their codes, whose
  // counters it clears, and for adamw() the blocks of everything else. Not for an update that ranks divide.
  struct Update {
    const AdamWMatrix* matrices;
    std::int64_t count, tiles, elements;
    const AdamWBlock* others;
    std::int64_t other_count, other_elements;
  };
  const Update& begin_update();
  // Parameters were loaded from elsewhere: the history of magnitudes is void.
  void weights_replaced();
  std::vector<float> state() const { return scales_.state(); }
  void set_state(std::span<const float> state);

 private:
  Fp8Target target(std::int64_t slot, std::uint8_t* codes, std::uint8_t* transposed, Pass pass) const;
  void find_scale(std::int64_t slot, Pass pass, const std::function<void(const Fp8Target&)>& look);
  void swiglu_backward(std::int64_t layer, const __nv_bfloat16* d_swiglu_out, const __nv_bfloat16* gate_up);
  void prepare_update();
  void clear_weight_counters(std::int64_t first_layer, std::int64_t layers);
  void upload_scales();
  // Of all ranks.
  std::vector<Fp8Counters> step_counters() const {
    return of_all_ranks(scales_.slots(), {results_.at<Fp8Counters>(0), static_cast<std::size_t>(ranks_ * slots())});
  }
  // An operand of a GEMM.
  Fp8Matrix matrix(std::int64_t slot, const std::uint8_t* codes) const { return {codes, memory_.inverse(slot)}; }
  bool frozen() const { return !frozen_.empty(); }
  void forget_weights() {
    if (!frozen()) buffers_.forget();
  }
  int exponent(std::int64_t slot) const;
  // The codes of an input, as rows, for the forward GEMM.
  std::uint8_t* input_codes(BlockLinear linear, std::int64_t layer) const {
    if (frozen() || (linear != BlockLinear::qkv && linear != BlockLinear::up)) return memory_.input;
    return memory_.norms[static_cast<std::size_t>(2 * layer) + (linear == BlockLinear::up ? 1 : 0)];
  }
  // The gradient of a linear layer's output, as rows.
  Fp8Matrix gradient(BlockLinear linear, std::int64_t layer) const {
    return matrix(scales_.slots().at(Fp8Kind::gradient, layer, linear),
                  linear == BlockLinear::up ? memory_.d_gate_up : memory_.gradient);
  }
  const Fp8Memory::Weight& weight(BlockLinear linear, std::int64_t layer) const {
    return memory_.weights[static_cast<std::size_t>(4 * buffers_.of(layer)) + static_cast<std::size_t>(linear)];
  }
  // As rows, for the forward GEMM.
  const std::uint8_t* weight_codes(BlockLinear linear, std::int64_t layer) const {
    if (!frozen()) return weight(linear, layer).codes;
    return static_cast<const std::uint8_t*>(frozen_[static_cast<std::size_t>(layer)].linear(linear).weight.packed.data);
  }

  const ModelConfig config_;
  const std::optional<LoraConfig> lora_;
  const std::int64_t rows_, ranks_;
  const bool swiglu_in_epilogue_;
  const std::span<const BlockWeights<__nv_bfloat16>> frozen_;
  std::vector<int> frozen_exponents_;  // [4 layer + linear]
  Matmul& matmul_;
  OperatorClock& clock_;
  cudaStream_t stream_;
  Fp8Scales scales_;
  Fp8Memory memory_;
  Fp8Buffers buffers_;
  DeviceArena arena_;
  PinnedBuffer results_, upload_;  // counters of all ranks; scales and their inverses
  Update update_{};
  std::int64_t micro_batches_ = 0;
};

}  // namespace weft::cuda
