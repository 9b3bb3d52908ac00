// Several GPUs of one machine: how fast ranges of device memory move between ranks, and a training step on one GPU and on all
// of them, in one process with a thread a GPU. Training itself has a process a GPU; what the GPUs do is the same.
//
//   ranks_bench [--config NAME] [--micro-batch B] [--seq-len T] [--steps N] [--bucket ELEMENTS] [--by peer|nccl|host]
//               [--shard none|optimizer|gradients] [--rounds N] [--rounded-alone] [--exchange-only]
//
// The step is that of --bench: one micro-batch a rank on random tokens, all of forward, backward, norm and update. A rank
// alone and the ranks of a run take turns, --rounds times, so that the clock is the same for both. --rounded-alone: the one GPU
// keeps its moments in bf16, for models that do not fit it otherwise.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/options.h"
#include "llmc/comm/thread_ranks.h"
#include "llmc/cuda/comm/device_ranks.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/device.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/cuda/training/training.h"
#include "llmc/model/compare.h"
#include "llmc/model/presets.h"
#include "llmc/train/bench.h"

namespace weft {
namespace {

struct Settings {
  std::string config = "llama3.2-1b";
  std::int64_t micro_batch = 8, seq_len = 2048, steps = 12, bucket = 16 << 20, rounds = 2;
  std::string by = "peer", shard = "optimizer";
  bool exchange_only = false, rounded_alone = false;
};

Settings parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const auto value = [&] {
      if (++i == argc) fail(Exit::usage, "%s: expected a value", escaped(option).c_str());
      return std::string(argv[i]);
    };
    if (option == "--config") {
      settings.config = value();
    } else if (option == "--micro-batch") {
      settings.micro_batch = std::stoll(value());
    } else if (option == "--seq-len") {
      settings.seq_len = std::stoll(value());
    } else if (option == "--steps") {
      settings.steps = std::stoll(value());
    } else if (option == "--bucket") {
      settings.bucket = std::stoll(value());
    } else if (option == "--rounds") {
      settings.rounds = std::stoll(value());
    } else if (option == "--rounded-alone") {
      settings.rounded_alone = true;
    } else if (option == "--by") {
      settings.by = value();
    } else if (option == "--shard") {
      settings.shard = value();
    } else if (option == "--exchange-only") {
      settings.exchange_only = true;
    } else {
      fail(Exit::usage, "unknown option %s", escaped(option).c_str());
    }
  }
  return settings;
}

using Clock = std::chrono::steady_clock;

std::unique_ptr<cuda::DeviceRanks> device_ranks(Communicator& ranks, const Settings& settings) {
  cuda::check(cudaSetDevice(ranks.rank()), "GPU");
  if (settings.by == "host") return cuda::make_staged_ranks(ranks);
  return settings.by == "nccl" ? cuda::make_nccl_ranks(ranks, 120) : cuda::make_peer_ranks(ranks, 120);
}

// ---- ranges of memory -----------------------------------------------------------------------------------------------

void bench_exchange(int gpus, const Settings& settings) {
  run_thread_ranks(gpus, 120, [&](Communicator& ranks) {
    const auto plane = device_ranks(ranks, settings);
    if (ranks.rank() == 0) std::printf("%s, %d GPUs\n", plane->name().c_str(), gpus);
    constexpr std::int64_t kMost = 256 << 20;  // elements
    MemoryPlan plan("values");
    const std::uint64_t values = plan.add(kMost * sizeof(float)), received = plan.add(kMost * sizeof(float));
    cuda::DeviceArena arena(plan);
    const cuda::Stream stream;
    arena.clear(stream);
    plane->share(arena.at<std::byte>(0), arena.bytes());
    const cuda::Event start, stop;
    for (const std::int64_t elements : {kMost / 256, kMost / 64, kMost / 16, kMost / 4, kMost}) {
      std::vector<Range> parts = shares(elements, gpus), bytes = parts;
      for (Range& part : bytes) part = {4 * part.begin, 4 * part.end};
      const auto time = [&](const auto& work) {
        constexpr int kTimes = 10;
        work();
        ranks.barrier();
        cuda::check(cudaEventRecord(start, stream), "timing");
        for (int i = 0; i < kTimes; ++i) work();
        cuda::check(cudaEventRecord(stop, stream), "timing");
        plane->wait(stream, nullptr, "timing");
        float ms = 0;
        cuda::check(cudaEventElapsedTime(&ms, start, stop), "timing");
        return static_cast<double>(ms) / kTimes;
      };
      const double exchange =
          time([&] { plane->exchange(arena.at<float>(values), parts, arena.at<float>(received), stream); });
      const double gather = time([&] { plane->gather(arena.at<std::byte>(values), bytes, stream); });
      const double sent = 4.0 * static_cast<double>(elements) * (gpus - 1) / gpus;  // by each rank
      if (ranks.rank() != 0) continue;
      std::printf("%8.1f MB: exchange %7.3f ms, %4.0f GB/s each way; gather %7.3f ms, %4.0f GB/s\n",
                  4e-6 * static_cast<double>(elements), exchange, sent / exchange * 1e-6, gather, sent / gather * 1e-6);
    }
  });
}

