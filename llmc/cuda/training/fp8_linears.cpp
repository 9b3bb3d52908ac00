#include "llmc/cuda/training/fp8_linears.h"

#include <algorithm>
#include <bit>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/types.cuh"
#include "llmc/cuda/op/gemm/bias_grad.h"
#include "llmc/cuda/op/gemm/matmul_swiglu_fp8.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

namespace {

// The linear layers in the order of Fp8Memory::weights; their codes have no addresses yet.
std::vector<AdamWMatrix> matrices_of(const ModelConfig& config, const TensorTable& table) {
  std::vector<AdamWMatrix> list;
  std::int64_t tiles = 0;
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const BlockNames names = names_of(config).block(l);
    for (const BlockLinear linear : kBlockLinears) {
      const TensorSpec& spec = table.at(weight_of(names.linear(linear).front()));
      const LinearSize size = linear_size(config, linear);
      list.push_back({spec.offset, size.OC, size.C, tiles, spec.decay ? 1 : 0, {}});
      tiles += adamw_tiles(size.OC, size.C);
    }
  }
  return list;
}

// The blocks of which no element belongs to a matrix. Neighbouring matrices share blocks with each other, never with
// other tensors, because those do not decay or lie in other sections.
std::vector<AdamWBlock> blocks_outside(const std::vector<AdamWMatrix>& matrices, std::span<const AdamWBlock> blocks) {
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  for (const AdamWMatrix& matrix : matrices) {
    ranges.emplace_back(matrix.begin, matrix.begin + matrix.rows * matrix.columns);
  }
  std::sort(ranges.begin(), ranges.end());
  const auto inside = [&](std::int64_t element) {
    const auto behind =
        std::partition_point(ranges.begin(), ranges.end(), [&](const auto& range) { return range.first <= element; });
    return behind != ranges.begin() && element < std::prev(behind)->second;
  };
  std::vector<AdamWBlock> list;
  for (const AdamWBlock& block : blocks) {
    const bool begins_inside = inside(block.begin);
    if (begins_inside != inside(block.begin + block.count - 1)) {
      fail(Exit::internal, "fp8: a block of AdamW has a part of a linear layer");
    }
    if (!begins_inside) list.push_back(block);
  }
  return list;
}

}  // namespace

Fp8Memory::Fp8Memory(const ModelConfig& config, const TrainOptions& options, const TensorTable& table,
                     const Sharding& sharding) {
  const bool frozen = options.lora.has_value();
  if (!sharding.sharded && !frozen) {
    matrix_list = matrices_of(config, table);
    other_list = blocks_outside(matrix_list, sharding.blocks);
  }
  const std::int64_t N = options.micro_batch * options.seq_len, slots = Fp8Slots{config.num_layers}.count();
  const std::int64_t places = Fp8Buffers(config.num_layers, sharding.parameters_sharded).count();
  std::int64_t widest_input = 0, widest_gradient = 0, largest_frozen = 0;
  weights.resize(frozen ? 0 : static_cast<std::size_t>(4 * places));
  for (const BlockLinear linear : kBlockLinears) {
    const LinearSize size = linear_size(config, linear);
    widest_input = std::max(widest_input, size.C);
    if (linear != BlockLinear::up) widest_gradient = std::max(widest_gradient, size.OC);
    if (frozen) largest_frozen = std::max(largest_frozen, size.C * size.OC);
    for (std::int64_t place = 0; place < (frozen ? 0 : places); ++place) {
      Weight& weight = weights[static_cast<std::size_t>(4 * place) + static_cast<std::size_t>(linear)];
      layout.reserve(&weight.codes, size.C * size.OC);
      layout.reserve(&weight.transposed, size.C * size.OC);
    }
  }
  layout.reserve(&matrices, static_cast<std::int64_t>(matrix_list.size()));
  layout.reserve(&others, static_cast<std::int64_t>(other_list.size()));
  layout.reserve(&scales, slots);
  layout.reserve(&inverses, kScaleStride * slots);
  layout.reserve(&counters, slots + 1);
  layout.reserve(&frozen_transposed, largest_frozen);
  norms.resize(frozen ? 0 : static_cast<std::size_t>(2 * config.num_layers));  // sized once: `layout` keeps addresses
  for (std::size_t i = 0; i < norms.size(); ++i) {
    if (i >= 2 && options.recompute != Recompute::none) {
      layout.share(&norms[i], &norms[i % 2]);
    } else {
      layout.reserve(&norms[i], N * config.hidden_size);
    }
  }
  layout.reserve(&input, N * widest_input);
  layout.reserve(&gradient, N * widest_gradient);
  layout.reserve(&d_gate_up, N * 2 * config.ffn_size);
  if (frozen) return;
  layout.reserve(&gradient_transposed, N * widest_gradient);
  layout.reserve(&d_gate_up_transposed, N * 2 * config.ffn_size);
}

