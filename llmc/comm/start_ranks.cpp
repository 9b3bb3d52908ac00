#include "llmc/comm/start_ranks.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/base/log.h"
#include "llmc/comm/socket.h"

namespace weft {

namespace {

constexpr const char* kListener = "WEFT_RANKS_LISTENER";
constexpr int kPassedOn[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};

struct Child {
  pid_t pid = -1;
  bool ended = false;
  int status = 0;  // of waitpid()
  bool failed() const { return ended && status != 0; }
};

std::string new_run_id() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != std::ssize(bytes)) {
    fail(Exit::environment, "--gpus: the system gives no random numbers: %s", std::strerror(errno));
  }
  std::string text;
  for (const unsigned char byte : bytes) text += format("%02x", byte);
  return text;
}

// The environment of a rank, as execve() takes it.
class RankEnvironment {
 public:
  explicit RankEnvironment(const std::vector<std::pair<std::string, std::string>>& own) {
    for (char** each = environ; *each != nullptr; ++each) {
      const std::string_view name = std::string_view(*each).substr(0, std::strcspn(*each, "="));
      const bool replaced = std::any_of(own.begin(), own.end(), [&](const auto& mine) { return mine.first == name; });
      if (!replaced) texts_.emplace_back(*each);
    }
    for (const auto& [name, value] : own) texts_.push_back(format("%s=%s", name.c_str(), value.c_str()));
    for (std::string& text : texts_) pointers_.push_back(text.data());
    pointers_.push_back(nullptr);
  }
  char* const* pointers() const { return pointers_.data(); }

 private:
  std::vector<std::string> texts_;
  std::vector<char*> pointers_;
};

std::string own_path() {
  char path[4096];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof path - 1);
  if (length <= 0) fail(Exit::environment, "/proc/self/exe: cannot be read: %s", std::strerror(errno));
  return {path, static_cast<std::size_t>(length)};
}

sigset_t supervised_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : kPassedOn) sigaddset(&set, number);
  sigaddset(&set, SIGCHLD);
  return set;
}

// Blocks the signals that the supervisor waits for; children get the mask from before.
class SupervisedSignals {
 public:
  SupervisedSignals() : set(supervised_signals()) { pthread_sigmask(SIG_BLOCK, &set, &before); }
  ~SupervisedSignals() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  SupervisedSignals(const SupervisedSignals&) = delete;
  SupervisedSignals& operator=(const SupervisedSignals&) = delete;
  const sigset_t set;
  sigset_t before;
};

pid_t start_rank(const std::string& path, char* const* argv, const RankEnvironment& environment, int listener,
                 const sigset_t& mask) {
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  // The child of a process whose other threads may hold any lock: only async-signal-safe calls are allowed.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(static_cast<int>(Exit::environment));  // the parent died before prctl()
  if (listener >= 0) ::fcntl(listener, F_SETFD, 0);
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  ::execve(path.c_str(), argv, environment.pointers());
  ::_exit(static_cast<int>(Exit::environment));
}

class Supervisor {
 public:
  // `patience_s`: how long ranks may go on after another one has failed.
  Supervisor(std::vector<Child>& children, double patience_s) : children_(children), patience_s_(patience_s) {}

  Exit run(const sigset_t& set) {
    while (std::any_of(children_.begin(), children_.end(), [](const Child& child) { return !child.ended; })) {
      siginfo_t info{};
      const timespec wait{1, 0};  // to look at the clock
      const int number = ::sigtimedwait(&set, &info, &wait);
      // What the terminal sends goes to its whole process group, the ranks among them.
      if (number > 0 && number != SIGCHLD && info.si_code != SI_KERNEL) signal_all(number);
      reap();
      if (kill_at_ && SocketClock::now() >= *kill_at_) kill_rest();
    }
    return outcome();
  }

 private:
  void signal_all(int number) const {
    for (const Child& child : children_) {
      if (!child.ended) ::kill(child.pid, number);
    }
  }

  void reap() {
    for (std::size_t r = 0; r < children_.size(); ++r) {
      Child& child = children_[r];
      if (child.ended || ::waitpid(child.pid, &child.status, WNOHANG) != child.pid) continue;
      child.ended = true;
      if (!child.failed()) continue;
      // A rank that a signal has killed cannot tell anybody; one that has failed has told the others, which may end
      // before it.
      const bool killed = WIFSIGNALED(child.status) && !killed_rest_;
      if (!first_ || (killed && !WIFSIGNALED(children_[*first_].status))) first_ = r;
      if (!kill_at_) kill_at_ = deadline_in(patience_s_);
    }
  }

  void kill_rest() {
    for (std::size_t r = 0; r < children_.size(); ++r) {
      if (children_[r].ended) continue;
      log_warning("rank %zu does not end: it is killed", r);
      ::kill(children_[r].pid, SIGKILL);
    }
    killed_rest_ = true;
    kill_at_.reset();
  }

  Exit outcome() const {
    if (!first_) return Exit::ok;
    const int status = children_[*first_].status;
    if (WIFSIGNALED(status)) {
      const int number = WTERMSIG(status);
      log_error("rank %zu was killed by signal %d (%s)", *first_, number, ::strsignal(number));
      return Exit::environment;
    }
    const Exit code = static_cast<Exit>(WEXITSTATUS(status));
    const bool was_asked = code == Exit::interrupted || code == Exit::terminated;
    if (!was_asked) log_info("rank %zu ended first, with exit code %d", *first_, static_cast<int>(code));
    return code;
  }

  std::vector<Child>& children_;
  const double patience_s_;
  std::optional<std::size_t> first_;  // rank that failed
  std::optional<Deadline> kill_at_;   // when the ranks that are left are killed
  bool killed_rest_ = false;
};

}  // namespace

Exit start_ranks(char* const* argv, std::int64_t count, double time_limit_s, double grace_s) {
  const std::string path = own_path(), run = new_run_id(), local = "127.0.0.1";
  Socket listener = listen_at(local, 0);
  const std::string port = std::to_string(port_of(listener)), size = std::to_string(count);
  std::signal(SIGCHLD, SIG_DFL);  // if it were ignored, as some parents leave it, the children's status would be lost
  const SupervisedSignals signals;
  std::vector<Child> children(static_cast<std::size_t>(count));
  for (std::size_t r = 0; r < children.size(); ++r) {
    const int inherited = r == 0 ? listener.fd() : -1;
    const RankEnvironment environment({{"RANK", std::to_string(r)},
                                       {"LOCAL_RANK", std::to_string(r)},
                                       {"WORLD_SIZE", size},
                                       {"LOCAL_WORLD_SIZE", size},
                                       {"MASTER_ADDR", local},
                                       {"MASTER_PORT", port},
                                       {"WEFT_RUN_ID", run},
                                       {kListener, std::to_string(inherited)}});
    children[r].pid = start_rank(path, argv, environment, inherited, signals.before);
    if (children[r].pid > 0) continue;
    const int error = errno;
    for (const Child& child : children) {
      if (child.pid > 0) ::kill(child.pid, SIGKILL);
    }
    fail(Exit::environment, "--gpus: cannot start rank %zu: %s", r, std::strerror(error));
  }
  listener.close();
  return Supervisor(children, time_limit_s + grace_s).run(signals.set);
}

int inherited_listener() {
  const char* const text = std::getenv(kListener);
  if (text == nullptr) return -1;
  int descriptor = -1;
  std::from_chars(text, text + std::strlen(text), descriptor);
  ::unsetenv(kListener);
  if (descriptor >= 0) ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  return descriptor;
}

}  // namespace weft
