// Starts the ranks of a run on this machine: this program again, once for each.
#pragma once

#include <cstdint>

#include "llmc/base/error.h"

namespace weft {

inline constexpr double kGraceSeconds = 10;  // beyond the time limit, for a rank to end: it may be saving

// Runs the program of this process with its arguments `argv` in `count` processes, with the variables of torchrun in their
// environment (llmc/comm/launcher.h) and a port that is bound before they start, and waits for all of them. They share this
// process's terminal. SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed on to them; if this process dies, they are killed. Where
// one fails, the others learn of it by themselves; those that are still there `time_limit_s` and `grace_s` seconds later are
// killed. Returns Exit::ok, or the code of the first rank that failed, which a line on stderr names; a rank that was killed
// by a signal that this process has not sent is Exit::environment. Exit::environment if the processes cannot be started.
Exit start_ranks(char* const* argv, std::int64_t count, double time_limit_s, double grace_s = kGraceSeconds);

// The descriptor that rank 0 of start_ranks() is to listen with; -1 in any other process. Takes it out of the environment.
int inherited_listener();

}  // namespace weft
