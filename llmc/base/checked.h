// Arithmetic on sizes that come from files: an overflow is an error that names the quantity; values never wrap.
#pragma once

#include <cstdint>

#include "llmc/base/error.h"

namespace weft {

// a * b. An overflow is Exit::bad_file: "<what>: size overflows 64 bits".
inline std::uint64_t checked_mul(std::uint64_t a, std::uint64_t b, const std::string& what) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) fail(Exit::bad_file, "%s: size overflows 64 bits", what.c_str());
  return product;
}

// a + b, likewise.
inline std::uint64_t checked_add(std::uint64_t a, std::uint64_t b, const std::string& what) {
  std::uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) fail(Exit::bad_file, "%s: size overflows 64 bits", what.c_str());
  return sum;
}

// The smallest multiple of `alignment` (a power of two) that is >= value.
inline std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment, const std::string& what) {
  return checked_add(value, alignment - 1, what) & ~(alignment - 1);
}

}  // namespace weft
