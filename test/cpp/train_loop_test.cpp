// The training loop: accumulation, bit-exact resume, validation, the best checkpoint, faults of files.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/utf8.h"
#include "llmc/comm/thread_ranks.h"
#include "llmc/model/compare.h"
#include "llmc/train/evaluate.h"
#include "test/cpp/train_loop_tools.h"

namespace weft {
namespace {

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
  run("much", saturating(0.02));
  const std::string much = log_;
  expect_contains(much, "step 1: fp8 saturates: 2 % of the values of layers.0 qkv gradient were beyond its range");
  expect_contains(much, "step 101: fp8 saturates");
  EXPECT_EQ(much.find("fp8 saturates", much.find("fp8 saturates") + 1), much.rfind("fp8 saturates")) << "twice";
  EXPECT_EQ(steps("much").at(7)["fp8"]["gradient"], (Json{{"values", 1000}, {"saturated", 20}, {"flushed", 5}}));
  settings_.steps = 2;
  run("little", saturating(kFp8SaturationWarning));
  EXPECT_EQ(log_.find("fp8 saturates"), std::string::npos);
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
  run("run", at_forward(40, [] { throw Crash{}; }));
  std::istringstream text(log_);
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
  run("run");
  expect_contains(log_, "sample: " + letters + "\n");
  expect_contains(log_, "warning: no sample: an unlucky sample\n");
  expect_contains(log_, "sample: <\\x1b[2J\\x7f\\xc2\\x9b1m\\x00\\xff>\n");
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

// With --keep-best each new lowest loss is saved, and the newest of these stays beside the newest checkpoints.
TEST_F(TrainLoopTest, TheCheckpointWithTheLowestValidationLossIsKept) {
  const std::map<std::int64_t, double> losses = {{2, 5.0}, {4, 3.0}, {6, 4.0}, {8, 4.5}, {10, 3.5}};
  with_validation_ = true;
  settings_.val_every = 2;
  settings_.val_batches = 1;
  const auto script = validation_losses([&](std::int64_t step) { return losses.at(step); });
  using Steps = std::set<std::int64_t>;
  settings_.save_every = 2;
  const Result plain = run("plain", script);
  EXPECT_EQ(checkpoints("plain"), (Steps{8, 10}));
  EXPECT_FALSE(plain.state.best.has_value());
  settings_.keep_best = true;
  const Result best = run("best", script);
  EXPECT_EQ(checkpoints("best"), (Steps{4, 8, 10}));
  EXPECT_EQ(best.state.best, (TrainState::Best{4, 3.0}));
  EXPECT_EQ(best.tensors, plain.tensors);
  settings_.save_every = 0;  // no save is due but those
  run("rare", script);
  EXPECT_EQ(checkpoints("rare"), (Steps{4, 10}));
  // The best one is remembered when the run goes on.
  settings_.steps = 6;
  settings_.save_every = 2;
  run("resumed", script);
  settings_.steps = 10;
  const Result resumed = run("resumed", script);
  EXPECT_EQ(checkpoints("resumed"), (Steps{4, 8, 10}));
  EXPECT_EQ(resumed.state.best, best.state.best);
}

// A lowest loss on other data, or on more batches, is not compared with, and without --keep-best it is not gone on with.
TEST_F(TrainLoopTest, ALowestLossOfOtherDataIsForgotten) {
  const std::map<std::int64_t, double> losses = {{2, 3}, {4, 4}, {6, 5}, {8, 9}};
  const auto script = validation_losses([&](std::int64_t step) { return losses.at(step); });
  with_validation_ = true;
  settings_.val_every = settings_.save_every = 2;
  settings_.val_batches = 1;
  settings_.keep_best = true;
  settings_.steps = 4;
  const std::string on = run("run", script).state.best_on;
  settings_.steps = 6;
  settings_.val_batches = 2;
  const Result more = run("run", script);
  expect_contains(log_, "3.0000 after step 2, is of other data or another --val-batches");
  EXPECT_EQ(more.state.best->step, 6);
  EXPECT_NE(more.state.best_on, on);
  settings_.keep_best = false;
  settings_.steps = 8;
  EXPECT_FALSE(run("run", script).state.best.has_value());
  EXPECT_EQ(log_.find("lowest loss"), std::string::npos);
}

// While the new best one is not on the disk the one before stays, also when the run goes on, and what comes is compared with it.
TEST_F(TrainLoopTest, ABestCheckpointThatCannotBeSavedDoesNotPushTheOneBeforeOut) {
  with_validation_ = true;
  settings_.val_every = 2;
  settings_.keep_best = true;
  settings_.save_every = 2;
  std::map<std::int64_t, double> losses = {{2, 5.0}, {4, 4.0}};  // of other steps 10
  const auto script = [&](HookedModel& model) {
    validation_losses([&](std::int64_t step) { return losses.contains(step) ? losses.at(step) : 10.0; })(model);
    model.before_update = [note_step = model.before_update](const AdamWStep& update) {
      note_step(update);
      if (update.step < 4) return;
      set_call_fault(
          [](const char*, const std::string& path) { return path.find("step_00000004") == std::string::npos; });
    };
  };
  settings_.steps = 10;
  const Result result = run("run", script);
  EXPECT_EQ(result.exit, Exit::ok) << result.error;
  EXPECT_TRUE(has_checkpoint("run", 2));
  EXPECT_FALSE(has_checkpoint("run", 4));
  expect_contains(log_, "lowest loss on --val: 5.0000 after step 2, kept in ");
  expect_contains(log_, "step_00000002'\n");
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
  const auto script = validation_losses([&](std::int64_t step) { return losses.at(step); });
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
      const Result result =
          run(name, validation_losses([=](std::int64_t step) { return for_good || step <= 4 ? bad : 3.0; }));
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
  const auto script = validation_losses([&](std::int64_t step) { return losses.at(step); });
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
    EXPECT_EQ(run(slow ? "slow" : "quick", slow_disk).exit, Exit::ok);
    set_call_fault(nullptr);
    EXPECT_EQ(log_.find("waited") != std::string::npos, slow) << log_;
    if (slow) expect_contains(log_, "step 2 waited ");
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
  const Result result = run("run", at_forward(5, [] { fail(Exit::environment, "the GPU has fallen off the bus"); }));
  expect_contains(log_, "step_00000004' (");
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
  EXPECT_TRUE(run("run", at_forward(4, [] { throw Crash(); })).crashed);
  double mean = 0;
  for (const auto& [step, record] : steps("run")) {
    if (step <= 3) continue;
    const double seconds = record["dt_ms"].get<double>() / 1000;
    mean = step == 4 ? seconds : mean + 0.1 * (seconds - mean);
    const std::string left = human_seconds(static_cast<double>(settings_.steps - step) * mean);
    const std::size_t line = log_.find(format("step %lld/1000000  ", static_cast<long long>(step)));
    ASSERT_NE(line, std::string::npos) << log_;
    expect_contains(log_.substr(line, log_.find('\n', line) - line), "  " + left + " left");
  }
  EXPECT_GT(mean, 0);
}

TEST_F(TrainLoopTest, TheTimeLimitStopsSavesAndResumes) {
  const Result whole = run("whole");
  settings_.max_minutes = 1e-9;
  const Result none = run("run");
  expect_contains(log_, "stopped by --max-minutes after step 0: the same command goes on from there\n");
  EXPECT_EQ(none.exit, Exit::ok);
  EXPECT_EQ(none.state.step, 0);
  EXPECT_TRUE(has_checkpoint("run", 0));
  settings_.max_minutes = 0;
  EXPECT_EQ(run("run").tensors, whole.tensors);
  EXPECT_EQ(log_.find("stopped by"), std::string::npos) << "it has come to its end";
}

}  // namespace
}  // namespace weft
