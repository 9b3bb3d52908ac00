// Models for tests of the fused decode kernel, on the CPU and on the GPU, and steps of both.
//
// Tolerance. Kernel and reference start from the same values, weights that the storage type holds exactly. The kernel
// computes in fp32 and rounds keys and values to the storage type on their way into the cache, which the reference keeps in
// fp32: an error of at most the unit roundoff u of each of them. Scores err by u relative to their size, outputs by u
// relative to the values, at every layer; so the logits are held to 2 u of the largest logit (fp16 1e-3, bf16 8e-3).
//
// With keys and values in fp8 the reference rounds them as the kernel does, through the storage type. Where fp32 sums differ in
// the last bit, a few of 10^5 numbers get another code, which is up to 2^-4 of them away: held to bf16's tolerance.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/sampler.h"
#include "llmc/cpu/inference.h"
#include "llmc/cuda/fused/decode.h"
#include "llmc/cuda/fused/step.h"
#include "llmc/cuda/inference/parameters.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/file/tensor_file.h"
#include "llmc/model/model_file.h"
#include "llmc/model/single_sequence.h"
#include "test/cpp/test_files.h"
#include "test/gpu/operator_tools.h"

namespace weft::test {

// A model with random parameters, on the CPU and on the GPU. Matrices are scaled so that activations and attention scores
// are of order one at every width.
template <typename S>
class Model {
 public:
  // page_size: of the cache; 0: the whole cache is one page. kv_fp8: it holds codes.
  Model(const ModelConfig& config, std::int64_t capacity, unsigned seed = 1, std::int64_t page_size = 0,
        bool kv_fp8 = false)
      : config_(config),
        capacity_(page_size == 0 ? capacity : (capacity + page_size - 1) / page_size * page_size),
        page_size_(page_size == 0 ? capacity : page_size),
        kv_fp8_(kv_fp8),
        arena_(static_cast<std::size_t>(TensorTable(config).arena_elements())),
        keys_(kv_fp8 ? 0 : cache_elements()),
        values_(kv_fp8 ? 0 : cache_elements()),
        codes_(kv_fp8 ? kv_bytes(config, capacity_, 0, true) : 0) {
    const TensorTable table(config);
    parameters_.resize(arena_.size());
    std::vector<S> narrow(arena_.size());
    for (const TensorSpec& spec : table.specs()) {
      const bool matrix = spec.shape.size() == 2;
      const float scale = matrix ? std::sqrt(1.0f / static_cast<float>(spec.shape[1])) : 0.1f;
      // A prime number of values, over and over: rows differ, and large models are made fast.
      const std::int64_t period = std::min<std::int64_t>(spec.elements, 200003);
      const std::vector<S> rounded =
          stored<S>(random_floats(period, seed++, scale, spec.init == Init::ones ? 1.0f : 0.0f));
      const Floats values = widened(rounded);
      for (std::int64_t done = 0; done < spec.elements; done += period) {
        const std::int64_t count = std::min(period, spec.elements - done);
        std::copy_n(values.begin(), count, parameters_.begin() + spec.offset + done);
        std::copy_n(rounded.begin(), count, narrow.begin() + spec.offset + done);
      }
    }
    arena_.upload(narrow);
    const RopeTable rope = rope_table(config.rope, capacity_);
    cos_ = std::make_unique<DeviceBuffer<float>>(rope.cos);
    sin_ = std::make_unique<DeviceBuffer<float>>(rope.sin);
    rope_ = {cos_->data(), sin_->data(), rope.positions, rope.half};
  }

  const ModelConfig& config() const { return config_; }
  Floats& parameters() { return parameters_; }
  float* parameter(const std::string& name) { return parameters_.data() + TensorTable(config_).at(name).offset; }
  void upload() { arena_.upload(stored<S>(parameters_)); }

