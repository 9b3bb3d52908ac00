#include "llmc/infer/lookup.h"

#include <algorithm>

namespace weft {

std::span<const std::int32_t> Lookup::find(std::span<const std::int32_t> ids, std::int64_t count) {
  found_.clear();
  const std::int64_t size = std::ssize(ids);
  const auto at = [&](std::int64_t i) { return ids[static_cast<std::size_t>(i)]; };
  for (std::int64_t i = std::ssize(previous_); i < size; ++i) {
    previous_.push_back(-1);
    if (i == 0) continue;
    const std::uint64_t pair =
        static_cast<std::uint64_t>(static_cast<std::uint32_t>(at(i - 1))) << 32 | static_cast<std::uint32_t>(at(i));
    const auto [entry, is_new] = last_.try_emplace(pair, i);
    if (is_new) continue;
    previous_.back() = entry->second;
    entry->second = i;
  }
  if (size < kFewestSame || count < 1) return {};
  std::int64_t best = -1, longest = kFewestSame - 1;
  std::int64_t end = previous_[static_cast<std::size_t>(size - 1)];
  for (int places = 0; end >= 0 && places < kMostPlaces && longest < kMostSame; ++places) {
    std::int64_t same = kFewestSame;
    while (same < kMostSame && same <= end && at(end - same) == at(size - 1 - same)) ++same;
    if (same > longest) {
      longest = same;
      best = end;
    }
    end = previous_[static_cast<std::size_t>(end)];
  }
  if (best < 0) return {};
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t from = best + 1 + i;
    found_.push_back(from < size ? at(from) : found_[static_cast<std::size_t>(from - size)]);
  }
  return found_;
}

}  // namespace weft
