// Ranks on GPUs: their sums, what moves between them, and models that train as ranks. N ranks give the bits of one model with
// N virtual ranks; threads on one GPU stand for ranks, and with two GPUs NCCL moves the values.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "llmc/comm/thread_ranks.h"
#include "llmc/cpu/rank_sum.h"
#include "llmc/cuda/comm/device_ranks.h"
#include "llmc/cuda/op/optim/rank_sum.h"
#include "llmc/cuda/runtime/device.h"
#include "llmc/cuda/runtime/fork.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/cuda/training/training.h"
#include "llmc/model/compare.h"
#include "test/cpp/whole_model_checks.h"
#include "test/gpu/operator_tools.h"

namespace weft {
namespace {

using test::DeviceBuffer;
using test::Floats;

// ---- the operator ----

TEST(CudaRankSum, IsTheCpusForAnySizeAndAlignment) {
  for (const std::int64_t count : {0, 1, 3, 4, 1023, 4096, 4099, 70'001}) {
    for (const std::size_t ranks : {1u, 2u, 3u, 8u, 16u, 17u, 448u}) {
      if (ranks > 100 && count > 10'000) continue;
      for (const std::int64_t offset : {0, 1, 4}) {  // elements behind an aligned address
        SCOPED_TRACE(format("%lld elements at %lld of %zu ranks", static_cast<long long>(count),
                            static_cast<long long>(offset), ranks));
        std::vector<Floats> pieces;
        std::vector<DeviceBuffer<float>> on_device;
        std::vector<const float*> host, device;
        for (std::size_t r = 0; r < ranks; ++r) {
          pieces.push_back(test::random_floats(count + offset, static_cast<unsigned>(r)));
        }
        for (const Floats& piece : pieces) {
          on_device.emplace_back(piece);
          host.push_back(piece.data() + offset);
          device.push_back(on_device.back().data() + offset);
        }
        Floats expected(static_cast<std::size_t>(count));
        cpu::add_ranks(expected.data(), host, count);
        const DeviceBuffer<float> sum(static_cast<std::size_t>(count + offset + 1));
        cuda::add_ranks(sum.data() + offset, device, count, nullptr);
        const Floats got = sum.download();
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), got.begin() + offset));
        EXPECT_TRUE(std::isnan(got.back())) << "written behind the end";
        cuda::add_ranks(on_device.back().data() + offset, device, count, nullptr);  // into the last piece
        const Floats in_place = on_device.back().download();
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), in_place.begin() + offset));
      }
    }
  }
}

TEST(CudaRankSum, RefusesMoreRanksThanItHasRoomFor) {
  const std::vector<const float*> pieces(449, nullptr);
  EXPECT_THROW(cuda::add_ranks(nullptr, pieces, 4, nullptr), Error);
}

// ---- what moves between ranks ----

// Rank r has r + 0.001 i at element i.
void check_data_plane(Communicator& ranks, cuda::DeviceRanks& plane, std::int64_t count) {
  const int size = ranks.size(), me = ranks.rank();
  const auto value = [](int rank, std::int64_t i) { return static_cast<float>(rank) + 0.001f * static_cast<float>(i); };
  Floats mine(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) mine[static_cast<std::size_t>(i)] = value(me, i);
  std::vector<Range> parts = shares(count, size);
  if (size == 3) parts[1].end = parts[1].begin;  // a rank without a part
  const Range own = parts[static_cast<std::size_t>(me)];
  const cuda::Stream stream;
  {
    const DeviceBuffer<float> values(mine);
    const DeviceBuffer<float> received(static_cast<std::size_t>((size - 1) * own.size()));
    plane.share(reinterpret_cast<std::byte*>(values.data()), values.bytes());
    plane.exchange(values.data(), parts, received.data(), stream);
    plane.wait(stream, nullptr, "test");
    const Floats got = received.download();
    for (int rank = 0, row = 0; rank < size; ++rank) {
      if (rank == me) continue;
      for (std::int64_t i = 0; i < own.size(); ++i) {
        ASSERT_EQ(got[static_cast<std::size_t>(row * own.size() + i)], value(rank, own.begin + i))
            << me << " of " << rank;
      }
      ++row;
    }
    EXPECT_EQ(values.download(), mine);
  }
  const DeviceBuffer<float> values(mine);
  std::vector<Range> bytes = parts;
  for (Range& part : bytes) part = {4 * part.begin, 4 * part.end};
  plane.share(reinterpret_cast<std::byte*>(values.data()), values.bytes());
  plane.gather(reinterpret_cast<std::byte*>(values.data()), bytes, stream);
  plane.wait(stream, nullptr, "test");
  const Floats got = values.download();
  for (int rank = 0; rank < size; ++rank) {
    for (std::int64_t i = parts[static_cast<std::size_t>(rank)].begin; i < parts[static_cast<std::size_t>(rank)].end;
         ++i) {
      ASSERT_EQ(got[static_cast<std::size_t>(i)], value(rank, i));
    }
  }
}

