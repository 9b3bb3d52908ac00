// p = softmax(logits) with the row's maximum subtracted;  loss = -log p[label];  d loss / d logits = p -
// onehot(label).
//
// A row is read three times (maximum, sum, gradient). The sum runs in fp32 within blocks of kSumBlock logits and in
// double over the blocks, so that V = 128,256 loses no more digits than V = 1,000.

#include "llmc/cpu/classifier.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "llmc/cpu/exp.h"
#include "llmc/model/train_model.h"

namespace weft::cpu {

namespace {

constexpr std::int64_t kSumBlock = 1024;

// Ignores NaN logits: the sum becomes NaN through them.
float row_maximum(const float* row, std::int64_t V) {
  float maximum = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : maximum)
  for (std::int64_t v = 0; v < V; ++v) maximum = row[v] > maximum ? row[v] : maximum;
  return maximum;
}

double sum_of_exponentials(const float* row, std::int64_t V, float maximum) {
  double sum = 0;
  for (std::int64_t first = 0; first < V; first += kSumBlock) {
    const std::int64_t count = std::min(kSumBlock, V - first);
    float block[kSumBlock];
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) block[i] = exp_f32(row[first + i] - maximum);
    sum += sum_of(block, count);
  }
  return sum;
}

}  // namespace

float LogSoftmax::loss(float logit) const {
  return static_cast<float>(std::log(sum) + (static_cast<double>(maximum) - logit));
}

LogSoftmax log_softmax(const float* row, std::int64_t V) {
  const float maximum = row_maximum(row, V);
  return {maximum, sum_of_exponentials(row, V, maximum)};
}

void classifier(float* logits, float* losses, const std::int32_t* labels, std::int64_t N, std::int64_t V,
                float loss_scale, bool write_gradient, const float* weights) {
#pragma omp parallel for schedule(static)
  for (std::int64_t n = 0; n < N; ++n) {
    float* row = logits + n * V;
    if (labels[n] == kIgnoredLabel) {
      losses[n] = 0;
      if (write_gradient) std::fill(row, row + V, 0.0f);
      continue;
    }
    const LogSoftmax softmax = log_softmax(row, V);
    losses[n] = softmax.loss(row[labels[n]]);
    if (!write_gradient) continue;
    const float row_scale = weights != nullptr ? weights[n] * loss_scale : loss_scale;
    const float scale = static_cast<float>(row_scale / softmax.sum);
#pragma omp simd
    for (std::int64_t v = 0; v < V; ++v) row[v] = exp_f32(row[v] - softmax.maximum) * scale;
    row[labels[n]] -= row_scale;
  }
}

}  // namespace weft::cpu
