#include "llmc/serve/http.h"

#include <charconv>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/log.h"
#include "llmc/base/signals.h"
#include "llmc/serve/http_asio.h"
#include "llmc/serve/http_connections.h"

namespace weft {

namespace {

constexpr auto kAcceptPause = std::chrono::milliseconds(100);  // after a failed accept, such as no free descriptor

}  // namespace

// Listens, accepts, and runs the thread of the connections.
class HttpServerState {
 public:
  HttpServerState(const HostPort& address, const HttpLimits& limits, HttpHandler handler, HttpErrorBody error_body,
                  HttpHeaderCheck check);

  void run();
  void accept();
  void stop(double seconds);

  HttpConnections connections;
  tcp::acceptor acceptor{connections.io};
  std::uint64_t accepts = 0;  // begun: the last one counts
  asio::steady_timer accept_pause{connections.io};
  RepeatedError failures;

  tcp::endpoint endpoint;  // where it listens
  std::thread thread;
};

HttpServerState::HttpServerState(const HostPort& address, const HttpLimits& limits, HttpHandler handler,
                                 HttpErrorBody error_body, HttpHeaderCheck check)
    : connections(limits, std::move(handler), std::move(error_body), std::move(check)) {
  const std::string shown = escaped(address.host) + format(", port %d", address.port);
  const auto expect = [&](const error_code& error, const char* action) {
    if (!error) return;
    const bool taken = error == asio::error::address_in_use;
    fail(Exit::environment, "cannot %s %s: %s%s", action, shown.c_str(), error.message().c_str(),
         taken ? ". Is another server running? Port 0 takes a free one" : "");
  };
  error_code error;
  const auto found = tcp::resolver(connections.io)
                         .resolve(address.host, std::to_string(address.port),
                                  tcp::resolver::passive | tcp::resolver::numeric_service, error);
  expect(error, "find the address");
  acceptor.open(found.begin()->endpoint().protocol(), error);
  expect(error, "open a socket for");
  acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  acceptor.bind(found.begin()->endpoint(), error);
  expect(error, "listen on");
  acceptor.listen(asio::socket_base::max_listen_connections, error);
  expect(error, "listen on");
  endpoint = acceptor.local_endpoint();
}

void HttpServerState::accept() {
  acceptor.async_accept([this, number = ++accepts](const error_code& error, tcp::socket socket) {
    if (connections.stopping || number != accepts) return;
    if (error) {
      accept_pause.expires_after(kAcceptPause);
      accept_pause.async_wait([this](const error_code& cancelled) {
        if (!cancelled) accept();
      });
      return;
    }
    try {
      connections.serve(std::move(socket));
    } catch (const std::bad_alloc&) {
      ++connections.refused;
    }
    accept();
  });
}

// Connections end by themselves where something goes wrong in them (HttpConnection::guard()). What is left is a task of
// post(), and memory that asio needs itself, perhaps for the accept that was pending: so another one takes its place.
void HttpServerState::run() {
  const auto work = asio::make_work_guard(connections.io);
  for (;;) {
    try {
      connections.io.run();
      return;
    } catch (const std::exception& error) {
      failures.log("the thread of the connections: " + escaped(error.what()));
    }
    error_code ignored;
    acceptor.cancel(ignored);
    accept_pause.cancel();
    ++accepts;
    if (!connections.stopping) asio::post(connections.io, [this] { accept(); });
  }
}

void HttpServerState::stop(double seconds) {
  const auto until = std::chrono::steady_clock::now() + duration_of(seconds);
  // Waited for, since from then on no connection hands the workers anything: they would not take it any more.
  const auto closing = std::make_shared<std::promise<void>>();
  asio::post(connections.io, [this, closing] {
    acceptor.close();
    accept_pause.cancel();
    connections.close_all_soon();
    closing->set_value();
  });
  closing->get_future().wait_until(until);
  connections.workers.finish();
  while (connections.open > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  asio::post(connections.io, [this] {
    connections.close_all();
    connections.io.stop();
  });
  thread.join();
}

// ---- the server -------------------------------------------------------------------------------------------------------

HttpServer::HttpServer(const HostPort& address, const HttpLimits& limits, HttpHandler handler, HttpErrorBody error_body,
                       HttpHeaderCheck check) {
  const SignalsElsewhere blocked;  // for the worker threads
  state_ =
      std::make_unique<HttpServerState>(address, limits, std::move(handler), std::move(error_body), std::move(check));
}

HttpServer::~HttpServer() {
  stop(0);
}

void HttpServer::start() {
  state_->accept();
  const SignalsElsewhere blocked;
  state_->thread = std::thread([state = state_.get()] { state->run(); });
}

void HttpServer::stop(double seconds) {
  if (state_->thread.joinable()) state_->stop(seconds);
}

std::uint16_t HttpServer::port() const {
  return state_->endpoint.port();
}

std::string HttpServer::url() const {
  const std::string host = state_->endpoint.address().to_string();
  return "http://" + (state_->endpoint.address().is_v6() ? "[" + host + "]" : host) + format(":%d", port());
}

bool HttpServer::loopback() const {
  return state_->endpoint.address().is_loopback();
}

HttpCounters HttpServer::counters() const {
  const HttpConnections& all = state_->connections;
  return {.connections = all.open,
          .refused = all.refused,
          .displaced = all.displaced,
          .cut_off = all.cut_off,
          .body_bytes = static_cast<std::int64_t>(all.body_bytes),
          .unsent_bytes = static_cast<std::int64_t>(all.unsent_bytes),
          .waiting = static_cast<std::int64_t>(all.workers.waiting())};
}

void HttpServer::post(std::function<void()> task) {
  asio::post(state_->connections.io, std::move(task));
}

HostPort parse_host_port(const std::string& text, const std::string& option) {
  const auto refuse = [&]() {
    fail(Exit::usage, "%s: got %s, expected HOST:PORT, as 127.0.0.1:8000 or [::1]:8000; port 0: any free one",
         option.c_str(), escaped(text).c_str());
  };
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) refuse();
  HostPort address{text.substr(0, colon), 0};
  const char *begin = text.data() + colon + 1, *end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(begin, end, address.port);
  if (error != std::errc() || rest != end) refuse();
  const bool brackets = address.host.size() > 2 && address.host.front() == '[' && address.host.back() == ']';
  if (brackets) address.host = address.host.substr(1, address.host.size() - 2);
  // A name with a NUL would be cut by the resolver; a colon without brackets is ambiguous.
  if (!brackets && address.host.find_first_of("[]:") != std::string::npos) refuse();
  if (address.host.find('\0') != std::string::npos) refuse();
  return address;
}

}  // namespace weft
