// The shape of a new model from a Hugging Face config.json (--config FILE).
#pragma once

#include <string>

#include "llmc/base/json.h"
#include "llmc/model/config.h"

namespace weft {

// The Llama that `json` describes, with the keys of transformers 4 and 5, which have to agree where both are present.
// What changes the arithmetic has no silent default, and what weft does not compute is refused by its key: as
// scripts/hf_config.py, which reads the same files for the converter. Special ids are left out: a run takes them from the
// tokenizer of its data. `source` names the file in errors, which are Exit::bad_file.
ModelConfig llama_from_hf_config(const Json& json, const std::string& source);

// Of a file.
ModelConfig read_hf_config(const std::string& path);

}  // namespace weft
