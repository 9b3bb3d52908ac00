// Ranks as processes, on one machine or many, that talk over TCP.
#pragma once

#include <memory>
#include <string>

#include "llmc/comm/communicator.h"
#include "llmc/comm/rendezvous.h"

namespace weft {

// Where the ranks of a run meet.
struct MeetingPoint {
  std::string address;  // or name, of rank 0's machine
  std::int64_t port = 0;
  int listener = -1;  // on rank 0: a descriptor that listens there already, which is taken over; -1: none
};

// Meets the other ranks and returns when all of them are there. No wait, the meeting included, takes much longer than
// `time_limit_s` seconds; between its calls a rank may take any time, if no other rank waits for it. Errors are those
// of Communicator, and Exit::environment if the ranks cannot meet: the port is taken, or a rank does not come, is of
// another version or was started for another number of ranks. What comes to the port and is no rank of this run is
// turned away and does no harm.
std::unique_ptr<Communicator> rendezvous(const RankIdentity& self, const MeetingPoint& point, double time_limit_s);

}  // namespace weft
