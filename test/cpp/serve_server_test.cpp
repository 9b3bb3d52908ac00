#include "llmc/serve/server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "test/cpp/http_client.h"
#include "test/cpp/paged_fake.h"
#include "test/cpp/processor_time.h"
#include "test/cpp/sanitized.h"

namespace weft {
namespace {

// Fails in its next step once it is told to: the one way out of CompletionsServer::run() without a signal.
class Breakable : public PagedFake {
 public:
  explicit Breakable(const PagedFakeSizes& sizes) : PagedFake(sizes) {}
  void submit(std::span<const Chunk> work) override {
    if (broken) fail(Exit::internal, "the device is lost");
    if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    PagedFake::submit(work);
  }
  std::atomic<bool> broken{false};
  std::atomic<bool> slow{false};  // thousands of ids last longer than any wait of a test
};

class Nobody : public RequestListener {
 public:
  void on_prompt(std::span<const ScoredId>) override {}
  bool on_id(const ScoredId&) override { return true; }
  void on_end(RequestEnd) override {}
};

PagedFakeSizes sizes() {
  return {.num_pages = 4096, .max_positions = 8000, .read_everything = false};
}

// A server whose model has no tokenizer: prompts are ids.
class CompletionsServerTest : public testing::Test {
 protected:
  CompletionsServerTest() : model_(sizes()), engine_(model_, engine_options()) {
    ServerOptions options;
    options.address = {"127.0.0.1", 0};
    options.model = "fake";
    options.version = "1.2";
    options.max_queue = 4;
    options.answer_values = 100'000;
    server_ = std::make_unique<CompletionsServer>(options);
    port_ = static_cast<std::uint16_t>(std::stoi(server_->url().substr(server_->url().rfind(':') + 1)));
  }
  ~CompletionsServerTest() override {
    if (failure_.empty()) {
      EXPECT_TRUE(eventually([&] { return held().empty(); })) << held();
    }
    if (!thread_.joinable()) return;
    // Clients that have left are still told to the engine.
    EXPECT_TRUE(eventually([&] { return engine_.statistics().running == 0 && engine_.statistics().waiting == 0; }));
    // Whatever a test has done, the places of all answers are free.
    EXPECT_TRUE(eventually([&] { return server_->held().empty(); })) << server_->held();
    fail_model();
  }

  static EngineOptions engine_options() {
    EngineOptions options;
    options.max_running = 8;
    options.rows_per_step = 32;
    return options;
  }
  void run() {
    thread_ = std::thread([this] {
      try {
        server_->run(engine_, engine_options(), model_.config(), nullptr, Tokenizer::Special::text);
      } catch (const Error& error) {
        failure_ = error.what();
      }
    });
    ASSERT_TRUE(eventually([&] { return ask("GET /health").find("200 OK") != std::string::npos; }));
  }
  // Breaks the model under a request of its own: nothing else is under way.
  void fail_model() {
    model_.broken = true;
    EXPECT_NE(complete(R"({"prompt": [5]})").find("the device is lost"), std::string::npos);
    // Past the server's queue, so that the thread also ends where a test has left that full.
    EngineRequest request;
    request.prompt = {5};
    request.max_ids = 1;
    engine_.submit(std::move(request), std::make_shared<Nobody>());
    thread_.join();
  }

  std::string ask(const std::string& line, const std::string& body = "") const {
    const Client client(port_);
    client.send(request(line, body));
    return client.receive();
  }
  // What the server and the engine hold for clients though all have gone, as /metrics says it; empty: nothing.
  std::string held() const {
    const std::string text = ask("GET /metrics");
    std::string found;
    for (const char* name : {"weft:connections", "weft:body_bytes", "weft:unsent_bytes", "weft:requests_to_read",
                             "weft:completions", "weft:answers", "weft:answer_values", "vllm:num_requests_running",
                             "vllm:num_requests_waiting", "weft:kv_pages_in_use"}) {
      const std::string line = std::string("\n") + name + "{model_name=\"fake\"} ";
      const std::size_t at = text.find(line);
      const bool of_engine = line.find("vllm") == 1 || line.find("kv") != std::string::npos;
      if (at == std::string::npos && of_engine && !thread_.joinable()) continue;  // there is none yet
      const std::string value = at == std::string::npos ? "?" : text.substr(at + line.size(), 1);
      const std::string expected = std::string(name) == "weft:connections" ? "1" : "0";  // the one that asks
      if (value != expected) found += std::string(name) + " " + value + "\n";
    }
    return found;
  }
  std::string complete(const std::string& body) const { return ask("POST /v1/completions", body); }
  static std::string request(const std::string& line, const std::string& body,
                             const std::string& fields = "Content-Type: application/json\r\n") {
    return line + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + fields +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  }

