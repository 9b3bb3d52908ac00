// The parameters of a quantised model on the device: one allocation with the float tensors in S and,
// for each quantised linear layer, a packed matrix (op/gemm/quantized_matmul.h), in which q, k and v, or gate and up, are
// one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/cuda/inference/inference_model.h"
#include "llmc/cuda/inference/parameters.h"
#include "llmc/model/lora.h"
#include "llmc/model/model_file.h"
#include "llmc/model/tensor_table.h"

namespace weft::cuda {

template <typename S>
class QuantizedParameters {
 public:
  // `lora`: of an adapter beside the weights. Where it changes gate or up, their rows are packed behind each other: the sum comes
  // before SwiGLU. `fp8_activations`: the matrices of the blocks, which are fp8, stay in rows (PackedMatrix::in_rows).
  explicit QuantizedParameters(const ModelConfig& config, const std::optional<LoraConfig>& lora = std::nullopt,
                               bool fp8_activations = false);

  const MemoryPlan& plan() const { return plan_; }
  const TensorTable& table() const { return table_; }
  // Pointers to everything in an arena of plan() that begins at `arena`.
  DeviceWeights<S> weights(std::byte* arena) const;
  std::vector<ParameterTarget<S>> targets(std::byte* arena) const;  // in the order of the table's specs
  // Copies the values of the adapter to the device. Exit::bad_file for one that is damaged or does not fit in S.
  void load_adapter(const ModelFile& adapter, std::byte* arena) const;

 private:
  // A matrix in the plan. dtype f32: none, its tensors are floats.
  struct Matrix {
    DType dtype = DType::f32;
    std::int64_t K = 0;
    std::uint64_t blocks_at = 0, scales_at = 0;
    bool in_rows = false;
    PackedMatrix in(std::byte* arena) const;
  };
  // The destination of a tensor: floats at an offset, or a place in a matrix.
  struct Target {
    std::uint64_t floats_at = 0;
    Matrix matrix;
    PackedPlace place;
  };
  // The adapter's part of one layer: A of its modules below each other, and their B, times the scale, as the blocks of a matrix
  // that is zero elsewhere (op/lora/low_rank.h).
  struct LowRankPart {
    std::size_t block = 0;
    BlockLinear linear = BlockLinear::qkv;
    std::int64_t hidden = 0;  // H
    std::uint64_t down_at = 0, up_at = 0;
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
  // Plans the matrix of these modules, whose rows are concatenated, or alternate if they are gate and up and not in_rows.
  void place_matrix(const std::vector<std::string>& modules, bool gated, bool in_rows = false);
  void place_adapter();

  ModelConfig config_;
  TensorTable table_;
  MemoryPlan plan_;
  std::vector<Target> targets_;  // in the order of the table's specs
  std::optional<LoraConfig> lora_;
  std::vector<LowRankPart> low_rank_;
};

}  // namespace weft::cuda
