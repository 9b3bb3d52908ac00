// How many ids to draft for a sequence: as many as make its tokens cheapest, from the share of earlier drafts that were right.
#pragma once

#include <cstdint>

namespace weft {

inline constexpr std::int64_t kMostDrafted = 7;  // with the row of the id before them, 8 rows

// Costs in steps of one row of one sequence.
struct DraftCosts {
  double row = 0;    // of a further row in a step
  double draft = 0;  // of drafting one id
};

// Takes a time into the mean of the last few, in seconds; 0: none yet.
void running_mean(double& mean, double seconds);

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
