#include "llmc/infer/stop_text.h"

#include <algorithm>
#include <utility>

#include "llmc/base/error.h"

namespace weft {

StopTextFilter::StopTextFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const std::string& stop : stops_) {
    if (stop.empty()) fail(Exit::usage, "--stop: got '', expected at least one character");
  }
}

std::string StopTextFilter::push(std::string_view text, bool ends) {
  std::string out;
  for (const char byte : text) {
    if (stopped_) break;
    held_ += byte;
    std::size_t complete = 0;  // bytes of the longest stop text that ends here
    std::size_t begun = 0;     // bytes of the longest prefix of a stop text that ends here
    for (const std::string& stop : stops_) {
      for (std::size_t length = std::min(ends ? stop.size() : stop.size() - 1, held_.size()); length > 0; --length) {
        if (!held_.ends_with(std::string_view(stop).substr(0, length))) continue;
        if (length == stop.size()) complete = std::max(complete, length);
        begun = std::max(begun, length);
        break;
      }
    }
    const std::size_t keep = complete > 0 ? complete : begun;
    out.append(held_, 0, held_.size() - keep);
    held_.erase(0, held_.size() - keep);
    stopped_ = complete > 0;
  }
  if (stopped_) held_.clear();
  return out;
}

std::string StopTextFilter::finish() {
  return std::exchange(held_, {});
}

}  // namespace weft
