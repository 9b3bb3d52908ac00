// How the quantised weights of a model are stored. Activations stay floats.
//
//   int8   w = scale[n] q       q in [-127, 127], scale fp32 [N]
//   fp8    w = scale[n] q       q in e4m3, scale fp32 [N]
//   int4   w = scale[n, g] (q - zero[n, g])    q and zero in 0 .. 15, groups of 128 along K (the last one may be shorter),
//                                              scale fp16 [N, G], zero u8 [N, G]
//
// for a matrix [N, K], of which each row gives one output. The linear layers of the blocks are quantised, the head by
// choice (int8); embedding, norms, biases and a tied head are not. In the table and in a file the matrix has its usual name,
// and "<name>.scales" and "<name>.zeros" stand beside it (doc/tensor_file.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "llmc/base/ceil_div.h"
#include "llmc/base/dtype.h"
#include "llmc/base/json_fwd.h"

namespace weft {

enum class WeightScheme { none, int8, int4, fp8 };
const char* weight_scheme_name(WeightScheme scheme);  // "none", "int8", "int4", "fp8"

inline constexpr std::int64_t kQuantGroup = 128;  // of int4: columns that share a scale and a zero
inline std::int64_t quant_groups(std::int64_t columns) {
  return ceil_div(columns, kQuantGroup);
}

struct Quantization {
  WeightScheme weights = WeightScheme::none;  // of the linear layers of the blocks
  WeightScheme head = WeightScheme::none;     // none or int8

  bool any() const { return weights != WeightScheme::none || head != WeightScheme::none; }
  bool operator==(const Quantization&) const = default;
};

// The object "quantization" of a model file's configuration: {"scheme", "group", "head"}. Exit::bad_file for anything else
// than what to_json() writes; `source` names the file in errors.
Quantization quantization_from_json(const Json& object, const std::string& source);
Json quantization_to_json(const Quantization& quantization);
// "none", "int4", "int4, head int8": for people.
std::string quantization_text(const Quantization& quantization);

// What kind of values a tensor of the table holds.
enum class ValueKind {
  floats,
  quants,  // q of a matrix
  scales,  // positive and finite
  zeros,   // 0 .. 15
};

// The index of the first element that a quantised model must not have: q of int8 that is -128, q of e4m3 that is not a
// number, a scale that is not finite and positive, a zero above 15. `data`: bytes of a tensor of this kind and dtype, any
// whole number of elements. Nothing for ValueKind::floats.
std::optional<std::size_t> first_invalid_value(ValueKind kind, DType dtype, std::span<const std::byte> data);
// What such a tensor expects of each element, for messages: "-127 to 127", "a finite number above 0", ...
const char* valid_values(ValueKind kind, DType dtype);

// A quantised matrix [N, K] in the memory of either device.
struct QuantizedMatrix {
  const void* data = nullptr;         // q: [N, K] i8 or e4m3; u4 [N, K / 2] bytes, the even column in the low bits
  DType dtype = DType::f32;           // i8, u4 or e4m3; f32: there is no quantised matrix
  const float* row_scales = nullptr;  // [N]; null with u4
  const std::uint16_t* group_scales = nullptr;  // [N, G] bits of fp16; u4 only
  const std::uint8_t* zeros = nullptr;          // [N, G]; u4 only

  explicit operator bool() const { return data != nullptr; }
};

}  // namespace weft
