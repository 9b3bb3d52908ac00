// The training loop: data, gradients, guard, update, reports, checkpoints. The same for every device and
// model.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/log.h"
#include "llmc/comm/communicator.h"
#include "llmc/model/train_model.h"
#include "llmc/train/background_save.h"
#include "llmc/train/checkpoint.h"
#include "llmc/train/data_loader.h"
#include "llmc/train/fault_injection.h"
#include "llmc/train/guard.h"
#include "llmc/train/preference.h"
#include "llmc/train/run_log.h"

namespace weft {

// The mean of -log p over `tokens` labels, every one with the same weight; of a preference that of the loss over pairs.
struct MeanLoss {
  double loss = 0;
  std::int64_t tokens = 0;
  bool operator==(const MeanLoss&) const = default;
};
// The mean loss over `batches` micro-batches of `micro_batch` windows. The windows are spread evenly over the dataset, and
// are the same at every call; `batches` 0, or more than there are: every window once. Nothing if a signal came meanwhile.
// Ranks divide the micro-batches and get the same bits as one that measures alone; an error of one is an error of all.
std::optional<MeanLoss> mean_loss(TrainModel& model, const TokenDataset& data, std::int64_t micro_batch,
                                  std::int64_t batches, Communicator& ranks);
std::optional<MeanLoss> mean_loss(TrainModel& model, const TokenDataset& data, std::int64_t micro_batch,
                                  std::int64_t batches);

// The loop of one process. With several ranks each process has one, and all take the same steps and the same decisions.
// Only the first rank writes the log, messages and samples, and the checkpoints too unless all ranks write those
// together.
class TrainLoop {
 public:
  struct Parts {
    const TrainSettings& settings;
    TrainModel& model;
    DataLoader& data;
    CheckpointKeeper* checkpoints;  // null on ranks other than the first
    RunLog& log;
    const TokenDataset* validation = nullptr;              // may be absent
    std::function<std::string(std::int64_t step)> sample;  // may be empty
    std::unique_ptr<StateCopy> copy;  // of the ranks that save; absent: training waits for each save
    Communicator* ranks = nullptr;    // null: this process is alone. Their number divides settings.virtual_ranks
    // With ranks that write checkpoints together: on each of them, with a copy of its own part. Absent: the first one
    // writes.
    std::unique_ptr<JointSave> joint_save = nullptr;
    // Of the training and the validation data, which are pairs then. Null: the loss is that of text.
    const Preference *preference = nullptr, *val_preference = nullptr;
  };

  // Continues from `start`: the model holds its parameters and moments, and the data loader is at its position.
  TrainLoop(Parts parts, TrainState start);

  // Trains until the last step, a signal or the time limit; saves; prints the result on stdout. Returns Exit::ok or the code
  // of the signal. Throws Exit::numeric if the guard stops the run or a save finds a value that is not finite,
  // Exit::resources if the last save fails, and errors of the data. Before it throws an error of the guard or of the data
  // it saves the state of the last good step. In every case it waits for a save in progress.
  Exit run();
  const TrainState& state() const { return state_; }

 private:
  struct Step {                           // what the reports say of one step
    std::int64_t number = 0, labels = 0;  // labels: of the tokens that are learned; with a preference, pairs
    double loss = 0, gradient_norm = 0, learning_rate = 0, seconds = 0;
    bool skipped = false;
    std::optional<MeanLoss> val;
    std::optional<PreferenceSums> preferences, val_preferences;
    std::optional<Fp8Statistics> fp8;
  };

  struct ControlFlags {
    // stop: a signal or the time limit; save: SIGUSR1; failed: a save's error has to end the run
    bool stop, save, failed;
    std::optional<TrainState::Best> best;  // the first rank's counts: it knows what could be saved
  };

  ControlFlags flags_of_all(bool failed);
  Step train_step();
  StepStatistics compute(std::int64_t step, const std::vector<MicroBatch>& batches);
  PreferenceSums sum_of_step(std::span<const PreferenceSums> sums);
  bool recover(std::int64_t step, const std::vector<MicroBatch>& batches, StepStatistics& statistics);
  void apply(const Step& step);
  void report_spike(const Step& step, const Spike& spike);
  void report_saturation(const Step& step);
  bool due(std::int64_t every) const;
  bool first_rank() const { return ranks_.rank() == 0; }
  double tokens_per_label(std::int64_t labels) const;
  std::int64_t micro_batches() const { return parts_.settings.accumulation() / ranks_.size(); }
  bool stop_requested() const;
  std::vector<MicroBatch> read_batches();
  void keep_comparable_best();
  void announce_stop(const std::string& doing) const;
  void after_step(Step& step);
  void validate(Step& step);
  void report(const Step& step);
  void write_sample();
  void begin_save();
  void save_now(bool last);
  bool to_be_saved();
  void start_save();
  std::optional<BackgroundSave::Result> wait_for_save();
  void settle_save();
  std::optional<Error> report_save(const std::optional<BackgroundSave::Result>& result);
  Exit finish();

  Parts parts_;
  SingleRank alone_;
  Communicator& ranks_;
  TrainState state_;
  FaultPlan faults_;
  std::optional<PreferenceSums> preferences_;  // of the step that was computed last
  std::optional<BackgroundSave> saves_;        // where there is a keeper, and on all ranks that save together
  const std::chrono::steady_clock::time_point start_time_;
  const std::int64_t first_step_;
  std::chrono::steady_clock::time_point last_line_;
  bool ending_ = false;                         // an error is ending the run: a save that fails too is only a warning
  std::int64_t saved_step_;                     // of the newest checkpoint that is known to be complete; 0: none
  std::optional<TrainState::Best> saved_best_;  // whose checkpoint is known to be complete, of those with --keep-best
  std::int64_t begun_save_ = -1;                // the step of the save that was begun last; -1: none
  std::int64_t saturated_step_ = 0;             // of the last warning that fp8 saturates; 0: none
  double mean_step_seconds_ = 0;                // exponentially weighted mean, for the time left
  std::optional<std::int64_t> validated_step_;  // where state_.val_loss was measured, if by this process
  ProgressLine progress_;
};

}  // namespace weft
