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

const char* name_of(const WeightFormat* format) {
  return format == nullptr ? "none" : format->name;
}

}  // namespace

Quantization quantization_from_json(const Json& object, const std::string& source) {
  if (!object.is_object()) fail(Exit::bad_file, "%s: expected an object", source.c_str());
  Quantization quantization;
  const std::string name = json_string(object, "scheme", source);
  quantization.weights = find_weight_format(name);
  if (quantization.weights == nullptr) {
    fail(Exit::bad_file, "%s: scheme: got %s, expected %s. A newer weft may know it", source.c_str(),
         escaped(name).c_str(), weight_format_names().c_str());
  }
  const std::int64_t expected = quantization.weights->group();
  const std::int64_t group = json_int(object, "group", 0, INT32_MAX, source);
  if (group != expected) {
    fail(Exit::bad_file, "%s: group: got %lld, expected %lld with %s", source.c_str(), static_cast<long long>(group),
         static_cast<long long>(expected), name.c_str());
  }
  const std::string head = json_string(object, "head", source);
  quantization.head = find_weight_format(head);
  if (quantization.head != nullptr ? !quantization.head->of_head : head != "none") {
    fail(Exit::bad_file, "%s: head: got %s, expected none or %s", source.c_str(), escaped(head).c_str(),
         weight_format_names(true).c_str());
  }
  return quantization;
}

Json quantization_to_json(const Quantization& quantization) {
  return {{"scheme", name_of(quantization.weights)},
          {"group", quantization.weights == nullptr ? 0 : quantization.weights->group()},
          {"head", name_of(quantization.head)}};
}

std::string quantization_text(const Quantization& quantization) {
  const std::string weights = name_of(quantization.weights);
  return quantization.head == nullptr ? weights : weights + ", head " + quantization.head->name;
}

std::string fp8_activations_unsupported_reason(const Quantization& quantization, bool adapter) {
  const WeightFormat* const weights = quantization.weights;
  if (weights == nullptr || weights->dtype != DType::e4m3) {
    return format("the model's weights are %s, expected fp8 (convert_hf.py --quantize fp8)",
                  weights == nullptr ? "floats" : weights->name);
  }
  return adapter ? "not with an adapter beside quantised weights" : "";
}

std::optional<std::size_t> first_invalid_value(ValueKind kind, DType dtype, std::span<const std::byte> data) {
  switch (kind) {
    case ValueKind::floats:
      return std::nullopt;
    case ValueKind::quants: {
      const WeightFormat& format = weight_format(dtype);
      if (format.invalid_mask == 0) return std::nullopt;
      return find_bad<std::uint8_t>(data, [&](std::uint8_t byte) { return !format.valid(byte); });
    }
    case ValueKind::scales:
      // A positive finite number has no sign bit, some other bit, and not all bits of its exponent.
      if (dtype == DType::f16) {
        return find_bad<std::uint16_t>(data, [](std::uint16_t bits) { return bits == 0 || bits >= 0x7C00; });
      }
      return find_bad<std::uint32_t>(data, [](std::uint32_t bits) { return bits == 0 || bits >= 0x7F800000; });
    case ValueKind::zeros:
      return find_bad<std::uint8_t>(data, [](std::uint8_t zero) { return zero > kMaxZero; });
  }
  return std::nullopt;
}

const char* valid_values(ValueKind kind, DType dtype) {
  switch (kind) {
    case ValueKind::floats:
      break;
    case ValueKind::quants:
      return weight_format(dtype).valid_values;
    case ValueKind::scales:
      return "a finite number above 0";
    case ValueKind::zeros:
      return "0 to 15";
  }
  return "a finite number";
}

}  // namespace weft
