// The training loop: accumulation, bit-exact resume, the numeric guard, faults and signals; also initial
// parameters and the guard's parts.
#include "llmc/base/json.h"
#include "llmc/model/presets.h"
#include "llmc/train/loop.h"

#include <gtest/gtest.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "llmc/base/log.h"
#include "llmc/base/philox.h"
#include "llmc/base/signals.h"
#include "llmc/base/utf8.h"
#include "llmc/comm/thread_ranks.h"
#include "llmc/model/compare.h"
#include "llmc/train/bench.h"
#include "llmc/train/evaluate.h"
#include "llmc/train/sample.h"
#include "test/cpp/byte_tokenizer.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

struct Crash {};  // thrown in the place of a kill: nothing above the loop sees the step end

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
  std::string result_line_;
};

// Interferes at the n-th forward pass of a start.
std::function<void(HookedModel&)> at_forward(int n, std::function<void()> action) {
  return [=](HookedModel& model) {
    auto count = std::make_shared<int>(0);
    model.before_forward = [=](std::uint64_t) {
      if (++*count == n) action();
    };
  };
}

// The statistics of the n-th reading, and of the `times` - 1 after it, are not finite.
std::function<void(HookedModel&)> bad_statistics(int n, int times, bool loss) {
  return [=](HookedModel& model) {
    auto count = std::make_shared<int>(0);
    model.after_statistics = [=](StepStatistics& statistics) {
      ++*count;
      if (*count < n || *count >= n + times) return;
      (loss ? statistics.loss_sum : statistics.gradient_norm) = std::numeric_limits<double>::infinity();
    };
  };
}

// Labels that are left out count nothing: two batches that share the labels of one add up to it.
TEST(CpuLlamaTest, IgnoredLabelsAreNotCounted) {
  const TrainSettings settings = micro_settings();
  const std::unique_ptr<TrainModel> model = micro_model(settings);
  const std::vector<std::uint16_t> text = patterned_tokens(17);
  const std::vector<std::int32_t> tokens(text.begin(), text.end() - 1), labels(text.begin() + 1, text.end());
  std::vector<std::int32_t> some = labels, others = labels;
  for (std::size_t i = 0; i < labels.size(); ++i) (i % 3 == 0 ? others : some)[i] = kIgnoredLabel;
  const auto evaluated = [&](const std::vector<std::int32_t>& asked) {
    std::int64_t count = -1;
    const double sum = model->evaluate({tokens, asked}, &count);
    model->zero_gradients();
    model->forward({tokens, asked}, 0, 1);
    const StepStatistics trained = model->statistics();
    EXPECT_EQ(trained.label_count, count);
    EXPECT_EQ(trained.loss_sum, sum);
    return std::pair(sum, count);
  };
  const auto [all_sum, all_count] = evaluated(labels);
  const auto [some_sum, some_count] = evaluated(some);
  const auto [other_sum, other_count] = evaluated(others);
  EXPECT_EQ(all_count, 16);
  EXPECT_EQ(some_count, 6);
  EXPECT_EQ(other_count, 10);
  EXPECT_NEAR(some_sum + other_sum, all_sum, 1e-9 * all_sum);
}

// The CPU computes in fp32: what a GPU could do is refused, and not done otherwise.
TEST(CpuLlamaTest, OtherPrecisionsAreRefused) {
  TrainOptions options = micro_settings().model_options();
  options.precision = Precision::bf16;
  expect_contains(error_of(Exit::usage, [&] { cpu::make_training_model(micro_config(), options); }),
                  "--precision: got bf16");
}

// What fp8 has lost is in the record of each step; of much saturation one warning in a hundred steps names the tensor.
TEST_F(TrainLoopTest, SaturationIsLoggedAndWarnedOf) {
  const auto saturating = [](double share) {
    return [share](HookedModel& model) {
      model.after_statistics = [share](StepStatistics& statistics) {
        statistics.fp8.emplace();
        statistics.fp8->kinds[static_cast<std::size_t>(Fp8Kind::gradient)] = {1000, 20, 5};
        statistics.fp8->worst = "layers.0 qkv gradient";
        statistics.fp8->worst_share = share;
      };
    };
  };
  settings_.steps = 104;
  testing::internal::CaptureStderr();
  run("much", saturating(0.02));
  const std::string much = testing::internal::GetCapturedStderr();
  expect_contains(much, "step 1: fp8 saturates: 2 % of the values of layers.0 qkv gradient were beyond its range");
  expect_contains(much, "step 101: fp8 saturates");
  EXPECT_EQ(much.find("fp8 saturates", much.find("fp8 saturates") + 1), much.rfind("fp8 saturates")) << "twice";
  EXPECT_EQ(steps("much").at(7)["fp8"]["gradient"], (Json{{"values", 1000}, {"saturated", 20}, {"flushed", 5}}));
  settings_.steps = 2;
  testing::internal::CaptureStderr();
  run("little", saturating(kFp8SaturationWarning));
  EXPECT_EQ(testing::internal::GetCapturedStderr().find("fp8 saturates"), std::string::npos);
  EXPECT_EQ(steps("little").at(2)["fp8"]["gradient"]["saturated"], 20);
}

TEST_F(TrainLoopTest, LearnsAndReports) {
  settings_.steps = 60;
  with_validation_ = true;
  settings_.val_every = 20;
  const Result result = run("run");
  EXPECT_EQ(result.exit, Exit::ok);
  EXPECT_EQ(result.state.step, 60);
  const std::vector<double> loss = logged("run", "loss");
  ASSERT_EQ(loss.size(), 60u);
  EXPECT_NEAR(loss.front(), std::log(32.0), 0.1) << "a new model knows nothing: the loss is log V";
  EXPECT_LT(loss.back(), 2.5);
  EXPECT_EQ(loss.back(), *result.state.loss) << "the log keeps every bit";
  const auto records = steps("run");
  EXPECT_EQ(records.at(20).count("val_loss") + records.at(60).count("val_loss"), 2u);
  EXPECT_EQ(records.at(21).count("val_loss"), 0u);
  EXPECT_EQ(records.at(60)["tokens"], 60 * 16);
  EXPECT_TRUE(has_checkpoint("run", 60));
  expect_contains(result_line_, "step 60  train loss ");
  expect_contains(result_line_, "step_00000060");
}

// Each step with something to say has a line of its own, however long the run.
TEST_F(TrainLoopTest, ALongRunPrintsItsValidationsAndTheStepsThatItSkips) {
  settings_.steps = 1200;
  settings_.on_nan = "skip";
  settings_.debug_inject = {"nan@step=7"};
  with_validation_ = true;
  settings_.val_every = 9;
  testing::internal::CaptureStderr();
  run("run", at_forward(40, [] { throw Crash{}; }));
  std::istringstream text(testing::internal::GetCapturedStderr());
  std::vector<std::int64_t> printed;
  const auto records = steps("run");
  for (std::string line; std::getline(text, line);) {
    if (!line.starts_with("step ") || line.find("/1200") == std::string::npos) continue;
    const std::int64_t step = std::atoi(line.c_str() + 5);
    printed.push_back(step);
    EXPECT_EQ(line.ends_with(" left  skipped"), step == 7) << line;
    const Json& record = records.at(step);
    EXPECT_EQ(record.contains("val_loss"), step % 9 == 0);
    const std::string end =
        step % 9 == 0 ? format(" left  val %.4f", record["val_loss"].get<double>()) : std::string(" left");
    EXPECT_TRUE(step == 7 || line.ends_with(end)) << line;
  }
  EXPECT_EQ(printed, (std::vector<std::int64_t>{1, 7, 9, 18, 20, 27, 36}));
}

TEST_F(TrainLoopTest, AccumulationEqualsOneBigBatch) {
  settings_.micro_batch = 4;
  settings_.batch_tokens = 32;
  const Result big = run("big");
  settings_.micro_batch = 1;
  const Result accumulated = run("accumulated");
  EXPECT_EQ(big.state.windows, accumulated.state.windows);
  ASSERT_EQ(big.tensors.size(), accumulated.tensors.size());
  for (std::size_t i = 0; i < big.tensors.size(); ++i) {
    // Ten updates of 1e-2 whose directions agree to rounding; a lost or doubled micro-batch changes them
    // entirely.
    ASSERT_NEAR(big.tensors[i], accumulated.tensors[i], 2e-5) << i;
  }
  const std::vector<double> a = logged("big", "grad_norm"), b = logged("accumulated", "grad_norm");
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-5 * a[i]);
}

void expect_same_run(const std::vector<double>& a, const std::vector<double>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i], b[i]) << "step " << i + 1;
}

TEST_F(TrainLoopTest, HalfAndHalfIsTheWholeBitForBit) {
  settings_.batch_tokens = 32;
  settings_.dropout = 0.3;  // its masks are addressed by the micro-step
  const Result whole = run("whole");
  settings_.steps = 5;
  const Result half = run("halves");
  EXPECT_EQ(half.state.step, 5);
  EXPECT_NE(half.tensors, whole.tensors);
  settings_.steps = 10;
  const Result halves = run("halves");
  EXPECT_TRUE(halves.state == whole.state);
  EXPECT_EQ(halves.tensors, whole.tensors);
  for (const char* key : {"loss", "grad_norm", "lr"}) expect_same_run(logged("halves", key), logged("whole", key));
}

TEST_F(TrainLoopTest, ACrashAnywhereCostsNothingButTime) {
  settings_.schedule = "cosine";
  settings_.save_every = 3;
  settings_.dropout = 0.3;
  settings_.batch_tokens = 32;
  const Result whole = run("whole");
  for (const int forward : {1, 6, 9, 14, 20}) {
    const std::string name = format("crash%d", forward);
    EXPECT_TRUE(run(name, at_forward(forward, [] { throw Crash(); })).crashed);
    const Result result = run(name);
    EXPECT_TRUE(result.state == whole.state) << "crash in micro-batch " << forward;
    EXPECT_EQ(result.tensors, whole.tensors) << "crash in micro-batch " << forward;
    expect_same_run(logged(name, "loss"), logged("whole", "loss"));
  }
}

// Each micro-batch of a run has a number of its own, or dropout would draw the same mask again.
TEST_F(TrainLoopTest, MicroBatchesAreNumberedThroughTheRun) {
  settings_.batch_tokens = 32;
  settings_.on_nan = "rerun";
  std::vector<std::uint64_t> numbers;
  const auto collect = [&](HookedModel& model) {
    model.before_forward = [&](std::uint64_t micro_step) { numbers.push_back(micro_step); };
  };
  settings_.steps = 3;
  run("run", collect);
  settings_.steps = 5;
  settings_.debug_inject = {"nan@step=4"};  // run again: with the numbers of the first attempt
  run("run", collect);
  EXPECT_EQ(numbers, (std::vector<std::uint64_t>{0, 1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9}));
}

