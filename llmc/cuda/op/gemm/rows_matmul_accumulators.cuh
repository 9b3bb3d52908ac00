// The epilogue of kernels of rows_matmul_hopper.cu that have no use for shared memory: straight from the accumulators of wgmma.
#pragma once

#include <cstdint>
#include <type_traits>

#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/op/gemm/rows_matmul.cuh"
#include "llmc/cuda/op/gemm/rows_matmul_fp8.cuh"

namespace weft::cuda::rows {

// Output: Output<S>, or ScaledOutput<S> whose sums are first multiplied by both scales.
//
// Finishes a warpgroup's sums of 64 rows of the weight, from `first` on, by N rows of x, from `row` on. Nothing waits: a warp
// stores 8 outputs of 4 rows at once, whole sectors of 32 bytes if they are fp32.
template <int N, typename Output>
__device__ void finish_accumulators(const Output& output, std::int64_t first, std::int64_t row,
                                    const float (&sum)[N / 2]) {
  using S = typename Output::Element;
  constexpr bool kScaled = std::is_same_v<Output, ScaledOutput<S>>;
  constexpr int kAtOnce = 16;  // scales of x
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroupSize, lane = thread % kWarpSize,
            warp = thread / kWarpSize;
  const bool gated = output.gated();
  const std::int64_t column = (gated ? first / 2 + 8 * warp : first + 16 * warp) + lane / 4, OC = output.OC;
  row += lane % 4 * 2;
  const int rows = static_cast<int>(min(std::int64_t{N}, output.rows - row));  // not positive: none
  [[maybe_unused]] float scales[2] = {};  // of the thread's two rows of the weight: gated, of gate and up
  float bias[2] = {-0.0f, -0.0f};         // what is added to stays as it is
  int limit[2];                           // rows of x of which the thread's elements exist
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    limit[k] = column + (gated ? 0 : 8 * k) < OC ? rows : 0;
    if (limit[k] <= 0) continue;
    if constexpr (kScaled) scales[k] = output.weight_scales[column + (gated ? k * OC : 8 * k)];
    if (output.bias == nullptr && output.bias2 == nullptr) continue;
    bias[k] = 0;
    if (output.bias != nullptr) bias[k] += to_float(output.bias[column + 8 * k]);
    if (output.bias2 != nullptr) bias[k] += to_float(output.bias2[column + 8 * k]);
  }
  // use(element, place, values): the thread's rows of x are `place` behind its first one
  const auto each = [&](const auto& use) {
    std::int64_t to = row * OC + column;
    [[maybe_unused]] float x_scales[kAtOnce];
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const auto place = [](int n) { return n / 2 * 8 + n % 2; };
      if constexpr (kScaled) {
        if (i % kAtOnce == 0) {
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n)
            x_scales[n] = place(i + n) < rows ? output.x_scales[row + place(i + n)] : 0.0f;
        }
      }
      float values[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        values[k] = sum[i / 2 * 4 + i % 2 + 2 * k];
        if constexpr (kScaled) values[k] = scaled_sum(values[k], x_scales[i % kAtOnce], scales[k]);
      }
      use(to, place(i), values);
      to += i % 2 == 0 ? OC : 7 * OC;
    }
  };
  if (gated) {
    return each([&](std::int64_t to, int place, const float(&values)[2]) {
      const S value = from_float<S>(gated_of_sums<S>(output.epilogue, values[0], values[1]));
      if (place < limit[0]) output.out[to] = value;
    });
  }
  // element(its number, place, limit, value)
  const auto store = [&](const auto& element) {
    each([&](std::int64_t to, int place, const float(&values)[2]) {
#pragma unroll
      for (int k = 0; k < 2; ++k) element(to + 8 * k, place, limit[k], values[k] + bias[k]);
    });
  };
  const auto store_16 = [&](const auto& activation) {
    store([&](std::int64_t to, int place, int rows_of, float value) {
      const S rounded = from_float<S>(activation(value));
      if (place < rows_of) output.out[to] = rounded;
    });
  };
  switch (output.epilogue) {
    case RowsEpilogue::add:
      // Most tiles lie within the result. A branch an element, which is what ptxas makes of a condition, is many times the code,
      // and a warp waits for instructions that it executes once a tile.
      if (first + 64 <= OC && row - lane % 4 * 2 + N <= output.rows)
        return store([&](std::int64_t to, int, int, float value) { add_one(output.out_fp32 + to, value); });
      return store([&](std::int64_t to, int place, int rows_of, float value) {
        if (place < rows_of) add_one(output.out_fp32 + to, value);
      });
    case RowsEpilogue::store_fp32:
      return store([&](std::int64_t to, int place, int rows_of, float value) {
        if (place < rows_of) output.out_fp32[to] = value;
      });
    case RowsEpilogue::gelu:
      return store_16([](float value) { return gelu_for<S>(value); });
    default:
      return store_16([](float value) { return value; });
  }
}

}  // namespace weft::cuda::rows
