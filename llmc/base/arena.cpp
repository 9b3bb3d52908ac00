#include "llmc/base/arena.h"

#include <omp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <optional>

#include "llmc/base/cgroup.h"
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
  available = std::min(available, cgroup_memory(cgroup_membership(), kCgroupRoot).limit);
  rlimit address_space{};
  if (::getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
    available = std::min(available, static_cast<std::uint64_t>(address_space.rlim_cur));
  }
  return available;
}

namespace {

// Address space of OpenBLAS 0.3's work buffer for one thread, in its largest configuration.
constexpr std::uint64_t kBlasBufferBytes = 128 << 20;

// The number that follows the word `key` in a text file; 0 if there is none.
std::uint64_t number_after(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  std::uint64_t number = 0;
  while (file >> word) {
    if (word == key && file >> number) return number;
  }
  return 0;
}

// Address space that ulimit -v still allows this process; empty without a limit.
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
  std::uint64_t free = std::min(available_host_memory(), cgroup_memory(cgroup_membership(), kCgroupRoot).free);
  if (const std::uint64_t kilobytes = number_after("/proc/meminfo", "MemAvailable:"); kilobytes > 0) {
    free = std::min(free, kilobytes * 1024);
  }
  return std::min(free, free_address_space().value_or(free));
}

HostArena::HostArena(const MemoryPlan& plan) : bytes_(plan.bytes()) {
  if (bytes_ == 0) return;
  // OpenBLAS maps a buffer for each thread at the first GEMM. If it cannot, it retries for ever and the program hangs,
  // so the address space for these buffers is checked here.
  const std::uint64_t for_blas = kBlasBufferBytes * static_cast<std::uint64_t>(omp_get_max_threads() + 1);
  if (const auto left = free_address_space(); left && *left < checked_add(bytes_, for_blas, plan.name())) {
    fail(Exit::resources, "%s: cannot allocate %s of host memory: ulimit -v leaves %s, and the math library needs %s",
         plan.name().c_str(), human_bytes(static_cast<double>(bytes_)).c_str(),
         human_bytes(static_cast<double>(*left)).c_str(), human_bytes(static_cast<double>(for_blas)).c_str());
  }
  // mmap, not calloc: its pages are zero without being written, and never part of a reused heap block.
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
