// infer_pythia --bench-batch: times many sequences at once through the engine, a closed batch of equally long prompts of
// random ids at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llmc/base/json_fwd.h"
#include "llmc/base/percentile.h"
#include "llmc/base/sampling.h"
#include "llmc/infer/engine.h"
#include "llmc/infer/report.h"
#include "llmc/model/inference_model.h"

namespace weft {

struct BatchBenchOptions {
  std::vector<std::int64_t> sequences;  // one measurement each
  std::int64_t prompt = 128;            // ids of each prompt
  std::int64_t tokens = 128;            // generated after each, at least 2
  SamplerOptions sampler = {};
  bool rest = false;        // pause before every timed run, as a GPU needs (kBenchRest)
  double read_ceiling = 0;  // GB/s of a kernel that only reads memory on this device; 0: not measured
};

struct BatchBenchPoint {
  std::int64_t sequences = 0;
  double prompt_seconds = 0;    // all prompts, to the last one's first id; median of three
  std::vector<double> step_ms;  // of the steps in which all sequences decode, in their order
  std::uint64_t bytes_per_step = 0;

  double step_percentile(double percent) const { return percentile(step_ms, percent); }
  double mean_ms() const;
  double tokens_per_second() const { return static_cast<double>(sequences) * 1e3 / mean_ms(); }
  double gb_per_second() const { return static_cast<double>(bytes_per_step) / mean_ms() / 1e6; }
};

struct BatchBenchResult {
  std::int64_t prompt = 0, tokens = 0;
  std::vector<BatchBenchPoint> points;
  double read_ceiling = 0;
};

// Exit::usage if prompt and tokens are more than a sequence can hold, Exit::resources if not all sequences fit into the
// pages at once, Exit::numeric if logits are not finite. `engine`: the options apart from max_running; prefixes are not
// shared.
BatchBenchResult run_batch_bench(InferenceModel& model, EngineOptions engine, const BatchBenchOptions& options);

std::string batch_bench_text(const BatchBenchResult& result);
Json batch_bench_json(const BatchBenchResult& result, const DecodePath& path);

}  // namespace weft
