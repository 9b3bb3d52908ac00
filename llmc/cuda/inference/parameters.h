// The parameters of a model on the device: one allocation in the layout of the tensor table, filled from a file or with random
// numbers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <span>
#include <type_traits>

#include "llmc/base/dtype.h"
#include "llmc/base/error.h"
#include "llmc/cuda/inference/inference.h"
#include "llmc/cuda/op/gemm/device_weights.h"
#include "llmc/cuda/op/gemm/quantized_matmul.h"
#include "llmc/model/model_file.h"

namespace weft::cuda {

template <typename S>
constexpr DType storage_dtype() {
  if constexpr (std::is_same_v<S, __half>) return DType::f16;
  if constexpr (std::is_same_v<S, __nv_bfloat16>) return DType::bf16;
  return DType::f32;
}

// Calls function(S{}) with the storage type for `dtype`; Exit::internal for a quantised one.
template <typename Function>
auto with_storage(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::f32:
      return function(float{});
    case DType::bf16:
      return function(__nv_bfloat16{});
    case DType::f16:
      return function(__half{});
    default:
      fail(Exit::internal, "no storage type %s on the GPU", dtype_name(dtype));
  }
}

// The destination of a tensor of the table.
template <typename S>
struct ParameterTarget {
  S* floats = nullptr;  // ValueKind::floats
  PackedMatrix packed;  // other kinds: the tensor's rows, scales or zero points go to `place` in this matrix
  PackedPlace place;
  std::int64_t K = 0;  // row length of the matrix
};

// Copies every parameter of the file to its target ([specs of the table]), converting other float types. Several
// threads read, hash and copy, each through two page-locked buffers, so that disk, hash and bus work at the same time.
// Exit::bad_file if a hash is wrong or a value is not finite or cannot be represented in S. Packed matrices must have
// been zeroed.
template <typename S>
void load_parameters(const ModelFile& file, std::span<const ParameterTarget<S>> targets, const LoadProgress& progress);
// The same into table().arena_elements() elements of S, for a model without quantised tensors.
template <typename S>
void load_parameters(const ModelFile& file, S* parameters, const LoadProgress& progress);

// Random parameters for measurements: N(0, 0.02^2), norms 1, biases 0. Quantised weights are uniform, with the same
// variance.
template <typename S>
void randomize_parameters(const TensorTable& table, std::uint64_t seed, std::span<const ParameterTarget<S>> targets);
template <typename S>
void randomize_parameters(const TensorTable& table, std::uint64_t seed, S* parameters);

}  // namespace weft::cuda
