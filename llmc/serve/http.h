// An HTTP/1.1 server for one handler: connections, limits and time limits. Built on Boost.Beast and Asio, which only its
// own files include: http.cpp listens, http_connections.h has the connections, http_request_reader.h what is read, and
// send_queue.h what is sent.
//
// One thread reads and writes all connections. Handlers of requests with a body run on worker threads, because parsing
// and tokenizing a long prompt takes time, small bodies first (work_queue.h); all others run on the thread of the connections
// and must be quick. Nothing here waits for a client: what cannot be written at once is queued, up to a limit. The next
// request of a connection is read when the answer before it has been written.
//
// What is refused without asking the handler, with a JSON error and a closed connection: malformed requests (400), bodies
// over the limit (413), headers over the limit (431), requests beyond the memory for bodies (503). Requests whose header the
// check refuses are answered before their body is read; the connection is closed if there is one. Every answer has the id of
// its request, as X-Request-Id.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weft {

struct HttpLimits {
  std::size_t header_bytes = 16 << 10;
  std::size_t body_bytes = 4 << 20;
  // Bodies of all connections together: the bytes that have come count until the handler has returned or has answered.
  std::size_t all_body_bytes = 256 << 20;
  // Unsent bytes of a stream above which its client has to take as many within stall_seconds: otherwise it is cut off for
  // being too slow. One event may be larger.
  std::size_t backlog_bytes = 1 << 20;
  double stall_seconds = 2;
  // Unsent bytes of all connections together, and of one stream a quarter of that: an answer that would exceed them is 503,
  // a stream is cut off. Small ones always pass.
  std::size_t all_unsent_bytes = 512 << 20;
  std::size_t socket_buffer_bytes = 256 << 10;  // of the kernel, for what is sent
  std::int64_t connections = 1024;              // a further one displaces an idle one, or is closed at once
  double read_seconds = 30;                     // from the first byte of a request to its last
  double idle_seconds = 60;                     // between requests
  double write_seconds = 30;                    // in which a client takes write_bytes, or all that waits for it
  std::size_t write_bytes = 256 << 10;
  double linger_seconds = 2;  // for a client to read the last answer and close the connection
  int workers = 2;
};

struct HttpRequest {
  std::string id;                                                           // request_id() of X-Request-Id
  std::string method;                                                       // "GET"; HEAD is handed over as GET
  std::string path;                                                         // decoded, without the query
  std::string host, origin, authorization, content_type, content_encoding;  // header fields; empty: none
  std::string body;
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;  // further ones
};

// One request and the way to answer it, either by respond() or by begin_stream(), send()..., end_stream(). All functions
// may be called from any thread; none of them waits. Calls after the client has gone do nothing.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;
  virtual const HttpRequest& request() const = 0;
  virtual std::string take_body() = 0;  // only before the handler returns; request().body is empty afterwards
  virtual void respond(HttpResponse response) = 0;
  // 200, text of unknown length. HTTP/1.1: chunked; HTTP/1.0: up to the end of the connection.
  virtual void begin_stream(const std::string& content_type) = 0;
  virtual void send(std::string data) = 0;
  virtual void end_stream() = 0;
  virtual void abandon() = 0;  // closes the connection, in the middle of the answer if need be
  // `gone` is called once, on the thread of the connections, if the client closes the connection, or is cut off, before
  // it has the whole answer; at once if that has happened.
  virtual void on_gone(std::function<void()> gone) = 0;
  virtual bool gone() const = 0;
};

// Must not throw.
using HttpHandler = std::function<void(const std::shared_ptr<HttpExchange>&)>;

// Called on the thread of the connections with the header of a request, before its body is read. Returns the answer of one
// that is refused. Must not throw.
using HttpHeaderCheck = std::function<std::optional<HttpResponse>(const HttpRequest&)>;

// The body of an answer that HTTP itself gives, such as 413, in the form that the handler's clients expect. `request`: as far as
// it could be read.
using HttpErrorBody = std::function<std::string(const HttpRequest& request, int status, const std::string& message)>;

// HOST:PORT, as "127.0.0.1:8000", "[::1]:8000" or "localhost:0". Exit::usage with `option` if it is not.
struct HostPort {
  std::string host;  // without brackets
  std::uint16_t port = 0;
};
HostPort parse_host_port(const std::string& text, const std::string& option);

struct HttpCounters {
  std::int64_t connections = 0;  // open now
  std::int64_t refused = 0;      // closed at once, because there were too many
  std::int64_t displaced = 0;    // closed without a request, for a new one
  std::int64_t cut_off = 0;      // streams whose client did not keep up
  // What is held now: bodies that have come and are not answered, bytes that clients have not taken, requests that wait for
  // a worker.
  std::int64_t body_bytes = 0, unsent_bytes = 0, waiting = 0;
};

class HttpServerState;

class HttpServer {
 public:
  // Binds and listens; answers from start() on. The address is in use, or not this machine's: Exit::environment.
  // `check` may be null.
  HttpServer(const HostPort& address, const HttpLimits& limits, HttpHandler handler, HttpErrorBody error_body,
             HttpHeaderCheck check = nullptr);
  ~HttpServer();  // stop(0)
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  void start();
  std::uint16_t port() const;  // the chosen one, if 0 was asked for
  std::string url() const;     // "http://127.0.0.1:8000"
  bool loopback() const;       // only this machine can connect
  HttpCounters counters() const;

  // Runs `task` on the thread of the connections.
  void post(std::function<void()> task);
  // Accepts no more, closes connections without a request, gives the others `seconds` to take their answers, and ends the
  // threads. No handler runs afterwards.
  void stop(double seconds);

 private:
  std::unique_ptr<HttpServerState> state_;
};

}  // namespace weft
