// A family of models is data: what Hugging Face calls it and its modules, and which capabilities its configurations have. This
// folder is the only place, beside the converter, that knows a family by its name.
#pragma once

#include <span>
#include <string>

#include "llmc/base/dtype.h"
#include "llmc/base/json_fwd.h"
#include "llmc/model/config.h"
#include "llmc/model/tensor_names.h"

namespace weft {

struct Family {
  const char* name;  // model_type of config.json, and the family of a model file
  ModelNames names;
  DType published;  // the type of its checkpoints, in which programs compute unless they are told another
  // Sets the capabilities that all its models have.
  void (*set_fixed)(ModelConfig& config);
  // Reads what configurations of this family alone have, from the object "model" of a model file, and checks all of it:
  // Exit::bad_file.
  void (*read)(const Json& object, const std::string& source, ModelConfig& config);
};

extern const Family kLlama, kGptNeox;

std::span<const Family* const> families();
// Null: there is none of this name.
const Family* find_family(const std::string& name);
const Family& family_of(const ModelConfig& config);

}  // namespace weft
