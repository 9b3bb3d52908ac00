#include "llmc/serve/routes.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/serve/text_request.h"

namespace weft {

namespace {

struct Route {
  std::string_view method;  // GET, which answers HEAD, too, or POST
  std::string_view path;    // {name} at its end stands for anything but nothing
  Endpoint* endpoint;
  bool open = false;  // needs no key
};

constexpr Route kRoutes[] = {
    {"GET", "/", show_page, true},
    {"GET", "/health", show_health, true},
    {"GET", "/version", show_version},
    {"GET", "/metrics", show_metrics},
    {"GET", "/v1/models", list_models},
    {"GET", "/v1/models/{name}", show_model},
    {"GET", "/tokenizer_info", show_tokenizer},
    {"POST", "/v1/completions", create_completion},
    {"POST", "/v1/chat/completions", create_chat_completion},
    {"POST", "/tokenize", tokenize},
    {"POST", "/detokenize", detokenize},
};

// What stands for {name} in `path`; nothing if it is not the route's.
std::optional<std::string_view> name_in(std::string_view path, const Route& route) {
  constexpr std::string_view kName = "{name}";
  if (!route.path.ends_with(kName)) return path == route.path ? std::optional(std::string_view()) : std::nullopt;
  const std::string_view before = route.path.substr(0, route.path.size() - kName.size());
  if (!path.starts_with(before) || path.size() == before.size()) return std::nullopt;
  return path.substr(before.size());
}

}  // namespace

std::string allowed_methods(std::string_view path) {
  bool get = false, post = false;
  for (const Route& route : kRoutes) {
    if (path == "*" || name_in(path, route)) (route.method == "GET" ? get : post) = true;
  }
  if (!get && !post) return "";
  return std::string(get ? "GET, HEAD, OPTIONS" : "OPTIONS") + (post ? ", POST" : "");
}

bool is_open(std::string_view path) {
  return std::ranges::any_of(kRoutes, [&](const Route& route) { return route.open && name_in(path, route); });
}

std::optional<HttpResponse> call_endpoint(Service& service, const std::shared_ptr<HttpExchange>& exchange) {
  const HttpRequest& request = exchange->request();
  const std::string methods = allowed_methods(request.path);
  if (methods.empty() && request.method != "CONNECT") {
    throw RequestError(404, format("no such path: %s", escaped(request.path).c_str()));
  }
  if (request.method == "OPTIONS") return HttpResponse{200, "text/plain", "", {{"Allow", methods}}};
  for (const Route& route : kRoutes) {
    const std::optional<std::string_view> name = name_in(request.path, route);
    if (name && route.method == request.method) return route.endpoint({service, exchange, std::string(*name)});
  }
  throw RequestError(405, methods.ends_with("POST") ? "expected POST" : "expected GET");
}

}  // namespace weft
