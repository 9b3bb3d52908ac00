#include "llmc/infer/scheduler.h"

#include <algorithm>

#include "llmc/base/error.h"

namespace weft {

namespace {

bool decodes(const Sequence& s) {
  if (s.sampled >= s.max_ids) return false;
  const std::int64_t missing = s.known_rows() - s.rows;
  return s.id_on_device ? missing <= 1 : s.id_on_host && missing == 1;
}

bool has_prompt_rows(const Sequence& s) {
  return !s.id_on_device && !s.id_on_host && s.rows < s.known_rows();
}

// How many of `remaining` rows from `position` on to compute, at most `limit`. If not all fit, the rows stop at the end
// of a page, provided that one ends within the limit.
std::int64_t whole_pages(std::int64_t position, std::int64_t remaining, std::int64_t limit, std::int64_t page_size) {
  if (remaining <= limit) return remaining;
  const std::int64_t beyond = (position + limit) % page_size;
  return beyond < limit ? limit - beyond : limit;
}

}  // namespace

std::vector<std::int64_t> divide_rows(std::int64_t budget, std::span<const PromptRows> prompts,
                                      std::int64_t page_size) {
  std::vector<std::int64_t> rows(prompts.size(), 0);
  const auto give = [&](std::size_t i, std::int64_t limit) {
    budget += rows[i];
    rows[i] = whole_pages(prompts[i].position, prompts[i].remaining, std::min(limit, budget), page_size);
    budget -= rows[i];
  };
  if (prompts.empty()) return rows;
  give(0, (budget + 1) / 2);
  std::vector<std::size_t> shortest_first;
  for (std::size_t i = 1; i < prompts.size(); ++i) shortest_first.push_back(i);
  std::ranges::stable_sort(shortest_first, {}, [&](std::size_t i) { return prompts[i].remaining; });
  for (const std::size_t i : shortest_first) give(i, budget);
  give(0, rows[0] + budget);
  return rows;
}

Scheduler::Scheduler(PagePool& pool, const SchedulerOptions& options) : pool_(pool), options_(options) {
  for (std::int64_t slot = options.slots - 1; slot >= 0; --slot) slots_.push_back(static_cast<std::int32_t>(slot));
  running_.reserve(static_cast<std::size_t>(options.max_running));
  shares_.reserve(static_cast<std::size_t>(options.max_running));
  plan_.reserve(static_cast<std::size_t>(options.max_running));
}

void Scheduler::add(Sequence& sequence) {
  ++waiting_;
  const auto found = sequence.group == 0 ? groups_.end() : std::ranges::find(groups_, sequence.group, &Group::id);
  if (found != groups_.end()) return found->sequences.push_back(&sequence);
  groups_.push_back({sequence.group, {&sequence}});
}

// The sequence whose turn it is; null if none waits.
Sequence* Scheduler::next_waiting() const {
  return groups_.empty() ? nullptr : groups_.front().sequences.front();
}

// Takes it out, and with it the turn of its group.
void Scheduler::take_next_waiting() {
  --waiting_;
  Group group = std::move(groups_.front());
  groups_.pop_front();
  group.sequences.pop_front();
  if (!group.sequences.empty()) groups_.push_back(std::move(group));
}

void Scheduler::forget_waiting(const Sequence& sequence) {
  --waiting_;
  for (auto group = groups_.begin(); group != groups_.end(); ++group) {
    const auto found = std::ranges::find(group->sequences, &sequence);
    if (found == group->sequences.end()) continue;
    group->sequences.erase(found);
    if (group->sequences.empty()) groups_.erase(group);
    return;
  }
}

std::span<const PlannedSpan> Scheduler::plan() {
  admit();
  for (Sequence* s : running_) use_prefix(*s);
  divide();
  plan_.clear();
  // In the order of admission: whoever is preempted for a page is younger and has no span yet.
  for (std::size_t i = 0; i < shares_.size(); ++i) {
    Share& share = shares_[i];
    Sequence& s = *share.sequence;
    if (!s.running || !get_pages(share)) continue;
    s.drafts.resize(static_cast<std::size_t>(share.drafts));
    PlannedSpan span{&s, s.rows, share.rows, share.decodes && s.id_on_device && share.drafts == 0, false, share.drafts};
    s.rows += share.rows;
    ++s.in_flight;
    span.sample = s.max_ids > 0 && (share.decodes || s.rows == s.known_rows());
    if (span.sample) {
      s.sampled += 1 + share.drafts;
      s.id_on_device = share.drafts == 0;
      s.id_on_host = share.drafts > 0;
    }
    plan_.push_back(span);
  }
  // Pages get their names after all prefixes were looked up: a page that this step fills is for later steps.
  for (const PlannedSpan& span : plan_) name_pages(*span.sequence);
  std::stable_partition(plan_.begin(), plan_.end(), [](const PlannedSpan& span) { return span.id_on_device; });
  return plan_;
}

void Scheduler::admit() {
  const std::int64_t limit = std::min(options_.max_running, options_.rows_per_step);
  while (Sequence* const next = next_waiting()) {
    if (running() >= limit || slots_.empty() || !admissible(*next)) break;
    take_next_waiting();
    Sequence& s = *next;
    s.slot = slots_.back();
    slots_.pop_back();
    s.rows = 0;
    s.id_on_device = s.id_on_host = false;
    s.running = true;
    running_.push_back(&s);
    if (s.preempted) continue;
    s.order = ++admitted_;
    prompt_ids_ += s.prompt_size;
    s.ids.reserve(static_cast<std::size_t>(s.prompt_size + s.max_ids));
    s.table.reserve(s.table.missing(s.prompt_size + s.max_ids));
  }
}

// Whether there are pages for all rows that are known now, beside what running prompts will take and one page for each
// running sequence: a sequence that is admitted too early is preempted soon and computed twice.
bool Scheduler::admissible(const Sequence& s) const {
  if (s.in_flight > 0) return false;  // preempted, and an id of it is not known yet
  std::int64_t needed = s.table.missing(s.known_rows());
  if (options_.share_prefixes) {
    const BlockTable::PrefixHit hit = s.table.prefix_hit(s.ids, s.first_needed_row());
    needed += hit.cached - hit.pages;
  }
  for (const Sequence* other : running_) needed += 1 + other->table.missing(other->known_rows());
  return needed <= pool_.available();
}

// Skips rows whose keys and values another sequence has computed, perhaps since this one was admitted.
void Scheduler::use_prefix(Sequence& s) {
  const std::int64_t covered = std::ssize(s.table.pages()) * pool_.page_size();
  if (!options_.share_prefixes || !has_prompt_rows(s) || s.rows != covered) return;
  s.rows = s.table.extend_by_prefix(s.ids, s.first_needed_row());
  if (!s.preempted) prefix_ids_ += s.rows - covered;
}

// Whether an older prompt is about to fill a page that this one can use: then this one waits for it.
bool Scheduler::follows_another(const Sequence& s) const {
  const std::int64_t next_page_end = s.rows + pool_.page_size();
  if (!options_.share_prefixes || next_page_end > s.first_needed_row()) return false;
  for (const Sequence* other : running_) {
    if (other == &s) break;
    if (!has_prompt_rows(*other) || other->known_rows() < next_page_end) continue;
    if (s.table.has_same_next_page(s.ids, other->table, other->ids)) return true;
  }
  return false;
}

void Scheduler::divide() {
  shares_.clear();
  std::int64_t budget = options_.rows_per_step;
  std::vector<PromptRows> prompts;
  for (Sequence* s : running_) {
    if (decodes(*s)) {
      shares_.push_back({s, 1, true});
      --budget;
    } else if (has_prompt_rows(*s) && !follows_another(*s)) {
      shares_.push_back({s, 0, false});
      prompts.push_back({s->rows, s->known_rows() - s->rows});
    }
  }
  const bool any_decodes = budget < options_.rows_per_step;
  budget -= give_drafts(prompts.empty() ? budget : budget / 2);
  if (any_decodes) budget = std::min(budget, options_.prompt_rows);
  const std::vector<std::int64_t> rows = divide_rows(budget, prompts, pool_.page_size());
  for (std::size_t i = 0, prompt = 0; i < shares_.size(); ++i) {
    if (!shares_[i].decodes) shares_[i].rows = rows[prompt++];
  }
}

// Gives drafts to the shares that decode, in the order of admission, at most `budget` in all. Returns how many. An id is
// sampled after the last draft too, so max_ids must leave room for one more id than there are drafts.
std::int64_t Scheduler::give_drafts(std::int64_t budget) {
  std::int64_t given = 0;
  for (Share& share : shares_) {
    if (!share.decodes) continue;
    const Sequence& s = *share.sequence;
    share.drafts = std::min({std::ssize(s.drafts), s.max_ids - s.sampled - 1, budget - given});
    given += share.drafts;
  }
  return given;
}

// Gets pages for the rows of `share`, if need be those of younger sequences. If there are too few, the share gets fewer
// rows; false: it gets none.
bool Scheduler::get_pages(Share& share) {
  Sequence& s = *share.sequence;
  if (share.rows == 0) return false;
  while (!s.table.grow(s.rows + share.rows)) {
    if (preempt_younger_than(s)) continue;
    const std::int64_t pages = std::ssize(s.table.pages()) + pool_.available();
    share.rows = std::min(share.rows, pages * pool_.page_size() - s.rows);
    if (share.rows <= 0) return false;
  }
  // Drafts take free pages only.
  while (share.drafts > 0 && !s.table.grow(s.rows + share.rows + share.drafts)) --share.drafts;
  share.rows += share.drafts;
  return true;
}

// Takes the pages of the youngest running sequence that is younger than `sequence`. False if there is none, or if pages will be
// free anyway once a step is collected.
bool Scheduler::preempt_younger_than(const Sequence& sequence) {
  if (pages_in_flight_ > 0 || running_.back()->order <= sequence.order) return false;
  Sequence& youngest = *running_.back();
  stop_running(youngest);
  youngest.preempted = true;
  groups_.push_front({0, {&youngest}});
  ++waiting_;
  ++preemptions_;
  return true;
}

void Scheduler::name_pages(Sequence& s) {
  if (options_.share_prefixes) s.table.name_full_pages(s.ids, std::min(s.rows, std::ssize(s.ids)));
}

void Scheduler::stop_running(Sequence& s) {
  running_.erase(std::ranges::find(running_, &s));
  s.running = false;
  name_pages(s);
  if (s.in_flight == 0) {
    give_back(s);
  } else {
    pages_in_flight_ += std::ssize(s.table.pages());
  }
}

void Scheduler::give_back(Sequence& s) {
  s.table.release(s.forget_pages);
  slots_.push_back(s.slot);
  s.slot = -1;
}

void Scheduler::verified(Sequence& s, std::int64_t accepted) {
  const std::int64_t wrong = std::ssize(s.drafts) - accepted;
  if (wrong < 0) fail(Exit::internal, "scheduler: more drafts were right than there were");
  s.rows -= wrong;
  s.sampled -= wrong;
}

void Scheduler::collected(Sequence& s) {
  if (s.in_flight <= 0) fail(Exit::internal, "scheduler: a step was collected that has no rows of this sequence");
  --s.in_flight;
  if (s.in_flight > 0 || s.running) return;
  pages_in_flight_ -= std::ssize(s.table.pages());
  give_back(s);
}

void Scheduler::end(Sequence& s, bool forget_pages) {
  s.ended = true;
  s.forget_pages = forget_pages;
  if (s.running) {
    stop_running(s);
  } else {
    forget_waiting(s);
  }
}

bool Scheduler::released(const Sequence& s) {
  return s.ended && s.in_flight == 0;
}

}  // namespace weft
