// Fused dropout + residual + norm, backward, arithmetic in fp32. For g = dout w + dout2 w2, with the offset of weights in
// w and w2 (the formulas of llmc/cpu/residual_norm.cpp):
//
//   dh = rstd (g - [mean(g)] - xhat mean(g xhat)) + dresidual_out      [mean(g)] for LayerNorm only
//   dresidual = dh,   dx = dh colscale f,   dcolscale += dh x f        f = rowscale * dropout factor
//   dweight += dout xhat,   dbias += dout
//
// Bytes moved a row in the form that Llama uses, T and R of E bytes: dout, h and dresidual_out are read and dresidual
// written, 4 C E, or 5 C E if dx is written as well.
//
// Column sums (dweight, ...) accumulate in registers or shared memory, each thread adding to its own columns. At its
// end a block writes them to the workspace, and a second kernel, which starts while the first one ends, adds the blocks
// in order. Where shared memory is too small for the sums, the full kernel accumulates them in the workspace itself.
// The layout of rows: llmc/cuda/op/norm/residual_norm.cuh.

#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/norm/column_sums.cuh"
#include "llmc/cuda/op/norm/residual_norm.cuh"

namespace weft::cuda {

namespace {

using namespace norm_detail;

constexpr int kMaxBackwardBlocks = 640;

template <typename S>
__device__ void add_columns(float* sums, const ColumnSums& columns, int which, int g,
                            const float (&values)[S::kGroup]) {
  if (columns.slot[which] < 0) return;
  float* first = sums + columns.slot[which] * columns.capacity + sum_position<S::kRowThreads, S::kGroup>(S::column(g));
#pragma unroll
  for (int chunk = 0; chunk < S::kGroup / 4; ++chunk) {
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
      if (S::outside(g, C)) continue;
      float* first = sums + k * columns.capacity + sum_position<S::kRowThreads, S::kGroup>(S::column(g));
#pragma unroll
      for (int chunk = 0; chunk < S::kGroup / 4; ++chunk)
        *reinterpret_cast<float4*>(first + chunk * S::kRowThreads * 4) = make_float4(0, 0, 0, 0);
    }
  }
}

// Adds the block's sums over the rows that it computes at a time, and writes them to its part of the workspace.
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

// ---- backward ---------------------------------------------------------------------------------------------------------
template <typename T, typename R, typename S>
struct BackwardStage {
  char* memory;  // null: rows are not prefetched; never null for an exact spread
  __device__ bool used() const { return S::kExact || memory != nullptr; }
  __device__ char* dout() const { return memory; }
  __device__ char* h() const { return used() ? memory + StagedRow<T, S>::kBytes : nullptr; }
  __device__ char* skip() const { return used() ? h() + StagedRow<R, S>::kBytes : nullptr; }
  static constexpr int kBytes = StagedRow<T, S>::kBytes + 2 * StagedRow<R, S>::kBytes;

