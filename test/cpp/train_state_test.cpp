// What a run carries from one use to the next: each member of its state through a checkpoint, and each object that is used many
// times. Used again, behind a success or a failure, it does what a fresh one does; a call that fails has changed nothing.
#include "llmc/base/json.h"
#include "llmc/train/checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <thread>

#include "llmc/base/error_from.h"
#include "llmc/base/philox.h"
#include "llmc/model/fp8.h"
#include "llmc/train/background_save.h"
#include "llmc/train/data_order.h"
#include "llmc/train/fault_injection.h"
#include "llmc/train/joint_save.h"
#include "llmc/train/schedule.h"
#include "test/cpp/sanitized.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// A number in [0, 1) that depends on two others alone.
double random_number(std::uint64_t a, std::uint64_t b) {
  return philox(77, a, b).word[0] * 0x1p-32;
}

// ---- each member ----

struct Change {
  const char* name;  // of the member in the JSON object
  std::function<void(TrainState&)> change;
};
// Changes each member of a state. A new member does not compile until it is here.
std::vector<Change> changes_of_state() {
  TrainState state;
  [[maybe_unused]] auto& [step, updates, windows, micro_steps, skipped, transient, loss, val_loss, spikes, best,
                          best_on] = state;
  return {{"step", [](TrainState& s) { ++s.step; }},
          {"updates", [](TrainState& s) { ++s.updates; }},
          {"windows", [](TrainState& s) { ++s.windows; }},
          {"micro_steps", [](TrainState& s) { ++s.micro_steps; }},
          {"skipped", [](TrainState& s) { ++s.skipped; }},
          {"transient", [](TrainState& s) { ++s.transient; }},
          {"loss", [](TrainState& s) { s.loss = std::nextafter(*s.loss, 1); }},
          {"loss", [](TrainState& s) { s.loss.reset(); }},
          {"val_loss", [](TrainState& s) { s.val_loss = std::nextafter(*s.val_loss, 1); }},
          {"val_loss", [](TrainState& s) { s.val_loss.reset(); }},
          {"spikes", [](TrainState& s) { s.spikes.observe(1, 1); }},
          {"best", [](TrainState& s) { ++s.best->step; }},
          {"best", [](TrainState& s) { s.best->val_loss = std::nextafter(s.best->val_loss, 1); }},
          {"best", [](TrainState& s) { s.best.reset(); }},
          {"best_on", [](TrainState& s) { s.best_on += "b"; }}};
}

TEST(TrainStateMembers, EachIsWrittenUnderItsNameAndComesBack) {
  const TrainState state = some_state();
  const Json before = state.to_json(), untouched = TrainState{}.to_json();
  std::set<std::string> seen;
  for (const auto& [name, change] : changes_of_state()) {
    TrainState changed = state;
    change(changed);
    EXPECT_FALSE(changed == state) << name;
    const Json json = changed.to_json();
    for (const auto& [key, value] : before.items()) EXPECT_EQ(json.value(key, Json()) == value, key != name) << key;
    EXPECT_TRUE(TrainState::from_json(json, "state") == changed) << name << " " << json;
    EXPECT_NE(before.at(name), untouched.value(name, Json())) << name;
    seen.insert(name);
  }
  for (const auto& [key, value] : before.items()) EXPECT_TRUE(seen.contains(key)) << key << " is changed by nothing";
}

// Each number of a detector by itself, so that no two are exchanged.
TEST(TrainStateMembers, EachNumberOfTheDetectorComesBack) {
  const Json before = some_state().spikes.to_json();
  EXPECT_EQ(before["observed"], 40);
  EXPECT_EQ(before["quiet"], 14);
  for (const auto& [key, value] : before.items()) {
    Json changed = before;
    if (value.is_number_integer()) {
      changed[key] = value.get<std::int64_t>() + 1;
    } else {
      changed[key] = std::nextafter(value.get<double>(), 1e9);
    }
    const SpikeDetector back = SpikeDetector::from_json(changed, "state");
    EXPECT_EQ(back.to_json(), changed) << key;
    EXPECT_FALSE(back == some_state().spikes) << key;
  }
}

// ---- checkpoints ----

class StateTest : public testing::Test {
 protected:
  void SetUp() override {
    write_shard(temporary_.file("train.bin"), patterned_tokens(200));
    data_.emplace(temporary_.file("train.bin"), 8);
    settings_ = micro_settings();
    settings_.steps = 1000;
    model_ = micro_model(settings_);
  }
  void TearDown() override { set_call_fault(nullptr); }

