// What the kernels of rows_matmul_fp8() add to those of rows_matmul(): the scales of both operands.
#pragma once

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

}  // namespace weft::cuda::rows
