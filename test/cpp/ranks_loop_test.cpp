// Training on several ranks: threads, each with a model, a data loader and a loop of its own. What they compute, decide and
// write is, bit for bit, that of one process with --virtual-ranks.
#include <gtest/gtest.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <thread>
#include <tuple>

#include "llmc/base/file.h"
#include "llmc/base/signals.h"
#include "llmc/comm/thread_ranks.h"
#include "llmc/train/loop.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// An embedding of three blocks of AdamW, so that ranks divide a tensor.
ModelConfig ranks_config() {
  ModelConfig config = micro_config();
  config.vocab_size = config.tokenizer_vocab = 600;
  config.num_layers = 2;
  return config;
}

class RanksLoop : public testing::Test {
 protected:
  void SetUp() override {
    write_shard(temporary_.file("train_0.bin"), patterned_tokens(303));
    write_shard(temporary_.file("train_1.bin"), patterned_tokens(190, 500));
    settings_ = micro_settings();
    settings_.steps = 4;
    settings_.schedule = "cosine";
    settings_.dropout = 0.25;
    settings_.grad_clip = 0.5;
    settings_.val_every = 2;
    settings_.val_batches = 5;
    step_of(2, 1);
    omp_set_num_threads(1);
  }
  void TearDown() override {
    omp_set_num_threads(threads_);
    arm_save_fault({});
  }
  void replace_shard() const {
    fs::remove(temporary_.file("train_0.bin"));
    write_shard(temporary_.file("train_0.bin"), patterned_tokens(303, 7));
  }
  // In packed rows.
  void train_on_conversations() {
    settings_.packed = settings_.masks_documents = true;
    for (int shard = 0; shard < 2; ++shard) {
      const std::vector<std::size_t> lengths = {9, 5, 2, 8, 9, 3, 7, 6, 4, 9, 9, 2, 5};
      write_document_shard(temporary_.file(format("train_%d.bin", shard)), patterned_tokens(78, 100u * shard), lengths,
                           [](std::size_t token) { return token % 7 < 3 || token == 17; });
    }
  }
  // Matrices of several blocks, which ranks must not cut.
  void train_with_muon() {
    settings_.optimizer = "muon";
    config_.hidden_size = 64;
    config_.num_heads = 8;
    config_.ffn_size = 160;
  }
  // Sizes that fp8 takes, and more layers than there are places for divided parameters.
  void train_in_fp8() {
    settings_.precision = "fp8";
    config_.num_layers = 5;
    config_.tied_embeddings = false;
    config_.hidden_size = 32;
    config_.ffn_size = 48;
  }
  void step_of(std::int64_t ranks, std::int64_t accumulation) {
    settings_.virtual_ranks = ranks;
    settings_.batch_tokens = ranks * accumulation * settings_.micro_batch * settings_.seq_len;
  }

  struct Outcome {
    Exit exit = Exit::internal, error_code = Exit::ok;
    std::string error;
    TrainState state;
    std::vector<float> tensors;  // parameters and moments
  };
  // May interfere with one rank.
  using Hook = std::function<void(int rank, HookedModel&, TrainSettings&)>;

  // What one process does, a rank of `several` or, if that is null, all there is.
  // `beside`: for saves that all write; null: the first rank writes.
  void start(const std::string& name, Communicator* several, Communicator* beside, Shard shard, const Hook& hook,
             Outcome& outcome) {
    omp_set_num_threads(1);
    SingleRank alone;
    Communicator& ranks = several != nullptr ? *several : alone;
    const bool first = ranks.rank() == 0;
    TrainSettings settings = settings_;
    const TokenDataset data(temporary_.file("train_*.bin"), settings.seq_len);
    const std::unique_ptr<TrainModel> inner =
        several != nullptr ? cpu::make_training_model(config_, settings.model_options(), *several, shard)
                           : cpu::make_training_model(config_, settings.model_options());
    initialize_parameters(*inner, static_cast<std::uint64_t>(settings.seed));
    HookedModel model(*inner);
    if (hook) hook(ranks.rank(), model, settings);
    std::optional<RunDirectory> directory;
    std::optional<CheckpointKeeper> keeper;
    RunLog silent;
    std::optional<RunLog> log;
    if (first) {
      directory.emplace(temporary_.file(name));
      RunIdentity identity = micro_identity(settings, data);
      identity.model = config_;
      keeper.emplace(*directory, identity, settings.keep);
      log.emplace(directory->file("log.jsonl"));
    }
    CheckpointKeeper* const checkpoints = first ? &*keeper : nullptr;
    const TrainState begin = resume_on_all(ranks, checkpoints, settings.resume_mode(), model).value_or(TrainState{});
    DataLoader loader(data, settings.micro_batch, static_cast<std::uint64_t>(settings.seed), begin.windows,
                      {ranks.rank(), ranks.size(), settings.rank_accumulation()});
    const bool joint = beside != nullptr && shard != Shard::none;
    TrainLoop loop({settings, model, loader, checkpoints, first ? *log : silent, &data, nullptr,
                    joint   ? model.make_own_copy()
                    : first ? model.make_state_copy()
                            : nullptr,
                    several,
                    joint ? std::make_unique<JointSave>(*beside, checkpoints, model.optimizer(), model.table(),
                                                        model.own_elements())
                          : nullptr},
                   begin);
    try {
      outcome.exit = loop.run();
      outcome.tensors = whole_state(*inner);
    } catch (const Error&) {
      outcome.state = loop.state();
      throw;
    }
    outcome.state = loop.state();
  }

