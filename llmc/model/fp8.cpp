#include "llmc/model/fp8.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/model/shards.h"

namespace weft {

namespace {

// Octaves beyond the factor of two of fp8_exponent(). Gradients of all layers grow together in single steps, sixty-fourfold
// within a history was met, and e5m2 has the range to spare: dev/performance/fp8.md, Scales.
constexpr int kGradientHeadroom = 5;

int delayed_exponent(float largest, Fp8Kind kind) {
  const int exponent = fp8_exponent(std::bit_cast<std::uint32_t>(largest), fp8_format(kind));
  if (kind != Fp8Kind::gradient || largest == 0) return exponent;
  return exponent - kGradientHeadroom;  // at least -119, so that 2^-exponent is finite
}

}  // namespace

std::string Fp8Slots::name(std::int64_t slot) const {
  constexpr const char* kKinds[] = {"input", "weight", "gradient"};
  constexpr const char* kLinears[] = {"qkv", "output", "gate, up", "down"};
  return format("layers.%lld %s %s", static_cast<long long>(slot % of_a_kind() / 4),
                kLinears[static_cast<int>(linear(slot))], kKinds[static_cast<int>(kind(slot))]);
}

std::vector<Fp8Counters> of_all_ranks(const Fp8Slots& slots, std::span<const Fp8Counters> counters) {
  const auto count = static_cast<std::size_t>(slots.count());
  std::vector<Fp8Counters> sum(counters.begin(), counters.begin() + slots.count());
  for (std::size_t i = count; i < counters.size(); ++i) {
    if (slots.kind(static_cast<std::int64_t>(i % count)) == Fp8Kind::weight) continue;
    Fp8Counters& all = sum[i % count];
    all.saturated += counters[i].saturated;
    all.flushed += counters[i].flushed;
    all.amax_bits = std::max(all.amax_bits, counters[i].amax_bits);
  }
  return sum;
}

Fp8Buffers::Fp8Buffers(std::int64_t layers, bool parameters_sharded)
    : layers_(layers),
      occupants_(parameters_sharded ? std::min(static_cast<std::size_t>(layers), SectionBuffers::kLayerBuffers)
                                    : static_cast<std::size_t>(layers),
                 kNone) {}

bool Fp8Buffers::has_all() const {
  for (std::int64_t l = 0; l < layers_; ++l) {
    if (!has(l)) return false;
  }
  return true;
}

Fp8Tensor round_tensor(std::span<const float> values, Fp8Format format) {
  const std::int64_t count = std::ssize(values);
  const float largest = fp8_largest(format);
  std::uint32_t amax = 0;
#pragma omp parallel for schedule(static) reduction(max : amax)
  for (std::int64_t i = 0; i < count; ++i) {
    amax = std::max(amax, std::bit_cast<std::uint32_t>(values[static_cast<std::size_t>(i)]) & 0x7FFFFFFFu);
  }
  Fp8Tensor tensor;
  tensor.codes.resize(values.size());
  tensor.exponent = std::isfinite(std::bit_cast<float>(amax)) ? fp8_exponent(amax, format) : 0;
  const float scale = std::bit_cast<float>(fp8_scale_bits(tensor.exponent));
  std::int64_t saturated = 0, flushed = 0;
#pragma omp parallel for schedule(static) reduction(+ : saturated, flushed)
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = values[static_cast<std::size_t>(i)], scaled = value * scale;
    saturated += std::abs(scaled) > largest ? 1 : 0;
    flushed += value != 0 && std::abs(scaled) <= fp8_flushed(format) ? 1 : 0;
    // An infinity of the tensor is not finite, one of the product saturates.
    const float finite = std::isinf(value) ? value : std::clamp(scaled, -largest, largest);
    tensor.codes[static_cast<std::size_t>(i)] = f32_to_fp8(finite, format);
  }
  tensor.counters.saturated = static_cast<std::uint64_t>(saturated);
  tensor.counters.flushed = static_cast<std::uint64_t>(flushed);
  tensor.counters.amax_bits = amax;
  return tensor;
}

Fp8Scales::Fp8Scales(std::int64_t layers)
    : slots_{layers},
      amax_(static_cast<std::size_t>(kFp8History * slots_.count())),
      exponents_(static_cast<std::size_t>(slots_.count())) {}

