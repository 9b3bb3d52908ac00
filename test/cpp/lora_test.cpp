// Adapters: the operator by finite differences; a model with an adapter against the same model with the product in its
// weights, whose gradients give those of A and B by the chain rule; and an adapter's way through training, files and
// inference.
#include <gtest/gtest.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>

#include "llmc/base/log.h"
#include "llmc/base/philox.h"
#include "llmc/comm/thread_ranks.h"
#include "llmc/cpu/inference.h"
#include "llmc/cpu/low_rank.h"
#include "llmc/model/compare.h"
#include "llmc/model/single_sequence.h"
#include "llmc/train/bench.h"
#include "llmc/train/inputs.h"
#include "llmc/train/loop.h"
#include "llmc/train/report.h"
#include "test/cpp/gradient_check.h"
#include "test/cpp/inference_tools.h"
#include "test/cpp/quantized_files.h"
#include "test/cpp/sanitized.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

using namespace weft::test;

// ---- the operator ----

// y + scale (dropout(x) A^T) B^T, as it is defined.
Doubles low_rank_sum(const LowRankShape& s, const Range& rows, Doubles y, const Doubles& x, const Doubles& down,
                     const Doubles& up) {
  const auto at = [](const Doubles& values, std::int64_t i) { return values[static_cast<std::size_t>(i)]; };
  for (std::int64_t n = 0; n < s.N; ++n) {
    for (std::int64_t r = 0; r < s.rank; ++r) {
      double hidden = 0;
      for (std::int64_t c = 0; c < s.in; ++c) {
        const auto e = static_cast<std::uint64_t>(n * s.in + c);
        const PhiloxWords random =
            philox(s.seed, s.offset + e / 4, static_cast<std::uint64_t>(RandomStream::adapter_dropout));
        if (uniform01(random.word[e % 4]) < s.dropout) continue;
        hidden += at(x, n * s.in + c) * at(down, r * s.in + c) / (1 - static_cast<double>(s.dropout));
      }
      for (std::int64_t o = 0; o < rows.size(); ++o) {
        y[static_cast<std::size_t>(n * s.out + rows.begin + o)] +=
            static_cast<double>(s.scale) * hidden * at(up, o * s.rank + r);
      }
    }
  }
  return y;
}

TEST(LowRank, ProductAndGradients) {
  struct Case {
    std::int64_t N, in, out, rank;
    Range rows;
    float dropout;
  };
  // On both sides of few rows, and of the blocks of a GEMM (256 x 512, at least 96).
  for (const Case& c : {Case{1, 7, 9, 1, {0, 9}, 0},
                        {5, 33, 20, 3, {4, 15}, 0},
                        {5, 33, 20, 3, {4, 15}, 0.3f},
                        {301, 130, 97, 17, {50, 97}, 0},
                        {130, 70, 530, 16, {1, 530}, 0.1f}}) {
    LowRankShape shape{c.N, c.in, c.out, c.rank, 0.75f, c.dropout, 11, 1ull << 40};
    const std::int64_t rows = c.rows.size();
    Floats x = random_floats(c.N * c.in, 1), down = random_floats(c.rank * c.in, 2),
           up = random_floats(rows * c.rank, 3);
    const Floats before = random_floats(c.N * c.out, 4), dy = random_floats(c.N * c.out, 5);
    const LowRank<float> adapter{down.data(), up.data(), c.rows};
    Floats workspace(static_cast<std::size_t>(cpu::low_rank_workspace(shape)), NAN);
    const std::string what = format("%lld x %lld, dropout %g", static_cast<long long>(c.N),
                                    static_cast<long long>(c.in), static_cast<double>(c.dropout));

    Floats y = before;
    cpu::low_rank_forward(shape, y.data(), x.data(), adapter, workspace.data());
    expect_close(y, low_rank_sum(shape, c.rows, widen(before), widen(x), widen(down), widen(up)), what);

    Floats dx(x.size(), 1), d_down(down.size(), 2), d_up(up.size(), 3);  // what is there before is added to
    cpu::low_rank_backward(shape, dx.data(), {d_down.data(), d_up.data(), c.rows}, dy.data(), x.data(), adapter,
                           workspace.data());
    const auto minus = [](Floats values, float start) {
      for (float& value : values) value -= start;
      return values;
    };
    const Doubles zeros(before.size());
    const auto loss = [&](const Doubles& at_x, const Doubles& at_down, const Doubles& at_up) {
      return weighted_sum(low_rank_sum(shape, c.rows, zeros, at_x, at_down, at_up), dy);
    };
    const std::size_t samples = c.N > 100 ? 5 : 60;
    expect_gradient(
        what + ", x", [&](const Doubles& at) { return loss(at, widen(down), widen(up)); }, x, minus(dx, 1), samples);
    expect_gradient(
        what + ", down", [&](const Doubles& at) { return loss(widen(x), at, widen(up)); }, down, minus(d_down, 2),
        samples);
    expect_gradient(
        what + ", up", [&](const Doubles& at) { return loss(widen(x), widen(down), at); }, up, minus(d_up, 3), samples);

    Floats without_dx(down.size(), 2), up_again(up.size(), 3);
    cpu::low_rank_backward(shape, nullptr, {without_dx.data(), up_again.data(), c.rows}, dy.data(), x.data(), adapter,
                           workspace.data());
    expect_close(without_dx, widen(d_down), what);
    EXPECT_EQ(up_again, d_up) << what;

    expect_same_bits_for_any_threads(what, [&] {
      Floats out = before, gx(x.size()), gd(down.size()), gu(up.size());
      cpu::low_rank_forward(shape, out.data(), x.data(), adapter, workspace.data());
      cpu::low_rank_backward(shape, gx.data(), {gd.data(), gu.data(), c.rows}, dy.data(), x.data(), adapter,
                             workspace.data());
      return std::vector<Floats>{out, gx, gd, gu};
    });
  }
}

// ---- names and sizes ----

LoraConfig lora_of(std::int64_t rank, const std::string& targets, double alpha = 6,
                   LoraTargets model = llama_lora_targets()) {
  return {rank, alpha, parse_lora_targets("--lora-targets", targets, model)};
}
LoraConfig lora_of(const ModelConfig& config, std::int64_t rank, const std::string& targets, double alpha = 6) {
  return lora_of(rank, targets, alpha, lora_targets(config));
}

TEST(Lora, Targets) {
  EXPECT_EQ(lora_of(2, "all").targets.size(), 7u);
  EXPECT_EQ(lora_of(2, "v,q,v").target_names(), "q,v");
  EXPECT_EQ(lora_of(2, "down,up,gate,o,v,k,q").target_names(), "all");
  for (const char* bad : {"", "q,", "x", "q,all", "Q"}) {
    expect_contains(error_of(Exit::usage, [&] { lora_of(2, bad); }),
                    "expected all, or some of q, k, v, o, gate, up, down with commas between them");
  }
  const LoraConfig lora = lora_of(3, "q,down", 4.5);
  EXPECT_EQ(lora_from_json(lora_to_json(lora), "x", llama_lora_targets()), lora);
  EXPECT_EQ(lora.scale(), 1.5f);
}