  Outcome run_alone(const std::string& name, const Hook& hook = {}) {
    Outcome outcome;
    testing::internal::CaptureStdout();
    try {
      start(name, nullptr, nullptr, Shard::none, hook, outcome);
    } catch (const Error& error) {
      outcome.error = error.what();
      outcome.error_code = error.code();
    }
    testing::internal::GetCapturedStdout();
    return outcome;
  }
  std::vector<Outcome> run_ranks(const std::string& name, Shard shard, const Hook& hook = {},
                                 double time_limit_s = 60) {
    const std::int64_t processes = processes_ > 0 ? processes_ : settings_.virtual_ranks;
    std::vector<Outcome> outcomes(static_cast<std::size_t>(processes));
    testing::internal::CaptureStdout();
    try {
      run_thread_ranks(static_cast<int>(processes), time_limit_s, [&](Communicator& ranks, Communicator& beside) {
        Outcome& outcome = outcomes[static_cast<std::size_t>(ranks.rank())];
        try {
          start(name, &ranks, all_save_ ? &beside : nullptr, shard, hook, outcome);
        } catch (const Error& error) {
          outcome.error = error.what();
          outcome.error_code = error.code();
          throw;  // as the end of a process
        }
      });
    } catch (const Error&) {
    }
    result_lines_ = testing::internal::GetCapturedStdout();
    return outcomes;
  }

  // The log without what is a matter of time.
  std::vector<Json> records(const std::string& name) const {
    std::vector<Json> all = json_lines(temporary_.file(name) + "/log.jsonl");
    for (Json& record : all) {
      for (const char* key : {"time", "seconds", "stalled_seconds", "tokens_per_s", "tokens_per_s_rank", "dt_ms"})
        record.erase(key);
    }
    return all;
  }
  std::string checkpoint(const std::string& name, std::int64_t step) const {
    return temporary_.file(name) + format("/step_%08lld", static_cast<long long>(step));
  }
  void expect_same_files(const std::string& a, const std::string& b, std::int64_t step) const {
    for (const char* file : {"/model.bin", "/state.bin", "/manifest.json"}) {
      EXPECT_EQ(read_bytes(checkpoint(a, step) + file), read_bytes(checkpoint(b, step) + file)) << file;
    }
  }

  static void expect_all_have(const Outcome& whole, const std::vector<Outcome>& ranks, const std::string& name) {
    for (const Outcome& rank : ranks) {
      EXPECT_EQ(rank.exit, Exit::ok) << rank.error;
      EXPECT_TRUE(rank.state == whole.state) << name << " " << rank.state.to_json();
      EXPECT_EQ(rank.tensors, whole.tensors) << name;
    }
  }
  static std::string name_of(const std::string& run, Shard shard) {
    return format("%s_%d", run.c_str(), static_cast<int>(shard));
  }
  // Runs the ranks: each has what the run "alone_<run>" has, and together they leave its log and its files.
  void expect_ranks_give(const Outcome& alone, const std::string& run, Shard shard) {
    ASSERT_EQ(alone.exit, Exit::ok) << alone.error;
    const std::string name = name_of("ranks_" + run, shard);
    expect_all_have(alone, run_ranks(name, shard), name);
    EXPECT_EQ(records(name), records("alone_" + run)) << name;
    expect_same_files(name, "alone_" + run, 4);
  }
  // Two steps on `saved` processes and two more on `resumed` are the run "whole".
  void expect_resumed(const Outcome& whole, const std::string& name, Shard shard, std::int64_t saved,
                      std::int64_t resumed) {
    const auto run = [&](std::int64_t processes, std::int64_t steps) {
      settings_.steps = steps;
      processes_ = processes;
      return processes == 1 ? std::vector<Outcome>{run_alone(name)} : run_ranks(name, shard);
    };
    run(saved, 2);
    expect_all_have(whole, run(resumed, 4), name);
    EXPECT_EQ(read_bytes(checkpoint(name, 4) + "/model.bin"), read_bytes(checkpoint("whole", 4) + "/model.bin"));
  }

  const int threads_ = omp_get_max_threads();
  TemporaryDirectory temporary_;
  TrainSettings settings_;
  ModelConfig config_ = ranks_config();
  std::int64_t processes_ = 0;  // that share the ranks of a step; 0: as many as there are ranks
  bool all_save_ = true;        // where the state is divided; otherwise the first rank saves
  std::string result_lines_;
};

constexpr Shard kShards[] = {Shard::none, Shard::optimizer, Shard::parameters};

TEST_F(RanksLoop, NRanksAreOneProcessBitForBit) {
  for (const std::int64_t ranks : {2, 3, 4, 8}) {
    for (const std::int64_t accumulation : {1, 2}) {
      step_of(ranks, accumulation);
      const std::string run = format("%lld_%lld", static_cast<long long>(ranks), static_cast<long long>(accumulation));
      const Outcome alone = run_alone("alone_" + run);
      for (const Shard shard : kShards) {
        expect_ranks_give(alone, run, shard);
        EXPECT_EQ(std::count(result_lines_.begin(), result_lines_.end(), '\n'), 1) << "the first rank's alone";
      }
    }
  }
}

