// The generation loop: from the prompt's ids to new ids and their text, with the time of each token.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/logit_rules.h"
#include "llmc/base/percentile.h"
#include "llmc/base/sampler.h"
#include "llmc/model/decode_model.h"
#include "llmc/text/tokenizer.h"

namespace weft {

struct GenerateOptions {
  std::int64_t max_tokens = 128;
  SamplerOptions sampler = {};
  std::vector<std::int32_t> stop_ids = {};   // usually the model's eos_ids
  std::vector<std::string> stop_texts = {};  // need a tokenizer
  bool hide_special = false;                 // the text lacks special tokens; stop texts see them
  LogitRuleOptions rules = {};               // min_tokens: stop texts do not count before, either
  std::vector<std::int32_t> earlier = {};    // GenerationRequest::earlier
};

enum class FinishReason {
  end_of_text,  // a stop id
  stop_text,
  max_tokens,
  context_full,
  interrupted,  // by a signal
};
// What programs read: "stop", "length" or "interrupted".
const char* finish_reason_name(FinishReason reason);
// What people read, after "ended by".
const char* finish_reason_text(FinishReason reason);

// A token counts as ready when it has been sampled: the first by the host's clock, when the host has it; from one to the next by
// DecodeModel::sampled_seconds(), because several may reach the host at once.
struct GenerateTimes {
  double first_token_ms = 0;           // from the start of the prefill to the first token
  std::vector<double> inter_token_ms;  // between one token and the next: decode only

  double inter_token_percentile(double percent) const { return percentile(inter_token_ms, percent); }
  // Of decode only: the first token belongs to the prefill. NaN if there are no other tokens.
  double tokens_per_second() const;
};

struct GenerateResult {
  std::vector<std::int32_t> ids;  // every sampled id, including a stop id and the ids of a stop text
  std::string text;               // their text up to the stop; empty without a tokenizer
  FinishReason finish_reason = FinishReason::max_tokens;
  GenerateTimes times;
  std::int64_t context = 0;                // positions in the cache at the end
  std::optional<DraftCounts> drafts = {};  // if the model drafts
};

struct GenerateHooks {
  std::function<void(std::string_view)> on_text;  // each piece of text that the stop texts leave: valid UTF-8
  std::function<void()> on_id;                    // each sampled id, before its text; the first one ends the prefill
  std::function<bool()> interrupted;              // asked before each further token; null: never
};

// Appends `prompt` (not empty, in range, fitting) to what the model's cache holds and generates. The last id
// sampled is not in the cache afterwards. `tokenizer` may be null: no text then, and no stop texts.
GenerateResult generate(DecodeModel& model, const Tokenizer* tokenizer, std::span<const std::int32_t> prompt,
                        const GenerateOptions& options, const GenerateHooks& hooks = {});

}  // namespace weft
