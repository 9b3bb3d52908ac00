#include "llmc/serve/answers.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"

namespace weft {

// Takes what one completion produces on the engine's thread.
class Answers::Sink : public CompletionSink {
 public:
  Sink(Answers& answers, std::shared_ptr<Answer> answer, std::size_t choice)
      : answers_(answers), answer_(std::move(answer)), choice_(choice), last_(answer_->arrival) {}

  bool on_piece(CompletionPiece piece) override {
    if (piece.id.has_value()) {
      const auto now = std::chrono::steady_clock::now();
      const double seconds = in_seconds(now - last_);
      if (!times_.first_seconds) {
        times_.first_seconds = seconds;
        answers_.metrics_.first_token(seconds);
      } else {
        times_.later_seconds += seconds;
        ++times_.later_tokens;
        answers_.metrics_.inter_token(seconds);
      }
      last_ = now;
    }
    answers_.outbox_.push_back({answer_, choice_, std::move(piece), {}, {}});
    return !answer_->cancelled();
  }

  void on_end(const CompletionEnd& end) override {
    answers_.metrics_.ended(end.reason, seconds_since(answer_->arrival));
    answers_.admission_.completion_ended();
    answers_.outbox_.push_back({answer_, choice_, {}, end, times_});
  }

 private:
  Answers& answers_;
  const std::shared_ptr<Answer> answer_;
  const std::size_t choice_;
  std::chrono::steady_clock::time_point last_;
  TokenTimes times_;
};

std::shared_ptr<CompletionSink> Answers::sink(std::shared_ptr<Answer> answer, std::size_t choice) {
  return std::make_shared<Sink>(*this, std::move(answer), choice);
}

void Answers::submit(const std::shared_ptr<Answer>& answer, Engine& engine, std::vector<Completion> completions,
                     Reservation& places) {
  try {
    {
      const std::lock_guard lock(mutex_);  // all() waits until all are submitted
      answers_.insert(answer);
      answer->submit(engine, std::move(completions), places);
    }
    answer->exchange->on_gone([answer] { answer->cancel(); });
  } catch (...) {
    answer->give_up();
    erase(answer);
    throw;
  }
}

void Answers::fail_all(const std::string& message) {
  flush();
  for (const std::shared_ptr<Answer>& answer : all()) {
    post_([this, answer, message] {
      if (answer->complete()) return;
      answer->fail(500, message);
      log(*answer);
    });
  }
}

void Answers::flush() {
  if (outbox_.empty()) return;
  bool posted = false;
  {
    const std::lock_guard lock(inbox_mutex_);
    if (inbox_.empty()) {
      inbox_.swap(outbox_);
    } else {
      std::ranges::move(outbox_, std::back_inserter(inbox_));
    }
    posted = std::exchange(delivery_posted_, true);
  }
  outbox_.clear();
  if (!posted) post_([this] { deliver_inbox(); });
}

void Answers::deliver_inbox() {
  {
    const std::lock_guard lock(inbox_mutex_);
    delivering_.swap(inbox_);
    delivery_posted_ = false;
  }
  for (const Event& event : delivering_) {
    Answer& answer = *event.answer;
    attempt(answer, [&] {
      if (event.end.has_value()) return answer.take_end(event.choice, *event.end, event.times);
      answer.take_piece(event.choice, event.piece);
    });
    if (!event.end.has_value() || !answer.complete()) continue;
    attempt(answer, [&] { log(answer); });
    erase(event.answer);
  }
  for (const Event& event : delivering_) {
    attempt(*event.answer, [&] { event.answer->send_unsent(); });
  }
  delivering_.clear();
}

void Answers::log(const Answer& answer) const {
  if (!log_) return;
  if (const std::string line = answer.line(); !line.empty()) log_info("%s", line.c_str());
}

// Calls `action`, which makes a part of the answer; ends the answer if it throws. There may not even be enough memory
// to say so.
template <typename Action>
void Answers::attempt(Answer& answer, const Action& action) {
  try {
    action();
  } catch (const std::exception& error) {
    try {
      failures_.log("an answer failed: " + escaped(error.what()));
      answer.fail(503, "not enough memory for this answer");
    } catch (const std::exception&) {
      answer.exchange->abandon();
    }
  }
}

}  // namespace weft
