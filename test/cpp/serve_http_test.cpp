#include "llmc/serve/http.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "test/cpp/http_client.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

std::string post(const std::string& body, const std::string& fields = "") {
  return "POST /x HTTP/1.1\r\nHost: localhost\r\n" + fields + "Content-Length: " + std::to_string(body.size()) +
         "\r\n\r\n" + body;
}
constexpr const char* kGet = "GET /hello HTTP/1.1\r\nHost: localhost\r\n\r\n";
constexpr const char* kLastGet =
    "GET /last HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: the-last\r\n\r\n";

HttpLimits quick_limits() {
  HttpLimits limits;
  limits.body_bytes = 1000;
  limits.header_bytes = 512;
  limits.all_body_bytes = 1500;
  // Far longer than Client::receive() waits: a connection that closes in a test was closed by what the test is about.
  limits.read_seconds = limits.idle_seconds = limits.write_seconds = 60;
  return limits;
}

// So that what waits for a client who takes nothing is seen soon.
HttpLimits small_buffers() {
  HttpLimits limits = quick_limits();
  limits.socket_buffer_bytes = 10'000;
  return limits;
}

std::string error_text(const HttpRequest&, int status, const std::string& message) {
  return std::to_string(status) + ": " + message;
}

void answer(const std::shared_ptr<HttpExchange>& exchange, const std::string& text) {
  exchange->respond({200, "text/plain", text, {}});
}

// Answers with the method, the path and the body.
void echo(const std::shared_ptr<HttpExchange>& exchange) {
  const HttpRequest& request = exchange->request();
  answer(exchange, request.method + " " + request.path + " [" + request.body + "]");
}

// A server with a handler, started.
struct Running {
  explicit Running(HttpHandler handler, const HttpLimits& limits = quick_limits())
      : server(
            {"127.0.0.1", 0}, limits,
            [this, handler = std::move(handler)](const std::shared_ptr<HttpExchange>& exchange) {
              handler(exchange);
              ++asked;
            },
            error_text) {
    server.start();
  }
  // At the end of every test: its clients have gone, and nothing is held for them.
  ~Running() {
    const auto held = [this] {
      const HttpCounters c = server.counters();
      return format("%lld connections, %lld bytes of bodies, %lld unsent, %lld requests to read",
                    static_cast<long long>(c.connections), static_cast<long long>(c.body_bytes),
                    static_cast<long long>(c.unsent_bytes), static_cast<long long>(c.waiting));
    };
    const std::string nothing = "0 connections, 0 bytes of bodies, 0 unsent, 0 requests to read";
    EXPECT_TRUE(eventually([&] { return held() == nothing; })) << held();
  }
  std::string ask(const std::string& data) {
    const Client client(server.port(), data);
    return client.receive();
  }
  std::atomic<int> asked{0};  // how often its handler has returned
  HttpServer server;
};

// A server that keeps what the first client asks. Others get an echo.
struct Kept {
  explicit Kept(const HttpLimits& limits = quick_limits(), bool stream = false)
      : running(
            [this, stream](const std::shared_ptr<HttpExchange>& one) {
              if (one->request().path != "/hello") return echo(one);
              exchange = one;
              one->on_gone([this] { gone = true; });
              if (stream) one->begin_stream("text/event-stream");
              ready = true;
            },
            limits) {}
  bool begun() const {
    return eventually([this] { return ready.load(); });
  }

  std::shared_ptr<HttpExchange> exchange;
  std::atomic<bool> gone{false}, ready{false};
  Running running;
};

// The same with a stream, which has been begun and is not ended.
struct KeptStream : Kept {
  explicit KeptStream(const HttpLimits& limits = quick_limits()) : Kept(limits, true) {}
};

// Holds threads up until it is opened.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

// Bytes of which no two pieces of eight are equal, so that one that is lost, repeated or exchanged shows.
std::string numbered(std::size_t bytes) {
  std::string text;
  for (std::size_t i = 0; text.size() < bytes; ++i) text += std::to_string(10'000'000 + i);
  text.resize(bytes);
  return text;
}

// The ids of the requests, in their order.
std::vector<std::string> ids_of(const std::string& answers) {
  constexpr std::string_view kField = "\r\nX-Request-Id: ";
  std::vector<std::string> found;
  for (std::size_t at = answers.find(kField); at != std::string::npos; at = answers.find(kField, at + 1)) {
    const std::size_t begin = at + kField.size();
    found.push_back(answers.substr(begin, answers.find("\r\n", begin) - begin));
  }
  return found;
}

// An answer as it is but for the id, which is another each time.
std::string without_id(std::string answer) {
  for (const std::string& id : ids_of(answer)) answer.replace(answer.find(id), id.size(), "");
  return answer;
}

void expect_in_order(const std::string& text, const std::vector<std::string>& parts) {
  std::size_t at = 0;
  for (const std::string& part : parts) {
    at = text.find(part, at);
    ASSERT_NE(at, std::string::npos) << part << "\n" << text;
  }
}

TEST(Http, AddressesAreHostAndPort) {
  EXPECT_EQ(parse_host_port("127.0.0.1:8000", "--serve").port, 8000);
  EXPECT_EQ(parse_host_port("[::1]:0", "--serve").host, "::1");
  for (const char* bad : {"", ":", "8000", ":8000", "localhost", "localhost:", "localhost:x", "localhost:65536",
                          "localhost:-1", "::1:8000", "localhost:80 ", "[::1:80", "a[::1]:80"}) {
    const std::string message = error_of(Exit::usage, [&] { parse_host_port(bad, "--serve"); });
    EXPECT_NE(message.find("expected HOST:PORT"), std::string::npos) << message;
  }
}

TEST(Http, AnAddressInUseIsAnEnvironmentError) {
  Running running(echo);
  const std::string message = error_of(Exit::environment, [&] {
    HttpServer({"127.0.0.1", running.server.port()}, quick_limits(), echo, error_text);
  });
  EXPECT_NE(message.find("in use"), std::string::npos) << message;
  error_of(Exit::environment, [&] { HttpServer({"192.0.2.1", 0}, quick_limits(), echo, error_text); });
}

TEST(Http, AConnectionServesManyRequests) {
  Running running(echo);
  const Client client(running.server.port());
  for (int i = 0; i < 3; ++i) {
    client.send(kGet);
    EXPECT_NE(client.receive("[]").find("GET /hello []"), std::string::npos);
    client.send(post("body"));
    EXPECT_NE(client.receive("[body]").find("POST /x [body]"), std::string::npos);
  }
  EXPECT_EQ(running.server.counters().connections, 1);
}

TEST(Http, RequestsThatComeTogetherAreAnsweredInOrder) {
  Running running(echo);
  const std::string text = running.ask(std::string(kGet) + post("one") + post("two") + kGet + kLastGet);
  expect_in_order(text, {"GET /hello []", "[one]", "[two]", "GET /hello []", "GET /last []"});
  EXPECT_TRUE(text.ends_with("GET /last []"));
}

// Whether a connection stays after an answer: Connection decides, and the version where it says nothing.
TEST(Http, TheClientSaysWhetherAConnectionStays) {
  Running running(echo);
  struct Case {
    const char *version, *field;
    bool stays;
  };
  for (const Case& c : {Case{"1.1", "", true}, Case{"1.1", "Connection: close\r\n", false},
                        Case{"1.1", "Connection: keep-alive\r\n", true}, Case{"1.0", "", false},
                        Case{"1.0", "Connection: close\r\n", false}, Case{"1.0", "Connection: keep-alive\r\n", true}}) {
    const std::string what = std::string(c.version) + " " + c.field;
    const Client client(running.server.port(),
                        std::string("GET /a HTTP/") + c.version + "\r\nHost: a\r\n" + c.field + "\r\n");
    const std::string first = client.receive("[]");
    EXPECT_NE(first.find("GET /a"), std::string::npos) << what;
    EXPECT_EQ(first.find("Connection: close") == std::string::npos, c.stays) << what;
    // HTTP/1.0 takes a connection for closed unless it is told.
    EXPECT_EQ(first.find("Connection: keep-alive") != std::string::npos, c.stays && c.version == std::string("1.0"))
        << what;
    if (c.stays) {
      client.send(kLastGet);
      EXPECT_TRUE(client.receive().ends_with("GET /last []")) << what;
    } else {
      EXPECT_EQ(client.receive(), "") << what;  // the end, and not after the time for an idle connection
    }
  }
}

