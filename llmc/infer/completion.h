// One completion: from a prompt and its generation options to a request of the engine, and from the ids that the engine
// hands out to pieces of text with their log-probabilities. Batch files and the server are built on it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/base/json_fwd.h"
#include "llmc/base/sampling.h"
#include "llmc/infer/engine.h"
#include "llmc/infer/requested_rules.h"
#include "llmc/model/config.h"
#include "llmc/text/tokenizer.h"

namespace weft {

// The generation options of one completion. Names and meanings are those of infer_pythia --help, with underscores.
struct CompletionOptions {
  std::int64_t max_tokens = 128;  // 0 with echo alone: the prompt is scored and nothing is generated
  SamplerOptions sampler = {};    // vocab_limit: make_completion() sets it
  std::vector<std::string> stop = {};
  std::vector<std::int32_t> stop_ids = {};  // beside the model's eos_ids, and as these without text
  bool ignore_eos = false;                  // nor stop_ids
  RequestedRules rules = {};
  // What make_completion() makes of `rules`, for the one prompt or for all, if it was made before.
  std::optional<LogitRuleOptions> logit_rules = {};
  std::int32_t logprobs = -1;  // number of likeliest ids whose log-probabilities come with each id's own; -1: no scores
  bool echo = false;           // the prompt's text comes first; with logprobs, those of the prompt's ids too
  std::optional<std::chrono::steady_clock::time_point> deadline = {};
};

inline constexpr std::int32_t kMaxLogprobs = 20;
inline constexpr std::size_t kMaxStopTexts = 16;
inline constexpr std::size_t kMaxStopTextBytes = 1024;

// Sets the option that the JSON member `name` stands for: max_tokens, temperature, top_k, top_p, min_p, seed, stop (a
// string or a list of strings), ignore_eos, logprobs, echo, or one of read_rule(). Returns false if `name` is none of
// them. A value of the wrong type or out of range is Exit::usage: "<name>: got X, expected Y".
bool read_completion_option(const std::string& name, const Json& value, CompletionOptions& options);
// Checks options against each other: max_tokens of 0 without echo is Exit::usage. Call it once all members are read.
void check_completion_options(const CompletionOptions& options);

// The rules of a completion, all other options of which are set. Exit::usage as logit_rules().
LogitRuleOptions completion_rules(const CompletionOptions& options, const Tokenizer* tokenizer,
                                  const ModelConfig& config);

struct CompletionPrompt {
  std::vector<std::int32_t> ids;
  std::string text;          // what echo shows: valid UTF-8
  std::size_t in_front = 0;  // how many ids come before the text: the token that begins a document
};
// `name`: the field's, for errors. An empty text becomes the token that begins a document (start_ids()). Text without a
// tokenizer is Exit::usage.
CompletionPrompt prompt_from_text(std::string_view text, const Tokenizer* tokenizer, Tokenizer::Special special,
                                  const ModelConfig& config, const std::string& name);
// From a JSON list of at least one id in [0, vocab_size), otherwise Exit::usage.
CompletionPrompt prompt_from_ids(const Json& list, const Tokenizer* tokenizer, const ModelConfig& config,
                                 const std::string& name);

enum class FinishedBy { stop, length, cancelled, error };
const char* finished_by_name(FinishedBy reason);  // "stop", "length", "cancelled", "error"

// What one step added to a completion.
struct CompletionPiece {
  // Valid UTF-8. Empty while a character or the beginning of a stop text is held back. A stop text never shows.
  std::string text;
  // The sampled id, a stop id included; empty for the prompt's piece and for text that was held back until the end.
  std::optional<ScoredId> id;
  // For echo with logprobs, in the prompt's piece: of prompt[1], prompt[2], ... The first id has none.
  std::vector<ScoredId> prompt;
  bool is_prompt = false;  // echo: the first piece is the prompt's text
};

struct CompletionEnd {
  FinishedBy reason = FinishedBy::stop;
  std::string message;             // of an error or a cancellation: one line, otherwise empty
  std::int64_t prompt_ids = 0;     // ids of the prompt
  std::int64_t generated_ids = 0;  // sampled ids, a stop id included
  std::int64_t cached_ids = 0;     // ids of the prompt that were found in the prefix cache
};

// Takes what a completion produces, on the thread that calls Engine::step(). Must not throw and must not block.
class CompletionSink {
 public:
  virtual ~CompletionSink() = default;
  // One piece an id. Returns false to end the completion: on_end() with `cancelled` follows.
  virtual bool on_piece(CompletionPiece piece) = 0;
  virtual void on_end(const CompletionEnd& end) = 0;
};

// Both arguments of Engine::submit().
struct Completion {
  EngineRequest request;
  std::shared_ptr<RequestListener> listener;
};
// `tokenizer` may be null: pieces have no text then, and stop texts are Exit::usage. It must outlive the listener.
Completion make_completion(CompletionPrompt prompt, const CompletionOptions& options, const Tokenizer* tokenizer,
                           const ModelConfig& config, std::shared_ptr<CompletionSink> sink);

}  // namespace weft
