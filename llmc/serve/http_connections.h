// The connections of a server: each reads a request, hands it over, writes the answer, and so on until it is closed.
//
// Owns what they share: limits, counters, the workers, and `io`, whose one thread does everything here that is not
// atomic. A connection lives as long as `io` has something to do for it, and ends by itself where something goes wrong
// in it. A further one above the limit displaces the one that has been without a request for longest.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <utility>

#include "llmc/base/log.h"
#include "llmc/serve/http.h"
#include "llmc/serve/http_asio.h"
#include "llmc/serve/work_queue.h"

namespace weft {

class HttpConnection;

struct HttpConnections {
  HttpConnections(const HttpLimits& limits_of_server, HttpHandler handler_of_requests, HttpErrorBody body_of_errors,
                  HttpHeaderCheck check_of_headers)
      : limits(limits_of_server),
        handler(std::move(handler_of_requests)),
        error_body(std::move(body_of_errors)),
        check(std::move(check_of_headers)),
        workers(limits_of_server.workers) {}

  // Closes it at once if there are too many.
  void serve(tcp::socket socket);
  void close_all_soon();  // after the answers that are being made or written; hands nothing over any more
  void close_all();
  // Counts bytes of bodies that have come; false: there is no memory for them.
  bool reserve_body(std::size_t bytes) {
    if (bytes > limits.all_body_bytes - body_bytes) return false;
    body_bytes += bytes;
    return true;
  }
  bool displace_idle();

  const HttpLimits limits;
  const HttpHandler handler;
  const HttpErrorBody error_body;
  const HttpHeaderCheck check;
  std::atomic<std::int64_t> open{0}, refused{0}, displaced{0}, cut_off{0};
  // Changed on the thread of the connections alone.
  std::atomic<std::size_t> body_bytes{0};    // that have come
  std::atomic<std::size_t> unsent_bytes{0};  // in the queues of all connections
  RepeatedError failures;                    // lines of the log that a client may be able to cause

  // Used on the thread of the connections alone. Declared before `io`, whose destructor destroys the last connections.
  std::unordered_set<HttpConnection*> all;
  bool stopping = false;
  asio::io_context io{1};
  WorkQueue workers;
};

}  // namespace weft
