#include "llmc/serve/metrics.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/serve/answer_choice.h"

namespace weft {

namespace {

// vLLM's bounds, with finer ones where a token takes a few milliseconds. Seconds.
const std::vector<double> kFirstTokenBounds = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
                                               1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560};
const std::vector<double> kInterTokenBounds = {0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025,
                                               0.05,   0.075, 0.1,    0.15,  0.2,   0.3,   0.4,    0.5,  0.75,
                                               1,      2.5,   5,      7.5,   10,    20,    40,     80};
const std::vector<double> kRequestBounds = {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                            30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};

// A label's value: backslash, quote and line end are escaped.
std::string label_value(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\n') {
      out += "\\n";
    } else {
      if (c == '\\' || c == '"') out += '\\';
      out += c;
    }
  }
  return out;
}

std::string head(const std::string& name, const char* type, const std::string& help) {
  return "# HELP " + name + " " + help + "\n# TYPE " + name + " " + type + "\n";
}

std::string line(const std::string& name, const std::string& labels, double value) {
  return name + (labels.empty() ? "" : "{" + labels + "}") + format(" %.15g\n", value);
}

}  // namespace

Histogram::Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

void Histogram::observe(double value) {
  ++counts_[static_cast<std::size_t>(std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin())];
  sum_ += value;
}

std::string Histogram::text(const std::string& name, const std::string& help, const std::string& labels) const {
  std::string out = head(name, "histogram", help);
  std::int64_t below = 0;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    below += counts_[i];
    const std::string bound = i < bounds_.size() ? format("%g", bounds_[i]) : "+Inf";
    out += line(name + "_bucket", format("%s,le=\"%s\"", labels.c_str(), bound.c_str()), static_cast<double>(below));
  }
  return out + line(name + "_sum", labels, sum_) + line(name + "_count", labels, static_cast<double>(below));
}

ServerMetrics::ServerMetrics()
    : first_token_(kFirstTokenBounds), inter_token_(kInterTokenBounds), request_(kRequestBounds) {}

void ServerMetrics::first_token(double seconds) {
  const std::lock_guard lock(mutex_);
  first_token_.observe(seconds);
}

void ServerMetrics::inter_token(double seconds) {
  const std::lock_guard lock(mutex_);
  inter_token_.observe(seconds);
}

void ServerMetrics::ended(FinishedBy reason, double seconds) {
  const std::lock_guard lock(mutex_);
  ++ended_.at(static_cast<std::size_t>(reason));
  request_.observe(seconds);
}

void ServerMetrics::answered(int status) {
  const std::lock_guard lock(mutex_);
  ++answered_[status];
}

std::string ServerMetrics::text(const std::string& model, const EngineStatistics* engine, const HttpCounters& http,
                                const ServerHolds& holds) const {
  const std::string label = "model_name=\"" + label_value(model) + "\"";
  std::string out;
  const auto one = [&](const char* name, const char* type, const char* help, auto value) {
    out += head(name, type, help) + line(name, label, static_cast<double>(value));
  };
  if (engine != nullptr) {
    const EngineStatistics& e = *engine;
    one("vllm:num_requests_running", "gauge", "Sequences that are being computed.", e.running);
    one("vllm:num_requests_waiting", "gauge", "Sequences that wait.", e.waiting);
    one("vllm:kv_cache_usage_perc", "gauge", "Share of the K/V pages in use, 1: all.",
        e.pages > 0 ? static_cast<double>(e.pages_in_use) / static_cast<double>(e.pages) : 0);
    one("vllm:prompt_tokens_total", "counter", "Ids of prompts.", e.prompt_ids);
    one("vllm:generation_tokens_total", "counter", "Generated ids.", e.generated_ids);
    one("vllm:num_preemptions_total", "counter", "Sequences that lost their pages.", e.preemptions);
    one("vllm:prefix_cache_queries_total", "counter", "Ids of prompts that were looked for in shared pages.",
        e.prompt_ids);
    one("vllm:prefix_cache_hits_total", "counter", "Ids of prompts that were found in shared pages.", e.prefix_ids);

    one("vllm:spec_decode_num_drafts_total", "counter", "Steps of sequences that verified drafted ids.",
        e.drafts.verifications);
    one("vllm:spec_decode_num_draft_tokens_total", "counter", "Drafted ids.", e.drafts.drafted);
    one("vllm:spec_decode_num_accepted_tokens_total", "counter", "Drafted ids that were right.", e.drafts.accepted);
    one("weft:kv_pages", "gauge", "Pages of the K/V pool.", e.pages);
    one("weft:kv_pages_in_use", "gauge", "Pages of sequences.", e.pages_in_use);
    one("weft:kv_pages_cached", "gauge", "Pages kept for a prefix that may come again.", e.pages_cached);
    one("weft:steps_total", "counter", "Steps of the model.", e.steps);
    one("weft:sampled_chunks_total", "counter", "Steps of sequences that ended with an id.", e.drafts.chunks);
    one("weft:rows_total", "counter", "Rows of all steps.", e.rows);
  }
  one("weft:connections", "gauge", "Open connections.", http.connections);
  one("weft:connections_refused_total", "counter", "Connections closed at once: there were too many.", http.refused);
  one("weft:connections_displaced_total", "counter", "Connections without a request closed for a new one.",
      http.displaced);
  one("weft:body_bytes", "gauge", "Bytes of request bodies that are not answered.", http.body_bytes);
  one("weft:unsent_bytes", "gauge", "Bytes of answers that clients have not taken.", http.unsent_bytes);
  one("weft:requests_to_read", "gauge", "Requests that wait to be parsed and tokenized.", http.waiting);
  one("weft:completions", "gauge", "Completions under way: places taken.", holds.completions);
  one("weft:answers", "gauge", "Requests under way.", holds.answers);
  one("weft:answer_values", "gauge", "Tokens and log-probabilities of large answers under way.", holds.values);
  one("weft:streams_cut_off_total", "counter", "Streams whose client did not keep up.", http.cut_off);

  const std::lock_guard lock(mutex_);
  out += first_token_.text("vllm:time_to_first_token_seconds", "From a request to its first token.", label);
  out += inter_token_.text("vllm:inter_token_latency_seconds", "From one token to the next.", label);
  out += request_.text("vllm:e2e_request_latency_seconds", "From a request to the end of a completion.", label);
  out += head("vllm:request_success_total", "counter", "Completions that ended, by reason.");
  for (std::size_t i = 0; i < ended_.size(); ++i) {
    out += line("vllm:request_success_total",
                label + ",finished_reason=\"" + finish_reason_name(static_cast<FinishedBy>(i)) + "\"",
                static_cast<double>(ended_[i]));
  }
  out += head("weft:http_responses_total", "counter", "HTTP answers, by status.");
  for (const auto& [status, count] : answered_) {
    out += line("weft:http_responses_total", label + format(",code=\"%d\"", status), static_cast<double>(count));
  }
  return out;
}

}  // namespace weft
