// Training on several ranks: their sums, and what one process computes for all of them (--virtual-ranks).
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "llmc/comm/thread_ranks.h"
#include "llmc/cpu/adamw.h"
#include "llmc/cpu/rank_sum.h"
#include "llmc/model/lora.h"
#include "llmc/model/presets.h"
#include "llmc/model/shards.h"
#include "test/cpp/gradient_check.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

using test::Floats;

// ---- the operator ----

// In this order, and in fp32: 1 + 2^-24 + 2^-24 is 1, and 2^-24 + 2^-24 + 1 is more.
TEST(RankSum, AddsInTheOrderOfTheRanks) {
  const float one = 1, small = 0x1p-24f;
  float sum = 0;
  cpu::add_ranks(&sum, std::vector<const float*>{&one, &small, &small}, 1);
  EXPECT_EQ(sum, 1.0f);
  cpu::add_ranks(&sum, std::vector<const float*>{&small, &small, &one}, 1);
  EXPECT_GT(sum, 1.0f);
}

TEST(RankSum, IsTheDefinitionForAnySizeAndAnyThreads) {
  for (const std::int64_t count : {0, 1, 4095, 4096, 4097, 9001}) {
    for (const std::size_t ranks : {1u, 2u, 3u, 8u}) {
      std::vector<Floats> pieces;
      std::vector<const float*> pointers;
      for (std::size_t r = 0; r < ranks; ++r) pieces.push_back(test::random_floats(count, static_cast<unsigned>(r)));
      for (const Floats& piece : pieces) pointers.push_back(piece.data());
      Floats expected = pieces[0];
      for (std::size_t r = 1; r < ranks; ++r) {
        for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += pieces[r][i];
      }
      test::expect_same_bits_for_any_threads("add_ranks", [&] {
        Floats sum(pieces[0].size(), -1.0f);
        cpu::add_ranks(sum.data(), pointers, count);
        return std::vector<Floats>{sum};
      });
      Floats sum(expected.size());
      cpu::add_ranks(sum.data(), pointers, count);
      EXPECT_EQ(sum, expected) << ranks << " ranks, " << count;
      cpu::add_ranks(pieces.back().data(), pointers, count);  // into the last piece
      EXPECT_EQ(pieces.back(), expected) << ranks << " ranks, " << count;
    }
  }
}

TEST(RankSum, OneByOneIsAllAtOnce) {
  const Floats a = test::random_floats(5000, 1), b = test::random_floats(5000, 2), c = test::random_floats(5000, 3);
  Floats at_once(5000), one_by_one = a;
  cpu::add_ranks(at_once.data(), std::vector<const float*>{a.data(), b.data(), c.data()}, 5000);
  for (const Floats* next : {&b, &c}) {
    cpu::add_ranks(one_by_one.data(), std::vector<const float*>{one_by_one.data(), next->data()}, 5000);
  }
  EXPECT_EQ(one_by_one, at_once);
}

TEST(RankSum, ThePiecesOfAnExchangeChangeNothing) {
  const std::int64_t count = 9001;
  for (const int size : {1, 2, 3, 8}) {
    Floats expected = test::random_floats(count, 0);
    for (int r = 1; r < size; ++r) {
      const Floats more = test::random_floats(count, static_cast<unsigned>(r));
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += more[i];
    }
    std::vector<Range> parts = shares(count, size);
    if (size == 3) parts[1].end = parts[1].begin;  // a rank without a part: nobody has the sum of these elements
    for (const std::int64_t piece : {std::int64_t{7}, std::int64_t{4096}, cpu::kExchangePiece}) {
      run_thread_ranks(size, 60, [&](Communicator& ranks) {
        omp_set_num_threads(1);
        const Floats mine = test::random_floats(count, static_cast<unsigned>(ranks.rank()));
        Floats values = mine;
        const Range part = parts[static_cast<std::size_t>(ranks.rank())];
        cpu::exchange_and_add(ranks, values.data() + part.begin, values.data(), parts, false, piece);
        for (std::int64_t i = 0; i < count; ++i) {
          const bool own = part.begin <= i && i < part.end;
          const auto at = static_cast<std::size_t>(i);
          ASSERT_EQ(values[at], own ? expected[at] : mine[at]) << i << " of rank " << ranks.rank();
        }
      });
    }
  }
}

// ---- ranges of the arena ----

