#include "llmc/train/bench.h"

#include <algorithm>
#include <chrono>

#include "llmc/base/error.h"
#include "llmc/base/philox.h"
#include "llmc/model/compare.h"

namespace weft {

namespace {

constexpr std::int64_t kWarmupSteps = 4, kTimedSteps = 15;

// Dense bf16 rates of the datasheets. A GPU that is not here gets no share, never a wrong one.
double peak_bf16_flops(const std::string& device_name) {
  const std::pair<const char*, double> known[] = {{"H100 PCIe", 756.4e12}, {"H100", 989.4e12}, {"H200", 989.4e12},
                                                  {"A100", 311.9e12},      {"L40S", 362.0e12}, {"B200", 2250e12}};
  for (const auto& [name, flops] : known) {
    if (device_name.find(name) != std::string::npos) return flops;
  }
  return 0;
}

double causal_flops_per_token(const ModelConfig& config, const TensorTable& table, std::int64_t T) {
  const double embedding = static_cast<double>(config.vocab_size * config.hidden_size);
  double matrices = config.tied_embeddings ? embedding : 0;  // a tied embedding is the head as well
  for (const TensorSpec& spec : table.specs()) {
    if (spec.shape.size() == 2) matrices += static_cast<double>(spec.elements);
  }
  matrices -= embedding;
  return 6 * matrices + 6 * static_cast<double>(config.num_layers * config.q_size() * T);
}

void random_ids(std::vector<std::int32_t>& ids, std::int64_t vocab, std::uint64_t seed, std::uint64_t batch) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const PhiloxWords words = philox(seed, batch << 32 | i, static_cast<std::uint64_t>(RandomStream::data_order));
    ids[i] = static_cast<std::int32_t>(words.word[0] % static_cast<std::uint32_t>(vocab));
  }
}

}  // namespace

TrainBenchResult bench_training(TrainModel& model, const TrainSettings& settings, const std::string& device_name) {
  const auto count = static_cast<std::size_t>(settings.micro_batch * settings.seq_len);
  std::vector<std::int32_t> tokens(count), labels(count);
  random_ids(tokens, model.config().vocab_size, 1, 0);
  random_ids(labels, model.config().vocab_size, 2, 0);
  TrainBenchResult result;
  result.tokens = settings.batch_tokens;
  result.flops_per_token = causal_flops_per_token(model.config(), model.table(), settings.seq_len);
  result.peak_flops = peak_bf16_flops(device_name);

  AdamWStep update;
  update.learning_rate = 1e-4f;
  std::vector<double> milliseconds;
  for (update.step = 1; update.step <= kWarmupSteps + kTimedSteps; ++update.step) {
    const auto begin = std::chrono::steady_clock::now();
    model.zero_gradients();
    for (std::int64_t i = 0; i < settings.accumulation(); ++i) {
      model.forward({tokens, labels}, 0, 1.0f / static_cast<float>(settings.batch_tokens));
      model.backward();
    }
    const StepStatistics statistics = model.statistics();
    update.gradient_scale = clip_factor(statistics.gradient_norm, settings.grad_clip);
    model.update(update);
    const std::chrono::duration<double, std::milli> passed = std::chrono::steady_clock::now() - begin;
    if (update.step > kWarmupSteps) milliseconds.push_back(passed.count());
    result.last_loss = statistics.loss_sum / static_cast<double>(statistics.label_count);
    if (update.step == 1) result.first_loss = result.last_loss;
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  result.median_ms = milliseconds[milliseconds.size() / 2];
  result.fastest_ms = milliseconds.front();
  result.slowest_ms = milliseconds.back();
  return result;
}

std::vector<std::string> train_bench_text(const TrainBenchResult& r, const std::string& device_name) {
  const double achieved = r.tokens_per_s() * r.flops_per_token;
  std::vector<std::string> lines = {
      format("%s: %.0f tokens/s; a step of %lld tokens in %.2f ms (median of %lld; %.2f to %.2f)", device_name.c_str(),
             r.tokens_per_s(), static_cast<long long>(r.tokens), r.median_ms, static_cast<long long>(kTimedSteps),
             r.fastest_ms, r.slowest_ms),
      format("%.3g TF/s by 6 N_matmul + 6 L q T = %.3f GF a token (causal)", achieved * 1e-12,
             r.flops_per_token * 1e-9)};
  lines.push_back(r.peak_flops > 0
                      ? format("MFU %.1f %% of the %.1f TF/s of dense bf16", 100 * r.mfu(), r.peak_flops * 1e-12)
                      : std::string("MFU n/a: the peak of this device is not known"));
  lines.push_back(format("loss %.4f -> %.4f on the same random tokens", r.first_loss, r.last_loss));
  return lines;
}

Json train_bench_json(const TrainBenchResult& r, const TrainSettings& s, const std::string& device_name) {
  return {{"device", device_name},
          {"config", s.config.empty() ? s.model : s.config},
          {"precision", s.precision},
          {"recompute", s.recompute},
          {"micro_batch", s.micro_batch},
          {"seq_len", s.seq_len},
          {"tokens", r.tokens},
          {"median_ms", r.median_ms},
          {"tokens_per_s", r.tokens_per_s()},
          {"flops_per_token", r.flops_per_token},
          {"mfu", r.peak_flops > 0 ? Json(r.mfu()) : Json(nullptr)},
          {"first_loss", r.first_loss},
          {"last_loss", r.last_loss}};
}

}  // namespace weft
