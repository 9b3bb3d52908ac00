// GEMV over the chunks of the ring with quantised weights, on tensor cores (PTX ISA, "Matrix Fragments for mma.m16n8k32").
// Formats of integers go through the integer mma.m16n8k32. The weights are operand A, as stored or after one mask for 8 of them.
// Operand B holds the activations in fixed point: each warp scales its fp32 activations by a power of two, so that the
// largest becomes a 31-bit integer, and splits each integer into four signed 8-bit digits. A column of B is one digit of
// the activations. Sums of digits times weights are exact in int32; they are scaled and added in fp32. So the result is as
// exact as fp32 activations times the weights would be, without unpacking weights to floats.
//
// Formats of floats (kIntegers false) go through mma.m16n8k16: the weights become fp16, exactly, and the activations are
// three fp16 digits of 11 bits relative to the largest. Products are exact, sums are fp32.
//
// Four digits (of floats three and zeros) fill half of the 8 columns; the other half serves another part of K. Rows g and
// g + 8 of A are both weight row g, over the two parts of K; columns 0 to 3 of B are the digits of the first part,
// columns 4 to 7 those of the second. Wanted are the sums of row g with columns 0 to 3 and of row g + 8 with columns 4
// to 7; the others are discarded. A tile therefore has 8 rows of weights, not 16. With 8 bits the parts are pieces of 16
// in a group: of the four words w0 w1 w2 w3 that a lane loads from weight row g, the mma takes w0 and w2 as row g of A,
// w1 and w3 as row g + 8.
//
// With 4 bits the parts are the warp's two groups, so that a lane has sums of one group, and scales them once for a tile.
// How high and low halves of a byte are multiplied: int4.cuh.
#pragma once

#include <type_traits>

#include "llmc/cuda/fused/consumer.cuh"
#include "llmc/cuda/fused/packed_tiles.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

