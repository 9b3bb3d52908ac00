// The second time of everything in a training run: each step, save, validation, sample and warning behind the first, and each
// start of the program behind the first. A run of many steps in one start is the same run as one of many starts: what a loop,
// a data loader, a keeper of checkpoints or a log carries over wrongly from one use to the next, or forgets between two
// starts, is a difference.
#include "llmc/base/json.h"
#include "llmc/train/loop.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "llmc/base/file.h"
#include "llmc/model/compare.h"
#include "llmc/train/run_log.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

struct Crash {};  // thrown in the place of a kill: nothing above the loop sees the step end

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr const char* kTimes[] = {"time", "seconds", "stalled_seconds", "tokens_per_s", "dt_ms"};

// What happened in one step, as the model saw it.
struct Seen {
  std::vector<StepStatistics> statistics;  // of each attempt
  std::vector<AdamWStep> updates;
  std::vector<std::uint64_t> micro_steps;
  double val_sum = 0;
  std::int64_t val_labels = 0;
};

class TrainAgainTest : public testing::Test {
 protected:
  // 34 steps of two micro-batches over 36 windows in two shards: nearly four epochs. What can happen in a step happens at least
  // twice: see the tables below.
  void SetUp() override {
    write_shard(temporary_.file("train_0.bin"), patterned_tokens(203));
    write_shard(temporary_.file("train_1.bin"), patterned_tokens(90, 500));
    write_shard(temporary_.file("val.bin"), patterned_tokens(90, 900));
    settings_ = micro_settings();
    settings_.steps = 34;
    settings_.batch_tokens = 32;
    settings_.schedule = "cosine";
    settings_.warmup_steps = 5;
    settings_.dropout = 0.2;  // its masks are addressed by the micro-step
    settings_.grad_clip = 0.5;
    settings_.on_nan = "skip";
    settings_.val_every = 3;
    settings_.val_batches = 2;
    settings_.sample_every = 4;
    settings_.save_every = 2;
    settings_.keep_best = true;
    omp_set_num_threads(1);
  }
  void TearDown() override {
    omp_set_num_threads(threads_);
    arm_save_fault({});
    set_call_fault(nullptr);
  }

  // Steps whose loss or norm is not finite: at the first attempt, or, with --on-nan rerun, at that alone.
  const std::set<std::int64_t> bad_losses_ = {6, 18}, bad_norms_ = {9, 19};
  // Steps with a thousand times their gradient norm: the second lies in the quiet time of the first, the third behind it.
  const std::set<std::int64_t> spikes_ = {14, 25, 33};
  // What is added to the loss of each validation, so that the lowest one comes, goes and comes again.
  const std::map<std::int64_t, double> val_offsets_ = {{3, 5},  {6, 3},  {9, 4},  {12, 2},
                                                       {15, 6}, {18, 9}, {21, 1}, {24, 3}};

