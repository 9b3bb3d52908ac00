// bf16. Bytes moved beside the operands, for elements of E bytes: forward writes 3 N F E, where the GEMM alone writes 2
// and SwiGLU moves 3; backward reads and writes 4 N F E, where the GEMM writes 1 and SwiGLU moves 5.

#include "llmc/cuda/op/gemm/matmul_swiglu.h"

#include "llmc/cuda/op/elementwise/swiglu.cuh"
#include "llmc/cuda/op/gemm/matmul_swiglu.cuh"

namespace weft::cuda {

namespace {

using namespace matmul_swiglu;

constexpr auto kBf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// What both directions have in common. Their epilogues work on pieces of eight consecutive columns, kPieces in a row of
// a tile: load() reads what store() needs beside the sums.
template <typename Direction, Major kLayout>
struct InBf16 {
  static constexpr Major kB = kLayout;
  using Maps = CUtensorMap;
  struct Staging {};
  struct Tensors {
    bf16 *gate_up, *swiglu_out;
  };
#if WEFT_WGMMA
  static __device__ void load_a(const TileA& a, const Maps& map, unsigned full, int k, int row) {
    tensor_load(a.address, &map, full, k, row);
  }
  static __device__ void multiply(float (&d)[kAccumulators], std::uint64_t a, std::uint64_t b, bool accumulate) {
    wgmma_async<bf16, Major::k, kB>(d, a, b, accumulate);
  }
  struct Epilogue {
    __device__ explicit Epilogue(const Tensors&) {}
    __device__ void scale(float (&)[kAccumulators]) const {}
    __device__ void end() const {}

    // Finishes all pieces of a warp's rows. Row 0 of `sums` is the warp's first row in the upper block of the tile, row
    // 16 is 64 below. Inputs are loaded one batch ahead.
    __device__ void finish(const Arguments<Direction>& p, const Sums& sums, Staging&, std::int64_t tile_row, int warp,
                           std::int64_t column0, int lane) const {
      constexpr int kPieces = Direction::kPieces, kAtOnce = 3, kBatches = kWarpRows * kPieces / kWarpSize / kAtOnce;
      static_assert(kBatches * kAtOnce * kWarpSize == kWarpRows * kPieces && kBatches % 2 == 0);
      using Inputs = typename Direction::Input[kAtOnce];
      const std::int64_t row0 = tile_row + 16 * warp;
      const auto for_batch = [&](int batch, const auto& use) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int i = (batch * kAtOnce + j) * kWarpSize + lane, r = i / kPieces, piece = i % kPieces;
          use(j, r, piece, row0 + r / 16 * 64 + r % 16, column0 + 8 * piece);
        }
      };
      // Outside of the result loads the nearest row and column inside it: an unconditional load, so that no register
      // must keep its old value.
      const auto load = [&](int batch, Inputs& inputs) {
        for_batch(batch, [&](int j, int, int, std::int64_t row, std::int64_t column) {
          Direction::load(inputs[j], p, min(row, p.M - 1), min(column, p.F - 8));
        });
      };
      const auto store = [&](int batch, const Inputs& inputs) {
        for_batch(batch, [&](int j, int r, int piece, std::int64_t row, std::int64_t column) {
          if (row < p.M && column < p.F) Direction::store(inputs[j], sums, r, piece, p, row, column);
        });
      };
      Inputs even, odd;
      load(0, even);
#pragma unroll 1
      for (int batch = 0; batch < kBatches; batch += 2) {
        load(batch + 1, odd);
        store(batch, even);
        if (batch + 2 < kBatches) load(batch + 2, even);
        store(batch + 1, odd);
      }
    }
  };
#endif
};

struct Forward : InBf16<Forward, Major::k> {
  static constexpr int kPieces = kColumns / 16, kResultColumns = 8 * kPieces;
  static CUtensorMap weight_map(const bf16* weight, std::int64_t C, std::int64_t F) {
    return encode_matrix(weight, kBf16, 2 * F, C, kColumns / kCluster);
  }
  static __device__ int weight_row(int column, int rank, int F) { return gate_or_up_row(column, rank, F); }

