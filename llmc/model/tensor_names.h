// The Hugging Face names of the modules that have parameters: TensorTable declares the parameters by them, and bind_weights()
// finds them again. Each family writes its own once (llmc/model/families). The parameters of a module are called
// "<module>.weight" and "<module>.bias".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llmc/model/config.h"

namespace weft {

inline std::string weight_of(const std::string& module) {
  return module + ".weight";
}
inline std::string bias_of(const std::string& module) {
  return module + ".bias";
}

// Of a quantised matrix called `weight`.
inline std::string scales_of(const std::string& weight) {
  return weight + ".scales";
}
inline std::string zeros_of(const std::string& weight) {
  return weight + ".zeros";
}

// The modules of one block. Modules of one list are neighbours in memory and make one matrix.
struct BlockNames {
  std::string input_norm, post_norm;  // of what attention and the MLP read
  std::vector<std::string> qkv;       // q, k, v; or one module with all three
  std::vector<std::string> output;
  std::vector<std::string> up;  // gate, up; or up
  std::vector<std::string> down;
  std::string q_norm = {}, k_norm = {};            // with ModelConfig::qk_norm
  std::string attention_norm = {}, mlp_norm = {};  // of what they give, with ModelConfig::post_norms

  const std::vector<std::string>& linear(BlockLinear which) const {
    return which == BlockLinear::qkv      ? qkv
           : which == BlockLinear::output ? output
           : which == BlockLinear::up     ? up
                                          : down;
  }
};

struct ModelNames {
  const char *embedding, *final_norm, *head;
  BlockNames (*block)(std::int64_t layer);
  bool norms_first;  // files have both norms of a block before its matrices, instead of each before those that read it
};

const ModelNames& names_of(const ModelConfig& config);

}  // namespace weft