TEST_F(TrainLoopTest, AFinishedRunHasNothingToDo) {
  const Result first = run("run");
  const Result second = run("run", at_forward(1, [] { throw Crash(); }));
  EXPECT_FALSE(second.crashed);
  EXPECT_EQ(second.exit, Exit::ok);
  EXPECT_EQ(second.tensors, first.tensors);
}

TEST_F(TrainLoopTest, ValidationAndSamplesChangeNothing) {
  const Result plain = run("plain");
  with_validation_ = true;
  settings_.val_every = settings_.sample_every = 1;
  int samples = 0;
  sample_ = [&](std::int64_t) -> std::string {
    if (++samples == 3) fail(Exit::numeric, "an unlucky sample");
    return "text \x1b[2J";
  };
  const Result watched = run("watched");
  EXPECT_EQ(watched.tensors, plain.tensors);
  EXPECT_EQ(samples, 10);
}

// On the terminal in the letters of the model, without what would steer the terminal; in the log as it is. One that fails is
// a warning.
TEST_F(TrainLoopTest, ASampleIsShownAsTextAndLoggedAsItIs) {
  const std::string letters = " aZ~\t\n\u00fc\u00df\u20ac\u732b\U0001F600";
  const std::string controls = "\x1b[2J\x7f\xc2\x9b" + std::string("1m\0\xff", 4);
  settings_.steps = 3;
  settings_.sample_every = 1;
  sample_ = [&](std::int64_t step) -> std::string {
    if (step == 2) fail(Exit::numeric, "an unlucky sample");
    return step == 1 ? letters : "<" + controls + ">";
  };
  testing::internal::CaptureStderr();
  run("run");
  const std::string messages = testing::internal::GetCapturedStderr();
  expect_contains(messages, "sample: " + letters + "\n");
  expect_contains(messages, "warning: no sample: an unlucky sample\n");
  expect_contains(messages, "sample: <\\x1b[2J\\x7f\\xc2\\x9b1m\\x00\\xff>\n");
  std::map<std::int64_t, std::string> logged;
  for (const Json& record : json_lines(temporary_.file("run") + "/log.jsonl")) {
    if (record["type"] == "sample") logged[record["step"]] = record["text"];
  }
  EXPECT_EQ(logged,
            (std::map<std::int64_t, std::string>{{1, letters}, {3, "<" + utf8_replace_invalid(controls) + ">"}}));
}

TEST_F(TrainLoopTest, ValidationIsTheSameEveryTime) {
  const TokenDataset data(temporary_.file("train_0.bin"), 8);  // 25 windows
  const std::unique_ptr<TrainModel> model = micro_model(settings_);
  const std::optional<MeanLoss> once = mean_loss(*model, data, 2, 3);
  EXPECT_EQ(once, mean_loss(*model, data, 2, 3));
  ASSERT_TRUE(once.has_value());
  EXPECT_NE(mean_loss(*model, data, 2, 0), once) << "all windows, not three micro-batches";

  settings_.micro_batch = 32;  // more than there are: the rows beyond do not count
  const std::unique_ptr<TrainModel> wide = micro_model(settings_);
  settings_.micro_batch = 5;
  const std::unique_ptr<TrainModel> narrow = micro_model(settings_);
  const double every_window = mean_loss(*narrow, data, 5, 0)->loss;
  EXPECT_NEAR(mean_loss(*wide, data, 32, 0)->loss, every_window, 1e-6);

  settings_.micro_batch = 13;  // the second one has a row too many
  const std::unique_ptr<TrainModel> uneven = micro_model(settings_);
  EXPECT_NEAR(mean_loss(*uneven, data, 13, 0)->loss, every_window, 1e-6);
  EXPECT_NEAR(mean_loss(*uneven, data, 13, 9)->loss, every_window, 1e-6);
}

// The windows that are measured are spread over all of the data, the same at every call.
TEST_F(TrainLoopTest, ValidationIsSpreadOverTheData) {
  std::vector<std::uint16_t> tokens(25 * 8 + 1);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::uint16_t>(i / 8);  // its window
  write_shard(temporary_.file("spread_0.bin"), {tokens.begin(), tokens.begin() + 10 * 8 + 1});
  write_shard(temporary_.file("spread_1.bin"), {tokens.begin() + 10 * 8, tokens.end()});
  const TokenDataset data(temporary_.file("spread_*.bin"), 8);
  ASSERT_EQ(data.windows(), 25u);
  const auto measured = [&](std::int64_t micro_batch, std::int64_t batches) {
    settings_.micro_batch = micro_batch;
    settings_.batch_tokens = 8 * micro_batch;
    const std::unique_ptr<TrainModel> inner = micro_model(settings_);
    HookedModel model(*inner);
    std::vector<int> windows;
    model.before_evaluate = [&](const Batch& batch) {
      for (std::size_t row = 0; row < batch.tokens.size(); row += 8) {
        if (batch.labels[row] != kIgnoredLabel) windows.push_back(batch.tokens[row]);
      }
    };
    mean_loss(model, data, micro_batch, batches);
    return windows;
  };
  EXPECT_EQ(measured(2, 3), (std::vector<int>{0, 4, 8, 12, 16, 20}));
  EXPECT_EQ(measured(5, 1), (std::vector<int>{0, 5, 10, 15, 20}));
  std::vector<int> all(25);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
  for (const std::int64_t batches : {0, 7, 100}) EXPECT_EQ(measured(4, batches), all) << batches;
}

TEST_F(TrainLoopTest, RowsOfAMeasurementAreSpreadOverWindowsOfAnyNumber) {
  const std::uint64_t windows = std::uint64_t{1} << 44, rows = windows / 2;  // the product needs 87 bits
  EXPECT_EQ(TokenDataset::spread_window(rows - 1, rows, windows), windows - 2);
  EXPECT_EQ(TokenDataset::spread_window(5, 6, 25), 20u);
}

// With --keep-best each new lowest loss is saved, and the newest of these stays beside the newest checkpoints.
// The tokens that --eval claims are those that it has measured, however many it was asked for and however many ranks measure.
TEST_F(TrainLoopTest, EvalCountsTheTokensThatItMeasures) {
  TrainInputs inputs;
  inputs.config = micro_config();
  inputs.val.emplace(temporary_.file("train_*.bin"), settings_.seq_len, WindowUse::measurement);
  const auto windows = static_cast<std::int64_t>(inputs.val->windows());
  ASSERT_EQ(windows, 26 + 12) << "of 202 and of 89 labels: the last ones have 2 and 1";
  const auto evaluated = [&](int ranks) {
    std::atomic<std::int64_t> measured{0};
    testing::internal::CaptureStdout();
    run_thread_ranks(ranks, 20, [&](Communicator& all) {
      const std::unique_ptr<TrainModel> inner = micro_model(settings_);
      HookedModel model(*inner);
      model.after_evaluate = [&](double&, std::int64_t count) { measured += count; };
      EXPECT_EQ(evaluate(model, settings_, inputs, all), Exit::ok);
    });
    return std::pair(testing::internal::GetCapturedStdout(), measured.load());
  };
  settings_.json = true;
  for (const std::int64_t micro_batch : {5, 4}) {
    settings_.micro_batch = micro_batch;
    const std::int64_t batches = (windows + micro_batch - 1) / micro_batch;
    EXPECT_EQ(windows - (batches - 1) * micro_batch, micro_batch == 5 ? 3 : 2);
    std::string all;
    for (const std::int64_t asked : {std::int64_t{0}, std::int64_t{1}, batches - 1, batches, batches + 1, kMaxSteps}) {
      settings_.val_batches = asked;
      const bool every = asked == 0 || asked >= batches;
      const auto [text, measured] = evaluated(1);
      if (asked == 0) all = text;
      if (every) {
        EXPECT_EQ(measured, 202 + 89) << asked;
        EXPECT_EQ(text, all) << asked;
      } else {
        EXPECT_LE(measured, asked * micro_batch * settings_.seq_len) << asked;
        EXPECT_GT(measured, (asked * micro_batch - 2) * settings_.seq_len) << asked;
      }
      EXPECT_EQ(Json::parse(text)["tokens"].get<std::int64_t>(), measured) << asked;
      EXPECT_EQ(Json::parse(text)["of_tokens"], 203 + 90) << asked;
      EXPECT_EQ(evaluated(3), std::pair(text, measured)) << asked;
    }
  }
  settings_.json = false;
  expect_contains(evaluated(1).first, "  291 of 293 tokens (all but the first of each of 2 shards) in windows of 8\n");
}

// The mean is over tokens: that of one sequence at a time, with a last one of its own length, from the definition.
TEST_F(TrainLoopTest, TheEndOfAShardCountsByItsTokens) {
  const std::vector<std::uint16_t> text = patterned_tokens(21);  // windows of 8, 8 and 4 labels
  write_shard(temporary_.file("ends_0.bin"), text);
  write_shard(temporary_.file("ends_1.bin"), patterned_tokens(4, 77));  // shorter than a window
  double sum = 0;
  const auto add = [&](const std::vector<std::uint16_t>& ids, std::size_t begin, std::size_t count) {
    TrainOptions options = settings_.model_options();
    options.micro_batch = 1;
    options.seq_len = static_cast<std::int64_t>(count);
    const std::unique_ptr<TrainModel> model = cpu::make_training_model(micro_config(), options);
    initialize_parameters(*model, 7);
    const std::vector<std::int32_t> tokens(ids.begin() + static_cast<std::ptrdiff_t>(begin),
                                           ids.begin() + static_cast<std::ptrdiff_t>(begin + count));
    const std::vector<std::int32_t> labels(ids.begin() + static_cast<std::ptrdiff_t>(begin) + 1,
                                           ids.begin() + static_cast<std::ptrdiff_t>(begin + count) + 1);
    std::int64_t counted = 0;
    sum += model->evaluate({tokens, labels}, &counted);
    EXPECT_EQ(counted, static_cast<std::int64_t>(count));
  };
  add(text, 0, 8);
  add(text, 8, 8);
  add(text, 16, 4);
  add(patterned_tokens(4, 77), 0, 3);
  const TokenDataset data(temporary_.file("ends_*.bin"), 8, WindowUse::measurement);
  for (const std::int64_t micro_batch : {1, 2, 3, 4, 9}) {
    settings_.micro_batch = micro_batch;
    const std::unique_ptr<TrainModel> model = cpu::make_training_model(micro_config(), settings_.model_options());
    initialize_parameters(*model, 7);
    const MeanLoss measured = *mean_loss(*model, data, micro_batch, 0);
    EXPECT_EQ(measured.tokens, 8 + 8 + 4 + 3) << micro_batch;
    EXPECT_NEAR(measured.loss, sum / 23, 1e-6) << micro_batch;
  }
}

