// Which weights of a model are quantised, in which format (formats/weight_format.h). Activations stay floats. The linear layers
// of the blocks are quantised, the head by choice; embedding, norms, biases and a tied head are not. In the table and in a file
// a matrix [N, K], of which each row gives one output, has its usual name, and "<name>.scales" and "<name>.zeros" stand beside
// it (doc/tensor_file.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "llmc/base/json_fwd.h"
#include "llmc/model/formats/weight_format.h"

namespace weft {

struct Quantization {
  const WeightFormat* weights = nullptr;  // of the linear layers of the blocks; null: floats
  const WeightFormat* head = nullptr;     // one that it may have, or null

  bool any() const { return weights != nullptr || head != nullptr; }
  bool operator==(const Quantization&) const = default;
};

// The object "quantization" of a model file's configuration: {"scheme", "group", "head"}. Exit::bad_file for anything else
// than what to_json() writes; `source` names the file in errors.
Quantization quantization_from_json(const Json& object, const std::string& source);
Json quantization_to_json(const Quantization& quantization);
// "none", "int4", "int4, head int8": for people.
std::string quantization_text(const Quantization& quantization);

// Why linear layers with such weights cannot multiply in fp8, for `--activations fp8`; empty if they can. `adapter`: whether
// one stands beside the weights.
std::string fp8_activations_unsupported_reason(const Quantization& quantization, bool adapter);

// What kind of values a tensor of the table holds.
enum class ValueKind {
  floats,
  quants,  // q of a matrix
  scales,  // positive and finite
  zeros,   // 0 .. 15
};

// The index of the first element that a quantised model must not have: a q that is invalid in its format, a scale that is
// not finite and positive, a zero above 15. `data`: bytes of a tensor of this kind and dtype, any
// whole number of elements. Nothing for ValueKind::floats.
std::optional<std::size_t> first_invalid_value(ValueKind kind, DType dtype, std::span<const std::byte> data);
// What such a tensor expects of each element, for messages: "-127 to 127", "a finite number above 0", ...
const char* valid_values(ValueKind kind, DType dtype);

}  // namespace weft
