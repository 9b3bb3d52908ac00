// Fused dropout + residual + norm (Ba et al., 2016; Zhang & Sennrich, 2019), arithmetic in fp32:
//
//   h = dropout(x rowscale) colscale + residual        z = xhat w + b,   xhat = (h - mean) rstd
//
// and backward, for g = dout w + dout2 w2 (the formulas of llmc/cpu/residual_norm.cpp):
//   dh = rstd (g - [mean(g)] - xhat mean(g xhat)) + dresidual_out      [mean(g)] for LayerNorm only
//   dresidual = dh,   dx = dh colscale f,   dcolscale += dh x f        f = rowscale * dropout factor
//   dweight += dout xhat,   dbias += dout
//
// Bytes moved a row for the form of Llama, T and R of E bytes: forward reads x and residual and writes residual_out and
// out, 4 C E; backward reads dout, h and dresidual_out and writes dresidual, 4 C E, or 5 C E where it writes dx as well.
//
// How it is laid out
//  - A row lies in the registers of one warp (C <= 1024) or of one block, so memory is passed once and statistics are
//    taken in two passes over registers. A thread owns groups of 8 columns.
//  - Blocks stay on their multiprocessor and walk over the rows. While a thread works on one row its part of the next is
//    copied to shared memory (cp.async); it reads back only what it copied itself, so this needs no barrier.
//  - Column sums (dweight, ...) grow in shared memory, each thread adding to its own columns; at the end a block writes
//    them to the workspace and a second kernel adds the blocks in order. Where shared memory is too small for the sums,
//    they grow in the workspace itself.
//  - "Plain" kernels know x, residual, weight and bias. Everything else (dropout, scales, a second output, h recomputed
//    in backward) is in the "full" kernels, which do without the copying ahead.

#include "llmc/cuda/residual_norm.h"

#include <cuda_pipeline.h>

#include <algorithm>

#include "llmc/base/philox.h"
#include "llmc/cuda/elements.cuh"

namespace weft::cuda {

namespace {

constexpr int kGroup = 8;  // neighbouring columns of one thread
constexpr int kMaxBackwardBlocks = 640;
constexpr int kColumnSums = 5;  // dweight, dbias, dweight2, dbias2, dcolscale

template <typename T>
using Group = Elements<T, kGroup>;

// How a row is spread over threads: thread `lane` of the row owns groups lane, lane + kRowThreads, ...
template <int kRowThreads_, int kGroups_>
struct Spread {
  static constexpr int kRowThreads = kRowThreads_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kRows = kRowThreads == kWarpSize ? 8 : 1;  // rows that a block works on at once
  static constexpr int kThreads = kRowThreads * kRows;

  static __device__ int lane() { return threadIdx.x % kRowThreads; }
  static __device__ int slot() { return threadIdx.x / kRowThreads; }
  static __device__ int column(int g) { return (g * kRowThreads + lane()) * kGroup; }
};

// ---- sums over a row --------------------------------------------------------------------------------------------------
// Adds kValues numbers over the threads of a row, in an order that does not depend on timing. One barrier a sum: two
// scratch areas take turns, and who writes one has passed the barrier after which the other was read.
template <typename S>
struct RowSum {
  static constexpr int kWarps = S::kRowThreads / kWarpSize;
  float (*scratch)[kWarps][2];
  int turn = 0;

  template <int kValues>
  __device__ void add(float (&value)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) value[i] = warp_sum(value[i]);
    if constexpr (kWarps > 1) {
      if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) scratch[turn][threadIdx.x / kWarpSize][i] = value[i];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        value[i] = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) value[i] += scratch[turn][w][i];
      }
      turn ^= 1;
    }
  }
};

// ---- a thread's part of the next row, on its way to shared memory -----------------------------------------------------
template <typename T, typename S>
struct StagedRow {
  static constexpr int kChunks = kGroup * static_cast<int>(sizeof(T)) / 16;
  static constexpr int kBytes = S::kGroups * kChunks * S::kRowThreads * 16;