// ---- steps ----------------------------------------------------------------------------------------------------------

double step_ms(TrainModel& model, const Settings& settings, double* loss) {
  const auto count = static_cast<std::size_t>(settings.micro_batch * settings.seq_len);
  std::vector<std::int32_t> tokens(count), labels(count);
  const auto vocab = static_cast<std::size_t>(model.config().vocab_size);
  for (std::size_t i = 0; i < count; ++i) {
    tokens[i] = static_cast<std::int32_t>(i * 7919 % vocab);
    labels[i] = static_cast<std::int32_t>((i + 1) * 7919 % vocab);
  }
  AdamWStep update;
  update.learning_rate = 1e-4f;
  update.step = 0;
  std::vector<double> times;
  Clock::time_point last;
  constexpr std::int64_t kWarmUp = 5;
  for (std::int64_t i = 0; i < kWarmUp + settings.steps; ++i) {
    ++update.step;
    model.zero_gradients();
    model.forward({tokens, labels}, 0, 1.0f / static_cast<float>(count));
    model.backward();
    const StepStatistics statistics = model.statistics();
    update.gradient_scale = clip_factor(statistics.gradient_norm, 1.0);
    model.update(update);
    *loss = statistics.loss_sum / static_cast<double>(statistics.label_count);
    const Clock::time_point now = Clock::now();
    if (i >= kWarmUp) times.push_back(std::chrono::duration<double>(now - last).count() * 1e3);
    last = now;
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

TrainOptions options_of(const Settings& settings, int ranks) {
  TrainOptions options;
  options.micro_batch = settings.micro_batch;
  options.seq_len = settings.seq_len;
  options.precision = Precision::bf16;
  options.accumulates = false;
  options.virtual_ranks = ranks;
  return options;
}

double alone_ms(const Settings& settings) {
  cuda::check(cudaSetDevice(0), "GPU");
  TrainOptions options = options_of(settings, 1);
  if (settings.rounded_alone) options.moments = Precision::bf16;
  const auto model = cuda::make_training_model(preset_config(settings.config), options);
  bench_parameters(*model);
  double loss = 0;
  const double ms = step_ms(*model, settings, &loss);
  std::printf("one GPU: %.2f ms a step, loss %.4f\n", ms, loss);
  std::fflush(stdout);
  return ms;
}

void bench_steps(int gpus, const Settings& settings) {
  if (settings.by == "peer") {
    fail(Exit::usage,
         "--by peer: only with --exchange-only. Steps of ranks that are threads wait for each other's memory; "
         "measure them with train_llama --bench --gpus N");
  }
  const double tokens = static_cast<double>(settings.micro_batch * settings.seq_len);
  std::printf("%s, T %lld, B %lld a GPU, buckets of %lld\n", settings.config.c_str(),
              static_cast<long long>(settings.seq_len), static_cast<long long>(settings.micro_batch),
              static_cast<long long>(settings.bucket));
  const Shard shard = settings.shard == "none"        ? Shard::none
                      : settings.shard == "gradients" ? Shard::gradients
                                                      : Shard::optimizer;
  for (std::int64_t round = 0; round < settings.rounds; ++round) {
    const double alone = alone_ms(settings);
    run_thread_ranks(gpus, 300, [&](Communicator& ranks) {
      const auto plane = device_ranks(ranks, settings);
      const auto model = cuda::make_training_model(preset_config(settings.config), options_of(settings, gpus), ranks,
                                                   *plane, shard, settings.bucket);
      bench_parameters(*model);
      ranks.barrier();  // that frees memory, which waits for all GPUs of the process
      double loss = 0;
      const double ms = step_ms(*model, settings, &loss);
      model->decoder(1);  // waits for the last parameters
      if (ranks.rank() != 0) return;
      std::printf("%d GPUs, %s, --shard %s: %.2f ms a step, %.0f tokens/s, %.3f x one GPU, loss %.4f\n", gpus,
                  plane->name().c_str(), settings.shard.c_str(), ms, gpus * tokens / ms * 1e3, gpus * alone / ms, loss);
      std::fflush(stdout);
    });
  }
}

Exit run(int argc, char** argv) {
  const Settings settings = parse(argc, argv);
  const int gpus = cuda::visible_gpus();
  if (gpus < 2) fail(Exit::environment, "this machine has %d GPUs, the benchmark needs two", gpus);
  if (settings.exchange_only) {
    bench_exchange(gpus, settings);
  } else {
    bench_steps(gpus, settings);
  }
  return Exit::ok;
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  return weft::run_program([&] { return weft::run(argc, argv); });
}
