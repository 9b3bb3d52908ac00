// What the first rank of a run and its CheckpointKeeper (llmc/train/checkpoint.h) say to each other about a checkpoint whose
// tensors all ranks write (llmc/train/joint_save.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llmc/file/tensor_file.h"

namespace weft {

// A checkpoint whose files several ranks write (llmc/train/joint_save.h): what the first one keeps of it from
// CheckpointKeeper::begin_shared() until commit_shared().
struct SharedCheckpoint {
  std::string directory;  // step_N.tmp
  TensorFileWriter model, training;
  // Under these names the files are written; the tensors of the state lie in them at these offsets: role by role of
  // kStateRoles, each in the order of the table.
  std::string model_path, training_path;
  std::vector<std::uint64_t> offsets;
};

// What a read of a saved tensor has found, by a rank of a run.
struct TensorRead {
  std::uint64_t hash = 0;
  std::int64_t first_bad = -1;  // element that is not finite; -1: none
  float bad_value = 0;
};

}  // namespace weft