  std::unique_ptr<DecodeModel> on_cpu() {
    const TensorTable table(config_);
    const std::string path = directory_.file("model.bin");
    Json model_config = Json::object();
    model_config["model"] = config_to_json(config_);
    TensorFileWriter writer(path, FileKind::model, model_config);
    for (const TensorSpec& spec : table.specs()) writer.declare(spec.name, DType::f32, spec.shape);
    for (const TensorSpec& spec : table.specs()) {
      writer.write_f32(parameters_.data() + spec.offset, static_cast<std::size_t>(spec.elements));
    }
    writer.publish();
    if (!kv_fp8_) return cpu::load_decoder(ModelFile::open(path), capacity_);
    InferenceOptions options = one_sequence(capacity_);
    options.kv_fp8 = true;
    const DType type = std::is_same_v<S, fp16> ? DType::f16 : DType::bf16;
    return single_sequence(cpu::load_inference(ModelFile::open(path), options, type), capacity_);
  }

  std::unique_ptr<cuda::FusedDecode<S>> fused(const cuda::FusedTuning& tuning = {}) {
    keys_.fill_bytes(0xff);  // NaN: what the kernel must not read shows
    values_.fill_bytes(0xff);
    codes_.fill_bytes(0xff);
    return std::make_unique<cuda::FusedDecode<S>>(config_, weights(), cache(), rope_, mailbox_, stream_, tuning);
  }

  // Needs pages.
  std::unique_ptr<cuda::FusedStep<S>> fused_step(const cuda::FusedTuning& tuning = {}) {
    return std::make_unique<cuda::FusedStep<S>>(config_, weights(), cache(), rope_, stream_, tuning);
  }

  cuda::KvCache<S> cache() const {
    cuda::KvCache<S> cache = {keys_.data(), values_.data(), capacity_, page_size_};
    if (kv_fp8_) cache.codes = kv_codes(config_, pages(), codes_.data(), 0);
    return cache;
  }
  // What the cache has of the first layer: with codes the bytes of keys, values and the scales of both, else keys and values as
  // codes of each row would be.
  std::vector<std::vector<std::uint8_t>> first_layer() const;

 private:
  InferenceOptions pages() const {
    InferenceOptions options;
    options.page_size = page_size_;
    options.num_pages = capacity_ / page_size_;
    return options;
  }
  std::size_t cache_elements() const {
    return static_cast<std::size_t>(config_.num_layers * config_.kv_size() * capacity_);
  }
  cuda::DeviceWeights<S> weights() { return cuda::bind_plain<S>(config_, TensorTable(config_), arena_.data()); }

