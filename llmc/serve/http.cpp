#include "llmc/serve/http.h"

#include <poll.h>

// Boost is used from its headers alone: no library of it is linked.
#define BOOST_ERROR_CODE_HEADER_ONLY
#define BOOST_SYSTEM_NO_DEPRECATED
#include <algorithm>
#include <atomic>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <charconv>
#include <chrono>
#include <deque>
#include <iterator>
#include <optional>
#include <thread>
#include <unordered_set>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/log.h"
#include "llmc/base/signals.h"
#include "llmc/serve/request_target.h"
#include "llmc/serve/work_queue.h"

namespace weft {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;
using tcp = asio::ip::tcp;

namespace {

constexpr std::size_t kReadBytes = 16 << 10;       // asked of the socket at once
constexpr std::size_t kPipelinedBytes = 64 << 10;  // of later requests: no more is read while one is being answered
constexpr std::size_t kBufferBytes = 128 << 10;    // of a connection: also the longest line between two chunks
constexpr std::size_t kSmallBytes = 64 << 10;      // of an answer that passes whatever waits for clients
constexpr std::size_t kBuffersAtOnce = 64;         // pieces of the queue in one write
// How often a client of which nothing is read is asked whether it is still there.
constexpr auto kWatchInterval = std::chrono::milliseconds(500);
constexpr auto kAcceptPause = std::chrono::milliseconds(100);  // after a failed accept, such as no free descriptor

const char* reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 413:
      return "Payload Too Large";
    case 415:
      return "Unsupported Media Type";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 503:
      return "Service Unavailable";
    default:
      return "Internal Server Error";
  }
}

}  // namespace

// ---- what connections share -------------------------------------------------------------------------------------------

namespace {
class Connection;
}

class HttpServerState {
 public:
  HttpServerState(const HostPort& address, const HttpLimits& limits_of_server, HttpHandler handler_of_requests,
                  HttpErrorBody body_of_errors, HttpHeaderCheck check_of_headers);

  void run();
  void accept();
  void take(tcp::socket socket);
  void stop(double seconds);
  bool make_room();
  bool reserve_body(std::size_t bytes) {
    if (bytes > limits.all_body_bytes - body_bytes) return false;
    body_bytes += bytes;
    return true;
  }

  const HttpLimits limits;
  const HttpHandler handler;
  const HttpErrorBody error_body;
  const HttpHeaderCheck check;
  std::atomic<std::int64_t> open{0}, refused{0}, displaced{0}, cut_off{0};
  // Changed on the thread of the connections alone.
  std::atomic<std::size_t> body_bytes{0};      // that have come
  std::atomic<std::size_t> unsent_bytes{0};    // in the queues of all connections
  RepeatedError failed_connections, failures;  // lines of the log that a client may be able to cause

  // Used on the thread of the connections alone. Declared before `io`, whose destructor destroys the last connections.
  std::unordered_set<Connection*> connections;
  bool stopping = false;
  asio::io_context io{1};
  tcp::acceptor acceptor{io};
  std::uint64_t accepts = 0;  // begun: the last one counts
  asio::steady_timer accept_pause{io};

  tcp::endpoint endpoint;  // where it listens
  WorkQueue workers;
  std::thread thread;
};

// ---- one connection ---------------------------------------------------------------------------------------------------