Fp8Linears::Fp8Linears(const ModelConfig& config, const TrainOptions& options, const TensorTable& table,
                       const Sharding& sharding, bool swiglu_in_epilogue, std::span<const BlockWeights<bf16>> frozen,
                       Matmul& matmul, OperatorClock& clock, cudaStream_t stream)
    : config_(config),
      lora_(options.lora),
      rows_(options.micro_batch * options.seq_len),
      ranks_(sharding.ranks),
      swiglu_in_epilogue_(swiglu_in_epilogue),
      frozen_(frozen),
      frozen_exponents_(std::size(kBlockLinears) * frozen.size()),
      matmul_(matmul),
      clock_(clock),
      stream_(stream),
      scales_(config.num_layers),
      memory_(config, options, table, sharding),
      buffers_(config.num_layers, sharding.parameters_sharded),
      arena_(memory_.layout.plan()),
      results_(static_cast<std::uint64_t>(ranks_ * slots()) * sizeof(Fp8Counters)),
      upload_((1 + Fp8Memory::kScaleStride) * static_cast<std::uint64_t>(slots()) * sizeof(float)) {
  memory_.layout.bind(arena_);
  arena_.clear(stream_);
  std::fill_n(results_.at<Fp8Counters>(0), ranks_ * slots(), Fp8Counters{});
  if (frozen_.empty() != !options.lora)
    fail(Exit::internal, "fp8: frozen weights without an adapter, or none with one");
  if (options.lora) {
    all_weights_rounded();
  } else if (!sharding.sharded) {
    prepare_update();
  }
}

void Fp8Linears::prepare_update() {
  for (std::int64_t l = 0; l < config_.num_layers; ++l) {
    for (const BlockLinear linear : kBlockLinears) {
      const Fp8Memory::Weight& codes = weight(linear, l);
      memory_.matrix_list[static_cast<std::size_t>(4 * l) + static_cast<std::size_t>(linear)].codes =
          target(scales_.slots().at(Fp8Kind::weight, l, linear), codes.codes, codes.transposed, Pass::training);
    }
  }
  const auto upload = [&](auto* to, const auto& list) {
    check(cudaMemcpyAsync(to, list.data(), list.size() * sizeof(list[0]), cudaMemcpyHostToDevice, stream_), "fp8");
  };
  upload(memory_.matrices, memory_.matrix_list);
  upload(memory_.others, memory_.other_list);

  const AdamWMatrix& last = memory_.matrix_list.back();
  update_ = {memory_.matrices,
             static_cast<std::int64_t>(memory_.matrix_list.size()),
             last.first_tile + adamw_tiles(last.rows, last.columns),
             0,
             memory_.others,
             static_cast<std::int64_t>(memory_.other_list.size()),
             0};
  for (const AdamWMatrix& matrix : memory_.matrix_list) update_.elements += matrix.rows * matrix.columns;
  for (const AdamWBlock& block : memory_.other_list) update_.other_elements += block.count;
}

// ---- rounding -------------------------------------------------------------------------------------------------------

Fp8Target Fp8Linears::target(std::int64_t slot, std::uint8_t* codes, std::uint8_t* transposed, Pass pass) const {
  return {codes, transposed, memory_.scales + slot, pass == Pass::training ? memory_.counters + slot : nullptr};
}

// In the first step, and in an evaluation before it, the history has no scale yet: finds a tensor's scale from its own
// largest magnitude, for which `look` reads it once.
void Fp8Linears::find_scale(std::int64_t slot, Pass pass, const std::function<void(const Fp8Target&)>& look) {
  if (scales_.known() || pass == Pass::again) return;
  Fp8Counters* const counters = memory_.counters + scales_.slots().count();
  check(cudaMemsetAsync(counters, 0, sizeof *counters, stream_), "fp8 scale");
  look({nullptr, nullptr, nullptr, counters});
  fp8_current_scale(memory_.scales + slot, memory_.inverse(slot), counters, fp8_format(scales_.slots().kind(slot)),
                    stream_);
}