__device__ __forceinline__ unsigned load_shared_word(unsigned address) {
  unsigned value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ void store_shared(unsigned address, unsigned x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared(unsigned address, unsigned x, unsigned y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

// The sums of one tile or three over the four lanes that share a row: lane t gets that of tile t.
template <int kTiles>
__device__ __forceinline__ float sum_of_tile(const float (&v)[kTiles], int t) {
  static_assert(kTiles == 1 || kTiles == 3);
  const auto sum_of_pair = [](float even, float odd, bool takes_odd, int offset) {
    return (takes_odd ? odd : even) + __shfl_xor_sync(~0u, takes_odd ? even : odd, offset);
  };
  if constexpr (kTiles == 1) {
    const float sum = v[0] + __shfl_xor_sync(~0u, v[0], 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  } else {
    const bool odd = t % 2 == 1;
    return sum_of_pair(sum_of_pair(v[0], v[1], odd, 1), sum_of_pair(v[2], 0.0f, odd, 1), t >= 2, 2);
  }
}

// mma for one tile and all K of a load of the warp; each takes two words of B a lane.
template <typename Format>
constexpr int kFragments = Format::kIntegers ? 4 : 8;
static_assert(kWarpGroups == 2);  // the two parts of K with 4 bits
// The digits of one band of activations (packed_tiles.cuh), as this lane's B fragments.
template <typename K>
template <typename Format, int kLoads>
struct Consumer<K>::Digits {
  unsigned b[kLoads][kFragments<Format>][2];
  int sums[kLoads];  // with groups: Format::sum_of_group() of the lane's group
  float scale;       // factor from the sum over this lane's two digits to activations
};

// Splits this warp's activations into digits and distributes them to its lanes as B fragments, through shared memory.
// If any is infinite or NaN, all sums of the warp become NaN.
template <typename K>
template <typename Format, int kLoads>
__device__ __forceinline__ void Consumer<K>::make_digits(Digits<Format, kLoads>& d, const float* x) const {
  constexpr bool kNibbles = Format::kBits == 4;
  // |x| < 2^(exponent - 126) for the largest biased exponent, which is scaled to 2^kDigitBits.
  constexpr unsigned kUp = 127 + 126 + Format::kDigitBits;
  unsigned most = 0;
#pragma unroll
  for (int j = 0; j < kLoads * kLaneElements; ++j) most = max(most, __float_as_uint(x[j]) & 0x7fffffffu);
  const unsigned exponent = max(__reduce_max_sync(~0u, most) >> 23, 32u);
  const float up = __uint_as_float((kUp - exponent) << 23);
  const int column = lane / 4, t = lane % 4;
  d.scale = exponent == 255 ? __uint_as_float(0x7fffffffu) : __uint_as_float((exponent + 254 - kUp) << 23);
  if constexpr (Format::kIntegers) {
    if (t % 2 == 1) d.scale *= 65536.0f;
    if (kNibbles) d.scale *= 0.0625f;  // the digits are of 16 times the activations
  } else if (t % 2 == 1) {
    d.scale *= 0x1p-22f;
  }
  const unsigned planes = shared_address(shared) + at.digits + warp * kDigitBytes;
  const unsigned from = planes + column % 4 * kDigitPlane;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const float* const own = x + i * kLaneElements;
    if constexpr (Format::kIntegers) {
      unsigned plane[4][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned v[4];  // four signed digits in the bytes of a word, the least significant in the lowest byte
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          v[j] = (Format::fixed_point(own, half, j, up) + 0x80808080u) ^ 0x80808080u;
        }
        const unsigned low01 = __byte_perm(v[0], v[1], 0x5140), high01 = __byte_perm(v[0], v[1], 0x7362),
                       low23 = __byte_perm(v[2], v[3], 0x5140), high23 = __byte_perm(v[2], v[3], 0x7362);
        plane[0][half] = __byte_perm(low01, low23, 0x5410);
        plane[1][half] = __byte_perm(low01, low23, 0x7632);
        plane[2][half] = __byte_perm(high01, high23, 0x5410);
        plane[3][half] = __byte_perm(high01, high23, 0x7632);
      }
      __syncwarp();  // the digits of the previous load have been read
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if constexpr (kNibbles) {  // of two lanes, the words of half 0 before those of half 1: neighbours for mma
          const unsigned to = planes + n * kDigitPlane + lane / 2 * 16 + lane % 2 * 4;
          store_shared(to, plane[n][0]);
          store_shared(to + 8, plane[n][1]);
        } else {
          store_shared(planes + n * kDigitPlane + 8 * lane, plane[n][0], plane[n][1]);
        }
      }
      __syncwarp();
      if constexpr (kNibbles) {  // of the group of this lane's column
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 words = load_shared(from + column / 4 * 128 + 32 * t + 16 * half);
          d.b[i][2 * half][0] = words.x, d.b[i][2 * half][1] = words.y;
          d.b[i][2 * half + 1][0] = words.z, d.b[i][2 * half + 1][1] = words.w;
        }
      } else {
#pragma unroll
        for (int f = 0; f < kFragments<Format>; ++f) {
          const unsigned word = from + f / 2 * 128 + 32 * t + 16 * (f % 2) + (column >= 4 ? 4 : 0);
          d.b[i][f][0] = load_shared_word(word);
          d.b[i][f][1] = load_shared_word(word + 8);
        }
      }
    } else {
      unsigned plane[3][4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        float rest[2] = {own[2 * pair] * up, own[2 * pair + 1] * up};
#pragma unroll
        for (int n = 0; n < 3; ++n) {
          const __half2 digit = __floats2half2_rn(rest[0], rest[1]);
          plane[n][pair] = *reinterpret_cast<const unsigned*>(&digit);
          rest[0] = (rest[0] - __low2float(digit)) * 2048.0f;
          rest[1] = (rest[1] - __high2float(digit)) * 2048.0f;
        }
      }
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) {
        __syncwarp();
        if (lane / 16 == group) {
          const unsigned to = planes + lane % 16 * 16;
#pragma unroll
          for (int n = 0; n < 3; ++n) {
            store_shared(to + n * kDigitPlane, make_uint4(plane[n][0], plane[n][1], plane[n][2], plane[n][3]));
          }
          store_shared(to + 3 * kDigitPlane, make_uint4(0, 0, 0, 0));
        }
        __syncwarp();
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const unsigned word = from + 64 * t + 16 * s + (column >= 4 ? 4 : 0);
          d.b[i][4 * group + s][0] = load_shared_word(word);
          d.b[i][4 * group + s][1] = load_shared_word(word + 8);
        }
      }
    }
    if constexpr (Format::kGrouped) d.sums[i] = Format::sum_of_group(d.b[i]);
  }
}