TEST(Lora, TargetsOfAGptNeox) {
  const ModelConfig neox = micro_neox();
  EXPECT_EQ(lora_of(neox, 2, "all").targets.size(), 4u);
  EXPECT_EQ(lora_of(neox, 2, "down,up,o,qkv").target_names(), "all");
  EXPECT_EQ(lora_of(neox, 2, "up,qkv").target_names(), "qkv,up");
  EXPECT_EQ(lora_of(2, "q,o,gate,down").target_names(), "q,o,gate,down");
  for (const char* bad : {"q", "k,v", "gate", "qkv,", "QKV"}) {
    expect_contains(error_of(Exit::usage, [&] { lora_of(neox, 2, bad); }),
                    "expected all, or some of qkv, o, up, down with commas between them");
  }
  expect_contains(error_of(Exit::usage, [&] { lora_of(2, "qkv"); }), "got 'qkv', expected all, or some of q, k, v, o,");
  const LoraConfig lora = lora_of(neox, 3, "qkv,up");
  EXPECT_EQ(lora_from_json(lora_to_json(lora), "x", lora_targets(neox)), lora);
  expect_contains(
      error_of(Exit::bad_file, [&] { lora_from_json(lora_to_json(lora), "file: lora", llama_lora_targets()); }),
      "file: lora: targets: got '\"qkv\"', expected some of q, k, v, o, gate, up, down");
  expect_contains(error_of(Exit::bad_file,
                           [&] { lora_from_json(lora_to_json(lora_of(3, "q")), "file: lora", lora_targets(neox)); }),
                  "targets: got '\"q\"', expected some of qkv, o, up, down");
  for (const char* fits : {"all", "q,qkv", "gate"}) check_lora_targets("--lora-targets", fits);
  expect_contains(error_of(Exit::usage, [] { check_lora_targets("--lora-targets", "q,w"); }), "got 'w', expected all");
}

TEST(Lora, WhatAFileMayNotSay) {
  const auto message = [](const char* json) {
    return error_of(Exit::bad_file, [&] { lora_from_json(Json::parse(json), "file: lora", llama_lora_targets()); });
  };
  EXPECT_EQ(message("3"), "file: lora: expected an object");
  expect_contains(message(R"({"rank": 0, "alpha": 1, "targets": ["q"]})"), "rank");
  expect_contains(message(R"({"rank": 1, "targets": ["q"]})"), "alpha");
  expect_contains(message(R"({"rank": 1, "alpha": 1e300, "targets": ["q"]})"), "alpha: got 1e+300, which is too large");
  expect_contains(message(R"({"rank": 1, "alpha": 1, "targets": []})"), "targets: expected a list of names");
  expect_contains(message(R"({"rank": 1, "alpha": 1, "targets": ["q", 3]})"), "targets: got");
  expect_contains(message(R"({"rank": 1, "alpha": 1, "targets": ["w"]})"), "targets: got");
}

TEST(Lora, ARankIsAtMostTheSmallerSideOfEachMatrix) {
  const ModelConfig config = micro_config();  // k and v have 8 rows
  EXPECT_EQ(lora_unsupported_reason(lora_of(8, "all"), config), "");
  EXPECT_EQ(lora_unsupported_reason(lora_of(16, "q,o,gate,up,down"), config), "");
  EXPECT_EQ(lora_unsupported_reason(lora_of(9, "q,k"), config),
            "rank 9 is more than the smaller side of the model's matrix k, [8, 16]");
  const ModelConfig neox = micro_neox();  // qkv is [48, 16]
  EXPECT_EQ(lora_unsupported_reason(lora_of(neox, 16, "all"), neox), "");
  EXPECT_EQ(lora_unsupported_reason(lora_of(neox, 17, "qkv"), neox),
            "rank 17 is more than the smaller side of the model's matrix qkv, [48, 16]");
  EXPECT_EQ(lora_unsupported_reason(lora_of(1, "o,up"), neox),
            "got a target up of another family, expected some of qkv, o, up, down for gpt_neox");
  EXPECT_NE(lora_unsupported_reason(lora_of(neox, 1, "qkv"), config), "");
}

// Kaiming-uniform as PyTorch and PEFT have it: A between -1 / sqrt(in) and 1 / sqrt(in), B zero.
TEST(Lora, ANewAdapterChangesNothing) {
  const TensorTable table(micro_config(), lora_of(4, "all"));
  ASSERT_EQ(table.specs().size(), 14u);
  for (std::size_t s = 0; s < table.specs().size(); ++s) {
    const TensorSpec& spec = table.specs()[s];
    Floats values(static_cast<std::size_t>(spec.elements));
    initial_values(spec, s, 1, 5, values);
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    if (spec.name.ends_with("lora_B.weight")) {
      EXPECT_EQ(std::pair(*low, *high), std::pair(0.0f, 0.0f)) << spec.name;
      continue;
    }
    const double bound = 1 / std::sqrt(static_cast<double>(spec.shape[1]));
    EXPECT_GE(*low, -bound);
    EXPECT_LE(*high, bound);
    double squares = 0;
    for (const float value : values) squares += static_cast<double>(value) * value;
    EXPECT_NEAR(squares / static_cast<double>(values.size()), bound * bound / 3, 0.25 * bound * bound / 3) << spec.name;
  }
}

// ---- the model ----

ModelConfig two_layers() {
  ModelConfig config = micro_config();
  config.num_layers = 2;
  config.qk_norm = true;
  config.qkv_bias = true;
  return config;
}

ModelConfig two_neox_layers(bool parallel) {
  ModelConfig config = micro_neox();
  config.num_layers = 2;
  config.parallel_residual = parallel;
  return config;
}

std::vector<ModelConfig> all_layers() {
  return {two_layers(), two_neox_layers(true), two_neox_layers(false)};
}

std::string named(const ModelConfig& config) {
  return config.family + (config.parallel_residual ? ", parallel" : "");
}

using Tensors = std::map<std::string, Floats>;

Tensors random_base(const ModelConfig& config) {
  Tensors base;
  unsigned seed = 100;
  const TensorTable table(config);
  for (const TensorSpec& spec : table.specs()) {
    base[spec.name] = random_floats(spec.elements, ++seed, 0.2f, spec.init == Init::ones ? 1.0f : 0.0f);
  }
  return base;
}

Tensors random_adapter(const ModelConfig& config, const LoraConfig& lora) {
  Tensors adapter;
  unsigned seed = 500;
  const TensorTable table(config, lora);
  for (const TensorSpec& spec : table.specs()) {
    adapter[spec.name] = random_floats(spec.elements, ++seed, 0.3f);
  }
  return adapter;
}

TrainOptions options_of(std::optional<LoraConfig> lora, Recompute recompute = Recompute::none) {
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = 8;
  options.recompute = recompute;
  options.lora = std::move(lora);
  return options;
}

void set(TrainModel& model, const Tensors& values) {
  for (const TensorSpec& spec : model.table().specs()) {
    model.write_tensor(TensorRole::parameter, spec, values.at(spec.name).data());
  }
}

void set(TrainModel& model, const Tensors& base, const Tensors& adapter) {
  const TensorTable table(model.config());
  for (const TensorSpec& spec : table.specs()) model.write_frozen(spec, base.at(spec.name).data());
  set(model, adapter);
}

std::unique_ptr<TrainModel> model_with(const ModelConfig& config, const TrainOptions& options, const Tensors& base,
                                       const Tensors& adapter) {
  std::unique_ptr<TrainModel> model = cpu::make_training_model(config, options);
  set(*model, base, adapter);
  return model;
}

std::string module_of(const std::string& name) {
  return name.substr(0, name.rfind(".weight"));
}

// The base with the adapter's product in it, element by element in double.
Tensors merged(const ModelConfig& config, const LoraConfig& lora, Tensors base, const Tensors& adapter) {
  const TensorTable table(config);
  for (const TensorSpec& spec : table.specs()) {
    const auto a = adapter.find(module_of(spec.name) + ".lora_A.weight");
    if (a == adapter.end()) continue;
    const Floats& b = adapter.at(module_of(spec.name) + ".lora_B.weight");
    const std::size_t in = static_cast<std::size_t>(spec.shape[1]), rank = static_cast<std::size_t>(lora.rank);
    Floats& weight = base[spec.name];
    for (std::size_t i = 0; i < weight.size(); ++i) {
      double sum = weight[i];
      for (std::size_t r = 0; r < rank; ++r) {
        sum += lora.alpha / static_cast<double>(lora.rank) * static_cast<double>(b[i / in * rank + r]) *
               static_cast<double>(a->second[r * in + i % in]);
      }
      weight[i] = static_cast<float>(sum);
    }
  }
  return base;
}

