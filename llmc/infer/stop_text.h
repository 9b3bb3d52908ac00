// Stop texts: they end a generation, and no part of them is shown.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace weft {

// A filter between the generated text and its output. push() takes the next piece of text, of any size, and returns the
// text that cannot belong to a stop text any more. The generation ends at the first byte that completes a stop text,
// however the text is split into pieces. If several stop texts end there, the longest is removed.
class StopTextFilter {
 public:
  // An empty stop text is Exit::usage.
  explicit StopTextFilter(std::vector<std::string> stops);

  // Empty once stopped(). `ends` false: a stop text that this completes does not end anything; what it begins counts.
  std::string push(std::string_view text, bool ends = true);
  std::string finish();  // what is still held back: no stop text came of it
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;  // held back: the longest suffix of the text that is a prefix of a stop text
  bool stopped_ = false;
};

}  // namespace weft
