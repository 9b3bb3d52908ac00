#include "llmc/model/families/family.h"

#include "llmc/base/error.h"

namespace weft {

std::span<const Family* const> families() {
  static constexpr const Family* kFamilies[] = {&kLlama, &kMistral, &kQwen2, &kQwen3, &kSmolLm3, &kGemma3, &kGptNeox};
  return kFamilies;
}

const Family* find_family(const std::string& name) {
  for (const Family* family : families()) {
    if (name == family->name) return family;
  }
  return nullptr;
}

const Family& family_of(const ModelConfig& config) {
  const Family* family = find_family(config.family);
  if (family == nullptr) fail(Exit::internal, "no family is called %s", escaped(config.family).c_str());
  return *family;
}

const ModelNames& names_of(const ModelConfig& config) {
  return family_of(config).names;
}

DType published_dtype(const ModelConfig& config) {
  return family_of(config).published;
}

void set_family(ModelConfig& config, const std::string& name) {
  config.family = name;
  family_of(config).set_fixed(config);
}

}  // namespace weft
