// --eval: the loss of a model file on the validation shards.
#pragma once

#include <string>

#include "llmc/base/error.h"
#include "llmc/comm/communicator.h"
#include "llmc/train/inputs.h"

namespace weft {

// Measures all of --val, or --val-batches micro-batches spread over it, and prints one line, or with --json one object.
// Exit::ok, or the code of a signal that came meanwhile; a loss that is not finite is Exit::numeric.
// Ranks divide the work; the first prints.
Exit evaluate(TrainModel& model, const TrainSettings& settings, const TrainInputs& inputs, Communicator& ranks);

}  // namespace weft
