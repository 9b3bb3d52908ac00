// Faults on purpose (--debug-inject): what the tests of recovery use to fail a run at an exact place. Always
// compiled in, because a fault that needs another binary proves nothing about this one.
//
//   nan@step=N        a gradient of step N becomes NaN, once
//   kill@step=N       the process dies (SIGKILL) before step N
//   term@step=N       SIGTERM arrives during step N
//   hang@step=N       step N never ends
//   kill@save=BYTE    the process dies when a save is about to write byte BYTE of the checkpoint
//   io-error@save=BYTE, enospc@save=BYTE   that write fails, once
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "llmc/model/train_model.h"

namespace weft {

enum class SaveFault { none, kill, io_error, enospc };

struct FaultPlan {
  std::optional<std::int64_t> nan_step, kill_step, term_step, hang_step;
  SaveFault save = SaveFault::none;
  std::uint64_t save_byte = 0;
};

const char* fault_help();
// Exit::usage with the accepted forms.
FaultPlan parse_faults(const std::vector<std::string>& specs);

// Installs the hook for faults while saving (llmc/base/file.h); process-wide.
void arm_save_fault(const FaultPlan& plan);

// Called before step `step`: kill, term and hang.
void inject_before_step(const FaultPlan& plan, std::int64_t step);
// Called between the gradients and their check; forgets nan_step when it has struck.
void inject_gradient_fault(FaultPlan& plan, std::int64_t step, TrainModel& model);

}  // namespace weft