// Two sequences of 8.
struct SomeTokens {
  explicit SomeTokens(std::size_t begin) {
    const std::vector<std::uint16_t> tokens = patterned_tokens(17, begin);
    ids.assign(tokens.begin(), tokens.end());
  }
  operator Batch() const { return {{ids.data(), 16}, {ids.data() + 1, 16}}; }
  std::vector<std::int32_t> ids;
};

struct Pass {
  double loss = 0;
  Tensors gradients;
};

Pass pass_of(TrainModel& model) {
  model.zero_gradients();
  model.forward(SomeTokens(0), 3, 1.0f / 16);
  model.backward();
  Pass pass{model.statistics().loss_sum, {}};
  for (const TensorSpec& spec : model.table().specs()) {
    Floats& values = pass.gradients[spec.name];
    values.resize(static_cast<std::size_t>(spec.elements));
    model.read_tensor(TensorRole::gradient, spec, values.data());
  }
  return pass;
}

void train(TrainModel& model, std::int64_t steps, float learning_rate) {
  AdamWStep step;
  step.learning_rate = learning_rate;
  for (step.step = 1; step.step <= steps; ++step.step) {
    pass_of(model);
    model.update(step);
  }
}

double loss_of(TrainModel& model) {
  std::int64_t labels = 0;
  return model.evaluate(SomeTokens(7), &labels);
}

Floats logits_of(DecodeModel& decoder) {
  const std::vector<std::int32_t> prompt = {1, 2, 3, 4, 5, 6, 7};
  decoder.reset();
  const std::span<const float> logits = decoder.prefill(prompt);
  return {logits.begin(), logits.end()};
}

// With W' = W + s B A: dA = s B^T dW' and dB = s dW' A^T.
void expect_model_with_the_product(const ModelConfig& config, const std::vector<const char*>& all_targets) {
  for (const char* targets : all_targets) {
    const LoraConfig lora = lora_of(config, 3, targets, 4.5);
    const Tensors base = random_base(config), adapter = random_adapter(config, lora);
    const std::unique_ptr<TrainModel> model = model_with(config, options_of(lora), base, adapter);
    const std::unique_ptr<TrainModel> whole = cpu::make_training_model(config, options_of(std::nullopt));
    set(*whole, merged(config, lora, base, adapter));
    const Pass pass = pass_of(*model), witness = pass_of(*whole);
    EXPECT_NEAR(pass.loss, witness.loss, 1e-6 * witness.loss) << targets;
    ASSERT_EQ(pass.gradients.size(), 2 * 2 * lora.targets.size()) << targets;
    for (const TensorSpec& spec : whole->table().specs()) {
      const std::string module = module_of(spec.name);
      if (!adapter.contains(module + ".lora_A.weight")) continue;
      const Floats &a = adapter.at(module + ".lora_A.weight"), &b = adapter.at(module + ".lora_B.weight");
      const Floats& dw = witness.gradients.at(spec.name);
      const std::size_t rows = static_cast<std::size_t>(spec.shape[0]), in = static_cast<std::size_t>(spec.shape[1]),
                        rank = 3;
      Doubles da(a.size()), db(b.size());
      for (std::size_t o = 0; o < rows; ++o) {
        for (std::size_t c = 0; c < in; ++c) {
          for (std::size_t r = 0; r < rank; ++r) {
            da[r * in + c] += 1.5 * static_cast<double>(b[o * rank + r]) * static_cast<double>(dw[o * in + c]);
            db[o * rank + r] += 1.5 * static_cast<double>(dw[o * in + c]) * static_cast<double>(a[r * in + c]);
          }
        }
      }
      expect_close(pass.gradients.at(module + ".lora_A.weight"), da, module + ", A");
      expect_close(pass.gradients.at(module + ".lora_B.weight"), db, module + ", B");
    }
  }
}

TEST(LoraModel, IsTheModelWithTheProductInItsWeights) {
  expect_model_with_the_product(two_layers(), {"all", "q,v", "k", "o,down", "gate", "up"});
  for (const bool parallel : {true, false}) {
    SCOPED_TRACE(parallel);
    expect_model_with_the_product(two_neox_layers(parallel), {"all", "qkv", "o,down", "up"});
  }
}

TEST(LoraModel, RecomputationAndThreadsChangeNoBit) {
  for (const ModelConfig& config : all_layers()) {
    SCOPED_TRACE(named(config));
    const LoraConfig lora = lora_of(config, 3, "all");
    const Tensors base = random_base(config), adapter = random_adapter(config, lora);
    TrainOptions options = options_of(lora);
    options.adapter_dropout = 0.25;
    options.dropout = 0.1f;
    const Pass expected = pass_of(*model_with(config, options, base, adapter));
    for (const Recompute recompute : {Recompute::norm, Recompute::block}) {
      options.recompute = recompute;
      const Pass again = pass_of(*model_with(config, options, base, adapter));
      EXPECT_EQ(again.loss, expected.loss);
      EXPECT_EQ(again.gradients, expected.gradients);
    }
    const int threads = omp_get_max_threads();
    omp_set_num_threads(3);
    EXPECT_EQ(pass_of(*model_with(config, options, base, adapter)).gradients, expected.gradients);
    omp_set_num_threads(threads);
    options.adapter_dropout = 0;
    EXPECT_NE(pass_of(*model_with(config, options, base, adapter)).loss, expected.loss);
  }
}

// Of one token: a column of A whose input was dropped has no gradient.
TEST(LoraModel, EachLayerAndMicroBatchHasMasksOfItsOwn) {
  const ModelConfig config = two_layers();
  const LoraConfig lora = lora_of(1, "q,v,gate");
  TrainOptions options = options_of(lora);
  options.micro_batch = options.seq_len = 1;
  options.adapter_dropout = 0.5;
  const std::unique_ptr<TrainModel> model =
      model_with(config, options, random_base(config), random_adapter(config, lora));
  const auto kept = [&](const std::string& module, std::uint64_t micro_step) {
    const std::vector<std::int32_t> token = {3}, label = {4};
    model->zero_gradients();
    model->forward({token, label}, micro_step, 1);
    model->backward();
    const TensorSpec& spec = model->table().at(module + ".lora_A.weight");
    Floats gradient(static_cast<std::size_t>(spec.elements));
    model->read_tensor(TensorRole::gradient, spec, gradient.data());
    std::vector<bool> columns;
    for (const float value : gradient) columns.push_back(value != 0);
    return columns;
  };
  const std::string v0 = "model.layers.0.self_attn.v_proj", v1 = "model.layers.1.self_attn.v_proj",
                    gate0 = "model.layers.0.mlp.gate_proj";
  const std::vector<bool> first = kept(v0, 3);
  EXPECT_EQ(kept(v0, 3), first);
  for (const std::vector<bool>& other : {kept(v1, 3), kept(gate0, 3), kept(v0, 4)}) {
    EXPECT_NE(other, first);
    EXPECT_NE(other, std::vector<bool>(16, true));
    EXPECT_NE(other, std::vector<bool>(16, false));
  }
}

TEST(LoraModel, TheFrozenModelStaysAsItWas) {
  for (const ModelConfig& config : all_layers()) {
    SCOPED_TRACE(named(config));
    const LoraConfig lora = lora_of(config, 3, "all");
    const Tensors base = random_base(config);
    TrainOptions options = options_of(lora);
    options.adapter_dropout = 0.5;
    const std::unique_ptr<TrainModel> model = model_with(config, options, base, random_adapter(config, lora));
    const std::unique_ptr<TrainModel> whole = cpu::make_training_model(config, options_of(std::nullopt));
    set(*whole, base);
    const double before = loss_of(*model);
    const std::unique_ptr<TrainModel> without_dropout =
        model_with(config, options_of(lora), base, random_adapter(config, lora));
    EXPECT_EQ(before, loss_of(*without_dropout));
    train(*model, 3, 0.01f);
    EXPECT_LT(std::abs(loss_of(*model) - before), before);
    EXPECT_NE(loss_of(*model), before);
    for (const TensorSpec& spec : model->table().specs()) {
      const Floats zeros(static_cast<std::size_t>(spec.elements));
      model->write_tensor(TensorRole::parameter, spec, zeros.data());
    }
    EXPECT_EQ(loss_of(*model), loss_of(*whole));
  }
}