  __device__ void fetch(const ResidualNormShape& shape, const ResidualNormBackward<T, R>& io, std::int64_t row) const {
    if (!used() || row >= shape.rows) return;
    StagedRow<T, S>::fetch(dout(), at_row(io.dout, row, shape.C), shape.C);
    StagedRow<R, S>::fetch(h(), at_row(io.residual_out, row, shape.C), shape.C);
    StagedRow<R, S>::fetch(skip(), at_row(io.dresidual_out, row, shape.C), shape.C);
    __pipeline_commit();
  }
};

template <typename S, typename T>
__device__ void store_row(T* matrix, const Group<T, S> (&groups)[S::kGroups], std::int64_t row, std::int64_t C) {
  if (matrix == nullptr) return;
#pragma unroll
  for (int g = 0; g < S::kGroups; ++g) {
    if (!S::outside(g, C)) groups[g].store_streaming(matrix + row * C + S::column(g));
  }
}

// Hides the group's values from the compiler, which would otherwise keep the fp32 values of the first pass for the
// second, in twice the registers.
template <typename T, int kCount>
__device__ void forget(Elements<T, kCount>& group) {
  auto* words = reinterpret_cast<unsigned*>(group.value);
#pragma unroll
  for (int i = 0; i < Elements<T, kCount>::kBytes / 4; ++i) asm volatile("" : "+r"(words[i]));
}

// Threads that must fit on a multiprocessor: exact spreads are unrolled so far that without this limit they would take
// all its registers.
template <typename S>
constexpr int kResidentThreads = S::kThreadColumns > 16 ? 512 : 640;

// Plain: x, residual, weight, bias, and for RMSNorm the offset of weights. A thread's part of dout, h and the skip
// gradient stays in registers in its storage type between the two passes over the row.

template <typename T, typename R, typename S, bool kLayerNorm, bool kOffset>
__global__ void __launch_bounds__(S::kThreads, S::kExact ? kResidentThreads<S> / S::kThreads : 1)
    plain_backward_kernel(ResidualNormShape shape, ResidualNormBackward<T, R> io, ColumnSums columns, bool staged) {
  extern __shared__ char4 dynamic_memory[];
  __shared__ float scratch[2][RowSum<S>::kBlockWarps][2];
  using Stage = BackwardStage<T, R, S>;
  float* sums = reinterpret_cast<float*>(dynamic_memory);
  float* own_sums = sums + S::slot() * columns.count * columns.capacity;
  char* stages = reinterpret_cast<char*>(sums + S::kRows * columns.count * columns.capacity);
  const Stage stage{staged ? stages + S::slot() * Stage::kBytes : nullptr};
  RowSum<S> row_sum{scratch};
  const std::int64_t C = shape.C, step = static_cast<std::int64_t>(gridDim.x) * S::kRows;
  // fp32 rows take twice the registers: there the skip gradient is read late, and the weight again for each row, from
  // L1. The latter also where an exact spread must leave registers for the unrolled arithmetic.
  constexpr bool kLateSkip = sizeof(T) == 4;
  constexpr bool kKeepWeight = sizeof(T) + sizeof(R) == 4 && !(S::kExact && S::kThreadColumns > 16);
  Group<T, S> kept_weight[kKeepWeight ? S::kGroups : 1];
  if constexpr (kKeepWeight) {
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) StagedRow<T, S>::read(kept_weight[g], nullptr, io.weight, g, C);
  }
  const auto weight_group = [&](int g) {
    if constexpr (kKeepWeight) {
      return kept_weight[g];
    } else {
      Group<T, S> w;
      StagedRow<T, S>::read(w, nullptr, io.weight, g, C);
      return w;
    }
  };
  const auto with_offset = [&](float weight) { return kOffset ? weight + shape.weight_offset : weight; };
  // The column sums of a thread with few columns stay in registers until the end.
  constexpr bool kRegisterSums = S::kThreadColumns <= 16;
  float weight_sum[kRegisterSums ? S::kGroups : 1][S::kGroup] = {};
  launch_dependents();  // the successor waits for the end of this kernel; only its launch latency is hidden
  clear_columns<S>(own_sums, columns, C);
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * S::kRows + S::slot();
  stage.fetch(shape, io, row);
  float next_mean = 0, next_rstd = 0;
  const auto read_statistics = [&](std::int64_t of) {
    if (of >= shape.rows) return;
    if constexpr (kLayerNorm) next_mean = io.mean[of];
    next_rstd = io.rstd[of];
  };
  read_statistics(row);
  for (; row < shape.rows; row += step) {
    const float mean = next_mean, rstd = next_rstd;
    read_statistics(row + step);
    if (stage.used()) __pipeline_wait_prior(0);
    Group<T, S> dout[S::kGroups];
    Group<R, S> h[S::kGroups], skip[kLateSkip ? 1 : S::kGroups];
    StagedRow<T, S>::read_row(dout, stage.dout(), io.dout + row * C, C);
    StagedRow<R, S>::read_row(h, stage.h(), io.residual_out + row * C, C);
    if constexpr (!kLateSkip) {
      StagedRow<R, S>::read_row(skip, stage.skip(), io.dresidual_out + row * C, C, io.dresidual_out != nullptr);
    }
    if constexpr (!kLateSkip) stage.fetch(shape, io, row + step);

    float sum[2] = {0, 0};  // sums of g and of g (h - mean)
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      if (S::outside(g, C)) continue;
      const Group<T, S> w = weight_group(g);
      float column_sum[S::kGroup];
#pragma unroll
      for (int i = 0; i < S::kGroup; ++i) {
        const float centred = kLayerNorm ? h[g].get(i) - mean : h[g].get(i), d = dout[g].get(i);
        const float gradient = d * with_offset(w.get(i));
        if constexpr (kLayerNorm) sum[0] += gradient;
        sum[1] += gradient * centred;
        if constexpr (kRegisterSums) {
          weight_sum[g][i] += d * (rstd * centred);
        } else {
          column_sum[i] = d * (rstd * centred);
        }
      }
      if constexpr (!kRegisterSums) add_columns<S>(own_sums, columns, 0, g, column_sum);
    }
    if (columns.slot[1] >= 0) {
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        if (S::outside(g, C)) continue;
        float d[S::kGroup];
#pragma unroll
        for (int i = 0; i < S::kGroup; ++i) d[i] = dout[g].get(i);
        add_columns<S>(own_sums, columns, 1, g, d);
      }
    }
    if constexpr (kLayerNorm) {
      row_sum.add(sum);
    } else {  // RMSNorm does not need the mean of g
      float needed[1] = {sum[1]};
      row_sum.add(needed);
      sum[1] = needed[0];
    }
    // dh = rstd g + (h - mean) slope + offset + skip
    const float per_column = 1.0f / static_cast<float>(C);
    const float offset = kLayerNorm ? -rstd * sum[0] * per_column : 0.0f;
    const float slope = -rstd * rstd * rstd * sum[1] * per_column;
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      if (S::outside(g, C)) continue;
      forget(dout[g]);
      forget(h[g]);
      if constexpr (kKeepWeight) forget(kept_weight[g]);
      const Group<T, S> w = weight_group(g);
      Group<R, S>& skip_g = skip[kLateSkip ? 0 : g];
      if constexpr (kLateSkip) StagedRow<R, S>::read(skip_g, stage.skip(), at_row(io.dresidual_out, row, C), g, C);
      float dh[S::kGroup];
