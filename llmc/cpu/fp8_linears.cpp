#include "llmc/cpu/fp8_linears.h"

#include <algorithm>

#include "llmc/cpu/fp8.h"

namespace weft::cpu {

namespace {

// Plans the three kinds of operands; `weights` gets a pointer for each layer and linear layer.
const MemoryPlan& plan(Regions& regions, const ModelConfig& config, std::int64_t rows, std::vector<float*>& weights,
                       float*& input, float*& gradient) {
  weights.assign(static_cast<std::size_t>(4 * config.num_layers), nullptr);
  std::int64_t widest_input = 0, widest_gradient = 0;
  for (const BlockLinear linear : kBlockLinears) {
    const LinearSize size = linear_size(config, linear);
    widest_input = std::max(widest_input, size.C);
    widest_gradient = std::max(widest_gradient, size.OC);
    for (std::int64_t l = 0; l < config.num_layers; ++l) {
      regions.want(&weights[static_cast<std::size_t>(4 * l) + static_cast<std::size_t>(linear)], size.C * size.OC);
    }
  }
  regions.want(&input, rows * widest_input);
  regions.want(&gradient, rows * widest_gradient);
  return regions.plan();
}

}  // namespace

Fp8Linears::Fp8Linears(const ModelConfig& config, const TrainOptions& options)
    : config_(config),
      rows_(options.micro_batch * options.seq_len),
      scales_(config.num_layers),
      exponents_(static_cast<std::size_t>(scales_.slots().count())),
      tallies_(exponents_.size()),
      arena_(plan(regions_, config, rows_, weights_, input_, gradient_)) {
  regions_.bind(arena_);
}

std::uint64_t Fp8Linears::planned_bytes(const ModelConfig& config, const TrainOptions& options) {
  Regions regions("operands rounded to fp8");
  std::vector<float*> weights;
  float *input = nullptr, *gradient = nullptr;
  return plan(regions, config, options.micro_batch * options.seq_len, weights, input, gradient).bytes();
}

void Fp8Linears::round(float* out, std::int64_t slot, const float* x, std::int64_t count, Pass pass) {
  const auto index = static_cast<std::size_t>(slot);
  const Fp8Format format = fp8_format(scales_.slots().kind(slot));
  if (pass != Pass::again) {
    exponents_[index] = scales_.known() ? scales_.exponent(slot) : fp8_exponent(amax_bits(x, count), format);
  }
  round_fp8(out, x, count, format, exponents_[index], pass == Pass::training ? &tallies_[index] : nullptr);
}

void Fp8Linears::use_weights(const LlamaParameters<float>& weights) {
  if (!weights_stale_) return;
  weights_stale_ = false;
  const Fp8Slots& slots = scales_.slots();
  for (std::int64_t l = 0; l < config_.num_layers; ++l) {
    for (const BlockLinear linear : kBlockLinears) {
      const LinearSize size = linear_size(config_, linear);
      const std::int64_t slot = slots.at(Fp8Kind::weight, l, linear);
      tallies_[static_cast<std::size_t>(slot)] = {};
      round(weights_[static_cast<std::size_t>(slot - slots.first(Fp8Kind::weight))], slot,
            weights.layers[static_cast<std::size_t>(l)].weight(linear), size.C * size.OC, Pass::training);
    }
  }
}

const float* Fp8Linears::weight(BlockLinear linear, std::int64_t layer) const {
  return weights_[static_cast<std::size_t>(4 * layer) + static_cast<std::size_t>(linear)];
}

const float* Fp8Linears::input(BlockLinear linear, std::int64_t layer, const float* x, Pass pass) {
  round(input_, scales_.slots().at(Fp8Kind::input, layer, linear), x, rows_ * linear_size(config_, linear).C, pass);
  return input_;
}

const float* Fp8Linears::gradient(BlockLinear linear, std::int64_t layer, const float* dout) {
  round(gradient_, scales_.slots().at(Fp8Kind::gradient, layer, linear), dout, rows_ * linear_size(config_, linear).OC,
        Pass::training);
  return gradient_;
}

void Fp8Linears::begin_step() {
  const Fp8Slots& slots = scales_.slots();
  for (const Fp8Kind kind : {Fp8Kind::input, Fp8Kind::gradient}) {
    std::fill_n(tallies_.begin() + slots.first(kind), slots.of_a_kind(), Fp8Tally{});
  }
  micro_batches_ = 0;
}

Fp8Statistics Fp8Linears::statistics() const {
  return fp8_statistics(config_, tallies_, rows_, micro_batches_);
}

void Fp8Linears::end_step() {
  scales_.push(tallies_);
  weights_stale_ = true;
}

void Fp8Linears::weights_replaced() {
  scales_.forget();
  weights_stale_ = true;
}

}  // namespace weft::cpu
