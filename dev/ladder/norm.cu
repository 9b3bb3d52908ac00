// The fused norm (residual + RMSNorm or LayerNorm, forward) in seven steps, from one thread a row to the kernel that
// training runs. The problem is NormProblem of ladder.h.
//
// Bytes a row that any version must move: x and residual in, residual_out and out back, 4 C of 2 bytes each. The arithmetic
// is some ten instructions an element, so the floor is the time of a copy of these bytes, and the steps are about one
// question: how does memory stay busy all the time?

#include <algorithm>

#include "dev/ladder/ladder.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::ladder {

namespace {

using cuda::check;
using cuda::check_launch;

constexpr int kWarp = 32;

// The new value of the residual stream, rounded to its storage type before statistics are taken of it: whoever reads
// residual_out later and computes the norm again gets the same bits.
__device__ bf16 add(bf16 x, bf16 residual) {
  return __float2bfloat16_rn(__bfloat162float(x) + __bfloat162float(residual));
}

__device__ float scaled(float xhat, const bf16* weight, const bf16* bias, int column) {
  return xhat * __bfloat162float(weight[column]) + (bias != nullptr ? __bfloat162float(bias[column]) : 0.0f);
}

unsigned blocks_for(std::int64_t rows, int rows_per_block) {
  return static_cast<unsigned>((rows + rows_per_block - 1) / rows_per_block);
}

// ---- step 1: one thread a row -----------------------------------------------------------------------------------------
// The plain loops, as on a CPU. Neighbouring threads read addresses that lie a whole row apart, so each of a warp's loads
// touches 32 sectors of 32 bytes and uses 2 bytes of each; with 16,384 rows a GPU of 132 multiprocessors has 124 threads
// on each, too few to hide any latency.
__global__ void one_thread_a_row(NormProblem p) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= p.rows) return;
  const bf16 *x = p.x + row * p.C, *residual = p.residual + row * p.C;
  bf16 *h = p.residual_out + row * p.C, *out = p.out + row * p.C;
  float sum = 0;
  for (int c = 0; c < p.C; ++c) {
    h[c] = add(x[c], residual[c]);
    sum += __bfloat162float(h[c]);
  }
  const float mean = p.layernorm ? sum / p.C : 0.0f;
  float squares = 0;
  for (int c = 0; c < p.C; ++c) {
    const float centred = __bfloat162float(h[c]) - mean;
    squares += centred * centred;
  }
  const float rstd = rsqrtf(squares / p.C + p.eps);
  for (int c = 0; c < p.C; ++c)
    out[c] = __float2bfloat16_rn(scaled((__bfloat162float(h[c]) - mean) * rstd, p.weight, p.bias, c));
}

void launch_one_thread_a_row(const NormProblem& p, cudaStream_t stream) {
  constexpr int kThreads = 128;
  one_thread_a_row<<<blocks_for(p.rows, kThreads), kThreads, 0, stream>>>(p);
  check_launch("ladder: norm, one thread a row");
}

// ---- step 2: one block a row, sums by a tree in shared memory ---------------------------------------------------------
// Neighbouring threads read neighbouring columns: a warp's load is 64 contiguous bytes. Sums now cross threads, by a tree
// in shared memory whose every level ends with a barrier: log2(256) = 8 barriers a sum, two sums a row.
constexpr int kBlock = 256;

__device__ float tree_sum(float value, float* scratch) {
  scratch[threadIdx.x] = value;
  __syncthreads();
  for (int half = kBlock / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
    __syncthreads();
  }
  const float total = scratch[0];
  __syncthreads();  // everybody has read the total before the next sum overwrites it
  return total;
}

// Steps 2 and 3 differ in the sum alone. A thread reads back from residual_out only what it wrote itself, so no barrier
// stands between the passes.
template <float (*BlockSum)(float, float*)>
__device__ void block_row(const NormProblem& p, float* scratch) {
  const std::int64_t row = blockIdx.x;
  const bf16 *x = p.x + row * p.C, *residual = p.residual + row * p.C;
  bf16 *h = p.residual_out + row * p.C, *out = p.out + row * p.C;
  float sum = 0;
  for (int c = threadIdx.x; c < p.C; c += kBlock) {
    h[c] = add(x[c], residual[c]);
    sum += __bfloat162float(h[c]);
  }
  const float mean = p.layernorm ? BlockSum(sum, scratch) / p.C : 0.0f;
  float squares = 0;
  for (int c = threadIdx.x; c < p.C; c += kBlock) {
    const float centred = __bfloat162float(h[c]) - mean;
    squares += centred * centred;
  }
  const float rstd = rsqrtf(BlockSum(squares, scratch) / p.C + p.eps);
  for (int c = threadIdx.x; c < p.C; c += kBlock)
    out[c] = __float2bfloat16_rn(scaled((__bfloat162float(h[c]) - mean) * rstd, p.weight, p.bias, c));
}

