// Adapters on the GPU: the operator and whole models against the CPU, and models against themselves.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "llmc/comm/thread_ranks.h"
#include "llmc/cpu/low_rank.h"
#include "llmc/cpu/training.h"
#include "llmc/cuda/comm/device_ranks.h"
#include "llmc/cuda/op/gemm/dequantize.h"
#include "llmc/cuda/op/lora/low_rank.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/cuda/training/training.h"
#include "llmc/model/compare.h"
#include "llmc/model/training_activations.h"
#include "llmc/train/bench.h"
#include "llmc/train/report.h"
#include "test/cpp/golden_cases.h"
#include "test/cpp/test_files.h"
#include "test/cpp/whole_model_checks.h"
#include "test/gpu/operator_tools.h"

namespace weft {
namespace {

using test::DeviceBuffer;
using test::Floats;

// ---- the operator ----

struct OperatorCase {
  std::int64_t N, in, out, rank;
  std::vector<Range> rows;
  float dropout;
};

// Ranks that need padding and those that do not, modules with gaps between them, and N that fills no tile.
std::vector<OperatorCase> operator_cases() {
  std::vector<OperatorCase> cases;
  for (const float dropout : {0.0f, 0.3f}) {
    cases.push_back({1, 72, 104, 1, {{0, 104}}, dropout});
    cases.push_back({37, 72, 104, 5, {{0, 40}, {72, 104}}, dropout});
    cases.push_back({111, 200, 72, 16, {{0, 72}}, dropout});
    cases.push_back({301, 72, 400, 16, {{0, 200}, {200, 400}}, dropout});
    cases.push_back({129, 264, 208, 64, {{0, 80}, {80, 144}, {144, 208}}, dropout});
    cases.push_back({75, 72, 96, 1, {{0, 48}, {48, 72}, {72, 96}}, dropout});
  }
  return cases;
}

// The 2-norm of the difference: bf16 rounds h, dh and the sums to 2^-9 of themselves.
template <typename T>
void expect_distance(const Floats& got, const Floats& want, const char* what) {
  const bool exact = std::is_same_v<T, float>;
  const TensorDistance row = distance(what, got, want, exact ? 5e-6 : 1e-2, Norm::l2);
  EXPECT_TRUE(row.pass) << what << " " << row.relative;
}

Floats plus(Floats values, const Floats& others) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] += others[i];
  return values;
}

template <typename T>
void check_operator(const OperatorCase& c) {
  const auto modules = static_cast<std::int64_t>(c.rows.size());
  const LowRankShape shape{c.N, c.in, c.out, c.rank, 0.75f, c.dropout, 11, 3ull << 40, modules};
  const Floats x = test::random_stored<T>(c.N * c.in, 1), dy = test::random_stored<T>(c.N * c.out, 2),
               y = test::random_stored<T>(c.N * c.out, 3), dx = test::random_stored<T>(c.N * c.in, 4);
  Floats want_y = y, want_dx = dx;
  std::vector<Floats> down, up, d_down, d_up, before_down, before_up;
  Floats workspace(static_cast<std::size_t>(cpu::low_rank_workspace(shape)));
  for (std::size_t m = 0; m < c.rows.size(); ++m) {
    const auto seed = static_cast<unsigned>(10 * m);
    down.push_back(test::random_stored<T>(c.rank * c.in, seed + 5, 0.1f));
    up.push_back(test::random_stored<T>(c.rows[m].size() * c.rank, seed + 6));
    before_down.push_back(test::random_floats(c.rank * c.in, seed + 7));
    before_up.push_back(test::random_floats(c.rows[m].size() * c.rank, seed + 8));
    d_down.emplace_back(down.back().size());
    d_up.emplace_back(up.back().size());
    const LowRank<float> module{down[m].data(), up[m].data(), c.rows[m]};
    cpu::low_rank_forward(shape, want_y.data(), x.data(), module, workspace.data());
    cpu::low_rank_backward(shape, want_dx.data(), {d_down[m].data(), d_up[m].data(), c.rows[m]}, dy.data(), x.data(),
                           module, workspace.data());
  }

  const cuda::Stream stream;
  cuda::Matmul matmul(stream);
  cuda::LowRankWorkspace<T> work;
  ArenaLayout layout("test");
  work.reserve(layout, {&shape, 1}, c.dropout > 0);
  const cuda::DeviceArena arena(layout.plan());
  layout.bind(arena);
  cuda::check(cudaMemset(arena.at<std::byte>(0), 0xff, arena.bytes()), "test");
  const DeviceBuffer<T> gpu_x = test::on_device<T>(x), gpu_dy = test::on_device<T>(dy), gpu_y = test::on_device<T>(y),
                        gpu_dx = test::on_device<T>(dx);
  std::vector<DeviceBuffer<T>> gpu_down, gpu_up;
  std::vector<DeviceBuffer<float>> stored_down, stored_up, added_down, added_up;
  std::vector<LowRank<T>> gpu_modules;
  std::vector<LowRank<float>> stored, added;
  for (std::size_t m = 0; m < c.rows.size(); ++m) {
    gpu_down.push_back(test::on_device<T>(down[m]));
    gpu_up.push_back(test::on_device<T>(up[m]));
    for (auto* list : {&stored_down, &added_down}) list->push_back(test::on_device<float>(before_down[m]));
    for (auto* list : {&stored_up, &added_up}) list->push_back(test::on_device<float>(before_up[m]));
    gpu_modules.push_back({gpu_down[m].data(), gpu_up[m].data(), c.rows[m]});
    stored.push_back({stored_down[m].data(), stored_up[m].data(), c.rows[m]});
    added.push_back({added_down[m].data(), added_up[m].data(), c.rows[m]});
  }
  const std::span<const LowRank<T>> list(gpu_modules);
  cuda::low_rank_forward<T>(matmul, shape, gpu_y.data(), gpu_x.data(), list, work, stream);
  cuda::low_rank_hidden_grad<T>(matmul, shape, gpu_dy.data(), list, work, stream);
  cuda::low_rank_input_grad<T>(matmul, shape, gpu_dx.data(), work, stream);
  cuda::low_rank_weight_grad<T>(matmul, shape, stored, gpu_dy.data(), gpu_x.data(), work, cuda::Accumulate::no, stream);
  cuda::low_rank_weight_grad<T>(matmul, shape, added, gpu_dy.data(), gpu_x.data(), work, cuda::Accumulate::yes, stream);
  stream.synchronize("test");

  expect_distance<T>(test::on_host(gpu_y), want_y, "y");
  expect_distance<T>(test::on_host(gpu_dx), want_dx, "dx");
  for (std::size_t m = 0; m < c.rows.size(); ++m) {
    const Floats got_down = test::on_host(stored_down[m]), got_up = test::on_host(stored_up[m]);
    expect_distance<T>(got_down, d_down[m], "d_down");
    expect_distance<T>(got_up, d_up[m], "d_up");
    expect_distance<float>(test::on_host(added_down[m]), plus(before_down[m], got_down), "added d_down");
    expect_distance<float>(test::on_host(added_up[m]), plus(before_up[m], got_up), "added d_up");
  }

  // Merged: weight + scale B A.
  const Floats weight = test::random_stored<T>(c.out * c.in, 9);
  Floats want = weight;
  for (std::size_t m = 0; m < c.rows.size(); ++m) {
    add_low_rank(want.data() + c.rows[m].begin * c.in, down[m].data(), up[m].data(), c.rows[m].size(), c.in, c.rank,
                 0.75f);
  }
  const DeviceBuffer<T> gpu_weight = test::on_device<T>(weight);
  cuda::low_rank_merge<T>(matmul, shape, gpu_weight.data(), list, work, stream);
  stream.synchronize("test");
  expect_distance<T>(test::on_host(gpu_weight), want, "merged");
}

