#include "llmc/model/optimizers/muon.h"

#include <algorithm>
#include <cmath>

#include "llmc/model/optimizer.h"

namespace weft {

namespace {

constexpr const char* kStates[] = {"momentum"};
constexpr float kAdamRms = 0.2f;  // of AdamW's updates (Liu et al., 2025)

class Muon final : public Optimizer {
 public:
  const char* name() const override { return "muon"; }
  const char* state_name() const override { return "momentum, AdamW moments"; }
  std::span<const char* const> state_tensors(const TensorSpec& spec) const override {
    return spec.hidden_matrix ? std::span<const char* const>(kStates) : adamw_optimizer().state_tensors(spec);
  }
  bool needs_whole(const TensorSpec& spec) const override { return spec.hidden_matrix; }
};

}  // namespace

MuonStep muon_step(const AdamWStep& adamw, float momentum) {
  return {adamw.learning_rate, momentum, adamw.weight_decay, adamw.gradient_scale, adamw.step};
}

float muon_step_size(const MuonStep& step, std::int64_t rows, std::int64_t columns) {
  const float scale = kAdamRms * std::sqrt(static_cast<float>(std::max(rows, columns)));
  return step.learning_rate * scale;
}

const Optimizer& muon_optimizer() {
  static const Muon optimizer;
  return optimizer;
}

}  // namespace weft