  ModelConfig config_;
  std::int64_t capacity_, page_size_;
  bool kv_fp8_;
  TemporaryDirectory directory_;
  Floats parameters_;
  cuda::Stream stream_;
  cuda::Mailbox mailbox_;
  DeviceBuffer<S> arena_, keys_, values_;
  DeviceBuffer<std::uint8_t> codes_;
  std::unique_ptr<DeviceBuffer<float>> cos_, sin_;
  cuda::DeviceRopeTable rope_;
};

template <typename S>
std::vector<std::vector<std::uint8_t>> Model<S>::first_layer() const {
  const std::int64_t HS = config_.head_dim, rows = capacity_ * config_.num_kv_heads;
  std::vector<std::vector<std::uint8_t>> parts;
  for (const std::int64_t size : {rows * HS, rows * HS, rows, rows}) {
    parts.emplace_back(static_cast<std::size_t>(size), std::uint8_t{0xff});
  }
  if (kv_fp8_) {
    const KvCodes codes = cache().codes;
    const std::uint8_t* const from[] = {codes.keys, codes.values, codes.key_scales, codes.value_scales};
    for (std::size_t i = 0; i < parts.size(); ++i) {
      cuda::check(cudaMemcpy(parts[i].data(), from[i], parts[i].size(), cudaMemcpyDeviceToHost), "codes");
    }
    return parts;
  }
  for (const KvKind kind : {KvKind::key, KvKind::value}) {
    const bool key = kind == KvKind::key;
    const Floats numbers = widened((key ? keys_ : values_).download());
    for (std::int64_t row = 0; row < rows; ++row) {
      const float* const values = numbers.data() + row * HS;
      if (std::isnan(*values)) continue;  // nothing was appended here
      kv_store(kind, values, HS, row, parts[key ? 0 : 1].data(), parts[key ? 2 : 3].data());
    }
  }
  return parts;
}

template <typename S>
Floats logits_of(const cuda::FusedDecode<S>& fused, const ModelConfig& config) {
  Floats logits(static_cast<std::size_t>(config.vocab_size));
  cuda::check(cudaMemcpy(logits.data(), fused.logits(), logits.size() * sizeof(float), cudaMemcpyDeviceToHost),
              "logits");
  return logits;
}

// Feeds one id and returns the one that is sampled.
template <typename S>
std::int32_t step(cuda::FusedDecode<S>& fused, std::int32_t id, std::int64_t position,
                  const SamplerOptions& options = {}) {
  cuda::FusedRequest request;
  request.first_id = id;
  request.position = position;
  request.count = 1;
  request.sampling = sampling_plan(options);
  fused.launch(request);
  const std::optional<std::int32_t> next = fused.wait(0);
  const auto result = fused.finish();
  EXPECT_EQ(result.end, cuda::FusedEnd::length);
  EXPECT_EQ(result.tokens, 1);
  return next.value_or(-1);
}

inline std::int32_t id_at(std::int64_t i, const ModelConfig& config) {
  return static_cast<std::int32_t>((i * 7919 + 13) % config.vocab_size);
}

template <typename S>
void expect_logits(const Floats& got, std::span<const float> want, const std::string& what,
                   double roundoff = unit_roundoff<S>()) {
  double largest = 0, worst = 0;
  for (const float value : want) largest = std::max(largest, std::abs(static_cast<double>(value)));
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double error = std::abs(static_cast<double>(got[i]) - want[i]);
    if (!(error <= worst)) worst = error;  // a NaN is the worst
    if (std::isnan(error)) break;
  }
  const double share = worst / (2 * roundoff * largest);
  record_worst("logits_" + type_name<S>() + (roundoff != unit_roundoff<S>() ? "_fp8" : ""), share);
  EXPECT_LE(share, 1.0) << what << ": error " << worst << " of largest logit " << largest;
}

template <typename S>
void check_steps(const ModelConfig& config, int steps, const cuda::FusedTuning& tuning = {}) {
  SCOPED_TRACE(type_name<S>() + ", " + std::to_string(config.num_heads) + " heads of " +
               std::to_string(config.head_dim));
  Model<S> model(config, steps);
  const auto cpu = model.on_cpu();
  const auto fused = model.fused(tuning);
  for (int i = 0; i < steps; ++i) {
    step(*fused, id_at(i, config), i);
    expect_logits<S>(logits_of(*fused, config), cpu->decode(id_at(i, config)), "step " + std::to_string(i));
    if (testing::Test::HasFailure()) return;
  }
}

// ---- what every model's kernel does ------------------------------------------------------------------------------------

// The bits of the logits of `count` tokens in one launch.
template <typename S>
std::uint64_t bits_of_launch(cuda::FusedDecode<S>& fused, std::int64_t count) {
  cuda::FusedRequest request;
  request.first_id = 7;
  request.count = count;
  fused.launch(request);
  EXPECT_EQ(fused.finish().tokens, count);
  return fused.logits_hash();
}

template <typename S>
void expect_same_bits_every_run(Model<S>& model, std::int64_t count, int runs) {
  const auto fused = model.fused();
  const std::uint64_t hash = bits_of_launch(*fused, count);
  for (int run = 1; run < runs; ++run) ASSERT_EQ(bits_of_launch(*fused, count), hash) << "run " << run;
}

// `model` has room for 4,000 ids.
template <typename S>
void expect_cancel_ends_the_launch(Model<S>& model) {
  const auto fused = model.fused();
  cuda::FusedRequest request;
  request.count = 4000;
  fused->launch(request);
  ASSERT_TRUE(fused->wait(3).has_value());
  fused->cancel();
  const auto result = fused->finish();
  EXPECT_EQ(result.end, cuda::FusedEnd::cancelled);
  EXPECT_GE(result.tokens, 4);
  EXPECT_LT(result.tokens, 4000);
  // The next launch is not affected.
  EXPECT_GE(step(*fused, 1, 0), 0);
}

