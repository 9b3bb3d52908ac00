// A checkpoint that all ranks of a run write together into the same files, each its own part of a sharded state. The
// files are byte for byte those that one rank would have written.
//
//   1. the first rank creates the files, at their full size, and sends their names and layout;
//   2. each rank writes its parts, hashes them on the way, and syncs;
//   3. each rank reads some complete tensors back from the files, compares the hash of every part with that of its writer,
//      and computes the hash of the tensor: the format needs it, and no rank could compute it from its own part;
//   4. the first rank writes the headers with these hashes and the manifest, and gives the checkpoint its name.
//
// A step begins when all ranks have finished the one before, and an error of one rank ends the save on all. So a
// checkpoint gets its name only after all ranks have written and synced their parts and every tensor has been read back
// once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/range.h"
#include "llmc/comm/communicator.h"
#include "llmc/model/train_model.h"
#include "llmc/train/shared_checkpoint.h"

namespace weft {

class CheckpointKeeper;
struct TrainState;

class JointSave {
 public:
  // All ranks construct one together. `ranks`: a communicator that nothing else uses. `keeper`: on the first rank; null
  // on the others. `own`: TrainModel::own_elements() of this rank. Exit::internal unless each element belongs to one
  // rank.
  JointSave(Communicator& ranks, CheckpointKeeper* keeper, const Optimizer& optimizer, const TensorTable& table,
            const std::vector<Range>& own);

  // Called by all ranks with the same state and the same TrainModel::fp8_state(), each with the copy of its own part, on
  // any thread. Returns the checkpoint's path on the first rank and an empty text on the others, which do not wait for
  // step 4. On failure nothing older is touched and what was written is removed; the errors are those of
  // CheckpointKeeper::save() and of Communicator.
  std::string save(const TrainState& state, const StateCopy& copy, const std::vector<float>& fp8_state);

  // Tells the other ranks that this one will not take part in the next save().
  void abort(const Error& error) noexcept { ranks_.abort(error); }
  // Whether the communicator has failed, so that no later save can succeed. To be called on the thread that saves.
  bool ended() const;
  bool is_first() const { return ranks_.rank() == 0; }

 private:
  // A contiguous part of one tensor that one rank has.
  struct Part {
    std::size_t tensor;  // of `state_`
    Range elements;      // of the tensor
  };
  // The names and the layout of the files.
  struct Files {
    std::string model, training;
    std::vector<std::uint64_t> offsets;  // of each tensor in its file
  };

  Files tell_files(const SharedCheckpoint* made);
  void write_parts(const Files& files, const StateCopy& copy);
  void read_tensors(const Files& files);
  TensorRead read_tensor(std::span<const std::byte> data, std::size_t tensor, const std::string& path) const;

  std::size_t rank() const { return static_cast<std::size_t>(ranks_.rank()); }
  const TensorSpec& spec_of(std::size_t tensor) const { return table_.specs()[state_[tensor].spec]; }
  TensorRole role_of(std::size_t tensor) const { return state_[tensor].role; }
  std::string name_of(std::size_t tensor) const;
  bool in_model_file(std::size_t tensor) const { return role_of(tensor) == TensorRole::parameter; }

  Communicator& ranks_;
  CheckpointKeeper* const keeper_;
  const Optimizer& optimizer_;
  const TensorTable& table_;
  const std::vector<StateTensor> state_;                   // state_tensors()
  std::vector<Part> parts_;                                // of all ranks, rank by rank
  std::vector<Range> parts_of_rank_;                       // of `parts_`
  std::vector<std::vector<std::size_t>> parts_of_tensor_;  // for each tensor the numbers of its parts, by first element
  std::vector<Range> read_by_;                             // the tensors that each rank reads back
  std::vector<std::uint64_t> hashes_;                      // of each part, as its writer has computed it
  std::vector<TensorRead> tensors_;
};

}  // namespace weft
