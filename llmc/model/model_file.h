// A model file: a tensor file of kind `model` whose configuration and tensor table agree, with its tokenizer
// inside.
#pragma once

#include <string>

#include "llmc/file/tensor_file.h"
#include "llmc/model/config.h"
#include "llmc/model/tensor_table.h"

namespace weft {

inline constexpr const char* kTokenizerTensor = "tokenizer.json";  // u8, the text of tokenizer.json

// Members of the configuration, beside "model".
inline constexpr const char* kChatFormat = "chat_format";      // doc/chat.md
inline constexpr const char* kChatTemplate = "chat_template";  // that the format was learned from
inline constexpr const char* kChatTokens = "chat_tokens";  // and the tokens that it names: bos_token, eos_token, ...

// Why the model cannot be trained: its weights are quantised, or a capability has no backward pass. Empty: it can.
std::string training_unsupported_reason(const ModelConfig& config);
// Exit::bad_file with that reason, if there is one, for the model of the file `path`.
void require_trainable(const ModelConfig& config, const std::string& path);

class ModelFile {
 public:
  // Opens and checks everything but the tensor data: configuration valid, every tensor of the table present with its
  // shape and a float dtype or, where it belongs to a quantised matrix, that of its scheme, nothing missing.
  // Exit::bad_file names what does not fit.
  static ModelFile open(const std::string& path);

  const ModelConfig& config() const { return config_; }
  const TensorTable& table() const { return table_; }
  const TensorFile& file() const { return file_; }
  DType dtype() const;  // of the embedding: what the start-up line names
  bool has_tokenizer() const;
  std::string tokenizer_json() const;  // verified; empty if the file carries none
  // What the configuration says of chats, as far as the file has it, and not checked.
  Json chat_members() const;
  // Reads one parameter as fp32 and verifies its hash. A value that is not finite is Exit::bad_file. Only for
  // ValueKind::floats.
  void read_parameter(const TensorSpec& spec, float* out) const;
  // Copies the spec.bytes of a tensor of another kind, which lie in memory as in the file, and verifies hash and
  // values.
  void read_quantized(const TensorSpec& spec, void* out) const;
  // read_parameter() or read_quantized(), by the kind. `out`: the tensor's place in an arena of
  // table(DType::f32)'s layout by bytes.
  void read_tensor(const TensorSpec& spec, std::byte* out) const;
  // Exit::bad_file for element `index` of a tensor whose values are not those of its kind.
  [[noreturn]] void refuse_value(const TensorSpec& spec, std::size_t index) const;
  void require_trainable() const { weft::require_trainable(config_, file_.path()); }

 private:
  ModelFile(TensorFile file, ModelConfig config);
  TensorFile file_;
  ModelConfig config_;
  TensorTable table_;
};

}  // namespace weft
