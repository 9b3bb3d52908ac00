// The parts of the server, as its endpoints see them (llmc/serve/routes.h). Each part's header says what it owns.
#pragma once

#include <atomic>

#include "llmc/base/log.h"
#include "llmc/infer/engine.h"
#include "llmc/serve/access.h"
#include "llmc/serve/admission.h"
#include "llmc/serve/answers.h"
#include "llmc/serve/http.h"
#include "llmc/serve/metrics.h"
#include "llmc/serve/request_log.h"
#include "llmc/serve/server.h"
#include "llmc/serve/text_request.h"

namespace weft {

struct Service {
  explicit Service(const ServerOptions& options_of_server);

  // 503 unless requests can be given to the engine.
  void check_ready() const {
    if (phase == Phase::loading) throw RequestError(503, "the model is still being loaded");
    if (phase == Phase::draining) throw RequestError(503, "the server is stopping");
  }

  // A request has its answer.
  void answered(const HttpRequest& request, int status) {
    metrics.answered(status);
    if (options.log_requests) log_info("%s", request_line(request, status).c_str());
  }

  enum class Phase { loading, ready, draining };

  const ServerOptions options;
  AccessRules access;
  ServerMetrics metrics;
  RepeatedError failed_requests;
  std::atomic<Phase> phase{Phase::loading};
  Admission admission;
  Answers answers;

  // Set before phase is `ready`, constant from then on.
  Engine* engine = nullptr;
  RequestContext context;

  HttpServer http;  // last: its threads use all of the above
};

}  // namespace weft
