// Run directories and checkpoints: whatever happens to a save or to the files afterwards, a run goes on from
// the newest state that is whole, or says why it cannot.
#include "llmc/train/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <new>
#include <thread>

#include "llmc/base/log.h"
#include "llmc/train/background_save.h"
#include "llmc/train/run_log.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

int writes_until_fault = 0;  // of the hooks below

class CheckpointTest : public testing::Test {
 protected:
  void SetUp() override {
    write_shard(temporary_.file("train.bin"), patterned_tokens(200));
    data_.emplace(temporary_.file("train.bin"), 8);
    settings_ = micro_settings();
    model_ = micro_model(settings_);
  }

  // A state that differs from step to step in everything that a checkpoint keeps.
  TrainState make_state(std::int64_t step) {
    fill(TensorRole::parameter, static_cast<float>(step));
    fill(TensorRole::moment1, static_cast<float>(step) + 0.25f);
    fill(TensorRole::moment2, static_cast<float>(step) + 0.5f);
    TrainState state;
    state.step = step;
    state.updates = step > 0 ? step - 1 : 0;
    state.skipped = step - state.updates;
    state.windows = static_cast<std::uint64_t>(step) * 2;
    state.micro_steps = static_cast<std::uint64_t>(step);
    state.loss = 1.0 / 3.0 + static_cast<double>(step);
    for (int i = 0; i < 40; ++i) state.spikes.observe(std::sqrt(i + 2.0));
    return state;
  }
  void fill(TensorRole role, float base) {
    std::vector<float> values;
    for (const TensorSpec& spec : model_->table().specs()) {
      values.resize(static_cast<std::size_t>(spec.elements));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = base + 1.0f / static_cast<float>(i + 3);
      model_->write_tensor(role, spec, values.data());
    }
  }

  RunIdentity identity() const { return micro_identity(settings_, *data_); }
  std::string run_path() const { return temporary_.file("run"); }
  std::string step_path(std::int64_t step) const {
    return run_path() + format("/step_%08lld", static_cast<long long>(step));
  }
  void save(std::int64_t step, std::int64_t keep = 100) {
    const RunDirectory run(run_path());
    CheckpointKeeper(run, identity(), keep).save(make_state(step), *model_);
  }
  // The step that a run would go on from; -1 for a fresh start.
  std::int64_t resumed_step(ResumeMode mode = ResumeMode::automatic) {
    const RunDirectory run(run_path());
    CheckpointKeeper keeper(run, identity(), 2);
    const std::optional<TrainState> state = keeper.resume(mode, *model_);
    return state ? state->step : -1;
  }

  TemporaryDirectory temporary_;
  std::optional<TokenDataset> data_;
  TrainSettings settings_;
  std::unique_ptr<TrainModel> model_;
};

TEST_F(CheckpointTest, BringsBackEveryBit) {
  const TrainState saved = make_state(3);
  const std::vector<float> expected = whole_state(*model_);
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  EXPECT_EQ(keeper.save(saved, *model_), step_path(3));
  make_state(9);
  const std::optional<TrainState> state = keeper.resume(ResumeMode::automatic, *model_);
  ASSERT_TRUE(state.has_value());
  EXPECT_TRUE(*state == saved);
  EXPECT_EQ(whole_state(*model_), expected);
}

TEST_F(CheckpointTest, ItsModelIsAModelFileWithTheTokenizer) {
  save(3);
  const ModelFile file = ModelFile::open(step_path(3) + "/model.bin", Family::llama);
  EXPECT_TRUE(file.config() == micro_config());
  EXPECT_EQ(file.tokenizer_json(), identity().tokenizer);
}

TEST_F(CheckpointTest, TheNewestWins) {
  save(3);
  save(9);
  save(7);
  EXPECT_EQ(resumed_step(), 9);
}

TEST_F(CheckpointTest, EmptyDirectoryAndTheThreeModes) {
  EXPECT_EQ(resumed_step(), -1);
  EXPECT_EQ(resumed_step(ResumeMode::never), -1) << "only the lock is there";
  expect_contains(error_of(Exit::bad_file, [&] { resumed_step(ResumeMode::must); }), "no checkpoint");
  save(3);
  EXPECT_EQ(resumed_step(ResumeMode::must), 3);
  expect_contains(error_of(Exit::usage, [&] { resumed_step(ResumeMode::never); }), "not empty");
}

