// What other tools call options that weft has under another name, for "did you mean".
#pragma once

#include <span>
#include <string_view>

namespace weft {

struct OptionAlias {
  std::string_view theirs;  // with its dashes; further dashes stand for underscores too
  std::string_view ours;    // without dashes. A name may come twice: the first row whose option a program has counts
};

std::span<const OptionAlias> option_aliases();

}  // namespace weft
