#include "llmc/infer/batch.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "llmc/base/clock.h"
#include "llmc/base/hash.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/signals.h"
#include "llmc/infer/prompt.h"
#include "llmc/infer/report.h"

namespace weft {

namespace {

using Clock = std::chrono::steady_clock;
using Answer = nlohmann::ordered_json;

constexpr int kRequestDepth = 8;
constexpr std::size_t kMaxIdBytes = 1024;
constexpr int kInputWaitMs = 100;  // for the next line while nothing runs; then a stop signal is looked for

// One line of the input.
struct BatchRequest {
  Json id;  // null: not known
  CompletionPrompt prompt;
  CompletionOptions options;
};

std::string shown(const Json& id) {
  return escaped(id.is_string() ? id.get_ref<const std::string&>() : json_text(id));
}

// Collects the pieces of one answer.
class Collector : public CompletionSink {
 public:
  explicit Collector(const CompletionOptions& options)
      : logprobs_(options.logprobs >= 0), prompt_logprobs_(logprobs_ && options.echo) {}

  bool on_piece(CompletionPiece piece) override {
    text_ += piece.text;
    if (piece.is_prompt) prompt_ = std::move(piece.prompt);
    if (piece.id.has_value()) ids_.push_back(std::move(*piece.id));
    return true;
  }
  void on_end(const CompletionEnd& end) override { end_ = end; }

  const std::optional<CompletionEnd>& end() const { return end_; }
  void add_to(Answer& answer) const {
    std::vector<std::int32_t> ids;
    for (const ScoredId& id : ids_) ids.push_back(id.id);
    answer["ids"] = std::move(ids);
    answer["text"] = text_;
    if (logprobs_) answer["logprobs"] = scores(ids_);
    if (prompt_logprobs_) answer["prompt_logprobs"] = scores(prompt_);
  }

 private:
  // A log-probability that is -infinity, that of a masked id, becomes null.
  static Answer scores(const std::vector<ScoredId>& ids) {
    Answer list = Answer::array();
    for (const ScoredId& id : ids) {
      Answer top = Answer::array();
      for (const IdLogprob& one : id.alternatives) top.push_back({one.id, one.logprob});
      list.push_back(Answer{{"id", id.id}, {"logprob", id.logprob}, {"top", std::move(top)}});
    }
    return list;
  }

  const bool logprobs_, prompt_logprobs_;  // wanted
  std::string text_;
  std::vector<ScoredId> prompt_, ids_;
  std::optional<CompletionEnd> end_;
};

// Identifies a request: a hash of the prompt's ids, every option, the model's configuration and its weights. `model`:
// BatchSettings::model; answers that were written until 2026-11-30 have none.
std::string fingerprint(const BatchRequest& request, const ModelConfig& config, const std::string& model) {
  const CompletionOptions& o = request.options;
  Json all = {{"prompt", ids_text(request.prompt.ids)},
              {"options",
               {o.max_tokens, o.sampler.temperature, o.sampler.top_k, o.sampler.top_p, o.sampler.min_p, o.sampler.seed,
                o.stop, o.ignore_eos, o.logprobs, o.echo}},
              {"model", config_to_json(config)}};
  if (o.rules.any()) all["rules"] = rules_json(o.rules);  // answers to requests without any keep their fingerprint
  if (!model.empty()) all["weights"] = model;
  return hash_text(xxh3_64(json_text(all)));
}

class Batch {
 public:
  Batch(InferenceModel& model, const Tokenizer* tokenizer, const BatchSettings& settings, PolledLines& input,
        AnswerFile& output)
      : config_(model.config()),
        tokenizer_(tokenizer),
        settings_(settings),
        input_(input),
        output_(output),
        engine_(model, settings.engine),
        most_pending_(2 * static_cast<std::size_t>(settings.engine.max_running)) {}

  Exit run();

 private:
  struct Pending {
    BatchRequest request;
    std::size_t line = 0;
    std::shared_ptr<Collector> collector;
  };

  void take_lines();
  void take_line(const std::string& line);
  void read_request(const Json& object, BatchRequest& request) const;
  void submit(const BatchRequest& request);
  void refuse(const Json& id, const std::string& error);
  void write_answers();
  void show_progress();
  void cancel_all();
  void report() const;

