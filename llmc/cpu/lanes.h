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

// The sum of a register's floats, in one order: halves are added until one float is left.
using Lanes4 __attribute__((vector_size(16))) = float;
using Lanes8 __attribute__((vector_size(32))) = float;

template <typename Half>
Half added_halves(const void* values) {
  Half low, high;
  std::memcpy(&low, values, sizeof low);
  std::memcpy(&high, static_cast<const char*>(values) + sizeof low, sizeof high);
  return low + high;
}
inline float sum_of_lanes(const Lanes& values) {
#if defined(__AVX512F__)
  const Lanes8 eight = added_halves<Lanes8>(&values);
  const Lanes4 four = added_halves<Lanes4>(&eight);
#elif defined(__AVX__)
  const Lanes4 four = added_halves<Lanes4>(&values);
#else
  const Lanes4 four = values;
#endif
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline std::int64_t padded(std::int64_t size) {
  return (size + kLanes - 1) / kLanes * kLanes;
}

}  // namespace weft::cpu
