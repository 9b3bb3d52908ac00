#include "llmc/serve/http_request_reader.h"

#include <boost/beast/core/string.hpp>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/serve/request_id.h"
#include "llmc/serve/request_target.h"

namespace weft {

namespace http = boost::beast::http;
using boost::beast::iequals;

RequestReader::RequestReader(const HttpLimits& limits) {
  parser_.header_limit(static_cast<std::uint32_t>(limits.header_bytes));
  parser_.body_limit(limits.body_bytes);
}

std::string RequestReader::take_header() {
  const auto& message = parser_.get();
  request_.id = request_id(std::string(message["X-Request-Id"]));
  // Beast treats a body in another transfer encoding as absent, and would parse its bytes as the next request.
  const auto encoding = message[http::field::transfer_encoding];
  if (!encoding.empty() && (!iequals(encoding, "chunked") || !knows_chunks())) {
    return "Transfer-Encoding: got " + escaped(std::string(encoding)) + ", expected none, or chunked since HTTP 1.1";
  }
  const auto field = [&](http::field name) { return std::string(message[name]); };
  head_only_ = message.method() == http::verb::head;
  request_.method = head_only_ ? "GET" : std::string(message.method_string());
  request_.host = field(http::field::host);
  request_.origin = field(http::field::origin);
  request_.authorization = field(http::field::authorization);
  request_.content_type = field(http::field::content_type);
  request_.content_encoding = field(http::field::content_encoding);
  parser_.eager(true);
  return target_error();
}

// Sets the path of request_, and the host if the target names one. Returns what is wrong with them.
std::string RequestReader::target_error() {
  const auto& message = parser_.get();
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

bool RequestReader::waits_for_continue() const {
  return iequals(parser_.get()[http::field::expect], "100-continue") && knows_chunks() && !complete();
}

void RequestReader::parse_body(boost::beast::flat_buffer& buffer, error_code& error) {
  while (!parser_.is_done() && buffer.size() > 0) {
    buffer.consume(parser_.put(buffer.data(), error));
    if (!error) continue;
    if (error == http::error::need_more) error = {};
    return;
  }
}

HttpRequest RequestReader::take() {
  request_.body = std::move(parser_.get().body());
  return std::move(request_);
}

std::optional<HttpRefusal> refusal_of(const error_code& error, const HttpLimits& limits) {
  if (error == http::error::body_limit) {
    return HttpRefusal{413, format("the body has more than the %zu bytes that are accepted", limits.body_bytes)};
  }
  if (error == http::error::header_limit) {
    return HttpRefusal{431, format("the header has more than the %zu bytes that are accepted", limits.header_bytes)};
  }
  if (error == http::error::buffer_overflow) return HttpRefusal{400, "a line between two chunks is too long"};
  // Errors of the parser have a category of their own. After an error of the socket no answer can reach the client.
  if (error.category() != make_error_code(http::error::bad_method).category() || error == http::error::end_of_stream ||
      error == http::error::partial_message) {
    return std::nullopt;
  }
  return HttpRefusal{400, "not a valid HTTP request: " + error.message()};
}

}  // namespace weft
