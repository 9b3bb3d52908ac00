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

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/infer/batch_bench.h"
#include "llmc/infer/bench.h"
#include "llmc/model/single_sequence.h"

using namespace weft;

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kPositions = 2048, kTokens = 1000;

class TimedDevice final : public InferenceModel {
 public:
  TimedDevice(std::int64_t sequences, std::int64_t depth, double step_seconds)
      : step_(duration_of(step_seconds)), slots_(sequences), depth_(depth) {
    config_.vocab_size = config_.tokenizer_vocab = 50'304;
    config_.max_positions = kPositions;
  }

  const ModelConfig& config() const override { return config_; }
  std::vector<MemoryLine> memory() const override { return {}; }
  std::uint64_t bytes_per_step(std::int64_t, std::int64_t) const override { return 0; }
  std::int64_t page_size() const override { return 32; }
  std::int64_t num_pages() const override { return slots_ * kPositions / page_size(); }
  std::int64_t slots() const override { return slots_; }
  std::int64_t max_rows() const override { return 2048; }
  std::int64_t max_positions() const override { return kPositions; }
  std::int64_t depth() const override { return depth_; }
  void keep_activations(bool) override {}
  std::vector<float> activation(const std::string&) override { return {}; }

  void submit(std::span<const Chunk> work) override {
    ready_ = std::max(ready_, Clock::now()) + step_;
    std::vector<ChunkResult> results(work.size());
    for (std::size_t i = 0; i < work.size(); ++i) {
      if (work[i].sampling != nullptr) results[i].sampled = ScoredId{5, 0, {}};
    }
    flights_.push_back({ready_, std::move(results)});
  }
  std::span<const ChunkResult> collect() override {
    while (Clock::now() < flights_.front().ready) {
    }
    ended_ = flights_.front().ready;
    results_ = std::move(flights_.front().results);
    flights_.pop_front();
    return results_;
  }
  double ended_seconds() const override { return in_seconds(ended_.time_since_epoch()); }

 private:
  struct Flight {
    Clock::time_point ready;
    std::vector<ChunkResult> results;
  };
  const Clock::duration step_;
  const std::int64_t slots_, depth_;
  ModelConfig config_;
  std::deque<Flight> flights_;
  std::vector<ChunkResult> results_;
  Clock::time_point ready_, ended_;
};

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
    const auto model = single_sequence(std::make_shared<TimedDevice>(1, depth, step_seconds), kPositions);
    return run_bench(*model, {.tokens = kTokens}).main.decode.tokens_per_second();
  }
  TimedDevice model(sequences, depth, step_seconds);
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