  RunIdentity identity() const { return micro_identity(settings_, *data_); }
  std::string step_path(const std::string& run, std::int64_t step) const {
    return temporary_.file(run) + format("/step_%08lld", static_cast<long long>(step));
  }
  // The parameters and moments of a step.
  void fill(std::int64_t step) {
    std::vector<float> values;
    for (const TensorRole role : kStateRoles) {
      for (const TensorSpec& spec : model_->table().specs()) {
        values.resize(static_cast<std::size_t>(spec.elements));
        for (std::size_t i = 0; i < values.size(); ++i) {
          values[i] = std::sin(static_cast<float>(step * 31 + static_cast<std::int64_t>(i) + 7 * spec.offset));
        }
        model_->write_tensor(role, spec, values.data());
      }
    }
  }
  std::string files(const std::string& run, std::int64_t step) const {
    std::string bytes;
    for (const char* name : {"/model.bin", "/state.bin", "/manifest.json"}) {
      bytes += read_bytes(step_path(run, step) + name) + "|";
    }
    return bytes;
  }
  // Everything in a run directory but its lock.
  std::map<std::string, std::string> everything(const std::string& run) const {
    std::map<std::string, std::string> all;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(temporary_.file(run))) {
      if (entry.path().filename() == "lock") continue;
      all[entry.path().string()] = entry.is_regular_file() ? read_bytes(entry.path().string()) : "directory";
    }
    return all;
  }

  TemporaryDirectory temporary_{memory_files()};
  std::optional<TokenDataset> data_;
  TrainSettings settings_;
  std::unique_ptr<TrainModel> model_;
};

TEST_F(StateTest, EachMemberComesBackFromACheckpoint) {
  fill(1);
  int number = 0;
  for (const auto& [name, change] : changes_of_state()) {
    TrainState state = some_state();
    change(state);
    const std::string run = format("run_%d", number++);
    {
      const RunDirectory directory(temporary_.file(run));
      CheckpointKeeper(directory, identity(), 2).save(state, *model_);
    }
    const RunDirectory directory(temporary_.file(run));
    CheckpointKeeper keeper(directory, identity(), 2);
    const std::optional<TrainState> back = keeper.resume(ResumeMode::must, *model_);
    ASSERT_TRUE(back.has_value());
    EXPECT_TRUE(*back == state) << name << " " << back->to_json();
    EXPECT_EQ(keeper.last_saved(), state.step);
    EXPECT_EQ(keeper.best_path(), "") << "the best one is not there";
  }
}

// Of a run whose best checkpoints were deleted by hand no other one becomes the best, and the one before the last does if it
// is there.
TEST_F(StateTest, TheBestOneIsTheLastThatWasTheBestAndIsThere) {
  fill(1);
  for (const bool first_is_there : {true, false}) {
    const std::string name = format("run_%d", first_is_there);
    TrainState state = some_state();
    {
      const RunDirectory directory(temporary_.file(name));
      CheckpointKeeper keeper(directory, identity(), 10);
      state.best.reset();
      for (const std::int64_t step : {110, 120, 130, 140}) {
        state.step = step;
        if (step == 110 || step == 130) state.best = TrainState::Best{step, 1.0};
        keeper.save(state, *model_);
      }
    }
    if (!first_is_there) fs::remove_all(step_path(name, 110));
    fs::remove_all(step_path(name, 130));
    const RunDirectory directory(temporary_.file(name));
    CheckpointKeeper keeper(directory, identity(), 10);
    ASSERT_TRUE(keeper.resume(ResumeMode::must, *model_).has_value());
    EXPECT_EQ(keeper.best_path(), first_is_there ? step_path(name, 110) : "");
  }
}

struct Fp8Model final : HookedModel {
  using HookedModel::HookedModel;
  std::vector<float> history;
  std::vector<float> fp8_state() const override {
    HookedModel::fp8_state();
    return history;
  }
  void set_fp8_state(std::span<const float> state) override { history.assign(state.begin(), state.end()); }
};
std::vector<float> history_of(std::int64_t step) {
  const std::int64_t count = kFp8History * Fp8Slots{micro_config().num_layers}.count();
  return std::vector<float>(static_cast<std::size_t>(count), static_cast<float>(step));
}

