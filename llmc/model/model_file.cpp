#include "llmc/model/model_file.h"

#include <cstring>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/hash.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/model/block_weights.h"
#include "llmc/model/formats/weight_format.h"

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
  if (config.activation == Activation::gelu_tanh) {
    return format(
        "got a model of the family %s, expected one that can be trained: it has GELU by tanh, which training has not. "
        "infer_pythia runs this model",
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

ModelFile::ModelFile(TensorFile file, ModelConfig config, std::optional<LoraConfig> lora)
    : file_(std::move(file)),
      config_(std::move(config)),
      lora_(std::move(lora)),
      table_(lora_ ? TensorTable(config_, *lora_) : TensorTable(config_)) {}

ModelFile ModelFile::open(const std::string& path) {
  TensorFile file = TensorFile::open(path, FileKind::model);
  ModelConfig config = read_config(file);
  // Every layer has several tensors: refused before a table of so many layers is built.
  if (file.tensors().size() < static_cast<std::size_t>(config.num_layers)) {
    fail(Exit::bad_file, "%s: %zu tensors cannot hold %lld layers", escaped(path).c_str(), file.tensors().size(),
         static_cast<long long>(config.num_layers));
  }
  ModelFile model(std::move(file), std::move(config), std::nullopt);
  model.check_tensors();
  return model;
}

ModelFile ModelFile::open_adapter(const std::string& path) {
  TensorFile file = TensorFile::open(path, FileKind::adapter);
  ModelConfig config = read_config(file);
  config.quantization = {};
  const std::string source = escaped(path) + ": " + kLora;
  LoraConfig lora = lora_from_json(file.config().value(kLora, Json()), source, lora_targets(config));
  if (const std::string reason = lora_unsupported_reason(lora, config); !reason.empty()) {
    fail(Exit::bad_file, "%s: %s", source.c_str(), reason.c_str());
  }
  ModelFile adapter(std::move(file), std::move(config), std::move(lora));
  adapter.check_tensors();
  return adapter;
}

void ModelFile::check_tensors() const {
  for (const TensorSpec& spec : table_.specs()) check_tensor(file_, spec);
  check_tokenizer(file_);
  refuse_unknown_tensors(file_, table_);
}

void ModelFile::require_fitting(const std::string& option, const ModelFile& adapter) const {
  const std::string name = escaped(adapter.file_.path()), own = escaped(file_.path());
  // Ids at which a text ends, and padding, make no difference to an adapter.
  const auto shape_of = [](ModelConfig config) {
    config.eos_ids.clear();
    config.bos_id.reset();
    config.tokenizer_vocab = 0;
    config.quantization = {};
    return config_to_json(config);
  };
  const Json mine = shape_of(config_), its = shape_of(adapter.config_);
  for (const auto& [key, value] : mine.items()) {
    if (its.value(key, Json()) == value) continue;
    fail(Exit::bad_file,
         "%s: %s: %s: got an adapter of a model with %s, but %s has %s. Take the model that it was made for",
         option.c_str(), name.c_str(), key.c_str(), its.value(key, Json()).dump().c_str(), own.c_str(),
         value.dump().c_str());
  }
  const std::string hash = hash_text(file_.header_hash());
  const Json base = adapter.file_.config().value(kAdapterBase, Json());
  if (base.is_string() && base != hash) {
    log_warning(
        "%s: %s was trained beside a file with header hash %s, and %s has %s. It fits if the weights are the same",
        option.c_str(), name.c_str(), escaped(base.get<std::string>()).c_str(), own.c_str(), hash.c_str());
  }
}

void ModelFile::add_adapter(const std::string& option, ModelFile adapter) {
  require_fitting(option, adapter);
  adapter_ = std::make_shared<const ModelFile>(std::move(adapter));
}

const TensorSpec* ModelFile::parts_for(const TensorSpec& spec) const {
  constexpr std::string_view kWeight = ".weight";
  if (!spec.name.ends_with(kWeight)) return nullptr;
  return table_.find(weight_of(lora_down_of(spec.name.substr(0, spec.name.size() - kWeight.size()))));
}

std::string ModelFile::content_hash() const {
  const std::string own = hash_text(file_.header_hash());
  return adapter_ ? own + "+" + adapter_->content_hash() : own;
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
  if (adapter_ && adapter_->file_.config().contains(kChatFormat)) return adapter_->chat_members();
  Json members = Json::object();
  for (const char* name : {kChatFormat, kChatTemplate, kChatTokens}) {
    if (const auto found = file_.config().find(name); found != file_.config().end()) members[name] = *found;
  }
  return members;
}

void ModelFile::read_parameter(const TensorSpec& spec, float* out) const {
  file_.read_finite_f32(file_.at(spec.name), out);
  if (!as_stored(spec)) add_parts(spec, out);
}

void ModelFile::add_parts(const TensorSpec& spec, float* out) const {
  const TensorSpec* const parts = adapter_->parts_for(spec);
  std::vector<float> a(static_cast<std::size_t>(parts[0].elements)), b(static_cast<std::size_t>(parts[1].elements));
  adapter_->read_parameter(parts[0], a.data());
  adapter_->read_parameter(parts[1], b.data());
  add_low_rank(out, a.data(), b.data(), spec.shape[0], spec.shape[1], adapter_->lora_->rank, adapter_->lora_->scale());
}

void ModelFile::read_values(const TensorSpec& spec, float* out) const {
  const TensorSpec& stored = table_.at(spec.name);
  if (stored.kind == ValueKind::floats) return read_parameter(stored, out);
  const WeightFormat& weights = weight_format(stored.dtype);
  const auto bytes_of = [&](const TensorSpec& part) {
    std::vector<std::byte> bytes(part.bytes);
    read_quantized(part, bytes.data());
    return bytes;
  };
  const std::vector<std::byte> quants = bytes_of(stored), scales = bytes_of(table_.at(scales_of(spec.name)));
  const std::vector<std::byte> zeros =
      weights.grouped ? bytes_of(table_.at(zeros_of(spec.name))) : std::vector<std::byte>();
  const QuantizedMatrix matrix = weights.matrix(quants.data(), scales.data(), zeros.data());
  const std::int64_t rows = spec.shape[0], columns = spec.shape[1];
  weights.dequantize(out, matrix, 0, rows, columns);
  for (std::int64_t i = 0; i < (weights.grouped ? 0 : rows * columns); ++i) out[i] *= matrix.row_scales[i / columns];
  if (adapter_ && adapter_->parts_for(spec) != nullptr) add_parts(spec, out);
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
