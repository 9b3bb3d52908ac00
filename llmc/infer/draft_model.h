// Drafts by a second, smaller model with the same tokenizer (Leviathan et al., "Fast Inference from Transformers via Speculative
// Decoding", ICML 2023). It has pages, slots and prefixes of its own.
//
// It draws each draft token with the random number that the sequence's own model will use at that position: sampling is a
// function of logits, seed and position (llmc/base/sampling.h), so the closer the two distributions are, the more often
// both pick the same id. At temperature 0 both take the likeliest.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "llmc/base/sampling.h"
#include "llmc/infer/draft_length.h"
#include "llmc/infer/page_pool.h"
#include "llmc/model/inference_model.h"

namespace weft {

class DraftModel {
 public:
  // Ids that are drafted are below vocab_size of both models. `model` must outlive this.
  DraftModel(InferenceModel& model, std::int64_t vocab_size);

  // The draft model's state of one sequence.
  struct State {
    explicit State(PagePool& pool) : table(pool) {}
    BlockTable table;
    std::int32_t slot = -1;                  // -1: none, and no pages
    std::int64_t rows = 0;                   // number of the sequence's ids whose rows are in the pages
    std::vector<std::int32_t> draft_tokens;  // their rows follow in the pages, and are kept if these ids are generated
    std::int64_t checked = 0;                // number of the sequence's ids that are known to be below vocab_size
    SamplingPlan plan;
  };
  PagePool& pool() { return pool_; }

  struct Job {
    State* state = nullptr;
    std::span<const std::int32_t> ids;  // of the sequence, all that are known
    const SamplingPlan* sampling = nullptr;
    std::int64_t count = 0;                       // ids to draft; 0: only the rows of `ids` are computed, for later
    std::vector<std::int32_t>* drafts = nullptr;  // empty
  };
  // Appends at most job.count draft tokens, and at most kMostDrafted, to *job.drafts, which is empty. Fewer or none: if the
  // model has not caught up with the ids yet (a call computes at most max_rows() of all jobs together), if pages are
  // missing, if an id is not in its vocabulary, or beyond its longest sequence. Waits until everything is computed.
  void draft(std::span<Job> jobs);
  void release(State& state);

  // Median time of a step of the draft model in seconds, leaving out steps with long prompts; 0: not known yet.
  double step_seconds() const { return step_times_.median(); }
  std::string inconsistency() const { return pool_.inconsistency(); }
  std::int64_t pages_in_use() const { return pool_.in_use(); }
  std::int64_t slots_in_use() const { return model_.slots() - std::ssize(slots_); }

 private:
  bool prepare(Job& job, std::int64_t& budget);
  void collect(std::vector<Job*>& flight);

  InferenceModel& model_;
  const std::int64_t vocab_size_;
  PagePool pool_;
  std::vector<std::int32_t> slots_;  // free
  std::vector<Chunk> chunks_;
  RecentTimes step_times_;
};

}  // namespace weft
