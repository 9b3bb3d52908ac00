// CPU threads: how many a program computes with, and how its idle ones wait.
//
// weft's loops and OpenBLAS run on the threads of OpenMP (libgomp). An idle thread of libgomp spins for some milliseconds
// before it sleeps. That is fastest where every thread has a core of its own, and a collapse where it has not: a thread
// that spins holds the core that the thread it waits for needs. So the time of spinning follows the load of the cores
// (doc/threads.md), and what the environment says about waiting does not count.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

inline constexpr std::int64_t kMaxThreads = 1024;  // of --threads
inline constexpr const char* kThreadsHelp = "CPU threads; 0: as many as cores are available, at most OMP_NUM_THREADS";

// ---- how many ----

struct ThreadLimits {
  std::int64_t cores = 1;       // that this process may run on (taskset, cpusets)
  std::optional<double> quota;  // cores' worth of time that its control groups allow
  std::string omp_num_threads;  // the variable; empty: not set
};
ThreadLimits thread_limits();
// `option` (of --threads) where it is not 0. Otherwise the cores, as far as the quota goes, and no more than
// OMP_NUM_THREADS where that is a number. At least 1.
std::int64_t choose_threads(std::int64_t option, const ThreadLimits& limits);

// Cores' worth of time that the control groups of a process allow: the smallest on the way to the root. `membership`: the
// text of /proc/self/cgroup; `root`: where the hierarchies (version 2, or version 1 with a directory for each controller)
// are mounted. Empty: no limit.
std::optional<double> cpu_quota(std::string_view membership, const std::string& root);

// First thing in main(): libgomp reads the environment when the program is loaded. If a variable there changes how threads
// wait, this starts the program again without it, under the same process id; it does so once. Where that is impossible it
// returns.
void clean_thread_environment(char** argv);

// From here on OpenMP uses choose_threads() threads; returns how many. Few threads on a machine of many cores: the program
// is started again as by clean_thread_environment(), with short spinning, so nothing may have been read or written yet.
std::int64_t set_threads(std::int64_t option);

// ---- how they wait ----

// While one lives, OpenMP's idle threads sleep almost at once: libgomp spins 3,000 times less while it has more threads than
// cores (its manual: GOMP_SPINCOUNT), and this object keeps some that only sleep.
class ShortWaits {
 public:
  ShortWaits();
  ~ShortWaits();
  ShortWaits(const ShortWaits&) = delete;
  ShortWaits& operator=(const ShortWaits&) = delete;

 private:
  struct Sleepers;
  std::unique_ptr<Sleepers> sleepers_;
};

// Keeps a ShortWaits while other processes use more than an eighth of this process's cores, and none while they do not.
class SharedCores {
 public:
  SharedCores();
  ~SharedCores();
  SharedCores(const SharedCores&) = delete;
  SharedCores& operator=(const SharedCores&) = delete;

 private:
  struct Watcher;
  std::unique_ptr<Watcher> watcher_;
};

// Clock ticks that CPUs have worked, steal included, from the text of /proc/stat. ours[i]: whether CPU i counts.
std::uint64_t busy_ticks(std::string_view stat, const std::vector<bool>& ours);

}  // namespace weft