void Fp8Linears::clear_weight_counters(std::int64_t first_layer, std::int64_t layers) {
  Fp8Counters* const first = memory_.counters + scales_.slots().at(Fp8Kind::weight, first_layer, kBlockLinears[0]);
  const std::size_t bytes = std::size(kBlockLinears) * static_cast<std::size_t>(layers) * sizeof(Fp8Counters);
  check(cudaMemsetAsync(first, 0, bytes, stream_), "fp8 weights");
}

void Fp8Linears::round_weights(std::int64_t layer, const BlockWeights<bf16>& weights, bool again) {
  const Pass pass = again ? Pass::again : Pass::training;
  if (!again) clear_weight_counters(layer, 1);
  for (const BlockLinear linear : kBlockLinears) {
    const LinearSize size = linear_size(config_, linear);
    const std::int64_t slot = scales_.slots().at(Fp8Kind::weight, layer, linear);
    const auto round = [&](const Fp8Target& to) {
      quantize_fp8(fp8_format(Fp8Kind::weight), to, weights.linear(linear).weight.plain, size.OC, size.C, stream_);
    };
    find_scale(slot, pass, round);
    const Fp8Memory::Weight& codes = weight(linear, layer);
    clock_.run("quantise weights", 0, 4.0 * static_cast<double>(size.C * size.OC),
               [&] { round(target(slot, codes.codes, codes.transposed, pass)); });
  }
  buffers_.put(layer);
}

void Fp8Linears::frozen_rounded(BlockLinear linear, std::int64_t layer, int exponent, const Fp8Counters& counters) {
  const std::int64_t slot = scales_.slots().at(Fp8Kind::weight, layer, linear);
  frozen_exponents_[static_cast<std::size_t>(slot - scales_.slots().first(Fp8Kind::weight))] = exponent;
  const float scale = std::bit_cast<float>(fp8_scale_bits(exponent)),
              inverse = std::bit_cast<float>(fp8_scale_bits(-exponent));
  const auto upload = [&](void* to, const void* from, std::size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "fp8 weights");
  };
  upload(memory_.scales + slot, &scale, sizeof scale);
  upload(memory_.inverse(slot), &inverse, sizeof inverse);
  upload(memory_.counters + slot, &counters, sizeof counters);
  check(cudaStreamSynchronize(stream_), "fp8 weights");
  weights_replaced();
}

void Fp8Linears::all_weights_rounded() {
  for (std::int64_t l = 0; l < config_.num_layers; ++l) buffers_.put(l);
}

// ---- forward --------------------------------------------------------------------------------------------------------

void Fp8Linears::write_input(BlockLinear linear, std::int64_t layer, double bytes, Pass pass,
                             const std::function<void(const Fp8Target&)>& norm) {
  const std::int64_t slot = scales_.slots().at(Fp8Kind::input, layer, linear);
  find_scale(slot, pass, norm);
  clock_.run("norm, quantise", 0, bytes, [&] { norm(target(slot, input_codes(linear, layer), nullptr, pass)); });
}

void Fp8Linears::forward(BlockLinear linear, std::int64_t layer, bf16* out, const bf16* x, const bf16* bias,
                         const bf16* addend, const char* name, Pass pass) {
  const LinearSize size = linear_size(config_, linear);
  const std::int64_t slot = scales_.slots().at(Fp8Kind::input, layer, linear);
  const double n = static_cast<double>(rows_), C = static_cast<double>(size.C), OC = static_cast<double>(size.OC);
  if (x != nullptr) {
    const auto round = [&](const Fp8Target& to) {
      quantize_fp8(fp8_format(Fp8Kind::input), to, x, rows_, size.C, stream_);
    };
    find_scale(slot, pass, round);
    clock_.run("quantise input", 0, 3 * n * C, [&] { round(target(slot, memory_.input, nullptr, pass)); });
  }
  const std::int64_t weight_slot = scales_.slots().at(Fp8Kind::weight, layer, linear);
  clock_.run(name, 2 * n * C * OC, n * C + C * OC + (addend != nullptr ? 4 : 2) * n * OC, [&] {
    matmul_.forward_fp8(out, matrix(slot, input_codes(linear, layer)), matrix(weight_slot, weight_codes(linear, layer)),
                        rows_, size.C, size.OC, addend, bias);
  });
}

