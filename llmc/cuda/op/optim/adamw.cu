// AdamW (Loshchilov & Hutter, 2019) over all tensors in one launch, and the global gradient norm. All arrays are arenas
// of one layout; arithmetic in fp32, in the order of llmc/cpu/adamw.cpp:
//
//   g = gradient scale;   m += (1 - beta1) (g - m);   v = beta2 v + (1 - beta2) g g
//   p = p keep - step_size m / (sqrt(v) / sqrt(1 - beta2^t) + eps)      keep = 1 - lr decay, step_size = lr / (1 - beta1^t)
//
// Bytes moved an element: g is read, p, m and v are read and written, 28 bytes, in fp32 and with split masters alike (p
// is 4 bytes in both); 20 with moments in bf16. The norm reads 4 bytes an element.
//
// A launch runs over a list of ranges of up to kAdamWBlockElements elements, each of which decays or does not as a
// whole, so a thread block finds its elements by its index, however many tensors there are. Every element is used once
// a step, so it is read and written with evict-first.
//
// Where codes in fp8 are wanted, the blocks are tiles of the matrices: 2 bytes more an element, and no pass that reads the
// parameters again.

#include "llmc/cuda/op/optim/adamw.h"

#include <algorithm>
#include <cmath>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/fp8/fp8.cuh"
#include "llmc/cuda/op/optim/update.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256;

struct Scalars {
  float step_size, inv_sqrt_correction2, keep, beta1, beta2, eps, gradient_scale;
};

Scalars scalars_of(const AdamWStep& step) {
  const double t = static_cast<double>(step.step);
  const double correction1 = 1.0 - std::pow(static_cast<double>(step.beta1), t);
  const double correction2 = 1.0 - std::pow(static_cast<double>(step.beta2), t);
  return {static_cast<float>(step.learning_rate / correction1),
          static_cast<float>(1.0 / std::sqrt(correction2)),
          1.0f - step.learning_rate * step.weight_decay,
          step.beta1,
          step.beta2,
          step.eps,
          step.gradient_scale};
}

__device__ float updated(float p, float gradient, float& m, float& v, const Scalars& s) {
  const float g = gradient * s.gradient_scale;
  m = m + (1.0f - s.beta1) * (g - m);
  v = s.beta2 * v + (1.0f - s.beta2) * g * g;
  return p * s.keep - s.step_size * m / (sqrtf(v) * s.inv_sqrt_correction2 + s.eps);
}

// ---- storage of the moments --------------------------------------------------------------------------------------------
struct Fp32Moments {
  float *m, *v;

  __device__ void shift_second(std::int64_t elements) { v += elements; }
  __device__ void get(std::int64_t j, float& first, float& second) const {
    first = m[j];
    second = v[j];
  }
  __device__ void set(std::int64_t, std::int64_t j, float first, float second) const {
    m[j] = first;
    v[j] = second;
  }
  __device__ void get_quad(std::int64_t j, float4& first, float4& second) const {
    first = __ldcs(reinterpret_cast<const float4*>(m + j));
    second = __ldcs(reinterpret_cast<const float4*>(v + j));
  }
  __device__ void set_quad(std::int64_t, std::int64_t j, float4 first, float4 second) const {
    __stcs(reinterpret_cast<float4*>(m + j), first);
    __stcs(reinterpret_cast<float4*>(v + j), second);
  }
};

struct RoundedMoments {
  std::uint16_t *m, *v;  // the bits of bf16
  std::uint64_t seed;
  std::int64_t step;

