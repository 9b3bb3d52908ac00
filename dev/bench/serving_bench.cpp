// What serving costs on the host, without a model: an engine and a server on a model of depth 2 that answers every step after
// a fixed time. Needs no GPU.
//   make benches && build/release/dev/bench/serving_bench [STEP_MS [SEQUENCES...]]      default: 2.7 1 16 64 128 256
//
// For each number of sequences, two lines:
//   engine   host time of Engine::step() while all sequences decode, apart from what the model takes, with text made of the
//            ids: it must fit beside a step of the model
//   server   the same sequences as streams over sockets, read by another process: ids/s beside those of the engine alone, and
//            the CPU time of an id on the engine's thread and on the others (connections, JSON)
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "dev/bench/timed_model.h"
#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/percentile.h"
#include "llmc/base/signals.h"
#include "llmc/infer/completion.h"
#include "llmc/infer/engine.h"
#include "llmc/serve/server.h"

using namespace weft;

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kTokenizer = "models/tiny-pythia/tokenizer.json";
constexpr std::int64_t kPrompt = 128, kTokens = 500, kRequests = 2;

double seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

EngineOptions engine_options(std::int64_t sequences) {
  EngineOptions options;
  options.max_running = sequences;
  return options;
}

std::vector<std::int32_t> prompt_of(std::int64_t number) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < kPrompt; ++i) ids.push_back(static_cast<std::int32_t>((number * 131 + i * 7) % 250));
  return ids;
}

// ---- the engine alone -----------------------------------------------------------------------------------------------

// As a client that asks again when it has its answer.
class Client final : public CompletionSink, public std::enable_shared_from_this<Client> {
 public:
  Client(Engine& engine, const TimedModel& model, const Tokenizer& tokenizer, std::int64_t number)
      : engine_(engine), model_(model), tokenizer_(tokenizer), number_(number) {}

  void ask() {
    CompletionOptions options;
    options.max_tokens = kTokens;
    Completion completion =
        make_completion({prompt_of(number_), ""}, options, &tokenizer_, model_.config(), shared_from_this());
    engine_.submit(std::move(completion.request), std::move(completion.listener));
  }
  bool on_piece(CompletionPiece) override { return true; }
  void on_end(const CompletionEnd&) override {
    if (--left_ > 0) ask();
  }

 private:
  Engine& engine_;
  const TimedModel& model_;
  const Tokenizer& tokenizer_;
  const std::int64_t number_;
  std::int64_t left_ = kRequests;
};

struct EngineFigures {
  std::vector<double> host_us;  // of the steps in which all sequences decode
  double ids_per_second = 0;    // of the whole run, with the steps for prompts
};

EngineFigures run_engine(const Tokenizer& tokenizer, std::int64_t sequences, double step_seconds) {
  TimedModel model(tokenizer.vocab_size(), sequences, 2, step_seconds, TimedModel::Wait::sleeps);
  Engine engine(model, engine_options(sequences));
  for (std::int64_t i = 0; i < sequences; ++i) std::make_shared<Client>(engine, model, tokenizer, i)->ask();
  EngineFigures figures;
  const Clock::time_point start = Clock::now();
  std::int64_t ids_before = 0;
  for (bool more = true; more;) {
    const Clock::time_point begin = Clock::now();
    const Clock::duration taken = model.taken;
    more = engine.step();
    const double host = seconds(Clock::now() - begin - (model.taken - taken));
    const std::int64_t ids = engine.statistics().generated_ids;
    if (ids - ids_before == sequences) figures.host_us.push_back(1e6 * host);
    ids_before = ids;
  }
  figures.ids_per_second = static_cast<double>(ids_before) / seconds(Clock::now() - start);
  if (model.deepest != 2 || model.without_ids < sequences * kRequests * (kTokens - 2)) {
    fail(Exit::internal, "the engine kept %zu steps in flight, with %lld rows without ids", model.deepest,
         static_cast<long long>(model.without_ids));
  }
  return figures;
}

// ---- the server -----------------------------------------------------------------------------------------------------

int connect_to(std::uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    fail(Exit::environment, "cannot connect");
  }
  return fd;
}

