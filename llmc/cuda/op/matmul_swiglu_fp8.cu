// fp8. Bytes moved beside the operands, for N F values of SwiGLU: forward writes 5 N F, where a GEMM writes 4 and the
// pass moves 5; backward reads 4 and writes 5 N F, where the GEMM writes 2 and the pass moves 11.
//
// A copy, and a row of a tile, takes pairs of codes as elements of 16 bits. Both operands lie along k, as fp8 requires.
//
// The rows of a tile are not in the order of the matrix: the two blocks of 64 rows are copied so that a warp's 16 rows
// of each are 32 consecutive rows of the matrix. In the transposed layout they are 32 bytes, the smallest piece that
// memory writes at once.

#include "llmc/cuda/op/matmul_swiglu_fp8.h"

#include "llmc/base/error.h"
#include "llmc/cuda/op/fp8.cuh"
#include "llmc/cuda/op/matmul_swiglu.cuh"
#include "llmc/cuda/op/swiglu.cuh"

namespace weft::cuda {

namespace {

using namespace matmul_swiglu;

using Eight = Elements<bf16, 8>;
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
CUtensorMap encode_weight(const std::uint8_t* codes, std::int64_t rows, std::int64_t C) {
  return encode_tensor_map(codes, kPairs,
                           {static_cast<std::uint64_t>(C) / sizeof(Pair), static_cast<std::uint64_t>(rows)}, {C},
                           {kDepth, kColumns / kCluster});
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
  static constexpr int kStages = 4, kFinishedTiles = 1, kResultColumns = kColumns / 2;
  // gate by the first block, up by the second
  static __device__ int weight_row(int column, int rank, int F) { return column + rank * F; }

  struct Tensors {
    bf16* gate_up;
    Fp8Target out;
    const float *x_scale, *weight_scale;
  };
#if WEFT_WGMMA
  struct Epilogue : Scaled {
    Fp8Target out;
    float out_scale;
    ThreadTally tally;

    __device__ explicit Epilogue(const Tensors& t)
        : Scaled{*t.x_scale * *t.weight_scale}, out(t.out), out_scale(t.out.codes != nullptr ? *t.out.scale : 1.0f) {}

    __device__ void finish(const Arguments<Forward>& p, const Sums& sums, std::int64_t tile_row, int warp,
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
        const unsigned low = round_four<Fp8Format::e4m3>(values, out_scale, tally);
        const unsigned high = round_four<Fp8Format::e4m3>(values + 4, out_scale, tally);
        *reinterpret_cast<uint2*>(out.codes + row * p.F + column) = make_uint2(low, high);
      }
    }
    __device__ void end() const {
      if (out.tally != nullptr) add_warp_tally(out.tally, tally);
    }
  };
#endif
};

// Its epilogue takes longer than the multiplication of a tile, so both warpgroups write at a time.
struct Backward : InFp8<Fp8Format::e5m2> {
  static constexpr int kStages = 3, kFinishedTiles = 2, kResultColumns = kColumns;
  static __device__ int weight_row(int column, int rank, int) { return column + rank * (kColumns / kCluster); }

  struct Tensors {
    const bf16* gate_up;
    Fp8Target dgate_up, out;
    const float *dout_scale, *weight_scale;
  };
#if WEFT_WGMMA
  // A lane computes squares of 4 rows and 8 columns; a warp 32 rows and 32 columns at a time.
  struct Epilogue : Scaled {
    static constexpr int kLaneRows = 4, kLaneColumns = 8, kLanesOfARow = 4;
    static constexpr int kBatchColumns = kLanesOfARow * kLaneColumns, kBatches = kColumns / kBatchColumns;
    static_assert(kWarpSize / kLanesOfARow * kLaneRows == kWarpRows && kBatches * kBatchColumns == kColumns);

    float gradient_scale, out_scale;
    Fp8Tally* gradient_total;
    ThreadTally tally, unused;

    __device__ explicit Epilogue(const Tensors& t)
        : Scaled{*t.dout_scale * *t.weight_scale},
          gradient_scale(*t.dgate_up.scale),
          out_scale(*t.out.scale),
          gradient_total(t.dgate_up.tally) {}

