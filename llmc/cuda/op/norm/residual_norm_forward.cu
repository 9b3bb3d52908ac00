// Fused dropout + residual + norm, forward (Ba et al., 2016; Zhang & Sennrich, 2019), arithmetic in fp32:
//
//   h = dropout(x rowscale) colscale + residual        z = xhat (w + offset) + b,   xhat = (h - mean) rstd
//
// Bytes moved a row in the form that Llama uses, T and R of E bytes: x and residual are read, residual_out and out
// written, 4 C E; codes in the place of out take C. The layout of rows: llmc/cuda/op/norm/residual_norm.cuh.

#include <type_traits>

#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/fp8/fp8.cuh"
#include "llmc/cuda/op/norm/residual_norm.cuh"
#include "llmc/model/fp8_rows.h"

namespace weft::cuda {

namespace {

using namespace norm_detail;

// norm_only: h = residual, which is not written; one output. plain: h = x + residual, either of which may be absent,
// and up to two outputs. few: as plain, for so few rows that each has its own block, as in decoding: nothing is
// prefetched, and weights are read before the predecessor in a chain has ended. offset: as plain, with the offset of
// weights. full: every operand.
enum class Form { norm_only, plain, few, offset, full };

template <typename T, typename S>
__device__ void prefetch_weights(const T* weight, std::int64_t C) {
  if (weight == nullptr) return;
#pragma unroll
  for (int g = 0; g < S::kGroups; ++g) {
    if (!S::outside(g, C)) prefetch_to_l2(weight + S::column(g));
  }
}

// Starts loading the weights before the rows arrive: to registers or, if they would take too many, to L2, from which
// the other layers' weights have evicted them.
template <typename T, typename S, bool kInRegisters>
__device__ auto early_weights(const T* weight, const T* bias, std::int64_t C) {
  if constexpr (kInRegisters) {
    return WeightsInRegisters<T, S>(weight, bias, C);
  } else {
    prefetch_weights<T, S>(weight, C);
    prefetch_weights<T, S>(bias, C);
    return WeightsInMemory<T, S>{weight, bias};
  }
}

// What is stored: the output; its codes by a tensor's scale; its codes by a scale for each row.
enum class Stored { values, codes, row_codes };

// One group of columns of the output.
template <typename T, typename S, bool kOffset, typename Weights>
__device__ Group<T, S> normalized(const float (&h)[S::kGroup], float mean, float rstd, const Weights& weights, int g,
                                  float offset) {
  Group<T, S> w, b;
  weights.get(g, w, b);
  float z[S::kGroup];
#pragma unroll
  for (int i = 0; i < S::kGroup; ++i) {
    const float weight = kOffset ? w.get(i) + offset : w.get(i);
    z[i] = (h[i] - mean) * rstd * weight + b.get(i);
  }
  w.set(z);
  return w;
}

template <typename T, typename S, bool kOffset, typename Weights>
__device__ void write_output(T* out, const float (&h)[S::kGroups][S::kGroup], float mean, float rstd,
                             const Weights& weights, std::int64_t C, float offset) {
#pragma unroll
  for (int g = 0; g < S::kGroups; ++g) {
    if (!S::outside(g, C)) normalized<T, S, kOffset>(h[g], mean, rstd, weights, g, offset).store(out + S::column(g));
  }
}

// What an output in fp8 needs beside Fp8Target.
struct Rounding {
  float scale = 1.0f;
  ThreadCounters counters;
};

// codes [C] of one row; null: only the counters.
template <typename T, typename S, typename Weights>
__device__ void write_codes(std::uint8_t* codes, Rounding& rounding, const float (&h)[S::kGroups][S::kGroup],
                            float mean, float rstd, const Weights& weights, std::int64_t C) {
  static_assert(S::kGroup == 8);
#pragma unroll
  for (int g = 0; g < S::kGroups; ++g) {
    if (S::outside(g, C)) continue;
    const Group<T, S> z = normalized<T, S, false>(h[g], mean, rstd, weights, g, 0);
    float stored[S::kGroup];  // as the norm in bf16 would have stored it
#pragma unroll
    for (int i = 0; i < S::kGroup; ++i) stored[i] = z.get(i);
    const unsigned low = round_four<Fp8Format::e4m3>(stored, rounding.scale, rounding.counters);
    const unsigned high = round_four<Fp8Format::e4m3>(stored + 4, rounding.scale, rounding.counters);
    if (codes != nullptr) *reinterpret_cast<uint2*>(codes + S::column(g)) = make_uint2(low, high);
  }
}

// Codes and scale of row `row`.
template <typename T, typename S, typename Weights>
__device__ void write_row_codes(const Fp8Rows& to, std::int64_t row, const float (&h)[S::kGroups][S::kGroup],
                                const float2& statistics, const Weights& weights, std::int64_t C, RowSum<S>& over_row) {
  static_assert(S::kGroup == 4);
  Group<T, S> z[S::kGroups];  // as it would have been stored
  float amax = 0;
#pragma unroll
  for (int g = 0; g < S::kGroups; ++g) {
    if (S::outside(g, C)) continue;
    z[g] = normalized<T, S, false>(h[g], statistics.x, statistics.y, weights, g, 0);
#pragma unroll
    for (int i = 0; i < S::kGroup; ++i) amax = fmaxf(amax, fabsf(z[g].get(i)));
  }
  const float scale = fp8_row_scale(over_row.largest(amax));
  if (S::lane() == 0) to.scales[row] = scale;
  const RowCodes codes_of_row(scale);
#pragma unroll
  for (int g = 0; g < S::kGroups; ++g) {
    if (S::outside(g, C)) continue;
    float values[S::kGroup];
#pragma unroll
    for (int i = 0; i < S::kGroup; ++i) values[i] = z[g].get(i);
    *reinterpret_cast<unsigned*>(to.codes + row * C + S::column(g)) = codes_of_row(values);
  }
}

template <typename T, typename R, typename S, Form kForm>
struct ForwardStage {
  static constexpr int kXBytes = kForm == Form::norm_only ? 0 : StagedRow<T, S>::kBytes;
  static constexpr int kBytes = kXBytes + StagedRow<R, S>::kBytes;

