// The device of a training run: what its memory holds, and the model on it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/app/device.h"
#include "llmc/base/arena.h"
#include "llmc/base/threads.h"
#include "llmc/model/train_model.h"
#include "llmc/train/options.h"

namespace weft {

class TrainDevice {
 public:
  // Settles what `auto` means on this machine and in this build: afterwards device and precision in `settings` are
  // definite. Exit::usage where precision and moments do not go with the device.
  explicit TrainDevice(TrainSettings& settings);

  bool gpu() const { return choice_.gpu; }
  const std::string& name() const { return choice_.name; }
  // Of a comparison in fp32 with PyTorch in fp32, relative to a tensor's largest value.
  double compare_tolerance() const { return choice_.gpu ? 1e-4 : 1e-5; }

  // Regions of memory that the run needs. `sample_positions`: of the decoder that writes samples; 0: none. The CPU's plan
  // leaves that one out.
  std::vector<MemoryLine> plan(const ModelConfig& config, const TrainOptions& options,
                               std::int64_t sample_positions) const;
  // Refuses a plan that cannot fit before anything is allocated: Exit::resources with what would fit. `batch_sequences`:
  // sequences of a step, which a smaller micro-batch has to divide; 0: the batch is that of a reference dump.
  void check_memory(const ModelConfig& config, const TrainOptions& options, std::int64_t batch_sequences,
                    std::int64_t sample_positions) const;
  std::unique_ptr<TrainModel> make(const ModelConfig& config, const TrainOptions& options) const;

 private:
  DeviceChoice choice_;
  std::optional<SharedCores> shared_cores_;  // on the CPU
};

}  // namespace weft