// Until the scales are known the epilogue cannot round: it stores gate_up, and swiglu() finds the scale and rounds.
void Fp8Linears::gate_up_and_swiglu(std::int64_t layer, bf16* gate_up, const bf16* bias, const char* name, Pass pass) {
  const bool rounds = swiglu_in_epilogue_ && scales_.known() && pass != Pass::again;
  if (swiglu_in_epilogue_) {
    const Fp8Slots& slots = scales_.slots();
    const std::int64_t C = config_.hidden_size, F = config_.ffn_size;
    const double n = static_cast<double>(rows_), c = static_cast<double>(C), f = static_cast<double>(F);
    const auto operand = [&](Fp8Kind kind, const std::uint8_t* codes) {
      return matrix(slots.at(kind, layer, BlockLinear::up), codes);
    };
    const Fp8Target out = target(slots.at(Fp8Kind::input, layer, BlockLinear::down), memory_.input, nullptr, pass);
    clock_.run(rounds ? "gate, up, swiglu" : name, 4 * n * c * f, n * c + 2 * f * c + (rounds ? 5 : 4) * n * f, [&] {
      gate_up_swiglu_fp8(gate_up, rounds ? out : Fp8Target{},
                         operand(Fp8Kind::input, input_codes(BlockLinear::up, layer)),
                         operand(Fp8Kind::weight, weight(BlockLinear::up, layer).codes), rows_, C, F, stream_);
    });
  } else {
    forward(BlockLinear::up, layer, gate_up, nullptr, bias, nullptr, name, pass);
  }
  if (!rounds && pass != Pass::again) swiglu(layer, nullptr, gate_up, pass);
}

void Fp8Linears::swiglu(std::int64_t layer, bf16* swiglu_out, const bf16* gate_up, Pass pass) {
  const std::int64_t F = config_.ffn_size, slot = scales_.slots().at(Fp8Kind::input, layer, BlockLinear::down);
  const auto round = [&](const Fp8Target& to) { swiglu_forward_fp8(to, gate_up, rows_, F, stream_, swiglu_out); };
  find_scale(slot, pass, round);
  clock_.run("swiglu, quantise", 0, (swiglu_out != nullptr ? 7.0 : 5.0) * static_cast<double>(rows_ * F),
             [&] { round(target(slot, memory_.input, nullptr, pass)); });
}

// ---- backward -------------------------------------------------------------------------------------------------------

void Fp8Linears::write_gradient(BlockLinear linear, std::int64_t layer,
                                const std::function<void(const Fp8Target&)>& attention) {
  const std::int64_t OC = linear_size(config_, linear).OC;
  attention(target(scales_.slots().at(Fp8Kind::gradient, layer, linear), memory_.gradient, nullptr, Pass::training));
  clock_.run("transpose gradient", 0, 2.0 * static_cast<double>(rows_ * OC),
             [&] { transpose_fp8(memory_.gradient_transposed, memory_.gradient, rows_, OC, stream_); });
}

void Fp8Linears::take_gradient(BlockLinear linear, std::int64_t layer, const bf16* dout) {
  if (linear == BlockLinear::up) fail(Exit::internal, "fp8: the gradient of gate and up is made with SwiGLU's");
  const std::int64_t OC = linear_size(config_, linear).OC;
  const std::int64_t slot = scales_.slots().at(Fp8Kind::gradient, layer, linear);
  const auto round = [&](const Fp8Target& to) {
    quantize_fp8(fp8_format(Fp8Kind::gradient), to, dout, rows_, OC, stream_);
  };
  find_scale(slot, Pass::training, round);
  clock_.run("quantise gradient", 0, (frozen() ? 3.0 : 4.0) * static_cast<double>(rows_ * OC),
             [&] { round(target(slot, memory_.gradient, memory_.gradient_transposed, Pass::training)); });
}

void Fp8Linears::input_grad(BlockLinear linear, std::int64_t layer, bf16* dx, const char* name) {
  const LinearSize size = linear_size(config_, linear);
  const double n = static_cast<double>(rows_), C = static_cast<double>(size.C), OC = static_cast<double>(size.OC);
  const std::int64_t weight_slot = scales_.slots().at(Fp8Kind::weight, layer, linear);
  const std::uint8_t* const transposed = frozen() ? memory_.frozen_transposed : weight(linear, layer).transposed;
  if (frozen()) {
    clock_.run("transpose weight", 0, 2 * C * OC, [&] {
      transpose_fp8(memory_.frozen_transposed, weight_codes(linear, layer), size.OC, size.C, stream_);
    });
  }
  clock_.run(name, 2 * n * C * OC, n * OC + C * OC + 2 * n * C, [&] {
    matmul_.input_grad_fp8(dx, gradient(linear, layer), matrix(weight_slot, transposed), rows_, size.C, size.OC);
  });
}