  struct Input {};
  static __device__ void load(Input&, const Arguments<Forward>&, std::int64_t, std::int64_t) {}
  static __device__ void store(const Input&, const Sums& sums, int r, int piece, const Arguments<Forward>& p,
                               std::int64_t row, std::int64_t column) {
    const Eight gate = sums.get(r, piece), up = sums.get(r, piece + kPieces);
    bf16* to = p.tensors.gate_up + row * 2 * p.F + column;
    gate.store(to);
    up.store(to + p.F);
    if (p.tensors.swiglu_out == nullptr) return;
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = swiglu<bf16>(gate.get(i), up.get(i));
    Eight out;
    out.set(values);
    out.store(p.tensors.swiglu_out + row * p.F + column);
  }
};

struct Backward : InBf16<Backward, Major::mn> {
  static constexpr int kPieces = kColumns / 8, kResultColumns = 8 * kPieces;
  static CUtensorMap weight_map(const bf16* weight, std::int64_t C, std::int64_t F) {
    return encode_matrix(weight, kBf16, C, F, kDepth / kCluster);
  }

  struct Input {
    Eight gate, up;
  };
  static __device__ void load(Input& input, const Arguments<Backward>& p, std::int64_t row, std::int64_t column) {
    const bf16* from = p.tensors.gate_up + row * 2 * p.F + column;
    input.gate.load(from);
    input.up.load(from + p.F);
  }
  static __device__ void store(const Input& input, const Sums& sums, int r, int piece, const Arguments<Backward>& p,
                               std::int64_t row, std::int64_t column) {
    const Eight gradient = sums.get(r, piece);
    float dgate[8], dup[8], out[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const GatedGradient d = swiglu_gradient<bf16>(gradient.get(i), input.gate.get(i), input.up.get(i));
      dgate[i] = d.gate;
      dup[i] = d.up;
      out[i] = d.out;
    }
    bf16* to = p.tensors.gate_up + row * 2 * p.F + column;
    Eight result;
    result.set(dgate);
    result.store(to);
    result.set(dup);
    result.store(to + p.F);
    if (p.tensors.swiglu_out == nullptr) return;
    result.set(out);
    result.store(p.tensors.swiglu_out + row * p.F + column);
  }
};

template <typename Direction>
void launch(bf16* gate_up, bf16* swiglu_out, const bf16* a, const bf16* weight, std::int64_t N, std::int64_t C,
            std::int64_t F, cudaStream_t stream) {
  if (N == 0) return;
  Arguments<Direction> arguments;
  arguments.a = encode_matrix(a, kBf16, N, C, kRows), arguments.b = Direction::weight_map(weight, C, F);
  arguments.M = N, arguments.F = F, arguments.K = C;
  arguments.tensors = {gate_up, swiglu_out};
  launch(arguments, "matmul with SwiGLU", stream);
}

}  // namespace

bool matmul_swiglu_computes(std::int64_t C, std::int64_t F) {
  return C % 8 == 0 && F % 8 == 0 && hopper_multiprocessors() > 0;
}

void gate_up_swiglu(bf16* gate_up, bf16* swiglu_out, const bf16* x, const bf16* weight, std::int64_t N, std::int64_t C,
                    std::int64_t F, cudaStream_t stream) {
  launch<Forward>(gate_up, swiglu_out, x, weight, N, C, F, stream);
}

void down_input_grad_swiglu(bf16* gate_up, bf16* swiglu_out, const bf16* dout, const bf16* weight, std::int64_t N,
                            std::int64_t C, std::int64_t F, cudaStream_t stream) {
  launch<Backward>(gate_up, swiglu_out, dout, weight, N, C, F, stream);
}

}  // namespace weft::cuda
