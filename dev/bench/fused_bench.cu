// Times the fused decode kernel on models of Pythia's shapes, and on the presets of Llama, with random fp16 weights, beside a
// plain read of memory in the same run.
//
//   nvcc -std=c++20 -O3 -I. -gencode arch=compute_90a,code=sm_90a dev/bench/fused_bench.cu build/release/libweft.a ...
//   ./a.out 2.8b 410m llama3.2-1b ... [--contexts 64,1024,2000] [--window KB] [--ring KB] [--blocks N] [--own-vectors] [--layer] [--timeline] [--sample]
//           [--rows 1,2,8]
//
// A row: milliseconds a token (median of 7 launches of 32 tokens around the context), bytes that a token must read over
// that time, and its share of the plain read. --layer times attention + MLP-up + GELU of one layer, the benchmark of
// ClusterFusion, rotating over the model's layers. --sample draws at temperature 0.8, top-k 50, top-p 0.95. --timeline
// prints when each phase of a layer ends (llmc/cuda/fused/timeline.h). --rows: also the kernel of a step of so many rows, one of
// each of as many sequences, and as positions of one sequence.

#include <cuda_fp16.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "dev/bench/gpu_main.h"
#include "llmc/cuda/fused/decode.h"
#include "llmc/cuda/fused/step.h"
#include "llmc/cuda/inference/fused_tokens.h"
#include "llmc/cuda/inference/parameters.h"
#include "llmc/cuda/op/gemm/ceilings.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/model/presets.h"
#include "llmc/model/tensor_table.h"

namespace {

using namespace weft;
using namespace weft::cuda;
using S = __half;

constexpr std::int64_t kCapacity = 2048, kTokens = 32;
constexpr int kLaunches = 7;

// fp16 numbers of +-2^-6 .. +-2^-5.
__global__ void fill_kernel(unsigned* words, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    unsigned x = static_cast<unsigned>(i * 2654435761u);
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    words[i] = (x & 0x83FF83FFu) | 0x24002400u;
  }
}

struct Shape {
  const char* name;
  std::int64_t layers, heads, head_dim, vocab;
};
constexpr Shape kShapes[] = {{"14m", 6, 4, 32, 50304},     {"31m", 6, 8, 32, 50304},    {"70m", 6, 8, 64, 50304},
                             {"160m", 12, 12, 64, 50304},  {"410m", 24, 16, 64, 50304}, {"1b", 16, 8, 256, 50304},
                             {"1.4b", 24, 16, 128, 50304}, {"2.8b", 32, 32, 80, 50304}, {"6.9b", 32, 32, 128, 50432},
                             {"12b", 36, 40, 128, 50688}};

ModelConfig config_of(const Shape& shape) {
  ModelConfig config;
  set_family(config, "gpt_neox");
  config.vocab_size = config.tokenizer_vocab = shape.vocab;
  config.num_heads = config.num_kv_heads = shape.heads;
  config.head_dim = shape.head_dim;
  config.hidden_size = shape.heads * shape.head_dim;
  config.ffn_size = 4 * config.hidden_size;
  config.num_layers = shape.layers;
  config.max_positions = kCapacity;
  config.norm_eps = 1e-5;
  config.norm = NormKind::layernorm;
  config.rope.theta = 10000;
  config.rope.rotary_dim = shape.head_dim / 4;
  config.parallel_residual = config.qkv_bias = config.output_bias = true;
  return config;
}

// A Pythia's name, the same with "-sequential", or a preset's.
ModelConfig config_named(const std::string& name) {
  const std::string suffix = "-sequential";
  const bool sequential = name.ends_with(suffix);
  const std::string base = sequential ? name.substr(0, name.size() - suffix.size()) : name;
  const auto found =
      std::find_if(std::begin(kShapes), std::end(kShapes), [&](const Shape& s) { return s.name == base; });
  if (found == std::end(kShapes)) return preset_config(name);
  ModelConfig config = config_of(*found);
  config.parallel_residual = !sequential;
  return config;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <typename Work>
double milliseconds(cudaStream_t stream, const Work& work) {
  const Event begin, end;
  check(cudaEventRecord(begin, stream), "event");
  work();
  check(cudaEventRecord(end, stream), "event");
  check(cudaEventSynchronize(end), "event");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end), "event");
  return ms;
}

DeviceArena allocate(std::uint64_t bytes) {
  MemoryPlan plan("benchmark");
  plan.add(bytes);
  return DeviceArena(plan);
}