#pragma unroll
      for (int i = 0; i < S::kGroup; ++i) {
        const float rest =
            kLayerNorm ? (h[g].get(i) - mean) * slope + (skip_g.get(i) + offset) : h[g].get(i) * slope + skip_g.get(i);
        dh[i] = rstd * (dout[g].get(i) * with_offset(w.get(i))) + rest;
      }
      skip_g.set(dh);
      if constexpr (kLateSkip) {
        if (io.dresidual != nullptr) skip_g.store_streaming(io.dresidual + row * C + S::column(g));
      }
      dout[g].set(dh);
    }
    if constexpr (!kLateSkip) store_row<S>(io.dresidual, skip, row, C);
    store_row<S>(io.dx, dout, row, C);
    if constexpr (kLateSkip) stage.fetch(shape, io, row + step);
  }
  if constexpr (kRegisterSums) {
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      if (!S::outside(g, C)) add_columns<S>(own_sums, columns, 0, g, weight_sum[g]);
    }
  }
  write_columns<S>(
      static_cast<float*>(io.workspace) + static_cast<std::int64_t>(blockIdx.x) * columns.count * columns.capacity,
      sums, columns);
}

// Computes the gradient of one group of xhat, g = dout w + dout2 w2, and if `add` the column sums of both outputs.
template <typename T, typename R, typename S, bool kOffset>
__device__ void full_gradient(float (&g_values)[S::kGroup], const ResidualNormBackward<T, R>& io, std::int64_t row,
                              std::int64_t C, float offset, int g, const float (&xhat)[S::kGroup], float* sums,
                              const ColumnSums& columns, bool add) {
  const T* const douts[2] = {io.dout, io.dout2};
  const T* const weights[2] = {io.weight, io.weight2};
#pragma unroll
  for (int i = 0; i < S::kGroup; ++i) g_values[i] = 0;
#pragma unroll
  for (int output = 0; output < 2; ++output) {
    if (weights[output] == nullptr) continue;
    Group<T, S> dout, w;
    dout.load(douts[output] + row * C + S::column(g));
    w.load(weights[output] + S::column(g));
    float d[S::kGroup], dx_hat[S::kGroup];
#pragma unroll
    for (int i = 0; i < S::kGroup; ++i) {
      d[i] = dout.get(i);
      dx_hat[i] = d[i] * xhat[i];
      g_values[i] += d[i] * (kOffset ? w.get(i) + offset : w.get(i));
    }
    if (add) {
      add_columns<S>(sums, columns, 2 * output, g, dx_hat);
      add_columns<S>(sums, columns, 2 * output + 1, g, d);
    }
  }
}

