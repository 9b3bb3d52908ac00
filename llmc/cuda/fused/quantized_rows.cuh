// GEMV over the chunks of the ring with weights in int8, int4 or fp8, on tensor cores (PTX ISA, "Matrix Fragments for
// mma.m16n8k32"). int8 and int4 go through the integer mma.m16n8k32. The weights are operand A, as stored (int8) or
// after one mask for 8 of them (int4). Operand B holds the activations in fixed point: each warp scales its fp32
// activations by a power of two, so that the largest becomes a 31-bit integer, and splits each integer into four signed
// 8-bit digits. A column of B is one digit of the activations. Sums of digits times weights are exact in int32; they are
// scaled and added in fp32. So the result is as exact as fp32 activations times the weights would be, without unpacking
// weights to floats.
//
// fp8 goes through mma.m16n8k16: two instructions make four weights fp16, exactly, and the activations are three fp16
// digits of 11 bits relative to the largest. Products are exact, sums are fp32.
//
// Four digits (of fp8 three and zeros) fill half of the 8 columns; the other half serves a second half of K. Of the
// four words w0 w1 w2 w3 that a lane loads from weight row g, the mma takes w0 and w2 as row g of A, w1 and w3 as row
// g + 8. Columns 0 to 3 of B hold the digits that belong to w0 and w2, columns 4 to 7 those that belong to w1 and w3.
// Wanted are the sums of row g with columns 0 to 3 and of row g + 8 with columns 4 to 7; the others are discarded. A
// tile therefore has 8 rows of weights, not 16.
#pragma once

#include <type_traits>

