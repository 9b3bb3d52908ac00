// What the tests of the training room share: shards, a model small enough to train in milliseconds, and a
// wrapper that lets a test interfere with any model.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "llmc/base/hash.h"
#include "llmc/cpu/training.h"
#include "llmc/model/presets.h"
#include "llmc/train/checkpoint.h"
#include "llmc/train/data_loader.h"
#include "llmc/train/initialize.h"
#include "llmc/train/options.h"
#include "test/cpp/test_files.h"

namespace weft {

template <typename T>
void append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// A token shard (layout in llmc/file/token_shard.h) of u16 tokens, or u32 for a vocabulary that needs them.
inline void write_shard(const std::string& path, const std::vector<std::uint16_t>& tokens, std::uint64_t vocab = 32,
                        std::uint64_t tokenizer_hash = 7, std::int64_t end_of_document = -1) {
  const bool wide = vocab > 65'536;
  std::string data;
  for (const std::uint16_t token : tokens) wide ? append<std::uint32_t>(data, token) : append(data, token);
  std::string bytes("\x89WTOK\r\n\x1a", 8);
  append<std::uint32_t>(bytes, 1);
  append<std::uint32_t>(bytes, static_cast<std::uint32_t>(wide ? DType::u32 : DType::u16));
  append<std::uint64_t>(bytes, tokens.size());
  append<std::uint64_t>(bytes, vocab);
  append<std::uint64_t>(bytes, tokenizer_hash);
  append<std::int64_t>(bytes, end_of_document);
  append<std::uint64_t>(bytes, xxh3_64(data));
  append<std::uint64_t>(bytes, xxh3_64(bytes));
  bytes.resize(256);
  write_bytes(path, bytes + data);
}

// A shard with documents: one for each of `lengths`, of which the tokens are learned that `learned` says. `version` 3: pairs.
inline void write_document_shard(const std::string& path, const std::vector<std::uint16_t>& tokens,
                                 const std::vector<std::size_t>& lengths,
                                 const std::function<bool(std::size_t token)>& learned, std::uint64_t vocab = 32,
                                 std::uint32_t version = 2) {
  std::string data;
  for (const std::uint16_t token : tokens) append(data, token);
  std::uint64_t begin = 0;
  for (const std::size_t length : lengths) {
    append(data, begin);
    begin += length;
  }
  std::string bits((tokens.size() + 7) / 8, '\0');
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    if (learned(t)) bits[t / 8] = static_cast<char>(bits[t / 8] | 1 << t % 8);
  }
  data += bits;
  std::string bytes("\x89WTOK\r\n\x1a", 8);
  append<std::uint32_t>(bytes, version);
  append<std::uint32_t>(bytes, static_cast<std::uint32_t>(DType::u16));
  append<std::uint64_t>(bytes, tokens.size());
  append<std::uint64_t>(bytes, vocab);
  append<std::uint64_t>(bytes, 7);
  append<std::uint64_t>(bytes, lengths.size());
  append<std::uint64_t>(bytes, xxh3_64(data));
  append<std::uint64_t>(bytes, xxh3_64(bytes));
  bytes.resize(256);
  write_bytes(path, bytes + data);
}

// `count` tokens that follow a rule a model can learn, beginning at `begin` of an endless text.
inline std::vector<std::uint16_t> patterned_tokens(std::size_t count, std::size_t begin = 0) {
  std::vector<std::uint16_t> tokens(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t n = begin + i;
    tokens[i] = static_cast<std::uint16_t>((n * n / 3 + n) % 31);
  }
  return tokens;
}

inline ModelConfig micro_config() {
  ModelConfig config = preset_config("tiny");
  config.vocab_size = config.tokenizer_vocab = 32;
  config.num_layers = 1;
  config.hidden_size = 16;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.head_dim = config.rope.rotary_dim = 8;
  config.ffn_size = 24;
  config.max_positions = 32;
  return config;
}

// A GPT-NeoX of the same size, with the parallel residual.
inline ModelConfig micro_neox() {
  ModelConfig config = micro_config();
  set_family(config, "gpt_neox");
  config.norm = NormKind::layernorm;
  config.parallel_residual = true;
  config.qkv_bias = config.output_bias = true;
  config.tied_embeddings = false;
  config.num_kv_heads = config.num_heads;
  config.rope.rotary_dim = 4;
  return config;
}

