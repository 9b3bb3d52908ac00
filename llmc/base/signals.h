// SIGINT, SIGTERM, SIGHUP and SIGUSR1 as flags that the loops poll at the end of a step or token.
#pragma once

namespace weft {

// Installs the handlers. A second SIGINT or SIGTERM exits at once with 128 + its number. SIGPIPE is ignored,
// so that a closed log pipe is a write error, not a death.
void install_signal_handlers();

// The signal that asks the program to save and stop: SIGINT, SIGTERM or SIGHUP; 0 if none came.
int stop_signal();
// True once after each SIGUSR1: "save a checkpoint now and go on".
bool take_save_request();

}  // namespace weft
