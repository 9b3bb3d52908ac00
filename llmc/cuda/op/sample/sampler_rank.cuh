// Ranks of ids: an id's rank is one 64-bit number that orders by logit and, among equal logits, by lower id.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace weft::cuda::sampler_detail {

// Orders like the logit; -0 and +0 are equal.
__device__ inline std::uint32_t ordered_key(float logit) {
  std::uint32_t bits = __float_as_uint(logit);
  if (bits == 0x80000000u) bits = 0;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ inline float logit_of(std::uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7FFFFFFFu : ~key);
}
__device__ inline std::uint64_t rank_of(float logit, std::int32_t id) {
  return static_cast<std::uint64_t>(ordered_key(logit)) << 32 | (0xFFFFFFFFu - static_cast<std::uint32_t>(id));
}
__device__ inline std::int32_t id_of(std::uint64_t rank) {
  return static_cast<std::int32_t>(0xFFFFFFFFu - static_cast<std::uint32_t>(rank));
}

}  // namespace weft::cuda::sampler_detail
