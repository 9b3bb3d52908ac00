#include "llmc/base/threads.h"

#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <mutex>
#include <sstream>
#include <system_error>
#include <thread>

#include "llmc/base/cgroup.h"
#include "llmc/base/clock.h"
#include "llmc/base/signals.h"

namespace weft {

namespace {

// start_again() sets this variable, so that the new program does not start itself once more.
constexpr const char* kStartedAgain = "WEFT_THREAD_ENVIRONMENT";
constexpr const char* kSpinCount = "GOMP_SPINCOUNT";
constexpr const char* kShortSpin = "100";
// If more sleeping threads would be needed, the program starts again with a fixed short spin time instead.
constexpr int kMaxSleepers = 8;

char** program_arguments = nullptr;
int team_threads = 0;           // result of set_threads(), for all threads: OpenMP's own setting is one per thread
bool threads_fixed = false;     // --threads says how many
bool short_spin_fixed = false;  // weft has started again with GOMP_SPINCOUNT = kShortSpin

// Replaces this process by the same program with the environment as it is now. Returns only if that fails.
void start_again() {
  if (program_arguments == nullptr) return;
  char path[4096];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof path - 1);
  if (length <= 0) return;
  path[length] = '\0';
  ::setenv(kStartedAgain, "1", 1);
  ::execv(path, program_arguments);
  ::unsetenv(kStartedAgain);
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<double> quota_of(double microseconds, double period) {
  if (!(microseconds > 0) || !(period > 0)) return std::nullopt;
  return microseconds / period;
}

// The CPU limit that a cgroup's directory sets, in cores. cpu.max (version 2) is "150000 100000", or "max 100000"
// without a limit; version 1 has the two numbers in two files, the first -1 without a limit.
std::optional<double> quota_in(const std::string& directory) {
  double quota = 0, period = 0;
  std::ifstream both(directory + "/cpu.max");
  if (both >> quota >> period) return quota_of(quota, period);
  std::ifstream quota_file(directory + "/cpu.cfs_quota_us"), period_file(directory + "/cpu.cfs_period_us");
  if (quota_file >> quota && period_file >> period) return quota_of(quota, period);
  return std::nullopt;
}

// CPUs that this process may run on.
std::vector<bool> our_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(::getpid(), sizeof set, &set) != 0) return {};
  std::vector<bool> ours(CPU_SETSIZE);
  for (std::size_t i = 0; i < ours.size(); ++i) ours[i] = CPU_ISSET(i, &set);
  return ours;
}

// Sleeping threads to add to the team so that libgomp has more threads than cores.
int sleepers_needed() {
  const int team = team_threads > 0 ? team_threads : omp_get_max_threads();
  return std::max(1, omp_get_num_procs() - team + 1);
}

// The first number of OMP_NUM_THREADS, which is "4", or "4,2" with a number for each level of nesting.
std::optional<std::int64_t> parse_omp_threads(const std::string& text) {
  std::int64_t number = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool whole = end.ec == std::errc{} && (end.ptr == text.data() + text.size() || *end.ptr == ',');
  return whole && number >= 1 ? std::optional(number) : std::nullopt;
}

}  // namespace

ThreadLimits thread_limits() {
  ThreadLimits limits;
  limits.cores = std::max(1, omp_get_num_procs());  // libgomp counts the affinity of the process
  limits.quota = cpu_quota(cgroup_membership(), kCgroupRoot);
  if (const char* wish = std::getenv("OMP_NUM_THREADS")) limits.omp_num_threads = wish;
  return limits;
}

std::int64_t choose_threads(std::int64_t option, const ThreadLimits& limits) {
  if (option > 0) return option;
  std::int64_t threads = std::clamp<std::int64_t>(limits.cores, 1, kMaxThreads);
  // Rounded down: a team waits for its slowest thread, so one that has only part of a core does not help.
  if (limits.quota) threads = std::min(threads, static_cast<std::int64_t>(std::max(1.0, std::floor(*limits.quota))));
  return std::min(threads, parse_omp_threads(limits.omp_num_threads).value_or(threads));
}

