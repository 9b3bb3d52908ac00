// The endpoints that say what the server is and how it is.
#include <optional>
#include <string>

#include "llmc/base/json.h"
#include "llmc/serve/metrics.h"
#include "llmc/serve/page.h"
#include "llmc/serve/request_id.h"
#include "llmc/serve/routes.h"
#include "llmc/serve/text_request.h"

namespace weft {

HttpResponse json_response(const Json& json) {
  return {200, "application/json", json_text(json), {}};
}

namespace {

Json model_of(const Service& service) {
  Json model = {{"id", service.options.model}, {"object", "model"}, {"created", 0}, {"owned_by", "weft"}};
  if (service.phase == Service::Phase::loading) return model;
  model["max_model_len"] = service.context.config->max_positions;
  if (service.context.chat != nullptr) model["chat"] = true;
  return model;
}

}  // namespace

std::optional<HttpResponse> show_page(const Call& /*call*/) {
  const std::string nonce = random_word();
  return HttpResponse{200,
                      "text/html; charset=utf-8",
                      browser_page(nonce),
                      {{"Content-Security-Policy", browser_page_policy(nonce)},
                       {"X-Frame-Options", "DENY"},
                       {"Referrer-Policy", "no-referrer"}}};
}

std::optional<HttpResponse> show_health(const Call& call) {
  switch (call.service.phase.load()) {
    case Service::Phase::loading:
      return HttpResponse{503, "application/json", R"({"status":"loading"})", {}};
    case Service::Phase::draining:
      return HttpResponse{503, "application/json", R"({"status":"draining"})", {}};
    case Service::Phase::ready:
      break;
  }
  return HttpResponse{200, "application/json", R"({"status":"ok"})", {}};
}

std::optional<HttpResponse> show_version(const Call& call) {
  return json_response({{"version", call.service.options.version}});
}

std::optional<HttpResponse> show_metrics(const Call& call) {
  const Service& service = call.service;
  const ServerHolds holds = {.completions = service.admission.completions(),
                             .values = service.admission.values(),
                             .answers = service.answers.under_way()};
  std::optional<EngineStatistics> engine;
  if (service.phase != Service::Phase::loading) engine = service.engine->statistics();
  return HttpResponse{
      200,
      "text/plain; version=0.0.4; charset=utf-8",
      service.metrics.text(service.options.model, engine ? &*engine : nullptr, service.http.counters(), holds),
      {}};
}

std::optional<HttpResponse> list_models(const Call& call) {
  return json_response({{"object", "list"}, {"data", Json::array({model_of(call.service)})}});
}

std::optional<HttpResponse> show_model(const Call& call) {
  check_model_name(call.name, call.service.options.model);
  return json_response(model_of(call.service));
}

}  // namespace weft
