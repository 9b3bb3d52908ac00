// Construction of the training model: GEMM plans first, then the arenas, then their initial contents.
#include <vector>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/op/gemm/matmul_swiglu.h"
#include "llmc/cuda/op/gemm/matmul_swiglu_fp8.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/training/training.h"
#include "llmc/cuda/training/training_model.h"

namespace weft::cuda {

// GEMM plans are timed before the arenas exist, because timing needs scratch memory of the size of the operands.
template <typename S>
TrainingModel<S>::TrainingModel(const ModelConfig& config, const TrainOptions& options, const Peers& peers)
    : config_(config),
      options_(options),
      peers_(peers),
      table_(trained_table(config, options, kStorage<S>)),
      frozen_table_(weft::cuda::frozen_table(config, options, kStorage<S>)),
      merged_table_(config, kStorage<S>),
      sharding_(config, table_, *options.optimizer, peers.share),
      swiglu_in_epilogue_(config.activation == Activation::swiglu && !config.mlp_bias &&
                          low_rank_shape(config, options, BlockLinear::up).modules == 0 &&
                          low_rank_shape(config, options, BlockLinear::down).modules == 0 &&
                          (options.precision == Precision::bf16
                               ? matmul_swiglu_computes(config.hidden_size, config.ffn_size)
                               : options.precision == Precision::fp8 && !options.lora && matmul_swiglu_fp8_computes())),
      clock_(stream_),
      matmul_(stream_, peers.share.rank == 0 ? options.matmul_plans : std::string()),
      acts_(config, options, classifier_rows(rows())),
      work_(config, options, peers.share, sharding_, muon_shapes(table_, *options.optimizer)),
      adapter_(config, options),
      parameter_arena_((prepare_matmuls(), read_parameters_plan(table_, sharding_, sizeof(S)))),
      own_parameter_arena_(state_plan("parameters", sharding_, sharding_.parameters_sharded ? sizeof(S) : 0)),
      low_arena_(state_plan("low halves of fp32 masters", sharding_, kSplitMaster<S> ? sizeof(std::int16_t) : 0)),
      gradients_(table_, options_, sharding_, peers_, clock_, stream_),
      state1_arena_(state_plan("first states of the optimizer", sharding_, moment_bytes(options))),
      state2_arena_(second_state_plan(sharding_, moment_bytes(options))),
      activation_arena_(acts_.plan()),
      workspace_arena_(work_.layout.plan()),
      frozen_arena_(frozen_plan(frozen_table_, options)),
      adapter_arena_(adapter_.layout.plan()),
      weights_(bind_weights(config, options.lora ? frozen_table_ : table_,
                            (options.lora ? frozen_arena_ : parameter_arena_).template at<S>(0), Offsets::bytes)),
      d_weights_(options.lora ? ModelWeights<float>{}
                              : bind_weights(config, table_, gradients_.computed().at<float>(0), Offsets::elements)),
      upload_(rows()),
      results_(sizeof(GradientNorm) +
               (1 + static_cast<std::uint64_t>(peers.share.ranks * peers.share.rounds)) * sizeof(LossTotal)),
      buffers_(sharding_.places) {
  if constexpr (std::is_same_v<S, bf16>) {
    if (options.precision == Precision::fp8) {
      const std::span<const BlockWeights<bf16>> frozen(weights_.blocks.data(),
                                                       options.lora ? weights_.blocks.size() : 0);
      fp8_.emplace(config, options, table_, sharding_, swiglu_in_epilogue_, frozen, matmul_, clock_, stream_);
    }
  }
  if (options.lora) {
    bind_adapter(config, *options.lora, table_, parameter_arena_.at<S>(0), Offsets::bytes, weights_);
    d_weights_.blocks.resize(static_cast<std::size_t>(config.num_layers));
    bind_adapter(config, *options.lora, table_, gradients_.computed().at<float>(0), Offsets::elements, d_weights_);
  }
  acts_.bind(activation_arena_);
  work_.layout.bind(workspace_arena_);
  adapter_.layout.bind(adapter_arena_);
  place_sections();
  for (DeviceArena* arena : {&parameter_arena_, &own_parameter_arena_, &low_arena_, &state1_arena_, &state2_arena_,
                             &activation_arena_, &workspace_arena_, &frozen_arena_, &adapter_arena_}) {
    arena->clear(stream_);
  }
  const RopeTable table = rope_table(config.rope, options.seq_len);
  rope_ = upload_rope_table(table, work_.rope_cos, work_.rope_sin, stream_);
  RopeTable local;
  if (config.local_rope_theta > 0) {
    local = rope_table(config.local_rope(), options.seq_len);
    local_rope_ = upload_rope_table(local, work_.local_rope_cos, work_.local_rope_sin, stream_);
  }
  rope_.document_starts = local_rope_.document_starts = work_.document_starts;
  const auto upload = [&](auto* to, const auto& list) {
    check(cudaMemcpyAsync(to, list.data(), list.size() * sizeof(list[0]), cudaMemcpyHostToDevice, stream_),
          "optimizer blocks");
  };
  upload(work_.adamw_blocks, sharding_.blocks);
  if (!sharding_.squares_order.empty()) upload(work_.squares_order, sharding_.squares_order);
  if (has_peers()) {
    const DeviceArena* const shared[] = {&parameter_arena_, &gradients_.computed(), &workspace_arena_};
    for (const DeviceArena* arena : shared) {
      peers_.device_ranks->share(arena->at<std::byte>(0), arena->bytes());
    }
    for (std::size_t b = 0; b < sharding_.buckets.size(); ++b) {
      parameters_ready_.push_back(std::make_unique<Event>(cudaEventDisableTiming));
    }
  }
  stream_.synchronize("start");
}

// Moves the pointers to gradients, and to sharded parameters, to where the sharding places them.
template <typename S>
void TrainingModel<S>::place_sections() {
  std::vector<std::int64_t> of_gradients, of_parameters;
  for (std::size_t s = 0; s < sharding_.sections.size(); ++s) {
    of_gradients.push_back(sharding_.gradient_shift(s));
    of_parameters.push_back(sharding_.parameters_sharded ? parameter_shift(s) : 0);
  }
  d_weights_.move_sections(of_gradients);
  weights_.move_sections(of_parameters);
}

// Every GEMM of the step: four linear layers and the head, each forward and for both gradients, and those of Muon. The first
// micro-batch of a step stores weight gradients, the others accumulate. Where SwiGLU is in the epilogue of a kernel of the project,
// the two GEMMs beside it need no plan: in fp8 the first step alone takes down's dgrad from cuBLASLt, by its first suggestion.
template <typename S>
void TrainingModel<S>::prepare_matmuls() {
  const std::int64_t N = rows(), chunk = classifier_rows(N);
  constexpr bool kIsFloat = std::is_same_v<S, float>;
  std::vector<MatmulShape> shapes;
  struct WeightGrads {
    bool stored, accumulated;
  };
  const auto prepare = [&](const LinearLayer& layer, std::int64_t n, bool addend, WeightGrads weight_grads) {
    const std::int64_t C = layer.C, OC = layer.OC;
    const cudaDataType_t type = options_.precision == Precision::fp8 && layer.block ? CUDA_R_8F_E4M3
                                : kIsFloat                                          ? CUDA_R_32F
                                                                                    : CUDA_R_16BF;
    if (!swiglu_in_epilogue_ || &layer != &gate_up_) {
      const bool bias = layer.block && has_bias(config_, *layer.block);
      shapes.push_back({Gemm::forward, n, C, OC, type, Accumulate::no, bias, addend});
    }
    if (!swiglu_in_epilogue_ || &layer != &down_) {
      shapes.push_back({Gemm::input_grad, n, C, OC, type, Accumulate::no, false});
    }
    if (weight_grads.stored) shapes.push_back({Gemm::weight_grad, n, C, OC, type, Accumulate::no, false});
    if (weight_grads.accumulated) shapes.push_back({Gemm::weight_grad, n, C, OC, type, Accumulate::yes, false});
  };
  const bool addend = residual_in_epilogue(), trained = !options_.lora, accumulates = trained && options_.accumulates;
  prepare(qkv_, N, false, {trained, accumulates});
  prepare(output_, N, addend, {trained, accumulates});
  prepare(gate_up_, N, false, {trained, accumulates});
  prepare(down_, N, addend || config_.parallel_residual, {trained, accumulates});
  prepare(head_, chunk, false, {trained, trained && (accumulates || N > chunk)});
  if (N % chunk != 0) prepare(head_, N % chunk, false, {false, trained});
  for (const LowRankShape& shape : low_rank_shapes(config_, options_)) {
    for (const MatmulShape& gemm : low_rank_matmuls<S>(shape)) shapes.push_back(gemm);
  }
  for (const MuonShape& shape : muon_shapes(table_, optimizer())) {
    const MuonMatmuls gemms = muon_matmuls(shape, kIsFloat ? CUDA_R_32F : CUDA_R_16BF);
    shapes.insert(shapes.end(), {gemms.gram, gemms.polynomial, gemms.next});
  }
  // Rank 0 chooses: another algorithm may add in another order, and then the bits would depend on which rank computes.
  if (peers_.share.rank == 0) matmul_.prepare(shapes);
  if (!has_peers()) return;
  matmul_.adopt_plans(peers_.ranks->broadcast_text(matmul_.plans()));
  if (peers_.share.rank != 0) matmul_.prepare(shapes);
}

namespace {

// Tensor cores with fp8 came with compute capability 8.9.
void require_fp8() {
  const int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
  const int minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
  if (10 * major + minor >= 89) return;
  fail(Exit::environment,
       "--precision: got fp8, which needs a GPU of compute capability 8.9 or later. This one has %d.%d: use "
       "--precision bf16",
       major, minor);
}

std::unique_ptr<TrainModel> make(const ModelConfig& config, const TrainOptions& options, Communicator* ranks,
                                 DeviceRanks* device_ranks, const RankShare& share) {
  check_sizes(config);
  if (options.optimizer != &adamw_optimizer() && options.optimizer != &muon_optimizer()) {
    fail(Exit::internal, "%s has no update on the GPU", options.optimizer->name());
  }
  if (options.moments == Precision::bf16 && options.precision == Precision::fp32) {
    fail(Exit::internal, "moments in bf16 beside parameters in fp32");
  }
  check_adapter(config, options);
  if (options.precision == Precision::fp8) {
    check_fp8_sizes(config, options.micro_batch, options.seq_len);
    require_fp8();
  }
  const auto make_as = [&](auto storage) -> std::unique_ptr<TrainModel> {
    using Model = TrainingModel<decltype(storage)>;
    return std::make_unique<Model>(config, options, Peers{ranks, device_ranks, share});
  };
  if (options.precision == Precision::fp32) return make_as(float{});
  return make_as(bf16{});
}

}  // namespace

std::unique_ptr<TrainModel> make_training_model(const ModelConfig& config, const TrainOptions& options) {
  return make(config, options, nullptr, nullptr, {});
}

std::unique_ptr<TrainModel> make_training_model(const ModelConfig& config, const TrainOptions& options,
                                                Communicator& ranks, DeviceRanks& device_ranks, Shard shard,
                                                std::int64_t bucket_elements) {
  if (options.virtual_ranks % ranks.size() != 0) {
    fail(Exit::internal, "%d ranks for a step of %lld", ranks.size(), static_cast<long long>(options.virtual_ranks));
  }
  if (options.lora && (shard == Shard::gradients || shard == Shard::parameters)) {
    fail(Exit::usage, "--shard: got %s, and those of an adapter are few. Use optimizer",
         shard == Shard::gradients ? "gradients" : "parameters");
  }
  if ((shard == Shard::gradients || shard == Shard::parameters) && options.rank_micro_batches > 1) {
    fail(Exit::internal,
         "sharded gradients with %lld micro-batches a rank: the sum of a rank has to be complete before it is added",
         static_cast<long long>(options.rank_micro_batches));
  }
  const std::int64_t rounds = options.virtual_ranks / ranks.size();
  return make(config, of_one_rank(options), &ranks, &device_ranks,
              {ranks.rank(), ranks.size(), shard, rounds, bucket_elements});
}

}  // namespace weft::cuda
