// Run directories and checkpoints: whatever happens to a save or to the files afterwards, a run goes on from
// the newest state that is whole, or says why it cannot.
#include "llmc/train/checkpoint.h"
#include "llmc/base/json.h"

#include <gtest/gtest.h>
#include <linux/capability.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <new>
#include <set>
#include <thread>

#include "llmc/base/cgroup.h"
#include "llmc/base/error_from.h"
#include "llmc/base/log.h"
#include "llmc/train/background_save.h"
#include "llmc/train/fault_injection.h"
#include "llmc/train/run_log.h"
#include "test/cpp/sanitized.h"
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
    fill(TensorRole::state1, static_cast<float>(step) + 0.25f);
    fill(TensorRole::state2, static_cast<float>(step) + 0.5f);
    TrainState state;
    state.step = step;
    state.updates = step > 0 ? step - 1 : 0;
    state.skipped = step - state.updates;
    state.windows = static_cast<std::uint64_t>(step) * 2;
    state.micro_steps = static_cast<std::uint64_t>(step);
    state.loss = 1.0 / 3.0 + static_cast<double>(step);
    for (int i = 0; i < 40; ++i) state.spikes.observe(3.0 / (i + 1), std::sqrt(i + 2.0));
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

// A model on a GPU has written its GEMM plans by then.
TEST_F(CheckpointTest, WhatTheRunItselfHasWrittenDoesNotMakeADirectoryUsed) {
  const RunDirectory run(run_path());
  std::ofstream(run.file("matmul_plans.txt")) << "plans";
  EXPECT_FALSE(CheckpointKeeper(run, identity(), 2).resume(ResumeMode::never, *model_).has_value());
}

