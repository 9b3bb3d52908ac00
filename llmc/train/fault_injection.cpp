#include "llmc/train/fault_injection.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <limits>
#include <mutex>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/log.h"

namespace weft {

namespace {

// The hooks are plain functions, so their state is global. Only writes to the directory of a save are counted.
std::mutex hook_mutex;
FaultPlan armed;
std::string current_save;        // the step_N.tmp that is being written
std::uint64_t bytes_before = 0;  // bytes that this save has written so far
std::int64_t calls_before = 0, log_records = 0;
bool save_fault_done = false, call_fault_done = false;

bool belongs_to_save(const std::string& directory) {
  return directory.ends_with(".tmp") && directory.find("step_") != std::string::npos;
}

// Makes the save fail in the planned way.
void fail_save(const std::string& path) {
  if (armed.save == SaveFault::kill) ::raise(SIGKILL);
  save_fault_done = true;
  if (armed.save == SaveFault::term || armed.save == SaveFault::stop) {
    ::kill(::getpid(), armed.save == SaveFault::term ? SIGTERM : SIGSTOP);
    return;
  }
  if (armed.save == SaveFault::enospc) {
    fail(Exit::resources, "%s: cannot write: no space left on device (injected)", escaped(path).c_str());
  }
  fail(Exit::environment, "%s: cannot write: input/output error (injected)", escaped(path).c_str());
}

std::size_t on_write(const std::string& path, std::uint64_t /*offset*/, std::size_t bytes) {
  const std::string directory = parent_directory(path);
  const std::lock_guard<std::mutex> lock(hook_mutex);
  if (save_fault_done || !belongs_to_save(directory)) return bytes;
  if (directory != current_save) {
    current_save = directory;
    bytes_before = 0;
  }
  if (bytes_before == armed.save_byte) fail_save(path);
  if (bytes_before < armed.save_byte) bytes = std::min<std::uint64_t>(bytes, armed.save_byte - bytes_before);
  bytes_before += bytes;
  return bytes;
}

bool on_call(const char* /*call*/, const std::string& /*path*/) {
  const std::lock_guard<std::mutex> lock(hook_mutex);
  if (call_fault_done || calls_before++ != armed.call_number) return true;
  if (armed.call == CallAction::kill) ::raise(SIGKILL);
  call_fault_done = true;
  return false;
}

constexpr const char* kForms =
    "nan@step=N, kill@step=N, hang@step=N, gpu@step=N, memory@step=N, inf@moment=N, arch@gpu=N, free@gpu=N, "
    "ranks@cpu=N, version@rank=R, "
    "term@step=N, term@validation=N, term@sample=N, enospc@log=N, kill@save=BYTE, term@save=BYTE, stop@save=BYTE, "
    "io-error@save=BYTE, enospc@save=BYTE, "
    "kill@call=K or io-error@call=K";

[[noreturn]] void refuse(const std::string& spec) {
  fail(Exit::usage, "--debug-inject: got %s, expected one of %s", escaped(spec).c_str(), kForms);
}

bool set_step_fault(FaultPlan& plan, const std::string& point, std::int64_t step) {
  const std::pair<const char*, std::optional<std::int64_t>*> points[] = {{"nan@step", &plan.nan_step},
                                                                         {"kill@step", &plan.kill_step},
                                                                         {"hang@step", &plan.hang_step},
                                                                         {"gpu@step", &plan.gpu_step},
                                                                         {"memory@step", &plan.memory_step},
                                                                         {"arch@gpu", &plan.gpu_arch},
                                                                         {"free@gpu", &plan.gpu_free},
                                                                         {"ranks@cpu", &plan.cpu_ranks},
                                                                         {"version@rank", &plan.other_version},
                                                                         {"term@step", &plan.term_step},
                                                                         {"term@validation", &plan.term_validation},
                                                                         {"term@sample", &plan.term_sample},
                                                                         {"inf@moment", &plan.inf_moment},
                                                                         {"enospc@log", &plan.log_record}};
  for (const auto& [name, field] : points) {
    if (point == name) *field = step;
    if (point == name) return true;
  }
  return false;
}

bool set_save_fault(FaultPlan& plan, const std::string& point, std::int64_t byte) {
  const std::pair<const char*, SaveFault> points[] = {{"kill@save", SaveFault::kill},
                                                      {"term@save", SaveFault::term},
                                                      {"stop@save", SaveFault::stop},
                                                      {"io-error@save", SaveFault::io_error},
                                                      {"enospc@save", SaveFault::enospc}};
  for (const auto& [name, fault] : points) {
    if (point != name) continue;
    plan.save = fault;
    plan.save_byte = static_cast<std::uint64_t>(byte);
    return true;
  }
  return false;
}

bool set_call_action(FaultPlan& plan, const std::string& point, std::int64_t number) {
  if (point != "kill@call" && point != "io-error@call") return false;
  plan.call = point == "kill@call" ? CallAction::kill : CallAction::io_error;
  plan.call_number = number;
  return true;
}

void parse_fault(const std::string& spec, FaultPlan& plan) {
  const std::size_t equals = spec.find('=');
  if (equals == std::string::npos) refuse(spec);
  const std::string point = spec.substr(0, equals), digits = spec.substr(equals + 1);
  std::int64_t number = -1;
  const auto end = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (end.ec != std::errc{} || end.ptr != digits.data() + digits.size() || number < 0) refuse(spec);
  const bool known = set_step_fault(plan, point, number) || set_save_fault(plan, point, number) ||
                     set_call_action(plan, point, number);
  if (!known) refuse(spec);
}

}  // namespace

const char* fault_help() {
  static const std::string text = std::string("test tool: fail on purpose at ") + kForms;
  return text.c_str();
}

FaultPlan parse_faults(const std::vector<std::string>& specs) {
  FaultPlan plan;
  for (const std::string& spec : specs) parse_fault(spec, plan);
  return plan;
}

void arm_save_fault(const FaultPlan& plan) {
  const std::lock_guard<std::mutex> lock(hook_mutex);
  armed = plan;
  current_save.clear();
  bytes_before = 0;
  calls_before = log_records = 0;
  save_fault_done = call_fault_done = false;
  set_write_fault(plan.save == SaveFault::none ? nullptr : on_write);
  set_call_fault(plan.call == CallAction::none ? nullptr : on_call);
}

void inject_term(const std::optional<std::int64_t>& planned, std::int64_t step) {
  if (planned == step) ::raise(SIGTERM);
}

void inject_before_step(const FaultPlan& plan, std::int64_t step) {
  if (plan.kill_step == step) ::raise(SIGKILL);
  inject_term(plan.term_step, step);
  if (plan.hang_step == step) {
    log_warning("step %lld hangs (injected)", static_cast<long long>(step));
    while (true) ::pause();
  }
}

void inject_gradient_fault(FaultPlan& plan, std::int64_t step, TrainModel& model) {
  if (plan.gpu_step == step) model.inject_device_fault();
  if (plan.memory_step == step) model.decoder(std::int64_t{1} << 40);  // a K/V cache of hundreds of terabytes
  if (plan.nan_step != step) return;
  plan.nan_step.reset();
  const TensorSpec& spec = model.table().specs()[0];
  std::vector<float> values(static_cast<std::size_t>(spec.elements));
  model.read_tensor(TensorRole::gradient, spec, values.data());
  values.back() = std::numeric_limits<float>::quiet_NaN();
  model.write_tensor(TensorRole::gradient, spec, values.data());
}

void inject_moment_fault(const FaultPlan& plan, std::int64_t step, TrainModel& model) {
  if (plan.inf_moment != step) return;
  const StateTensor last = state_tensors(model.optimizer(), model.table()).back();
  const TensorSpec& spec = model.table().specs()[last.spec];
  std::vector<float> values(static_cast<std::size_t>(spec.elements));
  model.read_tensor(last.role, spec, values.data());
  values.back() = std::numeric_limits<float>::infinity();
  model.write_tensor(last.role, spec, values.data());
}

bool log_record_allowed() {
  const std::lock_guard<std::mutex> lock(hook_mutex);
  return !armed.log_record || ++log_records != *armed.log_record;
}

}  // namespace weft
