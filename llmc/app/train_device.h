// The device that train_llama runs on: chooses the device and the precision, plans and checks memory, and makes the
// model.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/app/device.h"
#include "llmc/app/rank_team.h"
#include "llmc/base/arena.h"
#include "llmc/base/threads.h"
#include "llmc/comm/agreement.h"
#include "llmc/model/train_model.h"
#include "llmc/train/options.h"

namespace weft {

// What one rank of several holds of a model: its part of the state, or all of it, as with --eval.
enum class Holds { part, all };

class TrainDevice {
 public:
  // Replaces `auto` in the device and the precision of `settings` by what this machine and this build have. Exit::usage
  // if the device cannot do the precision or the moments that are asked for.
  // A rank of several gets its own GPU, and plans are those of its part.
  TrainDevice(TrainSettings& settings, const RankTeam& team);
  ~TrainDevice();
  TrainDevice(const TrainDevice&) = delete;
  TrainDevice& operator=(const TrainDevice&) = delete;

  bool gpu() const { return choice_.gpu; }
  const std::string& name() const { return choice_.name; }
  // Tolerance of a comparison with PyTorch, both in fp32, relative to a tensor's largest value.
  double compare_tolerance() const { return choice_.gpu ? 1e-4 : 1e-5; }
  // What all ranks have to have in common: the kind of device, the libraries that compute and that connect.
  std::vector<RankField> rank_fields() const;
  // Names the GPU among those of all machines; empty: no GPU.
  std::string gpu_id() const;

  // The memory that the run needs, one line for each kind. `sample_positions`: positions of the decoder that writes
  // samples; 0: no samples. A plan for the CPU does not include this decoder.
  std::vector<MemoryLine> plan(const ModelConfig& config, const TrainOptions& options, std::int64_t sample_positions,
                               Holds holds = Holds::part) const;
  // Bytes of such a plan; on the CPU those of all ranks of this machine, which share its memory.
  std::uint64_t planned_bytes(const ModelConfig& config, const TrainOptions& options, std::int64_t sample_positions,
                              Holds holds = Holds::part) const;
  // What a plan may use; 0: unknown.
  std::uint64_t available_bytes() const { return choice_.available_bytes; }
  // Exit::resources if the plan does not fit, before anything is allocated; the message says what would fit.
  // `batch_sequences`: a rank's sequences per step, which a smaller micro-batch has to divide; 0: the batch is that of a
  // reference dump.
  void check_memory(const ModelConfig& config, const TrainOptions& options, std::int64_t batch_sequences,
                    std::int64_t sample_positions, Holds holds = Holds::part) const;
  // A complete model of this process alone, whatever other ranks there are.
  std::unique_ptr<TrainModel> make(const ModelConfig& config, const TrainOptions& options) const;
  // This rank's part of the model; with one rank the same as above. All ranks call it together. The device outlives the
  // model.
  std::unique_ptr<TrainModel> make(const ModelConfig& config, const TrainOptions& options, Communicator& ranks);

 private:
  struct Links;  // between the GPUs of the ranks

  DeviceChoice choice_;
  const int rank_, ranks_, local_ranks_;
  const Shard shard_;
  const double time_limit_s_;
  std::unique_ptr<Links> links_;
  std::optional<SharedCores> shared_cores_;  // only if the CPU computes
};

}  // namespace weft