__global__ void __launch_bounds__(kBlock) one_block_a_row(NormProblem p) {
  __shared__ float scratch[kBlock];
  block_row<tree_sum>(p, scratch);
}

void launch_one_block_a_row(const NormProblem& p, cudaStream_t stream) {
  one_block_a_row<<<blocks_for(p.rows, 1), kBlock, 0, stream>>>(p);
  check_launch("ladder: norm, one block a row");
}

// ---- step 3: sums by warp shuffles ------------------------------------------------------------------------------------
// The lanes of a warp exchange registers without shared memory and without a barrier. What is left for shared memory is
// one number a warp: two barriers a sum instead of nine. The butterfly gives every lane the sum in one fixed order.
__device__ float warp_sum(float value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

__device__ float shuffle_sum(float value, float* scratch) {
  constexpr int kWarps = kBlock / kWarp;
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = 0;
  for (int warp = 0; warp < kWarps; ++warp) total += scratch[warp];
  __syncthreads();  // everybody has read the partial sums before the next sum overwrites them
  return total;
}

__global__ void __launch_bounds__(kBlock) sums_by_shuffles(NormProblem p) {
  __shared__ float scratch[kBlock / kWarp];
  block_row<shuffle_sum>(p, scratch);
}

void launch_sums_by_shuffles(const NormProblem& p, cudaStream_t stream) {
  sums_by_shuffles<<<blocks_for(p.rows, 1), kBlock, 0, stream>>>(p);
  check_launch("ladder: norm, sums by shuffles");
}

// ---- step 4: accesses of 16 bytes -------------------------------------------------------------------------------------
// The widest access of a thread is 16 bytes, eight bf16: an eighth of the load and store instructions, and eight times as
// many bytes under way for each of them. Whoever is short of either, instructions or bytes in flight, gains.
struct alignas(16) Eight {
  bf16 value[8];
};

__device__ Eight load(const bf16* address) {
  Eight eight;
  *reinterpret_cast<int4*>(&eight) = *reinterpret_cast<const int4*>(address);
  return eight;
}
__device__ void store(bf16* address, const Eight& eight) {
  *reinterpret_cast<int4*>(address) = *reinterpret_cast<const int4*>(&eight);
}

__device__ Eight add(const Eight& x, const Eight& residual) {
  Eight h;
#pragma unroll
  for (int i = 0; i < 8; ++i) h.value[i] = add(x.value[i], residual.value[i]);
  return h;
}

// Weight and bias are read by every row: they stay in L1 and L2.
__device__ Eight normalised(const float (&h)[8], float mean, float rstd, const NormProblem& p, int column) {
  const Eight weight = load(p.weight + column);
  Eight bias = {}, out;
  if (p.bias != nullptr) bias = load(p.bias + column);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    out.value[i] =
        __float2bfloat16_rn((h[i] - mean) * rstd * __bfloat162float(weight.value[i]) + __bfloat162float(bias.value[i]));
  return out;
}

__device__ void widen(float (&to)[8], const Eight& from) {
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = __bfloat162float(from.value[i]);
}

__global__ void __launch_bounds__(kBlock) wide_accesses(NormProblem p) {
  __shared__ float scratch[kBlock / kWarp];
  const std::int64_t row = blockIdx.x;
  const bf16 *x = p.x + row * p.C, *residual = p.residual + row * p.C;
  bf16 *stream = p.residual_out + row * p.C, *out = p.out + row * p.C;
  float h[8], sum = 0;
  for (int c = threadIdx.x * 8; c < p.C; c += kBlock * 8) {
    const Eight joined = add(load(x + c), load(residual + c));
    store(stream + c, joined);
    widen(h, joined);
    for (int i = 0; i < 8; ++i) sum += h[i];
  }
  const float mean = p.layernorm ? shuffle_sum(sum, scratch) / p.C : 0.0f;
  float squares = 0;
  for (int c = threadIdx.x * 8; c < p.C; c += kBlock * 8) {
    widen(h, load(stream + c));
    for (int i = 0; i < 8; ++i) squares += (h[i] - mean) * (h[i] - mean);
  }
  const float rstd = rsqrtf(shuffle_sum(squares, scratch) / p.C + p.eps);
  for (int c = threadIdx.x * 8; c < p.C; c += kBlock * 8) {
    widen(h, load(stream + c));
    store(out + c, normalised(h, mean, rstd, p, c));
  }
}

void launch_wide_accesses(const NormProblem& p, cudaStream_t stream) {
  wide_accesses<<<blocks_for(p.rows, 1), kBlock, 0, stream>>>(p);
  check_launch("ladder: norm, 16-byte accesses");
}

// ---- step 5: one pass over memory, the row stays in registers ---------------------------------------------------------
// A row of 2048 columns is 8 numbers for each of 256 threads: they fit the registers. Every byte is read once and written
// once, and the variance is still computed in two passes, around the mean, because the second pass costs registers and no
// memory. (The one-pass formula E[h^2] - mean^2 cancels where the mean is large.) The number of groups of eight is a
// template parameter: registers cannot be indexed by a variable.
template <int kGroups>
__global__ void __launch_bounds__(kBlock) row_in_registers(NormProblem p) {
  __shared__ float scratch[kBlock / kWarp];
  const std::int64_t row = blockIdx.x;
  Eight x[kGroups], residual[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {  // all loads before the first use: they are under way together
    const int c = (g * kBlock + threadIdx.x) * 8;
    x[g] = residual[g] = Eight{};
    if (c < p.C) x[g] = load(p.x + row * p.C + c), residual[g] = load(p.residual + row * p.C + c);
  }
  float h[kGroups][8], sum = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int c = (g * kBlock + threadIdx.x) * 8;
    const Eight joined = add(x[g], residual[g]);  // zeros past the end of the row
    if (c < p.C) store(p.residual_out + row * p.C + c, joined);
    widen(h[g], joined);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += h[g][i];
  }
  const float mean = p.layernorm ? shuffle_sum(sum, scratch) / p.C : 0.0f;
  float squares = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if ((g * kBlock + threadIdx.x) * 8 >= p.C) continue;  // a zero there is not zero once the mean is subtracted
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += (h[g][i] - mean) * (h[g][i] - mean);
  }
  const float rstd = rsqrtf(shuffle_sum(squares, scratch) / p.C + p.eps);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int c = (g * kBlock + threadIdx.x) * 8;
    if (c < p.C) store(p.out + row * p.C + c, normalised(h[g], mean, rstd, p, c));
  }
}