  // One start of the program on run directory `name`, as train_llama makes it. It ends behind `most_steps` steps, as at the
  // end of --max-minutes, or there in the middle of a step, as by SIGKILL.
  std::optional<Error> start(const std::string& name, std::int64_t most_steps, bool crash) {
    TrainSettings settings = settings_;
    const TokenDataset data(temporary_.file("train_*.bin"), settings.seq_len);
    const TokenDataset validation(temporary_.file("val.bin"), settings.seq_len);
    const std::unique_ptr<TrainModel> inner = micro_model(settings);
    HookedModel model(*inner);
    const RunDirectory directory(temporary_.file(name));
    CheckpointKeeper checkpoints(directory, micro_identity(settings, data), settings.keep);
    const TrainState begin = checkpoints.resume(settings.resume_mode(), model).value_or(TrainState{});
    RunLog log(directory.file("log.jsonl"));
    log.write({{"type", "resume"}, {"step", begin.step}});
    DataLoader loader(data, settings.micro_batch, static_cast<std::uint64_t>(settings.seed), begin.windows);

    const std::int64_t accumulation = settings.accumulation();
    std::int64_t step = begin.step;
    model.before_forward = [&](std::uint64_t micro_step) {
      const std::int64_t now = static_cast<std::int64_t>(micro_step) / accumulation + 1;
      if (now != step) seen_[now] = {};
      if (now != step && before_step_) before_step_(now);
      step = now;
      seen_[step].micro_steps.push_back(micro_step);
      if (crash && step == begin.step + most_steps) throw Crash();
      if (!crash && step == begin.step + most_steps) settings.max_minutes = 1e-9;  // over at the end of this step
    };
    model.after_statistics = [&](StepStatistics& statistics) {
      const bool first = seen_[step].statistics.empty();
      if (spikes_.contains(step)) statistics.gradient_norm *= 1000;
      if (first && bad_losses_.contains(step)) statistics.loss_sum = kInfinity;
      if (first && bad_norms_.contains(step)) statistics.gradient_norm = kInfinity;
      seen_[step].statistics.push_back(statistics);
    };
    model.before_update = [&](const AdamWStep& update) { seen_[step].updates.push_back(update); };
    model.after_evaluate = [&](double& loss_sum, std::int64_t labels) {
      const auto offset = val_offsets_.find(step);
      loss_sum += (offset != val_offsets_.end() ? offset->second : 7) * static_cast<double>(labels);
      seen_[step].val_sum += loss_sum;
      seen_[step].val_labels += labels;
    };
    TrainLoop loop({settings, model, loader, &checkpoints, log, &validation,
                    [](std::int64_t number) { return format("text after %lld", static_cast<long long>(number)); },
                    in_background_ ? model.make_state_copy() : nullptr},
                   begin);
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    std::optional<Error> ended_by;
    try {
      EXPECT_EQ(loop.run(), Exit::ok);
    } catch (const Crash&) {
    } catch (const Error& error) {
      ended_by = error;
    }
    std::istringstream messages(testing::internal::GetCapturedStderr());
    for (std::string line; std::getline(messages, line);) {
      if (line.starts_with("warning:")) warnings_.push_back(line);
    }
    result_line_ = testing::internal::GetCapturedStdout();
    state_ = loop.state();
    tensors_ = whole_state(*inner);
    best_path_ = checkpoints.best_path();
    ++starts_;
    return ended_by;
  }

  // What a run leaves, without what is a matter of time.
  struct Outcome {
    TrainState state;
    std::vector<float> tensors;
    std::vector<Json> records;  // but those of starts and saves; of a step that was computed twice, the later ones
    std::vector<std::string> warnings;
    std::map<std::string, std::string> files;  // of the newest checkpoint and of the best one
    std::string result_line;
    int starts = 0;
  };
  // As many starts as it takes to come to the end.
  Outcome run(const std::string& name, std::int64_t most_steps, bool crash = false) {
    warnings_.clear();
    starts_ = 0;
    state_ = {};
    while (state_.step < settings_.steps && starts_ < 100) {
      const std::optional<Error> error = start(name, most_steps, crash);
      EXPECT_FALSE(error.has_value()) << error->what();
    }
    Outcome outcome{state_, tensors_, records(name), warnings_, {}, result_line_, starts_};
    EXPECT_EQ(state_.step, settings_.steps);
    for (const std::string& path : {temporary_.file(name) + "/step_00000034", best_path_}) {
      if (path.empty()) continue;
      for (const char* file : {"/model.bin", "/state.bin", "/manifest.json"}) {
        outcome.files[fs::path(path).filename().string() + file] = read_bytes(path + file);
      }
    }
    const std::size_t at = outcome.result_line.find(name);
    if (at != std::string::npos) outcome.result_line.erase(at, name.size());
    return outcome;
  }
  // The records of a log as a reader has to take them: what follows a start replaces earlier records of later steps.
  std::vector<Json> records(const std::string& name) const {
    std::vector<Json> all;
    for (Json& record : json_lines(temporary_.file(name) + "/log.jsonl")) {
      if (record["type"] == "resume") {
        std::erase_if(all, [&](const Json& earlier) { return earlier["step"] > record["step"]; });
        continue;
      }
      if (record["type"] == "save") continue;
      for (const char* key : kTimes) record.erase(key);
      all.push_back(std::move(record));
    }
    return all;
  }
  static void expect_same(const Outcome& got, const Outcome& expected) {
    EXPECT_TRUE(got.state == expected.state) << got.state.to_json() << "\n" << expected.state.to_json();
    EXPECT_EQ(got.tensors, expected.tensors);
    ASSERT_EQ(got.records.size(), expected.records.size());
    for (std::size_t i = 0; i < got.records.size(); ++i) EXPECT_EQ(got.records[i], expected.records[i]);
    EXPECT_EQ(got.result_line, expected.result_line);
    ASSERT_EQ(got.files.size(), expected.files.size());
    for (const auto& [file, bytes] : expected.files) {
      EXPECT_TRUE(got.files.contains(file) && got.files.at(file) == bytes) << file;
    }
  }