// One of two ranks, alone in its process: the other one says `answers`, one in each call.
class ToldRank final : public Communicator {
 public:
  ToldRank(int rank, std::vector<std::int64_t> answers) : rank_(rank), answers_(std::move(answers)) {}
  int rank() const override { return rank_; }
  int size() const override { return 2; }
  void barrier() override {}
  void exchange(const float*, std::span<const Range>, float*) override { ADD_FAILURE(); }
  void gather_bytes(std::byte* values, std::span<const Range> parts) override {
    const Range other = parts[static_cast<std::size_t>(1 - rank_)];
    ASSERT_LT(call_, answers_.size());
    ASSERT_EQ(static_cast<std::size_t>(other.size()), sizeof answers_[call_]);
    std::memcpy(values + other.begin, &answers_[call_++], sizeof answers_[call_]);
  }
  void broadcast_bytes(std::byte*, std::int64_t, int) override { ADD_FAILURE(); }
  void abort(const Error&) noexcept override {}
  void check() override {}

 private:
  const int rank_;
  const std::vector<std::int64_t> answers_;
  std::size_t call_ = 0;
};

// Ranks that --eval stops end as the one that got the signal, and none of them has a result.
TEST_F(TrainLoopTest, EvalThatASignalStopsAnywhereEndsEverywhereWithItsCode) {
  TrainInputs inputs;
  inputs.config = micro_config();
  inputs.val.emplace(temporary_.file("train_*.bin"), settings_.seq_len);
  const std::unique_ptr<TrainModel> model = micro_model(settings_);
  for (const auto& [signal, code] : {std::pair(SIGTERM, Exit::terminated), {SIGINT, Exit::interrupted}}) {
    for (const int rank : {0, 1}) {
      ToldRank ranks(rank, {0, 1, signal});  // no error; it has stopped; why
      testing::internal::CaptureStdout();
      EXPECT_EQ(evaluate(*model, settings_, inputs, ranks), code) << rank;
      EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
    }
  }
}

TEST_F(TrainLoopTest, EvalOfALossThatIsNoNumberIsAnError) {
  TrainInputs inputs;
  inputs.config = micro_config();
  inputs.val.emplace(temporary_.file("train_*.bin"), settings_.seq_len);
  const std::unique_ptr<TrainModel> inner = micro_model(settings_);
  HookedModel model(*inner);
  settings_.model = "m.bin";
  settings_.val = "v.bin";
  SingleRank alone;
  for (const double loss : {std::nan(""), HUGE_VAL}) {
    model.after_evaluate = [&](double& sum, std::int64_t) { sum = loss; };
    testing::internal::CaptureStdout();
    expect_contains(error_of(Exit::numeric, [&] { evaluate(model, settings_, inputs, alone); }),
                    "'m.bin': the loss on 'v.bin' is ");
    EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  }
}

TEST_F(TrainLoopTest, TheCheckpointWithTheLowestValidationLossIsKept) {
  const std::map<std::int64_t, double> losses = {{2, 5.0}, {4, 3.0}, {6, 4.0}, {8, 4.5}, {10, 3.5}};
  with_validation_ = true;
  settings_.val_every = 2;
  settings_.val_batches = 1;
  const auto script = [&](std::int64_t first) {
    return [&losses, first](HookedModel& model) {
      auto step = std::make_shared<std::int64_t>(first);
      model.after_evaluate = [&losses, step](double& loss_sum, std::int64_t labels) {
        loss_sum = losses.at(*step) * static_cast<double>(labels);
        *step += 2;
      };
    };
  };
  using Steps = std::set<std::int64_t>;
  settings_.save_every = 2;
  const Result plain = run("plain", script(2));
  EXPECT_EQ(checkpoints("plain"), (Steps{8, 10}));
  EXPECT_FALSE(plain.state.best.has_value());
  settings_.keep_best = true;
  const Result best = run("best", script(2));
  EXPECT_EQ(checkpoints("best"), (Steps{4, 8, 10}));
  EXPECT_EQ(best.state.best, (TrainState::Best{4, 3.0}));
  EXPECT_EQ(best.tensors, plain.tensors);
  settings_.save_every = 0;  // no save is due but those
  run("rare", script(2));
  EXPECT_EQ(checkpoints("rare"), (Steps{4, 10}));
  // The best one is remembered when the run goes on.
  settings_.steps = 6;
  settings_.save_every = 2;
  run("resumed", script(2));
  settings_.steps = 10;
  const Result resumed = run("resumed", script(8));
  EXPECT_EQ(checkpoints("resumed"), (Steps{4, 8, 10}));
  EXPECT_EQ(resumed.state.best, best.state.best);
}

// While the new best one is not on the disk the one before stays, also when the run goes on, and what comes is compared with it.
TEST_F(TrainLoopTest, ABestCheckpointThatCannotBeSavedDoesNotPushTheOneBeforeOut) {
  with_validation_ = true;
  settings_.val_every = 2;
  settings_.keep_best = true;
  settings_.save_every = 2;
  std::map<std::int64_t, double> losses = {{2, 5.0}, {4, 4.0}};  // of other steps 10
  const auto script = [&](HookedModel& model) {
    const auto step = std::make_shared<std::int64_t>(0);
    model.after_evaluate = [&, step](double& loss_sum, std::int64_t labels) {
      loss_sum = (losses.contains(*step) ? losses.at(*step) : 10.0) * static_cast<double>(labels);
    };
    model.before_update = [step](const AdamWStep& update) {
      *step = update.step;
      if (*step < 4) return;
      set_call_fault(
          [](const char*, const std::string& path) { return path.find("step_00000004") == std::string::npos; });
    };
  };
  testing::internal::CaptureStderr();
  settings_.steps = 10;
  const Result result = run("run", script);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(result.exit, Exit::ok) << result.error;
  EXPECT_TRUE(has_checkpoint("run", 2));
  EXPECT_FALSE(has_checkpoint("run", 4));
  expect_contains(said, "lowest loss on --val: 5.0000 after step 2, kept in ");
  expect_contains(said, "step_00000002'\n");
  EXPECT_EQ(result.state.best, (TrainState::Best{2, 5.0}));
  settings_.steps = 14;
  EXPECT_EQ(run("run", script).state.best, (TrainState::Best{2, 5.0}));
  EXPECT_TRUE(has_checkpoint("run", 2));
  EXPECT_FALSE(has_checkpoint("run", 10));

  losses[6] = 4.5;
  in_background_ = false;  // so that the failure is known before step 6
  EXPECT_EQ(run("better", script).state.best, (TrainState::Best{6, 4.5}));
  EXPECT_TRUE(has_checkpoint("better", 6));
  EXPECT_FALSE(has_checkpoint("better", 2));
}

// A loss that was there before is no new lowest one, and no save is made for it; the least step below it is one.
TEST_F(TrainLoopTest, ALossThatComesAgainIsNoNewBest) {
  const std::map<std::int64_t, double> losses = {
      {2, 5.0}, {4, 3.0}, {5, 6.0}, {6, 3.0}, {8, std::nextafter(3.0, 0.0)}, {10, std::nextafter(3.0, 0.0)}};
  with_validation_ = true;
  settings_.val_every = 2;
  settings_.val_batches = 1;
  settings_.keep_best = true;
  settings_.keep = 10;
  const auto script = [&](HookedModel& model) {
    const auto step = std::make_shared<std::int64_t>(0);
    model.before_update = [step](const AdamWStep& update) { *step = update.step; };
    model.after_evaluate = [&losses, step](double& loss_sum, std::int64_t labels) {
      loss_sum = losses.at(*step) * static_cast<double>(labels);
    };
  };
  for (const std::vector<std::int64_t>& ends : {std::vector<std::int64_t>{10}, {5, 10}}) {
    const std::string name = format("run_%zu", ends.size());
    Result result;
    for (const std::int64_t end : ends) {
      settings_.steps = end;
      settings_.val_every = end == 5 ? 4 : 2;  // the equal loss comes behind the resume
      result = run(name, script);
    }
    EXPECT_EQ(checkpoints(name),
              ends.size() == 1 ? (std::set<std::int64_t>{2, 4, 8, 10}) : (std::set<std::int64_t>{4, 5, 8, 10}));
    EXPECT_EQ(result.state.best, (TrainState::Best{8, losses.at(8)}));
  }
}

// A loss that is no number is not the lowest one: nothing that comes would be lower, and no checkpoint with it can be read.
TEST_F(TrainLoopTest, ALossThatIsNoNumberIsNotTheLowest) {
  with_validation_ = true;
  settings_.keep_best = true;
  for (const double bad : {std::nan(""), HUGE_VAL}) {
    for (const bool for_good : {false, true}) {
      settings_.val_every = for_good ? 0 : 2;
      const std::string name = format("run_%g_%d", bad, for_good);
      const Result result = run(name, [&](HookedModel& model) {
        const auto step = std::make_shared<std::int64_t>(0);
        model.before_update = [step](const AdamWStep& update) { *step = update.step; };
        model.after_evaluate = [=](double& loss_sum, std::int64_t labels) {
          loss_sum = (for_good || *step <= 4 ? bad : 3.0) * static_cast<double>(labels);
        };
      });
      EXPECT_EQ(result.exit, Exit::ok) << result.error;
      EXPECT_EQ(result.state.best, for_good ? std::nullopt : std::optional(TrainState::Best{6, 3.0}));
      EXPECT_TRUE(has_checkpoint(name, 10));
      EXPECT_EQ(has_checkpoint(name, 6), !for_good);
    }
  }
}

