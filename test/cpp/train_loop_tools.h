// A training loop on a model so small that a start takes milliseconds: TrainLoopTest, and what interferes with a run.
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/train/loop.h"
#include "test/cpp/train_tools.h"

namespace weft {

namespace fs = std::filesystem;

struct Crash {};  // thrown in the place of a kill: nothing above the loop sees the step end

// Takes what is written to stderr while it exists to `log`, if there is one.
class CapturedLog {
 public:
  explicit CapturedLog(std::string* log) : log_(log) {
    if (log_ != nullptr) testing::internal::CaptureStderr();
  }
  ~CapturedLog() {
    if (log_ != nullptr) *log_ = testing::internal::GetCapturedStderr();
  }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

 private:
  std::string* const log_;
};

class TrainLoopTest : public testing::Test {
 protected:
  void SetUp() override {
    write_shard(temporary_.file("train_0.bin"), patterned_tokens(203));
    write_shard(temporary_.file("train_1.bin"), patterned_tokens(90, 500));
    settings_ = micro_settings();
    omp_set_num_threads(1);  // the model is so small that waking a second thread costs more than its work
  }
  void TearDown() override {
    omp_set_num_threads(threads_);
    arm_save_fault({});
  }

  struct Result {
    Exit exit = Exit::internal;
    TrainState state;
    std::vector<float> tensors;  // parameters and moments
    bool crashed = false;
    std::string error;
    Exit error_code = Exit::ok;
  };

  // One start of the program on run directory `name`: resume or initialise, then the loop.
  Result run(const std::string& name, const std::function<void(HookedModel&)>& interfere = {}) {
    const CapturedLog captured(captures_log_ ? &log_ : nullptr);
    const TokenDataset data(temporary_.file("train_*.bin"), settings_.seq_len);
    const TokenDataset validation(temporary_.file(val_pattern_), settings_.seq_len);
    const std::unique_ptr<TrainModel> inner = micro_model(settings_);
    HookedModel model(*inner);
    if (interfere) interfere(model);
    const RunDirectory directory(temporary_.file(name));
    CheckpointKeeper checkpoints(directory, micro_identity(settings_, data), settings_.keep);
    const TrainState start = checkpoints.resume(settings_.resume_mode(), model).value_or(TrainState{});
    RunLog log(directory.file("log.jsonl"));
    DataLoader loader(data, settings_.micro_batch, static_cast<std::uint64_t>(settings_.seed), start.windows);
    TrainLoop loop({settings_, model, loader, &checkpoints, log, with_validation_ ? &validation : nullptr, sample_,
                    in_background_ ? model.make_state_copy() : nullptr},
                   start);
    Result result;
    testing::internal::CaptureStdout();
    try {
      result.exit = loop.run();
    } catch (const Crash&) {
      result.crashed = true;
    } catch (const Error& error) {
      result.error = error.what();
      result.error_code = error.code();
    }
    result_line_ = testing::internal::GetCapturedStdout();
    result.state = loop.state();
    result.tensors = whole_state(*inner);
    return result;
  }

  // The step records of a run's log; of a step that was logged twice, the later one.
  std::map<std::int64_t, Json> steps(const std::string& name) const {
    std::map<std::int64_t, Json> records;
    for (const Json& record : json_lines(temporary_.file(name) + "/log.jsonl")) {
      if (record["type"] == "step") records[record["step"].get<std::int64_t>()] = record;
    }
    return records;
  }
  std::vector<double> logged(const std::string& name, const char* key) const {
    std::vector<double> values;
    for (const auto& [step, record] : steps(name)) values.push_back(record[key].get<double>());
    return values;
  }
  bool has_checkpoint(const std::string& name, std::int64_t step) const {
    return fs::exists(temporary_.file(name) + format("/step_%08lld/manifest.json", static_cast<long long>(step)));
  }
  // The steps up to 10 that have one.
  std::set<std::int64_t> checkpoints(const std::string& name) const {
    std::set<std::int64_t> steps;
    for (std::int64_t step = 0; step <= 10; ++step) {
      if (has_checkpoint(name, step)) steps.insert(step);
    }
    return steps;
  }

  const int threads_ = omp_get_max_threads();
  TemporaryDirectory temporary_;
  TrainSettings settings_;
  bool with_validation_ = false, in_background_ = true;
  std::string val_pattern_ = "train_*.bin";
  std::function<std::string(std::int64_t)> sample_;
  bool captures_log_ = true;
  std::string result_line_, log_;  // what the last run() has written to stdout and stderr
};

// Interferes at the n-th forward pass of a start.
inline std::function<void(HookedModel&)> at_forward(int n, std::function<void()> action) {
  return [=](HookedModel& model) {
    auto count = std::make_shared<int>(0);
    model.before_forward = [=](std::uint64_t) {
      if (++*count == n) action();
    };
  };
}

// The statistics of the n-th reading, and of the `times` - 1 after it, are not finite.
inline std::function<void(HookedModel&)> bad_statistics(int n, int times, bool loss) {
  return [=](HookedModel& model) {
    auto count = std::make_shared<int>(0);
    model.after_statistics = [=](StepStatistics& statistics) {
      ++*count;
      if (*count < n || *count >= n + times) return;
      (loss ? statistics.loss_sum : statistics.gradient_norm) = std::numeric_limits<double>::infinity();
    };
  };
}

// The loss of the validation behind each step is that of `losses`.
inline std::function<void(HookedModel&)> validation_losses(std::function<double(std::int64_t step)> losses) {
  return [=](HookedModel& model) {
    const auto step = std::make_shared<std::int64_t>(0);
    model.before_update = [step](const AdamWStep& update) { *step = update.step; };
    model.after_evaluate = [losses, step](double& loss_sum, std::int64_t labels) {
      loss_sum = losses(*step) * static_cast<double>(labels);
    };
  };
}

inline void expect_same_run(const std::vector<double>& a, const std::vector<double>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i], b[i]) << "step " << i + 1;
}

}  // namespace weft
