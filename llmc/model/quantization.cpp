#include "llmc/model/quantization.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "llmc/base/error.h"
#include "llmc/base/json.h"

namespace weft {

namespace {

// The index of the first of the T at `data` for which bad(value) holds.
template <typename T, typename Bad>
std::optional<std::size_t> find_bad(std::span<const std::byte> data, const Bad& bad) {
  for (std::size_t i = 0; i < data.size() / sizeof(T); ++i) {
    T value;
    std::memcpy(&value, data.data() + i * sizeof value, sizeof value);
    if (bad(value)) return i;
  }
  return std::nullopt;
}

std::optional<WeightScheme> scheme_from_name(const std::string& name) {
  for (const WeightScheme scheme : {WeightScheme::int8, WeightScheme::int4, WeightScheme::fp8}) {
    if (name == weight_scheme_name(scheme)) return scheme;
  }
  return std::nullopt;
}

}  // namespace

const char* weight_scheme_name(WeightScheme scheme) {
  switch (scheme) {
    case WeightScheme::none:
      return "none";
    case WeightScheme::int8:
      return "int8";
    case WeightScheme::int4:
      return "int4";
    case WeightScheme::fp8:
      return "fp8";
  }
  return "unknown";
}

Quantization quantization_from_json(const Json& object, const std::string& source) {
  if (!object.is_object()) fail(Exit::bad_file, "%s: expected an object", source.c_str());
  Quantization quantization;
  const std::string name = json_string(object, "scheme", source);
  const std::optional<WeightScheme> scheme = scheme_from_name(name);
  if (!scheme) {
    fail(Exit::bad_file, "%s: scheme: got %s, expected int8, int4 or fp8. A newer weft may know it", source.c_str(),
         escaped(name).c_str());
  }
  quantization.weights = *scheme;
  const std::int64_t expected = *scheme == WeightScheme::int4 ? kQuantGroup : 0;
  const std::int64_t group = json_int(object, "group", 0, INT32_MAX, source);
  if (group != expected) {
    fail(Exit::bad_file, "%s: group: got %lld, expected %lld with %s", source.c_str(), static_cast<long long>(group),
         static_cast<long long>(expected), name.c_str());
  }
  const std::string head = json_string(object, "head", source);
  if (head != "none" && head != "int8") {
    fail(Exit::bad_file, "%s: head: got %s, expected none or int8", source.c_str(), escaped(head).c_str());
  }
  if (head == "int8") quantization.head = WeightScheme::int8;
  return quantization;
}

Json quantization_to_json(const Quantization& quantization) {
  return {{"scheme", weight_scheme_name(quantization.weights)},
          {"group", quantization.weights == WeightScheme::int4 ? kQuantGroup : 0},
          {"head", weight_scheme_name(quantization.head)}};
}

std::string quantization_text(const Quantization& quantization) {
  const std::string weights = weight_scheme_name(quantization.weights);
  return quantization.head == WeightScheme::none ? weights : weights + ", head int8";
}

std::optional<std::size_t> first_invalid_value(ValueKind kind, DType dtype, std::span<const std::byte> data) {
  switch (kind) {
    case ValueKind::floats:
      return std::nullopt;
    case ValueKind::quants:
      if (dtype == DType::i8) return find_bad<std::int8_t>(data, [](std::int8_t q) { return q == INT8_MIN; });
      if (dtype == DType::e4m3) return find_bad<std::uint8_t>(data, [](std::uint8_t q) { return (q & 0x7F) == 0x7F; });
      return std::nullopt;  // u4: every nibble is a number
    case ValueKind::scales:
      // A positive finite number has no sign bit, some other bit, and not all bits of its exponent.
      if (dtype == DType::f16) {
        return find_bad<std::uint16_t>(data, [](std::uint16_t bits) { return bits == 0 || bits >= 0x7C00; });
      }
      return find_bad<std::uint32_t>(data, [](std::uint32_t bits) { return bits == 0 || bits >= 0x7F800000; });
    case ValueKind::zeros:
      return find_bad<std::uint8_t>(data, [](std::uint8_t zero) { return zero > 15; });
  }
  return std::nullopt;
}

const char* valid_values(ValueKind kind, DType dtype) {
  switch (kind) {
    case ValueKind::floats:
      break;
    case ValueKind::quants:
      return dtype == DType::i8 ? "-127 to 127" : dtype == DType::e4m3 ? "a number, not NaN" : "0 to 15";
    case ValueKind::scales:
      return "a finite number above 0";
    case ValueKind::zeros:
      return "0 to 15";
  }
  return "a finite number";
}

}  // namespace weft