  char* memory;  // null: rows are not prefetched; never null for an exact spread
  __device__ bool used() const { return S::kExact || memory != nullptr; }
  __device__ char* x() const { return memory; }
  __device__ char* residual() const { return used() ? memory + kXBytes : nullptr; }

  __device__ void fetch(const ResidualNormShape& shape, const ResidualNormForward<T, R>& io, std::int64_t row) const {
    if (!used() || row >= shape.rows) return;
    if constexpr (kForm != Form::norm_only) StagedRow<T, S>::fetch(x(), at_row(io.x, row, shape.C), shape.C);
    StagedRow<R, S>::fetch(residual(), at_row(io.residual, row, shape.C), shape.C);
    __pipeline_commit();
  }
};

template <typename T, typename R, typename S, Form kForm, Stored kStored>
__global__ void __launch_bounds__(S::kThreads)
    forward_kernel(ResidualNormShape shape, ResidualNormForward<T, R> io, bool staged) {
  extern __shared__ char4 dynamic_memory[];
  __shared__ float scratch[2][RowSum<S>::kBlockWarps][2];
  using Stage = ForwardStage<T, R, S, kForm>;
  constexpr bool kCodes = kStored == Stored::codes;
  const Stage stage{staged ? reinterpret_cast<char*>(dynamic_memory) + S::slot() * Stage::kBytes : nullptr};
  RowSum<S> row_sum{scratch};
  const std::int64_t C = shape.C, step = static_cast<std::int64_t>(gridDim.x) * S::kRows;
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * S::kRows + S::slot();
  launch_dependents();
  constexpr bool kFits = S::kThreadColumns * sizeof(T) <= 64 && S::kThreads <= 320;  // fits in a thread's registers
  constexpr bool kOffset = kForm == Form::offset || kForm == Form::full;
  constexpr bool kEarly = kForm == Form::few && kFits, kEarly2 = kForm == Form::few && S::kThreadColumns <= 8;
  const auto weights = early_weights<T, S, kEarly>(io.weight, io.bias, C);
  const auto weights2 = early_weights<T, S, kEarly2>(kForm != Form::norm_only ? io.weight2 : nullptr,
                                                     kForm != Form::norm_only ? io.bias2 : nullptr, C);
  wait_for_predecessors();
  Rounding rounding;
  if constexpr (kCodes) {
    if (io.codes.writes()) rounding.scale = *io.codes.scale;
  }
  stage.fetch(shape, io, row);
  for (; row < shape.rows; row += step) {
    if (stage.used()) __pipeline_wait_prior(0);
    Group<T, S> xs[S::kGroups];
    Group<R, S> skips[S::kGroups];
    if constexpr (kForm != Form::norm_only)
      StagedRow<T, S>::read_row(xs, stage.x(), io.x + row * C, C, io.x != nullptr);
    StagedRow<R, S>::read_row(skips, stage.residual(), io.residual + row * C, C, io.residual != nullptr);
    float h[S::kGroups][S::kGroup];
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      const int column = S::column(g);
      const Group<T, S>& x = xs[g];
      Group<R, S>& skip = skips[g];
      if constexpr (kForm == Form::full) {
        if (!S::outside(g, C)) {
          float factors[S::kGroup];
          branch_factors(factors, shape, io.rowscale != nullptr ? io.rowscale[row] : 1.0f, row * C + column);
          add_branch(skip, x, skip, factors, io.colscale != nullptr ? io.colscale + column : nullptr);
        }
      } else if constexpr (kForm != Form::norm_only) {
        if (io.x != nullptr) add_branch<T, R>(skip, x, skip, nullptr, nullptr);
      }
#pragma unroll
      for (int i = 0; i < S::kGroup; ++i) h[g][i] = skip.get(i);
      if constexpr (kForm != Form::norm_only) {
        if (io.residual_out != nullptr && !S::outside(g, C)) skip.store_streaming(io.residual_out + row * C + column);
      }
    }
    stage.fetch(shape, io, row + step);
    const float2 statistics = row_statistics<S>(h, shape, row_sum);
    if constexpr (kCodes) {
      write_codes<T, S>(at_row(io.codes.codes, row, C), rounding, h, statistics.x, statistics.y, weights, C);
    } else if constexpr (kStored == Stored::row_codes) {
      write_row_codes<T, S>(io.row_codes, row, h, statistics, weights, C, row_sum);
    } else {
      write_output<T, S, kOffset>(io.out + row * C, h, statistics.x, statistics.y, weights, C, shape.weight_offset);
    }
    if constexpr (kForm != Form::norm_only && kStored == Stored::values) {
      if (io.weight2 != nullptr)
        write_output<T, S, kOffset>(io.out2 + row * C, h, statistics.x, statistics.y, weights2, C, shape.weight_offset);
    }
    if (S::lane() == 0) {
      if (io.mean != nullptr) io.mean[row] = statistics.x;
      if (io.rstd != nullptr) io.rstd[row] = statistics.y;
    }
  }
  if constexpr (kCodes) {
    __shared__ unsigned counters_scratch[3];
    add_counters(io.codes, rounding.counters, counters_scratch);
  }
}

// ---- launchers --------------------------------------------------------------------------------------------------------
struct NormLaunch {
  cudaStream_t stream;
  int shared_limit;
  bool overlapping;
};

template <typename T, typename R, typename S, Form kForm, Stored kStored>
void launch_forward(const ResidualNormShape& shape, const ResidualNormForward<T, R>& io, const NormLaunch& launch) {
  const int stage_bytes = S::kRows * ForwardStage<T, R, S, kForm>::kBytes;
  const bool staged = kForm != Form::full && kForm != Form::few && stage_bytes <= launch.shared_limit;
  if constexpr (S::kExact) {
    if (!staged) {
      using Bounded = Spread<R, S::kRowThreads, S::kThreadColumns>;
      return launch_forward<T, R, Bounded, Form::plain, kStored>(shape, io, launch);
    }
  }
  const int shared_bytes = staged ? stage_bytes : 0;
  const auto kernel = forward_kernel<T, R, S, kForm, kStored>;
  const unsigned blocks =
      blocks_for(kernel, S::kThreads, shared_bytes, ceil_div(shape.rows, S::kRows), launch.shared_limit);
  launch_chained(kernel, dim3(blocks), dim3(S::kThreads), static_cast<std::size_t>(shared_bytes), launch.stream,
                 launch.overlapping, "residual_norm_forward", shape, io, staged);
}

// All forms spread a row of C columns over the same threads, so that they add in the same order: recomputation takes
// the norm of a stored stream (norm_only, plain) where the forward pass may have added a branch with dropout (full).
template <typename T, typename R, typename S, Stored kStored>
void launch_form(Form form, const ResidualNormShape& shape, const ResidualNormForward<T, R>& io,
                 const NormLaunch& launch) {
  using Bounded = Spread<R, S::kRowThreads, S::kThreadColumns>;
  if constexpr (kStored != Stored::row_codes) {
    if (form == Form::full)  // never staged
      return launch_forward<T, R, Bounded, Form::full, kStored>(shape, io, launch);
  }
  if constexpr (kStored == Stored::values) {  // the models with an offset have no width of an exact spread
    if (form == Form::offset) return launch_forward<T, R, Bounded, Form::offset, kStored>(shape, io, launch);
  }
  if constexpr (std::is_same_v<R, float>) {  // the residual stream of inference
    if (shape.rows <= device_attribute(cudaDevAttrMultiProcessorCount)) {
      return launch_forward<T, R, Bounded, Form::few, kStored>(shape, io, launch);
    }
  }
  if constexpr (S::kExact) {
    if (form == Form::norm_only) return launch_forward<T, R, S, Form::norm_only, kStored>(shape, io, launch);
  }
  launch_forward<T, R, S, Form::plain, kStored>(shape, io, launch);
}

template <typename T, typename R>
void check_codes(const ResidualNormShape& shape, const ResidualNormForward<T, R>& io) {
  const bool possible = std::is_same_v<T, bf16> && std::is_same_v<R, bf16> && io.out == nullptr &&
                        io.weight2 == nullptr && io.codes.transposed == nullptr && shape.C % 16 == 0 &&
                        shape.weight_offset == 0;
  if (!possible)
    fail(Exit::internal, "residual_norm: codes are of one output in bf16 without offset, in rows of multiples of 16");
}

template <typename T, typename R>
void check_row_codes(const ResidualNormShape& shape, const ResidualNormForward<T, R>& io, bool norm_only) {
  const bool possible = sizeof(T) == 2 && std::is_same_v<R, float> && norm_only && io.out == nullptr &&
                        io.row_codes.scales != nullptr && shape.C % 16 == 0;
  if (!possible)
    fail(Exit::internal,
         "residual_norm: codes of rows are of the norm of a stream in fp32 alone, in rows of multiples of 16");
}

}  // namespace

