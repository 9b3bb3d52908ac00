// A model file: a tensor file of kind `model` whose configuration and tensor table agree, with its tokenizer
// inside.
#pragma once

#include <optional>
#include <string>

#include "llmc/file/tensor_file.h"
#include "llmc/model/config.h"
#include "llmc/model/tensor_table.h"

namespace weft {

inline constexpr const char* kTokenizerTensor = "tokenizer.json";  // u8, the text of tokenizer.json

class ModelFile {
 public:
  // Opens and checks everything but the tensor data: configuration valid, family as asked (none: either), every
  // tensor of the table present with its shape and a float dtype, nothing missing. Exit::bad_file names what does
  // not fit.
  static ModelFile open(const std::string& path, std::optional<Family> expected = {});

  const ModelConfig& config() const { return config_; }
  const TensorTable& table() const { return table_; }
  const TensorFile& file() const { return file_; }
  DType dtype() const;  // of the embedding: what the start-up line names
  bool has_tokenizer() const;
  std::string tokenizer_json() const;  // verified; empty if the file carries none
  // Reads one parameter as fp32 and verifies its hash. A value that is not finite is Exit::bad_file.
  void read_parameter(const TensorSpec& spec, float* out) const;

 private:
  ModelFile(TensorFile file, ModelConfig config);
  TensorFile file_;
  ModelConfig config_;
  TensorTable table_;
};

}  // namespace weft
