// Slots of keys or values in e4m3 (paged_work_units.cuh) and their products with 16-bit fragments. Codes lie in the slot as in
// the page (kv_fp8.h), half of the bytes of 16 bits: units of 16 positions, in which each lane has what it multiplies. It is
// loaded as it lies, without ldmatrix, padding or conflicts of banks, and widened in registers. The sums have the order that
// they have over 16 bits.
#pragma once

#include <cstdint>

#include "llmc/cuda/op/attention/paged/kv_codes.cuh"
#include "llmc/cuda/op/attention/paged/paged_recurrence.cuh"

namespace weft::cuda::paged {

static_assert(kPageUnit == kKvUnit);

// A key block: its units, then the scales of all.
template <int HS>
struct CodeSlot {
  static constexpr int kKeys = kBlockKeys<HS>, kUnits = kKeys / kPageUnit, kUnitBytes = kPageUnit * HS;
  static constexpr int kScales = kKeys * HS, kBytes = kScales + kKeys;
  // One load of a lane: `kGroups` groups of 16 dimensions, of each two words: of keys those of the unit's first and last eight
  // keys, of values those of both halves of the sum over keys.
  static constexpr int kGroups = HS / 16 % 2 == 0 ? 2 : 1, kLoads = HS / 16 / kGroups, kLoadBytes = kGroups * 8;

  struct Words {
    unsigned word[kGroups][2];
  };
  static __device__ Words load(unsigned slot, int unit, int i) {
    const unsigned at = slot + unit * kUnitBytes + (i * kWarpSize + threadIdx.x % kWarpSize) * kLoadBytes;
    Words words;
    if constexpr (kGroups == 2) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words.word[0][0]), "=r"(words.word[0][1]), "=r"(words.word[1][0]), "=r"(words.word[1][1])
                   : "r"(at)
                   : "memory");
    } else {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(words.word[0][0]), "=r"(words.word[0][1])
                   : "r"(at)
                   : "memory");
    }
    return words;
  }
};

// Starts a warp's copy of the units of kPageUnit positions from `first` on that have one in [begin, end); of the others the
// slot keeps what it has.
template <int HS, typename S>
__device__ __forceinline__ void load_codes(const Arguments<S>& a, bool of_keys, unsigned slot, int pages, int kv_head,
                                           int first, int begin, int end, std::uint64_t policy) {
  using Slot = CodeSlot<HS>;
  const int lane = threadIdx.x % kWarpSize;
  const std::uint8_t* const codes = of_keys ? a.codes.keys : a.codes.values;
  const std::uint8_t* const scales = of_keys ? a.codes.key_scales : a.codes.value_scales;
#pragma unroll
  for (int unit = 0; unit < Slot::kUnits; ++unit) {
    const int position = first + unit * kPageUnit;
    const int page = __shfl_sync(~0u, pages, position % kSpan / kPageUnit);
    if (position >= end || position + kPageUnit <= begin) continue;
    const std::int64_t row = page_offset<1>(a, page, kv_head, position);
#pragma unroll
    for (int i = 0; i < ceil_div(HS, kWarpSize); ++i) {  // HS chunks of 16 bytes
      const int chunk = lane + i * kWarpSize;
      if (HS % kWarpSize != 0 && chunk >= HS) break;
      copy_async(slot + unit * Slot::kUnitBytes + chunk * 16, codes + row * HS + chunk * 16, true, policy);
    }
    if (lane == 0) copy_async(slot + Slot::kScales + unit * kPageUnit, scales + row, true, policy);
  }
}

// Scores of a key block += Q K^T. Two units at a time, so that no mma waits for the one before it.
template <typename S, int HS, int N>
__device__ __forceinline__ void multiply_by_key_codes(Accumulators<1, N>& scores, const RegisterOperand<S, HS, 1>& Q,
                                                      unsigned slot) {
  using Slot = CodeSlot<HS>;
  constexpr int kTogether = Slot::kUnits % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int first = 0; first < Slot::kUnits; first += kTogether) {
    unsigned power[2 * kTogether];  // of key `lane / 4` of 8
#pragma unroll
    for (int tile = 0; tile < 2 * kTogether; ++tile) {
      unsigned scale;
      const unsigned key = first * kPageUnit + tile * 8 + threadIdx.x % kWarpSize / 4;
      asm volatile("ld.shared.u8 %0, [%1];" : "=r"(scale) : "r"(slot + Slot::kScales + key) : "memory");
      power[tile] = kv_power<S>(scale);
    }
#pragma unroll
    for (int i = 0; i < Slot::kLoads; ++i) {
      typename Slot::Words words[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) words[u] = Slot::load(slot, first + u, i);
#pragma unroll
      for (int g = 0; g < Slot::kGroups; ++g) {
#pragma unroll
        for (int tile = 0; tile < 2 * kTogether; ++tile) {
          const WidePairs wide = widen<S>(words[tile / 2].word[g][tile % 2], power[tile]);
          multiply_add<S>(scores.at[0][first * 2 + tile], Q.at[0][i * Slot::kGroups + g], wide.first, wide.second);
        }
      }
    }
  }
}

// O += P V of a key block. Rows outside of [begin, end) count as zeros, whatever the slot has there.
template <typename S, int HS, int N, int KN>
__device__ __forceinline__ void multiply_by_value_codes(Accumulators<1, N>& O, const Accumulators<1, KN>& weights,
                                                        unsigned slot, int begin, int end) {
  using Slot = CodeSlot<HS>;
#pragma unroll
  for (int unit = 0; unit < Slot::kUnits; ++unit) {
    unsigned power[2];  // of keys 2t and 2t + 1 of the first and of the last eight
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned scales;
      const int key = unit * kPageUnit + half * 8 + static_cast<int>(threadIdx.x % 4) * 2;
      asm volatile("ld.shared.u16 %0, [%1];" : "=r"(scales) : "r"(slot + Slot::kScales + key) : "memory");
      const unsigned one = key >= begin && key < end ? kv_power<S>(scales & 0xff) : 0,
                     next = key + 1 >= begin && key + 1 < end ? kv_power<S>(scales >> 8) : 0;
      power[half] = __byte_perm(one, next, 0x7610);
    }
    const Fragment rows = as_operand<S>(weights, 0, unit);
#pragma unroll
    for (int i = 0; i < Slot::kLoads; ++i) {
      const typename Slot::Words words = Slot::load(slot, unit, i);
#pragma unroll
      for (int g = 0; g < Slot::kGroups; ++g) {
        const int n = (i * Slot::kGroups + g) * 2;
        const WidePairs earlier = widen<S>(words.word[g][0], power[0]), later = widen<S>(words.word[g][1], power[1]);
        multiply_add<S>(O.at[0][n], rows, earlier.first, later.first);
        multiply_add<S>(O.at[0][n + 1], rows, earlier.second, later.second);
      }
    }
  }
}

}  // namespace weft::cuda::paged
