// Run directories: who may write to them, and what a save leaves there.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/base/cgroup.h"
#include "llmc/base/json.h"
#include "llmc/train/fault_injection.h"
#include "llmc/train/run_log.h"
#include "test/cpp/checkpoint_tools.h"

namespace weft {
namespace {

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

}  // namespace
}  // namespace weft