// What scales of fp8 depend on is of the moment of each save, and comes back with the rest.
TEST_F(StateTest, TheHistoryOfScalesIsThatOfItsSave) {
  settings_.precision = "fp8";
  Fp8Model model(*model_);
  const RunDirectory directory(temporary_.file("run"));
  CheckpointKeeper keeper(directory, identity(), 100);
  BackgroundSave background(keeper, model.make_state_copy()), waiting(keeper, nullptr);
  for (std::int64_t step = 60; step < 68; ++step) {
    fill(step);
    model.history = history_of(step);
    if (step % 4 == 0) {
      keeper.save(some_state(step), model);
    } else if (step % 4 == 3) {
      EXPECT_FALSE(background.save_now(some_state(step), model).error.has_value());
    } else {
      BackgroundSave& saves = step % 4 == 1 ? background : waiting;
      saves.start(some_state(step), model);
      model.history = history_of(1000);  // training goes on
      EXPECT_FALSE(saves.wait()->error.has_value());
    }
    model.history.clear();
    CheckpointKeeper later(directory, identity(), 100);
    EXPECT_EQ(later.resume(ResumeMode::must, model)->step, step);
    EXPECT_EQ(model.history, history_of(step));
  }
}

// What a start may find changed: each member of what identifies a run. A new one does not compile until it is here.
TEST_F(StateTest, EachMemberOfARunsIdentityIsWrittenAndCompared) {
  RunIdentity same = identity();
  [[maybe_unused]] auto& [model, settings, steps, data, device, version, tokenizer, began_from, chat, adapter,
                          of_epochs] = same;
  struct Case {
    const char* name;
    std::function<void(RunIdentity&)> change;
    Exit refused;      // ok: the run goes on
    const char* told;  // in the error or the warning
  };
  const Case cases[] = {
      {"model", [](RunIdentity& run) { run.model.rope.theta *= 2; }, Exit::usage, "--config or --model: "},
      {"settings", [](RunIdentity& run) { run.settings["seed"] = 3; }, Exit::usage, "--seed: "},
      {"steps", [](RunIdentity& run) { --run.steps; }, Exit::usage, "--steps: got 999 steps, but "},
      {"steps", [](RunIdentity& run) { ++run.steps; }, Exit::ok, "--steps: extended from 1000 to 1001 steps"},
      {"steps", [](RunIdentity& run) { --run.steps, run.of_epochs = true; }, Exit::usage, "--epochs: got 999 steps"},
      {"steps", [](RunIdentity& run) { ++run.steps, run.of_epochs = true; }, Exit::ok, "--epochs: extended from 1000"},
      {"data", [](RunIdentity& run) { run.data[0]["tokens"] = 3; }, Exit::bad_file,
       "was trained on other data: shard 1 is "},
      {"device", [](RunIdentity& run) { run.device = "cuda"; }, Exit::ok, "goes on with cuda"},
      {"version", [](RunIdentity& run) { run.version = "another"; }, Exit::ok, ""},
      {"tokenizer", [](RunIdentity& run) { run.tokenizer = "{}"; }, Exit::ok, ""},
      {"began_from", [](RunIdentity& run) { run.began_from = "0123"; }, Exit::usage, "--model: "},
      {"chat", [](RunIdentity& run) { run.chat["chat_format"] = 1; }, Exit::ok, ""},
      {"adapter", [](RunIdentity& run) { run.adapter.emplace(); }, Exit::usage, "--lora-r: "}};
  fill(3);
  const TrainState state = some_state(90);
  {
    const RunDirectory directory(temporary_.file("run"));
    CheckpointKeeper(directory, same, 2).save(state, *model_);
  }
  const std::string expected = files("run", 90);
  std::set<std::string> written;
  for (const Case& each : cases) {
    RunIdentity other = identity();
    each.change(other);
    const RunDirectory directory(temporary_.file("run"));
    CheckpointKeeper keeper(directory, other, 2);
    testing::internal::CaptureStderr();
    const std::optional<Error> error = error_from([&] { keeper.resume(ResumeMode::must, *model_); });
    const std::string said = testing::internal::GetCapturedStderr() + (error ? error->what() : "");
    EXPECT_EQ(error ? error->code() : Exit::ok, each.refused) << each.name << ": " << said;
    expect_contains(said, each.told);
    EXPECT_EQ(said.empty(), *each.told == '\0') << each.name << ": " << said;
    EXPECT_EQ(keeper.last_saved(), error ? -1 : 90) << "a checkpoint that is refused is not this run's";
    EXPECT_EQ(files("run", 90), expected);
    if (other.adapter) continue;  // its files are of another kind: lora_test.cpp
    const RunDirectory elsewhere(temporary_.file("other"));
    CheckpointKeeper(elsewhere, other, 2).save(state, *model_);
    if (files("other", 90) != expected) written.insert(each.name);
    fs::remove_all(step_path("other", 90));
  }
  EXPECT_EQ(written, (std::set<std::string>{"model", "settings", "steps", "data", "device", "version", "tokenizer",
                                            "began_from", "chat"}));
}

