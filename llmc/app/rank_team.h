// This process as one of the ranks of a run: which one it is, and its connection to the others.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "llmc/base/error.h"
#include "llmc/base/threads.h"
#include "llmc/comm/communicator.h"
#include "llmc/comm/launcher.h"
#include "llmc/train/options.h"

namespace weft {

class RankTeam {
 public:
  // `launched`: what a launcher says about this process. Does not wait for other ranks. From here on ranks other than
  // the first write only warnings and errors (log_as_rank()).
  RankTeam(const TrainSettings& settings, const std::optional<LaunchedRank>& launched);

  int rank() const { return static_cast<int>(launched_.rank); }
  int size() const { return static_cast<int>(size_); }
  bool first() const { return launched_.rank == 0; }
  // This rank's number, and the number of ranks, on this machine.
  int local_rank() const { return static_cast<int>(launched_.local_rank); }
  int local_size() const { return static_cast<int>(launched_.local_size); }

  // The option --threads of this rank, where the ranks of a machine share its cores: `option`, or with 0 and others on this
  // machine a part of what `limits` allow.
  std::int64_t threads(std::int64_t option, const ThreadLimits& limits) const;

  // Meets the other ranks, which have to be of the same `version`.
  void meet(const TrainSettings& settings, const std::string& version);
  // The ranks' communicator: after meet(), or at once if there is one rank.
  Communicator& communicator() { return *communicator_; }
  // A second communicator of the same ranks, for the threads that save while steps run.
  Communicator& save_communicator() { return *save_communicator_; }

  // Calls work(). An error of it is told to the other ranks, and thrown.
  Exit together(const std::function<Exit()>& work);
  // Prints the error, tells it to the other ranks and ends the process at once: freeing what this rank has could mean
  // waiting for a GPU that waits for a rank that does not come.
  [[noreturn]] void leave_with(const Error& error);

 private:
  void abort(const Error& error);

  LaunchedRank launched_;
  std::int64_t size_;
  std::unique_ptr<Communicator> communicator_ = std::make_unique<SingleRank>();
  std::unique_ptr<Communicator> save_communicator_ = std::make_unique<SingleRank>();
};

}  // namespace weft