// Of conversations each rank has another number of learned tokens, and learns that of all only when the gradients are there.
TEST_F(RanksLoop, ConversationsOnRanksAreOneProcessBitForBit) {
  train_on_conversations();
  for (const auto& [ranks, accumulation] : {std::pair{2, 1}, {3, 2}, {4, 1}}) {
    step_of(ranks, accumulation);
    const std::string run = format("%d_%d", ranks, accumulation);
    const Outcome alone = run_alone("alone_" + run);
    std::set<std::int64_t> learned;
    for (const Json& record : records("alone_" + run)) {
      if (record["type"] == "step") learned.insert(record["learned_tokens"].get<std::int64_t>());
    }
    EXPECT_GT(learned.size(), 1u);
    for (const Shard shard : kShards) expect_ranks_give(alone, run, shard);
  }
  // Two steps, and two more in another start, by one process and by ranks.
  settings_.steps = 2;
  settings_.schedule = "constant";
  run_alone("again");
  settings_.steps = 4;
  const Outcome alone = run_alone("whole");
  for (const Outcome& rank : run_ranks("again", Shard::optimizer)) EXPECT_EQ(rank.tensors, alone.tensors) << rank.error;
}

TEST_F(RanksLoop, MuonOnRanksIsMuonInOneProcessBitForBit) {
  train_with_muon();
  for (const auto& [ranks, accumulation] : {std::pair{2, 1}, {3, 2}, {8, 1}}) {
    step_of(ranks, accumulation);
    const std::string run = format("%d_%d", ranks, accumulation);
    const Outcome alone = run_alone("alone_" + run);
    for (const Shard shard : kShards) expect_ranks_give(alone, run, shard);
  }
  for (all_save_ = false; const Shard shard : kShards) expect_ranks_give(run_alone("alone_first"), "first", shard);
}

TEST_F(RanksLoop, AnyNumberOfProcessesResumesAnyOtherWithMuon) {
  train_with_muon();
  settings_.micro_batch = 1;
  step_of(6, 1);
  settings_.schedule = "constant";
  const Outcome whole = run_alone("whole");
  for (const auto& [saved, resumed] : {std::pair{1, 1}, {1, 3}, {3, 1}, {2, 3}, {6, 2}}) {
    const std::string name = format("run%d_%d", saved, resumed);
    expect_resumed(whole, name, Shard::optimizer, saved, resumed);
    EXPECT_EQ(read_bytes(checkpoint(name, 4) + "/state.bin").size(),
              read_bytes(checkpoint("whole", 4) + "/state.bin").size());
  }
}

// Of a run with another optimizer nothing can go on, in either direction.
TEST_F(RanksLoop, AnotherOptimizerCannotGoOn) {
  for (const auto& [first, second] : {std::pair{"adamw", "muon"}, {"muon", "adamw"}}) {
    step_of(1, 1);
    settings_.steps = 2;
    settings_.optimizer = first;
    ASSERT_EQ(run_alone(first).exit, Exit::ok);
    settings_.optimizer = second;
    settings_.steps = 4;
    const Outcome outcome = run_alone(first);
    EXPECT_EQ(outcome.error_code, Exit::usage);
    expect_contains(outcome.error, format("--optimizer: got %s, but", second));
    expect_contains(outcome.error, format("was made with %s", first));
  }
}

// More layers than there are places for divided parameters, and a head that takes turns with the embedding; validation by
// ranks of which one has a micro-batch less, and by more ranks than there are micro-batches.
TEST_F(RanksLoop, LayersTakeTurnsInThePlacesOfDividedParameters) {
  config_.num_layers = 5;
  config_.tied_embeddings = false;
  for (const std::int64_t ranks : {3, 8}) {
    step_of(ranks, 1);
    settings_.recompute = ranks == 3 ? "none" : "block";
    const std::string run = format("%lld", static_cast<long long>(ranks));
    expect_ranks_give(run_alone("alone_" + run), run, Shard::parameters);
  }
}

// The scales of a step follow from what all ranks have met in the steps before, and the log counts what all have lost.
TEST_F(RanksLoop, RanksInFp8AreOneProcessBitForBit) {
  train_in_fp8();
  for (const auto& [ranks, accumulation, recompute] :
       {std::tuple{2, 1, "none"}, {3, 2, "none"}, {3, 1, "block"}, {4, 1, "norm"}}) {
    step_of(ranks, accumulation);
    settings_.recompute = recompute;
    const std::string run = format("%d_%d_%s", ranks, accumulation, recompute);
    const Outcome alone = run_alone("alone_" + run);
    const std::vector<Json> log = records("alone_" + run);
    const auto step = std::find_if(log.rbegin(), log.rend(), [](const Json& r) { return r.contains("fp8"); });
    ASSERT_NE(step, log.rend());
    const Json& counts = step->at("fp8").at("input");
    EXPECT_EQ(counts["values"], ranks * accumulation * 16 * 5 * (32 + 16 + 32 + 48));
    EXPECT_GT(counts["flushed"], 0);
    for (const Shard shard : kShards) expect_ranks_give(alone, run, shard);
  }
}

// The history of the scales goes with the checkpoint, whoever writes it and whoever goes on.
TEST_F(RanksLoop, AnyNumberOfProcessesResumesAnyOtherInFp8) {
  train_in_fp8();
  step_of(4, 1);
  settings_.schedule = "constant";
  const Outcome whole = run_alone("whole");
  for (const auto& [saved, resumed, shard, all_save] : {std::tuple{1, 4, Shard::parameters, true},
                                                        {4, 1, Shard::optimizer, true},
                                                        {2, 4, Shard::parameters, true},
                                                        {4, 2, Shard::optimizer, false},
                                                        {2, 1, Shard::none, true}}) {
    all_save_ = all_save;
    expect_resumed(whole, name_of(format("run%d_%d", saved, resumed), shard), shard, saved, resumed);
  }
}

