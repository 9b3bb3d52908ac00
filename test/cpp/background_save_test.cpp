// Saving while training goes on.
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "llmc/train/background_save.h"
#include "test/cpp/checkpoint_tools.h"

namespace weft {
namespace {

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
  for (const std::int64_t step : {3, 5, 7}) {  // the later ones as the first
    EXPECT_FALSE(saves.in_progress());
    EXPECT_FALSE(saves.poll().has_value());
    EXPECT_FALSE(saves.wait().has_value());
    const TrainState state = make_state(step);
    const std::vector<float> expected = whole_state(*model_);
    writer_may_go = false;
    set_write_fault(wait_at_write);
    TrainState current = state;
    saves.start(current, *model_);
    current = make_state(9);  // training goes on
    std::thread limit([] {    // a call that waits for the writer would wait for ever
      for (int i = 0; i < 10000 && !writer_may_go; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      writer_may_go = true;
    });
    EXPECT_FALSE(saves.poll().has_value());
    EXPECT_FALSE(saves.wait_at_most(std::chrono::milliseconds(2)).has_value());
    EXPECT_TRUE(saves.in_progress());
    error_of(Exit::internal, [&] { saves.start(state, *model_); });
    EXPECT_FALSE(writer_may_go) << "nothing has waited for the writer";
    writer_may_go = true;
    limit.join();
    const std::optional<BackgroundSave::Result> result = saves.wait();
    ASSERT_TRUE(result.has_value());
    EXPECT_FALSE(result->error.has_value());
    EXPECT_EQ(result->step, step);
    EXPECT_EQ(result->path, step_path(step));
    EXPECT_GE(result->seconds, result->stalled_seconds);
    EXPECT_FALSE(saves.wait().has_value()) << "a result is given once";
    EXPECT_EQ(keeper.last_saved(), step);
    set_write_fault(nullptr);
    CheckpointKeeper later(run, identity(), 2);
    EXPECT_TRUE(*later.resume(ResumeMode::must, *model_) == state);
    EXPECT_EQ(whole_state(*model_), expected);
  }
}

// A save asks for a tensor in pieces of a quarter of a million values, more than these tensors have. Here the pieces are small.
TEST_F(BackgroundSaveTest, BothSourcesGiveEveryPieceOfATensor) {
  make_state(3);
  const std::unique_ptr<StateCopy> copy = model_->make_state_copy();
  copy->take();
  const TensorSource sources[] = {tensors_of(*model_), tensors_of(*copy, {})};
  for (const TensorRole role : {TensorRole::parameter, TensorRole::state1, TensorRole::state2}) {
    for (const TensorSpec& spec : model_->table().specs()) {
      const auto count = static_cast<std::size_t>(spec.elements);
      std::vector<float> expected(count);
      model_->read_tensor(role, spec, expected.data());
      for (const TensorSource& source : sources) {
        for (const std::size_t most : {count, count / 2 + 1, std::size_t{7}}) {
          std::vector<float> got, buffer(most);
          for (std::size_t first = 0; first < count; first += most) {
            const std::size_t size = std::min(most, count - first);
            const float* piece = source.read(role, spec, first, size, buffer.data());
            got.insert(got.end(), piece, piece + size);
          }
          EXPECT_EQ(got, expected) << spec.name << " in pieces of " << most;
        }
      }
    }
  }
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
  const auto begun = std::chrono::steady_clock::now();
  const BackgroundSave::Result waited = without.save_now(state, *model_);
  const std::chrono::duration<double> most = std::chrono::steady_clock::now() - begun;
  EXPECT_FALSE(waited.error.has_value());
  EXPECT_GT(waited.seconds, 0);
  EXPECT_LE(waited.seconds, most.count());
  EXPECT_EQ(waited.stalled_seconds, waited.seconds);
  EXPECT_EQ(files(3), background);
}

// Without a thread to be had, start() is the save, and training waited for all of it.
TEST_F(BackgroundSaveTest, WithoutAThreadTrainingWaitsAndTheResultSaysSo) {
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  BackgroundSave saves(keeper, model_->make_state_copy());
  const TrainState state = make_state(3);
  pthread_attr_t usual, huge;
  pthread_getattr_default_np(&usual);
  pthread_attr_init(&huge);
  pthread_attr_setstacksize(&huge, std::size_t{1} << 50);  // no address space has room for it: no thread can be created
  ASSERT_EQ(pthread_setattr_default_np(&huge), 0);
  saves.start(state, *model_);
  pthread_setattr_default_np(&usual);
  pthread_attr_destroy(&huge);
  pthread_attr_destroy(&usual);
  const std::optional<BackgroundSave::Result> result = saves.poll();
  ASSERT_TRUE(result.has_value()) << "it is done";
  ASSERT_FALSE(result->error.has_value()) << result->error->what();
  EXPECT_GT(result->stalled_seconds, 0);
  EXPECT_GE(result->stalled_seconds, 0.9 * result->seconds);
}

// What another program does to the run directory meanwhile is an error of the run, never an exception of std::filesystem.
TEST_F(BackgroundSaveTest, AFileThatDisappearsWhileItIsSavedIsAnError) {
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  static std::string gone;
  gone = run_path() + "/step_00000003.tmp/model.bin";
  set_call_fault([](const char* call, const std::string& path) {
    if (std::string(call) == "sync" && path == parent_directory(gone)) std::filesystem::remove(gone);
    return true;
  });
  const TrainState state = make_state(3);
  const std::string message = error_of(Exit::environment, [&] { keeper.save(state, *model_); });
  expect_contains(message, "model.bin");
}

TEST_F(BackgroundSaveTest, ARunDirectoryThatBecomesALinkLoopIsAnError) {
  const RunDirectory run(run_path());
  static std::string directory;
  directory = run_path();
  run.begin_checkpoint(3);
  set_call_fault([](const char* call, const std::string& path) {
    if (std::string(call) == "sync" && path.ends_with(".tmp")) {
      std::filesystem::rename(directory, directory + ".moved");
      std::filesystem::create_symlink(directory, directory);
    }
    return true;
  });
  const std::string message = error_of(Exit::environment, [&] { run.commit_checkpoint(3); });
  expect_contains(message, "step_00000003");
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

TEST_F(BackgroundSaveTest, EachSaveIsTimedFromItsOwnBeginning) {
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  BackgroundSave saves(keeper, model_->make_state_copy());
  for (const std::int64_t step : {3, 4, 5}) {
    const auto begin = std::chrono::steady_clock::now();
    saves.start(make_state(step), *model_);
    const std::optional<BackgroundSave::Result> result = saves.wait();
    ASSERT_TRUE(result && !result->error);
    EXPECT_LE(result->seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
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
  settings.keep_best = true;  // a new lowest loss may come at any step, whatever --save-every says
  for (const std::int64_t every : {std::int64_t{0}, settings.steps}) {
    settings.save_every = every;
    EXPECT_TRUE(plan_saves(settings, micro_config(), 0).in_background) << every;
  }
}

}  // namespace
}  // namespace weft
