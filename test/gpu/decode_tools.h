// What tests of models on the GPU compare: logits of a storage type with others, ids with those of the host's sampler.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/base/sampler.h"
#include "llmc/infer/generate.h"
#include "llmc/model/compare.h"
#include "llmc/model/decode_model.h"

namespace weft::test {

constexpr double kFp32Tolerance = 1e-4;

// What a storage type costs the logits, in the 2-norm: each of the few stored tensors of a layer is rounded to 2^-11 or
// 2^-8 of itself. A wrong operator costs tens of percent.
inline double tolerance_of(DType dtype) {
  return dtype == DType::f32 ? kFp32Tolerance : dtype == DType::f16 ? 4e-3 : 3e-2;
}

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

inline void expect_close(const std::string& what, std::span<const float> got, std::span<const float> want,
                         DType dtype) {
  const TensorDistance row = distance(what, got, want, tolerance_of(dtype), dtype == DType::f32 ? Norm::max : Norm::l2);
  EXPECT_TRUE(row.pass) << what << " in " << dtype_name(dtype) << ": " << row.relative;
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", row.relative / tolerance_of(dtype));
  testing::Test::RecordProperty("metric_" + std::string(dtype_name(dtype)) + "_of_allowed", text);
}

// The ids that the host's sampler picks from the model's own logits.
inline std::vector<std::int32_t> host_sampled(DecodeModel& model, std::span<const std::int32_t> prompt,
                                              const GenerateOptions& options) {
  Sampler sampler(options.sampler);
  model.reset();
  std::span<const float> logits = model.prefill(prompt);
  std::vector<std::int32_t> ids;
  while (true) {
    ids.push_back(sampler.sample(logits, model.length()));
    if (static_cast<std::int64_t>(ids.size()) == options.max_tokens) return ids;
    logits = model.decode(ids.back());
  }
}

// How many of the ids that a model with `sampler`, which takes the likeliest, has generated after `prompt` are those of the CPU in
// fp32. Another one may stand where the two greatest logits are closer than fp16's rounding.
inline int equal_greedy_ids(DecodeModel& cpu, std::span<const std::int32_t> prompt, const SamplerOptions& sampler,
                            std::span<const std::int32_t> ids) {
  Sampler host(sampler);
  int equal = 0;
  std::span<const float> logits = cpu.prefill(prompt);
  for (const std::int32_t id : ids) {
    const std::int32_t best = host.sample(logits, 0);
    const auto logit = [&](std::int32_t of) { return logits[static_cast<std::size_t>(of)]; };
    const float largest = std::max(std::abs(*std::max_element(logits.begin(), logits.end())), 1.0f);
    if (id == best) {
      ++equal;
    } else {
      EXPECT_LT(logit(best) - logit(id), 4e-3f * largest) << "after " << equal << " equal ids";
    }
    logits = cpu.decode(id);
  }
  return equal;
}

}  // namespace weft::test
