// A rank's side of its connection to the hub (llmc/comm/rendezvous.h).
#include "llmc/comm/socket_ranks.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <thread>

#include "llmc/base/clock.h"
#include "llmc/base/hash.h"
#include "llmc/comm/frame_io.h"
#include "llmc/comm/rank_errors.h"

namespace weft {

namespace {

constexpr auto kBetweenAttempts = std::chrono::milliseconds(50);
constexpr auto kBetweenPeeks = std::chrono::milliseconds(1);
constexpr double kAbortSeconds = 1;  // in which an abort has to be on its way

std::uint64_t hash_of(std::span<const Range> parts) {
  return xxh3_64(parts.data(), parts.size_bytes());
}

class SocketRanks final : public Communicator {
 public:
  SocketRanks(Socket to_hub, const RankIdentity& self, double time_limit_s, std::unique_ptr<Rendezvous> hub)
      : rank_(self.rank),
        size_(self.size),
        time_limit_s_(time_limit_s),
        hub_(std::move(hub)),
        socket_(std::move(to_hub)) {
    wait_for_reply("the start");
  }
  ~SocketRanks() override {
    const std::lock_guard<std::mutex> lock(sending_);
    if (!ended() && finish_frame()) {
      writer_.begin(FrameKind::leave);
      finish_frame();
    }
    socket_.close();
  }
  SocketRanks(const SocketRanks&) = delete;
  SocketRanks& operator=(const SocketRanks&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void barrier() override { call({FrameKind::call, CallName::barrier, 0, 0, 0, 0}, {}); }

  void exchange(const float* values, std::span<const Range> parts, float* received) override {
    const std::int64_t mine = parts[me()].size(), piece = piece_of(sizeof(float)) / size_ + 1;
    std::vector<std::byte> brought;
    for_pieces(parts, piece, [&](const std::vector<Range>& now, std::int64_t first) {
      brought.clear();
      for (const Range& part : now) append(brought, static_cast<std::uint64_t>(part.size()) * sizeof(float));
      for (const Range& part : now) append(brought, std::span(values + part.begin, values + part.end));
      const auto got = call({FrameKind::call, CallName::exchange, 0, 0, hash_of(parts), 0}, brought);
      const std::int64_t count = now[me()].size();
      require_bytes(got, size_ * count * kFloat);
      for (std::int64_t r = 0; r < size_ && count > 0; ++r) {
        std::memcpy(received + r * mine + first, got.data() + r * count * kFloat,
                    static_cast<std::size_t>(count * kFloat));
      }
    });
  }

  void gather_bytes(std::byte* values, std::span<const Range> parts) override {
    for_pieces(parts, piece_of(1), [&](const std::vector<Range>& now, std::int64_t) {
      const auto brought = std::span(values + now[me()].begin, values + now[me()].end);
      const auto got = call({FrameKind::call, CallName::gather, 0, 0, hash_of(parts), 0}, brought);
      std::int64_t bytes = 0;
      for (const Range& part : now) bytes += part.size();
      require_bytes(got, bytes);
      const std::byte* from = got.data();
      for (const Range& part : now) {
        if (&part != &now[me()]) std::copy(from, from + part.size(), values + part.begin);
        from += part.size();
      }
    });
  }

  void broadcast_bytes(std::byte* values, std::int64_t bytes, int root) override {
    const Range all[] = {{0, bytes}};
    for_pieces(all, piece_of(1), [&](const std::vector<Range>& now, std::int64_t first) {
      const auto part = std::span(values + first, values + now[0].end);
      const auto got = call({FrameKind::call, CallName::broadcast, root, 0, hash_of(all), 0},
                            rank_ == root ? part : std::span<std::byte>());
      require_bytes(got, now[0].size());
      if (rank_ != root) std::copy(got.begin(), got.end(), part.begin());
    });
  }

  void check() override {
    require_going_on();
    take_frames("check()");
  }

  double sign_interval_s() const override { return time_limit_s_ / 4; }

  void beat() noexcept override {
    try {
      std::unique_lock<std::mutex> lock(sending_, std::try_to_lock);
      if (!lock.owns_lock() || ended()) return;  // a call that is being sent is a sign
      if (writer_.done()) writer_.begin(FrameKind::alive);
      finish_frame();  // or a later sign does, or the next call
    } catch (...) {    // the next one will do
    }
  }

  void abort(const Error& error) noexcept override {
    try {
      const Error reason(error.code(), format("rank %d: %s", rank_, error.what()));
      if (!end(reason)) return;
      // A call on another thread may be sending: it holds the connection no longer than the hub takes to read.
      std::unique_lock<std::mutex> lock(sending_, std::try_to_lock);
      for (const Deadline limit = deadline_in(kAbortSeconds); !lock.owns_lock() && SocketClock::now() < limit;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        [[maybe_unused]] const bool taken = lock.try_lock();
      }
      if (!lock.owns_lock() || !finish_frame()) return;
      writer_.begin(reason);
      finish_frame();
    } catch (...) {  // no memory for the reason: the end of the connection ends the others without it
    }
  }

 private:
  static constexpr std::int64_t kFloat = sizeof(float);
  std::size_t me() const { return static_cast<std::size_t>(rank_); }
  // Elements of each rank's part that move at once.
  std::int64_t piece_of(std::int64_t element_bytes) const {
    return std::max<std::int64_t>(1, std::int64_t{kPieceBytes} / size_ / element_bytes);
  }
  template <typename T>
  static void append(std::vector<std::byte>& bytes, const T& value) {
    const auto more = std::as_bytes(std::span(&value, 1));
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  static void append(std::vector<std::byte>& bytes, std::span<const float> values) {
    const auto more = std::as_bytes(values);
    bytes.insert(bytes.end(), more.begin(), more.end());
  }

  // Calls work(pieces, first) for the elements from `first` on of each part, `piece` at a time; once even if there are
  // none.
  template <typename Work>
  static void for_pieces(std::span<const Range> parts, std::int64_t piece, const Work& work) {
    std::int64_t first = 0;
    do {
      work(pieces_of(parts, first, piece), first);
      first += piece;
    } while (first < longest_of(parts));
  }

  static void require_bytes(std::span<const std::byte> got, std::int64_t expected) {
    if (std::ssize(got) != expected) {
      fail(Exit::internal, "the ranks sent %td bytes, expected %lld", std::ssize(got),
           static_cast<long long>(expected));
    }
  }

  // One call: what it brings, and what it gets, which stays until the next.
  std::span<const std::byte> call(const FrameHeader& header, std::span<const std::byte> brought) {
    require_going_on();
    const char* const name = name_of(header.call);
    {
      const std::lock_guard<std::mutex> lock(sending_);
      heard_ = SocketClock::now();
      send_frame(name);  // the rest of a sign
      writer_.begin(header, brought);
      send_frame(name);
    }
    return wait_for_reply(name);
  }

  void send_frame(const char* name) {
    while (!writer_.done()) {
      const bool open = writer_.write(socket_);
      if (writer_.done()) break;
      // A hub that has ended the run does not read any more, but has sent the reason.
      if (!open) lose(name);
      pollfd both{socket_.fd(), POLLIN | POLLOUT, 0};
      wait_for_any({&both, 1}, patience());
      take_frames(name);
      require_sign(name);
    }
  }

  // Sends what is left of the last frame; false if the hub does not take it in time. No other frame may begin before.
  bool finish_frame() { return writer_.write_all(socket_, deadline_in(kAbortSeconds)); }

  std::span<const std::byte> wait_for_reply(const char* name) {
    heard_ = SocketClock::now();
    while (!take_frames(name)) {
      require_sign(name);
      pollfd waiting{socket_.fd(), POLLIN, 0};
      wait_for_any({&waiting, 1}, patience());
    }
    return reader_.body();
  }

  // Takes what has come; true: it was a reply.
  bool take_frames(const char* name) {
    while (true) {
      const FrameReader::Got got = reader_.read(socket_);
      if (got == FrameReader::Got::nothing) return false;
      if (got == FrameReader::Got::closed) throw_end(lost_rank(0));
      heard_ = SocketClock::now();
      switch (reader_.header().kind) {
        case FrameKind::reply:
          return true;
        case FrameKind::abort:
          throw_end(reader_.reason());
        case FrameKind::alive:
          continue;
        default:
          throw_end(Error(Exit::internal, format("rank 0 sent what no hub sends, in %s", name)));
      }
    }
  }

  // The hub gives a sign four times within the limit: a rank that hears none has lost rank 0.
  Deadline patience() const { return heard_ + duration_of(1.25 * time_limit_s_); }
  void require_sign(const char* name) {
    if (SocketClock::now() >= patience()) throw_end(late_ranks({0}, name, time_limit_s_));
  }
  [[noreturn]] void lose(const char* name) {
    take_frames(name);
    throw_end(lost_rank(0));
  }

  // The first error stays; false: there was one before.
  bool end(const Error& error) {
    const std::lock_guard<std::mutex> lock(ending_);
    if (ended_) return false;
    ended_ = error;
    return true;
  }
  std::optional<Error> ended() const {
    const std::lock_guard<std::mutex> lock(ending_);
    return ended_;
  }
  void require_going_on() const {
    if (const std::optional<Error> error = ended()) throw *error;
  }
  [[noreturn]] void throw_end(const Error& error) {
    end(error);
    throw *ended();
  }

  const int rank_, size_;
  const double time_limit_s_;
  std::unique_ptr<Rendezvous> hub_;  // on rank 0; ends after the connection
  std::mutex sending_;
  Socket socket_;       // written under sending_, read by the thread that makes the calls
  FrameWriter writer_;  // used under sending_
  FrameReader reader_;
  Deadline heard_{};  // the last sign of the hub
  mutable std::mutex ending_;
  std::optional<Error> ended_;  // guarded by ending_
};

// Connects and says who this rank is; not open, with the reason in `problem`, if that cannot be.
Socket knock(const RankIdentity& self, const MeetingPoint& point, Deadline deadline, std::string& problem) {
  Socket socket = connect_to(point.address, point.port, deadline, problem);
  if (!socket.open()) return socket;
  Hello hello;
  hello.token = self.token;
  hello.rank = self.rank;
  hello.size = self.size;
  self.version.copy(hello.version, sizeof hello.version - 1);
  hello.job = self.job();
  const auto bytes = const_bytes_of(hello);
  if (write_some(socket, bytes) != std::ssize(bytes)) {
    problem = "the connection was closed";
    socket.close();
  }
  return socket;
}

// Waits for the first sign of the hub, a whole header; false, with the reason in `problem`, if something else comes, or the
// end of the connection: the port belongs to somebody who does not know this run.
bool is_answered(const Socket& socket, Deadline deadline, std::string& problem) {
  problem = "no answer";
  while (SocketClock::now() < deadline) {
    pollfd waiting{socket.fd(), POLLIN | POLLRDHUP, 0};
    wait_for_any({&waiting, 1}, deadline);
    FrameHeader header;  // what has not come yet is as in a frame
    const std::ptrdiff_t count = peek_some(socket, bytes_of(header));
    if (count == sizeof header && is_frame(header)) return true;
    const bool ended = count < 0 || (waiting.revents & POLLRDHUP) != 0;
    if (ended || !is_frame(header)) {
      problem = "who listens there is not rank 0 of this run";
      return false;
    }
    if (count > 0) std::this_thread::sleep_for(kBetweenPeeks);  // poll(2) does not wait while there are bytes to read
  }
  return false;
}

Socket connect_to_hub(const RankIdentity& self, const MeetingPoint& point, double time_limit_s) {
  const Deadline deadline = deadline_in(time_limit_s);
  std::string problem = "no answer";
  while (SocketClock::now() < deadline) {
    Socket socket = knock(self, point, deadline, problem);
    if (socket.open() && is_answered(socket, deadline, problem)) return socket;
    std::this_thread::sleep_for(kBetweenAttempts);
  }
  fail(Exit::environment, "rank 0 did not come to the start within %g s (port %lld of %s: %s)", time_limit_s,
       static_cast<long long>(point.port), escaped(point.address).c_str(), problem.c_str());
}

}  // namespace

std::unique_ptr<Communicator> rendezvous(const RankIdentity& self, const MeetingPoint& point, double time_limit_s) {
  if (self.rank != 0) {
    return std::make_unique<SocketRanks>(connect_to_hub(self, point, time_limit_s), self, time_limit_s, nullptr);
  }
  Socket listener = point.listener >= 0 ? Socket(point.listener) : listen_at(point.address, point.port);
  auto hub = std::make_unique<Rendezvous>(std::move(listener), self, time_limit_s);
  Socket connection = hub->take_first_connection();
  return std::make_unique<SocketRanks>(std::move(connection), self, time_limit_s, std::move(hub));
}

}  // namespace weft
