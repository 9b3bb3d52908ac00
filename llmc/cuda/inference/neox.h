// GPT-NeoX / Pythia generation on the GPU. llmc/cpu/inference_layers.cpp specifies what it computes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/model/decode_model.h"
#include "llmc/model/model_file.h"

namespace weft::cuda {

// How a token is decoded:
//   reference  one launch an operator, with NVTX ranges by token, layer and operator
//   graph      the same launches captured once in a CUDA graph, which every step replays
//   fused      the whole model, and many tokens, in one launch (llmc/cuda/fused/decode.h)
enum class DecodeMode { reference, graph, fused };
const char* decode_mode_name(DecodeMode mode);

// Called a few times a second while a file is read, from the calling thread.
using LoadProgress = std::function<void(std::uint64_t bytes_done, std::uint64_t bytes_all)>;

struct NeoxOptions {
  DType dtype = DType::f16;  // f16, bf16 or f32: of weights, activations and cache; sums and the residual are fp32
  DecodeMode mode = DecodeMode::graph;
  std::int64_t capacity = 0;  // positions of the K/V cache
  LoadProgress progress = nullptr;
  // For measurements: computes only norms, QKV, attention, output projection, MLP-up and GELU of every layer. The ids
  // are meaningless.
  bool layer_only = false;
};

// Empty if some mode can run this model with this storage type, otherwise one line for the user that says why not.
std::string neox_unsupported_reason(const ModelConfig& config, DType dtype);

// Empty if this GPU can run it in fused mode, otherwise one line for the user that says why not.
std::string fused_unsupported_reason(const ModelConfig& config, DType dtype);
// Whether the captured graph decodes a token faster than the fused kernel: with the sequential residual, whose five
// exchanges a layer cost more than overlapping launches, unless rows of the weights fill the loads of the warps
// (measured: dev/performance/fused.md).
bool graph_is_faster(const ModelConfig& config);
// Whether the fused kernel is the default for these weights, if the graph is not faster: not for quantised weights with
// the parallel residual and a hidden_size above 2,560, which have not been measured beside the graph.
bool fused_by_default(const ModelConfig& config);

// Memory that the model will allocate on the current GPU, as memory() reports it afterwards.
std::vector<MemoryLine> plan_neox(const ModelConfig& config, const NeoxOptions& options);

// Reads and verifies every parameter (load_parameters). Exit::usage where neox_unsupported_reason() is not empty, Exit::bad_file
// for damaged tensors, Exit::resources if the GPU has too little memory.
std::unique_ptr<DecodeModel> load_neox(const ModelFile& file, const NeoxOptions& options);
// The same with random parameters, for measurements.
std::unique_ptr<DecodeModel> random_neox(const ModelConfig& config, std::uint64_t seed, const NeoxOptions& options);

}  // namespace weft::cuda