  static __device__ float wide(unsigned bits) { return __uint_as_float(bits << 16); }
  static __device__ unsigned rounded(float value, unsigned random) {
    return round_at_random(__float_as_uint(value), random);
  }
  static __device__ float4 wide(uint2 bits) {
    return {wide(bits.x & 0xffffu), wide(bits.x >> 16), wide(bits.y & 0xffffu), wide(bits.y >> 16)};
  }
  __device__ void shift_second(std::int64_t elements) { v += elements; }
  __device__ void get(std::int64_t j, float& first, float& second) const {
    first = wide(m[j]);
    second = wide(v[j]);
  }
  __device__ void set(std::int64_t i, std::int64_t j, float first, float second) const {
    const PhiloxWords random = rounding_words(seed, step, i / kQuad);
    unsigned word = 0;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) word = i % kQuad == k ? random.word[k] : word;
    m[j] = static_cast<std::uint16_t>(rounded(first, word & 0xffffu));
    v[j] = static_cast<std::uint16_t>(rounded(second, word >> 16));
  }
  __device__ void get_quad(std::int64_t j, float4& first, float4& second) const {
    first = wide(__ldcs(reinterpret_cast<const uint2*>(m + j)));
    second = wide(__ldcs(reinterpret_cast<const uint2*>(v + j)));
  }
  __device__ void set_quad(std::int64_t i, std::int64_t j, float4 first, float4 second) const {
    const PhiloxWords random = rounding_words(seed, step, i / kQuad);
    const auto low = [&](int k) { return random.word[k] & 0xffffu; };
    const auto high = [&](int k) { return random.word[k] >> 16; };
    __stcs(reinterpret_cast<uint2*>(m + j), uint2{rounded(first.x, low(0)) | rounded(first.y, low(1)) << 16,
                                                  rounded(first.z, low(2)) | rounded(first.w, low(3)) << 16});
    __stcs(reinterpret_cast<uint2*>(v + j), uint2{rounded(second.x, high(0)) | rounded(second.y, high(1)) << 16,
                                                  rounded(second.z, high(2)) | rounded(second.w, high(3)) << 16});
  }
};

// Returns the updated masters.
template <typename Masters, typename Moments>
__device__ float4 update_quad(const Masters& masters, const float* gradients, const Moments& moments, std::int64_t i,
                              std::int64_t j, const Scalars& s) {
  const float4 g = __ldcs(reinterpret_cast<const float4*>(gradients + i));
  float4 m, v;
  moments.get_quad(j, m, v);
  float4 p = masters.get_quad(i, j);
  p.x = updated(p.x, g.x, m.x, v.x, s);
  p.y = updated(p.y, g.y, m.y, v.y, s);
  p.z = updated(p.z, g.z, m.z, v.z, s);
  p.w = updated(p.w, g.w, m.w, v.w, s);
  masters.set_quad(i, j, p);
  moments.set_quad(i, j, m, v);
  return p;
}

template <typename Masters, typename Moments>
__device__ void update_one(const Masters& masters, const float* gradients, const Moments& moments, std::int64_t i,
                           std::int64_t j, const Scalars& s) {
  float m, v;
  moments.get(j, m, v);
  masters.set(i, j, updated(masters.get(i, j), gradients[i], m, v, s));
  moments.set(i, j, m, v);
}

template <typename Masters, typename Moments>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(Masters masters, const float* gradients, Moments moments, const AdamWBlock* blocks, Scalars scalars,
                 const GradientNorm* norm) {
  if (norm != nullptr) {
    if (norm->non_finite != 0) return;
    scalars.gradient_scale = norm->gradient_scale;
  }
  const AdamWBlock block = blocks[blockIdx.x];
  if (block.decay == 0) scalars.keep = 1.0f;
  const std::int64_t state = block.state - block.begin;
  gradients += block.gradient - block.begin;
  masters.shift(block.parameter - block.begin);
  moments.shift_second(block.second);
  // Tensors of a group are adjacent without padding, so a block may begin and end inside a quad.
  const std::int64_t end = block.begin + block.count;
  const std::int64_t first_quad = min(ceil_div(block.begin, kQuad) * kQuad, end);
  const std::int64_t last_quad = max(end / kQuad * kQuad, first_quad);
#pragma unroll 2
  for (std::int64_t i = first_quad + threadIdx.x * kQuad; i < last_quad; i += kThreads * kQuad)
    update_quad(masters, gradients, moments, i, i + state, scalars);
  if (const std::int64_t i = block.begin + threadIdx.x; i < first_quad)
    update_one(masters, gradients, moments, i, i + state, scalars);
  if (const std::int64_t i = last_quad + threadIdx.x; i < end)
    update_one(masters, gradients, moments, i, i + state, scalars);
}

