#include "llmc/infer/describe.h"

#include <filesystem>
#include <iterator>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/file/signature.h"
#include "llmc/model/families/hf_config.h"
#include "llmc/model/model_file.h"
#include "llmc/model/tensor_names.h"
#include "llmc/model/tensor_table.h"

namespace weft {

namespace {

constexpr int kDescribeDepth = JsonLimits{}.depth + 1;  // a config.json of the largest depth, in an object
constexpr std::size_t kShownPath = 300;

std::string last_part(const std::string& module) {
  return module.substr(module.rfind('.') + 1);
}

Json linears_of(const ModelConfig& config) {
  constexpr const char* kNames[] = {"qkv", "output", "up", "down"};  // kBlockLinears
  const BlockNames block = names_of(config).block(0);
  Json linears;
  for (const BlockLinear which : kBlockLinears) {
    Json& parts = linears[kNames[static_cast<std::size_t>(which)]];
    for (const std::string& module : block.linear(which)) parts.push_back(last_part(module));
  }
  return linears;
}

Json description(ModelConfig config, bool ties_head, const Json& original, const std::string& source) {
  const bool trainable = training_unsupported_reason(config).empty();
  config.quantization = {};  // the parameters, whatever they are stored in
  Json tensors = Json::array();
  const TensorTable table(config);
  for (const TensorSpec& spec : table.specs()) {
    tensors.push_back({{"name", spec.name}, {"shape", spec.shape}, {"begins_as_zeros", spec.init == Init::zeros}});
  }
  const ModelNames& names = names_of(config);
  std::string problem;
  Json result = {{"model", config_to_json(config)}, {"hf_config", hf_from_model(config, original, source, problem)},
                 {"tensors", std::move(tensors)},   {"embedding", weight_of(names.embedding)},
                 {"head", weight_of(names.head)},   {"linears", linears_of(config)},
                 {"ties_head", ties_head},          {"trainable", trainable}};
  if (!problem.empty()) result["problem"] = problem;
  return result;
}

Json describe_hf(const HfConfig& hf, std::vector<std::string>& warnings) {
  const auto [config, ties_head] = model_from_hf(hf, warnings);
  return description(config, ties_head, hf.config, hf.source);
}

Json describe_file(const std::string& path) {
  const ModelFile file = ModelFile::open(path);
  const ModelConfig& config = file.config();
  Json result =
      description(config, config.tied_embeddings, file.file().config().value("hf_config", Json()), escaped(path));
  if (Json& hf = result["hf_config"]; hf.is_object()) {
    const DType dtype = file.dtype();
    hf["dtype"] = hf["torch_dtype"] = dtype == DType::f32 ? "float32" : dtype == DType::f16 ? "float16" : "bfloat16";
  }
  return result;
}

Json describe_request(const std::string& text, std::vector<std::string>& warnings) {
  const std::string stdin_name = "--describe -";
  const Json request = parse_json(text, stdin_name, {.depth = kDescribeDepth});
  const auto name = [&](const char* key) {
    return request.contains(key) ? escaped(json_string(request, key, stdin_name), kShownPath) : stdin_name;
  };
  if (!request.is_object()) fail(Exit::bad_file, "%s: expected a JSON object", stdin_name.c_str());
  if (request.contains("model")) {
    const ModelConfig config = config_from_json(request["model"], name("source") + ": model");
    return description(config, config.tied_embeddings, request.value("hf_config", Json()), name("source"));
  }
  HfConfig hf{request.value("config", Json()),
              request.value("generation", Json()),
              name("source"),
              name("generation_source"),
              {}};
  if (request.contains("rope_theta")) hf.rope_theta = json_number(request, "rope_theta", stdin_name);
  return describe_hf(hf, warnings);
}

}  // namespace

Json describe_model(const std::string& path, std::istream& input, std::vector<std::string>& warnings) {
  if (path == "-") return describe_request({std::istreambuf_iterator<char>(input), {}}, warnings);
  std::error_code error;
  if (!std::filesystem::is_directory(path, error) && MappedFile(path).text().starts_with(kTensorFileMagic)) {
    return describe_file(path);
  }
  return describe_hf(read_hf_config(path, warnings), warnings);
}

}  // namespace weft
