// Sampling on the GPU: the same ids as the host Sampler, bit for bit, and the distribution that both promise.

#include "llmc/cuda/op/sample/sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "llmc/base/error.h"
#include "llmc/base/sampler.h"
#include "llmc/base/sampling_math.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
using Ids = std::vector<std::int32_t>;
using Positions = std::vector<std::int64_t>;
using Errors = std::vector<SampleError>;

struct Sampled {
  Ids ids;
  Errors errors;
};

// Rows of V logits at a distance of row_stride (0: one row for all).
Sampled sample_on_gpu(const SamplerOptions& options, const DeviceBuffer<float>& logits, std::int64_t V,
                      std::int64_t row_stride, const Positions& positions, bool clusters = true) {
  const DeviceBuffer<SamplingPlan> plan(std::vector<SamplingPlan>{sampling_plan(options)});
  const DeviceBuffer<std::int64_t> places(positions);
  const DeviceBuffer<std::int32_t> ids(positions.size());
  const DeviceBuffer<SampleError> errors(Errors(positions.size(), SampleError::none));
  sample(ids.data(), errors.data(), logits.data(), static_cast<std::int64_t>(positions.size()), V, row_stride,
         plan.data(), places.data(), nullptr, clusters);
  return {ids.download(), errors.download()};
}

std::string described(const SamplerOptions& o) {
  char text[160];
  std::snprintf(text, sizeof text, "temperature %g top-k %lld top-p %g min-p %g limit %lld", o.temperature,
                static_cast<long long>(o.top_k), o.top_p, o.min_p, static_cast<long long>(o.vocab_limit));
  return text;
}

// ---- rows of every kind -----------------------------------------------------------------------------------------------
using Generator = std::mt19937;
struct Kind {
  const char* name;
  std::function<float(Generator&, std::int64_t id, std::int64_t V)> logit;
};
float normal(Generator& g, float scale) {
  return std::normal_distribution<float>(0, scale)(g);
}
float uniform(Generator& g) {
  return std::uniform_real_distribution<float>()(g);
}
const std::vector<Kind> kKinds = {
    {"a model's", [](Generator& g, std::int64_t, std::int64_t) { return normal(g, 3); }},
    {"almost flat", [](Generator& g, std::int64_t, std::int64_t) { return normal(g, 1e-3f); }},
    {"steep", [](Generator& g, std::int64_t, std::int64_t) { return normal(g, 40); }},
    {"far from zero", [](Generator& g, std::int64_t, std::int64_t) { return 3e4f + normal(g, 2); }},
    {"ties of a half", [](Generator& g, std::int64_t, std::int64_t) { return std::round(2 * normal(g, 2)) / 2; }},
    {"two values", [](Generator& g, std::int64_t, std::int64_t) { return uniform(g) < 0.5f ? 1.0f : 1.25f; }},
    {"zeros of both signs", [](Generator& g, std::int64_t, std::int64_t) { return uniform(g) < 0.5f ? -0.0f : 0.0f; }},
    {"all equal", [](Generator&, std::int64_t, std::int64_t) { return -7.5f; }},
    {"one id has it all", [](Generator&, std::int64_t id, std::int64_t V) { return id == V * 2 / 3 ? 50.0f : 0.0f; }},
    {"mostly masked", [](Generator& g, std::int64_t id,
                         std::int64_t V) { return id != V / 3 && uniform(g) < 0.97f ? -kInfinity : normal(g, 2); }},
    {"just above no weight",
     [](Generator& g, std::int64_t id, std::int64_t V) { return id == V - 1 ? 28.4f : 0.2f * uniform(g); }},
    {"every exponent", [](Generator& g, std::int64_t,
                          std::int64_t) { return std::ldexp(normal(g, 1), static_cast<int>(250 * uniform(g)) - 125); }},
    {"subnormal", [](Generator& g, std::int64_t, std::int64_t) { return normal(g, 1) * 0x1p-130f; }},
    {"ids in order", [](Generator&, std::int64_t id,
                        std::int64_t V) { return 12.0f * static_cast<float>(id) / static_cast<float>(V); }},
};

