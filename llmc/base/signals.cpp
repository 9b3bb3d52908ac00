#include "llmc/base/signals.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <ctime>

#include "llmc/base/log.h"

namespace weft {

namespace {

// Atomic, not sig_atomic_t: a handler may run on any thread.
std::atomic<int> pending_stop{0};
std::atomic<bool> pending_save{false};
std::atomic<std::int64_t> first_stop_ms{0};  // time of the first stop signal on the monotonic clock; 0: none yet
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free &&
              std::atomic<std::int64_t>::is_always_lock_free);

// timeout(1) and batch systems signal the process and then its process group: a second signal within this time belongs
// to the same request.
constexpr std::int64_t kOneRequestMs = 100;
constexpr unsigned kSoonSeconds = 1;  // time limit of OnStop::finish_soon

// A message that a signal handler can print.
struct Line {
  char text[256];
  std::size_t length = 0;

  void set(std::string_view line) {
    length = line.copy(text, sizeof text - 1);  // an empty view has no address to copy from
    if (length > 0) text[length++] = '\n';
  }
  // Async-signal-safe.
  void print() const {
    if (length == 0) return;
    static constexpr char kEraseLine[] = "\r\033[K";
    [[maybe_unused]] ssize_t ignored = 0;
    if (progress_line_shown()) ignored = ::write(STDERR_FILENO, kEraseLine, sizeof kEraseLine - 1);
    ignored = ::write(STDERR_FILENO, text, length);
  }
};

struct Reaction {
  OnStop action = OnStop::finish;
  Line first, left;
};

// Double buffer: on_stop() fills the entry that no handler reads and then makes it the current one.
Reaction reactions[2];
std::atomic<int> current_reaction{0};

[[noreturn]] void leave(const Reaction& reaction, int signal_number) {
  reaction.left.print();
  ::_exit(static_cast<int>(exit_after_signal(signal_number)));
}

extern "C" void on_stop_signal(int signal_number) {
  // Only async-signal-safe calls are allowed here.
  const Reaction& reaction = reactions[current_reaction.load()];
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const std::int64_t now_ms = now.tv_sec * 1000 + now.tv_nsec / 1'000'000;
  std::int64_t first_ms = 0;
  const bool first = first_stop_ms.compare_exchange_strong(first_ms, now_ms);
  if (reaction.action == OnStop::leave) leave(reaction, signal_number);
  if (!first && signal_number != SIGHUP && now_ms - first_ms >= kOneRequestMs) leave(reaction, signal_number);
  pending_stop = signal_number;
  if (!first) return;
  reaction.first.print();
  if (reaction.action == OnStop::finish_soon) ::alarm(kSoonSeconds);
}

extern "C" void on_alarm(int) {
  const Reaction& reaction = reactions[current_reaction.load()];
  if (reaction.action == OnStop::finish_soon) leave(reaction, pending_stop.load());
}

extern "C" void on_save(int) {
  pending_save = true;
}

extern "C" void on_bus_error(int) {
  static constexpr char kMessage[] =
      "error: a file in use cannot be read any more (bus error): it was cut while it was read, or its disk fails. "
      "Checkpoints are untouched: restore the file and start again\n";
  [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
  ::_exit(static_cast<int>(Exit::bad_file));
}

sigset_t handled_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal_number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGALRM}) sigaddset(&set, signal_number);
  return set;
}

void install(int signal_number, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(signal_number, &action, nullptr);
}

}  // namespace

bool is_ignored(int signal_number) {
  struct sigaction action {};
  return sigaction(signal_number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

void install_signal_handlers() {
  install(SIGALRM, on_alarm);
  install(SIGINT, on_stop_signal);
  install(SIGTERM, on_stop_signal);
  if (!is_ignored(SIGHUP)) install(SIGHUP, on_stop_signal);
  install(SIGUSR1, on_save);
  install(SIGPIPE, SIG_IGN);
}

void on_stop(OnStop action, std::string_view first, std::string_view left) {
  const int next = 1 - current_reaction.load();
  reactions[next].action = action;
  reactions[next].first.set(first);
  reactions[next].left.set(left);
  current_reaction = next;
}

int stop_signal() {
  return pending_stop.load();
}

Exit exit_after_signal(int signal_number) {
  if (signal_number == 0) return Exit::ok;
  return signal_number == SIGINT ? Exit::interrupted : Exit::terminated;
}

bool take_save_request() {
  return pending_save.exchange(false);
}

SignalsElsewhere::SignalsElsewhere() {
  const sigset_t handled = handled_signals();
  pthread_sigmask(SIG_BLOCK, &handled, &before_);
}

SignalsElsewhere::~SignalsElsewhere() {
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void install_bus_error_handler() {
  install(SIGBUS, on_bus_error);
}

}  // namespace weft