TEST(LoraModel, TheLossFalls) {
  for (const ModelConfig& config : all_layers()) {
    SCOPED_TRACE(named(config));
    for (const char* optimizer : {"adamw", "muon"}) {
      TrainOptions options = options_of(lora_of(config, 4, "all"));
      options.optimizer = find_optimizer(optimizer);
      Tensors adapter;
      const TensorTable table(config, *options.lora);
      for (std::size_t s = 0; s < table.specs().size(); ++s) {
        Floats& values = adapter[table.specs()[s].name];
        values.resize(static_cast<std::size_t>(table.specs()[s].elements));
        initial_values(table.specs()[s], s, 2, 1, values);
      }
      const std::unique_ptr<TrainModel> model = model_with(config, options, random_base(config), adapter);
      const double first = pass_of(*model).loss;
      train(*model, 30, 0.02f);
      EXPECT_LT(pass_of(*model).loss, (config.gated() ? 0.5 : 0.75) * first) << optimizer;
    }
  }
}

// ---- a frozen model in fp8 ----

ModelConfig fp8_config() {
  ModelConfig config = two_layers();
  config.ffn_size = 32;
  return config;
}

TrainOptions fp8_options(const char* targets = "all") {
  TrainOptions options = options_of(lora_of(3, targets));
  options.precision = Precision::fp8;
  return options;
}

double distance_of(const Floats& got, const Floats& want) {
  return distance("", got, want, 1, Norm::l2).relative;
}

// A new adapter adds nothing: the loss is that of the model that is trained whole in fp8, whose dW would give dB = s dW A^T if the
// adapter read x and dy as the GEMMs do. It reads them as they are, so that dB is not that, but as near as rounding leaves it.
TEST(LoraModel, InFp8TheAdapterReadsWhatIsNotRounded) {
  const ModelConfig config = fp8_config();
  const Tensors base = random_base(config);
  const LoraConfig lora = lora_of(3, "all");
  Tensors adapter = random_adapter(config, lora);
  for (auto& [name, values] : adapter) {
    if (name.find("lora_B") != std::string::npos) std::fill(values.begin(), values.end(), 0.0f);
  }
  TrainOptions options = options_of(std::nullopt);
  options.precision = Precision::fp8;
  const std::unique_ptr<TrainModel> whole = cpu::make_training_model(config, options),
                                    model = model_with(config, fp8_options(), base, adapter);
  set(*whole, base);
  const Pass want = pass_of(*whole), got = pass_of(*model);
  EXPECT_EQ(got.loss, want.loss);
  const std::string down = "model.layers.1.mlp.down_proj";
  const Floats &dW = want.gradients.at(down + ".weight"), &A = adapter.at(down + ".lora_A.weight");
  const std::size_t C = 16, F = 32, r = 3;
  Floats of_rounded(C * r);
  for (std::size_t i = 0; i < C * r; ++i) {
    double sum = 0;
    for (std::size_t f = 0; f < F; ++f) sum += static_cast<double>(dW[i / r * F + f] * A[i % r * F + f]);
    of_rounded[i] = static_cast<float>(sum * lora.alpha / 3);
  }
  const double apart = distance_of(got.gradients.at(down + ".lora_B.weight"), of_rounded);
  EXPECT_GT(apart, 3e-3);
  EXPECT_LT(apart, 0.12);
}

TEST(LoraModel, InFp8GradientsPointWhereThoseOfFp32Point) {
  const ModelConfig config = fp8_config();
  const Tensors base = random_base(config), adapter = random_adapter(config, lora_of(3, "all"));
  TrainOptions options = fp8_options();
  const auto in_fp8 = pass_of(*model_with(config, options, base, adapter));
  options.precision = Precision::fp32;
  const auto exact = pass_of(*model_with(config, options, base, adapter));
  EXPECT_NE(in_fp8.loss, exact.loss);
  EXPECT_NEAR(in_fp8.loss, exact.loss, 0.02 * exact.loss);
  Floats of_fp8, of_fp32;
  for (const auto& [name, values] : in_fp8.gradients) {
    const Floats& want = exact.gradients.at(name);
    EXPECT_GT(distance_of(values, want), 1e-3) << name;
    of_fp8.insert(of_fp8.end(), values.begin(), values.end());
    of_fp32.insert(of_fp32.end(), want.begin(), want.end());
  }
  EXPECT_LT(distance_of(of_fp8, of_fp32), 0.2);
}

// Three steps, behind which scales are delayed: the parameters and the history.
std::vector<float> trained_in_fp8(const TrainOptions& options) {
  const ModelConfig config = fp8_config();
  const std::unique_ptr<TrainModel> model =
      model_with(config, options, random_base(config), random_adapter(config, *options.lora));
  train(*model, 3, 0.01f);
  std::vector<float> all = whole_state(*model), history = model->fp8_state();
  all.insert(all.end(), history.begin(), history.end());
  return all;
}

// What would only reach frozen weights is not computed, so it has no history.
TEST(LoraModel, InFp8UnreadGradientsAreNotRounded) {
  const ModelConfig config = fp8_config();
  const Fp8Slots slots{config.num_layers};
  for (const char* targets : {"all", "o,down"}) {
    const LoraConfig lora = lora_of(3, targets);
    const std::unique_ptr<TrainModel> model =
        model_with(config, fp8_options(targets), random_base(config), random_adapter(config, lora));
    AdamWStep step;
    step.step = 1;
    pass_of(*model);
    model->update(step);
    const std::vector<float> newest = model->fp8_state();
    for (std::int64_t slot = slots.first(Fp8Kind::gradient); slot < slots.count(); ++slot) {
      EXPECT_EQ(newest[static_cast<std::size_t>(slot)] > 0,
                input_gradient_is_read(lora, slots.layer(slot), slots.linear(slot)))
          << targets << " " << slots.name(slot);
    }
  }
}

TEST(LoraModel, InFp8RecomputationChangesNoBit) {
  TrainOptions options = fp8_options();
  options.adapter_dropout = 0.3f;
  const std::vector<float> expected = trained_in_fp8(options);
  for (const Recompute recompute : {Recompute::norm, Recompute::block}) {
    options.recompute = recompute;
    EXPECT_EQ(trained_in_fp8(options), expected);
  }
}

// Its weights are what they were, and so is their place in the history; written anew, they are rounded anew.
TEST(LoraModel, InFp8TheFrozenModelStaysAsItWas) {
  const ModelConfig config = fp8_config();
  Tensors base = random_base(config);
  const Tensors adapter = random_adapter(config, lora_of(3, "all"));
  const std::unique_ptr<TrainModel> model = model_with(config, fp8_options(), base, adapter);
  const double before = loss_of(*model);
  train(*model, 3, 0.01f);
  const Fp8Slots slots{config.num_layers};
  const std::vector<float> history = model->fp8_state();
  for (std::int64_t i = 0; i < slots.of_a_kind(); ++i) {
    const auto slot = static_cast<std::size_t>(slots.first(Fp8Kind::weight) + i);
    EXPECT_GT(history[slot], 0.0f);
    EXPECT_EQ(history[slot], history[slot + static_cast<std::size_t>(slots.count())]);
  }
  set(*model, adapter);
  EXPECT_EQ(loss_of(*model), before);
  const std::string up = "model.layers.0.mlp.up_proj.weight";
  for (float& value : base.at(up)) value *= 3;
  const TensorTable table(config);
  model->write_frozen(table.at(up), base.at(up).data());
  EXPECT_EQ(loss_of(*model), loss_of(*model_with(config, fp8_options(), base, adapter)));
}

