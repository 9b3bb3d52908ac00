// --precision fp8: which tensors of a step are rounded to fp8, and with which scales. Both devices share it.
//
// Of each linear layer of the blocks all three GEMMs have operands in fp8: its input x, its weight W and the gradient dY of its
// output. x and W are e4m3. dY is e5m2: gradients of the tokens of one step differ by many powers of two, and what
// falls below the smallest number is lost.
//
// Scales are delayed: the exponent of a tensor follows from the largest magnitudes that it had in the last kFp8History
// steps, which are known before the tensor is. So a kernel can round what it computes without a pass before it that looks
// for the maximum, and the same scale holds for all micro-batches of a step and for what is computed again in the backward
// pass. While there is no history yet, in the first step, each tensor is looked through first (current scaling).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/fp8.h"
#include "llmc/model/config.h"
#include "llmc/model/lora.h"

namespace weft {

enum class Fp8Kind { input, weight, gradient };
inline constexpr Fp8Kind kFp8Kinds[] = {Fp8Kind::input, Fp8Kind::weight, Fp8Kind::gradient};

constexpr Fp8Format fp8_format(Fp8Kind kind) {
  return kind == Fp8Kind::gradient ? Fp8Format::e5m2 : Fp8Format::e4m3;
}

// The tensors that are rounded, numbered: kind by kind, so that those of one kind are neighbours, and layer by layer.
struct Fp8Slots {
  std::int64_t layers;

  std::int64_t count() const { return 3 * of_a_kind(); }
  std::int64_t of_a_kind() const { return 4 * layers; }
  std::int64_t first(Fp8Kind kind) const { return static_cast<std::int64_t>(kind) * of_a_kind(); }
  std::int64_t at(Fp8Kind kind, std::int64_t layer, BlockLinear linear) const {
    return first(kind) + 4 * layer + static_cast<std::int64_t>(linear);
  }
  Fp8Kind kind(std::int64_t slot) const { return static_cast<Fp8Kind>(slot / of_a_kind()); }
  std::int64_t layer(std::int64_t slot) const { return slot % of_a_kind() / 4; }
  BlockLinear linear(std::int64_t slot) const { return static_cast<BlockLinear>(slot % 4); }
  std::string name(std::int64_t slot) const;  // "layers.3 gate, up gradient"
};

// The counters of a whole step from those of its ranks, [ranks, slots]: what the micro-batches of all of them have met. Weights
// are the first rank's, because every rank has rounded all of them.
std::vector<Fp8Counters> of_all_ranks(const Fp8Slots& slots, std::span<const Fp8Counters> counters);

// Where rounded weights lie, and which are up to date. Every layer has a place of its own or, where ranks divide the
// parameters, layers take turns in as many places as their parameters do (SectionBuffers).
class Fp8Buffers {
 public:
  Fp8Buffers(std::int64_t layers, bool parameters_sharded);

  std::int64_t count() const { return std::ssize(occupants_); }
  std::int64_t of(std::int64_t layer) const { return layer % count(); }
  bool has(std::int64_t layer) const { return occupants_[static_cast<std::size_t>(of(layer))] == layer; }
  bool has_all() const;
  void put(std::int64_t layer) { occupants_[static_cast<std::size_t>(of(layer))] = layer; }
  void forget() { std::fill(occupants_.begin(), occupants_.end(), kNone); }  // the weights have changed

 private:
  static constexpr std::int64_t kNone = -1;

  std::int64_t layers_;
  std::vector<std::int64_t> occupants_;  // the layer in each place
};

// A tensor rounded on the host, by the scale that its own largest magnitude allows; 2^0 where that is not finite. Codes and counters
// are those of a GPU, bit for bit.
struct Fp8Tensor {
  std::vector<std::uint8_t> codes;
  int exponent = 0;
  Fp8Counters counters;
};
Fp8Tensor round_tensor(std::span<const float> values, Fp8Format format);

inline constexpr std::int64_t kFp8History = 16;  // steps

// The largest magnitudes of the last steps, and the exponents that follow from them.
class Fp8Scales {
 public:
  explicit Fp8Scales(std::int64_t layers);

  const Fp8Slots& slots() const { return slots_; }
  // Whether there is a history.
  bool known() const { return known_; }
  int exponent(std::int64_t slot) const { return exponents_[static_cast<std::size_t>(slot)]; }
  // A step has changed the parameters: its tensors, one set of counters a slot. What is not finite leaves that tensor's history
  // as it is.
  void push(std::span<const Fp8Counters> counters);
  void forget();

  // [kFp8History, slots]: the newest step first; zeros where there were not so many.
  const std::vector<float>& state() const { return amax_; }
  // Exit::internal for another size.
  void set_state(std::span<const float> state);

 private:
  void find_exponents();

  Fp8Slots slots_;
  std::vector<float> amax_;
  std::vector<int> exponents_;
  bool known_ = false;
};

// What was lost in a step, for the log.
struct Fp8Statistics {
  struct Kind {
    std::uint64_t values = 0, saturated = 0, flushed = 0;
  };
  std::array<Kind, 3> kinds;  // by Fp8Kind
  // The tensor of which the largest share was saturated; empty: none was.
  std::string worst;
  double worst_share = 0;
};
// Of `micro_batches`, of all ranks, with `rows` rows each. Gradients that an adapter `lora` leaves unread are not among the values.
Fp8Statistics fp8_statistics(const ModelConfig& config, const std::optional<LoraConfig>& lora,
                             std::span<const Fp8Counters> counters, std::int64_t rows, std::int64_t micro_batches);
// Beyond this share of a tensor saturation is more than a few outliers of one step.
inline constexpr double kFp8SaturationWarning = 1e-3;

// Why a model is not trained in fp8, as a message; empty if it is: a block that is not a Llama's, and a width, or a number of rows of
// a micro-batch, that is no multiple of 16, because GEMMs take fp8 in pieces of 16 bytes.
std::string fp8_unsupported_reason(const ModelConfig& config, std::int64_t micro_batch, std::int64_t seq_len);
// Exit::usage for that reason.
void check_fp8_sizes(const ModelConfig& config, std::int64_t micro_batch, std::int64_t seq_len);

}  // namespace weft
