// The models that --random-model makes for measurements, without a file: the sizes of the Pythia suite (Biderman et al., 2023)
// and the Llamas that train_llama knows by name (preset_config()).
#pragma once

#include <string>
#include <vector>

#include "llmc/model/config.h"

namespace weft {

// "pythia-14m" ... "pythia-12b", "tiny" ... "llama3.1-8b"; an unknown name is Exit::usage and lists them. Behind a colon
// stands how the weights are quantised: "pythia-2.8b:int8", int4 or fp8, and "pythia-2.8b:int4+head" with the head in int8.
// A head in int8 is a tensor of its own, beside the embedding of a preset that ties the two.
ModelConfig random_model_config(const std::string& name, const char* option = "--random-model");
std::vector<std::string> random_model_names();

}  // namespace weft
