// The probe and the error map on a machine with a GPU.
#include <gtest/gtest.h>

#include "llmc/cuda/runtime/device.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {
namespace {

TEST(Device, ProbeDescribesTheGpu) {
  const Device device = probe_device();
  EXPECT_TRUE(device.usable) << device.problem;
  EXPECT_GE(device.arch, 80);
  EXPECT_GT(device.multiprocessors, 0);
  EXPECT_GT(device.total_bytes, device.free_bytes / 2);
  EXPECT_GE(device.driver, device.runtime / 1000 * 1000);
}

TEST(Device, AnOldGpuIsRefusedWithBothArchitectures) {
  const Device device = probe_device(75);
  EXPECT_FALSE(device.usable);
  EXPECT_EQ(device.code, Exit::environment);
  for (const char* words : {"sm_75", "needs sm_80"}) {
    EXPECT_NE(device.problem.find(words), std::string::npos) << device.problem;
  }
}

TEST(Error, EachCudaErrorHasItsExitCodeAndAdvice) {
  const auto describe = [](cudaError_t error, int driver) {
    return describe_error(error, "step 7", driver, 13000, 90);
  };
  EXPECT_EQ(describe(cudaErrorMemoryAllocation, 13000).code(), Exit::resources);
  EXPECT_EQ(describe(cudaErrorIllegalAddress, 13000).code(), Exit::environment);
  EXPECT_EQ(describe(cudaErrorECCUncorrectable, 13000).code(), Exit::environment);
  const auto says = [&](cudaError_t error, int driver, const std::string& words) {
    const Error described = describe(error, driver);
    EXPECT_EQ(described.code(), Exit::environment);
    EXPECT_NE(std::string(described.what()).find(words), std::string::npos) << described.what();
  };
  says(cudaErrorInsufficientDriver, 0, "no NVIDIA driver found");
  says(cudaErrorInsufficientDriver, 12020, "supports CUDA 12.2, this program was built with CUDA 13.0");
  says(cudaErrorNoKernelImageForDevice, 13000, "Rebuild with GPU_ARCH=90a");
  says(cudaErrorUnsupportedPtxVersion, 13000, "newer than the driver");
  says(cudaErrorNoDevice, 13000, "CUDA_VISIBLE_DEVICES");
}

TEST(Error, CheckThrowsAndClearsTheError) {
  EXPECT_NO_THROW(check(cudaSuccess, "nothing"));
  EXPECT_THROW(check(cudaErrorInvalidValue, "bad call"), weft::Error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace weft::cuda
