// Checkpoints: whatever happens to a save or to the files afterwards, a run goes on from the newest state that is whole, or
// says why it cannot.
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/error_from.h"
#include "llmc/base/json.h"
#include "llmc/train/fault_injection.h"
#include "test/cpp/checkpoint_tools.h"
#include "test/cpp/sanitized.h"

namespace weft {
namespace {

int writes_until_fault = 0;  // of the hooks below

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
