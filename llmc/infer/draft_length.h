// How many ids to draft for a sequence: as many as make its tokens cheapest, from the share of earlier drafts that were right.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>

namespace weft {

inline constexpr std::int64_t kMostDrafted = 7;  // with the row of the id before them, 8 rows

// Costs in steps of one row of one sequence.
struct DraftCosts {
  double row = 0;    // of a further row in a step
  double draft = 0;  // of drafting one id
};

// Times of one kind of step, without the first ones, in which a GPU loads kernels and captures graphs.
class RecentTimes {
 public:
  static constexpr std::int64_t kFirst = 4, kWindow = 7;

  void add(double seconds);
  // Of the last kWindow, in seconds: a step that was interrupted does not weigh. 0: none yet.
  double median() const;
  std::int64_t seen() const { return std::max<std::int64_t>(added_ - kFirst, 0); }

 private:
  std::array<double, kWindow> times_{};  // the last ones, in a ring
  std::int64_t added_ = 0;
};

// What a step of some rows takes, from the steps that were seen: a + b rows.
class StepCosts {
 public:
  // A step of `rows` rows, 1 or more, took so long.
  void add(std::int64_t rows, double seconds) { times_[bucket_of(rows)].add(seconds); }
  struct Line {
    double one_row = 0;      // seconds; 0: nothing was seen
    double further_row = 0;  // in steps of one row
  };
  // `guess`: further_row as long as steps of fewer than two numbers of rows were seen kEnough times each.
  Line line(double guess) const;

 private:
  static constexpr std::int64_t kEnough = 3;
  // Single numbers up to 8, then powers of two.
  static std::int64_t bucket_of(std::int64_t rows);

  std::map<std::int64_t, RecentTimes> times_;  // by bucket_of()
};

// Ids that a verification of k drafts yields on average, if each is right with probability `acceptance`, given that those
// before it are: 1 + a + ... + a^k (Leviathan et al., eq. 1).
double expected_ids(double acceptance, std::int64_t k);
// The k from 0 to `most` of the lowest cost an id. A step of `sequences` rows of k + 1 each costs
// 1 + row * (sequences * (k + 1) - 1) and k drafts; both are shared by the sequences.
std::int64_t best_draft_length(double acceptance, std::int64_t most, std::int64_t sequences, const DraftCosts& costs);

class DraftLength {
 public:
  // For the next step. 0: none pays; after a while, which doubles each time, 1 again, to see whether that has changed.
  std::int64_t next(std::int64_t most, std::int64_t sequences, const DraftCosts& costs) const;
  // `accepted` of `drafted` ids, at least one, were right.
  void verified(std::int64_t drafted, std::int64_t accepted);
  // An id was generated without a draft although next() was 0.
  void generated_plainly();
  double acceptance() const { return right_ / seen_; }

 private:
  static constexpr double kMemory = 0.9;  // weight of what was seen before a verification: about the last ten count
  static constexpr std::int64_t kFirstPause = 16, kLongestPause = 256;

  // Of drafts that were compared: the first wrong one of a verification is, those behind it are not. It begins with a guess
  // of two comparisons.
  double right_ = 1.4, seen_ = 2;
  std::int64_t plain_ = 0, pause_ = kFirstPause;
};

}  // namespace weft
