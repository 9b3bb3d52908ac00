// Which GPU is present, and whether weft can use it.
#pragma once

#include <cstdint>
#include <string>

#include "llmc/base/error.h"

namespace weft::cuda {

struct Device {
  bool usable = false;
  // If not usable: the reason in one line, and the exit code for --device cuda.
  std::string problem;
  Exit code = Exit::ok;
  std::string name;
  std::string id;  // PCI bus address, as "0000:1b:00.0"; unique within a machine
  int arch = 0;    // 90 for compute capability 9.0
  int multiprocessors = 0;
  int shared_bytes = 0;  // the most that a block can request
  std::uint64_t total_bytes = 0, free_bytes = 0;
  int driver = 0, runtime = 0;  // CUDA versions; 13000 is 13.0
};

// Number of GPUs that CUDA_VISIBLE_DEVICES allows; 0 without a driver.
int visible_gpus();

// Examines GPU `index` of these and makes it current in this thread. Never throws: `problem` says what is wrong, and
// `code` is Exit::resources if the GPU's memory is full, otherwise Exit::environment. Requires sm_80 (bf16 tensor cores
// and asynchronous copies) or later, and code for that architecture in this program. injected_arch, for tests: replaces
// the architecture that the GPU reports (--debug-inject arch@gpu=N); 0: none.
Device probe_device(int injected_arch = 0, int index = 0);

// What launches need to know about the current GPU.
struct LaunchDevice {
  int multiprocessors = 0;
  bool overlapping = false;  // programmatic dependent launch: sm_90 and later
};
LaunchDevice launch_device();

}  // namespace weft::cuda
