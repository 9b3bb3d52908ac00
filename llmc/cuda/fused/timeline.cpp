#include "llmc/cuda/fused/timeline.h"

#include <algorithm>
#include <limits>

#include "llmc/base/error.h"

namespace weft::cuda {

namespace {

const char* phase_name(int phase) {
  static const char* const names[kFusedPhases] = {"x here",         "norms done",     "QKV done",       "up done",
                                                  "query here",     "attention done", "MLP up here",    "down done",
                                                  "attention here", "x written",      "middle written", "middle here"};
  return names[phase];
}

// Over the blocks, for one layer and phase: when it ended, in ns after `begin`.
struct Ends {
  double first = std::numeric_limits<double>::max(), mean = 0, last = 0;
  int blocks = 0;
};

}  // namespace

std::string timeline_text(const FusedTimeline& timeline) {
  if (timeline.times.empty()) return {};
  const auto ends_of = [&](std::int64_t layer, int phase, double begin) {
    Ends ends;
    for (int block = 0; block < timeline.blocks; ++block) {
      const std::uint64_t time =
          timeline.times[static_cast<std::size_t>((layer * kFusedPhases + phase) * timeline.blocks + block)];
      if (time == 0) continue;
      const double after = static_cast<double>(time) - begin;
      ends.first = std::min(ends.first, after);
      ends.last = ends.blocks == 0 ? after : std::max(ends.last, after);
      ends.mean += after;
      ++ends.blocks;
    }
    if (ends.blocks > 0) ends.mean /= ends.blocks;
    return ends;
  };
  std::string text = format("%-24s %8s %8s %8s\n", "end of a phase, us", "first", "mean", "last block");
  for (int phase = 0; phase < kFusedPhases; ++phase) {
    Ends sum{0, 0, 0, 0};
    int layers = 0;
    for (std::int64_t l = timeline.layers > 1 ? 1 : 0; l < timeline.layers; ++l) {
      const Ends input = ends_of(l, static_cast<int>(FusedPhase::x_here), 0);
      const Ends ends = ends_of(l, phase, input.first);
      if (input.blocks == 0 || ends.blocks == 0) continue;
      sum.first += ends.first;
      sum.mean += ends.mean;
      sum.last += ends.last;
      ++layers;
    }
    if (layers == 0) continue;
    const double scale = 1e-3 / layers;
    text +=
        format("%-24s %8.2f %8.2f %8.2f\n", phase_name(phase), sum.first * scale, sum.mean * scale, sum.last * scale);
  }
  return text;
}

}  // namespace weft::cuda
