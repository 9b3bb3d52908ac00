// The learning-rate schedules against their closed formulas.
#include "llmc/train/schedule.h"
#include "llmc/model/presets.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "llmc/base/error.h"
#include "llmc/model/config.h"
#include "llmc/model/tensor_table.h"

namespace weft {
namespace {

Schedule make(ScheduleShape shape) {
  return {.shape = shape, .peak = 3e-4, .min_ratio = 0.1, .warmup_steps = 10, .steps = 110};
}

TEST(Schedule, Cosine) {
  const Schedule schedule = make(ScheduleShape::cosine);
  for (int n = 11; n <= 110; ++n) {
    const double p = (n - 11) / 100.0;
    EXPECT_NEAR(schedule.at(n), 3e-5 + 2.7e-4 * 0.5 * (1 + std::cos(std::numbers::pi * p)), 1e-18);
  }
  EXPECT_NEAR(schedule.at(61), (3e-4 + 3e-5) / 2, 1e-15) << "half way";
  EXPECT_GT(schedule.at(110), 3e-5) << "no step is spent at the very end of the curve";
  EXPECT_LT(schedule.at(110), 3.1e-5);
}

TEST(Schedule, WsdHoldsThenDecaysByTheSquareRoot) {
  Schedule schedule = make(ScheduleShape::wsd);
  schedule.wsd_decay_fraction = 0.2;
  ASSERT_EQ(schedule.wsd_decay_steps(), 22);
  for (int n = 11; n <= 88; ++n) EXPECT_EQ(schedule.at(n), 3e-4);
  EXPECT_EQ(schedule.at(89), 3e-4) << "the first decaying step has lost nothing yet";
  for (int n = 89; n <= 110; ++n) EXPECT_NEAR(schedule.at(n), 3e-4 - 2.7e-4 * std::sqrt((n - 89) / 22.0), 1e-18);
}

// The rate of a new model falls with its size; weights that are there get a tenth of it.
TEST(Schedule, TheDefaultRateFollowsTheSizeOfTheModel) {
  const auto rate = [](const char* name, bool pretrained, int share = 1) {
    return default_learning_rate(TensorTable(preset_config(name)).parameters(), share * (pretrained ? 10 : 1));
  };
  EXPECT_EQ(rate("tiny", false), 3e-3);
  EXPECT_EQ(rate("d12", false), 6e-4);
  EXPECT_EQ(rate("smollm2-135m", false), 6e-4);
  EXPECT_EQ(rate("tinyllama-1.1b", false), 2e-4);
  EXPECT_EQ(rate("llama3.2-1b", false), 2e-4);
  EXPECT_EQ(rate("llama3.2-3b", false), 1.6e-4);
  EXPECT_EQ(rate("llama3.1-8b", false), 1.2e-4);
  EXPECT_EQ(rate("tiny", true), 3e-4);
  EXPECT_EQ(rate("tiny", true, 10), 3e-5) << "with dpo";
  EXPECT_EQ(rate("llama3.1-8b", true, 10), 1.2e-6) << "with dpo";
  EXPECT_EQ(rate("d12", true), 6e-5) << "as if it were typed: a run may be resumed with --lr 6e-5";
  EXPECT_EQ(rate("llama3.1-8b", true), 1.2e-5);
  double before = 1;
  for (std::int64_t parameters = 1; parameters < std::int64_t{1} << 40; parameters *= 2) {
    EXPECT_LE(default_learning_rate(parameters), before);
    before = default_learning_rate(parameters);
  }
}

// Each row of the table holds up to its number of parameters, and no further.
TEST(Schedule, TheDefaultRateChangesAfterEachSize) {
  const std::pair<std::int64_t, double> rows[] = {{30'000'000, 3e-3},  {100'000'000, 1e-3},   {250'000'000, 6e-4},
                                                  {500'000'000, 3e-4}, {2'000'000'000, 2e-4}, {4'000'000'000, 1.6e-4}};
  for (std::size_t i = 0; i < std::size(rows); ++i) {
    EXPECT_EQ(default_learning_rate(rows[i].first), rows[i].second);
    EXPECT_EQ(default_learning_rate(rows[i].first + 1), i + 1 < std::size(rows) ? rows[i + 1].second : 1.2e-4);
  }
}

// The decay takes the nearest number of steps.
TEST(Schedule, WsdDecayStepsAreRounded) {
  struct Case {
    double fraction;
    std::int64_t steps, decay;
  };
  for (const Case& c : {Case{0.2, 8, 2}, Case{0.2, 7, 1}, Case{0.2, 2, 0}, Case{0.1, 109, 11}, Case{0.1, 104, 10},
                        Case{0.5, 3, 2}, Case{1, 7, 7}, Case{0.29, 100, 29}}) {
    Schedule schedule = make(ScheduleShape::wsd);
    schedule.warmup_steps = 0;
    schedule.wsd_decay_fraction = c.fraction;
    schedule.steps = c.steps;
    EXPECT_EQ(schedule.wsd_decay_steps(), c.decay) << c.fraction << " of " << c.steps;
    for (std::int64_t n = 1; n <= c.steps - c.decay + 1 && n <= c.steps; ++n) EXPECT_EQ(schedule.at(n), 3e-4) << n;
    if (c.decay > 1) {
      EXPECT_LT(schedule.at(c.steps - c.decay + 2), 3e-4);
    }
  }
}

TEST(Schedule, NamesFollowTheEnum) {
  EXPECT_EQ(schedule_from_name("cosine"), ScheduleShape::cosine);
  EXPECT_EQ(schedule_from_name("wsd"), ScheduleShape::wsd);
  EXPECT_THROW(schedule_from_name("triangle"), Error);
}

}  // namespace
}  // namespace weft
