// SIGINT, SIGTERM and SIGHUP: end the program at once, or set a flag that the loops poll at the end of a step or token.
// SIGUSR1: a flag that asks for a checkpoint.
#pragma once

#include <csignal>
#include <string_view>

#include "llmc/base/error.h"

namespace weft {

// What a stop signal does.
enum class OnStop {
  leave,        // ends the program at once with exit_after_signal(): nothing is lost
  finish_soon,  // sets stop_signal(); the program is ended if it is still in this state a second later
  finish,       // sets stop_signal(). A second SIGINT or SIGTERM, more than 0.1 s after the first, ends the program
};

// Installs the handlers, in the state OnStop::finish without messages. SIGPIPE is ignored, so that a closed log pipe is a
// write error, not a death. A SIGHUP that was ignored stays so: a program started with nohup is to outlive the terminal.
void install_signal_handlers();

// Changes the state, for the signals to come. `first` is printed on stderr when a signal arrives, `left` when a signal (or
// the end of the second of finish_soon) ends the program; both are one line without its end, at most 250 bytes, or empty.
// Cheap enough to be called at each step. One thread at a time.
void on_stop(OnStop action, std::string_view first = {}, std::string_view left = {});

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
