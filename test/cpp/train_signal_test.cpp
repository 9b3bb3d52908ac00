// Signals and planted faults in the training loop.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/base/signals.h"
#include "test/cpp/train_loop_tools.h"

namespace weft {
namespace {

class TrainSignalTest : public TrainLoopTest {
 protected:
  // "threadsafe" starts the test's program again instead of forking it: OpenMP does not survive a fork.
  TrainSignalTest() {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    captures_log_ = false;  // EXPECT_EXIT reads it
  }

  // Runs with `raise_signals` in the middle of step 4, then leaves with the run's exit code, or with 1 unless
  // exactly the steps of `saved` among 4 and 10 have a checkpoint.
  [[noreturn]] void leave_after(const std::function<void()>& raise_signals, std::set<std::int64_t> saved) {
    leave_with(at_forward(4, raise_signals), std::move(saved));
  }
  // The same with signals wherever `interfere` raises them.
  [[noreturn]] void leave_with(const std::function<void(HookedModel&)>& interfere, std::set<std::int64_t> saved) {
    ::signal(SIGHUP, SIG_DFL);  // the tests may run under nohup
    install_signal_handlers();
    const Result result = run("run", interfere);
    std::set<std::int64_t> found;
    for (const std::int64_t step : {4, 10}) {
      if (has_checkpoint("run", step)) found.insert(step);
    }
    fs::remove_all(temporary_.file(""));
    ::_exit(found == saved ? static_cast<int>(result.exit) : 1);
  }
};

TEST_F(TrainSignalTest, TermFinishesTheStepSavesAndStops) {
  EXPECT_EXIT(leave_after([] { ::raise(SIGTERM); }, {4}), testing::ExitedWithCode(143), "after step 4");
}

// The result says which step the validation loss is of: not that of a measurement which a signal has ended.
TEST_F(TrainSignalTest, AMeasurementThatIsInterruptedIsNone) {
  with_validation_ = true;
  settings_.val_every = 2;
  settings_.val_batches = 2;
  const auto leave = [this] {
    install_signal_handlers();
    run("run", [](HookedModel& model) {
      const auto updates = std::make_shared<int>(0);
      model.before_update = [=](const AdamWStep&) { ++*updates; };
      model.before_evaluate = [=](const Batch&) {
        if (*updates == 4) ::raise(SIGTERM);
      };
    });
    const bool good = result_line_.starts_with("step 4 ") && result_line_.find("(step 2)") != std::string::npos;
    fs::remove_all(temporary_.file(""));
    ::_exit(good ? 0 : 1);
  };
  EXPECT_EXIT(leave(), testing::ExitedWithCode(0), "after step 4");
}

TEST_F(TrainSignalTest, HangupIsATermination) {
  EXPECT_EXIT(leave_after([] { ::raise(SIGHUP); }, {4}), testing::ExitedWithCode(143), "after step 4");
}

TEST_F(TrainSignalTest, InterruptHasItsOwnCode) {
  EXPECT_EXIT(leave_after([] { ::raise(SIGINT); }, {4}), testing::ExitedWithCode(130), "after step 4");
}

// Who has stopped the run is told so, also where it had come to its end: what follows in a script must not begin.
TEST_F(TrainSignalTest, ASignalInTheLastStepHasItsCode) {
  for (const auto& [signal_number, code] : {std::pair{SIGTERM, 143}, std::pair{SIGINT, 130}}) {
    const auto interfere = at_forward(10, [number = signal_number] { ::raise(number); });
    EXPECT_EXIT(leave_with(interfere, {10}), testing::ExitedWithCode(code), "step 10/10");
  }
}

TEST_F(TrainSignalTest, ASignalInTheLastValidationHasItsCode) {
  with_validation_ = true;
  settings_.val_every = 10;
  settings_.val_batches = 2;
  for (const auto& [signal_number, code] : {std::pair{SIGTERM, 143}, std::pair{SIGINT, 130}}) {
    const auto interfere = [number = signal_number](HookedModel& model) {
      model.before_evaluate = [number](const Batch&) { ::raise(number); };
    };
    EXPECT_EXIT(leave_with(interfere, {10}), testing::ExitedWithCode(code), "step 10/10");
  }
}

TEST_F(TrainSignalTest, ASecondInterruptDoesNotWait) {
  const auto twice = [this] {
    ::raise(SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    fs::remove_all(temporary_.file(""));  // nothing runs after the second one
    ::raise(SIGINT);
  };
  EXPECT_EXIT(leave_after(twice, {4}), testing::ExitedWithCode(130),
              "step 3/10(.|\n)*steps after the newest checkpoint \\(if any\\) are lost");
  const auto resumed = [&] {
    settings_.steps = 3;
    run("run");
    settings_.steps = 10;
    leave_after(twice, {4});
  };
  EXPECT_EXIT(resumed(), testing::ExitedWithCode(130), "newest checkpoint \\(step 3 or later\\) are lost");
}

// timeout(1) signals its child, then the group that the child is in, too.
TEST_F(TrainSignalTest, TwoSignalsAtOnceAreOneRequest) {
  const auto twice = [] {
    ::raise(SIGTERM);
    ::raise(SIGTERM);
  };
  EXPECT_EXIT(leave_after(twice, {4}), testing::ExitedWithCode(143), "after step 4");
}

TEST_F(TrainSignalTest, User1SavesAndGoesOn) {
  EXPECT_EXIT(leave_after([] { ::raise(SIGUSR1); }, {4, 10}), testing::ExitedWithCode(0), "step 10/10");
}

TEST_F(TrainSignalTest, EachUser1IsACheckpoint) {
  settings_.keep = 10;
  const auto leave = [&] {
    install_signal_handlers();
    run("run", [](HookedModel& model) {
      model.before_update = [](const AdamWStep& update) {
        if (std::set<std::int64_t>{1, 3, 4, 8}.contains(update.step)) ::raise(SIGUSR1);
      };
    });
    const std::set<std::int64_t> found = checkpoints("run");
    fs::remove_all(temporary_.file(""));
    ::_exit(found == std::set<std::int64_t>{1, 3, 4, 8, 10} ? 0 : 1);
  };
  EXPECT_EXIT(leave(), testing::ExitedWithCode(0), "step 10/10");
}

// Before the first step there is nothing new to save: the request waits for it, also when a run goes on.
TEST_F(TrainSignalTest, User1BeforeTheFirstStepSavesAfterIt) {
  settings_.keep = 10;
  const auto leave = [&] {
    install_signal_handlers();
    for (const std::int64_t end : {4, 10}) {
      settings_.steps = end;
      ::raise(SIGUSR1);
      run("run");
    }
    const std::set<std::int64_t> found = checkpoints("run");
    fs::remove_all(temporary_.file(""));
    ::_exit(found == std::set<std::int64_t>{1, 4, 5, 10} ? 0 : 1);
  };
  EXPECT_EXIT(leave(), testing::ExitedWithCode(0), "step 10/10");
}

// Who wants the end does not wait for a sample.
TEST_F(TrainSignalTest, NoSampleIsWrittenBehindATermination) {
  settings_.sample_every = 2;
  const auto leave = [&] {
    install_signal_handlers();
    std::vector<std::int64_t> samples;
    sample_ = [&](std::int64_t step) {
      samples.push_back(step);
      return std::string("text");
    };
    run("run", at_forward(4, [] { ::raise(SIGTERM); }));
    fs::remove_all(temporary_.file(""));
    ::_exit(samples == std::vector<std::int64_t>{2} ? 0 : 1);
  };
  EXPECT_EXIT(leave(), testing::ExitedWithCode(0), "after step 4");
}

// One request is one checkpoint, also where a save is due anyway: it does not stay for the next step.
TEST_F(TrainSignalTest, User1AtASaveIsThatSave) {
  settings_.save_every = 4;
  settings_.keep = 10;
  const auto leave = [this] { ::raise(SIGUSR1); };
  const auto without_a_second = [&] {
    const std::string next = temporary_.file("run") + "/step_00000005";
    install_signal_handlers();
    run("run", at_forward(4, leave));
    const bool good = has_checkpoint("run", 4) && has_checkpoint("run", 10) && !fs::exists(next);
    fs::remove_all(temporary_.file(""));
    ::_exit(good ? 0 : 1);
  };
  EXPECT_EXIT(without_a_second(), testing::ExitedWithCode(0), "step 10/10");
}

TEST(Faults, MalformedSpecsAreRefused) {
  for (const char* spec : {"", "nan", "nan@step", "nan@step=", "nan@step=x", "nan@step=-1", "nan@step=3x",
                           "boom@step=3", "kill@save=99999999999999999999"}) {
    expect_contains(error_of(Exit::usage, [&] { parse_faults({spec}); }), "--debug-inject");
  }
  const FaultPlan plan = parse_faults({"nan@step=3", "kill@save=100"});
  EXPECT_EQ(plan.nan_step, 3);
  EXPECT_EQ(plan.save, SaveFault::kill);
  EXPECT_EQ(plan.save_byte, 100u);
}

}  // namespace
}  // namespace weft
