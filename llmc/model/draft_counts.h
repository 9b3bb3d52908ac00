// How often drafts were right, for reports.
#pragma once

#include <cstdint>

namespace weft {

struct DraftCounts {
  std::int64_t chunks = 0;                 // chunks from which ids were sampled: single rows, prompts and verifications
  std::int64_t ids = 0;                    // sampled from them, right drafts included
  std::int64_t verifications = 0;          // chunks with drafts
  std::int64_t drafted = 0, accepted = 0;  // ids

  double ids_per_chunk() const { return chunks > 0 ? static_cast<double>(ids) / static_cast<double>(chunks) : 0; }
  double acceptance() const { return drafted > 0 ? static_cast<double>(accepted) / static_cast<double>(drafted) : 0; }
};

}  // namespace weft