TEST(CutArena, TheRangesAreNeighboursThatBeginWhereBlocksBegin) {
  for (const char* name : {"tiny", "d12", "llama3.1-8b"}) {
    const TensorTable table(preset_config(name));
    for (const int ranks : {1, 2, 3, 8, 512}) {
      const std::vector<Range> parts = cut_arena(table, ranks, cpu::kAdamWBlock);
      ASSERT_EQ(std::ssize(parts), ranks);
      std::int64_t begin = 0;
      for (const Range& part : parts) {
        EXPECT_EQ(part.begin, begin);
        begin = part.end;
        if (part.begin == table.arena_elements()) continue;
        bool at_a_block = false;
        for (const TensorSpec& spec : table.specs()) {
          const std::int64_t inside = part.begin - spec.offset;
          at_a_block |= inside >= 0 && inside < spec.elements && inside % cpu::kAdamWBlock == 0;
        }
        EXPECT_TRUE(at_a_block) << name << ", " << ranks << " ranks, element " << part.begin;
        // A block, and the padding behind the last tensor of a group, is all that a part has more than its share.
        EXPECT_LE(part.size(), table.arena_elements() / ranks + cpu::kAdamWBlock + 128) << name << ", " << ranks;
      }
      EXPECT_EQ(begin, table.arena_elements());
    }
  }
}

TEST(CutArena, AModelOfFewBlocksLeavesRanksWithNothing) {
  const TensorTable table(micro_config());  // nine tensors of less than a block
  const std::vector<Range> parts = cut_arena(table, 64, cpu::kAdamWBlock);
  std::int64_t elements = 0, with_something = 0;
  for (const Range& part : parts) {
    elements += part.size();
    with_something += part.size() > 0;
  }
  EXPECT_EQ(elements, table.arena_elements());
  EXPECT_LE(with_something, std::ssize(table.specs()));
  EXPECT_GT(with_something, 3);
}

// However many ranks: a border lies at an end of a matrix of a block, at the nearer one, and elsewhere where blocks begin.
TEST(CutArena, WhatTheOptimizerNeedsWholeIsNotCut) {
  for (const char* name : {"tiny", "d12", "llama3.2-1b"}) {
    const TensorTable table(preset_config(name));
    std::int64_t largest = 0;
    for (const TensorSpec& spec : table.specs()) {
      if (muon_optimizer().needs_whole(spec)) largest = std::max(largest, spec.elements);
    }
    for (const int ranks : {1, 2, 3, 5, 8, 64, 512}) {
      const std::vector<Range> parts = cut_arena(table, ranks, cpu::kAdamWBlock, muon_optimizer());
      ASSERT_EQ(std::ssize(parts), ranks);
      std::int64_t begin = 0;
      for (const Range& part : parts) {
        EXPECT_EQ(part.begin, begin);
        begin = part.end;
        EXPECT_LE(part.size(), table.arena_elements() / ranks + largest + cpu::kAdamWBlock + 128);
        for (const TensorSpec& spec : table.specs()) {
          const std::int64_t inside = part.begin - spec.offset;
          if (inside <= 0 || inside >= spec.elements) continue;
          EXPECT_FALSE(spec.name.find("_proj.weight") != std::string::npos) << spec.name << ", " << ranks << " ranks";
          EXPECT_EQ(inside % cpu::kAdamWBlock, 0) << spec.name;
        }
      }
      EXPECT_EQ(begin, table.arena_elements());
    }
  }
}

// Three layers in two places; embedding and head, which are not in use together, in one.
TEST(SectionBuffers, SectionsTakeTurns) {
  const std::vector<Range> sections = {{0, 100}, {100, 140}, {140, 180}, {180, 230}, {230, 350}};
  SectionBuffers places(sections, 3);
  EXPECT_EQ(places.elements(), 120 + 50 + 40);
  const std::int64_t begins[] = {0, 120, 170, 120, 0};
  for (std::size_t s = 0; s < sections.size(); ++s) EXPECT_EQ(places.begin_of(s), begins[s]) << s;
  EXPECT_TRUE(places.take(1));
  EXPECT_TRUE(places.take(2));
  EXPECT_FALSE(places.take(1));
  EXPECT_TRUE(places.take(3));
  EXPECT_FALSE(places.take(2));
  EXPECT_TRUE(places.take(1)) << "the third layer was there";
  EXPECT_TRUE(places.take(0));
  EXPECT_TRUE(places.take(4));
  EXPECT_TRUE(places.take(0));
  places.forget();
  for (const std::size_t s : {0u, 1u, 2u}) EXPECT_TRUE(places.take(s));
  const SectionBuffers one({sections.data(), 2}, 1);
  EXPECT_EQ(one.elements(), 140);
  EXPECT_EQ(SectionBuffers().elements(), 0);
}