TEST(Http, ARequestInSmallPiecesIsOneRequest) {
  Running running(echo);
  const Client client(running.server.port());
  for (const char byte : post("slow", "Connection: close\r\n")) client.send(std::string(1, byte));
  EXPECT_NE(client.receive().find("[slow]"), std::string::npos);
}

TEST(Http, HeadHasNoBody) {
  Running running(echo);
  const std::string text = running.ask("HEAD /hello HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
  EXPECT_NE(text.find("Content-Length: 13"), std::string::npos);
  EXPECT_TRUE(text.ends_with("\r\n\r\n"));
}

TEST(Http, ThePathEndsWhereTheQueryBegins) {
  Running running(echo);
  for (const auto& [target, path] :
       {std::pair("/a?b=c", "/a"), std::pair("/a?", "/a"), std::pair("/?/b", "/"), std::pair("/a/b", "/a/b")}) {
    const std::string text = running.ask(std::string("GET ") + target + " HTTP/1.0\r\n\r\n");
    EXPECT_TRUE(text.ends_with(std::string("GET ") + path + " []")) << text;
  }
}

// RFC 9112, 3.2: the four forms, which method each goes with, and that the host of the absolute form counts.
TEST(Http, TargetsHaveFourForms) {
  Running running([](const std::shared_ptr<HttpExchange>& exchange) {
    const HttpRequest& request = exchange->request();
    answer(exchange, request.method + " " + request.path + " at " + request.host);
  });
  struct Case {
    const char *line, *answer;  // "": 400
  };
  for (const Case& c : {Case{"GET /a", "GET /a at h"},
                        {"GET http://other:80/a?b=http://c/", "GET /a at other:80"},
                        {"GET HTTP://Other/a", "GET /a at Other"},
                        {"GET https://[::1]:8000/a/b", "GET /a/b at [::1]:8000"},
                        {"GET http://other", "GET / at other"},
                        {"GET http://other?x", "GET / at other"},
                        {"OPTIONS http://other", "OPTIONS * at other"},
                        {"OPTIONS http://other/", "OPTIONS / at other"},
                        {"OPTIONS *", "OPTIONS * at h"},
                        {"OPTIONS /a", "OPTIONS /a at h"},
                        {"CONNECT other:443", "CONNECT other:443 at h"},
                        {"GET /%61%2fb%3F?%zz", "GET /a/b? at h"},
                        {"GET //a", "GET //a at h"},
                        {"GET /a:b@c", "GET /a:b@c at h"},
                        {"GET *", ""},
                        {"GET a", ""},
                        {"GET other:443", ""},
                        {"GET ftp://other/a", ""},
                        {"GET http:/a", ""},
                        {"GET http:///a", ""},
                        {"GET http://me@other/a", ""},
                        {"GET http://me:word@other/a", ""},
                        {"GET http://other:x/a", ""},
                        {"GET http://[::1/a", ""},
                        {"GET /a#b", ""},
                        {"GET /%", ""},
                        {"GET /%4", ""},
                        {"GET /%zz", ""},
                        {"CONNECT /a", ""},
                        {"CONNECT other", ""}}) {
    const std::string text = running.ask(std::string(c.line) + " HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    if (*c.answer == '\0') {
      EXPECT_TRUE(text.starts_with("HTTP/1.1 400 ")) << c.line << "\n" << text;
    } else {
      EXPECT_TRUE(text.ends_with(std::string("\r\n\r\n") + c.answer)) << c.line << "\n" << text;
    }
  }
}

// RFC 9112, 3.2: HTTP/1.1 has one Host, which may be empty; 1.0 may have none.
TEST(Http, ARequestHasOneHost) {
  Running running(echo);
  const auto asked = [&](const std::string& version, const std::string& fields) {
    return running.ask("GET /a HTTP/" + version + "\r\n" + fields + "Connection: close\r\n\r\n");
  };
  for (const char* good : {"Host: a\r\n", "Host:\r\n", "Host: [::1]:80\r\n", "Host: a.example:\r\n"}) {
    EXPECT_TRUE(asked("1.1", good).starts_with("HTTP/1.1 200 ")) << good;
  }
  for (const char* bad :
       {"", "Host: a\r\nHost: a\r\n", "Host: a b\r\n", "Host: a/b\r\n", "Host: me@a\r\n", "Host: a:b\r\n",
        "Host: :80\r\n", "Host: [::1\r\n", "Host: a:123456\r\n", "Host: a, b\r\nHost: c\r\n"}) {
    EXPECT_TRUE(asked("1.1", bad).starts_with("HTTP/1.1 400 ")) << bad;
  }
  EXPECT_TRUE(asked("1.0", "").starts_with("HTTP/1.1 200 "));
  EXPECT_TRUE(asked("1.0", "Host: a\r\nHost: a\r\n").starts_with("HTTP/1.1 400 "));
}

// A connection that has served a request serves the next one as a new connection does: byte for byte, after a request of
// any kind, but for its id.
TEST(Http, NothingIsLeftOfTheRequestBefore) {
  Running running([](const std::shared_ptr<HttpExchange>& exchange) {
    if (exchange->request().path != "/stream") return echo(exchange);
    exchange->begin_stream("text/event-stream");
    exchange->send("data: 1\n\n");
    exchange->end_stream();
  });
  const std::string chunked = "Host: a\r\nTransfer-Encoding: chunked\r\n", close = "Connection: close\r\n\r\n";
  const std::pair<std::string, std::string> first[] = {
      // a request that leaves the connection open, and the end of its answer
      {"HEAD /a HTTP/1.1\r\nHost: a\r\n\r\n", "\r\n\r\n"},
      {kGet, "[]"},
      {"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "[]"},
      {post("body"), "[body]"},
      {post(""), "[]"},
      {post("body") + "\r\n", "[body]"},  // an empty line behind a body (RFC 9112, 2.2)
      {"POST /a HTTP/1.1\r\n" + chunked + "\r\n3\r\nabc\r\n0\r\n\r\n", "[abc]"},
      {"POST /a HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc", "[abc]"},
      {"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n", "0\r\n\r\n"}};
  const std::string second[] = {kLastGet,
                                "HEAD /b HTTP/1.1\r\nHost: a\r\n" + close,
                                post("text", "Connection: close\r\n"),
                                "POST /b HTTP/1.1\r\n" + chunked + close + "2\r\nde\r\n0\r\n\r\n",
                                "GET /stream HTTP/1.1\r\nHost: a\r\n" + close,
                                "GET /stream HTTP/1.0\r\n\r\n",
                                "GET /b HTTP/1.0\r\n\r\n",
                                "GET / HTTP/2.0\r\n\r\n",
                                "POST /b HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\n\r\n"};
  for (const std::string& request : second) {
    const std::string fresh = running.ask(request);
    ASSERT_TRUE(fresh.starts_with("HTTP/1.1 ")) << request;
    for (const auto& [before, end] : first) {
      const Client client(running.server.port(), before);
      ASSERT_TRUE(client.receive(end).ends_with(end)) << before;
      client.send(request);
      EXPECT_EQ(without_id(client.receive()), without_id(fresh)) << before << request;
    }
  }
}

TEST(Http, ChunkedBodiesAreRead) {
  Running running(echo);
  const std::string head = "POST /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
  EXPECT_NE(running.ask(head + "3\r\nabc\r\n2;extension=1\r\nde\r\n0\r\n\r\n").find("[abcde]"), std::string::npos);
  for (const char* name : {"Chunked", "CHUNKED"}) {
    const std::string text =
        running.ask(std::string("POST /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: ") + name +
                    "\r\n\r\n3\r\nabc\r\n0\r\n\r\n");
    EXPECT_TRUE(text.ends_with("[abc]")) << text;
  }
}

TEST(Http, TheInterimAnswerComesBeforeTheBody) {
  Running running(echo);
  const Client client(running.server.port(),
                      "POST /x HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n");
  EXPECT_EQ(client.receive("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  client.send("abc");
  EXPECT_NE(client.receive("[abc]").find("200 OK"), std::string::npos);
  // None to a client that does not know it, or that has nothing to send.
  for (const auto& [head, body] :
       {std::pair("POST /x HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n", "abc"),
        {"POST /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 0\r\n\r\n", ""},
        {"POST /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 3\r\n\r\n", "abc"}}) {
    const std::string text = running.ask(std::string(head) + body);
    EXPECT_TRUE(text.starts_with("HTTP/1.1 200 OK\r\n")) << text;
    EXPECT_TRUE(text.ends_with(std::string("[") + body + "]")) << text;
  }
}

TEST(Http, EachFieldReachesTheHandler) {
  Running running([](const std::shared_ptr<HttpExchange>& exchange) {
    const HttpRequest& r = exchange->request();
    exchange->respond(
        {200,
         "text/plain",
         "<" + r.host + "|" + r.origin + "|" + r.authorization + "|" + r.content_type + "|" + r.content_encoding + ">",
         {}});
  });
  const std::pair<const char*, const char*> fields[] = {{"Host", "a"},
                                                        {"Origin", "http://b"},
                                                        {"Authorization", "Bearer c"},
                                                        {"Content-Type", "d/e"},
                                                        {"Content-Encoding", "f"}};
  for (std::size_t without = 0; without <= std::size(fields); ++without) {
    std::string head = "GET / HTTP/1.0\r\n", expected;
    for (std::size_t i = 0; i < std::size(fields); ++i) {
      expected += i == 0 ? "<" : "|";
      if (i == without) continue;
      head += format("%s: %s\r\n", fields[i].first, fields[i].second);
      expected += fields[i].second;
    }
    const std::string text = running.ask(head + "\r\n");
    EXPECT_TRUE(text.ends_with("\r\n\r\n" + expected + ">")) << text;
  }
}

TEST(Http, EachStatusHasItsReasonAndEachAnswerItsFields) {
  int status = 0;
  Running running([&](const std::shared_ptr<HttpExchange>& exchange) {
    exchange->respond({status, "a/b", "body", {{"First", "1"}, {"Second", "2"}}});
  });
  for (const auto& [code, reason] : {std::pair(200, "OK"),
                                     {400, "Bad Request"},
                                     {401, "Unauthorized"},
                                     {403, "Forbidden"},
                                     {404, "Not Found"},
                                     {405, "Method Not Allowed"},
                                     {413, "Payload Too Large"},
                                     {415, "Unsupported Media Type"},
                                     {429, "Too Many Requests"},
                                     {431, "Request Header Fields Too Large"},
                                     {500, "Internal Server Error"},
                                     {503, "Service Unavailable"}}) {
    status = code;
    EXPECT_EQ(running.ask(kLastGet), format("HTTP/1.1 %d %s\r\n", code, reason) +
                                         "Content-Type: a/b\r\nCache-Control: no-store\r\nX-Content-Type-Options: "
                                         "nosniff\r\nX-Request-Id: the-last\r\n"
                                         "Connection: close\r\nFirst: 1\r\nSecond: 2\r\nContent-Length: 4\r\n\r\nbody");
  }
}

// The client's id of a request or a new one, in every answer: also of a stream, and where no handler was asked.
TEST(Http, EveryAnswerHasTheIdOfItsRequest) {
  Running running([](const std::shared_ptr<HttpExchange>& exchange) {
    if (exchange->request().path != "/stream") return echo(exchange);
    exchange->begin_stream("text/event-stream");
    exchange->send(exchange->request().id);
    exchange->end_stream();
  });
  // Of the requests of one connection each has its own, whether or not the one before had one.
  const std::string stream = "GET /stream HTTP/1.1\r\nHost: a\r\nX-Request-Id: of-a-stream\r\n\r\n";
  const std::string several =
      running.ask(post("1", "X-Request-Id: first\r\n") + kGet + stream +
                  "HEAD / HTTP/1.1\r\nHost: a\r\nX-Request-Id: head\r\n\r\n" +
                  "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Request-Id: two words\r\n\r\n");
  const std::vector<std::string> found = ids_of(several);
  ASSERT_EQ(found.size(), 5u) << several;
  EXPECT_EQ(found[0], "first");
  EXPECT_EQ(found[2], "of-a-stream");
  EXPECT_NE(several.find("\r\n\r\nb\r\nof-a-stream\r\n"), std::string::npos);
  EXPECT_EQ(found[3], "head");
  for (const std::string& made : {found[1], found[4]}) EXPECT_EQ(made.size(), 32u) << made;
  EXPECT_NE(found[1], found[4]);
  // Refused without the handler: a body that is too long, another transfer encoding, what is no HTTP.
  EXPECT_EQ(ids_of(running.ask("POST / HTTP/1.1\r\nHost: a\r\nX-Request-Id: long\r\nContent-Length: 9999\r\n\r\n")),
            std::vector<std::string>{"long"});
  EXPECT_EQ(ids_of(running.ask("POST / HTTP/1.1\r\nHost: a\r\nX-Request-Id: gzip\r\nTransfer-Encoding: gzip\r\n\r\n")),
            std::vector<std::string>{"gzip"});
  const std::vector<std::string> of_nothing = ids_of(running.ask("nothing\r\n\r\n"));
  ASSERT_EQ(of_nothing.size(), 1u);
  EXPECT_EQ(of_nothing[0].size(), 32u);
}

// Further requests that the server reads while it answers one.
TEST(Http, RequestsThatComeDuringAnAnswerAreAnsweredAfterIt) {
  Kept kept;
  const Client client(kept.running.server.port(), kGet);
  ASSERT_TRUE(kept.begun());
  client.send(post("one") + post("two") + kLastGet);
  for (int i = 0; i < 3; ++i) {  // until the thread of the connections has read them
    std::atomic<bool> ran{false};
    kept.running.server.post([&] { ran = true; });
    ASSERT_TRUE(eventually([&] { return ran.load(); }));
  }
  EXPECT_FALSE(kept.exchange->gone());
  echo(kept.exchange);
  expect_in_order(client.receive(), {"GET /hello []", "[one]", "[two]", "GET /last []"});
}

TEST(Http, WhatIsNoRequestIsRefusedAndTheConnectionClosed) {
  Running running(echo);
  const std::string head = "POST /x HTTP/1.1\r\nHost: a\r\n";
  const std::string chunked = head + "Transfer-Encoding: chunked\r\n\r\n";
  struct Case {
    std::string data, status;
  };
  for (const Case& c : std::vector<Case>{
           {std::string("\x16\x03\x01\x02 tls\r\n\r\n", 12), "400"},
           {"GET / HTTP/2.0\r\n\r\n", "400"},
           {"GET / HTTP/1.1\r\nX: a" + std::string(1, '\0') + "b\r\n\r\n", "400"},
           {head + "Content-Length: -1\r\n\r\n", "400"},
           {head + "Content-Length: +3\r\n\r\nabc", "400"},
           {head + "Content-Length: 0x3\r\n\r\nabc", "400"},
           {head + "Content-Length: 99999999999999999999999\r\n\r\n", "400"},
           {head + "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", "400"},
           {head + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", "400"},
           {chunked + "-3\r\nabc\r\n0\r\n\r\n", "400"},
           {chunked + "+3\r\nabc\r\n0\r\n\r\n", "400"},
           {chunked + "zz\r\nabc\r\n0\r\n\r\n", "400"},
           {chunked + "3\r\nabcdef\r\n0\r\n\r\n", "400"},
           {chunked + "fffffffffffffffff\r\n", "400"},
           {head + "Transfer-Encoding: gzip\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n", "400"},
           {head + "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", "400"},
           {"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", "400"},
           {chunked + "3;" + std::string(200'000, 'e') + "\r\nabc\r\n0\r\n\r\n", "400"},
           {head + "Content-Length: 1001\r\n\r\n", "413"},
           {chunked + "ffffffffffffffff\r\n", "413"},
           {chunked + "3e9\r\n" + std::string(1001, 'x') + "\r\n0\r\n\r\n", "413"},
           {chunked + "1f4\r\n" + std::string(500, 'x') + "\r\n1f5\r\n" + std::string(501, 'x') + "\r\n0\r\n\r\n",
            "413"},
           {"GET / HTTP/1.1\r\nX: " + std::string(600, 'a') + "\r\n\r\n", "431"},
           {"GET /" + std::string(600, 'a') + " HTTP/1.1\r\n\r\n", "431"},
           {"GET / HTTP/1.1\r\n" +
                [] {
                  std::string lines;
                  for (int i = 0; i < 200; ++i) lines += "a: b\r\n";
                  return lines;
                }() +
                "\r\n",
            "431"},
       }) {
    const std::string text = running.ask(c.data);
    EXPECT_TRUE(text.starts_with("HTTP/1.1 " + c.status + " ")) << c.data.substr(0, 120) << "\n" << text;
    EXPECT_NE(text.find("\r\n\r\n" + c.status + ": "), std::string::npos) << text;
    EXPECT_NE(text.find("Connection: close"), std::string::npos) << text;
    EXPECT_EQ(text.find("HTTP/1.1", 1), std::string::npos) << text;  // one answer: nothing was smuggled
    EXPECT_FALSE(text.ends_with("TIME")) << c.data.substr(0, 120);
  }
  EXPECT_TRUE(eventually([&] { return running.server.counters().connections == 0; }));
  EXPECT_NE(running.ask(kLastGet).find("GET /last"), std::string::npos);  // and it goes on
}

TEST(Http, AChunkedBodyTakesItsShareOfTheLimit) {
  Running running(echo);
  const std::string other = post(std::string(700, 'y'), "Connection: close\r\n");
  const Client chunked(running.server.port(), "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
  for (int i = 0; i < 9; ++i) chunked.send("64\r\n" + std::string(100, 'x') + "\r\n");  // whole chunks
  ASSERT_TRUE(eventually([&] { return running.ask(other).starts_with("HTTP/1.1 503"); }));
  EXPECT_TRUE(running.ask(kLastGet).ends_with("GET /last []"));  // without a body: takes nothing
  chunked.send("0\r\n\r\n");
  EXPECT_NE(chunked.receive("x]").find("200 OK"), std::string::npos);
  EXPECT_TRUE(eventually([&] { return running.ask(other).starts_with("HTTP/1.1 200"); }));
}

// Clients that announce long bodies and send none take nothing from those that send theirs.
TEST(Http, ABodyThatHasNotComeTakesNothingOfTheLimit) {
  Running running(echo);
  std::vector<std::unique_ptr<Client>> silent;
  for (int i = 0; i < 8; ++i) {
    silent.push_back(std::make_unique<Client>(running.server.port()));
    silent.back()->send(std::string("POST /x HTTP/1.1\r\nHost: a\r\n") +
                        (i % 2 == 0 ? "Content-Length: 1000\r\n\r\n" : "Transfer-Encoding: chunked\r\n\r\n3e8\r\n"));
  }
  ASSERT_TRUE(eventually([&] { return running.server.counters().connections == 8; }));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(running.ask(post(std::string(1000, 'y'), "Connection: close\r\n")).starts_with("HTTP/1.1 200"));
  }
}

// A request that the check of headers refuses has its answer before its body has come, whatever its length; without a body
// its connection goes on.
TEST(Http, HeadersAreCheckedBeforeTheBody) {
  std::atomic<int> handled{0};
  HttpServer server(
      {"127.0.0.1", 0}, quick_limits(),
      [&](const std::shared_ptr<HttpExchange>& exchange) {
        ++handled;
        echo(exchange);
      },
      error_text,
      [](const HttpRequest& request) -> std::optional<HttpResponse> {
        if (request.authorization == "key") return std::nullopt;
        return HttpResponse{401, "text/plain", request.method + " " + request.path + " needs a key", {{"A", "b"}}};
      });
  server.start();
  const std::string post_head = "POST /x?y HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n";
  {
    const Client client(server.port(), post_head + "\r\n");
    const std::string text = client.receive();
    EXPECT_TRUE(text.starts_with("HTTP/1.1 401 Unauthorized\r\n") && text.ends_with("\r\n\r\nPOST /x needs a key"))
        << text;
    EXPECT_NE(text.find("\r\nA: b\r\n"), std::string::npos);
    EXPECT_NE(text.find("\r\nConnection: close\r\n"), std::string::npos);
  }
  const Client client(server.port(), kGet);
  EXPECT_NE(client.receive("key").find("401"), std::string::npos);
  client.send("HEAD / HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_TRUE(client.receive("\r\n\r\n").ends_with("Content-Length: 17\r\n\r\n"));
  EXPECT_EQ(handled, 0);
  client.send(post_head + "Authorization: key\r\n\r\n" + std::string(900, 'x'));
  EXPECT_NE(client.receive("x]").find("200 OK"), std::string::npos);
  EXPECT_EQ(handled, 1);
}

// What a task on the thread of the connections throws ends neither that thread nor another request.
TEST(Http, AnExceptionEndsNobodyElse) {
  Running running([](const std::shared_ptr<HttpExchange>& exchange) {
    if (exchange->request().path == "/hello") throw std::bad_alloc();
    echo(exchange);
  });
  for (int i = 0; i < 3; ++i) {
    const Client client(running.server.port(), kGet);
    EXPECT_EQ(client.receive(), "") << "closed";
    running.server.post([] { throw std::runtime_error("no more of it"); });
    EXPECT_TRUE(eventually([&] { return running.ask(kLastGet).ends_with("GET /last []"); }));
    EXPECT_TRUE(eventually([&] { return running.server.counters().connections == 0; }));
  }
}

// Whatever clients cause a thousand times is in the log twice at most: at once, and at the end with how often it was.
TEST(Http, ClientsDoNotFillTheLog) {
  testing::internal::CaptureStderr();
  {
    Running running([](const std::shared_ptr<HttpExchange>& exchange) {
      if (exchange->request().path == "/hello") throw std::bad_alloc();
      echo(exchange);
    });
    for (int i = 0; i < 50; ++i) EXPECT_EQ(running.ask(kGet), "") << "closed";
    for (int i = 0; i < 50; ++i) running.server.post([] { throw std::runtime_error("no more of it"); });
    EXPECT_TRUE(eventually([&] { return running.ask(kLastGet).ends_with("GET /last []"); }));
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 4) << log;
  EXPECT_NE(log.find("a connection failed: 'std::bad_alloc' (49 since the last such line)"), std::string::npos) << log;
  EXPECT_NE(log.find("'no more of it' (49 since the last such line)"), std::string::npos) << log;
}

TEST(Http, BodiesOfAllConnectionsTogetherAreLimited) {
  Running running(echo);
  const Client first(running.server.port(),
                     "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n" + std::string(899, 'x'));
  const std::string second = post(std::string(700, 'y'), "Connection: close\r\n");
  ASSERT_TRUE(eventually([&] { return running.ask(second).starts_with("HTTP/1.1 503"); }));
  EXPECT_NE(running.ask(second).find("Retry-After: 1"), std::string::npos);
  first.send("x");
  EXPECT_NE(first.receive("]").find("200 OK"), std::string::npos);
  EXPECT_TRUE(eventually([&] { return running.ask(second).starts_with("HTTP/1.1 200"); }));
  {
    const Client leaves(running.server.port(),
                        "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n" + std::string(999, 'x'));
  }
  EXPECT_TRUE(eventually([&] { return running.ask(second).starts_with("HTTP/1.1 200"); }));
}

// A handler that has answered and has not yet returned counts no more: its client may send the next body at once. One
// whose client has gone counts until it returns, for it still has the body.
TEST(Http, ABodyCountsUntilItsAnswer) {
  Gate gate;
  std::atomic<int> answered{0}, unanswered{0};
  Running running([&](const std::shared_ptr<HttpExchange>& exchange) {
    const bool answers = exchange->request().body.front() != 'n';
    if (answers) echo(exchange);
    ++(answers ? answered : unanswered);
    if (exchange->request().body.front() != 'x') gate.pass();
  });
  const auto body = [](char c) { return post(std::string(900, c), "Connection: close\r\n"); };
  EXPECT_TRUE(running.ask(body('a')).starts_with("HTTP/1.1 200"));
  {
    const Client leaves(running.server.port(), body('n'));
    EXPECT_TRUE(eventually([&] { return unanswered == 1; }));
  }
  EXPECT_EQ(answered, 1);
  EXPECT_TRUE(eventually([&] { return running.server.counters().connections == 0; }));
  EXPECT_TRUE(running.ask(body('x')).starts_with("HTTP/1.1 503"));
  gate.open();
  EXPECT_TRUE(eventually([&] { return running.ask(body('x')).starts_with("HTTP/1.1 200"); }));
}

// However often they come, and before they are answered: a body that turns out to be empty gives back what was reserved
// for it.
TEST(Http, EmptyBodiesTakeNothingOfTheLimit) {
  std::vector<std::shared_ptr<HttpExchange>> unanswered;
  std::atomic<std::size_t> waiting{0};
  Running running([&](const std::shared_ptr<HttpExchange>& exchange) {
    if (exchange->request().path != "/wait") return echo(exchange);
    unanswered.push_back(exchange);
    waiting = unanswered.size();
  });
  const Client first(running.server.port()), second(running.server.port());
  for (std::size_t i = 0; i < 2; ++i) {  // one by one: until its end is read a chunked body takes its share
    (i == 0 ? first : second)
        .send("POST /wait HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n");
    EXPECT_TRUE(eventually([&] { return waiting == i + 1; }));
  }
  for (int i = 0; i < 4; ++i) {
    const std::string chunked = running.ask(
        "POST /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n");
    EXPECT_TRUE(chunked.ends_with("POST /x []")) << i << "\n" << chunked;
    EXPECT_TRUE(running.ask(post("", "Connection: close\r\n")).ends_with("POST /x []")) << i;
  }
}

// A further connection is closed at once if all others have requests. If one is idle, that one is: of several the one that
// has been so for longest.
TEST(Http, ConnectionsAreLimited) {
  HttpLimits limits = quick_limits();
  limits.connections = 2;
  std::mutex mutex;
  std::vector<std::shared_ptr<HttpExchange>> kept;
  Running running(
      [&](const std::shared_ptr<HttpExchange>& exchange) {
        if (exchange->request().path != "/keep") return echo(exchange);
        const std::lock_guard lock(mutex);
        kept.push_back(exchange);
      },
      limits);
  const std::string keep = "GET /keep HTTP/1.1\r\nHost: a\r\n\r\n";
  const auto waits_for = [&](std::size_t count) {
    return eventually([&] {
      const std::lock_guard lock(mutex);
      return kept.size() == count;
    });
  };
  const Client first(running.server.port());
  {
    const Client second(running.server.port());
    first.send(keep);
    second.send(keep.substr(0, 9));  // has begun
    ASSERT_TRUE(waits_for(1));
    ASSERT_TRUE(eventually([&] { return running.server.counters().connections == 2; }));
    std::this_thread::sleep_for(milliseconds(100));  // until its bytes are read: no state that shows
    EXPECT_EQ(Client(running.server.port()).receive(), "");
    EXPECT_EQ(running.server.counters().refused, 1);
    second.send(keep.substr(9));
    ASSERT_TRUE(waits_for(2));
    EXPECT_EQ(Client(running.server.port()).receive(), "");
    EXPECT_EQ(running.server.counters().refused, 2);
    // Both have their answers, the second one first: it is idle for longer.
    answer(kept[1], "[second]");
    EXPECT_TRUE(second.receive("]").ends_with("[second]"));
    answer(kept[0], "[first]");
    EXPECT_TRUE(first.receive("]").ends_with("[first]"));
    EXPECT_EQ(running.server.counters().displaced, 0);
    EXPECT_TRUE(running.ask(kLastGet).ends_with("GET /last []"));
    EXPECT_EQ(second.receive(), "");
  }
  first.send(kGet);  // it has stayed
  EXPECT_TRUE(first.receive("[]").ends_with("GET /hello []"));
  EXPECT_EQ(running.server.counters().displaced, 1);
  EXPECT_EQ(running.server.counters().refused, 2);
}

// The connection that has been idle for longest has just sent a request, which the server has not read yet: another one goes.
TEST(Http, ARequestThatHasComeIsNotDisplaced) {
  HttpLimits limits = quick_limits();
  limits.connections = 2;
  Running running(echo, limits);
  const Client first(running.server.port()), second(running.server.port());
  for (const Client* client : {&first, &second}) {
    client->send(kGet);
    EXPECT_TRUE(client->receive("[]").ends_with("GET /hello []"));
  }
  std::atomic<bool> busy{false}, go{false};
  running.server.post([&] {
    busy = true;
    while (!go) std::this_thread::sleep_for(milliseconds(1));
  });
  ASSERT_TRUE(eventually([&] { return busy.load(); }));
  const Client third(running.server.port(), kLastGet);
  first.send(kGet);
  go = true;
  EXPECT_TRUE(third.receive().ends_with("GET /last []"));
  EXPECT_TRUE(first.receive("[]").ends_with("GET /hello []"));
  EXPECT_EQ(second.receive(), "");
  EXPECT_EQ(running.server.counters().displaced, 1);
}

// Where no descriptor is free a connection waits, and is served when there is one.
TEST(Http, ConnectionsWaitForAFreeDescriptor) {
  Running running(echo);
  const Client first(running.server.port(), kGet);
  EXPECT_NE(first.receive("[]").find("GET /hello"), std::string::npos);
  EXPECT_TRUE(eventually([&] { return running.server.counters().connections == 1; }));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int lowest = ::dup(0);  // every lower one is taken
  ::close(lowest);
  const rlimit one{static_cast<rlim_t>(lowest) + 1, before.rlim_max};  // for the client's end, none for the server's
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &one), 0);
  const Client waiting(running.server.port());
  std::this_thread::sleep_for(milliseconds(150));
  EXPECT_EQ(running.server.counters().connections, 1);
  first.send(kGet);
  EXPECT_NE(first.receive("[]").find("GET /hello"), std::string::npos) << "who is connected is served";
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(eventually([&] { return running.server.counters().connections == 2; }));
}

TEST(Http, SlowRequestsAndIdleConnectionsAreClosed) {
  HttpLimits limits = quick_limits();
  limits.read_seconds = 0.1;
  const auto seconds_to_close = [&](const std::string& data) {
    Running running(echo, limits);
    const Clock::time_point start = Clock::now();
    const Client client(running.server.port(), data);
    EXPECT_EQ(client.receive().find("TIME"), std::string::npos);
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  EXPECT_LT(seconds_to_close("GET / HT"), 2);
  EXPECT_LT(seconds_to_close("POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab"), 2);
  limits.read_seconds = 60;
  limits.idle_seconds = 0.3;
  EXPECT_GT(seconds_to_close(kGet), 0.25);
}

// The thread of the connections is busy when a limit runs out, and finds with it the bytes that came in time.
TEST(Http, ALimitThatIsReplacedAsItRunsOutClosesNothing) {
  HttpLimits limits = quick_limits();
  limits.idle_seconds = 0.05;
  std::atomic<bool> sent{false};
  Running running(
      [&](const std::shared_ptr<HttpExchange>& exchange) {
        echo(exchange);
        if (exchange->request().path == "/last") return;
        EXPECT_TRUE(eventually([&] { return sent.load(); }));
        std::this_thread::sleep_for(milliseconds(80));
      },
      limits);
  const Client client(running.server.port(), kGet);
  EXPECT_NE(client.receive("[]").find("GET /hello []"), std::string::npos);
  client.send(kLastGet);
  sent = true;
  EXPECT_NE(client.receive().find("GET /last []"), std::string::npos);
}

TEST(Http, ALimitThatIsLiftedAsItRunsOutClosesNothing) {
  HttpLimits limits = quick_limits();
  limits.read_seconds = 0.5;
  Running running(echo, limits);
  const Client client(running.server.port());
  const std::string text = post("body");
  client.send(text.substr(0, text.size() - 1));
  const Clock::time_point begin = Clock::now();
  std::atomic<bool> busy{false};
  running.server.post([&] {
    busy = true;
    std::this_thread::sleep_until(begin + milliseconds(600));
  });
  EXPECT_TRUE(eventually([&] { return busy.load(); }));
  client.send(text.substr(text.size() - 1));
  EXPECT_NE(client.receive("[body]").find("POST /x [body]"), std::string::npos);
}

// A handler may take longer than its client has for the request, whether the request has a body, whether the answer is a
// stream, and again on the same connection.
TEST(Http, TheLimitOfARequestEndsWithTheRequest) {
  HttpLimits limits = quick_limits();
  limits.read_seconds = 0.05;
  std::mutex mutex;
  std::vector<std::shared_ptr<HttpExchange>> asked;  // guarded by mutex
  Running running(
      [&](const std::shared_ptr<HttpExchange>& exchange) {
        if (exchange->request().path == "/stream") exchange->begin_stream("text/plain");
        const std::lock_guard lock(mutex);
        asked.push_back(exchange);
      },
      limits);
  const std::string requests[] = {kGet, post("body"), "GET /stream HTTP/1.1\r\nHost: a\r\n\r\n"};
  const Client clients[3] = {Client(running.server.port()), Client(running.server.port()),
                             Client(running.server.port())};
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 3; ++i) clients[i].send(requests[i]);
    ASSERT_TRUE(eventually([&] {
      const std::lock_guard lock(mutex);
      return asked.size() == 3;
    }));
    std::this_thread::sleep_for(milliseconds(120));
    for (const std::shared_ptr<HttpExchange>& exchange : asked) {
      if (exchange->request().path != "/stream") {
        echo(exchange);
        continue;
      }
      exchange->send("[streamed]");
      exchange->end_stream();
    }
    asked.clear();
    for (const auto& [client, end] :
         {std::pair(0, "/hello []"), std::pair(1, "/x [body]"), std::pair(2, "0\r\n\r\n")}) {
      EXPECT_TRUE(clients[client].receive(end).ends_with(end)) << round << " " << requests[client];
    }
  }
}

// A client that goes away while its request is being answered.
TEST(Http, AClientThatLeavesIsNoticed) {
  std::atomic<int> gone{0};
  std::atomic<int> asked{0};
  std::shared_ptr<HttpExchange> kept;
  std::mutex mutex;
  Running running([&](const std::shared_ptr<HttpExchange>& exchange) {
    const std::lock_guard lock(mutex);
    kept = exchange;
    exchange->on_gone([&] { ++gone; });
    ++asked;
  });
  for (const std::string& request : {std::string(kGet), post("body"), std::string(kGet) + kGet}) {
    gone = asked = 0;
    {
      const Client client(running.server.port(), request);
      ASSERT_TRUE(eventually([&] { return asked == 1; }));
      EXPECT_EQ(gone, 0);
    }
    EXPECT_TRUE(eventually([&] { return gone == 1; }));
    EXPECT_TRUE(kept->gone());
    answer(kept, "too late");  // does nothing
    std::atomic<bool> at_once{false};
    running.server.post([&] { kept->on_gone([&] { at_once = true; }); });
    EXPECT_TRUE(eventually([&] { return at_once.load(); }));
  }
}

// An answer is complete once: what a handler still gives or asks for afterwards does nothing, and is not in the next answer.
TEST(Http, AfterTheAnswerTheExchangeIsOver) {
  std::atomic<int> gone{0};
  Running running([&](const std::shared_ptr<HttpExchange>& exchange) {
    echo(exchange);
    answer(exchange, "twice");
    exchange->begin_stream("text/plain");
    exchange->send("thrice");
    exchange->end_stream();
    exchange->on_gone([&] { ++gone; });
  });
  const std::string alone = running.ask(kLastGet);
  EXPECT_TRUE(alone.ends_with("GET /last []")) << alone;
  {
    const Client client(running.server.port(), kGet);
    EXPECT_TRUE(client.receive("[]").ends_with("GET /hello []"));
    client.send(kLastGet);
    EXPECT_EQ(client.receive(), alone);
  }
  EXPECT_TRUE(eventually([&] { return running.server.counters().connections == 0; }));
  EXPECT_EQ(gone, 0);
}

// A client that pipelines is noticed when it leaves, though nothing more of it is read.
TEST(Http, AClientThatSendsFarAheadIsNoticedWhenItLeaves) {
  std::atomic<int> gone{0};
  Running running([&](const std::shared_ptr<HttpExchange>& exchange) { exchange->on_gone([&] { ++gone; }); });
  {
    const Client client(running.server.port(), kGet + std::string(100 << 10, 'x'));
    ASSERT_TRUE(eventually([&] { return running.asked == 1; }));
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_EQ(gone, 0);
  }
  EXPECT_TRUE(eventually([&] { return gone == 1; }));
  EXPECT_EQ(running.asked, 1);
}

// One that sends without end is held back: what it sends stays in the sockets.
TEST(Http, AClientThatSendsWithoutEndIsHeldBack) {
  Kept kept;
  const Client client(kept.running.server.port(), kGet);
  ASSERT_TRUE(kept.begun());
  const std::string more(1 << 20, 'x');
  std::size_t taken = 0;
  EXPECT_TRUE(eventually([&] {
    const std::size_t bytes = client.try_send(more);
    taken += bytes;
    return bytes == 0;
  })) << taken;
  EXPECT_LT(taken, 64u << 20) << "what the buffers of two sockets hold";
  EXPECT_FALSE(kept.gone);
  answer(kept.exchange, "[the answer]");
  EXPECT_NE(client.receive("[the answer]").find("200 OK"), std::string::npos);
}

// Many times what is read ahead, with answers that come at once and with answers that come later.
TEST(Http, AllRequestsThatComeTogetherAreAnswered) {
  Running running([](const std::shared_ptr<HttpExchange>& exchange) { echo(exchange); });
  for (const std::string& request : {std::string(kGet), post("later")}) {
    constexpr int kRequests = 5000;
    std::string all;
    for (int i = 1; i < kRequests; ++i) all += request;
    const Client client(running.server.port());
    std::thread sender([&] { client.send(all + kLastGet); });
    const std::string text = client.receive();
    sender.join();
    int answers = 0;
    for (std::size_t at = text.find("HTTP/1.1 200"); at != std::string::npos; at = text.find("HTTP/1.1 200", at + 1)) {
      ++answers;
    }
    EXPECT_EQ(answers, kRequests) << request;
    EXPECT_TRUE(text.ends_with("GET /last []"));
  }
}

TEST(Http, AStreamIsReadAsItIsWritten) {
  Kept stream;
  const Client client(stream.running.server.port(), kGet);
  ASSERT_TRUE(stream.begun());
  stream.exchange->begin_stream("text/event-stream");
  stream.exchange->send("data: 1\n\n");
  const std::string head = client.receive("9\r\ndata: 1\n\n\r\n");
  EXPECT_NE(head.find("Transfer-Encoding: chunked"), std::string::npos);
  EXPECT_NE(head.find("Content-Type: text/event-stream"), std::string::npos);
  stream.exchange->send("");  // no end of the stream
  stream.exchange->send("data: 2\n\n");
  EXPECT_EQ(client.receive("data: 2\n\n\r\n"), "9\r\ndata: 2\n\n\r\n");
  stream.exchange->end_stream();
  EXPECT_EQ(client.receive("0\r\n\r\n"), "0\r\n\r\n");
  client.send(kLastGet);  // the connection goes on
  EXPECT_NE(client.receive().find("GET /last"), std::string::npos);
}

TEST(Http, AnOldClientGetsAStreamWithoutChunks) {
  Running running([](const std::shared_ptr<HttpExchange>& exchange) {
    exchange->begin_stream("text/event-stream");
    exchange->send("data: 1\n\n");
    exchange->end_stream();
  });
  // Whatever the client asks for, the end of the connection is the end of the stream, and the server says so.
  for (const char* field : {"", "Connection: close\r\n", "Connection: keep-alive\r\n"}) {
    const std::string text = running.ask(std::string("GET / HTTP/1.0\r\n") + field + "\r\n");
    EXPECT_EQ(text.find("chunked"), std::string::npos) << text;
    EXPECT_NE(text.find("\r\nConnection: close\r\n"), std::string::npos) << text;
    EXPECT_TRUE(text.ends_with("\r\n\r\ndata: 1\n\n")) << field << text;
  }
  for (const char* field : {"", "Connection: close\r\n", "Connection: keep-alive\r\n"}) {
    const Client client(running.server.port(), std::string("GET / HTTP/1.1\r\nHost: a\r\n") + field + "\r\n");
    const std::string text = client.receive("0\r\n\r\n");
    EXPECT_EQ(text.find("Connection: close") != std::string::npos,
              std::string(field).find("close") != std::string::npos);
    EXPECT_TRUE(text.ends_with("\r\n\r\n9\r\ndata: 1\n\n\r\n0\r\n\r\n")) << text;
  }
}

// The handler writes without end; the client does not read. Nobody waits for it, and it is cut off.
TEST(Http, ASlowReaderIsCutOffAndHoldsNobodyUp) {
  HttpLimits limits = small_buffers();
  limits.backlog_bytes = 100'000;
  limits.stall_seconds = 0.2;
  KeptStream stream(limits);
  const Client slow(stream.running.server.port(), kGet, 5000);
  ASSERT_TRUE(stream.begun());
  std::size_t sent = 0;
  for (; !stream.gone && sent < 100'000'000; sent += 1000) {
    stream.exchange->send(std::string(1000, 'x'));
    if (sent % 100'000 != 0) continue;
    std::this_thread::sleep_for(milliseconds(1));
    EXPECT_NE(stream.running.ask(kLastGet).find("GET /last"), std::string::npos);
  }
  EXPECT_TRUE(stream.gone);
  EXPECT_EQ(stream.running.server.counters().cut_off, 1);
  EXPECT_TRUE(eventually([&] { return stream.running.server.counters().connections == 0; }));
}

// Reading is not enough: what is taken while more than the backlog waits has to be worth it.
TEST(Http, AReaderWhoTakesTooLittleOfAStreamIsCutOff) {
  HttpLimits limits = small_buffers();
  limits.backlog_bytes = 1'000'000;
  limits.stall_seconds = 0.2;
  KeptStream stream(limits);
  const Client slow(stream.running.server.port(), kGet, 5000);
  ASSERT_TRUE(stream.begun());
  for (int i = 0; !stream.gone && i < 500; ++i) {
    stream.exchange->send(std::string(200'000, 'x'));
    slow.receive("x");  // some KB
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_TRUE(stream.gone);
  EXPECT_EQ(stream.running.server.counters().cut_off, 1);
}

// A stream of many times its backlog to a client that takes each piece before the next one comes.
TEST(Http, AStreamMayBeLongerThanItsBacklog) {
  HttpLimits limits = quick_limits();
  limits.backlog_bytes = 20'000;
  KeptStream stream(limits);
  const Client client(stream.running.server.port(), kGet);
  ASSERT_TRUE(stream.begun());
  for (int i = 0; i < 30; ++i) {
    const std::string end = format("<%d>", i);
    stream.exchange->send(std::string(5000, 'x') + end);
    ASSERT_NE(client.receive(end).find(end), std::string::npos) << i;
  }
  stream.exchange->end_stream();
  EXPECT_EQ(stream.running.server.counters().cut_off, 0);
}

// One event may be many times the backlog, and the next ones come at once: a client that reads all the time has kept up.
TEST(Http, ALargeEventCutsOffNobodyWhoReads) {
  HttpLimits limits = small_buffers();
  limits.backlog_bytes = 20'000;
  limits.stall_seconds = 1;
  KeptStream stream(limits);
  const Client client(stream.running.server.port(), "GET /hello HTTP/1.0\r\n\r\n");  // 1.0: no chunks between the bytes
  ASSERT_TRUE(stream.begun());
  const std::string event = numbered(3'000'000);
  std::string all = event;
  stream.exchange->send(event);
  for (int i = 0; i < 50; ++i) {
    const std::string more = format("<%d>", i);
    stream.exchange->send(more);
    all += more;
  }
  stream.exchange->end_stream();
  EXPECT_TRUE(client.receive().ends_with(all));
  EXPECT_EQ(stream.running.server.counters().cut_off, 0);
}

// All that waits for clients is limited: a further answer is refused, and who has not read its stream is cut off.
TEST(Http, UnsentBytesOfAllConnectionsAreLimited) {
  HttpLimits limits = small_buffers();
  limits.all_unsent_bytes = 8'000'000;
  std::shared_ptr<HttpExchange> kept;
  std::atomic<bool> streaming{false};
  Running running(
      [&](const std::shared_ptr<HttpExchange>& exchange) {
        if (exchange->request().path == "/last") return echo(exchange);
        if (exchange->request().path == "/hello") return answer(exchange, std::string(5'000'000, 'x'));
        kept = exchange;
        exchange->begin_stream("text/plain");
        exchange->send(std::string(1'900'000, 'x'));
        streaming = true;
      },
      limits);
  {
    const Client whole(running.server.port(), kGet, 5000);
    ASSERT_TRUE(eventually([&] { return running.asked == 1; }));
    const std::string refused = running.ask("GET /hello HTTP/1.0\r\n\r\n");
    EXPECT_TRUE(refused.starts_with("HTTP/1.1 503") &&
                refused.ends_with("503: too many answers wait for their clients: try again later"))
        << refused.substr(0, 200);
    EXPECT_NE(refused.find("\r\nRetry-After: 1\r\n"), std::string::npos);
    EXPECT_TRUE(running.ask(kLastGet).ends_with("GET /last []"));
  }
  // What a client did not take counts no more when it has gone.
  EXPECT_TRUE(eventually([&] { return running.ask("GET /hello HTTP/1.0\r\n\r\n").size() > 5'000'000; }));
  const Client stream(running.server.port(), "GET /stream HTTP/1.1\r\nHost: a\r\n\r\n", 5000);
  ASSERT_TRUE(eventually([&] { return streaming.load(); }));
  EXPECT_FALSE(kept->gone());
  kept->send(std::string(600'000, 'x'));  // more than a quarter, of one stream
  EXPECT_TRUE(eventually([&] { return kept->gone(); }));
  EXPECT_EQ(running.server.counters().cut_off, 1);
}

// Some byte now and then is not enough.
TEST(Http, AClientThatTakesTooLittleIsClosedInTime) {
  HttpLimits limits = small_buffers();
  limits.write_seconds = 2;
  limits.write_bytes = 1'000'000;
  Running running(
      [&](const std::shared_ptr<HttpExchange>& exchange) { answer(exchange, std::string(3'000'000, 'x') + "end"); },
      limits);
  const Client quick(running.server.port()), slow(running.server.port(), 5000);
  quick.send("GET /hello HTTP/1.0\r\n\r\n");
  EXPECT_TRUE(quick.receive().ends_with("end"));
  slow.send(kGet);
  ASSERT_TRUE(eventually([&] { return running.asked == 2; }));
  EXPECT_TRUE(eventually([&] {
    slow.receive("x");  // some KB
    return running.server.counters().connections == 0;
  }));
}

// A steady client may take many times as long as the limit says: each time it has taken write_bytes, it begins anew.
TEST(Http, ASteadySlowClientOutlivesTheLimitOfAWrite) {
  HttpLimits limits = small_buffers();
  limits.write_seconds = 1;
  limits.write_bytes = 100'000;
  const std::string all = numbered(4'000'000);
  Running running([&](const std::shared_ptr<HttpExchange>& exchange) { answer(exchange, all); }, limits);
  const Client client(running.server.port(), "GET /hello HTTP/1.0\r\n\r\n", 5000);
  std::string text;
  const Clock::time_point start = Clock::now();
  for (std::size_t before = 1; text.size() != before;) {
    before = text.size();
    text += client.receive_bytes(140'000);  // in 100 ms: ten times the least, so that a busy machine does no harm
    std::this_thread::sleep_for(milliseconds(100));
  }
  EXPECT_GT(Clock::now() - start, milliseconds(2500)) << "longer than twice the limit";
  EXPECT_TRUE(text.ends_with(all)) << text.size();
}

// What a client took before counts no more: after some MB at once it takes some KB now and then.
TEST(Http, AClientThatTakesEnoughOnceAndThenTricklesIsClosed) {
  HttpLimits limits = quick_limits();
  limits.write_seconds = 2;
  limits.write_bytes = 1'000'000;
  limits.socket_buffer_bytes = 100'000;
  Running running(
      [&](const std::shared_ptr<HttpExchange>& exchange) { answer(exchange, std::string(20'000'000, 'x')); }, limits);
  const Client client(running.server.port(), kGet, 100'000);
  EXPECT_EQ(client.receive_bytes(6'000'000).size(), 6'000'000u);
  EXPECT_EQ(running.server.counters().connections, 1);
  EXPECT_TRUE(eventually([&] {
    client.receive_bytes(1000);
    return running.server.counters().connections == 0;
  }));
}

// The same of a stream, of which more than the backlog waits: what its client took in an earlier stall_seconds is over.
TEST(Http, AReaderOfAStreamWhoTakesEnoughOnceAndThenTricklesIsCutOff) {
  HttpLimits limits = quick_limits();
  limits.backlog_bytes = 200'000;
  limits.stall_seconds = 0.3;
  limits.socket_buffer_bytes = 100'000;
  KeptStream stream(limits);
  const Client client(stream.running.server.port(), kGet, 100'000);
  ASSERT_TRUE(stream.begun());
  stream.exchange->send(std::string(9'000'000, 'x'));
  for (int i = 0; i < 8; ++i) {
    stream.exchange->send("x");
    EXPECT_EQ(client.receive_bytes(1'000'000).size(), 1'000'000u);
    std::this_thread::sleep_for(milliseconds(60));
  }
  EXPECT_FALSE(stream.gone);
  for (int i = 0; !stream.gone && i < 500; ++i) {
    stream.exchange->send("x");
    client.receive_bytes(100);
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_TRUE(stream.gone);
  EXPECT_EQ(stream.running.server.counters().cut_off, 1);
}

// Idle time is that between two requests, and begins anew with each.
TEST(Http, AConnectionThatIsUsedNowAndThenStays) {
  HttpLimits limits = quick_limits();
  limits.idle_seconds = 2;
  Running running(echo, limits);
  const Client client(running.server.port());
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(milliseconds(500));
    client.send(kGet);
    EXPECT_TRUE(client.receive("[]").ends_with("GET /hello []")) << i;
  }
}

// After the last answer the client may still send for linger_seconds, and loses nothing of the answer.
TEST(Http, WhatComesAfterTheLastAnswerDoesNoHarm) {
  HttpLimits limits = quick_limits();
  limits.linger_seconds = 60;
  Running running(echo, limits);
  const Client client(running.server.port(), kLastGet);
  for (int i = 0; i < 20; ++i) {
    client.send(std::string(10'000, 'x'));
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_TRUE(client.receive().ends_with("GET /last []"));
}

// The last byte that is accepted, and the first one that is not.
TEST(Http, SizesAreLimitedToTheByte) {
  Running running(echo);
  const auto of_header = [](std::size_t bytes) {
    const std::string rest = "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX: \r\n\r\n";
    return "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX: " + std::string(bytes - rest.size(), 'x') + "\r\n\r\n";
  };
  EXPECT_TRUE(running.ask(of_header(512)).starts_with("HTTP/1.1 200 "));
  EXPECT_TRUE(running.ask(of_header(560)).starts_with("HTTP/1.1 431 ")) << "the parser counts no line ends";
  const auto of_body = [&](std::size_t bytes) {
    return running.ask(post(std::string(bytes, 'x'), "Connection: close\r\n"));
  };
  EXPECT_TRUE(of_body(1000).starts_with("HTTP/1.1 200 "));
  EXPECT_TRUE(of_body(1001).starts_with("HTTP/1.1 413 "));
  // With 501 bytes of another client 999 are free of the 1500.
  const Client other(running.server.port(),
                     "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 502\r\n\r\n" + std::string(501, 'x'));
  ASSERT_TRUE(eventually([&] { return running.server.counters().body_bytes == 501; }));
  EXPECT_TRUE(of_body(999).starts_with("HTTP/1.1 200 "));
  EXPECT_TRUE(of_body(1000).starts_with("HTTP/1.1 503 "));
}

// More than the buffers of both sockets hold, in pieces of every size and more of them than one write takes: the writes end
// within pieces, and each byte comes once.
TEST(Http, AnswersThatAreWrittenInPartsComeWhole) {
  HttpLimits limits = small_buffers();
  limits.backlog_bytes = 10'000'000;
  const std::string all = numbered(3'000'000);
  Running running(
      [&](const std::shared_ptr<HttpExchange>& exchange) {
        if (exchange->request().path == "/whole") return answer(exchange, all);
        exchange->begin_stream("text/plain");
        for (std::size_t begin = 0, piece = 1; begin < all.size(); begin += piece, piece = piece * 3 % 20'011) {
          exchange->send(all.substr(begin, piece));
        }
        exchange->end_stream();
      },
      limits);
  for (const char* path : {"/whole", "/stream"}) {
    const Client client(running.server.port(), std::string("GET ") + path + " HTTP/1.0\r\n\r\n",
                        5000);  // 1.0: no chunks between the bytes
    const std::string text = client.receive();
    const std::size_t body = text.find("\r\n\r\n") + 4;
    EXPECT_EQ(text.size() - body, all.size()) << path;
    EXPECT_TRUE(text.substr(body) == all) << path;
  }
}

TEST(Http, AClientThatTakesNothingIsClosedInTime) {
  HttpLimits limits = small_buffers();
  limits.write_seconds = 0.2;
  std::atomic<int> gone{0};
  Running running(
      [&](const std::shared_ptr<HttpExchange>& exchange) {
        const std::string text(50'000'000, 'x');
        if (exchange->request().path != "/stream") return answer(exchange, text);
        exchange->on_gone([&] { ++gone; });
        exchange->begin_stream("text/plain");
        exchange->send(text);  // and no end
      },
      limits);
  const Client whole(running.server.port(), 5000), stream(running.server.port(), 5000);
  whole.send(kGet);
  stream.send("GET /stream HTTP/1.1\r\nHost: a\r\n\r\n");
  ASSERT_TRUE(eventually([&] { return running.asked == 2; }));
  EXPECT_TRUE(eventually([&] { return running.server.counters().connections == 0; }));
  EXPECT_EQ(gone, 1);
}

// The last answer of a connection is written, and the server waits for the client to close it: not for ever.
TEST(Http, AClientThatDoesNotCloseIsClosedInTime) {
  HttpLimits limits = quick_limits();
  limits.linger_seconds = 0.1;
  Running running(echo, limits);
  const Client last(running.server.port()), refused(running.server.port());
  last.send(kLastGet);
  EXPECT_TRUE(last.receive().ends_with("GET /last []"));
  refused.send("no HTTP\r\n\r\n");
  EXPECT_NE(refused.receive().find("HTTP/1.1 400 "), std::string::npos);
  EXPECT_TRUE(eventually([&] { return running.server.counters().connections == 0; }));
}

// The limit is that of a write. A client that has taken its answer may think about the next request for longer.
TEST(Http, TheLimitOfAWriteEndsWithTheWrite) {
  HttpLimits limits = small_buffers();
  limits.write_seconds = 0.3;
  limits.write_bytes = 1;
  Running running(
      [](const std::shared_ptr<HttpExchange>& exchange) {
        if (exchange->request().path == "/last") return echo(exchange);
        answer(exchange, std::string(300'000, 'x') + "end");
      },
      limits);
  const Client client(running.server.port(), kGet, 5000);
  EXPECT_TRUE(client.receive("end").ends_with("end"));
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  client.send(kLastGet);
  EXPECT_TRUE(client.receive().ends_with("GET /last []"));
}

// Answers of a client that sends requests and reads none are not collected without end.
TEST(Http, RequestsBehindAnAnswerThatIsNotReadAreNotAnswered) {
  HttpLimits limits = small_buffers();
  Running running([&](const std::shared_ptr<HttpExchange>& exchange) { answer(exchange, std::string(5'000'000, 'x')); },
                  limits);
  const Client slow(running.server.port(), 5000);
  for (int i = 0; i < 100; ++i) slow.send(kGet);
  ASSERT_TRUE(eventually([&] { return running.asked >= 1; }));
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_LE(running.asked, 3);
}

TEST(Http, HandlersOfLongRequestsKeepNobodyWaiting) {
  Gate gate;
  std::atomic<int> waiting{0};
  Running running([&](const std::shared_ptr<HttpExchange>& exchange) {
    if (!exchange->request().body.empty()) {
      ++waiting;
      gate.pass();
    }
    echo(exchange);
  });
  const Client first(running.server.port(), post("a")), second(running.server.port(), post("b"));
  ASSERT_TRUE(eventually([&] { return waiting == 2; }));
  EXPECT_NE(running.ask(kLastGet).find("GET /last"), std::string::npos);
  gate.open();
  EXPECT_NE(first.receive("]").find("[a]"), std::string::npos);
  EXPECT_NE(second.receive("]").find("[b]"), std::string::npos);
}

// An answer that does not come in the time for the end is not waited for.
TEST(Http, StoppingEndsThoughAnAnswerDoesNotCome) {
  std::atomic<int> gone{0};
  Running running([&](const std::shared_ptr<HttpExchange>& exchange) { exchange->on_gone([&] { ++gone; }); });
  const Client client(running.server.port(), kGet);
  ASSERT_TRUE(eventually([&] { return running.asked == 1; }));
  const Clock::time_point start = Clock::now();
  running.server.stop(0.2);
  EXPECT_GE(Clock::now() - start, milliseconds(200));
  EXPECT_LT(Clock::now() - start, milliseconds(3000));
  EXPECT_EQ(gone, 1);
  EXPECT_EQ(client.receive(), "");
}

// A request that comes at the moment of the end is answered or refused, and does not hold it up.
TEST(Http, StoppingIsNotHeldUpByRequestsThatCome) {
  for (int round = 0; round < 60; ++round) {
    Running running(echo);
    std::vector<std::unique_ptr<Client>> clients;
    for (int i = 0; i < 4; ++i) clients.push_back(std::make_unique<Client>(running.server.port()));
    std::thread sender([&] {
      for (const auto& client : clients) client->try_send(post("now"));
    });
    std::this_thread::sleep_for(std::chrono::microseconds(20 * round));
    const Clock::time_point start = Clock::now();
    running.server.stop(20);
    EXPECT_LT(Clock::now() - start, milliseconds(10000));
    sender.join();
  }
}

TEST(Http, StoppingLetsAnswersThroughAndEnds) {
  Kept kept;
  HttpServer& server = kept.running.server;
  const Client idle(server.port()), busy(server.port(), kGet);
  ASSERT_TRUE(kept.begun());
  std::thread stopper([&] { server.stop(5); });
  EXPECT_EQ(idle.receive(), "");
  answer(kept.exchange, "the answer");
  EXPECT_NE(busy.receive().find("the answer"), std::string::npos);
  stopper.join();
}

}  // namespace
}  // namespace weft
