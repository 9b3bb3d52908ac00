#include "llmc/base/logit_row.h"

#include <algorithm>
#include <array>
#include <limits>

namespace weft {

void apply(const LogitRow& row, std::int32_t last_id, std::span<float> logits) {
  const auto logit = [&](std::int32_t id) -> float& { return logits[static_cast<std::size_t>(id)]; };
  std::array<std::int32_t, kMostRecentIds> recent{};
  const auto end = std::ranges::transform(row.recent, recent.begin(), [&](std::int32_t id) {
                     return id == kUnknownId ? last_id : id;
                   }).out;
  const auto times = [&](std::int32_t id) { return static_cast<std::int32_t>(std::count(recent.begin(), end, id)); };
  std::array<bool, kMostRecentIds> found{};  // among the edits
  for (LogitEdit edit : row.edits) {
    edit.generated += times(edit.id);
    for (auto id = recent.begin(); id != end; ++id) {
      if (*id == edit.id) found[static_cast<std::size_t>(id - recent.begin())] = true;
    }
    logit(edit.id) = edited_logit(logit(edit.id), edit, row.penalties);
  }
  for (auto id = recent.begin(); id != end; ++id) {
    if (found[static_cast<std::size_t>(id - recent.begin())] || std::find(recent.begin(), id, *id) != id) continue;
    logit(*id) = edited_logit(logit(*id), {*id, 0, times(*id), 0}, row.penalties);
  }
  for (const ForbiddenId& forbidden : row.forbidden) {
    if (forbidden.after != ForbiddenId::kAlways && forbidden.after != last_id) continue;
    logit(forbidden.id) = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace weft
