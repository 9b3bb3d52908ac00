// Where a program computes: the GPU or the CPU, and why. llmc/app is the only part of weft that knows both devices; it is
// compiled with WEFT_CUDA where the build has nvcc.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace weft {

// What a program asks for. Everything but `device` is for tests (--debug-inject) and for plans.
struct DeviceRequest {
  std::string device = "auto";  // of --device: auto, cuda or cpu
  bool plan_only = false;       // --device cuda may be named without being there: nothing will be computed
  int pretended_arch = 0;       // the probe behaves as if the GPU were of this architecture; 0: as it is
  std::optional<std::uint64_t> pretended_free_bytes = std::nullopt;
  std::string planned_gpu = {};  // a plan for a GPU of that name with so many bytes, whatever is here; empty: none
  std::uint64_t planned_gpu_bytes = 0;
};

struct DeviceChoice {
  bool gpu = false;
  std::string name = "CPU";           // or the GPU's
  std::uint64_t available_bytes = 0;  // of its memory; 0: unknown
  std::string cpu_reason;             // with --device auto: why it is not the GPU
};

// The GPU where it was asked for or, with `auto`, where there is one that can be used. `--device cuda` without one fails
// with the code of the problem.
DeviceChoice choose_device(const DeviceRequest& request);
// The CPU, for a reason that was found later.
DeviceChoice choose_cpu(const std::string& reason);

// The line that says why --device auto took the CPU; nothing where the user asked for it.
void announce_cpu(const DeviceChoice& choice);

// Exit::resources with what is needed, what there is, and the advice.
[[noreturn]] void fail_plan(std::uint64_t needed, const DeviceChoice& device, const std::string& advice);

}  // namespace weft
