#include "llmc/serve/http_response.h"

#include <charconv>
#include <iterator>

#include "llmc/base/error.h"

namespace weft {

namespace {

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

std::string head_of(int status, const std::string& content_type, const std::string& id, bool close) {
  std::string head = format("HTTP/1.1 %d %s\r\n", status, reason(status));
  head += "Content-Type: " + content_type + "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n";
  head += "X-Request-Id: " + id + "\r\n";
  if (close) head += "Connection: close\r\n";
  return head;
}

}  // namespace

std::string response_head(const HttpResponse& response, const std::string& id, bool close, bool old) {
  std::string head = head_of(response.status, response.content_type, id, close);
  if (old && !close) head += "Connection: keep-alive\r\n";
  for (const auto& [name, value] : response.headers) head += format("%s: %s\r\n", name.c_str(), value.c_str());
  return head + format("Content-Length: %zu\r\n\r\n", response.body.size());
}

std::string stream_head(const std::string& content_type, const std::string& id, bool chunked, bool close) {
  return head_of(200, content_type, id, close) + (chunked ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n");
}

std::string chunk(const std::string& data) {
  char digits[2 * sizeof(std::size_t)];
  const char* const first = digits;
  const char* const end = std::to_chars(digits, std::end(digits), data.size(), 16).ptr;
  std::string chunk;
  chunk.reserve(sizeof digits + data.size() + 4);
  chunk.append(first, end).append("\r\n").append(data).append("\r\n");
  return chunk;
}

}  // namespace weft
