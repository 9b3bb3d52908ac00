// gpu_tests: GoogleTest with one question of its own, --gpu-present, which exits 0 where a usable GPU is found.
#include <gtest/gtest.h>

#include <cstring>
#include <iostream>

#include "llmc/cuda/runtime/device.h"

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--gpu-present") == 0) {
    const weft::cuda::Device device = weft::cuda::probe_device();
    std::cout << (device.usable ? device.name : device.problem) << "\n";
    return device.usable ? 0 : 1;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