struct Options {
  std::vector<std::string> models;
  std::vector<std::int64_t> contexts = {64, 1024, 2000}, rows;
  FusedTuning tuning;
  bool timeline = false, sample = false;
};

// The kernel of a step.
void run_steps(const std::string& name, const ModelConfig& config, const DeviceWeights<S>& weights,
               const DeviceRopeTable& rope, cudaStream_t stream, const Options& options, double ceiling) {
  constexpr std::int64_t kPageSize = 32, kPages = kCapacity / kPageSize, kSteps = 16;
  const std::int64_t positions = kFusedStepRows * kCapacity, cached = config.num_layers * config.kv_size() * positions;
  const DeviceArena cache_memory = allocate(static_cast<std::uint64_t>(2 * cached) * sizeof(S));
  fill_kernel<<<1056, 512, 0, stream>>>(cache_memory.at<unsigned>(0), cache_memory.bytes() / 4);
  const DeviceArena logits = allocate(static_cast<std::uint64_t>(kFusedStepRows * config.vocab_size) * sizeof(float));
  std::vector<std::int32_t> tables(static_cast<std::size_t>(kFusedStepRows * kPages));
  for (std::size_t i = 0; i < tables.size(); ++i) tables[i] = static_cast<std::int32_t>(i * 7919 % tables.size());
  const DeviceArena pages = allocate(tables.size() * sizeof(std::int32_t));
  check(cudaMemcpyAsync(pages.at<std::int32_t>(0), tables.data(), pages.bytes(), cudaMemcpyHostToDevice, stream),
        "pages");
  const KvCache<S> cache{cache_memory.at<S>(0), cache_memory.at<S>(0) + cached, positions, kPageSize};
  FusedStep<S> fused(config, weights, cache, rope, stream, options.tuning);
  const double parameters =
      static_cast<double>(TensorTable(config).parameters() - config.vocab_size * config.hidden_size);
  for (const std::int64_t context : options.contexts) {
    for (const std::int64_t rows : options.rows) {
      for (const bool one_sequence : {false, true}) {
        if (one_sequence && rows == 1) continue;
        std::vector<FusedStepRow> all;
        for (std::int64_t r = 0; r < rows; ++r) {
          const auto row = static_cast<std::int32_t>(r), position = static_cast<std::int32_t>(context);
          all.push_back(one_sequence
                            ? FusedStepRow{17 + row, position + row, 0, 0, row}
                            : FusedStepRow{17 + row, position, row * static_cast<std::int32_t>(kPages), row, row});
        }
        const auto step = [&] {
          fused.launch(all, pages.at<std::int32_t>(0), pages.at<std::int32_t>(0), logits.at<float>(0));
        };
        std::vector<double> times;
        for (int i = 0; i <= kLaunches; ++i) {
          const double ms = milliseconds(stream, [&] {
            for (std::int64_t s = 0; s < kSteps; ++s) step();
          });
          fused.check();
          if (i > 0) times.push_back(ms / static_cast<double>(kSteps));
        }
        const double ms = median(times),
                     read =
                         sizeof(S) * (parameters + static_cast<double>((one_sequence ? 1 : rows) * 2 *
                                                                       config.num_layers * config.kv_size() * context)),
                     rate = read / ms * 1e-6;
        std::printf("%-14s step  context %4lld rows %lld of %-13s: %8.4f ms  %5.0f GB/s  %5.1f %% of %4.0f\n",
                    name.c_str(), static_cast<long long>(context), static_cast<long long>(rows),
                    one_sequence ? "one sequence" : "as many", ms, rate, 100 * rate / ceiling, ceiling);
        if (options.timeline) {
          fused.record_timeline(true);
          step();
          std::fputs(timeline_text(fused.timeline()).c_str(), stdout);
          fused.record_timeline(false);
        }
        std::fflush(stdout);
      }
    }
  }
}

