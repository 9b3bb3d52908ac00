// Regions of one arena and the pointers that get their addresses: a plan is made without a GPU, bound when there is memory.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "llmc/cuda/runtime/arena.h"

namespace weft::cuda {

class Regions {
 public:
  explicit Regions(const std::string& name) : plan_(name) {}
  template <typename T>
  void want(T** pointer, std::int64_t elements) {
    wanted_.emplace_back(reinterpret_cast<void**>(pointer),
                         plan_.add(static_cast<std::uint64_t>(elements) * sizeof(T)));
  }
  const MemoryPlan& plan() const { return plan_; }
  void bind(const DeviceArena& arena) const {
    for (const auto& [pointer, offset] : wanted_) *pointer = arena.at<std::byte>(offset);
  }

 private:
  MemoryPlan plan_;
  std::vector<std::pair<void**, std::uint64_t>> wanted_;
};

}  // namespace weft::cuda
