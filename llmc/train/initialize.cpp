#include "llmc/train/initialize.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "llmc/base/philox.h"

namespace weft {

namespace {

constexpr double kStandardDeviation = 0.02;

// Two standard normal numbers from two random words (Box and Muller, 1958). The first uniform lies in (0, 1].
struct NormalPair {
  double first, second;
};
NormalPair normal_pair(std::uint32_t a, std::uint32_t b) {
  const double radius = std::sqrt(-2.0 * std::log((a + 1.0) * 0x1p-32));
  const double angle = 2.0 * std::numbers::pi * (b * 0x1p-32);
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

void fill_normal(std::span<float> values, double deviation, std::uint64_t tensor, std::uint64_t seed) {
  const std::uint64_t stream = static_cast<std::uint64_t>(RandomStream::init) << 32 | tensor;
#pragma omp parallel for schedule(static)
  for (std::size_t i = 0; i < values.size(); i += 4) {
    const PhiloxWords words = philox(seed, i / 4, stream);
    const NormalPair low = normal_pair(words.word[0], words.word[1]);
    const NormalPair high = normal_pair(words.word[2], words.word[3]);
    const double four[4] = {low.first, low.second, high.first, high.second};
    for (std::size_t j = 0; j < 4 && i + j < values.size(); ++j) {
      values[i + j] = static_cast<float>(deviation * four[j]);
    }
  }
}

// Between -bound and bound.
void fill_uniform(std::span<float> values, double bound, std::uint64_t tensor, std::uint64_t seed) {
  const std::uint64_t stream = static_cast<std::uint64_t>(RandomStream::init) << 32 | tensor;
#pragma omp parallel for schedule(static)
  for (std::size_t i = 0; i < values.size(); i += 4) {
    const PhiloxWords words = philox(seed, i / 4, stream);
    for (std::size_t j = 0; j < 4 && i + j < values.size(); ++j) {
      values[i + j] = static_cast<float>(bound * (2.0 * static_cast<double>(uniform01(words.word[j])) - 1.0));
    }
  }
}

}  // namespace

void initial_values(const TensorSpec& spec, std::uint64_t tensor, std::int64_t num_layers, std::uint64_t seed,
                    std::span<float> values) {
  switch (spec.init) {
    case Init::ones:
      std::fill(values.begin(), values.end(), 1.0f);
      break;
    case Init::zeros:
      std::fill(values.begin(), values.end(), 0.0f);
      break;
    case Init::normal:
      fill_normal(values, kStandardDeviation, tensor, seed);
      break;
    case Init::normal_residual:
      fill_normal(values, kStandardDeviation / std::sqrt(2.0 * static_cast<double>(num_layers)), tensor, seed);
      break;
    case Init::uniform:
      fill_uniform(values, 1 / std::sqrt(static_cast<double>(spec.shape.back())), tensor, seed);
      break;
  }
}

void initialize_parameters(TrainModel& model, std::uint64_t seed) {
  std::vector<float> values;
  const auto specs = model.table().specs();
  for (std::size_t tensor = 0; tensor < specs.size(); ++tensor) {
    values.resize(static_cast<std::size_t>(specs[tensor].elements));
    initial_values(specs[tensor], tensor, model.config().num_layers, seed, values);
    model.write_tensor(TensorRole::parameter, specs[tensor], values.data());
  }
}

}  // namespace weft