  // Chunks of neighbouring threads lie side by side: no bank conflicts.
  static __device__ int offset(int g, int chunk) { return ((g * kChunks + chunk) * S::kRowThreads + S::lane()) * 16; }
  static __device__ void fetch(char* stage, const T* row, std::int64_t C) {
    if (row == nullptr) return;
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      if (S::column(g) >= C) continue;
      const char* source = reinterpret_cast<const char*>(row + S::column(g));
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        __pipeline_memcpy_async(stage + offset(g, chunk), source + 16 * chunk, 16);
    }
  }
  // The group from the stage, or from memory where nothing is staged; zeros where the operand is absent.
  static __device__ void read(Group<T>& into, const char* stage, const T* row, int g, std::int64_t C) {
    if (row == nullptr || S::column(g) >= C) {
      into.clear();
    } else if (stage == nullptr) {
      into.load(row + S::column(g));
    } else {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        reinterpret_cast<int4*>(into.value)[chunk] = *reinterpret_cast<const int4*>(stage + offset(g, chunk));
    }
  }
};

template <typename T>
__device__ T* at_row(T* matrix, std::int64_t row, std::int64_t C) {
  return matrix != nullptr ? matrix + row * C : nullptr;
}

// ---- the branch -------------------------------------------------------------------------------------------------------
// factors = rowscale * (1 / (1 - p) where dropout keeps the element, else 0), for the 8 elements from `element` on: two
// Philox counters.
__device__ void branch_factors(float (&factors)[kGroup], const ResidualNormShape& shape, float scale,
                               std::int64_t element) {
  if (shape.dropout == 0) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) factors[i] = scale;
    return;
  }
  const float kept = scale / (1.0f - shape.dropout);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const PhiloxWords random = philox(shape.seed, shape.offset + static_cast<std::uint64_t>(element / 4 + half),
                                      static_cast<std::uint64_t>(RandomStream::dropout));
#pragma unroll
    for (int i = 0; i < 4; ++i) factors[4 * half + i] = uniform01(random.word[i]) >= shape.dropout ? kept : 0.0f;
  }
}

// h = x factors colscale + skip, rounded to R; factors null: 1.
template <typename T, typename R>
__device__ void join(Group<R>& h, const Group<T>& x, const Group<R>& skip, const float* factors, const T* colscale) {
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

// ---- forward ----------------------------------------------------------------------------------------------------------
template <typename T, typename S>
__device__ void write_output(T* out, const float (&h)[S::kGroups][kGroup], float mean, float rstd, const T* weight,
                             const T* bias, std::int64_t C) {
#pragma unroll
  for (int g = 0; g < S::kGroups; ++g) {
    const int column = S::column(g);
    if (column >= C) continue;
    Group<T> w, b;
    w.load(weight + column);
    b.clear();
    if (bias != nullptr) b.load(bias + column);
    float z[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) z[i] = (h[g][i] - mean) * rstd * w.get(i) + b.get(i);
    w.set(z);
    w.store(out + column);
  }
}

template <typename S>
__device__ float2 row_statistics(const float (&h)[S::kGroups][kGroup], const ResidualNormShape& shape,
                                 RowSum<S>& row_sum) {
  const float C = static_cast<float>(shape.C);
  float mean = 0;
  if (shape.kind == NormKind::layernorm) {
    float sum[1] = {0};
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) sum[0] += h[g][i];  // columns past C hold zeros
    }
    row_sum.add(sum);
    mean = sum[0] / C;
  }
  float squares[1] = {0};
#pragma unroll
  for (int g = 0; g < S::kGroups; ++g) {
    if (S::column(g) >= shape.C) continue;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) squares[0] += (h[g][i] - mean) * (h[g][i] - mean);
  }
  row_sum.add(squares);
  return {mean, 1.0f / sqrtf(squares[0] / C + shape.eps)};
}

template <typename T, typename R, typename S>
struct ForwardStage {
  char* memory;  // null: rows are read when they are needed
  __device__ char* x() const { return memory; }
  __device__ char* residual() const { return memory != nullptr ? memory + StagedRow<T, S>::kBytes : nullptr; }
  static constexpr int kBytes = StagedRow<T, S>::kBytes + StagedRow<R, S>::kBytes;

  __device__ void fetch(const ResidualNormShape& shape, const ResidualNormForward<T, R>& io, std::int64_t row) const {
    if (memory == nullptr || row >= shape.rows) return;
    StagedRow<T, S>::fetch(x(), at_row(io.x, row, shape.C), shape.C);
    StagedRow<R, S>::fetch(residual(), at_row(io.residual, row, shape.C), shape.C);
    __pipeline_commit();
  }
};

