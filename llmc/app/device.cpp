#include "llmc/app/device.h"

#include <cstdlib>
#include <sstream>
#include <vector>

#include "llmc/base/arena.h"
#include "llmc/base/error.h"
#include "llmc/base/log.h"
#ifdef WEFT_CUDA
#include "llmc/cuda/runtime/device.h"
#endif

namespace weft {

DeviceChoice choose_cpu(const std::string& reason) {
  DeviceChoice choice;
  choice.available_bytes = available_host_memory();
  choice.cpu_reason = reason;
  return choice;
}

DeviceChoice choose_device(const DeviceRequest& request) {
  if (request.device == "cpu") return choose_cpu("");
#ifdef WEFT_CUDA
  if (!request.planned_gpu.empty()) return {true, request.planned_gpu, request.planned_gpu_bytes, "", ""};
  const cuda::Device gpu = cuda::probe_device(request.pretended_arch);
  if (gpu.usable) return {true, gpu.name, request.pretended_free_bytes.value_or(gpu.free_bytes), gpu.id, ""};
  if (request.device == "cuda" && request.plan_only) return {true, "a GPU that is not here", 0, "", ""};
  const std::string problem = gpu.problem;
  const Exit code = gpu.code;
#else
  if (!request.planned_gpu.empty()) {
    fail(Exit::environment,
         "--gpu-memory: this program was built without nvcc, and what the kernels of a GPU need is in code that nvcc "
         "compiles. With the CUDA toolkit installed, make GPU_ARCH=90a builds it; a GPU is not needed");
  }
  const std::string problem = "this program was built without nvcc";
  const Exit code = Exit::environment;
#endif
  if (request.device == "cuda") fail(code, "--device cuda: %s. --device cpu needs no GPU", problem.c_str());
  return choose_cpu(problem);
}

void announce_cpu(const DeviceChoice& choice) {
  static std::string announced;  // two models on one device are one piece of news
  if (choice.gpu || choice.cpu_reason.empty() || choice.cpu_reason == announced) return;
  announced = choice.cpu_reason;
  log_info("running on the CPU: %s", announced.c_str());
}

void see_own_gpu(int local_rank) {
  constexpr const char* kVisible = "CUDA_VISIBLE_DEVICES";
  const char* const visible = std::getenv(kVisible);
  if (visible == nullptr) {
    ::setenv(kVisible, std::to_string(local_rank).c_str(), 1);
    return;
  }
  std::vector<std::string> gpus;
  std::istringstream list(visible);
  for (std::string gpu; std::getline(list, gpu, ',');) gpus.push_back(gpu);
  if (gpus.size() <= 1) return;
  if (static_cast<std::size_t>(local_rank) >= gpus.size()) {
    fail(Exit::environment, "%s: got %s, expected a GPU for each rank of this machine: this is its rank %d, from 0",
         kVisible, escaped(visible).c_str(), local_rank);
  }
  ::setenv(kVisible, gpus[static_cast<std::size_t>(local_rank)].c_str(), 1);
}

void require_gpus(std::int64_t count) {
#ifdef WEFT_CUDA
  const int visible = cuda::visible_gpus();
  if (visible == 0)
    fail(Exit::environment, "--gpus: got %lld, but no GPU can be used here: %s", static_cast<long long>(count),
         cuda::probe_device().problem.c_str());
  if (visible < count) {
    fail(Exit::environment,
         "--gpus: got %lld, but this program sees %d on this machine. Give at most --gpus %d, or see "
         "CUDA_VISIBLE_DEVICES",
         static_cast<long long>(count), visible, visible);
  }
#else
  fail(Exit::environment, "--gpus: got %lld, but this program was built without nvcc and has no GPU code",
       static_cast<long long>(count));
#endif
}

void fail_plan(std::uint64_t needed, const DeviceChoice& device, const std::string& advice) {
  fail(Exit::resources, "the plan needs %s of memory, %s has %s %s. %s",
       human_bytes(static_cast<double>(needed)).c_str(), device.name.c_str(),
       human_bytes(static_cast<double>(device.available_bytes)).c_str(), device.gpu ? "free" : "available",
       advice.c_str());
}

}  // namespace weft
