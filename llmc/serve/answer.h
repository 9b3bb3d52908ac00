// The answer to one request for text: from what the engine hands out for its choices to JSON, or to events of a
// stream.
//
// It is written on the thread of the connections alone, and once: fail() may have the last word before the engine has
// made everything, and what comes afterwards is dropped. cancel() may be called from any thread; the engine hears of it
// once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "llmc/infer/completion.h"
#include "llmc/infer/engine.h"
#include "llmc/serve/admission.h"
#include "llmc/serve/answer_json.h"
#include "llmc/serve/http.h"
#include "llmc/serve/metrics.h"
#include "llmc/serve/request_log.h"

namespace weft {

class Answer {
 public:
  Answer(ServerMetrics& metrics, Admission& admission) : values(admission.of_values()), metrics_(metrics) {}

  // Set before submit(), constant from then on.
  std::shared_ptr<HttpExchange> exchange;
  AnswerHead head;
  std::chrono::steady_clock::time_point arrival;
  bool stream = false, include_usage = false, usage_in_events = false;
  std::size_t choices_of_prompt = 1;
  Reservation values;

  // From then on they change on the thread of the connections alone.
  std::vector<std::unique_ptr<AnswerChoice>> choices;
  AnswerUsage usage;

  // Hands the completions of all choices to the engine, in their order, and passes their places on.
  void submit(Engine& engine, std::vector<Completion> completions, Reservation& places);
  void cancel();
  bool cancelled() const { return cancelled_; }
  // Whoever asked has another answer: nothing is written any more.
  void give_up() {
    failed_ = true;
    cancel();
  }

  // On the thread of the connections.
  void take_piece(std::size_t choice, const CompletionPiece& piece);
  void take_end(std::size_t choice, const CompletionEnd& end, const TokenTimes& times);
  bool complete() const { return unfinished_ == 0; }  // the engine has nothing more of it
  void send_unsent();
  void fail(int status, const std::string& message);
  // Of the log, once it is complete or has failed. Empty after give_up(): whoever answers has a line.
  std::string line() const;

 private:
  bool wanted() const { return !failed_ && !exchange->gone(); }
  void send(const std::string& data);
  void send_choice(AnswerChoice& choice);
  void respond(int status, std::string body);

  ServerMetrics& metrics_;
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> failed_{false};  // it has an answer, or gets one, that says why
  std::mutex mutex_;                 // submit() holds it until all are submitted
  Engine* engine_ = nullptr;
  std::vector<RequestId> ids_;  // in the engine

  std::size_t unfinished_ = 0;
  RequestFigures figures_;  // but for those of `usage`
  int status_ = 0;          // of the answer; 0: none, as yet
  std::string unsent_;      // events of a stream
};

}  // namespace weft
