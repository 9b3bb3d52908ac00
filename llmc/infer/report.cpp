#include "llmc/infer/report.h"

#include <cmath>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"

namespace weft {

namespace {

Json finite_or_null(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

// The length of the cache halfway between the first and the last decode step.
std::int64_t middle_context(const GenerateResult& result) {
  return result.context - static_cast<std::int64_t>(result.times.inter_token_ms.size()) / 2;
}

}  // namespace

MemoryTraffic memory_traffic(const DecodeModel& model, std::int64_t context, double tokens_per_second) {
  const std::uint64_t bytes = model.bytes_per_token(context);
  return {bytes, static_cast<double>(bytes) * tokens_per_second / 1e9};
}

std::string drafts_text(const DraftCounts& counts) {
  return format("%.2f tokens a step, %.0f %% of %lld drafted accepted", counts.ids_per_chunk(),
                100 * counts.acceptance(), static_cast<long long>(counts.drafted));
}

Json drafts_json(const DraftCounts& counts) {
  return {{"steps", counts.chunks},
          {"tokens_per_step", counts.ids_per_chunk()},
          {"verifications", counts.verifications},
          {"drafted", counts.drafted},
          {"accepted", counts.accepted}};
}

std::string short_statistics(const GenerateResult& result) {
  const std::size_t count = result.ids.size();
  std::string line = format("%zu token%s", count, count == 1 ? "" : "s");
  const double rate = result.times.tokens_per_second();
  if (std::isfinite(rate)) line += format(rate < 10 ? ", %.1f/s" : ", %.0f/s", rate);
  if (result.finish_reason == FinishReason::interrupted || result.finish_reason == FinishReason::context_full) {
    line += format("; ended by %s", finish_reason_text(result.finish_reason));
  }
  return line;
}

std::string statistics_line(const DecodeModel& model, const GenerateResult& result) {
  const GenerateTimes& times = result.times;
  std::string line = format("first token %.1f ms", times.first_token_ms);
  const std::size_t decoded = times.inter_token_ms.size();
  if (decoded > 0) {
    const double rate = times.tokens_per_second();
    const MemoryTraffic traffic = memory_traffic(model, middle_context(result), rate);
    line += format("; then %zu token%s at %.1f tokens/s, %.2f ms (p50) and %.2f ms (p99) between tokens", decoded,
                   decoded == 1 ? "" : "s", rate, times.inter_token_percentile(50), times.inter_token_percentile(99));
    line += format("; %s a token, %.2f GB/s", human_bytes(static_cast<double>(traffic.bytes_per_token)).c_str(),
                   traffic.gb_per_second);
  }
  if (result.drafts.has_value()) line += "; " + drafts_text(*result.drafts);
  return line + format("; ended by %s", finish_reason_text(result.finish_reason));
}

Json generation_json(const DecodeModel& model, std::span<const std::int32_t> prompt, const GenerateResult& result,
                     const DecodePath& path) {
  const double rate = result.times.tokens_per_second();
  const MemoryTraffic traffic = memory_traffic(model, middle_context(result), rate);
  Json object = {
      {"prompt_ids", prompt},
      {"ids", result.ids},
      {"text", result.text},
      {"finish_reason", finish_reason_name(result.finish_reason)},
      {"ttft_ms", result.times.first_token_ms},
      {"itl_ms_p50", finite_or_null(result.times.inter_token_percentile(50))},
      {"itl_ms_p99", finite_or_null(result.times.inter_token_percentile(99))},
      {"tokens_per_s", finite_or_null(rate)},
      {"bytes_per_token", traffic.bytes_per_token},
      {"gb_per_s", finite_or_null(traffic.gb_per_second)},
      {"device", path.device},
      {"decode", path.decode},
  };
  if (result.drafts.has_value()) object["drafts"] = drafts_json(*result.drafts);
  return object;
}

std::string perplexity_text(const PerplexityResult& result, std::int64_t window, std::int64_t stride) {
  const auto wide = [](std::int64_t value) { return static_cast<long long>(value); };
  std::string text = format("perplexity     %.4f\n", result.perplexity());
  text += format("mean nll       %.5f", result.mean_nll);
  if (std::isfinite(result.standard_error)) text += format(" +- %.5f", result.standard_error);
  text += format(" nats a token\n");
  if (!result.interrupted) text += format("bits per byte  %.4f\n", result.bits_per_byte());
  const bool no_context = !result.interrupted && result.tokens < result.of_tokens;
  text += format("tokens         %lld of %lld%s, %lld bytes\n", wide(result.tokens), wide(result.of_tokens),
                 no_context ? " (the first has nothing before it)" : "", wide(result.bytes));
  text += format("windows        %lld of %lld tokens, stride %lld%s\n", wide(result.windows), wide(window),
                 wide(stride), result.interrupted ? ", interrupted" : "");
  return text;
}

Json perplexity_json(const PerplexityResult& result, std::int64_t window, std::int64_t stride, const DecodePath& path) {
  return {
      {"perplexity", finite_or_null(result.perplexity())},
      {"mean_nll", result.mean_nll},
      {"standard_error", finite_or_null(result.standard_error)},
      {"bits_per_byte", finite_or_null(result.bits_per_byte())},
      {"tokens", result.tokens},
      {"of_tokens", result.of_tokens},
      {"bytes", result.bytes},
      {"windows", result.windows},
      {"window", window},
      {"stride", stride},
      {"interrupted", result.interrupted},
      {"device", path.device},
      {"decode", path.decode},
  };
}

std::string divergence_text(const DivergenceResult& result, std::int64_t window, std::int64_t stride) {
  std::string text = format("KL divergence  %.6f", result.mean);
  if (std::isfinite(result.standard_error)) text += format(" +- %.6f", result.standard_error);
  text += format(" nats a token, at most %.4f\n", result.largest);
  text += format("same top id    %.2f %%\n", 100 * result.same_top);
  text += format("perplexity     %.4f, of the other %.4f: %+.2f %%\n", std::exp(result.nll),
                 std::exp(result.nll_against), 100 * std::expm1(result.nll - result.nll_against));
  text +=
      format("tokens         %lld in windows of %lld, stride %lld%s\n", static_cast<long long>(result.tokens),
             static_cast<long long>(window), static_cast<long long>(stride), result.interrupted ? ", interrupted" : "");
  return text;
}

Json divergence_json(const DivergenceResult& result, std::int64_t window, std::int64_t stride, const DecodePath& path) {
  return {
      {"kl_mean", result.mean},
      {"kl_standard_error", finite_or_null(result.standard_error)},
      {"kl_largest", result.largest},
      {"same_top", result.same_top},
      {"mean_nll", result.nll},
      {"mean_nll_against", result.nll_against},
      {"nll_difference_standard_error", finite_or_null(result.nll_difference_error)},
      {"tokens", result.tokens},
      {"window", window},
      {"stride", stride},
      {"interrupted", result.interrupted},
      {"device", path.device},
      {"decode", path.decode},
  };
}

std::string json_line(const Json& object) {
  return json_text(object) + "\n";
}

}  // namespace weft
