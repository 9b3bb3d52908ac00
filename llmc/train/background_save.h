// Saves checkpoints while training goes on: the state is copied to host memory, and a second thread hashes, writes, syncs
// and renames the files. Training waits only while the state is copied, and for a save that is still running when the next
// one is due.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/model/train_model.h"
#include "llmc/train/checkpoint.h"
#include "llmc/train/joint_save.h"
#include "llmc/train/options.h"

namespace weft {

// Whether a run saves in the background, and the line of the start report that says so. It does if the copy leaves a fifth
// of the free host memory unused: a machine that swaps, or kills the largest process, is worse than a run that waits.
struct SavePlan {
  bool in_background = false;
  std::string line;  // empty: nothing is saved before the end of the run
};
// `planned_host_bytes`: host memory that the model itself will take.
SavePlan plan_saves(const TrainSettings& settings, const ModelConfig& config, std::uint64_t planned_host_bytes);

// All public functions are called by the training thread. From start() until its result is taken, nothing else may use the
// keeper: it belongs to the thread that writes.
class BackgroundSave {
 public:
  struct Result {
    std::int64_t step = 0;
    std::string path;                      // of the checkpoint; empty if it failed
    std::optional<Error> error;            // why
    std::optional<TrainState::Best> best;  // of the state that was to be saved
    bool was_last = false;                 // the ranks' communicator has failed: no later save can succeed
    double seconds = 0;                    // from start() to the end, reading back included
    double stalled_seconds = 0;            // the part of `seconds` during which training waited
  };

  // `copy` null: start() writes the checkpoint before it returns.
  BackgroundSave(CheckpointKeeper& keeper, std::unique_ptr<StateCopy> copy);
  // For ranks that save together: each has a copy of its own part of the state, and all call start() for the same
  // steps. Only the first rank's results have a path.
  BackgroundSave(std::unique_ptr<JointSave> joint, std::unique_ptr<StateCopy> copy);
  ~BackgroundSave();  // waits for a save in progress; its failure is a warning
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  // Begins a save. The result of the previous start() must have been taken. An error of copying the state is thrown; an
  // error of writing the files is part of the result.
  void start(const TrainState& state, TrainModel& model);
  // The result of the save that start() began, returned once. Nothing while it runs, or if none was begun.
  std::optional<Result> poll() { return wait_at_most(std::chrono::milliseconds(0)); }
  std::optional<Result> wait_at_most(std::chrono::milliseconds limit);
  std::optional<Result> wait();                  // waits until the save has ended, with a message once a minute
  bool in_progress() const { return started_; }  // the result of start() has not been taken

  // Saves on the calling thread. Must not be called between start() and the taking of its result.
  Result save_now(const TrainState& state, TrainModel& model);

 private:
  using Clock = std::chrono::steady_clock;
  void write(const TrainState& state, const TensorTable& table, const TensorSource& source, Result& result) const;
  std::optional<Result> take_result();

  CheckpointKeeper* const keeper_;  // null where ranks save together
  const std::unique_ptr<JointSave> joint_;
  const std::unique_ptr<StateCopy> copy_;
  Clock::time_point begin_;
  TrainState state_;              // of the save in progress
  std::vector<float> fp8_state_;  // TrainModel::fp8_state() at that step
  Result result_;
  double stalled_seconds_ = 0;
  bool started_ = false;
  std::thread thread_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;  // guarded by mutex_; once it is true the writing thread does not touch result_
};

}  // namespace weft
