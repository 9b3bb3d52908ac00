#include "llmc/model/optimizer.h"

#include <algorithm>

namespace weft {

namespace {

// The number of a state tensor among those of its parameter.
std::size_t state_index(TensorRole role) {
  return static_cast<std::size_t>(role) - static_cast<std::size_t>(TensorRole::state1);
}

const std::vector<const Optimizer*>& optimizers() {
  static const std::vector<const Optimizer*> all = {&adamw_optimizer(), &muon_optimizer()};
  return all;
}

}  // namespace

const std::vector<std::string>& optimizer_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const Optimizer* optimizer : optimizers()) result.emplace_back(optimizer->name());
    return result;
  }();
  return names;
}

const Optimizer* find_optimizer(std::string_view name) {
  const auto found = std::find_if(optimizers().begin(), optimizers().end(),
                                  [&](const Optimizer* optimizer) { return optimizer->name() == name; });
  return found == optimizers().end() ? nullptr : *found;
}

bool has_tensor(const Optimizer& optimizer, TensorRole role, const TensorSpec& spec) {
  return role == TensorRole::parameter || role == TensorRole::gradient ||
         state_index(role) < optimizer.state_tensors(spec).size();
}

std::vector<StateTensor> state_tensors(const Optimizer& optimizer, const TensorTable& table) {
  std::vector<StateTensor> tensors;
  for (const TensorRole role : kStateRoles) {
    for (std::size_t s = 0; s < table.specs().size(); ++s) {
      if (has_tensor(optimizer, role, table.specs()[s])) tensors.push_back({role, s});
    }
  }
  return tensors;
}

std::string state_tensor_name(const Optimizer& optimizer, TensorRole role, const TensorSpec& spec) {
  if (role == TensorRole::parameter) return spec.name;
  return std::string(optimizer.state_tensors(spec)[state_index(role)]) + "." + spec.name;
}

std::vector<Range> state_ranges(const Optimizer& optimizer, const TensorTable& table, TensorRole role,
                                const Range& within) {
  std::vector<Range> ranges;
  const auto specs = table.specs();
  for (std::size_t s = 0; s < specs.size(); ++s) {
    if (!has_tensor(optimizer, role, specs[s])) continue;
    const std::int64_t end = s + 1 < specs.size() ? specs[s + 1].offset : table.arena_elements();
    const Range range = common({specs[s].offset, end}, within);
    if (range.size() == 0) continue;
    if (!ranges.empty() && ranges.back().end == range.begin) {
      ranges.back().end = range.end;
    } else {
      ranges.push_back(range);
    }
  }
  return ranges;
}

std::vector<RoleRanges> state_ranges(const Optimizer& optimizer, const TensorTable& table, const Range& within) {
  std::vector<RoleRanges> of_roles;
  for (const TensorRole role : kStateRoles) of_roles.push_back({role, state_ranges(optimizer, table, role, within)});
  return of_roles;
}

}  // namespace weft