  const int threads_ = omp_get_max_threads();
  TemporaryDirectory temporary_{memory_files()};
  TrainSettings settings_;
  bool in_background_ = true;
  std::function<void(std::int64_t step)> before_step_;  // may be empty
  std::map<std::int64_t, Seen> seen_;                   // of each step, in the start that computed it last
  // Of the last start; the warnings of all of a run.
  TrainState state_;
  std::vector<float> tensors_;
  std::vector<std::string> warnings_;
  std::string result_line_, best_path_;
  int starts_ = 0;
};

TEST_F(TrainAgainTest, EachStepInAStartOfItsOwnIsTheSameRun) {
  const Outcome whole = run("whole", 1000);
  ASSERT_EQ(whole.starts, 1);
  EXPECT_EQ(whole.state.skipped, 4);
  EXPECT_EQ(whole.state.updates, 30);
  EXPECT_EQ(whole.state.best->step, 21);
  for (const std::int64_t most_steps : {1, 3, 7}) {
    const Outcome parts = run(format("parts_%d", static_cast<int>(most_steps)), most_steps);
    EXPECT_EQ(parts.starts, (34 + most_steps - 1) / most_steps);
    expect_same(parts, whole);
    EXPECT_EQ(parts.warnings, whole.warnings);
  }
  for (const std::int64_t most_steps : {4, 5}) {  // dies in the fourth step of each start: one or two steps are lost
    const Outcome crashed = run(format("crashed_%d", static_cast<int>(most_steps)), most_steps, true);
    EXPECT_GT(crashed.starts, 8);
    expect_same(crashed, whole);
  }
  in_background_ = false;
  expect_same(run("waiting", 2), whole);
}

TEST_F(TrainAgainTest, StepsThatAreComputedTwiceAreTheSameRunInAnyNumberOfStarts) {
  settings_.on_nan = "rerun";
  const Outcome whole = run("whole", 1000);
  EXPECT_EQ(whole.state.transient, 4);
  EXPECT_EQ(whole.state.updates, 34);
  const Outcome parts = run("parts", 1);
  expect_same(parts, whole);
  EXPECT_EQ(parts.warnings, whole.warnings);
}

