// A request for text, by whatever API: prompts and options for the engine, and what the parsers of all APIs have in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/infer/chat.h"
#include "llmc/infer/completion.h"
#include "llmc/model/config.h"
#include "llmc/serve/request_error.h"
#include "llmc/serve/request_fields.h"
#include "llmc/text/tokenizer.h"

namespace weft {

inline constexpr int kMaxRequestDepth = 8;                   // of the JSON: a list of lists of ids has 3
inline constexpr std::size_t kMaxRequestValues = 1'000'000;  // of the JSON: what bounds the ids of all prompts
inline constexpr std::int64_t kMaxChoices = 128;             // n

inline constexpr std::int64_t kMostAnswerValues = 1 << 22;  // answer_values(), each some 30 bytes of JSON

struct TextRequest {
  std::vector<CompletionPrompt> prompts;  // at least one
  CompletionOptions options;              // of all prompts
  std::int64_t n = 1;                     // completions a prompt
  bool stream = false, include_usage = false;
  bool usage_in_events = false;  // in all that have a choice
  bool seeded = false;           // the request names a seed
  bool in_thoughts = false;      // of a chat: its answer begins inside thoughts
  std::int64_t values = 0;       // answer_values()

  std::int64_t sequences() const { return n * static_cast<std::int64_t>(prompts.size()); }
};

// What the parsers have to know about the server.
struct RequestContext {
  std::string model;                                      // the name that requests may give
  const Tokenizer* tokenizer = nullptr;                   // may be null
  Tokenizer::Special special = Tokenizer::Special::text;  // names of special tokens in a prompt
  const ModelConfig* config = nullptr;
  std::int64_t max_sequences = 1024;  // prompts times n
  std::int64_t max_values = kMostAnswerValues;
  // Why a prompt of so many ids, with so many generated ones, cannot be served; empty if it can. Null: all can.
  std::function<std::string(std::int64_t prompt_ids, std::int64_t max_tokens)> refusal = nullptr;
  const Chat* chat = nullptr;  // null: the model has no chat format
  // The most ids that can be generated after a prompt of so many, which refusal() does not refuse. Null: any number.
  std::function<std::int64_t(std::int64_t prompt_ids)> room = nullptr;
  Json tokenizer_info = Json::object();  // members of GET /tokenizer_info that are not those of the tokenizer itself
};

// Called with the number of completions before the prompts are tokenized, which takes long: throws if there are no places for
// them. May be null.
using Reserve = std::function<void(std::int64_t completions)>;

// A name other than that of the model that is served: 404.
void check_model_name(const std::string& name, const std::string& served);
// The same of the field "model" of a body, if it has one.
void check_model(const Json& body, const std::string& served);

// How many tokens and log-probabilities an answer may have to hold at once: all of a whole answer, and of a stream those of
// the prompts, which come in one event.
std::int64_t answer_values(const TextRequest& request, const ModelConfig& config);

// ---- for the parsers, in the order of their use: all throw RequestError, which names the field ----------------------

// The object that is the body.
Json parse_request(std::string_view text);
// model, n, stream and stream_options.
void read_common_fields(const Json& body, const RequestContext& context, TextRequest& request);
// One of the options of a completion, or of the fields that all APIs refuse or ignore.
void read_option(const std::string& name, const Json& value, TextApi api, TextRequest& request);
// Options against each other, and against the server.
void check_options(const TextRequest& request, const RequestContext& context);
// Before the prompts are tokenized.
void reserve_places(const TextRequest& request, std::int64_t prompts, const RequestContext& context,
                    const Reserve& reserve);
// Refuses a text that certainly has too many ids. `name`: of the field.
void check_text_size(std::string_view text, const std::string& name, const std::string& param, std::int64_t max_tokens,
                     const RequestContext& context);
// Refuses a prompt of too many ids. `param`: its field. `place`: what the message begins with; may be empty.
void check_prompt_size(std::int64_t ids, const std::string& param, std::int64_t max_tokens,
                       const RequestContext& context, const std::string& place = {});
// Sets request.options.logit_rules, once for all choices. All else is read.
void complete_rules(TextRequest& request, const RequestContext& context);
// Sets request.values.
void check_answer_values(TextRequest& request, const RequestContext& context);

}  // namespace weft
