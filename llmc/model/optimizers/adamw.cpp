#include "llmc/model/optimizers/adamw.h"

#include "llmc/model/optimizer.h"

namespace weft {

namespace {

constexpr const char* kStates[] = {"moment1", "moment2"};

class AdamW final : public Optimizer {
 public:
  const char* name() const override { return "adamw"; }
  const char* state_name() const override { return "AdamW moments"; }
  std::span<const char* const> state_tensors(const TensorSpec& /*spec*/) const override { return kStates; }
};

}  // namespace

const Optimizer& adamw_optimizer() {
  static const AdamW optimizer;
  return optimizer;
}

}  // namespace weft
