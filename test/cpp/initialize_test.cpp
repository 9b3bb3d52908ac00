// Initial parameters.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "llmc/base/philox.h"
#include "llmc/model/presets.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

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

}  // namespace
}  // namespace weft