std::optional<double> cpu_quota(std::string_view membership, const std::string& root) {
  std::optional<double> smallest;
  for (const std::string& directory : cgroup_directories(membership, "cpu", root)) {
    if (const std::optional<double> quota = quota_in(directory)) smallest = std::min(smallest.value_or(*quota), *quota);
  }
  return smallest;
}

void clean_thread_environment(char** argv) {
  program_arguments = argv;
  if (std::getenv(kStartedAgain) != nullptr) {
    ::unsetenv(kStartedAgain);
    short_spin_fixed = std::getenv(kSpinCount) != nullptr;
    return;
  }
  bool found = false;
  for (const char* name : {"OMP_WAIT_POLICY", kSpinCount, "OMP_DYNAMIC", "OMP_NESTED", "OMP_MAX_ACTIVE_LEVELS",
                           "OMP_THREAD_LIMIT", "OMP_STACKSIZE", "GOMP_STACKSIZE"}) {
    found = found || std::getenv(name) != nullptr;
    ::unsetenv(name);
  }
  // More threads than cores only wait for each other, and libgomp aborts the program if the system refuses a thread.
  if (const char* wish = std::getenv("OMP_NUM_THREADS")) {
    const std::optional<std::int64_t> threads = parse_omp_threads(wish);
    if (!threads || *threads > omp_get_num_procs()) {
      ::unsetenv("OMP_NUM_THREADS");
      found = true;
    }
  }
  if (found) start_again();
}

std::int64_t set_threads(std::int64_t option) {
  const std::int64_t threads = choose_threads(option, thread_limits());
  team_threads = static_cast<int>(threads);
  threads_fixed = option > 0;
  omp_set_num_threads(team_threads);
  if (threads > 1 && sleepers_needed() > kMaxSleepers && !short_spin_fixed) {
    ::setenv(kSpinCount, kShortSpin, 1);
    start_again();
  }
  return threads;
}

void StepThreads::begin(bool probing) {
  probing_ = probing;
  steps_ = 0;
  spent_ = 0;
}

void StepThreads::took(double seconds, int threads) {
  // A probe lasts longer than the time slices of busy cores. Within one slice a single thread is always fast; it pays
  // afterwards, while the other processes have theirs.
  constexpr double kProbe = 0.05;            // seconds
  constexpr double kFirst = 0.2, kLast = 2;  // seconds before a probe: doubled when it has confirmed the choice,
  constexpr double kCost = 10;               // and at least so many times what it took
  constexpr double kGain = 0.9;              // the other choice has to take less than this share of the time
  constexpr double kLongestStep = 0.1;       // one thread is not tried if its step may take longer: a user would notice
  ++steps_;
  spent_ += seconds;
  if (spent_ < (probing_ ? kProbe : probe_after_)) return;
  const double mean = spent_ / static_cast<double>(steps_);
  if (!probing_) {
    step_seconds_ = mean;
    return begin(one_ || mean * threads < kLongestStep);
  }
  const bool lost = mean > kGain * step_seconds_;
  probe_after_ = std::max(kCost * spent_, lost ? std::clamp(2 * probe_after_, kFirst, kLast) : kFirst);
  if (!lost) one_ = !one_;
  begin(false);
}

void StepThreads::run(const std::function<void()>& step) {
  const int all = omp_get_max_threads();
  if (all == 1 || threads_fixed) return step();
  const struct Restore {
    int threads;
    ~Restore() { omp_set_num_threads(threads); }
  } restore{all};
  if (one_thread()) omp_set_num_threads(1);
  const auto before = std::chrono::steady_clock::now();
  step();
  took(seconds_since(before), all);
}

struct ShortWaits::Sleepers {
  std::mutex mutex;
  std::condition_variable changed;
  bool begun = false, done = false;
  std::thread owner;  // starts an OpenMP team of its own, which libgomp ends when this thread ends

  void run() {
    [[maybe_unused]] const int team = sleepers_needed() + 1;
    std::atomic<int> started{0};  // something to do: the compiler would remove an empty parallel region
#pragma omp parallel num_threads(team)
    ++started;
    std::unique_lock<std::mutex> lock(mutex);
    begun = true;
    changed.notify_all();
    changed.wait(lock, [this] { return done; });
  }
};