// The ways in which a checkpoint is made. Each of them is an object that is used again and again.
class SavingTest : public StateTest, public testing::WithParamInterface<const char*> {
 protected:
  // Makes the object; call it to save. Throws what the save has failed with.
  std::function<std::string(const TrainState&)> saver(CheckpointKeeper& keeper) {
    const std::string way = GetParam();
    if (way == "Keeper") return [&](const TrainState& state) { return keeper.save(state, *model_); };
    std::shared_ptr<BackgroundSave> saves;
    if (way == "Joint") {
      saves = std::make_shared<BackgroundSave>(
          std::make_unique<JointSave>(alone_, &keeper, model_->optimizer(), model_->table(), model_->own_elements()),
          model_->make_own_copy());
    } else {
      saves = std::make_shared<BackgroundSave>(keeper, way == "Waiting" ? nullptr : model_->make_state_copy());
    }
    return [this, saves, at_once = way == "AtOnce"](const TrainState& state) {
      BackgroundSave::Result result;
      if (at_once) {
        result = saves->save_now(state, *model_);
      } else {
        saves->start(state, *model_);
        EXPECT_TRUE(saves->in_progress());
        result = *saves->wait();
      }
      EXPECT_FALSE(saves->in_progress());
      EXPECT_FALSE(saves->poll().has_value()) << "a result is given once";
      EXPECT_EQ(result.step, state.step);
      EXPECT_FALSE(result.was_last);
      EXPECT_GT(result.seconds, 0);
      EXPECT_EQ(result.path.empty(), result.error.has_value());
      if (result.error) throw Error(*result.error);
      return result.path;
    };
  }
  // The files of one save by objects that have done nothing else.
  std::string fresh(std::int64_t step) {
    const std::string run = format("fresh_%d", static_cast<int>(step));
    fill(step);
    const RunDirectory directory(temporary_.file(run));
    CheckpointKeeper keeper(directory, identity(), 2);
    saver(keeper)(some_state(step));
    return files(run, step);
  }

  SingleRank alone_;
};

INSTANTIATE_TEST_SUITE_P(Ways, SavingTest, testing::Values("Keeper", "Waiting", "Background", "AtOnce", "Joint"),
                         [](const auto& info) { return info.param; });

int calls_until_fault = 0, calls_seen = 0;
bool fail_one_call(const char* /*call*/, const std::string& /*path*/) {
  ++calls_seen;
  return calls_until_fault-- != 0;
}

// Each call of a save that can fail, with one object: nothing is changed, or the checkpoint is there in spite of the error;
// and each save behind a failure has the bytes that a fresh object gives it.
TEST_P(SavingTest, BehindAnyFailureASaveIsThatOfFreshObjects) {
  const RunDirectory directory(temporary_.file("run"));
  CheckpointKeeper keeper(directory, identity(), 100);
  const auto save = saver(keeper);
  const auto save_step = [&](std::int64_t step) {
    fill(step);
    return save(some_state(step));
  };
  save_step(80);
  save_step(81);
  int failing = 0;
  for (std::int64_t step = 82;; ++step, ++failing) {
    ASSERT_LT(failing, 60);
    const auto before = everything("run");
    const std::int64_t last = keeper.last_saved();
    const std::string last_path = keeper.last_path(), best_path = keeper.best_path();
    calls_until_fault = failing;
    calls_seen = 0;
    set_call_fault(fail_one_call);
    const std::optional<Error> error = error_from([&] { save_step(step); });
    set_call_fault(nullptr);
    if (calls_seen <= failing) {  // nothing was left to fail
      EXPECT_FALSE(error.has_value()) << error->what();
      break;
    }
    ASSERT_TRUE(error.has_value()) << "call " << failing;
    EXPECT_EQ(error->code(), Exit::environment) << error->what();
    expect_contains(error->what(), "Input/output error");
    EXPECT_EQ(keeper.last_saved(), last);
    EXPECT_EQ(keeper.last_path(), last_path);
    EXPECT_EQ(keeper.best_path(), best_path);
    if (fs::exists(step_path("run", step))) {  // the last call of all: the sync of its name
      EXPECT_EQ(Checkpoint::open(step_path("run", step), step).state().step, step);
    } else {
      EXPECT_EQ(everything("run"), before) << "call " << failing;
    }
    if (failing % test::every_nth(4) != 0) continue;
    EXPECT_EQ(save_step(step), step_path("run", step));
    EXPECT_EQ(keeper.last_saved(), step);
    EXPECT_EQ(files("run", step), fresh(step)) << "behind call " << failing;
  }
  EXPECT_GT(failing, 8);
}