template <typename Masters, typename Moments>
void launch(const Masters& masters, const float* gradients, const Moments& moments, const AdamWBlock* blocks,
            std::int64_t block_count, const AdamWStep& step, const GradientNorm* norm, cudaStream_t stream) {
  if (block_count == 0) return;
  adamw_kernel<<<static_cast<unsigned>(block_count), kThreads, 0, stream>>>(masters, gradients, moments, blocks,
                                                                            scalars_of(step), norm);
  check_launch("adamw");
}

// The matrix of tile `tile`: the last one that begins at it or before.
__device__ const AdamWMatrix& matrix_of(const AdamWMatrix* matrices, std::int64_t count, std::int64_t tile) {
  std::int64_t first = 0;
  while (count > 1) {
    const std::int64_t half = count / 2;
    if (matrices[first + half].first_tile <= tile) first += half;
    count -= half;
  }
  return matrices[first];
}

// The value of a master's bf16 parameter.
__device__ float stored_parameter(float master) {
  return __uint_as_float(static_cast<unsigned>(split_master(__float_as_uint(master)).high) << 16);
}

template <typename Moments>
__global__ void __launch_bounds__(fp8_tile::kThreads)
    adamw_fp8_kernel(SplitMasters masters, const float* gradients, Moments moments, const AdamWMatrix* matrices,
                     std::int64_t count, Scalars scalars) {
  using namespace fp8_tile;
  constexpr int kRowThreads = kTileColumns / kQuad, kRowsAtOnce = fp8_tile::kThreads / kRowThreads;
  __shared__ unsigned tile[kTileWords], scratch[3];
  const AdamWMatrix matrix = matrix_of(matrices, count, blockIdx.x);
  if (matrix.decay == 0) scalars.keep = 1.0f;
  const float scale = *matrix.codes.scale;
  const std::int64_t number = blockIdx.x - matrix.first_tile, across = ceil_div(matrix.columns, kTileColumns);
  const std::int64_t first_row = number / across * kTileRows, first_column = number % across * kTileColumns;
  const int word = threadIdx.x % kRowThreads, first = threadIdx.x / kRowThreads;
  const std::int64_t column = first_column + word * kQuad;
  ThreadCounters counters;
  if (column < matrix.columns) {
    const int rows = static_cast<int>(min(matrix.rows - first_row, static_cast<std::int64_t>(kTileRows)));
#pragma unroll 2
    for (int row = first; row < rows; row += kRowsAtOnce) {
      const std::int64_t at = (first_row + row) * matrix.columns + column, i = matrix.begin + at;
      const float4 p = update_quad(masters, gradients, moments, i, i, scalars);
      const float values[kQuad] = {stored_parameter(p.x), stored_parameter(p.y), stored_parameter(p.z),
                                   stored_parameter(p.w)};
      const unsigned codes = round_four<Fp8Format::e4m3>(values, scale, counters);
      *reinterpret_cast<unsigned*>(matrix.codes.codes + at) = codes;
      tile[row * kTileStride + word] = codes;
    }
  }
  __syncthreads();
  store_transposed(matrix.codes.transposed, tile, first_row, first_column, matrix.rows, matrix.columns, 0);
  add_counters(matrix.codes, counters, scratch);
}

