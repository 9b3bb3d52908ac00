// How often drafts were right, for reports.
#pragma once

#include <cstdint>

namespace weft {

struct DraftCounts {
  std::int64_t spans = 0;                  // spans from which ids were sampled: single rows, prompts and verifications
  std::int64_t ids = 0;                    // sampled from them, right drafts included
  std::int64_t verifications = 0;          // spans with drafts
  std::int64_t drafted = 0, accepted = 0;  // ids

  double ids_per_span() const { return spans > 0 ? static_cast<double>(ids) / static_cast<double>(spans) : 0; }
  double acceptance() const { return drafted > 0 ? static_cast<double>(accepted) / static_cast<double>(drafted) : 0; }
};

}  // namespace weft
