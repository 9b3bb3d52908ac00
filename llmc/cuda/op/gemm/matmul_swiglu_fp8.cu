// fp8. Bytes moved beside the operands, for N F values of SwiGLU: forward writes 5 N F, where a GEMM writes 4 and the
// pass moves 5; backward reads 4 and writes 5 N F, where the GEMM writes 2 and the pass moves 11.
//
// A copy, and a row of a tile, takes pairs of codes as elements of 16 bits. Both operands lie along k, as fp8 requires.
//
// The rows of a tile are not in the order of the matrix: the two blocks of 64 rows are copied so that a warp's 16 rows
// of each are 32 consecutive rows of the matrix, which in the transposed layout are consecutive bytes.
//
// The backward epilogue takes longer than the multiplication of a tile at C = 2,048, so its instructions and its stores
// count (dev/performance/fp8.md, "SwiGLU in the epilogues").

#include "llmc/cuda/op/gemm/matmul_swiglu_fp8.h"

#include "llmc/base/error.h"
#include "llmc/cuda/op/elementwise/swiglu.cuh"
#include "llmc/cuda/op/fp8/fp8.cuh"
#include "llmc/cuda/op/gemm/matmul_swiglu.cuh"

namespace weft::cuda {

namespace {

using namespace matmul_swiglu;

using Pair = std::uint16_t;  // of codes

constexpr auto kPairs = CU_TENSOR_MAP_DATA_TYPE_UINT16;

// Of a [N, C]: the rows of one block of a tile, 16 of every 32 from row 16 block on. Groups of 16 rows are complete,
// since N is a multiple of 16. Where there is no group (N = 16, block 1) the map has one that is not used.
CUtensorMap encode_block(const std::uint8_t* codes, std::int64_t N, std::int64_t C, int block) {
  constexpr std::int64_t kGroup = kWarpRows / kBlocks;
  const std::int64_t groups = N / kGroup;
  return encode_tensor_map(codes + (groups > block ? block * kGroup * C : 0), kPairs,
                           {static_cast<std::uint64_t>(C) / sizeof(Pair), kGroup,
                            static_cast<std::uint64_t>(std::max(ceil_div(groups - block, kBlocks), std::int64_t{1}))},
                           {C, kWarpRows * C}, {kDepth, kGroup, kWarps});
}

// What both directions have in common. kFormat: that of a.
template <Fp8Format kFormat>
struct InFp8 {
  static constexpr Major kB = Major::k;
  struct Maps {
    CUtensorMap block[kBlocks];
  };
#if WEFT_WGMMA
  static __device__ void load_a(const TileA& a, const Maps& maps, unsigned full, int k, int row) {
    constexpr int kBlockRows = kRows / kBlocks;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      tensor_load(a.rows<kBlockRows>(i * kBlockRows).address, &maps.block[i], full, k, 0, row / kWarpRows);
    }
  }
  static __device__ void multiply(float (&d)[kAccumulators], std::uint64_t a, std::uint64_t b, bool accumulate) {
    wgmma_async_fp8<kFormat>(d, a, b, accumulate);
  }
  struct Scaled {
    float factor;
    __device__ void scale(float (&d)[kAccumulators]) const {
#pragma unroll
      for (float& value : d) value *= factor;
    }
  };
#endif
};

struct Forward : InFp8<Fp8Format::e4m3> {
  static constexpr int kResultColumns = kColumns / 2;
  struct Staging {};
  static __device__ int weight_row(int column, int rank, int F) { return gate_or_up_row(column, rank, F); }

  struct Tensors {
    bf16* gate_up;
    Fp8Target out;
    const float *x_scale, *weight_scale;
  };
#if WEFT_WGMMA
  struct Epilogue : Scaled {
    Fp8Target out;
    float out_scale;
    ThreadCounters counters;

    __device__ explicit Epilogue(const Tensors& t)
        : Scaled{*t.x_scale * *t.weight_scale}, out(t.out), out_scale(t.out.codes != nullptr ? *t.out.scale : 1.0f) {}