TEST(CudaRanks, ValuesPassThroughTheHost) {
  for (const int size : {2, 3}) {
    for (const std::int64_t count : {5, 1000, 5'000'000}) {  // the last in several pieces
      run_thread_ranks(size, 60, [&](Communicator& ranks) {
        const auto plane = cuda::make_staged_ranks(ranks);
        check_data_plane(ranks, *plane, count);
      });
    }
  }
}

using MakePlane = std::function<std::unique_ptr<cuda::DeviceRanks>(Communicator&)>;

// Ranks that are threads with a GPU each. They allocate and free, which waits for all GPUs of a process, and a call by copy
// engines waits for the other rank: only ranks that are processes may do both at a time. So models go by NCCL here;
// test/python/test_ranks_gpu.py has them by copy engines.
class CudaTwoGpus : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::visible_gpus() < 2) GTEST_SKIP() << "needs two GPUs";
    if (cuda::nccl_version().empty()) GTEST_SKIP() << "needs NCCL";
  }
  void TearDown() override { cuda::check(cudaSetDevice(0), "test"); }
};

TEST_F(CudaTwoGpus, ValuesArriveAsTheyAre) {
  for (const auto make_plane : {cuda::make_peer_ranks, cuda::make_nccl_ranks}) {
    run_thread_ranks(2, 60, [&](Communicator& ranks) {
      cuda::check(cudaSetDevice(ranks.rank()), "test");
      const auto plane = make_plane(ranks, 60);
      for (const std::int64_t count : {2, 1000, 20'000'001}) check_data_plane(ranks, *plane, count);
    });
  }
}

TEST_F(CudaTwoGpus, CopyEnginesComeFirst) {
  run_thread_ranks(2, 60, [&](Communicator& ranks) {
    cuda::check(cudaSetDevice(ranks.rank()), "test");
    EXPECT_EQ(cuda::make_device_ranks(ranks, 60)->name(), "copy engines");
  });
}

// A rank that does not come: the others end within the time limit, and their memory can be freed. Its own memory stays, as
// that of a process that hangs.
TEST_F(CudaTwoGpus, ARankThatDoesNotComeEndsTheOthers) {
  std::promise<void> first_has_ended;
  try {
    run_thread_ranks(2, 60, [&](Communicator& ranks) {
      cuda::check(cudaSetDevice(ranks.rank()), "test");
      const auto plane = cuda::make_nccl_ranks(ranks, 2);
      const DeviceBuffer<float> values(1'000'000);
      plane->share(reinterpret_cast<std::byte*>(values.data()), values.bytes());
      const cuda::Stream stream;
      const std::vector<Range> parts = {{0, 2'000'000}, {2'000'000, 4'000'000}};
      if (ranks.rank() == 1) return first_has_ended.get_future().wait();
      plane->gather(reinterpret_cast<std::byte*>(values.data()), parts, stream);
      try {
        plane->wait(stream, nullptr, "waiting in a test");
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("did not come within 2 s"), std::string::npos) << error.what();
        cudaStreamSynchronize(stream);  // the work that was given up ends
        first_has_ended.set_value();
        throw;
      }
      first_has_ended.set_value();
    });
    ADD_FAILURE() << "nobody came, nobody minded";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::environment) << error.what();
  }
}

// ---- models ----

struct Case {
  Precision precision = Precision::bf16, moments = Precision::fp32;
  bool tied = false;
  float dropout = 0;
  std::int64_t accumulation = 1;
  Recompute recompute = Recompute::none;
  bool graph = true;
  std::int64_t layers = 3;
  const Optimizer* optimizer = &adamw_optimizer();
  bool qwen = false;   // norms of heads, and every bias
  bool gemma = false;  // norms behind branches
};

