// Pointers to the parameters of a module, on either device, and how they are found in an arena of the tensor table's
// layout. T is the storage type, const where nobody writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "llmc/base/error.h"
#include "llmc/model/tensor_names.h"
#include "llmc/model/tensor_table.h"

namespace weft {

template <typename T>
struct NormParameters {
  T* weight = nullptr;  // [C]
  T* bias = nullptr;    // [C]; null with RMSNorm
};

template <typename T>
struct LinearParameters {
  T* weight = nullptr;  // [out, in], row-major; null where it is quantised
  T* bias = nullptr;    // [out]; null where the layer has none
};

// Which of the two positions of a TensorSpec an arena goes by.
enum class Offsets {
  bytes,     // each tensor lies in the dtype of its spec: the parameters of a model
  elements,  // one type for all tensors: gradients, moments, parameters that were read into one type
};

template <typename T>
class ParameterBinder {
 public:
  ParameterBinder(const TensorTable& table, T* arena, Offsets offsets)
      : table_(table), arena_(arena), offsets_(offsets) {}

  // Exit::internal where the table has no such parameter, or has it in a type of another size than T. Null where it is
  // quantised: bind_quantized() finds those.
  T* weight(const std::string& module) const {
    const TensorSpec& spec = table_.at(weight_of(module));
    return spec.kind == ValueKind::quants ? nullptr : at(spec);
  }
  // Null where the table has none.
  T* bias(const std::string& module) const {
    const TensorSpec* spec = table_.find(bias_of(module));
    return spec != nullptr ? at(*spec) : nullptr;
  }
  NormParameters<T> norm(const std::string& module) const { return {weight(module), bias(module)}; }
  LinearParameters<T> linear(const std::string& module) const { return {weight(module), bias(module)}; }

 private:
  T* at(const TensorSpec& spec) const {
    if (offsets_ == Offsets::elements) return arena_ + spec.offset;
    if (dtype_bytes(spec.dtype) != sizeof(T)) {
      fail(Exit::internal, "%s: stored as %s, bound as a type of %zu bytes", spec.name.c_str(), dtype_name(spec.dtype),
           sizeof(T));
    }
    using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(arena_) + spec.byte_offset);
  }

  const TensorTable& table_;
  T* arena_;
  Offsets offsets_;
};

}  // namespace weft
