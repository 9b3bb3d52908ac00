// Device memory for tests: owned, checked, and easy to poison.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "llmc/cuda/runtime/error.h"

namespace weft::test {

template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t count) : count_(count) {
    void* memory = nullptr;
    cuda::check(cudaMalloc(&memory, bytes() > 0 ? bytes() : 1), "test: allocation");
    data_ = static_cast<T*>(memory);
    fill_bytes(0xff);  // every float type's NaN: what a kernel leaves unwritten shows
  }
  explicit DeviceBuffer(const std::vector<T>& values) : DeviceBuffer(values.size()) { upload(values); }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  DeviceBuffer(DeviceBuffer&& other) noexcept : data_(other.data_), count_(other.count_) {
    other.data_ = nullptr;
    other.count_ = 0;
  }

  T* data() const { return data_; }
  std::size_t size() const { return count_; }
  std::size_t bytes() const { return count_ * sizeof(T); }

  // `values` has size() elements. Waits until they are there: weft's own streams do not wait for the default one.
  void upload(const std::vector<T>& values) {
    ASSERT_EQ(values.size(), count_);
    cuda::check(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice), "test: upload");
    cuda::check(cudaStreamSynchronize(nullptr), "test: upload");
  }
  // Waits for the default stream's kernels and reports their errors.
  std::vector<T> download() const {
    std::vector<T> values(count_);
    cuda::check(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost), "test: download");
    return values;
  }
  void fill_bytes(int byte) {
    cuda::check(cudaMemset(data_, byte, bytes()), "test: fill");
    cuda::check(cudaStreamSynchronize(nullptr), "test: fill");  // as upload()
  }

 private:
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace weft::test
