#include "llmc/base/arena.h"

#include <omp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <optional>

#include "llmc/base/checked.h"
#include "llmc/base/log.h"

namespace weft {

std::uint64_t MemoryPlan::add(std::uint64_t bytes) {
  const std::uint64_t offset = align_up(bytes_, kRegionAlignment, name_);
  bytes_ = checked_add(offset, bytes, name_);
  return offset;
}

std::uint64_t total_bytes(const std::vector<MemoryLine>& lines) {
  std::uint64_t total = 0;
  for (const MemoryLine& line : lines) total += line.bytes;
  return total;
}

std::vector<std::string> memory_table(const std::vector<MemoryLine>& lines) {
  std::size_t width = 5;
  for (const MemoryLine& line : lines) width = std::max(width, line.name.size());
  const double total = static_cast<double>(total_bytes(lines));
  std::vector<std::string> table;
  for (const MemoryLine& line : lines) {
    table.push_back(format("  %-*s  %9s", static_cast<int>(width), line.name.c_str(),
                           human_bytes(static_cast<double>(line.bytes)).c_str()));
  }
  table.push_back(format("  %-*s  %9s", static_cast<int>(width), "total", human_bytes(total).c_str()));
  return table;
}

std::uint64_t available_host_memory() {
  std::uint64_t available =
      static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::uint64_t limit = 0;
  std::ifstream cgroup("/sys/fs/cgroup/memory.max");  // "max" leaves the extraction failed and the limit unused
  if (cgroup >> limit) available = std::min(available, limit);
  rlimit address_space{};
  if (::getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
    available = std::min(available, static_cast<std::uint64_t>(address_space.rlim_cur));
  }
  return available;
}

namespace {

constexpr std::uint64_t kBlasBuffer = 128 << 20;  // of address space, the largest of OpenBLAS 0.3

// The number that follows `key` in a file of lines "key number"; 0 if there is none.
std::uint64_t number_after(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  std::uint64_t number = 0;
  while (file >> word) {
    if (word == key && file >> number) return number;
  }
  return 0;
}

// What ulimit -v leaves to this process; empty: no limit.
std::optional<std::uint64_t> free_address_space() {
  rlimit limit{};
  std::uint64_t pages = 0;
  std::ifstream statm("/proc/self/statm");
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || !(statm >> pages)) return std::nullopt;
  const std::uint64_t mapped = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto allowed = static_cast<std::uint64_t>(limit.rlim_cur);
  return allowed > mapped ? allowed - mapped : 0;
}

}  // namespace

std::uint64_t free_host_memory() {
  const std::uint64_t total = available_host_memory();
  std::uint64_t used = 0;
  // A control group counts for itself; beside it stands what the machine has left.
  std::uint64_t limit = 0;
  std::ifstream cgroup("/sys/fs/cgroup/memory.max");
  if (cgroup >> limit) used = number_after("/sys/fs/cgroup/memory.stat", "anon");
  std::uint64_t free = total > used ? total - used : 0;
  if (const std::uint64_t kilobytes = number_after("/proc/meminfo", "MemAvailable:"); kilobytes > 0) {
    free = std::min(free, kilobytes * 1024);
  }
  return std::min(free, free_address_space().value_or(free));
}

HostArena::HostArena(const MemoryPlan& plan) : bytes_(plan.bytes()) {
  if (bytes_ == 0) return;
  // OpenBLAS maps a buffer for each thread at its first product and, where it cannot, tries again for ever.
  const std::uint64_t for_blas = kBlasBuffer * static_cast<std::uint64_t>(omp_get_max_threads() + 1);
  if (const auto left = free_address_space(); left && *left < checked_add(bytes_, for_blas, plan.name())) {
    fail(Exit::resources, "%s: cannot allocate %s of host memory: ulimit -v leaves %s, and the math library needs %s",
         plan.name().c_str(), human_bytes(static_cast<double>(bytes_)).c_str(),
         human_bytes(static_cast<double>(*left)).c_str(), human_bytes(static_cast<double>(for_blas)).c_str());
  }
  // mmap gives zero pages and, unlike calloc, never comes from a recycled heap block.
  void* address = MAP_FAILED;
  if (bytes_ <= available_host_memory()) {
    address = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  if (address == MAP_FAILED) {
    fail(Exit::resources, "%s: cannot allocate %s of host memory (%s available)", plan.name().c_str(),
         human_bytes(static_cast<double>(bytes_)).c_str(),
         human_bytes(static_cast<double>(available_host_memory())).c_str());
  }
  base_ = static_cast<std::byte*>(address);
}

HostArena::~HostArena() {
  if (base_ != nullptr) ::munmap(base_, bytes_);
}

void HostArena::clear() {
  if (bytes_ > 0) std::memset(base_, 0, bytes_);
}

}  // namespace weft
