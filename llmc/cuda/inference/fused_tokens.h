// The fused decode kernel as the IdDecoder of an InferenceModel on the GPU: the model computes the prompt, and the
// kernel continues in the same pages.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/model/inference_model.h"
#include "llmc/model/single_sequence.h"

namespace weft::cuda {

// Positions of a page in a model for fused decoding: with the parallel residual a stage of the kernel's ring is of one page.
inline constexpr std::int64_t kFusedPageSize = 64;

// Empty if this GPU can run it in fused mode, otherwise one line for the user that says why not. `kv_fp8`: the model's pages
// hold keys and values in e4m3.
std::string fused_unsupported_reason(const ModelConfig& config, DType dtype, bool kv_fp8 = false);
// Whether the captured graph decodes a token faster than the fused kernel: with the sequential residual where a lane has two
// loads of a row, and the hidden state leaves more than half of the second one empty (measured in 16 bits:
// dev/performance/fused.md). Quantised ones are not measured there, nor below a hidden_size of 2,048, and left to the graph.
bool graph_is_faster(const ModelConfig& config);
// Whether the fused kernel is the default for these weights, if the graph is not faster: not for quantised weights with
// the parallel residual and a hidden_size above 4,096, which have not been measured beside the graph.
bool fused_by_default(const ModelConfig& config);
// The positions at which the fused kernel is fed faster than the graph, if it is the default: all of them, but with grouped
// queries of wide heads, which it computes without tensor cores (measured: dev/performance/fused.md).
std::int64_t fused_positions(const ModelConfig& config);

// Memory that fused_tokens() will allocate on the current GPU.
std::vector<MemoryLine> plan_fused_tokens(const ModelConfig& config);

// `model`: from load_inference() or random_inference() in `dtype`, fp16 or bf16; it must outlive the decoder.
// Exit::environment where fused_unsupported_reason() is not empty. `layer_only`, for measurements: FusedTuning.
std::unique_ptr<IdDecoder> fused_tokens(InferenceModel& model, DType dtype, bool layer_only = false);

}  // namespace weft::cuda