// Of all layers, or of two where no more have their parameters there.
TEST_F(RanksLoop, DividedParametersAreRoundedTwoLayersAtATime) {
  train_in_fp8();
  step_of(3, 1);
  const auto rounded = [&](int ranks, Shard shard) {
    const std::string name = "operands rounded to fp8 (fp32)";
    for (const MemoryLine& line : cpu::plan_training(config_, settings_.model_options(), 0, ranks, shard)) {
      if (line.name == name) return line.bytes;
    }
    return std::uint64_t{0};
  };
  const std::uint64_t layer = 4 * (32 * 32 + 32 * 16 + 32 * 96 + 48 * 32);
  EXPECT_GT(rounded(1, Shard::none), 5 * layer);
  EXPECT_EQ(rounded(3, Shard::optimizer), rounded(1, Shard::none));
  EXPECT_EQ(rounded(3, Shard::parameters), rounded(1, Shard::none) - 3 * layer);
}

// Where the ranks have no directory in common, or are told so.
TEST_F(RanksLoop, TheFirstRankMaySaveForAll) {
  step_of(3, 1);
  settings_.save_every = 3;
  const Outcome alone = run_alone("alone");
  for (all_save_ = false; const Shard shard : kShards) {
    const std::string name = name_of("ranks", shard);
    for (const Outcome& rank : run_ranks(name, shard)) EXPECT_EQ(rank.exit, Exit::ok) << rank.error;
    for (const std::int64_t step : {3, 4}) expect_same_files(name, "alone", step);
  }
}

// One rank needs longer to write than the steps take: a save begins when the one before has ended, on all ranks.
TEST_F(RanksLoop, ASaveWaitsForTheOneBefore) {
  step_of(3, 1);
  settings_.save_every = 1;
  settings_.keep = 10;
  const Outcome alone = run_alone("alone");
  std::atomic<int> reads{0};
  const auto slow = [&](int rank, HookedModel& model, TrainSettings&) {
    if (rank != 1) return;
    model.before_copy_read = [&] {
      ++reads;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    };
  };
  for (const Outcome& rank : run_ranks("ranks", Shard::optimizer, slow)) {
    EXPECT_EQ(rank.exit, Exit::ok) << rank.error;
    EXPECT_EQ(rank.tensors, alone.tensors);
  }
  EXPECT_GE(reads, 4 * 3);
  std::int64_t saved = 0;
  for (const Json& record : records("ranks")) {
    if (record["type"] != "save") continue;
    EXPECT_EQ(record["step"], ++saved);
  }
  EXPECT_EQ(saved, 4);
  for (const std::int64_t step : {1, 2, 3, 4}) expect_same_files("ranks", "alone", step);
}

// Whoever computed the first half, whoever goes on: the ranks, or one process for them.
TEST_F(RanksLoop, AResumeMayGoFromRanksToOneProcessAndBack) {
  step_of(4, 2);
  settings_.schedule = "constant";
  settings_.save_every = 3;
  settings_.steps = 9;
  const Outcome whole = run_alone("whole");
  for (const std::string way : {"ranks, alone, divided", "alone, divided, ranks"}) {
    std::istringstream words(way);
    for (std::string who; std::getline(words >> std::ws, who, ',');) {
      settings_.steps = settings_.steps % 9 + 3;
      std::vector<Outcome> outcomes;
      if (who == "alone") {
        outcomes.push_back(run_alone(way));
      } else {
        outcomes = run_ranks(way, who == "ranks" ? Shard::none : Shard::optimizer);
      }
      for (const Outcome& outcome : outcomes) ASSERT_EQ(outcome.exit, Exit::ok) << outcome.error;
      if (settings_.steps == 9) {
        for (const Outcome& outcome : outcomes) {
          EXPECT_EQ(outcome.tensors, whole.tensors) << way;
          EXPECT_TRUE(outcome.state == whole.state) << way;
        }
      }
    }
    EXPECT_EQ(read_bytes(checkpoint(way, 9) + "/model.bin"), read_bytes(checkpoint("whole", 9) + "/model.bin"));
  }
}

// One or two steps in each start, against a process alone that goes through: what a rank carries from step to step, its part of
// a save, its share of a measurement and its place in the data, it also finds again. The third step is skipped.
TEST_F(RanksLoop, EachStepInAStartOfItsOwnIsTheSameRun) {
  step_of(2, 2);
  settings_.steps = 6;
  settings_.save_every = 2;
  settings_.on_nan = "skip";
  const auto accumulation = static_cast<std::uint64_t>(settings_.accumulation());
  const auto hook_of = [&](int most_steps) {
    return [=](int, HookedModel& model, TrainSettings& settings) {
      const auto now = std::make_shared<std::uint64_t>(0);
      const auto end = std::make_shared<std::uint64_t>(0);
      model.before_forward = [=, &settings](std::uint64_t micro_step) {
        *now = micro_step / accumulation + 1;
        if (*end == 0) *end = *now + static_cast<std::uint64_t>(most_steps) - 1;
        if (*now == *end) settings.max_minutes = 1e-9;  // over at the end of this step
      };
      model.after_statistics = [=](StepStatistics& statistics) {
        if (*now == 3) statistics.gradient_norm = std::numeric_limits<double>::infinity();
      };
    };
  };
  const auto without_saves = [&](const std::string& name) {
    std::vector<Json> all = records(name);
    std::erase_if(all, [](const Json& record) { return record["type"] == "save"; });
    return all;
  };
  const Outcome whole = run_alone("whole", hook_of(100));
  ASSERT_EQ(whole.state.step, 6) << whole.error;
  EXPECT_EQ(whole.state.skipped, 1);
  for (const Shard shard : kShards) {
    for (const int most_steps : {1, 2}) {
      const std::string name = name_of(format("run_%d", most_steps), shard);
      std::vector<Outcome> ranks;
      for (int starts = 0; starts < 6 / most_steps; ++starts) ranks = run_ranks(name, shard, hook_of(most_steps));
      expect_all_have(whole, ranks, name);
      EXPECT_EQ(without_saves(name), without_saves("whole")) << name;
      expect_same_files(name, "whole", 6);
    }
  }
}