TEST(CutBuckets, SectionsAreTheLayersInTheOrderOfTheForwardPass) {
  for (const bool tied : {true, false}) {
    ModelConfig config = preset_config("tiny");
    config.tied_embeddings = tied;
    const TensorTable table(config);
    const std::vector<Range> sections = parameter_sections(config, table);
    ASSERT_EQ(std::ssize(sections), config.num_layers + (tied ? 1 : 2));
    std::int64_t begin = 0;
    for (const Range& section : sections) {
      EXPECT_EQ(section.begin, begin);
      begin = section.end;
    }
    EXPECT_EQ(begin, table.arena_elements());
    const auto section_of = [&](const std::string& name) {
      const std::int64_t offset = table.at(name).offset;
      return std::find_if(sections.begin(), sections.end(), [&](const Range& s) { return offset < s.end; }) -
             sections.begin();
    };
    EXPECT_EQ(section_of("model.embed_tokens.weight"), 0);
    EXPECT_EQ(section_of("model.layers.0.input_layernorm.weight"), 1);
    EXPECT_EQ(section_of("model.layers.1.mlp.down_proj.weight"), 2);
    EXPECT_EQ(section_of("model.norm.weight"), config.num_layers);
    if (!tied) {
      EXPECT_EQ(section_of("lm_head.weight"), config.num_layers + 1);
    }
  }
}

// An adapter has its layers alone.
TEST(CutBuckets, SectionsOfAnAdapter) {
  const ModelConfig config = preset_config("tiny");
  const TensorTable table(config, {2, 4, parse_lora_targets("--lora-targets", "q,down", llama_lora_targets())});
  const std::vector<Range> sections = parameter_sections(config, table);
  ASSERT_EQ(std::ssize(sections), config.num_layers + 1);
  EXPECT_EQ(sections[0], Range(0, 0));
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const Range section = sections[static_cast<std::size_t>(l) + 1];
    EXPECT_EQ(section.begin,
              table.at(format("model.layers.%lld.self_attn.q_proj.lora_A.weight", static_cast<long long>(l))).offset);
    EXPECT_GT(section.end,
              table.at(format("model.layers.%lld.mlp.down_proj.lora_B.weight", static_cast<long long>(l))).offset);
  }
  EXPECT_EQ(sections.back().end, table.arena_elements());
}

TEST(CutBuckets, AllOfTheArenaOnceAndEachRankAPartOfEveryBucket) {
  constexpr std::int64_t kBlock = 8192;
  const LoraConfig adapter{16, 32, parse_lora_targets("--lora-targets", "all", llama_lora_targets())};
  for (const char* name : {"tiny", "d12", "llama3.2-1b", "llama3.1-8b"}) {
    const ModelConfig config = preset_config(name);
    for (const TensorTable& table : {TensorTable(config), TensorTable(config, adapter)}) {
      const std::vector<Range> sections = parameter_sections(config, table);
      for (const int ranks : {1, 2, 3, 8, 512}) {
        for (const std::int64_t elements : {table.arena_elements() / 100, std::int64_t{16} << 20}) {
          std::int64_t begin = 0;
          std::size_t section = 0;
          for (const Bucket& bucket : cut_buckets(table, sections, ranks, kBlock, elements)) {
            EXPECT_EQ(bucket.range.begin, begin);
            EXPECT_GE(bucket.section, section);
            section = bucket.section;
            EXPECT_GE(begin, sections[section].begin);
            EXPECT_LT(begin, sections[section].end);
            EXPECT_TRUE(begin == sections[section].begin || begin % kBlock == 0);
            EXPECT_LE(bucket.range.size(), 4 * elements + kBlock);
            ASSERT_EQ(std::ssize(bucket.parts), ranks);
            for (const Range& part : bucket.parts) {
              EXPECT_EQ(part.begin, begin);
              EXPECT_TRUE(begin == bucket.range.begin || begin == bucket.range.end || begin % kBlock == 0) << begin;
              EXPECT_LE(part.size(), bucket.range.size() / ranks + kBlock);
              begin = part.end;
            }
            EXPECT_EQ(begin, bucket.range.end);
          }
          EXPECT_EQ(begin, table.arena_elements()) << name << ", " << ranks << " ranks";
        }
      }
    }
  }
}

