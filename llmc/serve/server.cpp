#include "llmc/serve/server.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <optional>
#include <random>
#include <unordered_set>
#include <utility>
#include <vector>

#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/signals.h"
#include "llmc/infer/completion.h"
#include "llmc/serve/completions_request.h"
#include "llmc/serve/completions_response.h"
#include "llmc/serve/metrics.h"
#include "llmc/serve/page.h"

namespace weft {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSignalInterval = std::chrono::milliseconds(100);  // how often an idle engine looks for a stop signal
constexpr double kCancelSeconds = 5;                              // for cancelled requests to leave the engine
constexpr double kFlushSeconds = 2;                               // at least, for clients to take their last bytes
constexpr std::int64_t kAnswersInMemory = 4;                      // of the largest, under way at once
constexpr std::int64_t kSmallAnswer = 1 << 12;                    // values of one that counts nothing of that
constexpr std::size_t kMaxKeyBytes = 4096;
constexpr const char* kKeyVariable = "WEFT_API_KEY";

enum class Phase { loading, ready, draining };

// 63 random bits.
std::uint64_t random_seed() {
  std::random_device random;  // 32 bits each
  const std::uint64_t high = random(), low = random();
  return high << 31 | low >> 1;
}

// Host or Origin without scheme and port: "http://[::1]:8000" is "[::1]".
std::string_view host_of(std::string_view text) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (text.starts_with(scheme)) text.remove_prefix(scheme.size());
  }
  const std::size_t bracket = text.rfind(']');
  const std::size_t colon = text.rfind(':');
  if (colon != std::string_view::npos && (bracket == std::string_view::npos || colon > bracket))
    text = text.substr(0, colon);
  return text;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
}

// Names of hosts, media types and encodings are the same in capital letters.
std::string lower_case(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

// What one request takes of the completions that may be under way. It is given back, but for those that the engine has.
class Places {
 public:
  explicit Places(std::atomic<std::int64_t>& in_flight) : in_flight_(in_flight) {}
  ~Places() { in_flight_ -= mine_; }
  Places(const Places&) = delete;
  Places& operator=(const Places&) = delete;

  // How many are under way with these.
  std::int64_t take(std::int64_t completions) {
    mine_ += completions;
    return in_flight_ += completions;
  }
  void pass_on() { --mine_; }  // one, to the engine

 private:
  std::atomic<std::int64_t>& in_flight_;
  std::int64_t mine_ = 0;
};

// One request for completions that the engine works on.
struct Answer {
  // Gives back what `values` has taken of `values_in_flight`.
  ~Answer() {
    if (values_in_flight != nullptr) *values_in_flight -= values;
  }

  std::shared_ptr<HttpExchange> exchange;
  CompletionsHead head;
  Clock::time_point arrival;
  bool stream = false, include_usage = false;
  std::int64_t values = 0;  // answer_values(); 0 of a small answer
  std::atomic<std::int64_t>* values_in_flight = nullptr;

  std::atomic<bool> cancelled{false};
  // It has an answer, or gets one, that says why; what the engine still makes is dropped.
  std::atomic<bool> failed{false};
  std::vector<RequestId> ids;  // in the engine; guarded by answers_mutex, which submit() holds until all are submitted

  // On the thread of the connections alone.
  std::vector<CompletionsChoice> choices;
  CompletionsUsage usage;
  std::size_t unfinished = 0;
  bool begun = false;
  std::string unsent;  // events of a stream
};

// What the engine handed out for one choice in a step.
struct Event {
  std::shared_ptr<Answer> answer;
  std::size_t choice = 0;
  CompletionPiece piece;             // if there is no `end`
  std::optional<CompletionEnd> end;  // the last event of the choice
};

}  // namespace

class CompletionsServer::State {
 public:
  explicit State(const ServerOptions& options_of_server)
      : options(options_of_server),
        http(
            options.address, options.http, [this](const std::shared_ptr<HttpExchange>& exchange) { handle(exchange); },
            [this](int status, const std::string& message) {
              metrics.answered(status);
              return error_body(status, message);
            },
            [this](const HttpRequest& request) { return refused_header(request); }) {}

