// What the kernels of rows_matmul_fp8() add to those of rows_matmul(): the scales of both operands.
#pragma once

#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/op/gemm/rows_matmul.cuh"

namespace weft::cuda::rows {

// A GEMM of codes. x and weight point to pairs of codes, of which K is the number.
template <typename T>
struct PairsMatmul : RowsMatmul<T> {
  const float* x_scales = nullptr;       // [rows]
  const float* weight_scales = nullptr;  // of the weight's rows: [OC]; gated: [2 OC]
};

template <typename S>
struct ScaledOutput : Output<S> {
  const float *x_scales, *weight_scales;
};

// Never fused with the addition of a bias: all kernels round alike.
__device__ inline float scaled_sum(float sum, float x_scale, float weight_scale) {
  return __fmul_rn(__fmul_rn(sum, x_scale), weight_scale);
}

// Columns, whose sums are first multiplied by the scale of the row of x, then by that of the row of the weight.
template <typename S>
class ScaledColumns {
 public:
  __device__ static int count(const Output<S>& output, int tile_rows) { return Columns<S>::count(output, tile_rows); }
  __device__ ScaledColumns(const ScaledOutput<S>& output, std::int64_t first, int four)
      : columns_(output, first, four), output_(output) {
    const std::int64_t column = (output.gated() ? first / 2 : first) + 4 * four;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool exists = column + i < output.OC;
      scales_[0][i] = exists ? output.weight_scales[column + i] : 0.0f;
      scales_[1][i] = exists && output.gated() ? output.weight_scales[output.OC + column + i] : 0.0f;
    }
  }

  template <typename Sums>
  __device__ void finish(std::int64_t row, const Sums& sums) const {
    if (row >= output_.rows) return;
    const float x_scale = output_.x_scales[row];
    columns_.finish(row, [&](int at) {
      const float4 sum = sums(at);
      const bool up = output_.gated() && at % 16 >= 8;  // see the top of rows_matmul.cuh
      const auto scaled = [&](float value, int i) {
        return scaled_sum(value, x_scale, up ? scales_[1][i] : scales_[0][i]);
      };
      return float4{scaled(sum.x, 0), scaled(sum.y, 1), scaled(sum.z, 2), scaled(sum.w, 3)};
    });
  }

 private:
  Columns<S> columns_;
  const ScaledOutput<S>& output_;
  float scales_[2][4];  // of the four rows of the weight, or of gate and of up
};

// *to += value, as add_four().
__device__ inline void add_one(float* to, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

// The epilogue for a warpgroup's sums of 64 rows of the weight, from `first` on, by N rows of x, from `row` on, straight
// from the accumulators, so that nothing waits: a warp stores 8 outputs of 4 rows at once.
template <typename S, int N>
__device__ void finish_accumulators(const ScaledOutput<S>& output, std::int64_t first, std::int64_t row,
                                    const float (&sum)[N / 2]) {
  constexpr int kAtOnce = 16;  // scales of x
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroupSize, lane = thread % kWarpSize,
            warp = thread / kWarpSize;
  const bool gated = output.gated();
  const std::int64_t column = (gated ? first / 2 + 8 * warp : first + 16 * warp) + lane / 4, OC = output.OC;
  float scales[2] = {}, bias[2] = {};  // of the thread's two rows of the weight: gated, of gate and up
  bool exists[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    exists[k] = column + (gated ? 0 : 8 * k) < OC;
    if (!exists[k]) continue;
    scales[k] = output.weight_scales[column + (gated ? k * OC : 8 * k)];
    if (output.bias != nullptr) bias[k] = to_float(output.bias[column + 8 * k]);
  }
  row += lane % 4 * 2;
  // use(element, values) for the thread's rows of x
  const auto each = [&](const auto& use) {
    std::int64_t to = row * OC + column;
    float x_scales[kAtOnce];
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const auto place = [](int n) { return n / 2 * 8 + n % 2; };
      if (i % kAtOnce == 0) {
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
          x_scales[n] = row + place(i + n) < output.rows ? output.x_scales[row + place(i + n)] : 0.0f;
      }
      if (row + place(i) < output.rows) {
        float values[2];
#pragma unroll
        for (int k = 0; k < 2; ++k)
          values[k] = scaled_sum(sum[i / 2 * 4 + i % 2 + 2 * k], x_scales[i % kAtOnce], scales[k]);
        use(to, values);
      }
      to += i % 2 == 0 ? OC : 7 * OC;
    }
  };
  if (gated) {
    if (!exists[0]) return;
    return each([&](std::int64_t to, const float(&values)[2]) {
      output.out[to] = from_float<S>(gated_of_sums<S>(output.epilogue, values[0], values[1]));
    });
  }
  const auto store = [&](const auto& element) {
    each([&](std::int64_t to, float(&values)[2]) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (output.bias != nullptr) values[k] += bias[k];
        if (exists[k]) element(to + 8 * k, values[k]);
      }
    });
  };
  switch (output.epilogue) {
    case RowsEpilogue::add:
      return store([&](std::int64_t to, float value) { add_one(output.out_fp32 + to, value); });
    case RowsEpilogue::store_fp32:
      return store([&](std::int64_t to, float value) { output.out_fp32[to] = value; });
    case RowsEpilogue::gelu:
      return store([&](std::int64_t to, float value) { output.out[to] = from_float<S>(gelu_for<S>(value)); });
    default:
      return store([&](std::int64_t to, float value) { output.out[to] = from_float<S>(value); });
  }
}

}  // namespace weft::cuda::rows
