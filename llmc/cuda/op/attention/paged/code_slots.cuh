// Slots of keys or values in e4m3 (paged_work_units.cuh) and their products with 16-bit fragments. Codes lie in the slot as in
// the page, half of the bytes of 16 bits; ldmatrix brings them to registers as pairs of bytes, and there they are widened.
//
// A 32-bit word of a row's codes has dimensions j, j + 8, j + 1, j + 9 of 16 (kv_index()). Of keys a lane 4 g + t gets the word of
// key g with j = 2t: its lower pair and its upper pair are both registers of operand B. Of values the transposed load gives
// keys 2t and 2t + 1, each with dimensions g and g + 8: the lower pair is of the n8 tile of the first 8 dimensions, the upper
// pair of the next one. So the sums have the order that they have over 16 bits.
#pragma once

#include <cstdint>

#include "llmc/cuda/op/attention/paged/kv_codes.cuh"
#include "llmc/cuda/op/attention/paged/paged_recurrence.cuh"

namespace weft::cuda::paged {

// Positions in a slot of a warp's ring.
template <int HS>
constexpr int kSlotKeys = HS <= 128 ? 32 : 16;

// kSlotKeys rows of codes, then their scales. A row is padded to an odd number of 16-byte chunks, as in Tile.
template <int HS>
struct CodeSlot {
  static constexpr int kKeys = kSlotKeys<HS>, kChunks = HS / 16, kRowBytes = (kChunks | 1) * 16;
  static constexpr int kScales = kKeys * kRowBytes, kBytes = kScales + kKeys;
  // One load_matrices(): matrix m has the keys of tile m % kTiles, of 8, in chunk m / kTiles of kChunksAtOnce.
  static constexpr int kTiles = kKeys / 8, kChunksAtOnce = 4 / kTiles, kLoads = kChunks / kChunksAtOnce;
  static_assert(kChunks % kChunksAtOnce == 0);

  static __device__ unsigned lane_address(unsigned slot) {
    return slot + threadIdx.x % kKeys * kRowBytes + threadIdx.x % kWarpSize / kKeys * 16;
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
  for (int unit = 0; unit < kSlotKeys<HS> / kPageUnit; ++unit) {
    const int position = first + unit * kPageUnit;
    const int page = __shfl_sync(~0u, pages, position % kSplit / kPageUnit);
    if (position >= end || position + kPageUnit <= begin) continue;
    const std::int64_t row = page_offset<1>(a, page, kv_head, position);
#pragma unroll
    for (int i = 0; i < ceil_div(HS, kWarpSize); ++i) {  // kPageUnit rows of HS bytes are HS chunks of 16
      const int chunk = lane + i * kWarpSize;
      if (HS % kWarpSize != 0 && chunk >= HS) break;
      const unsigned to =
          slot + (unit * kPageUnit + chunk / Slot::kChunks) * Slot::kRowBytes + chunk % Slot::kChunks * 16;
      copy_async(to, codes + row * HS + chunk * 16, true, policy);
    }
    if (lane == 0) copy_async(slot + Slot::kScales + unit * kPageUnit, scales + row, true, policy);
  }
}

// Scores of part `Part` of a key block, one slot, += Q K^T.
template <typename S, int HS, int Part, int N>
__device__ __forceinline__ void multiply_by_key_codes(Accumulators<1, N>& scores, const RegisterOperand<S, HS, 1>& Q,
                                                      unsigned slot) {
  using Slot = CodeSlot<HS>;
  unsigned power[Slot::kTiles];
#pragma unroll
  for (int tile = 0; tile < Slot::kTiles; ++tile) {
    unsigned scale;
    const unsigned key = tile * 8 + threadIdx.x % kWarpSize / 4;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(scale) : "r"(slot + Slot::kScales + key) : "memory");
    power[tile] = kv_power<S>(scale);
  }
  const unsigned at = Slot::lane_address(slot);
  Fragment next = load_matrices(at);
#pragma unroll
  for (int i = 0; i < Slot::kLoads; ++i) {
    const Fragment codes = next;
    if (i + 1 < Slot::kLoads) next = load_matrices(at + (i + 1) * Slot::kChunksAtOnce * 16);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int tile = m % Slot::kTiles;
      const WidePairs wide = widen<S>(codes.word[m], power[tile]);
      multiply_add<S>(scores.at[0][Part * Slot::kTiles + tile], Q.at[0][i * Slot::kChunksAtOnce + m / Slot::kTiles],
                      wide.lower, wide.upper);
    }
  }
}

// O += P V of part `Part` of a key block, one slot. Rows outside of [begin, end) count as zeros, whatever the slot has there.
template <typename S, int HS, int Part, int N, int KN>
__device__ __forceinline__ void multiply_by_value_codes(Accumulators<1, N>& O, const Accumulators<1, KN>& weights,
                                                        unsigned slot, int begin, int end) {
  using Slot = CodeSlot<HS>;
  unsigned power[Slot::kTiles];  // of keys 2t and 2t + 1 of a tile
#pragma unroll
  for (int tile = 0; tile < Slot::kTiles; ++tile) {
    unsigned scales;
    const int key = tile * 8 + static_cast<int>(threadIdx.x % 4) * 2;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(scales) : "r"(slot + Slot::kScales + key) : "memory");
    const unsigned first = key >= begin && key < end ? kv_power<S>(scales & 0xff) : 0,
                   second = key + 1 >= begin && key + 1 < end ? kv_power<S>(scales >> 8) : 0;
    power[tile] = __byte_perm(first, second, 0x7610);
  }
  Fragment rows[Slot::kTiles / 2];
#pragma unroll
  for (int k = 0; k < Slot::kTiles / 2; ++k) rows[k] = as_operand<S>(weights, 0, Part * Slot::kTiles / 2 + k);
  const unsigned at = Slot::lane_address(slot);
  Fragment next = load_matrices_transposed(at);
#pragma unroll
  for (int i = 0; i < Slot::kLoads; ++i) {
    const Fragment codes = next;
    if (i + 1 < Slot::kLoads) next = load_matrices_transposed(at + (i + 1) * Slot::kChunksAtOnce * 16);
#pragma unroll
    for (int m = 0; m < 4; m += 2) {
      const int tile = m % Slot::kTiles, n = (i * Slot::kChunksAtOnce + m / Slot::kTiles) * 2;
      const WidePairs earlier = widen<S>(codes.word[m], power[tile]),
                      later = widen<S>(codes.word[m + 1], power[tile + 1]);
      multiply_add<S>(O.at[0][n], rows[tile / 2], earlier.lower, later.lower);
      multiply_add<S>(O.at[0][n + 1], rows[tile / 2], earlier.upper, later.upper);
    }
  }
}

}  // namespace weft::cuda::paged