void launch_row_in_registers(const NormProblem& p, cudaStream_t stream) {
  const auto run = [&](auto kernel) { kernel<<<blocks_for(p.rows, 1), kBlock, 0, stream>>>(p); };
  if (p.C <= kBlock * 8) {
    run(row_in_registers<1>);
  } else if (p.C <= kBlock * 16) {
    run(row_in_registers<2>);
  } else if (p.C <= kBlock * 32) {
    run(row_in_registers<4>);
  } else {
    run(row_in_registers<8>);
  }
  check_launch("ladder: norm, row in registers");
}

// ---- step 6: blocks that stay, the next row under way, streaming accesses ---------------------------------------------
// In step 5 a block loads, then waits for its sums with nothing under way, then stores and ends. Here a block walks over
// rows, and the loads of its next row are issued before the sums of this one: memory has work while threads wait at
// barriers. There is one barrier a sum, because two scratch areas alternate. x and residual are read once and nobody
// reads residual_out soon: loads and stores that are marked "evict first" (ld.cs, st.cs) leave L2 to `out`, which the next
// GEMM reads.
template <int kThreads>
__device__ float alternating_sum(float value, float (&scratch)[2][kThreads / kWarp], int& area) {
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) scratch[area][threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) total += scratch[area][warp];
  area ^= 1;  // this area is written again after the barrier of the next sum, which every reader of it has reached
  return total;
}

__device__ Eight load_streaming(const bf16* address) {
  Eight eight;
  *reinterpret_cast<int4*>(&eight) = __ldcs(reinterpret_cast<const int4*>(address));
  return eight;
}
__device__ void store_streaming(bf16* address, const Eight& eight) {
  __stcs(reinterpret_cast<int4*>(address), *reinterpret_cast<const int4*>(&eight));
}