std::string name_of(const Case& c) {
  const char* const precision = c.precision == Precision::fp32   ? "fp32"
                                : c.precision == Precision::bf16 ? "bf16"
                                                                 : "fp8";
  return format("%s, %s%s%s%s%s, dropout %g, %lld micro-batches", c.optimizer->name(), precision,
                c.moments == Precision::bf16 ? " with bf16 moments" : "", c.tied ? ", tied" : "",
                c.qwen ? ", norms of heads, biases" : "", c.gemma ? ", norms behind branches" : "", c.dropout,
                static_cast<long long>(c.accumulation));
}

ModelConfig config_of(const Case& c) {
  ModelConfig config = test::small_llama();
  if (c.gemma) config = test::small_gemma();
  config.tied_embeddings = c.tied;
  config.num_layers = c.layers;
  if (c.qwen) {
    set_family(config, "qwen3");
    config.qkv_bias = config.output_bias = config.mlp_bias = true;
  }
  if (c.precision != Precision::fp8) return config;
  config.hidden_size = 144;
  config.ffn_size = 208;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = config.rope.rotary_dim = 64;
  return config;
}

// Of two sequences; fp8 takes a multiple of 16 rows.
std::int64_t seq_len_of(const Case& c) {
  return c.precision == Precision::fp8 ? 40 : 37;
}

test::TokenBatch tokens_of(const Case& c, unsigned seed) {
  return test::random_tokens(config_of(c), 2 * seq_len_of(c), seed);
}

TrainOptions options_of(const Case& c, std::int64_t ranks) {
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = seq_len_of(c);
  options.precision = c.precision;
  options.moments = c.moments;
  options.optimizer = c.optimizer;
  options.dropout = c.dropout;
  options.recompute = c.recompute;
  options.graph = c.graph;
  options.seed = 3;
  options.virtual_ranks = ranks;
  options.rank_micro_batches = c.accumulation;
  return options;
}

// Forward and backward of some micro-batches of a step of `all`.
void compute(TrainModel& model, const Case& c, std::int64_t step, const Range& micro_batches, std::int64_t all) {
  for (std::int64_t i = micro_batches.begin; i < micro_batches.end; ++i) {
    const auto number = static_cast<std::uint64_t>(step * all + i);
    const test::TokenBatch text = tokens_of(c, static_cast<unsigned>(number));
    model.forward(text.batch(), number, 0.01f);
    model.backward();
  }
}

