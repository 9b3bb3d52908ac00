// Faults on purpose (--debug-inject): what the tests of recovery use to fail a run at an exact place. Always
// compiled in, because a fault that needs another binary proves nothing about this one.
//
//   nan@step=N        a gradient of step N becomes NaN, once
//   kill@step=N       the process dies (SIGKILL) before step N
//   hang@step=N       step N never ends
//   gpu@step=N        a kernel of step N faults, which ends the process's use of its GPU
//   memory@step=N     step N asks its device for more memory than there is
//   inf@moment=N      a second moment becomes infinite in the update of step N, as the square of a huge gradient would
//   arch@gpu=N        the GPU says that it is of architecture sm_N
//   free@gpu=N        the GPU says that N bytes of its memory are free
//   term@step=N, term@validation=N, term@sample=N   SIGTERM arrives during step N, or what follows it
//   kill@save=BYTE    the process dies when a save has written so many bytes of the checkpoint
//   term@save=BYTE    SIGTERM arrives then
//   io-error@save=BYTE, enospc@save=BYTE   writing the next byte fails, once
//   enospc@log=N      log.jsonl has no room for the N-th record (from 1) after the run's first line
//   kill@call=K       the process dies before the K-th sync, rename or removal (from 0) of its saves
//   io-error@call=K   that call fails, once
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "llmc/model/train_model.h"

namespace weft {

enum class SaveFault { none, kill, term, io_error, enospc };
enum class CallAction { none, kill, io_error };

struct FaultPlan {
  std::optional<std::int64_t> nan_step, kill_step, hang_step, gpu_step, memory_step, gpu_arch, gpu_free, term_step,
      term_validation, term_sample, inf_moment, log_record;
  SaveFault save = SaveFault::none;
  std::uint64_t save_byte = 0;
  CallAction call = CallAction::none;
  std::int64_t call_number = 0;
};

const char* fault_help();
// Exit::usage with the accepted forms.
FaultPlan parse_faults(const std::vector<std::string>& specs);

// Installs the hooks for faults while saving (llmc/base/file.h) and logging; process-wide. Not while a save is in progress.
void arm_save_fault(const FaultPlan& plan);

// Called before step `step`: kill, term and hang.
void inject_before_step(const FaultPlan& plan, std::int64_t step);
// SIGTERM where `planned` is the step that was just finished.
void inject_term(const std::optional<std::int64_t>& planned, std::int64_t step);
// Called between the gradients and their check: nan, which it forgets when it has struck, gpu and memory.
void inject_gradient_fault(FaultPlan& plan, std::int64_t step, TrainModel& model);

// Called after the update of step `step`: inf.
void inject_moment_fault(const FaultPlan& plan, std::int64_t step, TrainModel& model);
// Asked before each record of log.jsonl: false where it is to find a full disk.
bool log_record_allowed();

}  // namespace weft