    __device__ void finish(const Arguments<Forward>& p, const Sums& sums, Staging&, std::int64_t tile_row, int warp,
                           std::int64_t column0, int lane) {
      constexpr int kPieces = kResultColumns / 8;
      static_assert(kWarpRows * kPieces % kWarpSize == 0);
#pragma unroll 2
      for (int i = lane; i < kWarpRows * kPieces; i += kWarpSize) {
        const int r = i / kPieces, piece = i % kPieces;
        const std::int64_t row = tile_row + kWarpRows * warp + r, column = column0 + 8 * piece;
        if (row >= p.M || column >= p.F) continue;
        const Eight gate = sums.get(r, piece), up = sums.get(r, piece + kPieces);
        bf16* const to = p.tensors.gate_up + row * 2 * p.F + column;
        gate.store(to);
        up.store(to + p.F);
        if (out.codes == nullptr) continue;
        float values[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] = swiglu<bf16>(gate.get(j), up.get(j));
        const unsigned low = round_four<Fp8Format::e4m3>(values, out_scale, counters);
        const unsigned high = round_four<Fp8Format::e4m3>(values + 4, out_scale, counters);
        *reinterpret_cast<uint2*>(out.codes + row * p.F + column) = make_uint2(low, high);
      }
    }
    __device__ void end() const {
      if (out.counters != nullptr) add_warp_counters(out.counters, counters);
    }
  };
#endif
};

struct Backward : InFp8<Fp8Format::e5m2> {
  static constexpr int kResultColumns = kColumns;
  static __device__ int weight_row(int column, int rank, int) { return column + rank * (kColumns / kCluster); }

  struct Tensors {
    const bf16* gate_up;
    Fp8Target dgate_up, out;
    const float *dout_scale, *weight_scale;
  };

  // A group: 64 columns of a tile, in which each output's transposed codes are collected, so that whole cache lines are
  // written. Those of dgate and dup lie where the group's sums were, those of out here.
  static constexpr int kGroupColumns = 64, kGroups = kColumns / kGroupColumns, kOutputs = 3;
  static constexpr int kChunk = 16, kChunkBytes = kChunk * kGroupColumns;  // rows that are collected together
  struct alignas(128) Staging {
    unsigned char out[2][kRows / kChunk][kChunkBytes];  // taken in turns, so that one barrier a group suffices
  };
#if WEFT_WGMMA
  // A lane computes fragments of 4 rows and 8 columns; a warp 16 rows and 64 columns at a time, half of its part of a
  // group.
  struct Epilogue : Scaled {
    static constexpr int kLaneRows = 4, kLaneColumns = 8, kLanesOfARow = kGroupColumns / kLaneColumns;
    static constexpr int kHalves = kWarpRows / kChunk;
    static_assert(kWarpSize / kLanesOfARow * kLaneRows == kChunk && kGroups * kGroupColumns == kColumns);

    float gradient_scale, out_scale;
    Fp8Counters* gradient_total;
    ThreadCounters counters;

    __device__ explicit Epilogue(const Tensors& t)
        : Scaled{*t.dout_scale * *t.weight_scale},
          gradient_scale(*t.dgate_up.scale),
          out_scale(*t.out.scale),
          gradient_total(t.dgate_up.counters) {}

    struct Input {
      Eight gate[kLaneRows], up[kLaneRows];
    };
    // The codes of a fragment: [columns 0 to 3 or 4 to 7][row].
    using Fragment = unsigned[2][kLaneRows];

    // Outside of the result the nearest row and column inside it.
    static __device__ void load(Input& input, const Arguments<Backward>& p, std::int64_t row, std::int64_t column) {
      column = min(column, p.F - kLaneColumns);
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        const bf16* const from = p.tensors.gate_up + min(row + i, p.M - 1) * 2 * p.F + column;
        input.gate[i].load(from);
        input.up[i].load(from + p.F);
      }
    }

    // Where the codes of 16 rows of a group are collected, by output and column. Neither the words that a warp stores
    // (of every eighth column) nor the pieces that it loads (of all rows of a column) share a bank.
    struct Chunk {
      unsigned char *of_sums, *of_out;
      int number;

      __device__ Chunk(const Sums& sums, Staging& staging, int group, int warp, int half)
          : of_sums(sums.data + WarpTile::offset(half * kChunk, group * kLanesOfARow)),
            of_out(staging.out[group % 2][kHalves * warp + half]),
            number(kHalves * warp + half) {}
      __device__ unsigned char* at(int output, int column) const {
        const int slot = (column & ~7) | ((column ^ column / 8 ^ number) & 7);
        return (output < 2 ? of_sums + output * kChunkBytes : of_out) + slot * kChunk;
      }
    };

