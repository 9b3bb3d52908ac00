// A vector register of floats, read and written at any address, and sums in one order. The compiler would split a type wider
// than the machine's registers and pass its parts through memory.
//
// Nothing here leaves the order or the rounding of a sum to the compiler. Which products it fuses into additions, and how
// wide it makes the vectors of a reduction, depends on the CPU that it tunes for, on the block of a loop that it looks at and
// on its version: so products are fused by multiply_add() alone, and sums run over kLanes partial sums. Bits then depend on
// the instruction set (kLanes, FMA or not) and on nothing else.
#pragma once

#include <immintrin.h>

#include <cmath>
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

// Every lane has the value.
inline Lanes all_lanes(float value) {
  return value - Lanes{};
}

// a * b + c, rounded once where the machine has FMA. Without it every multiplication rounds: std::fma would be a call.
inline Lanes multiply_add(const Lanes& a, const Lanes& b, const Lanes& c) {
#if defined(__FMA__) && defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
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

// The sum of `count` floats.
inline float sum_of(const float* values, std::int64_t count) {
  Lanes partial[4] = {};
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) partial[p] += *lanes(values + i + p * kLanes);
  }
  for (; i + kLanes <= count; i += kLanes) partial[0] += *lanes(values + i);
  if (i < count) partial[1] += partial_lanes(values + i, count - i);
  return sum_of_lanes((partial[0] + partial[1]) + (partial[2] + partial[3]));
}

// The sum in double of term(load) for i < count, where load(values) is values[i] as a double, or several neighbours at once.
template <typename Term>
double sum_in_double(std::int64_t count, const Term& term) {
  constexpr std::int64_t kHalf = kLanes / 2, kParts = 4;
  using Floats __attribute__((vector_size(kHalf * sizeof(float)))) = float;
  using Doubles __attribute__((vector_size(kHalf * sizeof(double)))) = double;
  Doubles partial[kParts] = {};
  std::int64_t i = 0;
  const auto add = [&](Doubles& sum, std::int64_t first) {
    sum += term([first](const float* values) {
      Floats few;
      std::memcpy(&few, values + first, sizeof few);
      return __builtin_convertvector(few, Doubles);
    });
  };
  for (; i + kParts * kHalf <= count; i += kParts * kHalf) {
#pragma GCC unroll 4
    for (std::int64_t p = 0; p < kParts; ++p) add(partial[p], i + p * kHalf);
  }
  for (; i + kHalf <= count; i += kHalf) add(partial[0], i);
  const Doubles whole = (partial[0] + partial[1]) + (partial[2] + partial[3]);
  double sum = 0;
  for (std::int64_t lane = 0; lane < kHalf; ++lane) sum += whole[lane];
  for (; i < count; ++i) {
    sum += term([i](const float* values) { return static_cast<double>(values[i]); });
  }
  return sum;
}

inline std::int64_t padded(std::int64_t size) {
  return (size + kLanes - 1) / kLanes * kLanes;
}

}  // namespace weft::cpu