// Partial sums of `rows` rows (at most partial_rows) over one band of activations of `groups` groups of K; the last
// band may have fewer than the others. `accumulate`: added to the sums that are there.
template <typename K>
template <typename Format, int kLoads>
__device__ __forceinline__ void Consumer<K>::multiply_band(int rows, int groups, const Digits<Format, kLoads>& x,
                                                           bool accumulate) {
  constexpr int kTiles = Format::kTiles, kSetRows = fused::kSetRows<Format>;
  const Parameters& p = c.p;
  const int g = lane / 4, t = lane % 4, stage_rows = kSetRows * p.warps_r, load_groups = kWarpGroups * p.warps_k;
  groups = stored_groups<Format>(groups);
  float* partial =
      reinterpret_cast<float*>(shared + at.partials) + (partial_buffer * p.warps_k + warp_k) * p.partial_rows;
  for (int first = 0; first < rows; first += stage_rows) {
    const int begin = first + warp_r * kSetRows, own_rows = max(0, min(kSetRows, rows - begin));
    // independent accumulators, so that the mma overlap
    std::conditional_t<Format::kIntegers, int, float> sums[kTiles][kWarpGroups][4] = {};
    float scaled[kTiles] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int here = min(groups - i * load_groups, load_groups);  // groups of K in this stage
      if (here <= 0) continue;
      const unsigned set = begin_chunk() + warp_r * (kSetRows * kGroupBytes<Format>)*here;
      // Rows and groups of K that the stage does not have are stale numbers, but finite ones: sums of such rows are
      // discarded, and the digits of such groups are 0. Where the numbers are floats they might be NaN: a scale is that
      // of the last group, and weights that are floats are not loaded.
      constexpr int kGroupLoads = kGroupPieces<Format>;
      const unsigned piece_bytes = own_rows * kPieceBytes,
                     own_pieces = set + warp_k * (kWarpGroups * kGroupLoads) * piece_bytes + g * kPieceBytes + t * 16;
      uint4 w[kTiles][kWarpGroups][kGroupLoads];
      [[maybe_unused]] unsigned words[kTiles];  // scale and zero of this lane's group
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int group = 0; group < kWarpGroups; ++group) {
          const bool mine =
              Format::kIntegers || (tile * kTileRows + g < own_rows && warp_k * kWarpGroups + group < here);
#pragma unroll
          for (int n = 0; n < kGroupLoads; ++n) {
            w[tile][group][n] = make_uint4(0, 0, 0, 0);
            const unsigned piece = own_pieces + (kGroupLoads * group + n) * piece_bytes;
            if (mine) w[tile][group][n] = load_shared(piece + tile * (kTileRows * kPieceBytes));
          }
        }
        if constexpr (Format::kGrouped) {
          const int word = min(warp_k * kWarpGroups + t / 2, here - 1) * own_rows + g;
          words[tile] = load_shared_word(set + here * piece_bytes + word * 4 + tile * (kTileRows * 4));
        }
      }
      end_chunk();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const auto multiply = [&](int group, auto& c) {
          Format::multiply(c, w[tile][group], x.b[i] + group * (kFragments<Format> / kWarpGroups));
        };
        if constexpr (Format::kGrouped) {
          int each[4] = {};
#pragma unroll
          for (int group = 0; group < kWarpGroups; ++group) multiply(group, each);
          const int low = t < 2 ? each[0] : each[2], high = t < 2 ? each[1] : each[3];
          const int zero = static_cast<int>(words[tile] >> 16);
          const float scale = __half2float(__ushort_as_half(static_cast<unsigned short>(words[tile])));
          scaled[tile] = fmaf(static_cast<float>(low + 256 * high - zero * x.sums[i]), scale, scaled[tile]);
        } else {
#pragma unroll
          for (int group = 0; group < kWarpGroups; ++group) multiply(group, sums[tile][group]);
        }
      }
    }
    float of_tile[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float sum = scaled[tile];
      if constexpr (!Format::kGrouped) {
        const auto& s = sums[tile];
        const auto low = t < 2 ? s[0][0] + s[1][0] : s[0][2] + s[1][2];
        const auto high = t < 2 ? s[0][1] + s[1][1] : s[0][3] + s[1][3];
        constexpr float kDigit = Format::kIntegers ? 256.0f : 0x1p-11f;
        sum = fmaf(static_cast<float>(high), kDigit, static_cast<float>(low));
      }
      of_tile[tile] = sum * x.scale;
    }
    const int tile = kTiles == 1 ? 0 : t, row = tile * kTileRows + g;
    const float sum = sum_of_tile(of_tile, t);
    if (t < kTiles && row < own_rows) {
      float& place = partial[begin + row];
      place = accumulate ? place + sum : sum;
    }
  }
}

// Partial sums of `rows` rows of `size` elements over this thread's part of `input`, band by band. With several bands,
// `input` is overwritten.
template <typename K>
template <typename Format, int kLoads>
__device__ __forceinline__ void Consumer<K>::multiply_stream(int rows, int size, float (&input)[kLoads * kLaneElements],
                                                             bool accumulate) {
  constexpr int kBand = kLoads == kRowLoads ? kRowLoads : down_loads(kRowLoads, K::kSequential);
  const int band_groups = kBand * kWarpGroups * c.p.warps_k;
#pragma unroll 1
  for (int groups = groups_of(size); groups > 0; groups -= band_groups) {
    Digits<Format, kBand> digits;
    make_digits(digits, input);
    multiply_band(rows, groups, digits, accumulate);
    accumulate = true;
    if constexpr (kLoads > kBand) {  // registers cannot be indexed at run time: move the next band to the front
#pragma unroll
      for (int j = kBand * kLaneElements; j < kLoads * kLaneElements; ++j) input[j - kBand * kLaneElements] = input[j];
    } else {
      break;
    }
  }
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
