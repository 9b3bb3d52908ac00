// The answers under way, and the way of their pieces from the engine's thread to that of the connections.
//
// What a step hands out is collected, and passed on at once by flush(): all pending events of a stream become one
// write, so that a thread of connections that has fallen behind catches up. An answer stays here from submit() until
// its last piece has been taken. One that cannot be written, which is for want of memory, ends alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "llmc/base/log.h"
#include "llmc/infer/completion.h"
#include "llmc/infer/engine.h"
#include "llmc/serve/admission.h"
#include "llmc/serve/answer.h"
#include "llmc/serve/metrics.h"

namespace weft {

class Answers {
 public:
  // `post` runs a task on the thread of the connections. `log`: each answer has a line in the log.
  Answers(ServerMetrics& metrics, Admission& admission, bool log, std::function<void(std::function<void()>)> post)
      : metrics_(metrics), admission_(admission), log_(log), post_(std::move(post)) {}

  // Takes what the engine makes for one choice.
  std::shared_ptr<CompletionSink> sink(std::shared_ptr<Answer> answer, std::size_t choice);
  // Answer::submit(); cancelled if the client goes away. If it throws, the answer has been given up.
  void submit(const std::shared_ptr<Answer>& answer, Engine& engine, std::vector<Completion> completions,
              Reservation& places);
  std::int64_t under_way() const {
    const std::lock_guard lock(mutex_);
    return std::ssize(answers_);
  }

  // On the engine's thread.
  void flush();
  void cancel_all() {
    for (const std::shared_ptr<Answer>& answer : all()) answer->cancel();
  }
  void fail_all(const std::string& message);

 private:
  class Sink;
  // What the engine handed out for one choice in a step.
  struct Event {
    std::shared_ptr<Answer> answer;
    std::size_t choice = 0;
    CompletionPiece piece;             // if there is no `end`
    std::optional<CompletionEnd> end;  // the last event of the choice
    TokenTimes times;                  // with the end
  };

  void deliver_inbox();
  void log(const Answer& answer) const;
  template <typename Action>
  void attempt(Answer& answer, const Action& action);
  std::vector<std::shared_ptr<Answer>> all() const {
    const std::lock_guard lock(mutex_);
    return {answers_.begin(), answers_.end()};
  }
  void erase(const std::shared_ptr<Answer>& answer) {
    const std::lock_guard lock(mutex_);
    answers_.erase(answer);
  }

  ServerMetrics& metrics_;
  Admission& admission_;
  const bool log_;
  const std::function<void(std::function<void()>)> post_;
  RepeatedError failures_;

  mutable std::mutex mutex_;
  std::unordered_set<std::shared_ptr<Answer>> answers_;

  std::vector<Event> outbox_;  // of the engine's thread
  std::mutex inbox_mutex_;
  std::vector<Event> inbox_;
  bool delivery_posted_ = false;   // of inbox_
  std::vector<Event> delivering_;  // used on the thread of the connections; kept for its memory
};

}  // namespace weft