template <typename T, typename R, typename S, bool kFull>
__global__ void __launch_bounds__(S::kThreads)
    forward_kernel(ResidualNormShape shape, ResidualNormForward<T, R> io, bool staged) {
  extern __shared__ char4 dynamic_memory[];
  __shared__ float scratch[2][RowSum<S>::kWarps][2];
  using Stage = ForwardStage<T, R, S>;
  const Stage stage{staged ? reinterpret_cast<char*>(dynamic_memory) + S::slot() * Stage::kBytes : nullptr};
  RowSum<S> row_sum{scratch};
  const std::int64_t C = shape.C, step = static_cast<std::int64_t>(gridDim.x) * S::kRows;
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * S::kRows + S::slot();
  stage.fetch(shape, io, row);
  for (; row < shape.rows; row += step) {
    if (staged) __pipeline_wait_prior(0);
    float h[S::kGroups][kGroup];
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      const int column = S::column(g);
      Group<T> x;
      Group<R> skip;
      StagedRow<T, S>::read(x, stage.x(), at_row(io.x, row, C), g, C);
      StagedRow<R, S>::read(skip, stage.residual(), at_row(io.residual, row, C), g, C);
      if constexpr (kFull) {
        if (column < C) {
          float factors[kGroup];
          branch_factors(factors, shape, io.rowscale != nullptr ? io.rowscale[row] : 1.0f, row * C + column);
          join<T, R>(skip, x, skip, factors, io.colscale != nullptr ? io.colscale + column : nullptr);
        }
      } else {
        join<T, R>(skip, x, skip, nullptr, nullptr);
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) h[g][i] = skip.get(i);
      if (io.residual_out != nullptr && column < C) skip.store(io.residual_out + row * C + column);
    }
    stage.fetch(shape, io, row + step);
    const float2 statistics = row_statistics<S>(h, shape, row_sum);
    write_output<T, S>(io.out + row * C, h, statistics.x, statistics.y, io.weight, io.bias, C);
    if constexpr (kFull) {
      if (io.weight2 != nullptr)
        write_output<T, S>(io.out2 + row * C, h, statistics.x, statistics.y, io.weight2, io.bias2, C);
    }
    if (S::lane() == 0) {
      if (io.mean != nullptr) io.mean[row] = statistics.x;
      if (io.rstd != nullptr) io.rstd[row] = statistics.y;
    }
  }
}

// ---- column sums ------------------------------------------------------------------------------------------------------
// `slot` numbers the sums that are asked for; -1: not. Each takes `capacity` floats: C rounded up to whole groups of all
// threads of a row.
struct ColumnSums {
  float* target[kColumnSums];
  int slot[kColumnSums];
  int count;
  int capacity;
};

// Where column c of a sum lies: a thread's 8 columns are two chunks of 4, and chunks of neighbouring threads lie side by
// side, so that a warp's 16-byte accesses meet no bank twice.
template <int kRowThreads>
__host__ __device__ constexpr int sum_position(int c) {
  const int group = c / kGroup, chunk = c % kGroup / 4;
  return ((group / kRowThreads * 2 + chunk) * kRowThreads + group % kRowThreads) * 4 + c % 4;
}

template <typename S>
__device__ void add_columns(float* sums, const ColumnSums& columns, int which, int g, const float (&values)[kGroup]) {
  if (columns.slot[which] < 0) return;
  float* first = sums + columns.slot[which] * columns.capacity + sum_position<S::kRowThreads>(S::column(g));
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    float4* sum = reinterpret_cast<float4*>(first + chunk * S::kRowThreads * 4);
    float4 s = *sum;
    s.x += values[4 * chunk];
    s.y += values[4 * chunk + 1];
    s.z += values[4 * chunk + 2];
    s.w += values[4 * chunk + 3];
    *sum = s;
  }
}

// Each thread clears its own columns, so no barrier is needed before it adds to them.
template <typename S>
__device__ void clear_columns(float* sums, const ColumnSums& columns, std::int64_t C) {
  for (int k = 0; k < columns.count; ++k) {
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      if (S::column(g) >= C) continue;
      float* first = sums + k * columns.capacity + sum_position<S::kRowThreads>(S::column(g));
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk)
        *reinterpret_cast<float4*>(first + chunk * S::kRowThreads * 4) = make_float4(0, 0, 0, 0);
    }
  }
}

