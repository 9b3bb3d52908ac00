// Ranks as threads of one process, for tests of everything that several ranks do.
#pragma once

#include <functional>

#include "llmc/comm/communicator.h"

namespace weft {

// Calls work(communicator) on `ranks` threads, each with the communicator of its rank, and returns when all have ended. A
// rank that throws, or returns while others wait for it, aborts what they do together. Throws what was thrown first. No wait
// for other ranks takes longer than `time_limit_s` seconds.
void run_thread_ranks(int ranks, double time_limit_s, const std::function<void(Communicator&)>& work);
// The same with a second communicator of each rank, for another thread: calls of the two do not meet.
void run_thread_ranks(int ranks, double time_limit_s,
                      const std::function<void(Communicator&, Communicator& beside)>& work);

}  // namespace weft
