#include "llmc/model/train_model.h"

namespace weft {

namespace {

MemoryPlan copy_plan(const TensorTable& table) {
  MemoryPlan plan("copy of the training state");
  plan.add(state_copy_bytes(table));
  return plan;
}

class HostStateCopy final : public StateCopy {
 public:
  explicit HostStateCopy(TrainModel& model) : model_(model), arena_(copy_plan(model.table())) {
    arena_.clear();  // touches every page now, so that the first take() need not
  }

  void take() override {
    for (const TensorRole role : kStateRoles) {
      for (const TensorSpec& spec : model_.table().specs()) model_.read_tensor(role, spec, at(role, spec));
    }
  }
  const float* read(TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t /*count*/,
                    float* /*buffer*/) const override {
    return at(role, spec) + first;
  }

 private:
  float* at(TensorRole role, const TensorSpec& spec) const {
    const std::int64_t part = role == TensorRole::parameter ? 0 : role == TensorRole::moment1 ? 1 : 2;
    return arena_.at<float>(0) + part * model_.table().arena_elements() + spec.offset;
  }

  TrainModel& model_;
  HostArena arena_;
};

}  // namespace

std::unique_ptr<StateCopy> TrainModel::make_state_copy() {
  return std::make_unique<HostStateCopy>(*this);
}

}  // namespace weft
