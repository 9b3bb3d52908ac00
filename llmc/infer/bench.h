// infer_pythia --bench: times the prompt and the decode steps of a model, on random ids: which tokens they are does not
// change the work.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "llmc/infer/report.h"
#include "llmc/model/decode_model.h"

namespace weft {

// Pause before every timed run on a GPU. Prompts in a row hold the GPU at its power limit, and its clock stays low for
// about 70 ms after them (dev/performance/prompts.md, "The clock after a prompt"): without a pause they would slow the
// next run.
inline constexpr std::chrono::milliseconds kBenchRest{200};
inline constexpr std::int64_t kBenchPrompt = 32;
inline constexpr std::int64_t kBenchContextTokens = 64;  // decoded at each of --bench-contexts, or as many as fit

struct BenchOptions {
  std::int64_t tokens = 128;                // decoded after a prompt of kBenchPrompt tokens
  std::vector<std::int64_t> contexts = {};  // other prompt lengths to measure as well
  std::uint64_t seed = 0;
  double read_ceiling = 0;  // GB/s of a kernel that only reads memory on this device; 0: not measured
};

// Positions that the cache needs for these options, at most `limit`.
std::int64_t bench_capacity(const BenchOptions& options, std::int64_t limit);
// `count` ids in [0, vocab_size).
std::vector<std::int32_t> random_ids(std::int64_t count, std::int64_t vocab_size, std::uint64_t seed);

// The figures for one prompt length, as a single request would see them: the GPU rests before every timed run. A model
// that samples on its device is timed with sampling, from one id to the next by DecodeModel::sampled_seconds(); any other
// model without.
struct BenchPoint {
  std::int64_t prompt = 0, tokens = 0;
  double first_token_ms = 0;  // the whole prompt, median of three
  GenerateTimes decode;       // one value per decode step; its first_token_ms is unused
  MemoryTraffic traffic;
  std::optional<DraftCounts> drafts = {};  // if the model drafts
};

struct BenchResult {
  BenchPoint main;
  std::vector<BenchPoint> contexts;
  double read_ceiling = 0;
};

// Measures a prompt of kBenchPrompt tokens and then options.contexts, each after a warm-up. Exit::usage if the model's
// cache is too short for the first.
BenchResult run_bench(DecodeModel& model, const BenchOptions& options);

// --bench-layer. `model` was loaded so that a token runs only attention, output projection, MLP-up and GELU of every
// layer. The result is the time of one layer at a context of kLayerContext, as in the tables of ClusterFusion (arXiv
// 2508.18850 and 2604.23553).
inline constexpr std::int64_t kLayerContext = 64;
struct LayerBenchResult {
  std::int64_t layers = 0;
  double layer_ms = 0;  // median over tokens, divided by the layers
};
LayerBenchResult run_layer_bench(DecodeModel& model, std::uint64_t seed);
std::string layer_bench_text(const LayerBenchResult& result, const DecodePath& path);
Json layer_bench_json(const LayerBenchResult& result, const DecodePath& path);

std::string bench_text(const BenchResult& result);
Json bench_json(const BenchResult& result, const DecodePath& path);

}  // namespace weft
