// GPT-NeoX / Pythia generation on the CPU in fp32.
#pragma once

#include <memory>

#include "llmc/model/decode_model.h"
#include "llmc/model/model_file.h"

namespace weft::cpu {

// Reads and verifies every parameter of the file (fp16, bf16 or fp32) into fp32 memory. `capacity`: positions
// of the K/V cache, 1 .. max_positions. Exit::bad_file for damaged tensors, Exit::resources if the memory
// cannot be had.
std::unique_ptr<DecodeModel> load_neox(const ModelFile& file, std::int64_t capacity);

}  // namespace weft::cpu