// The best one of an earlier start is what a new one that cannot be saved gives way to.
TEST_F(TrainLoopTest, ABestCheckpointThatCannotBeSavedGivesWayToThatOfAnEarlierStart) {
  std::map<std::int64_t, double> losses = {{2, 5.0}, {4, 9.0}, {6, 4.0}, {8, 4.5}, {10, 9.0}};
  with_validation_ = true;
  settings_.val_every = 2;
  settings_.keep_best = true;
  in_background_ = false;  // so that the failure is known before the next validation
  const auto script = [&](HookedModel& model) {
    const auto step = std::make_shared<std::int64_t>(0);
    model.before_update = [step](const AdamWStep& update) { *step = update.step; };
    model.after_evaluate = [&losses, step](double& loss_sum, std::int64_t labels) {
      loss_sum = losses.at(*step) * static_cast<double>(labels);
    };
  };
  for (const double eighth : {9.0, 4.5}) {
    const std::string name = eighth == 9 ? "worse" : "better";
    losses[8] = eighth;
    settings_.steps = 4;
    run(name, script);
    settings_.steps = 10;
    const Result result = run(name, [&](HookedModel& model) {
      script(model);
      model.before_update = [note_step = model.before_update](const AdamWStep& update) {
        note_step(update);
        set_call_fault(
            [](const char*, const std::string& path) { return path.find("step_00000006") == std::string::npos; });
      };
    });
    set_call_fault(nullptr);
    EXPECT_EQ(result.exit, Exit::ok) << result.error;
    EXPECT_EQ(result.state.best, eighth == 9 ? (TrainState::Best{2, 5.0}) : (TrainState::Best{8, 4.5}));
    EXPECT_FALSE(has_checkpoint(name, 6));
    EXPECT_EQ(has_checkpoint(name, 2), eighth == 9);
  }
}

// Clipping multiplies the gradient by limit / norm where the norm is larger; 0 turns it off, whatever the norm.
TEST_F(TrainLoopTest, GradientsAreClippedToTheLimitAndNotAtAllWithout) {
  EXPECT_EQ(clip_factor(1e30, 0), 1.0f);
  EXPECT_EQ(clip_factor(0.5, 1), 1.0f);
  EXPECT_EQ(clip_factor(4, 1), static_cast<float>(1 / (4 + 1e-6)));
  const auto scales = [&](const std::string& name, double limit) {
    settings_.grad_clip = limit;
    std::vector<float> seen;
    run(name, [&](HookedModel& model) {
      model.before_update = [&](const AdamWStep& step) { seen.push_back(step.gradient_scale); };
    });
    return seen;
  };
  EXPECT_EQ(scales("off", 0), std::vector<float>(10, 1.0f));
  const std::vector<float> clipped = scales("on", 1e-3);
  const std::vector<double> norms = logged("on", "grad_norm");
  ASSERT_EQ(clipped.size(), norms.size());
  for (std::size_t i = 0; i < norms.size(); ++i) {
    ASSERT_GT(norms[i], 1e-3);
    EXPECT_EQ(clipped[i], static_cast<float>(1e-3 / (norms[i] + 1e-6)));
  }
}

// ---- pieces ----

// The CPU makes logits for 512 rows at once: each row has its own label and its own gradient in every such piece.
TEST_F(TrainLoopTest, RowsPastThePieceOfTheClassifierHaveTheirOwnLabels) {
  settings_.seq_len = 32;
  settings_.micro_batch = 35;  // 1,120 rows: two pieces and 96 rows
  settings_.batch_tokens = 35 * 32;
  const std::unique_ptr<TrainModel> wide = micro_model(settings_);
  settings_.micro_batch = 1;
  const std::unique_ptr<TrainModel> narrow = micro_model(settings_);
  const std::vector<std::uint16_t> text = patterned_tokens(35 * 32 + 1);
  const std::vector<std::int32_t> tokens(text.begin(), text.end() - 1);
  std::vector<std::int32_t> labels(text.begin() + 1, text.end());
  for (std::size_t i = 0; i < labels.size(); ++i) {
    labels[i] = i % 11 == 0 ? kIgnoredLabel : static_cast<std::int32_t>((labels[i] + i / 32) % 32);
  }
  const auto row = [](const std::vector<std::int32_t>& ids, std::size_t b) {
    return std::span(ids).subspan(b * 32, 32);
  };
  std::int64_t count = 0, sum_of_counts = 0;
  const double loss = wide->evaluate({tokens, labels}, &count);
  wide->zero_gradients();
  narrow->zero_gradients();
  wide->forward({tokens, labels}, 0, 1e-3f);
  wide->backward();
  for (std::size_t b = 0; b < 35; ++b) {
    std::int64_t counted = 0;
    const double one = narrow->evaluate({row(tokens, b), row(labels, b)}, &counted);
    sum_of_counts += counted;
    narrow->forward({row(tokens, b), row(labels, b)}, 0, 1e-3f);
    narrow->backward();
    EXPECT_GT(one, 0);
  }
  const StepStatistics together = wide->statistics(), apart = narrow->statistics();
  EXPECT_EQ(count, sum_of_counts);
  EXPECT_EQ(together.label_count, apart.label_count);
  EXPECT_EQ(together.loss_sum, loss);
  EXPECT_NEAR(together.loss_sum, apart.loss_sum, 1e-6 * loss);
  const std::vector<float> a = tensors(*wide, TensorRole::gradient), b = tensors(*narrow, TensorRole::gradient);
  float largest = 0;
  for (const float value : b) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-5f * largest) << i;
}

// The CPU scores ids in pieces of 256: each against the id that follows it.
TEST(CpuLlamaTest, ScoresPastTheirPieceAreThoseOfTheirOwnLabels) {
  ModelConfig config = micro_config();
  config.max_positions = 640;
  TrainSettings settings = micro_settings();
  const std::unique_ptr<TrainModel> model = cpu::make_training_model(config, settings.model_options());
  initialize_parameters(*model, 3);
  for (const TensorSpec& spec : model->table().specs()) {  // larger than initial ones, or every id is as likely
    std::vector<float> values(static_cast<std::size_t>(spec.elements));
    model->read_tensor(TensorRole::parameter, spec, values.data());
    if (spec.shape.size() == 2)
      std::transform(values.begin(), values.end(), values.begin(), [](float v) { return 20 * v; });
    model->write_tensor(TensorRole::parameter, spec, values.data());
  }
  const std::vector<std::uint16_t> text = patterned_tokens(600);  // two pieces and 88 ids
  const std::vector<std::int32_t> ids(text.begin(), text.end());
  const std::unique_ptr<DecodeModel> decoder = model->decoder(640);
  const std::vector<double> scores = decoder->score(ids);
  ASSERT_EQ(scores.size(), 599u);
  decoder->reset();
  std::span<const float> logits = decoder->prefill(std::span(ids).first(1));
  for (std::size_t i = 1; i < ids.size(); ++i) {
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    const double expected = std::log(sum) - logits[static_cast<std::size_t>(ids[i])];
    ASSERT_NEAR(scores[i - 1], expected, 2e-4 * std::max(1.0, expected)) << "id " << i;
    if (i + 1 < ids.size()) logits = decoder->decode(ids[i]);
  }
  const std::vector<float> one_by_one(logits.begin(), logits.end());  // after all but the last id
  decoder->reset();
  const std::span<const float> in_pieces = decoder->prefill(std::span(ids).first(599));
  for (std::size_t v = 0; v < one_by_one.size(); ++v) {
    ASSERT_NEAR(in_pieces[v], one_by_one[v], 2e-4 * std::max(1.0f, std::abs(one_by_one[v]))) << v;
  }
}

// ---- numeric guard ----

// A moment that becomes infinite is no state to save, and none to go on from: the run ends, and nothing of that save stays.
TEST_F(TrainLoopTest, AnInfiniteMomentEndsTheRunAtTheNextSave) {
  settings_.save_every = 4;
  settings_.debug_inject = {"inf@moment=5"};
  for (const bool background : {true, false}) {
    in_background_ = background;
    const std::string name = background ? "background" : "waiting";
    const Result result = run(name);
    EXPECT_EQ(result.error_code, Exit::numeric) << result.error;
    expect_contains(result.error, "step 8: moment2.");
    expect_contains(result.error,
                    "The newest checkpoint is " + escaped(temporary_.file(name) + "/step_00000004") + ". ");
    expect_contains(result.error, "is inf");
    EXPECT_TRUE(has_checkpoint(name, 4));
    for (const char* left : {"/step_00000008", "/step_00000008.tmp", "/step_00000010"}) {
      EXPECT_FALSE(fs::exists(temporary_.file(name) + left)) << left;
    }
  }
}

TEST_F(TrainLoopTest, AnInfiniteMomentInTheLastSaveIsNotALackOfSpace) {
  settings_.debug_inject = {"inf@moment=10"};
  const Result result = run("run");
  EXPECT_EQ(result.error_code, Exit::numeric) << result.error;
  expect_contains(result.error, "step 10: moment2.");
  expect_contains(result.error, ". There is no older checkpoint. ");
  EXPECT_FALSE(fs::exists(temporary_.file("run") + "/step_00000010"));
}

// The first error is the one that is told; what the save before the end finds is a warning.
TEST_F(TrainLoopTest, TheGuardsErrorIsNotHiddenByThatOfTheSaveAfterIt) {
  settings_.debug_inject = {"inf@moment=5", "nan@step=6"};
  testing::internal::CaptureStderr();
  const Result result = run("run");
  const std::string log = testing::internal::GetCapturedStderr();
  expect_contains(log, "warning: no checkpoint of step 5: step 5: moment2.");
  EXPECT_EQ(log.find("Training goes on"), std::string::npos) << log;
  EXPECT_EQ(result.error_code, Exit::numeric);
  expect_contains(result.error, "step 6: loss");
}

TEST_F(TrainLoopTest, AbortStopsBeforeTheUpdate) {
  settings_.steps = 4;
  const Result before = run("before");
  settings_.steps = 10;
  settings_.debug_inject = {"nan@step=5"};
  const Result result = run("run");
  EXPECT_EQ(result.error_code, Exit::numeric);
  expect_contains(result.error, "step 5: loss ");
  expect_contains(result.error, "model.embed_tokens.weight[511]");  // the last element of 32 x 16
  expect_contains(result.error, "The parameters are those of step 4. ");
  std::vector<Json> named;
  for (const Json& record : json_lines(temporary_.file("run") + "/log.jsonl")) {
    if (record["type"] == "non_finite") named.push_back(record["tensor"]);
  }
  EXPECT_EQ(named, std::vector<Json>{"model.embed_tokens.weight[511]"});
  EXPECT_EQ(result.tensors, before.tensors) << "parameters and moments are those of step 4";
  EXPECT_TRUE(has_checkpoint("run", 4)) << "and they are saved";

  // The same command goes on; this time the fault does not come.
  settings_.debug_inject.clear();
  const Result whole = run("whole"), resumed = run("run");
  EXPECT_EQ(resumed.tensors, whole.tensors);
}