TEST(CudaLowRank, IsTheCpusForSeveralModulesAtOnce) {
  for (const OperatorCase& c : operator_cases()) {
    SCOPED_TRACE(format("%lld x %lld x %lld, %zu of rank %lld, dropout %g", static_cast<long long>(c.N),
                        static_cast<long long>(c.in), static_cast<long long>(c.out), c.rows.size(),
                        static_cast<long long>(c.rank), c.dropout));
    check_operator<float>(c);
    check_operator<test::bf16>(c);
  }
}

// ---- quantised matrices ----

// A tensor of a quantised matrix as a file has it, with scales of 0.01 to 0.02.
std::vector<std::byte> random_stored_bytes(const TensorSpec& spec, const WeightFormat& format, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<std::byte> bytes(spec.bytes);
  if (spec.kind == ValueKind::scales) {
    Floats scales(static_cast<std::size_t>(spec.elements));
    for (float& scale : scales) scale = 0.01f + 1e-5f * static_cast<float>(generator() % 1000);
    convert_from_f32(scales.data(), spec.dtype, bytes.data(), scales.size());
    return bytes;
  }
  for (std::byte& byte : bytes) {
    auto value = static_cast<std::uint8_t>(generator());
    if (spec.kind == ValueKind::zeros) value %= kMaxZero + 1;
    if (spec.kind == ValueKind::quants && !format.valid(value)) value = 0;
    byte = static_cast<std::byte>(value);
  }
  return bytes;
}

// As ModelFile::read_values() has them.
Floats values_of(const WeightFormat& format, const QuantizedMatrix& matrix, std::int64_t rows, std::int64_t K) {
  Floats values(static_cast<std::size_t>(rows * K));
  format.dequantize(values.data(), matrix, 0, rows, K);
  for (std::int64_t i = 0; i < (format.grouped ? 0 : rows * K); ++i) {
    values[static_cast<std::size_t>(i)] *= matrix.row_scales[i / K];
  }
  return values;
}

template <typename T>
void check_dequantize(const WeightFormat& format, std::int64_t rows, std::int64_t K) {
  const auto spec = [&](ValueKind kind, DType dtype, std::int64_t elements) {
    TensorSpec part;
    part.kind = kind;
    part.dtype = dtype;
    part.elements = elements;
    part.bytes = static_cast<std::uint64_t>(elements) * dtype_bits(dtype) / 8;
    return part;
  };
  const std::int64_t scales = format.grouped ? rows * quant_groups(K) : rows;
  const auto q = random_stored_bytes(spec(ValueKind::quants, format.dtype, rows * K), format, 1),
             s = random_stored_bytes(spec(ValueKind::scales, format.scale_dtype(), scales), format, 2),
             z = random_stored_bytes(spec(ValueKind::zeros, DType::u8, scales), format, 3);
  const DeviceBuffer<std::byte> gpu_q(q), gpu_s(s), gpu_z(z);
  const DeviceBuffer<T> out(static_cast<std::size_t>(rows * K));
  cuda::dequantize(out.data(), format.matrix(gpu_q.data(), gpu_s.data(), gpu_z.data()), rows, K, nullptr);
  const Floats want = values_of(format, format.matrix(q.data(), s.data(), z.data()), rows, K);
  EXPECT_EQ(test::on_host(out), test::widened(test::stored<T>(want))) << format.name << " " << K;
}

TEST(CudaDequantize, HasTheValuesOfTheFile) {
  for (const WeightFormat* format : weight_formats()) {
    for (const std::int64_t K : {8, 130, 264, 1000}) {
      check_dequantize<float>(*format, 37, K);
      check_dequantize<test::bf16>(*format, 37, K);
    }
  }
}

// ---- whole models ----

LoraConfig lora_of(std::int64_t rank, const std::string& targets, LoraTargets model = llama_lora_targets()) {
  return {rank, 1.5 * static_cast<double>(rank), parse_lora_targets("--lora-targets", targets, model)};
}

TrainOptions options_of(Precision precision, const LoraConfig& lora, float dropout = 0) {
  TrainOptions options;
  options.micro_batch = 3;
  options.seq_len = 37;
  options.precision = precision;
  options.lora = lora;
  options.adapter_dropout = dropout;
  options.seed = 5;
  return options;
}

Floats random_tensor(const TensorSpec& spec, std::mt19937& generator) {
  std::normal_distribution<float> noise(0, 1);
  Floats values(static_cast<std::size_t>(spec.elements));
  const float scale = spec.shape.size() == 2 ? 0.08f : 0.1f;
  for (float& value : values) value = scale * noise(generator) + (spec.init == Init::ones ? 1.0f : 0.0f);
  return values;
}

void randomize_adapter(TrainModel& model, unsigned seed = 12) {
  std::mt19937 generator(seed);
  for (const TensorSpec& spec : model.table().specs()) {
    model.write_tensor(TensorRole::parameter, spec, random_tensor(spec, generator).data());
  }
}

void randomize(TrainModel& model) {
  std::mt19937 generator(11);
  const TensorTable frozen(model.config());
  for (const TensorSpec& spec : frozen.specs()) model.write_frozen(spec, random_tensor(spec, generator).data());
  randomize_adapter(model);
}

std::unique_ptr<TrainModel> model_of(bool gpu, const ModelConfig& config, const TrainOptions& options) {
  auto model = gpu ? cuda::make_training_model(config, options) : cpu::make_training_model(config, options);
  randomize(*model);
  return model;
}

// The floats of the model above; the caller writes the quantised tensors.
std::unique_ptr<TrainModel> model_of_quantized(const ModelConfig& config, const TrainOptions& options) {
  auto model = cuda::make_training_model(config, options);
  std::mt19937 generator(11);
  const TensorTable kept = model->frozen_table(), whole(config);
  for (const TensorSpec& spec : whole.specs()) {
    const Floats values = random_tensor(spec, generator);
    if (kept.at(spec.name).kind == ValueKind::floats) model->write_frozen(spec, values.data());
  }
  randomize_adapter(*model);
  return model;
}

