// Divides an answer into thoughts and what is said, as it comes (doc/chat.md, "Thoughts").
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "llmc/text/chat_format.h"

namespace weft {

class ThoughtDivider {
 public:
  // `inside`: the answer begins inside thoughts.
  ThoughtDivider(ChatFormat::Thoughts marks, bool inside)
      : marks_(std::move(marks)), place_(inside ? Place::thoughts : Place::start) {}

  struct Parts {
    std::string thoughts, said;
  };
  // What is certain with this piece. The beginning of a mark, and white space that may stand beside one, is held back.
  Parts push(std::string_view piece);
  // The rest.
  Parts finish();

 private:
  enum class Place { start, thoughts, behind, said };

  void leave_start(Parts& parts);
  void take_thoughts(Parts& parts);

  ChatFormat::Thoughts marks_;
  Place place_;
  bool begun_ = false;  // thoughts have begun with something else than white space
  std::string held_;
};

// For a terminal, which shows thoughts as the model writes them: leaves out the marks of thoughts that are empty.
class EmptyThoughtsFilter {
 public:
  EmptyThoughtsFilter(ChatFormat::Thoughts marks, bool inside) : divider_(std::move(marks), inside) {}

  // What to show now. Held back is what may become empty thoughts, or is held back by ThoughtDivider.
  std::string push(std::string_view piece);
  std::string finish();

 private:
  std::string shown(const ThoughtDivider::Parts& parts);

  ThoughtDivider divider_;
  std::string all_;      // so far, while there are no thoughts
  bool thinks_ = false;  // something has been thought
};

}  // namespace weft