TEST_F(TrainLoopTest, AbortInTheFirstStep) {
  settings_.debug_inject = {"nan@step=1"};
  const Result result = run("run");
  EXPECT_EQ(result.error_code, Exit::numeric);
  for (const float value : result.tensors) ASSERT_TRUE(std::isfinite(value));
}

TEST_F(TrainLoopTest, InfiniteLossAloneStopsToo) {
  const Result result = run("run", bad_statistics(3, 1, true));
  EXPECT_EQ(result.error_code, Exit::numeric);
  expect_contains(result.error, "loss inf");
  EXPECT_EQ(result.state.step, 2);
}

// Gradients as the others have them, but for single elements.
class BadGradients final : public HookedModel {
 public:
  using HookedModel::HookedModel;
  std::map<std::pair<std::string, std::int64_t>, float> bad;  // by tensor and element
  TensorRole role = TensorRole::gradient;                     // what they are in
  void read_tensor(TensorRole of, const TensorSpec& spec, float* values) override {
    HookedModel::read_tensor(of, spec, values);
    for (const auto& [place, value] : bad) {
      if (of == role && place.first == spec.name) values[place.second] = value;
    }
  }
};

TEST_F(TrainLoopTest, TheFirstGradientThatIsNotFiniteIsNamed) {
  const std::unique_ptr<TrainModel> inner = micro_model(settings_);
  BadGradients model(*inner);
  EXPECT_EQ(first_bad_gradient(model), "");
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto specs = model.table().specs();
  const auto name_of = [](const TensorSpec& spec, std::int64_t element) {
    return format("%s[%lld]", spec.name.c_str(), static_cast<long long>(element));
  };
  for (const float value : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    for (const TensorSpec& spec : specs) {
      for (const std::int64_t element : {std::int64_t{0}, spec.elements / 2, spec.elements - 1}) {
        model.bad = {{{spec.name, element}, value}};
        EXPECT_EQ(first_bad_gradient(model), name_of(spec, element)) << value;
      }
      // Later ones of the same tensor and of others, of another kind, do not count.
      model.bad = {{{spec.name, 1}, value}, {{spec.name, 2}, std::isnan(value) ? kInfinity : std::nanf("")}};
      model.bad[{specs.back().name, specs.back().elements - 1}] = std::isnan(value) ? kInfinity : std::nanf("");
      EXPECT_EQ(first_bad_gradient(model), name_of(spec, 1)) << value;
    }
  }
  model.bad = {{{specs.front().name, 0}, std::numeric_limits<float>::max()}};
  EXPECT_EQ(first_bad_gradient(model), "") << "large is finite";
  model.bad = {{{specs.front().name, 0}, kInfinity}};
  for (const TensorRole other : {TensorRole::parameter, TensorRole::state1, TensorRole::state2}) {
    model.role = other;
    EXPECT_EQ(first_bad_gradient(model), "");
  }
}

TEST_F(TrainLoopTest, SkipLeavesEverythingAloneAndGoesOn) {
  settings_.steps = 4;
  const Result before = run("before");
  settings_.on_nan = "skip";
  settings_.steps = 5;
  settings_.debug_inject = {"nan@step=5"};
  const Result skipped = run("run");
  EXPECT_EQ(skipped.exit, Exit::ok);
  EXPECT_EQ(skipped.tensors, before.tensors);
  EXPECT_EQ(skipped.state.step, 5);
  EXPECT_EQ(skipped.state.updates, 4);
  EXPECT_EQ(skipped.state.skipped, 1);
  EXPECT_EQ(skipped.state.loss, before.state.loss);
  EXPECT_TRUE(skipped.state.spikes == before.state.spikes) << "the statistics never saw the bad step";
  EXPECT_EQ(4 * skipped.state.windows, 5 * before.state.windows) << "its data is not read again";
  EXPECT_EQ(4 * skipped.state.micro_steps, 5 * before.state.micro_steps);
  const auto records = steps("run");
  EXPECT_EQ(records.at(5)["skipped"], true);
  EXPECT_EQ(records.at(4)["skipped"], false);
  for (const auto& [step, record] : records) EXPECT_EQ(record["tokens"], step * settings_.batch_tokens);
  settings_.steps = 10;
  const Result after = run("run");
  EXPECT_EQ(after.state.updates, 9);
  for (const float value : after.tensors) ASSERT_TRUE(std::isfinite(value));
}

TEST_F(TrainLoopTest, SkippedStepsAreNoUpdatesOfAdamW) {
  settings_.on_nan = "skip";
  settings_.steps = 4;
  settings_.debug_inject = {"nan@step=2"};
  std::vector<std::int64_t> numbers;
  run("run", [&](HookedModel& model) {
    model.before_update = [&](const AdamWStep& update) { numbers.push_back(update.step); };
  });
  EXPECT_EQ(numbers, (std::vector<std::int64_t>{1, 2, 3})) << "the bias correction counts what the moments have seen";
}

TEST_F(TrainLoopTest, RerunRepairsATransientFault) {
  const Result clean = run("clean");
  settings_.on_nan = "rerun";
  settings_.debug_inject = {"nan@step=5"};
  const Result result = run("run");
  EXPECT_EQ(result.exit, Exit::ok);
  EXPECT_EQ(result.state.transient, 1);
  EXPECT_EQ(result.tensors, clean.tensors) << "as if it had never happened";
  expect_same_run(logged("run", "loss"), logged("clean", "loss"));
  // What is logged of the step is that of the attempt that counts, whichever number was bad before.
  settings_.debug_inject.clear();
  for (const bool loss : {true, false}) {
    const std::string name = loss ? "loss" : "norm";
    EXPECT_EQ(run(name, bad_statistics(5, 1, loss)).tensors, clean.tensors) << name;
    for (const char* key : {"loss", "grad_norm"}) expect_same_run(logged(name, key), logged("clean", key));
  }
}

TEST_F(TrainLoopTest, RerunGivesUpOnAPersistentFault) {
  settings_.on_nan = "rerun";
  const Result result = run("run", bad_statistics(5, 2, false));
  EXPECT_EQ(result.error_code, Exit::numeric);
  EXPECT_EQ(result.state.step, 4);
}

// Loss and gradient norm of the first steps of a run that warmed up too fast: step 15 is a spike.
constexpr double kSpikedRun[][2] = {
    {7.681, 2.38}, {7.583, 2.73}, {7.419, 2.39}, {7.293, 1.74}, {7.183, 1.46}, {7.063, 1.31}, {6.900, 1.26},
    {6.744, 1.22}, {6.498, 1.24}, {6.367, 1.91}, {6.123, 1.09}, {6.003, 1.11}, {5.941, 0.76}, {5.794, 2.59},
    {8.742, 240},  {5.732, 0.95}, {5.647, 0.67}, {5.519, 1.37}, {5.647, 1.05}, {5.704, 4.42}, {5.526, 2.67},
    {5.464, 0.98}, {5.488, 4.56}, {5.633, 3.31}, {5.482, 3.27}, {5.399, 1.43}};

TEST(Guard, ASpikeIsFoundInTheWarmUp) {
  SpikeDetector detector;
  for (int step = 1; step <= 26; ++step) {
    const std::optional<Spike> spike = detector.observe(kSpikedRun[step - 1][0], kSpikedRun[step - 1][1]);
    EXPECT_EQ(spike.has_value(), step == 15) << step;
    if (!spike) continue;
    EXPECT_TRUE(spike->of_norm);
    EXPECT_NEAR(spike->norm_level, 1.55, 0.01) << "the geometric mean of the steps before";
    EXPECT_NEAR(spike->loss_level, 6.757, 0.01);
  }
  EXPECT_TRUE(SpikeDetector::from_json(detector.to_json(), "test") == detector);
}

// What is least of a spike, by hand: 6 deviations of 0.1 above the mean loss, of 0.25 above the mean logarithm of the norm.
TEST(Guard, TheLeastSpikes) {
  SpikeDetector steady;
  for (int i = 0; i < 40; ++i) ASSERT_FALSE(steady.observe(3, 1).has_value());
  const auto spike_of = [&](double loss, double norm) {
    SpikeDetector detector = steady;
    const std::optional<Spike> spike = detector.observe(loss, norm);
    return spike ? std::string(spike->of_loss ? "loss" : "") + (spike->of_norm ? "norm" : "") : "none";
  };
  EXPECT_EQ(spike_of(3.59, 1), "none");
  EXPECT_EQ(spike_of(3.61, 1), "loss");
  EXPECT_EQ(spike_of(3, std::exp(1.49)), "none");
  EXPECT_EQ(spike_of(3, std::exp(1.51)), "norm");
  EXPECT_EQ(spike_of(3.61, std::exp(1.51)), "lossnorm");
  EXPECT_EQ(spike_of(0, 0), "none");
}

TEST(Guard, SpikesAreFoundAgainAndAgain) {
  SpikeDetector detector;
  int reported = 0;
  for (int i = 0; i < 400; ++i) {
    const bool spike = i >= 100 && i % 100 == 0;
    const std::optional<Spike> found = detector.observe(2.0, spike ? 10.0 : 1.0 + 0.1 * (i % 3));
    EXPECT_EQ(found.has_value(), spike) << i;
    EXPECT_TRUE(!found || (found->of_norm && !found->of_loss));
    reported += found.has_value();
  }
  EXPECT_EQ(reported, 3);
}

TEST(Guard, AHugeSpikeDoesNotHideTheNextOne) {
  SpikeDetector detector;
  for (int i = 0; i < 100; ++i) {
    const double norm = i == 50 ? 1e6 : i == 70 ? 100 : 1;
    const std::optional<Spike> found = detector.observe(2.0, norm);
    ASSERT_EQ(found.has_value(), norm > 1) << i;
    EXPECT_TRUE(i != 70 || found->norm_level < 1.1);
  }
}

TEST(Guard, ASpikeOfTheLossAlone) {
  SpikeDetector detector;
  for (int i = 0; i < 60; ++i) {
    const std::optional<Spike> found = detector.observe(i == 40 ? 3.5 : 2.0 + 0.05 * (i % 2), 1.0);
    ASSERT_EQ(found.has_value(), i == 40) << i;
    EXPECT_TRUE(!found || (found->of_loss && !found->of_norm));
  }
}

