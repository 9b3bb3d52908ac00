// Muon (Jordan et al., 2024; https://kellerjordan.github.io/posts/muon): the update of a matrix of the blocks is its momentum,
// orthogonalised. Embedding, head, norms and biases are updated by AdamW.
//
// The update is scaled by 0.2 sqrt(max(rows, columns)), which gives it the root mean square of AdamW's updates, so that one
// learning rate and one weight decay serve both (Liu et al., 2025, section 2.2; https://arxiv.org/abs/2502.16982).
#pragma once

namespace weft {

class Optimizer;
struct AdamWStep;

inline constexpr float kMuonMomentum = 0.95f;

struct MuonStep {
  float learning_rate = 0, momentum = kMuonMomentum, weight_decay = 0;
  float gradient_scale = 1;  // the clip factor; multiplies every gradient
};
// AdamW's learning rate, weight decay and clip factor.
MuonStep muon_step(const AdamWStep& adamw, float momentum = kMuonMomentum);

const Optimizer& muon_optimizer();

}  // namespace weft
