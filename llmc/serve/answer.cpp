#include "llmc/serve/answer.h"

namespace weft {

void Answer::submit(Engine& engine, std::vector<Completion> completions, Reservation& places) {
  const std::lock_guard lock(mutex_);
  engine_ = &engine;
  unfinished_ = completions.size();
  for (Completion& completion : completions) {
    ids_.push_back(engine.submit(std::move(completion.request), std::move(completion.listener)));
    places.pass_on();
  }
}

void Answer::cancel() {
  if (cancelled_.exchange(true)) return;
  const std::lock_guard lock(mutex_);
  for (const RequestId id : ids_) engine_->cancel(id);
}

void Answer::take_piece(std::size_t choice, const CompletionPiece& piece) {
  if (!wanted()) return;
  usage.completion_tokens += piece.id.has_value() ? 1 : 0;
  choices[choice]->add(piece);
  if (stream) send_choice(*choices[choice]);
}

void Answer::send_choice(AnswerChoice& choice) {
  while (choice.pending()) send(answer_event(head, choice.write(), usage_in_events ? &usage : nullptr));
}

void Answer::take_end(std::size_t choice, const CompletionEnd& end, const TokenTimes& times) {
  --unfinished_;
  figures_.add(end.reason, end.generated_ids, times);
  if (choice % choices_of_prompt == 0) usage.cached_tokens += end.cached_ids;
  if (!wanted()) return;
  if (end.reason == FinishedBy::error) return fail(500, end.message);
  choices[choice]->finish(end.reason);
  if (stream) send_choice(*choices[choice]);
  if (unfinished_ > 0) return;
  if (!stream) return respond(200, answer_body(head, choices, usage));
  if (include_usage) send(usage_event(head, usage));
  send(kLastEvent);
  send_unsent();
  exchange->end_stream();
}

void Answer::send(const std::string& data) {
  if (status_ == 0) {
    metrics_.answered(status_ = 200);
    exchange->begin_stream("text/event-stream");
  }
  unsent_ += data;
}

void Answer::send_unsent() {
  if (!unsent_.empty()) exchange->send(std::exchange(unsent_, {}));
}

void Answer::respond(int status, std::string body) {
  metrics_.answered(status_ = status);
  exchange->respond({status, "application/json", std::move(body), {}});
}

void Answer::fail(int status, const std::string& message) {
  if (failed_.exchange(true)) return;
  if (status_ != 0) {
    send(error_event(status, message));
    send(kLastEvent);
    send_unsent();
    exchange->end_stream();
  } else {
    respond(status, error_body(status, message));
  }
  cancel();
}

std::string Answer::line() const {
  if (status_ == 0 && !exchange->gone()) return "";
  RequestFigures all = figures_;
  all.prompt_tokens = usage.prompt_tokens;
  all.cached_tokens = usage.cached_tokens;
  if (!complete()) all.add(FinishedBy::error, 0, {});  // the engine has failed
  return request_line(exchange->request(), status_ == 0 ? kClientClosed : status_, &all);
}

}  // namespace weft
