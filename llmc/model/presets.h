// The models that train_llama --config and infer_pythia --random-model know by name, so that neither needs a file.
#pragma once

#include <string>
#include <vector>

#include "llmc/model/config.h"

namespace weft {

// "tiny", "llama3.2-1b", "pythia-160m", ...: the sizes that each family's authors published, and two of weft's own (tiny, d12).
// Without special ids: a run takes them from the tokenizer of its data. An unknown name is Exit::usage with `option` and lists
// them.
ModelConfig preset_config(const std::string& name, const char* option = "--config");
const std::vector<std::string>& preset_names();
std::string preset_list();  // "tiny, d12, ... or gemma3-1b"

// --config and --random-model also take the path of a Hugging Face config.json: a name that ends in .json or has a slash.
bool names_config_file(const std::string& name);
// Its model, without special ids. What it leaves to defaults is logged; what is wrong in it is an Error that names the file.
ModelConfig config_of_file(const std::string& path);

// Either of the two, for random weights. Behind a colon stands how the weights are quantised: "pythia-2.8b:int8", int4 or fp8,
// and "pythia-2.8b:int4+head" with the head in int8, which is a tensor of its own, beside the embedding of a preset that ties
// the two.
ModelConfig random_model_config(const std::string& text, const char* option = "--random-model");

}  // namespace weft
