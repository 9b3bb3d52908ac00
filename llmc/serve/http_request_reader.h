// One request while it is read: its limits, what it must look like, and what is wrong with it. Knows no socket and no
// connection.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "llmc/serve/http.h"
#include "llmc/serve/http_asio.h"
// After Asio's macros.
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

namespace weft {

class RequestReader {
 public:
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;
  explicit RequestReader(const HttpLimits& limits);

  // Reads the header: for http::async_read_header().
  Parser& parser() { return parser_; }
  // The header is complete, or as far as it came: request() has its fields. Returns what is wrong with it, which is 400; empty:
  // nothing.
  std::string take_header();
  const HttpRequest& request() const { return request_; }
  // What can be said of it from here on.
  bool head_only() const { return head_only_; }
  bool complete() const { return parser_.is_done(); }
  bool keep_alive() const { return parser_.get().keep_alive(); }
  bool knows_chunks() const { return parser_.get().version() >= 11; }
  bool waits_for_continue() const;

  // Takes what is in the buffer, as far as it is complete.
  void parse_body(boost::beast::flat_buffer& buffer, error_code& error);
  std::size_t body_bytes() const { return parser_.get().body().size(); }
  // The whole request, once it is complete.
  HttpRequest take();

 private:
  std::string target_error();

  Parser parser_;
  HttpRequest request_;
  bool head_only_ = false;
};

struct HttpRefusal {
  int status;
  std::string message;
};
// How an error of reading is answered; nothing if no answer can reach the client.
std::optional<HttpRefusal> refusal_of(const error_code& error, const HttpLimits& limits);

}  // namespace weft