// A run that stays bad is reported once, not at every step; one that is bad again much later is reported again.
TEST(Guard, ASpikeThatLastsIsOneReport) {
  SpikeDetector detector;
  std::vector<int> reported;
  for (int i = 0; i < 200; ++i) {
    const bool bad = (i >= 50 && i < 60) || i == 150;
    if (detector.observe(bad ? 9.0 : 2.0, bad ? 50.0 : 1.0)) reported.push_back(i);
  }
  EXPECT_EQ(reported, (std::vector<int>{50, 150}));
}

// Losses and norms as batches give them: noise with a standard deviation of a tenth and of 40 %, around a falling curve.
TEST(Guard, NoiseIsNoSpike) {
  SpikeDetector detector;
  for (std::uint64_t i = 0; i < 20000; ++i) {
    double sum = -6, other = -6;  // the sum of 12 uniform numbers is nearly normal
    for (std::uint64_t j = 0; j < 3; ++j) {
      const PhiloxWords more = philox(7, i, 1 + j);
      for (int k = 0; k < 4; ++k) sum += more.word[k] * 0x1p-32;
      const PhiloxWords last = philox(8, i, 1 + j);
      for (int k = 0; k < 4; ++k) other += last.word[k] * 0x1p-32;
    }
    const double falling = 2 + 5.5 * std::exp(-static_cast<double>(i) / 300);
    ASSERT_FALSE(detector.observe(falling + 0.1 * sum, std::exp(0.4 * other)).has_value()) << i;
  }
}

TEST(Guard, ANormOfZeroIsObserved) {
  SpikeDetector detector;
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(detector.observe(0.0, 0.0).has_value());
  EXPECT_TRUE(SpikeDetector::from_json(detector.to_json(), "test") == detector) << "every value is finite";
}

TEST(Guard, TheStateOfAnOlderVersionBeginsAnew) {
  const Json old = {{"observed", 40}, {"mean", 1.5}, {"variance", 0.25}};
  EXPECT_TRUE(SpikeDetector::from_json(old, "test") == SpikeDetector());
  Json now = SpikeDetector().to_json();
  for (const char* key : {"observed", "quiet", "loss_variance", "log_norm_variance"}) {
    Json bad = now;
    bad[key] = -1;
    expect_contains(error_of(Exit::bad_file, [&] { SpikeDetector::from_json(bad, "state"); }), key);
  }
  for (const auto& [key, limit] : {std::pair("loss_mean", 1e100),
                                   {"log_norm_mean", 1e100},
                                   {"loss_variance", 1e200},
                                   {"log_norm_variance", 1e200}}) {
    for (const double sign : {1.0, -1.0}) {
      Json level = now;
      level[key] = sign * std::nextafter(limit, HUGE_VAL);
      expect_contains(error_of(Exit::bad_file, [&] { SpikeDetector::from_json(level, "state"); }), key);
    }
    Json level = now;
    level[key] = limit;
    EXPECT_EQ(SpikeDetector::from_json(level, "state").to_json(), level);
  }
}

TEST_F(TrainLoopTest, ASpikeIsSaidInOneLineAndLogged) {
  settings_.steps = 30;
  const auto spike_at = [](int n, double factor) {
    return [=](HookedModel& model) {
      auto count = std::make_shared<int>(0);
      model.after_statistics = [=](StepStatistics& statistics) {
        if (++*count == n) statistics.gradient_norm *= factor;
      };
    };
  };
  const auto warnings_of = [&](const std::string& name, int step) {
    testing::internal::CaptureStderr();
    const Result result = run(name, spike_at(step, 1000));
    std::istringstream text(testing::internal::GetCapturedStderr());
    EXPECT_EQ(result.exit, Exit::ok);
    std::vector<std::string> lines;
    for (std::string line; std::getline(text, line);) {
      if (line.starts_with("warning:")) lines.push_back(line);
    }
    return lines;
  };
  EXPECT_TRUE(warnings_of("calm", 0).empty());
  settings_.warmup_steps = 20;
  const std::vector<std::string> clipped = warnings_of("clipped", 12);
  ASSERT_EQ(clipped.size(), 1u);
  for (const char* part : {"step 12: spike of the gradient norm: gradient norm ", " (running ", "loss ",
                           "The update was clipped to norm 1. If spikes recur: lower --lr or raise --warmup-steps"}) {
    expect_contains(clipped.front(), part);
  }
  settings_.grad_clip = 0;
  settings_.warmup_steps = 2;
  const std::vector<std::string> unclipped = warnings_of("unclipped", 12);
  ASSERT_EQ(unclipped.size(), 1u);
  expect_contains(unclipped.front(), "The update was not clipped. If spikes recur: lower --lr, and set --grad-clip 1");

  int logged_spikes = 0;
  double steps = 0, losses = 0, log_norms = 0;  // of the steps before: so few weigh alike in the running levels
  for (const Json& record : json_lines(temporary_.file("clipped") + "/log.jsonl")) {
    if (record["type"] == "step" && record["step"] < 12) {
      ++steps;
      losses += record["loss"].get<double>();
      log_norms += std::log(record["grad_norm"].get<double>());
    }
    if (record["type"] != "spike") continue;
    ++logged_spikes;
    EXPECT_EQ(record["step"], 12);
    EXPECT_EQ(record["windows"], (Json{22, 24})) << "of the data of this step";
    EXPECT_GT(record["grad_norm"].get<double>(), 100 * record["grad_norm_level"].get<double>());
    EXPECT_NEAR(record["loss_level"].get<double>(), losses / steps, 1e-9);
    EXPECT_NEAR(record["grad_norm_level"].get<double>(), std::exp(log_norms / steps), 1e-9);
  }
  EXPECT_EQ(logged_spikes, 1);
}

// The first 16 steps count alike: mean and variance are those of all of them.
TEST(Guard, TheLevelIsThatOfTheStepsSoFar) {
  SpikeDetector detector;
  std::vector<double> losses;
  for (int i = 0; i < 16; ++i) {
    losses.push_back(3.0 + 0.3 * std::sin(static_cast<double>(i * i)));
    EXPECT_FALSE(detector.observe(losses.back(), 1.0).has_value()) << i;
    const auto count = static_cast<double>(losses.size());
    double mean = 0, variance = 0;
    for (const double each : losses) mean += each / count;
    for (const double each : losses) variance += (each - mean) * (each - mean) / count;
    const Json level = detector.to_json();
    EXPECT_NEAR(level["loss_mean"].get<double>(), mean, 1e-12) << i;
    EXPECT_NEAR(level["loss_variance"].get<double>(), variance, 1e-12) << i;
  }
}

// ---- files ----

TEST_F(TrainLoopTest, AReplacedShardEndsTheRunAfterASave) {
  settings_.steps = 100;
  const Result result = run("run", at_forward(4, [&] {
                              const std::string shard = temporary_.file("train_0.bin");
                              fs::remove(shard);  // another file: one that is cut would be a bus error, with luck
                              write_shard(shard, patterned_tokens(203, 7));
                            }));
  EXPECT_EQ(result.error_code, Exit::bad_file);
  expect_contains(result.error, "train_0.bin");
  EXPECT_GE(result.state.step, 4);
  EXPECT_TRUE(has_checkpoint("run", result.state.step));
}

TEST_F(TrainLoopTest, AReplacedValidationShardEndsTheRunAfterASave) {
  with_validation_ = true;
  settings_.val_every = 5;
  val_pattern_ = "val_*.bin";
  const auto write = [&](std::size_t size) { write_shard(temporary_.file("val_0.bin"), patterned_tokens(size, 7)); };
  write(90);
  const Result result = run("run", at_forward(3, [&] { write(91); }));
  EXPECT_EQ(result.error_code, Exit::bad_file);
  expect_contains(result.error, "val_0.bin");
  EXPECT_EQ(result.state.step, 5);
  EXPECT_TRUE(has_checkpoint("run", 5));
}

TEST_F(TrainLoopTest, AFullDiskCostsACheckpointNotTheRun) {
  const Result clean = run("clean");
  settings_.save_every = 2;
  settings_.debug_inject = {"enospc@save=6000"};  // strikes once, in the save of step 2
  const Result result = run("run");
  EXPECT_EQ(result.exit, Exit::ok);
  EXPECT_EQ(result.tensors, clean.tensors);
  EXPECT_TRUE(has_checkpoint("run", 10));
  EXPECT_FALSE(fs::exists(temporary_.file("run") + "/step_00000002.tmp"));
}

// Who saves more often than the disk can take learns it; a wait that nobody would notice is not said.
TEST_F(TrainLoopTest, AStepThatWaitsForTheSaveBeforeSaysSo) {
  settings_.steps = 4;
  settings_.save_every = 1;
  static std::atomic<int> syncs;
  for (const bool slow : {false, true}) {
    syncs = slow ? 0 : 1;
    const auto slow_disk = [](HookedModel& model) {
      model.before_forward = [](std::uint64_t) {  // the loop has set its own hook before
        set_call_fault([](const char* call, const std::string&) {
          if (std::string_view(call) == "sync" && syncs++ == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1200));
          }
          return true;
        });
      };
    };
    testing::internal::CaptureStderr();
    const Result result = run(slow ? "slow" : "quick", slow_disk);
    const std::string log = testing::internal::GetCapturedStderr();
    set_call_fault(nullptr);
    EXPECT_EQ(result.exit, Exit::ok);
    EXPECT_EQ(log.find("waited") != std::string::npos, slow) << log;
    if (slow) expect_contains(log, "step 2 waited ");
  }
}

// The fallback where host memory has no room for a copy of the state.
TEST_F(TrainLoopTest, SavesThatHoldTrainingUpGiveTheSameBits) {
  settings_.save_every = 2;
  const Result background = run("background");
  in_background_ = false;
  const Result waiting = run("waiting");
  EXPECT_EQ(waiting.tensors, background.tensors);
  for (const char* name : {"model.bin", "state.bin"}) {
    const std::string file = std::string("/step_00000008/") + name;
    EXPECT_EQ(read_bytes(temporary_.file("waiting") + file), read_bytes(temporary_.file("background") + file));
  }
}

