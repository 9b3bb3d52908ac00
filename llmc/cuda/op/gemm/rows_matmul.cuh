// What the kernels of rows_matmul.h share: which rows of the weight form a tile, and the epilogue, so that all round
// alike.
//
// A tile has rows first to first + n of the weight, n a multiple of 16. With a gate 8 rows of gate and the 8 rows of up
// for the same units alternate. A thread's accumulators of wgmma and of mma.m16n8k16 are rows g and g + 8 of 16, so it
// has gate and up of a unit.
#pragma once

#include <cstdint>

#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/op/elementwise/gelu.cuh"
#include "llmc/cuda/op/elementwise/swiglu.cuh"
#include "llmc/cuda/op/gemm/rows_matmul.h"

namespace weft::cuda::rows {

// Rows of the weight as tiles count them: with a gate it and up, each padded to a multiple of 8.
template <typename S>
std::int64_t weight_rows(const RowsMatmul<S>& io) {
  return gated(io.epilogue) ? ceil_div(io.OC, 8) * 16 : io.OC;
}

template <typename S>
struct Output {
  using Element = S;
  const S *bias, *bias2;  // biases of the two inputs, or null
  S* out;
  float* out_fp32;
  std::int64_t rows, OC;
  RowsEpilogue epilogue;
  bool fours;  // four consecutive elements of bias and result, from a multiple of four, are one aligned access

  static Output of(const RowsMatmul<S>& io) {
    const auto aligned = [](const void* pointer, std::size_t bytes) {
      return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
    };
    const S* const bias2 = io.K2 > 0 ? io.bias2 : nullptr;
    const bool fours = io.OC % 4 == 0 && aligned(io.bias, 4 * sizeof(S)) && aligned(bias2, 4 * sizeof(S)) &&
                       aligned(io.out, 4 * sizeof(S)) && aligned(io.out_fp32, 4 * sizeof(float));
    return {io.bias, bias2, io.out, io.out_fp32, io.rows, io.OC, io.epilogue, fours};
  }
  __host__ __device__ bool gated() const { return cuda::gated(epilogue); }
};

// *to += value, and to[i] += value[i]. From sm_90 on L2 does the addition, so that the thread need not wait for the old value. No
// other thread adds to these elements.
__device__ inline void add_one(float* to, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
#else
  *to += value;
#endif
}
__device__ inline void add_four(float* to, const float (&value)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value[0]), "f"(value[1]),
               "f"(value[2]), "f"(value[3])
               : "memory");
#else
  Elements<float, 4> sum;
  sum.load(to);
  float result[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) result[i] = sum.get(i) + value[i];
  sum.set(result);
  sum.store(to);
#endif
}

// Before the epilogue a tile's sums lie in shared memory as [rows of x][rows of the weight + 4]: with this padding the
// elements that a warp stores at once, 8 rows of the weight by 4 even or odd rows of x, fall into different banks.
constexpr int kSumsPadding = 4;

// Stores an accumulator of 16 rows of the weight by N rows of x to `sums`, which points to the first of the 16 in rows
// of `stride` floats.
template <int R>
__device__ inline void store_sums(float* sums, int stride, const float* d, int lane) {
  float* const to = sums + lane % 4 * 2 * stride + lane / 4;
#pragma unroll
  for (int j = 0; j < R / 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) to[(8 * j + i % 2) * stride + 8 * (i / 2)] = d[4 * j + i];
}

template <typename S>
__device__ inline float rounded_to(float value) {
  return to_float(from_float<S>(value));
}
// A gated epilogue's result from the sums of gate and of up.
template <typename S>
__device__ inline float gated_of_sums(RowsEpilogue epilogue, float gate, float up) {
  gate = rounded_to<S>(gate);
  return gated_product<S>(gate, epilogue == RowsEpilogue::swiglu ? gate : GegluTanh::argument(gate), rounded_to<S>(up));
}

// The epilogue for four consecutive columns of the result, in any rows.
template <typename S>
class Columns {
 public:
  // Groups of four columns in a row of a tile.
  __device__ static int count(const Output<S>& output, int tile_rows) {
    return output.gated() ? tile_rows / 8 : tile_rows / 4;
  }
  // Group `four` of the tile that begins at row `first` of the weight.
  __device__ Columns(const Output<S>& output, std::int64_t first, int four)
      : output_(output),
        column_((output.gated() ? first / 2 : first) + 4 * four),
        at_(output.gated() ? four / 2 * 16 + four % 2 * 4 : 4 * four) {
#pragma unroll
    for (int i = 0; i < 4; ++i) bias_[i] = 0;
    add_bias(output.bias);
    add_bias(output.bias2);
  }

  // Computes and stores the four columns of row `row`. sums(i) returns elements i to i + 3 of the row's sums in the
  // tile, as float4.
  template <typename Sums>
  __device__ void finish(std::int64_t row, const Sums& sums) const {
    if (row >= output_.rows || column_ >= output_.OC) return;
    const float4 sum = sums(at_);
    float value[4] = {sum.x, sum.y, sum.z, sum.w};
    if (output_.gated()) {
      const float4 up = sums(at_ + 8);
      const float ups[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i] = gated_of_sums<S>(output_.epilogue, value[i], ups[i]);
    } else if (output_.bias != nullptr || output_.bias2 != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i] += bias_[i];
    }
    if (output_.epilogue == RowsEpilogue::gelu) {
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i] = gelu_for<S>(value[i]);
    }
    const std::int64_t to = row * output_.OC + column_;
    if (output_.epilogue == RowsEpilogue::add) {
      if (output_.fours) return add_four(output_.out_fp32 + to, value);
      each([&](int i) { add_one(output_.out_fp32 + to + i, value[i]); });
    } else if (output_.epilogue == RowsEpilogue::store_fp32) {
      store(output_.out_fp32 + to, value);
    } else {
      store(output_.out + to, value);
    }
  }

 private:
  __device__ void add_bias(const S* bias) {
    if (bias == nullptr || column_ >= output_.OC) return;
    if (output_.fours) {
      Elements<S, 4> four;
      four.load(bias + column_);
#pragma unroll
      for (int i = 0; i < 4; ++i) bias_[i] += four.get(i);
    } else {
      each([&](int i) { bias_[i] += to_float(bias[column_ + i]); });
    }
  }
  template <typename Use>
  __device__ void each(const Use& use) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column_ + i < output_.OC) use(i);
  }
  template <typename T>
  __device__ void store(T* to, const float (&value)[4]) const {
    if (output_.fours) {
      Elements<T, 4> out;
      out.set(value);
      out.store(to);
    } else {
      each([&](int i) { to[i] = from_float<T>(value[i]); });
    }
  }

  const Output<S>& output_;
  std::int64_t column_;
  int at_;  // index of the first sum (gated: of gate) in the tile
  float bias_[4];
};

// Whether the Hopper path computes this layer: it depends on the GPU and on the size of the weight alone.
template <typename S>
bool hopper_computes(const RowsMatmul<S>& io, const LaunchDevice& device);
template <typename S>
void hopper(const RowsMatmul<S>& io, const LaunchDevice& device, cudaStream_t stream);

template <typename S>
void portable(const RowsMatmul<S>& io, const LaunchDevice& device, cudaStream_t stream);

}  // namespace weft::cuda::rows
