// SIGINT, SIGTERM, SIGHUP and SIGUSR1 as flags that the loops poll at the end of a step or token.
#pragma once

#include <csignal>

#include "llmc/base/error.h"

namespace weft {

// Installs the handlers. A second SIGINT or SIGTERM, more than 0.1 s after the first signal, exits at once with 128 + its
// number. SIGPIPE is ignored, so that a closed log pipe is a write error, not a death. A SIGHUP that was ignored stays so:
// who starts a program with nohup wants it to outlive the terminal.
void install_signal_handlers();

// The signal that asks the program to save and stop: SIGINT, SIGTERM or SIGHUP; 0 if none came.
int stop_signal();
// What a program that it stopped ends with; Exit::ok for 0. Async-signal-safe.
Exit exit_after_signal(int signal_number);
// True once after each SIGUSR1: "save a checkpoint now and go on".
bool take_save_request();

// While it lives, this thread and the threads it starts leave those signals to others: a helper thread is born in one,
// so that a signal always interrupts what the main thread waits for.
class SignalsElsewhere {
 public:
  SignalsElsewhere();
  ~SignalsElsewhere();
  SignalsElsewhere(const SignalsElsewhere&) = delete;
  SignalsElsewhere& operator=(const SignalsElsewhere&) = delete;

 private:
  sigset_t before_;
};

// A page of a mapped file that cannot be read (the file became shorter, or its disk fails) kills a process by SIGBUS.
// From here on the process says so in one line and ends with Exit::bad_file; nothing is saved, nothing is damaged.
void install_bus_error_handler();

}  // namespace weft
