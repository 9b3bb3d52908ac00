#include "llmc/base/signals.h"

#include <unistd.h>

#include <csignal>

namespace weft {

namespace {

volatile std::sig_atomic_t pending_stop = 0;
volatile std::sig_atomic_t pending_save = 0;

extern "C" void on_stop(int signal_number) {
  // The second request means "now": nothing but async-signal-safe calls from here.
  if (pending_stop != 0 && signal_number != SIGHUP) ::_exit(128 + signal_number);
  pending_stop = signal_number;
}

extern "C" void on_save(int) {
  pending_save = 1;
}

void install(int signal_number, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(signal_number, &action, nullptr);
}

}  // namespace

void install_signal_handlers() {
  install(SIGINT, on_stop);
  install(SIGTERM, on_stop);
  install(SIGHUP, on_stop);
  install(SIGUSR1, on_save);
  install(SIGPIPE, SIG_IGN);
}

int stop_signal() {
  return pending_stop;
}

bool take_save_request() {
  const bool requested = pending_save != 0;
  pending_save = 0;
  return requested;
}

}  // namespace weft