// Values that cannot be saved, and behind them values that can.
TEST_P(SavingTest, BehindAValueThatIsNotFiniteASaveIsThatOfFreshObjects) {
  const RunDirectory directory(temporary_.file("run"));
  CheckpointKeeper keeper(directory, identity(), 100);
  const auto save = saver(keeper);
  const TensorSpec& spec = model_->table().specs()[2];
  std::vector<float> values(static_cast<std::size_t>(spec.elements), 1);
  values[3] = std::numeric_limits<float>::infinity();
  for (const std::int64_t step : {80, 82, 84}) {
    const TensorRole role = kStateRoles[(step - 80) / 2];
    fill(step);
    model_->write_tensor(role, spec, values.data());
    const std::string error = error_of(Exit::numeric, [&] { save(some_state(step)); });
    EXPECT_TRUE(error.starts_with(format("step %lld: %s: element 3 is inf", static_cast<long long>(step),
                                         state_tensor_name(adamw_optimizer(), role, spec).c_str())))
        << error;
    expect_contains(error, step == 80 ? "There is no older checkpoint" : step_path("run", step - 1));
    EXPECT_FALSE(fs::exists(step_path("run", step)));
    fill(step + 1);
    save(some_state(step + 1));
    EXPECT_EQ(files("run", step + 1), fresh(step + 1));
  }
}

// Training goes on meanwhile: whatever a save needs of the model it has copied before.
TEST_P(SavingTest, OnlyTheTrainingThreadUsesTheModel) {
  const std::unique_ptr<TrainModel> inner = std::move(model_);
  auto model = std::make_unique<Fp8Model>(*inner);
  if (GetParam() != std::string("Joint")) {  // ranks have no fp8
    settings_.precision = "fp8";
    model->history = history_of(1);
  }
  std::atomic<int> elsewhere{0};
  model->before_call = [&, training = std::this_thread::get_id()] {
    if (std::this_thread::get_id() != training) ++elsewhere;
  };
  model_ = std::move(model);
  const RunDirectory directory(temporary_.file("run"));
  CheckpointKeeper keeper(directory, identity(), 2);
  const auto save = saver(keeper);
  for (const std::int64_t step : {80, 81}) {
    fill(step);
    EXPECT_EQ(save(some_state(step)), step_path("run", step));
  }
  EXPECT_EQ(elsewhere, 0);
}

// ---- what is kept ----

int failing_saves = 0;
bool fail_saves(const char* call, const std::string& /*path*/) {
  return failing_saves == 0 || std::string(call) != "rename";
}

