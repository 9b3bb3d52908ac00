// Which rank this process is, from the environment variables of what has started it: torchrun, Open MPI's mpirun or Slurm's
// srun. None of their libraries is needed.
//
//   torchrun   RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT      pytorch.org/docs/stable/elastic/run.html
//              (also what train_llama --gpus sets for the processes that it starts)
//   Open MPI   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK                    its FAQ, "running MPI jobs"
//   Slurm      SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST       srun(1), output environment
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace weft {

struct LaunchedRank {
  const char* launcher = "";
  std::int64_t rank = 0, size = 1;
  std::int64_t local_rank = 0;  // among the ranks of this machine
  std::int64_t local_size = 1;  // ranks of this machine, as far as the launcher tells
  std::string address;    // of the first rank's machine: MASTER_ADDR, or the first of Slurm's nodes; empty: not told
  std::int64_t port = 0;  // MASTER_PORT; 0: not told
  std::string run;        // what the launcher calls this start, and WEFT_RUN_ID: the same for all ranks
  bool port_is_taken = false;  // the launcher itself listens at that port: torchrun's store
};

// Where the ranks of this start meet. The port is MASTER_PORT, or the next one if torchrun itself listens there, or, if
// none is given, one between 20,000 and 29,999 that follows from the name of the start. Exit::environment if no address
// is given and not all ranks are on this machine.
struct RankAddress {
  std::string address;
  std::int64_t port = 0;
};
RankAddress address_of_first(const LaunchedRank& rank);

// The value of an environment variable; null where it is not set. std::getenv is one.
using Environment = std::function<const char*(const char* name)>;

// Nothing if no launcher has started this process; nor in the batch script of a Slurm job, which is not a task of a
// step. torchrun is looked for before Open MPI, and that before Slurm, because each may run inside the later ones.
// Exit::environment names a variable that is missing beside others of its launcher, or that holds an impossible value.
std::optional<LaunchedRank> launched_rank(const Environment& environment);

// The first machine of Slurm's short form: "gpu[03-05,9]-a,other" begins with "gpu03-a". Exit::environment if it is none.
std::string first_node(const std::string& nodes);

}  // namespace weft