// The block's sums, added over its rows in work, to its part of the workspace.
template <typename S>
__device__ void write_columns(float* partial, const float* sums, const ColumnSums& columns) {
  __syncthreads();
  const int size = columns.count * columns.capacity;
  for (int i = threadIdx.x; i < size; i += S::kThreads) {
    float sum = sums[i];
#pragma unroll
    for (int slot = 1; slot < S::kRows; ++slot) sum += sums[slot * size + i];
    partial[i] = sum;
  }
}

constexpr int kFinishColumns = 32, kFinishLanes = 32;

// target[c] += sum of partial[block][k][c] over the blocks: 32 lanes take every 32nd block, then are added in order.
template <int kRowThreads>
__global__ void __launch_bounds__(kFinishColumns* kFinishLanes)
    finish_columns_kernel(ColumnSums columns, const float* partial, int blocks, int C) {
  __shared__ float lane_sum[kFinishLanes][kFinishColumns + 1];
  float* target = nullptr;  // picked by constant indices: a run-time index would move the struct to local memory
  int slot = 0;
#pragma unroll
  for (int k = 0; k < kColumnSums; ++k) {
    if (columns.slot[k] == static_cast<int>(blockIdx.y)) target = columns.target[k], slot = columns.slot[k];
  }
  const int x = threadIdx.x % kFinishColumns, y = threadIdx.x / kFinishColumns;
  const int c = blockIdx.x * kFinishColumns + x;
  const bool used = c < C;
  float sum = 0;
  if (used) {
    const std::int64_t size = static_cast<std::int64_t>(columns.count) * columns.capacity;
    const float* first = partial + slot * columns.capacity + sum_position<kRowThreads>(c);
#pragma unroll 8
    for (int block = y; block < blocks; block += kFinishLanes) sum += first[block * size];
  }
  lane_sum[y][x] = sum;
  __syncthreads();
  if (y > 0 || !used) return;
  for (int lane = 1; lane < kFinishLanes; ++lane) sum += lane_sum[lane][x];
  target[c] += sum;
}

// ---- backward ---------------------------------------------------------------------------------------------------------
template <typename T, typename R, typename S>
struct BackwardStage {
  char* memory;  // null: rows are read when they are needed
  __device__ char* dout() const { return memory; }
  __device__ char* h() const { return memory != nullptr ? memory + StagedRow<T, S>::kBytes : nullptr; }
  __device__ char* skip() const { return memory != nullptr ? h() + StagedRow<R, S>::kBytes : nullptr; }
  static constexpr int kBytes = StagedRow<T, S>::kBytes + 2 * StagedRow<R, S>::kBytes;

  __device__ void fetch(const ResidualNormShape& shape, const ResidualNormBackward<T, R>& io, std::int64_t row) const {
    if (memory == nullptr || row >= shape.rows) return;
    StagedRow<T, S>::fetch(dout(), at_row(io.dout, row, shape.C), shape.C);
    StagedRow<R, S>::fetch(h(), at_row(io.residual_out, row, shape.C), shape.C);
    StagedRow<R, S>::fetch(skip(), at_row(io.dresidual_out, row, shape.C), shape.C);
    __pipeline_commit();
  }
};

