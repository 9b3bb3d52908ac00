// What forward and backward of the fused norm and post_norm.cu share: how a row is spread over the registers of its
// threads, sums over a row, the asynchronous copy of the next row, and the addition of the branch to the residual
// stream.
//
//  - A row lies in the registers of one warp, several warps or a whole block, so it is read from memory once, and its
//    statistics are computed in two passes over registers. A thread owns groups of columns that take 16 bytes of the
//    stream: adjacent threads access adjacent 16 bytes, so a warp's accesses fill every sector of memory.
//  - Blocks are persistent and loop over the rows. While a thread works on one row, its part of the next one is copied
//    to shared memory (cp.async); it reads back only what it copied itself, so this needs no barrier.
//  - Plain kernels handle x, residual, weights and biases. Everything else (dropout, scales, in backward a second
//    output and recomputing h) is in the full kernels, which do not prefetch.
//  - Checking columns against C costs as many instructions as the arithmetic. Spreads of exactly C columns (kExact)
//    need no such checks; they exist for bf16, the storage type of training.
#pragma once

#include <cuda_pipeline.h>

#include <algorithm>

#include "llmc/base/philox.h"
#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/norm/residual_norm.h"

namespace weft::cuda::norm_detail {

// How a row of a stream in R is spread over threads: thread `lane` of the row owns groups lane, lane + kRowThreads, ...
// A block works on kRows rows at once.
template <typename R, int kRowThreads_, int kThreadColumns_, bool kExact_ = false,
          int kRows_ = kRowThreads_ == kWarpSize ? 8 : 1>
struct Spread {
  static constexpr int kGroup = 16 / static_cast<int>(sizeof(R));  // consecutive columns of one thread
  static constexpr int kRowThreads = kRowThreads_;
  static constexpr int kThreadColumns = kThreadColumns_;
  static constexpr int kGroups = kThreadColumns / kGroup;
  static constexpr bool kExact = kExact_;  // C is kColumns: no column is outside
  static constexpr int kColumns = kRowThreads * kThreadColumns;
  static constexpr int kRows = kRows_;
  static constexpr int kThreads = kRowThreads * kRows;

  static __device__ int lane() { return threadIdx.x % kRowThreads; }
  static __device__ int slot() { return threadIdx.x / kRowThreads; }
  static __device__ int column(int g) { return (g * kRowThreads + lane()) * kGroup; }
  static __device__ bool outside(int g, std::int64_t C) { return !kExact && column(g) >= C; }
};

template <typename T, typename S>
using Group = Elements<T, S::kGroup>;

// Adds kValues numbers over the threads of a row, in an order that does not depend on timing. One barrier a sum
// suffices: two scratch areas alternate, and a thread that writes one has passed the barrier after the reads of it.
template <typename S>
struct RowSum {
  static constexpr int kWarps = S::kRowThreads / kWarpSize;
  static constexpr int kBlockWarps = S::kThreads / kWarpSize;
  float (*scratch)[kBlockWarps][2];
  int area = 0;

  static __device__ void barrier() {  // synchronises the row's threads
    if constexpr (S::kRows == 1) {
      __syncthreads();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(S::slot() + 1), "n"(S::kRowThreads) : "memory");
    }
  }

  template <int kValues>
  __device__ void add(float (&value)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) value[i] = warp_sum(value[i]);
    if constexpr (kWarps > 1) {
      if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) scratch[area][threadIdx.x / kWarpSize][i] = value[i];
      }
      barrier();
      const int first = S::slot() * kWarps;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        value[i] = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) value[i] += scratch[area][first + w][i];
      }
      area ^= 1;
    }
  }

  // The largest of the row's values.
  __device__ float largest(float value) {
    value = warp_max(value);
    if constexpr (kWarps > 1) {
      if (threadIdx.x % kWarpSize == 0) scratch[area][threadIdx.x / kWarpSize][0] = value;
      barrier();
#pragma unroll
      for (int w = 0; w < kWarps; ++w) value = fmaxf(value, scratch[area][S::slot() * kWarps + w][0]);
      area ^= 1;
    }
    return value;
  }
};

// ---- a thread's part of the next row, copied ahead to shared memory -----------------------------------------------------
template <typename T, typename S>
struct StagedRow {
  static constexpr int kBytes = S::kColumns * static_cast<int>(sizeof(T));