// What a decoder generates from is the adapter as it is, not as it was when the decoder was made.
void expect_newest_adapter(const ModelConfig& config, const char* targets) {
  SCOPED_TRACE(named(config));
  const LoraConfig lora = lora_of(config, 3, targets);
  const Tensors base = random_base(config);
  Tensors adapter = random_adapter(config, lora);
  const std::unique_ptr<TrainModel> model = model_with(config, options_of(lora), base, adapter);
  const std::unique_ptr<DecodeModel> decoder = model->decoder(16);
  const auto expected = [&] {
    const Tensors all = merged(config, lora, base, adapter);
    const TensorTable table(config);
    const auto whole = single_sequence(cpu::make_inference(config, one_sequence(16),
                                                           [&](const TensorSpec& spec, std::byte* out) {
                                                             std::copy_n(all.at(spec.name).data(), spec.elements,
                                                                         reinterpret_cast<float*>(out));
                                                           }),
                                       16);
    return widen(logits_of(*whole));
  };
  expect_close(logits_of(*decoder), expected(), "first");
  for (auto& [name, values] : adapter) {
    for (float& value : values) value = 0.5f - value;
  }
  set(*model, adapter);
  expect_close(logits_of(*decoder), expected(), "after new parameters");
}

TEST(LoraModel, ADecoderHasTheNewestAdapter) {
  expect_newest_adapter(two_layers(), "q,v,down");
  for (const bool parallel : {true, false}) expect_newest_adapter(two_neox_layers(parallel), "all");
}

// Ranks add their gradients in the order of the ranks: the bits of one process with --virtual-ranks.
TEST(LoraModel, RanksHaveTheBitsOfOneProcess) {
  for (const ModelConfig& config : all_layers()) {
    SCOPED_TRACE(named(config));
    const LoraConfig lora = lora_of(config, 3, "all");
    const Tensors base = random_base(config), adapter = random_adapter(config, lora);
    TrainOptions options = options_of(lora);
    options.virtual_ranks = 4;
    options.adapter_dropout = 0.25;
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    AdamWStep step;
    step.step = 1;
    step.learning_rate = 0.01f;
    const auto micro_batch = [&](TrainModel& model, std::uint64_t rank) {
      model.forward(SomeTokens(40 * rank), rank, 1.0f / 64);
      model.backward();
    };
    const std::unique_ptr<TrainModel> alone = model_with(config, options, base, adapter);
    alone->zero_gradients();
    for (std::uint64_t rank = 0; rank < 4; ++rank) micro_batch(*alone, rank);
    alone->statistics();
    alone->update(step);
    const std::vector<float> expected = tensors(*alone, TensorRole::parameter);
    for (const Shard shard : {Shard::none, Shard::optimizer}) {
      run_thread_ranks(2, 20, [&](Communicator& ranks) {
        const std::unique_ptr<TrainModel> model = cpu::make_training_model(config, options, ranks, shard);
        set(*model, base, adapter);
        model->zero_gradients();
        for (const int round : {0, 1}) micro_batch(*model, static_cast<std::uint64_t>(2 * round + ranks.rank()));
        model->statistics();
        model->update(step);
        EXPECT_EQ(tensors(*model, TensorRole::parameter), expected);
      });
    }
    omp_set_num_threads(threads);
  }
}

TEST(LoraModel, WhatItRefuses) {
  TrainOptions options = options_of(lora_of(3, "all"));
  options.precision = Precision::fp8;
  ModelConfig config = micro_config();
  expect_contains(error_of(Exit::usage, [&] { cpu::make_training_model(config, options); }),
                  "ffn_size: got 24, --precision fp8 needs a multiple of 16");
  options.precision = Precision::fp32;
  expect_contains(error_of(Exit::usage, [&] { cpu::make_training_model(micro_neox(), options); }),
                  "--lora-r: got a target q of another family");
  options.lora = lora_of(9, "all");
  expect_contains(error_of(Exit::usage, [&] { cpu::make_training_model(config, options); }), "--lora-r: rank 9");
  run_thread_ranks(2, 20, [&](Communicator& ranks) {
    TrainOptions two = options_of(lora_of(3, "all"));
    two.virtual_ranks = 2;
    expect_contains(error_of(Exit::usage, [&] { cpu::make_training_model(config, two, ranks, Shard::parameters); }),
                    "--shard: got parameters");
  });
}

// ---- files ----

void write_file(const std::string& path, FileKind kind, const Json& config, const TensorTable& table,
                const Tensors& values) {
  TensorFileWriter writer(path, kind, config);
  for (const TensorSpec& spec : table.specs()) writer.declare(spec.name, DType::f32, spec.shape);
  for (const TensorSpec& spec : table.specs()) {
    writer.write(values.at(spec.name).data(), values.at(spec.name).size() * sizeof(float));
  }
  writer.publish();
}

void write_model(const std::string& path, const ModelConfig& config, const Tensors& values) {
  write_file(path, FileKind::model, {{"model", config_to_json(config)}}, TensorTable(config), values);
}

void write_adapter(const std::string& path, const ModelConfig& config, const LoraConfig& lora, const Tensors& values,
                   const Json& more = Json::object()) {
  Json members = {{"model", config_to_json(config)}, {kLora, lora_to_json(lora)}};
  members.update(more);
  write_file(path, FileKind::adapter, members, TensorTable(config, lora), values);
}

ModelConfig two_plain_layers() {
  ModelConfig config = micro_config();
  config.num_layers = 2;
  return config;
}

class LoraFiles : public testing::Test {
 protected:
  LoraFiles() : LoraFiles(two_plain_layers(), "q,o,up") {}
  LoraFiles(const ModelConfig& config, const std::string& targets)
      : config_(config), lora_(lora_of(config, 3, targets, 4.5)) {}
  void expect_in_the_weights() const;
  void expect_beside_quantised_weights() const;
  void SetUp() override {
    write_model(path("model.bin"), config_, base_);
    write_adapter(path("adapter.bin"), config_, lora_, adapter_);
  }
  std::string path(const std::string& name) const { return temporary_.file(name); }
  ModelFile with_adapter() const {
    ModelFile model = ModelFile::open(path("model.bin"));
    model.add_adapter("--adapter", ModelFile::open_adapter(path("adapter.bin")));
    return model;
  }

  static InferenceOptions pool() { return {.num_pages = 16, .slots = kSlots, .max_rows = 48}; }
  static std::uint64_t parameter_bytes(const InferenceModel& model) { return model.memory().front().bytes; }

  TemporaryDirectory temporary_;
  const ModelConfig config_;
  const LoraConfig lora_;
  const Tensors base_ = random_base(config_), adapter_ = random_adapter(config_, lora_);
};

class LoraFilesOfANeox : public LoraFiles {
 protected:
  LoraFilesOfANeox() : LoraFiles(two_neox_layers(true), "all") {}
};

void LoraFiles::expect_in_the_weights() const {
  const ModelFile model = with_adapter();
  EXPECT_EQ(model.adapter_rank(), 3);
  const Tensors expected = merged(config_, lora_, base_, adapter_);
  std::size_t changed = 0;
  for (const TensorSpec& spec : model.table().specs()) {
    Floats values(static_cast<std::size_t>(spec.elements));
    model.read_parameter(spec, values.data());
    changed += !model.as_stored(spec);
    if (model.as_stored(spec)) {
      EXPECT_EQ(values, base_.at(spec.name)) << spec.name;
    } else {
      expect_close(values, widen(expected.at(spec.name)), spec.name, 1e-6);
    }
  }
  EXPECT_EQ(changed, 2 * lora_.targets.size());

  // In inference: the logits of the training model beside which the adapter stands.
  const std::unique_ptr<TrainModel> training = model_with(config_, options_of(lora_), base_, adapter_);
  EXPECT_EQ(logits_of(*cpu::load_decoder(model, 16)), logits_of(*training->decoder(16)));
}

