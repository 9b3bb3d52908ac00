// A run directory: what one training run leaves on disk, and the lock that keeps a second run out of it.
//
//   lock              pid and host of the run that works here
//   config.json       settings and model of the last start
//   log.jsonl         one record a line
//   reference.bin     with --objective dpo: log p of the pairs by the model that the run began with (llmc/train/preference.h)
//   matmul_plans.txt  on a GPU: which algorithm computes which GEMM (llmc/cuda/op/gemm/matmul_plans.h)
//   step_00000100/    a checkpoint; only ever appears complete
//   step_00000100.tmp/, step_00000100.replaced.tmp/   a save or a removal that was interrupted; never loaded
//
// The directory may hold files that weft did not make, symbolic links included. So a file that is appended to or locked is
// opened with open_own_file(), every other file is written under a temporary name and renamed, and nothing is removed but
// the files that a save writes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace weft {

class RunDirectory {
 public:
  // Creates the directory if needed and takes its lock. A path that cannot be a directory is Exit::usage; one
  // in use by another run is Exit::environment, naming that run's pid and host. The lock of a process that has died is
  // taken over with a message.
  explicit RunDirectory(const std::string& path);
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  // Held nothing but the lock file when this run took it. A model on a GPU puts its GEMM plans here before a run begins.
  bool was_empty() const { return was_empty_; }
  // Removes the temporary directories that interrupted saves and removals left. Call it only when the run has made sure
  // that the checkpoints here are its own.
  void remove_leftovers() const;

  // Every entry named step_* that is not a temporary one, newest first. What cannot be a checkpoint has a `problem`: a
  // file, a loop of symbolic links, a name that weft does not write (its step is -1, and it comes last).
  struct Entry {
    std::string name;
    std::int64_t step = -1;
    std::string problem;
  };
  std::vector<Entry> checkpoints() const { return checkpoints_in(path_); }
  static std::vector<Entry> checkpoints_in(const std::string& path);  // without the lock
  // Exit::environment if the system does not open a file of this checkpoint for a reason that is not the file's: rights, a
  // device that does not answer, no more open files. Such a checkpoint may be whole. One that lacks files is accepted.
  void require_access(const Entry& entry) const;

  // A save calls begin_checkpoint(), which creates an empty step_N.tmp and returns its path; when the files in it are
  // synced, commit_checkpoint() renames it to step_N, replacing a damaged checkpoint of that step. On failure
  // discard_checkpoint() removes step_N.tmp. If a symbolic link or a file has one of the two names, it is left alone, and
  // the error is Exit::environment.
  std::string begin_checkpoint(std::int64_t step) const;
  void commit_checkpoint(std::int64_t step) const;
  void discard_checkpoint(std::int64_t step) const noexcept;
  // Renames the checkpoint to step_N.tmp before it deletes files, so that no half-removed one ever has a checkpoint's name.
  // A symbolic link to a checkpoint is left alone.
  void remove_checkpoint(std::int64_t step) const;

  std::string checkpoint_path(std::int64_t step) const;

 private:
  void take_lock();

  std::string path_;
  int lock_ = -1;
  bool was_empty_ = true;
};

}  // namespace weft
