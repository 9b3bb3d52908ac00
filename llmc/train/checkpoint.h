// Checkpoints: everything that a run needs to go on as if it had never stopped.
//
// step_00000100/ holds model.bin (a model file with the parameters in fp32 and the tokenizer, for --model and
// export_hf.py), state.bin (a training state: the optimizer's tensors, with --precision fp8 the history of its scales, and a JSON
// object with TrainState and RunIdentity) and manifest.json (names, sizes and hashes of both). A run that trains an adapter has
// adapter.bin in the place of model.bin: the model it belongs to is frozen. A save writes
// step_N.tmp, syncs it and renames it; a load refuses a checkpoint whose sizes, hashes, steps or values do not agree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/comm/communicator.h"
#include "llmc/file/run_dir.h"
#include "llmc/model/model_file.h"
#include "llmc/model/train_model.h"
#include "llmc/train/guard.h"
#include "llmc/train/options.h"
#include "llmc/train/shared_checkpoint.h"

namespace weft {

// The state of the training loop: with the parameters and the optimizer's tensors all that a run needs to go on. Random numbers are
// functions of (seed, position), so positions are kept in place of generators.
struct TrainState {
  std::int64_t step = 0;                    // steps finished
  std::int64_t updates = 0;                 // of them, those that changed the parameters: AdamW's bias correction
  std::uint64_t windows = 0;                // data consumed: the position of the DataLoader
  std::uint64_t micro_steps = 0;            // micro-batches computed: selects the next dropout mask
  std::int64_t skipped = 0, transient = 0;  // steps that the numeric guard skipped, or repaired by running them again
  std::optional<double> loss, val_loss;     // the last of each
  SpikeDetector spikes;
  struct Best {
    std::int64_t step = 0;
    double val_loss = 0;
    bool operator==(const Best&) const = default;
  };
  std::optional<Best> best;  // the lowest loss on --val so far, with --keep-best
  std::string best_on;       // a hash of the data that `best` is measured on; empty in states of before 2026-12

  Json to_json() const;
  static TrainState from_json(const Json& object, const std::string& source);
  bool operator==(const TrainState&) const = default;
};

// Of a run that trains an adapter: what it is, and the header hash of the frozen model.
struct TrainedAdapter {
  LoraConfig lora;
  std::string base;
};

// What identifies a run: a checkpoint may only be continued by a run with the same identity.
struct RunIdentity {
  ModelConfig model;
  Json settings;           // TrainSettings::numeric_settings()
  std::int64_t steps = 0;  // may grow
  Json data;               // TokenDataset::fingerprint() of the training shards
  std::string device;      // "cpu", "cuda": another one is allowed, with a warning
  std::string version;
  std::string tokenizer;       // text of tokenizer.json; may be empty
  std::string began_from;      // header hash of the model file (--model) that the run began with; empty: new parameters
  Json chat = Json::object();  // TrainInputs::chat
  std::optional<TrainedAdapter> adapter = {};  // the tokenizer of such a run stays with the model
  bool of_epochs = false;                      // the steps follow from --epochs, which messages then name
};

// A checkpoint that was read completely and found intact.
class Checkpoint {
 public:
  // What the caller knows of the values in the files. unknown: nothing. checked: all have been read, are finite, and
  // have the hashes that the files' tables give.
  enum class Values { unknown, checked };
  // Checks manifest and sizes and, with Values::unknown, every hash and that every value is finite.
  // Exit::bad_file says what is wrong.
  static Checkpoint open(const std::string& path, std::int64_t step, Values values = Values::unknown);

  const TrainState& state() const { return state_; }
  const ModelConfig& model() const { return model_.config(); }
  // Checks that `run` may continue this checkpoint: Exit::usage names an option that differs, Exit::bad_file a training
  // shard. Of another model, beginning or data the error says first that --out holds another run.
  void require_same_run(const RunIdentity& run) const;
  void load(TrainModel& model) const;

 private:
  Checkpoint(ModelFile model, TensorFile training) : model_(std::move(model)), training_(std::move(training)) {}
  void read_state(const Json& manifest, std::int64_t step);
  void require_same_beginning(const RunIdentity& run, const std::string& source) const;
  void require_same_model(const RunIdentity& run, const std::string& source) const;
  void require_same_data(const RunIdentity& run, const std::string& source) const;
  [[noreturn]] void refuse_other_run(Exit code, const std::string& difference) const;
  void check_tensors() const;
  bool in_fp8() const;
  const Optimizer& optimizer() const;