// Ids that are given instead of sampled: as many as a launch takes, greedy and drawn, in the middle of a text; and what a launch
// leaves in the cache serves one that begins before its end. `model` has room for 40 ids.
template <typename S>
void expect_given_ids_are_fed(Model<S>& model) {
  constexpr std::int64_t kIds = 24;
  const auto fused = model.fused();
  const auto decode = [&](const cuda::FusedRequest& request) {
    fused->launch(request);
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < request.count; ++i) ids.push_back(fused->wait(i).value_or(-1));
    EXPECT_FALSE(fused->wait(request.count).has_value());
    const auto result = fused->finish();
    EXPECT_EQ(result.end, cuda::FusedEnd::length);
    EXPECT_EQ(result.tokens, request.count);
    return ids;
  };
  for (const double temperature : {0.0, 1.0}) {
    SamplerOptions sampler;
    sampler.temperature = temperature;
    sampler.seed = 5;
    cuda::FusedRequest request;
    request.first_id = 11;
    request.sampling = sampling_plan(sampler);
    request.count = kIds;
    std::vector<std::int32_t> text = decode(request);
    text.insert(text.begin(), request.first_id);
    for (std::size_t more = 0; more <= cuda::kFusedMoreIds; ++more) {
      SCOPED_TRACE("temperature " + std::to_string(temperature) + ", " + std::to_string(more) + " more ids");
      const std::int64_t position = static_cast<std::int64_t>(more) * 2 % 5,
                         count = 1 + static_cast<std::int64_t>(more % 3) * 3;
      const auto begin = text.begin() + position;
      request.first_id = *begin;
      request.more_ids.assign(begin + 1, begin + 1 + static_cast<std::ptrdiff_t>(more));
      request.position = position;
      request.count = count;
      DeviceBuffer<std::int32_t> device_ids(static_cast<std::size_t>(count));
      request.device_ids = device_ids.data();
      const auto sampled = begin + 1 + static_cast<std::ptrdiff_t>(more);
      const std::vector<std::int32_t> want(sampled, sampled + count);
      EXPECT_EQ(decode(request), want);
      EXPECT_EQ(device_ids.download(), want);
      // The whole text again: the cache holds what it held.
      request.device_ids = nullptr;
      request.more_ids.clear();
      request.first_id = text[static_cast<std::size_t>(position + 9)];
      request.position = position + 9;
      request.count = 5;
      EXPECT_EQ(decode(request), std::vector<std::int32_t>(begin + 10, begin + 15));
      request.first_id = text[0];
      request.position = 0;
      request.count = kIds;
      EXPECT_EQ(decode(request), std::vector<std::int32_t>(text.begin() + 1, text.end()));
    }
    request.more_ids.assign(cuda::kFusedMoreIds + 1, 1);
    EXPECT_NE(error_of(Exit::internal, [&] { fused->launch(request); }).find("8 more"), std::string::npos);
    request.more_ids = {static_cast<std::int32_t>(model.config().vocab_size)};
    EXPECT_NE(error_of(Exit::internal, [&] { fused->launch(request); }).find("out of range"), std::string::npos);
    request.more_ids = {1, 2};
    request.count = 39;
    EXPECT_NE(error_of(Exit::internal, [&] { fused->launch(request); }).find("of 40"), std::string::npos);
  }
}

// A wait that never ends is an error of the machine, in all blocks, after the time limit, and the GPU is free afterwards.
template <typename S>
void expect_the_watchdog_ends_a_hang(Model<S>& model) {
  cuda::FusedTuning tuning;
  tuning.timeout_seconds = 0.2;
  tuning.lose_an_arrival = true;
  const auto broken = model.fused(tuning);
  cuda::FusedRequest request;
  request.count = 5;
  broken->launch(request);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(broken->wait(i).has_value());
  EXPECT_NE(error_of(Exit::environment, [&] { broken->wait(4); }).find("no progress"), std::string::npos);
  // The next object, of the same memory, is not affected.
  const auto sound = model.fused();
  EXPECT_GE(step(*sound, 1, 0), 0);
}

}  // namespace weft::test