std::vector<SamplerOptions> option_table(std::int64_t V) {
  return {
      {},
      {.temperature = 1, .seed = 1},
      {.temperature = 0.1, .seed = 2},
      {.temperature = 30, .seed = 3},
      {.temperature = 1e-300, .seed = 4},
      {.temperature = 1e300, .top_p = 0.3, .seed = 5},
      {.temperature = 1, .top_k = 1, .seed = 6},
      {.temperature = 1.5, .top_k = 2, .seed = 7},
      {.temperature = 1, .top_k = 50, .seed = 8},
      {.temperature = 3, .top_k = 700, .seed = 9},
      {.temperature = 2, .top_k = V, .seed = 10},
      {.temperature = 1, .top_p = 0, .seed = 11},
      {.temperature = 1, .top_p = 0.9, .seed = 12},
      {.temperature = 2, .top_p = 0.999, .seed = 13},
      {.temperature = 1, .min_p = 0.05, .seed = 14},
      {.temperature = 1, .min_p = 1, .seed = 15},
      {.temperature = 0.8, .top_k = 40, .top_p = 0.95, .min_p = 0.02, .seed = 16},
      {.temperature = 5, .top_k = 3000, .top_p = 0.5, .seed = (std::uint64_t{1} << 63) + 17},
      {.temperature = 4, .top_p = 0.8, .min_p = 0.1, .seed = 18, .vocab_limit = V - V / 5},
      {.vocab_limit = (V + 1) / 2},
      {.temperature = 1, .top_k = 10, .seed = 19, .vocab_limit = 5 * V},
  };
}

void compare_with_host(std::int64_t V, int rows_of_a_kind, long* compared) {
  SCOPED_TRACE(std::to_string(V) + " logits");
  const std::int64_t stride = V + 3;
  Generator generator(static_cast<unsigned>(V));
  std::vector<float> logits;
  Positions positions;
  std::vector<const char*> names;
  for (const Kind& kind : kKinds) {
    for (int r = 0; r < rows_of_a_kind; ++r) {
      for (std::int64_t id = 0; id < V; ++id) logits.push_back(kind.logit(generator, id, V));
      logits.insert(logits.end(), static_cast<std::size_t>(stride - V), std::nanf(""));  // what is read beyond V shows
      positions.push_back(static_cast<std::int64_t>(generator()) * (r % 2 == 0 ? 1 : 5));
      names.push_back(kind.name);
    }
  }
  const DeviceBuffer<float> gpu_logits(logits);
  for (const SamplerOptions& options : option_table(V)) {
    const Sampled got = sample_on_gpu(options, gpu_logits, V, stride, positions);
    const Sampled by_one_block = sample_on_gpu(options, gpu_logits, V, stride, positions, false);
    ASSERT_EQ(got.ids, by_one_block.ids) << described(options);
    ASSERT_EQ(got.errors, by_one_block.errors) << described(options);
    Sampler host(options);
    for (std::size_t r = 0; r < positions.size(); ++r) {
      const std::span<const float> row(logits.data() + r * static_cast<std::size_t>(stride),
                                       static_cast<std::size_t>(V));
      const std::int32_t want = host.sample(row, positions[r]);
      ASSERT_EQ(got.errors[r], SampleError::none) << names[r] << ", " << described(options);
      ASSERT_EQ(got.ids[r], want) << names[r] << ", " << described(options);
      ++*compared;
    }
  }
}