    __device__ void finish(const Arguments<Backward>& p, const Sums& sums, Staging& staging, std::int64_t tile_row,
                           int warp, std::int64_t column0, int lane) {
      const int lane_row = lane / kLanesOfARow * kLaneRows, piece = lane % kLanesOfARow;
      const std::int64_t row0 = tile_row + kWarpRows * warp + lane_row, lane_column = column0 + kLaneColumns * piece;
      Input next;
      load(next, p, row0, lane_column);
#pragma unroll 1
      for (int step = 0; step < kGroups * kHalves; ++step) {
        const int group = step / kHalves, half = step % kHalves;
        const Input input = next;
        if (step + 1 < kGroups * kHalves) {
          load(next, p, row0 + (step + 1) % kHalves * kChunk, lane_column + (step + 1) / kHalves * kGroupColumns);
        }
        Eight gradient[kLaneRows];
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
          gradient[i] = sums.get(half * kChunk + lane_row + i, group * kLanesOfARow + piece);
        }
        __syncwarp();  // the codes come where the sums are
        const std::int64_t row = row0 + half * kChunk, column = lane_column + group * kGroupColumns;
        const Chunk chunk(sums, staging, group, warp, half);
        if (row < p.M && column < p.F) {
          Fragment dgate, dup, out;
          if (round_fragment(gradient, input, dgate, dup, out)) {
            store_fragment(p, row, column, dgate, dup);
            collect(chunk, 0, dgate, piece, lane_row);
            collect(chunk, 1, dup, piece, lane_row);
            collect(chunk, 2, out, piece, lane_row);
          } else {
            write_each_value(p, gradient, chunk, piece, lane_row, row, column);
          }
        }
        if (half + 1 < kHalves) continue;
        named_barrier_wait(kEpilogueBarrier, kWarpgroupSize);
        write_group(p, sums, staging, group, warp, tile_row, column0 + group * kGroupColumns);
      }
    }

    // The codes of a fragment, of which it looks at all values together: that takes half of the instructions of looking
    // at each. False if it does not suffice, because some value saturates, is zero or is not finite; then it has counted
    // nothing.
    __device__ __forceinline__ bool round_fragment(const Eight (&gradient)[kLaneRows], const Input& input,
                                                   Fragment& dgate, Fragment& dup, Fragment& out) {
      float most = 0, least = INFINITY, most_out = 0;
      unsigned zeros = 0;
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float gates[4], ups[4], outs[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int at = 4 * half + j;
            const GatedGradient d =
                swiglu_gradient<bf16>(gradient[i].get(at), input.gate[i].get(at), input.up[i].get(at));
            gates[j] = d.gate * gradient_scale;
            ups[j] = d.up * gradient_scale;
            outs[j] = d.out * out_scale;
            most = larger_magnitude(larger_magnitude(most, d.gate), d.up);
            least = fminf(fminf(least, fabsf(d.gate)), fabsf(d.up));
            most_out = larger_magnitude(most_out, d.out);
          }
          dgate[half][i] = codes_of<Fp8Format::e5m2>(gates);
          dup[half][i] = codes_of<Fp8Format::e5m2>(ups);
          out[half][i] = codes_of<Fp8Format::e4m3>(outs);
          zeros += zero_codes(dgate[half][i]) + zero_codes(dup[half][i]);
        }
      }
      const bool fits = most * gradient_scale <= fp8_largest(Fp8Format::e5m2) && most_out < INFINITY;
      if (!fits || least == 0) return false;
      counters.amax = max(counters.amax, __float_as_uint(most));
      counters.flushed += zeros;
      return true;
    }
    static __device__ void store_fragment(const Arguments<Backward>& p, std::int64_t row, std::int64_t column,
                                          const Fragment& dgate, const Fragment& dup) {
      std::uint8_t* codes = p.tensors.dgate_up.codes + row * 2 * p.F + column;
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i, codes += 2 * p.F) {
        *reinterpret_cast<uint2*>(codes) = make_uint2(dgate[0][i], dgate[1][i]);
        *reinterpret_cast<uint2*>(codes + p.F) = make_uint2(dup[0][i], dup[1][i]);
      }
    }
    // Puts a fragment into its chunk, transposed: columns 8 piece to 8 piece + 7, rows `row` to row + 3.
    static __device__ void collect(const Chunk& chunk, int output, const Fragment& fragment, int piece, int row) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned columns[4];
        transpose_four(columns, fragment[half]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          *reinterpret_cast<unsigned*>(chunk.at(output, kLaneColumns * piece + 4 * half + j) + row) = columns[j];
        }
      }
    }
    // A fragment value by value: rare, so it is short rather than fast.
    __device__ void write_each_value(const Arguments<Backward>& p, const Eight (&gradient)[kLaneRows],
                                     const Chunk& chunk, int piece, int lane_row, std::int64_t row,
                                     std::int64_t column) {
      ThreadCounters of_out;  // counted in the forward pass
#pragma unroll 1
      for (int n = 0; n < 2 * kLaneRows; ++n) {
        const int i = n / 2, first = n % 2 * 4;
        const bf16* const from = p.tensors.gate_up + (row + i) * 2 * p.F + column + first;
        float gates[4], ups[4], outs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float dout = 0;
#pragma unroll
          for (int m = 0; m < 2 * kLaneRows; ++m) {  // registers have no index
            if (m == n) dout = gradient[m / 2].get(m % 2 * 4 + j);
          }
          const GatedGradient d = swiglu_gradient<bf16>(dout, to_float(from[j]), to_float(from[p.F + j]));
          gates[j] = d.gate;
          ups[j] = d.up;
          outs[j] = d.out;
        }
        const unsigned codes[kOutputs] = {round_four<Fp8Format::e5m2>(gates, gradient_scale, counters),
                                          round_four<Fp8Format::e5m2>(ups, gradient_scale, counters),
                                          round_four<Fp8Format::e4m3>(outs, out_scale, of_out)};
        std::uint8_t* const to = p.tensors.dgate_up.codes + (row + i) * 2 * p.F + column + first;
        *reinterpret_cast<unsigned*>(to) = codes[0];
        *reinterpret_cast<unsigned*>(to + p.F) = codes[1];
#pragma unroll
        for (int output = 0; output < kOutputs; ++output) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            chunk.at(output, kLaneColumns * piece + first + j)[lane_row + i] =
                static_cast<unsigned char>(codes[output] >> 8 * j);
          }
        }
      }
    }
    // All threads of the warpgroup: eight write a column of 128 rows.
    static __device__ void write_group(const Arguments<Backward>& p, const Sums& sums, Staging& staging, int group,
                                       int warp, std::int64_t tile_row, std::int64_t column0) {
      constexpr int kChunks = kRows / kChunk, kAtOnce = kWarpgroupSize / kChunks;
      const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize, number = thread % kChunks;
      const Chunk chunk(sums.of_warp(warp, number / kHalves), staging, group, number / kHalves, number % kHalves);
      const std::int64_t row = tile_row + kChunk * number;
#pragma unroll
      for (int output = 0; output < kOutputs; ++output) {
        std::uint8_t* to = output < 2 ? p.tensors.dgate_up.transposed + output * p.F * p.M : p.tensors.out.transposed;
        to += (column0 + thread / kChunks) * p.M + row;
#pragma unroll
        for (int i = 0; i < kGroupColumns / kAtOnce; ++i, to += kAtOnce * p.M) {
          const int column = thread / kChunks + i * kAtOnce;
          if (row < p.M && column0 + column < p.F) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(chunk.at(output, column));
          }
        }
      }
    }
    __device__ void end() const {
      if (gradient_total != nullptr) add_warp_counters(gradient_total, counters);
    }
  };