// Plain: x, residual, weight, bias. A thread's part of dout, h and the skip gradient stays in registers in its storage
// type between the two passes over the row.
template <typename T, typename R, typename S>
__global__ void __launch_bounds__(S::kThreads)
    plain_backward_kernel(ResidualNormShape shape, ResidualNormBackward<T, R> io, ColumnSums columns, bool staged) {
  extern __shared__ char4 dynamic_memory[];
  __shared__ float scratch[2][RowSum<S>::kWarps][2];
  using Stage = BackwardStage<T, R, S>;
  float* sums = reinterpret_cast<float*>(dynamic_memory);
  float* own_sums = sums + S::slot() * columns.count * columns.capacity;
  char* stages = reinterpret_cast<char*>(sums + S::kRows * columns.count * columns.capacity);
  const Stage stage{staged ? stages + S::slot() * Stage::kBytes : nullptr};
  RowSum<S> row_sum{scratch};
  const std::int64_t C = shape.C, step = static_cast<std::int64_t>(gridDim.x) * S::kRows;
  const bool layernorm = shape.kind == NormKind::layernorm;
  // fp32 rows are twice as wide: there the skip gradient is read late and the weight again for each row.
  constexpr bool kLateSkip = sizeof(T) == 4;
  constexpr bool kKeepWeight = sizeof(T) + sizeof(R) == 4;
  Group<T> kept_weight[kKeepWeight ? S::kGroups : 1];
  if constexpr (kKeepWeight) {
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) StagedRow<T, S>::read(kept_weight[g], nullptr, io.weight, g, C);
  }
  const auto weight_group = [&](int g) {
    if constexpr (kKeepWeight) {
      return kept_weight[g];
    } else {
      Group<T> w;
      StagedRow<T, S>::read(w, nullptr, io.weight, g, C);
      return w;
    }
  };
  clear_columns<S>(own_sums, columns, C);
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * S::kRows + S::slot();
  stage.fetch(shape, io, row);
  float next_mean = 0, next_rstd = 0;
  const auto read_statistics = [&](std::int64_t of) {
    if (of >= shape.rows) return;
    if (layernorm) next_mean = io.mean[of];
    next_rstd = io.rstd[of];
  };
  read_statistics(row);
  for (; row < shape.rows; row += step) {
    const float mean = next_mean, rstd = next_rstd;
    read_statistics(row + step);
    if (staged) __pipeline_wait_prior(0);
    Group<T> dout[S::kGroups];
    Group<R> h[S::kGroups], skip[kLateSkip ? 1 : S::kGroups];
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      StagedRow<T, S>::read(dout[g], stage.dout(), at_row(io.dout, row, C), g, C);
      StagedRow<R, S>::read(h[g], stage.h(), at_row(io.residual_out, row, C), g, C);
      if constexpr (!kLateSkip) StagedRow<R, S>::read(skip[g], stage.skip(), at_row(io.dresidual_out, row, C), g, C);
    }
    if constexpr (!kLateSkip) stage.fetch(shape, io, row + step);

    float sum[2] = {0, 0};  // of g and of g xhat
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      if (S::column(g) >= C) continue;
      const Group<T> w = weight_group(g);
      float d[kGroup], dx_hat[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const float xhat = (h[g].get(i) - mean) * rstd;
        d[i] = dout[g].get(i);
        dx_hat[i] = d[i] * xhat;
        sum[0] += d[i] * w.get(i);
        sum[1] += dx_hat[i] * w.get(i);
      }
      add_columns<S>(own_sums, columns, 0, g, dx_hat);
      add_columns<S>(own_sums, columns, 1, g, d);
    }
    row_sum.add(sum);
    const float mean_g = layernorm ? sum[0] / static_cast<float>(C) : 0.0f;
    const float mean_gx = sum[1] / static_cast<float>(C);
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      const int column = S::column(g);
      if (column >= C) continue;
      const Group<T> w = weight_group(g);
      Group<R>& skip_g = skip[kLateSkip ? 0 : g];
      if constexpr (kLateSkip) StagedRow<R, S>::read(skip_g, stage.skip(), at_row(io.dresidual_out, row, C), g, C);
      float dh[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const float xhat = (h[g].get(i) - mean) * rstd;
        dh[i] = rstd * (dout[g].get(i) * w.get(i) - mean_g - xhat * mean_gx) + skip_g.get(i);
      }
      if (io.dresidual != nullptr) {
        skip_g.set(dh);
        skip_g.store_streaming(io.dresidual + row * C + column);
      }
      if (io.dx != nullptr) {
        dout[g].set(dh);
        dout[g].store_streaming(io.dx + row * C + column);
      }
    }
    if constexpr (kLateSkip) stage.fetch(shape, io, row + step);
  }
  write_columns<S>(
      static_cast<float*>(io.workspace) + static_cast<std::int64_t>(blockIdx.x) * columns.count * columns.capacity,
      sums, columns);
}

// The gradient of one group of xhat, g = dout w + dout2 w2, and both outputs' column sums if `add`.
template <typename T, typename R, typename S>
__device__ void full_gradient(float (&g_values)[kGroup], const ResidualNormBackward<T, R>& io, std::int64_t row,
                              std::int64_t C, int g, const float (&xhat)[kGroup], float* sums,
                              const ColumnSums& columns, bool add) {
  const T* const douts[2] = {io.dout, io.dout2};
  const T* const weights[2] = {io.weight, io.weight2};
#pragma unroll
  for (int i = 0; i < kGroup; ++i) g_values[i] = 0;
#pragma unroll
  for (int output = 0; output < 2; ++output) {
    if (weights[output] == nullptr) continue;
    Group<T> dout, w;
    dout.load(douts[output] + row * C + S::column(g));
    w.load(weights[output] + S::column(g));
    float d[kGroup], dx_hat[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      d[i] = dout.get(i);
      dx_hat[i] = d[i] * xhat[i];
      g_values[i] += d[i] * w.get(i);
    }
    if (add) {
      add_columns<S>(sums, columns, 2 * output, g, dx_hat);
      add_columns<S>(sums, columns, 2 * output + 1, g, d);
    }
  }
}