int norm_shared_memory() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 1024;
}

template <typename T, typename R>
void residual_norm_forward(const ResidualNormShape& shape, const ResidualNormForward<T, R>& io, cudaStream_t stream,
                           int shared_limit, bool overlapping) {
  check_shape(shape);
  if (shape.rows == 0) return;
  const bool in_codes = io.codes.writes() || io.codes.counters != nullptr;
  if (in_codes) check_codes(shape, io);
  const bool in_row_codes = io.row_codes.codes != nullptr;
  Form form = Form::plain;
  if (shape.dropout != 0 || io.rowscale != nullptr || io.colscale != nullptr) {
    form = Form::full;
  } else if (shape.weight_offset != 0) {
    form = Form::offset;
  } else if (io.x == nullptr && io.residual != nullptr && io.residual_out == nullptr && io.weight2 == nullptr) {
    form = Form::norm_only;
  }
  if (in_row_codes) check_row_codes(shape, io, form == Form::norm_only);
  const NormLaunch launch{stream, shared_limit, overlapping};
  for_plain_spread<R, kMayBeExact<T, R>>(shape.C, [&](auto spread) {
    using S = decltype(spread);
    if constexpr (std::is_same_v<T, bf16> && std::is_same_v<R, bf16>) {
      if (in_codes) return launch_form<T, R, S, Stored::codes>(form, shape, io, launch);
    }
    if constexpr (std::is_same_v<R, float> && !std::is_same_v<T, float>) {
      if (in_row_codes) return launch_form<T, R, S, Stored::row_codes>(form, shape, io, launch);
    }
    launch_form<T, R, S, Stored::values>(form, shape, io, launch);
  });
}

#define WEFT_INSTANTIATE(T, R)                                                                                        \
  template void residual_norm_forward<T, R>(const ResidualNormShape&, const ResidualNormForward<T, R>&, cudaStream_t, \
                                            int, bool);
WEFT_INSTANTIATE(float, float)
WEFT_INSTANTIATE(bf16, bf16)
WEFT_INSTANTIATE(bf16, float)
WEFT_INSTANTIATE(fp16, fp16)
WEFT_INSTANTIATE(fp16, float)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