template <typename Moments>
void launch_fp8(const SplitMasters& masters, const float* gradients, const Moments& moments,
                const AdamWMatrix* matrices, std::int64_t count, std::int64_t tiles, const AdamWStep& step,
                cudaStream_t stream) {
  if (tiles == 0) return;
  adamw_fp8_kernel<<<static_cast<unsigned>(tiles), fp8_tile::kThreads, 0, stream>>>(masters, gradients, moments,
                                                                                    matrices, count, scalars_of(step));
  check_launch("adamw_fp8");
}

RoundedMoments rounded_moments(bf16* moment1, bf16* moment2, std::uint64_t seed, std::int64_t step) {
  return {reinterpret_cast<std::uint16_t*>(moment1), reinterpret_cast<std::uint16_t*>(moment2), seed, step};
}

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) convert_masters_kernel(To to, From from, std::int64_t count) {
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kQuad;
  if (i + kQuad <= count) {
    to.set_quad(i, i, from.get_quad(i, i));
  } else {
    for (std::int64_t j = i; j < count; ++j) to.set(j, j, from.get(j, j));
  }
}

template <typename From, typename To>
void convert_masters(To to, From from, std::int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  const unsigned blocks = static_cast<unsigned>(ceil_div(count, kThreads * kQuad));
  convert_masters_kernel<<<blocks, kThreads, 0, stream>>>(to, from, count);
  check_launch("convert_masters");
}

// ---- global norm ------------------------------------------------------------------------------------------------------
constexpr int kSumThreads = 1024;

// Each thread loads eight quads, all in flight at once.
__global__ void __launch_bounds__(kThreads)
    block_squares_kernel(double* squares, const float* gradients, const AdamWBlock* blocks) {
  __shared__ double scratch[kThreads];
  const std::int64_t begin = blocks[blockIdx.x].gradient, end = begin + blocks[blockIdx.x].count;
  const std::int64_t first_quad = min(ceil_div(begin, kQuad) * kQuad, end);
  const std::int64_t last_quad = max(end / kQuad * kQuad, first_quad);
  float lane[4] = {0, 0, 0, 0};
#pragma unroll 8
  for (std::int64_t i = first_quad + threadIdx.x * kQuad; i < last_quad; i += kThreads * kQuad) {
    const float4 g = __ldcs(reinterpret_cast<const float4*>(gradients + i));
    lane[0] += g.x * g.x;
    lane[1] += g.y * g.y;
    lane[2] += g.z * g.z;
    lane[3] += g.w * g.w;
  }
  if (const std::int64_t i = begin + threadIdx.x; i < first_quad) lane[0] += gradients[i] * gradients[i];
  if (const std::int64_t i = last_quad + threadIdx.x; i < end) lane[1] += gradients[i] * gradients[i];
  const double own = static_cast<double>(lane[0]) + lane[1] + lane[2] + lane[3];
  const double sum = block_sum_double<kThreads>(own, scratch);
  if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

// A single block suffices: it reads 8 bytes for 8192 gradients.
__global__ void __launch_bounds__(kSumThreads)
    gradient_norm_kernel(GradientNorm* result, const double* squares, const std::int32_t* order, std::int64_t count,
                         float clip) {
  __shared__ double scratch[kSumThreads];
  double own = 0;
#pragma unroll 8
  for (std::int64_t i = threadIdx.x; i < count; i += kSumThreads) own += squares[order != nullptr ? order[i] : i];
  const double norm = sqrt(block_sum_double<kSumThreads>(own, scratch));
  if (threadIdx.x != 0) return;
  result->norm = norm;
  result->gradient_scale = clip > 0 ? static_cast<float>(fmin(1.0, clip / (norm + 1e-6))) : 1.0f;
  result->non_finite = isfinite(norm) ? 0 : 1;
}

}  // namespace

void block_squares(double* squares, const float* gradients, const AdamWBlock* blocks, std::int64_t block_count,
                   cudaStream_t stream) {
  if (block_count == 0) return;
  block_squares_kernel<<<static_cast<unsigned>(block_count), kThreads, 0, stream>>>(squares, gradients, blocks);
  check_launch("block_squares");
}

