// The errors of calls between ranks that cannot be completed: the same words for threads and for processes.
#pragma once

#include <string>
#include <vector>

#include "llmc/base/error.h"

namespace weft {

// "1, 4": ranks by number.
inline std::string rank_list(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += format("%s%d", text.empty() ? "" : ", ", rank);
  return text;
}

inline Error late_ranks(const std::vector<int>& ranks, const char* call, double time_limit_s) {
  return Error(Exit::environment,
               format("rank %s did not come to %s within %g s", rank_list(ranks).c_str(), call, time_limit_s));
}

// A rank that has ended as if the run were over.
inline Error ended_rank(int rank) {
  return Error(Exit::environment, format("rank %d has ended, others go on", rank));
}

// A rank whose process has ended without a word.
inline Error lost_rank(int rank) {
  return Error(Exit::environment, format("rank %d is gone: its connection was closed", rank));
}

inline Error different_calls(const char* first, int rank, const char* other, bool same_call) {
  return Error(Exit::internal, format("the ranks do not agree: rank 0 is in %s, rank %d in %s%s", first, rank, other,
                                      same_call ? " with other sizes" : ""));
}

}  // namespace weft
