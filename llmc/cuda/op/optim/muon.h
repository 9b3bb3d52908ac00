// Muon on the GPU. The specification is llmc/cpu/muon.h; T, in which matrices are orthogonalised, is bf16 or, beside parameters
// in fp32, float.
//
// A step is three calls: muon_momentum(), orthogonalize(), muon_apply(). Matrices of one shape go through them together, up to
// muon_batch(shape) at a time. The GEMMs run over all places of such a batch, used or not: their plans, and so the bits of a
// matrix, do not depend on which others there are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>

#include "llmc/base/arena_layout.h"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/model/optimizers/muon.h"

namespace weft::cuda {

struct MuonShape {
  std::int64_t rows = 0, columns = 0;

  bool tall() const { return rows > columns; }
  std::int64_t shorter() const { return tall() ? columns : rows; }
  std::int64_t elements() const { return rows * columns; }
  auto operator<=>(const MuonShape&) const = default;
};

inline constexpr std::int64_t kMostMuonBatch = 16;
// As many small matrices as fill the GPU; a function of the shape alone.
std::int64_t muon_batch(const MuonShape& shape);

// A matrix, and where its first element lies: in the table, and in the arenas of its momentum and low halves, of gradients and
// of parameters. All are multiples of 4.
struct MuonMatrix {
  MuonShape shape;
  std::int64_t begin = 0, state = 0, gradient = 0, parameter = 0;
  bool decay = false;
};

// The GEMMs of an iteration: A = x x^T or, of a tall matrix, x^T x; P = b A + c A A; a x + P x or a x + x P.
struct MuonMatmuls {
  MatmulShape gram, polynomial, next;
};
// type: CUDA_R_16BF or CUDA_R_32F.
MuonMatmuls muon_matmuls(const MuonShape& shape, cudaDataType_t type);
// Operations that orthogonalize() needs for one matrix, and elements that it moves.
double muon_flops(const MuonShape& shape);
double muon_moves(const MuonShape& shape);

// Of all shapes that are updated, one batch after the other.
struct MuonWorkspace {
  std::byte *x = nullptr, *next = nullptr;           // T [batch, rows, columns], batch_stride() apart
  std::byte *gram = nullptr, *polynomial = nullptr;  // T [batch, n, n], n the shorter side
  double* squares = nullptr;                         // [batch, blocks]: sums of squares
  float* norms = nullptr;                            // [batch]

  void reserve(ArenaLayout& layout, std::span<const MuonShape> shapes, std::size_t element_bytes);
};

// For `matrices` of one shape, up to muon_batch() of them: m += (1 - momentum) (g - m) with g = gradient * gradient_scale, and
// x = u / ||u|| with u = g + momentum (m - g). A matrix of zeros stays zero.
template <typename T>
void muon_momentum(const MuonWorkspace& work, std::span<const MuonMatrix> matrices, const float* gradients,
                   float* momentum, const MuonStep& step, cudaStream_t stream);
// The same with a momentum in bf16, rounded stochastically as AdamW's first moment (llmc/cuda/op/optim/adamw.h).
template <typename T>
void muon_momentum(const MuonWorkspace& work, std::span<const MuonMatrix> matrices, const float* gradients,
                   __nv_bfloat16* momentum, const MuonStep& step, std::uint64_t seed, cudaStream_t stream);

// Newton-Schulz on the batch in work.x, in the stream of `matmul`. The result is in work.next.
template <typename T>
void orthogonalize(Matmul& matmul, const MuonShape& shape, const MuonWorkspace& work);

// p = p keep - muon_step_size() times what is in work.next.
void muon_apply(const MuonWorkspace& work, std::span<const MuonMatrix> matrices, float* parameters,
                const MuonStep& step, cudaStream_t stream);
void muon_apply(const MuonWorkspace& work, std::span<const MuonMatrix> matrices, __nv_bfloat16* parameters,
                std::int16_t* low, const MuonStep& step, cudaStream_t stream);

}  // namespace weft::cuda