TEST(GpuSampler, PicksTheHostsIds) {
  long compared = 0;
  for (const std::int64_t V : {1, 2, 3, 31, 32, 33, 127, 255, 256, 257, 300, 1000}) {
    compare_with_host(V, 6, &compared);
  }
  for (const std::int64_t V : {4095, 4096, 4097, 16'384, 50'257, 50'304}) compare_with_host(V, 2, &compared);
  for (const std::int64_t V : {128'256, 152'064}) compare_with_host(V, 1, &compared);
  RecordProperty("metric_choices_compared", static_cast<int>(compared));
  EXPECT_GT(compared, 20'000);
}

TEST(GpuSampler, ManyPositionsOfOneRow) {
  const std::int64_t V = 50'277;
  Generator generator(4);
  std::vector<float> logits;
  for (std::int64_t id = 0; id < V; ++id) logits.push_back(normal(generator, 2.5f));
  const DeviceBuffer<float> gpu_logits(logits);
  Positions positions(300);
  std::iota(positions.begin(), positions.end(), 0);
  for (const SamplerOptions& options : {SamplerOptions{.temperature = 1, .seed = 1},
                                        SamplerOptions{.temperature = 1.1, .top_k = 200, .top_p = 0.9, .seed = 2}}) {
    const Sampled got = sample_on_gpu(options, gpu_logits, V, 0, positions);
    Sampler host(options);
    for (std::size_t i = 0; i < positions.size(); ++i) ASSERT_EQ(got.ids[i], host.sample(logits, positions[i])) << i;
    EXPECT_EQ(sample_on_gpu(options, gpu_logits, V, 0, positions).ids, got.ids) << "the same call again";
  }
}

// The ids that test/cpp/sampler_test.cpp pins for the host.
const std::vector<float> kLogits = {1.5f, -0.5f, 3.0f, 0.0f, 2.5f, -2.0f, 1.0f, 2.9f, -8.0f, 0.7f};
TEST(GpuSampler, ChoicesAreReproducible) {
  Positions positions(24);
  std::iota(positions.begin(), positions.end(), 0);
  const SamplerOptions options{.temperature = 0.9, .top_k = 8, .top_p = 0.95, .min_p = 0.01, .seed = 1234};
  EXPECT_EQ(sample_on_gpu(options, DeviceBuffer<float>(kLogits), 10, 0, positions).ids,
            (Ids{4, 7, 4, 7, 2, 7, 2, 6, 0, 2, 7, 4, 2, 2, 2, 6, 6, 7, 2, 7, 7, 2, 4, 2}));
}

TEST(GpuSampler, SeedsDiffer) {
  Positions positions(200);
  std::iota(positions.begin(), positions.end(), 0);
  const DeviceBuffer<float> logits(kLogits);
  const auto sequence = [&](std::uint64_t seed) {
    return sample_on_gpu({.temperature = 1, .seed = seed}, logits, 10, 0, positions).ids;
  };
  EXPECT_EQ(sequence(5), sequence(5));
  EXPECT_NE(sequence(5), sequence(6));
  EXPECT_NE(sequence(5), sequence(5 + (1ull << 32)));
}

// ---- the distribution, against probabilities in plain double arithmetic ------------------------------------------------
// The value that a chi-square variable of `degrees` exceeds once in a million draws (Wilson and Hilferty, 1931).
double chi_square_limit(int degrees) {
  const double z = 4.753, k = 2.0 / (9.0 * degrees);
  return degrees * std::pow(1 - k + z * std::sqrt(k), 3);
}

void expect_distribution(const SamplerOptions& options, const std::vector<double>& weights) {
  constexpr int kDraws = 200'000;
  Positions positions(kDraws);
  std::iota(positions.begin(), positions.end(), 0);
  const Ids ids = sample_on_gpu(options, DeviceBuffer<float>(kLogits), 10, 0, positions).ids;
  std::vector<int> counts(10, 0);
  for (const std::int32_t id : ids) ++counts.at(static_cast<std::size_t>(id));
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double chi_square = 0;
  int degrees = -1;
  for (std::size_t id = 0; id < weights.size(); ++id) {
    const double expected = weights[id] / total * kDraws;
    if (expected == 0) {
      EXPECT_EQ(counts[id], 0) << "id " << id << " was filtered out";
      continue;
    }
    ASSERT_GE(expected, 5) << "too rare for the approximation: another temperature";
    chi_square += (counts[id] - expected) * (counts[id] - expected) / expected;
    ++degrees;
  }
  EXPECT_LT(chi_square, chi_square_limit(degrees)) << described(options);
}

TEST(GpuSampler, Distribution) {
  const auto powers = [](double temperature, std::vector<std::size_t> kept) {
    std::vector<double> weights(kLogits.size(), 0.0);
    for (const std::size_t id : kept) weights[id] = std::exp(static_cast<double>(kLogits[id]) / temperature);
    return weights;
  };
  expect_distribution({.temperature = 1.5, .seed = 1}, powers(1.5, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  expect_distribution({.temperature = 1.5, .top_k = 4, .seed = 2}, powers(1.5, {0, 2, 4, 7}));
  // At temperature 1 the shares in falling order are 0.327, 0.296, 0.198, 0.073, ...: half of the mass needs two ids.
  expect_distribution({.temperature = 1, .top_p = 0.5, .seed = 3}, powers(1, {2, 7}));
  expect_distribution({.temperature = 1, .top_p = 0.7, .seed = 4}, powers(1, {2, 4, 7}));
  expect_distribution({.temperature = 2, .min_p = 0.45, .seed = 5}, powers(2, {0, 2, 4, 7}));
}

// ---- errors -----------------------------------------------------------------------------------------------------------
TEST(GpuSampler, LogitsThatAreNoNumbers) {
  const std::int64_t V = 5000;
  Generator generator(9);
  std::vector<float> good;
  for (std::int64_t id = 0; id < V; ++id) good.push_back(normal(generator, 3));
  struct Case {
    std::vector<float> logits;
    SampleError error;
  };
  std::vector<Case> cases = {{good, SampleError::none}};
  for (const std::size_t where : {std::size_t{0}, std::size_t{2501}, std::size_t{4998}}) {
    for (const float value : {std::nanf(""), -std::nanf(""), kInfinity}) {
      std::vector<float> bad = good;
      bad[where] = value;
      cases.push_back({bad, std::isnan(value) ? SampleError::not_a_number : SampleError::infinite});
    }
  }
  cases.push_back({std::vector<float>(good.size(), -kInfinity), SampleError::nothing_finite});
  cases.push_back({good, SampleError::none});
  cases.back().logits[4999] = kInfinity;  // beyond the limit below: a padding row
  std::vector<float> rows;
  for (const Case& c : cases) rows.insert(rows.end(), c.logits.begin(), c.logits.end());
  const DeviceBuffer<float> logits(rows);
  for (const double temperature : {0.0, 1.0}) {
    for (const std::int64_t top_k : {0, 20}) {
      const SamplerOptions options{.temperature = temperature, .top_k = top_k, .top_p = 0.9, .vocab_limit = 4999};
      const Sampled got = sample_on_gpu(options, logits, V, V, Positions(cases.size(), 3));
      Sampler host(options);
      for (std::size_t i = 0; i < cases.size(); ++i) {
        EXPECT_EQ(got.errors[i], cases[i].error) << "case " << i;
        if (cases[i].error == SampleError::none) {
          EXPECT_EQ(got.ids[i], host.sample(cases[i].logits, 3)) << "case " << i;
          EXPECT_NO_THROW(check_sample(got.errors[i]));
        } else {
          EXPECT_EQ(got.ids[i], 0) << "case " << i;
          EXPECT_THROW(host.sample(cases[i].logits, 3), Error);
          EXPECT_THROW(check_sample(got.errors[i]), Error);
        }
      }
    }
  }
  EXPECT_EQ(sample_on_gpu({.temperature = 1}, logits, 0, 0, {0}).errors[0], SampleError::nothing_finite);
}

// Row r has something in column columns[r] that decides: the greatest logit, the only finite one, a NaN, an infinity.
TEST(GpuSampler, EveryColumnCounts) {
  for (const std::int64_t V : {1, 33, 257, 1031, 5003, 70'001}) {
    const std::vector<std::int64_t> columns = telling_columns(V);
    const std::int64_t stride = V + 1;  // rows begin at every residue of 16 bytes
    const Positions positions(columns.size(), 7);
    const auto sampled = [&](float others, float extreme, const SamplerOptions& options, bool clusters) {
      std::vector<float> rows(columns.size() * static_cast<std::size_t>(stride), others);
      for (std::size_t r = 0; r < columns.size(); ++r) {
        rows[r * static_cast<std::size_t>(stride) + static_cast<std::size_t>(columns[r])] = extreme;
        rows[(r + 1) * static_cast<std::size_t>(stride) - 1] = std::nanf("");  // what is read beyond V shows
      }
      return sample_on_gpu(options, DeviceBuffer<float>(rows), V, stride, positions, clusters);
    };
    for (const bool clusters : {true, false}) {
      for (const SamplerOptions& options :
           {SamplerOptions{}, SamplerOptions{.temperature = 1, .top_k = 1}, SamplerOptions{.temperature = 0.5},
            SamplerOptions{.temperature = 1, .top_p = 0.5}, SamplerOptions{.temperature = 1, .min_p = 0.5}}) {
        SCOPED_TRACE(described(options) + " of " + std::to_string(V) + (clusters ? ", clusters" : ""));
        const Sampled greatest = sampled(0, 60, options, clusters), finite = sampled(-kInfinity, -3, options, clusters);
        const Sampled bad = sampled(0, std::nanf(""), options, clusters),
                      infinite = sampled(0, kInfinity, options, clusters);
        for (std::size_t r = 0; r < columns.size(); ++r) {
          EXPECT_EQ(greatest.ids[r], columns[r]);
          EXPECT_EQ(finite.ids[r], columns[r]);
          EXPECT_EQ(finite.errors[r], SampleError::none) << columns[r];
          EXPECT_EQ(bad.errors[r], SampleError::not_a_number) << columns[r];
          EXPECT_EQ(infinite.errors[r], SampleError::infinite) << columns[r];
        }
      }
    }
  }
}

TEST(GpuSampler, AnErrorStays) {
  const DeviceBuffer<float> bad(std::vector<float>{1, std::nanf("")}), good(std::vector<float>{1, 2});
  const DeviceBuffer<SamplingPlan> plan(std::vector<SamplingPlan>{SamplingPlan{}});
  const DeviceBuffer<std::int64_t> position(Positions{0});
  const DeviceBuffer<std::int32_t> id(1);
  const DeviceBuffer<SampleError> error(Errors{SampleError::none});
  for (const DeviceBuffer<float>* logits : {&bad, &good}) {
    sample(id.data(), error.data(), logits->data(), 1, 2, 2, plan.data(), position.data(), nullptr);
  }
  EXPECT_EQ(id.download()[0], 1);
  EXPECT_EQ(error.download()[0], SampleError::not_a_number);
}

TEST(GpuSampler, RefusesMoreIdsThanTheSumsHold) {
  DeviceBuffer<float> logits(static_cast<std::size_t>(kMaxSampledVocab) + 1);
  logits.fill_bytes(0);
  EXPECT_EQ(sample_on_gpu({}, logits, kMaxSampledVocab, 0, {0}).ids[0], 0);
  EXPECT_THROW(sample_on_gpu({}, logits, kMaxSampledVocab + 1, 0, {0}), Error);
}

// A captured launch takes plan and position from memory when it is replayed.
TEST(GpuSampler, ReplayedInAGraph) {
  const DeviceBuffer<float> logits(kLogits);
  const DeviceBuffer<SamplingPlan> plan(1);
  const DeviceBuffer<std::int64_t> position(1);
  const DeviceBuffer<std::int32_t> id(1);
  const DeviceBuffer<SampleError> error(Errors{SampleError::none});
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamCreate(&stream), "stream");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  sample(id.data(), error.data(), logits.data(), 1, 10, 10, plan.data(), position.data(), stream);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "graph");
  for (const SamplerOptions& options : {SamplerOptions{}, SamplerOptions{.temperature = 1, .top_k = 5, .seed = 8},
                                        SamplerOptions{.temperature = 2, .top_p = 0.8, .seed = 9}}) {
    check(cudaMemcpy(plan.data(), std::vector<SamplingPlan>{sampling_plan(options)}.data(), sizeof(SamplingPlan),
                     cudaMemcpyHostToDevice),
          "plan");
    for (std::int64_t at = 0; at < 40; ++at) {
      check(cudaMemcpy(position.data(), &at, sizeof at, cudaMemcpyHostToDevice), "position");
      check(cudaGraphLaunch(executable, stream), "replay");
      check(cudaStreamSynchronize(stream), "replay");
      EXPECT_EQ(id.download()[0], Sampler(options).sample(kLogits, at)) << described(options) << " at " << at;
    }
  }
  check(cudaGraphExecDestroy(executable), "graph");
  check(cudaGraphDestroy(graph), "graph");
  check(cudaStreamDestroy(stream), "stream");
}

}  // namespace
}  // namespace weft::cuda