template <int kThreads, int kGroups>
__global__ void __launch_bounds__(kThreads) persistent(NormProblem p) {
  __shared__ float scratch[2][kThreads / kWarp];
  int area = 0;
  Eight x[kGroups], residual[kGroups];
  const auto fetch = [&](std::int64_t row) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int c = (g * kThreads + threadIdx.x) * 8;
      x[g] = residual[g] = Eight{};
      if (c < p.C) x[g] = load_streaming(p.x + row * p.C + c), residual[g] = load_streaming(p.residual + row * p.C + c);
    }
  };
  std::int64_t row = blockIdx.x;
  if (row < p.rows) fetch(row);
  for (; row < p.rows; row += gridDim.x) {  // the same number of rounds for all threads of a block
    float h[kGroups][8], sum = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int c = (g * kThreads + threadIdx.x) * 8;
      const Eight joined = add(x[g], residual[g]);
      if (c < p.C) store_streaming(p.residual_out + row * p.C + c, joined);
      widen(h[g], joined);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += h[g][i];
    }
    if (row + gridDim.x < p.rows) fetch(row + gridDim.x);
    const float mean = p.layernorm ? alternating_sum<kThreads>(sum, scratch, area) / p.C : 0.0f;
    float squares = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if ((g * kThreads + threadIdx.x) * 8 >= p.C) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += (h[g][i] - mean) * (h[g][i] - mean);
    }
    const float rstd = rsqrtf(alternating_sum<kThreads>(squares, scratch, area) / p.C + p.eps);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int c = (g * kThreads + threadIdx.x) * 8;
      if (c < p.C) store(p.out + row * p.C + c, normalised(h[g], mean, rstd, p, c));
    }
  }
}

template <int kThreads, int kGroups>
void run_persistent(const NormProblem& p, cudaStream_t stream) {
  int resident = 0;  // blocks of a multiprocessor
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, persistent<kThreads, kGroups>, kThreads, 0),
        "ladder: occupancy");
  const std::int64_t room =
      static_cast<std::int64_t>(std::max(resident, 1)) * cuda::device_attribute(cudaDevAttrMultiProcessorCount);
  persistent<kThreads, kGroups><<<static_cast<unsigned>(std::min(p.rows, room)), kThreads, 0, stream>>>(p);
}

void launch_persistent(const NormProblem& p, cudaStream_t stream) {
  if (p.C <= 1024) {
    run_persistent<128, 1>(p, stream);
  } else if (p.C <= 2048) {
    run_persistent<256, 1>(p, stream);
  } else if (p.C <= 4096) {
    run_persistent<256, 2>(p, stream);
  } else if (p.C <= 8192) {
    run_persistent<256, 4>(p, stream);
  } else {
    run_persistent<512, 4>(p, stream);
  }
  check_launch("ladder: norm, persistent");
}

// ---- step 7: the kernel that training runs ----------------------------------------------------------------------------
// llmc/cuda/op/norm/residual_norm_forward.cu: the next row is copied to shared memory by cp.async, so that it costs no
// registers; the threads of a row, the rows of a block and kernels without bounds tests are chosen by the width.
void launch_library(const NormProblem& p, cudaStream_t stream) {
  using namespace cuda;
  ResidualNormShape shape;
  shape.rows = p.rows, shape.C = p.C, shape.eps = p.eps;
  shape.kind = p.layernorm ? NormKind::layernorm : NormKind::rmsnorm;
  ResidualNormForward<bf16, bf16> io;
  io.x = p.x, io.residual = p.residual, io.weight = p.weight, io.bias = p.bias;
  io.residual_out = p.residual_out, io.out = p.out;
  residual_norm_forward<bf16, bf16>(shape, io, stream);
}

}  // namespace

const std::vector<Step<NormProblem>>& norm_steps() {
  static const std::vector<Step<NormProblem>> steps = {
      {"1 one thread a row", launch_one_thread_a_row},
      {"2 one block a row, tree in shared memory", launch_one_block_a_row},
      {"3 sums by warp shuffles", launch_sums_by_shuffles},
      {"4 accesses of 16 bytes", launch_wide_accesses},
      {"5 one pass, the row in registers", launch_row_in_registers},
      {"6 persistent, next row under way", launch_persistent},
      {"7 weft's kernel", launch_library},
  };
  return steps;
}

}  // namespace weft::ladder
