// The report of a run before it starts, on settings, data and memory: as text for people, as JSON for log.jsonl and
// config.json.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/base/json_fwd.h"
#include "llmc/train/inputs.h"
#include "llmc/train/options.h"

namespace weft {

// Every effective setting, the model, the data and the memory plan, a string for each line.
std::vector<std::string> start_report(const TrainSettings& settings, const TrainInputs& inputs,
                                      const std::vector<MemoryLine>& memory);

// A way of tuning a model, with everything else as in the run that was asked for.
struct TuningWay {
  std::string name;
  TrainOptions options;
};
// All weights, LoRA, on a GPU LoRA in fp8 where the model can be computed in it, and QLoRA beside weights of each format. The adapter
// is that of the run, or else has rank 16 and all targets. Empty where the model cannot have it.
std::vector<TuningWay> tuning_ways(const TrainSettings& settings, const ModelConfig& model);
// What each way needs of `available` bytes (0: unknown), a string for each line; none without ways. `needed`: the bytes of a run
// with these options.
std::vector<std::string> tuning_table(const std::vector<TuningWay>& ways, std::uint64_t available,
                                      const std::function<std::uint64_t(const TrainOptions&)>& needed);

// {"settings", "model"}: --print-config.
Json config_record(const TrainSettings& settings, const ModelConfig& model);

// The header of log.jsonl and the content of config.json: config_record() and version, device, data, memory
// and host.
Json header_record(const TrainSettings& settings, const TrainInputs& inputs, const std::vector<MemoryLine>& memory,
                   const std::string& version);

}  // namespace weft