Floats all_values(TrainModel& model, TensorRole role) {
  Floats all;
  for (const TensorSpec& spec : model.table().specs()) {
    if (!has_tensor(model.optimizer(), role, spec)) continue;
    const Floats values = test::read_values(model, role, spec);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

// Statistics of each step, then the last gradients, the state and, in fp8, the history of its scales.
struct Outcome {
  std::vector<double> statistics;
  Floats values;

  bool operator==(const Outcome& other) const {
    return statistics == other.statistics && values.size() == other.values.size() &&
           std::memcmp(values.data(), other.values.data(), values.size() * sizeof(float)) == 0;
  }
};

constexpr std::int64_t kSteps = 4;  // eager (in fp8 twice), captured, replayed

// `turns`: the micro-batches of each rank of the step that this model computes.
Outcome train(TrainModel& model, const Case& c, const std::vector<Range>& turns, std::int64_t all) {
  Outcome outcome;
  for (std::int64_t step = 1; step <= kSteps; ++step) {
    model.zero_gradients();
    for (const Range& micro_batches : turns) compute(model, c, step, micro_batches, all);
    const StepStatistics statistics = model.statistics();
    for (const double value :
         {statistics.loss_sum, static_cast<double>(statistics.label_count), statistics.gradient_norm}) {
      outcome.statistics.push_back(value);
    }
    if (statistics.fp8) {
      for (const Fp8Statistics::Kind& kind : statistics.fp8->kinds) {
        for (const std::uint64_t count : {kind.values, kind.saturated, kind.flushed}) {
          outcome.statistics.push_back(static_cast<double>(count));
        }
      }
    }
    AdamWStep update;
    update.step = step;
    update.learning_rate = 1e-3f;
    update.weight_decay = 0.1f;
    update.gradient_scale = clip_factor(statistics.gradient_norm, 1.0);
    model.update(update);
  }
  for (const TensorRole role : {TensorRole::parameter, TensorRole::gradient, TensorRole::state1, TensorRole::state2}) {
    const Floats values = all_values(model, role);
    outcome.values.insert(outcome.values.end(), values.begin(), values.end());
  }
  const Floats scales = model.fp8_state();
  outcome.values.insert(outcome.values.end(), scales.begin(), scales.end());
  return outcome;
}

Outcome train_virtual(const Case& c, std::int64_t ranks) {
  const auto model = cuda::make_training_model(config_of(c), options_of(c, ranks));
  test::randomize_parameters(*model);
  return train(*model, c, {{0, ranks * c.accumulation}}, ranks * c.accumulation);
}

// What each of `size` thread ranks gets that compute `rounds` ranks of a step each.
std::vector<Outcome> train_ranks(const Case& c, int size, Shard shard, std::int64_t bucket_elements,
                                 const MakePlane& make_plane, std::int64_t rounds) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(size));
  run_thread_ranks(size, 120, [&](Communicator& ranks) {
    const auto plane = make_plane(ranks);
    const auto model =
        cuda::make_training_model(config_of(c), options_of(c, rounds * size), ranks, *plane, shard, bucket_elements);
    test::randomize_parameters(*model);
    ranks.barrier();  // that frees memory, which waits for all GPUs of the process
    std::vector<Range> turns;
    for (std::int64_t rank = ranks.rank(); rank < rounds * size; rank += size) {
      turns.push_back({rank * c.accumulation, (rank + 1) * c.accumulation});
    }
    outcomes[static_cast<std::size_t>(ranks.rank())] = train(*model, c, turns, rounds * size * c.accumulation);
  });
  return outcomes;
}

const char* shard_name(Shard shard) {
  return shard == Shard::none        ? "none"
         : shard == Shard::optimizer ? "optimizer"
         : shard == Shard::gradients ? "gradients"
                                     : "parameters";
}

void expect_ranks_give(const Outcome& expected, const Case& c, int size, Shard shard, std::int64_t bucket_elements,
                       const MakePlane& make_plane = cuda::make_staged_ranks, std::int64_t rounds = 1) {
  const std::vector<Outcome> outcomes = train_ranks(c, size, shard, bucket_elements, make_plane, rounds);
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    EXPECT_EQ(outcomes[r].statistics, expected.statistics) << "rank " << r;
    EXPECT_TRUE(outcomes[r] == expected) << "rank " << r << " of " << size << ", " << shard_name(shard)
                                         << ", buckets of " << bucket_elements;
  }
}

const Case kWithDropout = {Precision::bf16, Precision::bf16, false, 0.1f, 2};
const Case kInFp8 = {Precision::fp8, Precision::fp32, false, 0, 1};

Case with_muon(Case c) {
  c.optimizer = &muon_optimizer();
  return c;
}

std::vector<Case> cases() {
  std::vector<Case> all = {
      {Precision::fp32, Precision::fp32, false, 0, 1},
      {Precision::fp32, Precision::fp32, true, 0.1f, 3},
      {Precision::bf16, Precision::fp32, false, 0, 1},
      {Precision::bf16, Precision::fp32, true, 0, 3, Recompute::block},
      kWithDropout,
      with_muon({Precision::fp32, Precision::fp32, true, 0.1f, 3}),
      with_muon({Precision::bf16, Precision::bf16, false, 0, 1}),
      {.recompute = Recompute::block, .qwen = true},
      {.tied = true, .recompute = Recompute::block, .gemma = true},
      with_muon({.precision = Precision::fp32, .dropout = 0.1f, .accumulation = 3, .gemma = true}),
  };
  if (test::has_fp8()) {
    all.push_back(kInFp8);
    all.push_back(with_muon(kInFp8));
    all.push_back({Precision::fp8, Precision::bf16, true, 0.1f, 1, Recompute::block});
    all.push_back({Precision::fp8, Precision::bf16, false, 0.1f, 2, Recompute::norm});
    all.push_back({.precision = Precision::fp8, .qwen = true});
  }
  return all;
}
// Gradients, and parameters with them, can be divided where a rank has one micro-batch.
std::vector<Shard> shards_of(const Case& c) {
  if (c.accumulation > 1) return {Shard::none, Shard::optimizer};
  return {Shard::none, Shard::optimizer, Shard::gradients, Shard::parameters};
}