test::TokenBatch text_of(const ModelConfig& config, const TrainOptions& options, unsigned seed) {
  return test::random_tokens(config, options.micro_batch * options.seq_len, seed);
}

AdamWStep adamw_step(std::int64_t step, const StepStatistics& statistics) {
  AdamWStep update;
  update.step = step;
  update.learning_rate = 3e-3f;
  update.weight_decay = 0.1f;
  update.gradient_scale = clip_factor(statistics.gradient_norm, 1.0);
  return update;
}

// Steps 1 .. `steps` of two micro-batches, always on the same text; returns the loss of each.
std::vector<double> run_steps(TrainModel& model, const test::TokenBatch& text, std::int64_t steps) {
  std::vector<double> losses;
  for (std::int64_t step = 1; step <= steps; ++step) {
    model.zero_gradients();
    for (const std::int64_t i : {0, 1}) {
      model.forward(text.batch(), static_cast<std::uint64_t>(2 * step + i), 0.005f);
      model.backward();
    }
    const StepStatistics statistics = model.statistics();
    losses.push_back(statistics.loss_sum / static_cast<double>(statistics.label_count));
    model.update(adamw_step(step, statistics));
  }
  return losses;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct ModelCase {
  std::string name;
  ModelConfig config = test::small_llama();
  std::int64_t rank = 5;
  std::string targets = "all";
  float adapter_dropout = 0, dropout = 0;
};

std::vector<ModelCase> model_cases() {
  std::vector<ModelCase> cases = {{"all"},
                                  {"all, dropout", test::small_llama(), 8, "all", 0.2f, 0.1f},
                                  {"q, v", test::small_llama(), 16, "q,v"},
                                  {"k", test::small_llama(), 1, "k", 0.2f},
                                  {"o, down", test::small_llama(), 5, "o,down", 0.2f},
                                  {"gate", test::small_llama(), 3, "gate"},
                                  {"up, tied", test::small_llama(), 3, "up"},
                                  {"all, norms of heads, biases", test::small_llama(), 5, "all", 0.2f},
                                  {"all, layernorm", test::small_llama(), 5, "q,gate,down", 0.2f},
                                  {"gemma, dropout", test::small_gemma(), 5, "all", 0.2f, 0.1f},
                                  {"gemma, k", test::small_gemma(), 3, "k"},
                                  {"neox", test::small_neox(true), 5, "all", 0.2f},
                                  {"neox, dropout", test::small_neox(true), 5, "all", 0.2f, 0.1f},
                                  {"neox, sequential", test::small_neox(false), 5, "all", 0.2f},
                                  {"neox, qkv", test::small_neox(true), 3, "qkv"},
                                  {"neox, o, up", test::small_neox(true), 8, "o,up"}};
  cases[6].config.tied_embeddings = true;
  set_family(cases[7].config, "qwen3");
  cases[7].config.qkv_bias = cases[7].config.output_bias = cases[7].config.mlp_bias = true;
  cases[8].config.norm = NormKind::layernorm;
  return cases;
}

TrainOptions options_of(const ModelCase& c, Precision precision) {
  TrainOptions options = options_of(precision, lora_of(c.rank, c.targets, lora_targets(c.config)), c.adapter_dropout);
  options.dropout = c.dropout;
  return options;
}

// Losses and gradients of two micro-batches: in fp32 as near as those of whole models, in bf16 in the same direction.
TEST(CudaLora, GradientsAreThoseOfTheCpu) {
  for (const ModelCase& c : model_cases()) {
    for (const Precision precision : {Precision::fp32, Precision::bf16}) {
      SCOPED_TRACE(c.name + (precision == Precision::fp32 ? ", fp32" : ", bf16"));
      const auto reference = model_of(false, c.config, options_of(c, Precision::fp32)),
                 model = model_of(true, c.config, options_of(c, precision));
      const bool exact = precision == Precision::fp32;
      for (TrainModel* each : {reference.get(), model.get()}) {
        each->zero_gradients();
        for (const unsigned i : {0, 1}) {
          const test::TokenBatch text = text_of(c.config, options_of(c, precision), i);
          each->forward(text.batch(), 8 + i, 0.01f);
          each->backward();
        }
      }
      const StepStatistics want = reference->statistics(), got = model->statistics();
      EXPECT_NEAR(got.loss_sum, want.loss_sum, (exact ? 1e-4 : 5e-3) * want.loss_sum);
      EXPECT_EQ(got.label_count, want.label_count);
      EXPECT_NEAR(got.gradient_norm, want.gradient_norm, (exact ? 1e-4 : 2e-2) * want.gradient_norm);
      ASSERT_EQ(model->table().specs().size(), reference->table().specs().size());
      for (const TensorSpec& spec : model->table().specs()) {
        Floats a(static_cast<std::size_t>(spec.elements)), b(a.size());
        model->read_tensor(TensorRole::gradient, spec, a.data());
        reference->read_tensor(TensorRole::gradient, spec, b.data());
        const TensorDistance row = exact ? distance(spec.name, a, b, 1e-4) : distance(spec.name, a, b, 0.06, Norm::l2);
        EXPECT_TRUE(row.pass) << spec.name << " " << row.relative;
      }
    }
  }
}

TEST(CudaLora, FiveStepsHaveTheLossesOfTheCpu) {
  for (const Optimizer* optimizer : {&adamw_optimizer(), &muon_optimizer()}) {
    const ModelConfig config = test::small_llama();
    TrainOptions options = options_of(Precision::fp32, lora_of(5, "all"), 0.1f);
    options.optimizer = optimizer;
    const test::TokenBatch text = text_of(config, options, 3);
    const auto losses = [&](bool gpu, Precision precision) {
      options.precision = precision;
      return run_steps(*model_of(gpu, config, options), text, 5);
    };
    const std::vector<double> want = losses(false, Precision::fp32), fp32 = losses(true, Precision::fp32),
                              bf16 = losses(true, Precision::bf16);
    EXPECT_LT(want.back(), want.front());
    for (std::size_t i = 0; i < want.size(); ++i) {
      EXPECT_NEAR(fp32[i], want[i], (optimizer == &adamw_optimizer() ? 1e-5 : 1e-4) * want[i]) << i;
      EXPECT_NEAR(bf16[i], want[i], 1e-2 * want[i]) << i;
    }
  }
}

// What a model is after some steps: eager, captured and replayed.
Floats trained(const ModelConfig& config, const TrainOptions& options) {
  const auto model = model_of(true, config, options);
  run_steps(*model, text_of(config, options, 7), 4);
  Floats all = read_all(*model, TensorRole::parameter);
  for (const TensorRole role : {TensorRole::gradient, TensorRole::state1}) {
    const Floats part = read_all(*model, role);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

TEST(CudaLora, RecomputationGraphsAndRerunsChangeNoBit) {
  for (const ModelCase& c : model_cases()) {
    for (const Precision precision : {Precision::fp32, Precision::bf16}) {
      SCOPED_TRACE(c.name + (precision == Precision::fp32 ? ", fp32" : ", bf16"));
      TrainOptions options = options_of(c, precision);
      const Floats expected = trained(c.config, options);
      EXPECT_TRUE(same_bits(trained(c.config, options), expected)) << "again";
      for (const Recompute recompute : {Recompute::norm, Recompute::block}) {
        options.recompute = recompute;
        EXPECT_TRUE(same_bits(trained(c.config, options), expected)) << "recomputed";
      }
      options.recompute = Recompute::none;
      options.graph = false;
      EXPECT_TRUE(same_bits(trained(c.config, options), expected)) << "without graphs";
    }
  }
}

// With an adapter that adds nothing, a model has the bits that it had before training.
TEST(CudaLora, TheFrozenModelStaysAsItWas) {
  for (const Precision precision : {Precision::fp32, Precision::bf16}) {
    const ModelConfig config = test::small_llama();
    const TrainOptions options = options_of(precision, lora_of(5, "all"), 0.2f);
    const auto model = model_of(true, config, options);
    const test::TokenBatch text = text_of(config, options, 3);
    const auto frozen_loss = [&] {
      for (const TensorSpec& spec : model->table().specs()) {
        const Floats zeros(static_cast<std::size_t>(spec.elements));
        model->write_tensor(TensorRole::parameter, spec, zeros.data());
      }
      std::int64_t labels = 0;
      return model->evaluate(text.batch(), &labels);
    };
    const double before = frozen_loss();
    randomize_adapter(*model);
    std::int64_t labels = 0;
    EXPECT_NE(model->evaluate(text.batch(), &labels), before);
    run_steps(*model, text, 3);
    EXPECT_EQ(frozen_loss(), before);
  }
}

// What a decoder generates from is the adapter as it is, not as it was when the decoder was made.
TEST(CudaLora, ADecoderHasTheNewestAdapter) {
  const ModelConfig config = test::small_llama();
  const TrainOptions options = options_of(Precision::fp32, lora_of(5, "q,v,down,up"), 0.2f);
  const auto reference = model_of(false, config, options), model = model_of(true, config, options);
  const auto want = reference->decoder(16), got = model->decoder(16);
  const std::vector<std::int32_t> prompt = {3, 1, 4, 1, 5};
  const auto logits = [&](DecodeModel& decoder) {
    const std::span<const float> values = decoder.prefill(prompt);
    return Floats(values.begin(), values.end());
  };
  const auto check = [&](const char* what) {
    const TensorDistance row = distance(what, logits(*got), logits(*want), 1e-4);
    EXPECT_TRUE(row.pass) << what << " " << row.relative;
  };
  check("first");
  for (TrainModel* each : {reference.get(), model.get()}) randomize_adapter(*each, 99);
  want->reset();
  got->reset();
  check("after new parameters");
  run_steps(*model, text_of(config, options, 3), 1);
  for (const TensorSpec& spec : model->table().specs()) {
    Floats values(static_cast<std::size_t>(spec.elements));
    model->read_tensor(TensorRole::parameter, spec, values.data());
    reference->write_tensor(TensorRole::parameter, spec, values.data());
  }
  want->reset();
  got->reset();
  check("after a step");
}

// Two ranks of two rounds, and one process that computes all four. Buckets of a few elements hold a part of a layer, others
// several layers.
TEST(CudaLora, RanksHaveTheBitsOfVirtualRanks) {
  const ModelConfig config = test::small_llama();
  for (const Precision precision : {Precision::fp32, Precision::bf16}) {
    TrainOptions options = options_of(precision, lora_of(5, "all"), 0.2f);
    options.virtual_ranks = 4;
    const auto micro_batch = [&](TrainModel& model, std::uint64_t step, std::uint64_t rank) {
      const test::TokenBatch text = text_of(config, options, static_cast<unsigned>(4 * step + rank));
      model.forward(text.batch(), 4 * step + rank, 0.002f);
      model.backward();
    };
    const auto train = [&](TrainModel& model, const std::vector<std::uint64_t>& ranks) {
      randomize(model);
      for (std::int64_t step = 1; step <= 3; ++step) {
        model.zero_gradients();
        for (const std::uint64_t rank : ranks) micro_batch(model, static_cast<std::uint64_t>(step), rank);
        model.update(adamw_step(step, model.statistics()));
      }
      return read_all(model, TensorRole::parameter);
    };
    const Floats expected = train(*cuda::make_training_model(config, options), {0, 1, 2, 3});
    for (const Shard shard : {Shard::none, Shard::optimizer}) {
      for (const std::int64_t bucket_elements : {500, 16 << 20}) {
        std::array<Floats, 2> got;
        run_thread_ranks(2, 120, [&](Communicator& ranks) {
          const auto plane = cuda::make_staged_ranks(ranks);
          const auto me = static_cast<std::uint64_t>(ranks.rank());
          const auto model = cuda::make_training_model(config, options, ranks, *plane, shard, bucket_elements);
          got[me] = train(*model, {me, me + 2});
        });
        for (const Floats& each : got) EXPECT_TRUE(same_bits(each, expected)) << bucket_elements;
      }
    }
  }
}

// A base that stays quantised, and one of its values: the same bits in training, and in what its decoder computes.
TEST(CudaLora, AQuantisedBaseIsItsValues) {
  for (const WeightFormat* format : weight_formats()) {
    for (const Precision precision : {Precision::fp32, Precision::bf16}) {
      for (const char* targets : {"all", "q,v"}) {
        SCOPED_TRACE(format->name);
        const ModelConfig config = test::small_llama();
        TrainOptions options = options_of(precision, lora_of(5, targets), 0.2f);
        options.recompute = Recompute::block;
        const auto values = model_of(true, config, options);
        options.frozen_quantization.weights = format;
        const auto model = model_of_quantized(config, options);
        const TensorTable table = model->frozen_table(), whole(config);
        std::size_t matrices = 0;
        for (const TensorSpec& spec : table.specs()) {
          if (spec.kind != ValueKind::quants) continue;
          ++matrices;
          const TensorSpec* parts[] = {&spec, &table.at(scales_of(spec.name)), table.find(zeros_of(spec.name))};
          std::vector<std::byte> bytes[3];
          for (std::size_t i = 0; i < 3; ++i) {
            if (parts[i] == nullptr) continue;
            bytes[i] = random_stored_bytes(*parts[i], *format, static_cast<unsigned>(3 * matrices + i));
            model->write_frozen_quantized(*parts[i], bytes[i].data());
          }
          const Floats floats = values_of(*format, format->matrix(bytes[0].data(), bytes[1].data(), bytes[2].data()),
                                          spec.shape[0], spec.shape[1]);
          values->write_frozen(whole.at(spec.name), floats.data());
        }
        EXPECT_EQ(matrices, 7 * static_cast<std::size_t>(config.num_layers));
        const test::TokenBatch text = text_of(config, options, 3);
        EXPECT_EQ(run_steps(*model, text, 4), run_steps(*values, text, 4));
        EXPECT_TRUE(same_bits(read_all(*model, TensorRole::parameter), read_all(*values, TensorRole::parameter)));
        EXPECT_LT(total_bytes(model->memory()), total_bytes(values->memory()));
        const std::vector<std::int32_t> prompt = {3, 1, 4, 1, 5};
        const auto logits = [&](TrainModel& each) {
          const std::unique_ptr<DecodeModel> decoder = each.decoder(16);
          const std::span<const float> all = decoder->prefill(prompt);
          return Floats(all.begin(), all.end());
        };
        EXPECT_EQ(logits(*model), logits(*values));
      }
    }
  }
}

// ---- a frozen model in fp8 ----

class CudaLoraFp8 : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::has_fp8()) GTEST_SKIP() << "needs a GPU of compute capability 8.9";
  }
};

