// The table of routes: what the server answers at which path. A further endpoint is a row in routes.cpp, which names
// its function, and that function in a file of its own, declared below.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "llmc/base/json_fwd.h"
#include "llmc/serve/http.h"
#include "llmc/serve/service.h"

namespace weft {

// A request at an endpoint.
struct Call {
  Service& service;
  const std::shared_ptr<HttpExchange>& exchange;
  std::string name;  // what stands for {name} in the route's path
};
// Returns the answer, or nothing: then it answers by the exchange, at once or later. Refuses by RequestError. Runs on a
// worker if the request has a body, otherwise on the thread of the connections, and must be quick there (http.h).
using Endpoint = std::optional<HttpResponse>(const Call& call);

// An answer 200.
HttpResponse json_response(const Json& json);

// Calls the endpoint; answers OPTIONS itself. RequestError: 404 without such a path, 405 for another method.
std::optional<HttpResponse> call_endpoint(Service& service, const std::shared_ptr<HttpExchange>& exchange);
// The methods of a path, as Allow lists them; empty: there is no such path. "*": of all.
std::string allowed_methods(std::string_view path);
// Whether it is answered without the server's key.
bool is_open(std::string_view path);

Endpoint show_page, show_health, show_version, show_metrics, list_models,
    show_model;                                 // endpoints.cpp, and json_response()
Endpoint create_completion;                     // completions.cpp
Endpoint create_chat_completion;                // chat_completions.cpp
Endpoint tokenize, detokenize, show_tokenizer;  // tokenize.cpp

}  // namespace weft
