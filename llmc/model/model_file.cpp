#include "llmc/model/model_file.h"

#include <cstring>

#include "llmc/base/error.h"
#include "llmc/base/json.h"

namespace weft {

namespace {

void check_tensor(const TensorFile& file, const TensorSpec& spec) {
  const TensorInfo* tensor = file.find(spec.name);
  if (tensor == nullptr) {
    fail(Exit::bad_file, "%s: tensor %s is missing. Convert the checkpoint again", escaped(file.path()).c_str(),
         spec.name.c_str());
  }
  if (tensor->shape != spec.shape) {
    fail(Exit::bad_file, "%s: %s: got shape %s, expected %s by the configuration", escaped(file.path()).c_str(),
         spec.name.c_str(), shape_text(tensor->shape).c_str(), shape_text(spec.shape).c_str());
  }
  if (spec.kind != ValueKind::floats) {
    if (tensor->dtype == spec.dtype) return;
    fail(Exit::bad_file, "%s: %s: got dtype %s, expected %s by the configuration", escaped(file.path()).c_str(),
         spec.name.c_str(), dtype_name(tensor->dtype), dtype_name(spec.dtype));
  }
  if (tensor->dtype != DType::f32 && tensor->dtype != DType::f16 && tensor->dtype != DType::bf16) {
    fail(Exit::bad_file, "%s: %s: got dtype %s, expected f32, f16 or bf16", escaped(file.path()).c_str(),
         spec.name.c_str(), dtype_name(tensor->dtype));
  }
}

// Checked before anything reads the tensor: a hash takes time, and a copy takes memory, for every byte that a sparse
// file claims to have.
void check_tokenizer(const TensorFile& file) {
  const TensorInfo* tensor = file.find(kTokenizerTensor);
  if (tensor == nullptr) return;
  const std::string where = escaped(file.path()) + ": " + kTokenizerTensor;
  if (tensor->dtype != DType::u8 || tensor->shape.size() != 1) {
    fail(Exit::bad_file, "%s: expected a vector of u8", where.c_str());
  }
  if (tensor->bytes > JsonLimits{}.bytes) {
    fail(Exit::bad_file, "%s: got %llu bytes, expected at most %zu", where.c_str(),
         static_cast<unsigned long long>(tensor->bytes), JsonLimits{}.bytes);
  }
}

void refuse_unknown_tensors(const TensorFile& file, const TensorTable& table) {
  const std::size_t known = table.specs().size() + (file.find(kTokenizerTensor) != nullptr ? 1 : 0);
  if (file.tensors().size() == known) return;
  for (const TensorInfo& tensor : file.tensors()) {
    if (tensor.name != kTokenizerTensor && table.find(tensor.name) == nullptr) {
      fail(Exit::bad_file, "%s: tensor %s does not belong to a %s model of this configuration",
           escaped(file.path()).c_str(), escaped(tensor.name).c_str(),
           json_string(file.config()["model"], "family", file.path()).c_str());
    }
  }
}

ModelConfig read_config(const TensorFile& file) {
  const std::string source = escaped(file.path()) + ": model";
  const auto model = file.config().find("model");
  if (model == file.config().end()) fail(Exit::bad_file, "%s: missing from the configuration", source.c_str());
  ModelConfig config = config_from_json(*model, source);
  const auto quantization = file.config().find("quantization");
  if (quantization == file.config().end()) return config;
  const std::string where = escaped(file.path()) + ": quantization";
  config.quantization = quantization_from_json(*quantization, where);
  if (config.tied_embeddings && config.quantization.head != nullptr) {
    fail(Exit::bad_file, "%s: head: got %s, but it is the embedding, which is not quantised", where.c_str(),
         config.quantization.head->name);
  }
  return config;
}

}  // namespace

std::string training_unsupported_reason(const ModelConfig& config) {
  if (!config.gated() || config.qkv_layout != QkvLayout::concatenated || config.parallel_residual) {
    return format(
        "got a model of the family %s, expected one that can be trained: with SwiGLU, a sequential residual, and q, k "
        "and v in matrices of their own. infer_pythia runs this model",
        config.family.c_str());
  }
  if (!config.quantization.any()) return {};
  return format("its weights are quantised (%s), and training needs floats. Take the file it was converted from",
                quantization_text(config.quantization).c_str());
}

void require_trainable(const ModelConfig& config, const std::string& path) {
  const std::string reason = training_unsupported_reason(config);
  if (!reason.empty()) fail(Exit::bad_file, "%s: %s", escaped(path).c_str(), reason.c_str());
}

ModelFile::ModelFile(TensorFile file, ModelConfig config)
    : file_(std::move(file)), config_(std::move(config)), table_(config_) {}

ModelFile ModelFile::open(const std::string& path) {
  TensorFile file = TensorFile::open(path, FileKind::model);
  ModelConfig config = read_config(file);
  // Every layer has several tensors: refused before a table of so many layers is built.
  if (file.tensors().size() < static_cast<std::size_t>(config.num_layers)) {
    fail(Exit::bad_file, "%s: %zu tensors cannot hold %lld layers", escaped(path).c_str(), file.tensors().size(),
         static_cast<long long>(config.num_layers));
  }
  ModelFile model(std::move(file), std::move(config));
  for (const TensorSpec& spec : model.table_.specs()) check_tensor(model.file_, spec);
  check_tokenizer(model.file_);
  refuse_unknown_tensors(model.file_, model.table_);
  return model;
}

DType ModelFile::dtype() const {
  return file_.at(table_.specs()[0].name).dtype;
}

bool ModelFile::has_tokenizer() const {
  return file_.find(kTokenizerTensor) != nullptr;
}

std::string ModelFile::tokenizer_json() const {
  const TensorInfo* tensor = file_.find(kTokenizerTensor);
  if (tensor == nullptr) return {};
  file_.verify(*tensor);
  const auto bytes = file_.bytes(*tensor);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Json ModelFile::chat_members() const {
  Json members = Json::object();
  for (const char* name : {kChatFormat, kChatTemplate, kChatTokens}) {
    if (const auto found = file_.config().find(name); found != file_.config().end()) members[name] = *found;
  }
  return members;
}

void ModelFile::read_parameter(const TensorSpec& spec, float* out) const {
  file_.read_finite_f32(file_.at(spec.name), out);
}

void ModelFile::read_quantized(const TensorSpec& spec, void* out) const {
  const TensorInfo& tensor = file_.at(spec.name);
  const std::span<const std::byte> data = file_.bytes(tensor);
  if (!data.empty()) std::memcpy(out, data.data(), data.size());
  file_.verify(tensor);
  if (const std::optional<std::size_t> bad = first_invalid_value(spec.kind, spec.dtype, data)) refuse_value(spec, *bad);
}

void ModelFile::read_tensor(const TensorSpec& spec, std::byte* out) const {
  if (spec.kind == ValueKind::floats) {
    read_parameter(spec, reinterpret_cast<float*>(out));
  } else {
    read_quantized(spec, out);
  }
}

void ModelFile::refuse_value(const TensorSpec& spec, std::size_t index) const {
  fail(Exit::bad_file, "%s: %s: element %zu: expected %s", escaped(file_.path()).c_str(), spec.name.c_str(), index,
       valid_values(spec.kind, spec.dtype));
}

}  // namespace weft