// The process dies at each write of a save in turn: the run must find the older checkpoint, every time.
TEST_F(CheckpointTest, DyingAtAnyWriteLeavesTheOlderCheckpoint) {
  save(3);
  int write = 0;
  for (bool died = true; died; ++write) {
    ASSERT_LT(write, 10000);
    const pid_t child = ::fork();
    if (child == 0) {
      writes_until_fault = write;
      set_write_fault([](const std::string&, std::uint64_t, std::size_t bytes) {
        if (writes_until_fault-- == 0) ::_exit(99);
        return bytes;
      });
      save(6);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    died = WEXITSTATUS(status) == 99;
    if (died) {
      EXPECT_TRUE(fs::exists(step_path(6) + ".tmp")) << "write " << write;
      ASSERT_EQ(resumed_step(), 3) << "write " << write;
      EXPECT_FALSE(fs::exists(step_path(6) + ".tmp")) << "the next run cleans up";
    }
  }
  EXPECT_GT(write, 10) << "the hook must have seen many writes";
  EXPECT_EQ(resumed_step(), 6);
}

TEST_F(CheckpointTest, FailingAtAnyWriteRemovesTheAttempt) {
  save(3);
  int write = 0;
  for (bool failed = true; failed; ++write) {
    writes_until_fault = write;
    set_write_fault([](const std::string&, std::uint64_t, std::size_t bytes) {
      if (writes_until_fault-- == 0) fail(Exit::resources, "no space left");
      return bytes;
    });
    try {
      save(6, 2);
      failed = false;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::resources);
      EXPECT_FALSE(fs::exists(step_path(6) + ".tmp"));
      EXPECT_FALSE(fs::exists(step_path(6)));
      EXPECT_TRUE(fs::exists(step_path(3)));
    }
    set_write_fault(nullptr);
  }
  EXPECT_GT(write, 10);
  EXPECT_EQ(resumed_step(), 6);
}

// At every sync, rename and removal of a save that replaces a checkpoint and removes another one: at no moment is there
// none.
TEST_F(CheckpointTest, DyingAtAnyCallLeavesACheckpoint) {
  int call = 0;
  for (bool died = true; died; ++call) {
    ASSERT_LT(call, 100);
    fs::remove_all(run_path());
    for (const int step : {2, 4, 6}) save(step);
    fs::resize_file(step_path(6) + "/state.bin", 5000);  // the run reaches its step again and replaces it
    const pid_t child = ::fork();
    if (child == 0) {
      writes_until_fault = call;
      set_call_fault([](const char*, const std::string&) {
        if (writes_until_fault-- == 0) ::_exit(99);
        return true;
      });
      const RunDirectory run(run_path());
      CheckpointKeeper keeper(run, identity(), 2);
      keeper.resume(ResumeMode::automatic, *model_);
      keeper.save(make_state(6), *model_);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    died = WEXITSTATUS(status) == 99;
    const std::int64_t step = resumed_step();
    ASSERT_TRUE(step == 6 || (died && step == 4)) << "call " << call << " left " << step;
  }
  EXPECT_EQ(call - 1, 3 * 3 + 5 + 3)
      << "three files; old name away, new name, their syncs, removal; one old checkpoint";
}

// Every file of the newest checkpoint cut at many lengths, and with single bits flipped all over.
TEST_F(CheckpointTest, DamageIsFoundWhereverItIs) {
  save(3);
  save(6);
  const std::vector<float> state_6 = whole_state(*model_);
  int found = 0;
  for (const char* name : {"model.bin", "state.bin", "manifest.json"}) {
    const std::string path = step_path(6) + "/" + name, whole = read_bytes(path);
    const std::size_t stride = whole.size() / 23 + 1;
    for (std::size_t length = 0; length < whole.size(); length += stride) {
      write_bytes(path, whole.substr(0, length));
      ASSERT_EQ(resumed_step(), 3) << name << " cut to " << length;
    }
    for (std::size_t at = stride / 2; at < whole.size(); at += stride) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ 0x04);
      write_bytes(path, damaged);
      // A flip in the gap between two tensors, or in "made_by", decides nothing: the state must then be the
      // saved one.
      const std::int64_t step = resumed_step();
      ASSERT_TRUE(step == 3 || (step == 6 && whole_state(*model_) == state_6)) << name << " flipped at " << at;
      found += step == 3;
    }
    write_bytes(path, whole);
    fs::remove(path);
    ASSERT_EQ(resumed_step(), 3) << name << " removed";
    write_bytes(path, whole);
    ASSERT_EQ(resumed_step(), 6);
  }
  EXPECT_GT(found, 40) << "of 69 flips";
}