  static __device__ void fetch(char* stage, const T* row, std::int64_t C) {
    if (row == nullptr) return;
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      if (!S::outside(g, C)) __pipeline_memcpy_async(address(stage, g), row + S::column(g), Group<T, S>::kBytes);
    }
  }
  // Reads a group from the stage, or from memory if `stage` is null; zeros where the operand is absent.
  static __device__ void read(Group<T, S>& into, char* stage, const T* row, int g, std::int64_t C) {
    if (row == nullptr || S::outside(g, C)) {
      into.clear();
    } else if (stage == nullptr) {
      into.load(row + S::column(g));
    } else {
      into.load(address(stage, g));
    }
  }
  // Reads all groups of a row. An exact spread is always staged, so only the operand's presence matters.
  static __device__ void read_row(Group<T, S> (&into)[S::kGroups], char* stage, const T* row, std::int64_t C,
                                  bool present = true) {
    if constexpr (S::kExact) {
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        if (present) {
          into[g].load(address(stage, g));
        } else {
          into[g].clear();
        }
      }
    } else {
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) read(into[g], stage, present ? row : nullptr, g, C);
    }
  }

 private:
  static __device__ T* address(char* stage, int g) {
    return reinterpret_cast<T*>(stage) + S::column(g);
  }
};

template <typename T>
__device__ T* at_row(T* matrix, std::int64_t row, std::int64_t C) {
  return matrix != nullptr ? matrix + row * C : nullptr;
}

// Norm weight and bias, read from memory one group of columns at a time...
template <typename T, typename S>
struct WeightsInMemory {
  const T *weight, *bias;
  __device__ void get(int g, Group<T, S>& w, Group<T, S>& b) const {
    w.load(weight + S::column(g));
    b.clear();
    if (bias != nullptr) b.load(bias + S::column(g));
  }
};
// ... or kept in registers, if a thread has few columns: they are then loaded before the row arrives.
template <typename T, typename S>
struct WeightsInRegisters {
  Group<T, S> weight[S::kGroups], bias[S::kGroups];
  __device__ WeightsInRegisters(const T* w, const T* b, std::int64_t C) {
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      if (w != nullptr && !S::outside(g, C)) WeightsInMemory<T, S>{w, b}.get(g, weight[g], bias[g]);
    }
  }
  __device__ void get(int g, Group<T, S>& w, Group<T, S>& b) const {
    w = weight[g], b = bias[g];
  }
};

// Mean (RMSNorm: 0) and 1 / sqrt(variance + eps) of a row, whose columns past C are zero.
template <typename S>
__device__ float2 row_statistics(const float (&h)[S::kGroups][S::kGroup], const ResidualNormShape& shape,
                                 RowSum<S>& row_sum) {
  const float per_column = 1.0f / static_cast<float>(shape.C);
  float mean = 0;
  if (shape.kind == NormKind::layernorm) {
    float sum[1] = {0};
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < S::kGroup; ++i) sum[0] += h[g][i];  // columns past C are zero
    }
    row_sum.add(sum);
    mean = sum[0] * per_column;
  }
  float squares[1] = {0};
#pragma unroll
  for (int g = 0; g < S::kGroups; ++g) {
    if (S::outside(g, shape.C)) continue;
#pragma unroll
    for (int i = 0; i < S::kGroup; ++i) squares[0] += (h[g][i] - mean) * (h[g][i] - mean);
  }
  row_sum.add(squares);
  return {mean, rsqrtf(squares[0] * per_column + shape.eps)};
}

// factors = rowscale * (1 / (1 - p) where dropout keeps the element, else 0), for the elements from `element` on; one
// Philox counter for every four of them.
template <int kGroup>
__device__ void branch_factors(float (&factors)[kGroup], const ResidualNormShape& shape, float scale,
                               std::int64_t element) {
  if (shape.dropout == 0) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) factors[i] = scale;
    return;
  }
  const float kept = scale / (1.0f - shape.dropout);
#pragma unroll
  for (int four = 0; four < kGroup / 4; ++four) {
    const PhiloxWords random = philox(shape.seed, shape.offset + static_cast<std::uint64_t>(element / 4 + four),
                                      static_cast<std::uint64_t>(RandomStream::dropout));
#pragma unroll
    for (int i = 0; i < 4; ++i) factors[4 * four + i] = uniform01(random.word[i]) >= shape.dropout ? kept : 0.0f;
  }
}

// h = x factors colscale + skip, rounded to R; factors null: 1.
template <typename T, typename R, int kGroup>
__device__ void add_branch(Elements<R, kGroup>& h, const Elements<T, kGroup>& x, const Elements<R, kGroup>& skip,
                           const float* factors, const T* colscale) {
  float values[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    values[i] = x.get(i);
    if (factors != nullptr) values[i] *= factors[i];
    if (colscale != nullptr) values[i] *= to_float(colscale[i]);
    values[i] += skip.get(i);
  }
  h.set(values);
}

