// A run directory: what one training run leaves on disk, and the lock that keeps a second run out of it.
//
//   lock              pid and host of the run that works here
//   config.json       settings and model of the last start
//   log.jsonl         one record a line
//   matmul_plans.txt  on a GPU: which algorithm computes which GEMM (llmc/cuda/op/matmul_plans.h)
//   step_00000100/    a checkpoint; only ever appears complete
//   step_00000100.tmp/, step_00000100.replaced.tmp/   a save or a removal that was interrupted; never loaded
//
// Others may have made things in this directory. What a run appends to or locks is opened by open_own_file(), every other
// file is written under a new name and renamed, and only what a save writes is ever removed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace weft {

class RunDirectory {
 public:
  // Creates the directory if needed and takes its lock. A path that cannot be a directory is Exit::usage; one
  // in use by another run Exit::environment with that run's pid and host. The lock of a run that is no more
  // is taken over with a message.
  explicit RunDirectory(const std::string& path);
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  bool empty() const;  // nothing here but the lock
  // Removes what interrupted saves and removals left. For a run that has found out that it may work here.
  void remove_leftovers() const;

  // Everything named step_*, newest first; what can be no checkpoint (a file, a loop of links, a number too
  // large) has a `problem`, and comes last if its name is no step.
  struct Entry {
    std::string name;
    std::int64_t step = -1;
    std::string problem;
  };
  std::vector<Entry> checkpoints() const;

  // A save: begin() makes an empty step_N.tmp and returns its path, commit() gives it its name once its files
  // are synced, replacing a damaged checkpoint of the same step, and discard() removes it. Something else under one of the
  // two names (a link, a file) is Exit::environment, and stays.
  std::string begin_checkpoint(std::int64_t step) const;
  void commit_checkpoint(std::int64_t step) const;
  void discard_checkpoint(std::int64_t step) const noexcept;
  // Takes the checkpoint's name away first, so that no half-removed one is ever seen. A link to one stays.
  void remove_checkpoint(std::int64_t step) const;

  std::string checkpoint_path(std::int64_t step) const;

 private:
  void take_lock();

  std::string path_;
  int lock_ = -1;
};

}  // namespace weft