  ModelFile model_;
  TensorFile training_;
  Json run_;
  TrainState state_;
};

// Where a save gets its tensors from: a model, or a copy of its state.
struct TensorSource {
  // Returns a pointer to elements first to first + count - 1 of a tensor: either `buffer` filled with them, or memory that
  // does not change until the save has ended. The elements of a tensor are read in order, from 0 on.
  std::function<const float*(TensorRole, const TensorSpec&, std::size_t first, std::size_t count, float* buffer)> read;
  bool for_many_threads = false;      // `read` may be called by several threads: both files are written at once
  std::vector<float> fp8_state = {};  // TrainModel::fp8_state() of the same moment
};
TensorSource tensors_of(TrainModel& model);
TensorSource tensors_of(const StateCopy& copy, std::vector<float> fp8_state);

// Called on the other ranks while the first one is in StateCopy::take(): sends it the part of the state that only this
// rank has, role by role and tensor by tensor, in the order in which TrainModel::make_state_copy() reads.
void take_part_in_copy(TrainModel& model);

// Saves checkpoints of one run and removes old ones.
class CheckpointKeeper {
 public:
  CheckpointKeeper(const RunDirectory& directory, RunIdentity identity, std::int64_t keep);

  // Loads the newest intact checkpoint into `model`, with a warning for each damaged one that is newer, removes what
  // interrupted saves left, and returns the checkpoint's state; nothing if there is no checkpoint and the run begins. If
  // there are checkpoints but none is intact: Exit::bad_file, because a run is never silently started over.
  // ResumeMode::must: the newest one has to be intact. ResumeMode::never: a directory that was not empty when this run
  // took it is Exit::usage.
  std::optional<TrainState> resume(ResumeMode mode, TrainModel& model);

  // Writes a checkpoint, reads it back, gives it its name, and only then removes old ones. On failure nothing older is
  // touched, what was written is removed, and the error is thrown: Exit::numeric where a value is not finite. Returns its
  // path.
  std::string save(const TrainState& state, const TensorTable& table, const TensorSource& source);
  std::string save(const TrainState& state, TrainModel& model) { return save(state, model.table(), tensors_of(model)); }

  // The same in two steps, for ranks that save together. begin_shared() creates the files at their full size; all ranks
  // then write the values of the tensors and read them back; commit_shared() gets what was read of each tensor, in the
  // order of SharedCheckpoint::offsets, and completes the checkpoint. discard() removes what was written.
  // `fp8_state`: TrainModel::fp8_state() of the same moment.
  SharedCheckpoint begin_shared(const TrainState& state, const TensorTable& table, std::vector<float> fp8_state) const;
  std::string commit_shared(SharedCheckpoint& files, const TrainState& state, const TensorTable& table,
                            std::span<const TensorRead> tensors);
  void discard(std::int64_t step) const noexcept { directory_.discard_checkpoint(step); }

  std::int64_t last_saved() const { return intact_.empty() ? -1 : *intact_.rbegin(); }  // step of the newest; -1: none
  std::string last_path() const;                                                        // empty if there is none
  std::string best_path() const;  // of the checkpoint with the lowest loss on --val, with --keep-best; else empty

 private:
  std::optional<Checkpoint> newest_intact(ResumeMode mode) const;
  std::optional<std::int64_t> newest_best(std::int64_t up_to) const;
  void write(const std::string& path, const TrainState& state, const TensorTable& table,
             const TensorSource& source) const;
  void write_manifest(const std::string& directory, const TrainState& state, const TensorFileWriter& model,
                      const TensorFileWriter& training) const;
  std::string keep(const TrainState& state);
  Error not_finite(const TrainState& state, const std::string& value) const;
  void read_back(const std::string& path, const TrainState& state, const TensorTable& table,
                 const TensorSource& source) const;
  void remove_old() const;

  const RunDirectory& directory_;
  const RunIdentity identity_;
  const std::size_t keep_;
  std::set<std::int64_t> intact_;     // steps whose checkpoint this process has read completely and found intact
  std::optional<std::int64_t> best_;  // the step of the checkpoint with the lowest loss on --val: it is not removed
};

// --warmup-steps of the newest checkpoint in a run directory that can be read; nothing if there is none. Takes no lock.
std::optional<std::int64_t> saved_warmup_steps(const std::string& out);

// CheckpointKeeper::resume() on all ranks: each gets the same result, or the same error. The first rank has the keeper
// and chooses the checkpoint; the others pass null, and each loads it into its own model.
std::optional<TrainState> resume_on_all(Communicator& ranks, CheckpointKeeper* keeper, ResumeMode mode,
                                        TrainModel& model);

}  // namespace weft
