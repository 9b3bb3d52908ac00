#include "llmc/infer/batch_bench.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/infer/bench.h"

namespace weft {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kWarmUpTokens = 8;

// Ids that the sequences were given since the counters were reset: all of them, and those that were a sequence's first.
struct Handed {
  std::int64_t ids = 0, first_ids = 0;
};

class Counter final : public RequestListener {
 public:
  explicit Counter(Handed& handed) : handed_(handed) {}
  bool on_id(const ScoredId&) override {
    ++handed_.ids;
    if (std::exchange(first_, false)) ++handed_.first_ids;
    return true;
  }
  void on_end(RequestEnd end) override { ended = end; }

  RequestEnd ended = RequestEnd::cancelled;

 private:
  Handed& handed_;
  bool first_ = true;
};

struct ClosedRun {
  double prompt_seconds = 0;
  std::vector<double> step_ms;
};

// Runs `sequences` requests at once, from the submission of all to the last id of the last one.
ClosedRun run_closed(InferenceModel& model, EngineOptions engine_options, const BatchBenchOptions& options,
                     std::int64_t sequences, std::int64_t tokens) {
  engine_options.max_running = sequences;
  Engine engine(model, engine_options);
  Handed handed;
  std::vector<std::shared_ptr<Counter>> counters;
  for (std::int64_t i = 0; i < sequences; ++i) {
    EngineRequest request;
    request.prompt = random_ids(options.prompt, model.config().vocab_size, options.sampler.seed + 1 + i);
    request.sampling = sampling_plan(options.sampler);
    request.max_ids = tokens;
    counters.push_back(std::make_shared<Counter>(handed));
    engine.submit(std::move(request), counters.back());
  }
  ClosedRun run;
  const Clock::time_point start = Clock::now();
  // Steps overlap: a step is taken to begin when the one before it ended. The host may see several ends at once, so they are
  // those of the device's clock. Every sequence has its first id before all decode.
  double before = 0;
  for (bool more = true; more;) {
    handed = {};
    more = engine.step();
    if (handed.first_ids > 0) run.prompt_seconds = seconds_since(start);
    if (handed.ids == 0) continue;
    const double ended = model.ended_seconds();
    if (handed.ids == sequences && handed.first_ids == 0) run.step_ms.push_back(1e3 * (ended - before));
    before = ended;
  }
  for (const std::shared_ptr<Counter>& counter : counters) {
    if (counter->ended == RequestEnd::not_finite) fail(Exit::numeric, "--bench-batch: the logits are not finite");
  }
  return run;
}

void check_sizes(const InferenceModel& model, const BatchBenchOptions& options) {
  const auto wide = [](std::int64_t value) { return static_cast<long long>(value); };
  if (options.tokens < 2) {
    fail(Exit::usage, "--bench-batch: got %lld generated tokens, expected at least 2: the first is of the prompt",
         wide(options.tokens));
  }
  const std::int64_t limit = std::max(model.max_positions(), model.config().max_positions);
  if (options.prompt > limit || options.tokens > limit - options.prompt) {
    fail(Exit::usage, "--bench-batch: %lld prompt and %lld generated tokens do not fit in the context of %lld",
         wide(options.prompt), wide(options.tokens), wide(limit));
  }
  // The last id needs no position. A sequence is admitted if every running one can get a further page (scheduler.cpp).
  const auto pages_of = [&](std::int64_t positions) { return (positions - 1) / model.page_size() + 1; };
  const std::int64_t pages = std::max(pages_of(options.prompt + options.tokens - 1), pages_of(options.prompt) + 1);
  const std::int64_t most = *std::max_element(options.sequences.begin(), options.sequences.end());
  if (pages * most <= model.num_pages()) return;
  fail(Exit::resources,
       "--bench-batch: %lld sequences need %lld pages of keys and values, and there are %lld: enough for %lld",
       wide(most), wide(pages * most), wide(model.num_pages()), wide(model.num_pages() / pages));
}

BatchBenchPoint measure(InferenceModel& model, const EngineOptions& engine, const BatchBenchOptions& options,
                        std::int64_t sequences) {
  const auto let_device_rest = [&options] {
    if (options.rest) std::this_thread::sleep_for(kBenchRest);
  };
  run_closed(model, engine, options, sequences, std::min(kWarmUpTokens, options.tokens));
  std::array<double, 3> prompts{};
  for (double& seconds : prompts) {
    let_device_rest();
    seconds = run_closed(model, engine, options, sequences, 1).prompt_seconds;
  }
  let_device_rest();

  BatchBenchPoint point;
  point.sequences = sequences;
  point.prompt_seconds = percentile(prompts, 50);
  point.step_ms = run_closed(model, engine, options, sequences, options.tokens).step_ms;
  if (point.step_ms.empty()) {
    fail(Exit::usage,
         "--bench-batch: %lld sequences never ran at the same time: the first had its %lld tokens before the last "
         "prompt of "
         "%lld ids was computed. Give more --max-tokens, or more --prompt-rows",
         static_cast<long long>(sequences), static_cast<long long>(options.tokens),
         static_cast<long long>(options.prompt));
  }
  point.bytes_per_step = model.bytes_per_step(sequences, options.prompt + options.tokens / 2);
  return point;
}

}  // namespace

