// Ranges of numbers, and how they are cut.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
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

// If 0 .. count - 1 is cut into `parts` parts whose sizes differ by one at most: where part i begins. This is count i /
// parts, computed without that product, which could overflow.
inline std::int64_t even_border(std::int64_t count, std::int64_t parts, std::int64_t i) {
  return count / parts * i + count % parts * i / parts;
}

inline std::int64_t longest_of(std::span<const Range> parts) {
  std::int64_t longest = 0;
  for (const Range& part : parts) longest = std::max(longest, part.size());
  return longest;
}
// At most `piece` numbers of each part, from its `first`-th on: for parts that are moved a piece at a time.
inline std::vector<Range> pieces_of(std::span<const Range> parts, std::int64_t first, std::int64_t piece) {
  std::vector<Range> pieces;
  for (const Range& part : parts) pieces.push_back(common(part, {part.begin + first, part.begin + first + piece}));
  return pieces;
}

// Ranges in ascending order whose elements are stored one after the other in one array.
class PackedRanges {
 public:
  explicit PackedRanges(std::vector<Range> ranges) : ranges_(std::move(ranges)) {
    for (const Range& range : ranges_) {
      begins_.push_back(size_);
      size_ += range.size();
    }
  }
  const std::vector<Range>& ranges() const { return ranges_; }
  std::int64_t begin_of(std::size_t range) const { return begins_[range]; }
  std::int64_t size() const { return size_; }
  // The place in that array of a number that one of the ranges contains.
  std::int64_t position_of(std::int64_t number) const {
    const auto behind = [](std::int64_t value, const Range& range) { return value < range.begin; };
    const auto next = std::upper_bound(ranges_.begin(), ranges_.end(), number, behind);
    const auto found = static_cast<std::size_t>(next - ranges_.begin()) - 1;
    return begins_[found] + number - ranges_[found].begin;
  }

 private:
  std::vector<Range> ranges_;
  std::vector<std::int64_t> begins_;
  std::int64_t size_ = 0;
};

}  // namespace weft