void Fp8Linears::bias_grad(BlockLinear linear, std::int64_t layer, float* dbias, void* workspace) {
  const std::int64_t OC = linear_size(config_, linear).OC;
  clock_.run("bias grad", 0, static_cast<double>(rows_ * OC),
             [&] { bias_grad_fp8(dbias, gradient(linear, layer), rows_, OC, workspace, stream_); });
}

void Fp8Linears::weight_grad(BlockLinear linear, std::int64_t layer, float* dweight, const bf16* x,
                             Accumulate accumulate, const char* name) {
  const LinearSize size = linear_size(config_, linear);
  const Fp8Slots& slots = scales_.slots();
  const std::int64_t slot = slots.at(Fp8Kind::input, layer, linear);
  const double n = static_cast<double>(rows_), C = static_cast<double>(size.C), OC = static_cast<double>(size.OC);
  if (x != nullptr) {
    clock_.run("quantise input", 0, 3 * n * C, [&] {
      quantize_fp8(fp8_format(Fp8Kind::input), target(slot, nullptr, memory_.input, Pass::again), x, rows_, size.C,
                   stream_);
    });
  } else if (linear != BlockLinear::down) {
    clock_.run("transpose input", 0, 2 * n * C,
               [&] { transpose_fp8(memory_.input, input_codes(linear, layer), rows_, size.C, stream_); });
  }
  const bool of_gate_up = linear == BlockLinear::up;
  const std::uint8_t* const codes = of_gate_up ? memory_.d_gate_up_transposed : memory_.gradient_transposed;
  const double passes = accumulate == Accumulate::yes ? 2 : 1;
  clock_.run(name, 2 * n * C * OC, n * (C + OC) + passes * C * OC * sizeof(float), [&] {
    matmul_.weight_grad_fp8(dweight, matrix(slots.at(Fp8Kind::gradient, layer, linear), codes),
                            matrix(slot, memory_.input), rows_, size.C, size.OC, accumulate);
  });
}

// Until the scales are known a GEMM of cuBLASLt stores d_swiglu_out, and swiglu_backward() finds the scale and rounds.
void Fp8Linears::down_input_grad_and_swiglu(std::int64_t layer, bf16* d_swiglu_out, const bf16* gate_up,
                                            const char* name) {
  if (!swiglu_in_epilogue_ || !scales_.known()) {
    input_grad(BlockLinear::down, layer, d_swiglu_out, name);
    return swiglu_backward(layer, d_swiglu_out, gate_up);
  }
  const Fp8Slots& slots = scales_.slots();
  const std::int64_t C = config_.hidden_size, F = config_.ffn_size;
  const double n = static_cast<double>(rows_), c = static_cast<double>(C), f = static_cast<double>(F);
  const Fp8Target dgate_up = target(slots.at(Fp8Kind::gradient, layer, BlockLinear::up), memory_.d_gate_up,
                                    memory_.d_gate_up_transposed, Pass::training);
  const Fp8Target out = target(slots.at(Fp8Kind::input, layer, BlockLinear::down), nullptr, memory_.input, Pass::again);
  clock_.run("down dgrad, swiglu", 2 * n * c * f, n * c + f * c + 9 * n * f, [&] {
    down_input_grad_swiglu_fp8(
        dgate_up, out, matrix(slots.at(Fp8Kind::gradient, layer, BlockLinear::down), memory_.gradient),
        matrix(slots.at(Fp8Kind::weight, layer, BlockLinear::down), weight(BlockLinear::down, layer).transposed),
        gate_up, rows_, C, F, stream_);
  });
}

