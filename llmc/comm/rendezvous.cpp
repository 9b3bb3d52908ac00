// Calls go in rounds: the hub reads until every rank has come to a call, compares what they have called, and writes the
// replies. An error in a round is told to all ranks, and is the end of the rounds.
#include "llmc/comm/rendezvous.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "llmc/base/clock.h"
#include "llmc/base/log.h"
#include "llmc/base/signals.h"
#include "llmc/comm/frame_io.h"
#include "llmc/comm/rank_errors.h"

namespace weft {

namespace {

constexpr double kMostStrangerSeconds = 10;  // in which a connection has to say who it is; less with a short time limit
constexpr std::size_t kMostStrangers = 64;   // connections at once that have not yet said who they are
// That a run which cannot start waits for ranks, to tell them why; half the time limit at most.
constexpr double kRefusalSeconds = 5;
constexpr double kLastWords = 1;  // seconds in which a rank has to take the news of an error
constexpr double kLinger =
    0.5;  // seconds that rank 0 stays for the others at the end: they may not have read everything

struct Peer {
  Socket socket;
  FrameReader reader;
  FrameWriter writer;
  bool present = false;   // it has said who it is
  bool has_left = false;  // as it should
  bool waiting = false;   // in a call
  FrameHeader call;
  std::vector<std::byte> brought;  // with that call
  Deadline last_sign{};            // that it is at work
};

struct Stranger {
  Socket socket;
  std::string from;
  Hello hello;
  std::size_t got = 0;
  Deadline deadline;
};

}  // namespace

class Rendezvous::Thread {
 public:
  Thread(Socket listener, const RankIdentity& first_rank, double time_limit_s)
      : listener_(std::move(listener)),
        identity_(first_rank),
        time_limit_s_(time_limit_s),
        peers_(static_cast<std::size_t>(first_rank.size)) {
    auto [ours, theirs] = connected_pair();
    peers_[0].socket = std::move(ours);
    peers_[0].present = true;
    first_connection_ = std::move(theirs);
    const SignalsElsewhere signals;
    thread_ = std::thread([this] { run(); });
  }
  ~Thread() { thread_.join(); }
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  Socket take_first_connection() { return std::move(first_connection_); }

 private:
  void run() noexcept {
    try {
      meet();
      while (round()) {
      }
    } catch (const Error& error) {
      tell_all(error);
    } catch (const std::exception& error) {
      tell_all(Error(Exit::resources, format("rank 0: between the ranks: %s", error.what())));
    }
    listener_.close();
    drain();
  }

  Deadline limit_from(Deadline begin) const { return begin + duration_of(time_limit_s_); }
  SocketClock::duration sign_interval() const { return duration_of(time_limit_s_ / 4); }
  std::vector<int> those(bool (*is)(const Peer&)) const {
    std::vector<int> ranks;
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      if (is(peers_[r])) ranks.push_back(static_cast<int>(r));
    }
    return ranks;
  }

  // ---- the start ----

  void meet() {
    deadline_ = deadline_in(time_limit_s_);
    Deadline next_sign = SocketClock::now() + sign_interval();
    const auto absent = [](const Peer& peer) { return !peer.present; };
    while (!those(absent).empty()) {
      const Deadline now = SocketClock::now();
      if (now >= deadline_) throw refusal_.value_or(late_ranks(those(absent), "the start", time_limit_s_));
      if (now >= next_sign) {
        send_signs([](const Peer& peer) { return peer.present; });
        next_sign = now + sign_interval();
      }
      std::vector<pollfd> waiting = peers_to_poll();
      if (strangers_.size() < kMostStrangers) waiting.push_back({listener_.fd(), POLLIN, 0});
      for (const Stranger& stranger : strangers_) waiting.push_back({stranger.socket.fd(), POLLIN, 0});
      Deadline wake = std::min(deadline_, next_sign);
      for (const Stranger& stranger : strangers_) wake = std::min(wake, stranger.deadline);
      wait_for_any(waiting, wake);
      read_peers();
      accept_strangers();
      hear_strangers();
    }
    if (refusal_) throw *refusal_;
    listener_.close();
    strangers_.clear();
    for (Peer& peer : peers_) peer.writer.begin(FrameKind::reply);
    write_replies("the start");
  }