// Widths that are multiples of 16, as GEMMs in fp8 need them.
ModelConfig fp8_llama() {
  ModelConfig config = test::small_llama();
  config.hidden_size = 144;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = config.rope.rotary_dim = 32;
  config.ffn_size = 208;
  return config;
}

TrainOptions fp8_options(const std::string& targets = "all", Precision precision = Precision::fp8) {
  TrainOptions options = options_of(precision, lora_of(5, targets));
  options.micro_batch = 2;
  options.seq_len = 40;
  return options;
}

std::vector<ModelCase> fp8_cases() {
  std::vector<ModelCase> cases = {{"all", fp8_llama()},
                                  {"all, dropout", fp8_llama(), 8, "all", 0.2f, 0.1f},
                                  {"q, v", fp8_llama(), 16, "q,v"},
                                  {"gate, down", fp8_llama(), 3, "gate,down"},
                                  {"o, norms of heads, biases", fp8_llama(), 5, "o", 0.2f},
                                  {"all, layernorm", fp8_llama(), 5, "all"}};
  set_family(cases[4].config, "qwen3");
  cases[4].config.qkv_bias = cases[4].config.output_bias = cases[4].config.mlp_bias = true;
  cases[5].config.norm = NormKind::layernorm;
  return cases;
}

TrainOptions fp8_options(const ModelCase& c, Precision precision = Precision::fp8) {
  TrainOptions options = fp8_options(c.targets, precision);
  options.lora = lora_of(c.rank, c.targets);
  options.adapter_dropout = c.adapter_dropout;
  options.dropout = c.dropout;
  return options;
}