// Full: every operand. Only h stays in registers; the rest is read again in the second pass, from L1 or L2.
template <typename T, typename R, typename S, bool kOffset>
__global__ void __launch_bounds__(S::kThreads)
    full_backward_kernel(ResidualNormShape shape, ResidualNormBackward<T, R> io, ColumnSums columns, bool sums_shared) {
  extern __shared__ char4 dynamic_memory[];
  __shared__ float scratch[2][RowSum<S>::kBlockWarps][2];
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
    Group<R, S> h[S::kGroups];
    float xhat[S::kGroup], gradient[S::kGroup], factors[S::kGroup], sum[2] = {0, 0};  // sum: of g and of g xhat
    const auto normalise = [&](const Group<R, S>& group) {
#pragma unroll
      for (int i = 0; i < S::kGroup; ++i) xhat[i] = (group.get(i) - mean) * rstd;
    };
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      const int column = S::column(g);
      if (S::outside(g, C)) continue;
      if (io.residual_out != nullptr) {
        h[g].load(io.residual_out + row * C + column);
      } else {
        Group<T, S> x;
        StagedRow<T, S>::read(x, nullptr, at_row(io.x, row, C), g, C);
        StagedRow<R, S>::read(h[g], nullptr, at_row(io.residual, row, C), g, C);
        branch_factors(factors, shape, rowscale, row * C + column);
        add_branch<T, R>(h[g], x, h[g], factors, io.colscale != nullptr ? io.colscale + column : nullptr);
      }
      normalise(h[g]);
      full_gradient<T, R, S, kOffset>(gradient, io, row, C, shape.weight_offset, g, xhat, sums, columns, true);
#pragma unroll
      for (int i = 0; i < S::kGroup; ++i) {
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
      if (S::outside(g, C)) continue;
      normalise(h[g]);
      full_gradient<T, R, S, kOffset>(gradient, io, row, C, shape.weight_offset, g, xhat, sums, columns, false);
      Group<R, S> skip;
      Group<T, S> x;
      StagedRow<R, S>::read(skip, nullptr, at_row(io.dresidual_out, row, C), g, C);
      StagedRow<T, S>::read(x, nullptr, at_row(io.x, row, C), g, C);
      branch_factors(factors, shape, rowscale, row * C + column);
      float dx[S::kGroup], dscale[S::kGroup];
#pragma unroll
      for (int i = 0; i < S::kGroup; ++i) {
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
template <typename S>
std::int64_t columns_capacity(std::int64_t C) {
  return ceil_div(C, S::kRowThreads * S::kGroup) * S::kRowThreads * S::kGroup;
}

template <typename T, typename R>
ColumnSums column_sums(const ResidualNormBackward<T, R>& io, std::int64_t capacity) {
  ColumnSums columns{{io.dweight, io.dbias, io.dweight2, io.dbias2, io.dcolscale}, {}, 0, static_cast<int>(capacity)};
  for (int k = 0; k < kColumnSums; ++k) columns.slot[k] = columns.target[k] != nullptr ? columns.count++ : -1;
  return columns;
}

template <typename T, typename R, typename S>
void launch_full_backward(const ResidualNormShape& shape, const ResidualNormBackward<T, R>& io, cudaStream_t stream,
                          int shared_limit) {
  const ColumnSums columns = column_sums(io, columns_capacity<S>(shape.C));
  const int sum_bytes = columns.count * columns.capacity * static_cast<int>(sizeof(float));
  const bool sums_shared = sum_bytes <= shared_limit;
  const int shared_bytes = sums_shared ? sum_bytes : 0;
  const auto kernel =
      shape.weight_offset != 0 ? full_backward_kernel<T, R, S, true> : full_backward_kernel<T, R, S, false>;
  const std::int64_t work = std::min<std::int64_t>(shape.rows, kMaxBackwardBlocks);
  const unsigned blocks = blocks_for(kernel, S::kThreads, shared_bytes, work, shared_limit);
  kernel<<<blocks, S::kThreads, shared_bytes, stream>>>(shape, io, columns, sums_shared);
  check_launch("residual_norm_backward");
  finish_columns<S::kRowThreads, S::kGroup>(columns, io.workspace, blocks, shape.C, stream);
}

template <typename T, typename R>
void full_backward(const ResidualNormShape& shape, const ResidualNormBackward<T, R>& io, cudaStream_t stream,
                   int shared_limit) {
  for_full_spread<R>(
      shape.C, [&](auto spread) { launch_full_backward<T, R, decltype(spread)>(shape, io, stream, shared_limit); });
}

template <typename T, typename R, typename S>
void launch_plain_backward(const ResidualNormShape& shape, const ResidualNormBackward<T, R>& io, cudaStream_t stream,
                           int shared_limit) {
  const ColumnSums columns = column_sums(io, columns_capacity<S>(shape.C));
  const int sum_bytes = S::kRows * columns.count * columns.capacity * static_cast<int>(sizeof(float));
  const int stage_bytes = S::kRows * BackwardStage<T, R, S>::kBytes;
  const bool staged = sum_bytes + stage_bytes <= shared_limit;
  const bool offset = shape.weight_offset != 0;
  if constexpr (S::kExact) {
    if (!staged || offset) {
      using Bounded = Spread<R, S::kRowThreads, S::kThreadColumns>;
      return launch_plain_backward<T, R, Bounded>(shape, io, stream, shared_limit);
    }
  }
  if (sum_bytes > shared_limit) return full_backward(shape, io, stream, shared_limit);
  const int shared_bytes = sum_bytes + (staged ? stage_bytes : 0);
  auto kernel = shape.kind == NormKind::layernorm ? plain_backward_kernel<T, R, S, true, false>
                                                  : plain_backward_kernel<T, R, S, false, false>;
  if constexpr (!S::kExact) {
    if (offset) kernel = plain_backward_kernel<T, R, S, false, true>;
  }
  const std::int64_t work = std::min<std::int64_t>(ceil_div(shape.rows, S::kRows), kMaxBackwardBlocks);
  const unsigned blocks = blocks_for(kernel, S::kThreads, shared_bytes, work, shared_limit);
  kernel<<<blocks, S::kThreads, shared_bytes, stream>>>(shape, io, columns, staged);
  check_launch("residual_norm_backward");
  finish_columns<S::kRowThreads, S::kGroup>(columns, io.workspace, blocks, shape.C, stream);
}

}  // namespace

template <typename T, typename R>
void residual_norm_backward(const ResidualNormShape& shape, const ResidualNormBackward<T, R>& io, cudaStream_t stream,
                            int shared_limit) {
  check_shape(shape);
  if (shape.rows == 0) return;
  ResidualNormBackward<T, R> operands = io;
  if (io.x == nullptr && io.residual_out == nullptr) operands.residual_out = io.residual;  // h is the stream alone
  const bool plain = shape.dropout == 0 && io.rowscale == nullptr && io.colscale == nullptr && io.weight2 == nullptr &&
                     io.dcolscale == nullptr && operands.residual_out != nullptr &&
                     (shape.weight_offset == 0 || shape.kind == NormKind::rmsnorm);
  if (!plain) return full_backward(shape, operands, stream, shared_limit);
  for_plain_backward_spread<R, kMayBeExact<T, R>>(shape.C, [&](auto spread) {
    launch_plain_backward<T, R, decltype(spread)>(shape, operands, stream, shared_limit);
  });
}

std::size_t residual_norm_backward_workspace(std::int64_t C, int column_sums) {
  std::int64_t capacity = 0;
  const auto widest = [&](auto spread) { capacity = std::max(capacity, columns_capacity<decltype(spread)>(C)); };
  for_plain_backward_spread<bf16, false>(C, widest);  // with groups of 8; spreads with smaller groups need no more
  for_full_spread<bf16>(C, widest);
  return static_cast<std::size_t>(kMaxBackwardBlocks * column_sums * capacity) * sizeof(float);
}

#define WEFT_INSTANTIATE(T, R)                                                                            \
  template void residual_norm_backward<T, R>(const ResidualNormShape&, const ResidualNormBackward<T, R>&, \
                                             cudaStream_t, int);
WEFT_INSTANTIATE(float, float)
WEFT_INSTANTIATE(bf16, bf16)
WEFT_INSTANTIATE(bf16, float)
WEFT_INSTANTIATE(fp16, fp16)
WEFT_INSTANTIATE(fp16, float)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
