// The model is a table: each parameter is declared once, with its Hugging Face name, shape, storage type, initialisation,
// whether it decays, and where it lies in the arenas. Allocation, initialisation, loading, saving, optimizer groups, the
// gradient norm and the exporter all walk this table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/base/dtype.h"
#include "llmc/base/range.h"
#include "llmc/model/config.h"

namespace weft {

struct LoraConfig;  // lora.h

// normal: N(0, 0.02^2); _residual: 0.02 / sqrt(2 L); uniform: between -1 / sqrt(columns) and 1 / sqrt(columns)
enum class Init { normal, normal_residual, ones, zeros, uniform };

struct TensorSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  Init init = Init::normal;
  bool decay = false;          // weight decay: matrices, not norms and biases
  bool hidden_matrix = false;  // a matrix of a block, neither embedding nor head. q, k and v are three, gate and up two
  ValueKind kind = ValueKind::floats;
  std::int64_t elements = 0;

  // In the arena of the parameters, where each tensor lies in its own type.
  DType dtype = DType::f32;
  std::uint64_t bytes = 0, byte_offset = 0;
  // In arenas with one type for all tensors (gradients, moments), in elements of that type.
  std::int64_t offset = 0;
};

// In the arenas with one type for all tensors.
inline Range elements_of(const TensorSpec& spec) {
  return {spec.offset, spec.offset + spec.elements};
}

class TensorTable {
 public:
  // `storage`: the dtype in which the float parameters are kept in memory. What a model file stores of them is the file's own
  // matter. Matrices that config.quantization names have the dtype of their format, in memory as in the file, and their
  // scales and zeros are tensors of the table too.
  explicit TensorTable(const ModelConfig& config, DType storage = DType::f32);
  // The tensors of an adapter for a model: layer by layer, for each target A [rank, in] and B [rows, rank].
  TensorTable(const ModelConfig& config, const LoraConfig& lora, DType storage = DType::f32);

  std::span<const TensorSpec> specs() const { return specs_; }
  const TensorSpec* find(std::string_view name) const;
  const TensorSpec& at(std::string_view name) const;       // Exit::internal if absent
  std::size_t index_of(std::string_view name) const;       // Exit::internal if absent
  std::int64_t parameters() const { return parameters_; }  // sum of elements, scales and zeros not counted
  bool quantized() const { return quantized_; }
  // Sizes of the arenas, with the padding between groups: of one type for all tensors, and of the parameters.
  std::int64_t arena_elements() const { return arena_elements_; }
  std::uint64_t arena_bytes() const { return arena_bytes_; }

 private:
  // Tensors of one group lie next to each other without padding, so that the group is one matrix for one GEMM:
  // {q, k, v} is [q + 2 kv, C], {gate, up} is [2 F, C]. Groups start on multiples of kGroupAlignment elements of the storage
  // type. The scales of a group of matrices are a group, and so are their zeros.
  static constexpr std::int64_t kGroupAlignment = 128;
  struct Matrix {
    std::string module;
    std::int64_t out, in;
    Init init;
  };
  void add(std::string name, std::vector<std::int64_t> shape, Init init, bool decay, ValueKind kind = ValueKind::floats,
           std::optional<DType> dtype = {});
  void add_matrices(const WeightFormat* format, const std::vector<Matrix>& matrices);
  void begin_group();
  void add_vector(std::string name, std::int64_t size, Init init);
  void add_norm(const ModelConfig& config, const std::string& module);
  void add_linear(const ModelConfig& config, std::int64_t layer, BlockLinear linear);

  DType storage_;
  bool quantized_ = false;
  std::vector<TensorSpec> specs_;
  std::int64_t parameters_ = 0, arena_elements_ = 0;
  std::uint64_t arena_bytes_ = 0;
};

// The arena of the parameters themselves, and one with `element_bytes` for each parameter (gradients, moments): Exit::internal
// with a quantised table.
MemoryPlan parameter_plan(const TensorTable& table);
MemoryPlan per_parameter_plan(const char* name, const TensorTable& table, std::size_t element_bytes);

}  // namespace weft
