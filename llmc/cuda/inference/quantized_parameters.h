// The parameters of a quantised model on the device: one allocation with the float tensors in S and,
// for each quantised linear layer, a packed matrix (op/gemm/quantized_matmul.h), in which q, k and v, or gate and up, are
// one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/cuda/inference/inference_model.h"
#include "llmc/cuda/inference/parameters.h"
#include "llmc/model/tensor_table.h"

namespace weft::cuda {

template <typename S>
class QuantizedParameters {
 public:
  explicit QuantizedParameters(const ModelConfig& config);

  const MemoryPlan& plan() const { return plan_; }
  const TensorTable& table() const { return table_; }
  // Pointers to everything in an arena of plan() that begins at `arena`.
  DeviceWeights<S> weights(std::byte* arena) const;
  std::vector<ParameterTarget<S>> targets(std::byte* arena) const;  // in the order of the table's specs

 private:
  // A matrix in the plan. dtype f32: none, its tensors are floats.
  struct Matrix {
    DType dtype = DType::f32;
    std::int64_t K = 0;
    std::uint64_t blocks_at = 0, scales_at = 0;
    PackedMatrix in(std::byte* arena) const;
  };
  // The destination of a tensor: floats at an offset, or a place in a matrix.
  struct Target {
    std::uint64_t floats_at = 0;
    Matrix matrix;
    PackedPlace place;
  };
  // For bind_weights().
  struct Source {
    const QuantizedParameters& of;
    std::byte* arena;
    const S* weight(const std::string& module) const { return floats(of.table_.index_of(weight_of(module))); }
    const S* bias(const std::string& module) const {
      const std::string name = bias_of(module);
      return of.table_.find(name) != nullptr ? floats(of.table_.index_of(name)) : nullptr;
    }
    const S* floats(std::size_t index) const;  // of the table's specs
    PackedMatrix packed(const std::vector<std::string>& modules) const;
  };

  void place_floats();
  // Plans the matrix of these modules, whose rows are concatenated, or alternate if they are gate and up.
  void place_matrix(const std::vector<std::string>& modules, bool gated);

  ModelConfig config_;
  TensorTable table_;
  MemoryPlan plan_;
  std::vector<Target> targets_;  // in the order of the table's specs
};

}  // namespace weft::cuda
