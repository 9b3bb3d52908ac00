#include "llmc/serve/server.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "llmc/base/clock.h"
#include "llmc/base/log.h"
#include "llmc/base/signals.h"
#include "llmc/serve/answer_json.h"
#include "llmc/serve/routes.h"
#include "llmc/serve/service.h"
#include "llmc/serve/text_request.h"

namespace weft {

namespace {

using Clock = std::chrono::steady_clock;
using Phase = Service::Phase;

constexpr auto kSignalInterval = std::chrono::milliseconds(100);  // how often an idle engine looks for a stop signal
constexpr double kCancelSeconds = 5;                              // for cancelled requests to leave the engine
constexpr double kFlushSeconds = 2;                               // at least, for clients to take their last bytes

// ---- the thread of the connections, and workers -----------------------------------------------------------------------

HttpResponse refused(const HttpRequest& request, const RequestError& error) {
  const int status = error.status();
  HttpResponse response{
      status, "application/json", error_body(status, error.what(), error.param(), error.api_code()), {}};
  if (status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (status == 429 || status == 503) response.headers.emplace_back("Retry-After", "1");
  if (status == 405) response.headers.emplace_back("Allow", allowed_methods(request.path));
  return response;
}

std::optional<HttpResponse> refused_header(Service& s, const HttpRequest& request) {
  try {
    check_access(request, s.access, is_open(request.path));
    return std::nullopt;
  } catch (const RequestError& error) {
    s.answered(request, error.status());
    return refused(request, error);
  }
}

void handle(Service& s, const std::shared_ptr<HttpExchange>& exchange) {
  const auto respond = [&](HttpResponse response) {
    s.answered(exchange->request(), response.status);
    exchange->respond(std::move(response));
  };
  const auto refuse = [&](const RequestError& error) { respond(refused(exchange->request(), error)); };
  try {
    if (std::optional<HttpResponse> response = call_endpoint(s, exchange)) respond(std::move(*response));
  } catch (const RequestError& error) {
    refuse(error);
  } catch (const Error& error) {
    refuse({error.code() == Exit::usage ? 400 : error.code() == Exit::resources ? 503 : 500, error.what()});
  } catch (const std::bad_alloc&) {
    refuse({503, "not enough memory for this request"});
  } catch (const std::exception& error) {
    s.failed_requests.log("a request failed: " + escaped(error.what()));
    refuse({500, "internal error"});
  }
}

// ---- the engine's thread ----------------------------------------------------------------------------------------------

// Returns when the requests under way have to be over after a stop signal.
Clock::time_point step_until_stopped(Service& s) {
  Clock::time_point give_up = Clock::time_point::max();
  for (;;) {
    if (s.phase == Phase::ready && stop_signal() != 0) {
      s.phase = Phase::draining;
      give_up = Clock::now() + duration_of(s.options.drain_seconds);
    }
    if (s.phase == Phase::draining && (s.admission.completions() == 0 || Clock::now() >= give_up)) return give_up;
    const bool more = s.engine->step();
    s.answers.flush();
    if (!more) s.engine->wait(std::min(Clock::now() + kSignalInterval, give_up));
  }
}

void finish_cancelled(Service& s) {
  s.answers.cancel_all();
  const Clock::time_point start = Clock::now();
  while (s.admission.completions() > 0 && seconds_since(start) < kCancelSeconds) {
    if (!s.engine->step()) s.engine->wait(Clock::now() + kSignalInterval);
    s.answers.flush();
  }
}

}  // namespace

// ---- the server -------------------------------------------------------------------------------------------------------

Service::Service(const ServerOptions& options_of_server)
    : options(options_of_server),
      admission(options.answer_values),
      answers(metrics, admission, options.log_requests,
              [this](std::function<void()> task) { http.post(std::move(task)); }),
      http(
          options.address, options.http,
          [this](const std::shared_ptr<HttpExchange>& exchange) { handle(*this, exchange); },
          [this](const HttpRequest& request, int status, const std::string& message) {
            answered(request, status);
            return error_body(status, message);
          },
          [this](const HttpRequest& request) { return refused_header(*this, request); }) {
  access = {options.address.host, options.allowed_hosts, http.loopback(), options.api_key};
}

CompletionsServer::CompletionsServer(const ServerOptions& options) : service_(std::make_unique<Service>(options)) {
  service_->http.start();
  log_info("listening on %s", url().c_str());
  if (!service_->http.loopback() && options.api_key.empty()) {
    log_warning("other machines can use this server, and no key is asked for: --api-key-file names one");
  }
}

CompletionsServer::~CompletionsServer() = default;

std::string CompletionsServer::url() const {
  return service_->http.url();
}

std::string CompletionsServer::held() const {
  const auto completions = static_cast<long long>(service_->admission.completions()),
             values = static_cast<long long>(service_->admission.values()),
             answers = static_cast<long long>(service_->answers.under_way());
  if (completions == 0 && values == 0 && answers == 0) return "";
  return format("%lld completions, %lld values, %lld answers", completions, values, answers);
}

Exit CompletionsServer::run(Engine& engine, const EngineOptions& engine_options, const ModelConfig& config,
                            const Tokenizer* tokenizer, Tokenizer::Special special, const ServedChat& chat) {
  Service& s = *service_;
  s.engine = &engine;
  s.context = {
      s.options.model,
      tokenizer,
      special,
      &config,
      engine_options.max_running + s.options.max_queue,
      s.options.answer_values,
      [&engine](std::int64_t prompt_ids, std::int64_t max_tokens) { return engine.refusal(prompt_ids, max_tokens); },
      chat.chat,
      [&engine](std::int64_t prompt_ids) { return engine.most_ids(prompt_ids); },
      chat.tokenizer_info};
  on_stop(OnStop::finish, "stopping: requests under way are finished; a second signal leaves at once",
          "left: requests under way were cut off");
  s.phase = Phase::ready;
  log_info("ready: %s", url().c_str());
  Clock::time_point give_up;
  try {
    give_up = step_until_stopped(s);
    finish_cancelled(s);
  } catch (const std::exception& error) {
    s.phase = Phase::draining;
    s.answers.fail_all(error.what());
    s.http.stop(kFlushSeconds);
    throw;
  }
  s.http.stop(std::max(kFlushSeconds, in_seconds(give_up - Clock::now())));
  return exit_after_signal(stop_signal());
}

}  // namespace weft
