// Where the ranks of a run meet: a thread in the process of rank 0, to which each rank has one connection, rank 0
// too. It brings the calls of all ranks together, sends each rank what it is to get, and watches the time: it
// knows which ranks have not come to a call. On GPUs only small messages pass here; gradients and parameters go
// from GPU to GPU (llmc/cuda/comm).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "llmc/base/hash.h"
#include "llmc/comm/socket.h"

namespace weft {

// What a rank must know to be let in.
struct RankIdentity {
  int rank = 0, size = 1;
  std::uint64_t token = 0;  // a number of this run, so that nothing else that connects to the port is taken for a rank
  std::string version;      // of weft; at most 95 bytes of it are compared
  // What tells two jobs apart that have the same token, because their launcher gives them none of their own: --out, as it
  // was given. A rank with another one is turned away.
  std::string out = {};

  std::uint64_t job() const { return xxh3_64(out); }
};

class Rendezvous {
 public:
  // `listener`: where the other ranks come. Waits for them and serves their calls on a thread of its own, until all have
  // left; each wait is limited to `time_limit_s` seconds.
  Rendezvous(Socket listener, const RankIdentity& first_rank, double time_limit_s);
  ~Rendezvous();  // the connection of rank 0 has to be closed before
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  Socket take_first_connection();  // of rank 0; once

 private:
  class Thread;
  std::unique_ptr<Thread> thread_;
};

}  // namespace weft