  const ModelConfig& config_;
  const Tokenizer* tokenizer_;
  const BatchSettings& settings_;
  PolledLines& input_;
  AnswerFile& output_;
  Engine engine_;
  const std::size_t most_pending_;  // enough to keep the engine busy, and few enough to keep memory small

  std::size_t line_ = 0;  // number of the line that was read last
  bool input_ended_ = false;
  std::unordered_set<std::string, SeededHash> ids_;  // of this run's input, as JSON
  std::map<RequestId, Pending> pending_;
  std::int64_t answered_ = 0, errors_ = 0, skipped_ = 0, changed_ = 0;
  const Clock::time_point start_ = Clock::now();
  ProgressLine progress_;
};

Exit Batch::run() {
  on_stop(OnStop::finish, "stopping: what was answered is kept, run again to go on", "left at once");
  while (stop_signal() == 0) {
    take_lines();
    const bool more = engine_.step();
    write_answers();
    show_progress();
    if (input_ended_ && !more && pending_.empty()) break;
  }
  if (stop_signal() != 0) cancel_all();
  progress_.clear();
  output_.sync();
  report();
  if (stop_signal() != 0) return exit_after_signal(stop_signal());
  if (errors_ > 0) return Exit::failed_lines;
  return changed_ > 0 ? Exit::bad_file : Exit::ok;
}

void Batch::take_lines() {
  std::string line;
  while (!input_ended_ && pending_.size() < most_pending_ && stop_signal() == 0) {
    switch (input_.next(line, pending_.empty() ? kInputWaitMs : 0)) {
      case PolledLines::Result::line:
        ++line_;
        take_line(line);
        break;
      case PolledLines::Result::too_long:
        ++line_;
        refuse(nullptr, format("this line has more than %zu bytes", kMaxRequestBytes));
        break;
      case PolledLines::Result::not_yet:
        return;
      case PolledLines::Result::end:
        input_ended_ = true;
        break;
    }
  }
}

void Batch::take_line(const std::string& line) {
  if (line.find_first_not_of(" \t\r") == std::string::npos) return;
  BatchRequest request;
  request.options = settings_.defaults;
  try {
    read_request(parse_json(line, "this line", {.bytes = kMaxRequestBytes, .depth = kRequestDepth}), request);
    if (!ids_.insert(json_text(request.id)).second) {
      fail(Exit::usage, "id: got %s a second time, expected another one for each line", shown(request.id).c_str());
    }
    submit(request);
  } catch (const Error& error) {
    if (error.code() == Exit::internal) throw;
    refuse(request.id, error.what());
  }
}

// Sets the id before anything else can fail, so that the answer to a bad request has it.
void Batch::read_request(const Json& object, BatchRequest& request) const {
  if (!object.is_object()) fail(Exit::usage, "this line: got a JSON %s, expected an object", object.type_name());
  const auto id = object.find("id");
  const bool is_text = id != object.end() && id->is_string() && id->get_ref<const std::string&>().size() <= kMaxIdBytes;
  if (!is_text && (id == object.end() || !id->is_number_integer())) {
    fail(Exit::usage, "id: got %s, expected a text of at most %zu bytes or an integer",
         id == object.end() ? "none" : shown(*id).c_str(), kMaxIdBytes);
  }
  request.id = *id;
  for (const auto& [name, value] : object.items()) {
    if (name == "id" || name == "prompt" || name == "prompt_ids" || value.is_null()) continue;
    if (read_completion_option(name, value, request.options)) continue;
    fail(Exit::usage,
         "%s: unknown field, expected id, prompt or prompt_ids, max_tokens, temperature, top_k, top_p, min_p, seed, "
         "stop, ignore_eos, logprobs, echo, presence_penalty, frequency_penalty, repetition_penalty, logit_bias, "
         "bad_words, min_tokens, stop_token_ids",
         escaped(name).c_str());
  }
  check_completion_options(request.options);
  const Json prompt = object.value("prompt", Json()), ids = object.value("prompt_ids", Json());
  if (prompt.is_null() == ids.is_null()) {
    fail(Exit::usage, "prompt: got %s, expected one of prompt and prompt_ids", prompt.is_null() ? "none" : "both");
  }
  if (!ids.is_null()) {
    request.prompt = prompt_from_ids(ids, tokenizer_, config_, "prompt_ids");
    return;
  }
  if (!prompt.is_string()) {
    fail(Exit::usage, "prompt: got %s, expected a text", escaped(json_text(prompt)).c_str());
  }
  request.prompt =
      prompt_from_text(prompt.get_ref<const std::string&>(), tokenizer_, settings_.special, config_, "prompt");
}

void Batch::submit(const BatchRequest& request) {
  if (const std::optional<std::string> before = output_.answered(request.id)) {
    if (*before == fingerprint(request, config_, settings_.model) || *before == fingerprint(request, config_, "")) {
      ++skipped_;
      return;
    }
    ++changed_;
    log_warning(
        "line %zu: id %s: the output has an answer to another request, or of another model, under this id. It "
        "stays. For a new one choose another --output, or remove its line",
        line_, shown(request.id).c_str());
    return;
  }
  const std::string refusal =
      engine_.refusal(static_cast<std::int64_t>(request.prompt.ids.size()), request.options.max_tokens);
  if (!refusal.empty()) fail(Exit::usage, "%s", refusal.c_str());
  auto collector = std::make_shared<Collector>(request.options);
  Completion completion = make_completion(request.prompt, request.options, tokenizer_, config_, collector);
  const RequestId id = engine_.submit(std::move(completion.request), std::move(completion.listener));
  pending_.emplace(id, Pending{request, line_, std::move(collector)});
}

void Batch::refuse(const Json& id, const std::string& error) {
  ++errors_;
  output_.write({{"id", id}, {"line", line_}, {"finish_reason", "error"}, {"error", error}});
}

void Batch::write_answers() {
  std::erase_if(pending_, [this](const auto& entry) {
    const Pending& pending = entry.second;
    const std::optional<CompletionEnd>& end = pending.collector->end();
    if (!end.has_value()) return false;
    Answer answer = {{"id", pending.request.id}};
    if (end->reason == FinishedBy::error) answer["line"] = pending.line;
    answer["prompt_ids"] = pending.request.prompt.ids;
    pending.collector->add_to(answer);
    answer["finish_reason"] = finished_by_name(end->reason);
    if (end->reason == FinishedBy::error) answer["error"] = end->message;
    answer["request"] = fingerprint(pending.request, config_, settings_.model);
    output_.write(answer);
    ++(end->reason == FinishedBy::error ? errors_ : answered_);
    return true;
  });
}

void Batch::show_progress() {
  if (!stderr_is_terminal()) return;
  const EngineStatistics now = engine_.statistics();
  const double seconds = seconds_since(start_);
  progress_.show(format("answered %lld, %lld running, %.0f tokens/s%s", static_cast<long long>(answered_),
                        static_cast<long long>(now.running), static_cast<double>(now.generated_ids) / seconds,
                        input_.progress().c_str()));
}

void Batch::cancel_all() {
  for (const auto& [id, pending] : pending_) engine_.cancel(id);
  while (engine_.step()) {
  }
  pending_.clear();
}

void Batch::report() const {
  const auto wide = [](std::int64_t value) { return static_cast<long long>(value); };
  const EngineStatistics now = engine_.statistics();
  const double seconds = seconds_since(start_);
  std::string line = format("answered %lld request%s", wide(answered_), answered_ == 1 ? "" : "s");
  if (errors_ > 0) line += format(", %lld with an error", wide(errors_));
  if (skipped_ > 0) line += format(", %lld had an answer", wide(skipped_));
  if (changed_ > 0) line += format(", %lld differ from what was answered under their id", wide(changed_));
  line += format("; %lld tokens in %s, %.1f tokens/s", wide(now.generated_ids), human_seconds(seconds).c_str(),
                 static_cast<double>(now.generated_ids) / seconds);
  if (now.prompt_ids > 0) {
    line += format("; %.0f %% of %lld prompt tokens were shared, %lld preemptions",
                   100.0 * static_cast<double>(now.prefix_ids) / static_cast<double>(now.prompt_ids),
                   wide(now.prompt_ids), wide(now.preemptions));
  }
  if (settings_.engine.drafts.any()) line += "; " + drafts_text(now.drafts);
  log_info("%s", line.c_str());
}

}  // namespace

Exit run_batch(InferenceModel& model, const Tokenizer* tokenizer, const BatchSettings& settings, PolledLines& input,
               AnswerFile& output) {
  return Batch(model, tokenizer, settings, input, output).run();
}

}  // namespace weft