void gradient_norm(GradientNorm* result, const double* squares, const std::int32_t* order, std::int64_t count,
                   float clip, cudaStream_t stream) {
  gradient_norm_kernel<<<1, kSumThreads, 0, stream>>>(result, squares, order, count, clip);
  check_launch("gradient_norm");
}

std::vector<AdamWBlock> adamw_blocks(std::span<const AdamWRange> ranges) {
  std::vector<AdamWBlock> blocks;
  std::size_t next = 0;
  while (next < ranges.size()) {
    const bool decay = ranges[next].decay;
    std::int64_t begin = ranges[next].begin, end = ranges[next].end;
    for (++next; next < ranges.size() && ranges[next].begin == end && ranges[next].decay == decay; ++next)
      end = ranges[next].end;
    while (begin < end) {
      const std::int64_t stop = std::min((begin / kAdamWBlockElements + 1) * kAdamWBlockElements, end);
      blocks.push_back({begin, begin, begin, begin, static_cast<std::int32_t>(stop - begin), decay ? 1 : 0});
      begin = stop;
    }
  }
  return blocks;
}

void adamw(float* parameters, const float* gradients, float* moment1, float* moment2, const AdamWBlock* blocks,
           std::int64_t block_count, const AdamWStep& step, const GradientNorm* norm, cudaStream_t stream) {
  launch(Fp32Masters{parameters}, gradients, Fp32Moments{moment1, moment2}, blocks, block_count, step, norm, stream);
}

void adamw(bf16* parameters, std::int16_t* low, const float* gradients, float* moment1, float* moment2,
           const AdamWBlock* blocks, std::int64_t block_count, const AdamWStep& step, const GradientNorm* norm,
           cudaStream_t stream) {
  launch(split_arrays(parameters, low), gradients, Fp32Moments{moment1, moment2}, blocks, block_count, step, norm,
         stream);
}

std::int64_t adamw_tiles(std::int64_t rows, std::int64_t columns) {
  return ceil_div(rows, fp8_tile::kTileRows) * ceil_div(columns, fp8_tile::kTileColumns);
}

void adamw_fp8(bf16* parameters, std::int16_t* low, const float* gradients, float* moment1, float* moment2,
               const AdamWMatrix* matrices, std::int64_t count, std::int64_t tiles, const AdamWStep& step,
               cudaStream_t stream) {
  launch_fp8(split_arrays(parameters, low), gradients, Fp32Moments{moment1, moment2}, matrices, count, tiles, step,
             stream);
}

void adamw_fp8(bf16* parameters, std::int16_t* low, const float* gradients, bf16* moment1, bf16* moment2,
               const AdamWMatrix* matrices, std::int64_t count, std::int64_t tiles, const AdamWStep& step,
               std::uint64_t seed, cudaStream_t stream) {
  launch_fp8(split_arrays(parameters, low), gradients, rounded_moments(moment1, moment2, seed, step.step), matrices,
             count, tiles, step, stream);
}

void adamw(bf16* parameters, std::int16_t* low, const float* gradients, bf16* moment1, bf16* moment2,
           const AdamWBlock* blocks, std::int64_t block_count, const AdamWStep& step, const GradientNorm* norm,
           std::uint64_t seed, cudaStream_t stream) {
  launch(split_arrays(parameters, low), gradients, rounded_moments(moment1, moment2, seed, step.step), blocks,
         block_count, step, norm, stream);
}

void split_masters(bf16* parameters, std::int16_t* low, const float* masters, std::int64_t count, cudaStream_t stream) {
  convert_masters(split_arrays(parameters, low), Fp32Masters{const_cast<float*>(masters)}, count, stream);
}

void join_masters(float* masters, const bf16* parameters, const std::int16_t* low, std::int64_t count,
                  cudaStream_t stream) {
  convert_masters(Fp32Masters{masters}, split_arrays(parameters, low), count, stream);
}

}  // namespace weft::cuda
