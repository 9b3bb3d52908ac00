// Checkpoints that several ranks write together: whatever each of them has, the files are those of one rank; and whatever
// happens to one of them, no rank goes on as if nothing had, and the checkpoint before stays.
#include "llmc/train/joint_save.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <thread>

#include "llmc/base/error_from.h"
#include "llmc/comm/thread_ranks.h"
#include "llmc/train/background_save.h"
#include "llmc/train/save_writers.h"
#include "test/cpp/rank_tools.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

using Ranges = std::vector<std::vector<Range>>;  // of each rank

// What a rank has: ranges of arenas that all ranks of a test share.
class PartCopy final : public StateCopy {
 public:
  PartCopy(const std::vector<float>* arenas, std::vector<Range> own) : arenas_(arenas), own_(std::move(own)) {}
  void take() override {}
  const float* read(TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t count,
                    float* buffer) const override {
    if (before_read) before_read(role, spec);
    const std::int64_t begin = spec.offset + static_cast<std::int64_t>(first);
    const Range wanted{begin, begin + static_cast<std::int64_t>(count)};
    EXPECT_TRUE(std::any_of(own_.begin(), own_.end(), [&](const Range& own) { return common(own, wanted) == wanted; }));
    const auto arena = static_cast<std::size_t>(std::find(kStateRoles, std::end(kStateRoles), role) - kStateRoles);
    std::copy_n(arenas_[arena].begin() + begin, count, buffer);
    return buffer;
  }
  std::function<void(TensorRole, const TensorSpec&)> before_read;

 private:
  const std::vector<float>* arenas_;
  const std::vector<Range> own_;
};

class JointSaveTest : public testing::Test {
 protected:
  void SetUp() override {
    write_shard(temporary_.file("train.bin"), patterned_tokens(200));
    use(micro_config());
  }
  void TearDown() override {
    set_write_fault(nullptr);
    set_call_fault(nullptr);
  }
  void use(const ModelConfig& config) {
    config_ = config;
    table_.emplace(config);
    for (std::size_t a = 0; a < 3; ++a) {
      arenas_[a].resize(static_cast<std::size_t>(table_->arena_elements()));
      for (std::size_t i = 0; i < arenas_[a].size(); ++i) arenas_[a][i] = std::sin(static_cast<float>(i + 7 * a));
    }
  }
  RunIdentity identity() const {
    RunIdentity identity = micro_identity(micro_settings(), TokenDataset(temporary_.file("train.bin"), 8));
    identity.model = config_;
    return identity;
  }
  static TrainState state_of(std::int64_t step) {
    TrainState state;
    state.step = step;
    return state;
  }
  std::string step_path(const std::string& run, std::int64_t step) const {
    return temporary_.file(run) + format("/step_%08lld", static_cast<long long>(step));
  }
  // As one rank writes it.
  void save_alone(const std::string& run, std::int64_t step) {
    const RunDirectory directory(temporary_.file(run));
    const TensorSource source{
        [&](TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t count, float* buffer) {
          return PartCopy(arenas_, {{0, table_->arena_elements()}}).read(role, spec, first, count, buffer);
        },
        true};
    CheckpointKeeper(directory, identity(), 10).save(state_of(step), *table_, source);
  }
  using Prepare = std::function<void(int rank, PartCopy&)>;
  // The error of each rank; empty: none. The first rank's path has to be that of the checkpoint.
  std::vector<std::string> save_together(const std::string& run, std::int64_t step, const Ranges& ranges,
                                         const Prepare& prepare = {}, Ranks kind = Ranks::threads,
                                         double time_limit_s = 20) {
    std::vector<std::string> errors(ranges.size());
    codes_.assign(ranges.size(), Exit::ok);
    const RunDirectory directory(temporary_.file(run));
    CheckpointKeeper keeper(directory, identity(), 10);
    run_ranks(kind, static_cast<int>(ranges.size()), time_limit_s, [&](Communicator& ranks) {
      const auto rank = static_cast<std::size_t>(ranks.rank());
      const bool first = rank == 0;
      PartCopy copy(arenas_, ranges[rank]);
      if (prepare) prepare(ranks.rank(), copy);
      JointSave save(ranks, first ? &keeper : nullptr, adamw_optimizer(), *table_, ranges[rank]);
      EXPECT_EQ(save.is_first(), first);
      const std::optional<Error> error = error_from([&] {
        const std::string path = save.save(state_of(step), copy, {});
        EXPECT_EQ(path, first ? step_path(run, step) : "");
      });
      EXPECT_FALSE(save.ended());
      if (!error) return;
      errors[rank] = error->what();
      codes_[rank] = error->code();
    });
    return errors;
  }
  void expect_same_files(const std::string& a, const std::string& b, std::int64_t step) const {
    for (const char* file : {"/model.bin", "/state.bin", "/manifest.json"}) {
      EXPECT_EQ(read_bytes(step_path(a, step) + file), read_bytes(step_path(b, step) + file)) << file;
    }
  }
  // Ranges of about `size` elements that go to the ranks in turns, as buckets and their parts do.
  Ranges in_turns(std::size_t ranks, std::int64_t size) const {
    Ranges ranges(ranks);
    std::int64_t begin = 0;
    for (std::size_t i = 0; begin < table_->arena_elements(); ++i) {
      const std::int64_t end = std::min(begin + size + static_cast<std::int64_t>(i % 3), table_->arena_elements());
      ranges[i % ranks].push_back({begin, end});
      begin = end;
    }
    return ranges;
  }

