// --describe: what a model is, without loading it.
#pragma once

#include <istream>
#include <string>
#include <vector>

#include "llmc/base/json_fwd.h"

namespace weft {

// One object of
//   "model"                as in a model file (doc/tensor_file.md)
//   "hf_config"            a config.json for it; null, and "problem" says why, if none describes it
//   "tensors"              name and shape of every parameter, in the order of a model file
//   "embedding", "head"    the names of two of them; a tied head is none
//   "linears"              of each kind of linear layer the last part of its modules' names
//   "ties_head"            the checkpoint's head is its embedding; a model file may hold it twice all the same
//   "trainable"            train_llama takes it
// `path`: a Hugging Face directory, a config.json, or a model file. "-" reads one object from `input`: {"config",
// "generation", "rope_theta"} with the content of config.json, of generation_config.json and a base for a config that
// names none; or {"model", "hf_config"} as in a model file. Both may have "source" and "generation_source", the names
// of the files in messages. Exit::bad_file.
Json describe_model(const std::string& path, std::istream& input, std::vector<std::string>& warnings);

}  // namespace weft
