#include "llmc/train/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/percentile.h"
#include "llmc/base/philox.h"
#include "llmc/model/compare.h"

namespace weft {

namespace {

constexpr std::int64_t kWarmupSteps = 4, kTimedSteps = 15;

// Dense bf16 rates of the datasheets; 0 for a GPU that is not listed: no MFU is better than a wrong one. The first name that
// the device's name contains is taken. "H100 NVL" and "GB200" contain names of other GPUs, but have other rates, so they
// come first and count as unknown.
double peak_bf16_flops(const std::string& device_name) {
  const std::pair<const char*, double> known[] = {{"NVL", 0},         {"GB200", 0},       {"H100 PCIe", 756.4e12},
                                                  {"H100", 989.4e12}, {"H200", 989.4e12}, {"A100", 311.9e12},
                                                  {"L40S", 362.0e12}, {"B200", 2250e12}};
  for (const auto& [name, flops] : known) {
    if (device_name.find(name) != std::string::npos) return flops;
  }
  return 0;
}

void random_ids(std::vector<std::int32_t>& ids, std::int64_t vocab, std::uint64_t seed, std::uint64_t batch) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const PhiloxWords words = philox(seed, batch << 32 | i, static_cast<std::uint64_t>(RandomStream::data_order));
    ids[i] = static_cast<std::int32_t>(words.word[0] % static_cast<std::uint32_t>(vocab));
  }
}

}  // namespace

double training_flops_per_token(const ModelConfig& config, const std::optional<LoraConfig>& lora, std::int64_t T) {
  const TensorTable table(config);
  const double embedding = static_cast<double>(config.vocab_size * config.hidden_size);
  double matrices = config.tied_embeddings ? embedding : 0;  // a tied embedding is the head as well
  for (const TensorSpec& spec : table.specs()) {
    if (spec.shape.size() == 2) matrices += static_cast<double>(spec.elements);
  }
  matrices -= embedding;
  const double attention = 6 * static_cast<double>(config.num_layers * config.q_size() * T);
  if (!lora) return 6 * matrices + attention;
  return 4 * matrices + attention + 6 * static_cast<double>(TensorTable(config, *lora).parameters());
}

namespace {

// Approximately normal with a new model's standard deviation, 0.02: sums of four uniform numbers.
std::vector<float> noise_table() {
  std::vector<float> table(1'048'573);  // a prime, so that no two rows of a matrix are equal
  for (std::size_t i = 0; i < table.size(); ++i) {
    const PhiloxWords words = philox(3, i, static_cast<std::uint64_t>(RandomStream::init));
    float sum = -2;
    for (const std::uint32_t word : words.word) sum += uniform01(word);
    table[i] = 0.02f * std::sqrt(3.0f) * sum;
  }
  return table;
}

// A tensor of a quantised matrix whose values have that deviation.
std::vector<std::byte> random_bytes(const TensorSpec& spec, const WeightFormat& format) {
  std::vector<std::byte> bytes(spec.bytes, static_cast<std::byte>(kRandomZero));
  if (spec.kind == ValueKind::scales) {
    const std::vector<float> scales(static_cast<std::size_t>(spec.elements),
                                    static_cast<float>(0.02 / format.random_deviation));
    convert_from_f32(scales.data(), spec.dtype, bytes.data(), scales.size());
  }
  if (spec.kind != ValueKind::quants) return bytes;
#pragma omp parallel for schedule(static)
  for (std::size_t first = 0; first < bytes.size(); first += sizeof(PhiloxWords)) {
    const PhiloxWords words =
        philox(3, static_cast<std::uint64_t>(spec.byte_offset) + first, static_cast<std::uint64_t>(RandomStream::init));
    for (std::size_t i = first; i < std::min(bytes.size(), first + sizeof words); ++i) {
      const auto bits = static_cast<std::uint8_t>(words.word[(i - first) / 4] >> 8 * ((i - first) % 4));
      bytes[i] = static_cast<std::byte>(format.random_q(bits));
    }
  }
  return bytes;
}

// Takes training steps, as TrainLoop does, on one random micro-batch.
class BenchSteps {
 public:
  BenchSteps(TrainModel& model, const TrainSettings& settings, int ranks)
      : model_(model), settings_(settings), micro_batches_(settings.accumulation() / ranks) {
    const auto count = static_cast<std::size_t>(settings.micro_batch * settings.seq_len);
    tokens_.resize(count);
    labels_.resize(count);
    random_ids(tokens_, model.config().vocab_size, 1, 0);
    random_ids(labels_, model.config().vocab_size, 2, 0);
    update_.step = 0;
    update_.learning_rate = 1e-4f;
  }

  // One step; returns its loss.
  double run() {
    ++update_.step;
    model_.zero_gradients();
    for (std::int64_t i = 0; i < micro_batches_; ++i) {
      model_.forward({tokens_, labels_}, 0, 1.0f / static_cast<float>(settings_.batch_tokens));
      model_.backward();
    }
    const StepStatistics statistics = model_.statistics();
    update_.gradient_scale = clip_factor(statistics.gradient_norm, settings_.grad_clip);
    model_.update(update_);
    return statistics.loss_sum / static_cast<double>(statistics.label_count);
  }