namespace {

class Exchange;

// Reads a request, hands it over, writes the answer, and so on. Everything runs on the thread of the connections.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(HttpServerState& server, tcp::socket socket)
      : server_(server),
        socket_(std::move(socket)),
        read_timer_(server.io),
        write_timer_(server.io),
        watch_timer_(server.io) {
    server_.connections.insert(this);
    ++server_.open;
  }
  // Closed before, unless an exception has left nothing that holds it.
  ~Connection() {
    try {
      close();
    } catch (const std::bad_alloc&) {  // of who is told that it has gone
    }
    server_.connections.erase(this);
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void next_request();
  void close();
  void close_soon();  // after the answer that is being made or written, if there is one
  // Calls `action`; closes the connection if that throws, which is for want of memory: nothing of it would go on.
  template <typename Action>
  void guard(const Action& action) {
    try {
      action();
    } catch (const std::exception& error) {
      server_.failed_connections.log("a connection failed: " + escaped(error.what()));
      close();
    }
  }

  // Since when the connection is without a request; nothing if it has one.
  std::optional<std::chrono::steady_clock::time_point> idle_since() const {
    return phase_ == Phase::idle && !closed_ ? std::optional(idle_since_) : std::nullopt;
  }

  bool has_data() const {
    error_code ignored;
    return socket_.available(ignored) > 0;
  }

  // From the exchange that is being answered.
  void respond(HttpResponse response);
  void begin_stream(const std::string& content_type);
  void send(const std::string& data);
  void end_stream();

 private:
  using Parser = http::request_parser<http::string_body>;
  enum class Phase {
    idle,       // between requests
    reading,    // a request
    answering,  // exchange_ is with the handler
    flushing,   // the answer is complete, but not yet written
    lingering,  // the last answer is written; what the client still sends is thrown away
  };

  void read_some();
  void read_ahead();
  void watch();
  void on_data();
  void read_header();
  void on_header(const error_code& error);
  HttpRequest header_fields() const;
  std::string target_error();
  void read_body();
  void parse_body(error_code& error);
  void answer_read_error(const error_code& error);
  void refuse(int status, const std::string& message);
  HttpResponse error_response(int status, const std::string& message) const;
  void hand_over();
  void finish_answer();
  void queue(std::string data, std::string more = {});
  bool falls_behind(std::size_t bytes);
  std::vector<asio::const_buffer> next_buffers() const;
  void write();
  void take_written(std::size_t bytes);
  void on_written(std::size_t bytes);
  void on_flushed();
  void limit(asio::steady_timer& timer, double seconds);
  static void lift_limit(asio::steady_timer& timer);
  void limit_reading(double seconds);

  HttpServerState& server_;
  tcp::socket socket_;
  asio::steady_timer read_timer_, write_timer_, watch_timer_;
  Phase phase_ = Phase::idle;
  std::chrono::steady_clock::time_point idle_since_;
  bool closed_ = false, close_after_ = false;

  boost::beast::flat_buffer buffer_{kBufferBytes};
  // A read_some() is pending, as it mostly is while a request is answered (read_ahead()).
  bool reads_ = false;
  std::optional<Parser> parser_;
  HttpRequest request_;       // that is read
  std::size_t reserved_ = 0;  // bytes of all_body_bytes, while the request is read: then the exchange has them

  std::shared_ptr<Exchange> exchange_;
  bool head_only_ = false;  // the request was HEAD
  bool chunked_ = false;    // the client knows chunks: HTTP/1.1

  std::deque<std::string> queue_;  // to be written
  std::size_t queued_bytes_ = 0;
  std::size_t front_written_ = 0;  // bytes of queue_.front()
  bool writes_ = false;            // a write waits for the client to take bytes
  bool write_limited_ = false;     // write_timer_ runs
  std::size_t taken_ = 0;          // bytes since it was set
  // While more than backlog_bytes are queued: what the client has taken, and until when that has to suffice.
  struct Stall {
    std::size_t taken;
    std::chrono::steady_clock::time_point until;
  };
  std::optional<Stall> stall_;
};

class Exchange final : public HttpExchange, public std::enable_shared_from_this<Exchange> {
 public:
  // Releases `reserved` bytes of all_body_bytes with release_body().
  Exchange(HttpServerState& server, std::weak_ptr<Connection> connection, HttpRequest request, std::size_t reserved)
      : server_(server), connection_(std::move(connection)), request_(std::move(request)), reserved_(reserved) {}

  const HttpRequest& request() const override { return request_; }
  std::string take_body() override { return std::move(request_.body); }
  bool gone() const override { return gone_; }

  void respond(HttpResponse response) override {
    to_connection([response = std::move(response)](Connection& c) mutable { c.respond(std::move(response)); });
  }
  void begin_stream(const std::string& content_type) override {
    to_connection([content_type](Connection& c) { c.begin_stream(content_type); });
  }
  void send(std::string data) override {
    to_connection([data = std::move(data)](Connection& c) { c.send(data); });
  }
  void end_stream() override {
    to_connection([](Connection& c) { c.end_stream(); });
  }
  void abandon() override {
    to_connection([](Connection& c) { c.close(); });
  }
  void on_gone(std::function<void()> gone) override {
    asio::dispatch(server_.io, [self = shared_from_this(), gone = std::move(gone)]() mutable {
      if (self->complete_) return;
      if (self->gone_) return gone();
      self->on_gone_ = std::move(gone);
    });
  }

