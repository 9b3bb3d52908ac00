// What all ranks of a run must have in common, checked before the first step.
#pragma once

#include <string>
#include <vector>

#include "llmc/comm/communicator.h"

namespace weft {

// A property of a rank, as a person knows it: "--lr", "train shard 2", "GPU".
struct RankField {
  std::string name, value;
  bool operator==(const RankField&) const = default;
};

// Throws Exit::environment on every rank, the same on all, if the ranks differ in a field: its name, the lowest rank that
// differs from rank 0, and both values. Of several fields the first counts.
void require_same(Communicator& ranks, const std::vector<RankField>& fields);

// Throws Exit::environment on every rank if two ranks have the same `value`, such as one GPU; ranks whose value is empty do not
// count. `what` is its name in the message.
void require_distinct(Communicator& ranks, const std::string& what, const std::string& value);

}  // namespace weft