TEST_F(LoraFiles, AnAddedAdapterIsInTheWeights) {
  expect_in_the_weights();
}
TEST_F(LoraFilesOfANeox, AnAddedAdapterIsInTheWeights) {
  expect_in_the_weights();
}

TEST_F(LoraFilesOfANeox, ATargetOfALlamaIsRefused) {
  write_adapter(path("q.bin"), config_, lora_, adapter_, {{kLora, lora_to_json(lora_of(3, "q,o"))}});
  expect_contains(error_of(Exit::bad_file, [&] { ModelFile::open_adapter(path("q.bin")); }),
                  "lora: targets: got '\"q\"', expected some of qkv, o, up, down");
}

TEST_F(LoraFiles, EachKindIsOpenedAsWhatItIs) {
  expect_contains(error_of(Exit::bad_file, [&] { ModelFile::open(path("adapter.bin")); }),
                  "kind: this is a LoRA adapter, expected a model");
  expect_contains(error_of(Exit::bad_file, [&] { ModelFile::open_adapter(path("model.bin")); }),
                  "kind: this is a model, expected a LoRA adapter");
}

TEST_F(LoraFiles, AnAdapterOfAnotherModelIsRefused) {
  ModelConfig other = config_;
  other.ffn_size += 8;
  write_adapter(path("adapter.bin"), other, lora_, random_adapter(other, lora_));
  expect_contains(error_of(Exit::bad_file, [&] { with_adapter(); }),
                  "ffn_size: got an adapter of a model with 32, but ");
  ModelConfig ids = config_;  // of a tuned model these may differ
  ids.eos_ids = {3};
  write_adapter(path("adapter.bin"), ids, lora_, adapter_);
  EXPECT_EQ(with_adapter().adapter_rank(), 3);
}

TEST_F(LoraFiles, AnAdapterOfAnotherFileIsWarnedOf) {
  const auto warning = [&](const std::string& base) {
    write_adapter(path("adapter.bin"), config_, lora_, adapter_, {{kAdapterBase, base}});
    testing::internal::CaptureStderr();
    with_adapter();
    return testing::internal::GetCapturedStderr();
  };
  const std::string hash =
      format("%016llx", static_cast<unsigned long long>(ModelFile::open(path("model.bin")).file().header_hash()));
  EXPECT_EQ(warning(hash), "");
  expect_contains(warning("0123456789abcdef"), "was trained beside a file with header hash '0123456789abcdef'");
}

TEST_F(LoraFiles, WhatAnAdapterLacks) {
  Tensors wide = random_adapter(config_, lora_of(4, "q,o,up"));
  write_adapter(path("rank.bin"), config_, lora_of(4, "q,o,up"), wide, {{kLora, lora_to_json(lora_)}});
  expect_contains(error_of(Exit::bad_file, [&] { ModelFile::open_adapter(path("rank.bin")); }),
                  "got shape [4, 16], expected [3, 16] by the configuration");
  write_adapter(path("less.bin"), config_, lora_of(3, "q,o"), adapter_, {{kLora, lora_to_json(lora_)}});
  expect_contains(error_of(Exit::bad_file, [&] { ModelFile::open_adapter(path("less.bin")); }),
                  "tensor model.layers.0.mlp.up_proj.lora_A.weight is missing");
  write_adapter(path("more.bin"), config_, lora_, adapter_, {{kLora, lora_to_json(lora_of(3, "q,o"))}});
  expect_contains(error_of(Exit::bad_file, [&] { ModelFile::open_adapter(path("more.bin")); }),
                  "tensor 'model.layers.0.mlp.up_proj.lora_A.weight' does not belong");
  write_adapter(path("none.bin"), config_, lora_, adapter_, {{kLora, nullptr}});
  expect_contains(error_of(Exit::bad_file, [&] { ModelFile::open_adapter(path("none.bin")); }),
                  "lora: expected an object");
}

// The frozen model of an adapter may be quantised: it is what its values are.
TEST_F(LoraFiles, AQuantisedModelIsReadAsItsValues) {
  for (const WeightFormat* weights : weight_formats()) {
    write_quantized_pair(ModelFile::open(path("model.bin")), {weights}, path("quantised.bin"), path("floats.bin"));
    ModelFile quantised = ModelFile::open(path("quantised.bin"));
    const ModelFile floats = ModelFile::open(path("floats.bin"));
    for (const TensorSpec& spec : floats.table().specs()) {
      Floats values(static_cast<std::size_t>(spec.elements)), expected(values.size());
      quantised.read_values(spec, values.data());
      floats.read_values(spec, expected.data());
      EXPECT_EQ(values, expected) << weights->name << ", " << spec.name;
    }
  }
}

// Beside quantised weights an adapter gives what it gives in the floats that they stand for.
void LoraFiles::expect_beside_quantised_weights() const {
  const std::vector<Sequence> sequences = random_sequences(config_, 5, 20);
  for (const WeightFormat* weights : weight_formats()) {
    write_quantized_pair(ModelFile::open(path("model.bin")), {weights}, path("quantised.bin"), path("floats.bin"));
    ModelFile beside = ModelFile::open(path("quantised.bin")), within = ModelFile::open(path("floats.bin"));
    const std::uint64_t alone = parameter_bytes(*cpu::load_inference(beside, pool()));
    const Floats without = logits_of(*cpu::load_decoder(beside, 16));
    for (ModelFile* file : {&beside, &within}) {
      file->add_adapter("--adapter", ModelFile::open_adapter(path("adapter.bin")));
    }
    ASSERT_NE(beside.adapter_beside(), nullptr);
    EXPECT_EQ(within.adapter_beside(), nullptr);
    for (const TensorSpec& spec : beside.table().specs()) EXPECT_TRUE(beside.as_stored(spec)) << spec.name;
    const Floats expected = logits_of(*cpu::load_decoder(within, 16));
    expect_close(logits_of(*cpu::load_decoder(beside, 16)), widen(expected), weights->name, 1e-5);
    EXPECT_GT(relative_error(without, widen(expected)), 1e-2) << weights->name;

    const std::unique_ptr<InferenceModel> model = cpu::load_inference(beside, pool());
    EXPECT_EQ(parameter_bytes(*model), alone + beside.adapter_beside()->table().arena_bytes());
    const std::vector<Trace> together = run(*model, sequences, 7, false, 1);
    EXPECT_EQ(run(*model, sequences, 1, true, 2), together) << weights->name;
    for (std::size_t s = 0; s < sequences.size(); ++s) {
      EXPECT_EQ(run(*model, {sequences[s]}, 30, false, 3).front().logits, together[s].logits) << weights->name;
    }
  }
}

TEST_F(LoraFiles, AnAdapterStandsBesideQuantisedWeights) {
  expect_beside_quantised_weights();
}
TEST_F(LoraFilesOfANeox, AnAdapterStandsBesideQuantisedWeights) {
  expect_beside_quantised_weights();
}

// ---- a run ----

class LoraRun : public testing::Test {
 protected:
  void SetUp() override {
    omp_set_num_threads(1);
    write_shard(path("train_0.bin"), patterned_tokens(303));
    write_model(path("model.bin"), micro_config(), random_base(micro_config()));
    settings_ = micro_settings();
    settings_.model = path("model.bin");
    settings_.train = path("train_*.bin");
    settings_.lora_r = 3;
    settings_.lora_targets = "q,v,down";
    settings_.lora_dropout = 0.25;
  }
  void TearDown() override { omp_set_num_threads(threads_); }
  std::string path(const std::string& name) const { return temporary_.file(name); }