void send_request(int fd, std::int64_t number) {
  std::string ids;
  for (const std::int32_t id : prompt_of(number)) ids += format("%s%d", ids.empty() ? "" : ",", id);
  const std::string body = R"({"stream": true, "ignore_eos": true, "max_tokens": )" + std::to_string(kTokens) +
                           R"(, "prompt": [)" + ids + "]}";
  const std::string text = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" +
                           format("Content-Length: %zu\r\n\r\n", body.size()) + body;
  if (::send(fd, text.data(), text.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(text.size())) {
    fail(Exit::environment, "cannot send");
  }
}

// Reads the streams of all clients to their ends, kRequests times each. Returns the seconds that took.
double run_clients(std::uint16_t port, std::int64_t clients) {
  std::vector<pollfd> sockets;
  std::vector<std::string> tails(static_cast<std::size_t>(clients));
  std::vector<std::int64_t> left(static_cast<std::size_t>(clients), kRequests);
  for (std::int64_t i = 0; i < clients; ++i) sockets.push_back({connect_to(port), POLLIN, 0});
  const Clock::time_point begin = Clock::now();
  for (std::int64_t i = 0; i < clients; ++i) send_request(sockets[static_cast<std::size_t>(i)].fd, i);
  std::vector<char> piece(1 << 16);
  for (std::int64_t open = clients; open > 0;) {
    ::poll(sockets.data(), sockets.size(), -1);
    for (std::size_t i = 0; i < sockets.size(); ++i) {
      if ((sockets[i].revents & (POLLIN | POLLHUP)) == 0) continue;
      const ssize_t got = ::recv(sockets[i].fd, piece.data(), piece.size(), 0);
      if (got <= 0) fail(Exit::environment, "the server closed a connection");
      std::string& tail = tails[i];
      tail.append(piece.data(), static_cast<std::size_t>(got));
      if (tail.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n")) {
        tail.clear();
        if (--left[i] > 0) {
          send_request(sockets[i].fd, static_cast<std::int64_t>(i) + clients * left[i]);
          continue;
        }
        ::close(sockets[i].fd);
        sockets[i].fd = -1;  // poll() skips it
        --open;
      }
      if (tail.size() > 64) tail.erase(0, tail.size() - 64);
    }
  }
  return seconds(Clock::now() - begin);
}

double cpu_seconds(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct ServerFigures {
  double ids_per_second = 0, engine_us = 0, others_us = 0;  // CPU microseconds of an id
};

ServerFigures run_server(const Tokenizer& tokenizer, std::int64_t sequences, double step_seconds) {
  TimedModel model(tokenizer.vocab_size(), sequences, 2, step_seconds, TimedModel::Wait::sleeps);
  const EngineOptions options = engine_options(sequences);
  ServerOptions server_options;
  server_options.address = {"127.0.0.1", 0};
  server_options.model = "timed";
  CompletionsServer server(server_options);
  Engine engine(model, options);
  const auto port = static_cast<std::uint16_t>(std::stoi(server.url().substr(server.url().rfind(':') + 1)));
  const double engine_before = cpu_seconds(CLOCK_THREAD_CPUTIME_ID), all_before = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
  int result[2];
  if (::pipe(result) != 0) fail(Exit::environment, "no pipe");
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      const double wall = run_clients(port, sequences);
      if (::write(result[1], &wall, sizeof wall) != sizeof wall) ::_exit(1);
    } catch (const Error& error) {
      std::fprintf(stderr, "clients: %s\n", error.what());
    }
    ::kill(::getppid(), SIGTERM);
    ::_exit(0);
  }
  install_signal_handlers();
  server.run(engine, options, model.config(), &tokenizer, Tokenizer::Special::text);
  double wall = 0;
  if (::read(result[0], &wall, sizeof wall) != sizeof wall) fail(Exit::internal, "the clients have no result");
  ServerFigures figures;
  const auto ids = static_cast<double>(engine.statistics().generated_ids);
  const double on_engine = cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - engine_before;
  figures.ids_per_second = ids / wall;
  figures.engine_us = 1e6 * on_engine / ids;
  figures.others_us = 1e6 * (cpu_seconds(CLOCK_PROCESS_CPUTIME_ID) - all_before - on_engine) / ids;
  ::close(result[0]);
  ::close(result[1]);
  ::waitpid(child, nullptr, 0);
  return figures;
}

// In a process of its own: a stop signal ends a server once.
void server_line(const Tokenizer& tokenizer, std::int64_t sequences, double step_seconds, double engine_rate) {
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      const ServerFigures server = run_server(tokenizer, sequences, step_seconds);
      std::printf(
          "%4lld  server  %8.0f ids/s, %5.1f %% of the engine's; CPU us an id: engine's thread %.2f, others %.2f: "
          "%.3f ms a step\n",
          static_cast<long long>(sequences), server.ids_per_second, 100 * server.ids_per_second / engine_rate,
          server.engine_us, server.others_us, 1e-3 * server.others_us * static_cast<double>(sequences));
    } catch (const Error& error) {
      std::fprintf(stderr, "server: %s\n", error.what());
    }
    std::fflush(stdout);
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
}

}  // namespace

int main(int argc, char** argv) {
  const double step_seconds = (argc > 1 ? std::atof(argv[1]) : 2.7) * 1e-3;
  std::vector<std::int64_t> counts;
  for (int i = 2; i < argc; ++i) counts.push_back(std::atoll(argv[i]));
  if (counts.empty()) counts = {1, 16, 64, 128, 256};
  ::prctl(PR_SET_TIMERSLACK, 1);
  try {
    const Tokenizer tokenizer = Tokenizer::from_json(read_text_file(kTokenizer, 1 << 24), kTokenizer);
    for (const std::int64_t sequences : counts) {
      const EngineFigures engine = run_engine(tokenizer, sequences, step_seconds);
      std::printf("%4lld  engine  %8.0f ids/s; host time of a step: median %.0f us, p99 %.0f us\n",
                  static_cast<long long>(sequences), engine.ids_per_second, percentile(engine.host_us, 50),
                  percentile(engine.host_us, 99));
      server_line(tokenizer, sequences, step_seconds, engine.ids_per_second);
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return static_cast<int>(error.code());
  }
  return 0;
}
