// Who writes the checkpoints of a run of several ranks: all of them, each its part (llmc/train/joint_save.h), or the
// first one, from a copy that all ranks fill.
#pragma once

#include <string>

#include "llmc/comm/communicator.h"
#include "llmc/model/shards.h"

namespace weft {

struct SaveWriters {
  bool all = false;
  std::string reason;  // why the first rank writes alone, for the log; empty if there was nothing to choose
};

// Called by all ranks together; all get the same answer. All ranks write if the state is sharded and they see the same
// `directory`, which is tested: the first rank creates a file there, each of the others writes into it, and the first
// reads the result. NFS clients must not write one page at the same time, so on NFS the ranks also have to be on one
// machine. The first rank's environment variable WEFT_SAVE comes first: "first" makes the first rank write alone,
// "ranks" skips the rule for NFS, but not the test; another value is Exit::usage.
SaveWriters choose_save_writers(Communicator& ranks, const std::string& directory, Shard shard, bool one_machine);

}  // namespace weft