// Full: every operand. Only h stays in registers; the rest is read again in the second pass, from L1 or L2.
template <typename T, typename R, typename S>
__global__ void __launch_bounds__(S::kThreads)
    full_backward_kernel(ResidualNormShape shape, ResidualNormBackward<T, R> io, ColumnSums columns, bool sums_shared) {
  extern __shared__ char4 dynamic_memory[];
  __shared__ float scratch[2][RowSum<S>::kWarps][2];
  float* partial =
      static_cast<float*>(io.workspace) + static_cast<std::int64_t>(blockIdx.x) * columns.count * columns.capacity;
  float* sums = sums_shared ? reinterpret_cast<float*>(dynamic_memory) : partial;
  RowSum<S> row_sum{scratch};
  const std::int64_t C = shape.C;
  const bool layernorm = shape.kind == NormKind::layernorm;
  clear_columns<S>(sums, columns, C);
  for (std::int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    const float mean = layernorm ? io.mean[row] : 0.0f, rstd = io.rstd[row];
    const float rowscale = io.rowscale != nullptr ? io.rowscale[row] : 1.0f;
    Group<R> h[S::kGroups];
    float xhat[kGroup], gradient[kGroup], factors[kGroup], sum[2] = {0, 0};  // of g and of g xhat
    const auto normalise = [&](const Group<R>& group) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) xhat[i] = (group.get(i) - mean) * rstd;
    };
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      const int column = S::column(g);
      if (column >= C) continue;
      if (io.residual_out != nullptr) {
        h[g].load(io.residual_out + row * C + column);
      } else {
        Group<T> x;
        StagedRow<T, S>::read(x, nullptr, at_row(io.x, row, C), g, C);
        StagedRow<R, S>::read(h[g], nullptr, at_row(io.residual, row, C), g, C);
        branch_factors(factors, shape, rowscale, row * C + column);
        join<T, R>(h[g], x, h[g], factors, io.colscale != nullptr ? io.colscale + column : nullptr);
      }
      normalise(h[g]);
      full_gradient<T, R, S>(gradient, io, row, C, g, xhat, sums, columns, true);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        sum[0] += gradient[i];
        sum[1] += gradient[i] * xhat[i];
      }
    }
    row_sum.add(sum);
    const float mean_g = layernorm ? sum[0] / static_cast<float>(C) : 0.0f;
    const float mean_gx = sum[1] / static_cast<float>(C);
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      const int column = S::column(g);
      if (column >= C) continue;
      normalise(h[g]);
      full_gradient<T, R, S>(gradient, io, row, C, g, xhat, sums, columns, false);
      Group<R> skip;
      Group<T> x;
      StagedRow<R, S>::read(skip, nullptr, at_row(io.dresidual_out, row, C), g, C);
      StagedRow<T, S>::read(x, nullptr, at_row(io.x, row, C), g, C);
      branch_factors(factors, shape, rowscale, row * C + column);
      float dx[kGroup], dscale[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const float dh = rstd * (gradient[i] - mean_g - xhat[i] * mean_gx) + skip.get(i);
        gradient[i] = dh;
        dscale[i] = dh * x.get(i) * factors[i];
        dx[i] = dh * factors[i];
        if (io.colscale != nullptr) dx[i] *= to_float(io.colscale[column + i]);
      }
      add_columns<S>(sums, columns, 4, g, dscale);
      if (io.dresidual != nullptr) {
        skip.set(gradient);
        skip.store(io.dresidual + row * C + column);
      }
      if (io.dx != nullptr) {
        x.set(dx);
        x.store(io.dx + row * C + column);
      }
    }
  }
  if (sums_shared) write_columns<S>(partial, sums, columns);
}

// ---- launchers --------------------------------------------------------------------------------------------------------
void check_shape(const ResidualNormShape& shape) {
  if (shape.C % kGroup != 0 || shape.C <= 0 || shape.C > kMaxNormWidth) {
    fail(Exit::internal, "residual_norm: C = %lld is not a multiple of %d up to %lld", static_cast<long long>(shape.C),
         kGroup, static_cast<long long>(kMaxNormWidth));
  }
}

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "residual_norm");
  check(cudaDeviceGetAttribute(&value, attribute, device), "residual_norm");
  return value;
}

