#include "llmc/app/device.h"

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
  if (!request.planned_gpu.empty()) return {true, request.planned_gpu, request.planned_gpu_bytes, ""};
  const cuda::Device gpu = cuda::probe_device(request.pretended_arch);
  if (gpu.usable) return {true, gpu.name, request.pretended_free_bytes.value_or(gpu.free_bytes), ""};
  if (request.device == "cuda" && request.plan_only) return {true, "a GPU that is not here", 0, ""};
  const std::string problem = gpu.problem;
  const Exit code = gpu.code;
#else
  if (!request.planned_gpu.empty()) {
    fail(Exit::environment,
         "--gpu-memory: this program was built without nvcc, and what the kernels of a GPU need is in code that nvcc "
         "compiles. With the CUDA toolkit installed, make builds it; a GPU is not needed");
  }
  const std::string problem = "this program was built without nvcc and has no GPU code";
  const Exit code = Exit::environment;
#endif
  if (request.device == "cuda") fail(code, "--device cuda: %s. --device cpu needs no GPU", problem.c_str());
  return choose_cpu(problem);
}

void announce_cpu(const DeviceChoice& choice) {
  if (!choice.gpu && !choice.cpu_reason.empty()) log_info("running on the CPU: %s", choice.cpu_reason.c_str());
}

void fail_plan(std::uint64_t needed, const DeviceChoice& device, const std::string& advice) {
  fail(Exit::resources, "the plan needs %s of memory, %s has %s %s. %s",
       human_bytes(static_cast<double>(needed)).c_str(), device.name.c_str(),
       human_bytes(static_cast<double>(device.available_bytes)).c_str(), device.gpu ? "free" : "available",
       advice.c_str());
}

}  // namespace weft
