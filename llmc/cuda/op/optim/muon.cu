// Muon: the kernels around Newton-Schulz, and its GEMMs. With g = gradient gradient_scale:
//
//   m += (1 - momentum) (g - m);   u = g + momentum (m - g)             momentum_kernel
//   x = u / ||u||                                                       norms_kernel, scale_kernel
//   x = a x + (b A + c A A) x, A = x x^T, five times                    three GEMMs each; of a tall matrix x (...), A = x^T x
//   p = p keep - step_size x                                            apply_kernel
//
// All arithmetic is fp32. u, x, A and its polynomial are stored in T: rounded to bf16 once each. A tall matrix is iterated from
// the other side, so that A always has the shorter side n. The polynomial is symmetric and need not be transposed.
//
// Bytes moved an element, T = bf16: 14 (g read, m read and written, u written), 4 (u read, x written), 10 (x read, p read and
// written), with the GEMMs' 30. Operations of a matrix [n, m]: 5 (4 n n m + 2 n n n).
//
// A grid is [blocks of kBlockElements elements of a matrix, matrices]. The matrices are kernel parameters. The norm is a sum of
// the blocks' sums, in double and in the order of the matrix, so it does not depend on where the matrix lies.
#include "llmc/cuda/op/optim/muon.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/op/optim/update.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kBlockElements = 8192;

std::int64_t stride_of(const MuonShape& shape) {
  return Matmul::batch_stride(shape.elements());
}
std::int64_t blocks_of(const MuonShape& shape) {
  return ceil_div(shape.elements(), kBlockElements);
}

// Matrices of one shape: matrix i has its place i stride elements behind the begin of x and of next.
struct Batch {
  MuonMatrix matrix[kMostMuonBatch];
  std::int64_t elements, stride;
};

// ---- storage of the momentum --------------------------------------------------------------------------------------------
// That of element i of the table is at j.
struct Fp32Momentum {
  float* m;

  __device__ float get(std::int64_t j) const { return m[j]; }
  __device__ void set(std::int64_t, std::int64_t j, float value) const { m[j] = value; }
  __device__ float4 get_quad(std::int64_t j) const { return __ldcs(reinterpret_cast<const float4*>(m + j)); }
  __device__ void set_quad(std::int64_t, std::int64_t j, float4 value) const {
    __stcs(reinterpret_cast<float4*>(m + j), value);
  }
};

struct RoundedMomentum {
  std::uint16_t* m;  // the bits of bf16
  std::uint64_t seed;
  std::int64_t step;

  static __device__ float wide(unsigned bits) { return __uint_as_float(bits << 16); }
  static __device__ unsigned rounded(float value, unsigned random) {
    return round_at_random(__float_as_uint(value), random & 0xffffu);
  }
  __device__ float get(std::int64_t j) const { return wide(m[j]); }
  __device__ void set(std::int64_t i, std::int64_t j, float value) const {
    const PhiloxWords random = rounding_words(seed, step, i / kQuad);
    unsigned word = 0;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) word = i % kQuad == k ? random.word[k] : word;
    m[j] = static_cast<std::uint16_t>(rounded(value, word));
  }
  __device__ float4 get_quad(std::int64_t j) const {
    const uint2 bits = __ldcs(reinterpret_cast<const uint2*>(m + j));
    return {wide(bits.x & 0xffffu), wide(bits.x >> 16), wide(bits.y & 0xffffu), wide(bits.y >> 16)};
  }
  __device__ void set_quad(std::int64_t i, std::int64_t j, float4 value) const {
    const PhiloxWords random = rounding_words(seed, step, i / kQuad);
    __stcs(reinterpret_cast<uint2*>(m + j),
           uint2{rounded(value.x, random.word[0]) | rounded(value.y, random.word[1]) << 16,
                 rounded(value.z, random.word[2]) | rounded(value.w, random.word[3]) << 16});
  }
};

