// What a JointSave (llmc/train/joint_save.h) and the first rank's CheckpointKeeper (llmc/train/checkpoint.h) exchange
// about a checkpoint whose tensors are written by all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llmc/file/tensor_file.h"

namespace weft {

// The files of such a checkpoint, kept by the first rank from CheckpointKeeper::begin_shared() until commit_shared().
struct SharedCheckpoint {
  std::string directory;  // step_N.tmp
  TensorFileWriter model, training;
  std::vector<float> fp8_state;  // written by the first rank at the end; empty without fp8
  // The names under which the files are written, and the offset of each of state_tensors() in its file.
  std::string model_path, training_path;
  std::vector<std::uint64_t> offsets;
};

// What a rank found when it read a saved tensor back.
struct TensorRead {
  std::uint64_t hash = 0;
  std::int64_t first_bad = -1;  // element that is not finite; -1: none
  float bad_value = 0;
};

}  // namespace weft