  // Runs up to `steps` in a directory, which goes on from what is there; returns the whole state.
  std::vector<float> run(const std::string& name, std::int64_t steps) {
    TrainSettings settings = settings_;
    settings.steps = steps;
    const TrainInputs inputs = open_inputs(settings);
    settings.model_targets = lora_targets(inputs.config);
    RunIdentity identity = micro_identity(settings, *inputs.train);
    identity.model = inputs.config;
    identity.tokenizer.clear();
    identity.began_from = inputs.began_from;
    if (inputs.trains_adapter) identity.adapter = TrainedAdapter{*settings.lora(), inputs.base};
    const RunDirectory directory(path(name));
    CheckpointKeeper checkpoints(directory, identity, settings.keep);
    const std::unique_ptr<TrainModel> model = cpu::make_training_model(inputs.config, settings.model_options());
    load_frozen(inputs, *model);
    const std::optional<TrainState> resumed = checkpoints.resume(ResumeMode::automatic, *model);
    if (!resumed) load_parameters(inputs, 1, *model);
    RunLog log(directory.file("log.jsonl"));
    DataLoader loader(*inputs.train, settings.micro_batch, 1, resumed ? resumed->windows : 0);
    testing::internal::CaptureStdout();
    TrainLoop({settings, *model, loader, &checkpoints, log, nullptr, nullptr, model->make_state_copy()},
              resumed.value_or(TrainState()))
        .run();
    testing::internal::GetCapturedStdout();
    return whole_state(*model);
  }

  const int threads_ = omp_get_max_threads();
  TemporaryDirectory temporary_;
  TrainSettings settings_;
};

TEST_F(LoraRun, GoesOnBitForBitAndWritesAnAdapter) {
  const std::vector<float> whole = run("whole", 8);
  run("parts", 3);
  EXPECT_EQ(run("parts", 8), whole);
  ModelFile adapter = ModelFile::open_adapter(path("whole/step_00000008/adapter.bin"));
  EXPECT_EQ(adapter.lora(), settings_.lora());
  EXPECT_FALSE(std::filesystem::exists(path("whole/step_00000008/model.bin")));
  testing::internal::CaptureStderr();
  ModelFile model = ModelFile::open(path("model.bin"));
  model.add_adapter("--adapter", std::move(adapter));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");  // it knows its base

  settings_.adapter = path("whole/step_00000008/adapter.bin");  // trained further: it begins where that one ended
  const std::vector<float> further = run("further", 1);
  settings_.lr = 0;
  const std::vector<float> started = run("started", 1);
  const std::size_t parameters = further.size() / 3;
  const std::vector<float> last(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(parameters));
  EXPECT_EQ(std::vector<float>(started.begin(), started.begin() + static_cast<std::ptrdiff_t>(parameters)), last);
  EXPECT_NE(std::vector<float>(further.begin(), further.begin() + static_cast<std::ptrdiff_t>(parameters)), last);
}

TEST_F(LoraRun, OfANeoxGoesOnBitForBit) {
  write_model(path("model.bin"), micro_neox(), random_base(micro_neox()));
  expect_contains(error_of(Exit::usage, [&] { open_inputs(settings_); }),
                  "--lora-targets: got 'q', expected all, or some of qkv, o, up, down");
  settings_.lora_targets = "all";
  const std::vector<float> whole = run("whole", 8);
  run("parts", 3);
  EXPECT_EQ(run("parts", 8), whole);
  settings_.adapter = path("whole/step_00000008/adapter.bin");
  EXPECT_TRUE(open_inputs(settings_).adapter.has_value());
  EXPECT_EQ(ModelFile::open_adapter(settings_.adapter).lora()->targets.size(), 4u);
}

// In fp8 a checkpoint has the history of the scales, too.
TEST_F(LoraRun, InFp8GoesOnBitForBit) {
  ModelConfig config = micro_config();
  config.ffn_size = 32;
  write_model(path("model.bin"), config, random_base(config));
  const std::vector<float> in_fp32 = run("fp32", 8);
  settings_.precision = "fp8";
  const std::vector<float> whole = run("whole", 8);
  EXPECT_NE(whole, in_fp32);
  run("parts", 3);
  EXPECT_EQ(run("parts", 8), whole);
}

TEST_F(LoraRun, OldCheckpointsAreRemoved) {
  settings_.save_every = 1;
  settings_.keep = 2;
  run("run", 5);
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path("run"))) names.insert(entry.path().filename());
  EXPECT_TRUE(names.contains("step_00000004") && names.contains("step_00000005"));
  for (const char* old : {"step_00000001", "step_00000002", "step_00000003"}) EXPECT_FALSE(names.contains(old)) << old;
}

TEST_F(LoraRun, IsContinuedByTheSameRunAlone) {
  run("run", 2);
  const auto message = [&](const std::function<void(TrainSettings&)>& change) {
    const TrainSettings before = settings_;
    change(settings_);
    const std::string text = error_of(Exit::usage, [&] { run("run", 4); });
    settings_ = before;
    return text;
  };
  expect_contains(message([](TrainSettings& s) { s.lora_r = 2; }), "--lora-alpha: got '4.0', but ");
  expect_contains(message([](TrainSettings& s) { s.lora_alpha = 7; }), "--lora-alpha: got '7.0'");
  expect_contains(message([](TrainSettings& s) { s.lora_targets = "all"; }), "--lora-targets: got 'all'");
  expect_contains(message([](TrainSettings& s) { s.lora_dropout = 0; }), "--lora-dropout: got '0.0'");
  expect_contains(message([](TrainSettings& s) { s.lora_r = 0; }), "--lora-r: ");
  Tensors other = random_base(micro_config());
  other.begin()->second[0] += 1;
  write_model(path("model.bin"), micro_config(), other);
  expect_contains(message([](TrainSettings&) {}), "began from a model file with header hash");
}

// QLoRA: beside a quantised model an adapter becomes, bit for bit, what it becomes beside the floats that the model has.
TEST_F(LoraRun, BesideAQuantisedModel) {
  std::set<std::vector<float>> states;
  for (const WeightFormat* weights : weight_formats()) {
    write_quantized_pair(ModelFile::open(path("model.bin")), {weights}, path("quantised.bin"), path("floats.bin"));
    settings_.model = path("quantised.bin");
    const std::vector<float> state = run(std::string(weights->name), 4);
    settings_.model = path("floats.bin");
    EXPECT_EQ(run(std::string("floats of ") + weights->name, 4), state) << weights->name;
    states.insert(state);
  }
  EXPECT_EQ(states.size(), weight_formats().size());
}

TEST_F(LoraRun, WhatOpeningRefuses) {
  settings_.lora_r = 9;
  expect_contains(error_of(Exit::usage, [&] { open_inputs(settings_); }), "--lora-r: rank 9 is more than");
  settings_.lora_r = 3;
  run("run", 1);
  settings_.adapter = path("run/step_00000001/adapter.bin");
  settings_.lora_alpha = 1;
  expect_contains(error_of(Exit::usage, [&] { open_inputs(settings_); }),
                  "has --lora-r 3 --lora-alpha 6 --lora-targets q,v,down. Give the same to train it further");
  settings_.adapter = path("model.bin");
  expect_contains(error_of(Exit::bad_file, [&] { open_inputs(settings_); }), "expected a LoRA adapter");
}