#endif
};

template <typename Direction>
void launch(const typename Direction::Tensors& tensors, const std::uint8_t* a, const std::uint8_t* weight,
            std::int64_t weight_rows, std::int64_t N, std::int64_t C, std::int64_t F, cudaStream_t stream) {
  if (N == 0) return;
  if (N % 16 != 0 || C % 16 != 0 || F % 16 != 0) {
    fail(Exit::internal, "fp8 matmul with SwiGLU: %lld x %lld x %lld, expected multiples of 16",
         static_cast<long long>(N), static_cast<long long>(C), static_cast<long long>(F));
  }
  Arguments<Direction> arguments;
  for (int i = 0; i < kBlocks; ++i) arguments.a.block[i] = encode_block(a, N, C, i);
  arguments.M = N, arguments.F = F, arguments.K = C / static_cast<std::int64_t>(sizeof(Pair));
  arguments.b = encode_matrix(weight, kPairs, weight_rows, arguments.K, kColumns / kCluster);
  arguments.tensors = tensors;
  launch(arguments, "fp8 matmul with SwiGLU", stream);
}

}  // namespace

bool matmul_swiglu_fp8_computes() {
  return hopper_multiprocessors() > 0;
}

void gate_up_swiglu_fp8(bf16* gate_up, const Fp8Target& out, const Fp8Matrix& x, const Fp8Matrix& weight,
                        std::int64_t N, std::int64_t C, std::int64_t F, cudaStream_t stream) {
  if (out.transposed != nullptr) fail(Exit::internal, "fp8 matmul with SwiGLU: the result is written as rows only");
  launch<Forward>({gate_up, out, x.scale, weight.scale}, x.codes, weight.codes, 2 * F, N, C, F, stream);
}

void down_input_grad_swiglu_fp8(const Fp8Target& dgate_up, const Fp8Target& out, const Fp8Matrix& dout,
                                const Fp8Matrix& weight_transposed, const bf16* gate_up, std::int64_t N, std::int64_t C,
                                std::int64_t F, cudaStream_t stream) {
  launch<Backward>({gate_up, dgate_up, out, dout.scale, weight_transposed.scale}, dout.codes, weight_transposed.codes,
                   F, N, C, F, stream);
}

}  // namespace weft::cuda