// `ceiling`: GB/s of a plain read.
void run(const std::string& name, const Options& options, double ceiling) {
  const ModelConfig config = config_named(name);
  const TensorTable table(config);
  Stream stream;
  const DeviceArena memory = allocate(static_cast<std::uint64_t>(table.arena_elements()) * sizeof(S));
  const std::int64_t cached = config.num_layers * config.kv_size() * kCapacity;
  const DeviceArena cache_memory = allocate(static_cast<std::uint64_t>(2 * cached) * sizeof(S));
  for (const DeviceArena* arena : {&memory, &cache_memory}) {
    fill_kernel<<<1056, 512, 0, stream>>>(arena->at<unsigned>(0), arena->bytes() / 4);
  }
  const RopeTable rope = rope_table(config.rope, kCapacity);
  const DeviceArena rope_memory = allocate(2 * rope.cos.size() * sizeof(float));
  check(cudaMemcpyAsync(rope_memory.at<float>(0), rope.cos.data(), rope.cos.size() * 4, cudaMemcpyHostToDevice, stream),
        "rope");
  check(cudaMemcpyAsync(rope_memory.at<float>(0) + rope.cos.size(), rope.sin.data(), rope.sin.size() * 4,
                        cudaMemcpyHostToDevice, stream),
        "rope");
  const DeviceWeights<S> w = bind_plain<S>(config, table, memory.at<S>(0));
  const KvCache<S> cache{cache_memory.at<S>(0), cache_memory.at<S>(0) + cached, kCapacity, kFusedPageSize};
  const DeviceRopeTable device_rope{rope_memory.at<float>(0), rope_memory.at<float>(0) + rope.cos.size(),
                                    rope.positions, rope.half};
  stream.synchronize("benchmark");
  Mailbox mailbox;
  FusedDecode<S> fused(config, w, cache, device_rope, mailbox, stream, options.tuning);
  for (const std::int64_t context : options.contexts) {
    FusedRequest request;
    request.first_id = 17;
    request.position = std::max<std::int64_t>(0, context - kTokens / 2);
    request.count = kTokens;
    if (options.sample) {
      SamplerOptions sampler;
      sampler.temperature = 0.8, sampler.top_k = 50, sampler.top_p = 0.95;
      request.sampling = sampling_plan(sampler);
    }
    std::vector<double> times;
    for (int i = 0; i <= kLaunches; ++i) {
      const double ms = milliseconds(stream, [&] { fused.launch(request); });
      fused.finish();
      if (i > 0) times.push_back(ms / static_cast<double>(kTokens));
    }
    double ms = median(times), bytes = static_cast<double>(fused.bytes_per_token(context));
    const auto layers = static_cast<double>(config.num_layers);
    if (options.tuning.layer_only) ms /= layers, bytes /= layers;
    const double rate = bytes / ms * 1e-6;
    std::printf("%-14s %s context %4lld blocks %3d window %3d KB: %8.4f ms  %5.0f GB/s  %5.1f %% of %4.0f\n",
                name.c_str(), options.tuning.layer_only ? "layer" : "token", static_cast<long long>(context),
                fused.blocks(), options.tuning.window_bytes >> 10, ms, rate, 100 * rate / ceiling, ceiling);
    if (options.timeline) {
      fused.record_timeline(true);
      fused.launch(request);
      fused.finish();
      std::fputs(timeline_text(fused.timeline()).c_str(), stdout);
      fused.record_timeline(false);
    }
    std::printf("  logits %016llx\n",
                static_cast<unsigned long long>(fused.logits_hash()));  // the same for every tuning
    std::fflush(stdout);
  }
  if (!options.rows.empty()) run_steps(name, config, w, device_rope, stream, options, ceiling);
}

// Numbers with commas between them.
std::vector<std::int64_t> numbers(const char* text) {
  std::vector<std::int64_t> all;
  for (; *text != 0; text += *text == ',') {
    char* end = nullptr;
    all.push_back(std::strtoll(text, &end, 10));
    if (end == text) break;
    text = end;
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (argument == "--window") {
      options.tuning.window_bytes = std::atoi(value) << 10, ++i;
    } else if (argument == "--ring") {
      options.tuning.ring_bytes = std::atoi(value) << 10, ++i;
    } else if (argument == "--blocks") {
      options.tuning.blocks = std::atoi(value), ++i;
    } else if (argument == "--own-vectors") {
      options.tuning.own_vectors = true;
    } else if (argument == "--layer") {
      options.tuning.layer_only = true;
    } else if (argument == "--timeline") {
      options.timeline = true;
    } else if (argument == "--sample") {
      options.sample = true;
    } else if (argument == "--contexts") {
      options.contexts = numbers(value), ++i;
    } else if (argument == "--rows") {
      options.rows = numbers(value), ++i;
    } else {
      options.models.push_back(argument);
    }
  }
  return gpu_main([&] {
    const double ceiling = measure_read_bandwidth();
    for (const std::string& name : options.models) run(name, options, ceiling);
  });
}