  void accept_strangers() {
    while (strangers_.size() < kMostStrangers) {
      Stranger stranger;
      stranger.socket = accept_from(listener_, stranger.from);
      if (!stranger.socket.open()) return;
      stranger.deadline = deadline_in(std::min(kMostStrangerSeconds, time_limit_s_ / 4));
      strangers_.push_back(std::move(stranger));
    }
  }

  void hear_strangers() {
    for (Stranger& stranger : strangers_) {
      const std::ptrdiff_t count = read_some(stranger.socket, bytes_of(stranger.hello).subspan(stranger.got));
      if (count > 0) stranger.got += static_cast<std::size_t>(count);
      if (stranger.got == sizeof(Hello)) {
        let_in(stranger);
      } else if (count < 0 || SocketClock::now() >= stranger.deadline || !may_be_rank(stranger)) {
        turn_away(stranger);
      }
    }
    std::erase_if(strangers_, [](const Stranger& stranger) { return !stranger.socket.open(); });
  }

  // Whether the bytes so far are those of a rank.
  static bool may_be_rank(const Stranger& stranger) {
    const std::size_t count = std::min(stranger.got, sizeof Hello{}.magic);
    return std::memcmp(stranger.hello.magic, Hello{}.magic, count) == 0;
  }

  void turn_away(Stranger& stranger) {
    if (!warned_) {
      log_warning("port %lld: a connection from %s is of no rank of this run, and was closed",
                  static_cast<long long>(port_of(listener_)), escaped(stranger.from).c_str());
    }
    warned_ = true;
    stranger.socket.close();
  }

  // A rank of another job, which has met this one at a port that both were given. It is told; the run goes on without it.
  void turn_away_other_job(Stranger& stranger) {
    const std::string reason = format(
        "rank %d was turned away: --out: got another one than the %s of rank 0. Give each job a port of its own "
        "(MASTER_PORT), and all ranks of a job the same --out",
        stranger.hello.rank, escaped(identity_.out).c_str());
    tell(stranger, Error(Exit::environment, reason));
    if (!warned_) log_warning("port %lld: %s", static_cast<long long>(port_of(listener_)), reason.c_str());
    warned_ = true;
  }

  static void tell(Stranger& stranger, const Error& error) {
    FrameWriter news;
    news.begin(error);
    news.write_all(stranger.socket, deadline_in(kLastWords));
    stranger.socket.close();
  }

  void let_in(Stranger& stranger) {
    Hello& hello = stranger.hello;
    if (!may_be_rank(stranger) || hello.token != identity_.token) return turn_away(stranger);
    hello.version[sizeof hello.version - 1] = '\0';
    if (hello.job != identity_.job() && hello.job != 0) return turn_away_other_job(stranger);
    if (hello.size != identity_.size || hello.rank < 0 || hello.rank >= hello.size) {
      return refuse(stranger, format("rank %d was started as one of %d ranks, rank 0 as one of %d", hello.rank,
                                     hello.size, identity_.size));
    }
    Peer& peer = peers_[static_cast<std::size_t>(hello.rank)];
    if (peer.present) return refuse(stranger, format("rank %d was started twice", hello.rank));
    peer.present = true;
    const std::string ours = identity_.version.substr(0, sizeof hello.version - 1);
    if (hello.version != ours) {
      return refuse(stranger,
                    format("rank %d: version: got %s, expected the %s of rank 0. Start all ranks with one program",
                           hello.rank, escaped(hello.version).c_str(), escaped(ours).c_str()));
    }
    peer.socket = std::move(stranger.socket);
  }

  // Tells this rank why the run cannot start, and the others when they come.
  void refuse(Stranger& stranger, const std::string& reason) {
    const Error error(Exit::environment, reason);
    tell(stranger, error);
    if (!refusal_) deadline_ = std::min(deadline_, deadline_in(std::min(kRefusalSeconds, time_limit_s_ / 2)));
    refusal_ = refusal_.value_or(error);
  }

  // ---- rounds ----