// Every field of every record, computed again from what the model was asked and what it answered. Two starts: the second one
// begins within the quiet time of a spike and behind two steps that were skipped.
TEST_F(TrainAgainTest, EachFieldOfEachRecordIsThatOfItsStep) {
  const auto began = std::chrono::system_clock::now();
  start("run", 20, false);
  start("run", 1000, false);
  const auto ended = std::chrono::system_clock::now();
  ASSERT_EQ(state_.step, 34);
  const auto seconds = [](std::chrono::system_clock::time_point time) {
    return static_cast<double>(std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch()).count()) /
           1000;
  };
  const Schedule schedule = settings_.learning_rate();
  const auto number = [](double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); };
  std::vector<Json> expected;
  SpikeDetector detector;
  std::int64_t updates = 0;
  for (std::int64_t n = 1; n <= 34; ++n) {
    const Seen& seen = seen_.at(n);
    const StepStatistics& last = seen.statistics.back();
    const auto label_count = static_cast<double>(last.label_count);
    EXPECT_EQ(last.label_count, 32) << "labels of the step before are not counted again";
    EXPECT_EQ(seen.micro_steps, (std::vector<std::uint64_t>{2 * static_cast<std::uint64_t>(n) - 2,
                                                            2 * static_cast<std::uint64_t>(n) - 1}));
    const Json windows = {4 * (n - 1), 4 * n};
    const bool skipped = !is_finite(last);
    EXPECT_EQ(seen.updates.size(), skipped ? 0u : 1u);
    if (skipped) {
      expected.push_back({{"type", "non_finite"},
                          {"step", n},
                          {"loss", number(last.loss_sum / label_count)},
                          {"grad_norm", number(last.gradient_norm)},
                          {"tensor", ""},
                          {"windows", windows}});
    } else {
      const AdamWStep& update = seen.updates.front();
      EXPECT_EQ(update.step, ++updates) << n;
      EXPECT_EQ(update.learning_rate, static_cast<float>(schedule.at(n))) << n;
      EXPECT_EQ(update.gradient_scale, clip_factor(last.gradient_norm, 0.5)) << n;
      EXPECT_EQ(update.beta1, static_cast<float>(settings_.beta1)) << n;
      EXPECT_EQ(update.beta2, static_cast<float>(settings_.beta2)) << n;
      EXPECT_EQ(update.eps, static_cast<float>(settings_.eps)) << n;
      EXPECT_EQ(update.weight_decay, static_cast<float>(settings_.weight_decay)) << n;
      if (const auto spike = detector.observe(last.loss_sum / label_count, last.gradient_norm)) {
        expected.push_back({{"type", "spike"},
                            {"step", n},
                            {"loss", last.loss_sum / label_count},
                            {"loss_level", spike->loss_level},
                            {"grad_norm", last.gradient_norm},
                            {"grad_norm_level", spike->norm_level},
                            {"windows", windows}});
      }
    }
    Json step = {{"type", "step"},       {"step", n},
                 {"tokens", 32 * n},     {"loss", number(last.loss_sum / label_count)},
                 {"lr", schedule.at(n)}, {"grad_norm", number(last.gradient_norm)},
                 {"skipped", skipped}};
    EXPECT_EQ(seen.val_labels, n % 3 == 0 || n == 34 ? 32 : 0) << n;
    if (n % 3 == 0 || n == 34) {
      step["val_loss"] = seen.val_sum / static_cast<double>(seen.val_labels);
      step["val_tokens"] = seen.val_labels;
    }
    expected.push_back(std::move(step));
    if (n % 4 == 0 || n == 34) {
      expected.push_back(
          {{"type", "sample"}, {"step", n}, {"text", format("text after %lld", static_cast<long long>(n))}});
    }
  }
  const std::vector<Json> got = records("run");
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], expected[i]);
  std::vector<Json> spikes;
  for (const Json& record : got) {
    if (record["type"] == "spike") spikes.push_back(record["step"]);
  }
  EXPECT_EQ(spikes, (std::vector<Json>{14, 33})) << "the one between them is within 16 updates of the first";

  std::vector<std::int64_t> saves;
  double before = seconds(began);
  for (const Json& record : json_lines(temporary_.file("run") + "/log.jsonl")) {
    EXPECT_GE(record["time"].get<double>(), before) << record;
    EXPECT_LE(record["time"].get<double>(), seconds(ended)) << record;
    before = record["time"].get<double>();
    if (record["type"] == "save") {
      EXPECT_EQ(record.size(), 5u) << record;
      saves.push_back(record["step"].get<std::int64_t>());
      EXPECT_GT(record["seconds"].get<double>(), 0) << record;
      EXPECT_GE(record["stalled_seconds"].get<double>(), 0) << record;
      EXPECT_LE(record["stalled_seconds"].get<double>(), record["seconds"].get<double>()) << record;
    }
    if (record["type"] == "step") {
      EXPECT_GT(record["dt_ms"].get<double>(), 0) << record;
      EXPECT_NEAR(record["tokens_per_s"].get<double>() * record["dt_ms"].get<double>() / 1000, 32, 1e-6) << record;
    }
  }
  // Every second step, where the loss on the validation data is the lowest, and the last one of each start: each once.
  EXPECT_EQ(saves, (std::vector<std::int64_t>{2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21, 22, 24, 26, 28, 30, 32, 34}));
}

// The same fault ends one start after the other: each has the same error, and leaves the directory as the first one left it.
// Without the fault the run goes on as if it had never been there.
TEST_F(TrainAgainTest, AFaultThatComesAgainLeavesTheSameEachTime) {
  settings_.on_nan = "rerun";
  settings_.keep_best = false;
  const Outcome whole = run("whole", 1000);
  before_step_ = [&](std::int64_t step) {
    if (step == 17) fail(Exit::numeric, "step 17 is not finite");
  };
  std::map<std::string, std::string> left;
  for (int time = 0; time < 3; ++time) {
    const std::optional<Error> error = start("run", 1000, false);
    ASSERT_TRUE(error.has_value());
    EXPECT_STREQ(error->what(), "step 17 is not finite");
    EXPECT_EQ(error->code(), Exit::numeric);
    EXPECT_EQ(state_.step, 16);
    std::map<std::string, std::string> now;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(temporary_.file("run"))) {
      const std::string path = entry.path().string();
      if (entry.is_regular_file() && !path.ends_with("log.jsonl")) now[path] = read_bytes(path);
    }
    EXPECT_EQ(now.size(), 2 * 3 + 1u) << "two checkpoints and the lock";
    EXPECT_TRUE(time == 0 || now == left) << time;
    left = now;
  }
  before_step_ = {};
  EXPECT_FALSE(start("run", 1000, false).has_value());
  EXPECT_TRUE(state_ == whole.state);
  EXPECT_EQ(tensors_, whole.tensors);
  EXPECT_EQ(records("run"), whole.records);
}

