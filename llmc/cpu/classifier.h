// Softmax + cross-entropy, forward and backward in one pass over the logits.
#pragma once

#include <cstdint>

namespace weft::cpu {

// What the log-probabilities of a row have in common.
struct LogSoftmax {
  float maximum = 0;
  double sum = 0;  // of e^(logit - maximum)

  // -log softmax of one of the row's logits.
  float loss(float logit) const;
};
LogSoftmax log_softmax(const float* row, std::int64_t V);

// For each row n of logits [N, V]: losses[n] = -log softmax(logits[n])[labels[n]], 0 where labels[n] is kIgnoredLabel.
// With write_gradient the logits become loss_scale * d(sum of losses)/d(logits), zero in ignored rows. `weights` [N]: the
// loss of row n counts weights[n] times in that sum; null: once.
// A NaN logit makes its row's loss and gradient NaN; an ignored row's logits are not read.
// Labels are kIgnoredLabel or in [0, V): the caller has checked.
void classifier(float* logits, float* losses, const std::int32_t* labels, std::int64_t N, std::int64_t V,
                float loss_scale, bool write_gradient, const float* weights = nullptr);

}  // namespace weft::cpu
