// Reports on a generation or a perplexity run: lines for people, a JSON object for programs.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "llmc/base/json_fwd.h"
#include "llmc/infer/divergence.h"
#include "llmc/infer/generate.h"
#include "llmc/infer/perplexity.h"
#include "llmc/model/decode_model.h"

namespace weft {

// Where and how a model runs, for example "cpu" and "reference".
struct DecodePath {
  std::string device, decode;
};

// Bytes that a decode step has to read at the given context (usually that of the middle of the generation), and the
// rate that follows from the speed: a lower bound of the memory traffic.
struct MemoryTraffic {
  std::uint64_t bytes_per_token = 0;
  double gb_per_second = 0;  // NaN if nothing was decoded
};
MemoryTraffic memory_traffic(const DecodeModel& model, std::int64_t context, double tokens_per_second);

// "2.71 tokens a step, 43 % of 120 drafted accepted", and the same as an object: steps (of the sequence),
// tokens_per_step, verifications, drafted, accepted.
std::string drafts_text(const DraftCounts& counts);
Json drafts_json(const DraftCounts& counts);

// "160 tokens, 956/s", and why the generation ended where that is not as asked.
std::string short_statistics(const GenerateResult& result);
// "first token 12.3 ms; then 31 tokens at 152 tokens/s, 6.5 ms (p50) and 7.1 ms (p99) between tokens; ..."
std::string statistics_line(const DecodeModel& model, const GenerateResult& result);

// The object of --json: prompt_ids, ids, text, finish_reason, ttft_ms, itl_ms_p50, itl_ms_p99, tokens_per_s,
// bytes_per_token, gb_per_s, device, decode; drafts if the model drafts. A figure that was not measured is null.
Json generation_json(const DecodeModel& model, std::span<const std::int32_t> prompt, const GenerateResult& result,
                     const DecodePath& path);

// The lines of a perplexity run, and its object for --json.
std::string perplexity_text(const PerplexityResult& result, std::int64_t window, std::int64_t stride);
Json perplexity_json(const PerplexityResult& result, std::int64_t window, std::int64_t stride, const DecodePath& path);
// The same for a comparison with another model.
std::string divergence_text(const DivergenceResult& result, std::int64_t window, std::int64_t stride);
Json divergence_json(const DivergenceResult& result, std::int64_t window, std::int64_t stride, const DecodePath& path);

// `object` as one line of JSON. U+FFFD replaces bytes that are not UTF-8.
std::string json_line(const Json& object);

}  // namespace weft
