// Chooses where a program computes, on the GPU or the CPU, and says why. llmc/app is the only part of weft that knows
// both devices; it is compiled with WEFT_CUDA if the build has nvcc.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace weft {

// What a program asks for. All fields except `device` are for tests (--debug-inject) and for plans (--dry-run).
struct DeviceRequest {
  std::string device = "auto";  // of --device: auto, cuda or cpu
  bool plan_only = false;       // nothing will be computed: --device cuda is accepted without a GPU
  int pretended_arch = 0;       // the probe behaves as if the GPU were of this architecture; 0: as it is
  std::optional<std::uint64_t> pretended_free_bytes = std::nullopt;
  std::string planned_gpu = {};         // plan for a GPU of this name, not for this machine's; empty: no such plan
  std::uint64_t planned_gpu_bytes = 0;  // its free memory
};

struct DeviceChoice {
  bool gpu = false;
  std::string name = "CPU";           // or the GPU's
  std::uint64_t available_bytes = 0;  // memory that a plan may use; 0: unknown
  std::string id;                     // of the GPU on its machine; empty: none, or a planned one
  std::string cpu_reason;             // with --device auto: why the GPU is not used; otherwise empty
};

// The GPU if it is asked for, or with `auto` if there is one that can be used; otherwise the CPU. --device cuda without
// a usable GPU fails with the exit code of the problem.
DeviceChoice choose_device(const DeviceRequest& request);
// The CPU, if it turns out later that the GPU cannot be used.
DeviceChoice choose_cpu(const std::string& reason);

// Logs why --device auto took the CPU; nothing if the user asked for the CPU or a GPU computes.
void announce_cpu(const DeviceChoice& choice);

// Makes the GPU of rank `local_rank` of this machine the only one that this process sees, before CUDA is used for the
// first time: a rank needs one GPU, and so none of its threads can touch another one's. A process that sees one GPU
// keeps it: its launcher has chosen. Exit::environment if there are fewer GPUs than ranks.
void see_own_gpu(int local_rank);
// Exit::environment if this machine, or this program, cannot give `count` ranks a GPU each. Uses none of them.
void require_gpus(std::int64_t count);

// Exit::resources for a plan that does not fit: the message has the bytes needed, those available, and the advice.
[[noreturn]] void fail_plan(std::uint64_t needed, const DeviceChoice& device, const std::string& advice);

}  // namespace weft
