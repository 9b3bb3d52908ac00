#include "llmc/infer/bench.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <thread>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/percentile.h"
#include "llmc/base/philox.h"
#include "llmc/infer/prompt.h"

namespace weft {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kWarmUpSteps = 4;

// The times of one prompt, from an empty cache, and of one decode step for each id of `decode_ids`. A model that
// samples decodes its own ids: then only their number counts, and steps are timed by the device's clock, since ids may
// reach the host several at once.
struct Run {
  double first_token_ms = 0;
  std::vector<double> step_ms;
};
Run run_once(DecodeModel& model, std::span<const std::int32_t> prompt, std::span<const std::int32_t> decode_ids) {
  Run run;
  model.reset();
  Clock::time_point before = Clock::now();
  const auto lap = [&before] {
    const Clock::time_point now = Clock::now();
    return in_milliseconds(now - std::exchange(before, now));
  };
  if (model.samples()) {
    GenerationRequest request;
    request.sampling = sampling_plan({.vocab_limit = model.config().tokenizer_vocab});
    request.max_ids = static_cast<std::int64_t>(decode_ids.size()) + 1;
    std::optional<double> last;
    model.generate_ids(prompt, request, [&](std::int32_t) {
      const double sampled = model.sampled_seconds();
      if (last.has_value()) {
        run.step_ms.push_back(1e3 * (sampled - *last));
      } else {
        run.first_token_ms = lap();
      }
      last = sampled;
      return true;
    });
    return run;
  }
  model.prefill(prompt);
  run.first_token_ms = lap();
  for (const std::int32_t id : decode_ids) {
    model.decode(id);
    run.step_ms.push_back(lap());
  }
  return run;
}

BenchPoint measure(DecodeModel& model, std::int64_t prompt_tokens, std::int64_t tokens, std::uint64_t seed) {
  const std::vector<std::int32_t> ids =
      random_ids(prompt_tokens + std::max(tokens, kWarmUpSteps), model.config().tokenizer_vocab, seed);
  const std::span<const std::int32_t> prompt = std::span(ids).first(static_cast<std::size_t>(prompt_tokens));
  const std::span<const std::int32_t> decode_ids = std::span(ids).subspan(prompt.size());

  const std::int64_t warm_up = std::min(kWarmUpSteps, model.capacity() - prompt_tokens - 1);
  run_once(model, prompt, decode_ids.first(static_cast<std::size_t>(std::max<std::int64_t>(warm_up, 0))));
  const auto let_gpu_rest = [&model] {
    if (model.samples()) std::this_thread::sleep_for(kBenchRest);
  };
  std::array<double, 3> first{};
  for (double& ms : first) {
    let_gpu_rest();
    ms = run_once(model, prompt, {}).first_token_ms;
  }

  BenchPoint point;
  point.prompt = prompt_tokens;
  point.first_token_ms = percentile(first, 50);
  let_gpu_rest();
  point.decode.inter_token_ms = run_once(model, prompt, decode_ids.first(static_cast<std::size_t>(tokens))).step_ms;
  point.drafts = model.draft_counts();
  point.tokens = static_cast<std::int64_t>(point.decode.inter_token_ms.size());
  point.traffic = memory_traffic(model, point.prompt + point.tokens / 2, point.decode.tokens_per_second());
  return point;
}

std::string row(const BenchPoint& point, double ceiling) {
  const std::string drafts = point.drafts.has_value() ? "  " + drafts_text(*point.drafts) : "";
  const std::string name = format("prompt %lld, decode %lld tokens", static_cast<long long>(point.prompt),
                                  static_cast<long long>(point.tokens));
  return format("%-30s %10.3f %10.3f %10.3f %12.1f %8.1f %8s%s\n", name.c_str(), point.first_token_ms,
                point.decode.inter_token_percentile(50), point.decode.inter_token_percentile(99),
                point.decode.tokens_per_second(), point.traffic.gb_per_second,
                ceiling > 0 ? format("%.1f %%", 100 * point.traffic.gb_per_second / ceiling).c_str() : "-",
                drafts.c_str());
}

Json point_json(const BenchPoint& point, double ceiling) {
  Json object = {
      {"prompt_tokens", point.prompt},
      {"tokens", point.tokens},
      {"ttft_ms", point.first_token_ms},
      {"itl_ms_p50", point.decode.inter_token_percentile(50)},
      {"itl_ms_p99", point.decode.inter_token_percentile(99)},
      {"tokens_per_s", point.decode.tokens_per_second()},
      {"bytes_per_token", point.traffic.bytes_per_token},
      {"gb_per_s", point.traffic.gb_per_second},
  };
  if (point.drafts.has_value()) object["drafts"] = drafts_json(*point.drafts);
  if (ceiling > 0) object["share_of_read_ceiling"] = point.traffic.gb_per_second / ceiling;
  return object;
}

}  // namespace

