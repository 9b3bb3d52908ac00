#include "llmc/serve/http_connections.h"

#include <poll.h>

#include <algorithm>
#include <boost/asio/dispatch.hpp>
#include <boost/beast/http/read.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/serve/http_request_reader.h"
#include "llmc/serve/http_response.h"
#include "llmc/serve/send_queue.h"

namespace weft {

namespace {

constexpr std::size_t kReadBytes = 16 << 10;       // asked of the socket at once
constexpr std::size_t kPipelinedBytes = 64 << 10;  // of later requests: no more is read while one is being answered
constexpr std::size_t kBufferBytes = 128 << 10;    // of a connection: also the longest line between two chunks
// How often a client of which nothing is read is asked whether it is still there.
constexpr auto kWatchInterval = std::chrono::milliseconds(500);

// A time limit that may be set anew. What it calls keeps it alive.
class Deadline {
 public:
  explicit Deadline(asio::io_context& io) : timer_(io) {}

  // Calls `late` when the time is over, unless set(), lift() or cancel() comes before. The handler of a timer that has
  // run out may wait in the queue behind the one that sets it anew: so what counts is what the timer is set to now.
  template <typename Late>
  void set(double seconds, Late late) {
    timer_.expires_after(duration_of(seconds));
    timer_.async_wait([this, late = std::move(late)](const error_code& cancelled) {
      if (!cancelled && timer_.expiry() <= asio::steady_timer::clock_type::now()) late();
    });
  }
  void lift() { timer_.expires_at(asio::steady_timer::time_point::max()); }
  void cancel() { timer_.cancel(); }

 private:
  asio::steady_timer timer_;
};

class Exchange;

}  // namespace

// ---- one connection ---------------------------------------------------------------------------------------------------

// The phases of a connection, and what moves between socket, reader and queue in each. Everything runs on the thread of
// the connections.
class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
 public:
  HttpConnection(HttpConnections& server, tcp::socket socket)
      : server_(server),
        socket_(std::move(socket)),
        read_deadline_(server.io),
        write_deadline_(server.io),
        watch_timer_(server.io),
        queue_(server.limits, server.unsent_bytes) {
    server_.all.insert(this);
    ++server_.open;
  }
  // Closed before, unless an exception has left nothing that holds it.
  ~HttpConnection() {
    try {
      close();
    } catch (const std::bad_alloc&) {  // of who is told that it has gone
    }
    server_.all.erase(this);
  }
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;

