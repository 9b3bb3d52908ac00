// How fast a model decodes: random ids in, times out. What the tokens are does not change the work.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "llmc/infer/report.h"
#include "llmc/model/decode_model.h"

namespace weft {

inline constexpr std::int64_t kBenchPrompt = 32;

struct BenchResult {
  std::int64_t prompt = 0, tokens = 0;
  double prefill_ms = 0;  // of the whole prompt, median of three
  GenerateTimes decode;   // one value a decode step; first_token_ms unused
  MemoryTraffic traffic;
  bool interrupted = false;
};

// A prompt of kBenchPrompt random ids, then `tokens` decode steps, after a warm-up. Exit::usage if the
// context is too short.
BenchResult run_bench(DecodeModel& model, std::int64_t tokens, std::uint64_t seed,
                      const std::function<bool()>& interrupted);

std::string bench_text(const BenchResult& result);
Json bench_json(const BenchResult& result, const RunPlace& place);

}  // namespace weft
