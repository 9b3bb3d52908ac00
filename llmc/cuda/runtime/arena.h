// Device memory: one cudaMalloc for each MemoryPlan, before the main loop; and page-locked host memory for asynchronous
// copies.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "llmc/base/arena.h"

namespace weft::cuda {

// The device memory of a plan, uninitialised. Exit::resources with the plan's name and the planned, free and total
// bytes if the GPU has too little.
class DeviceArena {
 public:
  explicit DeviceArena(const MemoryPlan& plan);
  ~DeviceArena();
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  template <typename T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  std::uint64_t bytes() const { return bytes_; }
  void clear(cudaStream_t stream);  // zero-fills, in the order of the stream

 private:
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// Page-locked host memory, uninitialised: copies to and from it run asynchronously. Exit::resources if the system
// refuses.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(std::uint64_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  template <typename T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  std::uint64_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
};

}  // namespace weft::cuda