  void next_request();
  void close();
  void close_soon();  // after the answer that is being made or written, if there is one
  // Calls `action`; closes the connection if that throws, which is for want of memory: nothing of it would go on.
  template <typename Action>
  void guard(const Action& action) {
    try {
      action();
    } catch (const std::exception& error) {
      server_.failures.log("a connection failed: " + escaped(error.what()));
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
  void read_body();
  void refuse(const HttpRefusal& refusal);
  void refuse_or_close(const error_code& error);
  HttpResponse error_response(const HttpRefusal& refusal) const;
  const HttpRequest& request() const;  // that is read or answered
  void hand_over();
  void finish_answer();
  void queue(std::string data, std::string more = {});
  void write();
  void on_written(std::size_t bytes);
  void on_flushed();
  void limit(Deadline& deadline, double seconds) {
    deadline.set(seconds, [self = shared_from_this()] { self->close(); });
  }

  HttpConnections& server_;
  tcp::socket socket_;
  Deadline read_deadline_, write_deadline_;
  asio::steady_timer watch_timer_;
  Phase phase_ = Phase::idle;
  std::chrono::steady_clock::time_point idle_since_;
  bool closed_ = false, close_after_ = false;

  boost::beast::flat_buffer buffer_{kBufferBytes};
  // A read_some() is pending, as it mostly is while a request is answered (read_ahead()).
  bool reads_ = false;
  std::optional<RequestReader> reader_;
  std::size_t reserved_ = 0;  // bytes of all_body_bytes, while the request is read: then the exchange has them

  std::shared_ptr<Exchange> exchange_;
  bool head_only_ = false;  // the request was HEAD
  bool chunked_ = false;    // the client knows chunks: HTTP/1.1

  SendQueue queue_;
  bool writes_ = false;           // a write waits for the client to take bytes
  bool write_limited_ = false;    // write_deadline_ is set
  std::size_t taken_before_ = 0;  // of queue_, when it was set
};

namespace {

// One request with its handler: from any thread to the connection, as long as this has one.
class Exchange final : public HttpExchange, public std::enable_shared_from_this<Exchange> {
 public:
  // Releases `reserved` bytes of all_body_bytes with release_body().
  Exchange(HttpConnections& server, std::weak_ptr<HttpConnection> connection, HttpRequest request, std::size_t reserved)
      : server_(server), connection_(std::move(connection)), request_(std::move(request)), reserved_(reserved) {}

  const HttpRequest& request() const override { return request_; }
  std::string take_body() override { return std::move(request_.body); }
  bool gone() const override { return gone_; }

  void respond(HttpResponse response) override {
    to_connection([response = std::move(response)](HttpConnection& c) mutable { c.respond(std::move(response)); });
  }
  void begin_stream(const std::string& content_type) override {
    to_connection([content_type](HttpConnection& c) { c.begin_stream(content_type); });
  }
  void send(std::string data) override {
    to_connection([data = std::move(data)](HttpConnection& c) { c.send(data); });
  }
  void end_stream() override {
    to_connection([](HttpConnection& c) { c.end_stream(); });
  }
  void abandon() override {
    to_connection([](HttpConnection& c) { c.close(); });
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
  // When the handler has returned or the answer is complete, whatever comes first: a client that has its answer may
  // send the next body, though the handler's thread may not have run again since.
  void release_body() { server_.body_bytes -= std::exchange(reserved_, 0); }

 private:
  template <typename Call>
  void to_connection(Call call) {
    asio::dispatch(server_.io, [self = shared_from_this(), call = std::move(call)]() mutable {
      if (self->gone_ || self->complete_) return;
      const std::shared_ptr<HttpConnection> connection = self->connection_.lock();
      if (connection) connection->guard([&] { call(*connection); });
    });
  }

  HttpConnections& server_;
  std::weak_ptr<HttpConnection> connection_;
  HttpRequest request_;
  std::size_t reserved_;
  std::atomic<bool> gone_{false};
  bool complete_ = false;  // the connection has the whole answer
  std::function<void()> on_gone_;
};

}  // namespace

// ---- reading ----

void HttpConnection::next_request() {
  phase_ = Phase::idle;
  idle_since_ = std::chrono::steady_clock::now();
  limit(read_deadline_, server_.limits.idle_seconds);
  error_code ignored;
  if (!reads_) return buffer_.size() > 0 ? read_header() : read_some();
  // A request that came while the one before was answered is in the buffer. Cancelling the pending read calls its
  // handler, which goes on with what is there.
  if (buffer_.size() > 0) socket_.cancel(ignored);
}

void HttpConnection::read_some() {
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

// Reads on while a request is answered, so that a client that goes away is noticed. A client that sends requests
// without waiting for answers (RFC 9112, 9.3.2) is held back by TCP once kPipelinedBytes of them are here.
void HttpConnection::read_ahead() {
  if (buffer_.size() < kPipelinedBytes) return read_some();
  watch();
}

// Where nothing is read, the end of what the client sends does not show: so the socket is asked for it now and then. If
// more is on its way than the sockets hold, the end has not come either: who has left then is noticed when it is
// written to.
void HttpConnection::watch() {
  watch_timer_.expires_after(kWatchInterval);
  watch_timer_.async_wait([self = shared_from_this()](const error_code& cancelled) {
    if (cancelled || self->closed_ || self->phase_ != Phase::answering || self->reads_) return;
    pollfd socket{self->socket_.native_handle(), POLLRDHUP, 0};
    if (::poll(&socket, 1, 0) > 0) return self->close();
    self->watch();
  });
}

void HttpConnection::on_data() {
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

void HttpConnection::read_header() {
  // RFC 9112, 2.2: clients may send an empty line after a body, which is not a part of it.
  const auto begins = [&] { return std::string_view(static_cast<const char*>(buffer_.data().data()), buffer_.size()); };
  while (begins().starts_with("\r\n")) buffer_.consume(2);
  if (buffer_.size() == 0) return read_some();
  phase_ = Phase::reading;
  limit(read_deadline_, server_.limits.read_seconds);
  reader_.emplace(server_.limits);
  boost::beast::http::async_read_header(socket_, buffer_, reader_->parser(),
                                        [self = shared_from_this()](const error_code& error, std::size_t) {
                                          if (!self->closed_) self->guard([&] { self->on_header(error); });
                                        });
}

void HttpConnection::on_header(const error_code& error) {
  const std::string wrong = reader_->take_header();  // with an error as far as it came
  if (error) return refuse_or_close(error);
  head_only_ = reader_->head_only();
  chunked_ = reader_->knows_chunks();
  if (!wrong.empty()) return refuse({400, wrong});
  if (std::optional<HttpResponse> refusal = server_.check ? server_.check(reader_->request()) : std::nullopt) {
    if (!reader_->complete() || !reader_->keep_alive()) close_after_ = true;
    return respond(std::move(*refusal));
  }
  if (reader_->waits_for_continue()) queue("HTTP/1.1 100 Continue\r\n\r\n");
  read_body();
}

// Reads the rest of the request in pieces of the buffer's size, because bytes count when they have come: a length is
// only announced. (http::async_read_some() may read several chunks before it says so.)
void HttpConnection::read_body() {
  error_code error;
  reader_->parse_body(buffer_, error);
  if (error) return refuse_or_close(error);
  const std::size_t come = reader_->body_bytes();
  if (!server_.reserve_body(come - reserved_)) return refuse({503, "too many request bodies at once: try again later"});
  reserved_ = come;
  if (reader_->complete()) return hand_over();
  const std::size_t room = std::min(kReadBytes, buffer_.max_size() - buffer_.size());
  if (room == 0) return refuse_or_close(boost::beast::http::error::buffer_overflow);
  socket_.async_read_some(buffer_.prepare(room),
                          [self = shared_from_this()](const error_code& failure, std::size_t bytes) {
                            if (self->closed_) return;
                            if (failure) return self->close();  // no answer can reach the client
                            self->buffer_.commit(bytes);
                            self->guard([&] { self->read_body(); });
                          });
}

void HttpConnection::refuse_or_close(const error_code& error) {
  if (const std::optional<HttpRefusal> refusal = refusal_of(error, server_.limits)) return refuse(*refusal);
  close();
}

void HttpConnection::refuse(const HttpRefusal& refusal) {
  close_after_ = true;
  respond(error_response(refusal));
}

HttpResponse HttpConnection::error_response(const HttpRefusal& refusal) const {
  const auto& [status, message] = refusal;
  HttpResponse response{status, "application/json", server_.error_body(request(), status, message), {}};
  if (status == 503) response.headers.emplace_back("Retry-After", "1");
  return response;
}

const HttpRequest& HttpConnection::request() const {
  return exchange_ ? exchange_->request() : reader_->request();
}

void HttpConnection::hand_over() {
  if (server_.stopping) return close();
  read_deadline_.lift();
  phase_ = Phase::answering;
  if (!reader_->keep_alive()) close_after_ = true;
  HttpRequest request = reader_->take();
  reader_.reset();

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

void HttpConnection::respond(HttpResponse response) {
  if (!head_only_ && !queue_.has_room(response.body.size())) {
    response = error_response({503, "too many answers wait for their clients: try again later"});
  }
  std::string head = response_head(response, request().id, close_after_, !chunked_);
  queue(std::move(head), head_only_ ? std::string() : std::move(response.body));
  finish_answer();
}

void HttpConnection::begin_stream(const std::string& content_type) {
  if (!chunked_) close_after_ = true;
  queue(stream_head(content_type, request().id, chunked_, close_after_));
}

void HttpConnection::send(const std::string& data) {
  if (data.empty()) return;  // an empty chunk would end the stream
  if (queue_.falls_behind(data.size())) {
    ++server_.cut_off;
    return close();
  }
  queue(chunked_ ? chunk(data) : data);
}

void HttpConnection::end_stream() {
  if (chunked_) queue(kLastChunk);
  finish_answer();
}

void HttpConnection::finish_answer() {
  if (closed_) return;
  if (exchange_) exchange_->set_complete();
  exchange_.reset();
  head_only_ = false;
  reader_.reset();
  read_deadline_.lift();
  phase_ = Phase::flushing;
  if (queue_.empty()) on_flushed();
}

void HttpConnection::queue(std::string data, std::string more) {
  if (closed_) return;
  queue_.push(std::move(data));
  queue_.push(std::move(more));
  if (!writes_) write();
}

void HttpConnection::write() {
  // First without waiting, which nearly always suffices: an asynchronous write and its timer cost as much as all the
  // rest of an event.
  error_code error;
  queue_.take(socket_.write_some(queue_.buffers<asio::const_buffer>(), error));
  if (error && error != asio::error::would_block) return close();
  if (queue_.empty()) return;
  writes_ = true;
  if (queue_.taken() - taken_before_ >= server_.limits.write_bytes) write_limited_ = false;  // a new one
  if (!std::exchange(write_limited_, true)) {
    taken_before_ = queue_.taken();
    limit(write_deadline_, server_.limits.write_seconds);
  }
  socket_.async_write_some(queue_.buffers<asio::const_buffer>(),
                           [self = shared_from_this()](const error_code& failure, std::size_t bytes) {
                             self->writes_ = false;
                             if (self->closed_) return;
                             if (failure) return self->close();
                             self->guard([&] { self->on_written(bytes); });
                           });
}

void HttpConnection::on_written(std::size_t bytes) {
  queue_.take(bytes);
  if (!queue_.empty()) write();
  if (!queue_.empty() || closed_) return;
  write_limited_ = false;
  write_deadline_.lift();
  if (phase_ == Phase::flushing) on_flushed();
}

void HttpConnection::on_flushed() {
  if (!close_after_) return next_request();
  // A socket that is closed with unread data in it resets the connection, and the client loses the answer. So what the
  // client still sends is read for a moment.
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
  phase_ = Phase::lingering;
  limit(read_deadline_, server_.limits.linger_seconds);
  buffer_.consume(reads_ ? 0 : buffer_.size());
  read_some();
}

void HttpConnection::close_soon() {
  close_after_ = true;
  if (phase_ == Phase::idle || phase_ == Phase::reading) close();
}

void HttpConnection::close() {
  if (std::exchange(closed_, true)) return;
  --server_.open;
  read_deadline_.cancel();
  write_deadline_.cancel();
  watch_timer_.cancel();
  error_code ignored;
  socket_.close(ignored);
  server_.body_bytes -= std::exchange(reserved_, 0);
  queue_.release();
  if (const std::shared_ptr<Exchange> exchange = std::exchange(exchange_, nullptr)) exchange->set_gone();
}

// ---- all of them ------------------------------------------------------------------------------------------------------

void HttpConnections::serve(tcp::socket socket) {
  if (open >= limits.connections && !displace_idle()) {
    ++refused;
    return;
  }
  error_code ignored;
  socket.non_blocking(true, ignored);
  socket.set_option(tcp::no_delay(true), ignored);
  socket.set_option(asio::socket_base::send_buffer_size(static_cast<int>(limits.socket_buffer_bytes)), ignored);
  std::make_shared<HttpConnection>(*this, std::move(socket))->next_request();
}

// Closes the connection that has been without a request for longest, if there is one. Clients keep connections open in
// case they need them again, and know that they may be closed: one that comes with a request is worth more.
bool HttpConnections::displace_idle() {
  HttpConnection* longest = nullptr;
  for (HttpConnection* connection : all) {
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

void HttpConnections::close_all_soon() {
  stopping = true;
  const std::vector<HttpConnection*> closing(all.begin(), all.end());
  for (HttpConnection* connection : closing) connection->close_soon();
}

void HttpConnections::close_all() {
  const std::vector<HttpConnection*> closing(all.begin(), all.end());
  for (HttpConnection* connection : closing) connection->close();
}

}  // namespace weft