// Every section in pieces; sections of their own; all in one.
constexpr std::int64_t kBuckets[] = {8'192, 50'000, 16 << 20};

// Against models that compute one rank each and know of no other.
TEST(CudaVirtualRanks, TheGradientIsTheSumOfEachRanksOwn) {
  for (const Case& c : cases()) {
    for (const std::int64_t ranks : {2, 3}) {
      SCOPED_TRACE(name_of(c));
      const std::int64_t all = ranks * c.accumulation;
      const auto model = cuda::make_training_model(config_of(c), options_of(c, ranks));
      test::randomize_parameters(*model);
      for (std::int64_t step = 1; step <= 3; ++step) {
        Floats expected;
        double loss = 0;
        std::int64_t labels = 0;
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          Case one = c;
          const auto alone = cuda::make_training_model(config_of(one), options_of(one, 1));
          test::randomize_parameters(*alone);
          alone->zero_gradients();
          compute(*alone, c, step, {rank * c.accumulation, (rank + 1) * c.accumulation}, all);
          const StepStatistics statistics = alone->statistics();
          loss += statistics.loss_sum;
          labels += statistics.label_count;
          const Floats own = all_values(*alone, TensorRole::gradient);
          for (std::size_t i = 0; i < own.size() && rank > 0; ++i) expected[i] += own[i];
          if (rank == 0) expected = own;
        }
        model->zero_gradients();
        compute(*model, c, step, {0, all}, all);
        const StepStatistics statistics = model->statistics();
        EXPECT_EQ(statistics.loss_sum, loss);
        EXPECT_EQ(statistics.label_count, labels);
        EXPECT_EQ(all_values(*model, TensorRole::gradient), expected) << "step " << step;
        double squares = 0;
        for (const float value : expected) squares += static_cast<double>(value) * value;
        EXPECT_NEAR(statistics.gradient_norm, std::sqrt(squares), 1e-6 * std::sqrt(squares));
      }
    }
  }
}

TEST(CudaVirtualRanks, MoreMicroBatchesThanTheirStepHasAreRefused) {
  const Case c;
  const auto model = cuda::make_training_model(config_of(c), options_of(c, 2));
  model->zero_gradients();
  compute(*model, c, 1, {0, 2}, 2);
  EXPECT_THROW(compute(*model, c, 1, {2, 3}, 2), Error);
}

// A pass without the one before it, a step that is read too early, and one that goes on after it has been read.
TEST(CudaRanks, CallsOutOfOrderAreRefused) {
  const Case c;
  const auto expect_refused = [](const char* words, const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "no error: " << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::internal);
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  const auto alone = cuda::make_training_model(config_of(c), options_of(c, 2));
  alone->zero_gradients();
  expect_refused("without a forward()", [&] { alone->backward(); });
  compute(*alone, c, 1, {0, 1}, 2);
  expect_refused("without a forward()", [&] { alone->backward(); });
  run_thread_ranks(2, 60, [&](Communicator& ranks) {
    const auto plane = cuda::make_staged_ranks(ranks);
    const auto model = cuda::make_training_model(config_of(c), options_of(c, 4), ranks, *plane, Shard::optimizer);
    test::randomize_parameters(*model);
    const std::int64_t mine = ranks.rank();
    model->zero_gradients();
    compute(*model, c, 1, {mine, mine + 1}, 4);
    expect_refused("before its last round", [&] { model->statistics(); });
    compute(*model, c, 1, {mine + 2, mine + 3}, 4);
    EXPECT_GT(model->statistics().gradient_norm, 0);
    expect_refused("more micro-batches", [&] { compute(*model, c, 1, {mine, mine + 1}, 4); });
  });
}

