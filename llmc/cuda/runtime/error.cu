#include "llmc/cuda/runtime/error.h"

#include <cstdint>

namespace weft::cuda {

namespace {

std::string version_text(int version) {
  return format("%d.%d", version / 1000, version % 1000 / 10);
}

// The Makefile's name for the architecture: 90a, which enables Hopper's own instructions, for 90.
std::string build_architecture(int arch) {
  return arch == 90 ? "90a" : format("%d", arch);
}

}  // namespace

Error describe_error(cudaError_t error, const std::string& action, int driver, int runtime, int arch) {
  const std::string what = action + ": " + cudaGetErrorString(error);
  switch (error) {
    case cudaErrorMemoryAllocation:
      return Error(Exit::resources, what + ". Lower --micro-batch or --seq-len, or free the GPU");
    case cudaErrorInsufficientDriver:
      if (driver == 0) return Error(Exit::environment, action + ": no NVIDIA driver found");
      return Error(Exit::environment,
                   format("%s: the driver supports CUDA %s, this program was built with CUDA %s. Update the driver, or "
                          "build with an older toolkit",
                          action.c_str(), version_text(driver).c_str(), version_text(runtime).c_str()));
    case cudaErrorNoDevice:
      return Error(Exit::environment, action + ": the driver sees no GPU. Check CUDA_VISIBLE_DEVICES");
    case cudaErrorInvalidDevice:
      return Error(Exit::environment, what + ". Check CUDA_VISIBLE_DEVICES");
    case cudaErrorNoKernelImageForDevice:
      return Error(Exit::environment, format("%s: this program holds no code for a GPU of architecture sm_%d. Rebuild "
                                             "with GPU_ARCH=%s",
                                             action.c_str(), arch, build_architecture(arch).c_str()));
    case cudaErrorUnsupportedPtxVersion:
      return Error(
          Exit::environment,
          format("%s: the program's PTX is newer than the driver (CUDA %s). Update the driver, or rebuild with "
                 "GPU_ARCH=%s",
                 action.c_str(), version_text(driver).c_str(), build_architecture(arch).c_str()));
    case cudaErrorDevicesUnavailable:
      return Error(Exit::environment, what + ". Another process may hold the GPU in exclusive mode");
    case cudaErrorECCUncorrectable:
      return Error(Exit::environment,
                   what + ". The GPU's memory is damaged: drain this GPU. The last checkpoint stands");
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
      return Error(Exit::environment,
                   what +
                       ". A kernel failed: failing hardware or a bug; the last checkpoint stands, and the same command "
                       "goes on from there");
    default:
      return Error(Exit::environment, what);
  }
}

void check(cudaError_t error, const char* action) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears an error that is not sticky
  int driver = 0, runtime = 0, device = 0, major = 0, minor = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver > 0 && cudaGetDevice(&device) == cudaSuccess) {
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  throw describe_error(error, action, driver, runtime, 10 * major + minor);
}

namespace {

__global__ void faulty_kernel(int* nowhere) {
  *nowhere = 1;
}

}  // namespace

void launch_faulty_kernel(cudaStream_t stream) {
  faulty_kernel<<<1, 1, 0, stream>>>(reinterpret_cast<int*>(std::uintptr_t{8}));
  check_launch("faulty kernel");
}

void check_launch(const char* kernel) {
  check(cudaGetLastError(), kernel);
}

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "GPU");
  check(cudaDeviceGetAttribute(&value, attribute, device), "GPU");
  return value;
}

int hopper_multiprocessors() {
  const bool hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
                      device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
  return hopper ? device_attribute(cudaDevAttrMultiProcessorCount) : 0;
}

}  // namespace weft::cuda
