// Fault injection (--debug-inject): makes a run fail at an exact point, for the tests of recovery. It is part of every
// build, because a test with another binary would prove nothing about this one.
//
//   nan@step=N        a gradient of step N becomes NaN, once
//   kill@step=N       the process dies (SIGKILL) before step N
//   hang@step=N       step N never ends
//   gpu@step=N        a kernel of step N faults, which ends the process's use of its GPU
//   memory@step=N     step N asks its device for more memory than there is
//   inf@moment=N      a second moment becomes infinite in the update of step N, as the square of a huge gradient would
//   ranks@cpu=N       the run has N ranks, started as --gpus starts them, on the CPU
//   version@rank=R    rank R says that it is of another version
//   arch@gpu=N        the GPU is taken for one of architecture sm_N
//   free@gpu=N        N bytes of the GPU's memory are taken to be free
//   term@step=N, term@validation=N, term@sample=N   SIGTERM arrives during step N, or what follows it
//   kill@save=BYTE    the process dies when a save has written BYTE bytes of the checkpoint
//   term@save=BYTE    SIGTERM arrives at that point
//   stop@save=BYTE    the process is stopped (SIGSTOP) at that point
//   io-error@save=BYTE, enospc@save=BYTE   writing the byte after that fails, once
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

enum class SaveFault { none, kill, term, stop, io_error, enospc };
enum class CallAction { none, kill, io_error };

struct FaultPlan {
  std::optional<std::int64_t> nan_step, kill_step, hang_step, gpu_step, memory_step, gpu_arch, gpu_free, cpu_ranks,
      other_version, term_step, term_validation, term_sample, inf_moment, log_record;
  SaveFault save = SaveFault::none;
  std::uint64_t save_byte = 0;
  CallAction call = CallAction::none;
  std::int64_t call_number = 0;
};

const char* fault_help();
// A text that is not one of the forms above is Exit::usage, which lists them.
FaultPlan parse_faults(const std::vector<std::string>& specs);

// Installs the hooks for faults while saving (llmc/base/file.h) and logging; process-wide. Not while a save is in progress.
void arm_save_fault(const FaultPlan& plan);

// Called before step `step`: kill, term and hang.
void inject_before_step(const FaultPlan& plan, std::int64_t step);
// Raises SIGTERM if `planned` is `step`.
void inject_term(const std::optional<std::int64_t>& planned, std::int64_t step);
// Called when the gradients are computed, before they are checked: gpu, memory, and nan, which happens once and is then
// removed from `plan`.
void inject_gradient_fault(FaultPlan& plan, std::int64_t step, TrainModel& model);

// Called after the update of step `step`: inf.
void inject_moment_fault(const FaultPlan& plan, std::int64_t step, TrainModel& model);
// Called before each record of log.jsonl is written: false if the record is to find the disk full.
bool log_record_allowed();

}  // namespace weft