TEST_F(CheckpointTest, MustInsistsOnTheNewest) {
  save(3);
  save(6);
  fs::resize_file(step_path(6) + "/state.bin", 5000);
  expect_contains(error_of(Exit::bad_file, [&] { resumed_step(ResumeMode::must); }), "step_00000006");
  EXPECT_EQ(resumed_step(ResumeMode::automatic), 3);
}

TEST_F(CheckpointTest, AllDamagedIsNeverAFreshStart) {
  save(3);
  save(6);
  for (const int step : {3, 6}) fs::resize_file(step_path(step) + "/model.bin", 5000);
  expect_contains(error_of(Exit::bad_file, [&] { resumed_step(); }), "none of its 2 checkpoints");
}

TEST_F(CheckpointTest, ManifestWordsMustAgreeWithTheFiles) {
  save(3);
  save(6);
  const std::string path = step_path(6) + "/manifest.json", whole = read_bytes(path);
  for (const char* key : {"\"step\": 6", "\"windows\": 12", "\"updates\": 5", "\"world_size\": 1"}) {
    std::string changed = whole;
    const std::size_t at = changed.find(key);
    ASSERT_NE(at, std::string::npos) << key;
    changed[at + std::string(key).size() - 1] = '7';
    write_bytes(path, changed);
    EXPECT_EQ(resumed_step(), 3) << key;
  }
}

TEST_F(CheckpointTest, RenamedCheckpointIsNotBelieved) {
  save(3);
  save(6);
  fs::rename(step_path(6), step_path(9));
  EXPECT_EQ(resumed_step(), 3);
}

TEST_F(CheckpointTest, FilesOfTwoCheckpointsDoNotMix) {
  for (const int step : {3, 6, 9}) save(step);
  for (const char* name : {"/state.bin", "/model.bin", "/manifest.json"}) {
    const std::string whole = read_bytes(step_path(9) + name);
    write_bytes(step_path(9) + name, read_bytes(step_path(6) + name));
    EXPECT_EQ(resumed_step(), 6) << name;
    write_bytes(step_path(9) + name, whole);
  }
  EXPECT_EQ(resumed_step(), 9);
}

TEST_F(CheckpointTest, NotFiniteValuesAreNoState) {
  save(3);
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  const TrainState state = make_state(6);
  const TensorSpec& spec = model_->table().specs().back();
  std::vector<float> values(static_cast<std::size_t>(spec.elements), 1.0f);
  values.back() = std::numeric_limits<float>::quiet_NaN();
  model_->write_tensor(TensorRole::moment2, spec, values.data());
  expect_contains(error_of(Exit::bad_file, [&] { keeper.save(state, *model_); }), "not finite");
  EXPECT_EQ(keeper.resume(ResumeMode::automatic, *model_)->step, 3);
}

TEST_F(CheckpointTest, StrangeNamesAreSkippedAndCounted) {
  fs::create_directories(run_path());
  write_bytes(run_path() + "/step_00000005", "a file");
  fs::create_directory(run_path() + "/step_99999999999999999999");
  fs::create_directory(run_path() + "/step_7");
  fs::create_symlink("step_00000008", step_path(8));
  expect_contains(error_of(Exit::bad_file, [&] { resumed_step(); }), "none of its 4");
  save(3);
  EXPECT_EQ(resumed_step(), 3);
  EXPECT_TRUE(fs::exists(run_path() + "/step_00000005")) << "what weft did not write it does not remove";
}

TEST_F(CheckpointTest, StaleTemporariesGoAtTheNextStart) {
  fs::create_directories(step_path(9) + ".tmp");
  write_bytes(step_path(9) + ".tmp/model.bin", "half");
  fs::create_directories(step_path(4) + ".replaced.tmp");
  EXPECT_EQ(resumed_step(), -1);
  EXPECT_FALSE(fs::exists(step_path(9) + ".tmp"));
  EXPECT_FALSE(fs::exists(step_path(4) + ".replaced.tmp"));
}

TEST_F(CheckpointTest, KeepsTheNewestOnes) {
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  for (const int step : {2, 4, 6, 8}) {
    keeper.save(make_state(step), *model_);
    EXPECT_TRUE(fs::exists(step_path(step)));
    EXPECT_EQ(fs::exists(step_path(step - 2)), step > 2) << "one older stays";
    EXPECT_FALSE(fs::exists(step_path(step - 4)));
  }
  EXPECT_THROW(CheckpointKeeper(run, identity(), 1), Error);
  EXPECT_THROW(CheckpointKeeper(run, identity(), 0), Error);
}