#include "llmc/cuda/fused/consumer.cuh"
#include "llmc/cuda/fused/producer.cuh"
#include "llmc/cuda/fused/weight_stream.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// c [16, 8] += a [16, 32] b [32, 8]. With int4, `a` is unsigned.
template <DType Q>
__device__ __forceinline__ void multiply_add(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  if constexpr (Q == DType::u4) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}
// c [16, 8] += a [16, 16] b [16, 8] in fp16.
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ unsigned load_shared_word(unsigned address) {
  unsigned value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
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

template <DType Q>
constexpr bool kIntegers = Q != DType::e4m3;
// mma for one tile and one group of 128; each takes two words of B a lane.
template <DType Q>
constexpr int kSteps = kIntegers<Q> ? 2 : 4;
// The digits of one band of activations (weight_stream.cuh), as this lane's B fragments.
template <typename K>
template <DType Q>
struct Consumer<K>::Digits {
  unsigned b[kRowLoads][kWarpGroups][kSteps<Q>][2];
  int sums[kRowLoads]
          [kWarpGroups];  // int4: the group's activations in this lane's two digits, as the weights weigh them
  float scale;            // factor from the sum over this lane's two digits to activations
};

// Splits this warp's activations into digits and distributes them to its lanes as B fragments, through shared memory.
// If any is infinite or NaN, all sums of the warp become NaN.
template <typename K>
template <DType Q>
__device__ __forceinline__ void Consumer<K>::make_digits(Digits<Q>& d, const float* x) const {
  // |x| < 2^(exponent - 126) for the largest biased exponent, which is scaled to 2^30, for fp8 to 2^9.
  constexpr unsigned kUp = kIntegers<Q> ? 283 : 262;
  unsigned most = 0;
#pragma unroll
  for (int j = 0; j < kInputs; ++j) most = max(most, __float_as_uint(x[j]) & 0x7fffffffu);
  const unsigned exponent = max(__reduce_max_sync(~0u, most) >> 23, 32u);
  const float up = __uint_as_float((kUp - exponent) << 23);
  const int column = lane / 4, t = lane % 4;
  d.scale = exponent == 255 ? __uint_as_float(0x7fffffffu) : __uint_as_float((exponent + 254 - kUp) << 23);
  if constexpr (kIntegers<Q>) {
    if (t % 2 == 1) d.scale *= 65536.0f;
    if (Q == DType::u4 && t >= 2) d.scale *= 0.0625f;
  } else if (t % 2 == 1) {
    d.scale *= 0x1p-22f;
  }
  const unsigned planes = shared_address(shared) + at.digits + warp * kDigitBytes;
  const unsigned from = planes + column % 4 * kDigitPlane;
#pragma unroll
  for (int i = 0; i < kRowLoads; ++i) {
    const float* const own = x + i * kLaneElements;
    if constexpr (kIntegers<Q>) {
      unsigned plane[4][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned v[4];  // four signed digits in the bytes of a word, the least significant in the lowest byte
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          v[j] = (static_cast<unsigned>(__float2int_rn(own[4 * half + j] * up)) + 0x80808080u) ^ 0x80808080u;
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
      for (int n = 0; n < 4; ++n) store_shared(planes + n * kDigitPlane + 8 * lane, plane[n][0], plane[n][1]);
      __syncwarp();
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
        for (int s = 0; s < kSteps<Q>; ++s) {
          const unsigned word = from + group * 128 + 32 * t + 16 * s + (column >= 4 ? 4 : 0);
          d.b[i][group][s][0] = load_shared_word(word);
          d.b[i][group][s][1] = load_shared_word(word + 8);
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
        for (int s = 0; s < kSteps<Q>; ++s) {
          const unsigned word = from + 64 * t + 16 * s + (column >= 4 ? 4 : 0);
          d.b[i][group][s][0] = load_shared_word(word);
          d.b[i][group][s][1] = load_shared_word(word + 8);
        }
      }
    }
    if constexpr (Q == DType::u4) {
      constexpr unsigned kOnes[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) {
        int sums[4] = {};
#pragma unroll
        for (int s = 0; s < kSteps<Q>; ++s) multiply_add<Q>(sums, kOnes, d.b[i][group][s]);
        const int sum = sums[0] + 256 * sums[1];
        d.sums[i][group] = t >= 2 ? 16 * sum : sum;  // columns 4 to 7 meet weights from high nibbles, 16 q
      }
    }
  }
}

// Partial sums of `rows` rows (at most partial_rows) over one band of activations of `groups` groups of K; the last
// band may have fewer than the others. `accumulate`: added to the sums that are there.
template <typename K>
template <DType Q>
__device__ __forceinline__ void Consumer<K>::multiply_band(int rows, int groups, const Digits<Q>& x, bool accumulate) {
  constexpr int kTiles = warp_tiles(Q), kSetRows = set_rows(Q);
  const Parameters& p = c.p;
  const int g = lane / 4, t = lane % 4, stage_rows = kSetRows * p.warps_r, load_groups = kWarpGroups * p.warps_k;
  float* partial =
      reinterpret_cast<float*>(shared + at.partials) + (partial_buffer * p.warps_k + warp_k) * p.partial_rows;
  for (int first = 0; first < rows; first += stage_rows) {
    const int begin = first + warp_r * kSetRows, own_rows = max(0, min(kSetRows, rows - begin));
    // independent accumulators, so that the mma overlap
    std::conditional_t<kIntegers<Q>, int, float> sums[kTiles][kWarpGroups][4] = {};
    float scaled[kTiles] = {};
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i) {
      const int here = min(groups - i * load_groups, load_groups);  // groups of K in this stage
      if (here <= 0) continue;
      const unsigned set = begin_chunk() + warp_r * (kSetRows * group_bytes(Q)) * here;
      // Rows and groups of K that the stage does not have are stale numbers, but finite ones: sums of such rows are
      // discarded, and the digits of such groups are 0. Where the numbers are floats they might be NaN: a scale is that
      // of the last group, and weights in fp8 are not loaded.
      uint4 w[kTiles][kWarpGroups][Q == DType::u4 ? 1 : 2];
      unsigned words[kTiles][kWarpGroups];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int group = 0; group < kWarpGroups; ++group) {
          const int row = tile * kTileRows + g, of_stage = warp_k * kWarpGroups + group;
          if constexpr (Q == DType::u4) {
            w[tile][group][0] = load_shared(set + (of_stage * own_rows + row) * 64 + t * 16);
            const int word = min(of_stage, here - 1) * own_rows + row;
            words[tile][group] = load_shared_word(set + here * own_rows * 64 + word * 4);
          } else {
            const bool mine = Q == DType::i8 || (row < own_rows && of_stage < here);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              w[tile][group][half] = make_uint4(0, 0, 0, 0);
              if (mine) {
                w[tile][group][half] = load_shared(set + ((2 * of_stage + half) * own_rows + row) * 64 + t * 16);
              }
            }
          }
        }
      }
      end_chunk();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int group = 0; group < kWarpGroups; ++group) {
          const auto& b = x.b[i][group];
          if constexpr (Q == DType::i8) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const uint4 v = w[tile][group][half];
              multiply_add<Q>(sums[tile][group], {v.x, v.y, v.z, v.w}, b[half]);
            }
          } else if constexpr (Q == DType::e4m3) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const uint4 v = w[tile][group][half];
              unsigned a[8];
              e4m3_pairs(v.x, a[0], a[1]);
              e4m3_pairs(v.y, a[2], a[3]);
              e4m3_pairs(v.z, a[4], a[5]);
              e4m3_pairs(v.w, a[6], a[7]);
              multiply_add(sums[tile][group], {a[0], a[1], a[2], a[3]}, b[2 * half]);
              multiply_add(sums[tile][group], {a[4], a[5], a[6], a[7]}, b[2 * half + 1]);
            }
          } else {
            constexpr unsigned kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;  // the high nibble stays in place: 16 q
            const uint4 v = w[tile][group][0];
            const int zero = static_cast<int>(words[tile][group] >> 16);
            int each[4] = {};
            multiply_add<Q>(each, {v.x & kLow, v.x & kHigh, v.y & kLow, v.y & kHigh}, b[0]);
            multiply_add<Q>(each, {v.z & kLow, v.z & kHigh, v.w & kLow, v.w & kHigh}, b[1]);
            const int low = t < 2 ? each[0] : each[2], high = t < 2 ? each[1] : each[3];
            const float scale = __half2float(__ushort_as_half(static_cast<unsigned short>(words[tile][group])));
            const int sum = low + 256 * high - zero * x.sums[i][group];
            scaled[tile] = fmaf(static_cast<float>(sum), scale, scaled[tile]);
          }
        }
      }
    }
    float of_tile[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float sum = scaled[tile];
      if constexpr (Q != DType::u4) {
        const auto& s = sums[tile];
        const auto low = t < 2 ? s[0][0] + s[1][0] : s[0][2] + s[1][2];
        const auto high = t < 2 ? s[0][1] + s[1][1] : s[0][3] + s[1][3];
        constexpr float kDigit = kIntegers<Q> ? 256.0f : 0x1p-11f;
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

// Four numbers in e4m3 as fp16.
template <typename K>
__device__ __forceinline__ void Consumer<K>::e4m3_pairs(unsigned word, unsigned& low, unsigned& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(word));
}

// Partial sums of `rows` rows of `size` elements over this thread's part of `input`, band by band. With several bands,
// `input` is overwritten.
template <typename K>
template <DType Q, int kLoads>
__device__ __forceinline__ void Consumer<K>::multiply_stream(int rows, int size, float (&input)[kLoads * kLaneElements],
                                                             bool accumulate) {
  const int band_groups = kRowLoads * kWarpGroups * c.p.warps_k;
#pragma unroll 1
  for (int groups = groups_of(size); groups > 0; groups -= band_groups) {
    Digits<Q> digits;
    make_digits<Q>(digits, input);
    multiply_band<Q>(rows, groups, digits, accumulate);
    accumulate = true;
    if constexpr (kLoads > kRowLoads) {  // registers cannot be indexed at run time: move the next band to the front
#pragma unroll
      for (int j = kInputs; j < kLoads * kLaneElements; ++j) input[j - kInputs] = input[j];
    } else {
      break;
    }
  }
}

// ---- the producer ---------------------------------------------------------------------------------------------------

// Copies one part of the stream from `source`, which is advanced past it.
template <typename K>
template <DType Q>
__device__ bool Producer<K>::stream_part(const std::byte*& source, int rows, int groups) {
  return for_each_stage(
      Q, StreamShape(c.p, K::kRowLoads), {rows, groups}, [&](int, int stage_rows, int, int stage_groups) {
        if (!acquire()) return false;
        const auto amount = static_cast<unsigned>(set_bytes(Q, stage_rows, stage_groups));
        const unsigned barrier = c.full + 8 * next.stage;
        hopper::mbarrier_arrive_expect(barrier, amount);
        hopper::bulk_load(c.ring + next.stage * c.p.stage_bytes, source, amount, barrier, hopper::L2::evict_first);
        source += amount;
        issued();
        return true;
      });
}

// Copies one layer, in the order in which the consumers read it.
template <typename K>
__device__ bool Producer<K>::quantized_layer(const LayerParts& parts, int token, int l) {
  const Parameters& p = c.p;
  const int before_cache = K::kSequential ? 1 : 2;
  const std::byte* source = layers[l].stream + c.block * p.stream_bytes;
#pragma unroll 1
  for (int i = 0; i < parts.count; ++i) {
    if (i == before_cache) {
      bool good;
      if constexpr (K::kSequential) {
        good = pages(token, l, p.position + token);
      } else {
        good = cache(token, l, p.position + token);
      }
      if (!good) return false;
    }
    if (!stream_part<K::W::kType>(source, parts.part[i].rows, parts.part[i].groups)) return false;
  }
  return true;
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
