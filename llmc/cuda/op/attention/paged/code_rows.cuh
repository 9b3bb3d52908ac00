// A row of keys or values in e4m3 (llmc/base/kv_fp8.h) from 16 bits, by a warp: its scale, its codes, and what a reader of them
// has. A lane has words lane, lane + 32, ... of the row, as in WarpRotation; lanes without a word have one of another lane.
#pragma once

#include <cstdint>

#include "llmc/cuda/hw/fragments.cuh"
#include "llmc/cuda/op/attention/paged/kv_codes.cuh"
#include "llmc/cuda/op/elementwise/rotate_pair.cuh"

namespace weft::cuda {

// The scale of a row; called by all lanes.
template <typename S, int kWords>
__device__ inline unsigned scale_of(const unsigned (&words)[kWords]) {
  unsigned amax = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const float2 values = unpack<S>(words[i]);
    amax = max(amax, max(__float_as_uint(values.x) & 0x7FFFFFFFu, __float_as_uint(values.y) & 0x7FFFFFFFu));
  }
  return kv_scale(__reduce_max_sync(~0u, amax));
}

// The codes of a word's elements.
template <typename S>
__device__ inline uint2 codes_of(unsigned word, unsigned scale) {
  const float2 values = unpack<S>(word);
  const float inverse = __uint_as_float(kv_inverse_bits(scale));
  return {kv_code(__float_as_uint(values.x * inverse)), kv_code(__float_as_uint(values.y * inverse))};
}

// The word that a reader of the codes has; with the same scale it has the same codes.
template <typename S>
__device__ inline unsigned as_stored(unsigned word, unsigned scale) {
  const uint2 codes = codes_of<S>(word, scale);
  return widen<S>(kv_pair(codes.x, 0) | kv_pair(codes.y, 0) << 16, kv_power<S>(scale)).first;
}

// Writes a row as row `row` of `to`; called by all lanes.
template <typename S, int HS>
__device__ inline void store_codes(KvKind kind, const unsigned (&words)[WarpRotation<S, HS>::kWords], unsigned scale,
                                   std::int64_t row, const KvCodes& to) {
  using Rotation = WarpRotation<S, HS>;
  const bool keys = kind == KvKind::key;
  if (threadIdx.x % kWarpSize == 0) (keys ? to.key_scales : to.value_scales)[row] = static_cast<std::uint8_t>(scale);
  const std::int64_t p = row % kKvUnit;
  std::uint16_t* const pairs = reinterpret_cast<std::uint16_t*>((keys ? to.keys : to.values) + (row - p) * HS);
#pragma unroll
  for (int i = 0; i < Rotation::kWords; ++i) {
    const auto [low, high] = codes_of<S>(words[i], scale);
    // Four lanes further are the dimensions that share 16 bits with these.
    const unsigned above = __shfl_down_sync(~0u, low | high << 8, 4);
    const int d = 2 * Rotation::word(i);
    if (d >= HS || d % 16 >= 8) continue;
    const unsigned first = kv_pair(low, above & 0xff), second = kv_pair(high, above >> 8);
    std::uint16_t* const at = pairs + kv_pair_index(kind, p, d, HS);
    if (keys) {
      *reinterpret_cast<unsigned*>(at) = first | second << 16;
    } else {
      *at = static_cast<std::uint16_t>(first);
      pairs[kv_pair_index(kind, p, d + 1, HS)] = static_cast<std::uint16_t>(second);
    }
  }
}

}  // namespace weft::cuda
