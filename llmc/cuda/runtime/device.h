// Which GPU there is, and whether weft can use it.
#pragma once

#include <cstdint>
#include <string>

#include "llmc/base/error.h"

namespace weft::cuda {

struct Device {
  bool usable = false;
  // Where it is not usable: why, in one line, and what --device cuda ends with.
  std::string problem;
  Exit code = Exit::ok;
  std::string name;
  std::string id;  // its place on the bus, "0000:1b:00.0": of GPUs of one machine no two have the same
  int arch = 0;    // 90 for compute capability 9.0
  int multiprocessors = 0;
  int shared_bytes = 0;  // that a block can ask for
  std::uint64_t total_bytes = 0, free_bytes = 0;
  int driver = 0, runtime = 0;  // CUDA versions; 13000 is 13.0
};

// How many GPUs CUDA_VISIBLE_DEVICES leaves; 0 where there is no driver.
int visible_gpus();

// Examines GPU `index` of those, and makes it the current one of this thread. Never throws: what is wrong is in `problem`, and `code` is
// Exit::resources where the GPU's memory is full, otherwise Exit::environment. Needs sm_80 (bf16 tensor cores and
// asynchronous copies) or later, and code for that architecture in this program.
// injected_arch: a test's replacement for the architecture that the GPU reports (--debug-inject arch@gpu=N); 0: none.
Device probe_device(int injected_arch = 0, int index = 0);

}  // namespace weft::cuda
