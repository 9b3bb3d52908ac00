// Texts that end a generation: neither they nor a part of them is ever shown.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace weft {

// Bytes go in as they are generated, in pieces of any size; out comes what cannot belong to a stop text any
// more. The generation ends with the first byte that completes a stop text, whatever the pieces were; of
// several that end there the longest counts.
class StopTextFilter {
 public:
  // An empty stop text is Exit::usage.
  explicit StopTextFilter(std::vector<std::string> stops);

  std::string push(std::string_view text);  // empty once stopped()
  std::string finish();                     // what was held back, if no stop text came of it
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;  // the longest end of the text that begins a stop text
  bool stopped_ = false;
};

}  // namespace weft
