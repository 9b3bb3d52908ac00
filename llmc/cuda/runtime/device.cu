#include "llmc/cuda/runtime/device.h"

#include <cuda_runtime_api.h>

#include <string>

#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

namespace {

constexpr int kOldestArch = 80;

// Never launched: querying its attributes tells whether this program contains code for the GPU.
__global__ void marker_kernel() {}

void inspect(Device& device, int injected_arch, int index) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "GPU");
  if (count == 0) check(cudaErrorNoDevice, "GPU");
  const std::string gpu = "GPU " + std::to_string(index);
  if (index >= count) fail(Exit::environment, "%s: this machine has %d (CUDA_VISIBLE_DEVICES)", gpu.c_str(), count);
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), gpu.c_str());
  device.name = properties.name;
  device.id = format("%04x:%02x:%02x.0", properties.pciDomainID, properties.pciBusID, properties.pciDeviceID);
  device.arch = injected_arch != 0 ? injected_arch : 10 * properties.major + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  device.shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
  if (device.arch < kOldestArch) {
    fail(Exit::environment, "%s (%s) is sm_%d, weft needs sm_%d or later", gpu.c_str(), device.name.c_str(),
         device.arch, kOldestArch);
  }
  check(cudaSetDevice(index), gpu.c_str());
  std::size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), gpu.c_str());
  device.free_bytes = free_bytes;
  device.total_bytes = total_bytes;
  cudaFuncAttributes attributes{};
  const cudaError_t found = cudaFuncGetAttributes(&attributes, marker_kernel);
  check(found == cudaErrorInvalidDeviceFunction ? cudaErrorNoKernelImageForDevice : found, gpu.c_str());
}

}  // namespace

int visible_gpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // no working driver: probe_device() reports it
  return 0;
}

Device probe_device(int injected_arch, int index) {
  Device device;
  cudaDriverGetVersion(&device.driver);
  cudaRuntimeGetVersion(&device.runtime);
  try {
    inspect(device, injected_arch, index);
    device.usable = true;
  } catch (const Error& error) {
    device.problem = error.what();
    device.code = error.code();
  }
  return device;
}

LaunchDevice launch_device() {
  return {.multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount),
          .overlapping = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9};
}

}  // namespace weft::cuda
