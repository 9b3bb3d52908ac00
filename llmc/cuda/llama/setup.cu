// Construction of the training model: GEMM plans first, then the arenas, then what they begin with.
#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/llama/llama.h"
#include "llmc/cuda/llama/llama_model.h"
#include "llmc/cuda/op/matmul_swiglu.h"

namespace weft::cuda {

// GEMM plans are timed before the arenas exist, because timing needs scratch memory of the size of the operands.
template <typename S>
Llama<S>::Llama(const ModelConfig& config, const TrainOptions& options)
    : config_(config),
      options_(options),
      table_(config, kStorage<S>),
      swiglu_in_epilogue_(std::is_same_v<S, bf16> && matmul_swiglu_computes(config.hidden_size, config.ffn_size)),
      clock_(stream_),
      matmul_(stream_, options.matmul_plans),
      adamw_blocks_(update_blocks(table_)),
      acts_(config, options, classifier_rows(rows())),
      work_(config, options, static_cast<std::int64_t>(adamw_blocks_.size())),
      parameter_arena_((prepare_matmuls(), parameter_plan(table_))),
      low_arena_(per_parameter_plan("low halves of fp32 masters", table_, kSplitMaster<S> ? sizeof(std::int16_t) : 0)),
      gradient_arena_(per_parameter_plan("gradients", table_, sizeof(float))),
      moment1_arena_(per_parameter_plan("first moments", table_, moment_bytes(options))),
      moment2_arena_(per_parameter_plan("second moments", table_, moment_bytes(options))),
      activation_arena_(acts_.plan()),
      workspace_arena_(work_.regions.plan()),
      weights_(config, table_, parameter_arena_.at<S>(0), Offsets::bytes),
      d_weights_(config, table_, gradient_arena_.at<float>(0), Offsets::elements),
      upload_(rows()),
      results_(sizeof(LossTotal) + sizeof(GradientNorm)) {
  acts_.bind(activation_arena_);
  work_.regions.bind(workspace_arena_);
  for (DeviceArena* arena : {&parameter_arena_, &low_arena_, &gradient_arena_, &moment1_arena_, &moment2_arena_,
                             &activation_arena_, &workspace_arena_}) {
    arena->clear(stream_);
  }
  const RopeTable table = rope_table(config.rope, options.seq_len);
  rope_ = upload_rope_table(table, work_.rope_cos, work_.rope_sin, stream_);
  check(cudaMemcpyAsync(work_.adamw_blocks, adamw_blocks_.data(), adamw_blocks_.size() * sizeof(AdamWBlock),
                        cudaMemcpyHostToDevice, stream_),
        "optimizer blocks");
  stream_.synchronize("start");
}

// Every GEMM of the step: four linear layers and the head, each forward and for both gradients. The first micro-batch of a
// step stores weight gradients, the others accumulate.
template <typename S>
void Llama<S>::prepare_matmuls() {
  const std::int64_t N = rows(), chunk = classifier_rows(N);
  const cudaDataType_t type = std::is_same_v<S, float> ? CUDA_R_32F : CUDA_R_16BF;
  std::vector<MatmulShape> shapes;
  struct WeightGrads {
    bool stored, accumulated;
  };
  const auto prepare = [&](const LinearLayer& layer, std::int64_t n, bool addend, WeightGrads weight_grads) {
    const std::int64_t C = layer.C, OC = layer.OC;
    if (!swiglu_in_epilogue_ || &layer != &gate_up_) {
      shapes.push_back({Gemm::forward, n, C, OC, type, Accumulate::no, false, addend});
    }
    if (!swiglu_in_epilogue_ || &layer != &down_) {
      shapes.push_back({Gemm::input_grad, n, C, OC, type, Accumulate::no, false});
    }
    if (weight_grads.stored) shapes.push_back({Gemm::weight_grad, n, C, OC, type, Accumulate::no, false});
    if (weight_grads.accumulated) shapes.push_back({Gemm::weight_grad, n, C, OC, type, Accumulate::yes, false});
  };
  const bool addend = residual_in_epilogue(), accumulates = options_.accumulates;
  prepare(qkv_, N, false, {true, accumulates});
  prepare(output_, N, addend, {true, accumulates});
  prepare(gate_up_, N, false, {true, accumulates});
  prepare(down_, N, addend, {true, accumulates});
  prepare(head_, chunk, false, {true, accumulates || N > chunk});
  if (N % chunk != 0) prepare(head_, N % chunk, false, {false, true});
  matmul_.prepare(shapes);
}

std::unique_ptr<TrainModel> make_llama(const ModelConfig& config, const TrainOptions& options) {
  check_sizes(config);
  if (options.moments == Precision::bf16 && options.precision != Precision::bf16) {
    fail(Exit::internal, "moments in bf16 beside parameters in fp32");
  }
  if (options.precision == Precision::bf16) return std::make_unique<Llama<bf16>>(config, options);
  return std::make_unique<Llama<float>>(config, options);
}

}  // namespace weft::cuda