    struct Input {
      Eight gate[kLaneRows], up[kLaneRows];
    };
    // The codes of a square: [columns 0 to 3 or 4 to 7][row].
    using Square = unsigned[2][kLaneRows];

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

    __device__ void finish(const Arguments<Backward>& p, const Sums& sums, std::int64_t tile_row, int warp,
                           std::int64_t column0, int lane) {
      const int lane_row = lane / kLanesOfARow * kLaneRows, lane_piece = lane % kLanesOfARow;
      const std::int64_t row = tile_row + kWarpRows * warp + lane_row;
      column0 += lane_piece * kLaneColumns;
      Input next;
      load(next, p, row, column0);
#pragma unroll 1
      for (int batch = 0; batch < kBatches; ++batch) {
        const std::int64_t column = column0 + batch * kBatchColumns;
        const Input input = next;
        if (batch + 1 < kBatches) load(next, p, row, column + kBatchColumns);
        if (row >= p.M || column >= p.F) continue;
        Square dgate, dup, out;
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
          const Eight gradient = sums.get(lane_row + i, batch * kLanesOfARow + lane_piece);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float gates[4], ups[4], outs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int at = 4 * half + j;
              const SwigluGradient d =
                  swiglu_gradient<bf16>(gradient.get(at), input.gate[i].get(at), input.up[i].get(at));
              gates[j] = d.gate;
              ups[j] = d.up;
              outs[j] = d.out;
            }
            dgate[half][i] = round_four<Fp8Format::e5m2>(gates, gradient_scale, tally);
            dup[half][i] = round_four<Fp8Format::e5m2>(ups, gradient_scale, tally);
            out[half][i] = round_four<Fp8Format::e4m3>(outs, out_scale, unused);
          }
        }
        const Fp8Target& to = p.tensors.dgate_up;
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
          std::uint8_t* const codes = to.codes + (row + i) * 2 * p.F + column;
          *reinterpret_cast<uint2*>(codes) = make_uint2(dgate[0][i], dgate[1][i]);
          *reinterpret_cast<uint2*>(codes + p.F) = make_uint2(dup[0][i], dup[1][i]);
        }
        store_transposed(to.transposed, dgate, column, row, p.M);
        store_transposed(to.transposed, dup, p.F + column, row, p.M);
        store_transposed(p.tensors.out.transposed, out, column, row, p.M);
      }
    }
    // Eight lanes fill 32 bytes.
    static __device__ void store_transposed(std::uint8_t* transposed, const Square& square, std::int64_t column,
                                            std::int64_t row, std::int64_t N) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned columns[4];
        transpose_four(columns, square[half]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          *reinterpret_cast<unsigned*>(transposed + (column + 4 * half + j) * N + row) = columns[j];
        }
      }
    }
    __device__ void end() const {
      if (gradient_total != nullptr) add_warp_tally(gradient_total, tally);
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
  arguments.b = encode_weight(weight, weight_rows, C);
  arguments.M = N, arguments.F = F, arguments.K = C / static_cast<std::int64_t>(sizeof(Pair));
  arguments.tensors = tensors;
  launch(arguments, "fp8 matmul with SwiGLU", stream);
}

}  // namespace

bool matmul_swiglu_fp8_computes() {
  return hopper_multiprocessors() > 0;
}

void gate_up_swiglu_fp8(bf16* gate_up, const Fp8Target& out, const Fp8Matrix& x, const Fp8Matrix& weight,
                        std::int64_t N, std::int64_t C, std::int64_t F, cudaStream_t stream) {
  launch<Forward>({gate_up, out, x.scale, weight.scale}, x.codes, weight.codes, 2 * F, N, C, F, stream);
}

void down_input_grad_swiglu_fp8(const Fp8Target& dgate_up, const Fp8Target& out, const Fp8Matrix& dout,
                                const Fp8Matrix& weight_transposed, const bf16* gate_up, std::int64_t N, std::int64_t C,
                                std::int64_t F, cudaStream_t stream) {
  launch<Backward>({gate_up, dgate_up, out, dout.scale, weight_transposed.scale}, dout.codes, weight_transposed.codes,
                   F, N, C, F, stream);
}

}  // namespace weft::cuda
