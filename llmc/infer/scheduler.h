// Decides what each step of the engine computes: which sequences run, how many rows each of them gets, and who gives up its
// pages when there are too few. Knows sequences and pages, but neither the model nor who asked.
//
// Sequences of one group (the choices of one request) share places among those that run. A group has all that others do not
// ask for. When a sequence waits, that of the group with the fewest running ones is next, and groups with equally many take
// turns. If it finds no place, or no pages, it takes those of the group that has the most, as long as that one keeps at least
// as many sequences running as the other then has (max-min fairness). So whoever asks for a thousand sequences does not hold up
// who asks for one. Groups of one sequence take nothing from each other: they wait in the order of arrival.
//
// Sequences are ordered by their first admission. A sequence that needs a page takes those of a younger one, of the group
// that has the most; so the oldest that runs gets every page that it asks for. It never gives up its place either, because a
// group gives up its youngest. So it ends after finitely many steps, and then another one is the oldest; and before a sequence
// stand finitely many turns: none waits for ever. What was preempted is the first of its group, the oldest before the others.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <span>
#include <string>
#include <vector>

#include "llmc/infer/page_pool.h"

namespace weft {

struct Sequence;

struct SequenceGroup {
  std::uint64_t id = 0;           // the caller's; 0: of one sequence alone
  std::deque<Sequence*> waiting;  // what was preempted, the oldest first, then the others in the order of arrival
  std::int64_t running = 0;
};

struct Sequence {
  Sequence(PagePool& pool, std::uint64_t number) : id(number), table(pool) {}

  std::uint64_t id;         // the caller's
  std::uint64_t group = 0;  // it shares places with others of the same number; 0: a group of its own
  std::list<SequenceGroup>::iterator shares_with;  // that group, while it waits or runs; set by the scheduler
  std::uint64_t order = 0;        // of the first admission: a smaller one is older; 0: not admitted yet
  std::vector<std::int32_t> ids;  // the prompt and what was sampled, as far as the host knows it
  std::int64_t prompt_size = 0;
  std::int64_t max_ids = 0;        // to sample; 0: the prompt is scored, all but its last row are computed
  std::int64_t rows_to_score = 0;  // rows, from the first one on, whose log-probabilities are wanted
  std::int64_t scored_rows = 0;    // of them, those that were collected

  BlockTable table;
  std::int32_t slot = -1;       // of the model; -1: none
  std::int64_t rows = 0;        // rows that were submitted since it was admitted, or found in shared pages
  std::int64_t cached_ids = 0;  // of the prompt, that were found in shared pages when it was first admitted
  std::int64_t sampled = 0;     // ids that were sampled, or that a submitted step will sample
  bool id_on_device = false;    // its last id was sampled in its slot, so a step needs no id from the host
  bool id_on_host = false;      // its last id came from a verification: it is in `ids` alone
  bool one_unknown_id = false;  // when a step samples an id, at most one before it may not be in `ids` yet
  // `rows` as it was after each submitted step with rows of this sequence that was not collected, the oldest first.
  std::deque<std::int64_t> rows_in_flight;
  // Draft tokens that may follow `ids`, for the next step: set before plan() if no row of the sequence is in flight. plan()
  // cuts them to those that the step computes.
  std::vector<std::int32_t> drafts;
  bool running = false;
  bool preempted = false;  // at least once
  bool ended = false;
  bool forget_pages = false;  // ended: its pages are not to be shared

  bool in_flight() const { return !rows_in_flight.empty(); }
  std::span<const std::int32_t> generated() const {
    return std::span(ids).subspan(static_cast<std::size_t>(prompt_size));
  }
  // known_rows(): rows to compute whose ids are known. first_needed_row(): the first of them whose result is needed;
  // rows before it may be found in the prefix cache.
  std::int64_t known_rows() const { return max_ids > 0 ? std::ssize(ids) : prompt_size - 1; }
  std::int64_t first_needed_row() const { return scored_rows < rows_to_score ? scored_rows : known_rows() - 1; }
};

// What a prompt, or the ids of a preempted sequence, still has to compute.
struct PromptRows {
  std::int64_t position = 0;   // of the next row
  std::int64_t remaining = 0;  // at least 1
};
// Divides `budget` rows between prompts, given in the order of admission: rows for each. The oldest gets half of them, so that
// it advances whatever arrives after it; the rest goes to the prompts with the fewest rows left, so that a short one does not
// wait for a long one (shortest remaining processing time first); what is left then goes to the oldest. A prompt that is not
// completed stops at the end of a page, if it reaches one: prefixes are shared by full pages.
std::vector<std::int64_t> divide_rows(std::int64_t budget, std::span<const PromptRows> prompts, std::int64_t page_size);

struct SchedulerOptions {
  std::int64_t max_running = 0;
  std::int64_t rows_per_step = 0;
  std::int64_t prompt_rows = 0;  // the most rows of prompts in a step that also decodes
  std::int64_t slots = 0;
  bool share_prefixes = true;
  std::int64_t window = 0;  // the model's longest_window(): pages in front of it are given back
  std::int64_t depth = 1;   // the model's: steps that are submitted before one is collected
};

// Rows of one sequence in a step.
struct PlannedChunk {
  Sequence* sequence = nullptr;
  std::int64_t first_position = 0, rows = 0;
  bool id_on_device = false;  // one row, whose id is the one that was sampled last in the sequence's slot
  bool sample = false;        // an id is sampled from the last row
  std::int64_t drafts = 0;    // how many of the rows are the sequence's drafts; an id is sampled from each of them, too
};

class Scheduler {
 public:
  Scheduler(PagePool& pool, const SchedulerOptions& options);

