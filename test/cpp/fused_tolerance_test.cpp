// The tolerance of the persistent kernel's tests with quantised weights (quantized_models.h), on the CPU: noise of the size that
// it is derived from stays below it, and bugs of the kernel in a single matrix lie above. A bug that reads wrong
// weights is a model whose file has these weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>

#include "llmc/cpu/inference.h"
#include "test/cpp/quantized_models.h"
#include "test/cpp/test_files.h"
#include "test/gpu/neox_models.h"

namespace weft {
namespace {

constexpr int kSteps = 5, kTileRows = 8;

DType cache_of(const ModelConfig& config) {
  return config.parallel_residual ? DType::f16 : DType::bf16;
}

// `wrong`: a position that has another id.
std::vector<std::vector<float>> logits_of(const ModelConfig& config, DType cache,
                                          const test::QuantizedEdits& edits = {}, int steps = kSteps, int wrong = -1) {
  const TemporaryDirectory directory(memory_files());
  const std::string path = directory.file("model.bin");
  test::write_random_quantized_model(path, config, 1, edits);
  const auto model = cpu::load_decoder(ModelFile::open(path), steps, cache);
  std::vector<std::vector<float>> logits;
  for (int i = 0; i < steps; ++i) {
    const int id = (i == wrong ? steps : i) * 7919 + 13;
    const std::span<const float> row = model->decode(static_cast<std::int32_t>(id % config.vocab_size));
    logits.emplace_back(row.begin(), row.end());
  }
  return logits;
}

// As a share of what is allowed, in the worst step from `first` on.
double share(const std::vector<std::vector<float>>& got, const std::vector<std::vector<float>>& want, DType cache,
             std::size_t first = 0) {
  double worst = 0;
  for (std::size_t i = first; i < want.size(); ++i) worst = std::max(worst, test::logits_error(got[i], want[i]));
  return worst / test::cached_logits_tolerance(cache);
}

std::vector<test::NamedConfig> models() {
  return {{"parallel", test::neox_config({"", 11, 64, 3, 2816, true, true, 1003})},
          {"parallel, narrow", test::neox_config({"", 2, 80, 2, 640, true, true, 307})},
          {"sequential", test::neox_config({"", 4, 32, 2, 264, false})},
          {"grouped queries", test::llama_config({"", 8, 2, 128, 2, 320, 640, false, true})},
          {"tied", test::llama_config({"", 4, 2, 64, 3, 256, 520, true})},
          {"narrow", test::llama_config({"", 6, 2, 32, 2, 72, 200, false, false, 1003})}};
}

// Every norm and the embedding a little off, each element by another amount: what all matrices read differs as after sums in
// another order.
test::QuantizedEdits noise(unsigned seed = 3) {
  auto random = std::make_shared<std::mt19937>(seed);
  return {nullptr, [random](std::vector<float>& values) {
            for (float& value : values) value *= 1 + 0x1p-19f * (static_cast<float>((*random)()) * 0x1p-31f - 1);
          }};
}

// The codes of a matrix, by row and column.
int code(const test::RandomMatrix& m, std::int64_t n, std::int64_t k) {
  const auto at = static_cast<std::size_t>(n * m.K + k);
  return m.dtype == DType::u4 ? m.q[at / 2] >> (at % 2 * 4) & 15 : m.q[at];
}
void set_code(test::RandomMatrix& m, std::int64_t n, std::int64_t k, int to) {
  const auto at = static_cast<std::size_t>(n * m.K + k);
  if (m.dtype == DType::u4) {
    m.q[at / 2] = static_cast<std::uint8_t>((m.q[at / 2] & (at % 2 == 0 ? 0xf0 : 0x0f)) | to << (at % 2 * 4));
  } else {
    m.q[at] = static_cast<std::uint8_t>(to);
  }
}

struct Bug {
  const char* name;
  void (*plant)(test::RandomMatrix& m, std::int64_t n,
                std::int64_t k);  // for row n and the columns of the group from k on
};
std::int64_t group_end(const test::RandomMatrix& m, std::int64_t k) {
  return std::min(m.K, k + kQuantGroup);
}
std::size_t group_index(const test::RandomMatrix& m, std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(n * ((m.K + kQuantGroup - 1) / kQuantGroup) + k / kQuantGroup);
}
constexpr Bug kBugs[] = {
    {"scales of the next row",
     [](test::RandomMatrix& m, std::int64_t n, std::int64_t k) {
       if (m.dtype == DType::u4) {
         m.group_scales[group_index(m, n, k)] = m.group_scales[group_index(m, n + 1, k)];
       } else {
         m.row_scales[static_cast<std::size_t>(n)] = m.row_scales[static_cast<std::size_t>(n + 1)];
       }
     }},
    {"zeros of the next group",
     [](test::RandomMatrix& m, std::int64_t n, std::int64_t k) {
       if (m.dtype == DType::u4) m.zeros[group_index(m, n, k)] = m.zeros[group_index(m, n, k) + 1];
     }},
    {"K off by a tile",
     [](test::RandomMatrix& m, std::int64_t n, std::int64_t k) {
       for (; k + 32 < group_end(m, k / kQuantGroup * kQuantGroup); ++k) set_code(m, n, k, code(m, n, k + 32));
     }},
    {"a stale half",  // the second 16 of 32 columns are still those of the rows before
     [](test::RandomMatrix& m, std::int64_t n, std::int64_t k) {
       for (const std::int64_t end = group_end(m, k); k < end; ++k) {
         if (k % 32 >= 16) set_code(m, n, k, code(m, n + kTileRows, k));
       }
     }},
};

// In a tile of every eight, as if one warp of eight were wrong, and in a single group of its rows.
test::QuantizedEdits planted(const Bug& bug, const std::string& tensor) {
  return {[&bug, tensor](const std::string& name, test::RandomMatrix& m) {
            if (name != tensor) return;
            for (std::int64_t first = 0; first + 2 * kTileRows <= m.N; first += 8 * kTileRows) {
              for (std::int64_t n = first; n < first + kTileRows; ++n) bug.plant(m, n, 0);
            }
          },
          nullptr};
}

TEST(FusedTolerance, NoiseOfSumsLiesBelow) {
  for (const test::NamedConfig& model : models()) {
    for (const WeightFormat* scheme : kWeightFormats) {
      const ModelConfig config = test::quantized(model.config, scheme, true);
      const DType cache = cache_of(config);
      SCOPED_TRACE(model.name + ", " + scheme->name);
      const auto want = logits_of(config, cache);
      const double off = share(logits_of(config, cache, noise()), want, cache);
      EXPECT_LT(off, 1);
      EXPECT_GT(share(logits_of(config, DType::f32), want, cache), 2 * off) << "keys and values are not rounded";
    }
  }
}

// FusedQuantized.MatchesTheCpuOverPagesAndSplits on the CPU: other noise, and keys and values of one position that are wrong.
TEST(FusedTolerance, OneWrongPositionOfManyLiesAbove) {
  constexpr int kMany = 210, kFirst = 60;
  for (const WeightFormat* scheme : kWeightFormats) {
    SCOPED_TRACE(scheme->name);
    const ModelConfig config = test::quantized(test::neox_config({"", 2, 80, 2, 640, true, true, 307}), scheme, false);
    const DType cache = cache_of(config);
    const auto want = logits_of(config, cache, {}, kMany);
    for (const unsigned seed : {1u, 2u, 4u}) {
      EXPECT_LT(share(logits_of(config, cache, noise(seed), kMany), want, cache, kFirst), test::kManyPositions);
    }
    for (const int wrong : {3, 63, 64, 100, 128, 150}) {
      const auto first = static_cast<std::size_t>(std::max(kFirst, wrong + 1));
      EXPECT_GT(share(logits_of(config, cache, {}, kMany, wrong), want, cache, first), 4 * test::kManyPositions)
          << "position " << wrong;
    }
  }
}

// In the last layer: later layers would amplify the error.
TEST(FusedTolerance, BugsOfOneWarpLieAbove) {
  for (const std::size_t which : {2u, 0u, 3u}) {
    const test::NamedConfig model = models()[which];
    for (const WeightFormat* scheme : kWeightFormats) {
      const ModelConfig config = test::quantized(model.config, scheme, true);
      const DType cache = cache_of(config);
      const TensorTable table(config);
      const std::string last_layer = "layers." + std::to_string(config.num_layers - 1) + ".";
      const auto want = logits_of(config, cache);
      double least = INFINITY;
      for (const TensorSpec& spec : table.specs()) {
        if (spec.kind != ValueKind::quants || spec.name.find(last_layer) == std::string::npos) continue;
        for (const Bug& bug : kBugs) {
          const bool of_zeros = &bug == &kBugs[1];
          if (of_zeros && (scheme != &kInt4 || spec.shape[1] <= kQuantGroup)) continue;
          const double off = share(logits_of(config, cache, planted(bug, spec.name)), want, cache);
          EXPECT_GT(off, 1) << model.name << ", " << scheme->name << ", " << bug.name << " in " << spec.name;
          least = std::min(least, off);
        }
      }
      char text[32];
      std::snprintf(text, sizeof text, "%.2f", least);
      RecordProperty("metric_" + std::string(scheme->name) + "_" + std::to_string(which), text);
    }
  }
}

}  // namespace
}  // namespace weft