// A Gemma 3 of the same size, with a window.
inline ModelConfig micro_gemma() {
  ModelConfig config = micro_config();
  set_family(config, "gemma3_text");
  config.num_layers = 2;
  config.windows = {3, 0};
  config.local_rope_theta = 50;
  config.attention_scale = 0.25;
  return config;
}

// Settings for micro_config(): 8 tokens a sequence, constant learning rate, no validation, saves only at the
// end.
inline TrainSettings micro_settings() {
  TrainSettings settings;
  settings.steps = 10;
  settings.micro_batch = 2;
  settings.seq_len = 8;
  settings.batch_tokens = 16;
  settings.warmup_steps = 2;
  settings.schedule = "constant";
  settings.lr = 1e-2;
  settings.save_every = settings.val_every = settings.sample_every = 0;
  settings.precision = "fp32";
  settings.device = "cpu";
  return settings;
}

inline std::unique_ptr<TrainModel> micro_model(const TrainSettings& settings) {
  std::unique_ptr<TrainModel> model = cpu::make_training_model(micro_config(), settings.model_options());
  initialize_parameters(*model, static_cast<std::uint64_t>(settings.seed));
  return model;
}

inline std::vector<float> tensors(TrainModel& model, TensorRole role) {
  std::vector<float> all;
  for (const TensorSpec& spec : model.table().specs()) {
    if (!has_tensor(model.optimizer(), role, spec)) continue;
    const std::size_t begin = all.size();
    all.resize(begin + static_cast<std::size_t>(spec.elements));
    model.read_tensor(role, spec, all.data() + begin);
  }
  return all;
}

inline double norm_of(const std::vector<float>& values) {
  double squares = 0;
  for (const float value : values) squares += static_cast<double>(value) * value;
  return std::sqrt(squares);
}

// Whether `gradient`, of all parameters of `model`, is the derivative of loss(), which `model` computes: by central differences
// along the gradient itself, and then along noise with the gradient in it, so that the derivative is no zero.
inline void expect_derivative(TrainModel& model, const std::vector<float>& gradient,
                              const std::function<double()>& loss, int directions, double tolerance) {
  const std::vector<float> start = tensors(model, TensorRole::parameter);
  const auto loss_at = [&](const std::vector<float>& direction, float distance) {
    std::size_t at = 0;
    for (const TensorSpec& spec : model.table().specs()) {
      std::vector<float> values(static_cast<std::size_t>(spec.elements));
      for (float& value : values) {
        value = start[at] + distance * direction[at];
        ++at;
      }
      model.write_tensor(TensorRole::parameter, spec, values.data());
    }
    return loss();
  };
  const auto norm = static_cast<float>(norm_of(gradient));
  std::mt19937 generator(5);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < directions; ++trial) {
    std::vector<float> direction = gradient;
    const float noise = trial == 0 ? 0.0f : 0.05f;
    for (float& value : direction) value = value / norm + noise * normal(generator);
    double expected = 0;
    for (std::size_t i = 0; i < gradient.size(); ++i) expected += static_cast<double>(gradient[i]) * direction[i];
    const float distance = 1e-3f;
    const double got = (loss_at(direction, distance) - loss_at(direction, -distance)) / (2 * distance);
    EXPECT_NEAR(got, expected, tolerance * std::abs(expected) + 1e-4) << trial;
  }
}

