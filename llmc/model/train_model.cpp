#include "llmc/model/train_model.h"

#include <algorithm>
#include <utility>

namespace weft {

TensorTable trained_table(const ModelConfig& config, const TrainOptions& options, DType storage) {
  return options.lora ? TensorTable(config, *options.lora, storage) : TensorTable(config, storage);
}

void check_adapter(const ModelConfig& config, const TrainOptions& options) {
  if (!options.lora) return;
  const std::string reason = lora_unsupported_reason(*options.lora, config);
  if (!reason.empty()) fail(Exit::usage, "--lora-r: %s", reason.c_str());
}

namespace {

using Read = std::function<void(TensorRole, const Range&, float* values)>;

std::uint64_t bytes_of(const std::vector<RoleRanges>& of_roles) {
  std::uint64_t elements = 0;
  for (const RoleRanges& each : of_roles) {
    for (const Range& range : each.ranges) elements += static_cast<std::uint64_t>(range.size());
  }
  return sizeof(float) * elements;
}

MemoryPlan copy_plan(const std::vector<RoleRanges>& of_roles) {
  MemoryPlan plan("copy of the training state");
  plan.add(bytes_of(of_roles));
  return plan;
}

class HostStateCopy final : public StateCopy {
 public:
  HostStateCopy(const std::vector<RoleRanges>& of_roles, Read read)
      : read_(std::move(read)), arena_(copy_plan(of_roles)) {
    arena_.clear();  // touches every page now, so that the first take() need not
    std::int64_t begin = 0;
    for (const RoleRanges& each : of_roles) {
      parts_.push_back({each.role, begin, PackedRanges(each.ranges)});
      begin += parts_.back().elements.size();
    }
  }

  void take() override {
    for (const Part& part : parts_) {
      const std::vector<Range>& ranges = part.elements.ranges();
      for (std::size_t i = 0; i < ranges.size(); ++i) read_(part.role, ranges[i], at(part, part.elements.begin_of(i)));
    }
  }
  const float* read(TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t /*count*/,
                    float* /*buffer*/) const override {
    for (const Part& part : parts_) {
      if (part.role != role) continue;
      return at(part, part.elements.position_of(spec.offset + static_cast<std::int64_t>(first)));
    }
    fail(Exit::internal, "a copy of the state without a tensor of %s", escaped(spec.name).c_str());
  }

 private:
  struct Part {
    TensorRole role;
    std::int64_t begin;  // in the copy
    PackedRanges elements;
  };
  float* at(const Part& part, std::int64_t position) const { return arena_.at<float>(0) + part.begin + position; }

  const Read read_;
  HostArena arena_;
  std::vector<Part> parts_;
};

}  // namespace

std::uint64_t state_copy_bytes(const Optimizer& optimizer, const TensorTable& table) {
  return bytes_of(state_ranges(optimizer, table, {0, table.arena_elements()}));
}

std::unique_ptr<StateCopy> make_host_copy(const std::vector<RoleRanges>& of_roles, Read read) {
  return std::make_unique<HostStateCopy>(of_roles, std::move(read));
}

std::unique_ptr<StateCopy> TrainModel::make_state_copy() {
  std::vector<RoleRanges> of_roles;
  for (const StateTensor& tensor : state_tensors(optimizer(), table())) {
    if (of_roles.empty() || of_roles.back().role != tensor.role) of_roles.push_back({tensor.role, {}});
    const TensorSpec& spec = table().specs()[tensor.spec];
    of_roles.back().ranges.push_back(elements_of(spec));
  }
  return make_host_copy(of_roles, [this](TensorRole role, const Range& range, float* values) {
    const auto specs = table().specs();
    const auto spec =
        std::find_if(specs.begin(), specs.end(), [&](const TensorSpec& s) { return s.offset == range.begin; });
    read_tensor(role, *spec, values);
  });
}

}  // namespace weft
