// TCP between the ranks of a run: sockets that never block, and waits with a deadline. POSIX.1-2017.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace weft {

using SocketClock = std::chrono::steady_clock;
using Deadline = SocketClock::time_point;
Deadline deadline_in(double seconds);

// Owns a file descriptor; moved, never copied.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void close();
  // Gives the descriptor away.
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

// Both ends of a connection inside this process. Exit::environment if the system refuses.
std::pair<Socket, Socket> connected_pair();

// Listens at a name or address of this machine and a port; port 0: one that is free. If this machine cannot
// listen at that name (a container behind another address), it listens at all of its addresses.
// Exit::environment names the port that is taken.
Socket listen_at(const std::string& address, std::int64_t port);
std::int64_t port_of(const Socket& listener);
// A second descriptor of the same socket.
Socket duplicate_of(const Socket& socket);

// A connection to the listener; not open, with the reason in `problem`, if there is none before the deadline.
Socket connect_to(const std::string& address, std::int64_t port, Deadline deadline, std::string& problem);

// A connection that came to the listener, with the peer's address in `from`; not open if none waits.
Socket accept_from(const Socket& listener, std::string& from);

// Bytes moved now: 0 if the other side has to act first, -1 if the connection has ended.
std::ptrdiff_t read_some(const Socket& socket, std::span<std::byte> to);
// The same, but the bytes stay to be read again.
std::ptrdiff_t peek_some(const Socket& socket, std::span<std::byte> to);
std::ptrdiff_t write_some(const Socket& socket, std::span<const std::byte> from);

// Waits until one of the descriptors is ready or the time has come. poll(2) with a deadline; a signal ends it early.
void wait_for_any(std::span<pollfd> descriptors, Deadline deadline);

// Memory as bytes, of one object.
template <typename T>
std::span<std::byte> bytes_of(T& object) {
  return {reinterpret_cast<std::byte*>(&object), sizeof object};
}
template <typename T>
std::span<const std::byte> const_bytes_of(const T& object) {
  return {reinterpret_cast<const std::byte*>(&object), sizeof object};
}

}  // namespace weft
