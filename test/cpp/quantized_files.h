// Model files with random quantised matrices, and the files of floats that hold the same weights: shared by the tests of both
// devices. The weights are computed here once more, element by element.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/file/tensor_file.h"
#include "llmc/model/formats/formats.h"
#include "llmc/model/model_file.h"
#include "llmc/model/tensor_names.h"

namespace weft::test {

// A quantised matrix [N, K], as its tensors have it.
struct RandomMatrix {
  DType dtype = DType::i8;
  std::int64_t N = 0, K = 0;
  std::vector<std::uint8_t> q;  // the bytes of the tensor
  std::vector<float> row_scales;
  std::vector<std::uint16_t> group_scales;
  std::vector<std::uint8_t> zeros;

  // Weights of about 1 / sqrt(K), and scales that differ by a factor of up to 4 from row to row and from group to group.
  RandomMatrix(DType dtype_, std::int64_t rows, std::int64_t columns, std::uint32_t seed)
      : dtype(dtype_), N(rows), K(columns) {
    std::mt19937 random(seed);
    const auto scale = [&](float largest) {
      const float factor =
          std::ldexp(1.0f + static_cast<float>(random() % 1024) / 1024, static_cast<int>(random() % 2));
      return factor / (largest * std::sqrt(static_cast<float>(K)));
    };
    const std::int64_t G = (K + 127) / 128;
    q.resize(static_cast<std::size_t>(dtype == DType::u4 ? N * K / 2 : N * K));
    for (std::uint8_t& byte : q) {
      do byte = static_cast<std::uint8_t>(random());
      while ((dtype == DType::i8 && byte == 0x80) || (dtype == DType::e4m3 && (byte & 0x7F) == 0x7F));
    }
    if (dtype == DType::u4) {
      for (std::int64_t i = 0; i < N * G; ++i) {
        group_scales.push_back(f32_to_f16(scale(8)));
        zeros.push_back(static_cast<std::uint8_t>(4 + random() % 9));
      }
    } else {
      for (std::int64_t n = 0; n < N; ++n) row_scales.push_back(scale(dtype == DType::i8 ? 96 : 100));
    }
  }

  float weight(std::int64_t n, std::int64_t k) const {
    const std::size_t at = static_cast<std::size_t>(n * K + k);
    if (dtype == DType::i8)
      return row_scales[static_cast<std::size_t>(n)] * static_cast<float>(static_cast<std::int8_t>(q[at]));
    if (dtype == DType::e4m3) return row_scales[static_cast<std::size_t>(n)] * e4m3_to_f32(q[at]);
    const std::size_t group = static_cast<std::size_t>(n * ((K + 127) / 128) + k / 128);
    const int nibble = k % 2 == 0 ? q[at / 2] % 16 : q[at / 2] / 16;
    return f16_to_f32(group_scales[group]) * static_cast<float>(nibble - zeros[group]);
  }
  std::vector<float> weights() const {
    std::vector<float> all;
    for (std::int64_t n = 0; n < N; ++n) {
      for (std::int64_t k = 0; k < K; ++k) all.push_back(weight(n, k));
    }
    return all;
  }
  QuantizedMatrix view() const {
    QuantizedMatrix matrix;
    matrix.data = q.data();
    matrix.dtype = dtype;
    if (dtype == DType::u4) {
      matrix.group_scales = group_scales.data();
      matrix.zeros = zeros.data();
    } else {
      matrix.row_scales = row_scales.data();
    }
    return matrix;
  }
};

// Writes a model of the sizes and float tensors of `source` twice: to `quantized` with random matrices of `quantization`, and to
// `floats` with their weights in fp32. The head is quantised only where the model has one of its own.
inline void write_quantized_pair(const ModelFile& source, Quantization quantization, const std::string& quantized,
                                 const std::string& floats) {
  ModelConfig config = source.config();
  if (config.tied_embeddings) quantization.head = nullptr;
  config.quantization = quantization;
  const TensorTable table(config);
  Json with = source.file().config(), without = with;
  with["quantization"] = quantization_to_json(quantization);
  TensorFileWriter packed(quantized, FileKind::model, with), plain(floats, FileKind::model, without);
  const bool tokenizer = source.has_tokenizer();
  for (const TensorSpec& spec : table.specs()) {
    packed.declare(spec.name, spec.dtype, spec.shape);
    if (spec.kind == ValueKind::floats || spec.kind == ValueKind::quants)
      plain.declare(spec.name, DType::f32, spec.shape);
  }
  const std::string text = source.tokenizer_json();
  if (tokenizer) {
    for (TensorFileWriter* writer : {&packed, &plain}) {
      writer->declare(kTokenizerTensor, DType::u8, {static_cast<std::int64_t>(text.size())});
    }
  }
  const auto matrix_of = [&](const std::string& name) {
    const TensorSpec& spec = table.at(name);
    return RandomMatrix(spec.dtype, spec.shape[0], spec.shape[1], static_cast<std::uint32_t>(table.index_of(name)));
  };
  const auto owner = [](const std::string& name, const char* suffix) {
    return name.substr(0, name.size() - std::strlen(suffix));
  };
  for (const TensorSpec& spec : table.specs()) {
    std::vector<float> values(static_cast<std::size_t>(spec.elements));
    switch (spec.kind) {
      case ValueKind::floats:
        source.read_parameter(source.table().at(spec.name), values.data());
        packed.write_f32(values.data(), values.size());
        plain.write_f32(values.data(), values.size());
        break;
      case ValueKind::quants: {
        const RandomMatrix matrix = matrix_of(spec.name);
        packed.write(matrix.q.data(), matrix.q.size());
        values = matrix.weights();
        plain.write_f32(values.data(), values.size());
        break;
      }
      case ValueKind::scales: {
        const RandomMatrix matrix = matrix_of(owner(spec.name, ".scales"));
        if (matrix.dtype == DType::u4) {
          packed.write(matrix.group_scales.data(), matrix.group_scales.size() * sizeof(std::uint16_t));
        } else {
          packed.write(matrix.row_scales.data(), matrix.row_scales.size() * sizeof(float));
        }
        break;
      }
      case ValueKind::zeros: {
        const RandomMatrix matrix = matrix_of(owner(spec.name, ".zeros"));
        packed.write(matrix.zeros.data(), matrix.zeros.size());
        break;
      }
    }
  }
  if (tokenizer) {
    packed.write(text.data(), text.size());
    plain.write(text.data(), text.size());
  }
  packed.publish();
  plain.publish();
}

}  // namespace weft::test
