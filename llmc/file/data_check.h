// One pass over a tensor's bytes that finds out whether they are what was written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "llmc/base/dtype.h"
#include "llmc/base/hash.h"

namespace weft {

// Hashes a tensor's data and, if `finite`, finds the first value that is not finite. Each piece is hashed and searched
// while it is in the cache, so that memory is read once.
class DataCheck {
 public:
  static constexpr std::size_t kCachePiece = 1 << 17;

  DataCheck(std::span<const std::byte> data, DType dtype, bool finite) : data_(data), dtype_(dtype), finite_(finite) {}

  // Processes bytes [begin, end). The calls cover the data in order and without gaps.
  void process(std::size_t begin, std::size_t end) {
    for (; begin < end; begin += kCachePiece) {
      const std::size_t size = std::min(kCachePiece, end - begin);
      stream_.update(data_.data() + begin, size);
      if (finite_ && !first_) find_not_finite(begin, size);
    }
  }
  std::uint64_t hash() const { return stream_.digest(); }
  std::optional<std::size_t> first_not_finite() const { return first_; }

 private:
  // A float is not finite when all bits of its exponent are set.
  template <typename Word>
  void find(std::size_t begin, std::size_t size, Word exponent) {
    const std::size_t count = size / sizeof(Word);
    const auto at = [&](std::size_t i) {
      Word word;
      std::memcpy(&word, data_.data() + begin + i * sizeof word, sizeof word);
      return word;
    };
    // Without a branch, so that the compiler vectorises it; the position is searched for only if there is one.
    bool any = false;
    for (std::size_t i = 0; i < count; ++i) any |= (at(i) & exponent) == exponent;
    for (std::size_t i = 0; any && !first_; ++i) {
      if ((at(i) & exponent) == exponent) first_ = begin / sizeof(Word) + i;
    }
  }
  void find_not_finite(std::size_t begin, std::size_t size) {
    if (dtype_ == DType::f32) find<std::uint32_t>(begin, size, 0x7F800000);
    if (dtype_ == DType::bf16) find<std::uint16_t>(begin, size, 0x7F80);
    if (dtype_ == DType::f16) find<std::uint16_t>(begin, size, 0x7C00);
  }

  std::span<const std::byte> data_;
  DType dtype_;
  bool finite_;
  Xxh3Stream stream_;
  std::optional<std::size_t> first_;
};

}  // namespace weft