  Breakable model_;
  std::unique_ptr<CompletionsServer> server_;  // ends after the engine
  Engine engine_;
  std::uint16_t port_ = 0;
  std::thread thread_;
  std::string failure_;
};

TEST_F(CompletionsServerTest, AnswersBeforeTheModelIsThere) {
  EXPECT_NE(ask("GET /health").find("503 Service Unavailable"), std::string::npos);
  EXPECT_NE(ask("GET /health").find(R"({"status":"loading"})"), std::string::npos);
  const std::string refused = complete(R"({"prompt": [5]})");
  EXPECT_NE(refused.find("503"), std::string::npos);
  EXPECT_NE(refused.find("still being loaded"), std::string::npos);
  EXPECT_NE(refused.find("Retry-After"), std::string::npos);
  EXPECT_NE(ask("GET /v1/models").find("\"fake\""), std::string::npos);
  EXPECT_NE(ask("GET /metrics").find("weft:connections"), std::string::npos);
  const std::string page = ask("GET /");
  for (const char* part : {"\r\nContent-Security-Policy: ", "\r\nX-Frame-Options: DENY\r\n",
                           "\r\nReferrer-Policy: no-referrer\r\n", "</html>"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
}

// The list of models and the version, before the model is there and after: a model says how long a text may be once it is known.
TEST_F(CompletionsServerTest, SaysWhatItServes) {
  const auto body_of = [&](const std::string& path) {
    const std::string text = ask("GET " + path);
    EXPECT_NE(text.find("\r\nContent-Type: application/json\r\n"), std::string::npos) << text;
    return Json::parse(text.substr(text.find("\r\n\r\n") + 4));
  };
  Json models = Json::parse(
      R"({"object": "list", "data": [{"id": "fake", "object": "model", "created": 0, "owned_by": "weft"}]})");
  EXPECT_EQ(body_of("/v1/models"), models);
  EXPECT_EQ(body_of("/version"), Json::parse(R"({"version": "1.2"})"));
  run();
  models["data"][0]["max_model_len"] = model_.config().max_positions;
  EXPECT_EQ(body_of("/v1/models"), models);
  EXPECT_EQ(body_of("/version"), Json::parse(R"({"version": "1.2"})"));
}

// One model by its name, whose characters may be escaped; any other is not found, in the form of OpenAI's errors.
TEST_F(CompletionsServerTest, AModelIsFoundByItsName) {
  run();
  const std::string list = ask("GET /v1/models");
  const std::string listed = list.substr(list.find("[{") + 1, list.find("}]") - list.find("[{"));
  for (const char* name : {"fake", "%66ake", "%66%61%6b%65", "fake?x=y"}) {
    const std::string text = ask(std::string("GET /v1/models/") + name);
    EXPECT_TRUE(text.starts_with("HTTP/1.1 200 ")) << name;
    EXPECT_TRUE(text.ends_with("\r\n\r\n" + listed)) << text << "\n" << list;
  }
  for (const char* name : {"Fake", "fake/", "fake%2F", "fak", "fake%00", "org/fake", "%20"}) {
    const std::string text = ask(std::string("GET /v1/models/") + name);
    EXPECT_TRUE(text.starts_with("HTTP/1.1 404 ")) << name;
    EXPECT_NE(text.find(R"("code":"model_not_found")"), std::string::npos) << text;
    EXPECT_NE(text.find(R"("param":"model")"), std::string::npos) << text;
  }
  EXPECT_NE(ask("GET /v1/models/").find("no such path"), std::string::npos);
  EXPECT_TRUE(ask("DELETE /v1/models/fake").starts_with("HTTP/1.1 405 "));
  EXPECT_TRUE(ask("HEAD /v1/models/fake").ends_with("\r\n\r\n"));
}

TEST_F(CompletionsServerTest, OptionsAreTheMethodsOfAPath) {
  for (const auto& [target, allow] : {std::pair("*", "GET, HEAD, OPTIONS, POST"),
                                      {"http://localhost", "GET, HEAD, OPTIONS, POST"},
                                      {"/health", "GET, HEAD, OPTIONS"},
                                      {"/v1/models/any", "GET, HEAD, OPTIONS"},
                                      {"/v1/completions", "OPTIONS, POST"}}) {
    const std::string text = ask(std::string("OPTIONS ") + target);
    EXPECT_TRUE(text.starts_with("HTTP/1.1 200 ")) << target;
    EXPECT_NE(text.find(std::string("\r\nAllow: ") + allow + "\r\n"), std::string::npos) << text;
    EXPECT_TRUE(text.ends_with("Content-Length: 0\r\n\r\n")) << text;
  }
  EXPECT_TRUE(ask("OPTIONS /nothing").starts_with("HTTP/1.1 404 "));
  EXPECT_TRUE(ask("CONNECT localhost:80").starts_with("HTTP/1.1 405 "));
}

// The host of a target in absolute form is checked as Host is, which it replaces.
TEST_F(CompletionsServerTest, TheHostOfAnAbsoluteTargetIsThisMachine) {
  EXPECT_TRUE(ask("GET http://localhost:1/version").starts_with("HTTP/1.1 200 "));
  EXPECT_TRUE(ask("GET http://127.0.0.1/version").starts_with("HTTP/1.1 200 "));
  const std::string other = ask("GET http://evil.example/version");  // with "Host: localhost"
  EXPECT_TRUE(other.starts_with("HTTP/1.1 403 ")) << other;
  EXPECT_NE(other.find("evil.example"), std::string::npos);
}

// A prompt that is too long for the model is refused before it is read, of several the first of them.
TEST_F(CompletionsServerTest, TooManyIdsAreRefusedWithWhatFits) {
  run();
  const auto ids = [](std::size_t count) {
    std::string text = "[5";
    for (std::size_t i = 1; i < count; ++i) text += ",5";
    return text + "]";
  };
  EXPECT_TRUE(complete(R"({"max_tokens": 1, "prompt": )" + ids(7999) + "}").starts_with("HTTP/1.1 200 "));
  const std::string one = complete(R"({"max_tokens": 1, "prompt": )" + ids(8000) + "}");
  EXPECT_TRUE(one.starts_with("HTTP/1.1 400 ")) << one;
  EXPECT_NE(one.find("takes at most 7999"), std::string::npos) << one;
  EXPECT_NE(one.find("context_length_exceeded"), std::string::npos) << one;
  const std::string several = complete(R"({"max_tokens": 1, "prompt": [[5], )" + ids(8000) + ", [-1]]}");
  EXPECT_NE(several.find("prompt[1]: the prompt has 8000 ids"), std::string::npos) << several;
}

// By its name in any letters, and by no other.
TEST_F(CompletionsServerTest, TheHostIsThisMachine) {
  for (const auto& [host, status] : {std::pair("localhost", "404"),
                                     {"LocalHost", "404"},
                                     {"LOCALHOST:8000", "404"},
                                     {"127.0.0.1:8000", "404"},
                                     {"[::1]:8000", "404"},
                                     {"[::1]", "404"},
                                     {"[::2]", "403"},
                                     {"localhos", "403"},
                                     {"localhost.example", "403"},
                                     {"example:8000", "403"}}) {
    const Client client(port_);
    client.send(std::string("GET /nothing HTTP/1.0\r\nHost: ") + host + "\r\n\r\n");
    EXPECT_TRUE(client.receive().starts_with(std::string("HTTP/1.1 ") + status)) << host;
  }
}

TEST_F(CompletionsServerTest, LogitsThatAreNotFiniteFailTheirRequestAlone) {
  run();
  const std::string good = complete(R"({"prompt": [5], "max_tokens": 9, "logprobs": 0})");
  EXPECT_NE(good.find("200 OK"), std::string::npos) << good;
  const std::string bad = complete(R"({"prompt": [5, 1], "max_tokens": 9})");
  EXPECT_NE(bad.find("500 Internal"), std::string::npos) << bad;
  EXPECT_NE(bad.find("not finite"), std::string::npos) << bad;
  // The other completion of the same request ends, too.
  const std::string both = complete(R"({"prompt": [[5], [5, 1]], "max_tokens": 5000, "stream": true, "logprobs": 0})");
  EXPECT_NE(both.find("not finite"), std::string::npos) << both.substr(0, 2000);
  EXPECT_TRUE(eventually([&] { return engine_.statistics().running == 0; }));
  EXPECT_LT(engine_.statistics().generated_ids, 5000);
  EXPECT_NE(complete(R"({"prompt": [5]})").find("200 OK"), std::string::npos);
}

TEST_F(CompletionsServerTest, WaitingForRequestsCostsNoProcessorTime) {
  run();
  const double seconds = processor_seconds([] { std::this_thread::sleep_for(std::chrono::milliseconds(400)); });
  EXPECT_LT(seconds, test::sanitized() ? 0.2 : 0.04);
}

// What /metrics says after two answers, one of them with two choices: every line that counts.
TEST_F(CompletionsServerTest, MetricsAddUpToWhatWasAnswered) {
  run();
  EXPECT_NE(complete(R"({"prompt": [5, 6, 7], "n": 2, "max_tokens": 9, "ignore_eos": true})").find("200 OK"),
            std::string::npos);
  EXPECT_NE(complete(R"({"prompt": [8], "max_tokens": 1, "ignore_eos": true, "stream": true})").find("[DONE]"),
            std::string::npos);
  EXPECT_NE(complete(R"({"prompt": "text"})").find("400 Bad"), std::string::npos);
  const std::string text = ask("GET /metrics");
  for (const char* line :
       {"vllm:num_requests_running{L} 0", "vllm:prompt_tokens_total{L} 7",  // each choice computes its prompt
        "vllm:generation_tokens_total{L} 19", "vllm:num_preemptions_total{L} 0", "weft:kv_pages{L} 4096",
        "weft:kv_pages_in_use{L} 0", "weft:rows_total{L} 23", "weft:sampled_chunks_total{L} 19",
        "vllm:time_to_first_token_seconds_count{L} 3", "vllm:inter_token_latency_seconds_count{L} 16",
        "vllm:e2e_request_latency_seconds_count{L} 3", "vllm:request_success_total{L,finished_reason=\"length\"} 3",
        "vllm:request_success_total{L,finished_reason=\"stop\"} 0", "weft:http_responses_total{L,code=\"400\"} 1"}) {
    std::string expected = line;
    expected.replace(expected.find('L'), 1, "model_name=\"fake\"");
    EXPECT_NE(text.find("\n" + expected + "\n"), std::string::npos) << expected << "\n" << text;
  }
}

TEST_F(CompletionsServerTest, ABodyIsJsonAndNotEncoded) {
  run();
  struct Case {
    const char *fields, *refused;  // the field that is refused
  };
  for (const Case& c : {Case{"", ""},
                        {"Content-Type: application/json\r\n", ""},
                        {"Content-Type: application/json; charset=utf-8\r\n", ""},
                        {"Content-Type: application/json ;charset=utf-8\r\n", ""},
                        {"Content-Type:\r\nContent-Encoding:\r\n", ""},
                        {"Content-Type: Application/JSON\r\nContent-Encoding: Identity\r\n", ""},
                        {"Content-Encoding: identity\r\n", ""},
                        {"Content-Type: application/json\r\nContent-Encoding: identity\r\n", ""},
                        {"Content-Type: text/plain\r\n", "Content-Type"},
                        {"Content-Type: text/plain; application/json\r\n", "Content-Type"},
                        {"Content-Type: application/jsonl\r\n", "Content-Type"},
                        {"Content-Type: text/plain\r\nContent-Encoding: identity\r\n", "Content-Type"},
                        {"Content-Encoding: gzip\r\n", "Content-Encoding"},
                        {"Content-Encoding: identity, gzip\r\n", "Content-Encoding"},
                        {"Content-Encoding: identit\r\n", "Content-Encoding"}}) {
    const Client client(port_);
    client.send(request("POST /v1/completions", R"({"prompt": [5], "max_tokens": 1})", c.fields));
    const std::string text = client.receive(), refused = c.refused;
    EXPECT_TRUE(text.starts_with(refused.empty() ? "HTTP/1.1 200" : "HTTP/1.1 415")) << c.fields << text;
    EXPECT_NE(text.find(refused.empty() ? "\"choices\"" : "\"" + refused + ": got"), std::string::npos) << text;
  }
}

// A prompt counts once, its completions each; in the last event of a stream as in a whole answer.
TEST_F(CompletionsServerTest, UsageCountsEveryChoice) {
  run();
  const std::string expected = R"("usage":{"prompt_tokens":3,"completion_tokens":24,"total_tokens":27})";
  const std::string body = R"({"prompt": [[5], [6, 7]], "n": 3, "max_tokens": 4, "ignore_eos": true)";
  EXPECT_NE(complete(body + "}").find(expected), std::string::npos);
  const std::string streamed = complete(body + R"(, "stream": true, "stream_options": {"include_usage": true}})");
  EXPECT_NE(streamed.find(expected), std::string::npos) << streamed;
  // All events before that one say that it comes; and nothing does where it does not.
  const auto count = [](const std::string& text, const std::string& part) {
    int found = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count(streamed, "\"usage\":null"), count(streamed, "data: {") - 1);
  for (const char* rest : {R"(, "stream": true})", R"(, "stream": true, "stream_options": {}})"}) {
    EXPECT_EQ(complete(body + rest).find("usage"), std::string::npos);
  }
}

// Status line and body of each answer in what a connection has brought; chunks are put together, and what differs from answer
// to answer, its id and time, is taken out.
std::vector<std::string> answers_of(std::string text) {
  std::vector<std::string> answers;
  while (!text.empty()) {
    const std::size_t head = text.find("\r\n\r\n");
    if (head == std::string::npos) break;
    std::string answer = text.substr(0, text.find("\r\n")) + "\n";
    const std::string fields = text.substr(0, head);
    text.erase(0, head + 4);
    const std::size_t length = fields.find("Content-Length: ");
    if (length != std::string::npos) {
      const std::size_t bytes = std::stoul(fields.substr(length + 16));
      answer += text.substr(0, bytes);
      text.erase(0, bytes);
    }
    for (std::size_t bytes = 1; length == std::string::npos && bytes > 0;) {
      bytes = std::stoul(text, nullptr, 16);
      answer += text.substr(text.find("\r\n") + 2, bytes);
      text.erase(0, text.find("\r\n") + 4 + bytes);
    }
    for (const char* field : {"\"id\":", "\"created\":"}) {
      for (std::size_t at = answer.find(field); at != std::string::npos; at = answer.find(field, at + 1)) {
        answer.erase(at + 5, answer.find_first_of(",}", at) - at - 5);
      }
    }
    answers.push_back(answer);
  }
  return answers;
}

// Requests of every kind, one behind the other on one connection and in another order: each has the answer that it has on a
// connection of its own, to a server that has answered nothing but a question for its health.
TEST_F(CompletionsServerTest, LaterRequestsOfAConnectionAreAnsweredAsIfTheyWereAlone) {
  run();
  const std::vector<std::string> bodies = {
      R"({"prompt": [5, 6, 7], "n": 2, "max_tokens": 9, "ignore_eos": true, "seed": 3})",
      R"({"prompt": [8], "max_tokens": 5, "stream": true, "logprobs": 0, "seed": 4})",
      R"({"prompt": "text"})",
      R"({"prompt": [5, 1], "max_tokens": 9})",
      R"({"prompt": [[5], [6, 7]], "max_tokens": 4, "echo": true, "logprobs": 0, "seed": 5})",
      R"({"prompt": [5, 6], "max_tokens": 0, "echo": true, "logprobs": 0})",
      R"({"prompt": [9, 9], "max_tokens": 3, "stream": true, "stream_options": {"include_usage": true}, "seed": 6})",
      R"({"prompt": [9, 9], "max_tokens": 3, "temperature": 0})"};
  std::vector<std::string> alone;
  for (const std::string& body : bodies) {
    const std::vector<std::string> answers = answers_of(complete(body));
    ASSERT_EQ(answers.size(), 1u) << body;
    alone.push_back(answers.front());
  }
  const Client client(port_);
  std::string all;
  for (std::size_t i = 0; i < 2 * bodies.size(); ++i) {
    std::string one = request("POST /v1/completions", bodies[i * 3 % bodies.size()]);
    if (i + 1 < 2 * bodies.size()) one.erase(one.find("Connection: close\r\n"), 19);
    all += one;
  }
  client.send(all);
  const std::vector<std::string> answers = answers_of(client.receive());
  ASSERT_EQ(answers.size(), 2 * bodies.size());
  for (std::size_t i = 0; i < answers.size(); ++i) EXPECT_EQ(answers[i], alone[i * 3 % bodies.size()]) << i;
}

// A seed gives the choices of each prompt, whichever prompts stand before it.
TEST_F(CompletionsServerTest, WithASeedAPromptHasItsChoicesWhereverItStands) {
  run();
  const auto ids_of = [&](const std::string& prompts) {
    const std::string text =
        complete(R"({"prompt": )" + prompts + R"(, "n": 2, "seed": 7, "logprobs": 0, "max_tokens": 6})");
    Json tokens = Json::array();
    const Json body = Json::parse(text.substr(text.find("\r\n\r\n") + 4));
    for (const Json& choice : body.at("choices")) tokens.push_back(choice.at("logprobs").at("tokens"));
    return tokens;
  };
  const Json alone = ids_of("[[5]]"), three = ids_of("[[6], [5], [5]]");
  ASSERT_EQ(alone.size(), 2u);
  ASSERT_EQ(three.size(), 6u);
  EXPECT_NE(alone[0], alone[1]);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(three[2 + i], alone[i % 2]) << i;
}

TEST_F(CompletionsServerTest, TheSeedDecidesAndZeroIsOne) {
  run();
  const auto tokens = [&](const std::string& seed) {
    const std::string text =
        complete(R"({"prompt": [5], "logprobs": 0, "ignore_eos": true, "max_tokens": 16)" + seed + "}");
    return Json::parse(text.substr(text.find("\r\n\r\n") + 4)).at("choices")[0].at("logprobs").at("tokens").dump();
  };
  for (const std::string seed : {R"(, "seed": 0)", R"(, "seed": 1)", R"(, "seed": 9223372036854775807)"}) {
    EXPECT_EQ(tokens(seed), tokens(seed)) << seed;
  }
  EXPECT_NE(tokens(R"(, "seed": 0)"), tokens(R"(, "seed": 1)"));
  EXPECT_NE(tokens(""), tokens(""));
  EXPECT_NE(tokens(R"(, "seed": null)"), tokens(R"(, "seed": 0)"));
}

TEST_F(CompletionsServerTest, AModelThatFailsEndsAllRequestsWithAnError) {
  run();
  model_.slow = true;
  const Client waiting(port_), streaming(port_);
  waiting.send(request("POST /v1/completions", R"({"prompt": [5], "max_tokens": 7000})"));
  streaming.send(
      request("POST /v1/completions", R"({"prompt": [6], "max_tokens": 7000, "stream": true, "logprobs": 0})"));
  streaming.receive("data: ");
  ASSERT_TRUE(eventually([&] { return engine_.statistics().running == 2; }));
  model_.broken = true;  // under the requests that run
  thread_.join();
  EXPECT_EQ(failure_, "the device is lost");
  EXPECT_NE(waiting.receive().find("500 Internal"), std::string::npos);
  const std::string rest = streaming.receive();
  EXPECT_NE(rest.find(R"("message":"the device is lost")"), std::string::npos) << rest;
  EXPECT_TRUE(rest.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n")) << rest;
}

// What an answer holds until it is complete is limited; a stream holds only what it echoes.
TEST_F(CompletionsServerTest, AnswersThatAreTooLargeAreRefused) {
  run();
  const std::string large = R"({"prompt": [5], "ignore_eos": true, "n": 12, "max_tokens": 5000, "logprobs": 0)";
  const std::string refused = complete(large + "}");
  EXPECT_TRUE(refused.starts_with("HTTP/1.1 400")) << refused.substr(0, 200);
  EXPECT_NE(refused.find("the answer may have 120000 values"), std::string::npos) << refused;
  {
    const Client streamed(port_);
    streamed.send(request("POST /v1/completions", large + R"(, "stream": true})"));
    EXPECT_NE(streamed.receive("data: ").find("200 OK"), std::string::npos);
  }
  ASSERT_TRUE(eventually([&] { return engine_.statistics().running == 0; }));
  // Of all answers together, too, as long as they are under way.
  model_.slow = true;
  const std::string body =
      R"({"prompt": [5], "ignore_eos": true, "max_tokens": 7900, "logprobs": 10})";  // 94,800 values
  {
    std::vector<std::unique_ptr<Client>> clients;
    for (int i = 0; i < 4; ++i) {
      clients.push_back(std::make_unique<Client>(port_));
      clients.back()->send(request("POST /v1/completions", body));
    }
    ASSERT_TRUE(eventually([&] { return engine_.statistics().running == 4; }));
    const std::string full = complete(body);
    EXPECT_TRUE(full.starts_with("HTTP/1.1 429")) << full.substr(0, 200);
    EXPECT_NE(full.find("too large: try again later"), std::string::npos);
    EXPECT_NE(complete(R"({"prompt": [5], "max_tokens": 2})").find("200 OK"), std::string::npos);
  }
  ASSERT_TRUE(eventually([&] { return engine_.statistics().running == 0; }));
  const std::string shorter =
      R"({"prompt": [5], "ignore_eos": true, "max_tokens": 600, "logprobs": 10})";  // 7,200 values
  EXPECT_TRUE(eventually([&] { return complete(shorter).starts_with("HTTP/1.1 200"); }));
}

// One place is left beside a long request. Of one with many choices and one that came after it, each gets its turn.
TEST_F(CompletionsServerTest, RequestsTakeTurns) {
  run();
  model_.slow = true;
  const Client others(port_), many(port_);
  others.send(request("POST /v1/completions", R"({"prompt": [5], "n": 7, "max_tokens": 7000, "ignore_eos": true})"));
  ASSERT_TRUE(eventually([&] { return engine_.statistics().running == 7; }));
  many.send(request("POST /v1/completions", R"({"prompt": [6], "n": 4, "max_tokens": 200, "ignore_eos": true})"));
  ASSERT_TRUE(eventually([&] { return engine_.statistics().waiting == 3; }));
  EXPECT_TRUE(complete(R"({"prompt": [7], "max_tokens": 1})").starts_with("HTTP/1.1 200"));
  EXPECT_TRUE(eventually([&] { return engine_.statistics().running == 8; })) << "some of the four still run";
  EXPECT_TRUE(many.receive("\r\n\r\n").starts_with("HTTP/1.1 200"));
}

TEST_F(CompletionsServerTest, MoreThanMayWaitIsRefused) {
  run();
  EXPECT_NE(complete(R"({"prompt": [5], "n": 13})").find("400 Bad"), std::string::npos);
  {
    const Client busy(port_);
    busy.send(request("POST /v1/completions", R"({"prompt": [5], "n": 12, "max_tokens": 7000})"));
    ASSERT_TRUE(eventually([&] { return engine_.statistics().running == 8; }));
    const std::string refused = complete(R"({"prompt": [5]})");
    EXPECT_NE(refused.find("429 Too Many"), std::string::npos) << refused;
    EXPECT_NE(refused.find("Retry-After: 1"), std::string::npos);
    for (int i = 0; i < 5; ++i) {
      EXPECT_NE(complete(R"({"prompt": [[5], [6], [7]], "n": 2})").find("429 Too Many"), std::string::npos);
    }
  }
  // What was refused holds no place: all that may be under way at once can be again.
  EXPECT_TRUE(eventually([&] { return complete(R"({"prompt": [5], "n": 12})").find("200 OK") != std::string::npos; }));
  EXPECT_EQ(engine_.statistics().running, 0);
}

}  // namespace
}  // namespace weft
