// Muon (Jordan et al., 2024; https://kellerjordan.github.io/posts/muon): the update of a matrix of the blocks is its momentum,
// orthogonalised. Embedding, head, norms and biases are updated by AdamW.
//
// The update is scaled by 0.2 sqrt(max(rows, columns)), which gives it the root mean square of AdamW's updates, so that one
// learning rate and one weight decay serve both (Liu et al., 2025, section 2.2; https://arxiv.org/abs/2502.16982).
#pragma once

#include <cstdint>

namespace weft {

class Optimizer;
struct AdamWStep;

inline constexpr float kMuonMomentum = 0.95f;

// An iteration of Newton-Schulz replaces each singular value s by kMuonA s + kMuonB s^3 + kMuonC s^5.
inline constexpr int kMuonIterations = 5;
inline constexpr float kMuonA = 3.4445f, kMuonB = -4.7750f, kMuonC = 2.0315f;

struct MuonStep {
  float learning_rate = 0, momentum = kMuonMomentum, weight_decay = 0;
  float gradient_scale = 1;  // the clip factor; multiplies every gradient
  std::int64_t step = 1;     // 1 for the first update: addresses the random bits that round a momentum in bf16
};
// AdamW's learning rate, weight decay, clip factor and number.
MuonStep muon_step(const AdamWStep& adamw, float momentum = kMuonMomentum);

// What multiplies the orthogonalised momentum of a matrix in its update: the learning rate and the scale above.
float muon_step_size(const MuonStep& step, std::int64_t rows, std::int64_t columns);
// What a parameter is multiplied by before: 1 for a tensor that does not decay.
inline float muon_keep(const MuonStep& step, bool decay) {
  return decay ? 1.0f - step.learning_rate * step.weight_decay : 1.0f;
}

const Optimizer& muon_optimizer();

}  // namespace weft
