// What a host with busy cores costs a device that it keeps at work, without a model and without a GPU: a simulated device takes a
// fixed time for each step and begins one when it has been submitted and the one before has ended. The host polls, as
// cudaEventSynchronize does, while as many processes as asked for compute on the same cores.
//   make benches && build/release/dev/bench/busy_host_bench [LOOPS]      default: as many as there are cores
//
// Prints the tokens/s by the device's clock, and what is missing to a device that never waits: for one sequence of 1.5 ms a step
// and for 64 of 2.8 ms, with 2 and with 16 steps in flight at most, on idle and on busy cores.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "dev/bench/timed_model.h"
#include "llmc/base/error.h"
#include "llmc/infer/batch_bench.h"
#include "llmc/infer/bench.h"
#include "llmc/model/single_sequence.h"

using namespace weft;

namespace {

constexpr std::int64_t kVocabulary = 50'304, kTokens = 1000;
constexpr TimedModel::Wait kPolls = TimedModel::Wait::polls;

// Processes that compute until this is destroyed.
class BusyLoops {
 public:
  explicit BusyLoops(std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) asm volatile("");  // a loop without any effect need not be kept
      }
      children_.push_back(child);
    }
  }
  ~BusyLoops() {
    for (const pid_t child : children_) ::kill(child, SIGKILL);
    for (const pid_t child : children_) ::waitpid(child, nullptr, 0);
  }
  BusyLoops(const BusyLoops&) = delete;
  BusyLoops& operator=(const BusyLoops&) = delete;

 private:
  std::vector<pid_t> children_;
};

double tokens_per_second(std::int64_t sequences, std::int64_t depth, double step_seconds) {
  if (sequences == 1) {
    const auto model = single_sequence(std::make_shared<TimedModel>(kVocabulary, 1, depth, step_seconds, kPolls),
                                       TimedModel::kPositions);
    return run_bench(*model, {.tokens = kTokens}).main.decode.tokens_per_second();
  }
  TimedModel model(kVocabulary, sequences, depth, step_seconds, kPolls);
  BatchBenchOptions options;
  options.sequences = {sequences};
  options.tokens = kTokens;
  EngineOptions engine;
  engine.rows_per_step = model.max_rows();
  return run_batch_bench(model, engine, options).points[0].tokens_per_second();
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t loops = argc > 1 ? std::atoll(argv[1]) : std::thread::hardware_concurrency();
  try {
    for (const auto& [sequences, step_ms] : {std::pair<std::int64_t, double>(1, 1.5), {64, 2.8}}) {
      const double all = 1e3 / step_ms * static_cast<double>(sequences);
      for (const std::int64_t depth : {2, 16}) {
        for (const std::int64_t busy : {std::int64_t{0}, loops}) {
          const BusyLoops neighbours(busy);
          const double rate = tokens_per_second(sequences, depth, step_ms * 1e-3);
          std::printf("%3lld sequences, %2lld steps in flight, %3lld busy loops: %8.0f tokens/s, %5.1f %% lost\n",
                      static_cast<long long>(sequences), static_cast<long long>(depth), static_cast<long long>(busy),
                      rate, 100 * (1 - rate / all));
          std::fflush(stdout);
        }
      }
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.code());
  }
}