// ---- launchers --------------------------------------------------------------------------------------------------------
inline void check_shape(const ResidualNormShape& shape) {
  if (shape.C % 8 != 0 || shape.C <= 0 || shape.C > kMaxNormWidth) {
    fail(Exit::internal, "residual_norm: C = %lld is not a multiple of 8 up to %lld", static_cast<long long>(shape.C),
         static_cast<long long>(kMaxNormWidth));
  }
}

// As many blocks as fit on the GPU at once, but no more than there is work for.
template <typename Kernel>
unsigned blocks_for(Kernel kernel, int threads, int shared_bytes, std::int64_t work, int shared_limit) {
  if (shared_bytes > shared_limit)
    fail(Exit::internal, "residual_norm: %d bytes of shared memory, a block has %d", shared_bytes, shared_limit);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "residual_norm");
  const std::int64_t resident =
      resident_blocks(kernel, threads, shared_bytes, device_attribute(cudaDevAttrMultiProcessorCount), "residual_norm");
  return static_cast<unsigned>(std::min(resident, work));
}

// Calls launch(Spread) with the spread for a row of C columns, an exact one if kMayBeExact allows it and C is its
// width. The fastest spreads were measured on an H200. Backward holds three rows where forward holds two, and at 4096
// columns uses more threads with fewer columns each.
template <typename R, int kRowThreads, int kThreadColumns, bool kMayBeExact, typename Launch>
void launch_spread(std::int64_t C, const Launch& launch) {
  if constexpr (kMayBeExact) {
    using Exact = Spread<R, kRowThreads, kThreadColumns, true>;
    if (C == Exact::kColumns) return launch(Exact{});
  }
  launch(Spread<R, kRowThreads, kThreadColumns>{});
}
template <typename R, bool kMayBeExact, typename Launch>
void for_plain_spread(std::int64_t C, const Launch& launch) {
  if constexpr (kMayBeExact) {
    if (C == 768) return launch(Spread<R, 32, 24, true, 4>{});
    if (C == 3072) return launch(Spread<R, 128, 24, true>{});
    // An fp32 stream would take twice the registers.
    if (sizeof(R) == 2 && C == 8192) return launch(Spread<R, 512, 16, true>{});
  }
  if (C <= 256) return launch_spread<R, 32, 8, false>(C, launch);
  if (C <= 512) return launch_spread<R, 32, 16, false>(C, launch);
  if (C <= 1024) return launch_spread<R, 32, 32, kMayBeExact>(C, launch);
  if (C <= 2048) return launch_spread<R, 128, 16, kMayBeExact>(C, launch);
  if (C <= 2560) return launch_spread<R, 320, 8, false>(C, launch);
  if (C <= 4096) return launch_spread<R, 128, 32, kMayBeExact>(C, launch);
  if (C <= 8192) return launch_spread<R, 256, 32, kMayBeExact>(C, launch);
  launch_spread<R, 512, 32, kMayBeExact>(C, launch);
}
template <typename R, bool kMayBeExact, typename Launch>
void for_plain_backward_spread(std::int64_t C, const Launch& launch) {
  if constexpr (kMayBeExact) {
    // Several rows a block: fewer blocks write column sums, and a row's threads wait only for each other.
    if (C == 768) return launch(Spread<R, 96, 8, true, 4>{});
    if (C == 1024) return launch(Spread<R, 64, 16, true, 4>{});
    if (C == 2048) return launch(Spread<R, 128, 16, true, 2>{});
    if (C == 3072) return launch(Spread<R, 384, 8, true>{});
    if (sizeof(R) == 2 && C == 8192) return launch(Spread<R, 512, 16, true>{});
  }
  if (C <= 2048) return for_plain_spread<R, false>(C, launch);
  if (C <= 4096) return launch_spread<R, 256, 16, kMayBeExact>(C, launch);
  if (C <= 8192) return launch_spread<R, 256, 32, kMayBeExact>(C, launch);
  launch_spread<R, 512, 32, kMayBeExact>(C, launch);
}
template <typename R, typename Launch>
void for_full_spread(std::int64_t C, const Launch& launch) {
  if (C <= 1024) return launch(Spread<R, 128, 8>{});
  if (C <= 4096) return launch(Spread<R, 128, 32>{});
  launch(Spread<R, 512, 32>{});
}
template <typename T, typename R>
constexpr bool kMayBeExact = std::is_same_v<T, bf16>;

}  // namespace weft::cuda::norm_detail