// ---- kernels ----------------------------------------------------------------------------------------------------------
// Calls quad(i) for the elements i to i + 3 of a matrix that a thread has, and one(i) for those behind the last quad.
template <typename Quad, typename One>
__device__ void for_elements(std::int64_t elements, const Quad& quad, const One& one) {
  const std::int64_t begin = blockIdx.x * kBlockElements, end = min(begin + kBlockElements, elements);
  for (std::int64_t i = begin + threadIdx.x * kQuad; i < end; i += kThreads * kQuad) {
    if (i + kQuad <= end) {
      quad(i);
    } else {
      for (std::int64_t j = i; j < end; ++j) one(j);
    }
  }
}

// u, and for each block the sum of its squares: squares [matrices, blocks].
template <typename T, typename Momentum>
__global__ void __launch_bounds__(kThreads)
    momentum_kernel(T* u, double* squares, const float* gradients, Momentum stored, const __grid_constant__ Batch batch,
                    float momentum, float gradient_scale) {
  __shared__ double scratch[kThreads];
  const MuonMatrix& matrix = batch.matrix[blockIdx.y];
  u += blockIdx.y * batch.stride;
  gradients += matrix.gradient;
  double square = 0;
  const auto update = [&](float gradient, float& m) {
    const float g = gradient * gradient_scale;
    m = m + (1.0f - momentum) * (g - m);
    const float value = g + momentum * (m - g);
    square += static_cast<double>(value) * value;
    return value;
  };
  for_elements(
      batch.elements,
      [&](std::int64_t i) {
        const float4 g = __ldcs(reinterpret_cast<const float4*>(gradients + i));
        float4 m = stored.get_quad(matrix.state + i);
        const float values[kQuad] = {update(g.x, m.x), update(g.y, m.y), update(g.z, m.z), update(g.w, m.w)};
        stored.set_quad(matrix.begin + i, matrix.state + i, m);
        Elements<T, kQuad> out;
        out.set(values);
        out.store(u + i);
      },
      [&](std::int64_t i) {
        float m = stored.get(matrix.state + i);
        u[i] = from_float<T>(update(gradients[i], m));
        stored.set(matrix.begin + i, matrix.state + i, m);
      });
  const double sum = block_sum_double<kThreads>(square, scratch);
  if (threadIdx.x == 0) squares[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// norms[i] of matrix i, one block each; 1 in the place of 0.
__global__ void __launch_bounds__(kThreads) norms_kernel(float* norms, const double* squares, std::int64_t blocks) {
  __shared__ double scratch[kThreads];
  double own = 0;
  for (std::int64_t i = threadIdx.x; i < blocks; i += kThreads) own += squares[blockIdx.x * blocks + i];
  const float norm = static_cast<float>(sqrt(block_sum_double<kThreads>(own, scratch)));
  if (threadIdx.x == 0) norms[blockIdx.x] = norm == 0 ? 1.0f : norm;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(T* x, const T* u, const float* norms, std::int64_t elements, std::int64_t stride) {
  const float norm = norms[blockIdx.y];
  x += blockIdx.y * stride;
  u += blockIdx.y * stride;
  for_elements(
      elements,
      [&](std::int64_t i) {
        Elements<T, kQuad> in, out;
        in.load(u + i);
        const float values[kQuad] = {in.get(0) / norm, in.get(1) / norm, in.get(2) / norm, in.get(3) / norm};
        out.set(values);
        out.store(x + i);
      },
      [&](std::int64_t i) { x[i] = from_float<T>(to_float(u[i]) / norm); });
}

template <typename T, typename Masters>
__global__ void __launch_bounds__(kThreads)
    apply_kernel(Masters masters, const T* update, const __grid_constant__ Batch batch, float step_size, float keep) {
  const MuonMatrix& matrix = batch.matrix[blockIdx.y];
  update += blockIdx.y * batch.stride;
  if (!matrix.decay) keep = 1.0f;
  for_elements(
      batch.elements,
      [&](std::int64_t i) {
        Elements<T, kQuad> x;
        x.load(update + i);
        float4 p = masters.get_quad(matrix.parameter + i, matrix.state + i);
        p = {p.x * keep - step_size * x.get(0), p.y * keep - step_size * x.get(1), p.z * keep - step_size * x.get(2),
             p.w * keep - step_size * x.get(3)};
        masters.set_quad(matrix.parameter + i, matrix.state + i, p);
      },
      [&](std::int64_t i) {
        const float p = masters.get(matrix.parameter + i, matrix.state + i);
        masters.set(matrix.parameter + i, matrix.state + i, p * keep - step_size * to_float(update[i]));
      });
}

// ---- launchers --------------------------------------------------------------------------------------------------------
Batch batch_of(std::span<const MuonMatrix> matrices) {
  const MuonShape& shape = matrices[0].shape;
  if (std::ssize(matrices) > muon_batch(shape)) fail(Exit::internal, "muon: %zu matrices at once", matrices.size());
  Batch batch{{}, shape.elements(), stride_of(shape)};
  std::copy(matrices.begin(), matrices.end(), batch.matrix);
  return batch;
}

dim3 grid_of(std::span<const MuonMatrix> matrices) {
  return {static_cast<unsigned>(blocks_of(matrices[0].shape)), static_cast<unsigned>(matrices.size())};
}

template <typename T, typename Momentum>
void launch_momentum(const MuonWorkspace& work, std::span<const MuonMatrix> matrices, const float* gradients,
                     const Momentum& momentum, const MuonStep& step, cudaStream_t stream) {
  const Batch batch = batch_of(matrices);
  const dim3 grid = grid_of(matrices);
  T* const u = reinterpret_cast<T*>(work.next);
  momentum_kernel<<<grid, kThreads, 0, stream>>>(u, work.squares, gradients, momentum, batch, step.momentum,
                                                 step.gradient_scale);
  check_launch("muon_momentum");
  norms_kernel<<<grid.y, kThreads, 0, stream>>>(work.norms, work.squares, grid.x);
  check_launch("muon_norms");
  scale_kernel<<<grid, kThreads, 0, stream>>>(reinterpret_cast<T*>(work.x), static_cast<const T*>(u), work.norms,
                                              batch.elements, batch.stride);
  check_launch("muon_scale");
}

template <typename T, typename Masters>
void launch_apply(const MuonWorkspace& work, std::span<const MuonMatrix> matrices, const Masters& masters,
                  const MuonStep& step, cudaStream_t stream) {
  const MuonShape& shape = matrices[0].shape;
  apply_kernel<<<grid_of(matrices), kThreads, 0, stream>>>(
      masters, reinterpret_cast<const T*>(work.next), batch_of(matrices),
      muon_step_size(step, shape.rows, shape.columns), muon_keep(step, true));
  check_launch("muon_apply");
}

template <typename T>
constexpr cudaDataType_t data_type() {
  return std::is_same_v<T, float> ? CUDA_R_32F : CUDA_R_16BF;
}

}  // namespace

// One matrix fills the GPU if its Gram matrix has that many tiles of 128 x 128.
std::int64_t muon_batch(const MuonShape& shape) {
  constexpr std::int64_t kTile = 128, kTiles = 128;
  const std::int64_t across = ceil_div(shape.shorter(), kTile);
  return std::clamp<std::int64_t>(kTiles / (across * across), 1, kMostMuonBatch);
}

MuonMatmuls muon_matmuls(const MuonShape& shape, cudaDataType_t type) {
  const std::int64_t n = shape.shorter(), rows = shape.rows, columns = shape.columns;
  const auto gemm = [&](Gemm which, std::int64_t N, std::int64_t C, std::int64_t OC, bool addend) {
    MatmulShape result{which, N, C, OC, type};
    result.addend = addend;
    result.batch = muon_batch(shape);
    return result;
  };
  const MatmulShape polynomial = gemm(Gemm::forward, n, n, n, true);
  if (shape.tall()) {
    return {gemm(Gemm::gram, rows, n, n, false), polynomial, gemm(Gemm::forward, rows, n, n, true)};
  }
  return {gemm(Gemm::forward, n, columns, n, false), polynomial, gemm(Gemm::input_grad, n, columns, n, true)};
}

double muon_flops(const MuonShape& shape) {
  const double n = static_cast<double>(shape.shorter()), m = static_cast<double>(shape.elements()) / n;
  return kMuonIterations * (4 * n * n * m + 2 * n * n * n);
}

double muon_moves(const MuonShape& shape) {
  const double n = static_cast<double>(shape.shorter());
  return kMuonIterations * (3 * static_cast<double>(shape.elements()) + 4 * n * n);
}

void MuonWorkspace::reserve(ArenaLayout& layout, std::span<const MuonShape> shapes, std::size_t element_bytes) {
  std::int64_t matrices = 0, grams = 0, blocks = 0, batch = 0;
  for (const MuonShape& shape : shapes) {
    const std::int64_t count = muon_batch(shape);
    matrices = std::max(matrices, count * stride_of(shape));
    grams = std::max(grams, count * Matmul::batch_stride(shape.shorter() * shape.shorter()));
    blocks = std::max(blocks, count * blocks_of(shape));
    batch = std::max(batch, count);
  }
  for (std::byte** each : {&x, &next}) layout.reserve_bytes(each, static_cast<std::size_t>(matrices) * element_bytes);
  for (std::byte** each : {&gram, &polynomial}) {
    layout.reserve_bytes(each, static_cast<std::size_t>(grams) * element_bytes);
  }
  layout.reserve(&squares, blocks);
  layout.reserve(&norms, batch);
}

template <typename T>
void muon_momentum(const MuonWorkspace& work, std::span<const MuonMatrix> matrices, const float* gradients,
                   float* momentum, const MuonStep& step, cudaStream_t stream) {
  launch_momentum<T>(work, matrices, gradients, Fp32Momentum{momentum}, step, stream);
}

template <typename T>
void muon_momentum(const MuonWorkspace& work, std::span<const MuonMatrix> matrices, const float* gradients,
                   bf16* momentum, const MuonStep& step, std::uint64_t seed, cudaStream_t stream) {
  launch_momentum<T>(work, matrices, gradients,
                     RoundedMomentum{reinterpret_cast<std::uint16_t*>(momentum), seed, step.step}, step, stream);
}

template <typename T>
void orthogonalize(Matmul& matmul, const MuonShape& shape, const MuonWorkspace& work) {
  const MuonMatmuls gemms = muon_matmuls(shape, data_type<T>());
  T *x = reinterpret_cast<T*>(work.x), *next = reinterpret_cast<T*>(work.next);
  T *gram = reinterpret_cast<T*>(work.gram), *polynomial = reinterpret_cast<T*>(work.polynomial);
  static_assert(kMuonIterations % 2 == 1, "the result is in `next`");
  for (int iteration = 0; iteration < kMuonIterations; ++iteration) {
    matmul.batched<T>(gemms.gram, gram, x, x);
    matmul.batched<T>(gemms.polynomial, polynomial, gram, gram, kMuonC, gram, kMuonB);
    if (shape.tall()) {
      matmul.batched<T>(gemms.next, next, x, polynomial, 1, x, kMuonA);
    } else {
      matmul.batched<T>(gemms.next, next, polynomial, x, 1, x, kMuonA);
    }
    std::swap(x, next);
  }
}

void muon_apply(const MuonWorkspace& work, std::span<const MuonMatrix> matrices, float* parameters,
                const MuonStep& step, cudaStream_t stream) {
  launch_apply<float>(work, matrices, Fp32Masters{parameters}, step, stream);
}

void muon_apply(const MuonWorkspace& work, std::span<const MuonMatrix> matrices, bf16* parameters, std::int16_t* low,
                const MuonStep& step, cudaStream_t stream) {
  launch_apply<bf16>(work, matrices, split_arrays(parameters, low), step, stream);
}

template void muon_momentum<float>(const MuonWorkspace&, std::span<const MuonMatrix>, const float*, float*,
                                   const MuonStep&, cudaStream_t);
template void muon_momentum<bf16>(const MuonWorkspace&, std::span<const MuonMatrix>, const float*, float*,
                                  const MuonStep&, cudaStream_t);
template void muon_momentum<bf16>(const MuonWorkspace&, std::span<const MuonMatrix>, const float*, bf16*,
                                  const MuonStep&, std::uint64_t, cudaStream_t);
template void orthogonalize<float>(Matmul&, const MuonShape&, const MuonWorkspace&);
template void orthogonalize<bf16>(Matmul&, const MuonShape&, const MuonWorkspace&);

}  // namespace weft::cuda
