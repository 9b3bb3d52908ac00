#include "llmc/comm/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"

namespace weft {

namespace {

constexpr int kBacklog = 1024;  // of connections that wait to be accepted: as many ranks as may start at once

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses addresses_of(const char* name, std::int64_t port, int flags, std::string& problem) {
  addrinfo wanted{};
  wanted.ai_family = AF_UNSPEC;
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(name, std::to_string(port).c_str(), &wanted, &found);
  if (error != 0) problem = ::gai_strerror(error);
  return {error == 0 ? found : nullptr, &::freeaddrinfo};
}

void set_option(const Socket& socket, int level, int option) {
  const int on = 1;
  ::setsockopt(socket.fd(), level, option, &on, sizeof on);
}

// Small messages leave at once: a step has several, and each would wait for the acknowledgement of the one before.
void prepare_connection(const Socket& socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY);
}

Socket new_socket(const addrinfo& address) {
  return Socket(::socket(address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, address.ai_protocol));
}

// A listening socket; not open, with errno set, if the system refuses.
Socket listen_on(const addrinfo& address) {
  Socket socket = new_socket(address);
  if (!socket.open()) return socket;
  set_option(socket, SOL_SOCKET, SO_REUSEADDR);  // a run that has just ended leaves connections behind
  if (::bind(socket.fd(), address.ai_addr, address.ai_addrlen) == 0 && ::listen(socket.fd(), kBacklog) == 0) {
    return socket;
  }
  const int error = errno;
  socket.close();
  errno = error;
  return socket;
}

// Listens at the first of the addresses that can be had; not open, with the reason in `problem`, if none can.
Socket listen_on_first(const addrinfo* addresses, std::string& problem) {
  for (const addrinfo* each = addresses; each != nullptr; each = each->ai_next) {
    Socket socket = listen_on(*each);
    if (socket.open()) return socket;
    problem = std::strerror(errno);
    if (errno == EADDRINUSE) break;
  }
  return Socket();
}

bool connected(const Socket& socket, Deadline deadline, std::string& problem) {
  pollfd waiting{socket.fd(), POLLOUT, 0};
  wait_for_any({&waiting, 1}, deadline);
  if (waiting.revents == 0) {
    problem = "no answer";
    return false;
  }
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) problem = std::strerror(error);
  return error == 0;
}

std::ptrdiff_t moved(ssize_t result) {
  if (result > 0) return result;
  return result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? 0 : -1;
}

}  // namespace

Deadline deadline_in(double seconds) {
  return SocketClock::now() + duration_of(seconds);
}

void Socket::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

std::pair<Socket, Socket> connected_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
    fail(Exit::environment, "cannot connect the ranks: %s", std::strerror(errno));
  }
  return {Socket(ends[0]), Socket(ends[1])};
}

Socket listen_at(const std::string& address, std::int64_t port) {
  std::string problem;
  const Addresses named = addresses_of(address.c_str(), port, 0, problem);
  Socket socket = listen_on_first(named.get(), problem);
  if (!socket.open() && problem != std::strerror(EADDRINUSE)) {
    const Addresses any = addresses_of(nullptr, port, AI_PASSIVE, problem);
    socket = listen_on_first(any.get(), problem);
  }
  if (!socket.open()) {
    fail(Exit::environment, "port %lld of %s: cannot listen for the ranks: %s. Set MASTER_PORT to a free port",
         static_cast<long long>(port), escaped(address).c_str(), problem.c_str());
  }
  return socket;
}

std::int64_t port_of(const Socket& listener) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

Socket duplicate_of(const Socket& socket) {
  Socket second(::fcntl(socket.fd(), F_DUPFD_CLOEXEC, 0));
  if (!second.open()) fail(Exit::environment, "cannot duplicate a socket: %s", std::strerror(errno));
  return second;
}

Socket connect_to(const std::string& address, std::int64_t port, Deadline deadline, std::string& problem) {
  const Addresses found = addresses_of(address.c_str(), port, 0, problem);
  for (const addrinfo* each = found.get(); each != nullptr; each = each->ai_next) {
    Socket socket = new_socket(*each);
    if (!socket.open()) {
      problem = std::strerror(errno);
      continue;
    }
    if (::connect(socket.fd(), each->ai_addr, each->ai_addrlen) != 0 && errno != EINPROGRESS) {
      problem = std::strerror(errno);
      continue;
    }
    if (!connected(socket, deadline, problem)) continue;
    prepare_connection(socket);
    return socket;
  }
  return Socket();
}

Socket accept_from(const Socket& listener, std::string& from) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  auto* const general = reinterpret_cast<sockaddr*>(&address);
  Socket socket(::accept4(listener.fd(), general, &size, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!socket.open()) return socket;
  char name[NI_MAXHOST] = "?";
  ::getnameinfo(general, size, name, sizeof name, nullptr, 0, NI_NUMERICHOST);
  from = name;
  prepare_connection(socket);
  return socket;
}

std::ptrdiff_t read_some(const Socket& socket, std::span<std::byte> to) {
  return to.empty() ? 0 : moved(::recv(socket.fd(), to.data(), to.size(), 0));
}

std::ptrdiff_t peek_some(const Socket& socket, std::span<std::byte> to) {
  return moved(::recv(socket.fd(), to.data(), to.size(), MSG_PEEK));
}

std::ptrdiff_t write_some(const Socket& socket, std::span<const std::byte> from) {
  return from.empty() ? 0 : moved(::send(socket.fd(), from.data(), from.size(), MSG_NOSIGNAL));
}

void wait_for_any(std::span<pollfd> descriptors, Deadline deadline) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::ceil<milliseconds>(deadline - SocketClock::now());
  const auto limited = std::clamp<milliseconds>(left, milliseconds(0), milliseconds(3'600'000));
  for (pollfd& each : descriptors) each.revents = 0;
  if (::poll(descriptors.data(), descriptors.size(), static_cast<int>(limited.count())) < 0) {
    for (pollfd& each : descriptors) each.revents = 0;
  }
}

}  // namespace weft