Floats values_of(TrainModel& model, TensorRole role, const TensorSpec& spec) {
  Floats values(static_cast<std::size_t>(spec.elements));
  model.read_tensor(role, spec, values.data());
  return values;
}

// Weights as small as training has them.
std::unique_ptr<TrainModel> small_weights(bool gpu, const ModelConfig& config, const TrainOptions& options) {
  auto model = gpu ? cuda::make_training_model(config, options) : cpu::make_training_model(config, options);
  std::mt19937 generator(11);
  const TensorTable frozen(config);
  const auto values = [&](const TensorSpec& spec) {
    Floats all = random_tensor(spec, generator);
    for (float& value : all) value *= spec.shape.size() == 2 ? 0.4f : 1.0f;
    return all;
  };
  for (const TensorSpec& spec : frozen.specs()) model->write_frozen(spec, values(spec).data());
  for (const TensorSpec& spec : model->table().specs()) {
    model->write_tensor(TensorRole::parameter, spec, values(spec).data());
  }
  return model;
}

// As for all weights (test/gpu/fp8_test.cpp): the GPU rounds to bf16 before it rounds to fp8, so the gradient may be as far from the
// reference as two computations that round independently, sqrt(2) times what the reference is from fp32. That of one small
// matrix may be farther by chance: on the CPU 1.8 times, of weights that differ by 2^-8, where the whole gradient is 1.0. The
// first step has current scales, the others delayed ones; those of the weights stay, and are the CPU's.
TEST_F(CudaLoraFp8, GradientsAreThoseOfTheCpuThatRoundsInTheSamePlaces) {
  for (const ModelCase& c : fp8_cases()) {
    SCOPED_TRACE(c.name);
    const TrainOptions options = fp8_options(c);
    const auto exact = small_weights(false, c.config, fp8_options(c, Precision::fp32)),
               reference = small_weights(false, c.config, options), model = small_weights(true, c.config, options);
    TrainModel* const all[] = {exact.get(), reference.get(), model.get()};
    for (int step = 1; step <= 3; ++step) {
      SCOPED_TRACE(step);
      const test::TokenBatch text = text_of(c.config, options, static_cast<unsigned>(step));
      for (TrainModel* each : all) {
        each->zero_gradients();
        each->forward(text.batch(), static_cast<std::uint64_t>(step), 0.01f);
        each->backward();
      }
      constexpr double kApart = 1.5, kOneApart = 3;
      const StepStatistics want = reference->statistics(), got = model->statistics();
      exact->statistics();
      EXPECT_NEAR(got.loss_sum, want.loss_sum, 5e-3 * want.loss_sum);
      EXPECT_NEAR(got.gradient_norm, want.gradient_norm, 0.05 * want.gradient_norm);
      for (std::size_t kind = 0; kind < 3; ++kind) {
        EXPECT_EQ(got.fp8->kinds[kind].values, want.fp8->kinds[kind].values);
        EXPECT_EQ(got.fp8->kinds[kind].saturated, 0u);
      }
      const auto weights = static_cast<std::size_t>(Fp8Kind::weight);
      EXPECT_EQ(got.fp8->kinds[weights].flushed, want.fp8->kinds[weights].flushed);
      Floats of_gpu, of_cpu, of_fp32;
      const auto expect_near = [&](const std::string& name, const Floats& got_part, const Floats& want_part,
                                   const Floats& exact_part, double most) {
        const double rounding = distance(name, want_part, exact_part, 1, Norm::l2).relative;
        const TensorDistance row = distance(name, got_part, want_part, most * rounding, Norm::l2);
        EXPECT_TRUE(row.pass) << name << ": " << row.relative << " from the CPU's, which is " << rounding
                              << " from fp32";
      };
      for (const TensorSpec& spec : model->table().specs()) {
        Floats parts[3];
        for (std::size_t i = 0; i < 3; ++i) parts[i] = values_of(*all[i], TensorRole::gradient, spec);
        expect_near(spec.name, parts[2], parts[1], parts[0], kOneApart);
        of_fp32.insert(of_fp32.end(), parts[0].begin(), parts[0].end());
        of_cpu.insert(of_cpu.end(), parts[1].begin(), parts[1].end());
        of_gpu.insert(of_gpu.end(), parts[2].begin(), parts[2].end());
      }
      expect_near("the whole gradient", of_gpu, of_cpu, of_fp32, kApart);
      AdamWStep none;
      none.learning_rate = 0;
      for (TrainModel* each : all) each->update(none);
      const std::vector<float> history = model->fp8_state(), of_reference = reference->fp8_state();
      const Fp8Slots slots{c.config.num_layers};
      // Below the first layer nothing is trained, so nobody reads the gradient of its qkv or, if that has no adapter, of its output:
      // the GPU does not round them, and their history is empty. The CPU rounds everything.
      const auto unread = [&](BlockLinear linear) { return slots.at(Fp8Kind::gradient, 0, linear); };
      const bool adapts_qkv = low_rank_shape(c.config, options, BlockLinear::qkv).modules > 0;
      for (std::int64_t slot = 0; slot < slots.count(); ++slot) {  // the newest step
        const auto i = static_cast<std::size_t>(slot);
        if (slot == unread(BlockLinear::qkv) || (!adapts_qkv && slot == unread(BlockLinear::output))) {
          EXPECT_EQ(history[i], 0.0f) << slots.name(slot);
          continue;
        }
        const float apart = slots.kind(slot) == Fp8Kind::weight ? 0.0f : 0.3f;
        EXPECT_NEAR(history[i], of_reference[i], apart * of_reference[i]) << slots.name(slot);
      }
    }
  }
}

