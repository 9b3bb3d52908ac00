#include "llmc/infer/draft_model.h"

#include <algorithm>
#include <chrono>
#include <deque>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"

namespace weft {

DraftModel::DraftModel(InferenceModel& model, std::int64_t vocab_size)
    : model_(model),
      vocab_size_(std::min(vocab_size, model.config().vocab_size)),
      pool_(model.num_pages(), model.page_size()) {
  for (std::int64_t slot = model.slots() - 1; slot >= 0; --slot) slots_.push_back(static_cast<std::int32_t>(slot));
}

void DraftModel::release(State& state) {
  if (state.slot < 0) return;
  state.table.release();
  slots_.push_back(state.slot);
  state.slot = -1;
  state.rows = state.checked = 0;
  state.draft_tokens.clear();
}

// Gets pages for the rows of the job's first step and, as far as there are free ones, for its draft tokens. False if the job
// gets no row.
bool DraftModel::prepare(Job& job, std::int64_t& budget) {
  State& s = *job.state;
  const std::int64_t size = std::ssize(job.ids);
  const auto id = [&](std::int64_t i) { return job.ids[static_cast<std::size_t>(i)]; };
  for (; s.checked < size; ++s.checked) {
    if (id(s.checked) >= vocab_size_) return false;
  }
  if (s.slot < 0) {
    if (slots_.empty()) return false;
    s.slot = slots_.back();
    slots_.pop_back();
  }
  for (const std::int32_t draft_token : s.draft_tokens) {
    if (s.rows >= size - 1 || id(s.rows) != draft_token) break;
    ++s.rows;
  }
  s.draft_tokens.clear();
  // The row of the last id is computed by the step that samples from it, so its page cannot be named yet.
  s.table.name_full_pages(job.ids, std::min(s.rows, size - 1));
  const bool ends_with_a_page = s.rows == std::ssize(s.table.pages()) * pool_.page_size();
  if (ends_with_a_page && s.rows + pool_.page_size() < size) s.rows = s.table.extend_by_prefix(job.ids, size - 1);
  if (job.count > 0) s.rows = std::min(s.rows, size - 1);

  std::int64_t rows = std::min({size - s.rows, budget, model_.max_positions() - s.rows});
  if (rows < 1 || !s.table.grow(s.rows + rows)) return false;
  if (s.rows + rows < size) job.count = 0;
  job.count = std::min(job.count, model_.max_positions() - size + 1);
  while (job.count > 1 && !s.table.grow(size + job.count - 1)) --job.count;
  budget -= rows;

  Chunk chunk;
  chunk.pages = s.table.pages();
  chunk.first_position = s.rows;
  chunk.ids = job.ids.subspan(static_cast<std::size_t>(s.rows), static_cast<std::size_t>(rows));
  chunk.slot = s.slot;
  if (job.count > 0) {
    s.plan = *job.sampling;
    s.plan.vocab_limit = s.plan.vocab_limit > 0 ? std::min(s.plan.vocab_limit, vocab_size_) : vocab_size_;
    chunk.sampling = &s.plan;
  }
  chunks_.push_back(chunk);
  s.rows += rows;
  return true;
}

void DraftModel::draft(std::span<Job> jobs) {
  const auto start = std::chrono::steady_clock::now();
  std::int64_t budget = model_.max_rows(), steps = 1;
  chunks_.clear();
  std::vector<Job*> working;
  for (Job& job : jobs) {
    if (prepare(job, budget)) {
      working.push_back(&job);
    } else {
      job.count = 0;
    }
  }
  if (working.empty()) return;
  const bool only_draft_tokens = model_.max_rows() - budget <= 2 * std::ssize(working);
  std::deque<std::vector<Job*>> flights;
  model_.submit(chunks_);
  flights.push_back(working);
  for (std::int64_t i = 1; i < kMostDrafted; ++i) {
    std::erase_if(working, [&](const Job* job) { return job->count <= i; });
    if (working.empty()) break;
    if (std::ssize(flights) >= model_.depth()) {
      collect(flights.front());
      flights.pop_front();
    }
    chunks_.clear();
    for (const Job* job : working) {
      Chunk chunk;
      chunk.pages = job->state->table.pages();
      chunk.first_position = std::ssize(job->ids) + i - 1;
      chunk.slot = job->state->slot;
      chunk.sampling = &job->state->plan;
      chunks_.push_back(chunk);
    }
    model_.submit(chunks_);
    flights.push_back(working);
    ++steps;
  }
  for (std::vector<Job*>& flight : flights) collect(flight);
  // The row of the last draft token was not computed.
  for (Job& job : jobs) {
    if (!job.drafts->empty()) job.state->draft_tokens.assign(job.drafts->begin(), job.drafts->end() - 1);
  }
  if (only_draft_tokens) step_times_.add(seconds_since(start) / static_cast<double>(steps));
}

// Adds the ids of one step to the jobs' drafts. If one could not be sampled, the job gets no further ones.
void DraftModel::collect(std::vector<Job*>& flight) {
  const std::span<const ChunkResult> results = model_.collect();
  if (results.size() != flight.size()) {
    fail(Exit::internal, "draft model: a step has another number of results than chunks");
  }
  for (std::size_t i = 0; i < flight.size(); ++i) {
    Job& job = *flight[i];
    if (std::ssize(*job.drafts) >= job.count) continue;
    if (!results[i].sampled.has_value()) {
      job.count = std::ssize(*job.drafts);
      continue;
    }
    job.drafts->push_back(results[i].sampled->id);
  }
}

}  // namespace weft