// A save that was begun before an error ends the run is finished, and said to be.
TEST_F(TrainLoopTest, AnErrorOfTheDeviceDoesNotLoseTheSaveInProgress) {
  settings_.save_every = 4;
  testing::internal::CaptureStderr();
  const Result result = run("run", at_forward(5, [] { fail(Exit::environment, "the GPU has fallen off the bus"); }));
  expect_contains(testing::internal::GetCapturedStderr(), "step_00000004' (");
  EXPECT_EQ(result.error_code, Exit::environment);
  EXPECT_TRUE(has_checkpoint("run", 4));
  EXPECT_FALSE(fs::exists(temporary_.file("run") + "/step_00000004.tmp"));
}

TEST_F(TrainLoopTest, AFailedLastSaveIsExit5AndLeavesTheOlderOne) {
  settings_.steps = 4;
  run("run");
  settings_.steps = 10;
  settings_.debug_inject = {"io-error@save=0"};
  const Result result = run("run");
  EXPECT_EQ(result.error_code, Exit::resources);
  EXPECT_TRUE(has_checkpoint("run", 4));
  EXPECT_FALSE(has_checkpoint("run", 10));
}

// The time that is left is counted on from the steps of this start: the first one alone at first, then a running mean.
TEST_F(TrainLoopTest, TheTimeLeftIsThatOfTheStepsOfThisStart) {
  settings_.steps = 3;
  run("run");
  settings_.steps = 1'000'000;
  settings_.val_every = 1;  // each step has its line
  settings_.val_batches = 1;
  with_validation_ = true;
  testing::internal::CaptureStderr();
  EXPECT_TRUE(run("run", at_forward(4, [] { throw Crash(); })).crashed);
  const std::string output = testing::internal::GetCapturedStderr();
  double mean = 0;
  for (const auto& [step, record] : steps("run")) {
    if (step <= 3) continue;
    const double seconds = record["dt_ms"].get<double>() / 1000;
    mean = step == 4 ? seconds : mean + 0.1 * (seconds - mean);
    const std::string left = human_seconds(static_cast<double>(settings_.steps - step) * mean);
    const std::size_t line = output.find(format("step %lld/1000000  ", static_cast<long long>(step)));
    ASSERT_NE(line, std::string::npos) << output;
    expect_contains(output.substr(line, output.find('\n', line) - line), "  " + left + " left");
  }
  EXPECT_GT(mean, 0);
}

TEST_F(TrainLoopTest, TheTimeLimitStopsSavesAndResumes) {
  const Result whole = run("whole");
  settings_.max_minutes = 1e-9;
  testing::internal::CaptureStderr();
  const Result none = run("run");
  expect_contains(testing::internal::GetCapturedStderr(),
                  "stopped by --max-minutes after step 0: the same command goes on from there\n");
  EXPECT_EQ(none.exit, Exit::ok);
  EXPECT_EQ(none.state.step, 0);
  EXPECT_TRUE(has_checkpoint("run", 0));
  settings_.max_minutes = 0;
  testing::internal::CaptureStderr();
  EXPECT_EQ(run("run").tensors, whole.tensors);
  EXPECT_EQ(testing::internal::GetCapturedStderr().find("stopped by"), std::string::npos) << "it has come to its end";
}

// ---- signals; each in a process of its own, because a stop cannot be taken back ----

class TrainSignalTest : public TrainLoopTest {
 protected:
  // "threadsafe" starts the test's program again instead of forking it: OpenMP does not survive a fork.
  TrainSignalTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

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

// A name that contains another GPU's is not that GPU.
TEST_F(TrainLoopTest, TheBenchGivesNoShareOfAPeakItDoesNotKnow) {
  SingleRank alone;
  const std::unique_ptr<TrainModel> model = micro_model(settings_);
  const auto peak = [&](const char* name) { return bench_training(*model, settings_, name, alone).peak_flops; };
  // Names as the driver gives them, with the dense bf16 rates of the datasheets; SXM where the name says nothing else.
  for (const auto& [name, flops] : {std::pair("NVIDIA H100 80GB HBM3", 989.4e12),
                                    {"NVIDIA H100 PCIe", 756.4e12},
                                    {"NVIDIA H100 NVL", 0.0},
                                    {"NVIDIA H200", 989.4e12},
                                    {"NVIDIA H200 NVL", 0.0},
                                    {"NVIDIA GH200 480GB", 989.4e12},
                                    {"NVIDIA A100-SXM4-80GB", 311.9e12},
                                    {"NVIDIA A100 80GB PCIe", 311.9e12},
                                    {"NVIDIA L40S", 362.0e12},
                                    {"NVIDIA L40", 0.0},
                                    {"NVIDIA B200", 2250e12},
                                    {"NVIDIA GB200", 0.0},
                                    {"NVIDIA GeForce RTX 4090", 0.0},
                                    {"cpu", 0.0}}) {
    EXPECT_EQ(peak(name), flops) << name;
  }
}

// Counted by hand: 6 operations for each weight of a matrix, and 6 L q T for causal attention (half of 12 L q T).
TEST(BenchFlops, OfThePresetsByHand) {
  // tiny: a layer has 2 x 192 x 192, 2 x 64 x 192 and 3 x 512 x 192; the tied embedding of 2,048 x 192 is the head.
  EXPECT_EQ(training_flops_per_token(preset_config("tiny"), std::nullopt, 256),
            6.0 * (4 * 393'216 + 393'216) + 6.0 * 4 * 192 * 256);
  // llama3.1-8b: 2 x 4096 x 4096, 2 x 1024 x 4096, 3 x 14336 x 4096; the head is a matrix of its own.
  EXPECT_EQ(training_flops_per_token(preset_config("llama3.1-8b"), std::nullopt, 8192), 51'470'401'536.0);
  // Heads that are together wider than the model: a layer has 2 x 60 x 24, 2 x 20 x 24 and 3 x 56 x 24, the head 100 x 24.
  ModelConfig wide = preset_config("tiny");
  wide.num_layers = 2;
  wide.hidden_size = 24;
  wide.num_heads = 3;
  wide.num_kv_heads = 1;
  wide.head_dim = 20;
  wide.ffn_size = 56;
  wide.vocab_size = 100;
  wide.tied_embeddings = false;
  EXPECT_EQ(training_flops_per_token(wide, std::nullopt, 16),
            6.0 * (2 * (2 * 1440 + 2 * 480 + 3 * 1344) + 2400) + 6.0 * 2 * 60 * 16);
}

// Beside frozen weights no GEMM computes their gradients; A and B of q and v have 3 x (192 + 192) and 3 x (192 + 64) parameters
// in each of 4 layers.
TEST(BenchFlops, OfAnAdapterByHand) {
  const LoraConfig lora{3, 6, parse_lora_targets("--lora-targets", "q,v", llama_lora_targets())};
  EXPECT_EQ(training_flops_per_token(preset_config("tiny"), lora, 256),
            4.0 * (4 * 393'216 + 393'216) + 6.0 * 4 * 192 * 256 + 6.0 * 4 * 3 * (192 + 192 + 192 + 64));
  EXPECT_EQ(training_flops_per_token(preset_config("tiny"), std::nullopt, 256),
            6.0 * (4 * 393'216 + 393'216) + 6.0 * 4 * 192 * 256);
}

TEST(BenchFlops, TheShareOfThePeakByHand) {
  TrainBenchResult result;
  result.tokens = 1000;
  result.median_ms = 10;
  result.flops_per_token = 1e9;
  EXPECT_EQ(result.mfu(), 0) << "an unknown peak gives no share";
  result.peak_flops = 400e12;
  EXPECT_EQ(result.tokens_per_s(), 100'000);
  EXPECT_DOUBLE_EQ(result.mfu(), 0.25);
  result.fastest_ms = 9;
  result.slowest_ms = 12;
  result.first_loss = 3.5;
  result.last_loss = 2.25;
  result.memory_bytes = 3'000'000'000;
  EXPECT_EQ(
      train_bench_text(result, "X"),
      (std::vector<std::string>{
          "X: 100000 tokens/s; a step of 1000 tokens in 10.00 ms (median of 15; 9.00 to 12.00)",
          "100 TF/s by 6 N_matmul + 6 L q T = 1.000 GF a token (causal)", "MFU 25.0 % of the 400.0 TF/s of dense bf16",
          "loss 3.5000 -> 2.2500 on the same random tokens, in " + human_bytes(3e9) + " of memory"}));
  result.peak_flops = 0;
  EXPECT_EQ(train_bench_text(result, "X")[2], "MFU n/a: the peak of this device is not known");
}

TEST_F(TrainLoopTest, RanksDivideAStepOfTheBench) {
  settings_.batch_tokens = 6 * 16;
  settings_.virtual_ranks = 3;
  int forwards[3] = {}, backwards[3] = {};
  run_thread_ranks(3, 60, [&](Communicator& ranks) {
    omp_set_num_threads(1);
    const std::unique_ptr<TrainModel> inner =
        cpu::make_training_model(micro_config(), settings_.model_options(), ranks, Shard::optimizer);
    HookedModel model(*inner);
    int &forward = forwards[ranks.rank()], &backward = backwards[ranks.rank()];
    model.before_forward = [&](std::uint64_t) { ++forward; };
    model.before_backward = [&] { EXPECT_EQ(++backward, forward); };
    bench_parameters(model);
    const TrainBenchResult result = bench_training(model, settings_, "NVIDIA H200", ranks);
    EXPECT_EQ(result.ranks, 3);
    EXPECT_EQ(result.tokens, 96);
    EXPECT_EQ(result.memory_bytes, total_bytes(inner->memory()));
    EXPECT_EQ(result.peak_flops, 3 * 989.4e12);
    EXPECT_NEAR(result.first_loss, std::log(32.0), 0.2) << "the mean over the tokens of all";
  });
  for (const int rank : {0, 1, 2}) {
    EXPECT_EQ(forwards[rank], (4 + 15) * 2);
    EXPECT_EQ(backwards[rank], forwards[rank]);
  }
}

// The update of a step of the bench is that of training: of the mean gradient of all its micro-batches, clipped.
TEST_F(TrainLoopTest, AStepOfTheBenchIsClippedByTheMeanOfItsGradients) {
  SingleRank alone;
  std::vector<double> first_norms;
  for (const std::int64_t micro_batches : {1, 3}) {
    settings_.batch_tokens = 16 * micro_batches;
    settings_.grad_clip = 1e-3;
    const std::unique_ptr<TrainModel> inner = micro_model(settings_);
    HookedModel model(*inner);
    std::vector<double> norms;
    model.after_statistics = [&](StepStatistics& statistics) { norms.push_back(statistics.gradient_norm); };
    model.before_update = [&](const AdamWStep& update) {
      EXPECT_EQ(update.gradient_scale, clip_factor(norms.back(), 1e-3));
      EXPECT_LT(update.gradient_scale, 1);
    };
    bench_training(model, settings_, "", alone);
    first_norms.push_back(norms.at(0));
  }
  EXPECT_NEAR(first_norms[1], first_norms[0], 1e-5 * first_norms[0]);
}

TEST_F(TrainLoopTest, TheBenchCountsTheOperationsOfItsOwnModel) {
  SingleRank alone;
  const std::unique_ptr<TrainModel> model = micro_model(settings_);
  // One layer of 2 x 16 x 16, 2 x 8 x 16 and 3 x 24 x 16, a head of 32 x 16; sequences of 8.
  const TrainBenchResult result = bench_training(*model, settings_, "NVIDIA H200", alone);
  EXPECT_EQ(result.flops_per_token, 6.0 * (1920 + 512) + 6.0 * 16 * 8);
  EXPECT_EQ(result.tokens, 16);
  EXPECT_DOUBLE_EQ(result.mfu(), 16 / result.median_ms * 1e3 * result.flops_per_token / 989.4e12);
  // The steps are those of a training: they learn the batch by heart.
  EXPECT_NEAR(result.first_loss, std::log(32.0), 0.2);
  EXPECT_LT(result.last_loss, result.first_loss);
  EXPECT_GT(result.last_loss, 0);
  EXPECT_LE(result.fastest_ms, result.median_ms);
  EXPECT_LE(result.median_ms, result.slowest_ms);
}

// ---- initial parameters ----

// Against the published definition, number by number: four normal numbers from each four words (Box and Muller), scaled by
// the depth where a branch ends. Sizes of 4 k + 1 to 4 k + 3 end within a group of four.
TEST(Initialize, EachValueIsThatOfItsAddress) {
  for (const Init init : {Init::normal, Init::normal_residual, Init::ones, Init::zeros}) {
    for (const std::size_t count : {1u, 5u, 10u, 1003u}) {
      TensorSpec spec;
      spec.init = init;
      std::vector<float> values(count, -1.0f);
      initial_values(spec, 9, 8, 1234, values);
      for (std::size_t i = 0; i < count; ++i) {
        double expected = init == Init::ones ? 1 : 0;
        if (init == Init::normal || init == Init::normal_residual) {
          const PhiloxWords words = philox(1234, i / 4, std::uint64_t{1} << 32 | 9);
          const std::uint32_t* pair = words.word + i % 4 / 2 * 2;
          const double radius = std::sqrt(-2 * std::log((pair[0] + 1.0) / 4294967296.0));
          const double angle = 6.283185307179586 * (pair[1] / 4294967296.0);
          const double deviation = init == Init::normal ? 0.02 : 0.02 / 4;  // sqrt(2 x 8 layers)
          expected = deviation * radius * (i % 2 == 0 ? std::cos(angle) : std::sin(angle));
        }
        ASSERT_NEAR(values[i], expected, 1e-8) << "element " << i << " of " << count;
      }
    }
  }
}

TEST(Initialize, FollowsTheTable) {
  ModelConfig config = preset_config("tiny");
  const TensorTable table(config);
  for (std::size_t tensor = 0; tensor < table.specs().size(); ++tensor) {
    const TensorSpec& spec = table.specs()[tensor];
    std::vector<float> values(static_cast<std::size_t>(spec.elements));
    initial_values(spec, tensor, config.num_layers, 1, values);
    double sum = 0, squares = 0;
    for (const float value : values) {
      sum += value;
      squares += static_cast<double>(value) * value;
    }
    const double n = static_cast<double>(values.size());
    const double deviation = spec.init == Init::normal ? 0.02 : 0.02 / std::sqrt(2.0 * 4);
    if (spec.init == Init::ones) {
      EXPECT_EQ(sum, n) << spec.name;
    } else {
      // Five standard errors of the mean and of the variance.
      EXPECT_LT(std::abs(sum / n), 5 * deviation / std::sqrt(n)) << spec.name;
      EXPECT_NEAR(squares / n, deviation * deviation, 5 * deviation * deviation * std::sqrt(2 / n)) << spec.name;
    }
  }
}

TEST(Initialize, IsAFunctionOfSeedTensorAndElement) {
  const TensorTable table(preset_config("tiny"));
  const TensorSpec& spec = table.specs()[0];
  std::vector<float> all(1001), part(500), other_tensor(1001), other_seed(1001);
  initial_values(spec, 0, 4, 1, all);
  initial_values(spec, 0, 4, 1, part);
  initial_values(spec, 1, 4, 1, other_tensor);
  initial_values(spec, 0, 4, 2, other_seed);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin()));
  int same = 0;
  for (std::size_t i = 0; i < all.size(); ++i) same += all[i] == other_tensor[i] || all[i] == other_seed[i];
  EXPECT_LT(same, 5);
}

// A token for each of the letters a to t.
std::string letter_tokenizer() {
  Json vocab = Json::object();
  for (int id = 0; id < 20; ++id) vocab[std::string(1, static_cast<char>('a' + id))] = id;
  return Json{{"version", "1.0"},
              {"added_tokens", Json::array()},
              {"decoder", {{"type", "Fuse"}}},
              {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}}}
      .dump();
}

