// InferenceModel on the GPU for GPT-NeoX and Llama: many sequences at once, and through single_sequence() one.
// llmc/cpu/inference.h specifies what it computes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/cuda/transformer/neox.h"
#include "llmc/model/inference_model.h"
#include "llmc/model/llama_layout.h"
#include "llmc/model/model_file.h"
#include "llmc/model/train_model.h"

namespace weft::cuda {

inline constexpr std::int64_t kInferenceRows = 2048;  // of a step: as many as a prompt needs to use the GPU well

struct GpuInferenceOptions {
  DType dtype =
      DType::f16;       // f16, bf16 or f32: of weights, activations, keys and values; sums and the residual are fp32
  bool direct = false;  // launch by launch, with NVTX ranges, instead of captured graphs: the same bits
  // Steps of up to kFusedStepRows rows run in one persistent kernel (llmc/cuda/fused/step.h), whose sums have another order: the
  // bits of a row then depend on whether its step is that small. Exit::environment where fused_steps_refusal() is not empty.
  bool fused_steps = false;
  LoadProgress progress = nullptr;
};

// Why the GPU cannot run this model with this storage type, in one line for the user; empty where it can.
std::string inference_refusal(const ModelConfig& config, DType dtype);

// Why GpuInferenceOptions::fused_steps is not possible for this model, storage type and the current GPU; empty where it is.
std::string fused_steps_refusal(const ModelConfig& config, DType dtype);
// What it allocates beside plan_inference().
std::vector<MemoryLine> plan_fused_steps(const ModelConfig& config);

// What load_inference() will allocate, as memory() reports it afterwards. Needs no GPU.
std::vector<MemoryLine> plan_inference(const ModelConfig& config, const InferenceOptions& pool, DType dtype);

// Reads and verifies every parameter (load_parameters). Exit::usage where inference_refusal() has something to say,
// Exit::bad_file for damaged tensors, Exit::resources where the GPU has too little memory. Pages of 16, 32 or 64 positions.
std::unique_ptr<InferenceModel> load_inference(const ModelFile& file, const InferenceOptions& pool,
                                               const GpuInferenceOptions& options);
// The same with random parameters, for measurements.
std::unique_ptr<InferenceModel> random_inference(const ModelConfig& config, std::uint64_t seed,
                                                 const InferenceOptions& pool, const GpuInferenceOptions& options);

// A Llama from parameters that live elsewhere on the device; S is float or bf16. They must stay valid as long as the model.
// Whoever changes them synchronises first; pages that were written before do not know of it.
template <typename S>
std::unique_ptr<InferenceModel> make_llama_inference(const ModelConfig& config, const LlamaParameters<S>& weights,
                                                     const InferenceOptions& pool, bool direct = false);

// What the model that writes the samples of a training run allocates: make_llama_inference() for one sequence of `capacity`
// positions. Needs no GPU. Exit::usage where inference_refusal() has something to say.
std::vector<MemoryLine> plan_llama_samples(const ModelConfig& config, Precision precision, std::int64_t capacity);

}  // namespace weft::cuda
