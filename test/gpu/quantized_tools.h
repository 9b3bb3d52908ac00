// Random quantised matrices for tests: as a file has them, as fp32 values, and packed on the GPU.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "llmc/cuda/op/gemm/quantized_matmul.h"
#include "test/gpu/operator_tools.h"

namespace weft::test {

// [rows, K] of i8, e4m3 or u4.
struct QuantizedValues {
  DType dtype;
  std::int64_t rows, K;
  std::vector<std::uint8_t> q;  // a value each
  Floats row_scales;
  std::vector<std::uint16_t> group_scales;
  std::vector<std::uint8_t> zeros;

  // `exact`: scales are powers of two, and e4m3 is 1/8 to 15, so that sums of some thousand products with multiples of 1/4 are
  // exact in fp32. Not for u4.
  QuantizedValues(DType dtype_, std::int64_t rows_, std::int64_t K_, unsigned seed, bool exact = false)
      : dtype(dtype_), rows(rows_), K(K_), q(static_cast<std::size_t>(rows * K)) {
    std::mt19937 random(seed);
    for (std::uint8_t& value : q) {
      do {
        value = static_cast<std::uint8_t>(dtype == DType::u4 ? random() % 16 : random() % 256);
      } while (!allowed(value, exact));
    }
    const auto scale = [&] {
      if (exact) return std::ldexp(1.0f, -6 - static_cast<int>(random() % 4));
      return 0.001f + 0.00001f * static_cast<float>(random() % 1000);
    };
    if (dtype != DType::u4) {
      for (std::int64_t row = 0; row < rows; ++row) row_scales.push_back(scale());
      return;
    }
    for (std::int64_t i = 0; i < rows * quant_groups(K); ++i) {
      const bool subnormal = random() % 16 == 0;
      group_scales.push_back(f32_to_f16(subnormal ? 0x1p-24f * static_cast<float>(1 + random() % 1023) : scale()));
      zeros.push_back(static_cast<std::uint8_t>(random() % 16));
    }
  }

  // Before rounding to the activations' type.
  float value(std::int64_t row, std::int64_t k) const {
    const std::uint8_t code = q[static_cast<std::size_t>(row * K + k)];
    if (dtype == DType::i8) return row_scales[static_cast<std::size_t>(row)] * static_cast<std::int8_t>(code);
    if (dtype == DType::e4m3) return row_scales[static_cast<std::size_t>(row)] * e4m3_to_f32(code);
    const auto group = static_cast<std::size_t>(row * quant_groups(K) + k / kQuantGroup);
    return f16_to_f32(group_scales[group]) * static_cast<float>(code - zeros[group]);
  }
  Floats values() const {
    Floats all;
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t k = 0; k < K; ++k) all.push_back(value(row, k));
    return all;
  }
  // As a file has it.
  std::vector<std::byte> stored_bytes() const {
    std::vector<std::byte> bytes;
    for (std::size_t i = 0; i < q.size(); i += dtype == DType::u4 ? 2 : 1)
      bytes.push_back(static_cast<std::byte>(dtype == DType::u4 ? q[i] | q[i + 1] << 4 : q[i]));
    return bytes;
  }

 private:
  bool allowed(std::uint8_t value, bool exact) const {
    if (dtype == DType::i8) return value != 0x80;
    if (dtype == DType::e4m3 && exact) return (value >> 3 & 15) >= 4 && (value >> 3 & 15) <= 10;
    return dtype == DType::u4 || (value & 0x7f) != 0x7f;
  }
};

// Packed for a layer with OC outputs; with SwiGLU `values` has the rows of gate, then those of up.
class PackedOnDevice {
 public:
  PackedOnDevice(const QuantizedValues& values, bool swiglu)
      : blocks_(cuda::packed_block_bytes(values.dtype, packed_rows_of(values, swiglu), values.K)),
        scales_(cuda::packed_scale_bytes(values.dtype, packed_rows_of(values, swiglu)) / sizeof(float)) {
    blocks_.fill_bytes(0);
    scales_.fill_bytes(0);
    matrix_ = {blocks_.data(), values.dtype == DType::u4 ? nullptr : scales_.data(), values.dtype};
    using Part = cuda::PackedPlace::Part;
    const std::int64_t tensors = swiglu ? 2 : 1, rows = values.rows / tensors, groups = quant_groups(values.K);
    const DeviceBuffer<std::byte> q(values.stored_bytes());
    const DeviceBuffer<float> row_scales(values.row_scales);
    const DeviceBuffer<std::uint16_t> group_scales(values.group_scales);
    const DeviceBuffer<std::uint8_t> zeros(values.zeros);
    const std::size_t row_bytes = q.size() / static_cast<std::size_t>(values.rows);
    for (std::int64_t tensor = 0; tensor < tensors; ++tensor) {
      // In two pieces, as a loader may have them.
      const std::int64_t half = rows / 2;
      for (const auto& [first, count] : {std::pair{std::int64_t{0}, half}, std::pair{half, rows - half}}) {
        const cuda::PackedPlace place = {first, !swiglu ? Part::rows : tensor == 0 ? Part::gate : Part::up};
        const std::int64_t from = tensor * rows + first;
        cuda::pack_weights(matrix_, place, values.K, q.data() + static_cast<std::size_t>(from) * row_bytes, count,
                           nullptr);
        if (values.dtype == DType::u4) {
          cuda::pack_group_scales(matrix_, place, values.K, group_scales.data() + from * groups, count, nullptr);
          cuda::pack_zeros(matrix_, place, values.K, zeros.data() + from * groups, count, nullptr);
        } else {
          cuda::pack_row_scales(matrix_, place, row_scales.data() + from, count, nullptr);
        }
      }
    }
    cuda::check(cudaStreamSynchronize(nullptr), "test: packing");
  }
  const cuda::PackedMatrix& matrix() const { return matrix_; }

 private:
  static std::int64_t packed_rows_of(const QuantizedValues& values, bool swiglu) {
    return cuda::packed_rows(swiglu ? values.rows / 2 : values.rows, swiglu);
  }
  DeviceBuffer<std::byte> blocks_;
  DeviceBuffer<float> scales_;
  cuda::PackedMatrix matrix_;
};

}  // namespace weft::test
