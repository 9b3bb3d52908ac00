// A client of the tests of the server, which sends bytes as they are; and waiting for what another thread does.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

namespace weft {

// A client that sends bytes as they are.
class Client {
 public:
  explicit Client(std::uint16_t port, int receive_buffer = 0) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    if (receive_buffer > 0) ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  // One that sends `first` at once.
  Client(std::uint16_t port, const std::string& first, int receive_buffer = 0) : Client(port, receive_buffer) {
    send(first);
  }
  ~Client() { ::close(fd_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void send(const std::string& data) const {
    EXPECT_EQ(::send(fd_, data.data(), data.size(), MSG_NOSIGNAL), static_cast<ssize_t>(data.size()));
  }
  // As much of `data` as the sockets take at once.
  std::size_t try_send(const std::string& data) const {
    const ssize_t sent = ::send(fd_, data.data(), data.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return sent > 0 ? static_cast<std::size_t>(sent) : 0;
  }
  // The next bytes: fewer than `most` if the server closes the connection, or if nothing comes for five seconds.
  std::string receive_bytes(std::size_t most) const {
    std::string text(most, '\0');
    std::size_t have = 0;
    while (have < most) {
      pollfd ready{fd_, POLLIN, 0};
      if (::poll(&ready, 1, 5000) == 0) break;
      const ssize_t got = ::recv(fd_, text.data() + have, most - have, 0);
      if (got <= 0) break;
      have += static_cast<std::size_t>(got);
    }
    text.resize(have);
    return text;
  }
  // What comes until the server closes the connection, or until `end` has come; "TIME" is appended after five seconds.
  std::string receive(const std::string& end = "") const {
    std::string text;
    using Clock = std::chrono::steady_clock;
    const Clock::time_point until = Clock::now() + std::chrono::seconds(5);
    char piece[4096];
    while (end.empty() || text.find(end) == std::string::npos) {
      pollfd ready{fd_, POLLIN, 0};
      if (::poll(&ready, 1, 50) == 0) {
        if (Clock::now() > until) return text + "TIME";
        continue;
      }
      const ssize_t got = ::recv(fd_, piece, sizeof piece, 0);
      if (got <= 0) break;
      text.append(piece, static_cast<std::size_t>(got));
    }
    return text;
  }

 private:
  int fd_;
};

inline bool eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 500; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace weft