// Every order of saves, of saves with a new lowest loss, of saves that fail, of damage to the newest checkpoint and of new
// starts: always the same ones are there, and a start goes on from the newest whole one.
TEST_F(StateTest, AnyOrderOfEventsKeepsTheNewestOnesAndTheBest) {
  enum Event { kSave, kBest, kFailed, kFailedBest, kDamage, kStart, kEvents };
  constexpr int kLength = 4;
  int orders = 1;
  for (int i = 0; i < kLength; ++i) orders *= kEvents;
  fill(1);
  for (int order = 0; order < orders; order += test::sanitized() ? 101 : 11) {
    const std::string name = format("order_%d", order);
    std::optional<RunDirectory> directory;
    std::optional<CheckpointKeeper> keeper;
    TrainState state;
    std::set<std::int64_t> whole, damaged, intact;  // on the disk; on the disk; known to the keeper
    std::map<std::int64_t, TrainState> saved;
    std::optional<std::int64_t> best;
    const auto start = [&] {
      keeper.reset();
      directory.reset();
      directory.emplace(temporary_.file(name));
      keeper.emplace(*directory, identity(), 2);
      testing::internal::CaptureStderr();
      const std::optional<Error> error = error_from([&] {
        const std::optional<TrainState> resumed = keeper->resume(ResumeMode::automatic, *model_);
        EXPECT_EQ(resumed.has_value(), !whole.empty());
        state = resumed.value_or(TrainState{});
        EXPECT_TRUE(state == (whole.empty() ? TrainState{} : saved.at(*whole.rbegin())));
      });
      const std::string said = testing::internal::GetCapturedStderr();
      if (error) {
        EXPECT_TRUE(whole.empty() && !damaged.empty()) << error->what();
        return false;
      }
      const auto newer = whole.empty() ? 0 : std::distance(damaged.lower_bound(*whole.rbegin()), damaged.end());
      EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), newer) << said;
      intact.clear();
      best.reset();
      if (!whole.empty()) intact = {*whole.rbegin()};
      if (state.best) {  // of those that are there, the last one that was the best when it was saved
        for (const std::int64_t step : whole) {
          if (saved.at(step).best && saved.at(step).best->step == step) best = step;
        }
      }
      return true;
    };
    ASSERT_TRUE(start());
    std::string events;
    const auto save = [&](bool is_best, bool fails) {
      state.step += 2;
      if (is_best) state.best = TrainState::Best{state.step, 1.0 / static_cast<double>(state.step)};
      failing_saves = fails ? 1 : 0;
      set_call_fault(fail_saves);
      const std::optional<Error> error = error_from([&] { keeper->save(state, *model_); });
      set_call_fault(nullptr);
      EXPECT_EQ(error.has_value(), fails) << events;
      if (fails) return;
      saved[state.step] = state;
      whole.insert(state.step);
      damaged.erase(state.step);
      intact.insert(state.step);
      if (is_best) best = state.step;
      if (intact.size() < 2) return;
      const std::int64_t oldest = *std::next(intact.rbegin());
      std::erase_if(whole, [&](std::int64_t step) { return step < oldest && step != best; });
      std::erase_if(damaged, [&](std::int64_t step) { return step < oldest && step != best; });
    };
    save(false, false);
    save(true, false);
    bool going = true;
    for (int i = 0, rest = order; i < kLength && going; ++i, rest /= kEvents) {
      const int event = rest % kEvents;
      events += "sbfFdS"[event];
      if (event == kDamage) {
        if (whole.empty()) continue;
        const std::int64_t step = *whole.rbegin();
        fs::resize_file(step_path(name, step) + (i % 2 == 0 ? "/state.bin" : "/model.bin"), 3000);
        whole.erase(step);
        damaged.insert(step);
      } else if (event == kStart) {
        going = start();
      } else {
        save(event == kBest || event == kFailedBest, event == kFailed || event == kFailedBest);
      }
      std::set<std::int64_t> expected = whole, got;
      expected.insert(damaged.begin(), damaged.end());
      for (const RunDirectory::Entry& entry : directory->checkpoints()) got.insert(entry.step);
      ASSERT_EQ(got, expected) << events;
      if (!going) break;
      EXPECT_EQ(keeper->last_saved(), intact.empty() ? -1 : *intact.rbegin()) << events;
      EXPECT_EQ(keeper->best_path(), best ? step_path(name, *best) : "") << events;
    }
    if (going) start();
    keeper.reset();
    directory.reset();
    fs::remove_all(temporary_.file(name));
  }
}

// The parts of a save by hand, each twice and behind what a failed one leaves.
TEST_F(StateTest, ARunDirectoryBeginsEachSaveAnew) {
  const std::string path = temporary_.file("run");
  for (int use = 0; use < 2; ++use) {
    const RunDirectory run(path);
    EXPECT_EQ(run.was_empty(), use == 0);
    EXPECT_EQ(run.checkpoints().size(), use == 0 ? 0u : 1u);
    run.discard_checkpoint(4);  // nothing was begun
    for (int attempt = 0; attempt < 2; ++attempt) {
      const std::string temporary = run.begin_checkpoint(4);
      EXPECT_EQ(temporary, step_path("run", 4) + ".tmp");
      EXPECT_TRUE(fs::is_empty(temporary)) << "nothing is left of the attempt before";
      write_bytes(temporary + "/model.bin", "attempt");
      write_bytes(temporary + "/state.bin.tmp.77", "attempt");
    }
    run.discard_checkpoint(4);
    run.discard_checkpoint(4);
    EXPECT_FALSE(fs::exists(step_path("run", 4) + ".tmp"));
    for (const char* content : {"one", "two"}) {
      write_bytes(run.begin_checkpoint(4) + "/model.bin", content);
      run.commit_checkpoint(4);
      EXPECT_EQ(read_bytes(step_path("run", 4) + "/model.bin"), content);
      EXPECT_FALSE(fs::exists(step_path("run", 4) + ".tmp"));
      EXPECT_FALSE(fs::exists(step_path("run", 4) + ".replaced.tmp"));
      error_of(Exit::environment, [&] { run.commit_checkpoint(4); });  // nothing was begun: what is there stays
      EXPECT_EQ(read_bytes(step_path("run", 4) + "/model.bin"), content);
      EXPECT_EQ(run.checkpoints().size(), 1u);
    }
    error_of(Exit::environment, [&] { RunDirectory second(path); });
    if (use == 1) {
      run.remove_checkpoint(4);
      run.remove_checkpoint(4);
      EXPECT_TRUE(run.checkpoints().empty());
    }
  }
}

