// InferenceModel on the GPU: many sequences at once, and through single_sequence() one.
// llmc/cpu/inference.h specifies what it computes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/model/inference_model.h"
#include "llmc/model/model_file.h"
#include "llmc/model/train_model.h"

namespace weft::cuda {

// Rows of a step: enough for a prompt to use the GPU well; with kPromptRows, where memory has room and nobody else waits for
// the step, the tiles of the GEMMs end closer together (1 to 4 % of a prompt of 8,192 ids and more).
inline constexpr std::int64_t kInferenceRows = 2048, kPromptRows = 8192;
inline constexpr std::int64_t kTwoStreamRows = 257;  // GpuInferenceOptions::two_stream_rows

// Called a few times a second while a file is read, from the calling thread.
using LoadProgress = std::function<void(std::uint64_t bytes_done, std::uint64_t bytes_all)>;

struct GpuInferenceOptions {
  // f16, bf16 or f32: of weights, activations, keys and values; sums and the residual stream are fp32
  DType dtype = DType::f16;
  // Single launches with NVTX ranges, by step and operator, instead of captured graphs: the same bits.
  bool direct = false;
  // Steps of up to kFusedStepRows rows run in one persistent kernel (llmc/cuda/fused/step.h), which adds in another
  // order: the bits of a row then depend on whether its step is that small. Exit::environment where
  // fused_steps_unsupported_reason() is not empty.
  bool fused_steps = false;
  LoadProgress progress = nullptr;
  // Steps of so many rows compute the first half of a parallel residual's MLP in a second stream, beside QKV and
  // attention: the same bits. Not with `direct`.
  std::int64_t two_stream_rows = kTwoStreamRows;
  // Of an adapter beside quantised weights (ModelFile::adapter_beside()): load_inference() takes it from the file.
  std::optional<LoraConfig> lora = std::nullopt;
  // The linear layers of the blocks multiply in fp8 (op/gemm/rows_matmul_fp8.h). Exit::usage or Exit::environment where
  // fp8_activations_unsupported_reason() is not empty; not with fused_steps or an adapter.
  bool fp8_activations = false;
};

// Empty if the GPU kernels can run this model with this storage type, otherwise one line for the user that says why
// not.
std::string inference_unsupported_reason(const ModelConfig& config, DType dtype);

// Empty if GpuInferenceOptions::fused_steps is possible for this model and storage type on the current GPU, otherwise
// one line for the user that says why not.
std::string fused_steps_unsupported_reason(const ModelConfig& config, DType dtype);
// Memory that fused_steps needs beyond plan_inference().
std::vector<MemoryLine> plan_fused_steps(const ModelConfig& config);

// Empty if GpuInferenceOptions::fp8_activations is possible for this model, otherwise one line for the user that says why
// not. Needs no GPU: whether there is one that can is said by fp8_activations_unsupported_gpu().
std::string fp8_activations_unsupported_reason(const ModelConfig& config, DType dtype,
                                               const std::optional<LoraConfig>& lora = std::nullopt);
std::string fp8_activations_unsupported_gpu();

// Memory that load_inference() will allocate, as memory() reports it afterwards. Needs no GPU. `lora`, `fp8_activations`:
// as in GpuInferenceOptions.
std::vector<MemoryLine> plan_inference(const ModelConfig& config, const InferenceOptions& pool, DType dtype,
                                       const std::optional<LoraConfig>& lora = std::nullopt,
                                       bool fp8_activations = false);

// Reads and verifies every parameter (load_parameters), and the adapter that stands beside them. Pages have 16, 32 or 64 positions. Exit::usage where
// inference_unsupported_reason() is not empty, for an adapter with fused_steps, and for kv_fp8 with fused_steps or in fp32, Exit::bad_file for damaged tensors,
// Exit::resources if the GPU has too little memory.
std::unique_ptr<InferenceModel> load_inference(const ModelFile& file, const InferenceOptions& pool,
                                               const GpuInferenceOptions& asked);
// The same with random parameters, for measurements.
std::unique_ptr<InferenceModel> random_inference(const ModelConfig& config, std::uint64_t seed,
                                                 const InferenceOptions& pool, const GpuInferenceOptions& options);

// A model over parameters that another object owns on the device, in an arena of the layout of `table` with S, float or bf16, for
// all tensors. They must outlive the model. Synchronise before changing them; pages that have been written do not reflect the change.
template <typename S>
std::unique_ptr<InferenceModel> make_inference(const ModelConfig& config, const TensorTable& table, const S* parameters,
                                               const InferenceOptions& pool, bool direct = false);

// Memory of the model that writes the samples of a training run: make_inference() for one sequence of `capacity`
// positions. Needs no GPU. Exit::usage where inference_unsupported_reason() is not empty.
std::vector<MemoryLine> plan_samples(const ModelConfig& config, Precision precision, std::int64_t capacity);

}  // namespace weft::cuda
