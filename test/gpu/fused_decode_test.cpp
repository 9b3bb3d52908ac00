// The fused decode kernel against the CPU reference, against the host's sampler, and against itself: the parallel residual.
// fused_tools.h derives the tolerance.
#include "llmc/cuda/fused/decode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <set>

#include "llmc/base/error.h"
#include "llmc/base/sampler.h"
#include "test/gpu/fused_tools.h"
#include "test/gpu/sequences.h"

namespace weft {
namespace {

using test::bf16;
using test::check_steps;
using test::DeviceBuffer;
using test::expect_logits;
using test::Floats;
using test::fp16;
using test::id_at;
using test::logits_of;
using test::Model;
using test::step;

ModelConfig neox_config(std::int64_t heads, std::int64_t head_dim, std::int64_t layers, std::int64_t vocab) {
  ModelConfig config;
  set_family(config, "gpt_neox");
  config.vocab_size = config.tokenizer_vocab = vocab;
  config.num_heads = config.num_kv_heads = heads;
  config.head_dim = head_dim;
  config.hidden_size = heads * head_dim;
  config.ffn_size = 4 * config.hidden_size;
  config.num_layers = layers;
  config.max_positions = 2048;
  config.norm_eps = 1e-5;
  config.norm = NormKind::layernorm;
  config.rope.theta = 10000;
  config.rope.rotary_dim = head_dim / 4 / 2 * 2;
  config.parallel_residual = true;
  config.qkv_bias = config.output_bias = true;
  return config;
}

// Every head_dim of Pythia, and every width: the ways in which warps share a row differ.
TEST(FusedDecode, MatchesTheCpuAtEveryShape) {
  const std::pair<int, int> shapes[] = {{4, 32},  {4, 64},  {4, 80},  {2, 128},  {2, 256}, {8, 32},  {8, 64},
                                        {12, 64}, {16, 64}, {8, 256}, {16, 128}, {3, 16},  {11, 64}, {2, 8}};
  for (const auto& [heads, head_dim] : shapes) {
    const int layers = heads * head_dim > 700 ? 1 : 3;
    check_steps<fp16>(neox_config(heads, head_dim, layers, 1003), 6);
    check_steps<bf16>(neox_config(heads, head_dim, layers, 1003), 4);
  }
}

TEST(FusedDecode, MatchesTheCpuAtTheLayersOf2_8B) {
  check_steps<fp16>(neox_config(32, 80, 2, 1003), 5);
  check_steps<bf16>(neox_config(32, 80, 2, 1003), 3);
}

TEST(FusedDecode, MatchesTheCpuAtTheLayersOf6_9BAnd12B) {
  check_steps<fp16>(neox_config(32, 128, 1, 301), 4);
  check_steps<fp16>(neox_config(40, 128, 1, 301), 4);
  check_steps<bf16>(neox_config(32, 128, 1, 301), 2);
}

TEST(FusedDecode, MatchesTheCpuWithoutAttentionBiasAndWithFewBlocks) {
  ModelConfig config = neox_config(4, 64, 2, 507);
  config.qkv_bias = config.output_bias = false;
  config.rope.rotary_dim = 64;
  check_steps<fp16>(config, 5);
  cuda::FusedTuning tuning;
  tuning.blocks = 24;
  check_steps<fp16>(config, 5, tuning);
  tuning.blocks = 3;      // fewer than heads
  tuning.ring_bytes = 1;  // the smallest ring
  tuning.window_bytes = 1;
  check_steps<fp16>(neox_config(4, 32, 2, 507), 5, tuning);
}

template <typename S>
void check_contexts(const ModelConfig& config, std::int64_t page_size = 0) {
  constexpr std::int64_t kCapacity = 2048;
  SCOPED_TRACE(test::type_name<S>() + ", head_dim " + std::to_string(config.head_dim) + ", pages of " +
               std::to_string(page_size));
  Model<S> model(config, kCapacity, 1, page_size);
  const auto cpu = model.on_cpu();
  const auto fused = model.fused();
  std::int64_t fed = 0;
  // From 128 and 192 positions on there are two and three splits, the shortest ones: a key lost at the edge of a split weighs
  // most there.
  for (const std::int64_t context : {0, 1, 31, 32, 33, 127, 128, 129, 130, 191, 192, 193, 256, 1000, 2047}) {
    std::vector<std::int32_t> ids;
    for (std::int64_t i = fed; i <= context; ++i) ids.push_back(id_at(i, config));
    for (; fed < context; ++fed) step(*fused, id_at(fed, config), fed);
    step(*fused, id_at(fed, config), fed);
    ++fed;
    expect_logits<S>(logits_of(*fused, config), cpu->prefill(ids), "context " + std::to_string(context));
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_NE(error_of(Exit::internal, [&] { step(*fused, 0, kCapacity); }), "");
}

TEST(FusedDecode, EveryContextUpToTheLimit) {
  for (const int head_dim : {32, 64, 80, 128, 256}) check_contexts<fp16>(neox_config(2, head_dim, 2, 307));
  for (const int head_dim : {64, 80}) check_contexts<fp16>(neox_config(2, head_dim, 2, 307), cuda::kFusedPageSize);
  check_contexts<bf16>(neox_config(4, 64, 2, 307));
  check_contexts<fp16>(neox_config(32, 80, 1, 307));
}

// Many tokens in one launch: the same ids and the same bits as one launch a token.
TEST(FusedDecode, ManyTokensInOneLaunch) {
  for (const auto& [heads, head_dim] : {std::pair{4, 32}, {16, 64}, {32, 80}}) {
    const ModelConfig config = neox_config(heads, head_dim, 2, 1003);
    constexpr int kTokens = 90;
    Model<fp16> model(config, kTokens);
    std::vector<std::int32_t> singly = {5};
    std::uint64_t hash = 0;
    {
      const auto fused = model.fused();
      for (int i = 0; i < kTokens; ++i) singly.push_back(step(*fused, singly.back(), i));
      hash = fused->logits_hash();
    }
    const auto fused = model.fused();
    cuda::FusedRequest request;
    request.first_id = 5;
    request.count = kTokens;
    fused->launch(request);
    std::vector<std::int32_t> together = {5};
    for (int i = 0; i < kTokens; ++i) together.push_back(fused->wait(i).value_or(-1));
    EXPECT_FALSE(fused->wait(kTokens).has_value());
    EXPECT_EQ(fused->finish().tokens, kTokens);
    EXPECT_EQ(singly, together);
    EXPECT_EQ(fused->logits_hash(), hash);
    EXPECT_GT(std::set<std::int32_t>(singly.begin(), singly.end()).size(), 3u) << "the test says nothing";
  }
}

TEST(FusedDecode, SameBitsEveryRun) {
  Model<fp16> model(neox_config(32, 80, 2, 1003), 64);
  test::expect_same_bits_every_run(model, 24, 100);
}

// The choice is the host sampler's, bit for bit, for the same logits and the position in the sequence.
TEST(FusedDecode, SamplesWhatTheHostWouldSample) {
  const ModelConfig config = neox_config(4, 64, 2, 5003);
  Model<fp16> model(config, 64);
  const auto fused = model.fused();
  SamplerOptions choices[5];
  choices[0].temperature = 1;
  choices[1].temperature = 0.7, choices[1].top_k = 40;
  choices[2].temperature = 1.3, choices[2].top_p = 0.9;
  choices[3].temperature = 2, choices[3].min_p = 0.05;
  choices[4].temperature = 0.9, choices[4].top_k = 100, choices[4].top_p = 0.8, choices[4].min_p = 0.01;
  std::int64_t position = 0;
  std::set<std::int32_t> seen;
  for (SamplerOptions& options : choices) {
    options.seed = 99;
    options.vocab_limit = 4900;
    std::int32_t id = 3;
    for (int i = 0; i < 10; ++i, ++position) {
      id = step(*fused, id, position, options);
      const Floats logits = logits_of(*fused, config);
      EXPECT_EQ(id, Sampler(options).sample(logits, position + 1)) << "position " << position;
      seen.insert(id);
    }
  }
  EXPECT_GT(seen.size(), 20u);
}

TEST(FusedDecode, NeverSamplesPaddedIds) {
  const ModelConfig config = neox_config(4, 32, 1, 1003);
  Model<fp16> model(config, 32);
  float* head = model.parameter("embed_out.weight");
  for (std::int64_t i = 900 * config.hidden_size; i < 1003 * config.hidden_size; ++i) head[i] *= 50;
  model.upload();
  const auto fused = model.fused();
  SamplerOptions options;
  bool padded_would_win = false;
  for (const double temperature : {0.0, 1.0}) {
    options.temperature = temperature;
    for (int i = 0; i < 8; ++i) {
      options.vocab_limit = 900;
      EXPECT_LT(step(*fused, i, i, options), 900);
      options.vocab_limit = 0;
      padded_would_win = padded_would_win || step(*fused, i, i, options) >= 900;
    }
  }
  EXPECT_TRUE(padded_would_win) << "the test says nothing";
}

TEST(FusedDecode, EqualLogitsGoToTheLowestId) {
  const ModelConfig config = neox_config(4, 32, 1, 1003);
  Model<fp16> model(config, 8);
  float* head = model.parameter("embed_out.weight");
  std::fill_n(head, config.vocab_size * config.hidden_size, 0.0f);
  model.upload();
  const auto fused = model.fused();
  EXPECT_EQ(step(*fused, 3, 0), 0);
}

TEST(FusedDecode, StopsAtAStopId) {
  const ModelConfig config = neox_config(16, 64, 2, 1003);
  Model<fp16> model(config, 128);
  const auto fused = model.fused();
  cuda::FusedRequest request;
  request.first_id = 11;
  request.count = 100;
  fused->launch(request);
  std::vector<std::int32_t> ids;
  for (int i = 0; i < 100; ++i) ids.push_back(fused->wait(i).value_or(-1));
  EXPECT_EQ(fused->finish().end, cuda::FusedEnd::length);
  const std::size_t at = static_cast<std::size_t>(std::find(ids.begin(), ids.end(), ids[20]) - ids.begin());
  // As many stop ids as the GPU compares, the one that is sampled last among them; one more is refused.
  request.stop_ids.assign(cuda::kMaxStopIds, 2000000);
  request.stop_ids.push_back(ids[20]);
  EXPECT_NE(error_of(Exit::internal, [&] { fused->launch(request); }).find("65 stop ids"), std::string::npos);
  request.stop_ids.erase(request.stop_ids.begin());
  fused->launch(request);
  for (std::size_t i = 0; i <= at; ++i) EXPECT_EQ(fused->wait(static_cast<std::int64_t>(i)).value_or(-1), ids[i]);
  EXPECT_FALSE(fused->wait(static_cast<std::int64_t>(at) + 1).has_value());
  const auto result = fused->finish();
  EXPECT_EQ(result.end, cuda::FusedEnd::stop_id);
  EXPECT_EQ(result.tokens, static_cast<std::int64_t>(at) + 1);
}

TEST(FusedDecode, GivenIdsAreFed) {
  for (const int heads : {4, 32}) {
    Model<fp16> model(neox_config(heads, 64, 3, 1003), 40);
    test::expect_given_ids_are_fed(model);
  }
}

TEST(FusedDecode, CancelEndsTheLaunch) {
  Model<fp16> model(neox_config(16, 64, 4, 1003), 4096);
  test::expect_cancel_ends_the_launch(model);
}

TEST(FusedDecode, DamagedLogitsAreAnError) {
  const ModelConfig config = neox_config(4, 32, 1, 1003);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Model<fp16> model(config, 8);
    model.parameter("embed_out.weight")[501 * config.hidden_size + 3] = bad;
    model.parameter("embed_out.weight")[502 * config.hidden_size + 3] = -bad;  // one of them gives +infinity
    model.upload();
    const auto fused = model.fused();
    EXPECT_NE(error_of(Exit::numeric, [&] { step(*fused, 3, 0); }), "");
    SamplerOptions options;
    options.vocab_limit = 500;
    EXPECT_GE(step(*fused, 3, 0, options), 0);
  }
}

TEST(FusedDecode, TheWatchdogEndsAHang) {
  Model<fp16> model(neox_config(4, 32, 2, 1003), 64);
  test::expect_the_watchdog_ends_a_hang(model);
}

// More ids than a launch has: the same ids however the text is divided into launches.
TEST(FusedDecode, TextLongerThanALaunch) {
  constexpr std::int64_t kLength = cuda::kFusedTokens + 200;
  const auto model = test::random_sequence(neox_config(4, 32, 6, 1003), 1, test::Way::fused, DType::f16, kLength + 8);
  SamplerOptions sampler;
  sampler.temperature = 1;
  std::vector<std::int32_t> ids = {5};
  const auto generate = [&](std::int64_t count) {
    const std::int32_t last = ids.back();
    model->generate_ids({&last, 1}, {sampling_plan(sampler), {}, count}, [&](std::int32_t id) {
      ids.push_back(id);
      return true;
    });
  };
  generate(kLength);
  EXPECT_EQ(model->length(), kLength);
  const std::vector<std::int32_t> at_once = std::move(ids);
  EXPECT_EQ(at_once.size(), static_cast<std::size_t>(kLength) + 1);
  model->reset();
  ids = {5};
  generate(300);
  generate(kLength - 300);
  EXPECT_EQ(ids, at_once);
}

// Ids of several launches go through one mailbox, in whose ring they overwrite each other: none is lost or read twice.
TEST(FusedDecode, LaunchesShareTheMailbox) {
  const ModelConfig config = neox_config(4, 32, 1, 1003);
  Model<fp16> model(config, cuda::kFusedTokens);
  const auto first = model.fused(), second = model.fused();  // of the same memory and mailbox
  cuda::FusedRequest request;
  request.first_id = 5;
  request.count = 3000;
  std::vector<std::int32_t> ids[3];
  for (std::vector<std::int32_t>& got : ids) {
    cuda::FusedDecode<fp16>& fused = &got == &ids[1] ? *second : *first;
    fused.launch(request);
    fused.finish();  // all ids are in the mailbox before the first is read
    for (std::int64_t i = 0; i < request.count; ++i) got.push_back(fused.wait(i).value_or(-1));
  }
  EXPECT_EQ(ids[0], ids[1]);
  EXPECT_EQ(ids[0], ids[2]);
  EXPECT_EQ(std::count(ids[0].begin(), ids[0].end(), -1), 0);
}

// The instrumented kernel computes the same bits, and every block stamps every phase that it has a part in, in order.
TEST(FusedDecode, TimelineHasEveryPhase) {
  for (const int heads : {4, 32}) {
    const ModelConfig config = neox_config(heads, 64, 3, 1003);
    Model<fp16> model(config, 64);
    const auto fused = model.fused();
    cuda::FusedRequest request;
    request.first_id = 7;
    request.count = 4;
    fused->launch(request);
    fused->finish();
    const std::uint64_t hash = fused->logits_hash();
    EXPECT_TRUE(fused->timeline().times.empty());
    EXPECT_EQ(cuda::timeline_text(fused->timeline()), "");

    fused->record_timeline(true);
    fused->launch(request);
    fused->finish();
    EXPECT_EQ(fused->logits_hash(), hash);
    const cuda::FusedTimeline timeline = fused->timeline();
    ASSERT_EQ(timeline.layers, 3);
    ASSERT_EQ(timeline.blocks, fused->blocks());
    const auto time = [&](std::int64_t layer, cuda::FusedPhase phase, int block) {
      return timeline.times.at(
          static_cast<std::size_t>((layer * cuda::kFusedPhases + static_cast<int>(phase)) * timeline.blocks + block));
    };
    for (int block = 0; block < timeline.blocks; ++block) {
      std::uint64_t before = 1;                // 0: not stamped
      for (std::int64_t l = 0; l <= 3; ++l) {  // 3: the head
        for (const auto phase : {cuda::FusedPhase::x_here, cuda::FusedPhase::norms_done, cuda::FusedPhase::qkv_done,
                                 cuda::FusedPhase::up_done}) {
          EXPECT_GE(time(l, phase, block), before) << "layer " << l << " block " << block;
          before = time(l, phase, block);
        }
        if (l == 3) break;
        EXPECT_GE(time(l, cuda::FusedPhase::attention_done, block), before);
        before = time(l, cuda::FusedPhase::attention_done, block);
      }
    }
    const std::string text = cuda::timeline_text(timeline);
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1 + 10) << text;  // phases of the parallel residual

    fused->record_timeline(false);
    fused->launch(request);
    fused->finish();
    EXPECT_EQ(fused->logits_hash(), hash);
    EXPECT_TRUE(fused->timeline().times.empty());
  }
}

cuda::Device hopper(int multiprocessors) {
  cuda::Device device;
  device.arch = 90;
  device.multiprocessors = multiprocessors;
  device.shared_bytes = 227 << 10;
  return device;
}

TEST(FusedDecode, RefusesWhatItCannotRun) {
  cuda::Device device = hopper(132);
  ModelConfig config = neox_config(32, 80, 2, 1003);
  EXPECT_EQ(cuda::fused_decode_unsupported_reason(config, device), "");
  device.arch = 89;
  EXPECT_NE(cuda::fused_decode_unsupported_reason(config, device).find("9.0"), std::string::npos);
  device.arch = 90;
  config.ffn_size = 1000;
  EXPECT_NE(cuda::fused_decode_unsupported_reason(config, device), "");
  EXPECT_NE(cuda::fused_decode_unsupported_reason(neox_config(24, 128, 2, 1003), device), "");
}

// A GPU, or a slice of one, that is too small is refused before anything is allocated: --decode auto asks.
TEST(FusedDecode, RefusesDevicesThatAreTooSmall) {
  const struct {
    int heads, head_dim, least;  // multiprocessors
  } cases[] = {{16, 64, 16}, {8, 256, 32}, {16, 128, 32}, {32, 80, 32}, {32, 128, 64}, {40, 128, 64}};
  for (const auto& [heads, head_dim, least] : cases) {
    const ModelConfig config = neox_config(heads, head_dim, 32, 50304);
    const auto reason = [&](int multiprocessors) {
      return cuda::fused_decode_unsupported_reason(config, hopper(multiprocessors));
    };
    EXPECT_EQ(reason(least), "") << config.hidden_size;
    EXPECT_NE(reason(least / 2).find("multiprocessors are too few"), std::string::npos) << config.hidden_size;
    EXPECT_NE(reason(0), "");
  }
  cuda::Device device = hopper(132);
  device.shared_bytes = 64 << 10;
  EXPECT_NE(cuda::fused_decode_unsupported_reason(neox_config(32, 80, 32, 50304), device).find("shared memory"),
            std::string::npos);
  device.shared_bytes = 99 << 10;
  EXPECT_EQ(cuda::fused_decode_unsupported_reason(neox_config(16, 64, 24, 50304), device), "");
  // And the GPU at hand says the same as its constructor.
  const ModelConfig config = neox_config(32, 128, 1, 301);
  Model<fp16> model(config, 8);
  cuda::FusedTuning tuning;
  tuning.blocks = 32;
  EXPECT_NE(error_of(Exit::environment, [&] { model.fused(tuning); }).find("multiprocessors are too few"),
            std::string::npos);
}

}  // namespace
}  // namespace weft