double BatchBenchPoint::mean_ms() const {
  return std::accumulate(step_ms.begin(), step_ms.end(), 0.0) / static_cast<double>(step_ms.size());
}

BatchBenchResult run_batch_bench(InferenceModel& model, EngineOptions engine, const BatchBenchOptions& options) {
  check_sizes(model, options);
  engine.share_prefixes = false;
  BatchBenchResult result{options.prompt, options.tokens, {}, options.read_ceiling};
  for (const std::int64_t sequences : options.sequences) {
    result.points.push_back(measure(model, engine, options, sequences));
  }
  return result;
}

std::string batch_bench_text(const BatchBenchResult& result) {
  std::string text = format("prompts of %lld ids, %lld generated\n%9s %15s %15s %9s %9s %11s %8s %8s\n",
                            static_cast<long long>(result.prompt), static_cast<long long>(result.tokens), "sequences",
                            "prompt tokens/s", "decode tokens/s", "median ms", "p99 ms", "a step", "GB/s", "of read");
  for (const BatchBenchPoint& point : result.points) {
    const std::string share = result.read_ceiling > 0
                                  ? format("%.1f %%", 100 * point.gb_per_second() / result.read_ceiling)
                                  : std::string("-");
    text +=
        format("%9lld %15.0f %15.1f %9.3f %9.3f %11s %8.1f %8s\n", static_cast<long long>(point.sequences),
               static_cast<double>(point.sequences * result.prompt) / point.prompt_seconds, point.tokens_per_second(),
               point.step_percentile(50), point.step_percentile(99),
               human_bytes(static_cast<double>(point.bytes_per_step)).c_str(), point.gb_per_second(), share.c_str());
  }
  if (result.read_ceiling > 0) text += format("a plain read reaches %.0f GB/s here\n", result.read_ceiling);
  return text;
}

Json batch_bench_json(const BatchBenchResult& result, const DecodePath& path) {
  Json points = Json::array();
  for (const BatchBenchPoint& point : result.points) {
    Json object = {
        {"sequences", point.sequences},
        {"prefill_tokens_per_s", static_cast<double>(point.sequences * result.prompt) / point.prompt_seconds},
        {"decode_tokens_per_s", point.tokens_per_second()},
        {"steps", point.step_ms.size()},
        {"step_ms_p50", point.step_percentile(50)},
        {"step_ms_p99", point.step_percentile(99)},
        {"bytes_per_step", point.bytes_per_step},
        {"gb_per_s", point.gb_per_second()},
    };
    if (result.read_ceiling > 0) object["share_of_read_ceiling"] = point.gb_per_second() / result.read_ceiling;
    points.push_back(std::move(object));
  }
  Json object = {{"prompt_tokens", result.prompt},
                 {"tokens", result.tokens},
                 {"points", std::move(points)},
                 {"device", path.device},
                 {"decode", path.decode}};
  if (result.read_ceiling > 0) object["read_ceiling_gb_per_s"] = result.read_ceiling;
  return object;
}

}  // namespace weft