// The dynamic shared memory that a block may ask for, less what the kernels declare themselves.
int shared_memory_limit() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 1024;
}

// As many blocks as fit on the GPU at once, but not more than there is work for.
template <typename Kernel>
unsigned blocks_for(Kernel kernel, int threads, int shared_bytes, std::int64_t work) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "residual_norm");
  int per_multiprocessor = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, shared_bytes),
        "residual_norm");
  const std::int64_t resident =
      static_cast<std::int64_t>(std::max(per_multiprocessor, 1)) * device_attribute(cudaDevAttrMultiProcessorCount);
  return static_cast<unsigned>(std::min(resident, work));
}

// Calls launch(Spread) with the spread of a row of C columns. Which is fastest was measured on an H200; backward holds
// three rows where forward holds two, and at 4096 columns takes more threads with fewer groups each.
template <typename Launch>
void for_plain_spread(std::int64_t C, const Launch& launch) {
  if (C <= 256) return launch(Spread<32, 1>{});
  if (C <= 512) return launch(Spread<32, 2>{});
  if (C <= 1024) return launch(Spread<32, 4>{});
  if (C <= 2048) return launch(Spread<128, 2>{});
  if (C <= 4096) return launch(Spread<128, 4>{});
  if (C <= 8192) return launch(Spread<256, 4>{});
  launch(Spread<512, 4>{});
}
template <typename Launch>
void for_plain_backward_spread(std::int64_t C, const Launch& launch) {
  if (C > 2048 && C <= 4096) return launch(Spread<256, 2>{});
  for_plain_spread(C, launch);
}
template <typename Launch>
void for_full_spread(std::int64_t C, const Launch& launch) {
  if (C <= 1024) return launch(Spread<128, 1>{});
  if (C <= 4096) return launch(Spread<128, 4>{});
  launch(Spread<512, 4>{});
}

template <typename T, typename R, typename S, bool kFull>
void launch_forward(const ResidualNormShape& shape, const ResidualNormForward<T, R>& io, cudaStream_t stream) {
  const int stage_bytes = S::kRows * ForwardStage<T, R, S>::kBytes;
  const bool staged = !kFull && stage_bytes <= shared_memory_limit();
  const int shared_bytes = staged ? stage_bytes : 0;
  const auto kernel = forward_kernel<T, R, S, kFull>;
  const unsigned blocks = blocks_for(kernel, S::kThreads, shared_bytes, ceil_div(shape.rows, S::kRows));
  kernel<<<blocks, S::kThreads, shared_bytes, stream>>>(shape, io, staged);
  check_launch("residual_norm_forward");
}

template <typename S>
std::int64_t columns_capacity(std::int64_t C) {
  return ceil_div(C, S::kRowThreads * kGroup) * S::kRowThreads * kGroup;
}

template <typename T, typename R>
ColumnSums column_sums(const ResidualNormBackward<T, R>& io, std::int64_t capacity) {
  ColumnSums columns{{io.dweight, io.dbias, io.dweight2, io.dbias2, io.dcolscale}, {}, 0, static_cast<int>(capacity)};
  for (int k = 0; k < kColumnSums; ++k) columns.slot[k] = columns.target[k] != nullptr ? columns.count++ : -1;
  return columns;
}

template <typename S>
void finish_columns(const ColumnSums& columns, const void* workspace, unsigned blocks, std::int64_t C,
                    cudaStream_t stream) {
  if (columns.count == 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(C, kFinishColumns)), static_cast<unsigned>(columns.count));
  finish_columns_kernel<S::kRowThreads><<<grid, kFinishColumns * kFinishLanes, 0, stream>>>(
      columns, static_cast<const float*>(workspace), static_cast<int>(blocks), static_cast<int>(C));
  check_launch("residual_norm_backward: column sums");
}

