// Upper limits of a model's sizes, so that a hostile file cannot make a program allocate or loop without end: far above
// any model that weft is meant for (SECURITY.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

inline constexpr std::int64_t kMaxVocab = 1'000'000;
inline constexpr std::int64_t kMaxLayers = 1024;
inline constexpr std::int64_t kMaxWidth = 1 << 20;  // hidden and FFN
inline constexpr std::int64_t kMaxHeads = 1024;
inline constexpr std::int64_t kMaxHeadDim = 1024;
inline constexpr std::int64_t kMaxPositions = 1 << 24;
inline constexpr std::size_t kMaxEosIds = 64;

}  // namespace weft
