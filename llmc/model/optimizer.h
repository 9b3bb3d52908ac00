// What an optimizer is: which state it keeps for each parameter, and what its step is given. Memory, checkpoints, copies,
// ranks and the training loop know optimizers by this description alone; the arithmetic is in llmc/cpu and llmc/cuda.
// dev/recipes/optimizer.md says how to add one.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/base/range.h"
#include "llmc/model/optimizers/adamw.h"
#include "llmc/model/optimizers/muon.h"
#include "llmc/model/tensor_table.h"

namespace weft {

// What is kept of a parameter. state1 and state2: the first and the second state tensor that the optimizer has for it, each
// with the parameter's shape, in fp32 unless TrainOptions::moments says otherwise.
enum class TensorRole { parameter, gradient, state1, state2 };
// The state with which a run resumes, in the order in which ranks read it together.
inline constexpr TensorRole kStateRoles[] = {TensorRole::parameter, TensorRole::state1, TensorRole::state2};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual const char* name() const = 0;        // in --optimizer and in checkpoints
  virtual const char* state_name() const = 0;  // of all its state tensors, in the table of memory
  // Names of the state tensors of a parameter, from state1 on: at most two, perhaps none.
  virtual std::span<const char* const> state_tensors(const TensorSpec& spec) const = 0;
  // Whether the update of one element needs all others of the tensor: ranks never cut it.
  virtual bool needs_whole(const TensorSpec& /*spec*/) const { return false; }
};

const std::vector<std::string>& optimizer_names();
// Null if there is none of this name.
const Optimizer* find_optimizer(std::string_view name);

// What one update is given: the hyperparameters of each kind of update.
struct OptimizerStep {
  OptimizerStep(const AdamWStep& step) : adamw(step), muon(muon_step(step)) {}
  AdamWStep adamw;
  MuonStep muon;
};

// A tensor of the state of a run.
struct StateTensor {
  TensorRole role;
  std::size_t spec;  // in the table
};
bool has_tensor(const Optimizer& optimizer, TensorRole role, const TensorSpec& spec);
// All of them: role by role of kStateRoles, each in the order of the table. The order of checkpoints and of reads by ranks.
std::vector<StateTensor> state_tensors(const Optimizer& optimizer, const TensorTable& table);
// What it is called in the file that holds it.
std::string state_tensor_name(const Optimizer& optimizer, TensorRole role, const TensorSpec& spec);

// The elements in `within` that have a tensor of this role, neighbours joined, with the padding behind each tensor. In the
// arenas of state tensors they lie one range after another (PackedRanges).
std::vector<Range> state_ranges(const Optimizer& optimizer, const TensorTable& table, TensorRole role,
                                const Range& within);

// The ranges of the arena that one has of a role.
struct RoleRanges {
  TensorRole role;
  std::vector<Range> ranges;
};
// state_ranges() of each role of kStateRoles.
std::vector<RoleRanges> state_ranges(const Optimizer& optimizer, const TensorTable& table, const Range& within);

}  // namespace weft
