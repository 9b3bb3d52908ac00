// The main() of a benchmark on the GPU.
#pragma once

#include <functional>

#include "llmc/base/options.h"
#include "llmc/cuda/runtime/device.h"

namespace weft {

// Runs `body` as run_program() does. Where no GPU can be used: one line that says so and why, and Exit::environment.
inline int gpu_main(const std::function<void()>& body) {
  return run_program([&] {
    const cuda::Device device = cuda::probe_device();
    if (!device.usable) fail(device.code, "this benchmark runs on a GPU: %s", device.problem.c_str());
    body();
    return Exit::ok;
  });
}

}  // namespace weft