// A sample depends on parameters, seed and step alone, and begins with the prompt each time.
TEST(SampleWriterTest, ASampleDoesNotGoOnWhereTheLastOneEnded) {
  TrainSettings settings = micro_settings();
  settings.sample_prompt = "abc";
  settings.sample_tokens = 9;
  settings.temperature = 1;
  const std::unique_ptr<TrainModel> model = micro_model(settings);
  SampleWriter writer(settings, letter_tokenizer(), micro_config());
  writer.attach(*model);
  const std::string fifth = writer.write(5), sixth = writer.write(6);
  EXPECT_EQ(fifth.size(), 12u) << fifth;
  EXPECT_TRUE(fifth.starts_with("abc")) << fifth;
  EXPECT_NE(fifth, sixth) << "other random numbers";
  EXPECT_EQ(writer.write(5), fifth);
}

TEST(SampleWriterTest, AnotherSeedIsAnotherSample) {
  TrainSettings settings = micro_settings();
  settings.sample_prompt = "abc";
  settings.sample_tokens = 20;
  settings.temperature = 1;
  const std::unique_ptr<TrainModel> model = micro_model(settings);
  const auto sample = [&](std::int64_t seed) {
    settings.seed = seed;
    SampleWriter writer(settings, letter_tokenizer(), micro_config());
    writer.attach(*model);
    return writer.write(1);
  };
  EXPECT_EQ(sample(1), sample(1));
  EXPECT_NE(sample(1), sample(2));
  EXPECT_NE(sample(1), sample(std::int64_t{1} << 40 | 1));
}

// Runs in a process of its own: a stop cannot be taken back.
TEST(SampleWriterDeathTest, ASampleEndsAtASignal) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto leave = [] {
    TrainSettings settings = micro_settings();
    settings.sample_prompt = "abc";
    settings.sample_tokens = 20;
    const std::unique_ptr<TrainModel> model = micro_model(settings);
    SampleWriter writer(settings, letter_tokenizer(), micro_config());
    writer.attach(*model);
    const std::size_t whole = writer.write(1).size();
    install_signal_handlers();
    on_stop(OnStop::finish);
    ::raise(SIGTERM);
    const std::string cut = writer.write(1);
    ::_exit(whole == 23 && cut.starts_with("abc") && cut.size() <= 4 ? 0 : 1);
  };
  EXPECT_EXIT(leave(), testing::ExitedWithCode(0), "");
}

// Of the ids that the model has and the tokenizer has not none is drawn; an end token ends the sample.
TEST(SampleWriterTest, ASampleIsMadeOfTokensAndEndsAtAnEndToken) {
  TrainSettings settings = micro_settings();
  settings.sample_prompt = "abc";
  settings.sample_tokens = 29;
  settings.temperature = 100;
  ModelConfig config = micro_config();
  const auto sample = [&] {
    const std::unique_ptr<TrainModel> model = cpu::make_training_model(config, settings.model_options());
    initialize_parameters(*model, 1);
    SampleWriter writer(settings, letter_tokenizer(), config);
    writer.attach(*model);
    return writer.write(1);
  };
  const std::string whole = sample();
  EXPECT_EQ(whole.size(), 32u) << whole;
  config.eos_ids = {whole[9] - 'a'};
  EXPECT_EQ(sample(), whole.substr(0, whole.find(whole[9], 3)));
}

// The token that begins a text counts among those of the prompt.
TEST(SampleWriterTest, APromptBeginsAsItsTokenizerSays) {
  Json tokenizer = Json::parse(letter_tokenizer());
  tokenizer["added_tokens"] = {{{"id", 20}, {"content", "<s>"}, {"special", true}}};
  tokenizer["post_processor"] = token_in_front("<s>", 20);
  TrainSettings settings = micro_settings();
  settings.sample_prompt = "abc";
  settings.sample_tokens = 9;
  EXPECT_EQ(SampleWriter(settings, tokenizer.dump(), micro_config()).positions(), 13);
}

// Of micro_config()'s 32 positions the prompt may take all but one.
TEST(SampleWriterTest, APromptLeavesRoomForOneTokenAtLeast) {
  TrainSettings settings = micro_settings();
  const std::unique_ptr<TrainModel> model = micro_model(settings);
  // Tokens of the prompt and of the sample, and the positions for both.
  for (const auto& [prompt, tokens, positions] :
       {std::tuple(1, 1, 2), {3, 9, 12}, {3, 29, 32}, {3, 30, 32}, {31, 1, 32}, {31, 64, 32}}) {
    settings.sample_prompt = std::string(static_cast<std::size_t>(prompt), 'c');
    settings.sample_tokens = tokens;
    SampleWriter writer(settings, letter_tokenizer(), micro_config());
    EXPECT_EQ(writer.positions(), positions) << prompt;
    writer.attach(*model);
    EXPECT_EQ(std::ssize(writer.write(1)), positions) << prompt;
  }
  for (const std::size_t prompt : {32u, 33u}) {
    settings.sample_prompt = std::string(prompt, 'c');
    const std::string message =
        error_of(Exit::usage, [&] { SampleWriter(settings, letter_tokenizer(), micro_config()); });
    expect_contains(message, format("--sample-prompt: %zu tokens leave no place in the model's 32 positions", prompt));
  }
}

}  // namespace
}  // namespace weft