  TemporaryDirectory temporary_;
  ModelConfig config_;
  std::optional<TensorTable> table_;
  std::vector<float> arenas_[3];
  std::vector<Exit> codes_;  // of the errors of each rank; ok: none
};

TEST_F(JointSaveTest, AnyDivisionGivesTheFilesOfOneRank) {
  save_alone("alone", 3);
  std::vector<Ranges> divisions = {in_turns(3, 100), in_turns(5, 17), in_turns(4, 100'000), {{}, {{0, 0}}, {}}};
  divisions.back()[2] = {{0, 5}, {5, 5}, {5, table_->arena_elements()}};  // two ranks have nothing
  for (const int ranks : {1, 2, 3, 4, 8}) {
    Ranges& ranges = divisions.emplace_back();
    for (const Range& part : cut_arena(*table_, ranks, 64)) ranges.push_back({part});
  }
  for (std::size_t i = 0; i < divisions.size(); ++i) {
    const std::string run = format("run%zu", i);
    for (const std::string& error : save_together(run, 3, divisions[i], {}, i == 0 ? Ranks::sockets : Ranks::threads)) {
      EXPECT_EQ(error, "");
    }
    expect_same_files(run, "alone", 3);
    EXPECT_FALSE(fs::exists(step_path(run, 3) + ".tmp"));
  }
}

// Parts of more than one piece, and tensors of more than one part.
TEST_F(JointSaveTest, LargeTensorsGoInPieces) {
  ModelConfig config = micro_config();
  config.vocab_size = config.tokenizer_vocab = 40'000;
  use(config);
  save_alone("alone", 3);
  EXPECT_EQ(save_together("run", 3, {{{0, 300'001}}, {{300'001, table_->arena_elements()}}})[0], "");
  expect_same_files("run", "alone", 3);
}

TEST_F(JointSaveTest, RanksThatDoNotHaveEachElementOnceAreRefused) {
  const std::int64_t all = table_->specs().back().offset + table_->specs().back().elements;
  for (const Ranges& ranges : {Ranges{{{0, 40}}, {{41, all}}}, Ranges{{{0, 41}}, {{40, all}}},
                               Ranges{{{0, 40}}, {{40, all - 1}}}, Ranges{{{0, all}}, {{0, all}}}}) {
    const std::string error = error_of(Exit::internal, [&] { save_together("run", 3, ranges); });
    expect_contains(error, "the ranks do not have each element once");
  }
}

// One rank cannot write: all end the save with its error, nothing of it is left, and the next one works.
TEST_F(JointSaveTest, AnErrorOfOneRankIsOneOfAll) {
  save_alone("run", 2);
  for (const int broken : {0, 2}) {
    const std::vector<std::string> errors = save_together("run", 3, in_turns(3, 100), [&](int rank, PartCopy& copy) {
      if (rank != broken) return;
      copy.before_read = [](TensorRole role, const TensorSpec&) {
        if (role == TensorRole::state1) fail(Exit::resources, "no space left");
      };
    });
    for (int r = 0; r < 3; ++r) {
      const std::string prefix = r == broken ? "" : format("rank %d: ", broken);
      EXPECT_EQ(errors[static_cast<std::size_t>(r)], prefix + "no space left");
    }
    for (const Exit code : codes_) EXPECT_EQ(code, Exit::resources);
    EXPECT_FALSE(fs::exists(step_path("run", 3)));
    EXPECT_FALSE(fs::exists(step_path("run", 3) + ".tmp"));
    Checkpoint::open(step_path("run", 2), 2);
  }
  EXPECT_EQ(save_together("run", 3, in_turns(3, 100))[0], "");
  Checkpoint::open(step_path("run", 3), 3);
}

// A save that nobody has asked for its outcome is waited for at the end; that it has failed is said once, and not by each rank.
TEST_F(JointSaveTest, AFailureAtTheEndIsSaidByTheFirstRank) {
  const RunDirectory directory(temporary_.file("run"));
  CheckpointKeeper keeper(directory, identity(), 10);
  const std::unique_ptr<TrainModel> model = cpu::make_training_model(config_, micro_settings().model_options());
  const Ranges ranges = in_turns(3, 100);
  testing::internal::CaptureStderr();
  run_thread_ranks(3, 20, [&](Communicator& ranks) {
    const auto rank = static_cast<std::size_t>(ranks.rank());
    auto copy = std::make_unique<PartCopy>(arenas_, ranges[rank]);
    copy->before_read = [rank](TensorRole, const TensorSpec&) {
      if (rank == 1) fail(Exit::resources, "no space left");
    };
    BackgroundSave saves(
        std::make_unique<JointSave>(ranks, rank == 0 ? &keeper : nullptr, adamw_optimizer(), *table_, ranges[rank]),
        std::move(copy));
    saves.start(state_of(3), *model);
  });
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "warning: no checkpoint of step 3: rank 1: no space left\n");
}

// Every call of every rank's part of a save that can fail: the checkpoint before stays, and the new one is whole or not there.
TEST_F(JointSaveTest, AFailingCallLeavesTheCheckpointBefore) {
  static std::atomic<int> calls, failing;
  save_alone("run", 2);
  bool failed = true;
  for (failing = 0; failed; ++failing) {
    ASSERT_LT(failing, 40);
    calls = 0;
    set_call_fault([](const char*, const std::string&) { return calls++ != failing; });
    const std::vector<std::string> errors = save_together("run", 3, in_turns(2, 100));
    set_call_fault(nullptr);
    failed = calls > failing;
    Checkpoint::open(step_path("run", 2), 2);
    if (!errors[0].empty()) expect_contains(errors[0], "Input/output error");
    if (fs::exists(step_path("run", 3))) Checkpoint::open(step_path("run", 3), 3);
    EXPECT_FALSE(fs::exists(step_path("run", 3) + ".tmp")) << failing << ": " << errors[0];
    fs::remove_all(step_path("run", 3));
  }
  EXPECT_GE(failing, 4 + 3 * 3 + 3) << "two files of two ranks, three files that get their names, and the directory";
}

// The first rank gives a checkpoint its name when all ranks have written and synced, and not before.
TEST_F(JointSaveTest, NothingIsNamedBeforeAllRanksHaveSynced) {
  static std::mutex mutex;
  static std::vector<std::string> calls;
  calls.clear();
  set_call_fault([](const char* call, const std::string& path) {
    const std::lock_guard<std::mutex> lock(mutex);
    calls.push_back(std::string(call) + " " + fs::path(path).filename().string());
    return true;
  });
  const auto slow = [](int rank, PartCopy& copy) {
    if (rank != 2) return;
    copy.before_read = [](TensorRole, const TensorSpec&) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
  };
  EXPECT_EQ(save_together("run", 3, in_turns(3, 400), slow)[0], "");
  const auto is_rename = [](const std::string& call) { return call.starts_with("rename "); };
  const auto named = std::find_if(calls.begin(), calls.end(), is_rename);
  const std::string temporary = ".tmp." + std::to_string(::getpid());
  EXPECT_EQ(std::count(calls.begin(), named, "sync model.bin" + temporary), 3);
  EXPECT_EQ(std::count(calls.begin(), named, "sync state.bin" + temporary), 3);
  EXPECT_EQ(std::count(calls.begin(), named, "sync model.bin"), 1) << "and with its header, by the first rank";
}

// What a rank has written is changed by somebody else, before it is read back: the first or the last value of each rank that
// has any.
TEST_F(JointSaveTest, WhatDoesNotComeBackIsAnErrorThatNamesItsWriter) {
  static std::string damaged;
  static std::uint64_t place;
  static std::atomic<int> synced;
  save_alone("alone", 3);
  const TensorFile model = TensorFile::open(step_path("alone", 3) + "/model.bin", FileKind::model);
  const TensorFile training = TensorFile::open(step_path("alone", 3) + "/state.bin", FileKind::training_state);
  const TensorSpec &first = table_->specs().front(), &last = table_->specs().back();
  const TensorSpec &before_cut = table_->specs()[3], &behind_cut = table_->specs()[4];
  const Ranges ranges = {{{0, 100}}, {}, {{100, behind_cut.offset}}, {{behind_cut.offset, table_->arena_elements()}}};
  struct Case {
    int rank;
    TensorRole role;
    const TensorSpec& spec;
    std::int64_t element;
  };
  for (const Case& one :
       {Case{0, TensorRole::parameter, first, 0}, Case{0, TensorRole::state2, first, 99},
        Case{2, TensorRole::parameter, first, 100}, Case{2, TensorRole::state2, before_cut, before_cut.elements - 1},
        Case{3, TensorRole::parameter, behind_cut, 0}, Case{3, TensorRole::state2, last, last.elements - 1}}) {
    const std::string name = state_tensor_name(adamw_optimizer(), one.role, one.spec);
    const TensorFile& file = one.role == TensorRole::parameter ? model : training;
    damaged = step_path("run", 3) + ".tmp/" + fs::path(file.path()).filename().string() + ".tmp." +
              std::to_string(::getpid());
    place = file.at(name).offset + static_cast<std::uint64_t>(one.element) * sizeof(float);
    synced = 0;
    set_call_fault([](const char* call, const std::string& path) {
      if (std::string(call) != "sync" || path != damaged || ++synced != 4) return true;  // the last one of the ranks
      std::fstream bytes(damaged, std::ios::in | std::ios::out | std::ios::binary);
      bytes.seekg(static_cast<std::streamoff>(place));
      const int byte = bytes.get();
      bytes.seekp(static_cast<std::streamoff>(place));
      bytes.put(static_cast<char>(byte ^ 1));
      return true;
    });
    for (const std::string& error : save_together("run", 3, ranges)) {
      expect_contains(error, format(": %s: what rank %d has written did not come back", name.c_str(), one.rank));
    }
    for (const Exit code : codes_) EXPECT_EQ(code, Exit::bad_file);
    EXPECT_FALSE(fs::exists(step_path("run", 3)));
  }
}

// The first one in the order of the file, in the words of a rank that saves alone, whoever has read it.
TEST_F(JointSaveTest, AValueThatIsNotFiniteIsNamedAsByOneRank) {
  const TensorSpec& spec = table_->specs()[3];
  arenas_[1][static_cast<std::size_t>(spec.offset) + 5] = -std::numeric_limits<float>::infinity();
  arenas_[2][9] = std::numeric_limits<float>::quiet_NaN();
  const std::string alone = error_of(Exit::numeric, [&] { save_alone("alone", 3); });
  const std::vector<std::string> errors = save_together("run", 3, in_turns(3, 100));
  EXPECT_EQ(errors[0], alone);
  EXPECT_EQ(codes_, (std::vector<Exit>{Exit::numeric, Exit::ok, Exit::ok}))
      << "the other ranks hear it from the first one's loop";
  EXPECT_FALSE(fs::exists(step_path("run", 3) + ".tmp"));
}

// One JointSave on each rank for a whole run: values that differ from save to save, a rank that cannot write, a value that is
// not finite. Each save behind the others has the files of one rank that has saved nothing before.
TEST_F(JointSaveTest, ALaterSaveIsThatOfFreshObjects) {
  const auto change = [&](std::int64_t step) {
    for (std::size_t a = 0; a < 3; ++a) {
      for (std::size_t i = 0; i < arenas_[a].size(); ++i) {
        arenas_[a][i] = std::sin(static_cast<float>(step * 1000 + static_cast<std::int64_t>(i + 7 * a)));
      }
    }
  };
  constexpr std::int64_t kCannotWrite[] = {4, 7}, kNotFinite[] = {5, 9}, kLast = 11;
  const auto is_one_of = [](std::span<const std::int64_t> steps, std::int64_t step) {
    return std::find(steps.begin(), steps.end(), step) != steps.end();
  };
  for (std::int64_t step = 3; step <= kLast; ++step) {
    change(step);
    if (!is_one_of(kCannotWrite, step) && !is_one_of(kNotFinite, step)) save_alone("alone", step);
  }
  const RunDirectory directory(temporary_.file("run"));
  CheckpointKeeper keeper(directory, identity(), 100);
  const Ranges ranges = in_turns(3, 100);
  run_ranks(Ranks::sockets, 3, 20, [&](Communicator& ranks) {
    const auto rank = static_cast<std::size_t>(ranks.rank());
    std::int64_t now = 0;
    PartCopy copy(arenas_, ranges[rank]);
    copy.before_read = [&](TensorRole role, const TensorSpec&) {
      if (rank == 1 && role == TensorRole::state2 && is_one_of(kCannotWrite, now)) {
        fail(Exit::resources, "no space left");
      }
    };
    JointSave save(ranks, rank == 0 ? &keeper : nullptr, adamw_optimizer(), *table_, ranges[rank]);
    for (now = 3; now <= kLast; ++now) {
      ranks.barrier();
      if (rank == 0) {
        change(now);
        if (is_one_of(kNotFinite, now)) arenas_[1][200] = std::numeric_limits<float>::infinity();
      }
      ranks.barrier();
      const std::optional<Error> error = error_from([&] { save.save(state_of(now), copy, {}); });
      const bool bad = is_one_of(kNotFinite, now) && rank == 0;  // the others hear it from the first one's loop
      EXPECT_EQ(error ? error->code() : Exit::ok, is_one_of(kCannotWrite, now) ? Exit::resources
                                                  : bad                        ? Exit::numeric
                                                                               : Exit::ok)
          << now;
      EXPECT_FALSE(save.ended());
    }
  });
  for (std::int64_t step = 3; step <= kLast; ++step) {
    if (is_one_of(kCannotWrite, step) || is_one_of(kNotFinite, step)) {
      EXPECT_FALSE(fs::exists(step_path("run", step))) << step;
    } else {
      expect_same_files("run", "alone", step);
    }
  }
  EXPECT_EQ(keeper.last_saved(), kLast);
}

TEST_F(JointSaveTest, AValueThatIsNotFiniteIsFoundInTheFirstAndTheLastPlaceOfATensor) {
  const TensorSpec& spec = table_->specs()[3];
  for (std::size_t a = 0; a < 3; ++a) {
    for (const std::int64_t place : {std::int64_t{0}, spec.elements - 1}) {
      float& value = arenas_[a][static_cast<std::size_t>(spec.offset + place)];
      const float before = std::exchange(value, std::numeric_limits<float>::infinity());
      const std::vector<std::string> errors = save_together("run", 3, in_turns(2, 100));
      value = before;
      expect_contains(errors[0], format("%s: element %lld is inf",
                                        state_tensor_name(adamw_optimizer(), kStateRoles[a], spec).c_str(),
                                        static_cast<long long>(place)));
      EXPECT_FALSE(fs::exists(step_path("run", 3)));
    }
  }
}

// A disk may take longer than ranks wait for each other.
TEST_F(JointSaveTest, TheOthersWaitForARankWhoseDiskIsSlow) {
  const auto slow = [](int rank, PartCopy& copy) {
    if (rank != 1) return;
    copy.before_read = [first = std::make_shared<std::atomic<bool>>(true)](TensorRole, const TensorSpec&) {
      if (first->exchange(false)) std::this_thread::sleep_for(std::chrono::milliseconds(1700));
    };
  };
  for (const std::string& error : save_together("run", 3, in_turns(3, 100), slow, Ranks::sockets, 1)) {
    EXPECT_EQ(error, "");
  }
  EXPECT_TRUE(fs::exists(step_path("run", 3)));
}

// A rank that dies: the others' saves end, now and from then on, and say so.
TEST_F(JointSaveTest, WithoutARankNoLaterSaveCanSucceed) {
  const RunDirectory directory(temporary_.file("run"));
  CheckpointKeeper keeper(directory, identity(), 10);
  const std::unique_ptr<TrainModel> model = cpu::make_training_model(config_, micro_settings().model_options());
  error_of(Exit::environment, [&] {
    run_thread_ranks(3, 20, [&](Communicator& ranks) {
      const std::vector<Range> own = in_turns(3, 100)[static_cast<std::size_t>(ranks.rank())];
      auto save =
          std::make_unique<JointSave>(ranks, ranks.rank() == 0 ? &keeper : nullptr, adamw_optimizer(), *table_, own);
      if (ranks.rank() == 1) return;
      BackgroundSave saves(std::move(save), std::make_unique<PartCopy>(arenas_, own));
      for (const std::int64_t step : {3, 4}) {
        saves.start(state_of(step), *model);
        const std::optional<BackgroundSave::Result> result = saves.wait();
        ASSERT_TRUE(result && result->error);
        expect_contains(result->error->what(), "rank 1 has ended");
        EXPECT_TRUE(result->was_last);
      }
      ranks.check();
    });
  });
  EXPECT_FALSE(fs::exists(step_path("run", 3)));
  EXPECT_FALSE(fs::exists(step_path("run", 3) + ".tmp"));
}

// ---- who writes ----

SaveWriters writers_of(const std::string& directory, Shard shard, bool one_machine = true) {
  SaveWriters of_all[3];
  run_thread_ranks(3, 20, [&](Communicator& ranks) {
    const auto rank = static_cast<std::size_t>(ranks.rank());
    of_all[rank] = choose_save_writers(ranks, rank == 0 ? directory : "elsewhere", shard, one_machine);
  });
  for (const SaveWriters& writers : of_all) {
    EXPECT_EQ(writers.all, of_all[0].all);
    EXPECT_EQ(writers.reason, of_all[0].reason);
  }
  return of_all[0];
}

TEST(SaveWriters, AllWriteADividedStateIntoADirectoryOfAll) {
  const TemporaryDirectory temporary;
  const std::string directory = temporary.file("run");
  fs::create_directory(directory);
  for (const Shard shard : {Shard::optimizer, Shard::gradients, Shard::parameters}) {
    EXPECT_TRUE(writers_of(directory, shard).all);
    EXPECT_TRUE(writers_of(directory, shard, false).all);
  }
  SingleRank alone;
  const SaveWriters one = choose_save_writers(alone, directory, Shard::optimizer, true);
  const SaveWriters whole = writers_of(directory, Shard::none);
  EXPECT_TRUE(!one.all && one.reason.empty());
  EXPECT_TRUE(!whole.all && whole.reason.empty()) << "there is nothing to divide";
  EXPECT_TRUE(fs::is_empty(directory)) << "the file that tells them is removed";
}

TEST(SaveWriters, TheEnvironmentMayAskForTheFirstRank) {
  const TemporaryDirectory temporary;
  ::setenv("WEFT_SAVE", "first", 1);
  const SaveWriters first = writers_of(temporary.file("."), Shard::optimizer);
  ::setenv("WEFT_SAVE", "ranks", 1);
  const SaveWriters all = writers_of(temporary.file("."), Shard::optimizer);
  ::setenv("WEFT_SAVE", "second", 1);
  const std::string refused = error_of(Exit::usage, [&] { writers_of(temporary.file("."), Shard::optimizer); });
  ::unsetenv("WEFT_SAVE");
  EXPECT_FALSE(first.all);
  EXPECT_EQ(first.reason, "WEFT_SAVE=first");
  EXPECT_TRUE(all.all);
  expect_contains(refused, "WEFT_SAVE: got 'second', expected first or ranks");
}

// A file that does not keep what another rank writes, as where machines have directories of the same name: here one rank finds
// another file, because somebody replaces it.
TEST(SaveWriters, TheFirstRankWritesWhereTheOthersDoNotSeeItsFiles) {
  const TemporaryDirectory temporary;
  static std::string probe;
  probe = temporary.file("ranks.probe");
  set_call_fault([](const char* call, const std::string& path) {
    if (std::string(call) == "sync" && path == parent_directory(probe)) fs::remove(probe);
    return true;
  });
  for (const char* wanted : {"", "ranks"}) {  // who asks for it does not make them see the files
    ::setenv("WEFT_SAVE", wanted, 1);
    for (const bool one_machine : {true, false}) {
      const SaveWriters hidden = writers_of(parent_directory(probe), Shard::optimizer, one_machine);
      EXPECT_FALSE(hidden.all);
      expect_contains(hidden.reason, "the ranks do not write one --out: rank 1: ");
      expect_contains(hidden.reason, "No such file");
    }
    const SaveWriters nowhere = writers_of(temporary.file("missing"), Shard::optimizer);
    EXPECT_FALSE(nowhere.all);
    expect_contains(nowhere.reason, "rank 0: ");
  }
  ::unsetenv("WEFT_SAVE");
  // A file of the same name that another run has left, of as many ranks or of fewer.
  static std::size_t left_bytes;
  set_call_fault([](const char* call, const std::string& path) {
    if (std::string(call) == "sync" && path == parent_directory(probe)) write_bytes(probe, std::string(left_bytes, 2));
    return true;
  });
  for (const std::size_t bytes : {24u, 16u}) {
    left_bytes = bytes;
    const SaveWriters other = writers_of(parent_directory(probe), Shard::optimizer);
    EXPECT_FALSE(other.all);
    expect_contains(other.reason, "rank 1: ");
    expect_contains(other.reason, "not what rank 0 has written");
  }
  static std::atomic<int> synced;
  synced = 0;
  set_call_fault([](const char* call, const std::string& path) {
    // The first rank's file, and behind it the answers of two.
    if (std::string(call) == "sync" && path == probe && ++synced == 3) write_bytes(probe, std::string(24, '\x01'));
    return true;
  });
  const SaveWriters lost = writers_of(parent_directory(probe), Shard::optimizer);
  set_call_fault(nullptr);
  EXPECT_FALSE(lost.all);
  expect_contains(lost.reason, "without what rank 0 has written");
  EXPECT_TRUE(fs::is_empty(parent_directory(probe))) << "the file that tells them is removed";
}

}  // namespace
}  // namespace weft