  Exit run();

  // ---- requests ----
  void handle(const std::shared_ptr<HttpExchange>& exchange);
  void route(const std::shared_ptr<HttpExchange>& exchange);
  std::optional<HttpResponse> refused_header(const HttpRequest& request);
  void check_access(const HttpRequest& request) const;
  void complete(const std::shared_ptr<HttpExchange>& exchange);
  void submit(const std::shared_ptr<Answer>& answer, const CompletionsRequest& request, Places& places);
  void check_ready() const;
  void respond(HttpExchange& exchange, HttpResponse response) {
    metrics.answered(response.status);
    exchange.respond(std::move(response));
  }
  HttpResponse health() const;
  Json model() const;
  HttpResponse model_of_name(const std::string& name) const;
  HttpResponse page() const;

  // ---- answers ----
  void hand_out(Event event) { outbox.push_back(std::move(event)); }
  void flush();
  void deliver_inbox();
  void deliver(Event& event);
  void deliver_piece(Answer& answer, std::size_t choice, const CompletionPiece& piece);
  void deliver_end(Answer& answer, std::size_t choice, const CompletionEnd& end);
  void send(Answer& answer, const std::string& data);
  void send_unsent(Answer& answer);
  void fail_answer(Answer& answer, int status, const std::string& message);
  void drop(Answer& answer, const std::string& why);
  // Calls `action`, which makes a part of the answer; ends the answer if it throws.
  template <typename Action>
  void attempt(Answer& answer, const Action& action) {
    try {
      action();
    } catch (const std::exception& error) {
      drop(answer, error.what());
    }
  }
  void cancel(Answer& answer);
  std::int64_t answers_under_way() {
    const std::lock_guard lock(answers_mutex);
    return std::ssize(answers);
  }
  std::vector<std::shared_ptr<Answer>> all_answers() {
    const std::lock_guard lock(answers_mutex);
    return {answers.begin(), answers.end()};
  }

  // ---- the engine's thread ----
  Clock::time_point step_until_stopped();
  void finish_cancelled();
  void fail_all(const std::string& message);

  const ServerOptions options;
  ServerMetrics metrics;
  RepeatedError failed_requests, failed_answers;
  std::atomic<Phase> phase{Phase::loading};
  std::atomic<std::int64_t> in_flight{0};         // completions, from their reservation to their end
  std::atomic<std::int64_t> values_in_flight{0};  // answer_values() of the answers under way
  std::atomic<std::uint64_t> last_group{0};       // of a request: EngineRequest::group
  std::mutex answers_mutex;
  std::unordered_set<std::shared_ptr<Answer>> answers;

  // Set before phase is `ready`, constant from then on.
  Engine* engine = nullptr;
  CompletionsContext context;
  std::int64_t max_in_flight = 0;

  // What a step hands out is collected in outbox, on the engine's thread, and passes through inbox to the thread of the
  // connections. There all pending events of a stream become one write, so that a thread that has fallen behind catches
  // up.
  std::vector<Event> outbox;
  std::mutex inbox_mutex;
  std::vector<Event> inbox;
  bool delivery_posted = false;   // of inbox
  std::vector<Event> delivering;  // used on the thread of the connections; kept for its memory

  HttpServer http;  // last: its threads use all of the above
};

namespace {

// Takes what one completion produces on the engine's thread.
template <typename Server>
class Sink : public CompletionSink {
 public:
  Sink(Server& server, std::shared_ptr<Answer> answer, std::size_t choice)
      : server_(server), answer_(std::move(answer)), choice_(choice), last_(answer_->arrival) {}