// Saves that fail again and again, and between them saves that do not: each failure costs its own checkpoint and is said.
TEST_F(TrainAgainTest, SavesThatFailAgainCostTheirCheckpointsAlone) {
  settings_.keep_best = false;
  settings_.steps = 16;
  settings_.keep = 3;
  start("clean", 1000, false);
  const TrainState clean = state_;
  const std::vector<float> expected = tensors_;
  for (in_background_ = false;; in_background_ = true) {
    const std::string name = in_background_ ? "background" : "waiting";
    before_step_ = [](std::int64_t) {
      set_call_fault([](const char*, const std::string& path) {
        for (const char* step : {"step_00000002.tmp", "step_00000004.tmp", "step_00000010.tmp", "step_00000014.tmp"}) {
          if (path.find(step) != std::string::npos) return false;
        }
        return true;
      });
    };
    warnings_.clear();
    EXPECT_FALSE(start(name, 1000, false).has_value());
    EXPECT_TRUE(state_ == clean);
    EXPECT_EQ(tensors_, expected);
    std::vector<std::string> failures;
    for (const std::string& line : warnings_) {
      if (line.starts_with("warning: no checkpoint of step "))
        failures.push_back(line.substr(31, line.find(':', 31) - 31));
    }
    EXPECT_EQ(failures, (std::vector<std::string>{"2", "4", "10", "14"})) << name;
    std::vector<std::int64_t> saves;
    for (const Json& record : json_lines(temporary_.file(name) + "/log.jsonl")) {
      if (record["type"] == "save") saves.push_back(record["step"].get<std::int64_t>());
    }
    EXPECT_EQ(saves, (std::vector<std::int64_t>{6, 8, 12, 16})) << name;
    std::set<std::string> found;
    for (const fs::directory_entry& entry : fs::directory_iterator(temporary_.file(name))) {
      if (entry.is_directory()) found.insert(entry.path().filename().string());
    }
    EXPECT_EQ(found, (std::set<std::string>{"step_00000008", "step_00000012", "step_00000016"})) << name;
    if (in_background_) break;
  }
}

// What a start finds is a matter of the directory alone: checkpoints that are damaged, of whatever kind, cost the steps
// behind the newest whole one, and nothing else.
TEST_F(TrainAgainTest, DamagedCheckpointsCostTheirStepsAndNothingElse) {
  const Outcome whole = run("whole", 1000);
  // Where the run stops; which of the checkpoints that it has left then are damaged, from the newest on.
  for (const auto& [stop, damaged] : {std::pair<std::int64_t, int>{13, 1}, {21, 1}, {22, 1}, {23, 2}, {25, 2}}) {
    const std::string name = format("run_%d", static_cast<int>(stop));
    warnings_.clear();
    start(name, stop, false);
    ASSERT_EQ(state_.step, stop);
    std::set<std::string> found;
    for (const fs::directory_entry& entry : fs::directory_iterator(temporary_.file(name))) {
      if (entry.is_directory()) found.insert(entry.path().string());
    }
    ASSERT_GT(std::ssize(found), damaged) << name;
    auto newest = found.rbegin();
    for (int i = 0; i < damaged; ++i, ++newest) fs::resize_file(*newest + (i == 0 ? "/state.bin" : "/model.bin"), 3000);
    start(name, 1000, false);
    Outcome outcome{state_, tensors_, records(name), {}, {}, {}, 0};
    EXPECT_TRUE(outcome.state == whole.state) << outcome.state.to_json() << "\n" << whole.state.to_json();
    EXPECT_EQ(outcome.tensors, whole.tensors);
    EXPECT_EQ(outcome.records, whole.records);
    EXPECT_EQ(fs::path(best_path_).filename(), "step_00000021");
    EXPECT_EQ(Checkpoint::open(best_path_, 21).state().best, whole.state.best);
  }
}

}  // namespace
}  // namespace weft
