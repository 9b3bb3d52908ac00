// The fused decode kernel of the sequential residual, Llama and GPT-NeoX, against the CPU reference and against itself.
// fused_tools.h derives the tolerance.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>

#include "llmc/model/presets.h"
#include "test/gpu/fused_tools.h"

namespace weft {
namespace {

using test::bf16;
using test::check_steps;
using test::expect_logits;
using test::fp16;
using test::id_at;
using test::logits_of;
using test::Model;
using test::step;

struct Sizes {
  std::int64_t C, heads, kv_heads, head_dim, F, layers = 2;
  bool tied = false;
};

ModelConfig llama_config(const Sizes& sizes, std::int64_t vocab = 1003) {
  ModelConfig config;
  config.vocab_size = config.tokenizer_vocab = vocab;
  config.hidden_size = sizes.C;
  config.num_heads = sizes.heads;
  config.num_kv_heads = sizes.kv_heads;
  config.head_dim = sizes.head_dim;
  config.ffn_size = sizes.F;
  config.num_layers = sizes.layers;
  config.max_positions = 2048;
  config.norm_eps = 1e-5;
  config.rope.theta = 10000;
  config.rope.rotary_dim = sizes.head_dim;
  config.tied_embeddings = sizes.tied;
  return config;
}

ModelConfig sequential_neox_config(std::int64_t heads, std::int64_t head_dim, std::int64_t layers) {
  ModelConfig config = llama_config({heads * head_dim, heads, heads, head_dim, 4 * heads * head_dim, layers});
  set_family(config, "gpt_neox");
  config.norm = NormKind::layernorm;
  config.rope.rotary_dim = head_dim / 4 / 2 * 2;
  config.qkv_bias = config.output_bias = true;
  return config;
}

// The presets' ways in which warps share a row, groups of 1 to 32 query heads, heads that are not C wide together, and sizes
// that fill no load, chunk or block.
TEST(FusedSequential, LlamaMatchesTheCpuAtEveryShape) {
  const Sizes shapes[] = {
      {256, 4, 1, 64, 688, 3, true},      // groups of 4, head size 64, tied
      {512, 4, 1, 128, 1376, 3},          // head size 128, untied
      {192, 6, 2, 32, 512, 4, true},      // tiny
      {576, 9, 3, 64, 1536, 2, true},     // smollm2-135m
      {768, 12, 4, 64, 2048, 2, true},    // d12
      {2048, 32, 4, 64, 5632, 1},         // tinyllama-1.1b: groups of 8
      {2048, 32, 8, 64, 8192, 1, true},   // llama3.2-1b
      {3072, 24, 8, 128, 8192, 1, true},  // llama3.2-3b
      {4096, 32, 8, 128, 14336, 1},       // llama3.1-8b
      {8, 1, 1, 8, 8},
      {72, 6, 2, 32, 200},
      {48, 6, 2, 8, 24},
      {208, 5, 5, 40, 328},
      {64, 32, 1, 16, 136},  // one K/V head for 32, heads wider than C
      {640, 3, 3, 256, 1000},
      {272, 6, 1, 24, 1088},
      {1504, 7, 1, 72, 4000},
  };
  for (const Sizes& sizes : shapes) {
    check_steps<fp16>(llama_config(sizes, sizes.C > 2000 ? 301 : 1003), 5);
    check_steps<bf16>(llama_config(sizes, sizes.C > 2000 ? 301 : 1003), 3);
    if (HasFailure()) return;
  }
}

// Qwen3 and SmolLM3. More heads than warps, heads of every width, layers that do not rotate, and an MLP that decides how warps
// share a row.
TEST(FusedSequential, NormsOfHeadsAndLayersWithoutRope) {
  const Sizes shapes[] = {
      {256, 4, 1, 64, 688, 3, true},
      {1024, 16, 8, 128, 3072, 1, true},  // qwen3-0.6b
      {2048, 16, 8, 128, 6144, 1, true},  // qwen3-1.7b
      {4096, 32, 8, 128, 12288, 1},       // qwen3-8b
      {64, 32, 1, 16, 136},
      {640, 3, 3, 256, 1000},
      {896, 14, 2, 64, 4864},        // qwen2.5-0.5b
      {2048, 16, 4, 128, 11008, 2},  // smollm3-3b
  };
  for (const Sizes& sizes : shapes) {
    ModelConfig qwen = llama_config(sizes, sizes.C > 2000 ? 301 : 1003), smol = qwen;
    set_family(qwen, "qwen3");
    set_family(smol, "smollm3");
    smol.nope_layers = {sizes.layers - 1};
    ASSERT_TRUE(qwen.qk_norm);
    check_steps<fp16>(qwen, 5);
    check_steps<bf16>(qwen, 3);
    check_steps<bf16>(smol, 3);
    if (HasFailure()) return;
  }
}

TEST(FusedSequential, NeoxMatchesTheCpu) {
  for (const auto& [heads, head_dim] : {std::pair{4, 32}, {3, 16}, {12, 64}, {8, 80}, {32, 80}, {32, 128}, {2, 256}}) {
    const int layers = heads * head_dim > 700 ? 1 : 3;
    check_steps<fp16>(sequential_neox_config(heads, head_dim, layers), 5);
    check_steps<bf16>(sequential_neox_config(heads, head_dim, layers), 3);
    if (HasFailure()) return;
  }
}

TEST(FusedSequential, FewBlocksAndTheSmallestRing) {
  cuda::FusedTuning tuning;
  tuning.blocks = 24;
  check_steps<fp16>(llama_config({512, 8, 2, 64, 1376}), 5, tuning);
  tuning.blocks = 3;  // fewer than K/V heads
  tuning.ring_bytes = 1;
  tuning.window_bytes = 1;
  check_steps<fp16>(llama_config({128, 8, 4, 16, 152}), 5, tuning);
  check_steps<fp16>(llama_config({128, 8, 8, 16, 152}), 5, tuning);  // three items of attention for two of the blocks
}

template <typename S>
void check_contexts(const ModelConfig& config, std::int64_t page_size, std::int64_t capacity,
                    const cuda::FusedTuning& tuning = {}, bool kv_fp8 = false) {
  SCOPED_TRACE(test::type_name<S>() + ", head_dim " + std::to_string(config.head_dim) + ", pages of " +
               std::to_string(page_size) + (kv_fp8 ? ", in fp8" : ""));
  Model<S> model(config, capacity, 1, page_size, kv_fp8);
  const auto cpu = model.on_cpu();
  const auto fused = model.fused(tuning);
  std::int64_t fed = 0;
  // From 128 and 192 positions on there are two and three splits.
  for (const std::int64_t context :
       {0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257, 700, 1500}) {
    if (context >= capacity) break;
    std::vector<std::int32_t> ids;
    for (std::int64_t i = fed; i <= context; ++i) ids.push_back(id_at(i, config));
    for (; fed < context; ++fed) step(*fused, id_at(fed, config), fed);
    step(*fused, id_at(fed, config), fed);
    ++fed;
    expect_logits<S>(logits_of(*fused, config), cpu->prefill(ids), "context " + std::to_string(context),
                     kv_fp8 ? test::unit_roundoff<bf16>() : test::unit_roundoff<S>());
    if (testing::Test::HasFailure()) return;
  }
}

TEST(FusedSequential, EveryContextInPagesAndWithout) {
  check_contexts<fp16>(llama_config({128, 8, 2, 64, 304}, 307), 64, 1501);
  check_contexts<fp16>(llama_config({256, 8, 2, 128, 304}, 307), 32, 701);
  check_contexts<bf16>(llama_config({128, 4, 1, 32, 304}, 307), 16, 701);
  check_contexts<fp16>(llama_config({128, 16, 2, 24, 304}, 307), 0, 701);
  check_contexts<fp16>(sequential_neox_config(2, 80, 2), 0, 701);
  ModelConfig normed = llama_config({128, 8, 2, 64, 304, 3}, 307);
  set_family(normed, "qwen3");
  check_contexts<bf16>(normed, 16, 701);
}

// With few blocks an item has many positions, and its scores and outputs are computed on tensor cores: turns of warps that are
// whole and not, of one page and of several, several rounds of all warps, groups that fill a set of queries and do not, head sizes
// that fill a lane's loads and do not, and rings of fewer stages than there are warps.
TEST(FusedSequential, LongItemsOnTensorCores) {
  cuda::FusedTuning tuning;
  tuning.blocks = 8;
  check_contexts<fp16>(llama_config({128, 8, 2, 64, 304}, 307), 64, 1501, tuning);
  check_contexts<bf16>(llama_config({256, 8, 2, 128, 304}, 307), 32, 1501, tuning);
  check_contexts<bf16>(llama_config({128, 6, 2, 40, 304}, 307), 16, 701, tuning);
  check_contexts<fp16>(llama_config({128, 7, 1, 80, 304}, 307), 0, 701, tuning);
  check_contexts<fp16>(llama_config({128, 16, 2, 24, 304}, 307), 0, 701, tuning);
  check_contexts<bf16>(llama_config({64, 32, 1, 16, 136}, 307), 64, 701, tuning);
  check_contexts<bf16>(llama_config({128, 11, 1, 64, 304}, 307), 32, 701, tuning);
  check_contexts<fp16>(llama_config({48, 6, 2, 8, 24}, 307), 0, 701, tuning);
  check_contexts<fp16>(llama_config({512, 4, 2, 256, 304}, 307), 32, 701, tuning);
  tuning.ring_bytes = 1;
  check_contexts<bf16>(llama_config({256, 8, 2, 128, 304}, 307), 16, 701, tuning);
  check_contexts<fp16>(llama_config({128, 16, 2, 24, 304}, 307), 48, 701, tuning);
  tuning.blocks = 4;
  check_contexts<bf16>(sequential_neox_config(2, 96, 2), 0, 1501, tuning);
}

// Keys and values in fp8: head sizes of 64 and 128, one query a K/V head to more than a set of them, norms of heads and partly
// rotated ones, units that are full and not, turns of one page and of several, few blocks and many, and the smallest ring.
TEST(FusedSequential, EveryContextOfCodes) {
  ModelConfig normed = llama_config({128, 8, 2, 64, 304, 3}, 307);
  set_family(normed, "qwen3");
  const auto check = [&](const cuda::FusedTuning& tuning) {
    check_contexts<fp16>(llama_config({128, 8, 2, 64, 304}, 307), 64, 701, tuning, true);
    check_contexts<bf16>(llama_config({256, 8, 2, 128, 304}, 307), 32, 701, tuning, true);
    check_contexts<fp16>(llama_config({128, 2, 2, 128, 304}, 307), 16, 701, tuning, true);
    check_contexts<bf16>(llama_config({128, 3, 1, 64, 304}, 307), 16, 701, tuning, true);
    check_contexts<bf16>(llama_config({128, 16, 2, 64, 304}, 307), 32, 701, tuning, true);
    check_contexts<fp16>(llama_config({128, 11, 1, 128, 304}, 307), 64, 701, tuning, true);
    check_contexts<bf16>(normed, 16, 701, tuning, true);
    check_contexts<fp16>(sequential_neox_config(2, 64, 2), 64, 701, tuning, true);
  };
  check({});
  cuda::FusedTuning tuning;
  tuning.blocks = 8;
  check(tuning);
  check_contexts<bf16>(llama_config({256, 8, 2, 128, 304}, 307), 32, 1501, tuning, true);
  tuning.ring_bytes = 1;
  check_contexts<bf16>(llama_config({256, 8, 2, 128, 304}, 307), 16, 701, tuning, true);
  check_contexts<fp16>(llama_config({128, 16, 2, 64, 304}, 307), 48, 701, tuning, true);
}

// Codes and scales of the first layer, which no attention precedes, are those of the rows that a cache of 16 bits has, and what is
// not appended stays as it was.
template <typename S>
void check_codes(const ModelConfig& config, std::int64_t page_size, const cuda::FusedTuning& tuning = {}) {
  SCOPED_TRACE(test::type_name<S>() + ", head_dim " + std::to_string(config.head_dim));
  constexpr std::int64_t kTokens = 150;
  Model<S> wide(config, 200, 1, page_size), narrow(config, 200, 1, page_size, true);
  for (Model<S>* model : {&wide, &narrow}) {
    const auto fused = model->fused(tuning);
    for (std::int64_t i = 0; i < kTokens; ++i) step(*fused, id_at(i, config), i);
  }
  const auto want = wide.first_layer(), got = narrow.first_layer();
  for (std::size_t i = 0; i < want.size(); ++i) {
    const auto [differs, other] = std::mismatch(got[i].begin(), got[i].end(), want[i].begin());
    EXPECT_TRUE(differs == got[i].end()) << "part " << i << ", byte " << differs - got[i].begin();
  }
  EXPECT_NE(want[2].front(), 0xff) << "the test says nothing";
}

TEST(FusedSequential, AppendsTheCodesOfItsRows) {
  cuda::FusedTuning few;
  few.blocks = 8;
  check_codes<fp16>(llama_config({128, 8, 2, 64, 304}, 307), 16);
  check_codes<bf16>(llama_config({256, 8, 2, 128, 304}, 307), 64);
  check_codes<bf16>(llama_config({128, 3, 1, 64, 304}, 307), 32, few);
  check_codes<fp16>(llama_config({128, 2, 2, 128, 304}, 307), 16, few);
  check_codes<fp16>(sequential_neox_config(2, 64, 2), 32);
}

// The size of pages is not to be seen in a bit: items of one query and of several, on tensor cores and not, over codes and not.
TEST(FusedSequential, BitsDoNotDependOnPages) {
  for (const auto& [sizes, kv_fp8] : {std::pair{Sizes{256, 8, 2, 128, 304}, false},
                                      {{128, 16, 2, 64, 304}, false},
                                      {{512, 4, 2, 256, 304}, false},
                                      {{256, 8, 2, 128, 304}, true},
                                      {{128, 16, 2, 64, 304}, true}}) {
    const ModelConfig config = llama_config(sizes, 307);
    cuda::FusedTuning tuning;
    tuning.blocks = 8;
    std::optional<std::uint64_t> hash;
    for (const std::int64_t page_size : {0, 8, 16, 48, 64}) {
      if (kv_fp8 && page_size < kKvUnit) continue;
      SCOPED_TRACE("pages of " + std::to_string(page_size));
      Model<bf16> model(config, 1000, 1, page_size, kv_fp8);
      const auto fused = model.fused(tuning);
      test::bits_of_launch(*fused, 50);
      const std::uint64_t got = test::bits_of_launch(*fused, 1000);
      EXPECT_EQ(got, hash.value_or(got));
      hash = got;
    }
  }
}

// Turns come faster than they are computed: several rounds of a ring lie between a warp's turns, few and many stages for one
// warp and several, and nothing else is read meanwhile. A turn that is read too early, or twice, is another one in every run.
TEST(FusedSequential, TurnsThatHaveComeLongAgo) {
  constexpr std::int64_t kTokens = 4000;
  cuda::FusedTuning tuning;
  tuning.blocks = 8;
  for (const bool kv_fp8 : {false, true}) {
    const ModelConfig config = llama_config({64, 8, 4, 128, 64, 1}, 307);
    Model<bf16> model(config, kTokens, 1, 64, kv_fp8);
    for (const int ring_bytes : {0, 1, 90 << 10, 110 << 10, 150 << 10}) {
      tuning.ring_bytes = ring_bytes;
      SCOPED_TRACE("a ring of " + std::to_string(ring_bytes));
      const std::uint64_t first = test::bits_of_launch(*model.fused(tuning), kTokens);
      EXPECT_EQ(test::bits_of_launch(*model.fused(tuning), kTokens), first);
    }
  }
}

// Many tokens in one launch: the same ids and the same bits as one launch a token; and after a stop id, or many launches.
TEST(FusedSequential, ManyTokensInOneLaunch) {
  struct Case {
    Sizes sizes;
    int blocks;
    bool kv_fp8 = false;
  };
  const Case cases[] = {
      {{256, 4, 1, 64, 688, 3, true}, 0},
      {{512, 8, 8, 64, 1376}, 0},
      {{2048, 32, 8, 64, 8192, 2}, 0},
      {{128, 8, 2, 64, 304}, 8},  // from position 128 on too few for an item of each query head
      {{256, 4, 1, 64, 688, 3, true}, 0, true},
      {{512, 8, 2, 128, 1376}, 0, true},
      {{128, 8, 2, 64, 304}, 8, true},
  };
  for (const auto& [sizes, blocks, kv_fp8] : cases) {
    const ModelConfig config = llama_config(sizes);
    cuda::FusedTuning tuning;
    tuning.blocks = blocks;
    constexpr int kTokens = 150;
    Model<fp16> model(config, kTokens, 1, 64, kv_fp8);
    std::vector<std::int32_t> singly;
    std::uint64_t hash = 0;
    {
      const auto fused = model.fused(tuning);
      for (int i = 0; i < kTokens; ++i) singly.push_back(step(*fused, singly.empty() ? 5 : singly.back(), i));
      hash = fused->logits_hash();
    }
    if (blocks == 0) {
      EXPECT_GT(std::set<std::int32_t>(singly.begin(), singly.end()).size(), 3u) << "the test says nothing";
    }
    const auto fused = model.fused(tuning);
    const auto launch = [&](std::int32_t id, std::int64_t position, std::int64_t count,
                            std::vector<std::int32_t> stop_ids = {}) {
      cuda::FusedRequest request;
      request.first_id = id;
      request.position = position;
      request.count = count;
      request.stop_ids = std::move(stop_ids);
      fused->launch(request);
      std::vector<std::int32_t> ids;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::optional<std::int32_t> got = fused->wait(i);
        if (!got.has_value()) break;
        ids.push_back(*got);
      }
      EXPECT_EQ(fused->finish().tokens, std::ssize(ids));
      return ids;
    };
    EXPECT_EQ(launch(5, 0, kTokens), singly);
    EXPECT_EQ(fused->logits_hash(), hash);
    EXPECT_EQ(launch(5, 0, kTokens), singly);
    EXPECT_EQ(fused->logits_hash(), hash);

    // What a launch appends before it stops, another one reads.
    const auto at = std::find(singly.begin(), singly.end(), singly[70]) - singly.begin();
    model.fused(tuning);  // the cache is NaN again
    std::vector<std::int32_t> ids = launch(5, 0, kTokens, {singly[70]});
    ASSERT_EQ(std::ssize(ids), at + 1);
    const std::vector<std::int32_t> rest = launch(ids.back(), at + 1, kTokens - at - 1);
    ids.insert(ids.end(), rest.begin(), rest.end());
    EXPECT_EQ(ids, singly);
    EXPECT_EQ(fused->logits_hash(), hash);
  }
}

TEST(FusedSequential, SameBitsEveryRun) {
  Model<bf16> model(llama_config({2048, 32, 8, 64, 8192, 2}), 256, 1, 64);
  test::expect_same_bits_every_run(model, 200, 50);
}

TEST(FusedSequential, SamplesWhatTheHostWouldSample) {
  const ModelConfig config = llama_config({256, 4, 1, 64, 688}, 5003);
  Model<fp16> model(config, 64);
  const auto fused = model.fused();
  SamplerOptions options;
  options.seed = 99;
  options.temperature = 0.9, options.top_k = 100, options.top_p = 0.8;
  options.vocab_limit = 4900;
  std::int32_t id = 3;
  for (int i = 0; i < 20; ++i) {
    id = step(*fused, id, i, options);
    EXPECT_EQ(id, Sampler(options).sample(logits_of(*fused, config), i + 1)) << "position " << i;
  }
}

TEST(FusedSequential, CancelEndsTheLaunch) {
  Model<fp16> model(llama_config({256, 4, 1, 64, 688}), 4096, 1, 64);
  test::expect_cancel_ends_the_launch(model);
}

TEST(FusedSequential, TheWatchdogEndsAHang) {
  Model<fp16> model(llama_config({256, 4, 1, 64, 688}), 64);
  test::expect_the_watchdog_ends_a_hang(model);
}

TEST(FusedSequential, GivenIdsAreFed) {
  Model<fp16> model(llama_config({512, 8, 2, 64, 1376, 3}), 40);
  test::expect_given_ids_are_fed(model);
}

TEST(FusedSequential, RefusesWhatItCannotRun) {
  cuda::Device device;
  device.arch = 90;
  device.multiprocessors = 132;
  device.shared_bytes = 227 << 10;
  for (const char* preset : {"tiny", "d12", "smollm2-135m", "tinyllama-1.1b", "llama3.2-1b", "llama3.2-3b",
                             "llama3.1-8b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b", "qwen3-8b", "smollm3-3b"}) {
    EXPECT_EQ(cuda::fused_decode_unsupported_reason(preset_config(preset), device), "") << preset;
  }
  const auto reason = [&](const Sizes& sizes) {
    return cuda::fused_decode_unsupported_reason(llama_config(sizes), device);
  };
  EXPECT_EQ(reason({512, 8, 2, 64, 1376}), "");
  EXPECT_NE(reason({516, 8, 2, 64, 1376}).find("hidden_size"), std::string::npos);
  EXPECT_NE(reason({512, 8, 2, 1024, 1376}).find("head_dim"), std::string::npos);
  EXPECT_NE(reason({512, 8, 2, 64, 1380}).find("ffn_size"), std::string::npos);
  EXPECT_NE(reason({512, 8, 2, 64, 24576}).find("ffn_size"), std::string::npos);
  EXPECT_NE(reason({512, 64, 1, 8, 1376}).find("query heads"), std::string::npos);
  EXPECT_EQ(cuda::fused_decode_unsupported_reason(llama_config({512, 8, 2, 128, 1376}), device, true), "");
  EXPECT_EQ(cuda::fused_decode_unsupported_reason(llama_config({512, 8, 2, 96, 1376}), device, true),
            "fused decoding reads keys and values in fp8 of a head_dim of 64 or 128, got 96");
  ModelConfig parallel = sequential_neox_config(8, 64, 2);
  parallel.parallel_residual = true;
  EXPECT_EQ(cuda::fused_decode_unsupported_reason(parallel, device), "");
  EXPECT_EQ(cuda::fused_decode_unsupported_reason(parallel, device, true),
            "fused decoding reads keys and values of 16 bits with the parallel residual");
  device.multiprocessors = 16;
  EXPECT_NE(
      cuda::fused_decode_unsupported_reason(preset_config("llama3.1-8b"), device).find("multiprocessors are too few"),
      std::string::npos);
}

}  // namespace
}  // namespace weft