// Cuts within matrices move to their nearer end; everything else is cut as without Muon.
TEST(CutBuckets, WhatTheOptimizerNeedsWholeIsNotCut) {
  constexpr std::int64_t kBlock = 8192;
  for (const char* name : {"tiny", "d12", "llama3.2-1b", "llama3.1-8b"}) {
    const ModelConfig config = preset_config(name);
    const TensorTable table(config);
    const std::vector<Range> sections = parameter_sections(config, table);
    const auto is_cut = [&](std::int64_t element, const TensorSpec& spec) {
      return element > spec.offset && element < spec.offset + spec.elements;
    };
    std::int64_t largest = 0;
    for (const TensorSpec& spec : table.specs()) {
      if (muon_optimizer().needs_whole(spec)) largest = std::max(largest, spec.elements);
    }
    for (const int ranks : {1, 2, 3, 8, 512}) {
      // Buckets of many layers, of a part of one, and of less than a matrix.
      const std::int64_t small = std::max<std::int64_t>(20000, table.arena_elements() / 2000);
      for (const std::int64_t elements : {table.arena_elements() / 3, std::int64_t{1} << 20, small}) {
        if (ranks * table.arena_elements() / elements > 200000) continue;  // seconds, and nothing new
        std::int64_t begin = 0;
        std::size_t busy = 0;  // ranks with a part of the widest bucket
        for (const Bucket& bucket : cut_buckets(table, sections, ranks, kBlock, elements, muon_optimizer())) {
          EXPECT_EQ(bucket.range.begin, begin);
          EXPECT_LT(begin, bucket.range.end);
          EXPECT_LE(bucket.range.size(), 4 * elements + 2 * kBlock + largest);
          ASSERT_EQ(std::ssize(bucket.parts), ranks);
          std::size_t parts = 0;
          for (const Range& part : bucket.parts) {
            EXPECT_EQ(part.begin, begin);
            EXPECT_LE(part.begin, part.end);
            begin = part.end;
            parts += part.size() > 0;
            for (const TensorSpec& spec : table.specs()) {
              if (!is_cut(begin, spec)) continue;
              EXPECT_EQ(spec.name.find("_proj.weight"), std::string::npos) << spec.name << ", " << ranks << " ranks";
              EXPECT_EQ(begin % kBlock, 0) << spec.name;
            }
          }
          busy = std::max(busy, parts);
          EXPECT_EQ(begin, bucket.range.end);
        }
        EXPECT_EQ(begin, table.arena_elements()) << name << ", " << ranks << " ranks";
        EXPECT_GE(busy, static_cast<std::size_t>(std::min(ranks, 3))) << name;
      }
    }
  }
}

// ---- one process for all ranks ----

class VirtualRanks : public testing::Test {
 protected:
  void SetUp() override { omp_set_num_threads(1); }
  void TearDown() override { omp_set_num_threads(threads_); }

  // A step of `ranks` x `accumulation` micro-batches of two sequences of eight.
  static TrainSettings settings(std::int64_t ranks, std::int64_t accumulation) {
    TrainSettings settings = micro_settings();
    settings.virtual_ranks = ranks;
    settings.batch_tokens = ranks * accumulation * 16;
    settings.dropout = 0.25;  // its masks are addressed by the micro-step of the run, not by that of the rank
    return settings;
  }
  // Forward and backward of micro-batches [first, last) of a run.
  static void compute(TrainModel& model, std::int64_t first, std::int64_t last, float scale) {
    for (std::int64_t i = first; i < last; ++i) {
      const std::vector<std::uint16_t> text = patterned_tokens(17, static_cast<std::size_t>(100 * i));
      const std::vector<std::int32_t> tokens(text.begin(), text.end() - 1), labels(text.begin() + 1, text.end());
      model.forward({tokens, labels}, static_cast<std::uint64_t>(i), scale);
      model.backward();
    }
  }

  const int threads_ = omp_get_max_threads();
};