template <typename T, typename R, typename S>
void launch_plain_backward(const ResidualNormShape& shape, const ResidualNormBackward<T, R>& io, cudaStream_t stream) {
  const ColumnSums columns = column_sums(io, columns_capacity<S>(shape.C));
  const int sum_bytes = S::kRows * columns.count * columns.capacity * static_cast<int>(sizeof(float));
  const int stage_bytes = S::kRows * BackwardStage<T, R, S>::kBytes;
  const bool staged = sum_bytes + stage_bytes <= shared_memory_limit();
  const int shared_bytes = sum_bytes + (staged ? stage_bytes : 0);
  const auto kernel = plain_backward_kernel<T, R, S>;
  const std::int64_t work = std::min<std::int64_t>(ceil_div(shape.rows, S::kRows), kMaxBackwardBlocks);
  const unsigned blocks = blocks_for(kernel, S::kThreads, shared_bytes, work);
  kernel<<<blocks, S::kThreads, shared_bytes, stream>>>(shape, io, columns, staged);
  check_launch("residual_norm_backward");
  finish_columns<S>(columns, io.workspace, blocks, shape.C, stream);
}

template <typename T, typename R, typename S>
void launch_full_backward(const ResidualNormShape& shape, const ResidualNormBackward<T, R>& io, cudaStream_t stream) {
  const ColumnSums columns = column_sums(io, columns_capacity<S>(shape.C));
  const int sum_bytes = columns.count * columns.capacity * static_cast<int>(sizeof(float));
  const bool sums_shared = sum_bytes <= shared_memory_limit();
  const int shared_bytes = sums_shared ? sum_bytes : 0;
  const auto kernel = full_backward_kernel<T, R, S>;
  const std::int64_t work = std::min<std::int64_t>(shape.rows, kMaxBackwardBlocks);
  const unsigned blocks = blocks_for(kernel, S::kThreads, shared_bytes, work);
  kernel<<<blocks, S::kThreads, shared_bytes, stream>>>(shape, io, columns, sums_shared);
  check_launch("residual_norm_backward");
  finish_columns<S>(columns, io.workspace, blocks, shape.C, stream);
}

}  // namespace

template <typename T, typename R>
void residual_norm_forward(const ResidualNormShape& shape, const ResidualNormForward<T, R>& io, cudaStream_t stream) {
  check_shape(shape);
  if (shape.rows == 0) return;
  const bool plain = shape.dropout == 0 && io.rowscale == nullptr && io.colscale == nullptr && io.weight2 == nullptr;
  if (plain) {
    for_plain_spread(shape.C, [&](auto spread) { launch_forward<T, R, decltype(spread), false>(shape, io, stream); });
  } else {
    for_full_spread(shape.C, [&](auto spread) { launch_forward<T, R, decltype(spread), true>(shape, io, stream); });
  }
}

template <typename T, typename R>
void residual_norm_backward(const ResidualNormShape& shape, const ResidualNormBackward<T, R>& io, cudaStream_t stream) {
  check_shape(shape);
  if (shape.rows == 0) return;
  ResidualNormBackward<T, R> operands = io;
  if (io.x == nullptr && io.residual_out == nullptr) operands.residual_out = io.residual;  // h is the stream alone
  const bool plain = shape.dropout == 0 && io.rowscale == nullptr && io.colscale == nullptr && io.weight2 == nullptr &&
                     io.dcolscale == nullptr && operands.residual_out != nullptr;
  if (plain) {
    for_plain_backward_spread(
        shape.C, [&](auto spread) { launch_plain_backward<T, R, decltype(spread)>(shape, operands, stream); });
  } else {
    for_full_spread(shape.C,
                    [&](auto spread) { launch_full_backward<T, R, decltype(spread)>(shape, operands, stream); });
  }
}

std::size_t residual_norm_backward_workspace(std::int64_t C, int column_sums) {
  std::int64_t capacity = 0;
  const auto widest = [&](auto spread) { capacity = std::max(capacity, columns_capacity<decltype(spread)>(C)); };
  for_plain_backward_spread(C, widest);
  for_full_spread(C, widest);
  return static_cast<std::size_t>(kMaxBackwardBlocks * column_sums * capacity) * sizeof(float);
}

#define WEFT_INSTANTIATE(T, R)                                                                                         \
  template void residual_norm_forward<T, R>(const ResidualNormShape&, const ResidualNormForward<T, R>&, cudaStream_t); \
  template void residual_norm_backward<T, R>(const ResidualNormShape&, const ResidualNormBackward<T, R>&, cudaStream_t);
WEFT_INSTANTIATE(float, float)
WEFT_INSTANTIATE(bf16, bf16)
WEFT_INSTANTIATE(bf16, float)
WEFT_INSTANTIATE(fp16, fp16)
WEFT_INSTANTIATE(fp16, float)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