// The plan is what is allocated: printed numbers are promises. The first rank has the largest parts.
TEST(CudaVirtualRanks, TheirMemoryIsPlanned) {
  const Case c;
  const ModelConfig config = config_of(c);
  const auto bytes = [](const std::vector<MemoryLine>& lines) { return total_bytes(lines); };
  const auto one = options_of(c, 1), two = options_of(c, 2);
  const auto model = cuda::make_training_model(config, two);
  EXPECT_EQ(bytes(model->memory()), bytes(cuda::plan_training(config, two)));
  EXPECT_EQ(bytes(cuda::plan_training(config, two)),
            bytes(cuda::plan_training(config, one)) + 4u * static_cast<std::uint64_t>(model->table().arena_elements()));
  run_thread_ranks(2, 60, [&](Communicator& ranks) {
    const auto plane = cuda::make_staged_ranks(ranks);
    for (const Shard shard : {Shard::none, Shard::optimizer, Shard::gradients, Shard::parameters}) {
      const auto rank = cuda::make_training_model(config, two, ranks, *plane, shard);
      EXPECT_EQ(bytes(rank->memory()), bytes(cuda::plan_training(config, two, ranks.rank(), 2, shard)));
    }
  });
}

TEST(CudaRanks, GiveTheBitsOfVirtualRanks) {
  for (const Case& c : cases()) {
    for (const int size : {2, 3}) {
      SCOPED_TRACE(name_of(c));
      const Outcome expected = train_virtual(c, size);
      for (const Shard shard : shards_of(c)) {
        for (const std::int64_t elements : kBuckets) expect_ranks_give(expected, c, size, shard, elements);
      }
    }
  }
}

// N ranks compute what more would, in rounds.
TEST(CudaRanks, FewerRanksGiveTheBitsOfMore) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(name_of(c));
    for (const auto& [size, rounds] : {std::pair{2, 2}, {3, 2}, {2, 3}}) {
      const Outcome expected = train_virtual(c, size * rounds);
      for (const Shard shard : shards_of(c)) {
        expect_ranks_give(expected, c, size, shard, 50'000, cuda::make_staged_ranks, rounds);
      }
    }
  }
}

