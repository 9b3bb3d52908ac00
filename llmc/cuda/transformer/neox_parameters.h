// The parameters of a GPT-NeoX on the device: one allocation in the layout of the tensor table, filled from a file or with
// random numbers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <span>
#include <type_traits>

#include "llmc/base/dtype.h"
#include "llmc/base/error.h"
#include "llmc/cuda/fused/neox_weights.h"
#include "llmc/cuda/op/quantized_matmul.h"
#include "llmc/cuda/transformer/neox.h"
#include "llmc/model/model_file.h"

namespace weft::cuda {

template <typename S>
constexpr DType storage_dtype() {
  if constexpr (std::is_same_v<S, __half>) return DType::f16;
  if constexpr (std::is_same_v<S, __nv_bfloat16>) return DType::bf16;
  return DType::f32;
}

// function(S{}) with the storage type of that name.
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

// Where a tensor of the table goes.
template <typename S>
struct ParameterTarget {
  S* floats = nullptr;  // ValueKind::floats
  PackedMatrix packed;  // other kinds: the tensor's rows, their scales or zeros, at `place`
  PackedPlace place;
  std::int64_t K = 0;  // of the matrix
};

// Copies every parameter of the file to its target, [specs of the table], and converts it where the file has another dtype. Several threads read, hash and copy at once, each through two page-locked pieces, so that disk,
// hash and bus work at the same time. Afterwards every hash was right and every value finite: Exit::bad_file otherwise,
// also for a value that S cannot hold. Packed matrices were cleared before.
template <typename S>
void load_parameters(const ModelFile& file, std::span<const ParameterTarget<S>> targets, const LoadProgress& progress);
// The same into table().arena_elements() elements of S; no tensor is quantised.
template <typename S>
void load_parameters(const ModelFile& file, S* parameters, const LoadProgress& progress);

// N(0, 0.02^2), norms 1, biases 0: for measurements. Quantised weights are uniform, with that variance.
template <typename S>
void randomize_parameters(const TensorTable& table, std::uint64_t seed, std::span<const ParameterTarget<S>> targets);
template <typename S>
void randomize_parameters(const TensorTable& table, std::uint64_t seed, S* parameters);

// Where the tensors of the table lie.
template <typename S>
NeoxWeights<S, S> bind_neox(const ModelConfig& config, const TensorTable& table, const S* parameters);

}  // namespace weft::cuda