// Without --lora-r an adapter is in the weights: --eval measures it, and training goes on from both.
TEST_F(LoraRun, AnAdapterIsMeasuredInTheWeights) {
  run("run", 4);
  settings_.adapter = path("run/step_00000004/adapter.bin");
  const auto loss = [&](const TrainSettings& settings) {
    const TrainInputs inputs = open_inputs(settings);
    const std::unique_ptr<TrainModel> model = cpu::make_training_model(inputs.config, settings.model_options());
    load_frozen(inputs, *model);
    load_parameters(inputs, 1, *model);
    return loss_of(*model);
  };
  TrainSettings whole = settings_;
  whole.lora_r = 0;
  const double beside = loss(settings_), within = loss(whole);
  EXPECT_NEAR(beside, within, 1e-6 * within);
  whole.adapter.clear();
  EXPECT_GT(std::abs(loss(whole) - within), 1e-3 * within);
}

// ---- --bench ----

// Keeps its frozen model in a format, and what it is given of the first layer's gate.
class Quantised : public HookedModel {
 public:
  Quantised(TrainModel& inner, const WeightFormat& format) : HookedModel(inner), config_(inner.config()) {
    config_.quantization.weights = &format;
  }
  TensorTable frozen_table() const override { return TensorTable(config_); }
  void write_frozen(const TensorSpec& /*spec*/, const float* /*values*/) override {}
  void write_frozen_quantized(const TensorSpec& spec, const std::byte* bytes) override {
    written[spec.name].assign(bytes, bytes + spec.bytes);
  }
  std::map<std::string, std::vector<std::byte>> written;

 private:
  ModelConfig config_;
};

// The deviation of a new model's weights and no mean: that of random bytes of int4, half a step, would grow with each layer.
TEST(BenchParameters, QuantisedWeightsAreThoseOfANewModel) {
  const ModelConfig config = preset_config("tiny");
  const std::unique_ptr<TrainModel> inner = cpu::make_training_model(config, options_of(lora_of(4, "q")));
  for (const WeightFormat* format : weight_formats()) {
    SCOPED_TRACE(format->name);
    Quantised model(*inner, *format);
    bench_parameters(model, true);
    const TensorTable table = model.frozen_table();
    const std::string name = "model.layers.0.mlp.gate_proj.weight";
    const TensorSpec& spec = table.at(name);
    const std::int64_t rows = spec.shape[0], K = spec.shape[1];
    for (const TensorSpec& each : table.specs()) {
      if (each.kind == ValueKind::floats) continue;
      EXPECT_EQ(first_invalid_value(each.kind, each.dtype, model.written.at(each.name)), std::nullopt) << each.name;
    }
    const std::byte* const zeros = format->grouped ? model.written.at(zeros_of(name)).data() : nullptr;
    const QuantizedMatrix matrix =
        format->matrix(model.written.at(name).data(), model.written.at(scales_of(name)).data(), zeros);
    Floats values(static_cast<std::size_t>(rows * K));
    format->dequantize(values.data(), matrix, 0, rows, K);
    double sum = 0, squares = 0;
    for (const float value : values) {
      const double w = static_cast<double>(value) * (format->grouped ? 1.0 : static_cast<double>(matrix.row_scales[0]));
      sum += w;
      squares += w * w;
    }
    const double count = static_cast<double>(values.size()), deviation = std::sqrt(squares / count);
    EXPECT_NEAR(deviation, 0.02, 0.003);
    EXPECT_LT(std::abs(sum / count), 0.02 * deviation);
  }
}

// ---- the plans of --dry-run ----

std::uint64_t mapped_bytes() {
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::string padded(const std::string& size) {
  return format("%9s", size.c_str());
}

TEST(TuningWays, ArePlannedAsTheyAreAllocated) {
  ModelConfig config = preset_config("tiny");
  config.vocab_size = config.tokenizer_vocab = 4096;
  TrainSettings settings = micro_settings();
  settings.seq_len = 256;
  const std::vector<TuningWay> ways = tuning_ways(settings, config);
  ASSERT_EQ(ways.size(), 2 + weight_formats().size());
  EXPECT_EQ(ways[0].name, "all weights");
  EXPECT_FALSE(ways[0].options.lora);
  EXPECT_EQ(ways[1].name, "LoRA, rank 16, targets all");
  for (std::size_t i = 0; i < ways.size(); ++i) {
    const WeightFormat* const beside = i < 2 ? nullptr : weight_formats()[i - 2];
    EXPECT_EQ(ways[i].options.frozen_quantization.weights, beside);
    if (i > 0) {
      EXPECT_EQ(ways[i].options.lora, lora_of(16, "all", 32));
    }
    const std::uint64_t planned = total_bytes(cpu::plan_training(config, ways[i].options)), before = mapped_bytes();
    const std::unique_ptr<TrainModel> model = cpu::make_training_model(config, ways[i].options);
    const std::uint64_t mapped = mapped_bytes() - before;
    EXPECT_EQ(total_bytes(model->memory()), planned) << ways[i].name;
    if (sanitized()) continue;  // a sanitizer's own memory is counted with the model's
    EXPECT_GE(mapped, planned) << ways[i].name;
    EXPECT_LE(mapped, planned + planned / 50) << ways[i].name;  // tables of RoPE, pages that are not full
  }
}

TEST(TuningWays, AreThoseOfTheRun) {
  TrainSettings settings = micro_settings();
  settings.lora_r = 3;
  settings.lora_targets = "q,v";
  settings.lora_dropout = 0.5;
  settings.frozen_quantization.weights = weight_formats()[1];
  settings.precision = "fp8";
  const std::vector<TuningWay> ways = tuning_ways(settings, micro_config());
  EXPECT_EQ(ways[0].options.frozen_quantization, Quantization());
  EXPECT_EQ(ways[0].options.precision, Precision::fp8);
  EXPECT_EQ(ways[1].name, "LoRA, rank 3, targets q,v");
  EXPECT_EQ(ways[1].options.lora, settings.lora());
  EXPECT_EQ(ways[1].options.adapter_dropout, 0.5f);
  EXPECT_EQ(ways[1].options.precision, Precision::fp32);
  EXPECT_EQ(ways.size(), 2 + weight_formats().size());
  settings.device = "cuda";
  EXPECT_EQ(tuning_ways(settings, micro_config())[1].options.precision, Precision::bf16);
  EXPECT_EQ(tuning_ways(settings, micro_config()).size(), 2 + weight_formats().size()) << "no width for fp8";
  const std::vector<TuningWay> on_gpu = tuning_ways(settings, fp8_config());
  ASSERT_EQ(on_gpu.size(), 3 + weight_formats().size());
  EXPECT_EQ(on_gpu[2].name, "LoRA, the same with --precision fp8");
  EXPECT_EQ(on_gpu[2].options.precision, Precision::fp8);
  EXPECT_EQ(on_gpu[2].options.lora, settings.lora());
  EXPECT_EQ(on_gpu[3].options.precision, Precision::bf16);

  settings.lora_r = 0;
  EXPECT_TRUE(tuning_ways(settings, micro_config()).empty()) << "k and v have 8 rows";
  const std::vector<TuningWay> of_neox = tuning_ways(settings, micro_neox());
  ASSERT_GT(of_neox.size(), 1u);
  EXPECT_EQ(of_neox[1].options.lora, lora_of(micro_neox(), 16, "all", 32));
}

TEST(TuningWays, AreATable) {
  const std::vector<TuningWay> ways = {{"all weights", options_of(std::nullopt)},
                                       {"LoRA", options_of(lora_of(3, "q"))}};
  const auto needed = [](const TrainOptions& options) { return options.lora ? 1000u : 1001u; };
  EXPECT_EQ(tuning_table(ways, 1000, needed),
            (std::vector<std::string>{"what fits in " + human_bytes(1000),
                                      "  all weights  " + padded(human_bytes(1001)) + "  too large",
                                      "  LoRA         " + padded(human_bytes(1000)) + "  fits"}));
  EXPECT_EQ(tuning_table(ways, 0, needed)[2], "  LoRA         " + padded(human_bytes(1000)));
  EXPECT_TRUE(tuning_table({}, 1000, needed).empty());
}

}  // namespace
}  // namespace weft