 private:
  TrainModel& model_;
  const TrainSettings& settings_;
  const std::int64_t micro_batches_;  // of this rank
  std::vector<std::int32_t> tokens_, labels_;
  AdamWStep update_;
};

}  // namespace

void bench_parameters(TrainModel& model, bool trains_adapter) {
  const std::vector<float> table = noise_table();
  std::vector<float> values;
  constexpr std::size_t kPiece = 1 << 14;  // elements of a thread at a time
  const auto fill = [&](const TensorSpec& spec, bool normal) {
    values.resize(static_cast<std::size_t>(spec.elements));
    const float constant = spec.init == Init::ones ? 1.0f : 0.0f;
    const std::size_t shift = static_cast<std::size_t>(spec.offset) % table.size();
#pragma omp parallel for schedule(static)
    for (std::size_t i = 0; i < values.size(); i += kPiece) {
      const std::size_t end = std::min(values.size(), i + kPiece);
      std::size_t from = (i + shift) % table.size();
      for (std::size_t to = i; to < end; ++to) {
        values[to] = normal ? table[from] : constant;
        if (++from == table.size()) from = 0;
      }
    }
  };
  const auto is_normal = [](const TensorSpec& spec) {
    return spec.init == Init::normal || spec.init == Init::normal_residual;
  };
  for (const TensorSpec& spec : model.table().specs()) {
    fill(spec, trains_adapter || is_normal(spec));
    model.write_tensor(TensorRole::parameter, spec, values.data());
  }
  if (!trains_adapter) return;
  const TensorTable frozen = model.frozen_table();
  const WeightFormat* format = nullptr;  // of the tensors in front
  for (const TensorSpec& spec : frozen.specs()) {
    if (spec.kind == ValueKind::floats) {
      fill(spec, is_normal(spec));
      model.write_frozen(spec, values.data());
      continue;
    }
    if (spec.kind == ValueKind::quants) format = &weight_format(spec.dtype);
    model.write_frozen_quantized(spec, random_bytes(spec, *format).data());
  }
}

TrainBenchResult bench_training(TrainModel& model, const TrainSettings& settings, const std::string& device_name,
                                Communicator& ranks) {
  TrainBenchResult result;
  result.tokens = settings.batch_tokens;
  result.flops_per_token = training_flops_per_token(model.config(), settings.lora(), settings.seq_len);
  result.trains_adapter = settings.lora_r > 0;
  result.memory_bytes = total_bytes(model.memory());
  result.ranks = ranks.size();
  result.peak_flops = ranks.size() * peak_bf16_flops(device_name);

  BenchSteps steps(model, settings, ranks.size());
  std::vector<double> milliseconds;
  for (std::int64_t step = 1; step <= kWarmupSteps + kTimedSteps; ++step) {
    ranks.barrier();
    const auto begin = std::chrono::steady_clock::now();
    result.last_loss = steps.run();
    const double passed = in_milliseconds(std::chrono::steady_clock::now() - begin);
    if (step > kWarmupSteps) milliseconds.push_back(passed);
    if (step == 1) result.first_loss = result.last_loss;
  }
  result.median_ms = percentile(milliseconds, 50);
  result.fastest_ms = *std::min_element(milliseconds.begin(), milliseconds.end());
  result.slowest_ms = *std::max_element(milliseconds.begin(), milliseconds.end());
  return result;
}

OperatorTable bench_operators(TrainModel& model, const TrainSettings& settings) {
  constexpr int kTimedSteps = 5;
  BenchSteps steps(model, settings, 1);
  for (std::int64_t step = 0; step < kWarmupSteps; ++step) steps.run();
  std::vector<OperatorTable> tables;
  for (int i = 0; i < kTimedSteps; ++i) tables.push_back(model.time_operators([&] { steps.run(); }));
  OperatorTable result = tables[0];
  if (result.operators.empty()) {
    fail(Exit::usage, "--operators: the clock is the GPU's, and this is --device %s", settings.device.c_str());
  }
  const auto over_steps = [&](const auto& value) {
    std::vector<double> values;
    for (const OperatorTable& table : tables) values.push_back(value(table));
    return percentile(values, 50);
  };
  result.milliseconds = over_steps([](const OperatorTable& table) { return table.milliseconds; });
  for (std::size_t i = 0; i < result.operators.size(); ++i) {
    result.operators[i].milliseconds = over_steps([&](const OperatorTable& t) { return t.operators[i].milliseconds; });
  }
  return result;
}