  bool on_piece(CompletionPiece piece) override {
    if (piece.id.has_value()) {
      const Clock::time_point now = Clock::now();
      const double seconds = in_seconds(now - last_);
      if (std::exchange(first_, false)) {
        server_.metrics.first_token(seconds);
      } else {
        server_.metrics.inter_token(seconds);
      }
      last_ = now;
    }
    server_.hand_out({answer_, choice_, std::move(piece), {}});
    return !answer_->cancelled;
  }

  void on_end(const CompletionEnd& end) override {
    server_.metrics.ended(end.reason, seconds_since(answer_->arrival));
    --server_.in_flight;
    server_.hand_out({answer_, choice_, {}, end});
  }

 private:
  Server& server_;
  const std::shared_ptr<Answer> answer_;
  const std::size_t choice_;
  Clock::time_point last_;
  bool first_ = true;
};

}  // namespace

// ---- requests ---------------------------------------------------------------------------------------------------------

namespace {

constexpr std::string_view kModels = "/v1/models/";  // and the name of one

// The methods of a path, as Allow lists them; empty: there is no such path.
const char* methods_of(std::string_view path) {
  if (path == "*") return "GET, HEAD, OPTIONS, POST";
  if (path == "/v1/completions") return "OPTIONS, POST";
  constexpr std::string_view kGet[] = {"/", "/health", "/version", "/metrics", "/v1/models"};
  const bool get =
      std::ranges::find(kGet, path) != std::end(kGet) || (path.starts_with(kModels) && path.size() > kModels.size());
  return get ? "GET, HEAD, OPTIONS" : "";
}

HttpResponse refused(const HttpRequest& request, const RequestError& error) {
  const int status = error.status();
  HttpResponse response{
      status, "application/json", error_body(status, error.what(), error.param(), error.api_code()), {}};
  if (status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (status == 429 || status == 503) response.headers.emplace_back("Retry-After", "1");
  if (status == 405) response.headers.emplace_back("Allow", methods_of(request.path));
  return response;
}

}  // namespace

std::optional<HttpResponse> CompletionsServer::State::refused_header(const HttpRequest& request) {
  try {
    check_access(request);
    return std::nullopt;
  } catch (const RequestError& error) {
    metrics.answered(error.status());
    return refused(request, error);
  }
}

void CompletionsServer::State::handle(const std::shared_ptr<HttpExchange>& exchange) {
  const auto refuse = [&](const RequestError& error) { respond(*exchange, refused(exchange->request(), error)); };
  try {
    route(exchange);
  } catch (const RequestError& error) {
    refuse(error);
  } catch (const Error& error) {
    refuse({error.code() == Exit::usage ? 400 : error.code() == Exit::resources ? 503 : 500, error.what()});
  } catch (const std::bad_alloc&) {
    refuse({503, "not enough memory for this request"});
  } catch (const std::exception& error) {
    failed_requests.log("a request failed: " + escaped(error.what()));
    refuse({500, "internal error"});
  }
}

void CompletionsServer::State::route(const std::shared_ptr<HttpExchange>& exchange) {
  const HttpRequest& request = exchange->request();
  const std::string& path = request.path;
  const std::string_view methods = methods_of(path);
  if (methods.empty() && request.method != "CONNECT") {
    throw RequestError(404, format("no such path: %s", escaped(path).c_str()));
  }
  if (request.method == "OPTIONS")
    return respond(*exchange, {200, "text/plain", "", {{"Allow", std::string(methods)}}});
  const bool completions = path == "/v1/completions";
  if (request.method != (completions ? "POST" : "GET")) {
    throw RequestError(405, completions ? "expected POST" : "expected GET");
  }
  if (completions) return complete(exchange);
  if (path.starts_with(kModels)) return respond(*exchange, model_of_name(path.substr(kModels.size())));
  if (path == "/") return respond(*exchange, page());
  if (path == "/health") return respond(*exchange, health());
  if (path == "/v1/models")
    return respond(*exchange,
                   {200, "application/json", json_text({{"object", "list"}, {"data", Json::array({model()})}}), {}});
  if (path == "/version") {
    return respond(*exchange, {200, "application/json", json_text({{"version", options.version}}), {}});
  }
  const ServerHolds holds = {.completions = in_flight, .values = values_in_flight, .answers = answers_under_way()};
  std::string text;
  if (phase == Phase::loading) {
    text = metrics.text(options.model, nullptr, http.counters(), holds);
  } else {
    const EngineStatistics statistics = engine->statistics();
    text = metrics.text(options.model, &statistics, http.counters(), holds);
  }
  respond(*exchange, {200, "text/plain; version=0.0.4; charset=utf-8", text, {}});
}

void CompletionsServer::State::check_access(const HttpRequest& request) const {
  // A page of another site can make a browser of this machine connect here: by a name of its own that leads to
  // 127.0.0.1 (DNS rebinding; Host tells), or openly (Origin tells).
  const std::string field = lower_case(request.host), address = lower_case(options.address.host);
  const std::string_view host = host_of(field);
  const bool known = host.empty() || host == "localhost" || host == "[::1]" || host == "127.0.0.1" || host == address ||
                     host == "[" + address + "]";
  if (http.loopback() && !known) {
    throw RequestError(403, format("Host: got %s, expected localhost: this server is for its own machine",
                                   escaped(request.host).c_str()));
  }
  if (!request.origin.empty() && request.origin != "http://" + request.host &&
      request.origin != "https://" + request.host) {
    throw RequestError(
        403, format("Origin: got %s: pages of other sites may not use this server", escaped(request.origin).c_str()));
  }
  if (options.api_key.empty() || request.path == "/" || request.path == "/health") return;
  constexpr std::string_view kScheme = "bearer ";
  const bool bearer = lower_case(request.authorization.substr(0, kScheme.size())) == kScheme;
  const std::string given(bearer ? trimmed(std::string_view(request.authorization).substr(kScheme.size()))
                                 : std::string_view());
  if (!same_key(given, options.api_key)) {
    throw RequestError(401,
                       bearer ? "Authorization: not the key of this server"
                              : "Authorization: expected Bearer and the key of this server",
                       "", "invalid_api_key");
  }
}

void CompletionsServer::State::check_ready() const {
  if (phase == Phase::loading) throw RequestError(503, "the model is still being loaded");
  if (phase == Phase::draining) throw RequestError(503, "the server is stopping");
}

HttpResponse CompletionsServer::State::health() const {
  switch (phase.load()) {
    case Phase::loading:
      return {503, "application/json", R"({"status":"loading"})", {}};
    case Phase::draining:
      return {503, "application/json", R"({"status":"draining"})", {}};
    case Phase::ready:
      break;
  }
  return {200, "application/json", R"({"status":"ok"})", {}};
}

Json CompletionsServer::State::model() const {
  Json model = {{"id", options.model}, {"object", "model"}, {"created", 0}, {"owned_by", "weft"}};
  if (phase != Phase::loading) model["max_model_len"] = context.config->max_positions;
  return model;
}

HttpResponse CompletionsServer::State::model_of_name(const std::string& name) const {
  check_model_name(name, options.model);
  return {200, "application/json", json_text(model()), {}};
}

HttpResponse CompletionsServer::State::page() const {
  const std::string nonce = random_word();
  return {200,
          "text/html; charset=utf-8",
          browser_page(nonce),
          {{"Content-Security-Policy", browser_page_policy(nonce)},
           {"X-Frame-Options", "DENY"},
           {"Referrer-Policy", "no-referrer"}}};
}

void CompletionsServer::State::complete(const std::shared_ptr<HttpExchange>& exchange) {
  const auto answer = std::make_shared<Answer>();
  answer->arrival = Clock::now();
  check_ready();
  const HttpRequest& http_request = exchange->request();
  if (!http_request.content_encoding.empty() && lower_case(http_request.content_encoding) != "identity") {
    throw RequestError(415, format("Content-Encoding: got %s, expected none: bodies are not decompressed",
                                   escaped(http_request.content_encoding).c_str()));
  }
  const std::string type(trimmed(lower_case(http_request.content_type.substr(0, http_request.content_type.find(';')))));
  if (!type.empty() && type != "application/json") {
    throw RequestError(415, format("Content-Type: got %s, expected application/json", escaped(type).c_str()));
  }
  Places places(in_flight);
  CompletionsRequest request = parse_completions(exchange->take_body(), context, [&](std::int64_t completions) {
    if (places.take(completions) <= max_in_flight) return;
    throw RequestError(429,
                       format("%lld completions are under way: try again later", static_cast<long long>(max_in_flight)),
                       "", "queue_full");
  });
  if (!request.seeded) request.options.sampler.seed = random_seed();
  if (options.request_seconds > 0) {
    request.options.deadline = answer->arrival + duration_of(options.request_seconds);
  }
  answer->exchange = exchange;
  answer->head = completions_head(options.model);
  answer->head.usage_follows = request.include_usage;
  answer->stream = request.stream;
  answer->include_usage = request.include_usage;
  submit(answer, request, places);
}

void CompletionsServer::State::submit(const std::shared_ptr<Answer>& answer, const CompletionsRequest& request,
                                      Places& places) {
  try {
    if (request.values > kSmallAnswer) answer->values = request.values;
    answer->values_in_flight = &values_in_flight;
    if (values_in_flight.fetch_add(answer->values) + answer->values > kAnswersInMemory * options.answer_values) {
      throw RequestError(429, "the answers under way are too large: try again later", "", "queue_full");
    }
    check_ready();  // again after the reservation: a server that drains waits for all completions that are reserved
    const bool scored = request.options.logprobs >= 0;
    const std::uint64_t group = ++last_group;
    std::vector<Completion> completions;
    for (const CompletionPrompt& prompt : request.prompts) {
      answer->usage.prompt_tokens += static_cast<std::int64_t>(prompt.ids.size());
      const auto shared = scored ? std::make_shared<const CompletionPrompt>(prompt) : nullptr;
      for (std::int64_t i = 0; i < request.n; ++i) {
        const std::size_t choice = answer->choices.size();
        CompletionOptions own = request.options;
        own.sampler.seed += static_cast<std::uint64_t>(i);
        answer->choices.emplace_back(static_cast<std::int64_t>(choice), context.tokenizer, own.logprobs, shared);
        completions.push_back(make_completion(prompt, own, context.tokenizer, *context.config,
                                              std::make_shared<Sink<State>>(*this, answer, choice)));
        completions.back().request.group = group;
      }
    }
    answer->unfinished = completions.size();
    {
      const std::lock_guard lock(answers_mutex);
      answers.insert(answer);
      for (Completion& completion : completions) {
        answer->ids.push_back(engine->submit(std::move(completion.request), std::move(completion.listener)));
        places.pass_on();
      }
    }
    answer->exchange->on_gone([this, answer] { cancel(*answer); });
  } catch (...) {
    answer->failed = true;  // handle() answers: not those that were submitted, with their end
    cancel(*answer);
    const std::lock_guard lock(answers_mutex);
    answers.erase(answer);
    throw;
  }
}

void CompletionsServer::State::cancel(Answer& answer) {
  if (answer.cancelled.exchange(true)) return;
  const std::lock_guard lock(answers_mutex);
  for (const RequestId id : answer.ids) engine->cancel(id);
}

// ---- answers ----------------------------------------------------------------------------------------------------------

void CompletionsServer::State::flush() {
  if (outbox.empty()) return;
  bool posted = false;
  {
    const std::lock_guard lock(inbox_mutex);
    if (inbox.empty()) {
      inbox.swap(outbox);
    } else {
      std::ranges::move(outbox, std::back_inserter(inbox));
    }
    posted = std::exchange(delivery_posted, true);
  }
  outbox.clear();
  if (!posted) http.post([this] { deliver_inbox(); });
}

void CompletionsServer::State::deliver_inbox() {
  {
    const std::lock_guard lock(inbox_mutex);
    delivering.swap(inbox);
    delivery_posted = false;
  }
  for (Event& event : delivering) deliver(event);
  for (Event& event : delivering) {
    attempt(*event.answer, [&] { send_unsent(*event.answer); });
  }
  delivering.clear();
}

void CompletionsServer::State::deliver(Event& event) {
  Answer& answer = *event.answer;
  if (event.end.has_value()) --answer.unfinished;
  if (!answer.failed && !answer.exchange->gone()) {
    attempt(answer, [&] {
      if (event.end.has_value()) return deliver_end(answer, event.choice, *event.end);
      deliver_piece(answer, event.choice, event.piece);
    });
  }
  if (event.end.has_value() && answer.unfinished == 0) {
    const std::lock_guard lock(answers_mutex);
    answers.erase(event.answer);
  }
}

void CompletionsServer::State::deliver_piece(Answer& answer, std::size_t choice, const CompletionPiece& piece) {
  answer.choices[choice].add(piece);
  if (answer.stream && answer.choices[choice].pending()) {
    send(answer, completions_event(answer.head, answer.choices[choice].write()));
  }
}

void CompletionsServer::State::deliver_end(Answer& answer, std::size_t choice, const CompletionEnd& end) {
  if (end.reason == FinishedBy::error) return fail_answer(answer, 500, end.message);
  answer.usage.completion_tokens += end.generated_ids;
  answer.choices[choice].finish(end.reason);
  if (answer.stream) send(answer, completions_event(answer.head, answer.choices[choice].write()));
  if (answer.unfinished > 0) return;
  if (answer.stream) {
    if (answer.include_usage) send(answer, completions_usage_event(answer.head, answer.usage));
    send(answer, kLastEvent);
    send_unsent(answer);
    return answer.exchange->end_stream();
  }
  respond(*answer.exchange, {200, "application/json", completions_body(answer.head, answer.choices, answer.usage), {}});
}

void CompletionsServer::State::send(Answer& answer, const std::string& data) {
  if (!std::exchange(answer.begun, true)) {
    metrics.answered(200);
    answer.exchange->begin_stream("text/event-stream");
  }
  answer.unsent += data;
}

void CompletionsServer::State::send_unsent(Answer& answer) {
  if (!answer.unsent.empty()) answer.exchange->send(std::exchange(answer.unsent, {}));
}

void CompletionsServer::State::fail_answer(Answer& answer, int status, const std::string& message) {
  if (answer.failed.exchange(true)) return;
  if (answer.begun) {
    send(answer, error_event(status, message));
    send(answer, kLastEvent);
    send_unsent(answer);
    answer.exchange->end_stream();
  } else {
    respond(*answer.exchange, {status, "application/json", error_body(status, message), {}});
  }
  cancel(answer);
}

// Ends an answer that cannot be made, which is for want of memory. There may not even be enough to say so.
void CompletionsServer::State::drop(Answer& answer, const std::string& why) {
  try {
    failed_answers.log("an answer failed: " + escaped(why));
    fail_answer(answer, 503, "not enough memory for this answer");
  } catch (const std::exception&) {
    answer.exchange->abandon();
  }
}

// ---- the engine's thread ----------------------------------------------------------------------------------------------

// Returns when the requests under way have to be over after a stop signal.
Clock::time_point CompletionsServer::State::step_until_stopped() {
  Clock::time_point give_up = Clock::time_point::max();
  for (;;) {
    if (phase == Phase::ready && stop_signal() != 0) {
      phase = Phase::draining;
      give_up = Clock::now() + duration_of(options.drain_seconds);
    }
    if (phase == Phase::draining && (in_flight == 0 || Clock::now() >= give_up)) return give_up;
    const bool more = engine->step();
    flush();
    if (!more) engine->wait(std::min(Clock::now() + kSignalInterval, give_up));
  }
}

void CompletionsServer::State::finish_cancelled() {
  for (const std::shared_ptr<Answer>& answer : all_answers()) cancel(*answer);
  const Clock::time_point start = Clock::now();
  while (in_flight > 0 && seconds_since(start) < kCancelSeconds) {
    if (!engine->step()) engine->wait(Clock::now() + kSignalInterval);
    flush();
  }
}

void CompletionsServer::State::fail_all(const std::string& message) {
  phase = Phase::draining;
  flush();
  for (const std::shared_ptr<Answer>& answer : all_answers()) {
    http.post([this, answer, message] { fail_answer(*answer, 500, message); });
  }
  http.stop(kFlushSeconds);
}

Exit CompletionsServer::State::run() {
  on_stop(OnStop::finish, "stopping: requests under way are finished; a second signal leaves at once",
          "left: requests under way were cut off");
  phase = Phase::ready;
  log_info("ready: %s", http.url().c_str());
  Clock::time_point give_up;
  try {
    give_up = step_until_stopped();
    finish_cancelled();
  } catch (const std::exception& error) {
    fail_all(error.what());
    throw;
  }
  http.stop(std::max(kFlushSeconds, in_seconds(give_up - Clock::now())));
  return exit_after_signal(stop_signal());
}

// ---- the server -------------------------------------------------------------------------------------------------------

CompletionsServer::CompletionsServer(const ServerOptions& options) : state_(std::make_unique<State>(options)) {
  state_->http.start();
  log_info("listening on %s", state_->http.url().c_str());
  if (!state_->http.loopback() && options.api_key.empty()) {
    log_warning("other machines can use this server, and no key is asked for: --api-key-file names one");
  }
}

CompletionsServer::~CompletionsServer() = default;

std::string CompletionsServer::url() const {
  return state_->http.url();
}

std::string CompletionsServer::held() const {
  const std::lock_guard lock(state_->answers_mutex);
  const auto completions = static_cast<long long>(state_->in_flight),
             values = static_cast<long long>(state_->values_in_flight);
  if (completions == 0 && values == 0 && state_->answers.empty()) return "";
  return format("%lld completions, %lld values, %zu answers", completions, values, state_->answers.size());
}

Exit CompletionsServer::run(Engine& engine, const EngineOptions& engine_options, const ModelConfig& config,
                            const Tokenizer* tokenizer, Tokenizer::Special special) {
  State& s = *state_;
  s.engine = &engine;
  s.max_in_flight = engine_options.max_running + s.options.max_queue;
  s.context = {
      s.options.model,
      tokenizer,
      special,
      &config,
      s.max_in_flight,
      s.options.answer_values,
      [&engine](std::int64_t prompt_ids, std::int64_t max_tokens) { return engine.refusal(prompt_ids, max_tokens); }};
  return s.run();
}

std::string read_api_key(const std::string& file) {
  std::string key, source;
  Exit code = Exit::bad_file;
  if (!file.empty()) {
    source = escaped(file);
    key = trimmed(read_text_file(file, kMaxKeyBytes));
  } else if (const char* variable = std::getenv(kKeyVariable); variable != nullptr) {
    source = kKeyVariable;
    code = Exit::usage;
    key = trimmed(variable);
  } else {
    return "";
  }
  const bool printable = std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c < '\x7F'; });
  if (key.empty() || !printable) {
    fail(code, "%s: expected a key of printable ASCII characters without spaces", source.c_str());
  }
  return key;
}

bool same_key(const std::string& given, const std::string& expected) {
  // No early end, and no branch on a character.
  volatile unsigned difference = given.size() == expected.size() ? 0 : 1;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto other = expected.empty() ? 0u : static_cast<unsigned char>(expected[i % expected.size()]);
    difference = difference | (static_cast<unsigned char>(given[i]) ^ other);
  }
  return difference == 0 && !expected.empty();
}

}  // namespace weft
