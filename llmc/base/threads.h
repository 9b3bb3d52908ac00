// CPU threads: how many a program computes with, and how its idle ones wait.
//
// weft's loops and OpenBLAS run on the threads of OpenMP (libgomp). An idle thread of libgomp spins for some
// milliseconds before it sleeps. That is fastest if every thread has a core of its own. If not, it is extremely slow,
// because a spinning thread occupies the core that the thread it waits for needs. So weft sets the spin time by the
// load of the cores (doc/threads.md) and ignores environment variables about waiting.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

inline constexpr std::int64_t kMaxThreads = 1024;  // upper bound of --threads
inline constexpr const char* kThreadsHelp = "CPU threads; 0: as many as cores are available, at most OMP_NUM_THREADS";

// ---- how many ----

struct ThreadLimits {
  std::int64_t cores = 1;       // that this process may run on (taskset, cpusets)
  std::optional<double> quota;  // CPU time that its cgroups allow, in cores; empty: no limit
  std::string omp_num_threads;  // the variable; empty: not set
};
ThreadLimits thread_limits();
// `option` (of --threads) if it is not 0. Otherwise the number of cores, but at most the quota and, if it is a number,
// OMP_NUM_THREADS. At least 1.
std::int64_t choose_threads(std::int64_t option, const ThreadLimits& limits);

// CPU time that the cgroups of a process allow, in cores: the smallest limit on the way to the root; empty: no limit.
// Arguments as for cgroup_directories().
std::optional<double> cpu_quota(std::string_view membership, const std::string& root);

// Removes environment variables that change how OpenMP's threads work. libgomp has read them when the program was
// loaded, so if there is one, this starts the program again without it (execv, once). Must be the first call in main().
// Returns if there is nothing to remove or the program cannot be started again.
void clean_thread_environment(char** argv);

// Makes OpenMP use choose_threads() threads; returns how many. With few threads on a machine of many cores it starts
// the program again, as clean_thread_environment() does, with a short spin time. So the program must not have read or
// written anything before.
std::int64_t set_threads(std::int64_t option);

// Chooses between all threads and one for a short step that is computed again and again, such as a token. In every parallel
// region the threads wait for the slowest one. A small model has more to lose by that than its work can gain, and on
// busy cores much more. So this measures both from time to time and keeps to the faster one.
class StepThreads {
 public:
  // Calls step() once, with all threads of the calling thread's OpenMP team or with one. Only with all if --threads has
  // fixed their number.
  void run(const std::function<void()>& step);

  // What run() decides by. Whether the next step takes one thread:
  bool one_thread() const { return one_ != probing_; }
  void took(double seconds, int threads);  // duration of that step; `threads`: how many all are

 private:
  void begin(bool probing);

  bool one_ = false;            // the choice
  bool probing_ = false;        // the next steps try the other one
  std::int64_t steps_ = 0;      // since the choice or the probe began
  double spent_ = 0;            // seconds of these steps
  double step_seconds_ = 0;     // mean of the choice, before the probe
  double probe_after_ = 0.015;  // seconds that the choice stays before the other one is tried
};

// ---- how they wait ----

// While one exists, OpenMP's idle threads sleep almost at once: libgomp spins 3,000 times less while it has more
// threads than cores (its manual: GOMP_SPINCOUNT), and this object adds threads that only sleep.
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

// Watches the load, and holds a ShortWaits as long as other processes use more than an eighth of this process's cores.
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

// Clock ticks that CPUs were busy, including time stolen by the hypervisor, from the text of /proc/stat. ours[i]:
// whether CPU i is counted.
std::uint64_t busy_ticks(std::string_view stat, const std::vector<bool>& ours);

}  // namespace weft