std::vector<std::string> operator_table_text(const OperatorTable& table, const std::string& device_name) {
  std::vector<std::string> lines = {
      format("%s: a step's operators, each between two events, median of five steps", device_name.c_str()),
      format("floor: the longer of bytes / %.0f GB/s (a copy) and flops / %.0f TF/s (a GEMM of 8192 x 8192)",
             table.bytes_per_s * 1e-9, table.flops_per_s * 1e-12),
      format("%-20s %6s %9s %7s %8s %8s %8s  %s", "operator", "calls", "us each", "% step", "GB/s", "TF/s", "% floor",
             "kernel")};
  OperatorTime all;
  double floor = 0;
  const auto line = [&](const OperatorTime& time, double floor_ms) {
    lines.push_back(format(
        "%-20s %6lld %9.1f %7.2f %8.0f %8.0f %8.1f%s", time.name.c_str(), static_cast<long long>(time.calls),
        1e3 * time.milliseconds / static_cast<double>(time.calls), 100 * time.milliseconds / table.milliseconds,
        time.bytes / time.milliseconds * 1e-6, time.flops / time.milliseconds * 1e-9,
        100 * floor_ms / time.milliseconds, time.implementation.empty() ? "" : ("  " + time.implementation).c_str()));
  };
  for (const OperatorTime& time : table.operators) {
    line(time, table.floor_milliseconds(time));
    all.calls += time.calls;
    all.milliseconds += time.milliseconds;
    all.flops += time.flops;
    all.bytes += time.bytes;
    floor += table.floor_milliseconds(time);
  }
  lines.push_back(format("sum %.2f ms of a step of %.2f ms, floor %.2f ms (%.1f %% of the sum)", all.milliseconds,
                         table.milliseconds, floor, 100 * floor / all.milliseconds));
  return lines;
}

namespace {

// The fields with which all results begin: what was measured, and on which device.
Json measured_json(const TrainSettings& s, const std::string& device_name) {
  return {{"device", device_name},        {"config", s.config.empty() ? s.model : s.config},
          {"precision", s.precision},     {"recompute", s.recompute},
          {"micro_batch", s.micro_batch}, {"seq_len", s.seq_len}};
}

}  // namespace

Json operator_table_json(const OperatorTable& table, const TrainSettings& s, const std::string& device_name) {
  Json operators = Json::array();
  for (const OperatorTime& time : table.operators) {
    operators.push_back({{"name", time.name},
                         {"implementation", time.implementation},
                         {"calls", time.calls},
                         {"ms", time.milliseconds},
                         {"flops", time.flops},
                         {"bytes", time.bytes},
                         {"floor_ms", table.floor_milliseconds(time)}});
  }
  Json json = measured_json(s, device_name);
  json.update({{"step_ms", table.milliseconds},
               {"copy_bytes_per_s", table.bytes_per_s},
               {"square_flops_per_s", table.flops_per_s},
               {"operators", operators}});
  return json;
}

std::vector<std::string> train_bench_text(const TrainBenchResult& r, const std::string& device_name) {
  const double achieved = r.tokens_per_s() * r.flops_per_token;
  std::vector<std::string> lines = {
      format("%s: %.0f tokens/s; a step of %lld tokens in %.2f ms (median of %lld; %.2f to %.2f)", device_name.c_str(),
             r.tokens_per_s(), static_cast<long long>(r.tokens), r.median_ms, static_cast<long long>(kTimedSteps),
             r.fastest_ms, r.slowest_ms),
      format("%.3g TF/s by %s = %.3f GF a token (causal)", achieved * 1e-12,
             r.trains_adapter ? "4 N_matmul + 6 L q T + 6 N_adapter" : "6 N_matmul + 6 L q T",
             r.flops_per_token * 1e-9)};
  if (r.ranks > 1) {
    lines.push_back(format("%d ranks: %.0f tokens/s each", r.ranks, r.tokens_per_s() / r.ranks));
  }
  lines.push_back(r.peak_flops > 0
                      ? format("MFU %.1f %% of the %.1f TF/s of dense bf16", 100 * r.mfu(), r.peak_flops * 1e-12)
                      : std::string("MFU n/a: the peak of this device is not known"));
  lines.push_back(format("loss %.4f -> %.4f on the same random tokens, in %s of memory", r.first_loss, r.last_loss,
                         human_bytes(static_cast<double>(r.memory_bytes)).c_str()));
  return lines;
}

Json train_bench_json(const TrainBenchResult& r, const TrainSettings& s, const std::string& device_name) {
  Json json = measured_json(s, device_name);
  json.update({{"tokens", r.tokens},
               {"median_ms", r.median_ms},
               {"tokens_per_s", r.tokens_per_s()},
               {"flops_per_token", r.flops_per_token},
               {"mfu", r.peak_flops > 0 ? Json(r.mfu()) : Json(nullptr)},
               {"first_loss", r.first_loss},
               {"last_loss", r.last_loss},
               {"memory_bytes", r.memory_bytes}});
  if (r.ranks > 1)
    json.update({{"ranks", r.ranks}, {"shard", s.shard}, {"tokens_per_s_rank", r.tokens_per_s() / r.ranks}});
  return json;
}

}  // namespace weft
