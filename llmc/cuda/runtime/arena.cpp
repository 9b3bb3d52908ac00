#include "llmc/cuda/runtime/arena.h"

#include "llmc/base/log.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

namespace {

std::string bytes_text(std::uint64_t bytes) {
  return human_bytes(static_cast<double>(bytes));
}

// The driver maps memory in blocks of this size and puts several smaller allocations into one. Another process can open
// a block only once, so memory that ranks share must not have a block in common with other memory.
constexpr std::uint64_t kBlockBytes = 2 << 20;

}  // namespace

DeviceArena::DeviceArena(const MemoryPlan& plan) : bytes_(plan.bytes()) {
  if (bytes_ == 0) return;
  void* address = nullptr;
  const cudaError_t error = cudaMalloc(&address, (bytes_ + kBlockBytes - 1) / kBlockBytes * kBlockBytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // clears the error, which is reported below
    std::size_t free_bytes = 0, total_bytes = 0;
    check(cudaMemGetInfo(&free_bytes, &total_bytes), "asking for the free GPU memory");
    fail(Exit::resources, "%s: %s of GPU memory planned (%llu bytes), %s of %s are free", plan.name().c_str(),
         bytes_text(bytes_).c_str(), static_cast<unsigned long long>(bytes_), bytes_text(free_bytes).c_str(),
         bytes_text(total_bytes).c_str());
  }
  check(error, "allocating GPU memory");
  base_ = static_cast<std::byte*>(address);
}

DeviceArena::~DeviceArena() {
  if (base_ != nullptr) cudaFree(base_);
}

void DeviceArena::clear(cudaStream_t stream) {
  if (bytes_ > 0) check(cudaMemsetAsync(base_, 0, bytes_, stream), "clearing GPU memory");
}

PinnedBuffer::PinnedBuffer(std::uint64_t bytes) : bytes_(bytes) {
  if (bytes_ == 0) return;
  void* address = nullptr;
  const cudaError_t error = cudaMallocHost(&address, bytes_);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail(Exit::resources, "cannot allocate %s of page-locked host memory", bytes_text(bytes_).c_str());
  }
  check(error, "allocating page-locked host memory");
  base_ = static_cast<std::byte*>(address);
}

PinnedBuffer::~PinnedBuffer() {
  if (base_ != nullptr) cudaFreeHost(base_);
}

}  // namespace weft::cuda