  // One call of all ranks; false: all have left.
  bool round() {
    const auto waits = [](const Peer& peer) { return peer.waiting; };
    const auto left = [](const Peer& peer) { return peer.has_left; };
    std::optional<Deadline> begin;  // when the first rank came
    Deadline next_sign{};
    while (those(waits).size() < peers_.size()) {
      const std::vector<int> gone = those(left), come = those(waits);
      if (gone.size() == peers_.size()) return false;
      if (!gone.empty() && !come.empty()) throw ended_rank(gone[0]);
      const Deadline now = SocketClock::now();
      if (!come.empty() && !begin) {
        begin = now;
        next_sign = now + sign_interval();
      }
      std::vector<pollfd> waiting = peers_to_poll();
      Deadline wake = now + std::chrono::hours(1);
      if (begin) {
        wake = std::min(next_sign, require_in_time(*begin, now));
        if (now >= next_sign) {
          send_signs(waits);
          next_sign = now + sign_interval();
          continue;
        }
      }
      wait_for_any(waiting, wake);
      read_peers();
    }
    compare();
    reply();
    return true;
  }

  // Throws if a rank is late; otherwise returns when the first one will be.
  Deadline require_in_time(Deadline begin, Deadline now) const {
    std::vector<int> late;
    Deadline next = Deadline::max();
    const char* call = "";
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      const Peer& peer = peers_[r];
      if (peer.waiting) {
        call = name_of(peer.call.call);
        continue;
      }
      const Deadline limit = limit_from(std::max(begin, peer.last_sign));
      if (now >= limit) late.push_back(static_cast<int>(r));
      next = std::min(next, limit);
    }
    if (!late.empty()) throw late_ranks(late, call, time_limit_s_);
    return next;
  }

  std::vector<pollfd> peers_to_poll() const {
    std::vector<pollfd> descriptors;
    for (const Peer& peer : peers_) {
      if (peer.socket.open() && !peer.has_left) descriptors.push_back({peer.socket.fd(), POLLIN, 0});
    }
    return descriptors;
  }

  void read_peers() {
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      Peer& peer = peers_[r];
      while (peer.socket.open() && !peer.has_left) {
        const FrameReader::Got got = peer.reader.read(peer.socket);
        if (got == FrameReader::Got::nothing) break;
        if (got == FrameReader::Got::closed) {
          peer.socket.close();
          throw lost_rank(static_cast<int>(r));
        }
        take_frame(static_cast<int>(r), peer);
      }
    }
  }

  void take_frame(int rank, Peer& peer) {
    const FrameHeader& header = peer.reader.header();
    peer.last_sign = SocketClock::now();
    switch (header.kind) {
      case FrameKind::call:
        if (peer.waiting) break;
        peer.waiting = true;
        peer.call = header;
        std::swap(peer.brought, peer.reader.body());
        return;
      case FrameKind::abort:
        throw peer.reader.reason();
      case FrameKind::leave:
        peer.has_left = true;
        return;
      case FrameKind::alive:
        return;
      case FrameKind::reply:
        break;
    }
    fail(Exit::internal, "rank %d sent what no rank sends", rank);
  }

  // Checks that all ranks have made the same call, before anything is copied.
  void compare() const {
    const FrameHeader& first = peers_[0].call;
    for (std::size_t r = 1; r < peers_.size(); ++r) {
      const FrameHeader& other = peers_[r].call;
      if (other.call == first.call && other.root == first.root && other.sizes == first.sizes) continue;
      throw different_calls(name_of(first.call), static_cast<int>(r), name_of(other.call), other.call == first.call);
    }
  }

  void reply() {
    const FrameHeader first = peers_[0].call;
    if (first.call == CallName::exchange) {
      for (std::size_t r = 0; r < peers_.size(); ++r) peers_[r].writer.begin(FrameKind::reply, pieces_for(r));
    } else {
      const auto root = static_cast<std::size_t>(first.root);
      const std::vector<std::byte> all = first.call == CallName::gather      ? everything()
                                         : first.call == CallName::broadcast ? peers_.at(root).brought
                                                                             : std::vector<std::byte>();
      for (Peer& peer : peers_) peer.writer.begin(FrameKind::reply, all);
    }
    for (Peer& peer : peers_) peer.waiting = false;
    write_replies(name_of(first.call));
  }

  std::vector<std::byte> everything() const {
    std::vector<std::byte> all;
    for (const Peer& peer : peers_) all.insert(all.end(), peer.brought.begin(), peer.brought.end());
    return all;
  }

  // Of an exchange every rank brings the sizes of its pieces, and behind them the pieces, one for each rank.
  std::vector<std::byte> pieces_for(std::size_t rank) const {
    std::vector<std::byte> pieces;
    for (const Peer& peer : peers_) {
      std::vector<std::uint64_t> sizes(peers_.size());
      const std::span<const std::byte> brought = peer.brought;
      const std::size_t table = sizes.size() * sizeof sizes[0];
      if (brought.size() < table) fail(Exit::internal, "an exchange without its sizes");
      std::memcpy(sizes.data(), brought.data(), table);
      std::size_t begin = table;
      for (std::size_t r = 0; r < rank; ++r) begin += sizes[r];
      if (begin > brought.size() || sizes[rank] > brought.size() - begin) {
        fail(Exit::internal, "an exchange with other sizes than it says");
      }
      const auto piece = brought.subspan(begin, sizes[rank]);
      pieces.insert(pieces.end(), piece.begin(), piece.end());
    }
    return pieces;
  }

  // A rank that does not read what it has asked for is as late as one that does not come.
  void write_replies(const char* call) {
    const Deadline deadline = deadline_in(time_limit_s_);
    while (true) {
      std::vector<pollfd> waiting;
      for (std::size_t r = 0; r < peers_.size(); ++r) {
        Peer& peer = peers_[r];
        if (peer.writer.done()) continue;
        if (!peer.writer.write(peer.socket)) {
          peer.socket.close();
          throw lost_rank(static_cast<int>(r));
        }
        if (!peer.writer.done()) waiting.push_back({peer.socket.fd(), POLLOUT, 0});
      }
      if (waiting.empty()) return;
      if (SocketClock::now() >= deadline) {
        throw late_ranks(those([](const Peer& peer) { return !peer.writer.done(); }), call, time_limit_s_);
      }
      wait_for_any(waiting, deadline);
    }
  }

  // Tells the ranks that wait that the hub is at work; a rank that hears nothing concludes that rank 0 is stopped.
  void send_signs(bool (*to)(const Peer&)) {
    for (Peer& peer : peers_) {
      if (!to(peer) || peer.has_left || !peer.socket.open()) continue;
      peer.writer.begin(FrameKind::alive);
      if (!peer.writer.write_all(peer.socket, deadline_in(kLastWords))) peer.socket.close();
    }
  }

  // ---- the end ----

  void tell_all(const Error& error) noexcept {
    try {
      for (Peer& peer : peers_) {
        if (!peer.writer.done()) peer.socket.close();  // half a reply lies before the news: it cannot be read
        if (!peer.socket.open() || peer.has_left) continue;
        peer.writer.begin(error);
        if (!peer.writer.write_all(peer.socket, deadline_in(kLastWords))) peer.socket.close();
      }
      for (Stranger& stranger : strangers_) stranger.socket.close();
    } catch (const std::exception&) {  // no memory: the ranks see their connections end
      for (Peer& peer : peers_) peer.socket.close();
    }
  }

  // Reads until all have closed their connections: closing a socket with unread data resets its connection, and the
  // rank would lose what it has not read yet.
  void drain() noexcept {
    std::optional<Deadline> end;
    std::array<std::byte, 4096> discarded;
    while (true) {
      std::vector<pollfd> waiting;
      for (Peer& peer : peers_) {
        std::ptrdiff_t count = 1;
        while (peer.socket.open() && count > 0) count = read_some(peer.socket, discarded);
        if (count < 0) peer.socket.close();
        if (peer.socket.open()) waiting.push_back({peer.socket.fd(), POLLIN, 0});
      }
      if (waiting.empty()) return;
      const Deadline now = SocketClock::now();
      if (!end && !peers_[0].socket.open()) end = now + duration_of(kLinger);
      if (end && now >= *end) return;
      wait_for_any(waiting, end.value_or(now + std::chrono::hours(1)));
    }
  }

  Socket listener_, first_connection_;
  const RankIdentity identity_;
  const double time_limit_s_;
  std::vector<Peer> peers_;
  std::vector<Stranger> strangers_;
  bool warned_ = false;
  Deadline deadline_{};           // of the start
  std::optional<Error> refusal_;  // why the run cannot start; told when all ranks have come
  std::thread thread_;            // last: it starts when everything else exists
};

Rendezvous::Rendezvous(Socket listener, const RankIdentity& first_rank, double time_limit_s)
    : thread_(std::make_unique<Thread>(std::move(listener), first_rank, time_limit_s)) {}

Rendezvous::~Rendezvous() = default;

Socket Rendezvous::take_first_connection() {
  return thread_->take_first_connection();
}

}  // namespace weft
