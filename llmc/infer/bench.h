// How fast a model decodes: random ids in, times out. What the tokens are does not change the work.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llmc/infer/report.h"
#include "llmc/model/decode_model.h"

namespace weft {

inline constexpr std::int64_t kBenchPrompt = 32;
inline constexpr std::int64_t kBenchContextTokens = 64;  // decoded at each of --bench-contexts, or as many as fit

struct BenchOptions {
  std::int64_t tokens = 128;                // decoded after a prompt of kBenchPrompt
  std::vector<std::int64_t> contexts = {};  // and these lengths of the prompt
  std::uint64_t seed = 0;
  double read_ceiling = 0;  // GB/s that a plain read reaches on this device; 0: not measured
};

// Positions that the cache needs for these options, at most `limit`.
std::int64_t bench_capacity(const BenchOptions& options, std::int64_t limit);
// "64,1024,2000" as lengths from 1 to limit - 1. Anything else is Exit::usage.
std::vector<std::int64_t> parse_contexts(const std::string& text, std::int64_t limit);

// One length of the prompt, as one request meets it: every run that is timed starts from a GPU that has rested. A model that
// samples is timed with its sampling, from id to id as the host gets them; another one without.
struct BenchPoint {
  std::int64_t prompt = 0, tokens = 0;
  double first_token_ms = 0;  // the whole prompt, median of three
  GenerateTimes decode;       // one value a decode step; first_token_ms unused
  MemoryTraffic traffic;
};

struct BenchResult {
  BenchPoint main;
  std::vector<BenchPoint> contexts;
  double read_ceiling = 0;
};

// After a warm-up. Exit::usage if the context is too short.
BenchResult run_bench(DecodeModel& model, const BenchOptions& options);

// A model whose tokens are attention, output projection, MLP-up and GELU of every layer, and nothing else: the time of one
// layer at a context of kLayerContext, as the tables of ClusterFusion have it (arXiv 2508.18850 and 2604.23553).
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