ShortWaits::ShortWaits() : sleepers_(std::make_unique<Sleepers>()) {
  const SignalsElsewhere signals;
  try {
    sleepers_->owner = std::thread([this] { sleepers_->run(); });
  } catch (const std::system_error&) {  // no more threads for this user: idle threads keep spinning
    return;
  }
  std::unique_lock<std::mutex> lock(sleepers_->mutex);
  sleepers_->changed.wait(lock, [this] { return sleepers_->begun; });
}

ShortWaits::~ShortWaits() {
  if (!sleepers_->owner.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(sleepers_->mutex);
    sleepers_->done = true;
  }
  sleepers_->changed.notify_all();
  sleepers_->owner.join();
}

// A thread that measures every kInterval how much other processes use this process's CPUs.
struct SharedCores::Watcher {
  static constexpr std::chrono::milliseconds kInterval{250};
  static constexpr double kCrowded = 1.0 / 8;  // share of the cores that others use
  static constexpr int kQuietIntervals = 2;    // below that share before threads may spin for long again

  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::optional<ShortWaits> waits;
  std::thread thread;

  struct Sample {
    double busy = 0, own = 0, now = 0;  // in seconds: CPU time of all processes, of this process, and clock time
  };
  const std::vector<bool> ours = our_cpus();

  Sample sample() const {
    timespec own{}, now{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &own);
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    const auto seconds = [](const timespec& t) {
      return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
    };
    const double ticks = static_cast<double>(busy_ticks(text_of("/proc/stat"), ours));
    return {ticks / static_cast<double>(::sysconf(_SC_CLK_TCK)), seconds(own), seconds(now)};
  }

  void run() {
    const auto cores = static_cast<double>(std::max<std::ptrdiff_t>(1, std::count(ours.begin(), ours.end(), true)));
    Sample before = sample();
    int quiet = kQuietIntervals - 1;  // at the start one quiet interval is enough
    std::unique_lock<std::mutex> lock(mutex);
    while (!changed.wait_for(lock, kInterval, [this] { return done; })) {
      const Sample after = sample();
      const double others = (after.busy - before.busy) - (after.own - before.own);
      quiet = others > kCrowded * cores * (after.now - before.now) ? 0 : quiet + 1;
      before = after;
      if (quiet == 0 && !waits) waits.emplace();
      if (quiet >= kQuietIntervals) waits.reset();
    }
  }
};

SharedCores::SharedCores() {
  if (omp_get_max_threads() == 1 || short_spin_fixed) return;  // no idle threads, or their spin time is short anyway
  watcher_ = std::make_unique<Watcher>();
  watcher_->waits.emplace();  // until the first measurement shows that no one else uses the cores
  const SignalsElsewhere signals;
  try {
    watcher_->thread = std::thread([this] { watcher_->run(); });
  } catch (const std::system_error&) {  // no more threads for this user: libgomp's own spinning stays
    watcher_.reset();
  }
}

SharedCores::~SharedCores() {
  if (!watcher_) return;
  {
    const std::lock_guard<std::mutex> lock(watcher_->mutex);
    watcher_->done = true;
  }
  watcher_->changed.notify_all();
  watcher_->thread.join();
}

std::uint64_t busy_ticks(std::string_view stat, const std::vector<bool>& ours) {
  std::uint64_t busy = 0;
  std::istringstream lines{std::string(stat)};
  for (std::string line; std::getline(lines, line);) {
    std::size_t cpu = 0;
    if (!line.starts_with("cpu")) break;  // the lines of the CPUs are the first of the file
    const auto number = std::from_chars(line.data() + 3, line.data() + line.size(), cpu);
    if (number.ec != std::errc{} || cpu >= ours.size() || !ours[cpu]) continue;  // the line "cpu " is the sum of all
    std::istringstream fields(line.substr(static_cast<std::size_t>(number.ptr - line.data())));
    std::uint64_t user = 0, nice = 0, system = 0, idle = 0, waiting = 0, interrupts = 0, soft = 0, steal = 0;
    fields >> user >> nice >> system >> idle >> waiting >> interrupts >> soft >> steal;
    busy += user + nice + system + interrupts + soft + steal;
  }
  return busy;
}

}  // namespace weft