void Fp8Linears::swiglu_backward(std::int64_t layer, const bf16* d_swiglu_out, const bf16* gate_up) {
  const std::int64_t F = config_.ffn_size;
  const Fp8Slots& slots = scales_.slots();
  const std::int64_t slot = slots.at(Fp8Kind::gradient, layer, BlockLinear::up);
  find_scale(slot, Pass::training,
             [&](const Fp8Target& to) { swiglu_backward_fp8(to, {}, d_swiglu_out, gate_up, rows_, F, stream_); });
  const Fp8Target out = target(slots.at(Fp8Kind::input, layer, BlockLinear::down), nullptr, memory_.input, Pass::again);
  clock_.run("swiglu backward, quantise", 0, 11.0 * static_cast<double>(rows_ * F), [&] {
    swiglu_backward_fp8(target(slot, memory_.d_gate_up, memory_.d_gate_up_transposed, Pass::training), out,
                        d_swiglu_out, gate_up, rows_, F, stream_);
  });
}

void Fp8Linears::swiglu_backward(std::int64_t layer, bf16* gate_up, const bf16* d_swiglu_out, bf16* swiglu_out) {
  const std::int64_t F = config_.ffn_size;
  const std::int64_t slot = scales_.slots().at(Fp8Kind::gradient, layer, BlockLinear::up);
  find_scale(slot, Pass::training,
             [&](const Fp8Target& to) { swiglu_backward_fp8(to, {}, d_swiglu_out, gate_up, rows_, F, stream_); });
  clock_.run("swiglu backward, quantise", 0, (swiglu_out != nullptr ? 14.0 : 12.0) * static_cast<double>(rows_ * F),
             [&] {
               swiglu_backward_fp8(target(slot, memory_.d_gate_up, nullptr, Pass::training), gate_up, swiglu_out,
                                   d_swiglu_out, gate_up, rows_, F, stream_);
             });
}

// ---- step -----------------------------------------------------------------------------------------------------------

void Fp8Linears::begin_step() {
  const Fp8Slots& slots = scales_.slots();
  for (const Fp8Kind kind : {Fp8Kind::input, Fp8Kind::gradient}) {
    check(cudaMemsetAsync(memory_.counters + slots.first(kind), 0,
                          static_cast<std::size_t>(slots.of_a_kind()) * sizeof(Fp8Counters), stream_),
          "zero_gradients");
  }
  micro_batches_ = 0;
}

void Fp8Linears::download_counters(const Fp8Counters* counters) {
  check(cudaMemcpyAsync(results_.at<Fp8Counters>(0), counters, results_.bytes(), cudaMemcpyDeviceToHost, stream_),
        "statistics");
}

Fp8Statistics Fp8Linears::statistics() const {
  return fp8_statistics(config_, lora_, step_counters(), rows_, ranks_ * micro_batches_);
}

void Fp8Linears::end_step() {
  scales_.push(step_counters());
  upload_scales();
  forget_weights();
}

const Fp8Linears::Update& Fp8Linears::begin_update() {
  clear_weight_counters(0, config_.num_layers);
  all_weights_rounded();
  return update_;
}

int Fp8Linears::exponent(std::int64_t slot) const {
  if (!frozen() || scales_.slots().kind(slot) != Fp8Kind::weight) return scales_.exponent(slot);
  return frozen_exponents_[static_cast<std::size_t>(slot - scales_.slots().first(Fp8Kind::weight))];
}

// The page-locked buffer may be overwritten: statistics() has synchronised the stream since the last upload, and so has
// set_state().
void Fp8Linears::upload_scales() {
  if (!scales_.known()) return;
  const std::int64_t slots = scales_.slots().count();
  auto* const scales = upload_.at<std::uint32_t>(0);
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    scales[slot] = fp8_scale_bits(exponent(slot));
    scales[slots + Fp8Memory::kScaleStride * slot] = fp8_scale_bits(-exponent(slot));
  }
  const std::size_t bytes = static_cast<std::size_t>(slots) * sizeof(float);
  check(cudaMemcpyAsync(memory_.scales, scales, bytes, cudaMemcpyHostToDevice, stream_), "fp8 scales");
  check(cudaMemcpyAsync(memory_.inverses, scales + slots, Fp8Memory::kScaleStride * bytes, cudaMemcpyHostToDevice,
                        stream_),
        "fp8 scales");
}

void Fp8Linears::weights_replaced() {
  scales_.forget();
  forget_weights();
}

void Fp8Linears::set_state(std::span<const float> state) {
  check(cudaStreamSynchronize(stream_), "fp8 scales");
  scales_.set_state(state);
  upload_scales();
  forget_weights();
}

}  // namespace weft::cuda
