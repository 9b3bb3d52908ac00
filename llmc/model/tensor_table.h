// The model is a table: each parameter is declared once, with its Hugging Face name, shape, initialisation,
// whether it decays, and where it lies in the parameter arena. Allocation, initialisation, loading, saving,
// optimizer groups, the gradient norm and the exporter all walk this table.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/model/config.h"

namespace weft {

enum class Init { normal, normal_residual, ones, zeros };  // normal: N(0, 0.02^2); _residual: 0.02 / sqrt(2 L)

struct TensorSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  Init init = Init::normal;
  bool decay = false;  // AdamW weight decay: matrices, not norms and biases
  std::int64_t elements = 0;
  std::int64_t offset = 0;  // in elements, in the parameter (and gradient, and moment) arena
};

class TensorTable {
 public:
  explicit TensorTable(const ModelConfig& config);

  std::span<const TensorSpec> specs() const { return specs_; }
  const TensorSpec* find(std::string_view name) const;
  const TensorSpec& at(std::string_view name) const;       // Exit::internal if absent
  std::size_t index_of(std::string_view name) const;       // Exit::internal if absent
  std::int64_t parameters() const { return parameters_; }  // sum of elements
  std::int64_t arena_elements() const { return arena_; }   // with the padding between groups

 private:
  // Tensors of one group lie next to each other with no padding, so that the group is one matrix for one
  // GEMM: {q, k, v} is [q + 2 kv, C], {gate, up} is [2 F, C]. Groups start on multiples of kGroupAlignment
  // elements.
  static constexpr std::int64_t kGroupAlignment = 128;
  void add(std::string name, std::vector<std::int64_t> shape, Init init, bool decay);
  void begin_group();
  void add_llama(const ModelConfig& config);
  void add_gpt_neox(const ModelConfig& config);

  std::vector<TensorSpec> specs_;
  std::int64_t parameters_ = 0;
  std::int64_t arena_ = 0;
};

}  // namespace weft
