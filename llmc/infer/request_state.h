// A request as the engine keeps it: what was asked, what is known of its sequence, and what its drafts need.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/base/logit_rules.h"
#include "llmc/infer/draft_length.h"
#include "llmc/infer/draft_model.h"
#include "llmc/infer/engine.h"
#include "llmc/infer/lookup.h"
#include "llmc/infer/scheduler.h"

namespace weft {

// Used by Drafter alone (llmc/infer/drafter.h).
struct RequestDrafts {
  DraftLength length;
  Lookup lookup;
  std::vector<std::int32_t> found;  // by lookup
  std::int64_t found_after = -1;    // the number of ids after which `found` was looked up
  std::optional<DraftModel::State> state;
};

// The scheduler sees the Sequence alone. All sequences of an engine's scheduler are of this type.
struct RequestState : Sequence {
  // Its number is given by EngineInbox. `max` is how many ids may be generated, at most asked.max_ids.
  RequestState(PagePool& pool, EngineRequest request, std::int64_t max, std::shared_ptr<RequestListener> to)
      : Sequence(pool, 0), asked(std::move(request)), listener(std::move(to)), cut(max < asked.max_ids) {
    ids = std::move(asked.prompt);
    prompt_size = std::ssize(ids);
    max_ids = max;
    group = asked.group;
    if (asked.score_prompt) rows_to_score = prompt_size - 1;
    rules = begun_rules(asked.rules, {}, ids);
    one_unknown_id = rules.has_value();
  }

  EngineRequest asked;  // the prompt is moved into `ids`
  std::shared_ptr<RequestListener> listener;
  bool cut;                      // max_ids is less than was asked for
  std::vector<ScoredId> scored;  // of the prompt, by row
  bool prompt_told = false;
  std::optional<LogitRules> rules;  // their state
  RequestDrafts drafting;
};

inline RequestState& request_of(Sequence& sequence) {
  return static_cast<RequestState&>(sequence);
}

}  // namespace weft
