// A part of something that is numbered.
#pragma once

#include <algorithm>
#include <cstdint>

namespace weft {

// The numbers from `begin` to `end` - 1.
struct Range {
  std::int64_t begin = 0, end = 0;

  std::int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

// What both contain; empty where they do not meet.
inline Range common(const Range& a, const Range& b) {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

}  // namespace weft