// A step of twelve ranks on any number of processes that divides twelve: the same run.
TEST_F(RanksLoop, ProcessesShareTheRanksOfAStep) {
  settings_.micro_batch = 1;
  for (const std::int64_t accumulation : {1, 2}) {
    step_of(12, accumulation);
    for (const std::int64_t processes : {2, 3, 4, 6, 12}) {
      processes_ = processes;
      const std::string run =
          format("%lld_%lld", static_cast<long long>(accumulation), static_cast<long long>(processes));
      const Outcome alone = run_alone("alone_" + run);
      for (const Shard shard : kShards) expect_ranks_give(alone, run, shard);
    }
  }
}

// The speed of a rank is that of a process, however many ranks of the step it computes.
TEST_F(RanksLoop, TheSpeedOfTheRunIsThatOfEachProcessTimesTheirNumber) {
  settings_.micro_batch = 1;
  step_of(6, 2);
  const auto expect_speeds = [&](const std::string& name, std::int64_t processes) {
    std::int64_t steps = 0;
    for (const Json& record : json_lines(temporary_.file(name) + "/log.jsonl")) {
      if (record["type"] != "step") continue;
      EXPECT_EQ(record["step"], ++steps) << "the first rank's alone";
      const double speed = record["tokens_per_s"], milliseconds = record["dt_ms"];
      EXPECT_NEAR(speed * milliseconds / 1000, settings_.batch_tokens, 1e-6) << name;
      ASSERT_EQ(record.contains("tokens_per_s_rank"), processes > 1) << name;
      if (processes == 1) continue;
      EXPECT_DOUBLE_EQ(record["tokens_per_s_rank"], speed / static_cast<double>(processes)) << name;
    }
    EXPECT_EQ(steps, settings_.steps);
  };
  run_alone("alone");
  expect_speeds("alone", 1);
  for (const std::int64_t processes : {2, 3, 6}) {
    processes_ = processes;
    const std::string name = format("run%lld", static_cast<long long>(processes));
    run_ranks(name, Shard::none);
    expect_speeds(name, processes);
  }
}

// One, two, three or four processes go on from what one, two, three or four have saved.
TEST_F(RanksLoop, AnyNumberOfProcessesResumesAnyOther) {
  settings_.micro_batch = 1;
  step_of(12, 1);
  settings_.schedule = "constant";
  settings_.steps = 4;
  const Outcome whole = run_alone("whole");
  for (std::int64_t saved = 1; saved <= 4; ++saved) {
    for (std::int64_t resumed = 1; resumed <= 4; ++resumed) {
      const std::string name = format("run%lld_%lld", static_cast<long long>(saved), static_cast<long long>(resumed));
      expect_resumed(whole, name, Shard::optimizer, saved, resumed);
    }
  }
}

TEST_F(RanksLoop, ProcessesThatShareRanksHaveOneSumMore) {
  step_of(4, 1);
  const auto sum_of = [&](int ranks) {
    std::uint64_t bytes = 0;
    for (const MemoryLine& line :
         cpu::plan_training(ranks_config(), settings_.model_options(), 0, ranks, Shard::optimizer)) {
      if (line.name == "sum of the ranks (fp32)") bytes = line.bytes;
    }
    return bytes;
  };
  EXPECT_EQ(sum_of(4), 0u);
  EXPECT_NEAR(static_cast<double>(sum_of(2)), static_cast<double>(sum_of(1)) / 2, 8192);
}

TEST_F(RanksLoop, AnotherNumberOfRanksCannotGoOn) {
  settings_.micro_batch = 1;
  step_of(4, 1);
  run_ranks("run", Shard::none);
  step_of(2, 2);  // the same windows a step, and the same micro-batches
  settings_.steps = 8;
  const std::vector<Outcome> outcomes = run_ranks("run", Shard::none);
  for (const Outcome& rank : outcomes) EXPECT_EQ(rank.error_code, Exit::usage);
  expect_contains(outcomes[1].error, "rank 0: --virtual-ranks: got '2'");
}

// ---- the guard ----

TEST_F(RanksLoop, TheGuardDecidesForAll) {
  for (const char* policy : {"skip", "rerun", "abort"}) {
    step_of(3, 2);
    settings_.on_nan = policy;
    settings_.debug_inject = {"nan@step=3"};
    const std::string alone_name = std::string("alone_") + policy;
    const Outcome alone = run_alone(alone_name);
    EXPECT_EQ(alone.error_code, policy == std::string("abort") ? Exit::numeric : Exit::ok) << alone.error;
    for (const Shard shard : kShards) {
      const std::string name = name_of(policy, shard);
      for (const Outcome& rank : run_ranks(name, shard)) {
        EXPECT_EQ(rank.error, alone.error);
        EXPECT_EQ(rank.error_code, alone.error_code);
        EXPECT_TRUE(rank.state == alone.state) << name;
        EXPECT_EQ(rank.tensors, alone.tensors) << name;
      }
      EXPECT_EQ(records(name), records(alone_name)) << name;
      EXPECT_EQ(fs::exists(checkpoint(name, 2)), fs::exists(checkpoint(alone_name, 2))) << name;
    }
  }
}

