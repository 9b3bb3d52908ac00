// --activations fp8 on the CPU: codes and scales of rows, linear layers of codes, whole models, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "golden_cases.h"
#include "gradient_check.h"
#include "inference_tools.h"
#include "llmc/app/decode_device.h"
#include "llmc/base/error.h"
#include "llmc/base/fp8.h"
#include "llmc/cpu/fp8_rows.h"
#include "llmc/cpu/inference.h"
#include "llmc/cpu/matmul_rows.h"
#include "llmc/model/fp8_rows.h"
#include "llmc/model/presets.h"
#include "quantized_files.h"
#include "test_files.h"

namespace weft {
namespace {

using test::Floats;
using test::random_floats;
using test::RandomMatrix;

struct Rows {
  Floats values, scales;
};
Rows quantized(const Floats& x, std::int64_t rows) {
  const auto C = static_cast<std::int64_t>(x.size()) / rows;
  Rows result{Floats(x.size()), Floats(static_cast<std::size_t>(rows))};
  cpu::quantize_rows_fp8(result.values.data(), result.scales.data(), x.data(), rows, C);
  return result;
}

TEST(Fp8Rows, TheLargestOfARowBecomesTheLargestCode) {
  for (const float size : {1.0f, 3.7e-5f, 0.3f, 900.0f, 1e30f, 1e-30f}) {
    Floats x = random_floats(3 * 50, 1);
    for (float& value : x) value *= size;
    x[50 + 7] = -9 * size;
    const Rows got = quantized(x, 3);
    EXPECT_EQ(got.values[50 + 7], -448) << size;
    EXPECT_EQ(got.scales[1], 9 * size / 448);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float scale = got.scales[i / 50];
      // Half of an eighth of a power of two, or half of the least code.
      ASSERT_LE(std::abs(got.values[i] * scale - x[i]), std::max(std::abs(x[i]) / 15.9f, scale * 0x1.01p-10f)) << i;
      ASSERT_EQ(got.values[i], fp8_to_f32(f32_to_fp8(x[i] / scale, Fp8Format::e4m3), Fp8Format::e4m3)) << i;
    }
  }
}

TEST(Fp8Rows, ARowOfZerosOrOfNearlyZerosHasTheScaleOne) {
  EXPECT_EQ(fp8_row_scale(0), 1);
  EXPECT_EQ(fp8_row_scale(448 * 0x1p-126f), 0x1p-126f);
  EXPECT_EQ(fp8_row_scale(std::nextafter(448 * 0x1p-126f, 0.0f)), 1);
  EXPECT_EQ(fp8_row_scale(std::numeric_limits<float>::max()), std::numeric_limits<float>::max() / 448);
  const Rows got = quantized({0, -0.0f, 0, 1e-40f, -1e-40f, 1e-42f}, 2);
  EXPECT_EQ(got.scales, (Floats{1, 1}));
  EXPECT_EQ(got.values, (Floats{0, 0, 0, 0, 0, 0}));
}

TEST(Fp8Rows, WhatIsNotFiniteStaysSo) {
  const float infinity = std::numeric_limits<float>::infinity();
  const Rows got = quantized({1, infinity, 1, NAN, 1, 448}, 3);
  EXPECT_TRUE(std::isnan(got.values[1]) && std::isnan(got.values[3]));
  EXPECT_EQ(got.values[4], 1) << "another row";
  EXPECT_EQ(got.scales[2], 1);
}

// Against sums in double of what the codes stand for, and a row's bits whatever the others.
TEST(Fp8Rows, LinearLayersMultiplyCodes) {
  for (const auto& [C, OC] : {std::pair<std::int64_t, std::int64_t>{16, 5}, {144, 50}, {3008, 61}}) {
    constexpr std::int64_t kRows = 13;
    const RandomMatrix matrix(DType::e4m3, OC, C, 7);
    Floats x = random_floats(kRows * C, 1);
    for (std::int64_t n = 0; n < kRows; ++n) {
      for (std::int64_t c = 0; c < C; ++c)
        x[static_cast<std::size_t>(n * C + c)] *= std::ldexp(1.0f, static_cast<int>(n) - 6);
    }
    const Floats bias = random_floats(OC, 2), before = random_floats(kRows * OC, 3);
    const Rows rows = quantized(x, kRows);
    for (const cpu::Accumulate how : {cpu::Accumulate::no, cpu::Accumulate::yes}) {
      Floats all = before, alone = before;
      cpu::matmul_rows_forward(all.data(), rows.values.data(), {nullptr, matrix.view()}, bias.data(), kRows, C, OC, how,
                               rows.scales.data());
      for (std::int64_t n = 0; n < kRows; ++n) {
        const Floats row(x.begin() + n * C, x.begin() + (n + 1) * C);
        const Rows one = quantized(row, 1);
        cpu::matmul_rows_forward(alone.data() + n * OC, one.values.data(), {nullptr, matrix.view()}, bias.data(), 1, C,
                                 OC, how, one.scales.data());
        for (std::int64_t o = 0; o < OC; ++o) {
          const auto at = static_cast<std::size_t>(n * OC + o);
          double sum = bias[static_cast<std::size_t>(o)], size = 1;
          for (std::int64_t c = 0; c < C; ++c) {
            const double part = static_cast<double>(rows.values[static_cast<std::size_t>(n * C + c)]) *
                                rows.scales[static_cast<std::size_t>(n)] * matrix.weight(o, c);
            sum += part;
            size += std::abs(part);
          }
          if (how == cpu::Accumulate::yes) sum += before[at];
          ASSERT_NEAR(all[at], sum, 1e-5 * size) << "row " << n << ", output " << o;
        }
      }
      EXPECT_EQ(all, alone);
    }
  }
}

InferenceOptions pool() {
  return {.num_pages = 60, .page_size = 16, .slots = 3, .max_rows = 64, .max_positions = 48};
}

// A golden model of each family: a sequence has its bits whatever else runs; logits differ from those of activations that are not
// rounded. By how much a model of random weights does not tell; test_quantisation.py has trained ones.
TEST(Fp8Rows, ModelsComputeWithCodes) {
  const TemporaryDirectory directory;
  const std::string packed = directory.file("packed.bin"), plain = directory.file("plain.bin");
  std::set<std::string> families;
  for (const GoldenCase& golden : golden_cases()) {
    if (!families.insert(golden.family).second) continue;
    SCOPED_TRACE(golden.name);
    test::write_quantized_pair(ModelFile::open(golden.model), {&kFp8, nullptr}, packed, plain);
    const ModelFile file = ModelFile::open(packed);
    const auto rounded = cpu::load_inference(file, pool(), DType::f32, true), exact = cpu::load_inference(file, pool());
    EXPECT_GT(total_bytes(rounded->memory()), total_bytes(exact->memory())) << "codes are not in the plan";
    const std::vector<test::Sequence> all = test::random_sequences(rounded->config(), 3, 30);
    const std::vector<test::Trace> got = test::run(*rounded, all, 5, true, 4),
                                   other = test::run(*exact, all, 5, true, 4);
    for (std::size_t s = 0; s < all.size(); ++s) {
      EXPECT_EQ(test::run(*rounded, {all[s]}, 64, false, 1)[0], got[s]);
      double difference = 0, size = 0;
      for (std::size_t i = 0; i < got[s].logits[0].size(); ++i) {
        const double a = got[s].logits[0][i], b = other[s].logits[0][i];
        difference += (a - b) * (a - b);
        size += b * b;
      }
      EXPECT_GT(std::sqrt(difference / size), 1e-3) << "nothing was rounded";
      EXPECT_LT(std::sqrt(difference / size), 1);
    }
    error_of(Exit::usage, [&] { cpu::load_inference(ModelFile::open(plain), pool(), DType::f32, true); });
  }
}

TEST(Fp8Rows, AreForWeightsInFp8Alone) {
  EXPECT_EQ(fp8_activations_unsupported_reason({&kFp8, nullptr}, false), "");
  EXPECT_EQ(fp8_activations_unsupported_reason({&kFp8, &kInt8}, false), "");
  EXPECT_EQ(fp8_activations_unsupported_reason({&kFp8, nullptr}, true), "not with an adapter beside quantised weights");
  EXPECT_EQ(fp8_activations_unsupported_reason({}, false),
            "the model's weights are floats, expected fp8 (convert_hf.py --quantize fp8)");
  EXPECT_EQ(fp8_activations_unsupported_reason({&kInt8, nullptr}, false),
            "the model's weights are int8, expected fp8 (convert_hf.py --quantize fp8)");
  InferSettings settings;
  settings.device = "cpu";
  settings.activations = "fp8";
  DecodeDevice device(settings);
  ModelConfig config = preset_config("tiny");
  EXPECT_EQ(error_of(Exit::usage, [&] { device.choose(config, DType::bf16); }),
            "--activations fp8: the model's weights are floats, expected fp8 (convert_hf.py --quantize fp8). Use "
            "--activations auto");
  config.quantization.weights = &kFp8;
  EXPECT_NO_THROW(device.choose(config, DType::bf16));
}

}  // namespace
}  // namespace weft
