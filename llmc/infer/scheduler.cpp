#include "llmc/infer/scheduler.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/model/queue_depth.h"
#include "llmc/model/visibility.h"

namespace weft {

namespace {

bool decodes(const Sequence& s) {
  if (s.sampled >= s.max_ids || (s.one_unknown_id && s.sampled > std::ssize(s.generated()) + 1)) return false;
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
  auto group = sequence.group == 0 ? groups_.end() : std::ranges::find(groups_, sequence.group, &SequenceGroup::id);
  if (group == groups_.end()) group = groups_.insert(group, {sequence.group, {}, 0});
  group->waiting.push_back(&sequence);
  sequence.shares_with = group;
}

// The group whose sequence is next: of those with the fewest running ones that whose turn it is. The end if none waits.
Scheduler::Groups::iterator Scheduler::next_waiting() {
  auto next = groups_.end();
  if (waiting_ == 0) return next;
  for (auto group = groups_.begin(); group != groups_.end(); ++group) {
    if (group->waiting.empty()) continue;
    if (next == groups_.end() || group->running < next->running) next = group;
    if (next->running == 0) break;
  }
  return next;
}

// The first waiting sequence of `group` runs from here on, and has had the group's turn.
void Scheduler::start(Groups::iterator group) {
  Sequence& s = *group->waiting.front();
  group->waiting.pop_front();
  --waiting_;
  ++group->running;
  groups_.splice(groups_.end(), groups_, group);
  s.slot = slots_.back();
  slots_.pop_back();
  s.rows = 0;
  s.id_on_device = s.id_on_host = false;
  s.running = true;
  if (!s.preempted) {
    s.order = ++admitted_;
    prompt_ids_ += s.prompt_size;
    s.ids.reserve(static_cast<std::size_t>(s.prompt_size + s.max_ids));
    s.table.reserve(s.table.missing(s.prompt_size + s.max_ids));
  }
  const auto younger = [&](const Sequence* other) { return other->order > s.order; };
  running_.insert(std::ranges::find_if(running_, younger), &s);
}

void Scheduler::forget_waiting(const Sequence& sequence) {
  --waiting_;
  std::erase(sequence.shares_with->waiting, &sequence);
  erase_if_empty(sequence.shares_with);
}

void Scheduler::erase_if_empty(Groups::iterator group) {
  if (group->waiting.empty() && group->running == 0) groups_.erase(group);
}

std::span<const PlannedChunk> Scheduler::plan() {
  admit();
  for (Sequence* s : running_) use_prefix(*s);
  divide();
  plan_.clear();
  // In the order of admission: whoever is preempted for a page is younger and has no chunk yet.
  for (std::size_t i = 0; i < shares_.size(); ++i) {
    Share& share = shares_[i];
    Sequence& s = *share.sequence;
    if (!s.running || !get_pages(share)) continue;
    s.drafts.resize(static_cast<std::size_t>(share.drafts));
    PlannedChunk chunk{&s,    s.rows,      share.rows, share.decodes && s.id_on_device && share.drafts == 0,
                       false, share.drafts};
    s.rows += share.rows;
    s.rows_in_flight.push_back(s.rows);
    chunk.sample = s.max_ids > 0 && (share.decodes || s.rows == s.known_rows());
    if (chunk.sample) {
      s.sampled += 1 + share.drafts;
      s.id_on_device = share.drafts == 0;
      s.id_on_host = share.drafts > 0;
    }
    plan_.push_back(chunk);
  }
  // Pages get their names after all prefixes were looked up: a page that this step fills is for later steps.
  for (const PlannedChunk& chunk : plan_) name_pages(*chunk.sequence);
  std::stable_partition(plan_.begin(), plan_.end(), [](const PlannedChunk& chunk) { return chunk.id_on_device; });
  return plan_;
}

bool Scheduler::can_queue_ahead() const {
  if (waiting_ > 0) return false;
  std::int64_t missing = 0;
  for (const Sequence* s : running_) {
    if (has_prompt_rows(*s) || s->id_on_host || s->one_unknown_id) return false;
    if (s->sampled < s->max_ids) missing += s->table.missing(s->rows + 1);
  }
  return missing <= pool_.available();
}

void Scheduler::admit() {
  const std::int64_t limit = std::min(options_.max_running, options_.rows_per_step);
  for (auto group = next_waiting(); group != groups_.end(); group = next_waiting()) {
    const Sequence& next = *group->waiting.front();
    if (next.in_flight()) break;  // preempted, and an id of it is not known yet
    if (running() < limit && !slots_.empty() && pages_needed(next) <= pool_.available()) {
      start(group);
    } else if (!make_room(next)) {
      break;
    }
  }
}

// Pages that the rows known now will hold at once, beside those that they hold: with a window those of its positions and of the
// steps in flight, and one that is filled in part at each end.
std::int64_t Scheduler::missing_pages(const Sequence& s) const {
  const std::int64_t missing = s.table.missing(s.known_rows());
  if (options_.window == 0) return missing;
  // No more steps with rows of a prompt are in flight: can_queue_ahead().
  const std::int64_t positions =
      options_.window + least_queued(options_.depth) * options_.rows_per_step + options_.depth;
  return std::min(missing, std::max<std::int64_t>(positions / pool_.page_size() + 2 - s.table.held(), 0));
}

// missing_pages(), beside what running prompts will take and one page for each running sequence: a sequence that is admitted too
// early is preempted soon and computed twice.
std::int64_t Scheduler::pages_needed(const Sequence& s) const {
  std::int64_t needed = missing_pages(s);
  if (options_.share_prefixes) {
    const BlockTable::PrefixHit hit = s.table.prefix_hit(s.ids, s.first_needed_row());
    needed = std::max(needed - hit.pages, std::int64_t{0}) + hit.cached;
  }
  for (const Sequence* other : running_) needed += 1 + missing_pages(*other);
  return needed;
}

// Preempts a sequence of a group that has more than its share beside that of `next`, which waits. False if there is none, if
// even all that such groups have would not do, or if a step that will be collected gives room anyway.
bool Scheduler::make_room(const Sequence& next) {
  if (pages_in_flight_ > 0) return false;
  const auto may_give = [&](const Sequence& s) { return s.shares_with->running >= next.shares_with->running + 2; };
  Sequence* const most = most_served(may_give);
  if (most == nullptr) return false;
  std::int64_t room = pool_.available();
  for (const Sequence* s : running_) {
    if (may_give(*s)) room += s->table.held() + 1 + missing_pages(*s);
  }
  if (pages_needed(next) > room) return false;
  preempt(*most);
  return true;
}

// The youngest sequence of the group that has most of them, among those that run and may give up their place; or null.
template <typename Predicate>
Sequence* Scheduler::most_served(Predicate may_give) const {
  Sequence* most = nullptr;
  for (auto s = running_.rbegin(); s != running_.rend(); ++s) {
    if (!may_give(**s)) continue;
    if (most == nullptr || (*s)->shares_with->running > most->shares_with->running) most = *s;
  }
  return most;
}

// Its group has none that is younger: among those that wait, too, it is the oldest.
void Scheduler::preempt(Sequence& s) {
  stop_running(s);
  s.preempted = true;
  s.shares_with->waiting.push_front(&s);
  ++waiting_;
  ++preemptions_;
}

// Skips rows whose keys and values another sequence has computed, perhaps since this one was admitted.
void Scheduler::use_prefix(Sequence& s) {
  const std::int64_t covered = std::ssize(s.table.pages()) * pool_.page_size();
  if (!options_.share_prefixes || !has_prompt_rows(s) || s.rows != covered) return;
  s.rows = s.table.extend_by_prefix(s.ids, s.first_needed_row());
  if (s.preempted) return;
  prefix_ids_ += s.rows - covered;
  s.cached_ids += s.rows - covered;
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

// Takes the pages of a running sequence that is younger than `sequence`; it is the next to be admitted of those with equal
// rights. False if there is none, or if pages will be free anyway once a step is collected.
bool Scheduler::preempt_younger_than(const Sequence& sequence) {
  if (pages_in_flight_ > 0) return false;
  Sequence* const most = most_served([&](const Sequence& other) { return other.order > sequence.order; });
  if (most == nullptr) return false;
  preempt(*most);
  groups_.splice(groups_.begin(), groups_, most->shares_with);
  return true;
}

void Scheduler::name_pages(Sequence& s) {
  if (options_.share_prefixes) s.table.name_full_pages(s.ids, std::min(s.rows, std::ssize(s.ids)));
}

void Scheduler::stop_running(Sequence& s) {
  running_.erase(std::ranges::find(running_, &s));
  --s.shares_with->running;
  s.running = false;
  name_pages(s);
  if (!s.in_flight()) {
    give_back(s);
  } else {
    pages_in_flight_ += s.table.held();
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
  if (!s.in_flight()) fail(Exit::internal, "scheduler: a step was collected that has no rows of this sequence");
  const std::int64_t next = std::min(s.rows_in_flight.front(), s.rows);  // fewer after wrong drafts
  s.rows_in_flight.pop_front();
  if (s.running) return give_back_unseen(s, next);
  if (s.in_flight()) return;
  pages_in_flight_ -= s.table.held();
  give_back(s);
}

// Gives back the pages that no row from `row` on sees: all before it are collected.
void Scheduler::give_back_unseen(Sequence& s, std::int64_t row) {
  if (options_.window == 0) return;
  name_pages(s);  // a page without users cannot get its name later, so those whose ids are not known yet stay
  const Visibility visibility = {.window = static_cast<int>(options_.window)};
  s.table.release_before(std::min<std::int64_t>(visibility.first_key(static_cast<int>(row)), std::ssize(s.ids)));
}

void Scheduler::end(Sequence& s, bool forget_pages) {
  s.ended = true;
  s.forget_pages = forget_pages;
  if (s.running) {
    stop_running(s);
    erase_if_empty(s.shares_with);
  } else {
    forget_waiting(s);
  }
}

bool Scheduler::released(const Sequence& s) {
  return s.ended && !s.in_flight();
}

std::string Scheduler::held_when_idle() const {
  if (!running_.empty()) return format("%zu sequences run", running_.size());
  if (waiting_ != 0 || !groups_.empty()) return format("%zu groups wait", groups_.size());
  if (slots_in_use() != 0) return format("%lld slots are taken", static_cast<long long>(slots_in_use()));
  if (pages_in_flight_ != 0) return format("%lld pages are in flight", static_cast<long long>(pages_in_flight_));
  return "";
}

}  // namespace weft