// Against models that compute one rank each and know of no other.
TEST_F(VirtualRanks, TheGradientIsTheSumOfEachRanksOwn) {
  for (const std::int64_t ranks : {2, 3, 4, 8}) {
    for (const std::int64_t accumulation : {1, 3}) {
      const TrainSettings together = settings(ranks, accumulation);
      const float scale = 1.0f / static_cast<float>(together.batch_tokens);
      Floats expected;
      double loss = 0;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const std::unique_ptr<TrainModel> alone = micro_model(settings(1, accumulation));
        alone->zero_gradients();
        compute(*alone, rank * accumulation, (rank + 1) * accumulation, scale);
        const Floats own = tensors(*alone, TensorRole::gradient);
        if (rank == 0) expected.resize(own.size());
        for (std::size_t i = 0; i < own.size(); ++i) expected[i] = rank == 0 ? own[i] : expected[i] + own[i];
        loss += alone->statistics().loss_sum;
      }
      const std::unique_ptr<TrainModel> model = micro_model(together);
      for (int step = 0; step < 2; ++step) {  // the second finds nothing of the first
        model->zero_gradients();
        compute(*model, 0, ranks * accumulation, scale);
        const StepStatistics statistics = model->statistics();
        EXPECT_EQ(tensors(*model, TensorRole::gradient), expected) << ranks << " ranks of " << accumulation;
        EXPECT_EQ(statistics.loss_sum, loss);
        EXPECT_EQ(statistics.label_count, together.batch_tokens);
        double squares = 0;
        for (const float value : expected) squares += static_cast<double>(value) * value;
        EXPECT_NEAR(statistics.gradient_norm, std::sqrt(squares), 1e-12 * std::sqrt(squares));
      }
    }
  }
}

// The update reads the sum, not the gradients of the last rank.
TEST_F(VirtualRanks, TheUpdateIsThatOfTheSum) {
  const std::unique_ptr<TrainModel> model = micro_model(settings(3, 1));
  const std::vector<float> before = tensors(*model, TensorRole::parameter);
  model->zero_gradients();
  compute(*model, 0, 3, 1.0f / 48);
  const std::vector<float> gradient = tensors(*model, TensorRole::gradient);
  AdamWStep step;
  step.learning_rate = 0.5f;
  step.beta1 = 0;
  step.beta2 = 0;
  model->update(step);
  EXPECT_EQ(tensors(*model, TensorRole::state1), gradient);
}

// One rank is a run without the option: the sum of one, and no buffer for more.
TEST_F(VirtualRanks, OneRankIsARunWithoutThem) {
  TrainSettings one = settings(1, 3);
  const std::uint64_t parameters = parameter_plan(TensorTable(micro_config())).bytes();
  const auto bytes = [](const TrainSettings& s) {
    return total_bytes(cpu::plan_training(micro_config(), s.model_options()));
  };
  EXPECT_EQ(bytes(settings(3, 1)), bytes(one) + parameters);
  TrainOptions plain;  // as for who does not know the option
  plain.micro_batch = one.micro_batch;
  plain.seq_len = one.seq_len;
  plain.dropout = static_cast<float>(one.dropout);
  plain.seed = static_cast<std::uint64_t>(one.seed);
  const std::unique_ptr<TrainModel> without = cpu::make_training_model(micro_config(), plain);
  initialize_parameters(*without, plain.seed);
  const std::unique_ptr<TrainModel> with = micro_model(one);
  for (TrainModel* model : {without.get(), with.get()}) {
    model->zero_gradients();
    compute(*model, 0, 3, 1.0f / 48);
  }
  EXPECT_EQ(tensors(*with, TensorRole::gradient), tensors(*without, TensorRole::gradient));
  EXPECT_EQ(with->statistics().loss_sum, without->statistics().loss_sum);
}

