// Memory is planned, then allocated once: a plan is a list of named regions, and an arena is one allocation
// that holds them. The same plan is printed by --dry-run on a machine that could never hold it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace weft {

// Regions start on multiples of this: a cache line, a 256-byte DMA segment, the alignment of vector loads.
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
// Sum over the lines.
std::uint64_t total_bytes(const std::vector<MemoryLine>& lines);

// "parameters 7.9 MB, gradients ..." as an aligned table with its total, one string a line.
std::vector<std::string> memory_table(const std::vector<MemoryLine>& lines);

// Bytes of physical memory that the process can expect to get, respecting a cgroup or ulimit below the
// machine's size.
std::uint64_t available_host_memory();

// Of it, what nobody uses now; file caches count as free.
std::uint64_t free_host_memory();

// Zero-filled host memory of a plan. Exit::resources with the plan's name and size where the system refuses.
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
