// A model file: a tensor file of kind `model` whose configuration and tensor table agree, with its tokenizer
// inside.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "llmc/file/tensor_file.h"
#include "llmc/model/config.h"
#include "llmc/model/lora.h"
#include "llmc/model/tensor_table.h"

namespace weft {

inline constexpr const char* kTokenizerTensor = "tokenizer.json";  // u8, the text of tokenizer.json

// Members of the configuration, beside "model".
inline constexpr const char* kLora = "lora";                   // of an adapter: lora_to_json()
inline constexpr const char* kAdapterBase = "base";            // and the header hash of the model it was trained beside
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
  // The same for an adapter: config() is that of the model it belongs to, table() has the adapter's tensors alone.
  static ModelFile open_adapter(const std::string& path);

  // Of an adapter; empty for a model.
  const std::optional<LoraConfig>& lora() const { return lora_; }
  // Exit::bad_file, with `option`, if an adapter belongs to a model of another shape; a warning if it was trained beside another
  // file.
  void require_fitting(const std::string& option, const ModelFile& adapter) const;
  // From here on the matrices that read_parameter() and read_tensor() give have the adapter in them; where the blocks' weights are
  // quantised, whose values cannot hold the sum, it stands beside them.
  void add_adapter(const std::string& option, ModelFile adapter);
  // An adapter that was added and is not in the weights; null: there is none.
  const ModelFile* adapter_beside() const { return config_.quantization.weights != nullptr ? adapter_.get() : nullptr; }
  std::int64_t adapter_rank() const { return adapter_ ? adapter_->lora_->rank : 0; }  // 0: none was added
  // Whether read_parameter() gives a tensor's values as the file has them.
  bool as_stored(const TensorSpec& spec) const {
    return !adapter_ || adapter_beside() != nullptr || adapter_->parts_for(spec) == nullptr;
  }

  const ModelConfig& config() const { return config_; }
  const TensorTable& table() const { return table_; }
  const TensorFile& file() const { return file_; }
  // Stands for the content of the file and of an adapter that was added.
  std::string content_hash() const;
  DType dtype() const;  // of the embedding: what the start-up line names
  bool has_tokenizer() const;
  std::string tokenizer_json() const;  // verified; empty if the file carries none
  // What the configuration says of chats, as far as the file has it, and not checked. That of an added adapter, if it has a
  // format: it was tuned on such chats.
  Json chat_members() const;
  // Reads one parameter as fp32 and verifies its hash. A value that is not finite is Exit::bad_file. Only for
  // ValueKind::floats.
  void read_parameter(const TensorSpec& spec, float* out) const;
  // The fp32 values of a matrix or vector, quantised or not, with an adapter that was added. `spec` may be that of the same model
  // without quantisation.
  void read_values(const TensorSpec& spec, float* out) const;
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
  ModelFile(TensorFile file, ModelConfig config, std::optional<LoraConfig> lora);
  void check_tensors() const;
  // An adapter's A and, behind it, B for the matrix `spec` of its model; null: it has none.
  const TensorSpec* parts_for(const TensorSpec& spec) const;
  void add_parts(const TensorSpec& spec, float* out) const;  // of the adapter that was added

  TensorFile file_;
  ModelConfig config_;
  std::optional<LoraConfig> lora_;
  TensorTable table_;
  std::shared_ptr<const ModelFile> adapter_;
};

}  // namespace weft