TEST_F(RanksLoop, AnInfiniteMomentEndsAllRanksWithoutACheckpoint) {
  settings_.debug_inject = {"inf@moment=4"};
  for (const Shard shard : kShards) {
    const std::string name = name_of("run", shard);
    const std::vector<Outcome> outcomes = run_ranks(name, shard);
    for (const Outcome& rank : outcomes) EXPECT_EQ(rank.error_code, Exit::numeric) << rank.error;
    expect_contains(outcomes[0].error, "moment2.");
    expect_contains(outcomes[1].error, "rank 0: step 4: moment2.");
    EXPECT_FALSE(fs::exists(checkpoint(name, 4)));
  }
}

// Found while training goes on: the first rank alone hears of it, and tells the others before the next step.
TEST_F(RanksLoop, ASaveThatFailsInTheBackgroundEndsAllRanks) {
  settings_.debug_inject = {"inf@moment=2"};
  settings_.steps = 8;
  settings_.save_every = 2;
  for (const Shard shard : kShards) {
    const std::vector<Outcome> outcomes =
        run_ranks(name_of("run", shard), shard, [](int, HookedModel& model, TrainSettings&) {
          model.before_forward = [](std::uint64_t) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
        });
    for (const Outcome& rank : outcomes) EXPECT_EQ(rank.error_code, Exit::numeric) << rank.error;
    expect_contains(outcomes[0].error, "step 2: moment2.");
    expect_contains(outcomes[1].error, "rank 0: step 2: moment2.");
  }
}

// ---- faults ----

// All ranks know of it before they go on, and save the last good step together.
TEST_F(RanksLoop, AnErrorOfOneRanksDataEndsAllAfterASave) {
  step_of(3, 1);
  for (const Shard shard : {Shard::none, Shard::optimizer}) {  // with divided parameters the others are in the call too
    const std::string name = name_of("run", shard);
    const std::vector<Outcome> outcomes = run_ranks(name, shard, [](int rank, HookedModel& model, TrainSettings&) {
      if (rank != 1) return;
      model.before_evaluate = [](const Batch&) { fail(Exit::bad_file, "val_0.bin: replaced"); };
    });
    EXPECT_EQ(outcomes[1].error, "val_0.bin: replaced");
    for (const std::size_t r : {0u, 2u}) EXPECT_EQ(outcomes[r].error, "rank 1: val_0.bin: replaced");
    for (const Outcome& rank : outcomes) {
      EXPECT_EQ(rank.error_code, Exit::bad_file);
      EXPECT_EQ(rank.state.step, 2);
    }
    EXPECT_TRUE(fs::exists(checkpoint(name, 2) + "/manifest.json"));
  }
}

// Found by the read before the second micro-batch: no rank computes it, and none waits for another one that does.
TEST_F(RanksLoop, AShardReplacedDuringValidationEndsAllAfterASave) {
  step_of(3, 1);
  settings_.steps = 3;
  for (const Shard shard : kShards) {
    const std::string name = name_of("run", shard);
    const std::vector<Outcome> outcomes = run_ranks(name, shard, [&](int rank, HookedModel& model, TrainSettings&) {
      if (rank != 1) return;
      model.before_evaluate = [&](const Batch&) { replace_shard(); };
    });
    for (const Outcome& rank : outcomes) {
      EXPECT_EQ(rank.error_code, Exit::bad_file) << name << ": " << rank.error;
      expect_contains(rank.error, "train_0.bin");
      EXPECT_EQ(rank.state.step, 2);
    }
    EXPECT_TRUE(fs::exists(checkpoint(name, 2) + "/manifest.json")) << name;
    write_shard(temporary_.file("train_0.bin"), patterned_tokens(303));
  }
}

// Two of five layers, the last of which has the final norm as well. A rank of them has no decoder.
TEST_F(RanksLoop, DividedParametersAreAPartAndThePlacesOfTwoLayers) {
  config_.num_layers = 5;
  config_.tied_embeddings = false;
  const TensorTable table(config_);
  const std::uint64_t all = parameter_plan(table).bytes();
  step_of(3, 1);
  std::atomic<std::uint64_t> own{0}, used{0};
  run_thread_ranks(3, 60, [&](Communicator& ranks) {
    const TrainOptions options = settings_.model_options();
    const std::unique_ptr<TrainModel> model = cpu::make_training_model(config_, options, ranks, Shard::parameters);
    for (const MemoryLine& line : model->memory()) {
      if (line.name == "parameters (fp32)") own += line.bytes;
      if (line.name == "parameters of layers in use (fp32)") used = line.bytes;
    }
    EXPECT_EQ(total_bytes(model->memory()),
              total_bytes(cpu::plan_training(config_, options, ranks.rank(), 3, Shard::parameters)));
    EXPECT_TRUE(model->evaluates_together());
    expect_contains(error_of(Exit::internal, [&] { model->decoder(4); }), "sharded parameters");
    EXPECT_TRUE(model->activation("logits").empty());
  });
  EXPECT_GE(own, all);
  EXPECT_LE(own, all + 3 * kRegionAlignment);
  const std::vector<Range> sections = parameter_sections(config_, table);
  const auto vocabulary = static_cast<std::uint64_t>(std::max(sections[0].size(), sections.back().size()));
  const auto layers = static_cast<std::uint64_t>(sections[4].size() + sections[5].size());
  EXPECT_GE(used, 4 * (vocabulary + layers));
  EXPECT_LE(used, 4 * (vocabulary + layers) + kRegionAlignment);
}