// A damaged newer checkpoint must not push a whole one out.
TEST_F(CheckpointTest, OnlyWholeOnesCountTowardsKeep) {
  save(2);
  save(4);
  fs::resize_file(step_path(4) + "/model.bin", 5000);
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  EXPECT_EQ(keeper.resume(ResumeMode::automatic, *model_)->step, 2);
  keeper.save(make_state(6), *model_);
  EXPECT_TRUE(fs::exists(step_path(2)));
  keeper.save(make_state(4), *model_);  // the run reaches the damaged step again and replaces it
  EXPECT_EQ(Checkpoint::open(step_path(4), 4).state().step, 4);
}

TEST_F(CheckpointTest, OtherSettingsAreRefusedByName) {
  save(3);
  settings_.lr = 0.5;
  const std::string message = error_of(Exit::usage, [&] { resumed_step(); });
  expect_contains(message, "--lr");
  expect_contains(message, "0.5");
  settings_ = micro_settings();
  settings_.seed = 4;
  expect_contains(error_of(Exit::usage, [&] { resumed_step(); }), "--seed");
  settings_ = micro_settings();
  settings_.schedule = "wsd";
  error_of(Exit::usage, [&] { resumed_step(); });
  settings_ = micro_settings();
  settings_.save_every = 3;  // decides no number
  EXPECT_EQ(resumed_step(), 3);
}

TEST_F(CheckpointTest, StepsCanBeAddedNotTakenAway) {
  save(3);
  settings_.steps = 20;
  EXPECT_EQ(resumed_step(), 3);
  settings_.steps = 9;
  expect_contains(error_of(Exit::usage, [&] { resumed_step(); }), "--steps");
}

TEST_F(CheckpointTest, OtherDataIsRefused) {
  save(3);
  write_shard(temporary_.file("train2.bin"), patterned_tokens(200));
  data_.emplace(temporary_.file("train*.bin"), 8);
  expect_contains(error_of(Exit::bad_file, [&] { resumed_step(); }), "2 shards");
  write_shard(temporary_.file("train.bin"), patterned_tokens(200, 1));
  data_.emplace(temporary_.file("train.bin"), 8);
  expect_contains(error_of(Exit::bad_file, [&] { resumed_step(); }), "other content");
}

TEST_F(CheckpointTest, OtherModelIsRefused) {
  save(3);
  const RunDirectory run(run_path());
  RunIdentity other = identity();
  other.model.num_layers = 2;
  CheckpointKeeper keeper(run, other, 2);
  expect_contains(error_of(Exit::usage, [&] { keeper.resume(ResumeMode::automatic, *model_); }), "num_layers");
}

// ---- saving in the background ----

