// Signals: SIGINT, SIGTERM and SIGHUP end the program at once or set a flag, which the loops poll at the end of a step
// or a token. SIGUSR1 sets a flag that asks for a checkpoint. SIGBUS ends the program with a message.
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

// Installs the handlers, in the state OnStop::finish without messages. SIGPIPE is ignored, so that a closed log pipe is
// a write error and does not kill the program. SIGHUP stays ignored if it was: a program started with nohup must
// survive the end of its terminal.
void install_signal_handlers();
// Whether this signal has no effect on the process: started with nohup, SIGHUP is ignored.
bool is_ignored(int signal_number);

// Sets the state for signals that come from now on. `first` is printed on stderr when the first signal arrives, `left`
// when a signal (or the time limit of finish_soon) ends the program; both are one line of at most 250 bytes without the
// newline, or empty. Cheap enough to be called at each step. Must not be called from two threads at the same time.
void on_stop(OnStop action, std::string_view first = {}, std::string_view left = {});

// The signal that asks the program to save and stop: SIGINT, SIGTERM or SIGHUP; 0 if none came.
int stop_signal();
// The exit code of a program that this signal has stopped; Exit::ok for 0. Async-signal-safe.
Exit exit_after_signal(int signal_number);
// True once after each SIGUSR1: "save a checkpoint now and go on".
bool take_save_request();

// While one exists, the signals above are blocked in this thread and in the threads that it starts. Helper threads are
// started under one, so that the kernel delivers a signal to the main thread and interrupts what that waits for.
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