// ---- the detector of spikes ----

// Saved and read back behind every step, against one that goes through: over noise, many spikes, and starts within and behind
// the quiet time of each.
TEST(SpikeDetectorAgain, ReadBackAtEveryStepItIsTheSame) {
  SpikeDetector whole, resumed;
  int spikes = 0, quiet = 0;
  for (std::uint64_t i = 0; i < 600; ++i) {
    const bool high = i > 20 && random_number(i, 1) < 0.06;
    const double loss = 3 + 0.05 * random_number(i, 2) + (high && i % 2 == 0 ? 3 : 0);
    const double norm = (1 + 0.2 * random_number(i, 3)) * (high && i % 3 != 0 ? 100 : 1);
    const std::optional<Spike> expected = whole.observe(loss, norm), got = resumed.observe(loss, norm);
    ASSERT_EQ(got.has_value(), expected.has_value()) << i;
    if (expected) {
      EXPECT_EQ(got->loss_level, expected->loss_level);
      EXPECT_EQ(got->norm_level, expected->norm_level);
      EXPECT_EQ(got->of_loss, expected->of_loss);
      EXPECT_EQ(got->of_norm, expected->of_norm);
    }
    spikes += expected.has_value();
    quiet += high && !expected;
    resumed = SpikeDetector::from_json(Json::parse(resumed.to_json().dump()), "state");
    ASSERT_TRUE(resumed == whole) << i;
  }
  EXPECT_GT(spikes, 8);
  EXPECT_GT(quiet, 8);
}

// The first eight steps give a level and no result; the sixteen behind a spike are not reported, whatever they are, and do not
// make the quiet time longer.
TEST(SpikeDetectorAgain, QuietForEightStepsAtFirstAndForSixteenBehindASpike) {
  for (int first = 0; first < 12; ++first) {
    SpikeDetector detector;
    for (int i = 0; i < first; ++i) EXPECT_FALSE(detector.observe(2, 1).has_value());
    EXPECT_EQ(detector.observe(20, 1).has_value(), first >= 8) << first;
  }
  for (int distance = 1; distance < 22; ++distance) {
    for (const bool between : {false, true}) {
      SpikeDetector detector;
      for (int i = 0; i < 30; ++i) detector.observe(2, 1);
      ASSERT_TRUE(detector.observe(9, 1).has_value());
      for (int i = 1; i < distance; ++i) {
        const bool high = between && i == distance / 2 && i <= 16;
        EXPECT_FALSE(detector.observe(high ? 9 : 2, 1).has_value());
      }
      EXPECT_EQ(detector.observe(30, 1).has_value(), distance > 16) << distance;
    }
  }
}

// ---- the schedule ----

// Every shape at every step of short runs, with warm-ups and decays that are absent, one step long, or longer than the run,
// against the definition; a run that is extended follows the schedule of the longer one from there on.
TEST(ScheduleCorners, EveryStepOfEveryShape) {
  for (const std::string& name : schedule_names()) {
    for (const std::int64_t steps : {1, 2, 3, 20}) {
      for (const std::int64_t warmup : {0, 1, 2, 3, 7, 19, 20, 25}) {
        for (const double ratio : {0.0, 0.1, 1.0}) {
          for (const double fraction : {0.0, 0.05, 0.2, 1.0}) {
            const Schedule schedule{schedule_from_name(name), 2.0, ratio, warmup, steps, fraction};
            const auto decay = static_cast<std::int64_t>(std::floor(fraction * static_cast<double>(steps) + 0.5));
            ASSERT_EQ(schedule.wsd_decay_steps(), decay);
            const std::int64_t flat =
                name == "wsd" ? std::max(warmup, steps - decay) : warmup;  // steps before it falls
            for (std::int64_t n = 1; n <= steps; ++n) {
              double rate = 2.0;
              if (n <= warmup) {
                rate = 2.0 * static_cast<double>(n) / static_cast<double>(warmup);
              } else if (n > flat && name != "constant") {
                const double p = static_cast<double>(n - 1 - flat) / static_cast<double>(steps - flat);
                const double left = name == "cosine"   ? (1 + std::cos(3.14159265358979323846 * p)) / 2
                                    : name == "linear" ? 1 - p
                                                       : 1 - std::sqrt(p);
                rate = 2.0 * ratio + 2.0 * (1 - ratio) * left;
              }
              ASSERT_NEAR(schedule.at(n), rate, 1e-14)
                  << name << ", step " << n << " of " << steps << ", warm-up " << warmup << ", fraction " << fraction;
              ASSERT_GT(schedule.at(n), 0) << "a step with a rate of 0 would be spent for nothing";
            }
          }
        }
      }
    }
  }
}

