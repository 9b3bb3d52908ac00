#include "llmc/train/fault_injection.h"

#include <unistd.h>

#include <cctype>
#include <charconv>
#include <csignal>
#include <limits>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/log.h"

namespace weft {

namespace {

// The hook is a plain function, so its state is global; only the training thread writes files.
FaultPlan armed;
std::string current_save;        // the step_N.tmp that is being written
std::uint64_t bytes_before = 0;  // of the files of this save that are complete, and of the current one
bool struck = false;

void strike(const std::string& path) {
  if (armed.save == SaveFault::kill) ::raise(SIGKILL);
  struck = true;
  if (armed.save == SaveFault::enospc) {
    fail(Exit::resources, "%s: cannot write: no space left on device (injected)", escaped(path).c_str());
  }
  fail(Exit::environment, "%s: cannot write: input/output error (injected)", escaped(path).c_str());
}

void on_write(const std::string& path, std::uint64_t /*offset*/, std::size_t bytes) {
  const std::string directory = parent_directory(path);
  if (struck || !directory.ends_with(".tmp") || directory.find("step_") == std::string::npos) return;
  if (directory != current_save) {
    current_save = directory;
    bytes_before = 0;
  }
  bytes_before += bytes;
  if (bytes_before > armed.save_byte) strike(path);
}

[[noreturn]] void refuse(const std::string& spec) {
  fail(Exit::usage,
       "--debug-inject: got %s, expected one of nan@step=N, kill@step=N, term@step=N, hang@step=N, "
       "kill@save=BYTE, io-error@save=BYTE, enospc@save=BYTE",
       escaped(spec).c_str());
}

void parse_fault(const std::string& spec, FaultPlan& plan) {
  const std::size_t equals = spec.find('=');
  if (equals == std::string::npos) refuse(spec);
  const std::string place = spec.substr(0, equals), digits = spec.substr(equals + 1);
  std::int64_t number = -1;
  const auto end = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (end.ec != std::errc{} || end.ptr != digits.data() + digits.size() || number < 0) refuse(spec);
  if (place == "nan@step")
    plan.nan_step = number;
  else if (place == "kill@step")
    plan.kill_step = number;
  else if (place == "term@step")
    plan.term_step = number;
  else if (place == "hang@step")
    plan.hang_step = number;
  else if (place == "kill@save")
    plan.save = SaveFault::kill;
  else if (place == "io-error@save")
    plan.save = SaveFault::io_error;
  else if (place == "enospc@save")
    plan.save = SaveFault::enospc;
  else
    refuse(spec);
  if (place.ends_with("@save")) plan.save_byte = static_cast<std::uint64_t>(number);
}

}  // namespace

const char* fault_help() {
  return "test tool: fail on purpose at nan@step=N, kill@step=N, term@step=N, hang@step=N, kill@save=BYTE, "
         "io-error@save=BYTE or enospc@save=BYTE";
}

FaultPlan parse_faults(const std::vector<std::string>& specs) {
  FaultPlan plan;
  for (const std::string& spec : specs) parse_fault(spec, plan);
  return plan;
}

void arm_save_fault(const FaultPlan& plan) {
  armed = plan;
  current_save.clear();
  struck = false;
  set_write_fault(plan.save == SaveFault::none ? nullptr : on_write);
}

void inject_before_step(const FaultPlan& plan, std::int64_t step) {
  if (plan.kill_step == step) ::raise(SIGKILL);
  if (plan.term_step == step) ::raise(SIGTERM);
  if (plan.hang_step == step) {
    log_warning("step %lld hangs (injected)", static_cast<long long>(step));
    while (true) ::pause();
  }
}

void inject_gradient_fault(FaultPlan& plan, std::int64_t step, TrainModel& model) {
  if (plan.nan_step != step) return;
  plan.nan_step.reset();
  const TensorSpec& spec = model.table().specs()[0];
  std::vector<float> values(static_cast<std::size_t>(spec.elements));
  model.read_tensor(TensorRole::gradient, spec, values.data());
  values.back() = std::numeric_limits<float>::quiet_NaN();
  model.write_tensor(TensorRole::gradient, spec, values.data());
}

}  // namespace weft
