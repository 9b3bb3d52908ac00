// How many ids to draft for a sequence: the number that makes its tokens cheapest, given the share of
// earlier drafts that were right.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>

namespace weft {

inline constexpr std::int64_t kMostDrafted = 7;  // 8 rows together with that of the id before them

// Costs, in units of a step with one row.
struct DraftCosts {
  double row = 0;    // of a further row in a step
  double draft = 0;  // of drafting one id
};

// Times of one kind of step. The first ones are left out, because a GPU loads kernels and captures graphs in them.
class RecentTimes {
 public:
  static constexpr std::int64_t kFirst = 4, kWindow = 7;

  void add(double seconds);
  // The median of the last kWindow in seconds, so that one step that was interrupted has no weight. 0: none yet.
  double median() const;
  std::int64_t seen() const { return std::max<std::int64_t>(added_ - kFirst, 0); }

 private:
  std::array<double, kWindow> times_{};  // the last ones, in a ring
  std::int64_t added_ = 0;
};

// Estimates the time of a step with a given number of rows: a straight line through the steps that were measured.
class StepCosts {
 public:
  // A step of `rows` rows, at least 1, took `seconds`.
  void add(std::int64_t rows, double seconds) { times_[bucket_of(rows)].add(seconds); }
  struct Line {
    double one_row = 0;      // seconds; 0: nothing was seen
    double further_row = 0;  // in steps of one row
  };
  // `guess`: taken for further_row until steps of two different sizes have been measured, kEnough times each.
  Line line(double guess) const;

 private:
  static constexpr std::int64_t kEnough = 3;
  // Each number of rows up to 8 is a bucket of its own; above, buckets end at powers of two.
  static std::int64_t bucket_of(std::int64_t rows);

  std::map<std::int64_t, RecentTimes> times_;  // by bucket_of()
};

// Ids that a verification of k drafts yields on average, if each is right with probability `acceptance`, given that those
// before it are: 1 + a + ... + a^k (Leviathan et al., eq. 1).
double expected_ids(double acceptance, std::int64_t k);
// The k from 0 to `most` with the lowest cost per generated id. A step of `sequences` chunks of k + 1 rows each costs
// 1 + row * (sequences * (k + 1) - 1) and k drafts; both are shared by the sequences.
std::int64_t best_draft_length(double acceptance, std::int64_t most, std::int64_t sequences, const DraftCosts& costs);

// Chooses the number of drafts for one sequence from how its earlier drafts fared.
class DraftLength {
 public:
  // Number of ids to draft in the next step. 0 if drafting does not pay; after a pause, which doubles each time, 1
  // again to find out whether that has changed.
  std::int64_t next(std::int64_t most, std::int64_t sequences, const DraftCosts& costs) const;
  // A step has verified `drafted` ids, at least one; the first `accepted` were right.
  void verified(std::int64_t drafted, std::int64_t accepted);
  // A step has generated an id without drafts because next() was 0.
  void generated_plainly();
  double acceptance() const { return right_ / seen_; }

 private:
  static constexpr double kMemory = 0.9;  // weight of the past at each verification: about the last ten count
  static constexpr std::int64_t kFirstPause = 16, kLongestPause = 256;

  // Weighted counts of right drafts and of compared ones. A verification compares drafts up to the first wrong one;
  // those behind it do not count. The initial values stand for a guess worth two comparisons.
  double right_ = 1.4, seen_ = 2;
  std::int64_t plain_ = 0, pause_ = kFirstPause;
};

}  // namespace weft