// ---- the data ----

// Every loader of every rank from every step on, over three epochs of three shards, against the order and the windows
// themselves.
TEST_F(StateTest, ALoaderReadsWhatItsPositionSaysHoweverItCameThere) {
  write_shard(temporary_.file("part_0.bin"), patterned_tokens(30), 1000);
  write_shard(temporary_.file("part_1.bin"), patterned_tokens(9, 300), 1000);
  write_shard(temporary_.file("part_2.bin"), patterned_tokens(52, 700), 1000);
  const TokenDataset data(temporary_.file("part_*.bin"), 8);
  ASSERT_EQ(data.windows(), 10u);
  constexpr std::uint64_t kSeed = 9, kEnd = 30;
  const DataOrder order(10, kSeed);
  const auto expect_batch = [&](const MicroBatch& batch, std::uint64_t position, std::uint64_t size) {
    ASSERT_EQ(batch.tokens.size(), 8 * size);
    ASSERT_EQ(batch.labels.size(), 8 * size);
    for (std::uint64_t b = 0; b < size; ++b) {
      std::vector<std::int32_t> tokens(8), labels(8);
      data.read_window(order.window_at(position + b), tokens, labels);
      EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), batch.tokens.begin() + static_cast<std::ptrdiff_t>(8 * b)));
      EXPECT_TRUE(std::equal(labels.begin(), labels.end(), batch.labels.begin() + static_cast<std::ptrdiff_t>(8 * b)));
    }
  };
  for (const std::uint64_t ranks : {1, 2, 3}) {
    for (const std::uint64_t share : {1, 2}) {
      for (const std::uint64_t size : {1, 3}) {
        const std::uint64_t step = ranks * share * size;
        for (std::uint64_t begin = 0; begin < kEnd; begin += step) {
          for (std::uint64_t rank = 0; rank < ranks; ++rank) {
            DataLoader loader(
                data, static_cast<std::int64_t>(size), kSeed, begin,
                {static_cast<std::int64_t>(rank), static_cast<std::int64_t>(ranks), static_cast<std::int64_t>(share)});
            // To the end from the first steps, three steps from the others.
            const std::uint64_t end = begin < 2 * step ? kEnd : begin + 3 * step;
            for (std::uint64_t at = begin; at < end; at += step) {
              for (std::uint64_t i = 0; i < share; ++i) {
                EXPECT_EQ(loader.position(), at + i * ranks * size);
                EXPECT_EQ(loader.epoch(), loader.position() / 10);
                expect_batch(loader.next(), at + (rank * share + i) * size, size);
              }
            }
          }
        }
      }
    }
  }
}

// ---- faults ----

// What is armed again strikes again, at the place that is said the second time.
TEST_F(StateTest, AFaultThatIsArmedAgainStrikesAgain) {
  fill(1);
  const RunDirectory directory(temporary_.file("run"));
  CheckpointKeeper keeper(directory, identity(), 100);
  std::int64_t step = 60;
  for (const char* fault : {"io-error@save=5000", "enospc@save=100", "io-error@call=3", "io-error@call=0"}) {
    arm_save_fault(parse_faults({fault}));
    EXPECT_TRUE(error_from([&] { keeper.save(some_state(step), *model_); }).has_value()) << fault;
    EXPECT_EQ(keeper.save(some_state(step), *model_), step_path("run", step)) << "once: " << fault;
    ++step;
  }
  for (int use = 0; use < 2; ++use) {
    arm_save_fault(parse_faults({"enospc@log=3"}));
    for (int record = 1; record <= 5; ++record) EXPECT_EQ(log_record_allowed(), record != 3);
  }
  arm_save_fault({});
  for (int record = 1; record <= 5; ++record) EXPECT_TRUE(log_record_allowed());
}

}  // namespace
}  // namespace weft