void Fp8Scales::push(std::span<const Fp8Counters> counters) {
  const auto slots = static_cast<std::size_t>(slots_.count());
  if (counters.size() != slots) fail(Exit::internal, "fp8: %zu counters for %zu slots", counters.size(), slots);
  std::copy_backward(amax_.begin(), amax_.end() - static_cast<std::ptrdiff_t>(slots), amax_.end());
  for (std::size_t slot = 0; slot < slots; ++slot) {
    const float amax = std::bit_cast<float>(counters[slot].amax_bits);
    if (std::isfinite(amax)) amax_[slot] = amax;
  }
  find_exponents();
}

void Fp8Scales::forget() {
  std::fill(amax_.begin(), amax_.end(), 0.0f);
  find_exponents();
}

void Fp8Scales::set_state(std::span<const float> state) {
  if (state.size() != amax_.size()) {
    fail(Exit::internal, "fp8: a history of %zu values for %zu", state.size(), amax_.size());
  }
  amax_.assign(state.begin(), state.end());
  find_exponents();
}

void Fp8Scales::find_exponents() {
  known_ = false;
  for (std::int64_t slot = 0; slot < slots_.count(); ++slot) {
    float largest = 0;
    for (std::int64_t step = 0; step < kFp8History; ++step) {
      largest = std::max(largest, amax_[static_cast<std::size_t>(step * slots_.count() + slot)]);
    }
    known_ |= largest > 0;
    exponents_[static_cast<std::size_t>(slot)] = delayed_exponent(largest, slots_.kind(slot));
  }
}

Fp8Statistics fp8_statistics(const ModelConfig& config, const std::optional<LoraConfig>& lora,
                             std::span<const Fp8Counters> counters, std::int64_t rows, std::int64_t micro_batches) {
  const Fp8Slots slots{config.num_layers};
  Fp8Statistics statistics;
  for (std::int64_t slot = 0; slot < slots.count(); ++slot) {
    const Fp8Counters& of_slot = counters[static_cast<std::size_t>(slot)];
    const Fp8Kind kind = slots.kind(slot);
    if (kind == Fp8Kind::gradient && !input_gradient_is_read(lora, slots.layer(slot), slots.linear(slot))) continue;
    const LinearSize size = linear_size(config, slots.linear(slot));
    const std::int64_t values =
        kind == Fp8Kind::weight ? size.C * size.OC : micro_batches * rows * (kind == Fp8Kind::input ? size.C : size.OC);
    Fp8Statistics::Kind& sum = statistics.kinds[static_cast<std::size_t>(kind)];
    sum.values += static_cast<std::uint64_t>(values);
    sum.saturated += of_slot.saturated;
    sum.flushed += of_slot.flushed;
    const double share =
        static_cast<double>(of_slot.saturated) / static_cast<double>(std::max<std::int64_t>(values, 1));
    if (share <= statistics.worst_share) continue;
    statistics.worst_share = share;
    statistics.worst = slots.name(slot);
  }
  return statistics;
}

std::string fp8_unsupported_reason(const ModelConfig& config, std::int64_t micro_batch, std::int64_t seq_len) {
  if (config.activation != Activation::swiglu || config.parallel_residual || config.post_norms ||
      config.qkv_layout != QkvLayout::concatenated) {
    return format(
        "--precision: got fp8 for a model of the family %s, expected one with SwiGLU, a sequential residual "
        "without norms behind its branches, and q, k and v in matrices of their own. Use --precision bf16 or fp32",
        config.family.c_str());
  }
  constexpr std::int64_t kMultiple = 16;
  const std::pair<const char*, std::int64_t> sizes[] = {{"hidden_size", config.hidden_size},
                                                        {"num_heads x head_dim", config.q_size()},
                                                        {"(num_heads + 2 num_kv_heads) x head_dim", config.qkv_size()},
                                                        {"ffn_size", config.ffn_size},
                                                        {"--micro-batch x --seq-len", micro_batch * seq_len}};
  for (const auto& [name, value] : sizes) {
    if (value % kMultiple == 0) continue;
    return format("%s: got %lld, --precision fp8 needs a multiple of %lld. Use --precision bf16 or fp32", name,
                  static_cast<long long>(value), static_cast<long long>(kMultiple));
  }
  return {};
}

void check_fp8_sizes(const ModelConfig& config, std::int64_t micro_batch, std::int64_t seq_len) {
  const std::string reason = fp8_unsupported_reason(config, micro_batch, seq_len);
  if (!reason.empty()) fail(Exit::usage, "%s", reason.c_str());
}

}  // namespace weft
