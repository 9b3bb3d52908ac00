// Saving while training goes on: the state is copied to host memory, and a thread hashes, writes, syncs and renames the
// copy. Training waits for the copy only, and for the end of a save that is still running when the next one is due.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "llmc/base/error.h"
#include "llmc/model/train_model.h"
#include "llmc/train/checkpoint.h"
#include "llmc/train/options.h"

namespace weft {

// Whether a run saves in the background, and the line that says so. It does if the copy leaves a fifth of the free host
// memory to others; a machine that starts to swap, or kills the largest process, is worse than a run that waits.
struct SavePlan {
  bool in_background = false;
  std::string line;  // empty: there is nothing to save before the end
};
// `planned_host_bytes`: what the model will take of the same memory.
SavePlan plan_saves(const TrainSettings& settings, const ModelConfig& config, std::uint64_t planned_host_bytes);

// Owned by the training thread; everything but write() is called there. Between start() and the result the keeper belongs
// to the thread that writes.
class BackgroundSave {
 public:
  struct Result {
    std::int64_t step = 0;
    std::string path;            // of the checkpoint; empty if it failed
    std::optional<Error> error;  // why
    double seconds = 0;          // from start() to the end, reading back included
    double stalled_seconds = 0;  // of them, those for which start() held training up
  };

  // Without a copy start() writes before it returns.
  BackgroundSave(CheckpointKeeper& keeper, std::unique_ptr<StateCopy> copy);
  ~BackgroundSave();  // waits; a failure that nobody asked for becomes a warning
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  // Not while the result of an earlier one was not taken. Throws what taking the copy throws; errors of the files are in
  // the result.
  void start(const TrainState& state, TrainModel& model);
  std::optional<Result> poll();  // the result of start(), once; empty: none, or not yet
  std::optional<Result> wait();  // the same, but it waits, and says so once a minute

  // On this thread, which waits for all of it. Not between start() and its result.
  Result save_now(const TrainState& state, TrainModel& model);

 private:
  using Clock = std::chrono::steady_clock;
  void write(const TrainState& state, const TensorTable& table, const TensorSource& source, Result& result) const;
  std::optional<Result> take_result();

  CheckpointKeeper& keeper_;
  const std::unique_ptr<StateCopy> copy_;
  Clock::time_point begin_;
  TrainState state_;  // of the save in progress
  Result result_;
  double stalled_seconds_ = 0;
  bool started_ = false;
  std::thread thread_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;  // guarded by mutex_; result_ is the training thread's again once it is true
};

}  // namespace weft
