// The report of a run before it starts, on settings, data and memory: as text for people, as JSON for log.jsonl and
// config.json.
#pragma once

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

// {"settings", "model"}: --print-config.
Json config_record(const TrainSettings& settings, const ModelConfig& model);

// The header of log.jsonl and the content of config.json: config_record() and version, device, data, memory
// and host.
Json header_record(const TrainSettings& settings, const TrainInputs& inputs, const std::vector<MemoryLine>& memory,
                   const std::string& version);

}  // namespace weft