TEST_F(RanksLoop, AReplacedShardEndsAllAfterASave) {
  step_of(3, 2);
  settings_.steps = 100;
  settings_.val_every = 0;
  const std::vector<Outcome> outcomes =
      run_ranks("run", Shard::optimizer, [&](int rank, HookedModel& model, TrainSettings&) {
        if (rank != 2) return;
        model.before_forward = [&](std::uint64_t micro_step) {
          if (micro_step != 16) return;  // the third step
          replace_shard();
        };
      });
  for (const Outcome& rank : outcomes) {
    EXPECT_EQ(rank.error_code, Exit::bad_file);
    expect_contains(rank.error, "train_0.bin");
    EXPECT_EQ(rank.state.step, outcomes[0].state.step);
    EXPECT_EQ(rank.state.windows, outcomes[0].state.windows);
  }
  EXPECT_TRUE(fs::exists(checkpoint("run", outcomes[0].state.step) + "/manifest.json"));
}

// Nothing in its memory can be trusted: no save, and nobody waits.
TEST_F(RanksLoop, ADeviceErrorOfOneRankEndsAll) {
  step_of(4, 1);
  settings_.save_every = 1;
  for (const int broken : {0, 3}) {
    const std::string name = format("run%d", broken);
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<Outcome> outcomes =
        run_ranks(name, Shard::optimizer, [&](int rank, HookedModel& model, TrainSettings&) {
          if (rank != broken) return;
          model.before_forward = [](std::uint64_t micro_step) {
            if (micro_step >= 8) fail(Exit::environment, "the GPU has fallen off the bus");
          };
        });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
    for (int r = 0; r < 4; ++r) {
      const Outcome& rank = outcomes[static_cast<std::size_t>(r)];
      EXPECT_EQ(rank.error_code, Exit::environment);
      EXPECT_EQ(rank.error,
                format("%sthe GPU has fallen off the bus", r == broken ? "" : format("rank %d: ", broken).c_str()));
    }
    EXPECT_TRUE(fs::exists(checkpoint(name, 2) + "/manifest.json")) << "the save in progress was finished";
    EXPECT_FALSE(fs::exists(checkpoint(name, 3)));
    EXPECT_FALSE(fs::exists(checkpoint(name, 2) + ".tmp"));
  }
}

TEST_F(RanksLoop, ARankThatHangsIsNamed) {
  step_of(3, 1);
  const auto hang = [](int rank, HookedModel& model, TrainSettings&) {
    model.before_forward = [rank](std::uint64_t micro_step) {
      if (rank == 1 && micro_step == 7) std::this_thread::sleep_for(std::chrono::seconds(4));
    };
  };
  for (const Outcome& rank : run_ranks("run", Shard::none, hang, 3)) {
    EXPECT_EQ(rank.error_code, Exit::environment);
    EXPECT_EQ(rank.error, "rank 1 did not come to exchange() within 3 s");
    EXPECT_EQ(rank.state.step, 2);
  }
  EXPECT_FALSE(fs::exists(checkpoint("run", 2)));
}

// The others wait for its part of a layer, in the middle of a pass.
TEST_F(RanksLoop, ARankThatHangsIsNamedByThoseWhoNeedItsParameters) {
  step_of(3, 1);
  config_.num_layers = 5;
  const auto hang = [](int rank, HookedModel& model, TrainSettings&) {
    model.before_forward = [rank](std::uint64_t micro_step) {
      if (rank == 1 && micro_step == 7) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    };
  };
  for (const Outcome& rank : run_ranks("run", Shard::parameters, hang, 1)) {
    EXPECT_EQ(rank.error_code, Exit::environment);
    EXPECT_EQ(rank.error, "rank 1 did not come to gather() within 1 s");
    EXPECT_EQ(rank.state.step, 2);
  }
}

TEST_F(RanksLoop, OneRanksTimeLimitStopsAllAfterASave) {
  step_of(3, 1);
  settings_.schedule = "constant";
  for (const int early : {0, 2}) {
    const std::string name = format("run%d", early);
    const std::vector<Outcome> outcomes =
        run_ranks(name, Shard::optimizer, [&](int rank, HookedModel&, TrainSettings& settings) {
          if (rank == early) settings.max_minutes = 1e-9;
        });
    for (const Outcome& rank : outcomes) {
      EXPECT_EQ(rank.exit, Exit::ok) << rank.error;
      EXPECT_EQ(rank.state.step, 0);
    }
    EXPECT_TRUE(fs::exists(checkpoint(name, 0) + "/manifest.json"));
  }
}

TEST_F(RanksLoop, AFullDiskCostsACheckpointNotTheRun) {
  settings_.save_every = 2;
  settings_.steps = 5;
  const Outcome clean = run_alone("clean");
  settings_.debug_inject = {"enospc@save=6000"};  // strikes once, in the save of step 2
  for (const Outcome& rank : run_ranks("run", Shard::optimizer)) {
    EXPECT_EQ(rank.exit, Exit::ok) << rank.error;
    EXPECT_EQ(rank.tensors, clean.tensors);
  }
  EXPECT_TRUE(fs::exists(checkpoint("run", 5)));
  EXPECT_FALSE(fs::exists(checkpoint("run", 2)));
}