TEST_F(CheckpointTest, ItsModelIsAModelFileWithTheTokenizerAndTheChatFormat) {
  RunIdentity run = identity();
  run.chat = {{"chat_format", {{"version", 1}}}, {"chat_template", "{{ messages }}"}, {"chat_tokens", Json::object()}};
  const RunDirectory directory(run_path());
  CheckpointKeeper(directory, run, 2).save(make_state(3), *model_);
  const ModelFile file = ModelFile::open(step_path(3) + "/model.bin");
  EXPECT_TRUE(file.config() == micro_config());
  EXPECT_EQ(file.tokenizer_json(), identity().tokenizer);
  EXPECT_EQ(file.chat_members(), run.chat);
  EXPECT_EQ(file.file().config().size(), 5u);
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
  for (bool died = true; died; write += test::every_nth(7)) {
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

// While it exists, the modes of files count for this thread, and for those that it starts, even if it is root's.
class ModesCount {
 public:
  ModesCount() {
    ::syscall(SYS_capget, &header_, before_);
    __user_cap_data_struct without[] = {before_[0], before_[1]};
    without[0].effective &= ~(CAP_TO_MASK(CAP_DAC_OVERRIDE) | CAP_TO_MASK(CAP_DAC_READ_SEARCH));
    EXPECT_EQ(::syscall(SYS_capset, &header_, without), 0);
  }
  ~ModesCount() { EXPECT_EQ(::syscall(SYS_capset, &header_, before_), 0); }
  ModesCount(const ModesCount&) = delete;
  ModesCount& operator=(const ModesCount&) = delete;

 private:
  __user_cap_header_struct header_{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct before_[2];
};

// A file that the system does not give out may be whole: the run ends with a line, and no older checkpoint takes its place. One
// that is not there, or is a loop of links, is damage.
TEST_F(CheckpointTest, WhatMayNotBeReadIsNotSkipped) {
  save(3);
  save(6);
  for (const std::string name : {"/manifest.json", "/model.bin", "/state.bin", ""}) {
    const std::string path = step_path(6) + name;
    const fs::perms before = fs::status(path).permissions();
    fs::permissions(path, fs::perms::none);
    const std::optional<Error> error = error_from([&] {
      const ModesCount modes;
      resumed_step();
    });
    fs::permissions(path, before);
    ASSERT_TRUE(error.has_value()) << name;
    EXPECT_EQ(error->code(), Exit::environment) << error->what();
    expect_contains(error->what(), path + (name.empty() ? "/" : "'"));
    expect_contains(error->what(), "cannot open: Permission denied");
    EXPECT_EQ(resumed_step(), 6);
  }
  for (const char* name : {"/manifest.json", "/model.bin", "/state.bin"}) {
    const std::string path = step_path(6) + name, whole = read_bytes(path);
    fs::remove(path);
    EXPECT_EQ(resumed_step(), 3) << name;
    fs::create_symlink(path, path);
    EXPECT_EQ(resumed_step(), 3) << name;
    fs::remove(path);
    write_bytes(path, whole);
  }
  EXPECT_EQ(resumed_step(), 6);
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

TEST_F(CheckpointTest, AManifestBeyondTheLimitIsNotRead) {
  save(3);
  fs::resize_file(step_path(3) + "/manifest.json", 6'000'000'000);  // on the disk it takes no more than before
  expect_contains(error_of(Exit::bad_file, [&] { Checkpoint::open(step_path(3), 3); }),
                  "manifest.json': 6000000000 bytes, at most 16777216 are accepted");
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
  model_->write_tensor(TensorRole::state2, spec, values.data());
  const std::string message = error_of(Exit::numeric, [&] { keeper.save(state, *model_); });
  expect_contains(message, format("step 6: moment2.%s: element %zu is nan", spec.name.c_str(), values.size() - 1));
  EXPECT_FALSE(fs::exists(step_path(6))) << "nothing of it stays";
  EXPECT_FALSE(fs::exists(step_path(6) + ".tmp"));
  EXPECT_EQ(keeper.resume(ResumeMode::automatic, *model_)->step, 3);
}

// The search for the value reads 2^18 of them at once: it is named wherever it is, in the order of the file.
TEST_F(CheckpointTest, TheValueThatIsNotFiniteIsNamedInAnyPiece) {
  ModelConfig config = micro_config();
  config.vocab_size = config.tokenizer_vocab = 32'769;
  const TensorTable table(config);
  const TensorSpec& spec = table.specs()[0];
  const auto count = static_cast<std::size_t>(spec.elements);
  constexpr std::size_t kPiece = 1 << 18;
  ASSERT_GT(count, 2 * kPiece);
  ASSERT_NE(count % kPiece, 0u);
  RunIdentity wide = identity();
  wide.model = config;
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, wide, 2);
  std::size_t bad = 0;
  const TensorSource source = {[&](TensorRole role, const TensorSpec& asked, std::size_t first, std::size_t size,
                                   float* buffer) -> const float* {
                                 std::fill_n(buffer, size, 1.0f);
                                 const bool here = role == TensorRole::state1 && asked.name == spec.name &&
                                                   bad >= first && bad < first + size;
                                 if (here) buffer[bad - first] = -std::numeric_limits<float>::infinity();
                                 return buffer;
                               },
                               true};
  for (const std::size_t at : {std::size_t{0}, kPiece - 1, kPiece, 2 * kPiece - 1, 2 * kPiece, count - 1}) {
    bad = at;
    expect_contains(error_of(Exit::numeric, [&] { keeper.save(make_state(6), table, source); }),
                    format("step 6: moment1.%s: element %zu is -inf", spec.name.c_str(), at));
  }
  EXPECT_TRUE(run.checkpoints().empty());
}

TEST_F(CheckpointTest, StrangeNamesAreSkippedAndCounted) {
  fs::create_directories(run_path());
  write_bytes(run_path() + "/step_00000005", "a file");
  fs::create_directory(run_path() + "/step_99999999999999999999");
  fs::create_directory(run_path() + "/step_7");
  fs::create_symlink("step_00000008", step_path(8));
  expect_contains(error_of(Exit::bad_file, [&] { resumed_step(); }), "none of its 4");
  std::map<std::string, std::string> problems;
  for (const RunDirectory::Entry& entry : RunDirectory(run_path()).checkpoints()) problems[entry.name] = entry.problem;
  EXPECT_EQ(problems, (std::map<std::string, std::string>{{"step_00000005", "not a directory"},
                                                          {"step_99999999999999999999", "not the name of a checkpoint"},
                                                          {"step_7", "not the name of a checkpoint"},
                                                          {"step_00000008", "Too many levels of symbolic links"}}));
  save(3);
  EXPECT_EQ(resumed_step(), 3);
  EXPECT_TRUE(fs::exists(run_path() + "/step_00000005")) << "what weft did not write it does not remove";
}

// By their steps, of however many digits, and strange names last: those hide no checkpoint.
TEST_F(CheckpointTest, CheckpointsComeByTheirStepsAndStrangeNamesLast) {
  fs::create_directories(run_path() + "/step_mine");
  expect_contains(error_of(Exit::bad_file, [&] { resumed_step(ResumeMode::must); }), "none of its 1 checkpoints");
  save(3);
  EXPECT_EQ(resumed_step(ResumeMode::must), 3);
  const RunDirectory run(run_path());
  for (const char* name : {"step_99999999", "step_100000000", "step_00000100", "step_7"}) {
    fs::create_directory(run.file(name));
  }
  std::vector<std::string> names;
  for (const RunDirectory::Entry& entry : run.checkpoints()) names.push_back(entry.name);
  EXPECT_EQ(names, (std::vector<std::string>{"step_100000000", "step_99999999", "step_00000100", "step_00000003",
                                             "step_7", "step_mine"}));
}

TEST_F(CheckpointTest, StaleTemporariesGoAtTheNextStart) {
  fs::create_directories(step_path(9) + ".tmp");
  write_bytes(step_path(9) + ".tmp/model.bin", "half");
  write_bytes(step_path(9) + ".tmp/state.bin.tmp.12345", "half");
  fs::create_directories(step_path(4) + ".replaced.tmp");
  fs::create_directories(step_path(123456789) + ".tmp");
  EXPECT_EQ(resumed_step(), -1);
  EXPECT_FALSE(fs::exists(step_path(9) + ".tmp"));
  EXPECT_FALSE(fs::exists(step_path(4) + ".replaced.tmp"));
  EXPECT_FALSE(fs::exists(step_path(123456789) + ".tmp"));
}

// Others may keep things under names that look alike, and under the very names that a save makes.
TEST_F(CheckpointTest, WhatNoSaveHasWrittenIsNotRemoved) {
  save(2);
  fs::create_directories(temporary_.file("elsewhere"));
  write_bytes(temporary_.file("elsewhere/model.bin"), "precious");
  std::vector<std::string> kept;
  for (const char* name :
       {"step_mine.tmp", "step_9.tmp", "step_00000009.old.tmp", "step_.tmp", "step_00000009.tmp.tmp"}) {
    kept.push_back(run_path() + "/" + name + "/model.bin");
    fs::create_directories(run_path() + "/" + name);
    write_bytes(kept.back(), "precious");
  }
  kept.push_back(step_path(5) + ".tmp/notes.txt");  // in a directory that a save may have left
  fs::create_directories(step_path(5) + ".tmp");
  write_bytes(kept.back(), "precious");
  for (const char* name : {"/model.bin.tmp.mine", "/model.bin.tmp.", "/model.bin.tmp.1.old"}) {
    kept.push_back(step_path(5) + ".tmp" + name);
    write_bytes(kept.back(), "precious");
  }
  kept.push_back(step_path(7) + ".tmp");
  write_bytes(kept.back(), "a file");
  fs::create_directory_symlink(temporary_.file("elsewhere"), step_path(8) + ".tmp");
  fs::create_directory_symlink(temporary_.file("elsewhere"), step_path(4));
  kept.push_back(temporary_.file("elsewhere/model.bin"));
  EXPECT_EQ(resumed_step(), 2);
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  // Saves under such names fail, and leave what is there alone.
  for (const int step : {5, 7, 8, 4}) {
    error_of(Exit::environment, [&] { keeper.save(make_state(step), *model_); });
  }
  for (const int step : {20, 21, 22}) keeper.save(make_state(step), *model_);  // remove old ones
  for (const std::string& path : kept) EXPECT_TRUE(fs::exists(path)) << path;
  EXPECT_TRUE(fs::is_symlink(step_path(8) + ".tmp"));
  EXPECT_TRUE(fs::is_symlink(step_path(4)));
  EXPECT_FALSE(fs::exists(step_path(2)));
}

TEST_F(CheckpointTest, ADirectoryThatIsRefusedKeepsEverything) {
  save(3);
  const std::string leftover = step_path(9) + ".tmp/model.bin";
  fs::create_directories(step_path(9) + ".tmp");
  write_bytes(leftover, "half");
  error_of(Exit::usage, [&] { resumed_step(ResumeMode::never); });
  EXPECT_TRUE(fs::exists(leftover));
  settings_.lr = 0.5;
  error_of(Exit::usage, [&] { resumed_step(); });
  EXPECT_TRUE(fs::exists(leftover));
  settings_ = micro_settings();
  fs::resize_file(step_path(3) + "/state.bin", 5000);
  error_of(Exit::bad_file, [&] { resumed_step(); });
  EXPECT_TRUE(fs::exists(leftover));
}

// Not only one with checkpoints: whatever is there may be another's.
TEST_F(CheckpointTest, NeverRefusesADirectoryThatHoldsAnything) {
  const std::string log = run_path() + "/log.jsonl", strange = run_path() + "/notes.txt";
  const std::string leftover = step_path(9) + ".tmp/model.bin";
  for (const std::string& path : {log, strange, leftover}) {
    fs::create_directories(fs::path(path).parent_path());
    write_bytes(path, "text");
    expect_contains(error_of(Exit::usage, [&] { resumed_step(ResumeMode::never); }), "not empty");
    EXPECT_EQ(read_bytes(path), "text");
    fs::remove_all(run_path());
  }
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

// ---- calls that fail while the process lives on ----

std::string strike_call, strike_path;            // of the hook below: which call, at the path that ends so
std::function<bool(const std::string&)> strike;  // true: the call goes on
int strikes = 0;
bool strike_once(const char* call, const std::string& path) {
  if (strikes > 0 || call != strike_call || !path.ends_with(strike_path)) return true;
  ++strikes;
  return strike(path);
}

class FailingCallTest : public CheckpointTest {
 protected:
  void arm(const std::string& call, const std::string& path, std::function<bool(const std::string&)> action) {
    strike_call = call;
    strike_path = path;
    strike = std::move(action);
    strikes = 0;
    set_call_fault(strike_once);
  }
  void TearDown() override { set_call_fault(nullptr); }
};

// A save that replaces a damaged checkpoint renames twice; when the second rename fails the old name is back.
TEST_F(FailingCallTest, TheSecondRenameOfAReplacement) {
  for (const int step : {3, 6}) save(step);
  fs::resize_file(step_path(6) + "/state.bin", 5000);
  const std::string before = read_bytes(step_path(6) + "/model.bin");
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  ASSERT_EQ(keeper.resume(ResumeMode::automatic, *model_)->step, 3);
  arm("rename", "step_00000006.tmp", [](const std::string&) { return false; });
  expect_contains(error_of(Exit::environment, [&] { keeper.save(make_state(6), *model_); }), "rename");
  EXPECT_EQ(strikes, 1);
  EXPECT_EQ(read_bytes(step_path(6) + "/model.bin"), before) << "what was there is there again";
  EXPECT_FALSE(fs::exists(step_path(6) + ".replaced.tmp"));
  EXPECT_FALSE(fs::exists(step_path(6) + ".tmp"));
  EXPECT_EQ(keeper.last_saved(), 3);
  keeper.save(make_state(6), *model_);
  EXPECT_EQ(keeper.resume(ResumeMode::must, *model_)->step, 6);
}

// The disk gives back something else than was written: the checkpoint never gets its name, and no older one goes.
TEST_F(FailingCallTest, AFileThatReadsBackDamaged) {
  for (const char* name : {"/model.bin", "/state.bin", "/manifest.json"}) {
    fs::remove_all(run_path());
    const RunDirectory run(run_path());
    CheckpointKeeper keeper(run, identity(), 2);
    for (const int step : {2, 4}) keeper.save(make_state(step), *model_);
    // The directory's sync that follows the last file.
    arm("rename", "manifest.json.tmp." + std::to_string(::getpid()), [&](const std::string&) {
      if (std::string(name) == "/manifest.json") return true;
      const std::string path = step_path(6) + ".tmp" + name;
      std::string bytes = read_bytes(path);
      bytes[bytes.size() - 5] = static_cast<char>(bytes[bytes.size() - 5] ^ 1);
      write_bytes(path, bytes);
      return true;
    });
    if (std::string(name) == "/manifest.json") {
      arm("sync", "step_00000006.tmp", [&](const std::string& directory) {
        // The first two are those of model.bin and state.bin.
        if (!fs::exists(directory + name)) return strikes = 0, true;
        std::string bytes = read_bytes(directory + name);
        bytes[bytes.find("xxh3") + 8] = 'x';
        write_bytes(directory + name, bytes);
        return true;
      });
    }
    error_of(Exit::bad_file, [&] { keeper.save(make_state(6), *model_); });
    set_call_fault(nullptr);
    EXPECT_EQ(strikes, 1) << name;
    EXPECT_FALSE(fs::exists(step_path(6))) << name;
    EXPECT_FALSE(fs::exists(step_path(6) + ".tmp")) << name;
    EXPECT_EQ(keeper.last_saved(), 4) << name;
    for (const int step : {2, 4}) EXPECT_EQ(Checkpoint::open(step_path(step), step).state().step, step) << name;
  }
}

TEST_F(FailingCallTest, ARemovalThatFailsIsAWarningAndTheNextSaveTriesAgain) {
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  for (const int step : {2, 4}) keeper.save(make_state(step), *model_);
  arm("rename", "step_00000002", [](const std::string&) { return false; });
  testing::internal::CaptureStderr();
  keeper.save(make_state(6), *model_);
  expect_contains(testing::internal::GetCapturedStderr(), "step_00000002");
  EXPECT_EQ(strikes, 1);
  EXPECT_TRUE(fs::exists(step_path(2)));
  keeper.save(make_state(8), *model_);
  EXPECT_EQ(run.checkpoints().size(), 2u);
}

// What a run that goes on is told: of more steps, and of another device; nothing where both are as they were.
TEST_F(CheckpointTest, WhatIsNotAsItWasIsSaidWhenARunGoesOn) {
  save(3);
  const auto told = [&](std::int64_t more_steps, const std::string& device) {
    RunIdentity now = identity();
    now.steps += more_steps;
    now.device = device;
    const RunDirectory run(run_path());
    testing::internal::CaptureStderr();
    EXPECT_EQ(CheckpointKeeper(run, now, 2).resume(ResumeMode::must, *model_)->step, 3);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(told(0, "cpu"), "");
  const auto steps = static_cast<long long>(identity().steps);
  EXPECT_EQ(told(5, "cpu"),
            format("--steps: extended from %lld to %lld; the learning rate now follows the longer schedule\n", steps,
                   steps + 5));
  expect_contains(
      told(0, "a GPU"),
      "step_00000003' was computed on 'cpu', this run goes on with a GPU: the numbers will differ in rounding\n");
}

// Each value of a manifest, absent, null, changed or of another type: never accepted, and never another error. Only who made it
// may differ. Of the tensors of each file the first one has to do.
TEST_F(CheckpointTest, EachValueOfAManifestIsCompared) {
  save(3);
  const std::string path = step_path(3) + "/manifest.json";
  const Json whole = Json::parse(read_bytes(path));
  const Json flat = whole.flatten();
  ASSERT_GT(flat.size(), 20u);
  const auto opened = [&](const Json& manifest) {
    write_bytes(path, manifest.dump());
    try {
      Checkpoint::open(step_path(3), 3);
      return true;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::bad_file) << error.what();
      return false;
    }
  };
  EXPECT_TRUE(opened(whole));
  for (const auto& [name, value] : flat.items()) {
    if (name.find("/tensors/") != std::string::npos && name.find("/tensors/0/") == std::string::npos) continue;
    const Json::json_pointer pointer(name);
    std::vector<Json> others = {nullptr};
    if (value.is_number())
      others.insert(others.end(), {value.get<std::int64_t>() + 1, -1, std::to_string(value.get<int>())});
    if (value.is_string()) others.insert(others.end(), {value.get<std::string>() + "0", 7});
    for (const Json& other : others) {
      Json changed = whole;
      changed[pointer] = other;
      EXPECT_EQ(opened(changed), name == "/made_by") << name << " " << other;
    }
    Json without = whole;
    if (const auto parent = pointer.parent_pointer(); without[parent].is_object())
      without[parent].erase(pointer.back());
    if (without != whole) {
      EXPECT_EQ(opened(without), name == "/made_by") << name;
    }
  }
  for (const char* files : {"null", "{}", "[]", "[{}]", "[{}, {}]", "[{}, {}, {}]", "[1, 2]", "\"model.bin\""}) {
    Json changed = whole;
    changed["files"] = Json::parse(files);
    EXPECT_FALSE(opened(changed)) << files;
  }
  Json more = whole;
  more["files"].push_back(whole["files"][0]);
  EXPECT_FALSE(opened(more));
  for (std::size_t file = 0; file < whole["files"].size(); ++file) {
    const Json tensors = whole["files"][file]["tensors"];
    std::vector<Json> others = {Json::array(), Json::object(), tensors, tensors};
    others[2].erase(others[2].size() - 1);
    others[3].push_back(tensors[0]);
    for (const Json& other : others) {
      Json changed = whole;
      changed["files"][file]["tensors"] = other;
      EXPECT_FALSE(opened(changed)) << file << " " << other;
    }
    Json without = whole;
    without["files"][file].erase("tensors");
    EXPECT_FALSE(opened(without)) << file;
  }
  for (const char* other : {"null", "[]", "3", "{}", "\"manifest\""}) EXPECT_FALSE(opened(Json::parse(other))) << other;
}

// Each member of what state.bin says of the run, absent or, of its progress, null: refused as a bad file, but for what a run may do without
// and for what is compared when a run goes on.
TEST_F(CheckpointTest, EachMemberOfTheStateIsNeeded) {
  save(3);
  const std::string path = step_path(3) + "/state.bin", whole = read_bytes(path);
  const TensorFile file = TensorFile::open(path, FileKind::training_state);
  std::string reason;  // the last one
  const auto opened = [&](const Json& config) {
    const std::string changed_path = path + ".changed";
    TensorFileWriter writer(changed_path, FileKind::training_state, config);
    for (const TensorInfo& tensor : file.tensors()) writer.declare(tensor.name, tensor.dtype, tensor.shape);
    for (const TensorInfo& tensor : file.tensors()) writer.write(file.bytes(tensor).data(), tensor.bytes);
    writer.publish();
    fs::rename(changed_path, path);
    try {
      Checkpoint::open(step_path(3), 3);
      return true;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::bad_file) << error.what();
      reason = error.what();
      return false;
    }
  };
  EXPECT_TRUE(opened(file.config()));
  Json of_another_model = file.config();  // of the same tensors
  of_another_model["model"]["norm_eps"] = 0.125;
  EXPECT_FALSE(opened(of_another_model));
  expect_contains(reason, "model: not that of model.bin");
  std::set<std::string> accepted;
  for (const char* part : {"/run", "/training", "/training/spikes"}) {
    const Json::json_pointer home(part);
    for (const auto& [name, value] : file.config()[home].items()) {
      Json without = file.config(), null = file.config();
      without[home].erase(name);
      null[home][name] = nullptr;
      if (opened(without)) accepted.insert(std::string(part) + "/" + name + " absent");
      if (home.back() != "run" && opened(null)) accepted.insert(std::string(part) + "/" + name + " null");
    }
  }
  std::set<std::string> expected = {"/training/loss null", "/training/val_loss null"};
  for (const char* name : {"began_from", "data", "device", "steps", "version", "world_size"}) {
    expected.insert(std::string("/run/") + name + " absent");
  }
  EXPECT_EQ(accepted, expected);
  for (const char* part : {"run", "training"}) {
    for (const char* other : {"null", "[]", "3"}) {
      Json changed = file.config();
      changed[part] = Json::parse(other);
      EXPECT_FALSE(opened(changed)) << part << " " << other;
    }
    Json without = file.config();
    without.erase(part);
    EXPECT_FALSE(opened(without)) << part;
  }
}

// Two runs at the same step, that differ in nothing but values: state.bin or model.bin of the other one is whole in itself.
TEST_F(CheckpointTest, AWholeFileThatIsNotTheManifestsIsRefused) {
  save(3);
  const std::string manifest = read_bytes(step_path(3) + "/manifest.json");
  std::map<std::string, std::string> other;
  for (const char* name : {"/model.bin", "/state.bin"}) other[name] = read_bytes(step_path(3) + name);
  fs::remove_all(run_path());
  {
    const RunDirectory run(run_path());
    const TrainState state = make_state(3);
    fill(TensorRole::parameter, 40);
    fill(TensorRole::state2, 50);
    CheckpointKeeper(run, identity(), 2).save(state, *model_);
  }
  for (const char* name : {"/model.bin", "/state.bin"}) {
    const std::string whole = read_bytes(step_path(3) + name);
    ASSERT_NE(whole, other[name]);
    write_bytes(step_path(3) + name, other[name]);
    expect_contains(error_of(Exit::bad_file, [&] { Checkpoint::open(step_path(3), 3); }),
                    "is not the tensor that the manifest describes");
    write_bytes(step_path(3) + name, whole);
  }
  EXPECT_EQ(resumed_step(), 3);
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

// Every field that decides the numbers, taken from the table itself: one changed at a time is refused by its name.
TEST_F(CheckpointTest, EachNumericSettingIsHeldByTheCheckpoint) {
  for (const bool all_fields : {false, true}) {
    fs::remove_all(run_path());
    settings_ = micro_settings();
    if (all_fields) {  // fields that stand there only where they mean something
      settings_.schedule = "wsd";
      settings_.moments = "bf16";
      settings_.virtual_ranks = 2;
    }
    save(3);
    const Json fields = settings_.numeric_settings();
    EXPECT_EQ(fields.size(), all_fields ? 18u : 15u);
    for (const auto& [key, value] : fields.items()) {
      const RunDirectory run(run_path());
      RunIdentity other = identity();
      Json& field = other.settings[key];
      if (value.is_string()) {
        field = value.get<std::string>() + "x";
      } else if (value.is_number_integer()) {
        field = value.get<std::int64_t>() + 1;
      } else {
        field = std::nextafter(value.get<double>(), 2.0);  // the smallest change there is
      }
      CheckpointKeeper keeper(run, other, 2);
      const std::string message = error_of(Exit::usage, [&] { keeper.resume(ResumeMode::automatic, *model_); });
      EXPECT_TRUE(message.starts_with("--" + key + ": ")) << message;
      other.settings.erase(key);
      CheckpointKeeper without(run, other, 2);
      expect_contains(error_of(Exit::usage, [&] { without.resume(ResumeMode::automatic, *model_); }),
                      "--'" + key + "': got nothing");
    }
  }
}

// What the options table has and the checkpoint does not hold decides no number, or is held in another way.
TEST(NumericSettings, AreAllOptionsButThese) {
  const std::set<std::string> others = {
      "config",       "model",        "norm",          "adapter",  // held as the model's configuration and began_from
      "train",                                                     // held as the shards' fingerprint
      "steps",        "epochs",                                    // held by themselves: they may grow
      "tokenizer",    "device",                                    // held, and said
      "vocab-size",                                                // held as the model's configuration
      "val",          "out",          "resume",        "save-every",    "keep",        "keep-best",    "eval",
      "gpu-memory",   "recompute",    "no-graph",      "max-minutes",   "on-nan",      "debug-inject", "val-every",
      "val-batches",  "sample-every", "sample-prompt", "sample-tokens", "temperature", "compare",      "bench",
      "operators",    "json",         "dry-run",       "print-config",  "color",       "verbose",      "threads",
      "gpus",         "shard",  // any number of them, and any sharding, gives the same bits
      "comm-timeout",
  };
  std::set<std::string> expected, got = others;
  for (const std::string& optimizer : optimizer_names()) {  // each has its own options
    const char* words[] = {"train_llama",
                           "--model",
                           "m.bin",
                           "--print-config",
                           "--schedule",
                           "wsd",
                           "--moments",
                           "bf16",
                           "--virtual-ranks",
                           "2",
                           "--optimizer",
                           optimizer.c_str(),
                           "--lora-r",
                           "3",
                           "--document-mask",
                           "--objective",
                           "dpo"};
    TrainSettings settings = *parse_train_options(static_cast<int>(std::size(words)), words, "test");
    settings.packed = true;  // as conversations make it
    for (const auto& [name, value] : settings.effective) expected.insert(name);
    const Json fields = settings.numeric_settings();
    for (const auto& [name, value] : fields.items()) {
      EXPECT_FALSE(others.contains(name)) << name;
      got.insert(name);
    }
  }
  EXPECT_EQ(got, expected) << "a new option belongs into numeric_settings() or into the list above";
}

// The text of each option reaches the field that the checkpoint holds.
TEST(NumericSettings, FollowTheCommandLine) {
  const std::map<std::string, std::string> given = {
      {"micro-batch", "3"},    {"seq-len", "5"},         {"batch-tokens", "30"},
      {"lr", "0.5"},           {"min-lr-ratio", "0.25"}, {"warmup-steps", "7"},
      {"schedule", "wsd"},     {"weight-decay", "0.5"},  {"beta1", "0.5"},
      {"beta2", "0.25"},       {"eps", "0.5"},           {"grad-clip", "0"},
      {"dropout", "0.5"},      {"seed", "77"},           {"precision", "fp32"},
      {"moments", "bf16"},     {"virtual-ranks", "2"},   {"wsd-decay-fraction", "0.5"},
      {"optimizer", "muon"},   {"muon-lr", "0.5"},       {"muon-momentum", "0.25"},
      {"lora-r", "3"},         {"lora-alpha", "0.5"},    {"lora-targets", "q,v"},
      {"lora-dropout", "0.25"}};
  std::vector<std::string> words = {"train_llama", "--model", "m.bin", "--print-config"};
  for (const auto& [name, value] : given) words.insert(words.end(), {"--" + name, value});
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  const TrainSettings settings = *parse_train_options(static_cast<int>(argv.size()), argv.data(), "test");
  const Json fields = settings.numeric_settings();
  EXPECT_EQ(fields.size(), given.size());
  for (const auto& [name, value] : given) {
    const Json& field = fields.at(name);
    EXPECT_EQ(field.is_string() ? field : Json::parse(field.dump()),
              field.is_string() ? Json(value) : Json::parse(value))
        << name;
  }
  const Schedule schedule = settings.learning_rate();
  EXPECT_EQ(schedule.shape, ScheduleShape::wsd);
  EXPECT_EQ(schedule.peak, 0.5);
  EXPECT_EQ(schedule.min_ratio, 0.25);
  EXPECT_EQ(schedule.warmup_steps, 7);
  EXPECT_EQ(schedule.steps, 400);
  EXPECT_EQ(schedule.wsd_decay_fraction, 0.5);
  EXPECT_EQ(schedule.at(201), 0.5) << "the first decaying step: half of 400 lie behind, and nothing is lost yet";
  EXPECT_DOUBLE_EQ(schedule.at(301), 0.5 - 0.375 * std::sqrt(0.5));
}

TEST_F(CheckpointTest, StepsCanBeAddedNotTakenAway) {
  save(3);
  settings_.steps = 20;
  EXPECT_EQ(resumed_step(), 3);
  settings_.steps = 9;
  expect_contains(error_of(Exit::usage, [&] { resumed_step(); }), "--steps");
}

// In words, each way in which the shards may differ, and what to do.
TEST_F(CheckpointTest, OtherDataIsRefused) {
  const auto shards = [](std::initializer_list<Json> list) { return Json(std::vector<Json>(list)); };
  const Json a = {{"name", "a.bin"}, {"tokens", 200}, {"xxh3", "01"}};
  const Json b = {{"name", "b.bin"}, {"tokens", 300}, {"xxh3", "02"}};
  Json changed = b, renamed = b, damaged = b;
  changed["xxh3"] = "03";
  renamed["name"] = "c.bin";
  damaged["name"] = 7;
  damaged["tokens"] = "many";
  const struct {
    Json saved, now;
    const char* told;
  } cases[] = {
      {shards({a, b}), shards({a}), "now 1 shard, then 2."},
      {shards({a}), shards({a, b}), "now 2 shards, then 1."},
      {shards({a, b}), shards({b, a}), "the same shards come in another order."},
      {shards({a, b}), shards({a, a}), "shard 2 is 'a.bin' (200 tokens), and then it was 'b.bin' (300 tokens)."},
      {shards({a, b}), shards({a, changed}), "shard 2, 'b.bin' (300 tokens), has other content than then."},
      {shards({a, b}), shards({a, renamed}),
       "shard 2 is 'c.bin' (300 tokens), and then it was 'b.bin' (300 tokens), with the same content."},
      {shards({damaged}), shards({b}), "shard 1 is 'b.bin' (300 tokens), and then it was a shard (? tokens)"},
      {shards({7}), shards({b}), "and then it was no shard."},
      {Json(7), shards({b}), "now 1 shard, then 0."}};
  for (const auto& [saved, now, told] : cases) {
    RunIdentity then = identity(), other = identity();
    then.data = saved;
    other.data = now;
    fs::remove_all(run_path());
    const RunDirectory run(run_path());
    CheckpointKeeper(run, then, 2).save(make_state(3), *model_);
    CheckpointKeeper keeper(run, other, 2);
    const std::string said = error_of(Exit::bad_file, [&] { keeper.resume(ResumeMode::must, *model_); });
    expect_contains(said, "step_00000003' was trained on other data: ");
    expect_contains(said, told);
    expect_contains(said, "; in another --out --model '" + step_path(3) + "/model.bin' continues from these weights");
    EXPECT_EQ(said.find('{'), std::string::npos) << said;
  }
}

// It is that of the newest checkpoint whose state can be read.
TEST_F(CheckpointTest, TheWarmUpOfARunIsThatOfItsNewestCheckpoint) {
  EXPECT_FALSE(saved_warmup_steps(run_path()).has_value());
  settings_.warmup_steps = 7;
  save(3);
  EXPECT_EQ(saved_warmup_steps(run_path()), 7);
  settings_.warmup_steps = 9;
  save(5);
  EXPECT_EQ(saved_warmup_steps(run_path()), 9);
  fs::resize_file(step_path(5) + "/state.bin", 100);
  EXPECT_EQ(saved_warmup_steps(run_path()), 7);
  fs::remove_all(step_path(3));
  EXPECT_FALSE(saved_warmup_steps(run_path()).has_value());
}

TEST_F(CheckpointTest, AStepPastTheEndOfItsRunIsRefused) {
  const auto save_of_a_run = [&](std::int64_t steps) {
    RunIdentity shorter = identity();
    shorter.steps = steps;
    const RunDirectory run(run_path());
    CheckpointKeeper(run, shorter, 2).save(make_state(3), *model_);
  };
  save_of_a_run(3);
  EXPECT_EQ(resumed_step(), 3);
  save_of_a_run(2);
  expect_contains(error_of(Exit::bad_file, [&] { resumed_step(); }), "step: got 3, but the run that made it had 2");
}

TEST_F(CheckpointTest, FewerShardsAreOtherData) {
  write_shard(temporary_.file("train2.bin"), patterned_tokens(200, 300));
  data_.emplace(temporary_.file("train*.bin"), 8);
  save(3);
  data_.emplace(temporary_.file("train.bin"), 8);
  expect_contains(error_of(Exit::bad_file, [&] { resumed_step(); }), "was trained on other data: now 1 shard, then 2");
}

TEST_F(CheckpointTest, OtherModelIsRefused) {
  save(3);
  const RunDirectory run(run_path());
  RunIdentity other = identity();
  other.model.num_layers = 2;
  CheckpointKeeper keeper(run, other, 2);
  expect_contains(error_of(Exit::usage, [&] { keeper.resume(ResumeMode::automatic, *model_); }), "num_layers");
}

// A start with another model, beginning or data, and often other settings as well, was most likely meant for a new directory: that
// comes first, and what differs after it.
TEST_F(CheckpointTest, AnotherRunInTheDirectoryIsNamedFirst) {
  save(3);
  const auto refused = [&](Exit code, const std::function<void(RunIdentity&)>& change) {
    const RunDirectory run(run_path());
    RunIdentity other = identity();
    change(other);
    other.settings["seed"] = 77;
    --other.steps;
    CheckpointKeeper keeper(run, other, 2);
    const std::string said = error_of(code, [&] { keeper.resume(ResumeMode::automatic, *model_); });
    const std::string first =
        format("--out: '%s' holds another run: 3 steps of a model with %lld layers of %lld, on 'train.bin' (",
               run_path().c_str(), static_cast<long long>(identity().model.num_layers),
               static_cast<long long>(identity().model.hidden_size));
    EXPECT_TRUE(said.starts_with(first)) << said;
    expect_contains(said, " tokens). Use another --out, or remove this one. --");
  };
  refused(Exit::usage, [](RunIdentity& run) { run.model.rope.theta *= 2; });
  refused(Exit::usage, [](RunIdentity& run) { run.began_from = "0123456789abcdef"; });
  refused(Exit::bad_file, [](RunIdentity& run) { run.data[0]["tokens"] = 3; });
}

// Another vocabulary can be asked for where a run begins with new parameters; a model file has its own.
TEST_F(CheckpointTest, AnotherVocabularyCanBeAskedForOfANewModelAlone) {
  save(3);
  for (const char* began_from : {"", "0123456789abcdef"}) {
    const RunDirectory run(run_path());
    RunIdentity other = identity();
    other.model.vocab_size = 64;
    other.began_from = began_from;
    CheckpointKeeper keeper(run, other, 2);
    const std::string message = error_of(Exit::usage, [&] { keeper.resume(ResumeMode::automatic, *model_); });
    expect_contains(message, "--config or --model: vocab_size is '64', but ");
    EXPECT_EQ(message.ends_with(". With --config, --vocab-size '32' is the same model"), *began_from == '\0')
        << message;
  }
}

// The run remembers the model file that it began from: another one would be read, and then not used.
TEST_F(CheckpointTest, AnotherBeginningIsRefused) {
  const auto resume_from = [&](const std::string& began_from) {
    const RunDirectory run(run_path());
    RunIdentity now = identity();
    now.began_from = began_from;
    CheckpointKeeper keeper(run, now, 2);
    return keeper.resume(ResumeMode::automatic, *model_)->step;
  };
  const auto save_from = [&](const std::string& began_from) {
    fs::remove_all(run_path());
    const RunDirectory run(run_path());
    RunIdentity now = identity();
    now.began_from = began_from;
    CheckpointKeeper(run, now, 2).save(make_state(3), *model_);
  };
  save_from("0123456789abcdef");
  EXPECT_EQ(resume_from("0123456789abcdef"), 3);
  const std::string other = error_of(Exit::usage, [&] { resume_from("0123456789abcdee"); });
  expect_contains(other, ". --model: ");
  expect_contains(other, "0123456789abcdef");
  const std::string fresh = error_of(Exit::usage, [&] { resume_from(""); });
  expect_contains(fresh, ". --config: ");
  save_from("");
  EXPECT_EQ(resume_from(""), 3);
  const std::string model = error_of(Exit::usage, [&] { resume_from("0123456789abcdef"); });
  expect_contains(model, ". --model: ");
  expect_contains(model, "new parameters");
}

// A new model takes its special ids from the tokenizer: it is named when it is what was exchanged.
TEST_F(CheckpointTest, AMissingTokenizerIsBlamedAndNotTheModel) {
  const auto message = [&](const std::string& saved, const std::string& now, std::int64_t layers = 1) {
    fs::remove_all(run_path());
    const RunDirectory run(run_path());
    RunIdentity one = identity(), other = identity();
    one.tokenizer = saved;
    one.model.bos_id = saved.empty() ? std::nullopt : std::optional<std::int32_t>(1);
    other.tokenizer = now;
    other.model.bos_id = now.empty() ? std::nullopt : std::optional<std::int32_t>(2);
    other.model.num_layers = layers;
    CheckpointKeeper(run, one, 2).save(make_state(3), *model_);
    CheckpointKeeper keeper(run, other, 2);
    return error_of(Exit::usage, [&] { keeper.resume(ResumeMode::automatic, *model_); });
  };
  const std::string removed = message("{}", "");
  EXPECT_TRUE(removed.starts_with("--tokenizer: ")) << removed;
  expect_contains(removed, "was made with a tokenizer, this start has none");
  expect_contains(message("{}", "[]"), "this start has another one");
  expect_contains(message("", "{}"), "was made without a tokenizer, this start has one");
  expect_contains(message("{}", "", 2), "--config or --model: ");
}

// Whichever of the ids the new tokenizer has changed. The same text with other ids is no other tokenizer.
TEST_F(CheckpointTest, AnotherTokenizerIsBlamedForEachIdThatComesFromIt) {
  using Ids = std::vector<std::int32_t>;
  const auto message = [&](std::optional<std::int32_t> bos, const Ids& eos, const std::string& tokenizer,
                           std::int64_t layers = 1) {
    const RunDirectory run(run_path());
    RunIdentity other = identity();
    other.tokenizer = tokenizer;
    other.model.bos_id = bos;
    other.model.eos_ids = eos;
    other.model.num_layers = layers;
    CheckpointKeeper keeper(run, other, 2);
    return error_of(Exit::usage, [&] { keeper.resume(ResumeMode::automatic, *model_); });
  };
  {
    const RunDirectory run(run_path());
    RunIdentity now = identity();
    now.model.bos_id = 1;
    now.model.eos_ids = {2, 3};
    CheckpointKeeper(run, now, 2).save(make_state(3), *model_);
  }
  const std::string same = identity().tokenizer;
  for (const auto& [bos, eos, key] : {std::tuple(std::optional<std::int32_t>(4), Ids{2, 3}, "bos_id"),
                                      {std::nullopt, Ids{2, 3}, "bos_id"},
                                      {1, Ids{2}, "eos_ids"},
                                      {1, Ids{}, "eos_ids"},
                                      {1, Ids{3, 2}, "eos_ids"},
                                      {4, Ids{5}, "bos_id"}}) {
    const std::string another = message(bos, eos, "{}");
    EXPECT_TRUE(another.starts_with("--tokenizer: ")) << another;
    expect_contains(another, "was made with a tokenizer, this start has another one");
    expect_contains(message(bos, eos, ""), "was made with a tokenizer, this start has none");
    const std::string ids = message(bos, eos, same);
    expect_contains(ids, format(". --config or --model: %s is ", key));
    const std::string more = message(bos, eos, "{}", 2);
    expect_contains(more, ". --config or --model: ");
  }
}

// A field that is not read back is as if the run had begun there: each of them has a value that is not its default.
TEST(TrainStateTest, EveryFieldComesBack) {
  const TrainState state = some_state();
  const Json json = state.to_json(), untouched = TrainState{}.to_json();
  for (const auto& [key, value] : json.items()) EXPECT_NE(value, untouched.value(key, Json())) << key;
  const TrainState back = TrainState::from_json(json, "state");
  EXPECT_TRUE(back == state) << back.to_json().dump() << "\n" << json.dump();
}

// Counters so large that what is added to them would not fit are no counters of a run.
TEST(TrainStateTest, CountersNearTheEndOfTheirTypeAreRefused) {
  const Json good = TrainState{}.to_json();
  for (const char* key : {"step", "updates", "windows", "micro_steps", "skipped", "transient"}) {
    for (const std::uint64_t value : {(std::uint64_t{1} << 63) - 1, (std::uint64_t{1} << 63) - 2,
                                      std::uint64_t{1} << 62, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
      Json state = good;
      state["step"] = std::int64_t{1'000'000'000'000};
      state[key] = value;
      expect_contains(error_of(Exit::bad_file, [&] { TrainState::from_json(state, "state"); }), key);
    }
  }
  Json spikes = good;
  spikes["spikes"]["observed"] = (std::uint64_t{1} << 63) - 1;
  expect_contains(error_of(Exit::bad_file, [&] { TrainState::from_json(spikes, "state"); }), "observed");
  Json best = good;
  best["best"] = {{"step", 1}, {"val_loss", 1.5}};
  expect_contains(error_of(Exit::bad_file, [&] { TrainState::from_json(best, "state"); }), "step");
  best["step"] = 1;
  EXPECT_EQ(TrainState::from_json(best, "state").best, (TrainState::Best{1, 1.5}));
  Json large = good;
  for (const char* key : {"step", "updates"}) large[key] = std::int64_t{1'000'000'000'000};
  EXPECT_EQ(TrainState::from_json(large, "state").step, 1'000'000'000'000);
}

// What a run counts of its steps is at most all of them.
TEST(TrainStateTest, NoCountOfStepsIsBeyondTheStep) {
  TrainState state = some_state(90);
  state.updates = state.skipped = state.transient = state.best->step = 90;
  const Json good = state.to_json();
  EXPECT_TRUE(TrainState::from_json(good, "state") == state);
  for (const char* key : {"/updates", "/skipped", "/transient", "/best/step"}) {
    Json bad = good;
    bad[Json::json_pointer(key)] = 91;
    expect_contains(error_of(Exit::bad_file, [&] { TrainState::from_json(bad, "state"); }),
                    std::string(key).substr(std::string(key).rfind('/') + 1) + ": got '91'");
  }
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

// Of every step, also of the first one, which has trained nothing.
TEST(RunDirectoryTest, LeftoversOfAnyStepGo) {
  const TemporaryDirectory temporary;
  const std::string path = temporary.file("run");
  const RunDirectory directory(path);
  for (const char* name : {"step_00000000.tmp", "step_00000000.replaced.tmp", "step_00000001.tmp", "step_99999999.tmp",
                           "step_100000000.tmp", "step_999999999999.replaced.tmp"}) {
    fs::create_directory(path + "/" + name);
  }
  for (const char* name :
       {"step_0.tmp", "step_000000001.tmp", "step_x.tmp", "step_.tmp", "other.tmp", "step_00000001.replaced"}) {
    fs::create_directory(path + "/" + name);
  }
  directory.remove_leftovers();
  std::set<std::string> left;
  for (const auto& entry : fs::directory_iterator(path)) left.insert(entry.path().filename().string());
  EXPECT_EQ(left, (std::set<std::string>{"lock", "step_0.tmp", "step_000000001.tmp", "step_x.tmp", "step_.tmp",
                                         "other.tmp", "step_00000001.replaced"}));
}

TEST(FreeMemory, IsPartOfWhatThereIs) {
  const std::uint64_t before = free_host_memory();
  EXPECT_GT(before, 0u);
  EXPECT_LE(before, available_host_memory());
  std::ifstream file("/proc/meminfo");  // "MemAvailable:   24000000 kB"
  std::uint64_t kilobytes = 0;
  for (std::string word; file >> word && kilobytes == 0;) {
    if (word == "MemAvailable:") file >> kilobytes;
  }
  const std::uint64_t smallest =
      std::min({kilobytes * 1024, available_host_memory(), cgroup_memory(cgroup_membership(), kCgroupRoot).free});
  EXPECT_GT(before, smallest / 2) << "other processes take and give back in between";
  EXPECT_LT(before, smallest / 2 * 3);
}

TEST(RunDirectoryTest, OneRunAtATime) {
  const TemporaryDirectory temporary;
  const std::string path = temporary.file("a run with spaces\nand more");
  {
    const RunDirectory first(path);
    const std::string message = error_of(Exit::environment, [&] { RunDirectory second(path); });
    expect_contains(message, format("pid %d", static_cast<int>(::getpid())));
  }
  testing::internal::CaptureStderr();
  const RunDirectory third(path);  // released
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "the run before has cleaned up";
}

// Between taking the lock and writing its name a run is nobody.
TEST(RunDirectoryTest, WhoHasJustTakenTheLockIsNamed) {
  const TemporaryDirectory temporary;
  const std::string path = temporary.file("run"), lock = path + "/lock";
  const RunDirectory first(path);
  const auto reason = [&] { return error_of(Exit::environment, [&] { RunDirectory second(path); }); };
  std::filesystem::resize_file(lock, 0);
  std::thread name([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::ofstream(lock) << "pid 7 on x\n";
  });
  expect_contains(reason(), "another run works here: 'pid 7 on x'. Stop it");
  name.join();
  std::filesystem::resize_file(lock, 0);
  expect_contains(reason(), "another run works here: 'a process without a name'. Stop it");
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

// Whatever a run before has left in the lock, shorter or longer than a name: the file says who works here, and nothing else.
TEST(RunDirectoryTest, TheLockNamesItsOwnerAlone) {
  const TemporaryDirectory temporary;
  const std::string path = temporary.file("run");
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  const std::string me = format("pid %d on %s", static_cast<int>(::getpid()), host);
  for (const std::string& left : {std::string(), std::string("x"), std::string("pid 7 on a\n"),
                                  "pid 4194304 on " + std::string(300, 'h') + "\n", std::string(2000, '\n')}) {
    fs::create_directories(path);
    write_bytes(path + "/lock", left);
    testing::internal::CaptureStderr();
    const RunDirectory run(path);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(read_bytes(path + "/lock"), me + "\n");
    EXPECT_EQ(said.find("taken over") != std::string::npos, left.find_first_not_of('\n') != std::string::npos) << said;
    expect_contains(error_of(Exit::environment, [&] { RunDirectory second(path); }),
                    "another run works here: " + escaped(me) + ". Stop it");
  }
  EXPECT_EQ(read_bytes(path + "/lock"), "") << "a run that has ended";
}

// Neither when a checkpoint is replaced nor when it is removed.
TEST(RunDirectoryTest, WhatAnInterruptedSaveHasLeftIsNotInTheWay) {
  const TemporaryDirectory temporary;
  const std::string path = temporary.file("run"), step = path + "/step_00000003";
  const RunDirectory run(path);
  for (const char* content : {"first", "second"}) {
    for (const char* left : {".replaced.tmp", ".tmp"}) {
      fs::create_directories(step + left);
      write_bytes(step + left + "/model.bin", "left");
      write_bytes(step + left + "/state.bin", "left");
    }
    write_bytes(run.begin_checkpoint(3) + "/model.bin", content);
    run.commit_checkpoint(3);
    EXPECT_EQ(read_bytes(step + "/model.bin"), content);
    EXPECT_FALSE(fs::exists(step + "/state.bin"));
  }
  EXPECT_FALSE(fs::exists(step + ".replaced.tmp"));
  fs::create_directories(step + ".tmp");
  write_bytes(step + ".tmp/model.bin", "left");
  run.remove_checkpoint(3);
  EXPECT_FALSE(fs::exists(step));
  EXPECT_FALSE(fs::exists(step + ".tmp"));
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
  EXPECT_EQ(calls_seen, (std::vector<std::string>{"sync step_00000003.tmp", "rename step_00000003.tmp", "sync run"}));
  // What another one replaces, or what is old, is deleted once the directory says so on the disk.
  write_bytes(run.begin_checkpoint(3) + "/model.bin", "y");
  calls_seen.clear();
  run.commit_checkpoint(3);
  EXPECT_EQ(calls_seen,
            (std::vector<std::string>{"sync step_00000003.tmp", "rename step_00000003", "rename step_00000003.tmp",
                                      "sync run", "remove step_00000003.replaced.tmp"}));
  calls_seen.clear();
  run.remove_checkpoint(3);
  set_call_fault(nullptr);
  EXPECT_EQ(calls_seen, (std::vector<std::string>{"rename step_00000003", "sync run", "remove step_00000003.tmp"}));
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
  const TemporaryDirectory temporary;
  testing::internal::CaptureStderr();
  FaultPlan plan;
  plan.log_record = 2;
  arm_save_fault(plan);
  RunLog log(temporary.file("log.jsonl"));
  for (int i = 0; i < 4; ++i) log.write({{"type", "step"}});
  arm_save_fault({});
  const std::string messages = testing::internal::GetCapturedStderr();
  const std::size_t first = messages.find("warning");
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(messages.find("warning", first + 1), std::string::npos);
  expect_contains(messages, "No space left on device");
  const std::string written = read_bytes(temporary.file("log.jsonl"));
  EXPECT_EQ(std::count(written.begin(), written.end(), '\n'), 1);
}

// What a run appends to or locks under a name that others may have taken: nothing is written through links, and nothing is
// waited for. A hard link is another name of a file elsewhere.
TEST(RunDirectoryTest, NothingIsWrittenThroughWhatOthersPutThere) {
  const TemporaryDirectory temporary;
  const auto put = [&](const std::string& path, const std::string& kind) {
    fs::remove(path);
    if (kind == "link") fs::create_symlink(temporary.file("victim"), path);
    if (kind == "dangling") fs::create_symlink(temporary.file("new"), path);
    if (kind == "hard link") fs::create_hard_link(temporary.file("victim"), path);
    if (kind == "FIFO") {
      ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
    }
    if (kind == "directory") fs::create_directory(path);
    if (kind == "device") fs::create_symlink("/dev/null", path);
  };
  const std::pair<const char*, const char*> kinds[] = {{"link", "symbolic link"},       {"dangling", "symbolic link"},
                                                       {"hard link", "hard link"},      {"FIFO", "regular file"},
                                                       {"directory", "Is a directory"}, {"device", "symbolic link"}};
  for (const auto& [kind, words] : kinds) {
    SCOPED_TRACE(kind);
    write_bytes(temporary.file("victim"), "precious\n");
    fs::create_directories(temporary.file("run"));
    put(temporary.file("run/lock"), kind);
    const std::string refused = error_of(Exit::usage, [&] { RunDirectory run(temporary.file("run")); });
    expect_contains(refused, "lock");
    expect_contains(refused, words);
    put(temporary.file("run/lock"), "nothing");
    put(temporary.file("run/log.jsonl"), kind);
    testing::internal::CaptureStderr();
    {
      const RunDirectory run(temporary.file("run"));
      RunLog log(run.file("log.jsonl"));
      log.write({{"type", "step"}});
    }
    const std::string messages = testing::internal::GetCapturedStderr();
    expect_contains(messages, words);
    expect_contains(messages, "without a log");
    EXPECT_EQ(read_bytes(temporary.file("victim")), "precious\n");
    EXPECT_FALSE(fs::exists(temporary.file("new")));
    fs::remove(temporary.file("run/log.jsonl"));
  }
}

// Files that are replaced as a whole: the new file takes the name, and what had it before is as it was.
TEST_F(CheckpointTest, AFileThatIsReplacedIsNotWrittenThrough) {
  write_bytes(temporary_.file("victim"), "precious");
  fs::create_directories(run_path());
  fs::create_symlink(temporary_.file("victim"), run_path() + "/config.json");
  ASSERT_EQ(::mkfifo((run_path() + "/matmul_plans.txt").c_str(), 0600), 0);
  for (const char* name : {"/config.json", "/matmul_plans.txt"}) {
    write_file_atomically(run_path() + name, "new");
    EXPECT_EQ(read_bytes(run_path() + name), "new");
    EXPECT_FALSE(fs::is_symlink(run_path() + name));
  }
  EXPECT_EQ(read_bytes(temporary_.file("victim")), "precious");
  // In a checkpoint, what is read may be a link, but nothing that blocks or has no end.
  save(3);
  for (const char* name : {"/model.bin", "/state.bin", "/manifest.json"}) {
    fs::rename(step_path(3) + name, temporary_.file("moved"));
    ASSERT_EQ(::mkfifo((step_path(3) + name).c_str(), 0600), 0);
    error_of(Exit::bad_file, [&] { resumed_step(); });
    fs::remove(step_path(3) + name);
    fs::create_symlink("/dev/zero", step_path(3) + name);
    error_of(Exit::bad_file, [&] { resumed_step(); });
    fs::remove(step_path(3) + name);
    fs::rename(temporary_.file("moved"), step_path(3) + name);
  }
  EXPECT_EQ(resumed_step(), 3);
}

}  // namespace
}  // namespace weft
