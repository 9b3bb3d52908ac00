// The target of a request: what stands between the method and the version (RFC 9112, 3.2).
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace weft {

struct RequestTarget {
  std::string path;  // decoded, without the query. "*": OPTIONS of the whole server
  // Of the absolute form, as proxies and clients behind a setting for one send it. It replaces Host.
  std::optional<std::string> authority;
};

// Nothing if it has none of the four forms, if the form does not go with the method, or if a %XX is not one.
std::optional<RequestTarget> parse_request_target(std::string_view method, std::string_view target);

// Whether `text` may be the content of Host: HOST or HOST:PORT (RFC 9110, 7.2), or nothing.
bool is_host(std::string_view text);

}  // namespace weft