  // On the thread of the connections.
  void set_gone() {
    gone_ = true;
    if (const std::function<void()> call = std::exchange(on_gone_, nullptr)) call();
  }
  void set_complete() {
    complete_ = true;
    on_gone_ = nullptr;
    release_body();
  }
  // When the handler has returned or the answer is complete, whatever comes first: a client that has its answer may send
  // the next body, though the handler's thread may not have run again since.
  void release_body() { server_.body_bytes -= std::exchange(reserved_, 0); }

 private:
  template <typename Call>
  void to_connection(Call call) {
    asio::dispatch(server_.io, [self = shared_from_this(), call = std::move(call)]() mutable {
      if (self->gone_ || self->complete_) return;
      const std::shared_ptr<Connection> connection = self->connection_.lock();
      if (connection) connection->guard([&] { call(*connection); });
    });
  }

  HttpServerState& server_;
  std::weak_ptr<Connection> connection_;
  HttpRequest request_;
  std::size_t reserved_;
  std::atomic<bool> gone_{false};
  bool complete_ = false;  // the connection has the whole answer
  std::function<void()> on_gone_;
};

// ---- reading ----

// Closes the connection when the time is over, unless limit() or lift_limit() comes before. The handler of a timer that
// has run out may wait in the queue behind the one that sets it anew: so what counts is what the timer is set to now.
void Connection::limit(asio::steady_timer& timer, double seconds) {
  timer.expires_after(duration_of(seconds));
  timer.async_wait([self = shared_from_this(), &timer](const error_code& cancelled) {
    if (!cancelled && timer.expiry() <= asio::steady_timer::clock_type::now()) self->close();
  });
}

void Connection::lift_limit(asio::steady_timer& timer) {
  timer.expires_at(asio::steady_timer::time_point::max());
}

void Connection::limit_reading(double seconds) {
  limit(read_timer_, seconds);
}

void Connection::next_request() {
  phase_ = Phase::idle;
  idle_since_ = std::chrono::steady_clock::now();
  limit_reading(server_.limits.idle_seconds);
  error_code ignored;
  if (!reads_) return buffer_.size() > 0 ? read_header() : read_some();
  // A request that came while the one before was answered is in the buffer. Cancelling the pending read calls its
  // handler, which goes on with what is there.
  if (buffer_.size() > 0) socket_.cancel(ignored);
}

void Connection::read_some() {
  if (std::exchange(reads_, true)) return;
  socket_.async_read_some(buffer_.prepare(kReadBytes),
                          [self = shared_from_this()](const error_code& error, std::size_t bytes) {
                            self->reads_ = false;
                            if (self->closed_) return;
                            // A client that has closed its side of the connection is taken to be gone.
                            if (error && error != asio::error::operation_aborted) return self->close();
                            self->buffer_.commit(bytes);
                            self->guard([&] { self->on_data(); });
                          });
}

// Reads on while a request is answered, so that a client that goes away is noticed. A client that sends requests without
// waiting for answers (RFC 9112, 9.3.2) is held back by TCP once kPipelinedBytes of them are here.
void Connection::read_ahead() {
  if (buffer_.size() < kPipelinedBytes) return read_some();
  watch();
}

// Where nothing is read, the end of what the client sends does not show: so the socket is asked for it now and then. If more
// is on its way than the sockets hold, the end has not come either: who has left then is noticed when it is written to.
void Connection::watch() {
  watch_timer_.expires_after(kWatchInterval);
  watch_timer_.async_wait([self = shared_from_this()](const error_code& cancelled) {
    if (cancelled || self->closed_ || self->phase_ != Phase::answering || self->reads_) return;
    pollfd socket{self->socket_.native_handle(), POLLRDHUP, 0};
    if (::poll(&socket, 1, 0) > 0) return self->close();
    self->watch();
  });
}

void Connection::on_data() {
  switch (phase_) {
    case Phase::idle:
      return read_header();
    case Phase::reading:
      return;
    case Phase::answering:
    case Phase::flushing:
      return read_ahead();
    case Phase::lingering:
      buffer_.consume(buffer_.size());
      return read_some();
  }
}

void Connection::read_header() {
  phase_ = Phase::reading;
  limit_reading(server_.limits.read_seconds);
  parser_.emplace();
  parser_->header_limit(static_cast<std::uint32_t>(server_.limits.header_bytes));
  parser_->body_limit(server_.limits.body_bytes);
  http::async_read_header(socket_, buffer_, *parser_,
                          [self = shared_from_this()](const error_code& error, std::size_t) {
                            if (!self->closed_) self->guard([&] { self->on_header(error); });
                          });
}

void Connection::on_header(const error_code& error) {
  if (error) return answer_read_error(error);
  // Beast treats a body in another transfer encoding as absent, and would parse its bytes as the next request.
  const auto encoding = parser_->get()[http::field::transfer_encoding];
  if (!encoding.empty() && (!boost::beast::iequals(encoding, "chunked") || parser_->get().version() < 11)) {
    return refuse(
        400, "Transfer-Encoding: got " + escaped(std::string(encoding)) + ", expected none, or chunked since HTTP 1.1");
  }
  request_ = header_fields();
  head_only_ = parser_->get().method() == http::verb::head;
  if (const std::string wrong = target_error(); !wrong.empty()) return refuse(400, wrong);
  if (std::optional<HttpResponse> refusal = server_.check ? server_.check(request_) : std::nullopt) {
    if (!parser_->is_done() || !parser_->get().keep_alive()) close_after_ = true;
    return respond(std::move(*refusal));
  }
  const auto expect = parser_->get()[http::field::expect];
  if (boost::beast::iequals(expect, "100-continue") && parser_->get().version() >= 11 && !parser_->is_done()) {
    queue("HTTP/1.1 100 Continue\r\n\r\n");
  }
  parser_->eager(true);
  read_body();
}

HttpRequest Connection::header_fields() const {
  const auto& message = parser_->get();
  const auto field = [&](http::field name) { return std::string(message[name]); };
  HttpRequest request;
  request.method = message.method() == http::verb::head ? "GET" : std::string(message.method_string());
  request.host = field(http::field::host);
  request.origin = field(http::field::origin);
  request.authorization = field(http::field::authorization);
  request.content_type = field(http::field::content_type);
  request.content_encoding = field(http::field::content_encoding);
  return request;
}

// Sets the path of request_, and the host if the target names one. Returns what is wrong with them.
std::string Connection::target_error() {
  const auto& message = parser_->get();
  const auto hosts = message.count(http::field::host);
  if (hosts == 0 && message.version() >= 11) return "Host: missing, expected the name of this server";
  if (hosts > 1 || !is_host(request_.host)) {
    return "Host: got " + (hosts > 1 ? "several" : escaped(request_.host)) + ", expected HOST or HOST:PORT";
  }
  const std::string target(message.target());
  std::optional<RequestTarget> parsed = parse_request_target(std::string(message.method_string()), target);
  if (!parsed) return "the target of the request: got " + escaped(target) + ", expected a path, as /v1/models";
  request_.path = std::move(parsed->path);
  if (parsed->authority) request_.host = std::move(*parsed->authority);  // RFC 9112, 3.2.2: it counts, and not Host
  return "";
}

// Reads the rest of the request in pieces of the buffer's size, because bytes count when they have come: a length is only
// announced. (http::async_read_some() may read several chunks before it says so.)
void Connection::read_body() {
  error_code error;
  parse_body(error);
  if (error) return answer_read_error(error);
  const std::size_t come = parser_->get().body().size();
  if (!server_.reserve_body(come - reserved_)) return refuse(503, "too many request bodies at once: try again later");
  reserved_ = come;
  if (parser_->is_done()) return hand_over();
  const std::size_t room = std::min(kReadBytes, buffer_.max_size() - buffer_.size());
  if (room == 0) return answer_read_error(http::error::buffer_overflow);
  socket_.async_read_some(buffer_.prepare(room),
                          [self = shared_from_this()](const error_code& failure, std::size_t bytes) {
                            if (self->closed_) return;
                            if (failure) return self->close();  // no answer can reach the client
                            self->buffer_.commit(bytes);
                            self->guard([&] { self->read_body(); });
                          });
}

// What is in the buffer, as far as it is complete.
void Connection::parse_body(error_code& error) {
  while (!parser_->is_done() && buffer_.size() > 0) {
    buffer_.consume(parser_->put(buffer_.data(), error));
    if (!error) continue;
    if (error == http::error::need_more) error = {};
    return;
  }
}

void Connection::answer_read_error(const error_code& error) {
  if (error == http::error::body_limit) {
    return refuse(413, format("the body has more than the %zu bytes that are accepted", server_.limits.body_bytes));
  }
  if (error == http::error::header_limit) {
    return refuse(431, format("the header has more than the %zu bytes that are accepted", server_.limits.header_bytes));
  }
  if (error == http::error::buffer_overflow) return refuse(400, "a line between two chunks is too long");
  // Errors of the parser have a category of their own. After an error of the socket no answer can reach the client.
  if (error.category() != make_error_code(http::error::bad_method).category() || error == http::error::end_of_stream ||
      error == http::error::partial_message) {
    return close();
  }
  refuse(400, "not a valid HTTP request: " + error.message());
}

void Connection::refuse(int status, const std::string& message) {
  close_after_ = true;
  respond(error_response(status, message));
}

HttpResponse Connection::error_response(int status, const std::string& message) const {
  HttpResponse response{status, "application/json", server_.error_body(status, message), {}};
  if (status == 503) response.headers.emplace_back("Retry-After", "1");
  return response;
}

void Connection::hand_over() {
  if (server_.stopping) return close();
  lift_limit(read_timer_);
  phase_ = Phase::answering;
  auto& message = parser_->get();
  HttpRequest request = std::exchange(request_, {});
  request.body = std::move(message.body());
  chunked_ = message.version() >= 11;
  if (!message.keep_alive()) close_after_ = true;
  parser_.reset();

  exchange_ = std::make_shared<Exchange>(server_, weak_from_this(), std::move(request), std::exchange(reserved_, 0));
  std::shared_ptr<Exchange> exchange = exchange_;
  read_ahead();
  if (exchange->request().body.empty()) {
    exchange->release_body();
    return server_.handler(exchange);
  }
  const std::size_t bytes = exchange->request().body.size();
  server_.workers.post(bytes, [&server = server_, exchange = std::move(exchange)]() mutable {
    if (!exchange->gone()) server.handler(exchange);
    asio::post(server.io, [exchange = std::move(exchange)] { exchange->release_body(); });
  });
}

// ---- writing ----

std::string head_of(int status, const std::string& content_type, bool close) {
  std::string head = format("HTTP/1.1 %d %s\r\n", status, reason(status));
  head += "Content-Type: " + content_type + "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n";
  if (close) head += "Connection: close\r\n";
  return head;
}

void Connection::respond(HttpResponse response) {
  const std::size_t bytes = head_only_ ? 0 : response.body.size();
  if (bytes > kSmallBytes && server_.unsent_bytes + bytes > server_.limits.all_unsent_bytes) {
    response = error_response(503, "too many answers wait for their clients: try again later");
  }
  std::string head = head_of(response.status, response.content_type, close_after_);
  for (const auto& [name, value] : response.headers) head += format("%s: %s\r\n", name.c_str(), value.c_str());
  head += format("Content-Length: %zu\r\n\r\n", response.body.size());
  queue(std::move(head), head_only_ ? std::string() : std::move(response.body));
  finish_answer();
}

void Connection::begin_stream(const std::string& content_type) {
  if (!chunked_) close_after_ = true;
  queue(head_of(200, content_type, close_after_) + (chunked_ ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n"));
}

void Connection::send(const std::string& data) {
  if (data.empty()) return;  // an empty chunk would end the stream
  if (falls_behind(data.size())) {
    ++server_.cut_off;
    return close();
  }
  if (!chunked_) return queue(data);
  char digits[2 * sizeof(std::size_t)];
  const char* const first = digits;
  const char* const end = std::to_chars(digits, std::end(digits), data.size(), 16).ptr;
  std::string chunk;
  chunk.reserve(sizeof digits + data.size() + 4);
  chunk.append(first, end).append("\r\n").append(data).append("\r\n");
  queue(std::move(chunk));
}

// Whether the client does not keep up with a stream, of which `bytes` are to follow.
bool Connection::falls_behind(std::size_t bytes) {
  const HttpLimits& limits = server_.limits;
  const std::size_t unsent = queued_bytes_ + bytes;
  if (unsent > limits.all_unsent_bytes / 4) return true;
  if (unsent > kSmallBytes && server_.unsent_bytes + bytes > limits.all_unsent_bytes) return true;
  if (queued_bytes_ <= limits.backlog_bytes) {
    stall_.reset();
    return false;
  }
  const auto now = std::chrono::steady_clock::now();
  if (stall_ && now < stall_->until) return false;
  const bool stalls = stall_ && stall_->taken < limits.backlog_bytes;
  stall_ = {0, now + duration_of(limits.stall_seconds)};
  return stalls;
}

void Connection::end_stream() {
  if (chunked_) queue("0\r\n\r\n");
  finish_answer();
}

void Connection::finish_answer() {
  if (closed_) return;
  if (exchange_) exchange_->set_complete();
  exchange_.reset();
  head_only_ = false;
  parser_.reset();
  lift_limit(read_timer_);
  phase_ = Phase::flushing;
  if (queue_.empty()) on_flushed();
}

void Connection::queue(std::string data, std::string more) {
  if (closed_) return;
  for (std::string* const piece : {&data, &more}) {
    const std::size_t bytes = piece->size();
    if (bytes == 0) continue;
    queue_.push_back(std::move(*piece));
    queued_bytes_ += bytes;
    server_.unsent_bytes += bytes;
  }
  if (!writes_) write();
}

std::vector<asio::const_buffer> Connection::next_buffers() const {
  std::vector<asio::const_buffer> buffers;
  for (const std::string& piece : queue_) {
    if (buffers.size() == kBuffersAtOnce) break;
    buffers.emplace_back(piece.data(), piece.size());
  }
  buffers.front() += front_written_;
  return buffers;
}

void Connection::write() {
  // First without waiting, which nearly always suffices: an asynchronous write and its timer cost as much as all the
  // rest of an event.
  error_code error;
  take_written(socket_.write_some(next_buffers(), error));
  if (error && error != asio::error::would_block) return close();
  if (queue_.empty()) return;
  writes_ = true;
  if (taken_ >= server_.limits.write_bytes) write_limited_ = false;  // a new one
  if (!std::exchange(write_limited_, true)) {
    taken_ = 0;
    limit(write_timer_, server_.limits.write_seconds);
  }
  socket_.async_write_some(next_buffers(), [self = shared_from_this()](const error_code& failure, std::size_t bytes) {
    self->writes_ = false;
    if (self->closed_) return;
    if (failure) return self->close();
    self->guard([&] { self->on_written(bytes); });
  });
}

void Connection::take_written(std::size_t bytes) {
  queued_bytes_ -= bytes;
  server_.unsent_bytes -= bytes;
  taken_ += bytes;
  if (stall_) stall_->taken += bytes;
  front_written_ += bytes;
  while (!queue_.empty() && front_written_ >= queue_.front().size()) {
    front_written_ -= queue_.front().size();
    queue_.pop_front();
  }
}

void Connection::on_written(std::size_t bytes) {
  take_written(bytes);
  if (!queue_.empty()) write();
  if (!queue_.empty() || closed_) return;
  write_limited_ = false;
  lift_limit(write_timer_);
  if (phase_ == Phase::flushing) on_flushed();
}

void Connection::on_flushed() {
  if (!close_after_) return next_request();
  // A socket that is closed with unread data in it resets the connection, and the client loses the answer. So what the
  // client still sends is read for a moment.
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
  phase_ = Phase::lingering;
  limit_reading(server_.limits.linger_seconds);
  buffer_.consume(reads_ ? 0 : buffer_.size());
  read_some();
}

void Connection::close_soon() {
  close_after_ = true;
  if (phase_ == Phase::idle || phase_ == Phase::reading) close();
}

void Connection::close() {
  if (std::exchange(closed_, true)) return;
  --server_.open;
  read_timer_.cancel();
  write_timer_.cancel();
  watch_timer_.cancel();
  error_code ignored;
  socket_.close(ignored);
  server_.body_bytes -= std::exchange(reserved_, 0);
  server_.unsent_bytes -= std::exchange(queued_bytes_, 0);
  if (const std::shared_ptr<Exchange> exchange = std::exchange(exchange_, nullptr)) exchange->set_gone();
}

}  // namespace

// ---- the server -------------------------------------------------------------------------------------------------------

HttpServerState::HttpServerState(const HostPort& address, const HttpLimits& limits_of_server,
                                 HttpHandler handler_of_requests, HttpErrorBody body_of_errors,
                                 HttpHeaderCheck check_of_headers)
    : limits(limits_of_server),
      handler(std::move(handler_of_requests)),
      error_body(std::move(body_of_errors)),
      check(std::move(check_of_headers)),
      workers(limits_of_server.workers) {
  const std::string shown = escaped(address.host) + format(", port %d", address.port);
  const auto check = [&](const error_code& error, const char* action) {
    if (!error) return;
    fail(Exit::environment, "cannot %s %s: %s. Is another server running? Port 0 takes a free one", action,
         shown.c_str(), error.message().c_str());
  };
  error_code error;
  const auto found = tcp::resolver(io).resolve(address.host, std::to_string(address.port),
                                               tcp::resolver::passive | tcp::resolver::numeric_service, error);
  check(error, "find the address");
  acceptor.open(found.begin()->endpoint().protocol(), error);
  check(error, "open a socket for");
  acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  acceptor.bind(found.begin()->endpoint(), error);
  check(error, "listen on");
  acceptor.listen(asio::socket_base::max_listen_connections, error);
  check(error, "listen on");
  endpoint = acceptor.local_endpoint();
}

void HttpServerState::accept() {
  acceptor.async_accept([this, number = ++accepts](const error_code& error, tcp::socket socket) {
    if (stopping || number != accepts) return;
    if (error) {
      accept_pause.expires_after(kAcceptPause);
      accept_pause.async_wait([this](const error_code& cancelled) {
        if (!cancelled) accept();
      });
      return;
    }
    try {
      take(std::move(socket));
    } catch (const std::bad_alloc&) {
      ++refused;
    }
    accept();
  });
}

// Closes the connection that has been without a request for longest, if there is one. Clients keep connections open in case
// they need them again, and know that they may be closed: one that comes with a request is worth more.
bool HttpServerState::make_room() {
  Connection* longest = nullptr;
  for (Connection* connection : connections) {
    const auto since = connection->idle_since();
    if (since && (longest == nullptr || *since < *longest->idle_since()) && !connection->has_data()) {
      longest = connection;
    }
  }
  if (longest == nullptr) return false;
  ++displaced;
  longest->close();
  return true;
}

void HttpServerState::take(tcp::socket socket) {
  if (open >= limits.connections && !make_room()) {
    ++refused;
    return;
  }
  error_code ignored;
  socket.non_blocking(true, ignored);
  socket.set_option(tcp::no_delay(true), ignored);
  socket.set_option(asio::socket_base::send_buffer_size(static_cast<int>(limits.socket_buffer_bytes)), ignored);
  std::make_shared<Connection>(*this, std::move(socket))->next_request();
}

// Connections end by themselves where something goes wrong in them (Connection::guard()). What is left is a task of post(),
// and memory that asio needs itself, perhaps for the accept that was pending: so another one takes its place.
void HttpServerState::run() {
  const auto work = asio::make_work_guard(io);
  for (;;) {
    try {
      io.run();
      return;
    } catch (const std::exception& error) {
      failures.log("the thread of the connections: " + escaped(error.what()));
    }
    error_code ignored;
    acceptor.cancel(ignored);
    accept_pause.cancel();
    ++accepts;
    if (!stopping) asio::post(io, [this] { accept(); });
  }
}

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
  if (!state_->thread.joinable()) return;
  const auto until = std::chrono::steady_clock::now() + duration_of(seconds);
  asio::post(state_->io, [state = state_.get()] {
    state->stopping = true;
    state->acceptor.close();
    state->accept_pause.cancel();
    const std::vector<Connection*> all(state->connections.begin(), state->connections.end());
    for (Connection* connection : all) connection->close_soon();
  });
  state_->workers.finish();
  while (state_->open > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  asio::post(state_->io, [state = state_.get()] {
    const std::vector<Connection*> all(state->connections.begin(), state->connections.end());
    for (Connection* connection : all) connection->close();
    state->io.stop();
  });
  state_->thread.join();
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
  return {.connections = state_->open,
          .refused = state_->refused,
          .displaced = state_->displaced,
          .cut_off = state_->cut_off,
          .body_bytes = static_cast<std::int64_t>(state_->body_bytes),
          .unsent_bytes = static_cast<std::int64_t>(state_->unsent_bytes),
          .waiting = static_cast<std::int64_t>(state_->workers.waiting())};
}

void HttpServer::post(std::function<void()> task) {
  asio::post(state_->io, std::move(task));
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
