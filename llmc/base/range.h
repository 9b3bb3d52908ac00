// A part of something that is numbered.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

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

// Where part i of `parts` parts of 0 .. count - 1 begins whose sizes differ by one at most: count i / parts, without that
// product.
inline std::int64_t even_border(std::int64_t count, std::int64_t parts, std::int64_t i) {
  return count / parts * i + count % parts * i / parts;
}

inline std::int64_t longest_of(std::span<const Range> parts) {
  std::int64_t longest = 0;
  for (const Range& part : parts) longest = std::max(longest, part.size());
  return longest;
}
// Of each part its numbers from the `first`-th on, `piece` at most: parts that are moved a piece at a time.
inline std::vector<Range> pieces_of(std::span<const Range> parts, std::int64_t first, std::int64_t piece) {
  std::vector<Range> pieces;
  for (const Range& part : parts) pieces.push_back(common(part, {part.begin + first, part.begin + first + piece}));
  return pieces;
}

}  // namespace weft