  // Adds a sequence that waits, behind those of its group. It must stay at its address until released() is true.
  void add(Sequence& sequence);
  // The rows of the next step, decodes first; the caller submits them. Empty if nothing can be computed before a submitted
  // step is collected, or at all. Valid until the next call.
  std::span<const PlannedChunk> plan();
  // Whether steps may be queued far ahead of the results: nothing waits, no prompt is computed, no sequence needs the host to know
  // its last ids, and each finds a page for its next row.
  bool can_queue_ahead() const;
  // Only the first `accepted` drafts of `sequence` in the step that is being collected were right: the rows of the
  // others are computed again. Called before ids are appended, and before collected().
  static void verified(Sequence& sequence, std::int64_t accepted);
  // A step with rows of `sequence` was collected.
  void collected(Sequence& sequence);
  // `sequence` computes nothing more. Its pages and its slot are free as soon as none of its rows is in flight.
  void end(Sequence& sequence, bool forget_pages);
  // True if `sequence` has ended and holds nothing.
  static bool released(const Sequence& sequence);

  std::int64_t running() const { return std::ssize(running_); }
  std::span<Sequence* const> running_sequences() const { return running_; }  // the oldest first
  std::int64_t waiting() const { return waiting_; }
  std::int64_t slots_in_use() const { return options_.slots - std::ssize(slots_); }
  // What is held although no sequence waits, runs or has rows in flight; empty if nothing is.
  std::string held_when_idle() const;
  std::int64_t preemptions() const { return preemptions_; }
  std::int64_t prompt_ids() const { return prompt_ids_; }  // of the prompts that were admitted
  std::int64_t prefix_ids() const { return prefix_ids_; }  // of those, ids that were found in shared pages

 private:
  // Rows that a running sequence gets in the step that is planned.
  struct Share {
    Sequence* sequence;
    std::int64_t rows;
    bool decodes;
    std::int64_t drafts = 0;  // of the rows
  };

  using Groups = std::list<SequenceGroup>;

  Groups::iterator next_waiting();
  void start(Groups::iterator group);
  void forget_waiting(const Sequence& sequence);
  void erase_if_empty(Groups::iterator group);
  void admit();
  std::int64_t missing_pages(const Sequence& sequence) const;
  std::int64_t pages_needed(const Sequence& sequence) const;
  bool make_room(const Sequence& next);
  template <typename Predicate>
  Sequence* most_served(Predicate may_give) const;
  void preempt(Sequence& sequence);
  void use_prefix(Sequence& sequence);
  bool follows_another(const Sequence& sequence) const;
  void divide();
  std::int64_t give_drafts(std::int64_t budget);
  bool get_pages(Share& share);
  bool preempt_younger_than(const Sequence& sequence);
  void name_pages(Sequence& sequence);
  void give_back_unseen(Sequence& sequence, std::int64_t row);
  void stop_running(Sequence& sequence);
  void give_back(Sequence& sequence);

  PagePool& pool_;
  const SchedulerOptions options_;
  Groups groups_;                     // with sequences that wait or run; whose turn comes first is first
  std::int64_t waiting_ = 0;          // sequences
  std::uint64_t admitted_ = 0;        // ever
  std::vector<Sequence*> running_;    // the oldest first
  std::vector<std::int32_t> slots_;   // free
  std::int64_t pages_in_flight_ = 0;  // of sequences that do not run any more but have rows in flight
  std::vector<Share> shares_;
  std::vector<PlannedChunk> plan_;
  std::int64_t preemptions_ = 0, prompt_ids_ = 0, prefix_ids_ = 0;
};

}  // namespace weft