TEST_F(CudaLoraFp8, FiveStepsHaveTheLossesOfTheCpuAndOfBf16) {
  for (const Optimizer* optimizer : {&adamw_optimizer(), &muon_optimizer()}) {
    const ModelConfig config = fp8_llama();
    const auto losses = [&](bool gpu, Precision precision) {
      TrainOptions options = fp8_options("all", precision);
      options.adapter_dropout = 0.1f;
      options.optimizer = optimizer;
      return run_steps(*model_of(gpu, config, options), text_of(config, options, 3), 5);
    };
    const std::vector<double> got = losses(true, Precision::fp8), of_cpu = losses(false, Precision::fp8),
                              of_bf16 = losses(true, Precision::bf16);
    EXPECT_LT(got.back(), got.front());
    EXPECT_NE(got, of_bf16);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i], of_cpu[i], 1e-2 * of_cpu[i]) << i;
      EXPECT_NEAR(got[i], of_bf16[i], 1e-2 * of_bf16[i]) << i;
    }
  }
}

// Parameters, moments and the history of scales behind steps that are eager, captured and replayed.
Floats trained_in_fp8(const ModelConfig& config, const TrainOptions& options) {
  const auto model = model_of(true, config, options);
  run_steps(*model, text_of(config, options, 7), 4);
  Floats all = model->fp8_state();
  for (const TensorRole role : {TensorRole::parameter, TensorRole::gradient, TensorRole::state1, TensorRole::state2}) {
    const Floats part = read_all(*model, role);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

TEST_F(CudaLoraFp8, RecomputationGraphsAndRerunsChangeNoBit) {
  for (const ModelCase& c : fp8_cases()) {
    SCOPED_TRACE(c.name);
    TrainOptions options = fp8_options(c);
    const Floats expected = trained_in_fp8(c.config, options);
    EXPECT_TRUE(same_bits(trained_in_fp8(c.config, options), expected)) << "again";
    for (const Recompute recompute : {Recompute::norm, Recompute::block}) {
      options.recompute = recompute;
      EXPECT_TRUE(same_bits(trained_in_fp8(c.config, options), expected)) << "recomputed";
    }
    options.recompute = Recompute::none;
    options.graph = false;
    EXPECT_TRUE(same_bits(trained_in_fp8(c.config, options), expected)) << "without graphs";
  }
}

TEST_F(CudaLoraFp8, GoesOnBitForBitAndValidationChangesNothing) {
  const ModelConfig config = fp8_llama();
  const TrainOptions options = fp8_options();
  const test::TokenBatch text = text_of(config, options, 3);
  const auto whole = model_of(true, config, options), half = model_of(true, config, options);
  std::int64_t labels = 0;
  half->evaluate(text.batch(), &labels);
  EXPECT_EQ(run_steps(*half, text, 3), run_steps(*whole, text, 3));
  const double evaluated = half->evaluate(text.batch(), &labels);
  const auto resumed = model_of(true, config, options);
  run_steps(*resumed, text_of(config, options, 8), 2);  // another history, which must go
  for (const TensorRole role : {TensorRole::parameter, TensorRole::state1, TensorRole::state2}) {
    for (const TensorSpec& spec : half->table().specs()) {
      resumed->write_tensor(role, spec, values_of(*half, role, spec).data());
    }
  }
  resumed->set_fp8_state(half->fp8_state());
  EXPECT_EQ(resumed->evaluate(text.batch(), &labels), evaluated);
  EXPECT_EQ(run_steps(*resumed, text, 3), run_steps(*whole, text, 3));
  EXPECT_EQ(resumed->fp8_state(), whole->fp8_state());
  EXPECT_TRUE(same_bits(read_all(*resumed, TensorRole::parameter), read_all(*whole, TensorRole::parameter)));
}

Floats prompt_logits(TrainModel& model) {
  const std::vector<std::int32_t> prompt = {3, 1, 4, 1, 5};
  const std::unique_ptr<DecodeModel> decoder = model.decoder(16);
  const std::span<const float> logits = decoder->prefill(prompt);
  return {logits.begin(), logits.end()};
}

// The values that a linear layer computes with: those of its modules, rounded with one scale.
void write_rounded_values(TrainModel& model, const Floats& all, const BlockNames& names, BlockLinear linear) {
  const TensorTable table(model.config());
  const Fp8Tensor rounded = round_tensor(all, Fp8Format::e4m3);
  std::size_t next = 0;
  for (const std::string& module : names.linear(linear)) {
    const TensorSpec& spec = table.at(weight_of(module));
    Floats values(static_cast<std::size_t>(spec.elements));
    for (float& value : values) {
      value = std::ldexp(fp8_to_f32(rounded.codes[next++], Fp8Format::e4m3), -rounded.exponent);
    }
    model.write_frozen(spec, values.data());
  }
}

// What samples are made from are the frozen weights as they are rounded: a model in bf16 that has those gives the same bits. Training
// changes nothing of them.
TEST_F(CudaLoraFp8, TheFrozenModelIsItsRoundedValuesAndStaysSo) {
  const ModelConfig config = fp8_llama();
  const auto model = model_of(true, config, fp8_options()),
             values = model_of(true, config, fp8_options("all", Precision::bf16));
  std::mt19937 generator(11);  // as randomize()
  std::map<std::string, Floats> base;
  const TensorTable table(config);
  for (const TensorSpec& spec : table.specs()) base[spec.name] = random_tensor(spec, generator);
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const BlockNames names = names_of(config).block(l);
    for (const BlockLinear linear : kBlockLinears) {
      Floats all;
      for (const std::string& module : names.linear(linear)) {
        const Floats& part = base.at(weight_of(module));
        all.insert(all.end(), part.begin(), part.end());
      }
      write_rounded_values(*values, all, names, linear);
    }
  }
  EXPECT_EQ(prompt_logits(*model), prompt_logits(*values));

  const test::TokenBatch text = text_of(config, fp8_options(), 3);
  const auto frozen_alone = [&] {
    for (const TensorSpec& spec : model->table().specs()) {
      const Floats zeros(static_cast<std::size_t>(spec.elements));
      model->write_tensor(TensorRole::parameter, spec, zeros.data());
    }
    std::int64_t labels = 0;
    Floats shown = prompt_logits(*model);
    shown.push_back(static_cast<float>(model->evaluate(text.batch(), &labels)));
    return shown;
  };
  const Floats before = frozen_alone();
  randomize_adapter(*model);
  run_steps(*model, text, 3);
  EXPECT_NE(prompt_logits(*model), Floats(before.begin(), before.end() - 1));
  EXPECT_EQ(frozen_alone(), before);
}

// Modules of a linear layer share a scale, whichever comes first; written again they are rounded anew; before the last one there is
// no pass.
TEST_F(CudaLoraFp8, ModulesOfALinearLayerMayComeInAnyOrder) {
  const ModelConfig config = fp8_llama();
  const TrainOptions options = fp8_options();
  const test::TokenBatch text = text_of(config, options, 3);
  std::mt19937 generator(11);
  const TensorTable table(config);
  std::vector<Floats> base;
  for (const TensorSpec& spec : table.specs()) base.push_back(random_tensor(spec, generator));
  const auto backwards = cuda::make_training_model(config, options), other = model_of(true, config, options);
  std::int64_t labels = 0;
  for (std::size_t i = base.size(); i-- > 0;) {
    const TensorSpec& spec = table.specs()[i];
    backwards->write_frozen(spec, base[i].data());
    if (spec.name.find("v_proj") != std::string::npos) {
      expect_contains(error_of(Exit::internal, [&] { backwards->evaluate(text.batch(), &labels); }),
                      "before all frozen weights of a linear layer");
    }
  }
  randomize_adapter(*backwards);
  EXPECT_EQ(run_steps(*backwards, text, 3), run_steps(*other, text, 3));
  for (std::size_t i = 0; i < base.size(); ++i) {  // once more, eight times as large
    for (float& value : base[i]) value *= table.specs()[i].shape.size() == 2 ? 8.0f : 1.0f;
    other->write_frozen(table.specs()[i], base[i].data());
  }
  const auto fresh = cuda::make_training_model(config, options);
  for (std::size_t i = 0; i < base.size(); ++i) fresh->write_frozen(table.specs()[i], base[i].data());
  for (TrainModel* each : {fresh.get(), other.get()}) randomize_adapter(*each);
  EXPECT_EQ(other->evaluate(text.batch(), &labels), fresh->evaluate(text.batch(), &labels));
}

// Whatever the file has: the GEMMs read its values in fp8, and the memory is that of any model in fp8.
TEST_F(CudaLoraFp8, AQuantisedFileIsItsValues) {
  const ModelConfig config = fp8_llama();
  TrainOptions options = fp8_options();
  const test::TokenBatch text = text_of(config, options, 3);
  const auto plain = model_of(true, config, options);
  const std::vector<double> expected = run_steps(*plain, text, 3);
  for (const WeightFormat* format : weight_formats()) {
    SCOPED_TRACE(format->name);
    options.frozen_quantization.weights = format;
    const auto model = model_of(true, config, options);
    const TensorTable taken = model->frozen_table();
    EXPECT_FALSE(taken.quantized());
    EXPECT_EQ(run_steps(*model, text, 3), expected);
    EXPECT_EQ(total_bytes(model->memory()), total_bytes(plain->memory()));
  }
}

TEST_F(CudaLoraFp8, RanksHaveTheBitsOfVirtualRanks) {
  const ModelConfig config = fp8_llama();
  TrainOptions options = fp8_options();
  options.virtual_ranks = 4;
  const auto train = [&](TrainModel& model, const std::vector<std::uint64_t>& ranks) {
    randomize(model);
    for (std::int64_t step = 1; step <= 3; ++step) {
      model.zero_gradients();
      for (const std::uint64_t rank : ranks) {
        const std::uint64_t number = 4 * static_cast<std::uint64_t>(step) + rank;
        model.forward(text_of(config, options, static_cast<unsigned>(number)).batch(), number, 0.002f);
        model.backward();
      }
      model.update(adamw_step(step, model.statistics()));
    }
    Floats all = model.fp8_state();
    const Floats parameters = read_all(model, TensorRole::parameter);
    all.insert(all.end(), parameters.begin(), parameters.end());
    return all;
  };
  const Floats expected = train(*cuda::make_training_model(config, options), {0, 1, 2, 3});
  for (const Shard shard : {Shard::none, Shard::optimizer}) {
    std::array<Floats, 2> got;
    run_thread_ranks(2, 120, [&](Communicator& ranks) {
      const auto plane = cuda::make_staged_ranks(ranks);
      const auto me = static_cast<std::uint64_t>(ranks.rank());
      const auto model = cuda::make_training_model(config, options, ranks, *plane, shard, 500);
      got[me] = train(*model, {me, me + 2});
    });
    for (const Floats& each : got) EXPECT_TRUE(same_bits(each, expected));
  }
}

// No gradient of a frozen weight, and no operand of one: each gradient is rounded once, as rows, each weight transposed once a pass.
TEST_F(CudaLoraFp8, AStepHasTheGemmsOfFrozenWeightsAlone) {
  const ModelConfig config = fp8_llama();
  const TrainOptions options = fp8_options();
  const auto model = model_of(true, config, options);
  const test::TokenBatch text = text_of(config, options, 3);
  run_steps(*model, text, 2);
  const OperatorTable table = model->time_operators([&] { run_steps(*model, text, 1); });
  std::map<std::string, std::int64_t> calls;
  for (const OperatorTime& time : table.operators) calls[time.name] = time.calls;
  const std::int64_t L = config.num_layers, passes = 2;
  EXPECT_EQ(calls["qkv"], passes * L);
  EXPECT_EQ(calls["qkv dgrad"], passes * (L - 1));  // nothing below the first layer is trained
  EXPECT_EQ(calls["down dgrad"], passes * L);
  EXPECT_EQ(calls["quantise input"], passes * 3 * L);
  EXPECT_EQ(calls["swiglu, quantise"], passes * L);
  EXPECT_EQ(calls["swiglu backward, quantise"], passes * L);
  EXPECT_EQ(calls["quantise gradient"], passes * (3 * L - 1));
  EXPECT_EQ(calls["transpose weight"], passes * (4 * L - 1));
  for (const char* absent : {"qkv wgrad", "output wgrad", "gate, up wgrad", "down wgrad", "transpose input",
                             "quantise weights", "transpose gradient", "dequantise", "adamw, quantise"}) {
    EXPECT_FALSE(calls.contains(absent)) << absent;
  }
}

TEST_F(CudaLoraFp8, MemoryIsHalfOfTheFrozenMatrices) {
  const ModelConfig config = fp8_llama();
  const TrainOptions options = fp8_options();
  const auto bytes_of = [&](const std::vector<MemoryLine>& lines, const std::string& name) {
    for (const MemoryLine& line : lines) {
      if (line.name == name) return line.bytes;
    }
    ADD_FAILURE() << name << " is not planned";
    return std::uint64_t{0};
  };
  const std::vector<MemoryLine> lines = cuda::plan_training(config, options),
                                in_bf16 = cuda::plan_training(config, fp8_options("all", Precision::bf16));
  std::uint64_t matrices = 0;
  for (const BlockLinear linear : kBlockLinears) {
    const LinearSize size = linear_size(config, linear);
    matrices += static_cast<std::uint64_t>(config.num_layers * size.C * size.OC);
  }
  // Beside the codes a scale for each row, and the ends of groups.
  const double saved = static_cast<double>(bytes_of(in_bf16, "frozen parameters (bf16)")) -
                       static_cast<double>(bytes_of(lines, "frozen parameters (fp8)"));
  EXPECT_NEAR(saved, static_cast<double>(matrices), 0.08 * static_cast<double>(matrices));
  EXPECT_GT(bytes_of(lines, "operands (fp8)"), 0u);
  EXPECT_EQ(total_bytes(model_of(true, config, options)->memory()), total_bytes(lines));
}

// What --bench fills a model with: a guess at each token has the loss log V.
TEST(CudaLora, TheBenchHasValuesInEachFormat) {
  const ModelConfig config = fp8_llama();
  std::vector<std::pair<Precision, const WeightFormat*>> cases = {{Precision::bf16, nullptr}};
  for (const WeightFormat* format : weight_formats()) cases.emplace_back(Precision::bf16, format);
  if (test::has_fp8()) cases.emplace_back(Precision::fp8, nullptr);
  for (const auto& [precision, format] : cases) {
    SCOPED_TRACE(format != nullptr ? format->name : "floats");
    TrainOptions options = fp8_options("all", precision);
    options.frozen_quantization.weights = format;
    const auto model = cuda::make_training_model(config, options);
    bench_parameters(*model, true);
    const test::TokenBatch text = text_of(config, options, 3);
    std::int64_t labels = 0;
    const double loss = model->evaluate(text.batch(), &labels) / static_cast<double>(labels);
    EXPECT_NEAR(loss, std::log(static_cast<double>(config.vocab_size)), 0.3);
    const std::vector<double> losses = run_steps(*model, text, 3);
    EXPECT_LT(losses.back(), losses.front());
  }
}

TEST(CudaLora, MemoryIsThatOfTheAdapter) {
  const ModelConfig config = test::small_llama();
  const TrainOptions options = options_of(Precision::bf16, lora_of(5, "q,v"));
  const auto bytes_of = [&](const std::vector<MemoryLine>& lines, const std::string& name) {
    for (const MemoryLine& line : lines) {
      if (line.name == name) return line.bytes;
    }
    ADD_FAILURE() << name << " is not planned";
    return std::uint64_t{0};
  };
  const std::vector<MemoryLine> lines = cuda::plan_training(config, options);
  const TensorTable adapter(config, *options.lora, DType::bf16), whole(config, DType::bf16);
  EXPECT_EQ(bytes_of(lines, "parameters (bf16)"), adapter.arena_bytes());
  EXPECT_EQ(bytes_of(lines, "frozen parameters (bf16)"), whole.arena_bytes());
  EXPECT_EQ(bytes_of(lines, "gradients (fp32)"), 4 * static_cast<std::uint64_t>(adapter.arena_elements()));
  EXPECT_EQ(total_bytes(model_of(true, config, options)->memory()), total_bytes(lines));
}

// What --dry-run says of each way of tuning is what its model then has.
TEST(CudaLora, TheWaysOfTuningArePlannedAsTheyAreAllocated) {
  TrainSettings settings;
  settings.device = "cuda";
  settings.micro_batch = 2;
  settings.seq_len = 64;
  settings.batch_tokens = 128;
  settings.lora_r = 5;
  ModelConfig config = fp8_llama();
  config.max_positions = 64;
  for (const char* precision : {"bf16", "fp32"}) {
    settings.precision = precision;
    std::vector<std::uint64_t> planned;
    for (const TuningWay& way : tuning_ways(settings, config)) {
      planned.push_back(total_bytes(cuda::plan_training(config, way.options)));
      if (way.options.precision == Precision::fp8 && !test::has_fp8()) continue;
      EXPECT_EQ(total_bytes(cuda::make_training_model(config, way.options)->memory()), planned.back()) << way.name;
    }
    ASSERT_EQ(planned.size(), 3 + weight_formats().size());
    EXPECT_LT(planned[1], planned[0]);  // an adapter's state is small beside that of all weights
  }
}

TEST(CudaLora, WhatItRefuses) {
  const ModelConfig config = test::small_llama();
  const auto refused = [&](Exit code, const ModelConfig& model, const TrainOptions& options) {
    return error_of(code, [&] { cuda::make_training_model(model, options); });
  };
  TrainOptions options = options_of(Precision::fp8, lora_of(5, "all"));
  expect_contains(refused(Exit::usage, config, options), "--precision fp8 needs a multiple of 16");
  expect_contains(refused(Exit::usage, test::small_neox(true), fp8_options("q,v")), "--lora-r: ");
  if (!test::has_fp8()) {
    expect_contains(refused(Exit::environment, fp8_llama(), fp8_options()),
                    "which needs a GPU of compute capability 8.9 or later");
  }
  options = options_of(Precision::bf16, lora_of(73, "q"));
  expect_contains(error_of(Exit::usage, [&] { cuda::make_training_model(config, options); }), "--lora-r: rank 73");
  run_thread_ranks(2, 20, [&](Communicator& ranks) {
    const auto plane = cuda::make_staged_ranks(ranks);
    TrainOptions two = options_of(Precision::bf16, lora_of(5, "all"));
    two.virtual_ranks = 2;
    for (const Shard shard : {Shard::gradients, Shard::parameters}) {
      expect_contains(error_of(Exit::usage, [&] { cuda::make_training_model(config, two, ranks, *plane, shard); }),
                      "--shard: got");
    }
  });
}

}  // namespace
}  // namespace weft
