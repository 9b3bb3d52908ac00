#include "llmc/model/train_model.h"

#include <utility>

namespace weft {

namespace {

using Read = std::function<void(TensorRole, std::size_t range, float* values)>;

MemoryPlan copy_plan(const PackedRanges& elements) {
  MemoryPlan plan("copy of the training state");
  plan.add(state_copy_bytes(elements.size()));
  return plan;
}

class HostStateCopy final : public StateCopy {
 public:
  HostStateCopy(std::vector<Range> ranges, Read read)
      : elements_(std::move(ranges)), read_(std::move(read)), arena_(copy_plan(elements_)) {
    arena_.clear();  // touches every page now, so that the first take() need not
  }

  void take() override {
    for (const TensorRole role : kStateRoles) {
      for (std::size_t i = 0; i < elements_.ranges().size(); ++i) read_(role, i, at(role, elements_.begin_of(i)));
    }
  }
  const float* read(TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t /*count*/,
                    float* /*buffer*/) const override {
    return at(role, elements_.position_of(spec.offset + static_cast<std::int64_t>(first)));
  }

 private:
  float* at(TensorRole role, std::int64_t position) const {
    const std::int64_t part = role == TensorRole::parameter ? 0 : role == TensorRole::moment1 ? 1 : 2;
    return arena_.at<float>(0) + part * elements_.size() + position;
  }

  const PackedRanges elements_;
  const Read read_;
  HostArena arena_;
};

}  // namespace

std::unique_ptr<StateCopy> make_host_copy(std::vector<Range> ranges, Read read) {
  return std::make_unique<HostStateCopy>(std::move(ranges), std::move(read));
}

std::unique_ptr<StateCopy> TrainModel::make_state_copy() {
  std::vector<Range> tensors;
  for (const TensorSpec& spec : table().specs()) tensors.push_back({spec.offset, spec.offset + spec.elements});
  return make_host_copy(std::move(tensors), [this](TensorRole role, std::size_t i, float* values) {
    read_tensor(role, table().specs()[i], values);
  });
}

}  // namespace weft
