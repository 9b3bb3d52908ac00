// What the benchmark of training counts.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/log.h"
#include "llmc/comm/thread_ranks.h"
#include "llmc/model/compare.h"
#include "llmc/model/presets.h"
#include "llmc/train/bench.h"
#include "test/cpp/train_loop_tools.h"

namespace weft {
namespace {

// A name that contains another GPU's is not that GPU.
TEST_F(TrainLoopTest, TheBenchGivesNoShareOfAPeakItDoesNotKnow) {
  SingleRank alone;
  const std::unique_ptr<TrainModel> model = micro_model(settings_);
  const auto peak = [&](const char* name) { return bench_training(*model, settings_, name, alone).peak_flops; };
  // Names as the driver gives them, with the dense bf16 rates of the datasheets; SXM where the name says nothing else.
  for (const auto& [name, flops] : {std::pair("NVIDIA H100 80GB HBM3", 989.4e12),
                                    {"NVIDIA H100 PCIe", 756.4e12},
                                    {"NVIDIA H100 NVL", 0.0},
                                    {"NVIDIA H200", 989.4e12},
                                    {"NVIDIA H200 NVL", 0.0},
                                    {"NVIDIA GH200 480GB", 989.4e12},
                                    {"NVIDIA A100-SXM4-80GB", 311.9e12},
                                    {"NVIDIA A100 80GB PCIe", 311.9e12},
                                    {"NVIDIA L40S", 362.0e12},
                                    {"NVIDIA L40", 0.0},
                                    {"NVIDIA B200", 2250e12},
                                    {"NVIDIA GB200", 0.0},
                                    {"NVIDIA GeForce RTX 4090", 0.0},
                                    {"cpu", 0.0}}) {
    EXPECT_EQ(peak(name), flops) << name;
  }
}

// Counted by hand: 6 operations for each weight of a matrix, and 6 L q T for causal attention (half of 12 L q T).
TEST(BenchFlops, OfThePresetsByHand) {
  // tiny: a layer has 2 x 192 x 192, 2 x 64 x 192 and 3 x 512 x 192; the tied embedding of 2,048 x 192 is the head.
  EXPECT_EQ(training_flops_per_token(preset_config("tiny"), std::nullopt, 256),
            6.0 * (4 * 393'216 + 393'216) + 6.0 * 4 * 192 * 256);
  // llama3.1-8b: 2 x 4096 x 4096, 2 x 1024 x 4096, 3 x 14336 x 4096; the head is a matrix of its own.
  EXPECT_EQ(training_flops_per_token(preset_config("llama3.1-8b"), std::nullopt, 8192), 51'470'401'536.0);
  // Heads that are together wider than the model: a layer has 2 x 60 x 24, 2 x 20 x 24 and 3 x 56 x 24, the head 100 x 24.
  ModelConfig wide = preset_config("tiny");
  wide.num_layers = 2;
  wide.hidden_size = 24;
  wide.num_heads = 3;
  wide.num_kv_heads = 1;
  wide.head_dim = 20;
  wide.ffn_size = 56;
  wide.vocab_size = 100;
  wide.tied_embeddings = false;
  EXPECT_EQ(training_flops_per_token(wide, std::nullopt, 16),
            6.0 * (2 * (2 * 1440 + 2 * 480 + 3 * 1344) + 2400) + 6.0 * 2 * 60 * 16);
}

// Beside frozen weights no GEMM computes their gradients; A and B of q and v have 3 x (192 + 192) and 3 x (192 + 64) parameters
// in each of 4 layers.
TEST(BenchFlops, OfAnAdapterByHand) {
  const LoraConfig lora{3, 6, parse_lora_targets("--lora-targets", "q,v", llama_lora_targets())};
  EXPECT_EQ(training_flops_per_token(preset_config("tiny"), lora, 256),
            4.0 * (4 * 393'216 + 393'216) + 6.0 * 4 * 192 * 256 + 6.0 * 4 * 3 * (192 + 192 + 192 + 64));
  EXPECT_EQ(training_flops_per_token(preset_config("tiny"), std::nullopt, 256),
            6.0 * (4 * 393'216 + 393'216) + 6.0 * 4 * 192 * 256);
}

TEST(BenchFlops, TheShareOfThePeakByHand) {
  TrainBenchResult result;
  result.tokens = 1000;
  result.median_ms = 10;
  result.flops_per_token = 1e9;
  EXPECT_EQ(result.mfu(), 0) << "an unknown peak gives no share";
  result.peak_flops = 400e12;
  EXPECT_EQ(result.tokens_per_s(), 100'000);
  EXPECT_DOUBLE_EQ(result.mfu(), 0.25);
  result.fastest_ms = 9;
  result.slowest_ms = 12;
  result.first_loss = 3.5;
  result.last_loss = 2.25;
  result.memory_bytes = 3'000'000'000;
  EXPECT_EQ(
      train_bench_text(result, "X"),
      (std::vector<std::string>{
          "X: 100000 tokens/s; a step of 1000 tokens in 10.00 ms (median of 15; 9.00 to 12.00)",
          "100 TF/s by 6 N_matmul + 6 L q T = 1.000 GF a token (causal)", "MFU 25.0 % of the 400.0 TF/s of dense bf16",
          "loss 3.5000 -> 2.2500 on the same random tokens, in " + human_bytes(3e9) + " of memory"}));
  result.peak_flops = 0;
  EXPECT_EQ(train_bench_text(result, "X")[2], "MFU n/a: the peak of this device is not known");
}

TEST_F(TrainLoopTest, RanksDivideAStepOfTheBench) {
  settings_.batch_tokens = 6 * 16;
  settings_.virtual_ranks = 3;
  int forwards[3] = {}, backwards[3] = {};
  run_thread_ranks(3, 60, [&](Communicator& ranks) {
    omp_set_num_threads(1);
    const std::unique_ptr<TrainModel> inner =
        cpu::make_training_model(micro_config(), settings_.model_options(), ranks, Shard::optimizer);
    HookedModel model(*inner);
    int &forward = forwards[ranks.rank()], &backward = backwards[ranks.rank()];
    model.before_forward = [&](std::uint64_t) { ++forward; };
    model.before_backward = [&] { EXPECT_EQ(++backward, forward); };
    bench_parameters(model);
    const TrainBenchResult result = bench_training(model, settings_, "NVIDIA H200", ranks);
    EXPECT_EQ(result.ranks, 3);
    EXPECT_EQ(result.tokens, 96);
    EXPECT_EQ(result.memory_bytes, total_bytes(inner->memory()));
    EXPECT_EQ(result.peak_flops, 3 * 989.4e12);
    EXPECT_NEAR(result.first_loss, std::log(32.0), 0.2) << "the mean over the tokens of all";
  });
  for (const int rank : {0, 1, 2}) {
    EXPECT_EQ(forwards[rank], (4 + 15) * 2);
    EXPECT_EQ(backwards[rank], forwards[rank]);
  }
}

// The update of a step of the bench is that of training: of the mean gradient of all its micro-batches, clipped.
TEST_F(TrainLoopTest, AStepOfTheBenchIsClippedByTheMeanOfItsGradients) {
  SingleRank alone;
  std::vector<double> first_norms;
  for (const std::int64_t micro_batches : {1, 3}) {
    settings_.batch_tokens = 16 * micro_batches;
    settings_.grad_clip = 1e-3;
    const std::unique_ptr<TrainModel> inner = micro_model(settings_);
    HookedModel model(*inner);
    std::vector<double> norms;
    model.after_statistics = [&](StepStatistics& statistics) { norms.push_back(statistics.gradient_norm); };
    model.before_update = [&](const AdamWStep& update) {
      EXPECT_EQ(update.gradient_scale, clip_factor(norms.back(), 1e-3));
      EXPECT_LT(update.gradient_scale, 1);
    };
    bench_training(model, settings_, "", alone);
    first_norms.push_back(norms.at(0));
  }
  EXPECT_NEAR(first_norms[1], first_norms[0], 1e-5 * first_norms[0]);
}

TEST_F(TrainLoopTest, TheBenchCountsTheOperationsOfItsOwnModel) {
  SingleRank alone;
  const std::unique_ptr<TrainModel> model = micro_model(settings_);
  // One layer of 2 x 16 x 16, 2 x 8 x 16 and 3 x 24 x 16, a head of 32 x 16; sequences of 8.
  const TrainBenchResult result = bench_training(*model, settings_, "NVIDIA H200", alone);
  EXPECT_EQ(result.flops_per_token, 6.0 * (1920 + 512) + 6.0 * 16 * 8);
  EXPECT_EQ(result.tokens, 16);
  EXPECT_DOUBLE_EQ(result.mfu(), 16 / result.median_ms * 1e3 * result.flops_per_token / 989.4e12);
  // The steps are those of a training: they learn the batch by heart.
  EXPECT_NEAR(result.first_loss, std::log(32.0), 0.2);
  EXPECT_LT(result.last_loss, result.first_loss);
  EXPECT_GT(result.last_loss, 0);
  EXPECT_LE(result.fastest_ms, result.median_ms);
  EXPECT_LE(result.median_ms, result.slowest_ms);
}

}  // namespace
}  // namespace weft
