// What is not finite, and spikes: the numeric guard in the loop and by itself.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/philox.h"
#include "test/cpp/train_loop_tools.h"

namespace weft {
namespace {

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
  const Result result = run("run");
  expect_contains(log_, "warning: no checkpoint of step 5: step 5: moment2.");
  EXPECT_EQ(log_.find("Training goes on"), std::string::npos) << log_;
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
    EXPECT_EQ(run(name, spike_at(step, 1000)).exit, Exit::ok);
    std::istringstream text(log_);
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

}  // namespace
}  // namespace weft