// Parameters and state tensors: what must agree bit for bit.
inline std::vector<float> whole_state(TrainModel& model) {
  std::vector<float> all = tensors(model, TensorRole::parameter);
  for (const TensorRole role : {TensorRole::state1, TensorRole::state2}) {
    const std::vector<float> more = tensors(model, role);
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

inline RunIdentity micro_identity(const TrainSettings& settings, const TokenDataset& data) {
  return {micro_config(),
          settings.numeric_settings(),
          settings.steps,
          data.fingerprint(),
          "cpu",
          "test",
          "{\"tokenizer\":1}",
          ""};
}

// A state no member of which has its default: one that is not saved or not read back is missed.
inline TrainState some_state(std::int64_t step = 90) {
  TrainState state;
  state.step = step;
  state.updates = step - 10;
  state.windows = 70;
  state.micro_steps = 60;
  state.skipped = 10;
  state.transient = 5;
  state.loss = 1.0 / 3;
  state.val_loss = 2.0 / 3;
  for (int i = 0; i < 40; ++i)
    state.spikes.observe(std::sqrt(i + 2.0), i == 37 ? 1e6 : 1.0);  // quiet for 14 more steps
  state.best = TrainState::Best{step - 50, 0.7};
  state.best_on = "a";
  return state;
}

// A copy of which each read waits for `before_read`.
class HookedCopy final : public StateCopy {
 public:
  HookedCopy(std::unique_ptr<StateCopy> inner, std::function<void()> before_read)
      : inner_(std::move(inner)), before_read_(std::move(before_read)) {}
  void take() override { inner_->take(); }
  const float* read(TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t count,
                    float* buffer) const override {
    if (before_read_) before_read_();
    return inner_->read(role, spec, first, count, buffer);
  }

 private:
  const std::unique_ptr<StateCopy> inner_;
  const std::function<void()> before_read_;
};

// Forwards everything to another model; a test may look at or change what passes.
class HookedModel : public TrainModel {
 public:
  explicit HookedModel(TrainModel& inner) : inner_(inner) {}
  std::function<void()> before_call;  // of each function, on the thread that calls it
  std::function<void(std::uint64_t micro_step)> before_forward;
  std::function<void()> before_backward;
  std::function<void(StepStatistics&)> after_statistics;
  std::function<void(const AdamWStep&)> before_update;
  std::function<void(const Batch&)> before_evaluate;
  std::function<void(double& loss_sum, std::int64_t label_count)> after_evaluate;
  std::function<void()>
      before_copy_read;  // of a copy that make_own_copy() makes from then on; by the thread that saves

  const ModelConfig& config() const override { return inner().config(); }
  const TensorTable& table() const override { return inner().table(); }
  const Optimizer& optimizer() const override { return inner().optimizer(); }
  std::vector<MemoryLine> memory() const override { return inner().memory(); }
  void forward(const Batch& batch, std::uint64_t micro_step, float loss_scale) override {
    if (before_forward) before_forward(micro_step);
    inner().forward(batch, micro_step, loss_scale);
  }
  void backward() override {
    if (before_backward) before_backward();
    inner().backward();
  }
  void zero_gradients() override { inner().zero_gradients(); }
  StepStatistics statistics() override {
    StepStatistics statistics = inner().statistics();
    if (after_statistics) after_statistics(statistics);
    return statistics;
  }
  void update(const OptimizerStep& step) override {
    if (before_update) before_update(step.adamw);
    inner().update(step);
  }
  double evaluate(const Batch& batch, std::int64_t* label_count) override {
    if (before_evaluate) before_evaluate(batch);
    double loss_sum = inner().evaluate(batch, label_count);
    if (after_evaluate) after_evaluate(loss_sum, *label_count);
    return loss_sum;
  }
  void label_losses(const Batch& batch, std::span<float> losses) override { inner().label_losses(batch, losses); }
  bool evaluates_together() const override { return inner().evaluates_together(); }
  void read_tensor(TensorRole role, const TensorSpec& spec, float* values) override {
    inner().read_tensor(role, spec, values);
  }
  void write_tensor(TensorRole role, const TensorSpec& spec, const float* values) override {
    inner().write_tensor(role, spec, values);
  }
  std::vector<float> activation(const std::string& name) override { return inner().activation(name); }
  std::vector<float> fp8_state() const override { return inner().fp8_state(); }
  void set_fp8_state(std::span<const float> state) override { inner().set_fp8_state(state); }
  std::vector<Range> own_elements() const override { return inner().own_elements(); }
  std::unique_ptr<StateCopy> make_own_copy() override {
    return std::make_unique<HookedCopy>(inner().make_own_copy(), before_copy_read);
  }
  std::unique_ptr<DecodeModel> decoder(std::int64_t capacity) override { return inner().decoder(capacity); }

 protected:
  TrainModel& inner() const {
    if (before_call) before_call();
    return inner_;
  }

 private:
  TrainModel& inner_;
};

}  // namespace weft
