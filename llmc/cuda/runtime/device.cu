#include "llmc/cuda/runtime/device.h"

#include <cuda_runtime_api.h>

#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

namespace {

constexpr int kOldestArch = 80;

// Never launched: asking for its attributes tells whether this program holds code for the GPU.
__global__ void marker_kernel() {}

void inspect(Device& device, int injected_arch) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "GPU");
  if (count == 0) check(cudaErrorNoDevice, "GPU");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "GPU 0");
  device.name = properties.name;
  device.arch = injected_arch != 0 ? injected_arch : 10 * properties.major + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  device.shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
  if (device.arch < kOldestArch) {
    fail(Exit::environment, "GPU 0 (%s) is sm_%d, weft needs sm_%d or later", device.name.c_str(), device.arch,
         kOldestArch);
  }
  check(cudaSetDevice(0), "GPU 0");
  std::size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "GPU 0");
  device.free_bytes = free_bytes;
  device.total_bytes = total_bytes;
  cudaFuncAttributes attributes{};
  const cudaError_t found = cudaFuncGetAttributes(&attributes, marker_kernel);
  check(found == cudaErrorInvalidDeviceFunction ? cudaErrorNoKernelImageForDevice : found, "GPU 0");
}

}  // namespace

Device probe_device(int injected_arch) {
  Device device;
  cudaDriverGetVersion(&device.driver);
  cudaRuntimeGetVersion(&device.runtime);
  try {
    inspect(device, injected_arch);
    device.usable = true;
  } catch (const Error& error) {
    device.problem = error.what();
    device.code = error.code();
  }
  return device;
}

}  // namespace weft::cuda