// A hook that holds the writing thread up until the test lets it go.
std::atomic<bool> writer_may_go{true};
std::atomic<int> writes_seen{0};
std::size_t wait_at_write(const std::string&, std::uint64_t, std::size_t bytes) {
  ++writes_seen;
  while (!writer_may_go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return bytes;
}

class BackgroundSaveTest : public CheckpointTest {
 protected:
  void SetUp() override {
    CheckpointTest::SetUp();
    writer_may_go = true;
    writes_seen = 0;
  }
  void TearDown() override {
    writer_may_go = true;
    set_write_fault(nullptr);
    set_call_fault(nullptr);
  }
};

TEST_F(BackgroundSaveTest, WritesTheStateOfItsBeginningWhateverComesAfter) {
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  BackgroundSave saves(keeper, model_->make_state_copy());
  EXPECT_FALSE(saves.poll().has_value());
  EXPECT_FALSE(saves.wait().has_value());
  const TrainState state = make_state(3);
  const std::vector<float> expected = whole_state(*model_);
  writer_may_go = false;
  set_write_fault(wait_at_write);
  saves.start(state, *model_);
  make_state(9);  // training goes on
  EXPECT_FALSE(saves.poll().has_value());
  error_of(Exit::internal, [&] { saves.start(state, *model_); });
  writer_may_go = true;
  const std::optional<BackgroundSave::Result> result = saves.wait();
  ASSERT_TRUE(result.has_value());
  EXPECT_FALSE(result->error.has_value());
  EXPECT_EQ(result->step, 3);
  EXPECT_EQ(result->path, step_path(3));
  EXPECT_GE(result->seconds, result->stalled_seconds);
  EXPECT_FALSE(saves.wait().has_value()) << "a result is given once";
  EXPECT_EQ(keeper.last_saved(), 3);
  EXPECT_TRUE(*keeper.resume(ResumeMode::must, *model_) == state);
  EXPECT_EQ(whole_state(*model_), expected);
}

TEST_F(BackgroundSaveTest, TheSameBytesAsASaveThatWaits) {
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 10);
  BackgroundSave with_copy(keeper, model_->make_state_copy()), without(keeper, nullptr);
  const auto files = [&](std::int64_t step) {
    std::string bytes;
    for (const char* name : {"/model.bin", "/state.bin", "/manifest.json"}) bytes += read_bytes(step_path(step) + name);
    std::filesystem::remove_all(step_path(step));
    return bytes;
  };
  const TrainState state = make_state(3);
  with_copy.start(state, *model_);
  ASSERT_FALSE(with_copy.wait()->error.has_value());
  const std::string background = files(3);
  without.start(state, *model_);
  const std::optional<BackgroundSave::Result> at_once = without.poll();
  ASSERT_TRUE(at_once.has_value()) << "without a copy start() is the save";
  EXPECT_EQ(at_once->stalled_seconds, at_once->seconds);
  EXPECT_EQ(files(3), background);
  EXPECT_FALSE(without.save_now(state, *model_).error.has_value());
  EXPECT_EQ(files(3), background);
}

TEST_F(BackgroundSaveTest, ErrorsAreResultsAndTheNextSaveWorks) {
  save(1);
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  BackgroundSave saves(keeper, model_->make_state_copy());
  const auto failing = [&](void (*arm)()) {
    arm();
    saves.start(make_state(3), *model_);
    const std::optional<BackgroundSave::Result> result = saves.wait();
    set_write_fault(nullptr);
    set_call_fault(nullptr);
    EXPECT_TRUE(result && result->error && result->path.empty());
    EXPECT_FALSE(fs::exists(step_path(3)));
    EXPECT_FALSE(fs::exists(step_path(3) + ".tmp"));
    return *result->error;
  };
  const Error full = failing([] {
    set_write_fault(
        [](const std::string&, std::uint64_t, std::size_t) -> std::size_t { fail(Exit::resources, "no space left"); });
  });
  EXPECT_EQ(full.code(), Exit::resources);
  EXPECT_STREQ(full.what(), "no space left");
  EXPECT_EQ(
      failing([] {
        set_write_fault([](const std::string&, std::uint64_t, std::size_t) -> std::size_t { throw std::bad_alloc(); });
      }).code(),
      Exit::resources);
  expect_contains(failing([] { set_call_fault([](const char*, const std::string&) { return false; }); }).what(),
                  "Input/output error");
  EXPECT_EQ(keeper.last_saved(), -1);
  saves.start(make_state(3), *model_);
  EXPECT_FALSE(saves.wait()->error.has_value());
  EXPECT_EQ(keeper.last_saved(), 3);
}

