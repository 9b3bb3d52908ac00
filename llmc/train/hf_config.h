// The shape of a new model from a Hugging Face config.json (--config FILE).
#pragma once

#include <string>
#include <vector>

#include "llmc/base/json_fwd.h"
#include "llmc/model/config.h"

namespace weft {

// The Llama that `json` describes. It may have the keys of transformers 4, of transformers 5, or both if they agree. A size
// has no default. What else is absent and changes the arithmetic has the default of transformers, which `warnings` tells, as
// it does what is left out; what weft does not compute is refused with its key. scripts/hf_config.py follows the same rules
// for the converter: test/fixtures/hf_config/cases.json is tried on both. Special ids are not read: a run takes them from
// the tokenizer of its data. `source` names the file in errors, which are Exit::bad_file.
ModelConfig llama_from_hf_config(const Json& json, const std::string& source, std::vector<std::string>& warnings);

// The same for the file `path`; logs the warnings.
ModelConfig read_hf_config(const std::string& path);

}  // namespace weft