// The first rank knows which save has failed, and all save at the same steps.
TEST_F(RanksLoop, ABestCheckpointThatCannotBeSavedIsNoneOnAnyRank) {
  const std::map<std::int64_t, double> losses = {{2, 5.0}, {4, 4.0}, {6, 10.0}, {8, 4.5}, {10, 6.0}};
  settings_.steps = 10;
  settings_.keep_best = true;
  settings_.save_every = 2;  // the save of step 6 waits for that of step 4
  for (const Shard shard : {Shard::none, Shard::optimizer}) {
    const std::string name = name_of("run", shard);
    const std::vector<Outcome> outcomes = run_ranks(name, shard, [&](int rank, HookedModel& model, TrainSettings&) {
      const auto step = std::make_shared<std::int64_t>(0);
      model.before_update = [rank, step](const AdamWStep& update) {
        *step = update.step;
        if (rank != 0) return;
        set_call_fault(
            [](const char*, const std::string& path) { return path.find("step_00000004") == std::string::npos; });
      };
      model.after_evaluate = [&losses, step](double& loss_sum, std::int64_t labels) {
        loss_sum = losses.at(*step) * static_cast<double>(labels);
      };
    });
    set_call_fault(nullptr);
    for (const Outcome& rank : outcomes) {
      EXPECT_EQ(rank.exit, Exit::ok) << rank.error;
      EXPECT_EQ(rank.state.best, (TrainState::Best{8, 4.5}));
    }
    for (const std::int64_t step : {2, 4, 8, 10}) {
      EXPECT_EQ(fs::exists(checkpoint(name, step)), step >= 8) << name << " " << step;
    }
  }
}

// A save that is asked for waits for the one of the best checkpoint, which fails: then too all ranks compare the next
// validation with the best one before.
TEST_F(RanksLoop, ABestCheckpointThatFailsWhileASaveIsAskedForIsNoneOnAnyRank) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const std::map<std::int64_t, double> losses = {{2, 5.0}, {4, 4.0}, {6, 4.5}, {8, 6.0}, {10, 6.0}};
  settings_.steps = 10;
  settings_.keep_best = true;
  settings_.save_every = 100;
  const auto train = [&] {
    install_signal_handlers();
    const std::vector<Outcome> outcomes =
        run_ranks("run", Shard::none, [&](int rank, HookedModel& model, TrainSettings&) {
          const auto step = std::make_shared<std::int64_t>(0);
          model.before_update = [rank, step](const AdamWStep& update) {
            *step = update.step;
            if (rank != 0) return;
            if (*step == 5) {
              ::kill(::getpid(), SIGUSR1);
              std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until it is there
            }
            set_call_fault([](const char*, const std::string& path) {
              if (path.find("step_00000004") == std::string::npos) return true;
              std::this_thread::sleep_for(std::chrono::milliseconds(500));  // it ends behind the signal
              return false;
            });
          };
          model.after_evaluate = [&losses, step](double& loss_sum, std::int64_t labels) {
            loss_sum = losses.at(*step) * static_cast<double>(labels);
          };
        });
    bool good = true;
    for (const Outcome& rank : outcomes) {
      good = good && rank.exit == Exit::ok && rank.state.best == TrainState::Best{6, 4.5};
      std::fprintf(stderr, "%s\n", rank.error.c_str());
    }
    ::_exit(good ? 0 : 1);
  };
  EXPECT_EXIT(train(), testing::ExitedWithCode(0), "no checkpoint of step 4");
}

TEST_F(RanksLoop, AFailedLastSaveEndsAllRanks) {
  settings_.debug_inject = {"io-error@save=0"};
  const std::vector<Outcome> outcomes = run_ranks("run", Shard::optimizer);
  for (const Outcome& rank : outcomes) EXPECT_EQ(rank.error_code, Exit::resources);
  expect_contains(outcomes[1].error, "rank 0: the last checkpoint could not be saved");
  EXPECT_FALSE(fs::exists(checkpoint("run", 4)));
}

TEST_F(RanksLoop, AResumeThatFailsIsAnErrorOfAllRanks) {
  settings_.resume = "must";
  const std::vector<Outcome> outcomes = run_ranks("empty", Shard::none);
  for (const Outcome& rank : outcomes) EXPECT_EQ(rank.error_code, Exit::bad_file);
  expect_contains(outcomes[1].error, "rank 0: --resume must: ");
}

// ---- memory ----

TEST_F(RanksLoop, ADividedOptimizerHasItsPartOfTheMoments) {
  const std::uint64_t all = 2 * parameter_plan(TensorTable(ranks_config())).bytes();
  for (const std::int64_t ranks : {2, 3}) {
    step_of(ranks, 1);
    for (const Shard shard : kShards) {
      std::atomic<std::uint64_t> sum{0};
      run_thread_ranks(static_cast<int>(ranks), 60, [&](Communicator& communicator) {
        const std::unique_ptr<TrainModel> model =
            cpu::make_training_model(ranks_config(), settings_.model_options(), communicator, shard);
        for (const MemoryLine& line : model->memory()) {
          EXPECT_NE(line.name, "sum of the ranks (fp32)");
          if (line.name == "AdamW moments (fp32)") sum += line.bytes;
        }
      });
      const std::uint64_t rounding = static_cast<std::uint64_t>(ranks) * 2 * kRegionAlignment;
      const std::uint64_t expected = shard == Shard::none ? static_cast<std::uint64_t>(ranks) * all : all;
      EXPECT_GE(sum, expected);
      EXPECT_LE(sum, expected + rounding);
    }
  }
}

TEST_F(RanksLoop, ANumberOfProcessesThatDoesNotDivideTheRanksIsRefused) {
  step_of(5, 1);
  run_thread_ranks(2, 60, [&](Communicator& ranks) {
    expect_contains(
        error_of(Exit::internal,
                 [&] { cpu::make_training_model(ranks_config(), settings_.model_options(), ranks, Shard::none); }),
        "2 ranks for a step of 5");
  });
}

}  // namespace
}  // namespace weft
