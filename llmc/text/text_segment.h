#pragma once

#include <string>

namespace weft {

// A stretch of a text that is joined from several sources. Special tokens are looked for in literals alone (doc/chat.md).
struct TextSegment {
  std::string text;
  bool literal = false;
};

}  // namespace weft
