#include "llmc/infer/bench.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/philox.h"

namespace weft {

namespace {

constexpr std::int64_t kWarmUpSteps = 4;

std::vector<std::int32_t> random_ids(std::int64_t count, std::int64_t vocab_size, std::uint64_t seed) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < count; ++i) {
    const PhiloxWords words =
        philox(seed, static_cast<std::uint64_t>(i), static_cast<std::uint64_t>(RandomStream::sampling));
    ids.push_back(static_cast<std::int32_t>(words.word[0] % static_cast<std::uint64_t>(vocab_size)));
  }
  return ids;
}

template <typename Work>
double time_ms(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

BenchResult run_bench(DecodeModel& model, std::int64_t tokens, std::uint64_t seed,
                      const std::function<bool()>& interrupted) {
  if (tokens > model.capacity() - kBenchPrompt || kWarmUpSteps > model.capacity() - kBenchPrompt) {
    fail(Exit::usage, "--bench: %lld prompt and %lld generated tokens do not fit in the context of %lld",
         static_cast<long long>(kBenchPrompt), static_cast<long long>(tokens),
         static_cast<long long>(model.capacity()));
  }
  const std::vector<std::int32_t> ids =
      random_ids(kBenchPrompt + std::max(tokens, kWarmUpSteps), model.config().vocab_size, seed);
  const std::span<const std::int32_t> prompt = std::span(ids).first(kBenchPrompt);
  const std::span<const std::int32_t> rest = std::span(ids).subspan(kBenchPrompt);

  BenchResult result;
  result.prompt = kBenchPrompt;
  model.reset();
  model.prefill(prompt);
  for (std::int64_t i = 0; i < kWarmUpSteps; ++i) model.decode(rest[static_cast<std::size_t>(i)]);

  std::array<double, 3> prefills{};
  for (double& milliseconds : prefills) {
    model.reset();
    milliseconds = time_ms([&] { model.prefill(prompt); });
  }
  std::sort(prefills.begin(), prefills.end());
  result.prefill_ms = prefills[1];

  for (std::int64_t i = 0; i < tokens && !result.interrupted; ++i) {
    const std::int32_t id = rest[static_cast<std::size_t>(i)];
    result.decode.inter_token_ms.push_back(time_ms([&] { model.decode(id); }));
    result.interrupted = interrupted && interrupted();
  }
  result.tokens = static_cast<std::int64_t>(result.decode.inter_token_ms.size());
  result.traffic = memory_traffic(model, result.prompt + result.tokens / 2, result.decode.tokens_per_second());
  return result;
}

std::string bench_text(const BenchResult& result) {
  const double prompt = static_cast<double>(result.prompt);
  std::string text = format("%-22s %10s %10s %12s %8s\n", "", "median ms", "p99 ms", "tokens/s", "GB/s");
  text += format("%-22s %10.3f %10s %12.1f %8s\n",
                 format("prefill, %lld tokens", static_cast<long long>(result.prompt)).c_str(), result.prefill_ms, "-",
                 prompt / result.prefill_ms * 1e3, "-");
  text += format("%-22s %10.3f %10.3f %12.1f %8.2f\n",
                 format("decode, %lld tokens", static_cast<long long>(result.tokens)).c_str(),
                 result.decode.inter_token_percentile(50), result.decode.inter_token_percentile(99),
                 result.decode.tokens_per_second(), result.traffic.gb_per_second);
  return text;
}

Json bench_json(const BenchResult& result, const RunPlace& place) {
  return {
      {"prompt_tokens", result.prompt},
      {"tokens", result.tokens},
      {"prefill_ms", result.prefill_ms},
      {"itl_ms_p50", result.decode.inter_token_percentile(50)},
      {"itl_ms_p99", result.decode.inter_token_percentile(99)},
      {"tokens_per_s", result.decode.tokens_per_second()},
      {"bytes_per_token", result.traffic.bytes_per_token},
      {"gb_per_s", result.traffic.gb_per_second},
      {"device", place.device},
      {"decode", place.decode},
  };
}

}  // namespace weft
