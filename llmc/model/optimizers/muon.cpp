#include "llmc/model/optimizers/muon.h"

#include "llmc/model/optimizer.h"

namespace weft {

namespace {

constexpr const char* kStates[] = {"momentum"};

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
  return {adamw.learning_rate, momentum, adamw.weight_decay, adamw.gradient_scale};
}

const Optimizer& muon_optimizer() {
  static const Muon optimizer;
  return optimizer;
}

}  // namespace weft
