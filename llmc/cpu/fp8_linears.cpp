#include "llmc/cpu/fp8_linears.h"

#include <algorithm>

#include "llmc/cpu/fp8.h"

namespace weft::cpu {

namespace {

// Plans the three kinds of operands; `weights` gets a pointer for each place and linear layer.
const MemoryPlan& plan(ArenaLayout& layout, const ModelConfig& config, std::int64_t rows, std::int64_t places,
                       std::vector<float*>& weights, float*& input, float*& gradient) {
  weights.assign(static_cast<std::size_t>(4 * places), nullptr);
  std::int64_t widest_input = 0, widest_gradient = 0;
  for (const BlockLinear linear : kBlockLinears) {
    const LinearSize size = linear_size(config, linear);
    widest_input = std::max(widest_input, size.C);
    widest_gradient = std::max(widest_gradient, size.OC);
    for (std::int64_t place = 0; place < places; ++place) {
      layout.reserve(&weights[static_cast<std::size_t>(4 * place) + static_cast<std::size_t>(linear)],
                     size.C * size.OC);
    }
  }
  layout.reserve(&input, rows * widest_input);
  layout.reserve(&gradient, rows * widest_gradient);
  return layout.plan();
}

}  // namespace

Fp8Linears::Fp8Linears(const ModelConfig& config, const TrainOptions& options, bool parameters_sharded)
    : config_(config),
      lora_(options.lora),
      rows_(options.micro_batch * options.seq_len),
      scales_(config.num_layers),
      exponents_(static_cast<std::size_t>(scales_.slots().count())),
      counters_(exponents_.size()),
      buffers_(config.num_layers, parameters_sharded),
      arena_(plan(layout_, config, rows_, buffers_.count(), weights_, input_, gradient_)) {
  layout_.bind(arena_);
}

std::uint64_t Fp8Linears::planned_bytes(const ModelConfig& config, const TrainOptions& options,
                                        bool parameters_sharded) {
  ArenaLayout layout("operands rounded to fp8");
  std::vector<float*> weights;
  float *input = nullptr, *gradient = nullptr;
  const std::int64_t places = Fp8Buffers(config.num_layers, parameters_sharded).count();
  return plan(layout, config, options.micro_batch * options.seq_len, places, weights, input, gradient).bytes();
}

void Fp8Linears::round(float* out, std::int64_t slot, const float* x, std::int64_t count, Pass pass) {
  const auto index = static_cast<std::size_t>(slot);
  const Fp8Format format = fp8_format(scales_.slots().kind(slot));
  if (pass != Pass::again) {
    exponents_[index] = scales_.known() ? scales_.exponent(slot) : fp8_exponent(amax_bits(x, count), format);
  }
  round_fp8(out, x, count, format, exponents_[index], pass == Pass::training ? &counters_[index] : nullptr);
}

void Fp8Linears::use_weights(std::int64_t layer, const BlockWeights<float>& weights, bool again) {
  if (buffers_.has(layer)) return;
  buffers_.put(layer);
  for (const BlockLinear linear : kBlockLinears) {
    const LinearSize size = linear_size(config_, linear);
    const std::int64_t slot = scales_.slots().at(Fp8Kind::weight, layer, linear);
    if (!again) counters_[static_cast<std::size_t>(slot)] = {};
    round(weight_of(linear, layer), slot, weights.linear(linear).weight.plain, size.C * size.OC,
          again ? Pass::again : Pass::training);
  }
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
    std::fill_n(counters_.begin() + slots.first(kind), slots.of_a_kind(), Fp8Counters{});
  }
  micro_batches_ = 0;
  of_ranks_.clear();
}

void Fp8Linears::gather_counters(Communicator& ranks) {
  const std::int64_t slots = scales_.slots().count();
  std::vector<Fp8Counters> all(static_cast<std::size_t>(ranks.size() * slots));
  std::copy(counters_.begin(), counters_.end(), all.begin() + ranks.rank() * slots);
  ranks.gather(all.data(), shares(std::ssize(all), ranks.size()));
  of_ranks_ = of_all_ranks(scales_.slots(), all);
  micro_batches_ *= ranks.size();
}

Fp8Statistics Fp8Linears::statistics() const {
  return fp8_statistics(config_, lora_, step_counters(), rows_, micro_batches_);
}

void Fp8Linears::end_step() {
  scales_.push(step_counters());
  buffers_.forget();
}

void Fp8Linears::weights_replaced() {
  scales_.forget();
  buffers_.forget();
}

}  // namespace weft::cpu
