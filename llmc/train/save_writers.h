// Who writes the checkpoints of a run of several ranks: all of them, each its part (llmc/train/joint_save.h), or the first one,
// from a copy that all fill.
#pragma once

#include <string>

#include "llmc/comm/communicator.h"
#include "llmc/model/shards.h"

namespace weft {

struct SaveWriters {
  bool all = false;
  std::string reason;  // why the first rank alone, for the log; empty where nothing else would make sense
};

// All ranks call it, and get the same. All write if they have divided the state and see one `directory`, the first rank's: it
// puts a file there, into which each of the others writes, and reads them. On NFS clients may not write one page at the same
// time, so there the ranks have to be on one machine. WEFT_SAVE of the first rank, "first" or "ranks", decides instead of all
// but the files; another value is Exit::usage.
SaveWriters choose_save_writers(Communicator& ranks, const std::string& directory, Shard shard, bool one_machine);

}  // namespace weft
