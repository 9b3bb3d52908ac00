// A vector register of floats, read and written at any address. The compiler would split a type wider than the machine's
// registers and pass its parts through memory.
#pragma once

#include <cstdint>
#include <cstring>

namespace weft::cpu {

#if defined(__AVX512F__)
constexpr std::int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr std::int64_t kLanes = 8;
#else
constexpr std::int64_t kLanes = 4;
#endif
using Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(alignof(float)), may_alias)) = float;

inline Lanes* lanes(float* values) {
  return reinterpret_cast<Lanes*>(values);
}
inline const Lanes* lanes(const float* values) {
  return reinterpret_cast<const Lanes*>(values);
}

// The first `count` < kLanes floats, and zeros.
inline Lanes partial_lanes(const float* values, std::int64_t count) {
  Lanes result = {};
  std::memcpy(&result, values, static_cast<std::size_t>(count) * sizeof(float));
  return result;
}

// The sum of a register's floats, in one order.
inline float sum_of_lanes(const Lanes& values) {
  float parts[kLanes];
  std::memcpy(parts, &values, sizeof parts);
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t i = 0; i < half; ++i) parts[i] += parts[i + half];
  }
  return parts[0];
}

inline std::int64_t padded(std::int64_t size) {
  return (size + kLanes - 1) / kLanes * kLanes;
}

}  // namespace weft::cpu