std::int64_t bench_capacity(const BenchOptions& options, std::int64_t limit) {
  std::int64_t needed = kBenchPrompt + std::min(std::max(options.tokens, kWarmUpSteps), limit) + 1;
  needed = std::max(needed, kLayerContext + 1);
  for (const std::int64_t context : options.contexts) needed = std::max(needed, context + kBenchContextTokens + 1);
  return std::min(needed, limit);
}

std::vector<std::int32_t> random_ids(std::int64_t count, std::int64_t vocab_size, std::uint64_t seed) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < count; ++i) {
    const PhiloxWords words =
        philox(seed, static_cast<std::uint64_t>(i), static_cast<std::uint64_t>(RandomStream::sampling));
    ids.push_back(static_cast<std::int32_t>(words.word[0] % static_cast<std::uint64_t>(vocab_size)));
  }
  return ids;
}

BenchResult run_bench(DecodeModel& model, const BenchOptions& options) {
  const std::int64_t room = model.capacity() - kBenchPrompt;
  if (options.tokens > room || kWarmUpSteps > room) {
    fail(Exit::usage, "--bench: %lld prompt and %lld generated tokens do not fit in the context of %lld",
         static_cast<long long>(kBenchPrompt), static_cast<long long>(options.tokens),
         static_cast<long long>(model.capacity()));
  }
  BenchResult result;
  result.read_ceiling = options.read_ceiling;
  // A model that samples yields one more id than decode steps, and the last id needs a position, too.
  const std::int64_t steps = model.samples() ? std::min(options.tokens, room - 1) : options.tokens;
  result.main = measure(model, kBenchPrompt, steps, options.seed);
  for (const std::int64_t context : options.contexts) {
    const std::int64_t tokens = std::min(kBenchContextTokens, model.capacity() - context - 1);
    if (tokens < 1) break;
    result.contexts.push_back(measure(model, context, tokens, options.seed));
  }
  return result;
}

LayerBenchResult run_layer_bench(DecodeModel& model, std::uint64_t seed) {
  constexpr std::int64_t kTokens = 64;
  const BenchPoint point = measure(model, kLayerContext - kTokens / 2, kTokens, seed);
  const std::int64_t layers = model.config().num_layers;
  return {layers, point.decode.inter_token_percentile(50) / static_cast<double>(layers)};
}

std::string layer_bench_text(const LayerBenchResult& result, const DecodePath& path) {
  return format("attention, MLP-up and GELU of one layer of %lld in turn, context %lld, decode %s: %.4f ms\n",
                static_cast<long long>(result.layers), static_cast<long long>(kLayerContext), path.decode.c_str(),
                result.layer_ms);
}

Json layer_bench_json(const LayerBenchResult& result, const DecodePath& path) {
  return {{"layers", result.layers},
          {"context", kLayerContext},
          {"layer_ms", result.layer_ms},
          {"device", path.device},
          {"decode", path.decode}};
}

std::string bench_text(const BenchResult& result) {
  std::string text = format("%-30s %10s %10s %10s %12s %8s %8s\n", "", "TTFT ms", "median ms", "p99 ms", "tokens/s",
                            "GB/s", "of read");
  text += row(result.main, result.read_ceiling);
  for (const BenchPoint& point : result.contexts) text += row(point, result.read_ceiling);
  if (result.read_ceiling > 0) text += format("a plain read reaches %.0f GB/s here\n", result.read_ceiling);
  return text;
}

Json bench_json(const BenchResult& result, const DecodePath& path) {
  Json object = point_json(result.main, result.read_ceiling);
  object["contexts"] = Json::array();
  for (const BenchPoint& point : result.contexts) object["contexts"].push_back(point_json(point, result.read_ceiling));
  if (result.read_ceiling > 0) object["read_ceiling_gb_per_s"] = result.read_ceiling;
  object["device"] = path.device;
  object["decode"] = path.decode;
  return object;
}

}  // namespace weft
