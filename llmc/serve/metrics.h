// Counters and histograms of a server, as Prometheus reads them. Names, labels and meanings of "vllm:..." are those of
// vLLM, so that its dashboards and load balancers work; "weft:..." are the server's own.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "llmc/infer/completion.h"
#include "llmc/infer/engine.h"
#include "llmc/serve/http.h"

namespace weft {

class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds);  // rising upper bounds; +Inf is added
  void observe(double value);
  // The lines of Prometheus' text format; `labels`: `a="b"`.
  std::string text(const std::string& name, const std::string& help, const std::string& labels) const;

 private:
  std::vector<double> bounds_;
  std::vector<std::int64_t> counts_;  // of values at most bounds_[i] and above the bound before; the last: above all
  double sum_ = 0;
};

// What requests under way hold of the server's limits: 0 when all have been answered.
struct ServerHolds {
  std::int64_t completions = 0;  // places
  std::int64_t values = 0;       // of answers: answer_values()
  std::int64_t answers = 0;      // requests that the engine works on
};

// Any thread may use it.
class ServerMetrics {
 public:
  ServerMetrics();
  void first_token(double seconds);               // from the arrival of a request
  void inter_token(double seconds);               // from one token of a completion to the next
  void ended(FinishedBy reason, double seconds);  // a completion, from the arrival of its request
  void answered(int status);                      // an HTTP request

  // `engine` may be null: while the model is being loaded.
  std::string text(const std::string& model, const EngineStatistics* engine, const HttpCounters& http,
                   const ServerHolds& holds) const;

 private:
  mutable std::mutex mutex_;
  Histogram first_token_, inter_token_, request_;
  std::array<std::int64_t, 4> ended_{};   // by FinishedBy
  std::map<int, std::int64_t> answered_;  // by status
};

}  // namespace weft
