// Random models with quantised matrices for the tests of the persistent kernel, and what its logits may differ by from those of
// the CPU.
//
// Tolerance. The kernel multiplies fp32 activations with the weights themselves: its activations are split into digits that hold
// them to 2^-30 of the largest of a warp's (2^-33 for fp8). What it rounds are keys and values, to the 16 bits of its cache with
// unit roundoff u, and the reference rounds them, too (cpu::load_decoder() with a type of cache). So the two differ by the order
// of fp32 sums, delta = 2^-19 of a value at most, and by the keys and values that this difference rounds the other way:
//   - Of two numbers that are delta apart, a share delta / (2 u) lies on two sides of a boundary, and these differ by a step, at
//     most 2 u. In the root mean square that is sqrt(2 u delta): 0.09 u in fp16, 0.03 u in bf16.
//   - A single such element of three times the root mean square of its W dimensions moves the attention's output by
//     6 u / sqrt(W) of its norm: 0.75 u with the 64 dimensions of the narrowest model.
// Together 0.84 u; the logits are held to u of the largest logit, 4.9e-4 with fp16 and 3.9e-3 with bf16. A reference that keeps
// keys and values in fp32 is off by up to 1.9 u and 4.5 u. fused_tolerance_test.cpp shows on the CPU that noise lies below the
// tolerance and planted bugs lie above.
// After many positions there are as many more elements to differ, and where scores are large one of them moves a whole weight of
// the softmax: up to 2.9 u of 150 steps in the narrowest model, so kManyPositions times the tolerance. A single wrong position of
// 210 is 60 u and more in the worst of these steps.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/base/json.h"
#include "llmc/file/tensor_file.h"
#include "llmc/model/formats/formats.h"
#include "llmc/model/model_file.h"
#include "test/cpp/quantized_files.h"

namespace weft::test {

constexpr double kManyPositions = 6;

inline double cached_logits_tolerance(DType cache) {
  return cache == DType::f16 ? 0x1p-11 : 0x1p-8;
}

// The largest error, as a share of the largest wanted logit; NaN if one is.
inline double logits_error(std::span<const float> got, std::span<const float> want) {
  double largest = 0, worst = 0;
  for (const float value : want) largest = std::max(largest, std::abs(static_cast<double>(value)));
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double error = std::abs(static_cast<double>(got[i]) - want[i]);
    if (!(error <= worst)) worst = error;
    if (std::isnan(error)) break;
  }
  return worst / largest;
}

inline ModelConfig quantized(ModelConfig config, const WeightFormat* weights, bool head) {
  config.quantization = {weights, head && !config.tied_embeddings ? &kInt8 : nullptr};
  return config;
}

// What is changed in a model before it is written: matrices by the name of their tensor, and single numbers of the others.
struct QuantizedEdits {
  std::function<void(const std::string& name, RandomMatrix& matrix)> matrix;
  std::function<void(std::vector<float>& values)> floats;
};

// Float tensors exact in fp16 and bf16, and random quantised matrices whose row scales are multiplied by `factor`.
inline void write_random_quantized_model(const std::string& path, const ModelConfig& config, float factor = 1,
                                         const QuantizedEdits& edits = {}) {
  const TensorTable table(config, DType::f32);
  Json json = Json{{"model", config_to_json(config)}};
  json["quantization"] = quantization_to_json(config.quantization);
  TensorFileWriter writer(path, FileKind::model, json);
  for (const TensorSpec& spec : table.specs()) writer.declare(spec.name, spec.dtype, spec.shape);
  const auto matrix_of = [&](const std::string& name) {
    const TensorSpec& spec = table.at(name);
    RandomMatrix matrix(spec.dtype, spec.shape[0], spec.shape[1], static_cast<std::uint32_t>(table.index_of(name)));
    if (edits.matrix) edits.matrix(name, matrix);
    return matrix;
  };
  const auto owner = [](const std::string& name) { return name.substr(0, name.rfind('.')); };
  std::mt19937 random(7);
  for (const TensorSpec& spec : table.specs()) {
    if (spec.kind == ValueKind::floats) {
      const float width = spec.shape.size() == 2 ? 1.0f : 0.1f, middle = spec.init == Init::ones ? 1.0f : 0.0f;
      std::vector<float> values(static_cast<std::size_t>(spec.elements));
      for (float& value : values)
        value = middle + width * static_cast<float>(static_cast<int>(random() % 127) - 63) / 64;
      for (float& value : values) value = bf16_to_f32(f32_to_bf16(value));
      if (edits.floats) edits.floats(values);
      writer.write_f32(values.data(), values.size());
    } else if (spec.kind == ValueKind::quants) {
      const RandomMatrix matrix = matrix_of(spec.name);
      writer.write(matrix.q.data(), matrix.q.size());
    } else if (spec.kind == ValueKind::zeros) {
      const RandomMatrix matrix = matrix_of(owner(spec.name));
      writer.write(matrix.zeros.data(), matrix.zeros.size());
    } else {
      RandomMatrix matrix = matrix_of(owner(spec.name));
      for (float& scale : matrix.row_scales) scale *= factor;
      if (matrix.dtype == DType::u4) {
        writer.write(matrix.group_scales.data(), matrix.group_scales.size() * sizeof(std::uint16_t));
      } else {
        writer.write_f32(matrix.row_scales.data(), matrix.row_scales.size());
      }
    }
  }
  writer.publish();
}

}  // namespace weft::test
