// Planning and allocating memory: a MemoryPlan gives every region its offset, an arena allocates the whole plan at
// once. --dry-run prints a plan without allocating it, so also one that is too large for this machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace weft {

// Every region starts on a multiple of this: enough for vector loads, cache lines and 256-byte DMA segments.
inline constexpr std::uint64_t kRegionAlignment = 256;

class MemoryPlan {
 public:
  explicit MemoryPlan(std::string name) : name_(std::move(name)) {}

  // Reserves `bytes` and returns their offset.
  std::uint64_t add(std::uint64_t bytes);
  const std::string& name() const { return name_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  std::string name_;
  std::uint64_t bytes_ = 0;
};

// One line of the memory table.
struct MemoryLine {
  std::string name;
  std::uint64_t bytes;
};
// Sum of the bytes of all lines.
std::uint64_t total_bytes(const std::vector<MemoryLine>& lines);

// "parameters 7.9 MB, gradients ..." as an aligned table with its total, one string a line.
std::vector<std::string> memory_table(const std::vector<MemoryLine>& lines);

// Upper bound of the memory that this process can get: the machine's physical memory, or the limit of one of its cgroups or
// of ulimit -v where that is lower.
std::uint64_t available_host_memory();

// The part of available_host_memory() that is unused now. File caches count as unused: the kernel gives them up.
std::uint64_t free_host_memory();

// The host memory of a plan, filled with zeros. Exit::resources with the plan's name and size if the system refuses it.
class HostArena {
 public:
  explicit HostArena(const MemoryPlan& plan);
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  template <typename T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  std::uint64_t bytes() const { return bytes_; }
  void clear();  // zero-fills

 private:
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
};

}  // namespace weft