TEST_F(BackgroundSaveTest, TheEndWaitsForTheWriter) {
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  std::thread release;
  {
    BackgroundSave saves(keeper, model_->make_state_copy());
    writer_may_go = false;
    set_write_fault(wait_at_write);
    saves.start(make_state(3), *model_);
    release = std::thread([] {
      while (writes_seen == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      writer_may_go = true;
    });
  }
  release.join();
  set_write_fault(nullptr);
  EXPECT_EQ(keeper.resume(ResumeMode::must, *model_)->step, 3);
}

TEST_F(BackgroundSaveTest, TheNewestOnesStayAndOldOnesGoAsWithSavesThatWait) {
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  BackgroundSave saves(keeper, model_->make_state_copy());
  for (const int step : {2, 4, 6, 8}) {
    saves.start(make_state(step), *model_);
    ASSERT_FALSE(saves.wait()->error.has_value());
  }
  EXPECT_EQ(run.checkpoints().size(), 2u);
}

TEST(SavePlanTest, ACopyHasToLeaveMemoryToOthers) {
  TrainSettings settings = micro_settings();
  EXPECT_EQ(plan_saves(settings, micro_config(), 0).line, "") << "saves only at the end";
  settings.save_every = 5;
  const SavePlan fits = plan_saves(settings, micro_config(), 0);
  EXPECT_TRUE(fits.in_background);
  expect_contains(fits.line, "in the background");
  const SavePlan too_large = plan_saves(settings, micro_config(), available_host_memory());
  EXPECT_FALSE(too_large.in_background);
  expect_contains(too_large.line, "training waits for each");
  settings.save_every = settings.steps;
  EXPECT_FALSE(plan_saves(settings, micro_config(), 0).in_background);
}

TEST(FreeMemory, IsPartOfWhatThereIs) {
  const std::uint64_t before = free_host_memory();
  EXPECT_GT(before, 0u);
  EXPECT_LE(before, available_host_memory());
}

TEST(RunDirectoryTest, OneRunAtATime) {
  const TemporaryDirectory temporary;
  const std::string path = temporary.file("a run with spaces\nand more");
  {
    const RunDirectory first(path);
    const std::string message = error_of(Exit::environment, [&] { RunDirectory second(path); });
    expect_contains(message, format("pid %d", static_cast<int>(::getpid())));
  }
  const RunDirectory third(path);  // released
}

TEST(RunDirectoryTest, LockOfADeadRunIsTakenOver) {
  const TemporaryDirectory temporary;
  const std::string path = temporary.file("run");
  const pid_t child = ::fork();
  if (child == 0) {
    const RunDirectory run(path);
    ::_exit(0);  // no destructor: as a kill would leave it
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  expect_contains(read_bytes(path + "/lock"), format("pid %d ", static_cast<int>(child)));
  testing::internal::CaptureStderr();
  const RunDirectory run(path);
  expect_contains(testing::internal::GetCapturedStderr(), format("pid %d ", static_cast<int>(child)));
}

TEST(RunDirectoryTest, PathsThatCannotBeADirectory) {
  const TemporaryDirectory temporary;
  write_bytes(temporary.file("file"), "x");
  error_of(Exit::usage, [&] { RunDirectory run(temporary.file("file")); });
  error_of(Exit::usage, [&] { RunDirectory run(temporary.file("file/run")); });
  error_of(Exit::usage, [&] { RunDirectory run(temporary.file(std::string(5000, 'x'))); });
}

std::vector<std::string> calls_seen;

// Whatever wrote the files, and whether or not that synced the directory: the name comes after the entries are safe.
TEST(RunDirectoryTest, ACheckpointIsSyncedBeforeItHasItsNameAndItsNameAfter) {
  const TemporaryDirectory temporary;
  const RunDirectory run(temporary.file("run"));
  write_bytes(run.begin_checkpoint(3) + "/model.bin", "x");
  calls_seen.clear();
  set_call_fault([](const char* call, const std::string& path) {
    calls_seen.push_back(std::string(call) + " " + fs::path(path).filename().string());
    return true;
  });
  run.commit_checkpoint(3);
  set_call_fault(nullptr);
  EXPECT_EQ(calls_seen, (std::vector<std::string>{"sync step_00000003.tmp", "rename step_00000003.tmp", "sync run"}));
}

TEST(RunLogTest, NumbersKeepEveryBitAndABrokenLastLineIsClosed) {
  const TemporaryDirectory temporary;
  const std::string path = temporary.file("log.jsonl");
  write_bytes(path, "{\"type\":\"step\",\"step\":1}\n{\"type\":\"st");
  const double loss = 2.0 / 3.0;
  {
    RunLog log(path);
    log.write({{"type", "step"}, {"loss", loss}});
    log.write({{"type", "step"}, {"loss", std::numeric_limits<double>::quiet_NaN()}});
    log.write({{"type", "sample"}, {"text", "\xff not UTF-8"}});
  }
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_EQ(lines[1], "{\"type\":\"st");
  EXPECT_EQ(Json::parse(lines[2])["loss"].get<double>(), loss);
  EXPECT_TRUE(Json::parse(lines[3])["loss"].is_null());
  EXPECT_TRUE(Json::parse(lines[4]).contains("text"));
}

TEST(RunLogTest, AFullDiskIsOneWarning) {
  testing::internal::CaptureStderr();
  RunLog log("/dev/full");
  for (int i = 0; i < 3; ++i) log.write({{"type", "step"}});
  const std::string messages = testing::internal::GetCapturedStderr();
  const std::size_t first = messages.find("warning");
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(messages.find("warning", first + 1), std::string::npos);
}

}  // namespace
}  // namespace weft