// Every wait between the stream of the step and that of the exchange, made to matter.
TEST(CudaRanks, DelaysChangeNothing) {
  for (const bool graph : {false, true}) {
    for (Case c : {kWithDropout, kInFp8, with_muon({})}) {
      if (c.precision == Precision::fp8 && !test::has_fp8()) continue;
      c.graph = graph;
      c.accumulation = 1;
      const Outcome expected = train_virtual(c, 2);
      for (const cuda::DelayPoint point : {cuda::DelayPoint::step, cuda::DelayPoint::forked}) {
        for (const Shard shard : shards_of(c)) {
          cuda::set_stream_delay(point, 5'000);
          expect_ranks_give(expected, c, 2, shard, 50'000);
          cuda::set_stream_delay(point, 0);
        }
      }
    }
  }
}

// More layers than there are places for divided gradients and parameters: each place is used again while it is exchanged.
TEST(CudaRanks, LayersTakeTurnsInThePlacesOfDividedGradients) {
  for (const bool tied : {false, true}) {
    Case c;
    c.tied = tied;
    c.layers = 8;
    const Outcome expected = train_virtual(c, 2);
    for (const cuda::DelayPoint point : {cuda::DelayPoint::step, cuda::DelayPoint::forked}) {
      cuda::set_stream_delay(point, 3'000);
      for (const Shard shard : {Shard::gradients, Shard::parameters}) expect_ranks_give(expected, c, 2, shard, 50'000);
      cuda::set_stream_delay(point, 0);
    }
  }
}

// A model of one layer, and of none to come after it: the places are fewer.
TEST(CudaRanks, DividedParametersOfOneLayer) {
  for (const bool tied : {false, true}) {
    Case c;
    c.tied = tied;
    c.layers = 1;
    expect_ranks_give(train_virtual(c, 2), c, 2, Shard::parameters, 50'000);
  }
}

// Losses of two texts before each step of two ranks, and the step's norm. The second step is skipped.
std::vector<double> evaluate_between_steps(TrainModel& model, const Case& c, const Range& micro_batches) {
  std::vector<double> losses;
  for (std::int64_t step = 1; step <= 5; ++step) {
    for (unsigned text = 0; text < 2; ++text) {
      std::int64_t labels = 0;
      losses.push_back(model.evaluate(tokens_of(c, 100 + text).batch(), &labels));
      losses.push_back(static_cast<double>(labels));
    }
    model.zero_gradients();
    compute(model, c, step, micro_batches, 2);
    losses.push_back(model.statistics().gradient_norm);
    AdamWStep update;
    update.step = step;
    update.learning_rate = 1e-2f;
    if (step != 2) model.update(update);
  }
  return losses;
}

// With the parameters as they are then; where each rank has a part of them, all evaluate at the same time.
TEST(CudaRanks, EvaluateBetweenSteps) {
  for (const Precision precision : {Precision::bf16, Precision::fp8}) {
    if (precision == Precision::fp8 && !test::has_fp8()) continue;
    for (const bool tied : {false, true}) {
      Case c;
      c.precision = precision;
      c.tied = tied;
      const auto whole = cuda::make_training_model(config_of(c), options_of(c, 2));
      test::randomize_parameters(*whole);
      EXPECT_FALSE(whole->evaluates_together());
      const std::vector<double> expected = evaluate_between_steps(*whole, c, {0, 2});
      for (const Shard shard : {Shard::none, Shard::optimizer, Shard::parameters}) {
        run_thread_ranks(2, 60, [&](Communicator& ranks) {
          const auto plane = cuda::make_staged_ranks(ranks);
          const auto model = cuda::make_training_model(config_of(c), options_of(c, 2), ranks, *plane, shard, 50'000);
          test::randomize_parameters(*model);
          EXPECT_EQ(model->evaluates_together(), shard == Shard::parameters);
          EXPECT_EQ(evaluate_between_steps(*model, c, {ranks.rank(), ranks.rank() + 1}), expected) << shard_name(shard);
          if (shard == Shard::parameters) {
            EXPECT_THROW(model->decoder(8), Error);
          }
        });
      }
    }
  }
}

TEST(CudaRanks, DividedGradientsAreZeroWhereNothingWasComputed) {
  const Case c;
  run_thread_ranks(2, 60, [&](Communicator& ranks) {
    const auto plane = cuda::make_staged_ranks(ranks);
    const auto model = cuda::make_training_model(config_of(c), options_of(c, 2), ranks, *plane, Shard::gradients);
    test::randomize_parameters(*model);
    model->zero_gradients();
    compute(*model, c, 1, {ranks.rank(), ranks.rank() + 1}, 2);
    EXPECT_GT(model->statistics().gradient_norm, 0);
    model->zero_gradients();
    EXPECT_EQ(model->statistics().gradient_norm, 0);
    for (const float value : all_values(*model, TensorRole::gradient)) ASSERT_EQ(value, 0.0f);
  });
}

TEST(CudaRanks, SeveralMicroBatchesOfDividedGradientsAreRefused) {
  Case c;
  c.accumulation = 2;
  for (const Shard shard : {Shard::gradients, Shard::parameters}) {
    run_thread_ranks(2, 60, [&](Communicator& ranks) {
      const auto plane = cuda::make_staged_ranks(ranks);
      try {
        cuda::make_training_model(config_of(c), options_of(c, 2), ranks, *plane, shard);
        ADD_FAILURE() << "two micro-batches were accepted";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Exit::internal);
        EXPECT_NE(std::string(error.what()).find("with 2 micro-batches a rank"), std::string::npos) << error.what();
      }
    });
  }
}

// A state that ranks give, another number of ranks takes: what a checkpoint does.
TEST(CudaRanks, StateMovesBetweenNumbersOfRanks) {
  const Case in_bf16 = {Precision::bf16, Precision::bf16};
  for (const Case& c : {Case{}, in_bf16, with_muon({}), with_muon(in_bf16)}) {
    SCOPED_TRACE(name_of(c));
    const auto source = cuda::make_training_model(config_of(c), options_of(c, 1));
    test::randomize_parameters(*source);
    source->zero_gradients();
    compute(*source, c, 1, {0, 1}, 1);
    AdamWStep update;
    update.learning_rate = 1e-2f;
    source->statistics();
    source->update(update);
    for (const auto& [size, shard] : {std::pair{2, Shard::optimizer}, {3, Shard::gradients}, {3, Shard::parameters}}) {
      run_thread_ranks(size, 60, [&, size = size, shard = shard](Communicator& ranks) {
        const auto plane = cuda::make_staged_ranks(ranks);
        const auto model = cuda::make_training_model(config_of(c), options_of(c, size), ranks, *plane, shard, 8'192);
        const std::vector<StateTensor> state = state_tensors(model->optimizer(), model->table());
        for (const auto& [role, s] : state) {
          const TensorSpec& spec = model->table().specs()[s];
          Floats values;
          if (ranks.rank() == 0) values = test::read_values(*source, role, spec);
          values.resize(static_cast<std::size_t>(spec.elements));
          ranks.broadcast_bytes(reinterpret_cast<std::byte*>(values.data()), 4 * spec.elements, 0);
          model->write_tensor(role, spec, values.data());
          EXPECT_EQ(test::read_values(*model, role, spec), values) << spec.name;
        }
        const auto copy = model->make_state_copy();  // on all ranks, as take() reads from all
        copy->take();
        for (const auto& [role, s] : state) {
          const TensorSpec& spec = model->table().specs()[s];
          const Floats values = test::read_values(*model, role, spec);
          Floats buffer(values.size());
          const float* copied = copy->read(role, spec, 0, buffer.size(), buffer.data());
          EXPECT_TRUE(std::equal(values.begin(), values.end(), copied)) << spec.name;
        }
        const auto own = model->make_own_copy();
        own->take();
        for (const auto& [role, s] : state) {
          const TensorSpec& spec = model->table().specs()[s];
          const Floats values = test::read_values(*model, role, spec);
          for (const Range& range : model->own_elements()) {
            const Range part = common(range, {spec.offset, spec.offset + spec.elements});
            if (part.size() == 0) continue;
            const auto first = static_cast<std::size_t>(part.begin - spec.offset);
            Floats buffer(static_cast<std::size_t>(part.size()));
            const float* copied = own->read(role, spec, first, buffer.size(), buffer.data());
            EXPECT_TRUE(std::equal(copied, copied + buffer.size(), values.begin() + part.begin - spec.offset))
                << spec.name;
          }
        }
      });
    }
  }
}

// Masters go to the GPU some at a time: a tensor that takes several pieces, of one model and of two ranks, each of which has the
// low halves of its part alone.
TEST(CudaRanks, LargeTensorsAreWrittenInPieces) {
  constexpr std::int64_t kMasters = 4 << 20;
  ModelConfig config = config_of({});
  config.num_layers = 1;
  config.vocab_size = config.tokenizer_vocab = 240'007;
  const TrainOptions one = options_of({}, 1), two = options_of({}, 2);
  const TensorTable table(config);
  const TensorSpec& spec = table.specs()[0];
  EXPECT_GT(spec.elements / 2, 2 * kMasters);
  const Floats values = test::random_floats(spec.elements, 5);
  const auto check_model = [&](TrainModel& model) {
    model.write_tensor(TensorRole::parameter, spec, values.data());
    EXPECT_TRUE(test::read_values(model, TensorRole::parameter, spec) == values);
  };
  check_model(*cuda::make_training_model(config, one));
  run_thread_ranks(2, 60, [&](Communicator& ranks) {
    const auto plane = cuda::make_staged_ranks(ranks);
    for (const Shard shard : {Shard::optimizer, Shard::parameters})
      check_model(*cuda::make_training_model(config, two, ranks, *plane, shard));
  });
}

TEST_F(CudaTwoGpus, GiveTheBitsOfVirtualRanksOnOne) {
  const auto on_own_gpu = [](Communicator& ranks) {
    cuda::check(cudaSetDevice(ranks.rank()), "test");
    return cuda::make_nccl_ranks(ranks, 60);
  };
  for (const Case& c : cases()) {
    SCOPED_TRACE(name_of(c));
    const Outcome expected = train_virtual(c, 2);
    for (const Shard shard : shards_of(c)) {
      for (const std::int64_t elements : kBuckets) expect_ranks_give(expected, c, 2, shard, elements, on_own_gpu);
    }
    cuda::set_stream_delay(cuda::DelayPoint::forked, 5'000);
    expect_ranks_give(expected, c, 2, Shard::optimizer, 50'000, on_own_gpu);
    cuda::set_stream_delay(cuda::DelayPoint::forked, 0);
  }
}

}  // namespace
}  // namespace weft
