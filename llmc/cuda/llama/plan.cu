#include "llmc/cuda/llama/plan.h"

#include <algorithm>
#include <cmath>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/llama/llama.h"
#include "llmc/cuda/op/attention/attention.h"
#include "llmc/cuda/op/embedding.h"
#include "llmc/cuda/op/matmul.h"
#include "llmc/cuda/op/residual_norm.h"
#include "llmc/model/llama_layout.h"

namespace weft::cuda {

// With fewer rows the gradient of the head, which every chunk reads and writes, costs more; more rows gain nothing and
// take memory (1 GB here with a vocabulary of 128,256).
std::int64_t classifier_rows(std::int64_t N) {
  constexpr std::int64_t kRows = 4096;
  return std::min(N, kRows);
}

AttentionShape attention_shape(const ModelConfig& config, const TrainOptions& options) {
  return {options.micro_batch,
          options.seq_len,
          options.seq_len,
          config.num_heads,
          config.num_kv_heads,
          config.head_dim,
          true,
          1.0f / std::sqrt(static_cast<float>(config.head_dim))};
}

std::vector<AdamWBlock> update_blocks(const TensorTable& table) {
  std::vector<AdamWRange> ranges;
  for (const TensorSpec& spec : table.specs()) ranges.push_back({spec.offset, spec.offset + spec.elements, spec.decay});
  return adamw_blocks(ranges);
}

LlamaWorkspace::LlamaWorkspace(const ModelConfig& config, const TrainOptions& options, std::int64_t adamw_block_count) {
  const std::int64_t N = options.micro_batch * options.seq_len;
  const std::int64_t rope_elements = options.seq_len * (config.rope.rotary_dim / 2);
  regions.want(&tokens, N);
  regions.want_bytes(&sorted_tokens, embedding_sort_bytes(N));
  regions.want(&labels, N);
  regions.want(&rope_cos, rope_elements);
  regions.want(&rope_sin, rope_elements);
  regions.want(&loss_total, 1);
  regions.want(&evaluation_total, 1);
  regions.want(&gradient_norm, 1);
  regions.want(&adamw_blocks, adamw_block_count);
  const int norm_sums = config.norm == NormKind::layernorm ? 2 : 1;  // column sums: weight, and bias
  regions.want_bytes(&scratch,
                     std::max({residual_norm_backward_workspace(config.hidden_size, norm_sums),
                               attention_backward_workspace(attention_shape(config, options)),
                               embedding_backward_workspace(N, config.hidden_size), gradient_norm_workspace()}));
}

template <typename S>
std::vector<MemoryLine> llama_memory(const ModelConfig& config, const TrainOptions& options) {
  const TensorTable table(config, kStorage<S>);
  const LlamaWorkspace workspace(config, options, static_cast<std::int64_t>(update_blocks(table).size()));
  const LlamaActivations<S> activations(config, options, classifier_rows(options.micro_batch * options.seq_len));
  const auto bytes_with = [&](std::size_t element) { return per_parameter_plan("", table, element).bytes(); };
  std::vector<MemoryLine> lines;
  lines.push_back({kSplitMaster<S> ? "parameters (bf16)" : "parameters (fp32)", table.arena_bytes()});
  if (kSplitMaster<S>) lines.push_back({"low halves of fp32 masters", bytes_with(sizeof(std::int16_t))});
  lines.push_back({"gradients (fp32)", bytes_with(sizeof(float))});
  lines.push_back({options.moments == Precision::bf16 ? "AdamW moments (bf16)" : "AdamW moments (fp32)",
                   2 * bytes_with(moment_bytes(options))});
  lines.push_back({kSplitMaster<S> ? "activations (bf16)" : "activations (fp32)", activations.plan().bytes()});
  lines.push_back({"workspace", workspace.regions.plan().bytes() + Matmul::kWorkspaceBytes});
  return lines;
}
template std::vector<MemoryLine> llama_memory<float>(const ModelConfig&, const TrainOptions&);
template std::vector<MemoryLine> llama_memory<bf16>(const ModelConfig&, const TrainOptions&);

void check_sizes(const ModelConfig& config) {
  if (config.hidden_size % 8 != 0 || config.hidden_size > kMaxNormWidth) {
    fail(Exit::usage, "hidden_size: got %lld, the GPU kernels need a multiple of 8 up to %lld. Use --device cpu",
         static_cast<long long>(config.hidden_size), static_cast<long long>(kMaxNormWidth));
  }
  if (!attention_supports(config.head_dim)) {
    fail(Exit::usage, "head_dim: got %lld, the GPU kernels have 32, 64, 80, 96, 128 and 256. Use --device cpu",
         static_cast<long long>(config.head_dim));
  }
}

std::vector<MemoryLine> plan_llama(const ModelConfig& config, const TrainOptions& options) {
  check_sizes(config);
  return options.precision == Precision::bf16 ? llama_memory<bf16>(config, options)
                                              : llama_memory<float>(config, options);
}

}  // namespace weft::cuda
