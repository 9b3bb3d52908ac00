// What norms of rows and norms of heads compute alike, of one row of C values: its statistics and the gradient through them.
// LayerNorm (Ba et al., 2016) or RMSNorm (Zhang and Sennrich, 2019), whose mean is taken for 0.
#pragma once

#include <cmath>
#include <cstdint>

#include "llmc/cpu/lanes.h"
#include "llmc/model/config.h"

namespace weft::cpu {

struct NormStatistics {
  float mean, rstd;
};

// In double, and the variance in a second pass: E[h^2] - E[h]^2 cancels where the mean is large.
inline NormStatistics norm_statistics(const float* h, std::int64_t C, NormKind kind, float eps) {
  double mean = 0;
  if (kind == NormKind::layernorm) {
    mean = sum_in_double(C, [h](const auto& load) { return load(h); }) / static_cast<double>(C);
  }
  const double squares = sum_in_double(C, [h, mean](const auto& load) {
    const auto deviation = load(h) - mean;
    return deviation * deviation;
  });
  const double variance = squares / static_cast<double>(C);
  return {static_cast<float>(mean), static_cast<float>(1.0 / std::sqrt(variance + eps))};
}

// g, the gradient of xhat = (h - mean) rstd, becomes that of h:  rstd (g - [mean(g)] - xhat mean(g xhat)), [] for LayerNorm only.
inline void norm_gradient(float* g, const float* xhat, float rstd, std::int64_t C, NormKind kind) {
  const auto mean_of = [C](const auto& term) {
    return static_cast<float>(sum_in_double(C, term) / static_cast<double>(C));
  };
  const float mean_g = kind == NormKind::layernorm ? mean_of([g](const auto& load) { return load(g); }) : 0.0f;
  const float mean_gx = mean_of([g, xhat](const auto& load) { return load(g) * load(xhat); });
#pragma omp simd
  for (std::int64_t c = 0; c < C; ++c) g[c] = rstd * (g[c] - mean_g - xhat[c] * mean_gx);
}

}  // namespace weft::cpu
