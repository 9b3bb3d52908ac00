// The configurations of the Pythia suite (Biderman et al., 2023), for measurements without a model file.
#pragma once

#include <string>
#include <vector>

#include "llmc/model/config.h"

namespace weft {

// "pythia-14m" ... "pythia-12b"; an unknown name is Exit::usage and lists them.
ModelConfig pythia_config(const std::string& name);
const std::vector<std::string>& pythia_names();

}  // namespace weft