// Parameters that are written, as a resume does it, are those of the next pass, whatever was computed with others before.
TEST_F(VirtualRanks, WrittenParametersReplaceThoseInUse) {
  const TrainSettings all = settings(2, 1);
  const std::vector<std::uint16_t> text = patterned_tokens(17, 3);
  const std::vector<std::int32_t> tokens(text.begin(), text.end() - 1), labels(text.begin() + 1, text.end());
  const auto losses_of = [&](TrainModel& model) {
    std::vector<double> losses;
    for (const std::uint64_t seed : {1, 2, 1}) {
      initialize_parameters(model, seed);
      std::int64_t count = 0;
      losses.push_back(model.evaluate({tokens, labels}, &count));
    }
    return losses;
  };
  const std::vector<double> expected = losses_of(*cpu::make_training_model(micro_config(), all.model_options()));
  EXPECT_NE(expected[0], expected[1]);
  EXPECT_EQ(expected[0], expected[2]);
  run_thread_ranks(2, 60, [&](Communicator& ranks) {
    omp_set_num_threads(1);
    for (const Shard shard : {Shard::none, Shard::optimizer, Shard::parameters}) {
      EXPECT_EQ(losses_of(*cpu::make_training_model(micro_config(), all.model_options(), ranks, shard)), expected);
    }
  });
}

// Both norms of a parallel layer belong to its section, which is there before the layer below adds to the stream; and the norm
// behind an MLP to that of its own layer.
TEST_F(VirtualRanks, OtherBlocksHaveTheSameBitsInAnyNumberOfProcesses) {
  ModelConfig neox = micro_neox(), gemma = micro_gemma();
  neox.num_layers = gemma.num_layers = 3;
  gemma.windows = {3, 0, 3};
  for (const auto& [config, optimizer, recompute] : {std::tuple{neox, "adamw", "none"},
                                                     {neox, "muon", "none"},
                                                     {gemma, "adamw", "none"},
                                                     {gemma, "muon", "block"}}) {
    TrainSettings all = settings(2, 1);
    all.optimizer = optimizer;
    all.recompute = recompute;
    const auto trained = [&](TrainModel& model, std::int64_t first, std::int64_t stride) {
      initialize_parameters(model, 1);
      for (std::int64_t t = 1; t <= 3; ++t) {
        model.zero_gradients();
        for (std::int64_t rank = first; rank < 2; rank += stride) compute(model, 2 * t + rank, 2 * t + rank + 1, 0.01f);
        model.statistics();
        model.update(all.optimizer_step(t, 3, 0.5f));
      }
      return tensors(model, TensorRole::parameter);
    };
    const Floats expected = trained(*cpu::make_training_model(config, all.model_options()), 0, 1);
    run_thread_ranks(2, 60, [&](Communicator& ranks) {
      omp_set_num_threads(1);
      for (const Shard shard : {Shard::none, Shard::optimizer, Shard::parameters}) {
        const auto model = cpu::make_training_model(config, all.model_options(), ranks, shard);
        EXPECT_EQ(trained(*model, ranks.rank(), 2), expected)
            << config.family << ", " << optimizer << ", " << static_cast<int>(shard);
      }
    });
  }
}

// Asked again, statistics and gradients are the same: ranks exchange them once.
TEST_F(VirtualRanks, StatisticsCanBeAskedForTwice) {
  for (const Shard shard : {Shard::none, Shard::optimizer, Shard::parameters}) {
    for (const int rounds : {1, 2}) {
      const TrainSettings all = settings(2 * rounds, 1);
      run_thread_ranks(2, 60, [&](Communicator& ranks) {
        omp_set_num_threads(1);
        const std::unique_ptr<TrainModel> model =
            cpu::make_training_model(micro_config(), all.model_options(), ranks, shard);
        initialize_parameters(*model, 1);
        model->zero_gradients();
        for (std::int64_t rank = ranks.rank(); rank < 2 * rounds; rank += 2) compute(*model, rank, rank + 1, 0.01f);
        const StepStatistics first = model->statistics();
        const Floats gradients = tensors(*model, TensorRole::gradient);
        const StepStatistics again = model->statistics();
        EXPECT_EQ(again.loss_sum, first.loss_sum);
        EXPECT_EQ(again.label_count, first.label_count);
        EXPECT_EQ(again.gradient_norm, first.gradient_norm);
        EXPECT_EQ(tensors(*model, TensorRole::gradient), gradients);
      });
    }
  }
}

TEST_F(VirtualRanks, MoreMicroBatchesThanTheirStepHasAreRefused) {
  const std::unique_ptr<TrainModel> model = micro_model(settings(2, 1));
  model->zero_gradients();
  compute(*model, 0, 2, 1);
  expect_contains(error_of(Exit::internal, [&] { compute(*model, 2, 3, 1); }), "more micro-batches");
}

}  // namespace
}  // namespace weft
