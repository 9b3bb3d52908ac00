#include "llmc/comm/communicator.h"

#include <algorithm>
#include <cstring>

namespace weft {

namespace {

// An error as it is sent between ranks: of a fixed size, so that all of them know how many bytes come.
struct Told {
  std::int32_t failed = 0, code = 0;
  char reason[504] = "";
};

}  // namespace

std::string Communicator::broadcast_text(std::string text, int root) {
  text.resize(static_cast<std::size_t>(broadcast(static_cast<std::int64_t>(text.size()), root)));
  broadcast_bytes(reinterpret_cast<std::byte*>(text.data()), static_cast<std::int64_t>(text.size()), root);
  return text;
}

void SingleRank::exchange(const float* values, std::span<const Range> parts, float* received) {
  std::copy(values + parts[0].begin, values + parts[0].end, received);
}

std::int64_t largest(Communicator& ranks, std::int64_t mine) {
  const std::vector<std::int64_t> all = ranks.gather(mine);
  return *std::max_element(all.begin(), all.end());
}

void fail_together(Communicator& ranks, const std::optional<Error>& mine) {
  if (largest(ranks, mine ? 1 : 0) == 0) return;  // called several times a step: without an error a flag is enough
  Told told;
  if (mine) {
    told.failed = 1;
    told.code = static_cast<std::int32_t>(mine->code());
    std::string_view(mine->what()).copy(told.reason, sizeof told.reason - 1);
  }
  const std::vector<Told> all = ranks.gather(told);
  if (mine) throw *mine;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].failed != 0) fail(static_cast<Exit>(all[r].code), "rank %zu: %s", r, all[r].reason);
  }
}

std::vector<Range> shares(std::int64_t count, int ranks) {
  std::vector<Range> result;
  const std::int64_t each = count / ranks, more = count % ranks;
  for (std::int64_t r = 0, begin = 0; r < ranks; ++r) {
    const std::int64_t end = begin + each + (r < more ? 1 : 0);
    result.push_back({begin, end});
    begin = end;
  }
  return result;
}

}  // namespace weft
