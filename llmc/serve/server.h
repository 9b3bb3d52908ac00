// The server of infer_pythia --serve: the APIs of OpenAI for completions and chats over one engine (doc/serving.md).
//
// Three kinds of threads: the one that calls run() steps the engine; one reads and writes connections and makes JSON of
// what the engine hands out; workers parse and tokenize requests. The first passes its results to the second in
// batches, through one queue: a step never waits for a client.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/infer/engine.h"
#include "llmc/model/config.h"
#include "llmc/serve/http.h"
#include "llmc/serve/text_request.h"
#include "llmc/text/tokenizer.h"

namespace weft {

struct ServerOptions {
  HostPort address;
  HttpLimits http;
  std::string model;                               // its name in the API
  std::string api_key;                             // empty: none is asked for
  std::vector<std::string> allowed_hosts;          // AccessRules::allowed_hosts
  std::string version;                             // for /version
  std::int64_t max_queue = 1024;                   // sequences that may wait beside those that run
  std::int64_t answer_values = kMostAnswerValues;  // the most of one answer; of all under way four times as many
  double drain_seconds = 30;
  double request_seconds = 0;  // a completion that takes longer ends; 0: no limit
  bool log_requests = false;   // each has a line in the log (request_log.h)
};

// What a model may have beside its tokenizer.
struct ServedChat {
  const Chat* chat = nullptr;            // null: it has no chat format
  Json tokenizer_info = Json::object();  // of GET /tokenizer_info: chat_template and the tokens that it names
};

struct Service;

class CompletionsServer {
 public:
  // Listens from here on, and answers 503 until run().
  explicit CompletionsServer(const ServerOptions& options);
  ~CompletionsServer();
  CompletionsServer(const CompletionsServer&) = delete;
  CompletionsServer& operator=(const CompletionsServer&) = delete;

  std::string url() const;
  // What answers hold, for tests: completions that are counted, values, answers. Empty if nothing, as it is once all have
  // ended and their connections have been told.
  std::string held() const;

  // Serves until a stop signal (llmc/base/signals.h), then takes no further requests, gives those under way
  // drain_seconds, and returns the exit code of the signal. If the engine fails, all requests end with an error, and its
  // error goes on to the caller. `tokenizer` may be null. Called once; everything given must live as long as the call.
  Exit run(Engine& engine, const EngineOptions& engine_options, const ModelConfig& config, const Tokenizer* tokenizer,
           Tokenizer::Special special, const ServedChat& chat = {});

 private:
  std::unique_ptr<Service> service_;
};

}  // namespace weft
